//! Tasks as the agent thinks of them, in no version's spelling; [`super::wire`] writes them out.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Where a task stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Submitted,
    Working,
    InputRequired,
    AuthRequired,
    Completed,
    Failed,
    Canceled,
    Rejected,
    /// A state that no version of the protocol knows.
    Unheard,
}

impl State {
    /// A finished task never changes again.
    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Canceled | Self::Rejected)
    }

    /// Nothing more happens until the caller says something (or, with auth, acts elsewhere).
    pub(super) fn ends_turn(self) -> bool {
        !matches!(self, Self::Submitted | Self::Working)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    User,
    Agent,
}

#[derive(Debug, Clone)]
pub(super) enum Content {
    Text(String),
    /// Base64, as it is on every wire.
    Bytes(String),
    Url(String),
    /// Raw, so that numbers are echoed exactly as they came.
    Data(Box<RawValue>),
}

#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) content: Content,
    pub(super) name: Option<String>,
    pub(super) media_type: Option<String>,
    pub(super) metadata: Option<Value>,
}

impl From<Content> for Part {
    fn from(content: Content) -> Self {
        Self { content, name: None, media_type: None, metadata: None }
    }
}

impl Part {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Content::Text(text.into()).into()
    }

    pub(super) fn data(data: &impl Serialize) -> Self {
        let raw = to_raw_value(data).expect("plain data has string keys");
        Content::Data(raw).into()
    }

    pub(super) fn file(name: &str, media_type: &str, bytes: &[u8]) -> Self {
        Self {
            name: Some(name.into()),
            media_type: Some(media_type.into()),
            ..Content::Bytes(BASE64.encode(bytes)).into()
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Message {
    pub(super) id: String,
    pub(super) role: Role,
    pub(super) parts: Vec<Part>,
    pub(super) context_id: Option<String>,
    pub(super) task_id: Option<String>,
    pub(super) reference_task_ids: Vec<String>,
    pub(super) metadata: Option<Value>,
}

impl Message {
    /// A message of the agent's own; `task_id` is `None` for a direct answer.
    pub(super) fn from_agent(context_id: &str, task_id: Option<&str>, parts: Vec<Part>) -> Self {
        Self {
            id: new_id(),
            role: Role::Agent,
            parts,
            context_id: Some(context_id.into()),
            task_id: task_id.map(Into::into),
            reference_task_ids: Vec::new(),
            metadata: None,
        }
    }

    /// The text parts, a line each.
    pub(super) fn text(&self) -> String {
        let texts = self.parts.iter().filter_map(|part| match &part.content {
            Content::Text(text) => Some(text.as_str()),
            Content::Bytes(_) | Content::Url(_) | Content::Data(_) => None,
        });
        texts.collect::<Vec<_>>().join("\n")
    }
}

#[derive(Debug, Clone)]
pub(super) struct Status {
    pub(super) state: State,
    pub(super) message: Option<Message>,
    /// RFC 3339 in UTC; a task that was only submitted has none, as with the public SDKs.
    pub(super) timestamp: Option<String>,
}

impl Status {
    pub(super) fn now(state: State, message: Option<Message>) -> Self {
        let now = OffsetDateTime::now_utc();
        let micros = now.replace_nanosecond(now.microsecond() * 1000).unwrap_or(now);
        Self { state, message, timestamp: micros.format(&Rfc3339).ok() }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Artifact {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) description: Option<String>,
    pub(super) parts: Vec<Part>,
}

/// How an artifact update goes with those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chunk {
    /// The whole artifact at once: neither flag is written.
    Whole,
    First,
    Next,
    Last,
    /// Whole, and marked as the last of the answer.
    Closing,
}

#[derive(Debug, Clone)]
pub(super) struct Task {
    pub(super) id: String,
    pub(super) context_id: String,
    pub(super) status: Status,
    pub(super) artifacts: Vec<Artifact>,
    pub(super) history: Vec<Message>,
}

impl Task {
    /// The task after `event`, folded in the way the public SDKs do: a status message that is
    /// replaced moves to the history, an appended chunk adds its parts.
    pub(super) fn apply(&mut self, event: &Event) {
        match event {
            Event::Status(status) => {
                self.history.extend(self.status.message.take());
                self.status = status.clone();
            }
            Event::Artifact(artifact, chunk) => {
                let known = self.artifacts.iter_mut().find(|known| known.id == artifact.id);
                match (known, chunk) {
                    (Some(known), Chunk::Next | Chunk::Last) => {
                        known.parts.extend_from_slice(&artifact.parts);
                    }
                    (Some(known), Chunk::Whole | Chunk::First | Chunk::Closing) => *known = artifact.clone(),
                    (None, _) => self.artifacts.push(artifact.clone()),
                }
            }
        }
    }

    /// Keeps the last `length` messages of the history.
    pub(super) fn with_history(mut self, length: Option<usize>) -> Self {
        if let Some(surplus) = length.and_then(|length| self.history.len().checked_sub(length)) {
            self.history.drain(..surplus);
        }
        self
    }
}

/// What happens to a task while it runs.
#[derive(Debug, Clone)]
pub(super) enum Event {
    Status(Status),
    Artifact(Artifact, Chunk),
}

pub(super) fn new_id() -> String {
    uuid::Uuid::new_v4().to_string()
}
