//! How long to wait before the next try: pure and without a clock.

use std::time::Duration;

/// Pauses that double from `first` to `longest`.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Begins at `first`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
        }
    }

    /// The next pause, spread by up to a fifth to either side, so that agents that fell together
    /// do not start together.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (self.next * 2).min(self.longest);
        pause.mul_f64(0.8 + 0.4 * fastrand::f64())
    }

    /// Begins again, after things went well for a while.
    pub fn reset(&mut self) {
        self.next = self.first;
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
            assert!(
                (expected * 0.8..=expected * 1.2).contains(&pause),
                "{pause} for {expected}"
            );
        }
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_millis(1200));
    }
}
