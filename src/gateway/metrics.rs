//! The metrics of the gateway.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

const BUCKETS: [f64; 13] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0];

type RouteLabels = [(&'static str, &'static str); 1];
type RequestLabels = [(&'static str, String); 2];

#[derive(Debug)]
pub(super) struct GatewayMetrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    durations: Family<RouteLabels, Histogram, fn() -> Histogram>,
    connections: Gauge,
    streams: Gauge,
    connected: Gauge,
}

/// Counts as long as it exists.
#[derive(Debug)]
pub(super) struct Open(Gauge);

impl Open {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Default for GatewayMetrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("a2a_gateway");
        let requests = Family::default();
        let durations: Family<_, _, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let (connections, streams, connected) = (Gauge::default(), Gauge::default(), Gauge::default());
        registry.register("requests", "HTTP requests by route and status.", Family::clone(&requests));
        registry.register("request_duration_seconds", "Time to the head of the response.", durations.clone());
        registry.register("connections", "Open connections.", connections.clone());
        registry.register("streams", "Open event streams.", streams.clone());
        registry.register("nats_connected", "Whether the gateway is connected to NATS.", connected.clone());
        Self { registry, requests, durations, connections, streams, connected }
    }
}

impl GatewayMetrics {
    pub(super) fn shared() -> Arc<Self> {
        Arc::new(Self::default())
    }

    pub(super) fn open_connection(&self) -> Open {
        Open::new(&self.connections)
    }

    pub(super) fn open_stream(&self) -> Open {
        Open::new(&self.streams)
    }

    pub(super) fn count(&self, route: &'static str, status: u16, took: Duration) {
        self.requests.get_or_create(&[("route", route.to_owned()), ("status", status.to_string())]).inc();
        self.durations.get_or_create(&[("route", route)]).observe(took.as_secs_f64());
    }

    pub(super) fn encode(&self, is_connected: bool) -> Result<String, fmt::Error> {
        self.connected.set(i64::from(is_connected));
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
