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

use crate::json::null_is_default;

/// What an agent answered to a message.
#[derive(Debug, Clone)]
pub enum Answer {
    /// A task, finished or not.
    Task(Task),
    /// A direct message without a task.
    Message(Message),
}

/// A task as the agent last told it.
#[derive(Debug, Clone)]
pub struct Task {
    /// The agent's id of the task.
    pub id: String,
    /// The conversation it belongs to.
    pub context_id: Option<String>,
    /// Where it stands.
    pub state: TaskState,
    /// What the agent says about that.
    pub status_message: Option<Message>,
    /// Its results.
    pub artifacts: Vec<Artifact>,
    /// What was said before.
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
    /// Its content.
    pub parts: Vec<Part>,
}

/// One result of a task.
#[derive(Debug, Clone)]
pub struct Artifact {
    /// The agent's id of it.
    pub id: Option<String>,
    /// The agent's name for it.
    pub name: Option<String>,
    /// Its content.
    pub parts: Vec<Part>,
}

/// A piece of content.
#[derive(Debug, Clone)]
pub enum Part {
    /// Text for people.
    Text(String),
    /// A file.
    File(File),
    /// Structured data, exactly as it was written.
    Data(Box<RawValue>),
}

/// A file, inline or elsewhere.
#[derive(Debug, Clone)]
pub struct File {
    /// Its name, as the sender says.
    pub name: Option<String>,
    /// Its media type, as the sender says.
    pub media_type: Option<String>,
    /// Where its bytes are.
    pub content: FileContent,
}

/// Where a file's bytes are.
#[derive(Debug, Clone)]
pub enum FileContent {
    /// Here, in base64 with the standard alphabet and padding.
    Base64(String),
    /// There.
    Uri(String),
}

/// The states of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskState {
    /// Taken, not begun.
    Submitted,
    /// Under way.
    Working,
    /// The agent asks something.
    InputRequired,
    /// The agent wants authentication.
    AuthRequired,
    /// Done.
    Completed,
    /// Ended without success.
    Failed,
    /// Ended on request.
    Canceled,
    /// Refused by the agent.
    Rejected,
    /// Something that no known version has, or `unknown` itself: taken as not finished.
    Unknown(String),
}

impl TaskState {
    /// Reads any version's spelling: `input-required`, `TASK_STATE_INPUT_REQUIRED`, `cancelled`.
    pub fn parse(text: &str) -> Self {
        let name = text
            .strip_prefix("TASK_STATE_")
            .unwrap_or(text)
            .to_ascii_lowercase()
            .replace('_', "-");
        match name.as_str() {
            "submitted" => Self::Submitted,
            "working" => Self::Working,
            "input-required" => Self::InputRequired,
            "auth-required" => Self::AuthRequired,
            "completed" => Self::Completed,
            "failed" => Self::Failed,
            "canceled" | "cancelled" => Self::Canceled,
            "rejected" => Self::Rejected,
            _ => Self::Unknown(crate::json::shorten(text, 64)),
        }
    }

    /// Whether nothing can change any more.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Completed | Self::Failed | Self::Canceled | Self::Rejected
        )
    }

    /// Whether the agent waits for the caller.
    pub fn is_waiting(&self) -> bool {
        matches!(self, Self::InputRequired | Self::AuthRequired)
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
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Ok(Self::parse(&text))
    }
}

impl Answer {
    /// Decodes a result that is a task, a message, or an object that wraps one of them.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        let wire: WireAnswer = serde_json::from_str(json)?;
        // A v0.1 task may have a `message` key, so what has a status is a task.
        if wire.status.is_some() {
            return WireTask::from(wire).try_into().map(Self::Task);
        }
        if let Some(task) = wire.task {
            return Ok(Self::Task(task.try_into()?));
        }
        if let Some(message) = wire.message {
            return Ok(Self::Message(
                serde_json::from_str::<WireMessage>(message.get())?.into(),
            ));
        }
        if wire.parts.is_some() {
            let message = WireMessage {
                message_id: wire.message_id,
                role: wire.role,
                context_id: wire.context_id,
                context_id_snake: wire.context_id_snake,
                parts: wire.parts.unwrap_or_default(),
            };
            return Ok(Self::Message(message.into()));
        }
        Err(serde::de::Error::custom("neither a task nor a message"))
    }
}

impl Task {
    /// Decodes a task, bare or wrapped as `{"task": …}`.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        match Answer::decode(json)? {
            Answer::Task(task) => Ok(task),
            Answer::Message(_) => Err(serde::de::Error::custom("a message where a task was expected")),
        }
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
pub fn normal_base64(text: &str) -> Option<(String, usize)> {
    let text = text.trim();
    if let Ok(bytes) = STANDARD.decode(text) {
        return Some((text.to_owned(), bytes.len()));
    }
    [STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD]
        .iter()
        .find_map(|engine| engine.decode(text).ok())
        .map(|bytes| (STANDARD.encode(&bytes), bytes.len()))
}

