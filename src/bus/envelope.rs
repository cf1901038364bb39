//! What a NATS message says beside its body, and how a reply is written.

mod question;

use async_nats::{Client, HeaderMap, HeaderValue, Message, Subject};
use bytes::Bytes;
use serde::Deserialize;

use crate::a2a::client::Trace;
use crate::action::error::{ActionError, Code};
use crate::action::once::Reply;
use crate::action::outcome::TaskRef;
use crate::action::request::{Body, Options};
use crate::action::run::Mode;
use crate::config::values::parse_capped_duration;
use crate::json::shorten;
use crate::telemetry::traceparent::Traceparent;

/// Longest idempotency key.
const MAX_KEY: usize = 512;
/// Longest `Nats-Service-Error`.
const MAX_ERROR: usize = 400;
/// Longest `tracestate` that is handed on.
const MAX_TRACE_STATE: usize = 512;
/// What a message costs beside payload and headers, at the most.
const FRAMING: usize = 64;

/// What headers say.
#[derive(Debug, Clone)]
pub struct Wishes {
    /// How the caller wants the reply.
    pub mode: Mode,
    /// Whether the task is cancelled when the caller is gone.
    pub cancel_on_disconnect: bool,
    /// Everything that the action itself wants to know.
    pub options: Options,
}

/// How the caller wants the reply, as far as that can be understood.
pub fn mode(message: &Message) -> Result<Mode, ActionError> {
    match message.headers.as_ref().and_then(|headers| header(headers, "A2A-Reply")) {
        None => Ok(Mode::Final),
        Some(mode) if mode.eq_ignore_ascii_case("final") => Ok(Mode::Final),
        Some(mode) if mode.eq_ignore_ascii_case("stream") => Ok(Mode::Stream),
        Some(mode) if mode.eq_ignore_ascii_case("submit") => Ok(Mode::Submit),
        Some(mode) => {
            let message = format!(
                "header `A2A-Reply: {}` is not known; use `final`, `stream` or `submit`",
                shorten(mode, 40)
            );
            Err(ActionError::invalid(message))
        }
    }
}

/// Reads the headers of a request.
pub fn wishes(message: &Message) -> Result<Wishes, ActionError> {
    let mode = mode(message)?;
    let Some(headers) = &message.headers else {
        return Ok(Wishes { mode, cancel_on_disconnect: false, options: Options::default() });
    };
    let cancel_on_disconnect = match header(headers, "A2A-On-Disconnect") {
        None => false,
        Some(wish) if wish.eq_ignore_ascii_case("cancel") => true,
        Some(wish) if wish.eq_ignore_ascii_case("continue") => false,
        Some(wish) => {
            let message = format!(
                "header `A2A-On-Disconnect: {}` is not known; use `cancel` or `continue`",
                shorten(wish, 40)
            );
            return Err(ActionError::invalid(message));
        }
    };
    let timeout = header(headers, "A2A-Timeout").map(parse_capped_duration).transpose();
    let timeout = timeout.map_err(|why| ActionError::invalid(format!("header `A2A-Timeout`: {why}")))?;
    let idempotency_key = header(headers, "Nats-Msg-Id").filter(|key| !key.is_empty()).map(str::to_owned);
    if idempotency_key.as_ref().is_some_and(|key| key.len() > MAX_KEY) {
        return Err(ActionError::invalid(format!("header `Nats-Msg-Id` is longer than {MAX_KEY} bytes")));
    }
    let options = Options { timeout, idempotency_key, trace: trace(message) };
    Ok(Wishes { mode, cancel_on_disconnect, options })
}

/// The body of a request, with what its `Content-Type` declares.
pub fn body(message: &Message) -> Body<'_> {
    let content_type = message.headers.as_ref().and_then(|headers| header(headers, "Content-Type"));
    Body::new(&message.payload, content_type)
}

/// The first value of a header, whose name is compared without case: HTTP clients and bridges change it.
///
/// The client keeps the order of the values of one spelling, but not the order of two spellings of one
/// name: of those, `name` as it is documented counts, and otherwise the first in byte order, so that
/// the same message always means the same.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let spellings = headers.iter().map(|(spelling, values)| (AsRef::<str>::as_ref(spelling), values));
    let (_, values) = spellings
        .filter(|(spelling, _)| spelling.eq_ignore_ascii_case(name))
        .min_by_key(|(spelling, _)| (*spelling != name, *spelling))?;
    values.first().map(|value| value.as_str().trim())
}

