//! Writes the frames of a streamed reply to the caller's inbox.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, HeaderName, HeaderValue, StatusCode, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Serialize;
use tokio::task::yield_now;

use super::encoded_reply::{EncodedReply, LoggedReply};
use super::inbox::{Inbox, OVERHEAD, subscribe_once};
use super::outbox::{Outbox, Room};
use super::peers::{ForwardableRequest, Link, PEER};
use super::reply_files;
use crate::a2a::model::{ArtifactUpdate, Part};
use crate::action::progress::{ForwardError, Listener, Progress, ProgressEvent};
use crate::events::artifact_data::ArtifactEncoder;
use crate::events::attach::ReplayedEnd;
use crate::events::coalescer::Coalescer;
use crate::events::event::FrameCounts;
use crate::events::selection::{FrameSelection, FrameSelector};
use crate::json::{self, split_first, typed_body};
use crate::offload;
use crate::reply::Reply;
use crate::state::peers::InstanceId;

pub(super) const SEQUENCE: HeaderName = HeaderName::from_static("A2A-Seq");
const INSTANCE: HeaderName = HeaderName::from_static("A2A-Instance");
/// How long to wait for the server's message that no one is subscribed.
const PROBE_TIMEOUT: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(crate) struct FrameWriter {
    inbox: Inbox,
    /// The id of the service that runs the call.
    instance: Arc<str>,
    sequence: u64,
    selector: FrameSelector,
    cancel_on_disconnect: bool,
    coalescer: Coalescer,
    /// The request, while another replica may run it.
    forwardable: Option<Box<ForwardableRequest>>,
    /// Frames before this one are not sent: the caller has them.
    first: u64,
    /// For a logged call, whose frames are those of the log.
    logged: LoggedReply,
}

#[derive(Serialize)]
struct StateData<'a> {
    state: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
struct TaskData {
    id: String,
    context_id: Option<String>,
}

impl FrameWriter {
    /// Sends frames to `to`, and a keep-alive after `keep_alive` without a frame.
    pub(crate) fn new(
        outbox: Outbox,
        to: Subject,
        keep_alive: Duration,
        instance: Arc<str>,
        selection: FrameSelection,
        cancel_on_disconnect: bool,
    ) -> Self {
        Self {
            inbox: Inbox::new(outbox, to, keep_alive),
            instance,
            sequence: 0,
            selector: FrameSelector::new(selection),
            cancel_on_disconnect,
            coalescer: Coalescer::default(),
            forwardable: None,
            first: 0,
            logged: LoggedReply::default(),
        }
    }

    /// Lets another replica run the request.
    pub(super) fn set_forwardable(&mut self, request: Option<Box<ForwardableRequest>>) {
        self.forwardable = request;
    }

    /// The frames go to the replica that has forwarded the request.
    pub(super) fn set_link(&mut self, link: Arc<Link>) {
        self.inbox.link = Some(link);
    }

    /// Sends a frame of the replica that runs the request.
    pub(super) async fn relay(&mut self, frame: Bytes) {
        self.send(None, frame).await;
    }

    /// Sends a message that is not for the caller to the replica that has forwarded the request.
    pub(super) async fn send_to_peer(&mut self, kind: &str, body: Bytes) {
        let mut headers = HeaderMap::new();
        headers.insert(PEER, kind);
        self.inbox.send(None, Some(headers), None, body).await;
    }

