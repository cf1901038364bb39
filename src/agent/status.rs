//! Where an agent stands, in the words that registry, logs and commands use.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Serialize, Serializer};

use crate::a2a::card::{Card, Interface};

/// The states of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Launched or looked for, and not seen yet.
    Starting,
    /// Its card is read and its skills are published.
    Ready,
    /// It runs, but does not show a usable card any more; its skills are withdrawn.
    Unhealthy,
    /// It is gone or never came; the bridge waits before it tries again.
    BackingOff,
    /// The bridge has let it go, or it has ended well and is left so.
    Stopped,
    /// It ended badly, too often or with settings that say to leave it so.
    Failed,
}

impl State {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Starting, Self::Ready, Self::Unhealthy, Self::BackingOff, Self::Stopped, Self::Failed];

    /// The word for it.
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

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for State {
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

/// Everything that is told about an agent.
#[derive(Debug, Clone)]
pub struct Status {
    /// Where it stands.
    pub state: State,
    /// Since when.
    pub since: SystemTime,
    /// How often it was started again.
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
    /// When it is tried again, while the bridge waits for that.
    pub next_try: Option<SystemTime>,
    /// Which order it follows; see `Agent::order`.
    pub order: u64,
    /// The last card, also while the agent is away.
    pub known: Option<KnownCard>,
}

impl Status {
    /// Before anything happened.
    pub fn new() -> Self {
        Self {
            state: State::Starting,
            since: SystemTime::now(),
            restarts: 0,
            last_error: None,
            advice: None,
            url: String::new(),
            pid: None,
            started: None,
            last_exit: None,
            next_try: None,
            order: 0,
            known: None,
        }
    }
}

impl Default for Status {
    fn default() -> Self {
        Self::new()
    }
}
