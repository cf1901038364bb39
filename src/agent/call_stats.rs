//! Counts the calls of one agent: in flight, by outcome, by latency.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Upper bounds of the histogram buckets, in seconds.
pub(crate) const BUCKETS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];

#[derive(Debug, Default)]
pub struct CallStats {
    in_flight: AtomicUsize,
    outcomes: Mutex<BTreeMap<String, u64>>,
    // Not cumulative.
    buckets: [AtomicU64; BUCKETS.len()],
    count: AtomicU64,
    micros: AtomicU64,
    last_error: Mutex<Option<CallError>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    pub code: String,
    pub message: String,
    pub at: SystemTime,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latency {
    /// Cumulative counts for [`BUCKETS`].
    pub buckets: [u64; BUCKETS.len()],
    pub count: u64,
    /// Sum of the durations.
    pub seconds: f64,
}

/// Counts one call as in flight until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlightCall(Arc<CallStats>);

impl Drop for InFlightCall {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

impl CallStats {
    /// Counts a call as in flight until the guard is dropped. A busy agent is not considered hung.
    pub(crate) fn begin(self: &Arc<Self>) -> InFlightCall {
        self.in_flight.fetch_add(1, Relaxed);
        InFlightCall(Arc::clone(self))
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    /// Counts a finished call by its status or error code.
    pub fn ended(&self, outcome: &str, took: Duration) {
        let mut outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        match outcomes.get_mut(outcome) {
            Some(count) => *count += 1,
            None => drop(outcomes.insert(outcome.to_owned(), 1)),
        }
        drop(outcomes);
        let seconds = took.as_secs_f64();
        let bucket = BUCKETS.iter().zip(&self.buckets).find(|(limit, _)| seconds <= **limit);
        if let Some((_, bucket)) = bucket {
            bucket.fetch_add(1, Relaxed);
        }
        self.count.fetch_add(1, Relaxed);
        self.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    pub fn failed(&self, code: &str, message: &str) {
        let error = CallError {
            code: code.to_owned(),
            message: crate::text::shorten(message, 400),
            at: SystemTime::now(),
        };
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    pub fn outcomes(&self) -> BTreeMap<String, u64> {
        self.outcomes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn latency(&self) -> Latency {
        let mut so_far = 0;
        Latency {
            buckets: self.buckets.each_ref().map(|bucket| {
                so_far += bucket.load(Relaxed);
                so_far
            }),
            count: self.count.load(Relaxed),
            seconds: Duration::from_micros(self.micros.load(Relaxed)).as_secs_f64(),
        }
    }

    pub fn last_error(&self) -> Option<CallError> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_in_flight_by_outcome_and_by_time() {
        let calls = Arc::new(CallStats::default());
        let (one, two) = (calls.begin(), calls.begin());
        assert_eq!(calls.in_flight(), 2);
        drop((one, two));
        assert_eq!(calls.in_flight(), 0);
        calls.ended("COMPLETED", Duration::from_millis(7));
        calls.ended("COMPLETED", Duration::from_secs(400));
        calls.ended("busy", Duration::ZERO);
        assert_eq!(calls.outcomes(), BTreeMap::from([("COMPLETED".into(), 2), ("busy".into(), 1)]));
        let latency = calls.latency();
        assert_eq!((latency.buckets[0], latency.buckets[1], latency.buckets[11]), (1, 2, 2));
        assert_eq!(latency.count, 3);
    }
}
