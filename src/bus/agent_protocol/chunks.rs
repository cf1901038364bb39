//! The chunks of an answer, on their way to the caller's inbox.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::{Client, HeaderMap, HeaderValue, Subject};
use bytes::Bytes;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::envelope::safe_name;
use crate::a2a::model::TaskState;
use crate::action::progress::{Audience, Frame, Progress};
use crate::bus::inbox::{Inbox, MAX_JOINED};
use crate::json::to_bytes;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Content, Outcome, ReplyStatus};
use crate::text::{head, shorten};

/// The protocol wants a sign of life at least as often.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);
/// What a chunk costs beside its text and attachments.
const OVERHEAD: usize = 256;
/// Longest `Nats-Service-Error`.
const MAX_ERROR: usize = 200;
/// What remains of a question that does not fit into its chunk.
const SHORT_QUESTION: usize = 1024;

/// The way to one caller.
#[derive(Debug)]
pub(super) struct ChunkWriter {
    inbox: Inbox,
    keepalive: Duration,
    has_started: bool,
    // Whether any text has been sent since the prompt or the last question.
    has_told: bool,
    // Text that may be the question or the reason of a failure, which go out in other forms.
    held: Option<Vec<String>>,
    // Text that waits to be joined with more while the connection is behind.
    joined: String,
    // Attachments that were sent: a task tells its files again after each question.
    sent: HashSet<[u8; 32]>,
}

#[derive(Serialize)]
struct Chunk<'a, T> {
    r#type: &'a str,
    data: T,
}

#[derive(Serialize)]
struct Response<'a> {
    text: &'a str,
    attachments: &'a [Attachment],
}

