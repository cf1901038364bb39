//! One agent's actions: request in, reply out.
//!
//! [`Actions`] holds no connection of its own: it looks at the instance that is running right now
//! (a watch channel written by the agent's loop) and at the shared [`Memory`]. How a call goes on
//! its way is in `journey`, answers to questions are in `answer`.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::assemble::ArtifactRules;
use super::error::{ActionError, Code};
use super::follow_up::FollowUps;
use super::journey::{ASIDE, Failure, Interruption, Journey, POLL, SETTLING_LOOKS, about_known_task};
use super::ledger::{Ledger, Record};
use super::once::{Once, Reply};
use super::outcome::Outcome;
use super::progress::{Progress, Silent};
use super::request::{Invocation, Options};
use crate::a2a::Instance;
use crate::a2a::client::ClientError;
use crate::a2a::dialect::{Outgoing, Wait};
use crate::a2a::model::{Task, TaskState};
use crate::a2a::retry::Retries;
use crate::telemetry::spans;

/// How long a caller waits for a cancel.
const CANCEL: Duration = Duration::from_secs(30);

/// How the caller wants the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One reply when the task ends or needs input.
    Final,
    /// Everything as it comes, then the reply.
    Stream,
    /// One reply at once; the task goes on, and its changes are published.
    Submit,
}

/// What all agents of this process remember together.
#[derive(Debug, Default)]
pub struct Memory {
    /// Open questions.
    pub follow_ups: FollowUps,
    /// Tasks and conversations.
    pub ledger: Ledger,
    /// Idempotency keys.
    pub once: Arc<Once>,
}

/// The settings of one agent that its actions need.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Limit of a whole call in mode `final`.
    pub request_timeout: Duration,
    /// Limit between two events of a stream.
    pub stream_idle_timeout: Duration,
    /// Limit of a whole task in the other modes.
    pub task_timeout: Duration,
    /// How long a question can be answered.
    pub input_required_ttl: Duration,
    /// How long a task can be looked up.
    pub task_ttl: Duration,
    /// Most bytes of one task.
    pub max_response_size: u64,
    /// Whether mode `final` streams inside, so that the task's id is known early.
    pub prefer_stream: bool,
    /// Which artifacts are the answer.
    pub artifacts: ArtifactRules,
}

/// How calls hear of a stop.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The stop has begun: submitted tasks are left to the agent.
    pub leave: CancellationToken,
    /// Its grace time is over: everything else ends now.
    pub hurry: CancellationToken,
}

impl Stop {
    /// For the calls of one agent, which may have to stop while those of others go on.
    #[must_use]
    pub fn of_one(&self) -> Self {
        Self { leave: self.leave.child_token(), hurry: self.hurry.child_token() }
    }
}

/// What is known about an agent that calls can go to.
pub type Live = watch::Receiver<Option<Arc<Instance>>>;

/// A submitted task has changed.
#[derive(Debug)]
pub struct News {
    /// The agent's id of the task.
    pub task_id: String,
    /// The reply object.
    pub reply: Bytes,
}

/// One agent's actions.
#[derive(Debug)]
pub struct Actions {
    pub(super) agent: Arc<str>,
    pub(super) limits: Limits,
    live: Live,
    pub(super) memory: Arc<Memory>,
    news: mpsc::Sender<News>,
    // Cancelled when the grace time of a stop is over, and when a stop begins.
    pub(super) hurry: CancellationToken,
    pub(super) leave: CancellationToken,
}

/// The skill that a call goes to, as the reply and the agent shall see it.
#[derive(Debug)]
pub struct Skill {
    /// Its original id; `None` sends the message to the agent as a whole.
    pub id: Option<Arc<str>>,
    /// Media types it answers with.
    pub output_modes: Vec<String>,
}

impl Actions {
    /// The actions of the agent called `agent` in the settings.
    pub fn new(
        agent: Arc<str>,
        limits: Limits,
        live: Live,
        memory: Arc<Memory>,
        news: mpsc::Sender<News>,
        stop: &Stop,
    ) -> Self {
        let Stop { hurry, leave } = stop.clone();
        Self { agent, limits, live, memory, news, hurry, leave }
    }

