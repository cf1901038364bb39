//! The model of A2A content, independent of the dialect.
//!
//! [`super::decode`] accepts the spellings of all versions: it ignores timestamps and unknown fields, keeps
//! unknown states, treats `null` as absent, accepts snake_case, and keeps the text of data (so `1.0` stays `1.0`). Only
//! reading is shared: each [dialect](super::dialect) writes its own form.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::files::{ObjectUrl, StoredFile};
use crate::memory::MemoryCharge;

/// An agent's response to a message.
#[derive(Debug, Clone)]
pub enum SendResult {
    Task(Task),
    /// There is no task.
    Message(Message),
}

/// An event of a stream, or the result of a request.
#[derive(Debug, Clone)]
pub enum Event {
    /// The current state of the whole task.
    Task(Task),
    /// There is no task.
    Message(Message),
    Status(StatusUpdate),
    Artifact(ArtifactUpdate),
}

impl Event {
    /// The memory that it takes, in bytes.
    pub fn allocated(&self) -> usize {
        match self {
            Self::Task(task) => task.allocated(),
            Self::Message(message) => message.allocated(),
            Self::Status(update) => update.message.as_ref().map_or(0, Message::allocated),
            Self::Artifact(update) => update.artifact.allocated(),
        }
    }
}

impl Task {
    /// The memory that it takes, in bytes.
    pub fn allocated(&self) -> usize {
        let messages = self.status_message.iter().chain(&self.history).map(Message::allocated);
        messages.chain(self.artifacts.iter().map(Artifact::allocated)).sum()
    }
}

#[derive(Debug, Clone)]
pub struct StatusUpdate {
    pub task_id: Option<String>,
    pub context_id: Option<String>,
    pub state: TaskState,
    pub message: Option<Message>,
    /// Whether the agent declares that no event follows (`final`, which v1.0 does not have).
    pub is_last: bool,
}

/// An artifact, or a piece of one.
#[derive(Debug, Clone)]
pub struct ArtifactUpdate {
    pub task_id: Option<String>,
    pub context_id: Option<String>,
    pub artifact: Artifact,
    /// Whether its parts follow those of the artifact with the same id.
    pub append: bool,
    pub last_chunk: bool,
}

#[derive(Debug, Clone)]
pub struct Task {
    pub id: String,
    pub context_id: Option<String>,
    pub state: TaskState,
    pub status_message: Option<Message>,
    pub artifacts: Vec<Artifact>,
    pub history: Vec<Message>,
    /// The charge for the memory of a large task, if it is a response of its own.
    pub(crate) memory: Option<Arc<MemoryCharge>>,
}

#[derive(Debug, Clone, Default)]
pub struct Message {
    pub id: Option<String>,
    pub from_user: bool,
    pub context_id: Option<String>,
    pub parts: Vec<Part>,
    /// The charge for the memory of a large message, if it is a response of its own.
    pub(crate) memory: Option<Arc<MemoryCharge>>,
}

impl Message {
    /// The memory that it takes, in bytes.
    pub fn allocated(&self) -> usize {
        let parts: usize = self.parts.iter().map(Part::allocated).sum();
        size_of::<Self>() + text_size(&self.id) + text_size(&self.context_id) + parts
    }
}

#[derive(Debug, Clone)]
pub struct Artifact {
    pub id: Option<String>,
    pub name: Option<String>,
    pub parts: Vec<Part>,
    /// Boxed, because few agents send any.
    pub extras: Option<Box<ArtifactExtras>>,
}

impl Artifact {
    /// The memory that it takes without its extras, in bytes.
    pub fn allocated(&self) -> usize {
        let parts: usize = self.parts.iter().map(Part::allocated).sum();
        size_of::<Self>() + text_size(&self.id) + text_size(&self.name) + parts
    }
}

