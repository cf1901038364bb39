//! Starts, reloads and stops all parts in the right order.

mod draining;
mod served_agent;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::draining::DrainingAgents;
use self::served_agent::ServedAgent;
use crate::a2a::{self, HttpClient, auth::AuthError};
use crate::action::actions::{Actions, CallShutdown};
use crate::agent::{Agent, AgentState, Predecessors};
use crate::background::OnPanic;
use crate::bus::agent_protocol::AgentProtocol;
use crate::bus::connect::{ConnectError, FirstConnection, connect};
use crate::bus::control;
use crate::bus::outbox::Outbox;
use crate::bus::publication::Publication;
use crate::bus::service::{ServiceContext, ServiceError, round_trip};
use crate::bus::subject::{AGENT_PROTOCOL_ROOT, ReplyGuard, SubjectError, Subjects};
use crate::config::{self, AgentConfig, Config};
use crate::dispatch::Dispatcher;
use crate::memory::{self, MemoryBudget};
use crate::metrics::{self, Metrics};
use crate::process::child::ProcessHost;
use crate::process::orphans::ProcessRecords;
use crate::state::memory::MemoryStore;
use crate::state::quota::Quotas;
use crate::state::{State, StateStore};

/// Task updates of one agent that wait to be published.
const UPDATE_QUEUE: usize = 256;
/// How long a reload waits for a changed attached agent to become ready before it replaces the old one anyway.
const HANDOVER_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of each of the last two steps of a stop: draining the connection, and ending the remaining tasks.
const SHUTDOWN_STEP_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("invalid subject or pattern under `nats`")]
    Subject(#[from] SubjectError),
    #[error("cannot set up the HTTP client")]
    Http(#[from] reqwest::Error),
    #[error("agent `{agent}`")]
    Auth { agent: String, source: AuthError },
    #[error("cannot publish agent `{agent}`")]
    Publish { agent: String, source: ServiceError },
    #[error("cannot receive commands for agent `{agent}`")]
    Control { agent: String, source: ServiceError },
    #[error("the bridge is stopping")]
    Stopping,
    #[error("cannot listen on {listen} (`metrics.listen`)")]
    Metrics { listen: std::net::SocketAddr, source: std::io::Error },
}

#[derive(Debug)]
pub struct Bridge {
    context: ServiceContext,
    subjects: Subjects,
    http: HttpClient,
    state: Arc<State>,
    host: ProcessHost,
    memory: Arc<MemoryBudget>,
    /// `None` once the bridge stops. Code that takes an agent out has to stop it.
    served: Mutex<Option<Vec<ServedAgent>>>,
    draining: DrainingAgents,
    /// Held during a start or a reload; the stop waits for it.
    reload_lock: tokio::sync::Mutex<()>,
    /// Cancelled when the bridge stops, to interrupt a start or a reload.
    stop_requested: CancellationToken,
    metrics: Arc<Metrics>,
    /// The owner of the agents in the agent protocol; `None` without that protocol.
    owner: Option<String>,
    call_shutdown: CallShutdown,
    /// Cancelled to skip the grace period of agent processes.
    skip_grace: CancellationToken,
    grace: Duration,
    /// See [`restart_only_settings`].
    restart_only: String,
}

/// The changes of a reload, reported when the new configuration is in force. Removed agents and replaced
/// processes may still be stopping.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReloadSummary {
    pub added: Vec<String>,
    /// Agents with changed settings. An attached agent is served without a gap; a launched agent starts when
    /// its previous process has ended.
    pub changed: Vec<String>,
    /// Agents that are no longer served; they stop when their calls have ended.
    pub removed: Vec<String>,
    /// Number of unchanged agents, which keep their process.
    pub kept: usize,
    /// Whether a setting changed that takes effect only after a restart of the bridge.
    pub needs_restart: bool,
}

