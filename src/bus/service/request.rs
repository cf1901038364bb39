//! One request and its place in the counts.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::telemetry::spans;

/// Longest text of an error in STATS, so that the counts of all endpoints fit into one message.
const LAST_ERROR_MAX: usize = 200;

/// A message to be answered: it has a reply subject, and that subject may be published to.
///
/// Take it apart: `let ServiceRequest { message, accounting } = request;`, answer, and end the call.
#[derive(Debug)]
pub struct ServiceRequest {
    /// The message; its `reply` is `Some` and allowed.
    pub message: async_nats::Message,
    /// Counts the request when it ends.
    pub accounting: Accounting,
}

/// A request that is being worked on. It is counted exactly once, when it ends; one that is dropped
/// without a word has gone wrong inside the bridge and counts as `500:internal`.
#[derive(Debug)]
pub struct Accounting {
    stats: Arc<EndpointStats>,
    began: Instant,
    counted: bool,
}

impl Accounting {
    pub(super) fn begin(stats: &Arc<EndpointStats>) -> Self {
        Self { stats: Arc::clone(stats), began: Instant::now(), counted: false }
    }

    pub fn succeed(mut self) {
        self.count(None);
    }

    /// The request was answered with an error. `code` and `text` become the endpoint's
    /// `last_error`, which everyone on the mesh can read.
    pub fn fail(mut self, code: u16, text: &str) {
        self.count(Some((code, text)));
    }

    /// The request was answered, with this error if it is one. Ends the span of the request, too.
    pub fn end(self, error: Option<(u16, &'static str)>) {
        spans::ended(error.map(|(_, code)| code));
        match error {
            None => self.succeed(),
            Some((number, code)) => self.fail(number, code),
        }
    }

    fn count(&mut self, error: Option<(u16, &str)>) {
        self.counted = true;
        let spent = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.stats.processing_time.fetch_add(spent, Relaxed);
        if let Some((code, text)) = error {
            self.stats.errors.fetch_add(1, Relaxed);
            let text: String = text.chars().take(LAST_ERROR_MAX).collect();
            let mut last = self.stats.last_error.lock().unwrap_or_else(PoisonError::into_inner);
            *last = format!("{code}:{text}");
        }
        self.stats.requests.fetch_add(1, Relaxed);
    }
}

impl Drop for Accounting {
    fn drop(&mut self) {
        if !self.counted {
            self.count(Some((500, "internal")));
        }
    }
}

/// The counts of one endpoint since the service started.
#[derive(Debug, Default)]
pub(super) struct EndpointStats {
    requests: AtomicU64,
    errors: AtomicU64,
    processing_time: AtomicU64,
    last_error: Mutex<String>,
}

/// The counts at one moment.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) requests: u64,
    pub(super) errors: u64,
    pub(super) processing_time: u64,
    pub(super) last_error: String,
}

impl EndpointStats {
    pub(super) fn counts(&self) -> Counts {
        Counts {
            requests: self.requests.load(Relaxed),
            errors: self.errors.load(Relaxed),
            processing_time: self.processing_time.load(Relaxed),
            last_error: self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_counts_once_however_it_ends() {
        let stats = Arc::new(EndpointStats::default());
        Accounting::begin(&stats).succeed();
        Accounting::begin(&stats).fail(429, "busy");
        assert_eq!(stats.counts().last_error, "429:busy");
        drop(Accounting::begin(&stats));
        let counts = stats.counts();
        assert_eq!((counts.requests, counts.errors), (3, 2));
        assert_eq!(counts.last_error, "500:internal");
        assert!(counts.processing_time > 0);
    }
}
