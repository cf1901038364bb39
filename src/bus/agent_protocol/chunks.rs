//! Writes the chunks of a response to the caller's inbox.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::Subject;
use base64::display::Base64Display;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Serialize, Serializer};
use sha2::{Digest as _, Sha256};
use tokio::task::yield_now;

use super::envelope::attachment_name;
use crate::a2a::model::TaskState;
use crate::action::progress::{Listener, Progress, ProgressEvent};
use crate::bus::encoded_reply::error_headers;
use crate::bus::inbox::Inbox;
use crate::bus::outbox::Outbox;
use crate::bus::reply_files;
use crate::events::coalescer::MAX_COALESCED;
use crate::files::CallFiles;
use crate::json::{self, split_first, typed_body};
use crate::offload;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyContent, ReplyStatus};
use crate::text::shorten;

/// The protocol requires a chunk at least this often.
const MAX_KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Maximum bytes of `Nats-Service-Error`.
const MAX_ERROR: usize = 200;
/// Bytes of an attachment in a chunk in addition to its name and its content.
const ATTACHMENT_OVERHEAD: usize = r#"{"filename":"","content":""},"#.len();
/// Bytes of a held text in addition to its content.
const HELD_OVERHEAD: usize = 32;
/// Length of a question in its chunk if the whole question does not fit.
const SHORT_QUESTION: usize = 1024;

#[derive(Debug)]
pub(super) struct ChunkWriter {
    inbox: Inbox,
    has_started: bool,
    /// Whether any text was sent since the prompt or the last question.
    has_sent_text: bool,
    /// Text that may turn out to be the question or the reason for a failure, which other chunks carry.
    held: Option<HeldTexts>,
    /// Text that waits for more while the connection is behind.
    coalesced: String,
    /// Digests of the attachments that were sent: an agent repeats a task's files after each question.
    sent_attachments: HashSet<[u8; 32]>,
}

#[derive(Serialize)]
struct ResponseData<'a> {
    text: &'a str,
    attachments: &'a [Attachment<'a>],
}

#[derive(Clone, Copy, Serialize)]
struct QueryData<'a> {
    id: &'a str,
    reply_subject: &'a str,
    prompt: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    attachments: &'a [Attachment<'a>],
}

#[derive(Debug, Serialize)]
struct Attachment<'a> {
    filename: String,
    content: Content<'a>,
}

/// The content of an attachment. It is base64 in the chunk.
#[derive(Debug, Clone, Copy)]
enum Content<'a> {
    Base64(&'a str),
    Plain(&'a str),
}

impl Content<'_> {
    /// The bytes that it takes in a chunk.
    fn encoded_len(self) -> usize {
        match self {
            // Agents can send anything in place of base64.
            Self::Base64(content) => json::string_len(content),
            Self::Plain(content) => content.len().div_ceil(3) * 4,
        }
    }
}

impl Serialize for Content<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Base64(content) => serializer.serialize_str(content),
            Self::Plain(content) => {
                serializer.collect_str(&Base64Display::new(content.as_bytes(), &STANDARD))
            }
        }
    }
}

/// Texts that wait for the end of the task.
#[derive(Debug, Default)]
struct HeldTexts {
    texts: Vec<String>,
    size: usize,
}

