//! The way of finished spans to the collector, and what is said when there is none.

use crate::text::error_chain;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::{BatchSpanProcessor, SdkTracerProvider, SpanData};
use url::Url;

use super::{TRACER, collector, variable};

const NAME: &str = env!("CARGO_PKG_NAME");
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// How long the end of the bridge waits for the last spans to leave.
const FLUSH: Duration = Duration::from_secs(2);
/// How long is silence after a warning that spans are lost.
const QUIET: Duration = Duration::from_secs(300);
/// The specification's default for one export.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The specification's default for spans that wait.
const QUEUE: u64 = 2048;
/// What the SDK understands; it takes anything else for the default without a word.
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

/// All spans since the start: what is not delivered in the end was lost.
pub(super) static COUNTS: Counts = Counts { ended: AtomicU64::new(0), delivered: AtomicU64::new(0) };

pub(super) struct Counts {
    pub(super) ended: AtomicU64,
    delivered: AtomicU64,
}

/// Why no spans are exported although there is a collector.
#[derive(Debug, thiserror::Error)]
enum ExportError {
    #[error("{0} is not an http or https address")]
    Address(&'static str),
    #[error("{0} asks for a protocol other than `http/protobuf`")]
    Protocol(&'static str),
    #[error("no HTTP client can be made")]
    Http(#[source] reqwest::Error),
    #[error("the exporter cannot be made")]
    Exporter(#[source] ExporterBuildError),
}

/// Spans are exported while it exists.
#[derive(Debug)]
pub struct Exporting(Option<SdkTracerProvider>);

/// Begins to export spans, if the environment says where to. Call it outside of the runtime: the SDK has
/// threads of its own.
pub fn start() -> Exporting {
    let is_off = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
        || variable("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
    let Some((name, value)) = collector().filter(|_| !is_off) else {
        return Exporting(None);
    };
    let provider = match provider(name, &value) {
        Ok(provider) => provider,
        Err(error) => {
            tracing::warn!(error = error_chain(&error), "no spans are exported");
            return Exporting(None);
        }
    };
    let scope = InstrumentationScope::builder(NAME).with_version(VERSION).build();
    let _ = TRACER.set(provider.tracer_with_scope(scope));
    Exporting(Some(provider))
}

fn provider(name: &'static str, value: &str) -> Result<SdkTracerProvider, ExportError> {
    let address = Url::parse(value).map_err(|_| ExportError::Address(name))?;
    if !matches!(address.scheme(), "http" | "https") {
        return Err(ExportError::Address(name));
    }
    let protocol = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
    let protocol = protocol.into_iter().find_map(|name| Some((name, variable(name)?)));
    if let Some((name, _)) = protocol.filter(|(_, value)| !value.eq_ignore_ascii_case("http/protobuf")) {
        return Err(ExportError::Protocol(name));
    }
    if let Some(sampler) = variable("OTEL_TRACES_SAMPLER").filter(|name| !SAMPLERS.contains(&name.as_str())) {
        tracing::warn!(sampler, "OTEL_TRACES_SAMPLER is not known; every trace that begins here is sampled");
    }
    let timeout = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
    let timeout = timeout.into_iter().find_map(|name| variable(name)?.parse().ok());
    let timeout = timeout.map_or(TIMEOUT, Duration::from_millis);
    // As for agents: headers that were meant for this address go to no other.
    let http = reqwest::blocking::Client::builder()
        .user_agent(concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .timeout(timeout)
        .build()
        .map_err(ExportError::Http)?;
    // Address, headers and compression come from the environment.
    let exporter = SpanExporter::builder().with_http().with_http_client(http).with_timeout(timeout);
    let exporter = exporter.build().map_err(ExportError::Exporter)?;

    // The rest of the address may hold a secret.
    let collector = address.origin().ascii_serialization();
    tracing::info!(collector, "spans of calls are exported");
    let queue = variable("OTEL_BSP_MAX_QUEUE_SIZE").and_then(|size| size.parse().ok()).unwrap_or(QUEUE);
    let watched = Watched { exporter, collector, queue, trouble: Mutex::default() };
    Ok(SdkTracerProvider::builder()
        .with_resource(resource())
        .with_span_processor(BatchSpanProcessor::builder(watched).build())
        .build())
}

/// Who we are: what the environment says goes before what we say.
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

impl Drop for Exporting {
    fn drop(&mut self) {
        let Some(provider) = self.0.take() else { return };
        // Whether all went well is seen in the counts.
        let _ = provider.shutdown_with_timeout(FLUSH);
        let lost = COUNTS.ended.load(Relaxed).saturating_sub(COUNTS.delivered.load(Relaxed));
        if lost > 0 {
            tracing::warn!(lost, "not all spans of calls were exported");
        }
    }
}

/// The exporter, and an eye on it: the SDK would complain of every batch.
#[derive(Debug)]
struct Watched {
    exporter: SpanExporter,
    collector: String,
    queue: u64,
    trouble: Mutex<Trouble>,
}

#[derive(Debug, Default)]
struct Trouble {
    /// Delivered or lost, as far as known.
    settled: u64,
    lost: u64,
    warned: Option<Instant>,
    is_told: bool,
}

impl opentelemetry_sdk::trace::SpanExporter for Watched {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len() as u64;
        let result = self.exporter.export(batch).await;
        if result.is_ok() {
            COUNTS.delivered.fetch_add(count, Relaxed);
        }
        let failure = result.as_ref().err().map(ToString::to_string);
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = COUNTS.ended.load(Relaxed);
        let collector = &self.collector;
        match trouble.after(count, failure, ended, self.queue) {
            Some(News::Lost(reason)) => {
                let lost = trouble.lost;
                tracing::warn!(%collector, reason, lost, "spans of calls are lost; the calls go on");
            }
            Some(News::Well) => {
                tracing::info!(%collector, lost = trouble.lost, "spans of calls are exported again");
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

/// What is worth a line in the log.
#[derive(Debug, PartialEq, Eq)]
enum News {
    Lost(String),
    Well,
}

impl Trouble {
    /// A batch of `count` has left or failed, when `ended` spans had ended and `queue` can wait at most.
    /// One warning in [`QUIET`], and one line when all is well again after it.
    fn after(&mut self, count: u64, failure: Option<String>, ended: u64, queue: u64) -> Option<News> {
        self.settled += count;
        self.lost += if failure.is_some() { count } else { 0 };
        // What is more than the queue holds cannot be waiting.
        let dropped = ended.saturating_sub(self.settled + queue);
        self.settled += dropped;
        self.lost += dropped;
        let slow = || (dropped > 0).then(|| "the collector is slower than the calls".to_owned());
        match failure.or_else(slow) {
            Some(reason) if self.warned.is_none_or(|at| at.elapsed() >= QUIET) => {
                (self.warned, self.is_told) = (Some(Instant::now()), true);
                Some(News::Lost(reason))
            }
            None if self.is_told => {
                self.is_told = false;
                Some(News::Well)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_in_trouble_is_told_of_once_and_every_span_is_counted() {
        let mut trouble = Trouble::default();
        let refused = || Some("refused".to_owned());
        assert_eq!(trouble.after(2, None, 4, 2), None);
        assert_eq!(trouble.after(2, refused(), 4, 2), Some(News::Lost("refused".to_owned())));
        assert_eq!(trouble.after(1, refused(), 6, 2), None);
        assert_eq!(trouble.after(1, None, 6, 2), Some(News::Well));
        assert_eq!(trouble.after(1, None, 7, 2), None);
        assert_eq!((trouble.settled, trouble.lost), (7, 3));
    }

    #[test]
    fn spans_that_did_not_fit_into_the_queue_are_lost() {
        let mut trouble = Trouble::default();
        let slow = trouble.after(1, None, 10, 2);
        assert!(matches!(&slow, Some(News::Lost(reason)) if reason.contains("slower")), "{slow:?}");
        assert_eq!(trouble.lost, 7);
        assert_eq!(trouble.after(2, None, 10, 2), Some(News::Well));
        assert_eq!((trouble.settled, trouble.lost), (10, 7));
    }
}
