//! One agent's life: process and card make a status. Nothing about NATS.
//!
//! [`Agent::start`] spawns the loop in `life` and returns a handle. The loop writes two watch
//! channels: the [`Status`] for whoever publishes it, and the [`Instance`] that calls go to, which
//! is there exactly while the agent is ready.

mod life;
mod probe;
pub mod status;

use std::sync::Arc;

use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use crate::a2a::auth::AuthError;
use crate::a2a::{self, Instance};
use crate::config;
use crate::tasks::{OnFailure, Tasks};

pub use status::{KnownCard, State, Status};

/// A handle to one agent; clone freely.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its settings.
    pub config: Arc<config::Agent>,
    /// Its name in the settings.
    pub name: Arc<str>,
    /// Where it stands.
    pub status: watch::Receiver<Status>,
    /// Where calls go, while it is ready.
    pub live: watch::Receiver<Option<Arc<Instance>>>,
    doubt: Arc<Notify>,
    stop: CancellationToken,
    ended: CancellationToken,
}

impl Agent {
    /// Begins to launch the agent or to look for it. `hurry` skips the grace time of its end.
    pub fn start(
        config: config::Agent,
        http: &reqwest::Client,
        tasks: &Tasks,
        hurry: CancellationToken,
    ) -> Result<Self, AuthError> {
        let chooser = Arc::new(a2a::chooser(&config, http)?);
        let name: Arc<str> = config.name.as_str().into();
        let config = Arc::new(config);
        let (status_sender, status) = watch::channel(Status::new());
        let (live_sender, live) = watch::channel(None);
        let agent = Self {
            config: Arc::clone(&config),
            name: Arc::clone(&name),
            status,
            live,
            doubt: Arc::default(),
            stop: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        let life = life::Life {
            config,
            name,
            chooser,
            tasks: tasks.clone(),
            status: status_sender,
            live: live_sender,
            doubt: Arc::clone(&agent.doubt),
            stop: agent.stop.clone(),
            hurry,
        };
        let ended = agent.ended.clone().drop_guard();
        tasks.spawn("agent", OnFailure::StopBridge, async move {
            life.run().await;
            drop(ended);
        });
        Ok(agent)
    }

    /// A call found nobody there: look at once whether the agent is gone.
    pub fn doubt(&self) {
        self.doubt.notify_one();
    }

    /// Ends the agent, if the bridge launched it, and waits until it has ended.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.ended.cancelled().await;
    }
}