/// The caller's trace context; nothing of an invalid one is handed on, as it could be anything.
pub fn trace(message: &Message) -> Trace {
    let Some(headers) = &message.headers else { return Trace::default() };
    let value = |text| reqwest::header::HeaderValue::from_str(text).ok();
    let Some(parent) = header(headers, "traceparent").and_then(Traceparent::parse) else {
        return Trace::default();
    };
    let state = header(headers, "tracestate").filter(|state| state.len() <= MAX_TRACE_STATE);
    Trace { parent: value(parent.as_str()), state: state.and_then(value) }
}

/// The trace that the caller's `traceparent` names.
pub fn trace_id(message: &Message) -> Option<&str> {
    let parent = header(message.headers.as_ref()?, "traceparent").and_then(Traceparent::parse)?;
    Some(parent.trace_id())
}

/// How a call ended, in one word: its status, or its error code.
pub fn outcome(reply: &Reply) -> &str {
    match reply {
        Err(error) => error.info.code.name(),
        // Replies begin with `success` and `status`; cards and other objects have neither.
        Ok(body) => {
            let head = body.get(..80).unwrap_or(body);
            let head = head.utf8_chunks().next().map_or("", |chunk| chunk.valid());
            let status = head.split_once("\"status\":\"");
            status.and_then(|(_, rest)| rest.split('"').next()).unwrap_or("ok")
        }
    }
}

/// A reply as it goes out: its body, and the headers of an error.
#[derive(Debug)]
pub struct Outgoing {
    /// The reply object.
    pub body: Bytes,
    /// The two headers of an error.
    pub headers: Option<HeaderMap>,
    /// The number and name of the error, for the counts.
    pub error: Option<(u16, &'static str)>,
}

impl Outgoing {
    /// Writes a reply; one that does not fit into a message, with `overhead` bytes around it, becomes
    /// an error that does, and a question is cut.
    pub fn new(reply: Reply, max_payload: usize, overhead: usize) -> Self {
        let outgoing = match reply {
            Ok(body) => Self { body, headers: None, error: None },
            Err(mut error) => {
                let whole = Self::of_error(&error);
                if whole.size(overhead) <= max_payload || error.info.a2a_data.take().is_none() {
                    whole
                } else {
                    // The agent's code and words say more than that they came with much data.
                    error.message += " (its data is too large for a message and left out)";
                    Self::of_error(&error)
                }
            }
        };
        let size = outgoing.size(overhead);
        if size <= max_payload {
            return outgoing;
        }
        if outgoing.error.is_none()
            && let Some(body) = question::cut(&outgoing.body, max_payload.saturating_sub(overhead))
        {
            return Self { body, ..outgoing };
        }
        let message = format!("the reply has {size} bytes, and the mesh takes {max_payload} at most");
        let mut error = ActionError::new(Code::TooLarge, message);
        error.task = task_of(&outgoing.body);
        let outgoing = Self::of_error(&error);
        if outgoing.size(overhead) <= max_payload {
            return outgoing;
        }
        // Ids that are too long as well: an error without its task is better than none.
        error.task = None;
        Self::of_error(&error)
    }

    fn size(&self, overhead: usize) -> usize {
        let headers = if self.headers.is_some() { MAX_ERROR + FRAMING } else { 0 };
        self.body.len() + headers + overhead
    }

    fn of_error(error: &ActionError) -> Self {
        let code = error.info.code;
        let line: String = error.message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Service-Error-Code", HeaderValue::from(u64::from(code.number())));
        headers.insert("Nats-Service-Error", shorten(&line, MAX_ERROR).as_str());
        Self { body: error.to_json(), headers: Some(headers), error: Some((code.number(), code.name())) }
    }

    /// Publishes the reply.
    pub async fn send(self, client: &Client, to: Subject) -> Result<(), async_nats::PublishError> {
        match self.headers {
            Some(headers) => client.publish_with_headers(to, headers, self.body).await,
            None => client.publish(to, self.body).await,
        }
    }
}

/// Which task a reply that is too large was about: the caller can still ask for it.
fn task_of(body: &[u8]) -> Option<TaskRef> {
    #[derive(Deserialize)]
    struct Body {
        task: Option<TaskRef>,
    }
    serde_json::from_slice::<Body>(body).ok().and_then(|body| body.task)
}
