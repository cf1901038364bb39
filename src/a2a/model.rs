//! The one lenient model of A2A content that everyone else uses, whatever wire it came over.
//!
//! Reading takes every version's spelling at once: unknown fields are ignored, unknown states
//! are kept, `null` is absent, snake_case is understood, data keeps its text (so `1` stays `1`),
//! timestamps are not looked at. Writing is the dialects' business.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use serde::Deserialize;
use serde_json::value::RawValue;

/// What an agent answered to a message.
#[derive(Debug, Clone)]
pub enum Answer {
    /// A task, finished or not.
    Task(Task),
    /// A direct message without a task.
    Message(Message),
}

/// What an agent tells, while it works or at once.
#[derive(Debug, Clone)]
pub enum Event {
    /// The whole task as it stands.
    Task(Task),
    /// A direct message: there is no task.
    Message(Message),
    /// The task's state has changed.
    Status(StatusUpdate),
    /// A result, or a piece of one.
    Artifact(ArtifactUpdate),
}

/// A change of a task's state.
#[derive(Debug, Clone)]
pub struct StatusUpdate {
    pub task_id: Option<String>,
    pub context_id: Option<String>,
    pub state: TaskState,
    /// What the agent says about it.
    pub message: Option<Message>,
    /// Whether the agent says that nothing follows. v1.0 has no word for it.
    pub is_last: bool,
}

/// A result, or a piece of one.
#[derive(Debug, Clone)]
pub struct ArtifactUpdate {
    pub task_id: Option<String>,
    pub context_id: Option<String>,
    pub artifact: Artifact,
    /// Whether its parts continue those of the artifact with the same id.
    pub append: bool,
    /// Whether the artifact is complete with it.
    pub last_chunk: bool,
}

/// A task as the agent last told it.
#[derive(Debug, Clone)]
pub struct Task {
    /// The agent's id of the task.
    pub id: String,
    /// The conversation it belongs to.
    pub context_id: Option<String>,
    pub state: TaskState,
    /// What the agent says about that.
    pub status_message: Option<Message>,
    pub artifacts: Vec<Artifact>,
    pub history: Vec<Message>,
}

/// A message of either side.
#[derive(Debug, Clone, Default)]
pub struct Message {
    /// The id that its sender gave it.
    pub id: Option<String>,
    /// Whether the user, not the agent, said it.
    pub from_user: bool,
    /// The conversation it belongs to.
    pub context_id: Option<String>,
    pub parts: Vec<Part>,
}

/// One result of a task.
#[derive(Debug, Clone)]
pub struct Artifact {
    /// The agent's id of it.
    pub id: Option<String>,
    /// The agent's name for it.
    pub name: Option<String>,
    pub parts: Vec<Part>,
    /// What else the agent says about it. Few do, and replies do not need it.
    pub extras: Option<Box<ArtifactExtras>>,
}

/// What an artifact may have beside its content, as it was written.
#[derive(Debug, Clone)]
pub struct ArtifactExtras {
    pub description: Option<Box<RawValue>>,
    pub metadata: Option<Box<RawValue>>,
    /// Which extensions of A2A it makes use of.
    pub extensions: Option<Box<RawValue>>,
    /// What the agent says about the update that brought the artifact.
    pub update_metadata: Option<Box<RawValue>>,
    /// The same for parts, with their place.
    pub parts: Vec<(usize, PartExtras)>,
}

/// What a part may have beside what [`Part`] holds.
#[derive(Debug, Clone)]
pub struct PartExtras {
    /// The name of what is not a file.
    pub filename: Option<String>,
    /// The media type of what is not a file.
    pub media_type: Option<String>,
    /// The agent's own, as it was written.
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
    /// Structured data, exactly as it was written.
    Data(Box<RawValue>),
}

/// What the allocator needs for a small block beside its content.
pub(crate) const ALLOCATION_OVERHEAD: usize = 32;