    /// Sends the last frame and the empty message that ends the stream. Returns the number and the name of
    /// the error if the reply is one.
    pub(crate) async fn finish(mut self, reply: &Reply) -> Option<(u16, &'static str)> {
        self.flush().await;
        let EncodedReply { body, headers, error, room } =
            self.logged.encode(reply, &self.inbox.outbox, OVERHEAD).await;
        // The reply is JSON already.
        let frame = [br#"{"type":"result","data":"#.as_slice(), &body, b"}"].concat().into();
        drop(body);
        self.send_with_headers(room, headers.unwrap_or_default(), frame).await;
        self.inbox.send(None, None, None, Bytes::new()).await;
        error
    }

    /// Begins to send the frames of a logged call, from `first` on.
    pub(super) async fn begin_at(&mut self, first: u64) {
        self.first = first;
        self.logged.is_logged = true;
        self.started().await;
        if first > 0 {
            // The caller learns that it is attached.
            self.inbox.send(None, None, None, typed_body("status", "ack")).await;
        }
    }

    /// The next frame has this number, by selection.
    pub(super) fn continue_at(&mut self, numbers: FrameCounts) {
        if let Some(number) = numbers.get(self.selector.selection().index()) {
            self.sequence = *number;
        }
    }

    /// Sends the result as it is in the log, and the end of the stream.
    pub(super) async fn finish_logged(&mut self, end: ReplayedEnd) -> Option<(u16, &'static str)> {
        let ReplayedEnd { body, error } = end;
        let frame = [br#"{"type":"result","data":"#.as_slice(), &body, b"}"].concat().into();
        let headers = error.as_ref().map(|(code, message)| EncodedReply::headers_of(*code, message));
        self.send_with_headers(None, headers.unwrap_or_default(), frame).await;
        self.inbox.send(None, None, None, Bytes::new()).await;
        error.map(|(code, _)| (code.number(), code.name()))
    }

    async fn send(&mut self, room: Option<Room>, body: Bytes) {
        self.send_with_headers(room, HeaderMap::new(), body).await;
    }

    async fn send_with_headers(&mut self, room: Option<Room>, mut headers: HeaderMap, body: Bytes) {
        headers.insert(SEQUENCE, HeaderValue::from(self.sequence));
        self.sequence += 1;
        if self.sequence <= self.first {
            return;
        }
        self.inbox.send(room, Some(headers), None, body).await;
    }

    /// Sends text in as many frames as it needs.
    async fn send_text<'t>(&mut self, text: &'t str, encode: impl Fn(&'t str) -> Bytes) {
        let max = self.inbox.data_room();
        if text.len() <= max {
            let room = self.inbox.reserve(text.len()).await;
            let body = offload::run(&self.inbox.outbox.agent, text.len(), || encode(text)).await;
            if body.len() <= max || text.is_empty() {
                return self.send(room, body).await;
            }
        }
        let text_room = max.saturating_sub(encode("").len());
        let mut rest = text;
        while !rest.is_empty() {
            let size = rest.len().min(max);
            let room = self.inbox.reserve(size).await;
            let encode_first = || {
                let (piece, rest) = split_first(rest, text_room).unwrap_or_default();
                (encode(piece), rest)
            };
            let body;
            (body, rest) = offload::run(&self.inbox.outbox.agent, size, encode_first).await;
            self.send(room, body).await;
            // Sending does not yield while the connection keeps up.
            yield_now().await;
        }
    }

    /// Sends an artifact, in pieces that append to each other if it does not fit into one frame.
    async fn send_artifact(&mut self, update: &ArtifactUpdate) {
        let max = self.inbox.data_room();
        let encoder = ArtifactEncoder::new(update, max);
        let size = encoder.size();
        if size <= max {
            let room = self.inbox.reserve(size).await;
            let whole = offload::run(&self.inbox.outbox.agent, size, || encoder.whole()).await;
            if whole.len() <= max {
                return self.send(room, whole).await;
            }
        }
        let groups = offload::run(&self.inbox.outbox.agent, size, || encoder.groups()).await;
        for group in groups {
            let size = group.size;
            let room = self.inbox.reserve(size.min(max)).await;
            let body = offload::run(&self.inbox.outbox.agent, size, || encoder.encode(group)).await;
            self.send(room, body).await;
            yield_now().await;
        }
    }

    /// Sends what the coalescer holds.
    pub(super) async fn flush(&mut self) {
        for frame in self.coalescer.take() {
            self.send_frame(frame).await;
        }
    }

    async fn send_frame(&mut self, frame: ProgressEvent) {
        match frame {
            ProgressEvent::Task { id, context_id } => {
                // Two ids that consist mostly of escapes can be too long for a small limit.
                let room = self.inbox.data_room();
                let short = |id: String| json::shorten_to_json(&id, room / 4).unwrap_or(id);
                let data = TaskData { id: short(id), context_id: context_id.map(short) };
                self.send(None, typed_body("task", data)).await;
            }
            ProgressEvent::State { state, message } => {
                let state = state.to_string();
                let encode = |message| typed_body("state", StateData { state: &state, message });
                self.send_text(&message, encode).await;
            }
            ProgressEvent::Artifact { mut update, .. } => {
                let has_file = update.artifact.parts.iter().any(|part| matches!(part, Part::File(_)));
                if has_file {
                    let room = self.inbox.data_room();
                    Box::pin(reply_files::reference_parts(&mut update, &self.inbox.outbox, room)).await;
                }
                self.send_artifact(&update).await;
            }
            ProgressEvent::Response(text) => self.send_text(&text, |text| typed_body("response", text)).await,
        }
    }
}

impl Progress for FrameWriter {
    async fn started(&mut self) {
        // The caller can find out with `$SRV.INFO` whether this instance still exists.
        let mut headers = HeaderMap::new();
        headers.insert(INSTANCE, &*self.instance);
        self.send_with_headers(None, headers, typed_body("status", "ack")).await;
    }

    async fn report(&mut self, event: ProgressEvent) {
        let Some(mut frame) = self.selector.select(event) else { return };
        while self.inbox.is_behind && !self.logged.is_logged {
            frame = match self.coalescer.add(frame) {
                Some(frame) => frame,
                None => return,
            };
            if self.coalescer.is_empty() {
                break;
            }
            self.flush().await;
        }
        self.send_frame(frame).await;
    }

    async fn flush(&mut self) {
        self.inbox.is_behind = false;
        self.flush().await;
    }

    fn runs_here(&mut self) {
        self.forwardable = None;
    }

    async fn forward(&mut self, to: InstanceId) -> Result<Reply, ForwardError> {
        let Some(mut request) = self.forwardable.take() else { return Err(ForwardError::NotKept) };
        let reply = Box::pin(request.run(to, Some(self))).await;
        // It charges the memory of the reply.
        self.forwardable = Some(request);
        reply
    }

    fn logged(&mut self) {
        self.logged.is_logged = true;
    }

    fn log_failed(&mut self) {
        self.logged.has_failed = true;
    }

    fn logged_result(&mut self, body: Bytes) {
        self.logged.result = Some(body);
    }

    fn keep_alive_interval(&self) -> Option<Duration> {
        Some(self.inbox.until_keep_alive())
    }

    /// Sends a keep-alive, and asks the server whether anyone is subscribed to the caller's inbox.
    async fn keep_alive(&mut self) -> Listener {
        // Each keep-alive has its own subject, so that messages to an earlier one cannot hide the server's answer.
        let probe = match self.cancel_on_disconnect {
            true => subscribe_once(&self.inbox.outbox.client).await,
            false => None,
        };
        let (reply, answers) = probe.unzip();
        // Keep-alives have no number: the sequence covers only what the agent reports.
        self.inbox.send(None, None, reply, typed_body("status", "ack")).await;
        if let Some(mut answers) = answers
            && let Ok(Some(answer)) = tokio::time::timeout(PROBE_TIMEOUT, answers.next()).await
            && answer.status == Some(StatusCode::NO_RESPONDERS)
        {
            return Listener::Disconnected;
        }
        Listener::Connected
    }
}

#[cfg(test)]
mod tests {
    use futures_util::poll;

    use super::*;
    use crate::a2a::model::Event;
    use crate::bus::inbox::unconnected_outbox;

    fn artifact(update: &str) -> ProgressEvent {
        let Event::Artifact(update) = Event::decode(update).unwrap() else { panic!("not an artifact") };
        ProgressEvent::Artifact { update, is_response: true }
    }

    #[tokio::test]
    async fn large_frames_are_encoded_off_the_workers() {
        const AGENT: &str = "an agent with large frames";
        let large = "x".repeat(2 * offload::INLINE);
        let metadata = format!(
            r#"{{"artifactUpdate":{{"taskId":"t","artifact":{{"artifactId":"a","parts":[{{"text":"a"}}],"metadata":"{large}"}}}}}}"#
        );
        let events =
            [ProgressEvent::Response(large.repeat(20)), ProgressEvent::Response(large), artifact(&metadata)];
        for (event, frames) in events.into_iter().zip([3, 1, 1]) {
            let outbox = unconnected_outbox(AGENT).await;
            let to = Subject::from_static("inbox");
            let mut writer =
                FrameWriter::new(outbox, to, Duration::MAX, "id".into(), FrameSelection::All, false);
            let turn = offload::hold_turn(AGENT);
            let mut reporting = Box::pin(writer.report(event));
            assert!(poll!(&mut reporting).is_pending(), "it is not the agent's turn");
            drop(turn);
            reporting.await;
            assert_eq!(writer.sequence, frames);
        }
    }

    #[tokio::test]
    async fn large_frames_wait_for_room_before_they_are_encoded() {
        const AGENT: &str = "an agent with a full window";
        let outbox = unconnected_outbox(AGENT).await;
        let full = outbox.fill();
        let to = Subject::from_static("inbox");
        let mut writer = FrameWriter::new(outbox, to, Duration::MAX, "id".into(), FrameSelection::All, false);
        let _turn = offload::hold_turn(AGENT);
        let mut reporting = Box::pin(writer.report(ProgressEvent::Response("x".repeat(8 << 10))));
        assert!(poll!(&mut reporting).is_pending());
        drop(full);
        reporting.await;
        assert!(writer.inbox.is_behind);
        // The next frame is coalesced, unless it is large.
        writer.report(ProgressEvent::Response("x".to_owned())).await;
        assert_eq!(writer.sequence, 1);
        writer.report(ProgressEvent::Response("x".repeat(32 << 10))).await;
        assert_eq!(writer.sequence, 3);
    }
}
