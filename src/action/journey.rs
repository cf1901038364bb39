//! One call on its way: sent once, followed to its end, told on the way.
//!
//! ```text
//! deliver ──blocking──> answer ──┐
//!         ──stream────> events ──┼──> Fold ──settled──> observe ──> Outcome
//!         ──at once───> poll ────┘      └──frames──> Progress
//! ```
//!
//! A message is sent at most once. A stream that ends without a settled state is never success:
//! the agent is asked what became of the task, its events are subscribed to again a few times,
//! and in the end it is polled. When nobody can tell, the outcome is unknown, and so says the reply.

mod observe;
mod stream;
mod wait;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::assemble::{self, Source};
use super::error::{ActionError, Code};
use super::fold::{Fold, TooMuch};
use super::outcome::{Outcome, Status, TaskRef};
use super::progress::{Frame, Progress};
use super::run::{Actions, Mode};
use crate::a2a::Instance;
use crate::a2a::client::{ClientError, Trace, chain};
use crate::a2a::dialect::{Outgoing, Wait};
use crate::a2a::model::{Answer, Event, Task, TaskState};
use crate::a2a::retry::{Retries, Retry};
pub(super) use observe::question_of;
use observe::unreadable;
pub(super) use wait::Interruption;

/// First pause before asking for a task again, and the longest.
pub(super) const POLL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How often in a row the agent may fail to say what became of a task.
const MAX_POLL_FAILURES: u32 = 6;
/// How long one look at a task may take.
pub(super) const ASIDE: Duration = Duration::from_secs(10);
/// How long an answer waits for a look at its task.
const RECALL: Duration = Duration::from_secs(3);
/// How often a task is looked at after its answer was cut off before it counts as still waiting.
pub(super) const SETTLING_LOOKS: u32 = 4;

/// One call on its way.
#[derive(Debug)]
pub(super) struct Journey<'a, P> {
    pub(super) actions: &'a Actions,
    pub(super) instance: Arc<Instance>,
    pub(super) mode: Mode,
    pub(super) skill: Option<Arc<str>>,
    pub(super) output_modes: Arc<[String]>,
    pub(super) session_id: Option<String>,
    pub(super) trace: &'a Trace,
    pub(super) deadline: Instant,
    pub(super) progress: &'a mut P,
    // Nobody listens; the task is cancelled as soon as its id is known.
    pub(super) abandoned: bool,
    pub(super) is_named: bool,
    // The question that the message answers.
    pub(super) answers: Option<u64>,
    // The status that was remembered last.
    pub(super) observed: Option<Status>,
    // The retries of its message, which the reply shows.
    pub(super) retries: Option<&'a Retries>,
}

/// Why a message led nowhere.
pub(super) enum Failure {
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

impl<P: Progress> Journey<'_, P> {
    /// Sends the message in the way that suits agent and caller, and follows the task to its end.
    pub(super) async fn deliver(&mut self, message: &Outgoing<'_>) -> Result<Outcome, Failure> {
        match Box::pin(self.attempt(message)).await {
            // The agent makes its own conversation, which the session follows from now on.
            Err(Failure::Client(error))
                if message.context_id.is_some()
                    && message.task_id.is_none()
                    && error.is_context_refused() =>
            {
                message.retries.record(Retry::ContextRefused);
                let message = Outgoing { context_id: None, ..*message };
                Box::pin(self.attempt(&message)).await
            }
            result => result,
        }
    }

    async fn attempt(&mut self, message: &Outgoing<'_>) -> Result<Outcome, Failure> {
        let max_size = usize::try_from(self.actions.limits.max_response_size).unwrap_or(usize::MAX);
        let mut fold = Fold::new(&self.actions.limits.artifacts, max_size, self.progress.listens());
        let wants_stream = self.mode != Mode::Final || self.actions.limits.prefer_stream;
        let streams = wants_stream && self.instance.card.streaming;
        if let Some(id) = message.task_id.filter(|_| streams || self.progress.listens()) {
            Box::pin(self.recall(id, &mut fold)).await;
        }
        if streams {
            match Box::pin(self.stream(message, &mut fold)).await {
                Err(Failure::Client(error)) => match self.stream_refused(&error) {
                    // The card promised what the agent does not do; the message was not taken.
                    Some(proof) => message.retries.record(proof),
                    None => return Err(Failure::Client(error)),
                },
                Err(failure) => return Err(failure),
                Ok(()) => return Ok(self.conclude(&fold).await?),
            }
        }
        let wait = if self.mode == Mode::Final { Wait::UntilSettled } else { Wait::No };
        let message = Outgoing { wait, ..*message };
        let instance = Arc::clone(&self.instance);
        let answer = match self.within(Box::pin(instance.client.send(&message, self.trace))).await {
            Ok(Ok(Answer::Task(task))) if self.answers.is_some() => {
                Answer::Task(Box::pin(self.past_old_question(task)).await)
            }
            Ok(Ok(answer)) => answer,
            // A task whose id is known can be asked for; an answer to a question is its caller's business.
            Ok(Err(error @ ClientError::Broken(_))) if message.task_id.is_none() => {
                let Some(task) = self.named_by_us(&message) else {
                    return Err(Failure::Client(error));
                };
                match self.look(task.id.as_deref().unwrap_or_default(), ASIDE).await {
                    Ok(Some(Ok(seen))) => Answer::Task(seen),
                    Ok(_) => return Err(ActionError::from_client(error).about(task).into()),
                    Err(interruption) => return Err(self.interrupted(interruption, Some(task)).await.into()),
                }
            }
            Ok(Err(error)) => return Err(Failure::Client(error)),
            Err(interruption) => {
                let task = self.named_by_us(&message);
                return Err(self.interrupted(interruption, task).await.into());
            }
        };
        Ok(Box::pin(self.resume(&mut fold, answer.into())).await?)
    }

