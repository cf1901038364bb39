//! One agent: a supervisor watches its process and its card and derives a status. No NATS here.
//!
//! [`Agent::start`] spawns a supervisor and returns a handle. The supervisor writes two watch channels:
//! the [`AgentStatus`], and the [`LiveAgent`] that serves calls, which exists exactly while the agent is
//! ready. Commands (start, stop, restart) go in the opposite direction.
//!
//! ```text
//! commands, exits, probes ──AgentEvent──> lifecycle (no I/O) ──Step──> supervisor ──> process, card
//!                                             └──────────> AgentStatus, LiveAgent
//! ```

pub(crate) mod call_stats;
pub(crate) mod diagnosis;
mod health_check;
mod lifecycle;
mod probe;
mod start;
pub(crate) mod status;
mod supervisor;

use std::sync::Arc;

use tokio::sync::{Notify, watch as channel};
use tokio_util::sync::CancellationToken;

use crate::a2a::auth::AuthError;
use crate::a2a::{self, HttpClient, LiveAgent};
use crate::background::OnPanic;
use crate::config;
use crate::memory::MemoryAccount;
use crate::process::child::ProcessHost;
use crate::process::output::Output;
use crate::secrets::Secrets;

use call_stats::CallStats;
use lifecycle::{AgentEvent, DesiredState, Lifecycle};
use supervisor::Supervisor;

pub(crate) use status::{AgentState, AgentStatus};

/// A handle to one agent; clone freely.
#[derive(Debug, Clone)]
pub struct Agent {
    pub config: Arc<config::AgentConfig>,
    pub name: Arc<str>,
    pub status: channel::Receiver<AgentStatus>,
    /// Serves calls; `None` unless the agent is ready.
    pub live: channel::Receiver<Option<Arc<LiveAgent>>>,
    pub output: Output,
    pub secrets: Secrets,
    pub calls: Arc<CallStats>,
    pub(crate) memory: Arc<MemoryAccount>,
    desired: channel::Sender<DesiredState>,
    /// The settings that the supervisor uses.
    settings: channel::Sender<Arc<config::AgentConfig>>,
    /// Notify it to probe the agent now, because a call could not reach it.
    pub recheck: Arc<Notify>,
    stop: CancellationToken,
    /// Cancelled when [`stop`](Self::stop) is complete.
    pub ended: CancellationToken,
}

impl Agent {
    /// Starts supervising the agent. Cancelling `skip_grace` kills its process without a grace period.
    pub(crate) fn start(
        config: config::AgentConfig,
        http: &HttpClient,
        host: &ProcessHost,
        skip_grace: CancellationToken,
        predecessors: Predecessors,
        memory: Arc<MemoryAccount>,
    ) -> Result<Self, AuthError> {
        // Unusable credentials are a configuration error; report it now instead of at every start.
        let secrets = config.secrets();
        a2a::chooser(&config, http, &secrets, Arc::clone(&memory))?;
        let name: Arc<str> = config.name.as_str().into();
        let config = Arc::new(config);
        let lifecycle = Lifecycle::new(Arc::clone(&name), Arc::clone(&config));
        let (status_sender, status) = channel::channel(lifecycle.status());
        let (live_sender, live) = channel::channel(None);
        let agent = Self {
            settings: channel::Sender::new(Arc::clone(&config)),
            config,
            output: Output::new(Arc::clone(&name), secrets.clone()),
            name,
            status,
            live,
            secrets,
            calls: predecessors.calls,
            memory,
            desired: channel::Sender::new(DesiredState { running: true, generation: 0 }),
            recheck: Arc::default(),
            stop: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        let supervisor = Supervisor {
            agent: agent.clone(),
            http: http.clone(),
            host: host.clone(),
            status: status_sender,
            live: live_sender,
            skip_grace,
            predecessors: predecessors.ended,
            lifecycle,
            started: None,
            last_port: None,
        };
        let ended = agent.ended.clone().drop_guard();
        host.tasks.spawn("agent", OnPanic::StopBridge, async move {
            supervisor.run().await;
            drop(ended);
        });
        Ok(agent)
    }

    /// Starts, stops or restarts the agent. Returns the generation that [`AgentStatus::generation`] reaches
    /// once the supervisor acts on the command.
    pub fn command(&self, command: AgentCommand) -> u64 {
        let state = self.status.borrow().state;
        let runs = matches!(state, AgentState::Starting | AgentState::Ready | AgentState::Unhealthy);
        let mut generation = 0;
        self.desired.send_modify(|desired| {
            let is_done = match command {
                AgentCommand::Start => desired.running && runs,
                AgentCommand::Stop => !desired.running,
                AgentCommand::Restart => false,
            };
            if !is_done {
                desired.running = command != AgentCommand::Stop;
                desired.generation += 1;
            }
            generation = desired.generation;
        });
        generation
    }

    /// Applies settings that leave the process and the credentials as they are
    /// (`SettingsDigest::is_same_process`). Returns a handle to the same agent;
    /// calls through this one keep the settings that they have.
    pub(crate) fn reconfigure(&self, config: config::AgentConfig) -> Self {
        let config = Arc::new(config);
        self.settings.send_replace(Arc::clone(&config));
        Self { config, ..self.clone() }
    }

    /// Resolves on shutdown, when the generation differs from this one, or when the settings differ from those of this
    /// handle. Cancel-safe.
    async fn commanded(&self, generation: u64) -> AgentEvent {
        let (mut desired, mut settings) = (self.desired.subscribe(), self.settings.subscribe());
        tokio::select! {
            biased;
            () = self.stop.cancelled() => AgentEvent::Shutdown,
            Ok(desired) = desired.wait_for(|desired| desired.generation != generation) => {
                AgentEvent::Commanded(*desired)
            }
            Ok(settings) = settings.wait_for(|settings| !Arc::ptr_eq(settings, &self.config)) => {
                AgentEvent::Reconfigured(Arc::clone(&settings))
            }
        }
    }

    /// Stops supervising the agent; a launched process exits first.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.ended.cancelled().await;
    }

    /// Whether both are handles to the same agent. A reload can replace an agent by one of the same name.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.name, &other.name)
    }
}

/// The agents that a new agent replaces.
#[derive(Debug, Default)]
pub(crate) struct Predecessors {
    /// The new agent starts after all of these are cancelled.
    pub ended: Vec<CancellationToken>,
    /// The new agent continues their counts.
    pub calls: Arc<CallStats>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentCommand {
    /// Starts a stopped agent, and retries a backing-off agent now.
    Start,
    Stop,
    Restart,
}
