//! A limit for log lines about events that a client can cause as often as it likes.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(60);

/// Logs the first event, and then at most once a minute how many there were.
#[derive(Debug)]
pub(crate) struct LogLimit {
    /// Lines in a minute.
    max: u32,
    state: Mutex<Unlogged>,
}

/// Events since the last log line.
#[derive(Debug, Default)]
struct Unlogged {
    count: u64,
    /// When the current minute began, and its lines.
    minute: Option<Instant>,
    lines: u32,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::per_minute(1)
    }
}

impl LogLimit {
    /// Logs the first `max` events of a minute.
    pub(crate) fn per_minute(max: u32) -> Self {
        Self { max, state: Mutex::default() }
    }

    /// Adds an event. Returns the number of events since the last log line if it is time for another one.
    pub(crate) fn add(&self, now: Instant) -> Option<u64> {
        let mut unlogged = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        unlogged.count += 1;
        if unlogged.minute.is_none_or(|minute| now.duration_since(minute) >= INTERVAL) {
            unlogged.minute = Some(now);
            unlogged.lines = 0;
        }
        if unlogged.lines == self.max {
            return None;
        }
        unlogged.lines += 1;
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

    #[test]
    fn several_lines_a_minute() {
        let (limit, begin) = (LogLimit::per_minute(2), Instant::now());
        let logged = [0, 1, 2, 3, 60].map(|seconds| limit.add(begin + Duration::from_secs(seconds)));
        assert_eq!(logged, [Some(1), Some(1), None, None, Some(3)]);
    }
}
