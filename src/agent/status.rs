//! The status of an agent, in the words that the registry, logs and commands use.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;

use crate::a2a::card::{Card, Interface};

/// The states of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentState {
    /// Not callable yet: the supervisor launches or probes the agent, or stops its process because of a
    /// command.
    Starting,
    Ready,
    /// The process runs but no longer serves a usable card; its skills are withdrawn.
    Unhealthy,
    /// The agent exited or cannot be reached; the supervisor retries after a back-off.
    BackingOff,
    /// Not running: stopped on request, or exited with code 0 and not configured to restart.
    Stopped,
    /// Exited with an error too often, or without being configured to restart.
    Failed,
}

impl AgentState {
    pub const ALL: [Self; 6] =
        [Self::Starting, Self::Ready, Self::Unhealthy, Self::BackingOff, Self::Stopped, Self::Failed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Unhealthy => "unhealthy",
            Self::BackingOff => "backing-off",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for AgentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A card and the interface that was chosen from it.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownCard {
    pub card: Arc<Card>,
    pub interface: Interface,
}

#[derive(Debug, Clone, PartialEq)]
pub struct AgentStatus {
    pub state: AgentState,
    pub since: SystemTime,
    pub restarts: u32,
    /// The problem that explains the state.
    pub last_error: Option<String>,
    /// The same in a few words.
    pub reason: Option<String>,
    /// What an operator can do about it.
    pub advice: Option<String>,
    /// The configured address with the port of the last start; empty before the first start.
    pub url: String,
    pub pid: Option<i32>,
    pub started: Option<SystemTime>,
    pub last_exit: Option<(String, SystemTime)>,
    /// When a backing-off agent is retried.
    pub next_try: Option<SystemTime>,
    /// The generation of the last command that the state reflects; see `Agent::command`.
    pub generation: u64,
    /// The last card, kept while the agent is unavailable.
    pub known: Option<KnownCard>,
}
