//! How a call ended when it did not end in an error: the reply object of the contract.

use crate::json::RawObject;
use bytes::Bytes;
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

use uuid::Uuid;

use super::error::{Code, ErrorInfo};
use crate::a2a::model::{ALLOCATION_OVERHEAD, TaskState};
use crate::a2a::retry::{Retries, Retry};
use crate::json;

/// What a caller needs to answer an agent's question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FollowUp {
    #[serde(rename = "follow_up_id")]
    pub id: Uuid,
    /// RFC 3339.
    pub expires_at: String,
}

/// The statuses of the contract; errors are not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum ReplyStatus {
    Completed,
    Failed,
    /// The agent refused the task.
    Rejected,
    Canceled,
    InputRequired,
    AuthRequired,
    Working,
}

impl ReplyStatus {
    /// The word of the contract.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Completed => "COMPLETED",
            Self::Failed => "FAILED",
            Self::Rejected => "REJECTED",
            Self::Canceled => "CANCELED",
            Self::InputRequired => "INPUT_REQUIRED",
            Self::AuthRequired => "AUTH_REQUIRED",
            Self::Working => "WORKING",
        }
    }

    /// Whether the agent waits for the caller.
    pub const fn is_waiting(self) -> bool {
        matches!(self, Self::InputRequired | Self::AuthRequired)
    }
}

impl From<&TaskState> for ReplyStatus {
    fn from(state: &TaskState) -> Self {
        match state {
            TaskState::Completed => Self::Completed,
            TaskState::Failed => Self::Failed,
            TaskState::Rejected => Self::Rejected,
            TaskState::Canceled => Self::Canceled,
            TaskState::InputRequired => Self::InputRequired,
            TaskState::AuthRequired => Self::AuthRequired,
            TaskState::Submitted | TaskState::Working | TaskState::Unknown(_) => Self::Working,
        }
    }
}

impl From<ReplyStatus> for TaskState {
    fn from(status: ReplyStatus) -> Self {
        match status {
            ReplyStatus::Completed => Self::Completed,
            ReplyStatus::Failed => Self::Failed,
            ReplyStatus::Rejected => Self::Rejected,
            ReplyStatus::Canceled => Self::Canceled,
            ReplyStatus::InputRequired => Self::InputRequired,
            ReplyStatus::AuthRequired => Self::AuthRequired,
            ReplyStatus::Working => Self::Working,
        }
    }
}

/// Which task a reply is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TaskRef {
    /// The agent's id; `null` for a direct message.
    pub id: Option<String>,
    pub context_id: Option<String>,
    /// The agent's name in the settings.
    pub agent: std::sync::Arc<str>,
    /// The original id of the skill; `null` when the bridge does not know it.
    pub skill: Option<std::sync::Arc<str>>,
}

/// A file in a reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplyFile {
    /// Its name, as the agent says.
    pub name: Option<String>,
    /// Its media type, as the agent says.
    pub mime_type: Option<String>,
    /// Its size in bytes, when it is here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The file itself, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<String>,
}

/// An artifact's id and name, so that versions of a refined result can be told apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ArtifactRef {
    /// The agent's id of it.
    pub id: Option<String>,
    /// The agent's name for it.
    pub name: Option<String>,
}

/// The content of a reply: what the agent's parts amount to.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ReplyContent {
    pub message: String,
    pub files: Vec<ReplyFile>,
    /// All data parts, in order.
    pub data: Vec<Box<RawValue>>,
    pub artifacts: Vec<ArtifactRef>,
}

#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    /// How it ended, or where it stands.
    pub status: ReplyStatus,
    /// Whether the caller got what was asked for.
    pub success: bool,
    pub content: ReplyContent,
    /// How to answer the agent's question.
    pub follow_up: Option<FollowUp>,
    /// Why the message went to the agent more than once.
    pub retries: Vec<Retry>,
    /// Which task it is about.
    pub task: TaskRef,
}