    /// The agent's name in the settings.
    pub fn agent(&self) -> &Arc<str> {
        &self.agent
    }

    /// The memory shared with the other agents.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Invokes a skill.
    pub async fn invoke(
        &self,
        skill: &Skill,
        request: Invocation,
        options: &Options,
        mode: Mode,
        progress: &mut impl Progress,
    ) -> Result<Outcome, ActionError> {
        let instance = self.instance()?;
        let Invocation { parts, meta } = request;
        let output_modes: Arc<[String]> =
            [&meta.output_modes, &skill.output_modes, &instance.card.output_modes]
                .into_iter()
                .find(|modes| !modes.is_empty())
                .map_or_else(Arc::default, |modes| modes.as_slice().into());
        let context_id =
            meta.session_id.as_ref().map(|session| self.memory.ledger.context(&self.agent, session));
        let retries = Retries::default();
        let mut journey = self.journey(instance, mode, options, progress);
        journey.retries = Some(&retries);
        journey.skill = skill.id.clone();
        journey.session_id = meta.session_id;
        journey.output_modes = Arc::clone(&output_modes);
        // For wires where the client makes the ids.
        let new_task_id = Uuid::new_v4().to_string();
        let message = Outgoing {
            task_id: None,
            new_task_id: Some(&new_task_id),
            context_id: context_id.as_deref(),
            reference_task_ids: &meta.reference_task_ids,
            parts: &parts,
            skill_id: skill.id.as_deref(),
            output_modes: &output_modes,
            wait: Wait::UntilSettled,
            retries: &retries,
        };
        match journey.deliver(&message).await {
            Ok(outcome) => Ok(outcome),
            Err(Failure::Client(error)) => Err(ActionError::from_client(error).after(&retries)),
            Err(Failure::Action(error)) => Err(self.lost_from_sight(error.after(&retries))),
        }
    }

    /// Asks the agent to cancel a task that was seen here.
    pub async fn cancel(&self, task_id: &str, options: &Options) -> Reply {
        let record = self.record(task_id)?;
        let refuse = |why: &str| Err(ActionError::new(Code::NotCancelable, why).about(record.task.clone()));
        if record.state.is_final() {
            return refuse("the task is in a final state");
        }
        let mut progress = Silent;
        let mut journey = self.journey(self.instance()?, Mode::Final, options, &mut progress);
        journey.skill.clone_from(&record.task.skill);
        journey.deadline = journey.deadline.min(Instant::now() + CANCEL);
        let instance = Arc::clone(&journey.instance);
        let client = &instance.client;
        let task = match journey.within(Box::pin(client.cancel(task_id, &options.trace))).await {
            Ok(Ok(task)) => task,
            Ok(Err(error)) if error.is_not_cancelable() => {
                return refuse(&format!("the agent refuses to cancel the task: {error}"));
            }
            Ok(Err(error)) => return Err(about_known_task(error, record.task.clone())),
            Err(Interruption::Gone) => {
                let error = ActionError::new(Code::TaskLost, "the agent ended while it held the task");
                return Err(error.after_reaching_agent().about(record.task.clone()));
            }
            Err(_) => {
                let mut error =
                    ActionError::new(Code::Timeout, "the agent did not answer the cancel in time");
                error.info.cancelled = Some(Some(false));
                return Err(error.after_reaching_agent().about(record.task.clone()));
            }
        };
        // Some agents take the wish and carry it out later.
        let task = cancelled_soon(&journey, task).await;
        let (outcome, _) = journey.observe(&task, "", record.follow_up.clone()).await?;
        match task.state {
            TaskState::Canceled => Ok(outcome.as_success().to_json()),
            ref state if state.is_final() => {
                refuse(&format!("the task ended as {state} before it could be cancelled"))
            }
            _ => Ok(outcome.to_json()),
        }
    }

