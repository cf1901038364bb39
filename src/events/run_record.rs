//! What is known of a run, beside its events.

use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::event::EventType;
use super::log::AgentLog;
use crate::action::progress::RunStart;
use crate::reply::Reply;
use crate::reply::outcome::ReplyStatus;
use crate::state::run_link::LiveRunLink;
use crate::text::Timestamp;

/// The version of the records that this release writes.
const VERSION: u32 = 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RunStatus {
    Running,
    Completed,
    Failed,
    Cancelled,
    InputRequired,
    Orphaned,
}

/// A run, for lists of runs, and to find its log when only its id is known.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    pub v: u32,
    pub session: Option<Arc<str>>,
    pub run: Uuid,
    pub agent: Arc<str>,
    pub skill: Option<Arc<str>>,
    pub task_id: Option<String>,
    pub context_id: Option<String>,
    pub status: RunStatus,
    /// The replica that runs it.
    pub instance: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_snapshot_hash: Option<String>,
    /// RFC 3339.
    pub started_at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_token_ms: Option<u64>,
    /// The number of events.
    pub events: u64,
    pub card_hash: Option<String>,
    /// The settings with which the agent ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<serde_json::Value>,
    /// The index of the last event that is part of the record; 0 before the first.
    #[serde(default)]
    pub last_index: u64,
}

impl RunRecord {
    /// A run of which nothing is known but its id.
    pub(crate) fn new(session: Option<Arc<str>>, run: Uuid) -> Self {
        Self {
            v: VERSION,
            session,
            run,
            agent: "".into(),
            skill: None,
            task_id: None,
            context_id: None,
            status: RunStatus::Running,
            instance: String::new(),
            input_snapshot_hash: None,
            started_at: String::new(),
            completed_at: None,
            first_token_ms: None,
            events: 0,
            card_hash: None,
            settings: None,
            last_index: 0,
        }
    }
}

/// How a call of a run has ended.
#[derive(Debug)]
pub(super) struct RunEnd {
    status: RunStatus,
    task_id: Option<String>,
    context_id: Option<String>,
}

impl RunEnd {
    pub(super) fn new(reply: &Reply) -> Self {
        let task = match reply {
            Ok(outcome) => Some(&outcome.task),
            Err(error) => error.task.as_ref(),
        };
        let status = match end_type(reply) {
            EventType::AgentComplete => RunStatus::Completed,
            EventType::AgentCancelled => RunStatus::Cancelled,
            EventType::AgentInputRequired => RunStatus::InputRequired,
            _ => RunStatus::Failed,
        };
        let (task_id, context_id) =
            task.map(|task| (task.id.clone(), task.context_id.clone())).unwrap_or_default();
        Self { status, task_id, context_id }
    }
}

impl RunRecord {
    pub(super) fn started(agent: &AgentLog, link: &LiveRunLink, start: &RunStart<'_>) -> Self {
        Self {
            v: VERSION,
            session: link.session.clone(),
            run: link.run,
            agent: Arc::clone(&agent.agent),
            skill: start.skill.map(Arc::from),
            task_id: None,
            context_id: start.context_id.map(str::to_owned),
            status: RunStatus::Running,
            instance: agent.log.instance.simple().to_string(),
            input_snapshot_hash: None,
            started_at: now(),
            completed_at: None,
            first_token_ms: None,
            events: 0,
            card_hash: Some(start.card_hash.to_owned()),
            settings: None,
            last_index: 0,
        }
    }

    /// The record after the end of a call. A run that waits for an answer is not complete.
    pub(super) fn ended(self, end: RunEnd, events: u64) -> Self {
        let RunEnd { status, task_id, context_id } = end;
        Self {
            status,
            task_id: task_id.or(self.task_id),
            context_id: context_id.or(self.context_id),
            completed_at: (status != RunStatus::InputRequired).then(now),
            events,
            ..self
        }
    }
}

/// The event that ends a call with this reply.
pub(super) fn end_type(reply: &Reply) -> EventType {
    match reply {
        Ok(outcome) => match outcome.status {
            ReplyStatus::Completed | ReplyStatus::Working => EventType::AgentComplete,
            ReplyStatus::Failed | ReplyStatus::Rejected => EventType::AgentFailed,
            ReplyStatus::Canceled => EventType::AgentCancelled,
            ReplyStatus::InputRequired | ReplyStatus::AuthRequired => EventType::AgentInputRequired,
        },
        Err(_) => EventType::AgentFailed,
    }
}

/// The present time as events and records have it.
pub(super) fn now() -> String {
    Timestamp(SystemTime::now()).to_string()
}