/// Fields of an artifact that replies do not use, with their original text.
#[derive(Debug, Clone)]
pub struct ArtifactExtras {
    pub description: Option<Box<RawValue>>,
    pub metadata: Option<Box<RawValue>>,
    pub extensions: Option<Box<RawValue>>,
    /// The metadata of the update that contained the artifact.
    pub update_metadata: Option<Box<RawValue>>,
    /// The extra fields of the parts, by their index.
    pub parts: Vec<(usize, PartExtras)>,
}

/// Fields of a part that [`Part`] does not have.
#[derive(Debug, Clone)]
pub struct PartExtras {
    /// Only if the part is not a file.
    pub filename: Option<String>,
    /// Only if the part is not a file.
    pub media_type: Option<String>,
    pub metadata: Option<Box<RawValue>>,
}

impl ArtifactExtras {
    pub fn is_empty(&self) -> bool {
        let raw = [&self.description, &self.metadata, &self.extensions, &self.update_metadata];
        raw.iter().all(|raw| raw.is_none()) && self.parts.is_empty()
    }
}

#[derive(Debug, Clone)]
pub enum Part {
    Text(String),
    File(File),
    /// JSON with its original text.
    Data(Box<RawValue>),
}

/// What the allocator needs in addition to the content of a small block.
pub(crate) const ALLOCATION_OVERHEAD: usize = 32;

/// The memory of an optional text, in bytes.
pub(super) fn text_size(text: &Option<String>) -> usize {
    text.as_ref().map_or(0, |text| ALLOCATION_OVERHEAD + text.len())
}

impl Part {
    /// The memory that it takes, in bytes.
    pub fn allocated(&self) -> usize {
        let content = match self {
            Self::Text(text) => text.len(),
            Self::Data(data) => data.get().len(),
            Self::File(File { name, media_type, content }) => {
                let content = match content {
                    FileContent::Base64(text) | FileContent::Uri(text) => text.len(),
                    FileContent::Reference(_) => 0,
                    FileContent::FromStore(file) | FileContent::InStore(file) => file.allocated(),
                };
                content + text_size(name) + text_size(media_type)
            }
        };
        size_of::<Self>() + ALLOCATION_OVERHEAD + content
    }

    /// Whether its bytes are read from the store while it is sent.
    pub(crate) fn is_streamed(&self) -> bool {
        matches!(self, Self::File(File { content: FileContent::FromStore(_), .. }))
    }

    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::File(_) | Self::Data(_) => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    pub name: Option<String>,
    pub media_type: Option<String>,
    pub content: FileContent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileContent {
    /// In any alphabet, as the agent sent it; [`normalize_base64`] converts it.
    Base64(String),
    Uri(String),
    /// In a request, until the file is looked up.
    Reference(ObjectUrl),
    /// A file that the agent gets. Its bytes are read from the store while the request is sent.
    FromStore(Box<StoredContent>),
    /// A file of the agent whose bytes went to the store while the response was received.
    InStore(Box<StoredContent>),
}

/// The content of a file in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredContent {
    pub(crate) file: StoredFile,
    /// What a message has in place of the bytes: the URL of the file, or a placeholder that occurs nowhere else.
    text: String,
}

impl StoredContent {
    /// For an agent.
    pub(crate) fn to_send(file: StoredFile) -> FileContent {
        let text = format!("file-{}", uuid::Uuid::new_v4().simple());
        FileContent::FromStore(Box::new(Self { file, text }))
    }

    /// From an agent.
    pub(crate) fn received(file: StoredFile) -> FileContent {
        let text = file.url.to_string();
        FileContent::InStore(Box::new(Self { file, text }))
    }

    pub(crate) fn placeholder(&self) -> &str {
        &self.text
    }

    fn allocated(&self) -> usize {
        let StoredFile { url, description, sha256, content_id, .. } = &self.file;
        let texts = url.bucket().len() + url.name().len() + sha256.len() + content_id.len() + self.text.len();
        size_of::<Self>()
            + 6 * ALLOCATION_OVERHEAD
            + texts
            + text_size(&description.name)
            + text_size(&description.media_type)
    }
}

