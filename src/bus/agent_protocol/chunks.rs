//! Writes the chunks of a response to the caller's inbox.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::Subject;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::envelope::attachment_name;
use crate::a2a::model::TaskState;
use crate::action::progress::{Listener, Progress, ProgressEvent};
use crate::bus::encoded_reply::error_headers;
use crate::bus::inbox::{Inbox, MAX_COALESCED, split_text, typed_body};
use crate::bus::outbox::Outbox;
use crate::json::to_bytes;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyContent, ReplyStatus};
use crate::text::shorten;

/// The protocol requires a chunk at least this often.
const MAX_KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Maximum bytes of `Nats-Service-Error`.
const MAX_ERROR: usize = 200;
/// Length of a question in its chunk if the whole question does not fit.
const SHORT_QUESTION: usize = 1024;

#[derive(Debug)]
pub(super) struct ChunkWriter {
    inbox: Inbox,
    has_started: bool,
    /// Whether any text was sent since the prompt or the last question.
    has_sent_text: bool,
    /// Text that may turn out to be the question or the reason for a failure, which other chunks carry.
    held: Option<Vec<String>>,
    /// Text that waits for more while the connection is behind.
    coalesced: String,
    /// Digests of the attachments that were sent: an agent repeats a task's files after each question.
    sent_attachments: HashSet<[u8; 32]>,
}

#[derive(Serialize)]
struct ResponseData<'a> {
    text: &'a str,
    attachments: &'a [Attachment],
}

#[derive(Serialize)]
struct QueryData<'a> {
    id: &'a str,
    reply_subject: &'a str,
    prompt: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    attachments: &'a [Attachment],
}

#[derive(Debug, Serialize)]
struct Attachment {
    filename: String,
    content: String,
}

impl ChunkWriter {
    pub(super) fn new(outbox: Outbox, to: Subject, keep_alive: Duration) -> Self {
        Self {
            inbox: Inbox::new(outbox, to, keep_alive.min(MAX_KEEP_ALIVE)),
            has_started: false,
            has_sent_text: false,
            held: None,
            coalesced: String::new(),
            sent_attachments: HashSet::new(),
        }
    }

    /// Sends the first chunk or a keep-alive.
    async fn acknowledge(&mut self) {
        self.send(typed_body("status", "ack")).await;
    }

    /// Sends keep-alives until `wait` resolves.
    pub(super) async fn keep_alive_during<T>(&mut self, wait: impl Future<Output = T>) -> T {
        tokio::pin!(wait);
        loop {
            let silence = self.inbox.until_keep_alive();
            tokio::select! {
                biased;
                result = &mut wait => return result,
                () = tokio::time::sleep(silence) => self.acknowledge().await,
            }
        }
    }

    /// Sends the agent's question; the caller answers to `reply_subject`.
    pub(super) async fn send_question(&mut self, id: &str, reply_subject: &str, outcome: &Outcome) {
        self.flush().await;
        let message = &outcome.content.message;
        self.release_held(message).await;
        let Attachments { groups, notes, .. } = self.new_attachments(&outcome.content);
        let query = |prompt, attachments: &[Attachment]| {
            typed_body("query", QueryData { id, reply_subject, prompt, attachments })
        };
        let mut body = query(message, groups.first().map_or(&[], Vec::as_slice));
        if groups.len() > 1 || body.len() > self.inbox.max_payload() {
            self.send_attachments(groups).await;
            body = query(message, &[]);
        }
        self.send_text(&notes).await;
        if body.len() > self.inbox.max_payload() {
            self.send_text(message).await;
            body = query(&shorten(message, SHORT_QUESTION), &[]);
        }
        self.send(body).await;
        self.has_sent_text = false;
    }

    /// Sends what is in an outcome and was not streamed before.
    pub(super) async fn send_outcome(&mut self, outcome: &Outcome) {
        self.flush().await;
        let message = &outcome.content.message;
        if outcome.status == ReplyStatus::Completed {
            self.release_held("").await;
            if !self.has_sent_text {
                self.send_text(message).await;
            }
        } else {
            // The error carries the message.
            self.release_held(message).await;
        }
        let Attachments { groups, notes, .. } = self.new_attachments(&outcome.content);
        self.send_attachments(groups).await;
        self.send_text(&notes).await;
    }

    /// Sends the error, if there is one, and the empty message that ends the stream. Returns the number and
    /// the name of the error.
    pub(super) async fn finish(mut self, result: Result<(), ActionError>) -> Option<(u16, &'static str)> {
        self.flush().await;
        let error = result.err();
        if let Some(error) = &error {
            let headers = error_headers(error_code(error), &error.message, MAX_ERROR);
            self.inbox.send(Some(headers), None, Bytes::new()).await;
        }
        self.send(Bytes::new()).await;
        error.map(|error| (error_code(&error), error.info.code.name()))
    }

    async fn send(&mut self, body: Bytes) {
        self.inbox.send(None, None, body).await;
    }

    /// Sends text in as many chunks as it needs.
    async fn send_text(&mut self, text: &str) {
        for piece in split_text(text, self.inbox.data_room()) {
            self.has_sent_text = true;
            self.send(typed_body("response", piece)).await;
        }
    }

    /// Sends the coalesced text.
    async fn flush(&mut self) {
        let coalesced = std::mem::take(&mut self.coalesced);
        self.send_text(&coalesced).await;
    }

    async fn send_attachments(&mut self, groups: Vec<Vec<Attachment>>) {
        for attachments in &groups {
            self.send(typed_body("response", ResponseData { text: "", attachments })).await;
        }
    }

