//! The shapes of A2A on the wire, all versions at once, and what they mean in the model.
//!
//! Two spellings of one field are two fields here where some agents send both, because an alias
//! would call that a duplicate.

use serde::Deserialize;
use serde::de::Error as _;
use serde_json::value::RawValue;

use super::model::{
    Answer, Artifact, ArtifactUpdate, Event, File, FileContent, Message, Part, StatusUpdate, Task, TaskState,
};
use crate::json::null_is_default;

impl Event {
    /// Decodes a task, a message or an update, bare or wrapped as in v1.0.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        let mut wire: WireEvent = serde_json::from_str(json)?;
        if let Some(update) = wire.status_update.take().or_else(|| wire.artifact_update.take()) {
            return update.into_event();
        }
        // A v0.1 task may have a `message` key, so what has a status is a task, or news of one.
        if wire.status.is_some() || wire.artifact.is_some() {
            return if wire.is_update() {
                wire.into_update().into_event()
            } else {
                wire.into_task().map(Self::Task)
            };
        }
        if let Some(task) = wire.task {
            return Ok(Self::Task(task.try_into()?));
        }
        if let Some(message) = wire.message {
            return Ok(Self::Message(
                serde_json::from_str::<WireMessage>(message.get())?.into(),
            ));
        }
        match wire.parts {
            Some(parts) => {
                let (message_id, role) = (wire.message_id, wire.role);
                let (context_id, context_id_snake) = (wire.context_id, wire.context_id_snake);
                Ok(Self::Message(
                    WireMessage {
                        message_id,
                        role,
                        context_id,
                        context_id_snake,
                        parts,
                    }
                    .into(),
                ))
            }
            None => Err(serde_json::Error::custom("neither a task nor a message")),
        }
    }
}

impl Answer {
    /// Decodes a result that is a task or a message.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        match Event::decode(json)? {
            Event::Task(task) => Ok(Self::Task(task)),
            Event::Message(message) => Ok(Self::Message(message)),
            // A v0.1 task with nothing but id and status looks like news of one.
            Event::Status(StatusUpdate {
                task_id: Some(id),
                context_id,
                state,
                message,
                ..
            }) => {
                let (artifacts, history) = (Vec::new(), Vec::new());
                Ok(Self::Task(Task {
                    id,
                    context_id,
                    state,
                    status_message: message,
                    artifacts,
                    history,
                }))
            }
            Event::Status(_) | Event::Artifact(_) => Err(serde_json::Error::custom(
                "an update where a task or a message was expected",
            )),
        }
    }
}

impl Task {
    /// Decodes a task, bare or wrapped.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        match Answer::decode(json)? {
            Answer::Task(task) => Ok(task),
            Answer::Message(_) => Err(serde_json::Error::custom("a message where a task was expected")),
        }
    }
}

/// Everything that an event or a result can be. One pass over the text fills what is there.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireEvent {
    kind: Option<String>,
    #[serde(alias = "status_update")]
    status_update: Option<WireUpdate>,
    #[serde(alias = "artifact_update")]
    artifact_update: Option<WireUpdate>,
    task: Option<WireTask>,
    // Kept raw: in a v0.1 task it can be anything.
    message: Option<Box<RawValue>>,
    id: Option<Id>,
    #[serde(alias = "task_id")]
    task_id: Option<Id>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    session_id: Option<String>,
    status: Option<WireStatus>,
    artifact: Option<WireArtifact>,
    artifacts: Option<Vec<WireArtifact>>,
    history: Option<Vec<WireMessage>>,
    #[serde(rename = "final")]
    is_final: Option<bool>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
    #[serde(alias = "message_id")]
    message_id: Option<Id>,
    role: Option<String>,
    parts: Option<Vec<WirePart>>,
}

impl WireEvent {
    /// Whether this is news of a task rather than the task: a task has no `final`, and calls its
    /// id `id`; v0.1 calls it so in both.
    fn is_update(&self) -> bool {
        match self.kind.as_deref() {
            Some("task") => false,
            Some("status-update" | "artifact-update") => true,
            _ => {
                let only_tasks_have = self.artifacts.is_some() || self.history.is_some();
                self.artifact.is_some() || self.is_final.is_some() || (self.id.is_none() && !only_tasks_have)
            }
        }
    }

    fn into_update(self) -> WireUpdate {
        WireUpdate {
            task_id: self.task_id.or(self.id),
            context_id: self.context_id.or(self.context_id_snake).or(self.session_id),
            status: self.status,
            artifact: self.artifact,
            is_final: self.is_final,
            append: self.append,
            last_chunk: self.last_chunk,
        }
    }

    fn into_task(self) -> Result<Task, serde_json::Error> {
        let wire = WireTask {
            id: self.id.or(self.task_id),
            context_id: self.context_id,
            context_id_snake: self.context_id_snake,
            session_id: self.session_id,
            status: self.status,
            artifacts: self.artifacts.unwrap_or_default(),
            history: self.history.unwrap_or_default(),
        };
        wire.try_into()
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireUpdate {
    #[serde(alias = "task_id", alias = "id")]
    task_id: Option<Id>,
    #[serde(alias = "context_id", alias = "sessionId")]
    context_id: Option<String>,
    status: Option<WireStatus>,
    artifact: Option<WireArtifact>,
    #[serde(rename = "final")]
    is_final: Option<bool>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
}

impl WireUpdate {
    fn into_event(self) -> Result<Event, serde_json::Error> {
        let task_id = self.task_id.map(|id| id.0).filter(|id| !id.is_empty());
        let context_id = self.context_id.filter(|id| !id.is_empty());
        if let Some(artifact) = self.artifact {
            // v0.1 has these inside the artifact.
            let append = self.append.or(artifact.append).unwrap_or(false);
            let last_chunk = self.last_chunk.or(artifact.last_chunk).unwrap_or(false);
            let artifact = artifact.into();
            return Ok(Event::Artifact(ArtifactUpdate {
                task_id,
                context_id,
                artifact,
                append,
                last_chunk,
            }));
        }
        match self.status {
            Some(WireStatus {
                state: Some(state),
                message,
            }) => {
                let message = message.map(Into::into);
                Ok(Event::Status(StatusUpdate {
                    task_id,
                    context_id,
                    state,
                    message,
                    is_last: self.is_final.unwrap_or(false),
                }))
            }
            _ => Err(serde_json::Error::custom("an update without a state")),
        }
    }
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
    // v0.1 numbers artifacts instead of naming them.
    index: Option<Id>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
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
            id: wire.artifact_id.or(wire.index).map(|id| id.0),
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
