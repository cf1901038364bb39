//! The frames of a streamed reply, on their way to the caller's inbox.

mod artifact;
mod coalescer;

use std::collections::HashSet;
use std::time::Duration;

use async_nats::{Client, HeaderMap, HeaderName, HeaderValue, StatusCode, Subject, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Serialize;

use self::coalescer::Coalescer;
use super::encoded_reply::EncodedReply;
use super::inbox::Inbox;
use crate::a2a::model::{Artifact, ArtifactUpdate, Part};
use crate::action::progress::{Audience, Frame, Progress};
use crate::json;
use crate::reply::Reply;

/// The number of a frame.
const SEQUENCE: HeaderName = HeaderName::from_static("A2A-Seq");
/// What a frame costs beside its data: the type around it, and its headers.
const OVERHEAD: usize = 256;
/// How long to wait for the server to say that nobody listens.
const PROBE: Duration = Duration::from_millis(300);

/// Which frames a caller wants (`A2A-Frames`). Status, task, state and result always come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum FrameSelection {
    #[default]
    All,
    /// The text of the answer comes once, as `response`; artifacts only for everything else.
    Text,
    /// No `response`.
    Artifacts,
}

/// The way to one caller.
#[derive(Debug)]
pub(crate) struct FrameWriter {
    inbox: Inbox,
    sequence: u64,
    keepalive: Duration,
    form: FrameSelection,
    // In the form `Text`: answer artifacts of which something was sent.
    begun: HashSet<Option<String>>,
    probe: Option<Probe>,
    // Text that waits to be joined while the connection is behind.
    held: Coalescer,
}

/// Finds out whether somebody listens, when the caller wants the task cancelled otherwise.
#[derive(Debug)]
enum Probe {
    Wanted,
    Open { inbox: Subject, answers: Subscriber },
}

#[derive(Serialize)]
struct Body<'a, T: ?Sized> {
    r#type: &'a str,
    data: &'a T,
}

