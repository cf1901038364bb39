//! The run of one call, from the message to the reply.
//!
//! A run is a state machine. How the message is sent decides where it begins:
//!
//! ```text
//! send, streaming ──> Reading ──cut off──> Checking ──> Subscribing ──> Reading
//!                        │                    │              └─refused─┐
//! send, blocking ────────┼────────────────────┴──────────> Polling <───┘
//!                        └──settled──> Settled <──────────────┘
//! ```
//!
//! Every event of the agent goes through a [`TaskBuilder`], and from there to the caller's [`Progress`] and to the
//! recorded tasks.
//!
//! A message is sent at most once, unless the agent's response proves that it did not run. A stream that ends
//! without a settled state is never a success: the run reads the task from the agent. If that fails too, the
//! reply says that the outcome is unknown.

mod poller;
mod recorder;
mod waiter;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::time::Instant;

use super::actions::Actions;
use super::assemble::{self, MessageSource};
use super::progress::{Progress, ProgressEvent};
use super::request::{MessageContent, ReplyMemory, ReplyMode};
use super::task_builder::{Applied, TaskBuilder};
use crate::a2a::LiveAgent;
use crate::a2a::client::ClientError;
use crate::a2a::dialect::OutgoingMessage;
use crate::a2a::model::{Event, SendResult, Task, TaskState};
use crate::a2a::retry::{Retries, Retry};
use crate::a2a::stream::EventStream;
use crate::caller::Caller;
use crate::failpoint;
use crate::memory::SizeError;
use crate::offload;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyStatus, TaskRef};
use crate::state::follow_ups::{ClaimSender, UnsettledQuestion};
use crate::state::run_link::LiveRunLink;
use crate::state::task_ends::TaskEndSubscription;
use crate::telemetry::trace_context::TraceContext;
use crate::text::error_chain;
pub(super) use poller::{PollSchedule, Polled, Poller};
pub(super) use recorder::{RunEnd, asks_question};
use recorder::{TaskRecorder, unreadable};
use waiter::AgentWaiter;
pub(super) use waiter::Interruption;

/// Timeout of one request for a task.
pub(super) const GET_TASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for reading a task before it gets an answer.
const TASK_BEFORE_ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of a cancel that the bridge sends by itself, to clean up after an interrupted call.
const CLEANUP_CANCEL_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of times to resubscribe to a task.
const MAX_SUBSCRIPTIONS: u32 = 3;
/// How long to read on after a state that ends the call: some agents send more events after it, and some keep the
/// stream open forever.
const READ_AFTER_END: Duration = Duration::from_millis(500);
/// Consecutive failed polls before a call with a waiting caller fails.
const MAX_FAILED_POLLS: u32 = 6;

#[derive(Debug)]
pub(super) struct RunInput<'a> {
    pub(super) purpose: Purpose,
    pub(super) mode: ReplyMode,
    pub(super) skill: Option<Arc<str>>,
    pub(super) output_modes: Arc<[String]>,
    /// The caller to whom the task belongs.
    pub(super) caller: &'a Caller,
    pub(super) trace: &'a TraceContext,
    pub(super) deadline: Instant,
    /// The retries of the message, for the reply.
    pub(super) retries: Option<&'a Retries>,
    pub(super) content: MessageContent,
    /// For an answer: records that it is about to be sent.
    pub(super) claim: Option<ClaimSender>,
    pub(super) reply_memory: &'a ReplyMemory,
    /// Where the call is logged, if it is.
    pub(super) link: Option<Arc<LiveRunLink>>,
}

#[derive(Debug)]
pub(super) enum Purpose {
    /// A message that begins a task.
    NewTask { session_id: Option<String> },
    /// The answer to the question with this fingerprint.
    Answer { question: String },
    /// Following a task whose replica is gone. The questions are those of the task that were not settled then.
    Adopted { questions: Arc<[UnsettledQuestion]> },
    /// A request to read or cancel a task of an earlier call.
    ReadOrCancel,
}

