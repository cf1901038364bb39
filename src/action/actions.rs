//! One agent's actions: invoke a skill, answer a question, look up and cancel a task.
//!
//! [`Actions`] holds no connection of its own: it uses the instance that is running right now
//! (a watch channel written by the agent's supervisor) and the shared [`State`]. How a call runs is in
//! `run`, answers to questions are in `answer`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::assemble::ArtifactRules;
use super::params::Template;
use super::progress::{NoProgress, Progress};
use super::request::{CallOptions, Invocation, ReplyMode};
use super::run::{
    Call, CallRun, Failure, GET_TASK_TIMEOUT, Interruption, Pace, Polled, Poller, Purpose, about_known_task,
};
use crate::a2a::Instance;
use crate::a2a::client::ClientError;
use crate::a2a::dialect::OutgoingMessage;
use crate::a2a::model::{Task, TaskState};
use crate::a2a::retry::Retries;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, TaskRef};
use crate::secrets::Secrets;
use crate::state::State;
use crate::state::tasks::TaskRecord;
use crate::telemetry::spans;

/// How long a caller waits for a cancel.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// The settings of one agent that its actions need.
#[derive(Debug, Clone)]
pub(crate) struct ActionSettings {
    /// Limit for a whole call in mode `final`.
    pub request_timeout: Duration,
    /// Limit between two events of a stream.
    pub stream_idle_timeout: Duration,
    /// Limit for a whole task in the modes `stream` and `submit`.
    pub task_timeout: Duration,
    /// How long a caller can answer a question.
    pub input_required_ttl: Duration,
    /// How long a caller can look up a task.
    pub task_ttl: Duration,
    /// Limit for the bytes of one task.
    pub max_response_size: u64,
    /// Whether calls in mode `final` use a stream to the agent, so that the task id is known early.
    pub prefer_stream: bool,
    pub artifacts: ArtifactRules,
}

/// Tells calls in flight that the bridge, or their agent's publication, shuts down.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallShutdown {
    /// The shutdown has begun: calls stop following submitted tasks, which go on at the agent.
    pub begun: CancellationToken,
    /// The grace period is over: every other call ends now.
    pub grace_over: CancellationToken,
}

impl CallShutdown {
    /// For the calls of one agent, which may shut down before the others.
    #[must_use]
    pub(crate) fn child(&self) -> Self {
        Self { begun: self.begun.child_token(), grace_over: self.grace_over.child_token() }
    }
}

/// The instance of an agent that calls go to, while there is one.
pub(crate) type Live = watch::Receiver<Option<Arc<Instance>>>;

/// A change of a submitted task.
#[derive(Debug)]
pub(crate) struct TaskUpdate {
    pub task_id: String,
    pub reply: Reply,
}

#[derive(Debug)]
pub(crate) struct Actions {
    pub(super) agent: Arc<str>,
    pub(super) limits: ActionSettings,
    live: Live,
    pub(super) state: Arc<State>,
    updates: mpsc::Sender<TaskUpdate>,
    pub(super) stop: CallShutdown,
    pub(super) secrets: Secrets,
}

/// A skill as a call needs it.
#[derive(Debug)]
pub(crate) struct CallableSkill {
    /// Its original id; `None` sends the message to the agent as a whole.
    pub id: Option<Arc<str>>,
    /// Media types that it produces.
    pub output_modes: Vec<String>,
    pub template: Template,
}

impl CallableSkill {
    /// The agent as a whole.
    pub(crate) fn whole_agent() -> Self {
        Self { id: None, output_modes: Vec::new(), template: Template::parse("") }
    }
}

