//! Puts the parts together: the order in which they start, and in `stop` the order in which they end.

mod stop;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::a2a::{self, auth::AuthError};
use crate::action::assemble::ArtifactRules;
use crate::action::run::{Actions, Limits, Memory, Stop};
use crate::agent::{Agent, Predecessors};
use crate::bus::connect::{ConnectError, connect};
use crate::bus::control::{Control, ControlError};
use crate::bus::desk::Desk;
use crate::bus::face::Face;
use crate::bus::publication::Publication;
use crate::bus::service::{Mesh, ServiceError};
use crate::bus::subject::{AGENT_PROTOCOL_ROOT, ReplyGuard, SubjectError, Subjects};
use crate::config::{self, Config};
use crate::metrics::{self, Metrics};
use crate::process::child::Host;
use crate::process::leftovers::Records;
use crate::tasks::{OnFailure, Tasks};

/// Changes of submitted tasks that wait to be published, for one agent.
const NEWS: usize = 256;

/// Why the bridge did not start.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// No connection to NATS.
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
        /// Which agent.
        agent: String,
        /// What is wrong.
        #[source]
        source: AuthError,
    },
    /// An agent could not be put on the mesh.
    #[error("cannot publish agent `{agent}`")]
    Publish {
        /// Which agent.
        agent: String,
        /// What is wrong.
        #[source]
        source: ServiceError,
    },
    /// An agent could not be put under control from the mesh.
    #[error("cannot listen for orders to agent `{agent}`")]
    Control {
        /// Which agent.
        agent: String,
        /// What is wrong.
        #[source]
        source: ControlError,
    },
    /// It was told to stop before it was up.
    #[error("the bridge is stopping")]
    Stopping,
    /// The port for metrics cannot be had.
    #[error("cannot listen on {listen} (`metrics.listen`)")]
    Metrics {
        /// Where.
        listen: std::net::SocketAddr,
        /// What is wrong.
        #[source]
        source: std::io::Error,
    },
}