    /// What the error proves if the agent does not stream: it has not taken the message.
    fn stream_refused(&self, error: &ClientError) -> Option<Retry> {
        let refused = error.is_streaming_refused().then_some(Retry::StreamingUnsupported);
        refused.or_else(|| self.instance.client.wrong_wire(error))
    }

    /// The task of a message whose id does not depend on the agent's answer.
    fn named_by_us(&self, message: &Outgoing<'_>) -> Option<TaskRef> {
        let made = message.new_task_id.filter(|_| self.instance.client.dialect().has_client_made_ids());
        let id = message.task_id.or(made)?;
        Some(self.task_ref(Some(id.to_owned()), message.context_id.map(str::to_owned)))
    }

    /// Some agents answer an answer with the task as it was, still asking, and then go on: looks
    /// again for a moment while the question is the one that was answered.
    async fn past_old_question(&mut self, mut task: Task) -> Task {
        let instance = Arc::clone(&self.instance);
        let trace = self.trace;
        let mut pause = POLL.0;
        for _ in 0..SETTLING_LOOKS {
            if !task.state.is_waiting() || Some(question_of(&task)) != self.answers {
                break;
            }
            let looked = self.within(async {
                tokio::time::sleep(pause).await;
                tokio::time::timeout(ASIDE, instance.client.get(&task.id, trace)).await
            });
            match looked.await {
                Ok(Ok(Ok(seen))) => task = seen,
                _ => break,
            }
            pause *= 2;
        }
        task
    }

    /// Begins with what a waiting task has made before: a stream tells only what is new, and a caller
    /// wants to hear only that.
    async fn recall(&mut self, id: &str, fold: &mut Fold<'_>) {
        // It can do without, and most of the time is for the answer.
        let limit = RECALL.min(self.deadline.saturating_duration_since(Instant::now()) / 4);
        if let Ok(Some(Ok(seen))) = self.look(id, limit).await
            && seen.state.is_waiting()
            && seen.id == id
        {
            fold.recall(Task { history: Vec::new(), ..seen });
        }
    }

    /// Looks at a task once; `None` if the agent does not answer within `limit`.
    async fn look(
        &mut self,
        id: &str,
        limit: Duration,
    ) -> Result<Option<Result<Task, ClientError>>, Interruption> {
        let (instance, trace) = (Arc::clone(&self.instance), self.trace);
        let looked = tokio::time::timeout(limit, Box::pin(instance.client.get(id, trace)));
        Ok(self.within(looked).await?.ok())
    }

    /// Goes on with a task that was looked at.
    pub(super) async fn resume(&mut self, fold: &mut Fold<'_>, event: Event) -> Result<Outcome, ActionError> {
        self.take(fold, event).await?;
        self.follow(fold).await?;
        self.conclude(fold).await
    }

    /// Follows a task that is known to the fold until it settles. Most have done so already.
    async fn follow(&mut self, fold: &mut Fold<'_>) -> Result<(), ActionError> {
        if self.is_over(fold) {
            return Ok(());
        }
        Box::pin(self.poll(fold)).await
    }

