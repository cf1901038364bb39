//! Puts the parts together: the order in which they start, change and end.

mod draining;
mod served_agent;

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
use crate::action::actions::{Actions, Limits, Stop};
use crate::action::assemble::ArtifactRules;
use crate::agent::{Agent, AgentState, Predecessors};
use crate::bus::agent_protocol::AgentProtocol;
use crate::bus::connect::{ConnectError, connect};
use crate::bus::control::{Control, ControlError};
use crate::bus::publication::Publication;
use crate::bus::service::{ServiceContext, ServiceError, round_trip};
use crate::bus::subject::{AGENT_PROTOCOL_ROOT, ReplyGuard, SubjectError, Subjects};
use crate::config::{self, Config};
use crate::dispatch::Dispatcher;
use crate::metrics::{self, Metrics};
use crate::process::child::Host;
use crate::process::orphans::Records;
use crate::state::memory::MemoryStore;
use crate::state::{State, StateStore};
use crate::tasks::{OnFailure, Tasks};

/// Changes of submitted tasks that wait to be published, for one agent.
const UPDATES: usize = 256;

/// How long a reload waits for a changed attached agent to be found, before the new settings replace the
/// old ones all the same.
const HANDOVER: Duration = Duration::from_secs(3);
/// How long the last tasks may take to end.
const LAST_TASKS: Duration = Duration::from_secs(2);

/// Why the bridge did not start.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// A subject or pattern that NATS does not take.
    #[error("the names in `nats` cannot be used")]
    Subject(#[from] SubjectError),
    /// The HTTP client could not be made.
    #[error("cannot set up HTTP")]
    Http(#[from] reqwest::Error),
    /// An agent's credentials cannot be sent.
    #[error("agent `{agent}`")]
    Auth {
        agent: String,
        #[source]
        source: AuthError,
    },
    /// An agent could not be put on the context.
    #[error("cannot publish agent `{agent}`")]
    Publish {
        agent: String,
        #[source]
        source: ServiceError,
    },
    /// An agent could not be put under control from the context.
    #[error("cannot listen for orders to agent `{agent}`")]
    Control {
        agent: String,
        #[source]
        source: ControlError,
    },
    /// It was told to stop before it was up.
    #[error("the bridge is stopping")]
    Stopping,
    /// The port for metrics cannot be had.
    #[error("cannot listen on {listen} (`metrics.listen`)")]
    Metrics {
        listen: std::net::SocketAddr,
        #[source]
        source: std::io::Error,
    },
}

#[derive(Debug)]
pub struct Bridge {
    context: ServiceContext,
    subjects: Subjects,
    http: HttpClient,
    state: Arc<State>,
    host: Host,
    tasks: Tasks,
    /// `None` once the bridge stops. Whoever takes one out sees it to its end.
    served: Mutex<Option<Vec<ServedAgent>>>,
    /// Those that a reload has replaced or removed.
    draining: DrainingAgents,
    /// One change of what is served at a time; the stop waits for it.
    change: tokio::sync::Mutex<RestartOnly>,
    /// The bridge stops: whoever waits for a place on the mesh waits no longer.
    closing: CancellationToken,
    metrics: Arc<Metrics>,
    // Whose agents they are, for clients of the agent protocol.
    owner: Option<String>,
    // The end of the grace time, for calls and for processes.
    stop: Stop,
    hurry_agents: CancellationToken,
    grace: Duration,
}

/// The settings that hold until the bridge is restarted.
#[derive(Debug)]
struct RestartOnly(String);

impl RestartOnly {
    fn of(config: &Config) -> Self {
        // Secrets are not in it: a changed password is noticed at the next connection.
        Self(format!("{:?} {:?} {:?}", config.nats, config.metrics, config.shutdown_grace))
    }
}

/// What a reload changes. It is reported when the new settings are in force; agents that leave, and
/// processes that are replaced, may still be ending.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReloadSummary {
    pub added: Vec<String>,
    /// Agents that have other settings than before. An attached one is served without a gap; a launched
    /// one starts when its previous process has ended.
    pub changed: Vec<String>,
    /// Agents that leave: they are taken off the context, and end when their calls have.
    pub removed: Vec<String>,
    /// Agents that keep their process.
    pub kept: usize,
    /// Whether something changed that needs a restart of the bridge.
    pub needs_restart: bool,
}

