//! Where an agent stands, in the words that registry, logs and commands use.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Serialize, Serializer};

use crate::a2a::card::{Card, Interface};

/// The states of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentState {
    /// In transition, and not callable: being launched or looked for, or its process is being ended on
    /// an order to restart or to stop.
    Starting,
    /// Its card is read and its skills are published.
    Ready,
    /// Its process runs, and it does not show a usable card any more; its skills are withdrawn. A
    /// process that has exited is never unhealthy.
    Unhealthy,
    /// It exited or was not found; the bridge waits before it retries.
    BackingOff,
    /// Nothing of it runs: somebody has stopped it, or it exited with code 0 and its settings do not
    /// ask for a restart.
    Stopped,
    /// It exited with an error, too often or with settings that do not ask for a restart.
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

impl Serialize for AgentState {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// A card and the interface that was chosen from it.
#[derive(Debug, Clone, PartialEq)]
pub struct KnownCard {
    /// What the agent says of itself.
    pub card: Arc<Card>,
    /// Where and how it is called.
    pub interface: Interface,
}

/// Everything that others may know about an agent, at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentStatus {
    pub state: AgentState,
    pub since: SystemTime,
    /// How often it was restarted.
    pub restarts: u32,
    /// What went wrong last; kept while it explains the state.
    pub last_error: Option<String>,
    /// What to do about it.
    pub advice: Option<String>,
    /// Where it was told to listen at its last start; empty before the first.
    pub url: String,
    /// The process, while the bridge runs one.
    pub pid: Option<i32>,
    /// When that process was started.
    pub started: Option<SystemTime>,
    /// How the last process ended, and when.
    pub last_exit: Option<(String, SystemTime)>,
    /// When the bridge retries, while it backs off.
    pub next_try: Option<SystemTime>,
    /// Which order it follows; see `Agent::order`. It changes together with the state.
    pub order: u64,
    /// The last card, also while the agent is away.
    pub known: Option<KnownCard>,
}