impl Bridge {
    /// Connects to NATS; no agent is served yet. `host` runs the processes of agents.
    ///
    /// # Errors
    ///
    /// When the subject prefix or a reply pattern is invalid, the HTTP client cannot be built, the NATS server rejects
    /// the bridge, or `first` does not wait and NATS cannot be reached.
    pub async fn connect(
        config: &Config,
        host: ProcessHost,
        first: FirstConnection,
    ) -> Result<Self, BridgeError> {
        let subjects = Subjects::new(&config.nats.subject_prefix)?;
        let mut guard = ReplyGuard::new(&config.nats.reply_prefixes, subjects.prefix())?;
        if config.nats.agent_protocol.is_some() {
            guard = guard.and_not_below(AGENT_PROTOCOL_ROOT);
        }
        let http = a2a::http_client()?;
        let memory_limit = config.limits.memory.unwrap_or_else(memory::default_limit);
        let memory = MemoryBudget::new(memory_limit);
        memory::reclaimer::start(&memory);
        let client = connect(&config.nats, memory.max_waiting(), first).await?;
        let context = ServiceContext::new(client.clone(), Arc::new(guard), host.tasks.tracker.clone()).await;
        let quotas = Quotas::new(memory_limit / 16 * 3);
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new(&quotas));
        let state = Arc::new(State::new(&store, &quotas));
        let metrics = Arc::new(Metrics::new(client, Arc::clone(&state), Arc::clone(&memory)));
        let draining = DrainingAgents::new(host.tasks.clone(), Arc::clone(&metrics), config.shutdown_grace);
        Ok(Self {
            context,
            subjects,
            http,
            state,
            memory,
            host: ProcessHost { records: open_records(config), ..host },
            served: Mutex::new(Some(Vec::new())),
            draining,
            reload_lock: tokio::sync::Mutex::default(),
            stop_requested: CancellationToken::new(),
            metrics,
            owner: config.nats.agent_protocol.as_ref().map(|protocol| protocol.owner.clone()),
            call_shutdown: CallShutdown::default(),
            skip_grace: CancellationToken::new(),
            grace: config.shutdown_grace,
            restart_only: restart_only_settings(config),
        })
    }

    /// Starts to serve every agent. Agents that are not reachable yet follow later.
    ///
    /// Not cancel-safe, like [`Bridge::reload`]: to interrupt it, call [`Bridge::stop`] concurrently.
    ///
    /// # Errors
    ///
    /// When an agent or the metrics cannot be served. The agents before it are served until [`Bridge::stop`].
    pub async fn serve(&self, config: Config) -> Result<(), BridgeError> {
        let _reload_lock = self.reload_lock.lock().await;
        let (state, stopping) = (Arc::clone(&self.state), self.host.tasks.stop.clone());
        self.host.tasks.spawn("sweep", OnPanic::Log, async move {
            stopping.run_until_cancelled(state.sweep_periodically()).await;
        });
        if let Some(config::MetricsConfig { listen }) = config.metrics {
            let server = metrics::serve(listen, Arc::clone(&self.metrics), self.host.tasks.stop.clone())
                .await
                .map_err(|source| BridgeError::Metrics { listen, source })?;
            self.host.tasks.spawn("metrics", OnPanic::Log, server);
        }
        for agent in config.agents {
            self.add(agent).await?;
        }
        self.metrics.set_serving();
        Ok(())
    }

    async fn add(&self, config: AgentConfig) -> Result<(), BridgeError> {
        let predecessors = self.draining.predecessors(&config);
        let agent = self.start_agent(config, predecessors)?;
        let new = self.serve_or_stop(agent).await?;
        self.insert(new, None)
    }

    /// Replaces an agent whose settings have changed.
    ///
    /// The old process has to end before the new one starts, because they may share a port. An attached agent
    /// has no process, so NATS shows the new one before the old one is withdrawn.
    async fn replace(&self, config: AgentConfig) -> Result<(), BridgeError> {
        let old = self.agents().into_iter().find(|old| *old.name == *config.name);
        let Some(old) = old else { return self.add(config).await };
        let mut predecessors = self.draining.predecessors(&config);
        predecessors.calls = Arc::clone(&old.calls);
        let is_attached = old.config.command.is_none() && config.command.is_none();
        let agent = self.start_agent(config, predecessors)?;
        let deadline = Instant::now() + HANDOVER_TIMEOUT;
        if is_attached {
            let mut status = agent.status.clone();
            let started = status.wait_for(|status| status.state != AgentState::Starting);
            let _ = self.stop_requested.run_until_cancelled(tokio::time::timeout_at(deadline, started)).await;
        }
        let new = self.serve_or_stop(agent).await?;
        if is_attached {
            let published = tokio::time::timeout_at(deadline, new.wait_until_first_published());
            let _ = self.stop_requested.run_until_cancelled(published).await;
        }
        self.insert(new, Some(&old))
    }

    /// Adds an agent to those that are served, in place of `old` if there is one.
    fn insert(&self, new: ServedAgent, old: Option<&Agent>) -> Result<(), BridgeError> {
        let (agent, announcer) = (new.agent.clone(), new.publication.announcer());
        let mut served = self.served();
        let Some(agents) = &mut *served else {
            drop(served);
            self.draining.drain(new, None);
            return Err(BridgeError::Stopping);
        };
        let position = agents.iter_mut().find(|served| old.is_some_and(|old| served.agent.is(old)));
        let replaced = match position {
            Some(position) => Some(std::mem::replace(position, new)),
            None => {
                agents.push(new);
                None
            }
        };
        drop(served);
        self.metrics.add(agent);
        if let Some(replaced) = replaced {
            self.draining.drain(replaced, Some(announcer));
        }
        Ok(())
    }

    fn start_agent(&self, config: AgentConfig, predecessors: Predecessors) -> Result<Agent, BridgeError> {
        if self.served().is_none() {
            return Err(BridgeError::Stopping);
        }
        let (name, skip_grace) = (config.name.clone(), self.skip_grace.clone());
        let memory = self.memory.account(&name);
        Agent::start(config, &self.http, &self.host, skip_grace, predecessors, memory)
            .map_err(|source| BridgeError::Auth { agent: name, source })
    }

    async fn serve_or_stop(&self, agent: Agent) -> Result<ServedAgent, BridgeError> {
        let served = tokio::select! {
            biased;
            () = self.stop_requested.cancelled() => Err(BridgeError::Stopping),
            served = self.open_front_doors(agent.clone()) => served,
        };
        if served.is_err() {
            agent.stop().await;
        }
        served
    }

    /// Starts everything that serves an agent on NATS. Cancel-safe: nothing is awaited after the first step
    /// that would have to be undone.
    async fn open_front_doors(&self, agent: Agent) -> Result<ServedAgent, BridgeError> {
        let name = || agent.name.to_string();
        let commands = control::subscribe(&agent, &self.context, &self.subjects).await;
        let commands = commands.map_err(|source| BridgeError::Control { agent: name(), source })?;
        let (update_sender, updates) = mpsc::channel(UPDATE_QUEUE);
        let call_shutdown = self.call_shutdown.child();
        let actions = Actions::new(
            Arc::clone(&agent.memory),
            Arc::clone(&agent.config),
            agent.live.clone(),
            Arc::clone(&self.state),
            update_sender,
            call_shutdown.clone(),
            agent.secrets.clone(),
        );
        let calls = TaskTracker::new();
        let dispatcher = Arc::new(Dispatcher::new(agent.clone(), actions, calls.clone()));
        let (context, subjects, tasks) = (&self.context, &self.subjects, &self.host.tasks);
        let outbox = Outbox::new(context.client.clone(), &agent.memory, context.confirmations.clone());
        let publication =
            Publication::start(Arc::clone(&dispatcher), updates, context, &outbox, subjects, tasks).await;
        let publication = publication.map_err(|source| BridgeError::Publish { agent: name(), source })?;
        let control = control::start(commands, agent.clone(), publication.instance(), context, tasks);
        let agent_protocol = self.owner.as_ref().map(|owner| {
            AgentProtocol::start(owner, dispatcher, context, &outbox, subjects, &call_shutdown, tasks)
        });
        Ok(ServedAgent { agent, publication, control, agent_protocol, calls, call_shutdown })
    }

    /// Applies a new configuration. Unchanged agents keep their process and their calls.
    ///
    /// It does not wait for calls: removed and replaced agents finish them in the background, and
    /// [`Bridge::stop`] waits for that. It waits for changed attached agents only, for at most three seconds,
    /// while the other agents are served already.
    ///
    /// # Errors
    ///
    /// When an agent of the new configuration cannot be served. The new configuration applies to the others.
    pub async fn reload(&self, config: Config) -> Result<ReloadSummary, BridgeError> {
        let _reload_lock = self.reload_lock.lock().await;
        let needs_restart = self.restart_only != restart_only_settings(&config);
        let before = self.agents();
        let names: Vec<String> = config.agents.iter().map(|agent| agent.name.clone()).collect();
        let (same, new): (Vec<_>, Vec<_>) = config.agents.into_iter().partition(|agent| {
            let is_same = |old: &Agent| *old.name == *agent.name && old.config.digest == agent.digest;
            before.iter().any(is_same)
        });
        // Invalid credentials must be an error before anything changes.
        for agent in &new {
            a2a::chooser(agent, &self.http, &agent.secrets(), self.memory.account(&agent.name))
                .map_err(|source| BridgeError::Auth { agent: agent.name.clone(), source })?;
        }
        let (changed, added): (Vec<_>, Vec<_>) =
            new.into_iter().partition(|agent| before.iter().any(|old| *old.name == *agent.name));
        let is_removed = |served: &mut ServedAgent| !names.iter().any(|name| *served.agent.name == **name);
        let removed: Vec<ServedAgent> = match &mut *self.served() {
            Some(served) => served.extract_if(.., is_removed).collect(),
            None => return Err(BridgeError::Stopping),
        };
        let names_of = |agents: &[AgentConfig]| agents.iter().map(|agent| agent.name.clone()).collect();
        let summary = ReloadSummary {
            added: names_of(&added),
            changed: names_of(&changed),
            removed: removed.iter().map(|served| served.agent.name.to_string()).collect(),
            kept: same.len(),
            needs_restart,
        };
        for served in removed {
            self.draining.drain(served, None);
        }
        let is_changed = |old: &Agent| changed.iter().any(|agent| *old.name == *agent.name);
        self.draining.mark_replacing(before.into_iter().filter(is_changed));
        let mut failed = None;
        for agent in added {
            failed = self.add(agent).await.err().or(failed);
        }
        for replaced in join_all(changed.into_iter().map(|agent| self.replace(agent))).await {
            failed = replaced.err().or(failed);
        }
        // An agent that could not be replaced is still served.
        for agent in self.agents() {
            self.draining.unmark(&agent);
        }
        failed.map_or(Ok(summary), Err)
    }

    /// Removes all agents from NATS, waits for their calls, cancels the rest, stops the agents, and closes the
    /// connection.
    ///
    /// A concurrent reload ends as well: its draining agents have their grace period, and it serves no new
    /// agent.
    pub async fn stop(&self) {
        self.metrics.set_stopping();
        self.stop_requested.cancel();
        let served = self.served().take().unwrap_or_default();
        let draining = async {
            let reload_lock = self.reload_lock.lock().await;
            self.draining.finished().await;
            drop(reload_lock);
        };
        tokio::join!(draining, self.stop_agents(&served));

        log_step("NATS closed", async {
            for served in &served {
                served.control.stop().await;
            }
            // The connection must stay open until the last replies have arrived.
            if let Err(error) = round_trip(&self.context.client).await {
                tracing::warn!(%error, "the last replies may not have reached NATS");
            }
            // Without a connection the client's queue may be full and never drain.
            let _ = tokio::time::timeout(SHUTDOWN_STEP_TIMEOUT, self.context.client.drain()).await;
            self.host.tasks.stop.cancel();
            let _ = tokio::time::timeout(SHUTDOWN_STEP_TIMEOUT, self.host.tasks.finished()).await;
        })
        .await;
    }

    async fn stop_agents(&self, served: &[ServedAgent]) {
        log_step("actions removed from NATS", join_all(served.iter().map(ServedAgent::withdraw))).await;
        let finish_calls = served.iter().map(|served| served.finish_calls(self.grace));
        log_step("calls drained", join_all(finish_calls)).await;
        log_step("agents stopped", join_all(served.iter().map(|served| served.agent.stop()))).await;
    }

    /// Ends every grace period of a concurrent [`Bridge::stop`].
    pub fn skip_grace_periods(&self) {
        self.call_shutdown.grace_over.cancel();
        self.skip_grace.cancel();
    }

    /// The agents that are served.
    pub fn agents(&self) -> Vec<Agent> {
        self.served().iter().flatten().map(|served| served.agent.clone()).collect()
    }

    fn served(&self) -> std::sync::MutexGuard<'_, Option<Vec<ServedAgent>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves when an essential task panics or the bridge stops.
    pub async fn stopping(&self) {
        self.host.tasks.stop.cancelled().await;
    }

    /// Whether an essential task has panicked.
    pub fn has_panicked(&self) -> bool {
        self.host.tasks.essential_task_panicked.load(Ordering::Relaxed)
    }
}

/// Logs the end of one step of the stop, with its duration.
async fn log_step<T>(name: &'static str, step: impl Future<Output = T>) {
    let began = Instant::now();
    step.await;
    tracing::info!(took = ?began.elapsed(), "{name}");
}

/// The settings that take effect only after a restart of the bridge, in a form that can be compared. Secrets
/// are redacted in it, so a changed password alone goes unnoticed.
fn restart_only_settings(config: &Config) -> String {
    format!("{:?} {:?} {:?} {:?}", config.nats, config.metrics, config.shutdown_grace, config.limits)
}

/// Opens the records of agent processes, and ends the processes that an earlier bridge with the same
/// configuration file left running, before any new process starts.
fn open_records(config: &Config) -> Option<Arc<ProcessRecords>> {
    let file = config.file.as_deref()?;
    match ProcessRecords::open(file) {
        Ok(records) => {
            let ended = records.kill_orphans();
            if !ended.is_empty() {
                let processes = ended.join(", ");
                tracing::warn!(processes, "ended processes that an earlier bridge left running");
            }
            Some(Arc::new(records))
        }
        Err(error) => {
            tracing::warn!(%error, "cannot record agent processes; if the bridge and its guards are killed, their agents keep running");
            None
        }
    }
}
