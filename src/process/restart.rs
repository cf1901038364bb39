//! The back-off and the limit of restarts. Pure: the caller supplies the time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Doubles the pause from `first` to `longest`.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The next pause with 20 % jitter, so that agents that fail together do not restart together.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (self.next * 2).min(self.longest);
        pause.mul_f64(0.8 + 0.4 * fastrand::f64())
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Limits the number of restarts within a sliding window.
#[derive(Debug, Clone)]
pub(crate) struct RestartBudget {
    most: usize,
    window: Duration,
    spent: VecDeque<Instant>,
}

impl RestartBudget {
    pub(crate) fn new(most: usize, window: Duration) -> Self {
        Self { most, window, spent: VecDeque::new() }
    }

    /// Takes one restart from the budget if one is left.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let over = |at: &Instant| now.saturating_duration_since(*at) >= self.window;
        while self.spent.front().is_some_and(over) {
            self.spent.pop_front();
        }
        let left = self.spent.len() < self.most;
        if left {
            self.spent.push_back(now);
        }
        left
    }

    pub(crate) fn reset(&mut self) {
        self.spent.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_begin_again_after_a_reset() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        for expected in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] {
            let pause = backoff.pause().as_secs_f64();
            assert!((expected * 0.8..=expected * 1.2).contains(&pause), "{pause} for {expected}");
        }
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_millis(1200));
    }

    #[test]
    fn an_agent_that_always_exits_at_once_starts_at_most_eight_times_in_two_minutes() {
        for _ in 0..1000 {
            let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
            let (mut at, mut starts) = (Duration::ZERO, 0);
            while at < Duration::from_secs(120) {
                starts += 1;
                at += backoff.pause();
            }
            assert!((7..=8).contains(&starts), "{starts}");
        }
    }

    #[test]
    fn agents_that_fall_together_do_not_start_together() {
        let first = |_| Backoff::new(Duration::from_secs(1), Duration::from_secs(60)).pause();
        let mut pauses: Vec<_> = (0..100).map(first).collect();
        pauses.sort_unstable();
        assert!(pauses[99] - pauses[0] > Duration::from_millis(200), "{pauses:?}");
    }

    #[test]
    fn a_budget_is_for_a_stretch_of_time() {
        let mut budget = RestartBudget::new(2, Duration::from_secs(10));
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(budget.take(at(0)) && budget.take(at(1)));
        assert!(!budget.take(at(9)));
        assert!(budget.take(at(10)));
        assert!(!budget.take(at(10)));
        budget.reset();
        assert!(budget.take(at(10)));
    }
}
