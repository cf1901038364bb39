//! The phases of a run whose answer is a stream of events.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::time::Instant;

use super::{
    CallRun, Failure, GET_TASK_TIMEOUT, Interruption, Phase, Polled, Purpose, StreamEnd, about_known_task,
};
use crate::a2a::client::ClientError;
use crate::a2a::model::{Event, Task};
use crate::a2a::stream::EventStream;
use crate::action::progress::Progress;
use crate::action::request::ReplyMode;
use crate::action::task_builder::{TaskBuilder, TooMuch};
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::TaskRef;
use crate::state::followers::Follower;

/// How often a task's events are subscribed to again.
const MAX_SUBSCRIPTIONS: u32 = 3;
/// How long to read on after a state that ends the call: some agents send more after it, and some
/// keep the stream open for ever.
const AFTER_THE_END: Duration = Duration::from_millis(500);

impl<P: Progress> CallRun<'_, P> {
    pub(super) async fn read(
        &mut self,
        events: &mut EventStream,
        subscriptions: &mut u32,
        fold: &mut TaskBuilder<'_>,
    ) -> Result<Phase, Failure> {
        let end = match self.read_events(events, fold).await {
            // Not every agent supports subscriptions, whatever its card says; then the task is polled.
            Err(Failure::Client(_)) if *subscriptions > 0 => {
                *subscriptions = MAX_SUBSCRIPTIONS;
                StreamEnd::Closed
            }
            Err(Failure::Client(error)) if !self.is_answer_untaken() && fold.task().is_some() => {
                return Err(about_known_task(error, self.known_ref(fold)).into());
            }
            ended => ended?,
        };
        // One stream that has told everything needs no check. Polling ends at once, unless a submitted task
        // waits for authentication.
        if fold.is_settled() && *subscriptions == 0 && !fold.is_bare() {
            return Ok(Phase::Polling);
        }
        Ok(if fold.direct().is_some() { Phase::Settled } else { Phase::Checking(end) })
    }

    /// Asks what became of a task whose stream ended without a settled state, or without any content.
    pub(super) async fn check(
        &mut self,
        end: StreamEnd,
        named_by_us: Option<&TaskRef>,
        subscriptions: u32,
        fold: &mut TaskBuilder<'_>,
    ) -> Result<Phase, Failure> {
        let named = fold.task().filter(|task| !task.id.is_empty()).map(|_| self.known_ref(fold));
        let Some(named) = named.or_else(|| named_by_us.cloned()) else {
            let message = "the agent ended its stream before it named a task";
            return Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent().into());
        };
        let id = named.id.clone().unwrap_or_default();
        match self.get_task(&id, GET_TASK_TIMEOUT).await {
            // A state that ended the task is not undone by an older one.
            Ok(Polled::Seen(seen)) if fold.is_settled() && !seen.state.is_settled() => {}
            Ok(Polled::Seen(seen)) => {
                self.take(fold, Event::Task(Task { id: id.clone(), ..seen })).await?;
            }
            Ok(Polled::Failed(error)) if error.is_task_not_found() && !fold.is_settled() => {
                return Err(about_known_task(error, named).into());
            }
            Ok(_) if self.is_answer_untaken() || fold.task().is_none() => {
                let message = "the agent ended its stream and cannot be asked what became of the task";
                let error = ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent();
                return Err(error.about(named).into());
            }
            Ok(_) => {}
            Err(interruption) => return Err(self.interrupted(interruption, Some(named)).await.into()),
        }
        // A submitted task may be silent for hours; then it is polled. Anybody else has waited long enough.
        if end == StreamEnd::Silent && !fold.is_settled() {
            return match self.call.mode {
                ReplyMode::Submit => Ok(Phase::Polling),
                ReplyMode::Final | ReplyMode::Stream => {
                    Err(self.interrupted_with(Interruption::Idle, fold).await.into())
                }
            };
        }
        let is_enough = fold.is_settled() || subscriptions >= MAX_SUBSCRIPTIONS;
        Ok(if is_enough { Phase::Polling } else { Phase::Subscribing(id) })
    }

    pub(super) async fn subscribe(
        &mut self,
        task_id: &str,
        fold: &TaskBuilder<'_>,
    ) -> Result<Phase, Failure> {
        let instance = Arc::clone(&self.instance);
        match self.within_idle(Box::pin(instance.client.subscribe(task_id, self.call.trace))).await {
            Ok(Ok(events)) => Ok(Phase::Reading(Box::new(events))),
            Ok(Err(_)) | Err(Interruption::Idle) => Ok(Phase::Polling),
            Err(interruption) => Err(self.interrupted_with(interruption, fold).await.into()),
        }
    }

    /// Whether the agent has reported nothing since it was sent an answer.
    fn is_answer_untaken(&self) -> bool {
        matches!(&self.call.purpose, Purpose::Answer(question) if !question.is_taken)
    }

    /// Reads events until the task settles or the stream ends, in order or not.
    async fn read_events(
        &mut self,
        events: &mut EventStream,
        fold: &mut TaskBuilder<'_>,
    ) -> Result<StreamEnd, Failure> {
        let mut read_until: Option<Instant> = None;
        loop {
            if fold.is_last() {
                events.close();
                return Ok(StreamEnd::Closed);
            }
            if fold.is_settled() {
                read_until.get_or_insert_with(|| Instant::now() + AFTER_THE_END);
            }
            let next = match read_until {
                Some(until) => match tokio::time::timeout_at(until, events.next()).await {
                    Ok(next) => Ok(next),
                    Err(_) => return Ok(StreamEnd::Closed),
                },
                None => {
                    let ended = OptionFuture::from(self.follower.as_ref().map(Follower::ended));
                    let next = async {
                        tokio::select! {
                            biased;
                            next = events.next() => Some(next),
                            Some(()) = ended => None,
                        }
                    };
                    match self.within_idle(next).await {
                        Ok(Some(next)) => Ok(next),
                        // Somebody has cancelled the task, and not every agent says so on the stream.
                        Ok(None) => {
                            self.follower = None;
                            read_until = Some(Instant::now() + AFTER_THE_END);
                            continue;
                        }
                        Err(interruption) => Err(interruption),
                    }
                }
            };
            let event = match next {
                Ok(Ok(Some(event))) => event,
                Ok(Ok(None)) => {
                    let frames = fold.end_of_stream().map_err(|TooMuch| self.too_much(fold))?;
                    self.tell(fold, frames).await?;
                    return Ok(StreamEnd::Closed);
                }
                // Whether the agent took the answer is up to the caller.
                Ok(Err(error)) if self.is_answer_untaken() => return Err(Failure::Client(error)),
                Ok(Err(ClientError::Broken(error))) => {
                    tracing::debug!(agent = %self.actions.agent, %error, "a stream was cut off");
                    return Ok(StreamEnd::Closed);
                }
                // A task that has ended is not undone by what comes after it.
                Ok(Err(_)) if fold.is_settled() => return Ok(StreamEnd::Closed),
                Ok(Err(error)) => return Err(Failure::Client(error)),
                // The task may have ended without a word.
                Err(Interruption::Idle) if fold.task().is_some() => return Ok(StreamEnd::Silent),
                Err(interruption) => return Err(self.interrupted_with(interruption, fold).await.into()),
            };
            match &mut self.call.purpose {
                Purpose::Answer(question) if !question.is_taken => {
                    question.is_taken = true;
                    let applied = fold.apply_first_after_answer(event);
                    let frames = applied.map_err(|TooMuch| self.too_much(fold))?;
                    self.tell(fold, frames).await?;
                }
                _ => self.take(fold, event).await?,
            }
            // A burst of events must not keep other calls waiting.
            tokio::task::coop::consume_budget().await;
        }
    }
}