enum RunPhase {
    Reading {
        events: Box<EventStream>,
        subscriptions: u32,
    },
    /// The stream has ended without a result, or was silent for too long: read the task from the agent.
    Checking {
        end: StreamEnd,
        subscriptions: u32,
    },
    Subscribing {
        task_id: String,
        subscriptions: u32,
    },
    /// Poll until the run can conclude. For most settled tasks it can already.
    Polling,
    Settled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamEnd {
    Closed,
    Idle,
}

#[derive(Debug)]
pub(super) struct CallRun<'a, P> {
    pub(super) actions: &'a Actions,
    pub(super) recorder: TaskRecorder<'a>,
    pub(super) waiter: AgentWaiter<'a, P>,
    builder: TaskBuilder<'a>,
    /// Whether the agent has sent an event since it got the answer. Until then the run does not know whether the agent
    /// took the answer.
    is_answer_taken: bool,
    /// Whether the caller of a submitted task has its reply.
    is_accepted: bool,
    last_recorded: Option<ReplyStatus>,
    /// Exists from the first record on, because from then on other requests can end the task.
    end_subscription: Option<TaskEndSubscription<'a>>,
}

pub(super) enum DeliveryError {
    /// The task of the question has ended, so the answer was not sent.
    TaskEnded,
    /// Nothing was sent to the agent.
    NotSent(ActionError),
    /// The call to the agent failed, and no task is known.
    Client(ClientError),
    /// Any other error, ready for the caller.
    Action(ActionError),
}

impl From<ActionError> for DeliveryError {
    fn from(error: ActionError) -> Self {
        Self::Action(error)
    }
}

impl<'a, P: Progress> CallRun<'a, P> {
    pub(super) fn new(
        actions: &'a Actions,
        live_agent: Arc<LiveAgent>,
        input: RunInput<'a>,
        progress: &'a mut P,
    ) -> Self {
        let max_size = usize::try_from(actions.config.max_response_size).unwrap_or(usize::MAX);
        progress.runs_here();
        let wants_content = progress.wants_content();
        let builder = TaskBuilder::new(&actions.artifacts, max_size, wants_content, &actions.memory);
        let waiter = AgentWaiter {
            actions,
            live_agent,
            progress,
            mode: input.mode,
            trace: input.trace,
            deadline: input.deadline,
            has_task_id: false,
            is_abandoned: false,
        };
        Self {
            actions,
            recorder: TaskRecorder::new(actions, input),
            waiter,
            builder,
            is_answer_taken: false,
            is_accepted: false,
            last_recorded: None,
            end_subscription: None,
        }
    }

    /// Sends the message in the way that suits agent and caller, and follows the task to its end. `message` is without
    /// its content, which the run holds until the agent has responded.
    pub(super) async fn deliver(
        &mut self,
        message: &OutgoingMessage<'_>,
    ) -> Result<Arc<Outcome>, DeliveryError> {
        let error = match Box::pin(self.send(message)).await {
            Err(DeliveryError::Client(error)) => error,
            result => return result,
        };
        let has_own_context =
            message.context_id.is_some() && matches!(self.recorder.input.purpose, Purpose::NewTask { .. });
        match Retry::without_context(&error) {
            // The agent chooses a context id, which the session uses from now on.
            Some(reason) if has_own_context => {
                message.retries.record(reason);
                let message = OutgoingMessage { context_id: None, ..*message };
                Box::pin(self.send(&message)).await
            }
            _ => Err(DeliveryError::Client(error)),
        }
    }

    async fn send(&mut self, message: &OutgoingMessage<'_>) -> Result<Arc<Outcome>, DeliveryError> {
        self.builder.reset();
        // Others can follow a session, and have its task canceled, while the call runs.
        let is_in_session = self.recorder.input.link.as_ref().is_some_and(|link| link.session.is_some());
        let is_streamed = self.actions.config.prefer_stream || is_in_session;
        let wants_stream = self.waiter.mode != ReplyMode::Final || is_streamed;
        let streams = wants_stream && self.waiter.live_agent.card.streaming;
        if let (Purpose::Answer { .. }, Some(id)) = (&self.recorder.input.purpose, message.task_id) {
            Box::pin(self.read_before_answer(id, streams)).await?;
            if let Some(claim) = &self.recorder.input.claim {
                failpoint::hit("answer-before-sending").await;
                Box::pin(claim.mark_sending()).await.map_err(DeliveryError::NotSent)?;
                failpoint::hit("answer-sending").await;
            }
        }
        if streams {
            match Box::pin(self.stream(message)).await {
                Err(DeliveryError::Client(error)) => {
                    match Retry::without_streaming(&error, self.waiter.live_agent.client.dialect) {
                        // The agent does not stream in spite of its card, and did not take the message.
                        Some(reason) => message.retries.record(reason),
                        None => return Err(DeliveryError::Client(error)),
                    }
                }
                Err(error) => return Err(error),
                Ok(()) => return Ok(self.conclude().await?),
            }
        }
        let event = self.send_blocking(message).await?;
        Ok(Box::pin(self.resume(event)).await?)
    }

