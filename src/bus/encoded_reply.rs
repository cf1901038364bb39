//! A reply as a NATS message.

use std::time::Duration;

use async_nats::{HeaderMap, HeaderValue, Subject};
use bytes::Bytes;

use super::outbox::{Outbox, Room};
use super::reply_files;
use crate::files::{CallFiles, FileError, FileMode};
use crate::json;
use crate::offload;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyContent, ReplyFile, TaskRef};
use crate::text::shorten;

/// How long the file store may take for a reply.
const STORE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum bytes of `Nats-Service-Error`.
const MAX_ERROR: usize = 400;
/// What a note in a shortened question calls the lists that it leaves out.
const FILES: &str = "files";
const DATA: &str = "data parts";
const ARTIFACTS: &str = "artifacts";
/// Maximum bytes of a message in addition to payload and headers.
const FRAMING: usize = 64;

#[derive(Debug)]
pub(crate) struct EncodedReply {
    pub body: Bytes,
    /// The headers of an error.
    pub headers: Option<HeaderMap>,
    /// The number and the name of the error, for the statistics.
    pub error: Option<(u16, &'static str)>,
    /// Room in the send window.
    pub(super) room: Option<Room>,
}

/// What the event log says about the reply of a call.
#[derive(Debug, Default)]
pub(super) struct LoggedReply {
    pub(super) is_logged: bool,
    /// Whether the log is incomplete.
    pub(super) has_failed: bool,
    /// The reply as it is in the log.
    pub(super) result: Option<Bytes>,
}

impl LoggedReply {
    /// Encodes a reply: as it is in the log, if it is there.
    pub(super) async fn encode(&mut self, reply: &Reply, outbox: &Outbox, overhead: usize) -> EncodedReply {
        let mut encoded = match self.result.take() {
            Some(body) => match reply {
                Ok(_) => EncodedReply::from_body(body),
                Err(error) => EncodedReply { body, ..EncodedReply::from_error(error) },
            },
            None => EncodedReply::prepare(reply, outbox, overhead).await,
        };
        if self.has_failed {
            encoded.headers.get_or_insert_default().insert("A2A-Log", "failed");
        }
        encoded
    }
}

impl EncodedReply {
    /// Waits for room in the send window, and encodes a reply. If the call has a file store, what does not fit goes by
    /// reference; otherwise, or if the store fails, as in [`EncodedReply::new`].
    pub(crate) async fn prepare(reply: &Reply, outbox: &Outbox, overhead: usize) -> Self {
        let Some(files) = CallFiles::current().filter(|files| Self::may_need_store(reply, files, outbox))
        else {
            return Self::prepare_inline(reply, outbox, overhead, None).await;
        };
        let encoding =
            tokio::time::timeout(STORE_TIMEOUT, reply_files::encode(reply, &files, outbox, overhead));
        let late = |_| {
            let seconds = STORE_TIMEOUT.as_secs();
            Err(FileError::Unavailable(format!("it did not store the reply within {seconds} s")))
        };
        match Box::pin(encoding).await.unwrap_or_else(late) {
            Ok(encoded) => encoded,
            Err(error) => {
                tracing::debug!(agent = %outbox.agent, %error, "cannot store a reply or its files");
                Self::prepare_inline(reply, outbox, overhead, Some(&error)).await
            }
        }
    }

    /// Whether a reply may need the file store. Most replies certainly do not.
    fn may_need_store(reply: &Reply, files: &CallFiles, outbox: &Outbox) -> bool {
        let needs_store = |file: &ReplyFile| files.mode == FileMode::Reference || file.sha256.is_some();
        let has_files = reply.as_ref().is_ok_and(|outcome| outcome.content.files.iter().any(needs_store));
        // Escapes may make each byte six, and the object around the content is small.
        has_files || Self::estimate(reply).saturating_mul(6) > outbox.max_payload() / 2
    }

    /// The approximate bytes of a reply, without escapes.
    pub(super) fn estimate(reply: &Reply) -> usize {
        match reply {
            Ok(outcome) => outcome.content_length(),
            Err(error) => error.allocated(),
        }
    }

    /// `why` is the reason why the file store did not take what does not fit.
    async fn prepare_inline(
        reply: &Reply,
        outbox: &Outbox,
        overhead: usize,
        why: Option<&FileError>,
    ) -> Self {
        let max_payload = outbox.max_payload();
        let size = Self::estimate(reply);
        // Escapes may make each byte six.
        let mut room = outbox.reserve(size.saturating_mul(6).min(max_payload)).await;
        let encoded =
            offload::run(&outbox.agent, size, || Self::new_because(reply, max_payload, overhead, why)).await;
        if let Some(room) = &mut room {
            room.shrink(encoded.body.len());
        }
        Self { room, ..encoded }
    }

    /// Encodes a reply. If it does not fit into a message with `overhead` bytes around it, a question becomes
    /// shorter, an error loses its data, and any other reply becomes an error that fits.
    pub(crate) fn new(reply: &Reply, max_payload: usize, overhead: usize) -> Self {
        Self::new_because(reply, max_payload, overhead, None)
    }