impl HeldTexts {
    /// Holds a text. Returns the texts that go out because together they are too large to hold.
    fn add(&mut self, text: String) -> Vec<String> {
        let size = HELD_OVERHEAD + text.len();
        let released = if self.size + size > MAX_COALESCED { std::mem::take(self).texts } else { Vec::new() };
        self.texts.push(text);
        self.size += size;
        released
    }
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
        let Attachments { groups, notes, .. } = self.new_attachments(&outcome.content).await;
        let query = |prompt, attachments| QueryData { id, reply_subject, prompt, attachments };
        let mut body = None;
        if groups.len() <= 1 {
            let first = groups.first();
            let attachments = first.map_or(&[][..], |group| &group.attachments);
            let size = message.len() + first.map_or(0, |group| group.size);
            body = self.encode_query(query(message, attachments), size).await;
        }
        if body.is_none() && !groups.is_empty() {
            self.send_attachments(&groups).await;
            body = self.encode_query(query(message, &[]), message.len()).await;
        }
        self.send_text(&notes).await;
        let body = match body {
            Some(body) => body,
            None => {
                self.send_text(message).await;
                typed_body("query", query(&shorten(message, SHORT_QUESTION), &[]))
            }
        };
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
        let Attachments { groups, notes, .. } = self.new_attachments(&outcome.content).await;
        self.send_attachments(&groups).await;
        self.send_text(&notes).await;
    }

    /// Sends the error, if there is one, and the empty message that ends the stream. Returns the number and
    /// the name of the error.
    pub(super) async fn finish(mut self, result: Result<(), ActionError>) -> Option<(u16, &'static str)> {
        self.flush().await;
        let error = result.err();
        if let Some(error) = &error {
            let headers = error_headers(error_code(error), &error.message, MAX_ERROR);
            self.inbox.send(None, Some(headers), None, Bytes::new()).await;
        }
        self.send(Bytes::new()).await;
        error.map(|error| (error_code(&error), error.info.code.name()))
    }

    async fn send(&mut self, body: Bytes) {
        self.inbox.send(None, None, None, body).await;
    }

    /// Sends text in as many chunks as it needs.
    async fn send_text(&mut self, mut text: &str) {
        let max = self.inbox.data_room();
        while !text.is_empty() {
            let size = text.len().min(max);
            let room = self.inbox.reserve(size).await;
            let encode_first = || {
                let (piece, rest) = split_first(text, max).unwrap_or_default();
                (typed_body("response", piece), rest)
            };
            let body;
            (body, text) = offload::run(&self.inbox.outbox.agent, size, encode_first).await;
            self.has_sent_text = true;
            self.inbox.send(room, None, None, body).await;
            if !text.is_empty() {
                // Sending does not yield while the connection keeps up.
                yield_now().await;
            }
        }
    }

    /// Sends the coalesced text.
    async fn flush(&mut self) {
        let coalesced = std::mem::take(&mut self.coalesced);
        self.send_text(&coalesced).await;
    }

    /// Encodes a question with content of `size` bytes. Returns `None` if it does not fit into a message.
    async fn encode_query(&self, query: QueryData<'_>, size: usize) -> Option<Bytes> {
        let max_payload = self.inbox.max_payload();
        if size > max_payload {
            return None;
        }
        let body = offload::run(&self.inbox.outbox.agent, size, || typed_body("query", query)).await;
        (body.len() <= max_payload).then_some(body)
    }

    async fn send_attachments(&mut self, groups: &[Group<'_>]) {
        for Group { attachments, size } in groups {
            let encode = || typed_body("response", ResponseData { text: "", attachments });
            let room = self.inbox.reserve(*size).await;
            let body = offload::run(&self.inbox.outbox.agent, *size, encode).await;
            self.inbox.send(room, None, None, body).await;
            yield_now().await;
        }
    }

    /// Sends the held texts except `skip`, which another chunk carries.
    async fn release_held(&mut self, skip: &str) {
        for text in self.held.take().unwrap_or_default().texts {
            if text != skip {
                self.send_text(&text).await;
            }
        }
    }

    /// The files and data that were not sent before.
    async fn new_attachments<'a>(&mut self, content: &'a ReplyContent) -> Attachments<'a> {
        if let Some(files) = CallFiles::current()
            && let Err(error) = Box::pin(reply_files::describe_received(content, &files)).await
        {
            tracing::debug!(agent = %self.inbox.outbox.agent, %error, "cannot name a file of the agent");
        }
        let of_files = content.files.iter().flat_map(|file| [&file.name, &file.url, &file.bytes]);
        let of_data = content.data.iter().map(|data| data.get().len());
        let size = of_files.flatten().map(String::len).chain(of_data).sum();
        let room = self.inbox.data_room();
        let sent = &mut self.sent_attachments;
        let collect = || Attachments::collect(content, room, sent);
        offload::run(&self.inbox.outbox.agent, size, collect).await
    }
}

/// Attachments in groups that fit into one chunk each.
#[derive(Debug, Default)]
struct Attachments<'a> {
    /// Size of a chunk.
    room: usize,
    groups: Vec<Group<'a>>,
    /// One line for each file that is too large or has only a URL.
    notes: String,
}

#[derive(Debug)]
struct Group<'a> {
    attachments: Vec<Attachment<'a>>,
    /// The bytes that they take in a chunk.
    size: usize,
}

impl<'a> Attachments<'a> {
    /// The files and data that are not in `sent`, which it extends.
    fn collect(content: &'a ReplyContent, room: usize, sent: &mut HashSet<[u8; 32]>) -> Self {
        let mut attachments = Self { room, ..Self::default() };
        for (index, file) in content.files.iter().enumerate() {
            let filename = attachment_name(file.name.as_deref(), &format!("file-{}", index + 1));
            let source = file.bytes.as_deref().or(file.url.as_deref()).unwrap_or_default();
            if !sent.insert(digest(&filename, source)) {
                continue;
            }
            match (&file.url, &file.bytes) {
                (Some(url), _) => attachments.note(&filename, url),
                (None, Some(bytes)) => {
                    attachments.add(filename, Content::Base64(bytes), file.size.unwrap_or_default());
                }
                (None, None) => {}
            }
        }
        for (index, data) in content.data.iter().map(|data| data.get()).enumerate() {
            let filename = match index {
                0 => "data.json".to_owned(),
                _ => format!("data-{}.json", index + 1),
            };
            if sent.insert(digest(&filename, data)) {
                attachments.add(filename, Content::Plain(data), data.len());
            }
        }
        attachments
    }