    async fn stream(&mut self, message: &OutgoingMessage<'_>) -> Result<(), DeliveryError> {
        let live_agent = Arc::clone(&self.waiter.live_agent);
        let sent = self.recorder.input.content.add_to(message);
        let open = Box::pin(live_agent.client.stream(&sent, self.waiter.trace));
        let events = match self.waiter.with_idle_timeout(open).await {
            Ok(events) => events.map_err(DeliveryError::Client)?,
            Err(interruption) => {
                let task = self.task_with_known_id(message);
                return Err(self.interrupted_for(interruption, task).await.into());
            }
        };
        let task = self.task_with_known_id(message);
        self.follow(RunPhase::Reading { events: Box::new(events), subscriptions: 0 }, task).await
    }

    async fn send_blocking(&mut self, message: &OutgoingMessage<'_>) -> Result<Event, DeliveryError> {
        let blocking = self.waiter.mode == ReplyMode::Final;
        let sent = OutgoingMessage { blocking, ..self.recorder.input.content.add_to(message) };
        let live_agent = Arc::clone(&self.waiter.live_agent);
        let is_new_task = matches!(self.recorder.input.purpose, Purpose::NewTask { .. });
        match self.waiter.within(Box::pin(live_agent.client.send(&sent, self.waiter.trace))).await {
            Ok(Ok(SendResult::Task(task))) => {
                let is_answer = matches!(self.recorder.input.purpose, Purpose::Answer { .. });
                let task = if is_answer { Box::pin(self.poll_past_old_question(task)).await } else { task };
                Ok(Event::Task(task))
            }
            Ok(Ok(SendResult::Message(message))) => Ok(Event::Message(message)),
            // A task whose id is known can be read. The caller of this run handles a broken response to an answer.
            Ok(Err(error @ ClientError::Broken(_))) if is_new_task => {
                let Some(task) = self.task_with_known_id(message) else {
                    return Err(DeliveryError::Client(error));
                };
                match self.waiter.get_task(task.id.as_deref().unwrap_or_default(), GET_TASK_TIMEOUT).await {
                    Ok(Polled::Task(task)) => Ok(Event::Task(task)),
                    Ok(_) => Err(ActionError::from_client(error).with_task(task).into()),
                    Err(interruption) => Err(self.interrupted_for(interruption, Some(task)).await.into()),
                }
            }
            Ok(Err(error)) => match (error.size_error(), self.task_with_known_id(message)) {
                (Some(why), Some(task)) if is_new_task => Err(self.does_not_fit_for(why, task).await.into()),
                _ => Err(DeliveryError::Client(error)),
            },
            Err(interruption) => {
                let task = self.task_with_known_id(message);
                Err(self.interrupted_for(interruption, task).await.into())
            }
        }
    }

    /// Continues with a task that the agent has reported.
    pub(super) async fn resume(&mut self, event: Event) -> Reply {
        self.apply(event).await?;
        self.poll().await?;
        self.conclude().await
    }

    /// Follows a task that a replica which is gone has begun: subscribes to it, or polls it. `reported` is what the caller
    /// has seen of it.
    pub(super) async fn follow_adopted(&mut self, task: Task, reported: Vec<Event>) -> Reply {
        let task_id = task.id.clone();
        self.builder.restore(&task_id, reported);
        self.waiter.has_task_id = true;
        self.is_accepted = true;
        self.apply(Event::Task(task)).await?;
        if !self.can_conclude() {
            let phase = RunPhase::Subscribing { task_id, subscriptions: 0 };
            match Box::pin(self.follow(phase, None)).await {
                Ok(()) => {}
                Err(DeliveryError::Action(error)) => return Err(error),
                Err(DeliveryError::Client(error)) => return Err(known_task_error(error, self.known_task())),
                Err(DeliveryError::NotSent(error)) => return Err(error),
                Err(DeliveryError::TaskEnded) => return Err(ActionError::internal()),
            }
        }
        self.conclude().await
    }

    /// Continues with a task that was read outside of the run, after an answer.
    pub(super) async fn resume_after_answer(&mut self, task: Task) -> Reply {
        self.builder.reset();
        self.resume(Event::Task(task)).await
    }

