//! A reply as a NATS message.

use async_nats::{HeaderMap, HeaderValue, Subject};
use bytes::Bytes;

use super::outbox::Outbox;
use crate::json;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyContent, TaskRef};
use crate::text::shorten;

/// Maximum bytes of `Nats-Service-Error`.
const MAX_ERROR: usize = 400;
/// Maximum bytes of a message in addition to payload and headers.
const FRAMING: usize = 64;

#[derive(Debug)]
pub(crate) struct EncodedReply {
    pub body: Bytes,
    /// The headers of an error.
    pub headers: Option<HeaderMap>,
    /// The number and the name of the error, for the statistics.
    pub error: Option<(u16, &'static str)>,
}

impl EncodedReply {
    /// Encodes a reply. If it does not fit into a message with `overhead` bytes around it, a question becomes
    /// shorter, an error loses its data, and any other reply becomes an error that fits.
    pub(crate) fn new(reply: &Reply, max_payload: usize, overhead: usize) -> Self {
        let encoded = match reply {
            // Encoding content that cannot fit would only cost time and memory.
            Ok(outcome) if outcome.follow_up.is_none() && outcome.content_length() > max_payload => {
                let size = outcome.content_length();
                return Self::too_large(size, Some(outcome.task.clone()), max_payload, overhead);
            }
            Ok(outcome) => Self::from_body(outcome.to_json()),
            Err(error) => Self::from_error(error),
        };
        let size = encoded.size(overhead);
        if size <= max_payload {
            return encoded;
        }
        let (smaller, task) = match reply {
            Ok(outcome) => {
                let question = shorten_question(outcome, max_payload.saturating_sub(overhead));
                (question.map(Self::from_body), Some(outcome.task.clone()))
            }
            // The agent's code and text are worth more than the fact that its data is large.
            Err(error) => (without_data(error).map(|error| Self::from_error(&error)), error.task.clone()),
        };
        match smaller {
            Some(smaller) if smaller.size(overhead) <= max_payload => smaller,
            _ => Self::too_large(size, task, max_payload, overhead),
        }
    }

    /// Encodes a document that is not a reply object, such as a card.
    pub(crate) fn from_document(body: Bytes, max_payload: usize) -> Self {
        if body.len() <= max_payload {
            return Self::from_body(body);
        }
        Self::too_large(body.len(), None, max_payload, 0)
    }

    fn too_large(size: usize, task: Option<TaskRef>, max_payload: usize, overhead: usize) -> Self {
        let message =
            format!("the reply has {size} bytes, but the NATS server accepts at most {max_payload}");
        let mut error = ActionError { task, ..ActionError::new(Code::TooLarge, message) };
        let encoded = Self::from_error(&error);
        if encoded.size(overhead) <= max_payload {
            return encoded;
        }
        // The ids are too long as well: an error without its task is better than no error.
        error.task = None;
        Self::from_error(&error)
    }

    fn size(&self, overhead: usize) -> usize {
        let headers = if self.headers.is_some() { MAX_ERROR + FRAMING } else { 0 };
        self.body.len() + headers + overhead
    }

    pub(super) fn from_body(body: Bytes) -> Self {
        Self { body, headers: None, error: None }
    }

    fn from_error(error: &ActionError) -> Self {
        let code = error.info.code;
        let headers = error_headers(code.number(), &error.message, MAX_ERROR);
        Self { body: error.to_json(), headers: Some(headers), error: Some((code.number(), code.name())) }
    }

    pub(crate) async fn send(self, outbox: &Outbox, to: Subject) -> Result<(), async_nats::PublishError> {
        outbox.publish(to, self.headers, None, self.body).await
    }
}

/// The headers of an error, with the message in one line of at most `max` bytes.
pub(super) fn error_headers(number: u16, message: &str, max: usize) -> HeaderMap {
    let line = message.replace(char::is_control, " ");
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Service-Error-Code", HeaderValue::from(u64::from(number)));
    headers.insert("Nats-Service-Error", shorten(line.trim(), max).as_str());
    headers
}

fn without_data(error: &ActionError) -> Option<ActionError> {
    error.info.a2a_data.as_ref()?;
    let mut error = error.clone();
    error.info.a2a_data = None;
    error.message += " (the error data is left out because it is too large for a message)";
    Some(error)
}

/// Encodes an agent's question in at most `room` bytes: an error in its place would lose the id with which to
/// answer it. Leaves out what came with the question, the largest first, and then cuts its text; a note at
/// the end of the text says so.
fn shorten_question(question: &Outcome, room: usize) -> Option<Bytes> {
    question.follow_up.as_ref()?;
    let mut short = question.clone();
    let message = std::mem::take(&mut short.content.message);
    let mut left_out = Vec::new();
    loop {
        let largest = remove_largest(&mut short.content);
        left_out.push(largest.unwrap_or("the rest of the text"));
        let is_last = largest.is_none();
        short.content.message = format!(" … (too large for a message; left out: {})", left_out.join(", "));
        let text_room = room.checked_sub(short.to_json().len());
        if is_last && text_room.is_none() {
            return None;
        }
        let text = json::json_prefix(&message, text_room.unwrap_or_default());
        if is_last || (text_room.is_some() && text.len() == message.len()) {
            short.content.message.insert_str(0, text);
            return Some(short.to_json());
        }
    }
}

/// Empties the list that takes the most bytes.
fn remove_largest(content: &mut ReplyContent) -> Option<&'static str> {
    let ReplyContent { files, data, artifacts, .. } = content;
    let sizes = [
        ("files", files.iter().map(|file| json::to_bytes(file).len()).sum::<usize>()),
        ("data parts", data.iter().map(|data| data.get().len()).sum()),
        ("artifacts", artifacts.iter().map(|artifact| json::to_bytes(artifact).len()).sum()),
    ];
    let (name, _) = sizes.into_iter().filter(|(_, size)| *size > 0).max_by_key(|(_, size)| *size)?;
    match name {
        "files" => files.clear(),
        "data parts" => data.clear(),
        _ => artifacts.clear(),
    }
    Some(name)
}