impl Outcome {
    /// The reply for a task in `state`, or for a direct message, which counts as completed.
    pub(crate) fn new(status: ReplyStatus, content: ReplyContent, task: TaskRef) -> Self {
        let success = matches!(status, ReplyStatus::Completed | ReplyStatus::Working);
        let (follow_up, retries) = (None, Vec::new());
        Self { status, success, content, follow_up, retries, task }
    }

    /// The same, of a message that went out after these retries.
    pub(crate) fn after(self, retries: Option<&Retries>) -> Self {
        Self { retries: retries.map(Retries::list).unwrap_or_default(), ..self }
    }

    /// The same as a success, for a cancel that cancelled.
    pub(crate) fn as_success(self) -> Self {
        Self { success: true, ..self }
    }

    /// The reply body of the contract.
    pub(crate) fn to_json(&self) -> Bytes {
        json::to_bytes(self)
    }

    /// The bytes that it holds in memory.
    pub(crate) fn allocated(&self) -> usize {
        let text =
            |text: &Option<String>| text.as_ref().map_or(0, |text| ALLOCATION_OVERHEAD + text.capacity());
        let ReplyContent { message, files, data, artifacts } = &self.content;
        let file =
            |file: &ReplyFile| text(&file.name) + text(&file.mime_type) + text(&file.url) + text(&file.bytes);
        let artifact = |artifact: &ArtifactRef| text(&artifact.id) + text(&artifact.name);
        size_of::<Self>()
            + message.capacity()
            + files.capacity() * size_of::<ReplyFile>()
            + files.iter().map(file).sum::<usize>()
            + data.capacity() * size_of::<Box<RawValue>>()
            + data.iter().map(|data| ALLOCATION_OVERHEAD + data.get().len()).sum::<usize>()
            + artifacts.capacity() * size_of::<ArtifactRef>()
            + artifacts.iter().map(artifact).sum::<usize>()
            + text(&self.task.id)
            + text(&self.task.context_id)
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("success", &self.success)?;
        map.serialize_entry("status", &self.status)?;
        map.serialize_entry("message", &self.content.message)?;
        map.serialize_entry("files", &self.content.files)?;
        match &self.follow_up {
            // In this state `data` holds the follow-up and nothing else.
            Some(follow_up) => {
                map.serialize_entry("data", follow_up)?;
                if !self.content.data.is_empty() {
                    map.serialize_entry("data_parts", &self.content.data)?;
                }
            }
            None => match merged(&self.content.data) {
                Some(object) => map.serialize_entry("data", &object)?,
                None => {
                    map.serialize_entry("data", &RawObject::default())?;
                    map.serialize_entry("data_parts", &self.content.data)?;
                }
            },
        }
        map.serialize_entry("artifacts", &self.content.artifacts)?;
        let failure = match self.status {
            ReplyStatus::Failed => Some(Code::TaskFailed),
            ReplyStatus::Rejected => Some(Code::TaskRejected),
            _ => None,
        };
        if let Some(code) = failure {
            map.serialize_entry("error_info", &ErrorInfo::new(code))?;
        }
        if !self.retries.is_empty() {
            map.serialize_entry("metadata", &Metadata { retries: &self.retries })?;
        }
        map.serialize_entry("task", &self.task)?;
        map.end()
    }
}

/// What a reply says about the call itself.
#[derive(Debug, Serialize)]
pub(crate) struct Metadata<'a> {
    /// Why the message went to the agent more than once.
    pub retries: &'a [Retry],
}

/// All parts as one object, when they are objects whose keys do not clash.
fn merged(parts: &[Box<RawValue>]) -> Option<RawObject> {
    let mut all = RawObject::default();
    for part in parts {
        let mut object: RawObject = serde_json::from_str(part.get()).ok()?;
        all.0.append(&mut object.0);
    }
    let mut keys = std::collections::HashSet::with_capacity(all.0.len());
    let distinct = all.0.iter().all(|(key, _)| keys.insert(key.as_str()));
    distinct.then_some(all)
}
