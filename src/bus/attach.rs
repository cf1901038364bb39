//! The front door for callers that attach to a logged call: its frames come from the event log.
//!
//! A caller names the call by its task or its run, and says from which frame on it wants to have it. Any replica answers,
//! because all of them share the log.

use std::time::Duration;

use async_nats::Message;
use serde::Deserialize;
use tokio::time::Instant;
use uuid::Uuid;

use super::frames::FrameWriter;
use crate::action::progress::{Listener, Progress as _};
use crate::caller::Caller;
use crate::dispatch::Dispatcher;
use crate::events::attach::{LastCall, Replay, Replayed, last_call};
use crate::events::resume;
use crate::events::store::LogKey;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::text::shorten;

/// How long a new task may take until other replicas find its record.
const RECORD_TIMEOUT: Duration = Duration::from_secs(1);
const RECORD_PAUSE: Duration = Duration::from_millis(50);
/// How long a quiet log may lack the end of a task that has ended, or of a call whose replica is gone.
const END_GRACE: Duration = Duration::from_secs(10);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct AttachRequest {
    task_id: Option<String>,
    run: Option<Uuid>,
    #[serde(default)]
    from: u64,
}

/// Which call to replay.
struct Target {
    key: LogKey,
    run: Uuid,
    /// The sequence after which the batches of the run come.
    after: u64,
}

/// Sends the frames of a logged call to their end. Returns the number and the name of the error if the reply is one.
pub(super) async fn attach(
    dispatcher: &Dispatcher,
    message: &Message,
    caller: &Caller,
    mut frames: FrameWriter,
) -> Option<(u16, &'static str)> {
    match replay(dispatcher, message, caller, &mut frames).await {
        Ok(Attached::Ended(error)) => error,
        Ok(Attached::Reply(reply)) => frames.finish(&reply).await,
        Err(error) => frames.finish(&Err(error)).await,
    }
}

/// How an attached caller was served.
enum Attached {
    /// The last frame is sent, or nobody listens.
    Ended(Option<(u16, &'static str)>),
    /// The log lacks the end, which is known from elsewhere.
    Reply(Reply),
}

async fn replay(
    dispatcher: &Dispatcher,
    message: &Message,
    caller: &Caller,
    frames: &mut FrameWriter,
) -> Result<Attached, ActionError> {
    let request: AttachRequest = serde_json::from_slice(&message.payload).map_err(|error| {
        ActionError::invalid(format!("invalid body: {}", shorten(&error.to_string(), 300)))
    })?;
    let log = dispatcher.log().ok_or_else(unknown)?;
    let store = &log.log.store;
    let target = find(dispatcher, &request, caller).await?;
    let call = last_call(store, &target.key, target.run, target.after).await?.ok_or_else(unknown)?;
    let mut replay = Replay::start(store, target.key.clone(), target.run, &call).await?;
    frames.begin_at(request.from).await;
    let mut quiet_since = Instant::now();
    loop {
        let keep_alive = frames.keep_alive_interval().unwrap_or(END_GRACE).min(END_GRACE);
        tokio::select! {
            biased;
            batch = replay.next() => {
                let Replayed { first, progress, end } = batch?;
                frames.continue_at(first);
                for event in progress {
                    frames.report(event).await;
                }
                quiet_since = Instant::now();
                if let Some(end) = end {
                    return Ok(Attached::Ended(frames.finish_logged(end).await));
                }
            }
            () = tokio::time::sleep(keep_alive) => {
                if frames.keep_alive_interval().is_some_and(|interval| interval.is_zero())
                    && frames.keep_alive().await == Listener::Disconnected
                {
                    return Ok(Attached::Ended(None));
                }
                if quiet_since.elapsed() >= END_GRACE {
                    quiet_since = Instant::now();
                    if let Some(reply) = known_end(dispatcher, &call, &target, caller).await {
                        return Ok(Attached::Reply(reply));
                    }
                }
            }
        }
    }
}

/// The log of the call that a request names.
async fn find(
    dispatcher: &Dispatcher,
    request: &AttachRequest,
    caller: &Caller,
) -> Result<Target, ActionError> {
    match (&request.task_id, request.run) {
        (Some(task_id), None) => {
            let deadline = Instant::now() + RECORD_TIMEOUT;
            let found = loop {
                match dispatcher.logged_task(task_id, caller).await {
                    Err(error) if error.info.code == Code::NotFound && Instant::now() < deadline => {
                        tokio::time::sleep(RECORD_PAUSE).await;
                    }
                    found => break found?,
                }
            };
            let link = found.ok_or_else(unknown)?;
            let key = resume::key(caller, &link);
            Ok(Target { key, run: link.run, after: link.before_start() })
        }
        (None, Some(run)) => {
            let log = dispatcher.log().ok_or_else(unknown)?;
            let key = log.log.find_run(caller, run).await?.ok_or_else(unknown)?;
            Ok(Target { key, run, after: 0 })
        }
        _ => Err(ActionError::invalid("the body must have either `task_id` or `run`")),
    }
}

/// How a call has ended whose log lacks the end: as the record of its task says, or with its replica.
async fn known_end(
    dispatcher: &Dispatcher,
    call: &LastCall,
    target: &Target,
    caller: &Caller,
) -> Option<Reply> {
    let log = dispatcher.log()?;
    // The task may have been assigned since.
    let now = last_call(&log.log.store, &target.key, target.run, target.after).await.ok().flatten();
    let call = now.as_ref().unwrap_or(call);
    if call.has_ended {
        return None;
    }
    match &call.task_id {
        Some(task_id) => dispatcher.ended_task(task_id, caller).await,
        None => {
            let is_gone = dispatcher.is_gone(call.instance?).await;
            is_gone.then(|| {
                let message =
                    "the replica that ran the call is gone, and the agent had not assigned a task id";
                Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent())
            })
        }
    }
}

fn unknown() -> ActionError {
    ActionError::new(Code::NotFound, "this call is unknown, or it was not logged")
}