    /// The task of a message, if its id does not depend on the agent's response.
    fn task_with_known_id(&self, message: &OutgoingMessage<'_>) -> Option<TaskRef> {
        let has_client_ids = self.waiter.live_agent.client.dialect.client_assigns_task_ids();
        let id = message.task_id.or(message.new_task_id.filter(|_| has_client_ids))?;
        Some(self.recorder.task_ref(Some(id.to_owned()), message.context_id.map(str::to_owned)))
    }

    /// Whether the task still asks the question that this run answers.
    async fn asks_old_question(&self, task: &Task) -> bool {
        match &self.recorder.input.purpose {
            Purpose::Answer { question } => asks_question(task, question, &self.actions.agent).await,
            Purpose::NewTask { .. } | Purpose::Adopted { .. } | Purpose::ReadOrCancel => false,
        }
    }

    /// Some agents reply to an answer with the task as it was, still asking, and then go on.
    async fn poll_past_old_question(&mut self, mut task: Task) -> Task {
        let mut poller = Poller::new(task.id.clone(), PollSchedule::CONFIRM);
        while self.asks_old_question(&task).await {
            match poller.next(&mut self.waiter).await {
                Ok(Some(Polled::Task(polled))) => task = polled,
                Ok(_) | Err(_) => break,
            }
        }
        task
    }

    /// Reads a task before it gets an answer. A task that has ended gets none. Otherwise the builder starts with the
    /// content of the task, because a stream reports only new content.
    async fn read_before_answer(&mut self, id: &str, streams: bool) -> Result<(), DeliveryError> {
        // Best effort. Uses at most a quarter of the remaining time; the rest is for the answer.
        let time_left = self.waiter.deadline.saturating_duration_since(Instant::now());
        let timeout = TASK_BEFORE_ANSWER_TIMEOUT.min(time_left / 4);
        let Ok(Polled::Task(task)) = self.waiter.get_task(id, timeout).await else {
            return Ok(());
        };
        if task.id == id && task.state.is_final() {
            self.recorder.observe(&task, "", None).await?;
            return Err(DeliveryError::TaskEnded);
        }
        let may_be_answered_elsewhere =
            self.actions.state.is_shared() && !self.actions.state.peers.is_alone();
        if task.id == id && !task.state.awaits_caller() && may_be_answered_elsewhere {
            // Another answer came first, under another id for the same question, or the agent went on without one.
            let message = "the agent does not wait for an answer now; look the task up with `get_task`";
            return Err(DeliveryError::NotSent(ActionError::new(Code::AgentUnavailable, message)));
        }
        if task.id == id && task.state.awaits_caller() && (streams || self.waiter.progress.wants_content()) {
            self.builder.start_from(Task { history: Vec::new(), ..task });
        }
        Ok(())
    }

    /// Runs the state machine until the task has settled.
    async fn follow(
        &mut self,
        mut phase: RunPhase,
        task_with_known_id: Option<TaskRef>,
    ) -> Result<(), DeliveryError> {
        loop {
            phase = match phase {
                RunPhase::Reading { mut events, subscriptions } => {
                    self.read(&mut events, subscriptions).await?
                }
                RunPhase::Checking { end, subscriptions } => {
                    self.check(end, subscriptions, task_with_known_id.as_ref()).await?
                }
                RunPhase::Subscribing { task_id, subscriptions } => {
                    self.subscribe(&task_id, subscriptions + 1).await?
                }
                RunPhase::Polling => return Ok(self.poll().await?),
                RunPhase::Settled => return Ok(()),
            };
        }
    }

    async fn read(
        &mut self,
        events: &mut EventStream,
        mut subscriptions: u32,
    ) -> Result<RunPhase, DeliveryError> {
        let end = match self.read_events(events).await {
            // Not every agent supports subscriptions, whatever its card says; then the run polls.
            Err(DeliveryError::Client(_)) if subscriptions > 0 => {
                subscriptions = MAX_SUBSCRIPTIONS;
                StreamEnd::Closed
            }
            Err(DeliveryError::Client(error))
                if !self.is_answer_undecided() && self.builder.task().is_some() =>
            {
                return Err(match error.size_error() {
                    Some(why) => self.does_not_fit(why).await.into(),
                    None => known_task_error(error, self.known_task()).into(),
                });
            }
            end => end?,
        };
        // One stream with all the content needs no check. `poll` returns immediately for a settled task, unless it is a
        // submitted task that waits for authentication, which may happen outside the bridge.
        if self.builder.is_settled() && subscriptions == 0 && !self.builder.is_empty() {
            return Ok(RunPhase::Polling);
        }
        Ok(match &self.builder.direct_message {
            Some(_) => RunPhase::Settled,
            None => RunPhase::Checking { end, subscriptions },
        })
    }

