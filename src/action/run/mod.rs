//! One call to an agent, from the message that is sent to the reply.
//!
//! A run is a state machine. The way a message is sent decides where it begins:
//!
//! ```text
//! send, streaming ──> Reading ──cut off──> Checking ──> Subscribing ──> Reading
//!                        │                    │              └─refused─┐
//! send, blocking ────────┼────────────────────┴──────────> Polling <───┘
//!                        └──settled──> Settled <──────────────┘
//! ```
//!
//! Everything that the agent reports goes through a [`TaskBuilder`], whichever way it came, and from there to the
//! caller's [`Progress`] and to the task store.
//!
//! A message is sent at most once, unless the agent's answer proves that it did not run. A stream that
//! ends without a settled state is never success: the run asks the agent what became of the task. When
//! nobody can tell, the outcome is unknown, and the reply says so.

mod observe;
mod poll;
mod stream;
mod wait;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::actions::Actions;
use super::assemble::{self, Source};
use super::progress::{Frame, Progress};
use super::request::ReplyMode;
use super::task_builder::{TaskBuilder, TooMuch};
use crate::a2a::Instance;
use crate::a2a::client::ClientError;
use crate::a2a::dialect::OutgoingMessage;
use crate::a2a::model::{Answer, Event, Task, TaskState};
use crate::a2a::retry::{Retries, Retry};
use crate::a2a::stream::EventStream;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyStatus, TaskRef};
use crate::state::followers::Follower;
use crate::telemetry::trace_context::TraceContext;
pub(super) use observe::question_of;
use observe::unreadable;
pub(super) use poll::{Pace, Polled, Poller};
pub(super) use wait::Interruption;

/// How long one request for a task may take.
pub(super) const GET_TASK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an answer waits for a look at its task.
const RECALL_TIMEOUT: Duration = Duration::from_secs(3);

/// What a run is for. It is complete when the run is made.
#[derive(Debug)]
pub(super) struct Call<'a> {
    pub(super) purpose: Purpose,
    pub(super) mode: ReplyMode,
    pub(super) skill: Option<Arc<str>>,
    pub(super) output_modes: Arc<[String]>,
    pub(super) trace: &'a TraceContext,
    pub(super) limit: Duration,
    /// The retries of its message, which the reply shows.
    pub(super) retries: Option<&'a Retries>,
}

#[derive(Debug)]
pub(super) enum Purpose {
    /// A message that begins a task, in this session.
    New { session_id: Option<String> },
    /// The answer to a question of a task that waits.
    Answer(Question),
    /// A look at a task of an earlier call, or its end.
    Inspect,
}

/// The question that a run answers.
#[derive(Debug)]
pub(super) struct Question {
    pub(super) id: String,
    /// Whether the agent has reported anything since it got the answer. Until then nobody knows whether it
    /// took the answer.
    pub(super) is_taken: bool,
}

enum Phase {
    /// Reads the events of an open stream.
    Reading(Box<EventStream>),
    /// The stream has ended without a result, or was silent for too long: asks the agent what became of the
    /// task.
    Checking(StreamEnd),
    /// Subscribes to the events of this task again.
    Subscribing(String),
    Polling,
    Settled,
}

/// Why nothing more comes from a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamEnd {
    Closed,
    Silent,
}

#[derive(Debug)]
pub(super) struct CallRun<'a, P> {
    actions: &'a Actions,
    pub(super) instance: Arc<Instance>,
    pub(super) call: Call<'a>,
    pub(super) progress: &'a mut P,
    began: SystemTime,
    pub(super) deadline: Instant,
    /// Whether the agent has named the task.
    is_named: bool,
    /// Nobody listens; the task is cancelled as soon as its id is known.
    is_abandoned: bool,
    /// Whether the caller of a submitted task has its reply.
    is_accepted: bool,
    /// The status that was recorded last.
    recorded: Option<ReplyStatus>,
    /// From when others can know the task, so that no end of it is missed.
    follower: Option<Follower<'a>>,
}

pub(super) enum Failure {
    /// The task of the question has ended, so its answer was not sent.
    TaskEnded,
    /// The call to the agent failed, and no task is known.
    Client(ClientError),
    /// Everything else, ready for the caller.
    Action(ActionError),
}

