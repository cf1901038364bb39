//! Counts of the state store, for metrics.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Upper limits of the latency histogram, in seconds.
pub(crate) const LATENCY_BUCKETS: [f64; 11] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 2.5];

/// A request to a shared store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    Scan,
}

impl Operation {
    pub(crate) const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Scan];

    /// The label in metrics.
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Scan => "scan",
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct StoreStats {
    latency: [Latency; Operation::ALL.len()],
    /// Requests that failed or were not confirmed.
    pub errors: AtomicU64,
    /// Writes that lost a race.
    pub conflicts: AtomicU64,
    /// Records that wait to be written.
    pub deferred: AtomicUsize,
    /// Writes that were deferred.
    pub deferred_total: AtomicU64,
    /// Records that were not written, because too many waited.
    pub dropped: AtomicU64,
}

#[derive(Debug, Default)]
pub(crate) struct Latency {
    // Not cumulative; the last one is for the rest.
    buckets: [AtomicU64; LATENCY_BUCKETS.len() + 1],
    micros: AtomicU64,
}

impl StoreStats {
    pub(crate) fn add(&self, operation: Operation, took: Duration) {
        let latency = self.latency(operation);
        let seconds = took.as_secs_f64();
        let index =
            LATENCY_BUCKETS.iter().position(|limit| seconds <= *limit).unwrap_or(LATENCY_BUCKETS.len());
        if let Some(bucket) = latency.buckets.get(index) {
            bucket.fetch_add(1, Relaxed);
        }
        latency.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    pub(crate) fn latency(&self, operation: Operation) -> &Latency {
        let [read, write, scan] = &self.latency;
        match operation {
            Operation::Read => read,
            Operation::Write => write,
            Operation::Scan => scan,
        }
    }
}

impl Latency {
    /// Counts for [`LATENCY_BUCKETS`] and for the rest, not cumulative.
    pub(crate) fn counts(&self) -> [u64; LATENCY_BUCKETS.len() + 1] {
        std::array::from_fn(|index| self.buckets.get(index).map_or(0, |count| count.load(Relaxed)))
    }

    /// Sum of the durations, in seconds.
    pub(crate) fn seconds(&self) -> f64 {
        Duration::from_micros(self.micros.load(Relaxed)).as_secs_f64()
    }
}