impl Actions {
    /// The actions of the agent with this name in the settings.
    pub(crate) fn new(
        agent: Arc<str>,
        limits: ActionSettings,
        live: Live,
        state: Arc<State>,
        updates: mpsc::Sender<TaskUpdate>,
        stop: CallShutdown,
        secrets: Secrets,
    ) -> Self {
        Self { agent, limits, live, state, updates, stop, secrets }
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// How long a call in this mode may take, whatever the caller wants.
    pub(crate) fn limit(&self, options: &CallOptions) -> Duration {
        let limit = match options.mode {
            ReplyMode::Final => self.limits.request_timeout,
            ReplyMode::Stream | ReplyMode::Submit => self.limits.task_timeout,
        };
        options.timeout.map_or(limit, |own| own.min(limit))
    }

    pub(crate) async fn invoke(
        &self,
        skill: &CallableSkill,
        request: Invocation,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Reply {
        let instance = self.instance()?;
        let Invocation { parts, meta } = request;
        let output_modes: Arc<[String]> =
            [&meta.output_modes, &skill.output_modes, &instance.card.output_modes]
                .into_iter()
                .find(|modes| !modes.is_empty())
                .map_or_else(Arc::default, |modes| modes.as_slice().into());
        let context_id = match &meta.session_id {
            Some(session_id) => {
                Some(Box::pin(self.state.sessions.context_id(&self.agent, session_id)).await?)
            }
            None => None,
        };
        let retries = Retries::new(&self.agent);
        let call = Call {
            purpose: Purpose::New { session_id: meta.session_id },
            mode: options.mode,
            skill: skill.id.clone(),
            output_modes: Arc::clone(&output_modes),
            trace: &options.trace,
            limit: self.limit(options),
            retries: Some(&retries),
        };
        // For wires where the client makes the ids.
        let new_task_id = Uuid::new_v4().to_string();
        let message = OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: None,
            new_task_id: Some(&new_task_id),
            context_id: context_id.as_deref(),
            reference_task_ids: &meta.reference_task_ids,
            parts: &parts,
            skill_id: skill.id.as_deref(),
            output_modes: &output_modes,
            blocking: true,
            retries: &retries,
        };
        match CallRun::new(self, instance, call, progress).deliver(&message).await {
            Ok(outcome) => Ok(outcome),
            // Only answers belong to a task that may have ended.
            Err(Failure::TaskEnded) => Err(ActionError::internal()),
            Err(Failure::Client(error)) => Err(ActionError::from_client(error).after(&retries)),
            Err(Failure::Action(error)) => Err(Box::pin(self.lost_from_sight(error.after(&retries))).await),
        }
    }

    /// Asks the agent to cancel a task that was seen here.
    pub(crate) async fn cancel_task(&self, task_id: &str, options: &CallOptions) -> Reply {
        let record = self.record(task_id).await?;
        let task_ref = || self.task_ref(&record, task_id);
        let refuse = |why: &str| Err(ActionError::new(Code::NotCancelable, why).about(task_ref()));
        if record.state.is_final() {
            return refuse("the task is in a final state");
        }
        let mut progress = NoProgress;
        let mut run = self.inspect(
            self.instance()?,
            &record,
            options,
            CANCEL_TIMEOUT.min(self.limit(options)),
            &mut progress,
        );
        let instance = Arc::clone(&run.instance);
        let task = match run.within(Box::pin(instance.client.cancel(task_id, &options.trace))).await {
            Ok(Ok(task)) => task,
            Ok(Err(error)) if error.is_not_cancelable() => {
                return refuse(&format!("the agent refuses to cancel the task: {error}"));
            }
            Ok(Err(error)) => return Err(about_known_task(error, task_ref())),
            Err(Interruption::Gone) => {
                let error = ActionError::new(Code::TaskLost, "the agent ended while it held the task");
                return Err(error.after_reaching_agent().about(task_ref()));
            }
            Err(_) => {
                let mut error =
                    ActionError::new(Code::Timeout, "the agent did not answer the cancel in time");
                error.info.cancelled = Some(Some(false));
                return Err(error.after_reaching_agent().about(task_ref()));
            }
        };
        let task = cancelled_soon(&mut run, task).await;
        let (outcome, _) = run.observe(&task, "", record.follow_up.clone()).await?;
        match task.state {
            TaskState::Canceled => Ok(Arc::new(Outcome::clone(&outcome).as_success())),
            ref state if state.is_final() => {
                refuse(&format!("the task ended as {state} before it could be cancelled"))
            }
            _ => Ok(outcome),
        }
    }

    /// Where a task that was seen here stands.
    pub(crate) async fn get_task(&self, task_id: &str, options: &CallOptions) -> Reply {
        let record = self.record(task_id).await?;
        if record.state.is_final() {
            return record.reply.clone();
        }
        let seen = self.ask_agent(&record, task_id, options).await?;
        match (self.record(task_id).await?, seen) {
            // Another call has seen the end meanwhile.
            (now, _) if now.state.is_final() => now.reply.clone(),
            (_, Some(outcome)) => Ok(outcome),
            // While the agent is away, the last known state is the answer.
            (now, None) => now.reply.clone(),
        }
    }

    /// Where a task stands at the agent; `None` while the agent cannot be asked.
    async fn ask_agent(
        &self,
        record: &TaskRecord,
        task_id: &str,
        options: &CallOptions,
    ) -> Result<Option<Arc<Outcome>>, ActionError> {
        let Ok(instance) = self.instance() else {
            return Ok(None);
        };
        let mut progress = NoProgress;
        let limit = GET_TASK_TIMEOUT.min(self.limit(options));
        let mut run = self.inspect(instance, record, options, limit, &mut progress);
        match run.get_task(task_id, GET_TASK_TIMEOUT).await {
            Ok(Polled::Seen(task)) => {
                let (outcome, _) = run.observe(&task, "", record.follow_up.clone()).await?;
                Ok(Some(outcome))
            }
            Ok(Polled::Failed(ClientError::Unreachable(_) | ClientError::Broken(_)) | Polled::TimedOut)
            | Err(_) => Ok(None),
            Ok(Polled::Failed(error)) => Err(about_known_task(error, self.task_ref(record, task_id))),
        }
    }

    /// Polls a task of an earlier call until its outcome is one that the caller waits for.
    pub(crate) async fn watch_task(
        &self,
        task_id: &str,
        options: &CallOptions,
        limit: Duration,
        is_awaited: impl Fn(&Outcome) -> bool,
    ) -> Reply {
        let record = self.record(task_id).await?;
        let mut progress = NoProgress;
        let mut run = self.inspect(self.instance()?, &record, options, limit, &mut progress);
        let mut poller = Poller::new(task_id.to_owned(), Pace::WATCH);
        loop {
            match poller.next(&mut run).await {
                Ok(Some(Polled::Seen(task))) => {
                    let (outcome, _) = run.observe(&task, "", record.follow_up.clone()).await?;
                    if is_awaited(&outcome) {
                        return Ok(outcome);
                    }
                }
                Ok(Some(Polled::Failed(error))) if error.is_task_not_found() => {
                    return Err(about_known_task(error, self.task_ref(&record, task_id)));
                }
                Ok(_) => {}
                Err(interruption) => {
                    let task = self.task_ref(&record, task_id);
                    return Err(run.interrupted(interruption, Some(task)).await);
                }
            }
        }
    }

    /// Records that a call has lost track of its task, for whoever asks for it.
    pub(super) async fn lost_from_sight(&self, error: ActionError) -> ActionError {
        // What is remembered has no credentials in it.
        let error = error.redacted(&self.secrets);
        if let Some(id) = error.task.as_ref().and_then(|task| task.id.as_ref()) {
            self.state.tasks.lose(&self.agent, id, &error).await;
        }
        error
    }

    /// Publishes a change of a submitted task.
    pub(crate) async fn publish(&self, task_id: &str, reply: Reply) {
        // Nobody publishes any more when the bridge stops.
        let _ = self.updates.send(TaskUpdate { task_id: task_id.to_owned(), reply }).await;
    }

    pub(super) fn instance(&self) -> Result<Arc<Instance>, ActionError> {
        self.live.borrow().clone().ok_or_else(|| ActionError::unavailable(&self.agent, None))
    }

    /// A run that looks at a task of an earlier call.
    fn inspect<'a>(
        &'a self,
        instance: Arc<Instance>,
        record: &TaskRecord,
        options: &'a CallOptions,
        limit: Duration,
        progress: &'a mut NoProgress,
    ) -> CallRun<'a, NoProgress> {
        let call = Call {
            purpose: Purpose::Inspect,
            mode: ReplyMode::Final,
            skill: record.task().and_then(|task| task.skill.clone()),
            output_modes: Arc::default(),
            trace: &options.trace,
            limit,
            retries: None,
        };
        CallRun::new(self, instance, call, progress)
    }

    fn task_ref(&self, record: &TaskRecord, task_id: &str) -> TaskRef {
        record.task().cloned().unwrap_or_else(|| TaskRef {
            id: Some(task_id.to_owned()),
            context_id: None,
            agent: Arc::clone(&self.agent),
            skill: None,
        })
    }

    async fn record(&self, task_id: &str) -> Result<Arc<TaskRecord>, ActionError> {
        let never = "this task was never seen here, or is forgotten";
        let record = self.state.tasks.find(&self.agent, task_id).await?;
        let record = record.ok_or_else(|| ActionError::new(Code::NotFound, never))?;
        spans::task(task_id, record.task().and_then(|task| task.context_id.as_deref()));
        Ok(record)
    }
}

/// Some agents accept a cancel and carry it out later.
async fn cancelled_soon(run: &mut CallRun<'_, NoProgress>, mut task: Task) -> Task {
    let mut poller = Poller::new(task.id.clone(), Pace::SETTLE);
    while !task.state.is_final() {
        match poller.next(run).await {
            Ok(Some(Polled::Seen(seen))) => task = seen,
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    task
}
