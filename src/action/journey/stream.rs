//! A call whose answer is a stream of events, and what becomes of it when the stream is cut off.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{ASIDE, Failure, Interruption, Journey, about_known_task};
use crate::a2a::client::ClientError;
use crate::a2a::dialect::Outgoing;
use crate::a2a::model::{Event, Task};
use crate::a2a::stream::EventStream;
use crate::action::error::{ActionError, Code};
use crate::action::fold::{Fold, TooMuch};
use crate::action::progress::Progress;
use crate::action::run::Mode;

/// How often a task's events are subscribed to again.
const MAX_SUBSCRIPTIONS: u32 = 3;
/// How long to read on after a state that ends the call: some agents send more after it, and some
/// keep the stream open for ever.
const AFTER_THE_END: Duration = Duration::from_millis(500);

impl<P: Progress> Journey<'_, P> {
    /// Sends the message and reads the events of its answer.
    pub(super) async fn stream(
        &mut self,
        message: &Outgoing<'_>,
        fold: &mut Fold<'_>,
    ) -> Result<(), Failure> {
        let instance = Arc::clone(&self.instance);
        let client = &instance.client;
        let mut events = match self.within_idle(Box::pin(client.stream(message, self.trace))).await {
            Ok(events) => events.map_err(Failure::Client)?,
            Err(interruption) => {
                let task = self.named_by_us(message);
                return Err(self.interrupted(interruption, task).await.into());
            }
        };
        let mut is_answer = message.task_id.is_some();
        let mut subscriptions = 0;
        loop {
            match self.read(&mut events, fold, &mut is_answer).await {
                // Not everybody can be subscribed to, whatever the card says; then the task is polled.
                Err(Failure::Client(_)) if subscriptions > 0 => subscriptions = MAX_SUBSCRIPTIONS,
                Err(Failure::Client(error)) if !is_answer && fold.task().is_some() => {
                    return Err(about_known_task(error, self.known_ref(fold)).into());
                }
                ended => ended?,
            }
            // Between two streams events may have been missed.
            if fold.is_settled() && subscriptions == 0 && !fold.is_bare() {
                return Ok(self.follow(fold).await?);
            }
            if fold.direct().is_some() {
                return Ok(());
            }
            let named = fold.task().filter(|task| !task.id.is_empty()).map(|_| self.known_ref(fold));
            let Some(named) = named.or_else(|| self.named_by_us(message)) else {
                let message = "the agent ended its stream before it named a task";
                return Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent().into());
            };
            let id = named.id.clone().unwrap_or_default();
            // Without a settled state, or without any content: ask what became of the task.
            match self.look(&id, ASIDE).await {
                // A state that ended the task is not undone by an older one.
                Ok(Some(Ok(seen))) if fold.is_settled() && !seen.state.is_settled() => {}
                Ok(Some(Ok(seen))) => {
                    self.take(fold, Event::Task(Task { id: id.clone(), ..seen })).await?;
                }
                Ok(Some(Err(error))) if error.is_task_not_found() && !fold.is_settled() => {
                    return Err(about_known_task(error, named).into());
                }
                Ok(_) if is_answer || fold.task().is_none() => {
                    let message = "the agent ended its stream and cannot be asked what became of the task";
                    let error = ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent();
                    return Err(error.about(named).into());
                }
                Ok(_) => {}
                Err(interruption) => return Err(self.interrupted(interruption, Some(named)).await.into()),
            }
            if fold.is_settled() || subscriptions >= MAX_SUBSCRIPTIONS {
                return Ok(self.follow(fold).await?);
            }
            subscriptions += 1;
            match self.within_idle(Box::pin(client.subscribe(&id, self.trace))).await {
                Ok(Ok(again)) => events = again,
                Ok(Err(_)) | Err(Interruption::Idle) => return Ok(self.follow(fold).await?),
                Err(interruption) => return Err(self.interrupted_with(interruption, fold).await.into()),
            }
        }
    }

    /// Reads events until the task settles or the stream ends, in order or not.
    async fn read(
        &mut self,
        events: &mut EventStream,
        fold: &mut Fold<'_>,
        is_answer: &mut bool,
    ) -> Result<(), Failure> {
        let mut last_call: Option<Instant> = None;
        loop {
            if fold.is_last() {
                events.close();
                return Ok(());
            }
            if fold.is_settled() {
                last_call.get_or_insert_with(|| Instant::now() + AFTER_THE_END);
            }
            let next = match last_call {
                Some(until) => match tokio::time::timeout_at(until, events.next()).await {
                    Ok(next) => Ok(next),
                    Err(_) => return Ok(()),
                },
                None => self.within_idle(events.next()).await,
            };
            let event = match next {
                Ok(Ok(Some(event))) => event,
                Ok(Ok(None)) => {
                    let frames = fold.end_of_stream().map_err(|TooMuch| self.too_much(fold))?;
                    return Ok(self.tell(fold, frames).await?);
                }
                // Whether the agent took the answer is its caller's business.
                Ok(Err(error)) if *is_answer => return Err(Failure::Client(error)),
                Ok(Err(ClientError::Broken(error))) => {
                    tracing::debug!(agent = %self.actions.agent, %error, "a stream was cut off");
                    return Ok(());
                }
                // A task that has ended is not undone by what comes after it.
                Ok(Err(_)) if fold.is_settled() => return Ok(()),
                Ok(Err(error)) => return Err(Failure::Client(error)),
                // A submitted task may be silent for hours; then it is polled.
                Err(Interruption::Idle) if self.mode == Mode::Submit && fold.task().is_some() => {
                    return Ok(());
                }
                Err(interruption) => return Err(self.interrupted_with(interruption, fold).await.into()),
            };
            if std::mem::take(is_answer) {
                let frames = fold.apply_first_after_answer(event).map_err(|TooMuch| self.too_much(fold))?;
                self.tell(fold, frames).await?;
            } else {
                self.take(fold, event).await?;
            }
            // A burst of events is no reason to keep other calls waiting.
            tokio::task::coop::consume_budget().await;
        }
    }
}
