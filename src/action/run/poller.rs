//! Polling an agent for a task, with a back-off.

use std::time::Duration;

use tokio::time::Instant;

use super::GET_TASK_TIMEOUT;
use super::waiter::{AgentWaiter, Interruption};
use crate::a2a::client::ClientError;
use crate::a2a::model::Task;
use crate::action::progress::Progress;

pub(in crate::action) enum Polled {
    Task(Task),
    Failed(ClientError),
    TimedOut,
}

/// How often to poll a task, and for how long.
#[derive(Debug, Clone, Copy)]
pub(in crate::action) struct PollSchedule {
    initial_interval: Duration,
    max_interval: Duration,
    growth: f32,
    max_polls: u32,
    /// Even after `max_polls`, the last poll does not begin before this time has passed.
    min_duration: Duration,
}

impl PollSchedule {
    /// Until the task has ended.
    pub(super) const FOLLOW: Self = Self {
        initial_interval: Duration::from_millis(100),
        max_interval: Duration::from_secs(5),
        growth: 1.5,
        max_polls: u32::MAX,
        min_duration: Duration::ZERO,
    };
    /// A few polls, to confirm a change that the agent has accepted but may show late.
    pub(in crate::action) const CONFIRM: Self = Self { growth: 2.0, max_polls: 4, ..Self::FOLLOW };
    /// While the task waits for an event outside the bridge.
    pub(in crate::action) const WATCH: Self = Self {
        initial_interval: Duration::from_secs(3),
        max_interval: Duration::from_secs(3),
        ..Self::FOLLOW
    };

    pub(in crate::action) fn with_min_duration(self, min_duration: Duration) -> Self {
        Self { min_duration, ..self }
    }
}

#[derive(Debug)]
pub(in crate::action) struct Poller {
    task_id: String,
    schedule: PollSchedule,
    interval: Duration,
    polls: u32,
    poll_until: Instant,
    last_began: Option<Instant>,
}

impl Poller {
    pub(in crate::action) fn new(task_id: String, schedule: PollSchedule) -> Self {
        let poll_until = Instant::now() + schedule.min_duration;
        Self {
            task_id,
            schedule,
            interval: schedule.initial_interval,
            polls: 0,
            poll_until,
            last_began: None,
        }
    }

    /// Sleeps, then polls once. Returns `None` when the schedule has ended.
    pub(in crate::action) async fn next<P: Progress>(
        &mut self,
        waiter: &mut AgentWaiter<'_, P>,
    ) -> Result<Option<Polled>, Interruption> {
        // By the time at which the poll began: if the process did not run meanwhile, its result says little about now.
        let was_long_enough = self.last_began.is_some_and(|began| began >= self.poll_until);
        if self.polls >= self.schedule.max_polls && was_long_enough {
            return Ok(None);
        }
        self.polls = self.polls.saturating_add(1);
        waiter.within(tokio::time::sleep(self.interval)).await?;
        self.last_began = Some(Instant::now());
        self.interval = self.interval.mul_f32(self.schedule.growth).min(self.schedule.max_interval);
        waiter.get_task(&self.task_id, GET_TASK_TIMEOUT).await.map(Some)
    }
}