#[derive(Serialize)]
struct Query<'a> {
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
    pub(super) fn new(client: Client, to: Subject, keepalive: Duration) -> Self {
        Self {
            inbox: Inbox::new(client, to),
            keepalive: keepalive.min(LONGEST_SILENCE),
            has_started: false,
            has_told: false,
            held: None,
            joined: String::new(),
            sent: HashSet::new(),
        }
    }

    /// The first chunk, and the keep-alive.
    async fn acknowledge(&mut self) {
        self.chunk("status", "ack").await;
    }

    /// Waits for something, with signs of life meanwhile.
    pub(super) async fn keep_alive_during<T>(&mut self, wait: impl Future<Output = T>) -> T {
        tokio::pin!(wait);
        loop {
            let silence = self.inbox.silence_left(self.keepalive);
            tokio::select! {
                biased;
                result = &mut wait => return result,
                () = tokio::time::sleep(silence) => self.acknowledge().await,
            }
        }
    }

    /// Asks the caller, who answers to `reply_subject`.
    pub(super) async fn ask(&mut self, id: &str, reply_subject: &str, outcome: &Outcome) {
        self.tell_joined().await;
        let Content { message, .. } = &outcome.content;
        self.release(message).await;
        let (mut groups, notes) = self.attachments(&outcome.content);
        let question = |prompt, attachments: &[Attachment]| {
            let data = Query { id, reply_subject, prompt, attachments };
            to_bytes(&Chunk { r#type: "query", data })
        };
        let mut body = question(message, groups.first().map_or(&[], Vec::as_slice));
        if groups.len() > 1 || body.len() > self.inbox.max_payload() {
            self.give(std::mem::take(&mut groups)).await;
            body = question(message, &[]);
        }
        self.text(&notes).await;
        if body.len() > self.inbox.max_payload() {
            self.text(message).await;
            body = question(&shorten(message, SHORT_QUESTION), &[]);
        }
        self.send(body).await;
        self.has_told = false;
    }

    /// Tells what an outcome holds and has not been told as it came.
    pub(super) async fn conclude(&mut self, outcome: &Outcome) {
        self.tell_joined().await;
        let Content { message, .. } = &outcome.content;
        if outcome.status == ReplyStatus::Completed {
            self.release("").await;
            if !self.has_told {
                self.text(message).await;
            }
        } else {
            // Its message is the error's.
            self.release(message).await;
        }
        let (groups, notes) = self.attachments(&outcome.content);
        self.give(groups).await;
        self.text(&notes).await;
    }

    /// The error, if there is one, and the empty message that ends the stream; the error's number and
    /// name, for the counts.
    pub(super) async fn end(mut self, done: Result<(), ActionError>) -> Option<(u16, &'static str)> {
        self.tell_joined().await;
        let error = done.err().map(|error| {
            let line: Vec<_> = error.message.split(char::is_control).collect();
            (error_code(&error), error.info.code.name(), line.join(" "))
        });
        if let Some((code, _, line)) = &error {
            let mut headers = HeaderMap::new();
            headers.insert("Nats-Service-Error-Code", HeaderValue::from(u64::from(*code)));
            headers.insert("Nats-Service-Error", shorten(line.trim(), MAX_ERROR).as_str());
            self.inbox.send(Some(headers), None, Bytes::new()).await;
        }
        self.send(Bytes::new()).await;
        error.map(|(code, name, _)| (code, name))
    }

    async fn chunk(&mut self, r#type: &str, data: impl Serialize) {
        self.send(to_bytes(&Chunk { r#type, data })).await;
    }

    async fn send(&mut self, body: Bytes) {
        self.inbox.send(None, None, body).await;
    }

    /// Sends text in as many chunks as it takes.
    async fn text(&mut self, text: &str) {
        for piece in pieces(text, self.room()) {
            self.has_told = true;
            self.chunk("response", piece).await;
        }
    }

    /// Sends the text that was joined.
    async fn tell_joined(&mut self) {
        let joined = std::mem::take(&mut self.joined);
        self.text(&joined).await;
    }

    async fn give(&mut self, groups: Vec<Vec<Attachment>>) {
        for group in groups {
            let data = Response { text: "", attachments: &group };
            self.chunk("response", data).await;
        }
    }

    /// Sends the texts that were held back, but for `known`, which goes out in another form.
    async fn release(&mut self, known: &str) {
        for text in self.held.take().unwrap_or_default() {
            if text != known {
                self.text(&text).await;
            }
        }
    }

    /// Files and data that were not sent before, in groups that fit into a chunk, and a note about
    /// each file that does not fit or is elsewhere.
    fn attachments(&mut self, content: &Content) -> (Vec<Vec<Attachment>>, String) {
        let (mut groups, mut notes) = (Vec::<Vec<Attachment>>::new(), String::new());
        let (room, mut used) = (self.room(), 0);
        let mut add = |groups: &mut Vec<Vec<Attachment>>, one: Attachment| {
            let size = to_bytes(&one).len() + 1;
            if size > room {
                return false;
            }
            match groups.last_mut() {
                Some(group) if used + size <= room => {
                    used += size;
                    group.push(one);
                }
                _ => {
                    used = size;
                    groups.push(vec![one]);
                }
            }
            true
        };
        for (index, file) in content.files.iter().enumerate() {
            let filename = safe_name(file.name.as_deref(), &format!("file-{}", index + 1));
            let place = file.bytes.as_deref().or(file.url.as_deref()).unwrap_or_default();
            if !self.sent.insert(digest(&filename, place)) {
                continue;
            }
            if let Some(url) = &file.url {
                notes.push_str(&format!("\n{filename}: {url}"));
            } else if let Some(bytes) = &file.bytes {
                let one = Attachment { filename: filename.clone(), content: bytes.clone() };
                if !add(&mut groups, one) {
                    let size = file.size.unwrap_or_default();
                    notes.push_str(&format!(
                        "\n{filename}: left out, {size} bytes are too many for one message"
                    ));
                }
            }
        }
        for (index, data) in content.data.iter().enumerate() {
            let filename = match index {
                0 => "data.json".to_owned(),
                _ => format!("data-{}.json", index + 1),
            };
            if !self.sent.insert(digest(&filename, data.get())) {
                continue;
            }
            let one = Attachment { filename: filename.clone(), content: base64(data.get()) };
            if !add(&mut groups, one) {
                let size = data.get().len();
                notes.push_str(&format!("\n{filename}: left out, {size} bytes are too many for one message"));
            }
        }
        (groups, notes)
    }

    fn room(&self) -> usize {
        self.inbox.max_payload().saturating_sub(OVERHEAD)
    }
}

impl Progress for ChunkWriter {
    async fn started(&mut self) {
        // The answer to a question goes on with the same stream.
        if !std::mem::replace(&mut self.has_started, true) {
            self.acknowledge().await;
        }
    }

    async fn frame(&mut self, frame: Frame) {
        match frame {
            Frame::Response(text) => match &mut self.held {
                Some(held) => held.push(text),
                None if self.inbox.is_behind() && self.joined.len() < MAX_JOINED => {
                    self.joined.push_str(&text);
                }
                None => {
                    self.tell_joined().await;
                    self.text(&text).await;
                }
            },
            Frame::State { state, .. } => {
                self.tell_joined().await;
                if state.is_waiting() || (state.is_final() && state != TaskState::Completed) {
                    self.held.get_or_insert_default();
                } else {
                    self.release("").await;
                }
            }
            // The protocol has no words for these.
            Frame::Task { .. } | Frame::Artifact { .. } => {}
        }
    }

    async fn catch_up(&mut self) {
        self.inbox.pause();
        self.tell_joined().await;
    }

    fn patience(&self) -> Option<Duration> {
        Some(self.inbox.silence_left(self.keepalive))
    }

    async fn keep_alive(&mut self) -> Audience {
        self.acknowledge().await;
        Audience::There
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
        // The agent's own refusal, as far as the protocol has a word for it.
        Code::AgentError => {
            error.info.http_status.filter(|status| matches!(status, 401 | 403 | 429)).unwrap_or(500)
        }
        // Too large is an answer: a prompt that is too large is an invalid request here.
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

/// A text in pieces that fit into `room` bytes of JSON each.
fn pieces(text: &str, room: usize) -> Vec<&str> {
    if to_bytes(&text).len() <= room {
        return if text.is_empty() { Vec::new() } else { vec![text] };
    }
    // Escapes can make a text in JSON six times as long.
    let room = (room / 6).max(4);
    let (mut pieces, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let piece = head(rest, room);
        pieces.push(piece);
        rest = rest.get(piece.len()..).unwrap_or_default();
    }
    pieces
}

fn digest(name: &str, content: &str) -> [u8; 32] {
    Sha256::new().chain_update(name).chain_update([0]).chain_update(content).finalize().into()
}

fn base64(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn long_text_is_cut_into_pieces_that_fit_and_add_up() {
        assert_eq!(pieces("", 100), Vec::<&str>::new());
        assert_eq!(pieces("abc", 5), ["abc"]);
        for text in ["é\u{1}\"".repeat(500), "x".repeat(1000)] {
            let pieces = pieces(&text, 120);
            assert!(pieces.iter().all(|piece| to_bytes(piece).len() <= 120 + 2));
            assert_eq!(pieces.concat(), text);
        }
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