/// A running bridge.
#[derive(Debug)]
pub struct Bridge {
    mesh: Mesh,
    subjects: Subjects,
    http: reqwest::Client,
    memory: Arc<Memory>,
    host: Host,
    tasks: Tasks,
    /// `None` once the bridge stops. Whoever takes one out sees it to its end.
    served: Mutex<Option<Vec<Served>>>,
    /// One change of what is served at a time; the stop waits for it.
    change: tokio::sync::Mutex<Fixed>,
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

/// One agent and its places on the mesh.
#[derive(Debug)]
struct Served {
    agent: Agent,
    publication: Publication,
    control: Control,
    /// For clients of the agent protocol.
    face: Option<Face>,
    calls: TaskTracker,
    stop: Stop,
}

/// The settings that hold until the bridge is started anew.
#[derive(Debug)]
struct Fixed(String);

impl Fixed {
    fn of(config: &Config) -> Self {
        // Secrets are not in it: a changed password is noticed at the next connection.
        Self(format!("{:?} {:?} {:?}", config.nats, config.metrics, config.shutdown_grace))
    }
}

/// What a reload has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reloaded {
    /// Agents that are new.
    pub added: Vec<String>,
    /// Agents that were started anew with other settings.
    pub changed: Vec<String>,
    /// Agents that are gone.
    pub removed: Vec<String>,
    /// Agents that kept their process.
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
        let mesh = Mesh { client: client.clone(), guard: Arc::new(guard), tasks: tasks.tracker().clone() };
        let memory = Arc::new(Memory::default());
        let metrics = Arc::new(Metrics::new(client, Arc::clone(&memory)));
        Ok(Self {
            mesh,
            subjects,
            http,
            memory,
            host: Host { tasks: tasks.clone(), records: records(config) },
            tasks,
            served: Mutex::new(Some(Vec::new())),
            change: tokio::sync::Mutex::new(Fixed::of(config)),
            closing: CancellationToken::new(),
            metrics,
            owner: config.nats.agent_protocol.as_ref().map(|face| face.owner.clone()),
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
        if let Some(config::Metrics { listen }) = config.metrics {
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

    async fn add(&self, config: config::Agent) -> Result<(), BridgeError> {
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
        let agent = Agent::start(config, &self.http, &self.host, hurry, Predecessors::default())
            .map_err(|source| BridgeError::Auth { agent: name, source })?;
        let placed = tokio::select! {
            biased;
            () = self.closing.cancelled() => Err(BridgeError::Stopping),
            placed = self.place(agent.clone(), limits) => placed,
        };
        let served = match placed {
            Ok(served) => served,
            Err(error) => {
                agent.stop().await;
                return Err(error);
            }
        };
        self.metrics.add(agent);
        match self.admit(served) {
            Ok(()) => Ok(()),
            Err(late) => {
                self.leave(&late).await;
                Err(BridgeError::Stopping)
            }
        }
    }

    /// One more that is served; given back if the bridge stops.
    fn admit(&self, new: Served) -> Result<(), Box<Served>> {
        match &mut *self.served() {
            Some(served) => {
                served.push(new);
                Ok(())
            }
            None => Err(Box::new(new)),
        }
    }

    /// Gives an agent its places on the mesh. Cancel-safe: nothing is waited for once there is something
    /// that would have to be taken back.
    async fn place(&self, agent: Agent, limits: Limits) -> Result<Served, BridgeError> {
        let name = || agent.name.to_string();
        let requests = Control::listen(&agent, &self.mesh, &self.subjects).await;
        let requests = requests.map_err(|source| BridgeError::Control { agent: name(), source })?;
        let (news, changes) = mpsc::channel(NEWS);
        let stop = self.stop.of_one();
        let actions = Actions::new(
            Arc::clone(&agent.name),
            limits,
            agent.live.clone(),
            Arc::clone(&self.memory),
            news,
            &stop,
        );
        let calls = TaskTracker::new();
        let desk = Arc::new(Desk::new(agent.clone(), actions, self.mesh.client.clone(), calls.clone()));
        let published =
            Publication::start(Arc::clone(&desk), changes, &self.mesh, &self.subjects, &self.tasks).await;
        let publication = published.map_err(|source| BridgeError::Publish { agent: name(), source })?;
        let control =
            Control::start(requests, agent.clone(), publication.instance(), &self.mesh, &self.tasks);
        let face = self.owner.as_ref();
        let face = face.map(|owner| Face::start(owner, desk, &self.mesh, &self.subjects, &stop, &self.tasks));
        Ok(Served { agent, publication, control, face, calls, stop })
    }

    /// Takes over other settings. Agents that are the same in both keep their process and their calls.
    ///
    /// # Errors
    ///
    /// An agent of the new settings cannot be served; the others are, as the new settings say.
    pub async fn reload(&self, config: Config) -> Result<Reloaded, BridgeError> {
        let fixed = self.change.lock().await;
        let mut done = Reloaded { needs_restart: fixed.0 != Fixed::of(&config).0, ..Reloaded::default() };
        let before = self.agents();
        let (same, new): (Vec<_>, Vec<_>) = config.agents.into_iter().partition(|agent| {
            let is_same = |old: &Agent| *old.name == *agent.name && old.config.digest == agent.digest;
            before.iter().any(is_same)
        });
        // What cannot be served is found out before anything is changed.
        for agent in &new {
            a2a::chooser(agent, &self.http)
                .map_err(|source| BridgeError::Auth { agent: agent.name.clone(), source })?;
        }
        let is_kept = |served: &Served| same.iter().any(|agent| *served.agent.name == *agent.name);
        let leaving: Vec<Served> = match &mut *self.served() {
            Some(served) => served.extract_if(.., |served| !is_kept(served)).collect(),
            None => return Err(BridgeError::Stopping),
        };
        done.kept = same.len();
        for agent in &new {
            let was_there = leaving.iter().any(|served| *served.agent.name == *agent.name);
            let list = if was_there { &mut done.changed } else { &mut done.added };
            list.push(agent.name.clone());
        }
        let gone = leaving.iter().map(|served| served.agent.name.to_string());
        done.removed = gone.filter(|name| !done.changed.contains(name)).collect();
        join_all(leaving.iter().map(|served| self.leave(served))).await;
        let mut failed = None;
        for agent in new {
            if let Err(error) = self.add(agent).await {
                failed = Some(error);
            }
        }
        match failed {
            None => Ok(done),
            Some(error) => Err(error),
        }
    }

    /// The agents that are served.
    pub fn agents(&self) -> Vec<Agent> {
        self.served().iter().flatten().map(|served| served.agent.clone()).collect()
    }

    fn served(&self) -> std::sync::MutexGuard<'_, Option<Vec<Served>>> {
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resolves when a task that the bridge cannot do without has failed.
    pub async fn failed(&self) {
        self.tasks.stopping().cancelled().await;
    }

    /// Whether it failed by a defect.
    pub fn has_defect(&self) -> bool {
        self.tasks.has_defect()
    }
}

/// Ends what an earlier bridge of the same settings file has left behind, before anything new starts.
fn records(config: &Config) -> Option<Arc<Records>> {
    let file = config.file.as_deref()?;
    match Records::open(file) {
        Ok(records) => {
            let left = records.end_leftovers();
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
