//! How long the requests of an endpoint took, in buckets. STATS carries the counts, from which a reader computes
//! percentiles for any stretch of time between two of its requests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Two buckets for each doubling, from 1 ms to 26 hours. A longer request counts in the last bucket.
const BUCKETS: usize = 54;

#[derive(Debug)]
pub(super) struct Histogram([AtomicU64; BUCKETS]);

/// The requests of one bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LatencyBucket {
    /// The longest duration in the bucket, in microseconds. The shortest one is 1/√2 of it.
    pub le_us: u64,
    pub count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Histogram {
    pub(super) fn add(&self, took: Duration) {
        if let Some(bucket) = self.0.get(index(took)) {
            bucket.fetch_add(1, Relaxed);
        }
    }

    /// The buckets with requests.
    pub(super) fn filled(&self) -> Vec<LatencyBucket> {
        let counts = self.0.iter().map(|count| count.load(Relaxed)).enumerate();
        let buckets = counts.map(|(index, count)| LatencyBucket { le_us: limit(index), count });
        buckets.filter(|bucket| bucket.count > 0).collect()
    }
}

fn index(took: Duration) -> usize {
    let doublings = (took.as_secs_f64() * 1000.0).log2();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float saturates at the limits"
    )]
    let index = (2.0 * doublings).ceil() as usize;
    index.min(BUCKETS - 1)
}

/// The longest duration in a bucket, in microseconds.
fn limit(index: usize) -> u64 {
    let doublings = index / 2;
    let base = if index.is_multiple_of(2) { 1000.0 } else { 1000.0 * std::f64::consts::SQRT_2 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 2^37")]
    let limit = (base * f64::from(2_u32.pow(u32::try_from(doublings).unwrap_or(u32::MAX)))).round() as u64;
    limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_in_the_bucket_that_contains_it() {
        for micros in [0, 1, 1000, 1001, 1414, 1415, 2000, 2001, 900_000, 60_000_000, 86_400_000_000] {
            let histogram = Histogram::default();
            histogram.add(Duration::from_micros(micros));
            let filled = histogram.filled();
            let [LatencyBucket { le_us, count: 1 }] = filled.as_slice() else { panic!("{filled:?}") };
            assert!(micros <= *le_us && (*le_us == 1000 || micros * 100 >= *le_us * 70), "{micros}: {le_us}");
        }
        let histogram = Histogram::default();
        histogram.add(Duration::MAX);
        assert_eq!(histogram.filled().len(), 1);
    }
}
