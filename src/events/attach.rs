//! The frames of a logged call, from the log.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Deserialize;
use uuid::Uuid;

use super::codec::decode;
use super::event::{Batch, Event, EventType, FrameCounts};
use super::follow::Follower;
use super::store::{EventStore, LogKey, LogUnavailable};
use crate::action::progress::ProgressEvent;
use crate::reply::error::Code;
use crate::state::peers::InstanceId;

/// The last call of a run, as its log has it now.
#[derive(Debug)]
pub(crate) struct LastCall {
    call: u32,
    /// The sequence after which its batches come.
    after: u64,
    /// The id of its task, if the agent has assigned one.
    pub task_id: Option<String>,
    /// The replica that runs the call, or ran it last.
    pub instance: Option<InstanceId>,
    pub has_ended: bool,
}

/// A batch of a call, as frames.
#[derive(Debug)]
pub(crate) struct Replayed {
    /// The number of the first frame, in each selection.
    pub first: FrameCounts,
    pub progress: Vec<ProgressEvent>,
    pub end: Option<ReplayedEnd>,
}

/// The end of a call.
#[derive(Debug)]
pub(crate) struct ReplayedEnd {
    /// The reply object.
    pub body: Bytes,
    /// The code and the message, if the reply is an error.
    pub error: Option<(Code, String)>,
}

/// Finds the last call of a run; `None` if the log has nothing of the run.
pub(crate) async fn last_call(
    store: &Arc<dyn EventStore>,
    key: &LogKey,
    run: Uuid,
    after: u64,
) -> Result<Option<LastCall>, LogUnavailable> {
    let mut last: Option<LastCall> = None;
    let mut task_id = None;
    let mut batches = store.read(key, after);
    while let Some(stored) = batches.next().await {
        let stored = stored?;
        let batch = stored.decode()?;
        if batch.run != Some(run) {
            continue;
        }
        let call = match &mut last {
            Some(last) if last.call == batch.call => last,
            _ => last.insert(LastCall {
                call: batch.call,
                after: stored.sequence.saturating_sub(1),
                task_id: None,
                instance: None,
                has_ended: false,
            }),
        };
        for event in &batch.events {
            call.has_ended |= event.kind.ends_call();
            call.instance = started_at(event).or(call.instance);
            if let Some(ProgressEvent::Task { id, .. }) = decode(event).into_iter().next() {
                task_id = Some(id);
            }
        }
    }
    Ok(last.map(|last| LastCall { task_id, ..last }))
}

/// The replica that an event says began the call.
fn started_at(event: &Event) -> Option<InstanceId> {
    #[derive(Deserialize)]
    struct Start {
        instance: InstanceId,
    }
    let is_start = event.kind == EventType::AgentStart;
    let start: Option<Start> = is_start.then(|| serde_json::from_str(event.payload.get()).ok()).flatten();
    start.map(|start| start.instance)
}

/// Replays one call, and goes on with what is appended to its log.
pub(crate) struct Replay {
    follower: Follower,
    run: Uuid,
    call: u32,
}

impl Replay {
    pub(crate) async fn start(
        store: &Arc<dyn EventStore>,
        key: LogKey,
        run: Uuid,
        call: &LastCall,
    ) -> Result<Self, LogUnavailable> {
        let follower = Follower::start(store, key, call.after).await?;
        Ok(Self { follower, run, call: call.call })
    }

    /// The next batch of the call. Waits until there is one. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Replayed, LogUnavailable> {
        loop {
            let batch = self.follower.next().await?.decode()?;
            if batch.run == Some(self.run) && batch.call == self.call {
                return Ok(replay(&batch));
            }
        }
    }
}

fn replay(batch: &Batch) -> Replayed {
    let progress = batch.events.iter().flat_map(decode).collect();
    let end = batch.events.iter().find(|event| event.kind.ends_call());
    Replayed { first: batch.frames, progress, end: end.map(replay_end) }
}

fn replay_end(event: &Event) -> ReplayedEnd {
    #[derive(Deserialize)]
    struct Body {
        status: String,
        message: String,
        error_info: Option<Info>,
    }
    #[derive(Deserialize)]
    struct Info {
        code: Code,
    }
    let body = Bytes::from(event.payload.get().to_owned());
    let error = match serde_json::from_slice(&body) {
        Ok(Body { status, message, error_info: Some(Info { code }) }) if status == "ERROR" => {
            Some((code, message))
        }
        _ => None,
    };
    ReplayedEnd { body, error }
}
