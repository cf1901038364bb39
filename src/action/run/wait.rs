//! Waiting for an agent: the limits of a wait, and what happens when one is reached.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::Instant;

use super::CallRun;
use crate::a2a::model::{Task, TaskState};
use crate::action::progress::{Listener, Progress};
use crate::action::request::ReplyMode;
use crate::action::task_builder::TaskBuilder;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::TaskRef;

/// How long to wait for a cancel that no caller asked for.
const CANCEL_AT_AGENT: Duration = Duration::from_secs(3);

/// Why a wait ended without a response from the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::action) enum Interruption {
    Deadline,
    Idle,
    /// The end of a stop's grace period.
    Hurry,
    /// The agent's process has ended.
    Gone,
    Abandoned,
}

impl<P: Progress> CallRun<'_, P> {
    /// Waits until the call's limit, the end of a stop's grace period, or the end of the agent.
    pub(in crate::action) async fn within<T>(
        &mut self,
        wait: impl Future<Output = T>,
    ) -> Result<T, Interruption> {
        self.limited(wait, self.deadline).await
    }

    /// The same, for a wait in which a stream may not be silent for too long.
    pub(super) async fn within_idle<T>(&mut self, wait: impl Future<Output = T>) -> Result<T, Interruption> {
        // In mode `final` nobody sees the stream, and the call has a limit of its own.
        if self.call.mode == ReplyMode::Final {
            return self.within(wait).await;
        }
        let idle = Instant::now() + self.actions.limits.stream_idle_timeout;
        let result = self.limited(wait, idle.min(self.deadline)).await;
        result.map_err(|why| {
            if why == Interruption::Deadline && idle < self.deadline { Interruption::Idle } else { why }
        })
    }

    async fn limited<T>(&mut self, wait: impl Future<Output = T>, until: Instant) -> Result<T, Interruption> {
        let mut wait = pin!(wait);
        // Events of a stream are often there already; then nothing else needs to be set up.
        if let Some(result) = wait.as_mut().now_or_never() {
            return Ok(result);
        }
        self.progress.flush().await;
        // A clone of a token takes a lock that all calls share, so they are borrowed.
        let (actions, instance) = (self.actions, Arc::clone(&self.instance));
        // Nobody waits for a submitted task, so neither does a stop.
        let is_left = self.call.mode == ReplyMode::Submit && self.is_named;
        let mut gone = pin!(instance.terminated.cancelled());
        let mut hurry = pin!(actions.stop.grace_over.cancelled());
        let mut leave = pin!(actions.stop.begun.cancelled());
        let mut end = pin!(tokio::time::sleep_until(until));
        loop {
            let patience = self.progress.keep_alive_interval().filter(|_| !self.is_abandoned);
            let silence = async {
                match patience {
                    Some(patience) => tokio::time::sleep(patience).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                result = &mut wait => return Ok(result),
                () = &mut gone => return Err(Interruption::Gone),
                () = &mut end => return Err(Interruption::Deadline),
                () = &mut hurry => return Err(Interruption::Hurry),
                () = &mut leave, if is_left => return Err(Interruption::Hurry),
                () = silence => {
                    self.is_abandoned |= self.progress.keep_alive().await == Listener::Disconnected;
                    if self.is_abandoned && self.is_named {
                        return Err(Interruption::Abandoned);
                    }
                }
            }
        }
    }

    pub(super) async fn interrupted_with(&self, why: Interruption, fold: &TaskBuilder<'_>) -> ActionError {
        let task = fold.task().filter(|task| !task.id.is_empty()).map(|_| self.known_ref(fold));
        self.interrupted(why, task).await
    }

    /// Cancels what was interrupted, if its task is known, and says how that went.
    pub(in crate::action) async fn interrupted(
        &self,
        why: Interruption,
        task: Option<TaskRef>,
    ) -> ActionError {
        // Boxed like everything that is rare, so that the future of an ordinary call stays small: it
        // is allocated, moved and kept for each call in flight.
        Box::pin(self.end_interrupted(why, task)).await
    }

    async fn end_interrupted(&self, why: Interruption, task: Option<TaskRef>) -> ActionError {
        let message = match why {
            Interruption::Gone => {
                let error = match task {
                    Some(task) => {
                        ActionError::new(Code::TaskLost, "the agent ended while it held the task").about(task)
                    }
                    None => ActionError::new(Code::OutcomeUnknown, "the agent ended before it answered"),
                };
                return error.after_reaching_agent();
            }
            Interruption::Deadline => "the agent did not end within the limit",
            Interruption::Idle => "the agent was silent for too long (`stream_idle_timeout`)",
            Interruption::Hurry => {
                "the bridge stops serving the agent; the call did not finish within the grace period"
            }
            Interruption::Abandoned => "nobody listens any more",
        };
        // A submitted task goes on without the bridge; only its own limit ends it.
        let leaves_it = self.call.mode == ReplyMode::Submit && why == Interruption::Hurry;
        let id = task.as_ref().and_then(|task| task.id.clone()).filter(|_| !leaves_it);
        let mut cancelled = (leaves_it && task.is_some()).then_some(false);
        if let Some(id) = id {
            cancelled = Some(self.cancel_at_agent(&id).await);
        }
        let mut error = ActionError { task, ..ActionError::new(Code::Timeout, message) };
        error.info.cancelled = Some(cancelled);
        error.after_reaching_agent()
    }

    async fn cancel_at_agent(&self, task_id: &str) -> bool {
        let client = &self.instance.client;
        match tokio::time::timeout(CANCEL_AT_AGENT, client.cancel(task_id, self.call.trace)).await {
            Ok(Ok(task)) => {
                let cancelled = task.state == TaskState::Canceled;
                let task = Task { id: task_id.to_owned(), ..task };
                // Followers of a submitted task get the error that follows, with the reason.
                let _ = match self.call.mode {
                    ReplyMode::Submit => self.record(&task, "", None).await.map(drop),
                    ReplyMode::Final | ReplyMode::Stream => self.observe(&task, "", None).await.map(drop),
                };
                cancelled
            }
            Ok(Err(_)) | Err(_) => false,
        }
    }
}