impl Bridge {
    /// Connects; nothing is served yet.
    ///
    /// # Errors
    ///
    /// NATS is not there, or the names in the settings are none of its.
    pub async fn connect(config: &Config) -> Result<Self, BridgeError> {
        let subjects = Subjects::new(&config.nats.subject_prefix)?;
        let mut guard = ReplyGuard::new(&config.nats.reply_prefixes, subjects.prefix())?;
        if config.nats.agent_protocol.is_some() {
            guard = guard.and_not_below(AGENT_PROTOCOL_ROOT);
        }
        let http = a2a::http_client()?;
        let client = connect(&config.nats).await?;
        let tasks = Tasks::default();
        let context =
            ServiceContext { client: client.clone(), guard: Arc::new(guard), tasks: tasks.tracker().clone() };
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::default());
        let state = Arc::new(State::new(&store));
        let metrics = Arc::new(Metrics::new(client, Arc::clone(&state)));
        let draining = DrainingAgents::new(tasks.clone(), Arc::clone(&metrics), config.shutdown_grace);
        Ok(Self {
            context,
            subjects,
            http,
            state,
            host: Host { tasks: tasks.clone(), records: records(config) },
            tasks,
            served: Mutex::new(Some(Vec::new())),
            draining,
            change: tokio::sync::Mutex::new(RestartOnly::of(config)),
            closing: CancellationToken::new(),
            metrics,
            owner: config.nats.agent_protocol.as_ref().map(|protocol| protocol.owner.clone()),
            stop: Stop::default(),
            hurry_agents: CancellationToken::new(),
            grace: config.shutdown_grace,
        })
    }

    /// Begins to serve every agent. Agents that are not there come later.
    ///
    /// Not cancel-safe, like [`Bridge::reload`]: whoever changes their mind calls [`Bridge::stop`] beside it.
    ///
    /// # Errors
    ///
    /// Something cannot be served; what can be is, until [`Bridge::stop`].
    pub async fn serve(&self, config: Config) -> Result<(), BridgeError> {
        let _change = self.change.lock().await;
        let (state, stopping) = (Arc::clone(&self.state), self.tasks.stopping().clone());
        self.tasks.spawn("sweep", OnFailure::Log, async move {
            stopping.run_until_cancelled(state.keep_swept()).await;
        });
        if let Some(config::MetricsConfig { listen }) = config.metrics {
            let server = metrics::serve(listen, Arc::clone(&self.metrics), self.tasks.stopping().clone())
                .await
                .map_err(|source| BridgeError::Metrics { listen, source })?;
            self.tasks.spawn("metrics", OnFailure::Log, server);
        }
        for agent in config.agents {
            self.add(agent).await?;
        }
        self.metrics.begun();
        Ok(())
    }

    async fn add(&self, config: config::AgentConfig) -> Result<(), BridgeError> {
        let before = self.draining.before(&config);
        let (agent, limits) = self.start(config, before)?;
        let new = self.serve_or_stop(&agent, limits).await?;
        let late = match &mut *self.served() {
            Some(served) => {
                served.push(new);
                None
            }
            None => Some(new),
        };
        if let Some(late) = late {
            self.draining.start(late, None);
            return Err(BridgeError::Stopping);
        }
        self.metrics.add(agent);
        Ok(())
    }

    /// Serves an agent with other settings than before.
    ///
    /// The old process has to end before the new one starts, as they may share a port. Attached agents
    /// have no process, so the new one is on the mesh before the old one leaves it.
    async fn replace(&self, config: config::AgentConfig) -> Result<(), BridgeError> {
        let old = self.agents().into_iter().find(|old| *old.name == *config.name);
        let Some(old) = old else { return self.add(config).await };
        let mut before = self.draining.before(&config);
        before.calls = Arc::clone(&old.calls);
        let is_attached = old.config.command.is_none() && config.command.is_none();
        let (agent, limits) = self.start(config, before)?;
        let limit = Instant::now() + HANDOVER;
        if is_attached {
            let mut status = agent.status.clone();
            let settled = status.wait_for(|status| status.state != AgentState::Starting);
            let _ = self.closing.run_until_cancelled(tokio::time::timeout_at(limit, settled)).await;
        }
        let new = self.serve_or_stop(&agent, limits).await?;
        if is_attached {
            let _ = self.closing.run_until_cancelled(tokio::time::timeout_at(limit, new.shown())).await;
        }
        let successor = new.publication.announcer();
        let replaced = match &mut *self.served() {
            Some(served) => match served.iter_mut().find(|served| served.agent.is(&old)) {
                Some(place) => Ok(std::mem::replace(place, new)),
                // Only a change removes agents, and there is one change at a time.
                None => Err(new),
            },
            None => Err(new),
        };
        match replaced {
            Ok(old) => {
                self.metrics.add(agent);
                self.draining.start(old, Some(successor));
                Ok(())
            }
            Err(late) => {
                self.draining.start(late, None);
                Err(BridgeError::Stopping)
            }
        }
    }

    fn start(
        &self,
        config: config::AgentConfig,
        before: Predecessors,
    ) -> Result<(Agent, Limits), BridgeError> {
        if self.served().is_none() {
            return Err(BridgeError::Stopping);
        }
        let limits = Limits {
            request_timeout: config.request_timeout,
            stream_idle_timeout: config.stream_idle_timeout,
            task_timeout: config.task_timeout,
            task_ttl: config.task_ttl,
            max_response_size: config.max_response_size,
            prefer_stream: config.prefer_stream,
            input_required_ttl: config.input_required_ttl,
            artifacts: ArtifactRules {
                answer: config.answer_artifacts.clone(),
                notice: config.notice_artifacts.clone(),
            },
        };
        let hurry = self.hurry_agents.clone();
        let name = config.name.clone();
        let agent = Agent::start(config, &self.http, &self.host, hurry, before);
        let agent = agent.map_err(|source| BridgeError::Auth { agent: name, source })?;
        Ok((agent, limits))
    }

    /// Gives an agent its places on the context, or ends it.
    async fn serve_or_stop(&self, agent: &Agent, limits: Limits) -> Result<ServedAgent, BridgeError> {
        let placed = tokio::select! {
            biased;
            () = self.closing.cancelled() => Err(BridgeError::Stopping),
            placed = self.open_front_doors(agent.clone(), limits) => placed,
        };
        if placed.is_err() {
            agent.stop().await;
        }
        placed
    }

    /// Gives an agent its places on the context. Cancel-safe: nothing is waited for once there is something
    /// that would have to be taken back.
    async fn open_front_doors(&self, agent: Agent, limits: Limits) -> Result<ServedAgent, BridgeError> {
        let name = || agent.name.to_string();
        let requests = Control::listen(&agent, &self.context, &self.subjects).await;
        let requests = requests.map_err(|source| BridgeError::Control { agent: name(), source })?;
        let (updates, published_updates) = mpsc::channel(UPDATES);
        let stop = self.stop.of_one();
        let actions = Actions::new(
            Arc::clone(&agent.name),
            limits,
            agent.live.clone(),
            Arc::clone(&self.state),
            updates,
            stop.clone(),
            agent.secrets.clone(),
        );
        let calls = TaskTracker::new();
        let dispatcher = Arc::new(Dispatcher::new(agent.clone(), actions, calls.clone()));
        let published = Publication::start(
            Arc::clone(&dispatcher),
            published_updates,
            &self.context,
            &self.subjects,
            &self.tasks,
        )
        .await;
        let publication = published.map_err(|source| BridgeError::Publish { agent: name(), source })?;
        let control =
            Control::start(requests, agent.clone(), publication.instance(), &self.context, &self.tasks);
        let agent_protocol = self.owner.as_ref().map(|owner| {
            AgentProtocol::start(owner, dispatcher, &self.context, &self.subjects, &stop, &self.tasks)
        });
        Ok(ServedAgent { agent, publication, control, agent_protocol, calls, stop })
    }

    /// Takes over other settings. Agents that are the same in both keep their process and their calls.
    ///
    /// Nobody waits for calls: agents that are removed or replaced finish them in the background, and
    /// [`Bridge::stop`] waits for that. Only an attached agent whose settings have changed is waited for,
    /// for three seconds at the most, and then the others are served already.
    ///
    /// # Errors
    ///
    /// An agent of the new settings cannot be served; the others are, as the new settings say.
    pub async fn reload(&self, config: Config) -> Result<ReloadSummary, BridgeError> {
        let fixed = self.change.lock().await;
        let mut done = ReloadSummary {
            needs_restart: fixed.0 != RestartOnly::of(&config).0,
            ..ReloadSummary::default()
        };
        let before = self.agents();
        let names: Vec<String> = config.agents.iter().map(|agent| agent.name.clone()).collect();
        let (same, new): (Vec<_>, Vec<_>) = config.agents.into_iter().partition(|agent| {
            let is_same = |old: &Agent| *old.name == *agent.name && old.config.digest == agent.digest;
            before.iter().any(is_same)
        });
        // What cannot be served is found out before anything is changed.
        for agent in &new {
            a2a::chooser(agent, &self.http, &agent.secrets())
                .map_err(|source| BridgeError::Auth { agent: agent.name.clone(), source })?;
        }
        let (changed, added): (Vec<_>, Vec<_>) =
            new.into_iter().partition(|agent| before.iter().any(|old| *old.name == *agent.name));
        done.kept = same.len();
        done.added = added.iter().map(|agent| agent.name.clone()).collect();
        done.changed = changed.iter().map(|agent| agent.name.clone()).collect();
        let is_removed = |served: &ServedAgent| !names.iter().any(|name| *served.agent.name == **name);
        let removed: Vec<ServedAgent> = match &mut *self.served() {
            Some(served) => served.extract_if(.., |served| is_removed(served)).collect(),
            None => return Err(BridgeError::Stopping),
        };
        done.removed = removed.iter().map(|served| served.agent.name.to_string()).collect();
        for served in removed {
            self.draining.start(served, None);
        }
        let mut failed = None;
        let is_changed = |old: &Agent| changed.iter().any(|agent| *old.name == *agent.name);
        let replaced: Vec<Agent> = before.iter().filter(|old| is_changed(old)).cloned().collect();
        self.draining.expect(replaced);
        for agent in added {
            failed = self.add(agent).await.err().or(failed);
        }
        for error in join_all(changed.into_iter().map(|agent| self.replace(agent))).await {
            failed = error.err().or(failed);
        }
        // What could not be replaced stays.
        for agent in self.agents() {
            self.draining.keep(&agent);
        }
        match failed {
            None => Ok(done),
            Some(error) => Err(error),
        }
    }

    /// Takes all agents off the context, lets calls finish, cancels the rest, ends the agents, closes NATS.
    ///
    /// A reload under way ends beside it: agents that leave have their grace period, and no new one is
    /// served.
    pub async fn stop(&self) {
        self.metrics.ends();
        self.closing.cancel();
        let served = self.served().take().unwrap_or_default();
        let draining = async {
            let change = self.change.lock().await;
            self.draining.finished().await;
            drop(change);
        };
        tokio::join!(draining, self.end(&served));

        let step = Step::begin("NATS closed");
        for served in &served {
            served.control.stop().await;
        }
        // The connection may only be closed once the last replies have arrived.
        if let Err(error) = round_trip(&self.context.client).await {
            tracing::warn!(%error, "the last replies may not have reached NATS");
        }
        // Without a connection its queue may be full, and nobody empties it.
        let _ = tokio::time::timeout(LAST_TASKS, self.context.client.drain()).await;
        self.tasks.stopping().cancel();
        let _ = tokio::time::timeout(LAST_TASKS, self.tasks.finished()).await;
        step.end();
    }

    /// Ends agents and the calls to them.
    async fn end(&self, served: &[ServedAgent]) {
        let step = Step::begin("actions taken off the mesh");
        join_all(served.iter().map(ServedAgent::withdraw)).await;
        step.end();

        let step = Step::begin("calls finished");
        join_all(served.iter().map(|served| served.finish_calls(self.grace))).await;
        step.end();

        let step = Step::begin("agents ended");
        join_all(served.iter().map(|served| served.agent.stop())).await;
        step.end();
    }

    /// Skips every grace period of a [`Bridge::stop`] under way.
    pub fn skip_grace_periods(&self) {
        self.stop.hurry.cancel();
        self.hurry_agents.cancel();
    }

    /// The agents that are served.
    pub fn agents(&self) -> Vec<Agent> {
        self.served().iter().flatten().map(|served| served.agent.clone()).collect()
    }

    fn served(&self) -> std::sync::MutexGuard<'_, Option<Vec<ServedAgent>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves when a task that the bridge cannot do without has failed.
    pub async fn failed(&self) {
        self.tasks.stopping().cancelled().await;
    }

    /// Whether it failed by a defect.
    pub fn has_panicked(&self) -> bool {
        self.tasks.has_defect()
    }
}

/// One step of the stop, with its duration in the log.
struct Step(&'static str, Instant);

impl Step {
    fn begin(name: &'static str) -> Self {
        Self(name, Instant::now())
    }

    fn end(self) {
        tracing::info!(took = ?self.1.elapsed(), "{}", self.0);
    }
}

/// Ends what an earlier bridge of the same settings file has left behind, before anything new starts.
fn records(config: &Config) -> Option<Arc<Records>> {
    let file = config.file.as_deref()?;
    match Records::open(file) {
        Ok(records) => {
            let left = records.kill_orphans();
            if !left.is_empty() {
                tracing::warn!(processes = left.join(", "), "ended what an earlier bridge has left behind");
            }
            Some(Arc::new(records))
        }
        Err(error) => {
            tracing::warn!(%error, "agents of a bridge that is killed together with their guards will not be found again");
            None
        }
    }
}