const ACK: Body<'static, &'static str> = Body { r#type: "status", data: &"ack" };

impl FrameWriter {
    /// FrameWriter go to `to`; after `keepalive` of silence comes a keep-alive.
    pub(crate) fn new(
        client: Client,
        to: Subject,
        keepalive: Duration,
        form: FrameSelection,
        cancel_on_disconnect: bool,
    ) -> Self {
        Self {
            inbox: Inbox::new(client, to),
            sequence: 0,
            keepalive,
            form,
            begun: HashSet::new(),
            probe: cancel_on_disconnect.then_some(Probe::Wanted),
            held: Coalescer::default(),
        }
    }

    /// The last frame, and the empty message that ends the stream; the error, for the counts.
    pub(crate) async fn finish(mut self, reply: &Reply) -> Option<(u16, &'static str)> {
        self.release().await;
        let EncodedReply { body, headers, error } =
            EncodedReply::new(reply, self.inbox.max_payload(), OVERHEAD);
        // The reply is JSON already.
        let frame = [br#"{"type":"result","data":"#.as_slice(), &body, b"}"].concat().into();
        self.send(headers.unwrap_or_default(), frame).await;
        self.inbox.send(None, None, Bytes::new()).await;
        error
    }

    async fn publish(&mut self, body: &impl Serialize) {
        self.send(HeaderMap::new(), json::to_bytes(body)).await;
    }

    async fn send(&mut self, mut headers: HeaderMap, body: Bytes) {
        headers.insert(SEQUENCE, HeaderValue::from(self.sequence));
        self.sequence += 1;
        self.send_as_is(Some(headers), body).await;
    }

    async fn send_as_is(&mut self, headers: Option<HeaderMap>, body: Bytes) {
        let reply = match &self.probe {
            Some(Probe::Open { inbox, .. }) => Some(inbox.clone()),
            _ => None,
        };
        self.inbox.send(headers, reply, body).await;
    }

    /// How large the body of a frame may be.
    fn room(&self) -> usize {
        self.inbox.max_payload().saturating_sub(OVERHEAD)
    }

    fn fits(&self, body: &Bytes) -> bool {
        body.len() <= self.room()
    }

    /// Sends text in as many frames as it takes.
    async fn text<'t>(&mut self, text: &'t str, frame: impl Fn(&'t str) -> Bytes) {
        let body = frame(text);
        // Nearly all of them do.
        if self.fits(&body) {
            return self.send(HeaderMap::new(), body).await;
        }
        let mut left = vec![text];
        while let Some(text) = left.pop() {
            let body = frame(text);
            let middle = (text.len() / 2..text.len()).find(|&at| at > 0 && text.is_char_boundary(at));
            match middle.filter(|_| !self.fits(&body)).map(|at| text.split_at(at)) {
                None => self.send(HeaderMap::new(), body).await,
                Some((first, second)) => left.extend([second, first]),
            }
        }
    }

    /// Sends an artifact, in pieces that append to each other where it does not fit into one frame.
    async fn artifact(&mut self, update: ArtifactUpdate) {
        let telling = artifact::Telling::new(&update, self.room());
        let whole = telling.whole();
        if self.fits(&whole) {
            return self.send(HeaderMap::new(), whole).await;
        }
        for body in telling.pieces() {
            self.send(HeaderMap::new(), body).await;
        }
    }

    async fn release(&mut self) {
        for frame in self.held.take() {
            self.tell(frame).await;
        }
    }

    async fn tell(&mut self, frame: Frame) {
        match frame {
            Frame::Task { id, context_id } => {
                // Two ids that are hardly more than escapes can be too long for a small limit.
                let short = |id: String| json::shorten_written(&id, self.room() / 4).unwrap_or(id);
                let data = TaskData { id: short(id), context_id: context_id.map(short) };
                self.publish(&Body { r#type: "task", data: &data }).await;
            }
            Frame::State { state, message } => {
                let state = state.to_string();
                let data = |message| StateData { state: &state, message };
                let frame = |message| json::to_bytes(&Body { r#type: "state", data: &data(message) });
                self.text(&message, frame).await;
            }
            Frame::Artifact { update, .. } => self.artifact(update).await,
            Frame::Response(text) => {
                self.text(&text, |text| json::to_bytes(&Body { r#type: "response", data: &text })).await;
            }
        }
    }

    /// Whether the server says that nobody is subscribed to the caller's inbox.
    async fn is_nobody_there(&mut self) -> bool {
        if let Some(Probe::Wanted) = self.probe {
            let inbox = Subject::from(self.inbox.client().new_inbox());
            if let Ok(answers) = self.inbox.client().subscribe(inbox.clone()).await {
                self.probe = Some(Probe::Open { inbox, answers });
            }
        }
        // Keep-alives have no number: what counts is what the agent reports.
        self.send_as_is(None, json::to_bytes(&ACK)).await;
        match &mut self.probe {
            Some(Probe::Open { answers, .. }) => {
                let answer = tokio::time::timeout(PROBE, answers.next()).await;
                matches!(answer, Ok(Some(message)) if message.status == Some(StatusCode::NO_RESPONDERS))
            }
            _ => false,
        }
    }
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
    /// What is left of a frame in the form that the caller wants.
    fn in_form(&mut self, frame: Frame) -> Option<Frame> {
        match (self.form, frame) {
            (FrameSelection::Artifacts, Frame::Response(_)) => None,
            (FrameSelection::Text, Frame::Artifact { mut update, is_answer: true }) => {
                without_text(&mut update.artifact);
                let has_begun = self.begun.contains(&update.artifact.id);
                if update.artifact.parts.is_empty() {
                    // A reader that has a part of it learns that the rest was replaced, or that it is complete.
                    let is_worth_knowing = has_begun && (!update.append || update.last_chunk);
                    return is_worth_knowing.then_some(Frame::Artifact { update, is_answer: true });
                }
                if !has_begun {
                    self.begun.insert(update.artifact.id.clone());
                }
                // There is nothing yet that this could be appended to.
                update.append &= has_begun;
                Some(Frame::Artifact { update, is_answer: true })
            }
            (_, frame) => Some(frame),
        }
    }
}

/// Removes the text parts, and keeps what the agent says about the others at their new places.
fn without_text(artifact: &mut Artifact) {
    if let Some(extras) = &mut artifact.extras {
        let mut others = 0;
        let new_place = |part: &Part| {
            let is_other = part.as_text().is_none();
            others += usize::from(is_other);
            is_other.then(|| others - 1)
        };
        let new_places: Vec<Option<usize>> = artifact.parts.iter().map(new_place).collect();
        extras.parts.retain_mut(|(place, _)| match new_places.get(*place).copied().flatten() {
            Some(new) => {
                *place = new;
                true
            }
            None => false,
        });
    }
    artifact.parts.retain(|part| part.as_text().is_none());
}

impl Progress for FrameWriter {
    /// The first frame, before the agent is called.
    async fn started(&mut self) {
        self.publish(&ACK).await;
    }

    async fn frame(&mut self, frame: Frame) {
        let Some(mut frame) = self.in_form(frame) else { return };
        while self.inbox.is_behind() {
            frame = match self.held.join(frame) {
                Some(frame) => frame,
                None => return,
            };
            if self.held.is_empty() {
                break;
            }
            self.release().await;
        }
        self.tell(frame).await;
    }

    async fn catch_up(&mut self) {
        self.inbox.pause();
        self.release().await;
    }

    fn patience(&self) -> Option<Duration> {
        Some(self.inbox.silence_left(self.keepalive))
    }

    async fn keep_alive(&mut self) -> Audience {
        if self.is_nobody_there().await { Audience::Gone } else { Audience::There }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::a2a::model::Event;

    #[test]
    fn without_its_text_an_artifact_keeps_what_is_said_about_its_other_parts() {
        let update = r#"{"artifactUpdate":{"taskId":"t","artifact":{"artifactId":"a","parts":[
            {"text":"a","metadata":{"n":0}}, {"data":1,"metadata":{"n":1}}, {"text":"b"}, {"data":2},
            {"text":"c","metadata":{"n":4}}, {"data":3,"metadata":{"n":5}}]}}}"#;
        let Event::Artifact(mut update) = Event::decode(update).unwrap() else { panic!("not an artifact") };
        without_text(&mut update.artifact);
        assert_eq!(update.artifact.parts.len(), 3);
        let extras = update.artifact.extras.unwrap().parts;
        let said: Vec<_> = extras
            .iter()
            .map(|(place, extras)| (*place, extras.metadata.as_ref().unwrap().get().to_owned()))
            .collect();
        assert_eq!(said, [(0, r#"{"n":1}"#.to_owned()), (2, r#"{"n":5}"#.to_owned())]);
    }
}