impl From<ActionError> for Failure {
    fn from(error: ActionError) -> Self {
        Self::Action(error)
    }
}

impl<'a, P: Progress> CallRun<'a, P> {
    pub(super) fn new(
        actions: &'a Actions,
        instance: Arc<Instance>,
        call: Call<'a>,
        progress: &'a mut P,
    ) -> Self {
        Self {
            actions,
            instance,
            deadline: Instant::now() + call.limit,
            call,
            progress,
            began: SystemTime::now(),
            is_named: false,
            is_abandoned: false,
            is_accepted: false,
            recorded: None,
            follower: None,
        }
    }

    /// Sends the message in the way that suits agent and caller, and follows the task to its end.
    pub(super) async fn deliver(&mut self, message: &OutgoingMessage<'_>) -> Result<Arc<Outcome>, Failure> {
        let error = match Box::pin(self.send(message)).await {
            Err(Failure::Client(error)) => error,
            result => return result,
        };
        let may_go_without = message.context_id.is_some() && matches!(self.call.purpose, Purpose::New { .. });
        match Retry::without_context(&error) {
            // The agent makes its own conversation, which the session follows from now on.
            Some(proof) if may_go_without => {
                message.retries.record(proof);
                let message = OutgoingMessage { context_id: None, ..*message };
                Box::pin(self.send(&message)).await
            }
            _ => Err(Failure::Client(error)),
        }
    }

    async fn send(&mut self, message: &OutgoingMessage<'_>) -> Result<Arc<Outcome>, Failure> {
        let mut fold = self.fold();
        let wants_stream = self.call.mode != ReplyMode::Final || self.actions.limits.prefer_stream;
        let streams = wants_stream && self.instance.card.streaming;
        if let (Purpose::Answer(_), Some(id)) = (&self.call.purpose, message.task_id) {
            Box::pin(self.recall(id, &mut fold, streams)).await?;
        }
        if streams {
            match Box::pin(self.stream(message, &mut fold)).await {
                Err(Failure::Client(error)) => {
                    match Retry::without_streaming(&error, self.instance.client.dialect()) {
                        // The card promised what the agent does not do; the message was not taken.
                        Some(proof) => message.retries.record(proof),
                        None => return Err(Failure::Client(error)),
                    }
                }
                Err(failure) => return Err(failure),
                Ok(()) => return Ok(self.conclude(&fold).await?),
            }
        }
        let answer = self.send_blocking(message).await?;
        Ok(Box::pin(self.resume(&mut fold, answer.into())).await?)
    }

    async fn stream(
        &mut self,
        message: &OutgoingMessage<'_>,
        fold: &mut TaskBuilder<'_>,
    ) -> Result<(), Failure> {
        let instance = Arc::clone(&self.instance);
        let opened = self.within_idle(Box::pin(instance.client.stream(message, self.call.trace))).await;
        let events = match opened {
            Ok(events) => events.map_err(Failure::Client)?,
            Err(interruption) => {
                let task = self.named_by_us(message);
                return Err(self.interrupted(interruption, task).await.into());
            }
        };
        self.follow(Phase::Reading(Box::new(events)), self.named_by_us(message), fold).await
    }

    async fn send_blocking(&mut self, message: &OutgoingMessage<'_>) -> Result<Answer, Failure> {
        let blocking = self.call.mode == ReplyMode::Final;
        let message = OutgoingMessage { blocking, ..*message };
        let instance = Arc::clone(&self.instance);
        match self.within(Box::pin(instance.client.send(&message, self.call.trace))).await {
            Ok(Ok(Answer::Task(task))) if self.answers(&task) => {
                Ok(Answer::Task(Box::pin(self.past_old_question(task)).await))
            }
            Ok(Ok(answer)) => Ok(answer),
            // A task whose id is known can be asked for. What became of an answer is up to its caller.
            Ok(Err(error @ ClientError::Broken(_))) if matches!(self.call.purpose, Purpose::New { .. }) => {
                let Some(task) = self.named_by_us(&message) else {
                    return Err(Failure::Client(error));
                };
                match self.get_task(task.id.as_deref().unwrap_or_default(), GET_TASK_TIMEOUT).await {
                    Ok(Polled::Seen(seen)) => Ok(Answer::Task(seen)),
                    Ok(_) => Err(ActionError::from_client(error).about(task).into()),
                    Err(interruption) => Err(self.interrupted(interruption, Some(task)).await.into()),
                }
            }
            Ok(Err(error)) => Err(Failure::Client(error)),
            Err(interruption) => {
                let task = self.named_by_us(&message);
                Err(self.interrupted(interruption, task).await.into())
            }
        }
    }

