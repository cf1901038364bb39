//! Starts, reloads and stops all parts in the right order.

mod draining;
mod served_agent;
mod store;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::draining::DrainingAgents;
use self::served_agent::ServedAgent;
use self::store::OpenStore;
use crate::a2a::{self, HttpClient, auth::AuthError};
use crate::action::actions::{Actions, CallShutdown};
use crate::agent::{Agent, AgentState, Predecessors};
use crate::background::OnPanic;
use crate::bus::agent_protocol::AgentProtocol;
use crate::bus::connect::credentials::NatsCredentials;
use crate::bus::connect::{ConnectError, FirstConnection, connect};
use crate::bus::control;
use crate::bus::event_log::{JetStreamEventStore, LogLimits, LogReplies};
use crate::bus::file_service;
use crate::bus::identity::Identity;
use crate::bus::jetstream::{Api, JetStreamAbsence};
use crate::bus::object_store::{Files, ObjectStore};
use crate::bus::outbox::Outbox;
use crate::bus::peers::{ForwardedCalls, Forwarder, NatsPeers, SessionCalls};
use crate::bus::publication::Publication;
use crate::bus::service::{ServiceContext, ServiceError, round_trip};
use crate::bus::sessions::SessionService;
use crate::bus::stoppable_task::StoppableTask;
use crate::bus::subject::{AGENT_PROTOCOL_ROOT, ReplyGuard, SubjectError, Subjects};
use crate::config::{self, AgentConfig, Config, JetStreamMode};
use crate::dispatch::call_log::CallLogSetting;
use crate::dispatch::{Dispatcher, maintenance};
use crate::events::log::{AgentLog, EventLog};
use crate::events::mapping::TypeRules;
use crate::events::sessions::service::Sessions;
use crate::files::fetch::FetchRules;
use crate::files::{FileAccess, FileRules};
use crate::memory::{self, MemoryBudget};
use crate::metrics::{self, Endpoints, Metrics};
use crate::process::child::ProcessHost;
use crate::process::orphans::ProcessRecords;
use crate::state::State;
use crate::state::peers::{PeerQueries, Peers};
use crate::state::quota::Quotas;
use crate::text::millis;

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
    #[error("cannot receive requests for files")]
    Files { source: ServiceError },
    #[error("cannot receive requests about sessions")]
    Sessions { source: ServiceError },
    #[error("cannot reach other replicas")]
    Peers(#[source] ServiceError),
    #[error("the bridge is stopping")]
    Stopping,
    #[error("cannot listen on {listen} (`metrics.listen`)")]
    Metrics { listen: std::net::SocketAddr, source: std::io::Error },
    #[error("cannot share state, and `nats.jetstream.mode` is `required`")]
    JetStream(#[source] JetStreamAbsence),
}

#[derive(Debug)]
pub struct Bridge {
    context: ServiceContext,
    subjects: Subjects,
    files: Arc<ObjectStore>,
    /// `None` before [`Bridge::serve`], and once the bridge stops.
    file_service: Mutex<Option<StoppableTask>>,
    /// `None` before [`Bridge::serve`], once the bridge stops, and without an event log.
    session_service: Mutex<Option<SessionService>>,
    peers: Arc<NatsPeers>,
    /// `None` without the setting `events`.
    log: Option<Arc<EventLog>>,
    http: HttpClient,
    state: Arc<State>,
    store: OpenStore,
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
    call_log: Arc<CallLogSetting>,
    /// Cancelled to skip the grace period of agent processes.
    skip_grace: CancellationToken,
    grace: Duration,
    credentials: Arc<NatsCredentials>,
    /// See [`restart_only_settings`].
    restart_only: Vec<RestartOnlySetting>,
}

/// The changes of a reload, reported when the new configuration is in force. Removed agents and replaced
/// processes may still be stopping.
#[derive(Debug, Default)]
pub struct ReloadSummary {
    pub added: Vec<String>,
    /// Agents with changed settings. An attached agent is served without a gap; a launched agent starts when
    /// its previous process has ended.
    pub changed: Vec<String>,
    /// Agents with changed limits, which keep their process.
    pub updated: Vec<String>,
    /// Agents that are no longer served; they stop when their calls have ended.
    pub removed: Vec<String>,
    /// Number of unchanged agents, which keep their process.
    pub kept: usize,
    /// Whether the credentials for NATS changed; the next connection uses them.
    pub nats_credentials: bool,
    /// The changed settings that take effect only after a restart of the bridge.
    pub needs_restart: Vec<&'static str>,
    /// Why agents of the new configuration are not served with it.
    pub failed: Vec<BridgeError>,
}

/// Why a reload changed nothing.
#[derive(Debug)]
pub struct ReloadError(pub Vec<BridgeError>);

/// What a reload has to do with the agents.
#[derive(Debug)]
struct Changes {
    /// All agents of the new configuration.
    names: Vec<String>,
    kept: usize,
    added: Vec<AgentConfig>,
    /// Those that keep their process.
    updated: Vec<AgentConfig>,
    changed: Vec<AgentConfig>,
    /// The current handles of `changed`.
    replaced: Vec<Agent>,
}

impl Changes {
    fn new(before: &[Agent], after: Vec<AgentConfig>) -> Self {
        let names = after.iter().map(|agent| agent.name.clone()).collect();
        let (added, updated, changed) = (Vec::new(), Vec::new(), Vec::new());
        let mut changes = Self { names, kept: 0, added, updated, changed, replaced: Vec::new() };
        for agent in after {
            let Some(old) = before.iter().find(|old| *old.name == *agent.name) else {
                changes.added.push(agent);
                continue;
            };
            if old.config.digest == agent.digest {
                changes.kept += 1;
            } else if old.config.digest.is_same_process(&agent.digest) {
                changes.updated.push(agent);
            } else {
                changes.replaced.push(old.clone());
                changes.changed.push(agent);
            }
        }
        changes
    }
}

impl Bridge {
    /// Connects to NATS; no agent is served yet. `host` runs the processes of agents. The HTTP endpoints for operators are
    /// served from the start.
    ///
    /// # Errors
    ///
    /// When the subject prefix or a reply pattern is invalid, the HTTP client cannot be built, the metrics cannot be
    /// served, a file for NATS cannot be used, the NATS server rejects the bridge, `first` does not wait and NATS cannot be reached,
    /// or JetStream is required and cannot be used.
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
        let credentials = NatsCredentials::new(&config.nats)?;
        let endpoints = serve_endpoints(config, &host).await?;
        let events = Arc::default();
        let client = connect(&config.nats, &credentials, memory.max_waiting(), first, &events).await?;
        let context = ServiceContext::new(client.clone(), Arc::new(guard), host.tasks.tracker.clone()).await;
        let context = context.with_identity(Identity::new(&config.nats.identity));
        let api = Api::new(client.clone(), Arc::clone(&events));
        let files = file_store(config, api, &subjects, &host);
        let peers = NatsPeers::start(&context, &subjects, &host.tasks).await.map_err(BridgeError::Peers)?;
        let log =
            open_log(config, Api::new(client.clone(), Arc::clone(&events)), &subjects, &peers, &host).await;
        let quotas = Quotas::new(memory_limit / 16 * 3);
        let store = OpenStore::open(&config.nats, &client, &events, &quotas, &host.tasks).await?;
        let state = Arc::new(State::new(&store.store, &quotas, &(Arc::clone(&peers) as Arc<dyn Peers>)));
        peers.set_queries(Arc::clone(&state) as Arc<dyn PeerQueries>);
        let metrics =
            Metrics::new(client, Arc::clone(&state), Arc::clone(&files), Arc::clone(&memory), log.clone());
        let metrics = Arc::new(metrics);
        endpoints.set_metrics(Arc::clone(&metrics));
        let draining = DrainingAgents::new(host.tasks.clone(), Arc::clone(&metrics), config.shutdown_grace);
        Ok(Self {
            context,
            subjects,
            files,
            file_service: Mutex::default(),
            session_service: Mutex::default(),
            peers,
            log,
            http,
            state,
            store,
            memory,
            host: ProcessHost { records: open_records(config), ..host },
            served: Mutex::new(Some(Vec::new())),
            draining,
            reload_lock: tokio::sync::Mutex::default(),
            stop_requested: CancellationToken::new(),
            metrics,
            owner: config.nats.agent_protocol.as_ref().map(|protocol| protocol.owner.clone()),
            call_shutdown: CallShutdown::default(),
            call_log: CallLogSetting::new(config.logging.calls),
            skip_grace: CancellationToken::new(),
            grace: config.shutdown_grace,
            credentials,
            restart_only: restart_only_settings(config),
        })
    }

    /// Starts to serve every agent. Agents that are not reachable yet follow later.
    ///
    /// Not cancel-safe, like [`Bridge::reload`]: to interrupt it, call [`Bridge::stop`] concurrently.
    ///
    /// # Errors
    ///
    /// When an agent cannot be served. The agents before it are served until [`Bridge::stop`].
    pub async fn serve(&self, config: Config) -> Result<(), BridgeError> {
        let _reload_lock = self.reload_lock.lock().await;
        let (state, stopping) = (Arc::clone(&self.state), self.host.tasks.stop.clone());
        self.host.tasks.spawn("sweep", OnPanic::Log, async move {
            let upkeep = async { tokio::join!(state.sweep_periodically(), state.share_long_running()) };
            stopping.run_until_cancelled(upkeep).await;
        });
        self.serve_files().await?;
        self.serve_sessions().await?;
        for agent in config.agents {
            self.add(agent).await?;
        }
        self.metrics.set_serving();
        Ok(())
    }

    async fn serve_files(&self) -> Result<(), BridgeError> {
        let (files, stopping, tasks) =
            (Arc::clone(&self.files), self.host.tasks.stop.clone(), &self.host.tasks);
        tasks.spawn("file store", OnPanic::Log, async move {
            stopping.run_until_cancelled(files.run()).await;
        });
        let memory = self.memory.account("");
        let outbox = Outbox::new(self.context.client.clone(), &memory, self.context.confirmations.clone());
        let service =
            file_service::start(Arc::clone(&self.files), &self.context, outbox, memory, tasks).await;
        let service = service.map_err(|source| BridgeError::Files { source })?;
        *self.file_service.lock().unwrap_or_else(PoisonError::into_inner) = Some(service);
        Ok(())
    }

    async fn serve_sessions(&self) -> Result<(), BridgeError> {
        let Some(log) = &self.log else { return Ok(()) };
        let calls = Arc::new(SessionCalls::new(&self.peers));
        let sessions = Arc::new(Sessions::new(Arc::clone(log), calls));
        let memory = self.memory.account("");
        let outbox = Outbox::new(self.context.client.clone(), &memory, self.context.confirmations.clone());
        let service =
            SessionService::start(sessions, &self.context, &self.subjects, outbox, &self.host.tasks).await;
        let service = service.map_err(|source| BridgeError::Sessions { source })?;
        *self.session_service.lock().unwrap_or_else(PoisonError::into_inner) = Some(service);
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

    /// Serves an agent with new settings that leave its process as it is. NATS shows the new instance before the old one
    /// is withdrawn, and calls in flight keep the settings with which they began.
    async fn update(&self, config: AgentConfig) -> Result<(), BridgeError> {
        let old = self.agents().into_iter().find(|old| *old.name == *config.name);
        let Some(old) = old else { return self.add(config).await };
        let agent = old.reconfigure(config);
        let new = tokio::select! {
            biased;
            () = self.stop_requested.cancelled() => return Err(BridgeError::Stopping),
            new = self.open_front_doors(agent) => new?,
        };
        let published = tokio::time::timeout(HANDOVER_TIMEOUT, new.wait_until_first_published());
        let _ = self.stop_requested.run_until_cancelled(published).await;
        self.insert(new, Some(&old))
    }

    /// Adds an agent to those that are served, in place of `old` if there is one.
    fn insert(&self, mut new: ServedAgent, old: Option<&Agent>) -> Result<(), BridgeError> {
        let (agent, announcer) = (new.agent.clone(), new.publication.announcer());
        let ending = new.call_shutdown.begun.clone();
        let mut served = self.served();
        let Some(agents) = &mut *served else {
            drop(served);
            self.draining.drain(new, None);
            return Err(BridgeError::Stopping);
        };
        let position = agents.iter_mut().find(|served| old.is_some_and(|old| served.agent.is(old)));
        let replaced = match position {
            Some(position) => {
                if position.agent.is(&new.agent) {
                    let earlier = position.earlier_calls.iter().filter(|calls| !calls.is_empty()).cloned();
                    new.earlier_calls = earlier.chain([position.calls.clone()]).collect();
                }
                Some(std::mem::replace(position, new))
            }
            None => {
                agents.push(new);
                None
            }
        };
        drop(served);
        self.metrics.add(agent.clone());
        match replaced {
            Some(replaced) if replaced.agent.is(&agent) => {
                self.draining.drain_calls(replaced, announcer, ending);
            }
            Some(replaced) => self.draining.drain(replaced, Some(announcer)),
            None => {}
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
        let files = FileAccess {
            store: Arc::new(Files(Arc::clone(&self.files))),
            rules: Arc::clone(self.files.rules()),
        };
        let call_log = Arc::clone(&self.call_log);
        let dispatcher = Dispatcher::new(agent.clone(), actions, calls.clone(), call_log);
        let (context, subjects, tasks) = (&self.context, &self.subjects, &self.host.tasks);
        let outbox = Outbox::new(context.client.clone(), &agent.memory, context.confirmations.clone());
        if let Some(log) = &self.log {
            log.set_secrets(&agent.name, agent.secrets.clone());
        }
        let log = self.log.as_ref().map(|log| AgentLog {
            log: Arc::clone(log),
            agent: Arc::clone(&agent.name),
            rules: Arc::new(TypeRules::new(&agent.config.events.types)),
            secrets: agent.secrets.clone(),
            replies: Arc::new(LogReplies(outbox.clone())),
            memory: Arc::clone(&agent.memory),
        });
        let dispatcher = Arc::new(dispatcher.with_files(files).with_log(log));
        let publish_error = |source| BridgeError::Publish { agent: name(), source };
        let forwarded = ForwardedCalls::new(&dispatcher, &outbox, subjects);
        let peer_service = self.peers.serve(&agent.name, Some(forwarded)).await.map_err(publish_error)?;
        let is_launched = agent.config.command.is_some();
        let forwarder = Forwarder::new(&self.peers, &outbox, &agent.memory, is_launched, &call_shutdown);
        let publication = Publication::start(
            Arc::clone(&dispatcher),
            updates,
            context,
            &outbox,
            subjects,
            forwarder,
            tasks,
        );
        let publication = publication.await.map_err(publish_error)?;
        let (maintained, deaths) = (Arc::downgrade(&dispatcher), self.peers.deaths());
        let stopping = tasks.stop.clone();
        tasks.spawn("maintenance", OnPanic::Log, async move {
            stopping.run_until_cancelled(maintenance::run(maintained, deaths)).await;
        });
        let control = control::start(
            commands,
            agent.clone(),
            Arc::clone(&self.state),
            publication.instance(),
            context,
            tasks,
        );
        let agent_protocol = self.owner.as_ref().map(|owner| {
            AgentProtocol::start(owner, dispatcher, context, &outbox, subjects, &call_shutdown, tasks)
        });
        Ok(ServedAgent {
            agent,
            publication,
            peer_service,
            control,
            agent_protocol,
            calls,
            earlier_calls: Vec::new(),
            call_shutdown,
        })
    }

    /// Applies a new configuration. Unchanged agents keep their process and their calls.
    ///
    /// It does not wait for calls: removed and replaced agents finish them in the background, and
    /// [`Bridge::stop`] waits for that. It waits for changed attached agents only, for at most three seconds,
    /// while the other agents are served already.
    ///
    /// # Errors
    ///
    /// When the credentials of an agent or of NATS cannot be used, or the bridge stops: nothing has changed. An agent that
    /// cannot be served is in [`ReloadSummary::failed`]; the new configuration applies to the others.
    pub async fn reload(&self, config: Config) -> Result<ReloadSummary, ReloadError> {
        let _reload_lock = self.reload_lock.lock().await;
        let needs_restart = changed_settings(&self.restart_only, &restart_only_settings(&config));
        let mut changes = Changes::new(&self.agents(), config.agents);
        // Invalid credentials must be an error before anything changes.
        let invalid = changes.changed.iter().chain(&changes.added).filter_map(|agent| {
            let secrets = agent.secrets();
            let chooser = a2a::chooser(agent, &self.http, &secrets, self.memory.account(&agent.name));
            Some(BridgeError::Auth { agent: agent.name.clone(), source: chooser.err()? })
        });
        let invalid: Vec<_> = invalid.collect();
        if !invalid.is_empty() {
            return Err(ReloadError(invalid));
        }
        let replaced = self.credentials.replace(&config.nats);
        let nats_credentials = replaced.map_err(|error| ReloadError(vec![error.into()]))?;
        let is_removed =
            |served: &mut ServedAgent| !changes.names.iter().any(|name| *served.agent.name == **name);
        let removed: Vec<ServedAgent> = match &mut *self.served() {
            Some(served) => served.extract_if(.., is_removed).collect(),
            None => return Err(ReloadError(vec![BridgeError::Stopping])),
        };
        let mut summary = ReloadSummary {
            removed: removed.iter().map(|served| served.agent.name.to_string()).collect(),
            kept: changes.kept,
            nats_credentials,
            needs_restart,
            ..ReloadSummary::default()
        };
        self.call_log.set(config.logging.calls);
        for served in removed {
            self.draining.drain(served, None);
        }
        self.draining.mark_replacing(std::mem::take(&mut changes.replaced));
        let mut record = |names: fn(&mut ReloadSummary) -> &mut Vec<String>, name, result| match result {
            Ok(()) => names(&mut summary).push(name),
            Err(error) => summary.failed.push(error),
        };
        for agent in changes.added {
            let name = agent.name.clone();
            record(|summary| &mut summary.added, name, Box::pin(self.add(agent)).await);
        }
        let updated =
            changes.updated.into_iter().map(|agent| async { (agent.name.clone(), self.update(agent).await) });
        for (name, result) in join_all(updated).await {
            record(|summary| &mut summary.updated, name, result);
        }
        let changed = changes
            .changed
            .into_iter()
            .map(|agent| async { (agent.name.clone(), self.replace(agent).await) });
        for (name, result) in join_all(changed).await {
            record(|summary| &mut summary.changed, name, result);
        }
        // An agent that could not be replaced is still served.
        for agent in self.agents() {
            self.draining.unmark(&agent);
        }
        Ok(summary)
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

        let file_service = self.file_service.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(file_service) = file_service {
            file_service.stop().await;
        }
        let session_service = self.session_service.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(session_service) = session_service {
            session_service.stop().await;
        }
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
        // Other replicas take over from here, so all state must be written. Agents may take long to stop.
        log_step("state written", self.store.flush()).await;
        self.peers.leave().await;
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

/// The store for files, which looks for JetStream later.
fn file_store(config: &Config, api: Api, subjects: &Subjects, host: &ProcessHost) -> Arc<ObjectStore> {
    let config::FilesConfig {
        max_size,
        max_request,
        max_per_caller,
        max_total,
        ttl,
        allowed_buckets,
        fetch_hosts,
    } = &config.files;
    let own = ObjectStore::bucket_name(subjects.prefix());
    let rules = FileRules {
        max_size: *max_size,
        max_request: *max_request,
        max_per_caller: *max_per_caller,
        max_total: *max_total,
        ttl: *ttl,
        allowed_buckets: allowed_buckets.iter().cloned().chain([own]).collect(),
        fetch: FetchRules::new(fetch_hosts.clone()),
    };
    let config::JetStreamConfig { mode, replicas } = &config.nats.jetstream;
    let replicas = (*mode != JetStreamMode::Off).then_some(*replicas);
    ObjectStore::new(api, subjects.clone(), Arc::new(rules), replicas, host.tasks.clone())
}

/// The event log, if the configuration has one. It looks for JetStream until it finds it.
async fn open_log(
    config: &Config,
    api: Api,
    subjects: &Subjects,
    peers: &NatsPeers,
    host: &ProcessHost,
) -> Option<Arc<EventLog>> {
    let config::EventsConfig { record, required, max_age, max_bytes, history } = config.events.as_ref()?;
    let replicas = config.nats.jetstream.replicas;
    let limits = LogLimits { max_age: *max_age, max_bytes: *max_bytes, replicas };
    let store = Arc::new(JetStreamEventStore::new(api, subjects.clone(), limits));
    if let Err(reason) = store.open().await {
        tracing::warn!(%reason, "the event log is not available; calls are not logged until it is");
    }
    let (watched, stop) = (Arc::clone(&store), host.tasks.stop.clone());
    host.tasks.spawn("event log", OnPanic::Log, async move {
        stop.run_until_cancelled(watched.watch()).await;
    });
    let (instance, tasks) = (peers.instance(), host.tasks.clone());
    let log = EventLog::new(store, *record, *required, instance, tasks, history.clone());
    Some(Arc::new(log))
}

/// Starts the HTTP endpoints for operators, if there are to be any.
async fn serve_endpoints(config: &Config, host: &ProcessHost) -> Result<Arc<Endpoints>, BridgeError> {
    let endpoints = Arc::new(Endpoints::default());
    if let Some(config::MetricsConfig { listen }) = config.metrics {
        let server = metrics::serve(listen, Arc::clone(&endpoints), host.tasks.stop.clone())
            .await
            .map_err(|source| BridgeError::Metrics { listen, source })?;
        host.tasks.spawn("metrics", OnPanic::Log, server);
    }
    Ok(endpoints)
}

/// Logs the end of one step of the stop, with its duration.
async fn log_step<T>(name: &'static str, step: impl Future<Output = T>) {
    let began = Instant::now();
    step.await;
    tracing::info!(took_ms = millis(began.elapsed()), "{name}");
}

/// A setting that takes effect only after a restart of the bridge, and a hash of its value, which may hold a password.
type RestartOnlySetting = (&'static str, [u8; 32]);

fn restart_only_settings(config: &Config) -> Vec<RestartOnlySetting> {
    let Config { nats, metrics, shutdown_grace, limits, files, events, .. } = config;
    // Without the credentials in them, which a reload replaces.
    let urls: Vec<String> =
        nats.url.iter().map(|url| config::without_user_info(url).replace("***@", "")).collect();
    let settings = [
        ("nats.url", format!("{urls:?}")),
        ("nats.tls", format!("{:?}", nats.tls)),
        ("nats.subject_prefix", format!("{:?}", nats.subject_prefix)),
        ("nats.reply_prefixes", format!("{:?}", nats.reply_prefixes)),
        ("nats.inbox_prefix", format!("{:?}", nats.inbox_prefix)),
        ("nats.identity", format!("{:?}", nats.identity)),
        ("nats.agent_protocol", format!("{:?}", nats.agent_protocol)),
        ("nats.jetstream", format!("{:?}", nats.jetstream)),
        ("metrics", format!("{metrics:?}")),
        ("shutdown_grace", format!("{shutdown_grace:?}")),
        ("limits", format!("{limits:?}")),
        ("files", format!("{files:?}")),
        ("events", format!("{events:?}")),
    ];
    settings.into_iter().map(|(name, value)| (name, Sha256::digest(value).into())).collect()
}

fn changed_settings(before: &[RestartOnlySetting], after: &[RestartOnlySetting]) -> Vec<&'static str> {
    let pairs = before.iter().zip(after);
    pairs.filter(|(before, after)| before != after).map(|(_, (name, _))| *name).collect()
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