    /// Encodes a reply that fits. Otherwise returns its size, or at least the minimum.
    pub(super) fn fitting(reply: &Reply, max_payload: usize, overhead: usize) -> Result<Self, usize> {
        // Encoding content that cannot fit would only cost time and memory.
        let least = match reply {
            Ok(outcome) => outcome.content_length(),
            Err(error) => error.info.a2a_data.as_ref().map_or(0, |data| data.get().len()),
        };
        if least > max_payload {
            return Err(least);
        }
        let encoded = match reply {
            Ok(outcome) => Self::from_body(outcome.to_json()),
            Err(error) => Self::from_error(error),
        };
        let size = encoded.size(overhead);
        if size <= max_payload { Ok(encoded) } else { Err(size) }
    }

    fn new_because(reply: &Reply, max_payload: usize, overhead: usize, why: Option<&FileError>) -> Self {
        let size = match Self::fitting(reply, max_payload, overhead) {
            Ok(encoded) => return encoded,
            Err(size) => size,
        };
        let (smaller, task) = match reply {
            Ok(outcome) => {
                let question = shorten_question(outcome, max_payload.saturating_sub(overhead));
                (question.map(Self::from_body), Some(outcome.task.clone()))
            }
            // The agent's code and text are worth more than the fact that its data is large.
            Err(error) => (error.without_data().map(|error| Self::from_error(&error)), error.task.clone()),
        };
        match smaller {
            Some(smaller) if smaller.size(overhead) <= max_payload => smaller,
            _ => Self::too_large(size, task, max_payload, overhead, why),
        }
    }

    /// Encodes a document that is not a reply object, such as a card.
    pub(crate) fn from_document(body: Bytes, max_payload: usize) -> Self {
        if body.len() <= max_payload {
            return Self::from_body(body);
        }
        Self::too_large(body.len(), None, max_payload, 0, None)
    }

    fn too_large(
        size: usize,
        task: Option<TaskRef>,
        max_payload: usize,
        overhead: usize,
        why: Option<&FileError>,
    ) -> Self {
        let mut message =
            format!("the reply has {size} bytes, but the NATS server accepts at most {max_payload}");
        if let Some(why) = why {
            message.push_str(&format!("; {why}"));
        }
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
        Self { body, headers: None, error: None, room: None }
    }

    /// The headers of an error.
    pub(super) fn headers_of(code: Code, message: &str) -> HeaderMap {
        error_headers(code.number(), message, MAX_ERROR)
    }

    fn from_error(error: &ActionError) -> Self {
        let code = error.info.code;
        let headers = Self::headers_of(code, &error.message);
        let error_name = Some((code.number(), code.name()));
        Self { body: error.to_json(), headers: Some(headers), error: error_name, room: None }
    }

    pub(crate) async fn send(self, outbox: &Outbox, to: Subject) -> Result<(), async_nats::PublishError> {
        match self.room {
            Some(room) => outbox.publish_in(Some(room), to, self.headers, None, self.body).await,
            None => outbox.publish(to, self.headers, None, self.body).await,
        }
    }
}

/// The headers of an error, with the message in one line of at most `max` bytes.
pub(super) fn error_headers(number: u16, message: &str, max: usize) -> HeaderMap {
    let line = shorten(message, max).replace(char::is_control, " ");
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Service-Error-Code", HeaderValue::from(u64::from(number)));
    headers.insert("Nats-Service-Error", shorten(line.trim(), max).as_str());
    headers
}

/// Encodes an agent's question in at most `room` bytes: an error in its place would lose the id with which to
/// answer it. Leaves out what came with the question, the largest first, and then cuts its text; a note at
/// the end of the text says so.
fn shorten_question(question: &Outcome, room: usize) -> Option<Bytes> {
    question.follow_up.as_ref()?;
    let ReplyContent { message, files, data, artifacts } = &question.content;
    let mut left_out = Vec::new();
    // A list that does not fit by itself is not even copied.
    let mut fitting = |name, bytes: usize| {
        let fits = bytes <= room;
        if !fits {
            left_out.push(name);
        }
        fits
    };
    let [of_files, of_data, of_artifacts] = question.content.list_lengths();
    let has_files = fitting(FILES, of_files);
    let has_data = fitting(DATA, of_data);
    let has_artifacts = fitting(ARTIFACTS, of_artifacts);
    let mut short = Outcome {
        content: ReplyContent {
            message: String::new(),
            files: if has_files { files.clone() } else { Vec::new() },
            data: if has_data { data.clone() } else { Vec::new() },
            artifacts: if has_artifacts { artifacts.clone() } else { Vec::new() },
        },
        status: question.status,
        success: question.success,
        follow_up: question.follow_up.clone(),
        retries: question.retries.clone(),
        task: question.task.clone(),
    };
    loop {
        let largest = remove_largest(&mut short.content);
        left_out.push(largest.unwrap_or("the rest of the text"));
        let is_last = largest.is_none();
        short.content.message = format!(" … (too large for a message; left out: {})", left_out.join(", "));
        let text_room = room.checked_sub(short.to_json().len());
        if is_last && text_room.is_none() {
            return None;
        }
        let text = json::json_prefix(message, text_room.unwrap_or_default());
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
        (FILES, files.iter().map(|file| json::to_bytes(file).len()).sum::<usize>()),
        (DATA, data.iter().map(|data| data.get().len()).sum()),
        (ARTIFACTS, artifacts.iter().map(|artifact| json::to_bytes(artifact).len()).sum()),
    ];
    let (name, _) = sizes.into_iter().filter(|(_, size)| *size > 0).max_by_key(|(_, size)| *size)?;
    match name {
        FILES => files.clear(),
        DATA => data.clear(),
        _ => artifacts.clear(),
    }
    Some(name)
}
