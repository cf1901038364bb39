//! What the headers of a NATS request say.

use async_nats::{HeaderMap, Message};

use super::frames::FrameForm;
use crate::a2a::client::Trace;
use crate::action::request::{CallOptions, ReplyMode};
use crate::config::values::parse_duration;
use crate::json::shorten;
use crate::reply::error::ActionError;

/// Longest idempotency key.
const MAX_KEY: usize = 512;

/// The headers of a request, checked.
#[derive(Debug, Default)]
pub struct Headers {
    pub options: CallOptions,
    pub idempotency_key: Option<String>,
    /// Which frames a stream has.
    pub frames: FrameForm,
    /// Whether the task is cancelled when the caller is gone.
    pub cancel_on_disconnect: bool,
}

impl Headers {
    pub fn read(message: &Message) -> Result<Self, ActionError> {
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
            &[("all", FrameForm::All), ("text", FrameForm::Text), ("artifacts", FrameForm::Artifacts)],
        )?;
        let cancel_on_disconnect =
            choice(headers, "A2A-On-Disconnect", &[("continue", false), ("cancel", true)])?;
        let timeout = header(headers, "A2A-Timeout").map(parse_duration).transpose();
        let timeout = timeout.map_err(|why| ActionError::invalid(format!("header `A2A-Timeout`: {why}")))?;
        let idempotency_key = header(headers, "Nats-Msg-Id").filter(|key| !key.is_empty()).map(str::to_owned);
        if idempotency_key.as_ref().is_some_and(|key| key.len() > MAX_KEY) {
            let message = format!("header `Nats-Msg-Id` is longer than {MAX_KEY} bytes");
            return Err(ActionError::invalid(message));
        }
        let options = CallOptions { mode: mode.unwrap_or_default(), timeout, trace: trace(message) };
        Ok(Self {
            options,
            idempotency_key,
            frames: frames.unwrap_or_default(),
            cancel_on_disconnect: cancel_on_disconnect.unwrap_or_default(),
        })
    }

    /// The same for an operation that has exactly one reply.
    pub fn with_one_reply(mut self) -> Self {
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
pub fn wants_stream(message: &Message) -> bool {
    let mode = message.headers.as_ref().and_then(|headers| header(headers, "A2A-Reply"));
    mode.is_some_and(|mode| mode.eq_ignore_ascii_case("stream"))
}

/// Header names are compared without case, because HTTP clients and bridges change it.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut all = headers.iter().filter(|(other, _)| AsRef::<str>::as_ref(*other).eq_ignore_ascii_case(name));
    all.next().and_then(|(_, values)| values.first()).map(|value| value.as_str().trim())
}

/// The caller's trace context.
pub fn trace(message: &Message) -> Trace {
    let Some(headers) = &message.headers else { return Trace::default() };
    let value =
        |name| header(headers, name).and_then(|text| reqwest::header::HeaderValue::from_str(text).ok());
    // What is not a trace context is not handed on: it could be anything.
    let parent =
        header(headers, "traceparent").filter(|text| is_traceparent(text)).and_then(|_| value("traceparent"));
    Trace { parent, state: value("tracestate").filter(|state| state.len() <= 512) }
}

fn is_traceparent(text: &str) -> bool {
    let hex = |part: &str, length| part.len() == length && part.bytes().all(|b| b.is_ascii_hexdigit());
    let mut parts = text.split('-');
    let mut next = |length| parts.next().is_some_and(|part| hex(part, length));
    next(2) && next(32) && next(16) && next(2)
}
