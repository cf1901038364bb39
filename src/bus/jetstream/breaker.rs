//! Refuses requests for a while after one has failed, so that not every call waits for a timeout.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// First and maximum time without requests; it doubles after each failed probe.
const DELAY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));

#[derive(Debug, Default)]
pub(in crate::bus) struct Breaker(Mutex<Option<Open>>);

#[derive(Debug)]
struct Open {
    until: Instant,
    delay: Duration,
    /// Whether a request finds out whether the store is back.
    is_probing: bool,
}

/// The right to send one request. The holder reports its result.
#[derive(Debug)]
#[must_use]
pub(in crate::bus) struct Passage<'a> {
    breaker: &'a Breaker,
    is_probe: bool,
}

impl Breaker {
    /// `None` if the request would most likely fail.
    pub(in crate::bus) fn enter(&self) -> Option<Passage<'_>> {
        let mut open = self.open();
        let is_probe = match &mut *open {
            None => false,
            Some(open) if open.is_probing || Instant::now() < open.until => return None,
            Some(open) => {
                open.is_probing = true;
                true
            }
        };
        Some(Passage { breaker: self, is_probe })
    }

    /// Whether [`Self::enter`] would let a request pass.
    pub(in crate::bus) fn is_closed(&self) -> bool {
        self.open().as_ref().is_none_or(|open| !open.is_probing && Instant::now() >= open.until)
    }

    /// Lets all requests pass again.
    pub(in crate::bus) fn close(&self) {
        *self.open() = None;
    }

    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Passage<'_> {
    pub(in crate::bus) fn succeeded(mut self) {
        // A request that began before the failure of another one proves nothing.
        if std::mem::take(&mut self.is_probe) {
            self.breaker.close();
        }
    }

    pub(in crate::bus) fn failed(mut self) {
        let mut open = self.breaker.open();
        let (first, max) = DELAY;
        let delay = match &*open {
            None => first,
            Some(open) if self.is_probe => max.min(2 * open.delay),
            // Another request has failed already.
            Some(_) => return,
        };
        self.is_probe = false;
        *open = Some(Open { until: Instant::now() + delay, delay, is_probing: false });
    }
}

impl Drop for Passage<'_> {
    /// A request that was abandoned: the next one probes.
    fn drop(&mut self) {
        if self.is_probe
            && let Some(open) = &mut *self.breaker.open()
        {
            open.is_probing = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn passes_after(breaker: &Breaker, seconds: f32) {
        tokio::time::advance(Duration::from_secs_f32(seconds - 0.1)).await;
        assert!(!breaker.is_closed() && breaker.enter().is_none());
        tokio::time::advance(Duration::from_millis(200)).await;
        assert!(breaker.is_closed());
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_failure_one_request_at_a_time_probes_and_the_delay_doubles() {
        let breaker = Breaker::default();
        let (one, other) = (breaker.enter().unwrap(), breaker.enter().unwrap());
        one.failed();
        other.failed();
        passes_after(&breaker, 1.0).await;
        for delay in [2.0, 4.0, 8.0, 15.0, 15.0] {
            let probe = breaker.enter().unwrap();
            assert!(breaker.enter().is_none() && !breaker.is_closed());
            probe.failed();
            passes_after(&breaker, delay).await;
        }
        drop(breaker.enter().unwrap());
        breaker.enter().expect("an abandoned probe ends").succeeded();
        let (_one, _other) = (breaker.enter().unwrap(), breaker.enter().unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_from_before_the_failure_does_not_end_it() {
        let breaker = Breaker::default();
        let (one, other) = (breaker.enter().unwrap(), breaker.enter().unwrap());
        one.failed();
        other.succeeded();
        assert!(breaker.enter().is_none());
        breaker.close();
        assert!(breaker.enter().is_some());
    }
}
