//! What the headers of a NATS request say.

use async_nats::{HeaderMap, Message};

use super::frames::FrameSelection;
use crate::action::request::{CallOptions, ReplyMode, RequestBody};
use crate::config::values::parse_capped_duration;
use crate::reply::error::ActionError;
use crate::telemetry::trace_context::TraceContext;
use crate::telemetry::trace_context::Traceparent;
use crate::text::shorten;

const MAX_KEY: usize = 512;
/// Longest `tracestate` that is handed on.
const MAX_TRACE_STATE: usize = 512;

/// The headers of a request, checked.
#[derive(Debug, Default)]
pub(crate) struct Headers {
    pub options: CallOptions,
    pub idempotency_key: Option<String>,
    /// Which frames a stream has.
    pub frames: FrameSelection,
    /// Whether the task is cancelled when the caller is gone.
    pub cancel_on_disconnect: bool,
}

impl Headers {
    pub(crate) fn read(message: &Message, trace: TraceContext) -> Result<Self, ActionError> {
        let Some(headers) = &message.headers else {
            return Ok(Self::default());
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
        let timeout = header(headers, "A2A-Timeout").map(parse_capped_duration).transpose();
        let timeout = timeout.map_err(|why| ActionError::invalid(format!("header `A2A-Timeout`: {why}")))?;
        let idempotency_key = header(headers, "Nats-Msg-Id").filter(|key| !key.is_empty()).map(str::to_owned);
        if idempotency_key.as_ref().is_some_and(|key| key.len() > MAX_KEY) {
            let message = format!("header `Nats-Msg-Id` is longer than {MAX_KEY} bytes");
            return Err(ActionError::invalid(message));
        }
        let options = CallOptions { mode: mode.unwrap_or_default(), timeout, trace };
        Ok(Self {
            options,
            idempotency_key,
            frames: frames.unwrap_or_default(),
            cancel_on_disconnect: cancel_on_disconnect.unwrap_or_default(),
        })
    }

    /// The same for an operation that has exactly one reply.
    pub(crate) fn with_one_reply(mut self) -> Self {
        self.options.mode = ReplyMode::Final;
        self
    }
}

/// One of several words, in any case; any other is refused.
fn choice<T: Copy>(headers: &HeaderMap, name: &str, choices: &[(&str, T)]) -> Result<Option<T>, ActionError> {
    let Some(wanted) = header(headers, name) else { return Ok(None) };
    if let Some((_, choice)) = choices.iter().find(|(word, _)| wanted.eq_ignore_ascii_case(word)) {
        return Ok(Some(*choice));
    }
    let words: Vec<_> = choices.iter().map(|(word, _)| format!("`{word}`")).collect();
    let wanted = shorten(wanted, 40);
    let message = format!("header `{name}: {wanted}` is not known; use one of {}", words.join(", "));
    Err(ActionError::invalid(message))
}

/// Whether the caller of a request that is refused expects frames.
pub(crate) fn wants_stream(message: &Message) -> bool {
    let mode = message.headers.as_ref().and_then(|headers| header(headers, "A2A-Reply"));
    mode.is_some_and(|mode| mode.eq_ignore_ascii_case("stream"))
}

/// The body of a request, with what its `Content-Type` declares.
pub(crate) fn body(message: &Message) -> RequestBody {
    let content_type = message.headers.as_ref().and_then(|headers| header(headers, "Content-Type"));
    RequestBody::new(message.payload.clone(), content_type)
}

/// The first value of a header. Its name is compared without case, because HTTP clients and bridges change it.
///
/// The NATS client keeps the order of the values of one spelling, but not the order of two spellings of one
/// name: of those, `name` as it is documented counts, and otherwise the first in byte order, so that
/// the same message always means the same.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let spellings = headers.iter().map(|(spelling, values)| (AsRef::<str>::as_ref(spelling), values));
    let (_, values) = spellings
        .filter(|(spelling, _)| spelling.eq_ignore_ascii_case(name))
        .min_by_key(|(spelling, _)| (*spelling != name, *spelling))?;
    values.first().map(|value| value.as_str().trim())
}

/// The caller's trace context. Nothing of an invalid one is handed on: it could be anything.
pub(crate) fn trace(message: &Message) -> TraceContext {
    let Some(headers) = &message.headers else { return TraceContext::default() };
    let value = |text| reqwest::header::HeaderValue::from_str(text).ok();
    let Some(parent) = header(headers, "traceparent").and_then(Traceparent::parse) else {
        return TraceContext::default();
    };
    let state = header(headers, "tracestate").filter(|state| state.len() <= MAX_TRACE_STATE);
    TraceContext { parent: value(parent.as_str()), state: state.and_then(value) }
}
