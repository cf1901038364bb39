//! Asking an agent for a task again and again: wait, ask, back off.

use crate::text::error_chain;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{CallRun, GET_TASK_TIMEOUT, Interruption, about_known_task};
use crate::a2a::client::ClientError;
use crate::a2a::model::{Event, Task, TaskState};
use crate::action::progress::Progress;
use crate::action::request::ReplyMode;
use crate::action::task_builder::TaskBuilder;
use crate::reply::error::ActionError;
use crate::reply::outcome::ReplyStatus;

/// Consecutive failed polls before a call with a waiting caller fails.
const MAX_FAILURES: u32 = 6;

/// The result of one poll.
pub(in crate::action) enum Polled {
    Seen(Task),
    Failed(ClientError),
    TimedOut,
}

/// How often to poll a task, and for how long.
#[derive(Debug, Clone, Copy)]
pub(in crate::action) struct Pace {
    first: Duration,
    longest: Duration,
    growth: f32,
    polls: u32,
    /// Polling goes on after those for this long.
    patience: Duration,
}

impl Pace {
    /// Until the task has ended.
    pub(super) const FOLLOW: Self = Self {
        first: Duration::from_millis(100),
        longest: Duration::from_secs(5),
        growth: 1.5,
        polls: u32::MAX,
        patience: Duration::ZERO,
    };
    /// A few polls, for an agent that is slow to show what it has done.
    pub(in crate::action) const SETTLE: Self = Self { growth: 2.0, polls: 4, ..Self::FOLLOW };
    /// While the task waits for something that may happen elsewhere.
    pub(in crate::action) const WATCH: Self =
        Self { first: Duration::from_secs(3), longest: Duration::from_secs(3), ..Self::FOLLOW };

    pub(in crate::action) fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }
}

/// Polls one task at a given pace.
#[derive(Debug)]
pub(in crate::action) struct Poller {
    task_id: String,
    pace: Pace,
    pause: Duration,
    polls: u32,
    patient_until: Instant,
}

impl Poller {
    pub(in crate::action) fn new(task_id: String, pace: Pace) -> Self {
        let patient_until = Instant::now() + pace.patience;
        Self { task_id, pace, pause: pace.first, polls: 0, patient_until }
    }

    /// Sleeps, then polls once; `None` when polling is over.
    pub(in crate::action) async fn next<P: Progress>(
        &mut self,
        run: &mut CallRun<'_, P>,
    ) -> Result<Option<Polled>, Interruption> {
        if self.polls >= self.pace.polls && Instant::now() >= self.patient_until {
            return Ok(None);
        }
        self.polls = self.polls.saturating_add(1);
        run.within(tokio::time::sleep(self.pause)).await?;
        self.pause = self.pause.mul_f32(self.pace.growth).min(self.pace.longest);
        run.get_task(&self.task_id, GET_TASK_TIMEOUT).await.map(Some)
    }
}

impl<P: Progress> CallRun<'_, P> {
    /// Asks the agent for a task once.
    pub(in crate::action) async fn get_task(
        &mut self,
        task_id: &str,
        limit: Duration,
    ) -> Result<Polled, Interruption> {
        let (instance, trace) = (Arc::clone(&self.instance), self.call.trace);
        let asked = tokio::time::timeout(limit, Box::pin(instance.client.get(task_id, trace)));
        Ok(match self.within(asked).await? {
            Ok(Ok(task)) => Polled::Seen(task),
            Ok(Err(error)) => Polled::Failed(error),
            Err(_) => Polled::TimedOut,
        })
    }

    /// Polls a task that the fold knows until it settles. Most have done so already.
    pub(super) async fn poll(&mut self, fold: &mut TaskBuilder<'_>) -> Result<(), ActionError> {
        if self.is_over(fold) {
            return Ok(());
        }
        Box::pin(self.poll_until_over(fold)).await
    }

    async fn poll_until_over(&mut self, fold: &mut TaskBuilder<'_>) -> Result<(), ActionError> {
        let Some(id) = fold.task().map(|task| task.id.clone()) else {
            return Ok(());
        };
        let mut poller = Poller::new(id.clone(), Pace::FOLLOW);
        let mut failures = 0;
        self.report_auth(fold).await?;
        while !self.is_over(fold) {
            let failed = match poller.next(self).await {
                Err(interruption) => return Err(self.interrupted_with(interruption, fold).await),
                Ok(None) => return Ok(()),
                Ok(Some(Polled::Seen(seen))) => {
                    failures = 0;
                    self.take(fold, Event::Task(Task { id: id.clone(), ..seen })).await?;
                    self.report_auth(fold).await?;
                    continue;
                }
                Ok(Some(Polled::Failed(error))) if error.is_task_not_found() => {
                    return Err(about_known_task(error, self.known_ref(fold)));
                }
                // An agent that is overloaded says so, and can be asked again.
                Ok(Some(Polled::Failed(ClientError::Refused { http_status: Some(429 | 503), .. }))) => {
                    continue;
                }
                Ok(Some(Polled::Failed(error))) => error_chain(&error),
                Ok(Some(Polled::TimedOut)) => "no answer in time".to_owned(),
            };
            failures += 1;
            // Nobody waits for a submitted task; it is polled until its own limit.
            if failures >= MAX_FAILURES && self.call.mode != ReplyMode::Submit {
                return Err(self.unknown(&failed, fold));
            }
        }
        Ok(())
    }

    /// Reports how to answer a request for authentication after which the task is followed on.
    async fn report_auth(&mut self, fold: &TaskBuilder<'_>) -> Result<(), ActionError> {
        let waits = |task: &&Task| task.state == TaskState::AuthRequired && !self.is_over(fold);
        if let Some(task) = fold.task().filter(waits) {
            self.recorded = Some(ReplyStatus::from(&task.state));
            let (outcome, _) = self.observe(task, fold.status_texts(), None).await?;
            self.accept(&outcome).await;
        }
        Ok(())
    }
}
