//! A task that goes on after its question was answered.

use super::{Past, TaskBuilder, TooMuch};
use crate::a2a::model::{Event, Task};
use crate::action::progress::Frame;

impl TaskBuilder<'_> {
    /// Begins with a task as it was before an answer to it. What it holds was told before.
    pub(crate) fn recall(&mut self, task: Task) {
        if self.apply(Event::Task(task)).is_err() {
            return self.forget();
        }
        self.past = Past::LookedUp;
        (self.told_task, self.has_content) = (false, false);
    }

    pub(super) fn forget(&mut self) {
        *self = Self::new(self.rules, self.max_size, self.tells);
    }

    /// Takes the first event of an answered question's stream: an old snapshot that still waits
    /// does not end it, and what it holds was told before.
    pub(crate) fn apply_first_after_answer(&mut self, event: Event) -> Result<Vec<Frame>, TooMuch> {
        let is_old = matches!(&event, Event::Task(task) if task.state.is_waiting())
            && !(self.past == Past::LookedUp && self.is_of_another_task(&event));
        let mut frames = self.apply(event)?;
        if is_old {
            self.past = Past::Old;
            frames.retain(|frame| matches!(frame, Frame::Task { .. }));
        }
        Ok(frames)
    }
}
