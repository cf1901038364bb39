//! The spans of calls, made with the OpenTelemetry SDK and sent as OTLP over HTTP.
//!
//! A call only puts its finished span into the SDK's bounded queue; a thread of the SDK sends what is in
//! it. A queue that is full drops, so a collector that is slow or away costs spans and nothing else.

mod export;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};

use opentelemetry::context::{FutureExt as _, WithContext};
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator as _};
use opentelemetry::trace::{SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracer;
use reqwest::header::HeaderValue;

pub use self::export::{Exporting, start};
use super::{Arrival, collector, variable};
use crate::telemetry::trace_context::TraceContext;

/// Longest id of an agent that is told; they are a UUID, as a rule.
const MAX_ID: usize = 256;

/// Set once, when spans are exported.
static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// What a call notes for the end of its span. A span keeps every attribute that it is given, even the same
/// one twice, so each is set once.
#[derive(Debug, Default)]
struct Noted {
    task: AtomicBool,
    outcome: Mutex<Option<&'static str>>,
}

/// The span of one call; empty when nothing is exported.
#[derive(Debug)]
pub struct CallSpan(Context);

impl CallSpan {
    pub fn begin(arrival: Arrival<'_>, trace: impl FnOnce() -> TraceContext) -> Self {
        Self(TRACER.get().map_or_else(Context::new, |tracer| begin(tracer, arrival, trace())))
    }

    /// The work of the call, which can add to the span by the functions of this module.
    pub fn around<F: Future>(self, work: F) -> WithContext<F> {
        work.with_context(self.0)
    }
}

/// Names of attributes follow the semantic conventions for messaging and for generative AI, as far as
/// these have one. The caller waits for a reply, so the kind is SERVER.
fn begin(tracer: &SdkTracer, arrival: Arrival<'_>, mut trace: TraceContext) -> Context {
    let Arrival { agent, action, subject } = arrival;
    let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &Carrier(&mut trace));
    let attributes = [
        KeyValue::new("messaging.system", "nats"),
        KeyValue::new("messaging.operation.name", "process"),
        KeyValue::new("messaging.operation.type", "process"),
        KeyValue::new("messaging.destination.name", subject.to_owned()),
        KeyValue::new("gen_ai.agent.name", agent.to_owned()),
        KeyValue::new("a2a.action", action.to_owned()),
    ];
    let builder = tracer.span_builder(format!("{agent}.{action}")).with_kind(SpanKind::Server);
    let span = builder.with_attributes(attributes).start_with_context(tracer, &parent);
    parent.with_span(span).with_value(Noted::default())
}

/// Makes the call's span the parent of what the agent does.
pub fn hand_on(trace: &mut TraceContext) {
    let context = Context::current();
    if context.get::<Noted>().is_some() {
        *trace = TraceContext::default();
        TraceContextPropagator::new().inject_context(&context, &mut Carrier(trace));
    }
}

/// The task that the call is about, as the agent names it.
pub fn task(id: &str, context_id: Option<&str>) {
    let context = Context::current();
    if context.get::<Noted>().is_none_or(|noted| noted.task.swap(true, Relaxed)) {
        return;
    }
    let ids = [("a2a.task.id", Some(id)), ("gen_ai.conversation.id", context_id)];
    for (key, id) in ids {
        if let Some(id) = id.filter(|id| id.len() <= MAX_ID) {
            context.span().set_attribute(KeyValue::new(key, id.to_owned()));
        }
    }
}

/// How the work ended, in the word that the metrics have for it. The last word counts: a prompt with a
/// question makes several calls.
pub fn outcome(outcome: &'static str) {
    if let Some(noted) = Context::current().get::<Noted>() {
        *noted.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

/// The caller has its reply, with the code of an error if it is one. What happens later, as for a task that
/// was submitted, is not part of the call.
pub fn ended(error: Option<&'static str>) {
    let context = Context::current();
    let Some(noted) = context.get::<Noted>() else { return };
    let span = context.span();
    if !span.is_recording() {
        return;
    }
    let outcome = *noted.outcome.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(outcome) = outcome {
        span.set_attribute(KeyValue::new("a2a.outcome", outcome));
    }
    let failure = match outcome {
        Some("FAILED") => Some("task_failed"),
        Some("REJECTED") => Some("task_rejected"),
        _ => None,
    };
    if let Some(error) = error.or(failure) {
        span.set_attribute(KeyValue::new("error.type", error));
        // Without the error's text: that may be the agent's, and hold anything.
        span.set_status(Status::error(""));
    }
    export::COUNTS.ended.fetch_add(1, Relaxed);
    span.end();
}

/// The two headers of a trace, as the propagator reads and writes them.
struct Carrier<'a>(&'a mut TraceContext);

impl Extractor for Carrier<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let value = match key {
            "traceparent" => self.0.parent.as_ref(),
            "tracestate" => self.0.state.as_ref(),
            _ => None,
        };
        value.and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

impl Injector for Carrier<'_> {
    fn set(&mut self, key: &str, value: String) {
        let value = HeaderValue::try_from(value).ok().filter(|value| !value.is_empty());
        match key {
            "traceparent" => self.0.parent = value,
            "tracestate" => self.0.state = value,
            _ => {}
        }
    }
}
