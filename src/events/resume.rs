//! Continues the log of a run: with the answer to its question, or at another replica after a crash.

use futures_util::StreamExt as _;

use super::codec::decode;
use super::frame_counter::FrameCounter;
use super::log::AgentLog;
use super::run_log::{RunLog, RunPosition};
use super::store::{LogKey, LogUnavailable};
use crate::a2a::model::{self, Message, Part, StatusUpdate};
use crate::action::progress::ProgressEvent;
use crate::caller::Caller;
use crate::state::run_link::RunLink;

/// Numbers of events that are skipped for each call of which nothing is left in the log.
const UNKNOWN_CALL: u64 = 1_000_000;

/// The key of a run's log.
pub(crate) fn key(caller: &Caller, link: &RunLink) -> LogKey {
    match &link.session {
        Some(session) => LogKey::session(caller, session),
        None => LogKey::run(caller, link.run),
    }
}

/// A run as its log has it.
#[derive(Debug)]
pub(crate) struct ResumedRun {
    pub run: Box<RunLog>,
    /// What the run has reported, as the agent said it.
    pub reported: Vec<model::Event>,
    /// Whether the log has the end of the call.
    pub has_ended: bool,
}

/// The log of the next call of a run, which answers its question.
pub(super) async fn next_call(
    agent: &AgentLog,
    caller: &Caller,
    link: &RunLink,
) -> Result<Box<RunLog>, LogUnavailable> {
    let key = key(caller, link);
    let mut next_n = 0;
    // Most often the question is the only batch since the record of it was written.
    for after in [link.last.saturating_sub(1), link.before_start()] {
        let mut batches = agent.log.store.read(&key, after);
        while let Some(batch) = batches.next().await {
            let batch = batch?.decode()?;
            if batch.run == Some(link.run) {
                next_n = batch.events.last().map_or(next_n, |event| next_n.max(event.n + 1));
            }
        }
        if next_n > 0 {
            break;
        }
    }
    let call = link.call.saturating_add(1);
    if next_n == 0 {
        next_n = UNKNOWN_CALL * u64::from(call);
    }
    let link = RunLink { call, ..link.clone() };
    Ok(Box::new(RunLog::new(agent.clone(), caller, link, RunPosition::new(next_n))))
}

/// The log of a call whose replica is gone. `max_size` limits what is read of it: of a larger log only the numbers count,
/// and the agent's answer is reported again.
pub(crate) async fn adopted(
    agent: &AgentLog,
    caller: &Caller,
    link: &RunLink,
    max_size: usize,
) -> Result<ResumedRun, LogUnavailable> {
    let key = key(caller, link);
    let mut position = RunPosition::new(0);
    let (mut reported, mut size, mut has_ended) = (Vec::new(), 0_usize, false);
    let (mut start, mut last, mut call) = (link.start, link.last, link.call);
    let mut batches = agent.log.store.read(&key, link.before_start());
    while let Some(stored) = batches.next().await {
        let stored = stored?;
        let batch = stored.decode()?;
        if batch.run != Some(link.run) {
            continue;
        }
        if start == 0 {
            start = stored.sequence;
        }
        last = last.max(stored.sequence);
        if batch.call > call {
            // The question was answered, and the record does not say so yet.
            (call, has_ended) = (batch.call, false);
            position.frames = FrameCounter::new();
        }
        let is_call = batch.call == call;
        if is_call {
            position.frames.set(batch.frames);
        }
        for event in &batch.events {
            position.next_n = position.next_n.max(event.n + 1);
            has_ended |= is_call && event.kind.ends_call();
            let progress = decode(event);
            if is_call {
                position.frames.add(&progress);
            }
            for event in progress {
                if let ProgressEvent::State { state, .. } = &event {
                    position.last_state = Some(state.clone());
                }
                size += event_size(&event);
                if size <= max_size {
                    reported.extend(as_reported(event));
                }
            }
        }
    }
    if size > max_size {
        reported = Vec::new();
    }
    if position.next_n == 0 {
        position.next_n = UNKNOWN_CALL * (u64::from(call) + 1);
    }
    let link = RunLink { start, last, call, ..link.clone() };
    let run = Box::new(RunLog::new(agent.clone(), caller, link, position));
    Ok(ResumedRun { run, reported, has_ended })
}

fn event_size(event: &ProgressEvent) -> usize {
    match event {
        ProgressEvent::Artifact { update, .. } => update.artifact.allocated(),
        ProgressEvent::State { message, .. } => message.len() + size_of::<Message>(),
        ProgressEvent::Task { .. } | ProgressEvent::Response(_) => 0,
    }
}

/// An event as the agent sent it. The text of the answer follows from the artifacts.
fn as_reported(event: ProgressEvent) -> Option<model::Event> {
    Some(match event {
        ProgressEvent::Artifact { update, .. } => model::Event::Artifact(update),
        ProgressEvent::State { state, message } => {
            let text = Some(message).filter(|message| !message.is_empty());
            let message = text.map(|text| Message { parts: vec![Part::Text(text)], ..Message::default() });
            model::Event::Status(StatusUpdate {
                task_id: None,
                context_id: None,
                state,
                message,
                is_last: false,
            })
        }
        ProgressEvent::Task { .. } | ProgressEvent::Response(_) => return None,
    })
}