impl FileContent {
    pub(super) fn as_bytes_or_uri(&self) -> (Option<&str>, Option<&str>) {
        match self {
            Self::Base64(bytes) => (Some(bytes), None),
            Self::Uri(uri) => (None, Some(uri)),
            Self::FromStore(file) => (Some(&file.text), None),
            Self::InStore(file) => (None, Some(&file.text)),
            // Requests are sent after their files are looked up.
            Self::Reference(_) => (None, None),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskState {
    Submitted,
    Working,
    InputRequired,
    AuthRequired,
    Completed,
    Failed,
    Canceled,
    Rejected,
    /// A state that no known version has, or `unknown` itself; counts as not finished.
    Unknown(String),
}

/// Longer names of states are cut.
const MAX_STATE: usize = 64;

/// The names of the states, in the order of their numbers in protobuf, which begin with 1.
static STATES: [(TaskState, &str); 8] = [
    (TaskState::Submitted, "submitted"),
    (TaskState::Working, "working"),
    (TaskState::Completed, "completed"),
    (TaskState::Failed, "failed"),
    (TaskState::Canceled, "canceled"),
    (TaskState::InputRequired, "input-required"),
    (TaskState::Rejected, "rejected"),
    (TaskState::AuthRequired, "auth-required"),
];

impl TaskState {
    /// Accepts the spelling of any version: `input-required`, `TASK_STATE_INPUT_REQUIRED`, `cancelled`.
    pub fn parse(text: &str) -> Self {
        // Nearly all responses have one of these two.
        match text {
            "TASK_STATE_COMPLETED" | "completed" => return Self::Completed,
            "TASK_STATE_WORKING" | "working" => return Self::Working,
            _ => {}
        }
        if text.len() > MAX_STATE {
            return Self::Unknown(crate::text::shorten(text, MAX_STATE));
        }
        let name = text.strip_prefix("TASK_STATE_").unwrap_or(text).to_ascii_lowercase().replace('_', "-");
        let name = if name == "cancelled" { "canceled" } else { &name };
        let known = STATES.iter().find(|(_, known)| *known == name);
        known.map_or_else(|| Self::Unknown(text.to_owned()), |(state, _)| state.clone())
    }

    pub fn is_final(&self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Canceled | Self::Rejected)
    }

    /// Whether the status message explains why there is no result.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Failed | Self::Rejected)
    }

    /// Whether the task continues only after the caller has answered or authenticated.
    pub fn awaits_caller(&self) -> bool {
        matches!(self, Self::InputRequired | Self::AuthRequired)
    }

    /// Whether the task does not continue by itself: it is final or awaits the caller.
    pub fn is_settled(&self) -> bool {
        self.is_final() || self.awaits_caller()
    }
}

impl fmt::Display for TaskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => f.write_str(name),
            known => {
                f.write_str(STATES.iter().find(|(state, _)| state == known).map_or("", |(_, name)| name))
            }
        }
    }
}

impl<'de> Deserialize<'de> for TaskState {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = TaskState;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a task state")
            }

            fn visit_str<E>(self, text: &str) -> Result<TaskState, E> {
                Ok(TaskState::parse(text))
            }

            /// The JSON of protobuf allows the number of a state in place of its name.
            fn visit_u64<E>(self, number: u64) -> Result<TaskState, E> {
                let known = STATES.iter().zip(1..).find(|(_, index)| *index == number);
                Ok(known
                    .map_or_else(|| TaskState::Unknown(number.to_string()), |((state, _), _)| state.clone()))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// Converts base64 of any alphabet to the standard one with padding; also returns the number of bytes.
///
/// Protobuf's JSON may use the URL-safe alphabet, and some agents omit the padding.
pub(crate) fn normalize_base64(text: &str) -> Option<(String, usize)> {
    let text = text.trim();
    if let Ok(bytes) = STANDARD.decode(text) {
        return Some((text.to_owned(), bytes.len()));
    }
    [STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD]
        .iter()
        .find_map(|engine| engine.decode(text).ok())
        .map(|bytes| (STANDARD.encode(&bytes), bytes.len()))
}