    async fn poll(&mut self, fold: &mut Fold<'_>) -> Result<(), ActionError> {
        let (mut pause, longest) = POLL;
        let mut failures = 0;
        let instance = Arc::clone(&self.instance);
        let client = &instance.client;
        self.tell_of_auth(fold).await?;
        while !self.is_over(fold) {
            let Some(id) = fold.task().map(|task| task.id.clone()) else {
                return Ok(());
            };
            let trace = self.trace;
            let looked = self.within(async {
                tokio::time::sleep(pause).await;
                tokio::time::timeout(ASIDE, Box::pin(client.get(&id, trace))).await
            });
            match looked.await {
                Err(interruption) => return Err(self.interrupted_with(interruption, fold).await),
                Ok(Ok(Ok(seen))) => {
                    failures = 0;
                    self.take(fold, Event::Task(Task { id, ..seen })).await?;
                    self.tell_of_auth(fold).await?;
                }
                Ok(Ok(Err(error))) if error.is_task_not_found() => {
                    return Err(about_known_task(error, self.known_ref(fold)));
                }
                // An agent that is overloaded says so, and can be asked again.
                Ok(Ok(Err(ClientError::Refused { http_status: Some(429 | 503), .. }))) => {}
                Ok(failed) => {
                    failures += 1;
                    // Nobody waits for a submitted task; it is looked for until its own limit.
                    if failures >= MAX_POLL_FAILURES && self.mode != Mode::Submit {
                        let why = match failed {
                            Ok(Err(error)) => chain(&error),
                            _ => "no answer in time".to_owned(),
                        };
                        return Err(self.unknown(&why, fold));
                    }
                }
            }
            pause = pause.mul_f32(1.5).min(longest);
        }
        Ok(())
    }

    /// Takes what the agent told, and tells it on.
    async fn take(&mut self, fold: &mut Fold<'_>, event: Event) -> Result<(), ActionError> {
        let frames = fold.apply(event).map_err(|TooMuch| self.too_much(fold))?;
        self.tell(fold, frames).await
    }

    async fn tell(&mut self, fold: &Fold<'_>, frames: Vec<Frame>) -> Result<(), ActionError> {
        // The task is remembered as soon as it has a name, so that it can be cancelled and looked up,
        // and when its status changes. Its settled state is left to the end, when all of it is there.
        if let Some(task) = fold.task().filter(|task| !task.id.is_empty())
            && !task.state.is_settled()
            && self.observed != Some(Status::from(&task.state))
        {
            self.observed = Some(Status::from(&task.state));
            self.follow_context(task.context_id.as_deref());
            self.observe(task, fold.status_texts(), None).await?;
        }
        self.is_named |= fold.task().is_some_and(|task| !task.id.is_empty());
        for frame in frames {
            self.progress.frame(frame).await;
        }
        if self.abandoned && self.is_named {
            return Err(self.interrupted_with(Interruption::Abandoned, fold).await);
        }
        Ok(())
    }

    /// Whether there is nothing to wait for. Authentication may happen elsewhere, so a submitted
    /// task is followed on while it waits for that.
    fn is_over(&self, fold: &Fold<'_>) -> bool {
        let waits_for_auth = fold.task().is_some_and(|task| task.state == TaskState::AuthRequired);
        fold.is_settled() && !(self.mode == Mode::Submit && waits_for_auth)
    }

    /// Tells how to answer a question after which the task is followed on.
    async fn tell_of_auth(&mut self, fold: &Fold<'_>) -> Result<(), ActionError> {
        if let Some(task) =
            fold.task().filter(|task| task.state == TaskState::AuthRequired && !self.is_over(fold))
        {
            self.observed = Some(Status::from(&task.state));
            let (outcome, _) = self.observe(task, fold.status_texts(), None).await?;
            self.progress.waits(&outcome).await;
        }
        Ok(())
    }

    /// The reply for a call that has come to its end.
    async fn conclude(&mut self, fold: &Fold<'_>) -> Result<Outcome, ActionError> {
        if let Some(message) = fold.direct() {
            self.follow_context(message.context_id.as_deref());
            let content = assemble::of_message(message).map_err(|reason| unreadable(&reason))?;
            let task = self.task_ref(None, message.context_id.clone());
            return Ok(Outcome::new(Status::Completed, content, task).after(self.retries));
        }
        let Some(task) = fold.task() else {
            return Err(ActionError::internal().after_reaching_agent());
        };
        self.follow_context(task.context_id.as_deref());
        let (outcome, source) = self.observe(task, fold.status_texts(), None).await?;
        if source == Source::States && !outcome.content.message.is_empty() {
            self.progress.frame(Frame::Response(outcome.content.message.clone())).await;
        }
        Ok(outcome)
    }

    fn unknown(&self, why: &str, fold: &Fold<'_>) -> ActionError {
        let message = format!("the agent can no longer be asked what became of the task: {why}");
        ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent().about(self.known_ref(fold))
    }

    fn too_much(&self, fold: &Fold<'_>) -> ActionError {
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
