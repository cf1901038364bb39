//! A limit for log lines about events that a client can cause as often as it likes.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(60);

/// Logs the first event, and then at most once a minute how many there were.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<Unlogged>);

/// Events since the last log line.
#[derive(Debug, Default)]
struct Unlogged {
    count: u64,
    logged: Option<Instant>,
}

impl LogLimit {
    /// Adds an event. Returns the number of events since the last log line if it is time for another one.
    pub(crate) fn add(&self, now: Instant) -> Option<u64> {
        let mut unlogged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        unlogged.count += 1;
        if unlogged.logged.is_some_and(|logged| now.duration_since(logged) < INTERVAL) {
            return None;
        }
        unlogged.logged = Some(now);
        Some(std::mem::take(&mut unlogged.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_logged_once_a_minute_with_their_number() {
        let (limit, begin) = (LogLimit::default(), Instant::now());
        let logged = [0, 1, 59, 60, 61, 130].map(|seconds| limit.add(begin + Duration::from_secs(seconds)));
        assert_eq!(logged, [Some(1), None, None, Some(3), None, Some(2)]);
    }
}
