//! One request, and the statistics of its endpoint.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::latency::{Histogram, LatencyBucket};
use crate::caller::Caller;
use crate::reply::error::ActionError;
use crate::telemetry::spans;

/// Maximum bytes of an error text in STATS, so that the statistics of all endpoints fit into one message.
const MAX_LAST_ERROR: usize = 200;

/// A message with a reply subject to which the bridge may publish.
///
/// A handler takes it apart (`let ServiceRequest { message, caller, accounting } = request;`), answers, and ends the
/// accounting.
#[derive(Debug)]
pub struct ServiceRequest {
    /// Its `reply` is `Some` and allowed.
    pub message: async_nats::Message,
    /// Who calls. An error is the reply to a caller whom the bridge does not serve.
    pub(crate) caller: Result<Caller, ActionError>,
    pub accounting: Accounting,
}

/// Counts one request in the statistics of its endpoint, exactly once, when the request ends. If it is
/// dropped before, the bridge failed, and the request counts as `500:internal`.
#[derive(Debug)]
pub struct Accounting {
    stats: Arc<EndpointStats>,
    began: Instant,
    counted: bool,
}

impl Accounting {
    pub(super) fn begin(stats: &Arc<EndpointStats>) -> Self {
        stats.in_flight.fetch_add(1, Relaxed);
        Self { stats: Arc::clone(stats), began: Instant::now(), counted: false }
    }

    pub fn succeed(mut self) {
        self.count(None);
    }

    /// The reply was an error. `code` and `text` become the endpoint's `last_error`, which everyone who may
    /// request STATS can read.
    pub fn fail(mut self, code: u16, text: &str) {
        self.count(Some((code, text)));
    }

    /// The request has its reply, `error` if that was one. Also ends the request's span.
    pub(crate) fn end(mut self, error: Option<(u16, &'static str)>) {
        spans::end(error.map(|(_, code)| code));
        self.count(error);
    }

    fn count(&mut self, error: Option<(u16, &str)>) {
        self.counted = true;
        let took = self.began.elapsed();
        let spent = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.stats.processing_time.fetch_add(spent, Relaxed);
        self.stats.latency.get_or_init(Box::default).add(took);
        self.stats.in_flight.fetch_sub(1, Relaxed);
        if let Some((code, text)) = error {
            self.stats.errors.fetch_add(1, Relaxed);
            let text: String = text.chars().take(MAX_LAST_ERROR).collect();
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

/// The statistics of one endpoint since the service started.
#[derive(Debug, Default)]
pub(super) struct EndpointStats {
    requests: AtomicU64,
    errors: AtomicU64,
    processing_time: AtomicU64,
    last_error: Mutex<String>,
    in_flight: AtomicU64,
    /// Created by the first request: a card can have many skills of which few are used.
    latency: OnceLock<Box<Histogram>>,
}

/// What the bridge adds to the statistics of the service protocol.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct EndpointData {
    /// Requests without a reply so far.
    pub in_flight: u64,
    /// How many of the other requests took how long, without empty buckets.
    pub latency: Vec<LatencyBucket>,
}

/// The statistics at one moment, as STATS shows them.
#[derive(Debug, Default, Serialize)]
pub(super) struct StatsSnapshot {
    pub(super) num_requests: u64,
    pub(super) num_errors: u64,
    pub(super) last_error: String,
    pub(super) processing_time: u64,
    pub(super) average_processing_time: u64,
    #[serde(skip_serializing_if = "EndpointData::is_empty")]
    pub(super) data: EndpointData,
}

impl EndpointData {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl EndpointStats {
    pub(super) fn snapshot(&self) -> StatsSnapshot {
        let num_requests = self.requests.load(Relaxed);
        let processing_time = self.processing_time.load(Relaxed);
        StatsSnapshot {
            num_requests,
            num_errors: self.errors.load(Relaxed),
            last_error: self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            processing_time,
            average_processing_time: processing_time.checked_div(num_requests).unwrap_or(0),
            data: EndpointData {
                in_flight: self.in_flight.load(Relaxed),
                latency: self.latency.get().map(|latency| latency.filled()).unwrap_or_default(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_counts_once_however_it_ends() {
        let stats = Arc::new(EndpointStats::default());
        Accounting::begin(&stats).succeed();
        Accounting::begin(&stats).fail(429, "busy");
        assert_eq!(stats.snapshot().last_error, "429:busy");
        let running = Accounting::begin(&stats);
        assert_eq!(stats.snapshot().data.in_flight, 1);
        drop(running);
        let snapshot = stats.snapshot();
        assert_eq!(snapshot.data.in_flight, 0);
        assert_eq!(snapshot.data.latency.iter().map(|bucket| bucket.count).sum::<u64>(), 3);
        assert_eq!((snapshot.num_requests, snapshot.num_errors), (3, 2));
        assert_eq!(snapshot.last_error, "500:internal");
        assert!(snapshot.processing_time > 0);
        assert_eq!(snapshot.average_processing_time, snapshot.processing_time / 3);
    }
}
