//! Puts the parts together: the order in which they start, and the order in which they stop.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::a2a::{self, auth::AuthError};
use crate::action::assemble::ArtifactRules;
use crate::action::run::{Actions, Limits, Memory, Stop};
use crate::agent::Agent;
use crate::bus::connect::{ConnectError, connect};
use crate::bus::publication::Publication;
use crate::bus::service::{Mesh, ServiceError, round_trip};
use crate::bus::subject::{ReplyGuard, SubjectError, Subjects};
use crate::config::{self, Config};
use crate::tasks::Tasks;

/// How long calls that were cut off may take to cancel at the agent and to reply.
const LAST_WORDS: Duration = Duration::from_secs(4);
/// Changes of submitted tasks that wait to be published, for one agent.
const NEWS: usize = 256;
/// How long the last tasks may take to leave.
const LAST_TASKS: Duration = Duration::from_secs(2);

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
}

/// A running bridge.
#[derive(Debug)]
pub struct Bridge {
    client: Client,
    tasks: Tasks,
    served: Vec<(Agent, Publication)>,
    calls: TaskTracker,
    // The end of the grace time, for calls and for processes.
    stop: Stop,
    hurry_agents: CancellationToken,
    grace: Duration,
}

impl Bridge {
    /// Connects and begins to serve every agent. Agents that are not there come later.
    pub async fn start(config: Config) -> Result<Self, BridgeError> {
        let subjects = Subjects::new(&config.nats.subject_prefix)?;
        let guard = Arc::new(ReplyGuard::new(&config.nats.reply_prefixes, subjects.prefix())?);
        let http = a2a::http_client()?;
        let client = connect(&config.nats).await?;
        let tasks = Tasks::default();
        let mesh = Mesh {
            client: client.clone(),
            guard,
            tasks: tasks.tracker().clone(),
        };
        let memory = Arc::new(Memory::default());
        let mut bridge = Self {
            client,
            tasks,
            served: Vec::with_capacity(config.agents.len()),
            calls: TaskTracker::new(),
            stop: Stop::default(),
            hurry_agents: CancellationToken::new(),
            grace: config.shutdown_grace,
        };
        for agent in config.agents {
            if let Err(error) = bridge.serve(agent, &http, &mesh, &subjects, &memory).await {
                bridge.stop().await;
                return Err(error);
            }
        }
        Ok(bridge)
    }

    async fn serve(
        &mut self,
        config: config::Agent,
        http: &reqwest::Client,
        mesh: &Mesh,
        subjects: &Subjects,
        memory: &Arc<Memory>,
    ) -> Result<(), BridgeError> {
        let name = config.name.clone();
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
        let agent = Agent::start(config, http, &self.tasks, self.hurry_agents.clone()).map_err(|source| {
            BridgeError::Auth {
                agent: name.clone(),
                source,
            }
        })?;
        let (news, changes) = mpsc::channel(NEWS);
        let actions = Actions::new(
            Arc::clone(&agent.name),
            limits,
            agent.live.clone(),
            Arc::clone(memory),
            news,
            &self.stop,
        );
        let published = Publication::start(
            agent.clone(),
            actions,
            changes,
            mesh,
            subjects,
            self.calls.clone(),
            &self.tasks,
        )
        .await;
        match published {
            Ok(publication) => self.served.push((agent, publication)),
            Err(source) => {
                agent.stop().await;
                return Err(BridgeError::Publish { agent: name, source });
            }
        }
        Ok(())
    }

    /// The agents that are served.
    pub fn agents(&self) -> impl Iterator<Item = &Agent> {
        self.served.iter().map(|(agent, _)| agent)
    }

    /// Resolves when a task that the bridge cannot do without has failed.
    pub async fn failed(&self) {
        self.tasks.stopping().cancelled().await;
    }

    /// Whether it failed by a defect.
    pub fn has_defect(&self) -> bool {
        self.tasks.has_defect()
    }

    /// Skips every grace time of a [`Bridge::stop`] under way.
    pub fn hurry(&self) {
        self.stop.hurry.cancel();
        self.hurry_agents.cancel();
    }

    /// Off the mesh, let calls finish, cancel the rest, end the agents, close NATS.
    pub async fn stop(&self) {
        let step = Step::begin("actions taken off the mesh");
        join_all(self.served.iter().map(|(_, publication)| publication.withdraw())).await;
        self.stop.leave.cancel();
        step.end();

        let step = Step::begin("calls finished");
        self.calls.close();
        let in_time = tokio::select! {
            biased;
            () = self.calls.wait() => true,
            () = tokio::time::sleep(self.grace) => false,
            () = self.stop.hurry.cancelled() => false,
        };
        if !in_time {
            tracing::warn!(calls = self.calls.len(), "calls still in flight are cancelled");
            self.stop.hurry.cancel();
            let _ = tokio::time::timeout(LAST_WORDS, self.calls.wait()).await;
        }
        step.end();

        let step = Step::begin("agents ended");
        join_all(self.served.iter().map(|(agent, _)| agent.stop())).await;
        step.end();

        let step = Step::begin("NATS closed");
        for (agent, publication) in &self.served {
            let status = agent.status.borrow().clone();
            publication.farewell(&status).await;
        }
        // The connection may only be closed once the last replies have arrived.
        if let Err(error) = round_trip(&self.client).await {
            tracing::warn!(%error, "the last replies may not have reached NATS");
        }
        // Without a connection its queue may be full, and nobody empties it.
        let _ = tokio::time::timeout(LAST_TASKS, self.client.drain()).await;
        self.tasks.stopping().cancel();
        let _ = tokio::time::timeout(LAST_TASKS, self.tasks.finished()).await;
        step.end();
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
