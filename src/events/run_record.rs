//! What is known of a run, beside its events.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

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
}
