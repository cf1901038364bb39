//! The back-off and the limit of restarts. Pure: the caller supplies the time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Doubles the delay from `first` to `max`.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, next: first }
    }

    /// The next delay with 20 % jitter, so that agents that fail together do not restart together.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (self.next * 2).min(self.max);
        delay.mul_f64(0.8 + 0.4 * fastrand::f64())
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Limits the number of restarts within a sliding window.
#[derive(Debug, Clone)]
pub(crate) struct RestartBudget {
    max: usize,
    window: Duration,
    restarts: VecDeque<Instant>,
}

impl RestartBudget {
    pub(crate) fn new(max: usize, window: Duration) -> Self {
        Self { max, window, restarts: VecDeque::new() }
    }

    /// Takes one restart from the budget if one is left.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let is_expired = |at: &Instant| now.saturating_duration_since(*at) >= self.window;
        while self.restarts.front().is_some_and(is_expired) {
            self.restarts.pop_front();
        }
        let left = self.restarts.len() < self.max;
        if left {
            self.restarts.push_back(now);
        }
        left
    }

    pub(crate) fn reset(&mut self) {
        self.restarts.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_and_begin_again_after_a_reset() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        for expected in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] {
            let delay = backoff.next_delay().as_secs_f64();
            assert!((expected * 0.8..=expected * 1.2).contains(&delay), "{delay} for {expected}");
        }
        backoff.reset();
        assert!(backoff.next_delay() <= Duration::from_millis(1200));
    }

    #[test]
    fn an_agent_that_always_exits_immediately_starts_at_most_eight_times_in_two_minutes() {
        for _ in 0..1000 {
            let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
            let (mut at, mut starts) = (Duration::ZERO, 0);
            while at < Duration::from_secs(120) {
                starts += 1;
                at += backoff.next_delay();
            }
            assert!((7..=8).contains(&starts), "{starts}");
        }
    }

    #[test]
    fn agents_that_fail_together_restart_at_different_times() {
        let first = |_| Backoff::new(Duration::from_secs(1), Duration::from_secs(60)).next_delay();
        let mut delays: Vec<_> = (0..100).map(first).collect();
        delays.sort_unstable();
        assert!(delays[99] - delays[0] > Duration::from_millis(200), "{delays:?}");
    }

    #[test]
    fn restarts_leave_the_budget_after_the_window() {
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
