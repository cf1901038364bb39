//! One agent: its process and its card make a status. Nothing about NATS.
//!
//! [`Agent::start`] spawns a supervisor and returns a handle. The supervisor writes two watch
//! channels: the [`AgentStatus`] for whoever publishes it, and the [`Instance`] that calls go to, which
//! is there exactly while the agent is ready. Orders (start, stop, restart) go the other way.
//!
//! ```text
//! orders, exits, probes ──Event──> lifecycle (no I/O) ──Step──> supervisor ──> process, card
//!                                      └──────────> Status, Instance
//! ```

pub(crate) mod calls;
mod lifecycle;
mod probe;
mod start;
pub(crate) mod status;
mod supervisor;
mod trouble;
mod watch;

use std::sync::Arc;

use tokio::sync::{Notify, watch as channel};
use tokio_util::sync::CancellationToken;

use crate::a2a::auth::AuthError;
use crate::a2a::{self, Instance};
use crate::config;
use crate::process::child::Host;
use crate::process::output::Output;
use crate::secrets::Secrets;
use crate::tasks::OnFailure;

use calls::{Calls, Work};
use lifecycle::{Lifecycle, Wanted};
use supervisor::{Orders, Supervisor};

pub(crate) use status::{AgentState, AgentStatus};

/// A handle to one agent; clone freely.
#[derive(Debug, Clone)]
pub struct Agent {
    pub config: Arc<config::AgentConfig>,
    /// Its name in the settings.
    pub name: Arc<str>,
    pub status: channel::Receiver<AgentStatus>,
    /// Where calls go, while it is ready.
    pub live: channel::Receiver<Option<Arc<Instance>>>,
    pub output: Output,
    /// Its credentials, which no error message shows.
    pub secrets: Secrets,
    pub calls: Arc<Calls>,
    wanted: channel::Sender<Wanted>,
    recheck: Arc<Notify>,
    stop: CancellationToken,
    ended: CancellationToken,
}

impl Agent {
    /// Begins to launch the agent or to look for it. `hurry` skips the grace period of its end.
    pub fn start(
        config: config::AgentConfig,
        http: &reqwest::Client,
        host: &Host,
        hurry: CancellationToken,
        before: Predecessors,
    ) -> Result<Self, AuthError> {
        // Credentials that cannot be sent are an error of the settings, not of a start.
        let secrets = config.secrets();
        a2a::chooser(&config, http, &secrets)?;
        let name: Arc<str> = config.name.as_str().into();
        let config = Arc::new(config);
        let lifecycle = Lifecycle::new(Arc::clone(&name), Arc::clone(&config));
        let (status_sender, status) = channel::channel(lifecycle.status());
        let (live_sender, live) = channel::channel(None);
        let (wanted, orders) = channel::channel(Wanted { running: true, order: 0 });
        let agent = Self {
            config: Arc::clone(&config),
            name: Arc::clone(&name),
            status,
            live,
            output: Output::new(Arc::clone(&name), secrets.clone()),
            secrets,
            calls: before.calls,
            wanted,
            recheck: Arc::default(),
            stop: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        let supervisor = Supervisor {
            config,
            name,
            http: http.clone(),
            host: host.clone(),
            output: agent.output.clone(),
            secrets: agent.secrets.clone(),
            calls: Arc::clone(&agent.calls),
            status: status_sender,
            live: live_sender,
            orders: Orders { wanted: orders, stop: agent.stop.clone() },
            recheck: Arc::clone(&agent.recheck),
            hurry,
            after: before.ended,
            lifecycle,
            run: None,
            last_port: None,
        };
        let ended = agent.ended.clone().drop_guard();
        host.tasks.spawn("agent", OnFailure::StopBridge, async move {
            supervisor.run().await;
            drop(ended);
        });
        Ok(agent)
    }

    /// A call found nobody there: probe the agent at once.
    pub fn recheck(&self) {
        self.recheck.notify_one();
    }

    /// A call is in flight for as long as what this gives back lives: the agent is not taken for hung.
    pub fn work(&self) -> Work {
        self.calls.begin()
    }

    /// Orders the agent to run, to stop, or to restart. Gives back the number that [`AgentStatus::order`] has
    /// once the agent follows the order.
    pub fn order(&self, order: Order) -> u64 {
        let state = self.status.borrow().state;
        let runs = matches!(state, AgentState::Starting | AgentState::Ready | AgentState::Unhealthy);
        let mut number = 0;
        self.wanted.send_modify(|wanted| {
            let is_done = match order {
                Order::Start => wanted.running && runs,
                Order::Stop => !wanted.running,
                Order::Restart => false,
            };
            if !is_done {
                wanted.running = order != Order::Stop;
                wanted.order += 1;
            }
            number = wanted.order;
        });
        number
    }

    /// Ends the agent, if the bridge launched it, and waits until it has ended.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.ended.cancelled().await;
    }

    /// Whether both are handles to the same agent; a name alone may have been replaced.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.name, &other.name)
    }

    /// Cancelled when the agent has ended after a [`stop`](Self::stop).
    pub fn ended(&self) -> &CancellationToken {
        &self.ended
    }
}

/// What a new agent takes over from those that it replaces.
#[derive(Debug, Default)]
pub struct Predecessors {
    /// Cancelled when they have ended; the new agent starts after all of them.
    pub ended: Vec<CancellationToken>,
    /// The counts go on where theirs are.
    pub calls: Arc<Calls>,
}

/// What an agent can be ordered to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Run, if it does not; a backing-off agent is retried now.
    Start,
    Stop,
    /// End, and start at once.
    Restart,
}