// The shapes on the wire. Two spellings of one field are two fields here, because some agents
// send both and an alias would call that a duplicate.

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireAnswer {
    id: Option<Id>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    session_id: Option<String>,
    status: Option<WireStatus>,
    #[serde(default, deserialize_with = "null_is_default")]
    artifacts: Vec<WireArtifact>,
    #[serde(default, deserialize_with = "null_is_default")]
    history: Vec<WireMessage>,
    task: Option<WireTask>,
    // Kept raw: in a v0.1 task it can be anything.
    message: Option<Box<RawValue>>,
    message_id: Option<Id>,
    role: Option<String>,
    parts: Option<Vec<WirePart>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireTask {
    id: Option<Id>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    session_id: Option<String>,
    status: Option<WireStatus>,
    #[serde(default, deserialize_with = "null_is_default")]
    artifacts: Vec<WireArtifact>,
    #[serde(default, deserialize_with = "null_is_default")]
    history: Vec<WireMessage>,
}

#[derive(Deserialize)]
struct WireStatus {
    state: Option<TaskState>,
    message: Option<WireMessage>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMessage {
    #[serde(alias = "message_id")]
    message_id: Option<Id>,
    role: Option<String>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    parts: Vec<WirePart>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireArtifact {
    #[serde(alias = "artifact_id")]
    artifact_id: Option<Id>,
    name: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    parts: Vec<WirePart>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WirePart {
    text: Option<String>,
    file: Option<WireFile>,
    data: Option<Box<RawValue>>,
    raw: Option<String>,
    url: Option<String>,
    filename: Option<String>,
    #[serde(alias = "media_type", alias = "mimeType", alias = "mime_type")]
    media_type: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireFile {
    name: Option<String>,
    #[serde(alias = "mime_type", alias = "mediaType", alias = "media_type")]
    mime_type: Option<String>,
    bytes: Option<String>,
    #[serde(alias = "url")]
    uri: Option<String>,
}

/// An id that should be a string and sometimes is a number.
#[derive(Deserialize)]
#[serde(from = "serde_json::Value")]
struct Id(String);

impl From<serde_json::Value> for Id {
    fn from(value: serde_json::Value) -> Self {
        match value {
            serde_json::Value::String(text) => Self(text),
            other => Self(other.to_string()),
        }
    }
}

impl From<WireAnswer> for WireTask {
    fn from(wire: WireAnswer) -> Self {
        Self {
            id: wire.id,
            context_id: wire.context_id,
            context_id_snake: wire.context_id_snake,
            session_id: wire.session_id,
            status: wire.status,
            artifacts: wire.artifacts,
            history: wire.history,
        }
    }
}

impl TryFrom<WireTask> for Task {
    type Error = serde_json::Error;

    fn try_from(wire: WireTask) -> Result<Self, Self::Error> {
        let missing = |what: &str| serde::de::Error::custom(format!("a task without {what}"));
        let Some(WireStatus {
            state: Some(state),
            message,
        }) = wire.status
        else {
            return Err(missing("a status"));
        };
        Ok(Self {
            id: wire
                .id
                .map(|id| id.0)
                .filter(|id| !id.is_empty())
                .ok_or_else(|| missing("an id"))?,
            context_id: wire
                .context_id
                .or(wire.context_id_snake)
                .or(wire.session_id)
                .filter(|id| !id.is_empty()),
            state,
            status_message: message.map(Into::into),
            artifacts: wire.artifacts.into_iter().map(Into::into).collect(),
            history: wire.history.into_iter().map(Into::into).collect(),
        })
    }
}

impl From<WireMessage> for Message {
    fn from(wire: WireMessage) -> Self {
        Self {
            id: wire.message_id.map(|id| id.0),
            from_user: wire
                .role
                .is_some_and(|role| role.eq_ignore_ascii_case("user") || role == "ROLE_USER"),
            context_id: wire
                .context_id
                .or(wire.context_id_snake)
                .filter(|id| !id.is_empty()),
            parts: wire.parts.into_iter().filter_map(WirePart::into_part).collect(),
        }
    }
}

impl From<WireArtifact> for Artifact {
    fn from(wire: WireArtifact) -> Self {
        Self {
            id: wire.artifact_id.map(|id| id.0),
            name: wire.name.filter(|name| !name.is_empty()),
            parts: wire.parts.into_iter().filter_map(WirePart::into_part).collect(),
        }
    }
}

impl WirePart {
    /// `None` for a kind of part that no known version has.
    fn into_part(self) -> Option<Part> {
        let file = |name, media_type, content| {
            Some(Part::File(File {
                name,
                media_type,
                content,
            }))
        };
        if let Some(text) = self.text {
            return Some(Part::Text(text));
        }
        if let Some(wire) = self.file {
            let content = match (wire.bytes, wire.uri) {
                (Some(bytes), _) => FileContent::Base64(bytes),
                (None, Some(uri)) => FileContent::Uri(uri),
                (None, None) => return None,
            };
            return file(wire.name, wire.mime_type, content);
        }
        if let Some(raw) = self.raw {
            return file(self.filename, self.media_type, FileContent::Base64(raw));
        }
        if let Some(url) = self.url {
            return file(self.filename, self.media_type, FileContent::Uri(url));
        }
        self.data.map(Part::Data)
    }
}
