//! Runs of a session, as a fold over its events.

use std::sync::Arc;

use serde::Deserialize;
use uuid::Uuid;

use crate::events::event::{Event, EventType};
use crate::events::run_record::{RunRecord, RunStatus};
use crate::text::{Timestamp, millis};

/// What one event says about its run.
#[derive(Debug, Clone)]
pub(crate) struct RunChange {
    index: u64,
    at: String,
    /// How many events the run has at least.
    events: u64,
    what: What,
}

#[derive(Debug, Clone)]
enum What {
    Started(Box<Started>),
    Task { id: Option<String>, context_id: Option<String> },
    Token,
    Ended { status: RunStatus, id: Option<String>, context_id: Option<String> },
    Orphaned,
    Other,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct Started {
    agent: Arc<str>,
    skill: Option<Arc<str>>,
    card_hash: Option<String>,
    context_id: Option<String>,
    instance: String,
    settings: Option<serde_json::Value>,
    #[serde(skip)]
    input_snapshot_hash: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TaskPayload {
    id: Option<String>,
    context_id: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReplyPayload {
    task: Option<TaskPayload>,
}

impl RunChange {
    /// `None` for an event of the session itself.
    pub(super) fn new(index: u64, event: &Event, chain: &str) -> Option<Self> {
        let payload = event.payload.get();
        let what = match event.kind {
            EventType::AgentStart => {
                let started: Started = serde_json::from_str(payload).unwrap_or_default();
                What::Started(Box::new(Started { input_snapshot_hash: chain.to_owned(), ..started }))
            }
            EventType::AgentStatus => match serde_json::from_str(payload).unwrap_or_default() {
                TaskPayload { id: None, .. } => What::Other,
                TaskPayload { id, context_id } => What::Task { id, context_id },
            },
            EventType::AgentToken => What::Token,
            kind if kind.ends_call() => {
                let reply: ReplyPayload = serde_json::from_str(payload).unwrap_or_default();
                let TaskPayload { id, context_id } = reply.task.unwrap_or_default();
                let status = match kind {
                    EventType::AgentComplete => RunStatus::Completed,
                    EventType::AgentCancelled => RunStatus::Cancelled,
                    EventType::AgentInputRequired => RunStatus::InputRequired,
                    _ => RunStatus::Failed,
                };
                What::Ended { status, id, context_id }
            }
            _ => What::Other,
        };
        Some(Self { index, at: event.at.clone(), events: event.n + 1, what })
    }

    pub(super) fn orphaned(index: u64) -> Self {
        Self { index, at: String::new(), events: 0, what: What::Orphaned }
    }

    /// Whether the change is worth a write of its own.
    fn matters(&self, record: &RunRecord) -> bool {
        match self.what {
            What::Token => record.first_token_ms.is_none(),
            _ => true,
        }
    }
}

/// Applies changes that the record does not have yet. Returns whether it has changed.
pub(crate) fn apply(
    record: &mut Option<RunRecord>,
    (session, run): (&Arc<str>, Uuid),
    changes: &[RunChange],
) -> bool {
    let mut has_changed = false;
    for change in changes {
        let record = record.get_or_insert_with(|| RunRecord::new(Some(Arc::clone(session)), run));
        if change.index <= record.last_index {
            continue;
        }
        has_changed |= change.matters(record);
        record.last_index = change.index;
        record.events = record.events.max(change.events);
        apply_one(record, change);
    }
    has_changed
}

fn apply_one(record: &mut RunRecord, change: &RunChange) {
    match &change.what {
        What::Started(started) => {
            let Started { agent, skill, card_hash, context_id, instance, settings, input_snapshot_hash } =
                (**started).clone();
            if record.started_at.is_empty() || record.input_snapshot_hash.is_none() {
                record.started_at.clone_from(&change.at);
                record.input_snapshot_hash = Some(input_snapshot_hash);
                (record.skill, record.card_hash, record.settings) = (skill, card_hash, settings);
                record.context_id = context_id;
            }
            (record.agent, record.instance) = (agent, instance);
            if record.status != RunStatus::Orphaned {
                record.status = RunStatus::Running;
            }
            record.completed_at = None;
        }
        What::Task { id, context_id } => {
            record.task_id.clone_from(id);
            if context_id.is_some() {
                record.context_id.clone_from(context_id);
            }
        }
        What::Token => {
            if record.first_token_ms.is_none() {
                record.first_token_ms = elapsed(&record.started_at, &change.at);
            }
        }
        What::Ended { status, id, context_id } => {
            // What becomes of a run that nobody waits for any more does not matter for the conversation.
            if record.status != RunStatus::Orphaned {
                record.status = *status;
            }
            record.completed_at = (*status != RunStatus::InputRequired).then(|| change.at.clone());
            record.task_id = id.clone().or_else(|| record.task_id.take());
            record.context_id = context_id.clone().or_else(|| record.context_id.take());
        }
        What::Orphaned => {
            if matches!(record.status, RunStatus::Running | RunStatus::InputRequired) {
                record.status = RunStatus::Orphaned;
            }
        }
        What::Other => {}
    }
}

fn elapsed(from: &str, to: &str) -> Option<u64> {
    let time = |text: &str| text.parse::<Timestamp>().ok().map(|Timestamp(time)| time);
    let elapsed = time(to)?.duration_since(time(from)?).unwrap_or_default();
    Some(millis(elapsed))
}