    /// Sends the held texts except `skip`, which another chunk carries.
    async fn release_held(&mut self, skip: &str) {
        for text in self.held.take().unwrap_or_default() {
            if text != skip {
                self.send_text(&text).await;
            }
        }
    }

    /// The files and data that were not sent before.
    fn new_attachments(&mut self, content: &ReplyContent) -> Attachments {
        let mut attachments = Attachments { room: self.inbox.data_room(), ..Attachments::default() };
        for (index, file) in content.files.iter().enumerate() {
            let filename = attachment_name(file.name.as_deref(), &format!("file-{}", index + 1));
            let source = file.bytes.as_deref().or(file.url.as_deref()).unwrap_or_default();
            if !self.sent_attachments.insert(digest(&filename, source)) {
                continue;
            }
            match (&file.url, &file.bytes) {
                (Some(url), _) => attachments.note(&filename, url),
                (None, Some(bytes)) => {
                    attachments.add(filename, bytes.clone(), file.size.unwrap_or_default());
                }
                (None, None) => {}
            }
        }
        for (index, data) in content.data.iter().map(|data| data.get()).enumerate() {
            let filename = match index {
                0 => "data.json".to_owned(),
                _ => format!("data-{}.json", index + 1),
            };
            if self.sent_attachments.insert(digest(&filename, data)) {
                attachments.add(filename, STANDARD.encode(data), data.len());
            }
        }
        attachments
    }
}

/// Attachments in groups that fit into one chunk each.
#[derive(Debug, Default)]
struct Attachments {
    /// Size of a chunk.
    room: usize,
    /// Size of the last group.
    used: usize,
    groups: Vec<Vec<Attachment>>,
    /// One line for each file that is too large or has only a URL.
    notes: String,
}

impl Attachments {
    /// Adds a file of `size` bytes with its content in base64.
    fn add(&mut self, filename: String, content: String, size: usize) {
        let attachment = Attachment { filename, content };
        let encoded_size = to_bytes(&attachment).len() + ",".len();
        if encoded_size > self.room {
            let note = format!("left out because {size} bytes are too many for one message");
            return self.note(&attachment.filename, &note);
        }
        self.used += encoded_size;
        match self.groups.last_mut() {
            Some(group) if self.used <= self.room => group.push(attachment),
            _ => {
                self.used = encoded_size;
                self.groups.push(vec![attachment]);
            }
        }
    }

    fn note(&mut self, filename: &str, text: &str) {
        self.notes.push_str(&format!("\n{filename}: {text}"));
    }
}

impl Progress for ChunkWriter {
    async fn started(&mut self) {
        // The answer to a question continues the same stream.
        if !std::mem::replace(&mut self.has_started, true) {
            self.acknowledge().await;
        }
    }

    async fn report(&mut self, event: ProgressEvent) {
        match event {
            ProgressEvent::Response(text) => match &mut self.held {
                Some(held) => held.push(text),
                None if self.inbox.is_behind && self.coalesced.len() < MAX_COALESCED => {
                    self.coalesced.push_str(&text);
                }
                None => {
                    self.flush().await;
                    self.send_text(&text).await;
                }
            },
            ProgressEvent::State { state, .. } => {
                self.flush().await;
                if state.awaits_caller() || (state.is_final() && state != TaskState::Completed) {
                    self.held.get_or_insert_default();
                } else {
                    self.release_held("").await;
                }
            }
            // The protocol has no chunks for these.
            ProgressEvent::Task { .. } | ProgressEvent::Artifact { .. } => {}
        }
    }

    async fn flush(&mut self) {
        self.inbox.is_behind = false;
        self.flush().await;
    }

    fn keep_alive_interval(&self) -> Option<Duration> {
        Some(self.inbox.until_keep_alive())
    }

    async fn keep_alive(&mut self) -> Listener {
        self.acknowledge().await;
        Listener::Connected
    }
}

/// The protocol's code for an error: it has 400, 401, 403, 404, 409, 429 and 500.
fn error_code(error: &ActionError) -> u16 {
    match error.info.code {
        Code::InvalidRequest => 400,
        Code::TaskRejected => 403,
        Code::NotFound => 404,
        Code::FollowUpUsed | Code::FollowUpExpired | Code::NotCancelable => 409,
        Code::Busy => 429,
        // The agent's own status, if the protocol has a code for it.
        Code::AgentError => {
            error.info.http_status.filter(|status| matches!(status, 401 | 403 | 429)).unwrap_or(500)
        }
        // Here `TooLarge` means the agent's response; a prompt that is too large is an invalid request.
        Code::TooLarge
        | Code::AgentUnavailable
        | Code::TaskLost
        | Code::Timeout
        | Code::OutcomeUnknown
        | Code::StateUnavailable
        | Code::Internal
        | Code::TaskFailed
        | Code::TaskCanceled => 500,
    }
}

fn digest(name: &str, content: &str) -> [u8; 32] {
    Sha256::new().chain_update(name).chain_update([0]).chain_update(content).finalize().into()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(Code::InvalidRequest, None, 400)]
    #[case(Code::Busy, None, 429)]
    #[case(Code::AgentError, Some(401), 401)]
    #[case(Code::AgentError, Some(503), 500)]
    #[case(Code::AgentError, None, 500)]
    #[case(Code::FollowUpExpired, None, 409)]
    #[case(Code::TaskRejected, None, 403)]
    #[case(Code::TaskFailed, None, 500)]
    #[case(Code::AgentUnavailable, None, 500)]
    fn errors_have_the_codes_of_the_protocol(
        #[case] code: Code,
        #[case] http_status: Option<u16>,
        #[case] expected: u16,
    ) {
        let mut error = ActionError::new(code, "no");
        error.info.http_status = http_status;
        assert_eq!(error_code(&error), expected);
    }
}