impl Part {
    /// The bytes that it holds in memory.
    pub fn allocated(&self) -> usize {
        let text = |text: &Option<String>| text.as_ref().map_or(0, |text| ALLOCATION_OVERHEAD + text.len());
        let content = match self {
            Self::Text(text) => text.len(),
            Self::Data(data) => data.get().len(),
            Self::File(File { name, media_type, content }) => {
                let (FileContent::Base64(bytes) | FileContent::Uri(bytes)) = content;
                bytes.len() + text(name) + text(media_type)
            }
        };
        size_of::<Self>() + ALLOCATION_OVERHEAD + content
    }
}

/// A file, inline or elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Its name, as the sender says.
    pub name: Option<String>,
    /// Its media type, as the sender says.
    pub media_type: Option<String>,
    pub content: FileContent,
}

/// Where a file's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileContent {
    /// Here, in base64 with the standard alphabet and padding.
    Base64(String),
    Uri(String),
}

/// The states of a task.
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
    /// Something that no known version has, or `unknown` itself: taken as not finished.
    Unknown(String),
}

impl TaskState {
    /// Reads any version's spelling: `input-required`, `TASK_STATE_INPUT_REQUIRED`, `cancelled`.
    pub fn parse(text: &str) -> Self {
        // The two that nearly all answers have.
        match text {
            "TASK_STATE_COMPLETED" | "completed" => return Self::Completed,
            "TASK_STATE_WORKING" | "working" => return Self::Working,
            _ => {}
        }
        let name = text.strip_prefix("TASK_STATE_").unwrap_or(text).to_ascii_lowercase().replace('_', "-");
        match name.as_str() {
            "submitted" => Self::Submitted,
            "working" => Self::Working,
            "input-required" => Self::InputRequired,
            "auth-required" => Self::AuthRequired,
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            "canceled" | "cancelled" => Self::Canceled,
            "rejected" => Self::Rejected,
            _ => Self::Unknown(crate::text::shorten(text, 64)),
        }
    }

    /// Reads the number that protobuf has for it: its JSON allows that in place of the name.
    fn numbered(number: u64) -> Self {
        match number {
            1 => Self::Submitted,
            2 => Self::Working,
            3 => Self::Completed,
            4 => Self::Failed,
            5 => Self::Canceled,
            6 => Self::InputRequired,
            7 => Self::Rejected,
            8 => Self::AuthRequired,
            _ => Self::Unknown(number.to_string()),
        }
    }

    /// Whether nothing can change any more.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Canceled | Self::Rejected)
    }

    /// Whether what the agent says in this state is why it has no result.
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Failed | Self::Rejected)
    }

    /// Whether the agent waits for the caller.
    pub fn is_waiting(&self) -> bool {
        matches!(self, Self::InputRequired | Self::AuthRequired)
    }

    /// Whether a task in this state does not go on by itself.
    pub fn is_settled(&self) -> bool {
        self.is_final() || self.is_waiting()
    }
}

impl fmt::Display for TaskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Submitted => "submitted",
            Self::Working => "working",
            Self::InputRequired => "input-required",
            Self::AuthRequired => "auth-required",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
            Self::Rejected => "rejected",
            Self::Unknown(name) => name,
        })
    }
}

impl<'de> Deserialize<'de> for TaskState {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = TaskState;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a state")
            }

            fn visit_str<E>(self, text: &str) -> Result<TaskState, E> {
                Ok(TaskState::parse(text))
            }

            fn visit_u64<E>(self, number: u64) -> Result<TaskState, E> {
                Ok(TaskState::numbered(number))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl Part {
    /// The text, if this is one.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::File(_) | Self::Data(_) => None,
        }
    }
}

/// Standard base64 of what `text` says in any of the alphabets in use, and the number of bytes.
///
/// Protobuf's JSON may use the URL-safe alphabet, and some agents leave the padding out.
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
