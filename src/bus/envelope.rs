//! What a NATS message says beside its body, and how a reply is written.

use async_nats::{Client, HeaderMap, HeaderValue, Message, Subject};
use bytes::Bytes;
use serde::Deserialize;

use crate::a2a::client::Trace;
use crate::action::error::{ActionError, Code};
use crate::action::once::Reply;
use crate::action::outcome::TaskRef;
use crate::action::request::Options;
use crate::config::values::parse_duration;
use crate::json::shorten;

/// Longest idempotency key.
const MAX_KEY: usize = 512;
/// Longest `Nats-Service-Error`.
const MAX_ERROR: usize = 400;
/// What a message costs beside payload and headers, at the most.
const FRAMING: usize = 64;

/// How the caller wants the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyMode {
    /// One reply when the task ends or needs input.
    Final,
}

/// Reads the headers of a request.
pub fn options(message: &Message) -> Result<(ReplyMode, Options), ActionError> {
    let Some(headers) = &message.headers else {
        return Ok((ReplyMode::Final, Options::default()));
    };
    let mode = match header(headers, "A2A-Reply") {
        None => ReplyMode::Final,
        Some(mode) if mode.eq_ignore_ascii_case("final") => ReplyMode::Final,
        Some(mode @ ("stream" | "submit")) => {
            let message = format!(
                "header `A2A-Reply: {mode}` is not served by this version of the bridge; use `final`"
            );
            return Err(ActionError::invalid(message));
        }
        Some(mode) => {
            let message = format!(
                "header `A2A-Reply: {}` is not known; use `final`",
                shorten(mode, 40)
            );
            return Err(ActionError::invalid(message));
        }
    };
    let timeout = header(headers, "A2A-Timeout").map(parse_duration).transpose();
    let timeout = timeout.map_err(|why| ActionError::invalid(format!("header `A2A-Timeout`: {why}")))?;
    let idempotency_key = header(headers, "Nats-Msg-Id")
        .filter(|key| !key.is_empty())
        .map(str::to_owned);
    if idempotency_key.as_ref().is_some_and(|key| key.len() > MAX_KEY) {
        return Err(ActionError::invalid(format!(
            "header `Nats-Msg-Id` is longer than {MAX_KEY} bytes"
        )));
    }
    Ok((
        mode,
        Options {
            timeout,
            idempotency_key,
            trace: trace(headers),
        },
    ))
}

/// Header names are compared without case: HTTP clients and bridges change it.
fn header<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut all = headers
        .iter()
        .filter(|(other, _)| AsRef::<str>::as_ref(*other).eq_ignore_ascii_case(name));
    all.next()
        .and_then(|(_, values)| values.first())
        .map(|value| value.as_str().trim())
}

fn trace(headers: &HeaderMap) -> Trace {
    let value =
        |name| header(headers, name).and_then(|text| reqwest::header::HeaderValue::from_str(text).ok());
    // What is not a trace context is not handed on: it could be anything.
    let parent = header(headers, "traceparent")
        .filter(|text| is_traceparent(text))
        .and_then(|_| value("traceparent"));
    Trace {
        parent,
        state: value("tracestate").filter(|state| state.len() <= 512),
    }
}

fn is_traceparent(text: &str) -> bool {
    let hex = |part: &str, length| part.len() == length && part.bytes().all(|b| b.is_ascii_hexdigit());
    let mut parts = text.split('-');
    let mut next = |length| parts.next().is_some_and(|part| hex(part, length));
    next(2) && next(32) && next(16) && next(2)
}

/// The trace that the caller's `traceparent` names.
pub fn trace_id(message: &Message) -> Option<&str> {
    let parent = header(message.headers.as_ref()?, "traceparent").filter(|text| is_traceparent(text))?;
    parent.split('-').nth(1)
}

/// How a call ended, in one word: its status, or its error code.
pub fn outcome(reply: &Reply) -> &str {
    match reply {
        Err(error) => error.info.code.name(),
        // Replies begin with `success` and `status`; cards and other objects have neither.
        Ok(body) => std::str::from_utf8(body.get(..80.min(body.len())).unwrap_or_default())
            .ok()
            .and_then(|head| head.split_once("\"status\":\""))
            .and_then(|(_, rest)| rest.split('"').next())
            .unwrap_or("ok"),
    }
}

/// A reply as it goes out.
#[derive(Debug)]
pub struct Outgoing {
    headers: Option<HeaderMap>,
    body: Bytes,
    /// The number and text of the error, for the counts.
    pub error: Option<(u16, &'static str)>,
}

impl Outgoing {
    /// Writes a reply; one that does not fit into a message becomes an error that does.
    pub fn new(reply: Reply, max_payload: usize) -> Self {
        let outgoing = match reply {
            Ok(body) => Self {
                headers: None,
                body,
                error: None,
            },
            Err(error) => Self::of_error(&error),
        };
        let size = outgoing.body.len()
            + if outgoing.headers.is_some() {
                MAX_ERROR + FRAMING
            } else {
                0
            };
        if size <= max_payload {
            return outgoing;
        }
        let message = format!("the reply has {size} bytes, and the mesh takes {max_payload} at most");
        let mut error = ActionError::new(Code::TooLarge, message);
        error.task = task_of(&outgoing.body);
        Self::of_error(&error)
    }

    fn of_error(error: &ActionError) -> Self {
        let code = error.info.code;
        let line: String = error
            .message
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let mut headers = HeaderMap::new();
        headers.insert(
            "Nats-Service-Error-Code",
            HeaderValue::from(u64::from(code.number())),
        );
        headers.insert("Nats-Service-Error", shorten(&line, MAX_ERROR).as_str());
        Self {
            headers: Some(headers),
            body: error.to_json().into(),
            error: Some((code.number(), code.name())),
        }
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
    serde_json::from_slice::<Body>(body)
        .ok()
        .and_then(|body| body.task)
}
