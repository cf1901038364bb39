//! Sends finished spans to the collector, and logs when that fails.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::{BatchSpanProcessor, SdkTracerProvider, SpanData};
use url::Url;

use super::super::{collector_variable, first_variable, variable};
use super::{TRACER, Tracer};
use crate::text::error_chain;

const NAME: &str = env!("CARGO_PKG_NAME");
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How long the bridge waits for the export of the last spans before it exits.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Shortest time between two warnings about lost spans.
const WARN_INTERVAL: Duration = Duration::from_secs(300);
/// The specification's default for one export.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);
/// The specification's default for the number of queued spans.
const DEFAULT_QUEUE: u64 = 2048;
/// The samplers of the SDK, which silently replaces any other name with its default.
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

/// Spans since the start of the program. After the last flush, `ended - delivered` spans are lost.
#[derive(Debug, Clone, Default)]
struct SpanCounts {
    ended: Arc<AtomicU64>,
    delivered: Arc<AtomicU64>,
}

/// Exports spans until it is dropped, which flushes the queue.
#[derive(Debug)]
pub(crate) struct SpanExport {
    provider: SdkTracerProvider,
    counts: SpanCounts,
}

/// Starts the export if the environment names a collector. Call it outside of the runtime: the SDK has its own threads.
pub(crate) fn start_export() -> Option<SpanExport> {
    let is_off = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
        || variable("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
    let (name, value) = collector_variable().filter(|_| !is_off)?;
    let counts = SpanCounts::default();
    let provider = provider(name, &value, counts.clone())
        .inspect_err(|error| tracing::warn!(error = error_chain(error.as_ref()), "no spans are exported"))
        .ok()?;
    let scope = InstrumentationScope::builder(NAME).with_version(VERSION).build();
    let sdk = provider.tracer_with_scope(scope);
    let _ = TRACER.set(Tracer { sdk, ended_spans: Arc::clone(&counts.ended) });
    Some(SpanExport { provider, counts })
}

fn provider(name: &'static str, value: &str, counts: SpanCounts) -> anyhow::Result<SdkTracerProvider> {
    let address = Url::parse(value).ok().filter(|address| matches!(address.scheme(), "http" | "https"));
    let address = address.with_context(|| format!("{name} is not an http or https URL"))?;
    let protocol = first_variable(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]);
    if let Some((name, _)) = protocol.filter(|(_, value)| !value.eq_ignore_ascii_case("http/protobuf")) {
        bail!("{name} names a protocol other than `http/protobuf`, the only one supported");
    }
    if let Some(sampler) = variable("OTEL_TRACES_SAMPLER").filter(|name| !SAMPLERS.contains(&name.as_str())) {
        tracing::warn!(sampler, "unknown OTEL_TRACES_SAMPLER; sampling every trace that starts here");
    }
    let timeout = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
    let timeout = timeout.into_iter().find_map(|name| variable(name)?.parse().ok());
    let timeout = timeout.map_or(DEFAULT_TIMEOUT, Duration::from_millis);
    // No redirects: the configured headers may hold credentials for this address only.
    let http = reqwest::blocking::Client::builder()
        .user_agent(concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .timeout(timeout)
        .build()
        .context("cannot create the HTTP client")?;
    // The exporter reads the address, headers and compression from the environment.
    let exporter = SpanExporter::builder().with_http().with_http_client(http).with_timeout(timeout);
    let exporter = exporter.build().context("cannot create the exporter")?;

    // The path and query of the address may hold a secret.
    let collector = address.origin().ascii_serialization();
    tracing::info!(collector, "exporting spans of calls");
    let queue =
        variable("OTEL_BSP_MAX_QUEUE_SIZE").and_then(|size| size.parse().ok()).unwrap_or(DEFAULT_QUEUE);
    let monitored = MonitoredExporter { exporter, collector, queue, counts, health: Mutex::default() };
    Ok(SdkTracerProvider::builder()
        .with_resource(resource())
        .with_span_processor(BatchSpanProcessor::builder(monitored).build())
        .build())
}

/// The environment takes precedence over the built-in name and version.
fn resource() -> Resource {
    let resource = Resource::builder_empty()
        .with_detector(Box::new(TelemetryResourceDetector))
        .with_service_name(NAME)
        .with_attribute(KeyValue::new("service.version", VERSION))
        .with_detector(Box::new(EnvResourceDetector::new()));
    match variable("OTEL_SERVICE_NAME") {
        Some(name) => resource.with_service_name(name).build(),
        None => resource.build(),
    }
}

impl Drop for SpanExport {
    fn drop(&mut self) {
        // Ignores the result: the counts show what was lost.
        let _ = self.provider.shutdown_with_timeout(FLUSH_TIMEOUT);
        let lost = self.counts.ended.load(Relaxed).saturating_sub(self.counts.delivered.load(Relaxed));
        if lost > 0 {
            tracing::warn!(lost, "some spans of calls were not exported");
        }
    }
}

/// Logs failures at a limited rate; the SDK would log every failed batch.
#[derive(Debug)]
struct MonitoredExporter {
    exporter: SpanExporter,
    collector: String,
    queue: u64,
    counts: SpanCounts,
    health: Mutex<ExportHealth>,
}

#[derive(Debug, Default)]
struct ExportHealth {
    /// Spans known to be delivered or lost.
    settled: u64,
    lost: u64,
    last_warning: Option<Instant>,
    is_failing: bool,
}

impl opentelemetry_sdk::trace::SpanExporter for MonitoredExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len() as u64;
        let result = self.exporter.export(batch).await;
        if result.is_ok() {
            self.counts.delivered.fetch_add(count, Relaxed);
        }
        let failure = result.as_ref().err().map(ToString::to_string);
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = self.counts.ended.load(Relaxed);
        let collector = &self.collector;
        match health.after_batch(count, failure, ended, self.queue) {
            Some(HealthChange::Failing(reason)) => {
                let lost = health.lost;
                tracing::warn!(%collector, reason, lost, "losing spans of calls; the calls themselves are not affected");
            }
            Some(HealthChange::Recovered) => {
                tracing::info!(%collector, lost = health.lost, "exporting spans of calls again");
            }
            None => {}
        }
        result
    }

    fn shutdown(&self) -> OTelSdkResult {
        self.exporter.shutdown()
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum HealthChange {
    Failing(String),
    Recovered,
}

impl ExportHealth {
    /// Records a batch of `count` spans, after `ended` spans in total, of which the queue holds at most `queue`.
    /// Returns what to log: at most one warning per [`WARN_INTERVAL`], and one line after the recovery.
    fn after_batch(
        &mut self,
        count: u64,
        failure: Option<String>,
        ended: u64,
        queue: u64,
    ) -> Option<HealthChange> {
        self.settled += count;
        self.lost += if failure.is_some() { count } else { 0 };
        // Spans that exceed the queue were dropped.
        let dropped = ended.saturating_sub(self.settled + queue);
        self.settled += dropped;
        self.lost += dropped;
        let slow = || (dropped > 0).then(|| "the collector is slower than the calls".to_owned());
        match failure.or_else(slow) {
            Some(reason) if self.last_warning.is_none_or(|at| at.elapsed() >= WARN_INTERVAL) => {
                (self.last_warning, self.is_failing) = (Some(Instant::now()), true);
                Some(HealthChange::Failing(reason))
            }
            None if self.is_failing => {
                self.is_failing = false;
                Some(HealthChange::Recovered)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_collector_is_reported_once_and_every_span_is_counted() {
        let mut health = ExportHealth::default();
        let refused = || Some("refused".to_owned());
        assert_eq!(health.after_batch(2, None, 4, 2), None);
        assert_eq!(health.after_batch(2, refused(), 4, 2), Some(HealthChange::Failing("refused".to_owned())));
        assert_eq!(health.after_batch(1, refused(), 6, 2), None);
        assert_eq!(health.after_batch(1, None, 6, 2), Some(HealthChange::Recovered));
        assert_eq!(health.after_batch(1, None, 7, 2), None);
        assert_eq!((health.settled, health.lost), (7, 3));
    }

    #[test]
    fn spans_that_did_not_fit_into_the_queue_are_lost() {
        let mut health = ExportHealth::default();
        let slow = health.after_batch(1, None, 10, 2);
        assert!(
            matches!(&slow, Some(HealthChange::Failing(reason)) if reason.contains("slower")),
            "{slow:?}"
        );
        assert_eq!(health.lost, 7);
        assert_eq!(health.after_batch(2, None, 10, 2), Some(HealthChange::Recovered));
        assert_eq!((health.settled, health.lost), (10, 7));
    }
}