    /// Where a task that was seen here stands.
    pub async fn get(&self, task_id: &str, options: &Options) -> Reply {
        let record = self.record(task_id)?;
        if record.state.is_final() {
            return record.reply.clone();
        }
        // While the agent is away, memory answers.
        let looked = self.look(task_id, options).await?;
        match (self.record(task_id)?, looked) {
            // Another call has seen the end meanwhile.
            (now, _) if now.state.is_final() => now.reply.clone(),
            (_, Some(outcome)) => Ok(outcome.to_json()),
            (now, None) => now.reply.clone(),
        }
    }

    /// Where a task that was seen here stands at the agent; `None` while the agent cannot be asked.
    pub async fn look(&self, task_id: &str, options: &Options) -> Result<Option<Outcome>, ActionError> {
        let record = self.record(task_id)?;
        let Ok(instance) = self.instance() else {
            return Ok(None);
        };
        let mut progress = Silent;
        let mut journey = self.journey(instance, Mode::Final, options, &mut progress);
        journey.skill.clone_from(&record.task.skill);
        journey.deadline = journey.deadline.min(Instant::now() + ASIDE);
        let instance = Arc::clone(&journey.instance);
        let client = &instance.client;
        match journey.within(Box::pin(client.get(task_id, &options.trace))).await {
            Ok(Ok(task)) => {
                let (outcome, _) = journey.observe(&task, "", record.follow_up.clone()).await?;
                Ok(Some(outcome))
            }
            Ok(Err(ClientError::Unreachable(_) | ClientError::Broken(_))) | Err(_) => Ok(None),
            Ok(Err(error)) => Err(about_known_task(error, record.task.clone())),
        }
    }

    /// A call has ended without knowing how its task goes on; whoever asks for it shall hear so.
    pub(super) fn lost_from_sight(&self, error: ActionError) -> ActionError {
        if let Some(id) = error.task.as_ref().and_then(|task| task.id.as_ref()) {
            self.memory.ledger.lose(&self.agent, id, &error);
        }
        error
    }

    /// Publishes that a submitted task has changed.
    pub async fn news(&self, task_id: &str, reply: Bytes) {
        // Nobody publishes any more when the bridge stops.
        let _ = self.news.send(News { task_id: task_id.to_owned(), reply }).await;
    }

    pub(super) fn instance(&self) -> Result<Arc<Instance>, ActionError> {
        self.live.borrow().clone().ok_or_else(|| ActionError::unavailable(&self.agent, None))
    }

    pub(super) fn journey<'a, P: Progress>(
        &'a self,
        instance: Arc<Instance>,
        mode: Mode,
        options: &'a Options,
        progress: &'a mut P,
    ) -> Journey<'a, P> {
        let limit = match mode {
            Mode::Final => self.limits.request_timeout,
            Mode::Stream | Mode::Submit => self.limits.task_timeout,
        };
        let limit = options.timeout.map_or(limit, |own| own.min(limit));
        Journey {
            actions: self,
            instance,
            mode,
            skill: None,
            output_modes: Arc::default(),
            session_id: None,
            trace: &options.trace,
            deadline: Instant::now() + limit,
            progress,
            abandoned: false,
            is_named: false,
            answers: None,
            observed: None,
            retries: None,
        }
    }

    fn record(&self, task_id: &str) -> Result<Arc<Record>, ActionError> {
        let never = "this task was never seen here, or is forgotten";
        let record = self.memory.ledger.task(&self.agent, task_id);
        let record = record.ok_or_else(|| ActionError::new(Code::NotFound, never))?;
        spans::task(task_id, record.task.context_id.as_deref());
        Ok(record)
    }
}

/// Gives an agent that cancels later a moment to do so.
async fn cancelled_soon<P: Progress>(journey: &Journey<'_, P>, mut task: Task) -> Task {
    let mut pause = POLL.0;
    for _ in 0..SETTLING_LOOKS {
        if task.state.is_final() {
            break;
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
        let looked = journey.instance.client.get(&task.id, journey.trace);
        if let Ok(Ok(seen)) = tokio::time::timeout(ASIDE, looked).await {
            task = seen;
        }
    }
    task
}