    /// Reads the task after a stream that ended without a settled state, or without any content.
    async fn check(
        &mut self,
        end: StreamEnd,
        subscriptions: u32,
        task_with_known_id: Option<&TaskRef>,
    ) -> Result<RunPhase, DeliveryError> {
        let Some(task_ref) = self.task_with_id().or_else(|| task_with_known_id.cloned()) else {
            let message = "the agent ended its stream before it assigned a task id";
            return Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent().into());
        };
        let id = task_ref.id.clone().unwrap_or_default();
        match self.waiter.get_task(&id, GET_TASK_TIMEOUT).await {
            // An older state does not undo the end of the task.
            Ok(Polled::Task(task)) if self.builder.is_settled() && !task.state.is_settled() => {}
            Ok(Polled::Task(task)) => self.apply(Event::Task(Task { id: id.clone(), ..task })).await?,
            Ok(Polled::Failed(error)) if error.is_task_not_found() && !self.builder.is_settled() => {
                return Err(known_task_error(error, task_ref).into());
            }
            Ok(_) if self.is_answer_undecided() || self.builder.task().is_none() => {
                let message = "the agent ended its stream, and reading the task from it failed";
                let error = ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent();
                return Err(error.with_task(task_ref).into());
            }
            Ok(_) => {}
            Err(interruption) => {
                return Err(self.interrupted_for(interruption, Some(task_ref)).await.into());
            }
        }
        let is_settled = self.builder.is_settled();
        // A submitted task may be silent for hours, so the run polls it. Any other call has timed out.
        if end == StreamEnd::Idle && !is_settled && self.waiter.mode != ReplyMode::Submit {
            return Err(self.interrupted(Interruption::Idle).await.into());
        }
        let polls = is_settled || end == StreamEnd::Idle || subscriptions >= MAX_SUBSCRIPTIONS;
        Ok(if polls { RunPhase::Polling } else { RunPhase::Subscribing { task_id: id, subscriptions } })
    }

    async fn subscribe(&mut self, task_id: &str, subscriptions: u32) -> Result<RunPhase, DeliveryError> {
        let live_agent = Arc::clone(&self.waiter.live_agent);
        let subscribe = Box::pin(live_agent.client.subscribe(task_id, self.waiter.trace));
        match self.waiter.with_idle_timeout(subscribe).await {
            Ok(Ok(events)) => Ok(RunPhase::Reading { events: Box::new(events), subscriptions }),
            Ok(Err(_)) | Err(Interruption::Idle) => Ok(RunPhase::Polling),
            Err(interruption) => Err(self.interrupted(interruption).await.into()),
        }
    }

    /// Whether the run answers a question, and the agent has sent nothing since.
    fn is_answer_undecided(&self) -> bool {
        matches!(self.recorder.input.purpose, Purpose::Answer { .. }) && !self.is_answer_taken
    }

    /// Reads events until the task settles or the stream ends.
    async fn read_events(&mut self, events: &mut EventStream) -> Result<StreamEnd, DeliveryError> {
        let mut read_until: Option<Instant> = None;
        loop {
            if self.builder.is_stream_finished() {
                events.close();
                return Ok(StreamEnd::Closed);
            }
            if self.builder.is_settled() {
                read_until.get_or_insert_with(|| Instant::now() + READ_AFTER_END);
            }
            let next = match read_until {
                Some(until) => match tokio::time::timeout_at(until, events.next()).await {
                    Ok(next) => Ok(next),
                    // An event that has arrived in time counts, however long it waits to be decoded.
                    Err(_) => match events.decode_arrived().await {
                        Ok(None) => return Ok(StreamEnd::Closed),
                        arrived => Ok(arrived),
                    },
                },
                None => {
                    let subscription = self.end_subscription.as_ref();
                    let ended = OptionFuture::from(subscription.map(TaskEndSubscription::ended));
                    let next = async {
                        tokio::select! {
                            biased;
                            next = events.next() => Some(next),
                            Some(()) = ended => None,
                        }
                    };
                    match self.waiter.with_idle_timeout(next).await {
                        Ok(Some(next)) => Ok(next),
                        // Another request has canceled the task, which not every agent reports on the stream.
                        Ok(None) => {
                            self.end_subscription = None;
                            read_until = Some(Instant::now() + READ_AFTER_END);
                            continue;
                        }
                        Err(interruption) => Err(interruption),
                    }
                }
            };
            let event = match next {
                Ok(Ok(Some(event))) => event,
                Ok(Ok(None)) => {
                    let progress = self.builder.end_stream();
                    self.report(progress).await?;
                    return Ok(StreamEnd::Closed);
                }
                // The caller of this run finds out whether the agent took the answer.
                Ok(Err(error)) if self.is_answer_undecided() => return Err(DeliveryError::Client(error)),
                Ok(Err(ClientError::Broken(error))) => {
                    tracing::debug!(agent = %self.actions.agent, %error, "the connection of a stream broke");
                    return Ok(StreamEnd::Closed);
                }
                // A later error does not undo the end of the task.
                Ok(Err(_)) if self.builder.is_settled() => return Ok(StreamEnd::Closed),
                Ok(Err(error)) => return Err(DeliveryError::Client(error)),
                // The task may have ended without an event.
                Err(Interruption::Idle) if self.builder.task().is_some() => return Ok(StreamEnd::Idle),
                Err(interruption) => return Err(self.interrupted(interruption).await.into()),
            };
            if self.is_answer_undecided() {
                self.is_answer_taken = true;
                let (size, builder) = (event.allocated(), &mut self.builder);
                let progress =
                    offload::run(&self.actions.agent, size, || builder.apply_first_after_answer(event)).await;
                self.report(progress).await?;
            } else {
                self.apply(event).await?;
            }
            // A burst of events must not keep other calls waiting.
            tokio::task::coop::consume_budget().await;
        }
    }

    /// Polls the task until the run can conclude. Most tasks have settled already.
    async fn poll(&mut self) -> Result<(), ActionError> {
        if self.can_conclude() {
            return Ok(());
        }
        Box::pin(self.poll_until_settled()).await
    }

    async fn poll_until_settled(&mut self) -> Result<(), ActionError> {
        let Some(id) = self.builder.task().map(|task| task.id.clone()) else {
            return Ok(());
        };
        let mut poller = Poller::new(id.clone(), PollSchedule::FOLLOW);
        let (mut failures, mut is_out_of_memory) = (0, false);
        self.report_auth().await?;
        while !self.can_conclude() {
            let failure = match poller.next(&mut self.waiter).await {
                Err(interruption) => return Err(self.interrupted(interruption).await),
                Ok(None) => return Ok(()),
                Ok(Some(Polled::Task(task))) => {
                    failures = 0;
                    self.apply(Event::Task(Task { id: id.clone(), ..task })).await?;
                    self.report_auth().await?;
                    continue;
                }
                Ok(Some(Polled::Failed(error))) if error.is_task_not_found() => {
                    return Err(known_task_error(error, self.known_task()));
                }
                // An overloaded agent says so, and can be polled again.
                Ok(Some(Polled::Failed(ClientError::Refused { http_status: Some(429 | 503), .. }))) => {
                    continue;
                }
                Ok(Some(Polled::Failed(error))) if error.size_error() == Some(SizeError::TooLarge) => {
                    return Err(self.does_not_fit(SizeError::TooLarge).await);
                }
                Ok(Some(Polled::Failed(error))) => {
                    is_out_of_memory = error.size_error() == Some(SizeError::OutOfMemory);
                    error_chain(&error)
                }
                Ok(Some(Polled::TimedOut)) => "no response in time".to_owned(),
            };
            failures += 1;
            // No caller waits for a submitted task; the run polls it until its own timeout.
            if failures >= MAX_FAILED_POLLS && self.waiter.mode != ReplyMode::Submit {
                if is_out_of_memory {
                    return Err(self.does_not_fit(SizeError::OutOfMemory).await);
                }
                let message = format!("reading the task from the agent failed: {failure}");
                let error = ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent();
                return Err(error.with_task(self.known_task()));
            }
        }
        Ok(())
    }

    /// Reports a request for authentication. The run then continues to follow the task.
    async fn report_auth(&mut self) -> Result<(), ActionError> {
        if let Some(task) = self.builder.task()
            && task.state == TaskState::AuthRequired
            && !self.can_conclude()
        {
            self.last_recorded = Some(ReplyStatus::AuthRequired);
            let (outcome, _) = self.observe(task).await?;
            self.accept(&outcome).await;
        }
        Ok(())
    }

    async fn apply(&mut self, event: Event) -> Result<(), ActionError> {
        let (size, builder) = (event.allocated(), &mut self.builder);
        let progress = offload::run(&self.actions.agent, size, || builder.apply(event)).await;
        self.report(progress).await
    }

    /// Records a change of the task, and passes the progress to the caller.
    async fn report(&mut self, progress: Applied) -> Result<(), ActionError> {
        self.recorder.input.content.release();
        let progress = match progress {
            Ok(progress) => progress,
            Err(why) => return Err(self.does_not_fit(why).await),
        };
        // The task is recorded as soon as it has an id, so that requests can find and cancel it, and when its status
        // changes. The settled state is recorded at the end, with the complete content.
        if let Some(task) = self.builder.task_with_id()
            && !task.state.is_settled()
            && self.last_recorded != Some(ReplyStatus::from(&task.state))
        {
            self.last_recorded = Some(ReplyStatus::from(&task.state));
            if self.end_subscription.as_ref().is_none_or(|subscription| !subscription.is_for(&task.id)) {
                let tasks = &self.actions.state.tasks;
                self.end_subscription = Some(tasks.subscribe_to_end(&self.actions.agent, &task.id));
            }
            self.recorder.update_session(task.context_id.as_deref()).await;
            let (outcome, _) = self.observe(task).await?;
            self.accept(&outcome).await;
        }
        self.waiter.has_task_id |= self.builder.task_with_id().is_some();
        for mut event in progress {
            // The reason for a failure is redacted like an error.
            if let ProgressEvent::State { state, message } = &mut event
                && state.is_failure()
            {
                offload::run(&self.actions.agent, message.len(), || self.actions.secrets.redact(message))
                    .await;
            }
            self.waiter.progress.report(event).await;
        }
        if self.waiter.is_abandoned && self.waiter.has_task_id {
            return Err(self.interrupted(Interruption::Abandoned).await);
        }
        Ok(())
    }

    /// Records the state of the builder's task and builds the reply. A task for whose record there is no room is
    /// canceled, because no request could find it.
    async fn observe(&self, task: &Task) -> Result<(Arc<Outcome>, MessageSource), ActionError> {
        let observed = self.recorder.observe(task, &self.builder.status_texts, None).await;
        if observed.as_ref().is_err_and(|error| error.info.code == Code::Busy) && !task.state.is_final() {
            Box::pin(self.cancel_at_agent(&task.id)).await;
        }
        observed
    }

    /// The running task is recorded: gives the caller of a submitted task its reply, once.
    async fn accept(&mut self, outcome: &Arc<Outcome>) {
        let is_submitted = self.waiter.mode == ReplyMode::Submit;
        self.waiter.progress.recorded(is_submitted);
        if is_submitted && !std::mem::replace(&mut self.is_accepted, true) {
            self.waiter.progress.accepted(outcome).await;
        }
    }

    /// Whether the run can build the reply: the task has settled. Authentication may happen outside the bridge, so the
    /// run follows a submitted task that waits for it.
    fn can_conclude(&self) -> bool {
        let waits_for_auth = self.builder.task().is_some_and(|task| task.state == TaskState::AuthRequired);
        self.builder.is_settled() && !(self.waiter.mode == ReplyMode::Submit && waits_for_auth)
    }

    /// Builds the reply.
    async fn conclude(&mut self) -> Reply {
        if let Some(message) = &self.builder.direct_message {
            self.recorder.update_session(message.context_id.as_deref()).await;
            let size = message.allocated();
            self.recorder.cover_reply(size)?;
            let content =
                offload::run(&self.actions.agent, size, || assemble::message_content(message)).await;
            let content = content.map_err(|reason| unreadable(&reason))?;
            let task = self.recorder.task_ref(None, message.context_id.clone());
            let outcome = Outcome::new(ReplyStatus::Completed, content, task);
            return Ok(Arc::new(outcome.with_retries(self.recorder.input.retries)));
        }
        let Some(task) = self.builder.task() else {
            return Err(ActionError::internal().after_reaching_agent());
        };
        self.recorder.update_session(task.context_id.as_deref()).await;
        let (outcome, source) = self.observe(task).await?;
        let message = &outcome.content.message;
        let not_streamed = match source {
            MessageSource::Artifacts => {
                offload::run(&self.actions.agent, message.len(), || self.builder.not_streamed(message)).await
            }
            MessageSource::States => message,
            MessageSource::History => "",
        };
        if !not_streamed.is_empty() {
            self.waiter.progress.report(ProgressEvent::Response(not_streamed.to_owned())).await;
        }
        Ok(outcome)
    }

    /// The task of the builder, for an error.
    fn known_task(&self) -> TaskRef {
        let task = self.builder.task();
        let context_id = task.and_then(|task| task.context_id.clone());
        self.recorder.task_ref(task.map(|task| task.id.clone()), context_id)
    }

    fn task_with_id(&self) -> Option<TaskRef> {
        self.builder.task_with_id().map(|_| self.known_task())
    }

    /// Cancels a task whose content does not fit, because the run no longer follows it, and returns the error for the
    /// caller.
    async fn does_not_fit(&self, why: SizeError) -> ActionError {
        let runs = self.builder.task_with_id().is_some_and(|task| !task.state.is_final());
        if runs { self.does_not_fit_for(why, self.known_task()).await } else { self.size_error(why) }
    }

    async fn does_not_fit_for(&self, why: SizeError, task: TaskRef) -> ActionError {
        if let Some(id) = &task.id {
            Box::pin(self.cancel_at_agent(id)).await;
        }
        self.size_error(why).with_task(task)
    }

    fn size_error(&self, why: SizeError) -> ActionError {
        let error = match why {
            SizeError::TooLarge => ClientError::TooLarge { limit: self.actions.config.max_response_size },
            SizeError::OutOfMemory => ClientError::OutOfMemory,
        };
        ActionError::from_client(error).with_task(self.known_task())
    }

    async fn interrupted(&self, why: Interruption) -> ActionError {
        self.interrupted_for(why, self.task_with_id()).await
    }

    /// Cancels an interrupted task if its id is known, and returns the error for the caller.
    pub(super) async fn interrupted_for(&self, why: Interruption, task: Option<TaskRef>) -> ActionError {
        // Boxed like every rare step, so that the future of an ordinary call stays small: it is allocated, moved and
        // kept for each call in flight.
        Box::pin(self.cancel_interrupted(why, task)).await
    }

    async fn cancel_interrupted(&self, why: Interruption, task: Option<TaskRef>) -> ActionError {
        // A submitted task goes on without the bridge; only its own timeout ends it.
        let leaves_task = self.waiter.mode == ReplyMode::Submit && why == Interruption::Shutdown;
        let task_id = task.as_ref().and_then(|task| task.id.as_ref());
        let message = match why {
            Interruption::AgentExited => return agent_exited(task),
            Interruption::Deadline => "the agent did not finish within the timeout",
            Interruption::Idle => "the agent was silent for too long (`stream_idle_timeout`)",
            Interruption::Shutdown if leaves_task && task_id.is_some() => {
                "the bridge stops serving the agent and no longer tracks the task"
            }
            Interruption::Shutdown => {
                "the bridge stops serving the agent; the call did not finish within the grace period"
            }
            Interruption::Abandoned => "the caller no longer listens",
        };
        let canceled = match task_id {
            Some(_) if leaves_task => Some(false),
            Some(id) => Some(self.cancel_at_agent(id).await),
            None => None,
        };
        let mut error = ActionError { task, ..ActionError::new(Code::Timeout, message) };
        error.info.cancelled = Some(canceled);
        error.after_reaching_agent()
    }

    async fn cancel_at_agent(&self, task_id: &str) -> bool {
        let cancel = self.waiter.live_agent.client.cancel(task_id, self.waiter.trace);
        let Ok(Ok(task)) = tokio::time::timeout(CLEANUP_CANCEL_TIMEOUT, cancel).await else {
            return false;
        };
        let task = Task { id: task_id.to_owned(), ..task };
        match self.waiter.mode {
            ReplyMode::Submit => self.recorder.record_unpublished(&task).await,
            ReplyMode::Final | ReplyMode::Stream => {
                // Best effort: the caller gets the error.
                let _ = self.recorder.observe(&task, "", None).await;
            }
        }
        task.state == TaskState::Canceled
    }
}

pub(super) fn agent_exited(task: Option<TaskRef>) -> ActionError {
    let error = match task {
        Some(task) => {
            ActionError::new(Code::TaskLost, "the agent exited while it ran the task").with_task(task)
        }
        None => ActionError::new(Code::OutcomeUnknown, "the agent exited before it responded"),
    };
    error.after_reaching_agent()
}

/// An error about a task that the bridge has seen: if the agent no longer knows it, the task is lost.
pub(super) fn known_task_error(error: ClientError, task: TaskRef) -> ActionError {
    let is_lost = error.is_task_not_found();
    let mut error = ActionError::from_client(error).with_task(task);
    if is_lost {
        error.info.code = Code::TaskLost;
    }
    error
}