    /// Goes on with a task that the agent has reported.
    pub(super) async fn resume(&mut self, fold: &mut TaskBuilder<'_>, event: Event) -> Reply {
        self.take(fold, event).await?;
        self.poll(fold).await?;
        self.conclude(fold).await
    }

    pub(super) fn fold(&self) -> TaskBuilder<'a> {
        let limits = &self.actions.limits;
        let max_size = usize::try_from(limits.max_response_size).unwrap_or(usize::MAX);
        TaskBuilder::new(&limits.artifacts, max_size, self.progress.wants_content())
    }

    /// The task of a message whose id does not depend on the agent's answer.
    fn named_by_us(&self, message: &OutgoingMessage<'_>) -> Option<TaskRef> {
        let made = message.new_task_id.filter(|_| self.instance.client.dialect().client_assigns_task_ids());
        let id = message.task_id.or(made)?;
        Some(self.task_ref(Some(id.to_owned()), message.context_id.map(str::to_owned)))
    }

    /// Whether this run answers the question that the task still asks.
    fn answers(&self, task: &Task) -> bool {
        match &self.call.purpose {
            Purpose::Answer(question) => task.state.is_waiting() && question_of(task) == question.id,
            Purpose::New { .. } | Purpose::Inspect => false,
        }
    }

    /// Some agents reply to an answer with the task as it was, still asking, and then go on.
    async fn past_old_question(&mut self, mut task: Task) -> Task {
        let mut poller = Poller::new(task.id.clone(), Pace::SETTLE);
        while self.answers(&task) {
            match poller.next(self).await {
                Ok(Some(Polled::Seen(seen))) => task = seen,
                Ok(_) | Err(_) => break,
            }
        }
        task
    }

    /// Looks at a task before it is answered. A task that has ended is not answered any more. Otherwise the
    /// fold begins with what the task has made so far: a stream reports only what is new.
    async fn recall(&mut self, id: &str, fold: &mut TaskBuilder<'_>, streams: bool) -> Result<(), Failure> {
        // The run can do without, and most of the time is for the answer.
        let limit = RECALL_TIMEOUT.min(self.deadline.saturating_duration_since(Instant::now()) / 4);
        let Ok(Polled::Seen(seen)) = self.get_task(id, limit).await else {
            return Ok(());
        };
        if seen.id == id && seen.state.is_final() {
            self.observe(&seen, "", None).await?;
            return Err(Failure::TaskEnded);
        }
        if seen.id == id && seen.state.is_waiting() && (streams || self.progress.wants_content()) {
            fold.recall(Task { history: Vec::new(), ..seen });
        }
        Ok(())
    }

    /// Runs the state machine until the task has settled.
    async fn follow(
        &mut self,
        mut phase: Phase,
        named_by_us: Option<TaskRef>,
        fold: &mut TaskBuilder<'_>,
    ) -> Result<(), Failure> {
        let mut subscriptions = 0;
        loop {
            phase = match phase {
                Phase::Reading(mut events) => self.read(&mut events, &mut subscriptions, fold).await?,
                Phase::Checking(end) => self.check(end, named_by_us.as_ref(), subscriptions, fold).await?,
                Phase::Subscribing(task_id) => {
                    subscriptions += 1;
                    self.subscribe(&task_id, fold).await?
                }
                Phase::Polling => {
                    self.poll(fold).await?;
                    Phase::Settled
                }
                Phase::Settled => return Ok(()),
            };
        }
    }

    /// Takes what the agent reported, and passes it on.
    async fn take(&mut self, fold: &mut TaskBuilder<'_>, event: Event) -> Result<(), ActionError> {
        let frames = fold.apply(event).map_err(|TooMuch| self.too_much(fold))?;
        self.tell(fold, frames).await
    }

    async fn tell(&mut self, fold: &TaskBuilder<'_>, frames: Vec<Frame>) -> Result<(), ActionError> {
        // The task is recorded as soon as it has a name, so that it can be cancelled and looked up, and
        // when its status changes. Its settled state is left to the end, when all of it is there.
        if let Some(task) = fold.task().filter(|task| !task.id.is_empty())
            && !task.state.is_settled()
            && self.recorded != Some(ReplyStatus::from(&task.state))
        {
            self.recorded = Some(ReplyStatus::from(&task.state));
            if self.follower.as_ref().is_none_or(|follower| !follower.follows(&task.id)) {
                self.follower = Some(self.actions.state.tasks.follow(&self.actions.agent, &task.id));
            }
            self.follow_context(task.context_id.as_deref()).await;
            let (outcome, _) = self.observe(task, fold.status_texts(), None).await?;
            self.accept(&outcome).await;
        }
        self.is_named |= fold.task().is_some_and(|task| !task.id.is_empty());
        for mut frame in frames {
            // The reason of a failure is redacted as an error is.
            if let Frame::State { state, message } = &mut frame
                && state.is_failure()
            {
                self.actions.secrets.redact(message);
            }
            self.progress.frame(frame).await;
        }
        if self.is_abandoned && self.is_named {
            return Err(self.interrupted_with(Interruption::Abandoned, fold).await);
        }
        Ok(())
    }

    /// Gives the caller of a submitted task its reply, once.
    async fn accept(&mut self, outcome: &Arc<Outcome>) {
        if self.call.mode == ReplyMode::Submit && !std::mem::replace(&mut self.is_accepted, true) {
            self.progress.accepted(outcome).await;
        }
    }

    /// Whether there is nothing to wait for. Authentication may happen elsewhere, so a submitted
    /// task is followed on while it waits for that.
    fn is_over(&self, fold: &TaskBuilder<'_>) -> bool {
        let waits_for_auth = fold.task().is_some_and(|task| task.state == TaskState::AuthRequired);
        fold.is_settled() && !(self.call.mode == ReplyMode::Submit && waits_for_auth)
    }

    /// The reply for a call that has come to its end.
    async fn conclude(&mut self, fold: &TaskBuilder<'_>) -> Reply {
        if let Some(message) = fold.direct() {
            self.follow_context(message.context_id.as_deref()).await;
            let content = assemble::of_message(message).map_err(|reason| unreadable(&reason))?;
            let task = self.task_ref(None, message.context_id.clone());
            return Ok(Arc::new(
                Outcome::new(ReplyStatus::Completed, content, task).after(self.call.retries),
            ));
        }
        let Some(task) = fold.task() else {
            return Err(ActionError::internal().after_reaching_agent());
        };
        self.follow_context(task.context_id.as_deref()).await;
        let (outcome, source) = self.observe(task, fold.status_texts(), None).await?;
        let message = &outcome.content.message;
        let untold = match source {
            Source::Answer => fold.untold(message),
            Source::States => message,
            Source::History => "",
        };
        if !untold.is_empty() {
            self.progress.frame(Frame::Response(untold.to_owned())).await;
        }
        Ok(outcome)
    }

    fn unknown(&self, why: &str, fold: &TaskBuilder<'_>) -> ActionError {
        let message = format!("the agent can no longer be asked what became of the task: {why}");
        ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent().about(self.known_ref(fold))
    }

    fn too_much(&self, fold: &TaskBuilder<'_>) -> ActionError {
        let limit = self.actions.limits.max_response_size;
        let error = ClientError::TooLarge { limit };
        ActionError::from_client(error).about(self.known_ref(fold))
    }
}

impl From<Answer> for Event {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Task(task) => Self::Task(task),
            Answer::Message(message) => Self::Message(message),
        }
    }
}

/// An error about a task that was seen here: when the agent does not know it any more, it is lost.
pub(super) fn about_known_task(error: ClientError, task: TaskRef) -> ActionError {
    let lost = error.is_task_not_found();
    let mut error = ActionError::from_client(error).about(task);
    if lost {
        error.info.code = Code::TaskLost;
    }
    error
}
