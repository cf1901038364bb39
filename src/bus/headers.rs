//! The headers of a NATS request.

use async_nats::{HeaderMap, Message};

use crate::action::request::{CallOptions, ReplyMode, RequestBody};
use crate::caller::Caller;
use crate::config::values::parse_capped_duration;
use crate::events::selection::FrameSelection;
use crate::files::FileMode;
use crate::reply::error::ActionError;
use crate::telemetry::trace_context::{TraceContext, is_valid_traceparent};
use crate::text::shorten;

/// Maximum bytes of an idempotency key.
const MAX_KEY: usize = 512;
/// Maximum bytes of a `tracestate` that is passed on.
const MAX_TRACE_STATE: usize = 512;

/// The validated headers of a request.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    pub options: CallOptions,
    pub idempotency_key: Option<String>,
    pub frames: FrameSelection,
    /// Whether to cancel the task when the caller disconnects.
    pub cancel_on_disconnect: bool,
    /// Whether `status`, `task` and `state` frames precede the reply in mode `final`.
    pub wants_ack: bool,
}

impl Headers {
    /// The options of a request of `caller`.
    pub(crate) fn read(message: &Message, caller: Caller, trace: TraceContext) -> Result<Self, ActionError> {
        let Some(headers) = &message.headers else {
            return Ok(Self { options: CallOptions { caller, ..CallOptions::default() }, ..Self::default() });
        };
        let mode = choice(
            headers,
            "A2A-Reply",
            &[("final", ReplyMode::Final), ("stream", ReplyMode::Stream), ("submit", ReplyMode::Submit)],
        )?;
        let frames = choice(
            headers,
            "A2A-Frames",
            &[
                ("all", FrameSelection::All),
                ("text", FrameSelection::Text),
                ("artifacts", FrameSelection::Artifacts),
            ],
        )?;
        let cancel_on_disconnect =
            choice(headers, "A2A-On-Disconnect", &[("continue", false), ("cancel", true)])?;
        let files = choice(
            headers,
            "A2A-Files",
            &[("inline", FileMode::Inline), ("reference", FileMode::Reference)],
        )?;
        let is_logged = choice(headers, "A2A-Log", &[("off", false), ("on", true)])?;
        let wants_ack = choice(headers, "A2A-Ack", &[("no", false), ("yes", true)])?;
        let timeout = header(headers, "A2A-Timeout").map(parse_capped_duration).transpose();
        let timeout = timeout.map_err(|why| ActionError::invalid(format!("header `A2A-Timeout`: {why}")))?;
        let idempotency_key = header(headers, "Nats-Msg-Id").filter(|key| !key.is_empty()).map(str::to_owned);
        if idempotency_key.as_ref().is_some_and(|key| key.len() > MAX_KEY) {
            let message = format!("header `Nats-Msg-Id` is longer than {MAX_KEY} bytes");
            return Err(ActionError::invalid(message));
        }
        let options =
            CallOptions { mode, timeout, caller, trace, files, is_logged, ..CallOptions::default() };
        Ok(Self { options, idempotency_key, frames, cancel_on_disconnect, wants_ack })
    }
}

/// The value of a header that accepts a fixed set of values, in upper or lower case; the default if absent.
fn choice<T>(headers: &HeaderMap, name: &str, choices: &[(&str, T)]) -> Result<T, ActionError>
where
    T: Copy + Default,
{
    let Some(wanted) = header(headers, name) else { return Ok(T::default()) };
    if let Some((_, choice)) = choices.iter().find(|(value, _)| wanted.eq_ignore_ascii_case(value)) {
        return Ok(*choice);
    }
    let values: Vec<_> = choices.iter().map(|(value, _)| format!("`{value}`")).collect();
    let wanted = shorten(wanted, 40);
    let message = format!("header `{name}: {wanted}` is not supported; use one of {}", values.join(", "));
    Err(ActionError::invalid(message))
}

/// Whether the caller expects frames, even if other headers are invalid.
pub(crate) fn wants_stream(message: &Message) -> bool {
    let mode = message.headers.as_ref().and_then(|headers| header(headers, "A2A-Reply"));
    mode.is_some_and(|mode| mode.eq_ignore_ascii_case("stream"))
}

/// The first value of a header of a message.
pub(super) fn value<'m>(message: &'m Message, name: &str) -> Option<&'m str> {
    header(message.headers.as_ref()?, name)
}

/// The body of a request, with its declared `Content-Type`.
pub(crate) fn body(message: &Message) -> RequestBody {
    let content_type = message.headers.as_ref().and_then(|headers| header(headers, "Content-Type"));
    RequestBody::new(message.payload.clone(), content_type)
}

/// The first value of a header. Names are compared without case, because HTTP clients and bridges change it.
///
/// The NATS client keeps the order of values under one spelling of the name, but not the order of two
/// spellings. The documented spelling takes precedence, then the first in byte order, so that the same
/// message always has the same meaning.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let spellings = headers.iter().map(|(spelling, values)| (AsRef::<str>::as_ref(spelling), values));
    let (_, values) = spellings
        .filter(|(spelling, _)| spelling.eq_ignore_ascii_case(name))
        .min_by_key(|(spelling, _)| (*spelling != name, *spelling))?;
    values.first().map(|value| value.as_str().trim())
}

/// The caller's trace context. An invalid one is dropped as a whole, because it can contain any text.
pub(crate) fn trace(message: &Message) -> TraceContext {
    let Some(headers) = &message.headers else { return TraceContext::default() };
    let value = |text| reqwest::header::HeaderValue::from_str(text).ok();
    let Some(parent) = header(headers, "traceparent").filter(|text| is_valid_traceparent(text)) else {
        return TraceContext::default();
    };
    let state = header(headers, "tracestate").filter(|state| state.len() <= MAX_TRACE_STATE);
    TraceContext { parent: value(parent), state: state.and_then(value) }
}
