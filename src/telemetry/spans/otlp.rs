//! Spans made with the OpenTelemetry SDK and sent as OTLP over HTTP.
//!
//! A call only puts its finished span into the SDK's bounded queue; a thread of the SDK sends it. A full queue drops
//! spans, so a slow or unreachable collector never slows down a call.

mod export;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use opentelemetry::context::{FutureExt as _, WithContext};
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracer;
use reqwest::header::HeaderValue;

pub(crate) use self::export::start_export;
use super::CallInfo;
use crate::telemetry::trace_context::TraceContext;

/// Maximum length of an id assigned by the agent.
const MAX_ID: usize = 256;

/// The process-wide tracer, like the process-wide logger of `tracing`. Set once if spans are exported.
static TRACER: OnceLock<Tracer> = OnceLock::new();

#[derive(Debug)]
struct Tracer {
    sdk: SdkTracer,
    ended_spans: Arc<AtomicU64>,
}

/// State of a call's span. A span keeps every attribute it is given, even the same one twice, so each is set once.
#[derive(Debug, Default)]
struct SpanState {
    has_task: AtomicBool,
    outcome: Mutex<Option<&'static str>>,
}

/// The span of one call; empty if spans are not exported.
#[derive(Debug)]
pub(crate) struct CallSpan(Context);

impl CallSpan {
    pub(crate) fn start(call_info: CallInfo<'_>, trace: impl FnOnce() -> TraceContext) -> Self {
        Self(TRACER.get().map_or_else(Context::new, |tracer| start_span(tracer, call_info, &trace())))
    }

    /// Runs the work of the call, which can add to the span with the functions of this module.
    pub(crate) fn instrument<F: Future>(self, work: F) -> WithContext<F> {
        work.with_context(self.0)
    }
}

/// Attribute names follow the semantic conventions for messaging and for generative AI where those define one.
/// The caller waits for a reply, so the kind is SERVER.
fn start_span(tracer: &Tracer, call_info: CallInfo<'_>, trace: &TraceContext) -> Context {
    let CallInfo { agent, action, subject } = call_info;
    let headers = [("traceparent", &trace.parent), ("tracestate", &trace.state)];
    let headers: HashMap<_, _> = headers
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_owned(), value.as_ref()?.to_str().ok()?.to_owned())))
        .collect();
    let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
    let attributes = [
        KeyValue::new("messaging.system", "nats"),
        KeyValue::new("messaging.operation.name", "process"),
        KeyValue::new("messaging.operation.type", "process"),
        KeyValue::new("messaging.destination.name", subject.to_owned()),
        KeyValue::new("gen_ai.agent.name", agent.to_owned()),
        KeyValue::new("a2a.action", action.to_owned()),
    ];
    let builder = tracer.sdk.span_builder(format!("{agent}.{action}")).with_kind(SpanKind::Server);
    let span = builder.with_attributes(attributes).start_with_context(&tracer.sdk, &parent);
    parent.with_span(span).with_value(SpanState::default())
}

/// Makes the call's span the parent of the agent's spans.
pub(crate) fn propagate(trace: &mut TraceContext) {
    let context = Context::current();
    if context.get::<SpanState>().is_some() {
        let mut headers = HashMap::new();
        TraceContextPropagator::new().inject_context(&context, &mut headers);
        let mut header = |name: &str| HeaderValue::try_from(headers.remove(name)?).ok();
        trace.parent = header("traceparent");
        trace.state = header("tracestate").filter(|state| !state.is_empty());
    }
}

pub(crate) fn set_task(id: &str, context_id: Option<&str>) {
    let context = Context::current();
    if context.get::<SpanState>().is_none_or(|state| state.has_task.swap(true, Relaxed)) {
        return;
    }
    let ids = [("a2a.task.id", Some(id)), ("gen_ai.conversation.id", context_id)];
    for (key, id) in ids {
        if let Some(id) = id.filter(|id| id.len() <= MAX_ID) {
            context.span().set_attribute(KeyValue::new(key, id.to_owned()));
        }
    }
}

/// Sets the outcome, named as in the metrics. The last one counts: a prompt with a question makes several calls.
pub(crate) fn set_outcome(outcome: &'static str) {
    if let Some(state) = Context::current().get::<SpanState>() {
        *state.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

/// Ends the span when the caller has its reply. Later work, as on a submitted task, is not part of the call.
pub(crate) fn end(error: Option<&'static str>) {
    let context = Context::current();
    let Some(state) = context.get::<SpanState>() else { return };
    let span = context.span();
    if !span.is_recording() {
        return;
    }
    let outcome = *state.outcome.lock().unwrap_or_else(PoisonError::into_inner);
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
        // Without the error's text: it may be the agent's and contain user data.
        span.set_status(Status::error(""));
    }
    if let Some(tracer) = TRACER.get() {
        tracer.ended_spans.fetch_add(1, Relaxed);
    }
    span.end();
}