    /// Adds a file of `size` bytes.
    fn add(&mut self, filename: String, content: Content<'a>, size: usize) {
        let encoded_size = json::string_len(&filename) + content.encoded_len() + ATTACHMENT_OVERHEAD;
        if encoded_size > self.room {
            let note = format!("left out because {size} bytes are too many for one message");
            return self.note(&filename, &note);
        }
        let attachment = Attachment { filename, content };
        match self.groups.last_mut() {
            Some(group) if group.size + encoded_size <= self.room => {
                group.size += encoded_size;
                group.attachments.push(attachment);
            }
            _ => self.groups.push(Group { attachments: vec![attachment], size: encoded_size }),
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
                Some(held) => {
                    for text in held.add(text) {
                        self.send_text(&text).await;
                    }
                }
                None if self.inbox.is_behind && self.coalesced.len().max(text.len()) < MAX_COALESCED => {
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
        Code::Forbidden | Code::TaskRejected => 403,
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
    use futures_util::poll;
    use rstest::rstest;
    use serde_json::value::RawValue;

    use super::*;
    use crate::bus::inbox::unconnected_outbox;
    use crate::reply::outcome::ReplyFile;

    #[tokio::test]
    async fn large_attachments_are_collected_and_encoded_off_the_workers() {
        const AGENT: &str = "an agent with large attachments";
        let file = |number: usize| ReplyFile {
            name: Some(format!("{number}.bin")),
            mime_type: None,
            size: Some(1),
            sha256: None,
            url: None,
            bytes: Some("A".repeat(2 * offload::INLINE)),
        };
        let content = ReplyContent {
            message: String::new(),
            files: (0..10).map(file).collect(),
            data: Vec::new(),
            artifacts: Vec::new(),
        };
        let outbox = unconnected_outbox(AGENT).await;
        let mut chunks = ChunkWriter::new(outbox, Subject::from_static("inbox"), Duration::MAX);
        let turn = offload::hold_turn(AGENT);
        let mut collecting = Box::pin(chunks.new_attachments(&content));
        assert!(poll!(&mut collecting).is_pending(), "it is not the agent's turn");
        drop(turn);
        let Attachments { groups, .. } = collecting.await;
        assert_eq!(groups.iter().map(|group| group.attachments.len()).collect::<Vec<_>>(), [7, 3]);

        let turn = offload::hold_turn(AGENT);
        let mut sending = Box::pin(chunks.send_attachments(&groups));
        assert!(poll!(&mut sending).is_pending(), "it is not the agent's turn");
        drop(turn);
        sending.await;
    }

    #[test]
    fn attachments_are_measured_as_they_are_encoded() {
        let file = |name: &str, bytes: &str| ReplyFile {
            name: Some(name.to_owned()),
            mime_type: None,
            size: Some(1),
            sha256: None,
            url: None,
            bytes: Some(bytes.to_owned()),
        };
        let data = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
        let content = ReplyContent {
            message: String::new(),
            files: vec![file("a.bin", "AAEC"), file("\"é\".bin", "no \"base64\"\n\u{1}"), file("c.bin", "")],
            data: vec![data("1"), data("12"), data("123"), data("[1,2]")],
            artifacts: Vec::new(),
        };
        let mut sent = HashSet::new();
        let Attachments { groups, .. } = Attachments::collect(&content, 1000, &mut sent);
        let [Group { attachments, size }] = groups.as_slice() else { panic!("{groups:?}") };
        let encoded = json::to_bytes(attachments);
        assert_eq!((attachments.len(), encoded.len()), (7, size + "[]".len() - ",".len()));
        let decoded: serde_json::Value = serde_json::from_slice(&encoded).unwrap();
        assert_eq!(decoded[1]["content"], "no \"base64\"\n\u{1}");
        assert_eq!(decoded[6]["content"], "WzEsMl0=");
        assert!(Attachments::collect(&content, 1000, &mut sent).groups.is_empty(), "all were sent");
    }

    #[test]
    fn held_text_is_limited_and_the_last_text_stays() {
        let mut held = HeldTexts::default();
        let mut released = 0;
        for number in 0..1000 {
            let text = number.to_string() + &"x".repeat(if number % 10 == 0 { 60_000 } else { 100 });
            released += held.add(text.clone()).len();
            assert_eq!(held.texts.last(), Some(&text));
            assert!(held.texts.len() == 1 || held.size <= MAX_COALESCED);
        }
        assert_eq!(released + held.texts.len(), 1000);
        assert!((0..MAX_COALESCED).any(|_| !held.add(String::new()).is_empty()), "empty texts count, too");
    }

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
