//! The shapes of A2A on the wire, all versions at once, and what they mean in the model.
//!
//! Two spellings of one field are two fields here where some agents send both, because an alias
//! would call that a duplicate.

mod content;

use serde::Deserialize;
use serde::de::Error as _;
use serde_json::value::RawValue;

use super::model::{Answer, ArtifactUpdate, Event, Message, Part, StatusUpdate, Task, TaskState};
use crate::json::null_is_default;
use content::{Content, WireArtifact, WirePart};

/// Longest id that an agent may give. Ids are kept, sent back and become parts of subjects.
const MAX_ID: usize = 1024;

impl Event {
    /// Decodes a task, a message or an update, bare or wrapped as in v1.0.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str::<WireEvent>(json)?.try_into()
    }

    /// Decodes a JSON-RPC response with such a result, in one pass; `None` when it is anything else.
    pub fn decode_response(json: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Response {
            result: Option<Box<WireEvent>>,
            error: Option<serde::de::IgnoredAny>,
        }
        // One check of the whole text costs less than one of each string in it.
        let response: Response = serde_json::from_str(std::str::from_utf8(json).ok()?).ok()?;
        let wire = response.result.filter(|_| response.error.is_none())?;
        (*wire).try_into().ok()
    }
}

impl TryFrom<WireEvent> for Event {
    type Error = serde_json::Error;

    fn try_from(wire: WireEvent) -> Result<Self, serde_json::Error> {
        let event = Self::with_any_ids(wire)?;
        let (task_id, context_id) = match &event {
            Self::Task(task) => (Some(&task.id), &task.context_id),
            Self::Message(message) => (None, &message.context_id),
            Self::Status(update) => (update.task_id.as_ref(), &update.context_id),
            Self::Artifact(update) => (update.task_id.as_ref(), &update.context_id),
        };
        for (what, id) in [("task", task_id), ("context", context_id.as_ref())] {
            if let Some(id) = id.filter(|id| id.len() > MAX_ID) {
                let length = id.len();
                let reason = format!("its {what} id has {length} bytes, and {MAX_ID} is the most");
                return Err(serde_json::Error::custom(reason));
            }
        }
        Ok(event)
    }
}

impl Event {
    fn with_any_ids(mut wire: WireEvent) -> Result<Self, serde_json::Error> {
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
            return Ok(Self::Task((*task).try_into()?));
        }
        if let Some(message) = wire.message {
            return Ok(Self::Message(serde_json::from_str::<WireMessage>(message.get())?.into()));
        }
        if wire.parts.is_none() && wire.content.is_none() {
            return Err(serde_json::Error::custom("neither a task nor a message"));
        }
        Ok(Self::Message(
            WireMessage {
                message_id: wire.message_id,
                role: wire.role,
                context_id: wire.context_id,
                context_id_snake: wire.context_id_snake,
                parts: wire.parts.unwrap_or_default(),
                content: wire.content,
            }
            .into(),
        ))
    }
}

impl TryFrom<Event> for Answer {
    type Error = serde_json::Error;

    /// A result that is a task or a message.
    fn try_from(event: Event) -> Result<Self, serde_json::Error> {
        match event {
            Event::Task(task) => Ok(Self::Task(task)),
            Event::Message(message) => Ok(Self::Message(message)),
            // A v0.1 task with nothing but id and status looks like news of one.
            Event::Status(StatusUpdate { task_id: Some(id), context_id, state, message, .. }) => {
                let (artifacts, history) = (Vec::new(), Vec::new());
                Ok(Self::Task(Task { id, context_id, state, status_message: message, artifacts, history }))
            }
            Event::Status(_) | Event::Artifact(_) => {
                Err(serde_json::Error::custom("an update where a task or a message was expected"))
            }
        }
    }
}

impl Task {
    /// Decodes a task, bare or wrapped.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        Event::decode(json)?.try_into()
    }
}

impl TryFrom<Event> for Task {
    type Error = serde_json::Error;

    fn try_from(event: Event) -> Result<Self, serde_json::Error> {
        match event.try_into()? {
            Answer::Task(task) => Ok(task),
            Answer::Message(_) => Err(serde_json::Error::custom("a message where a task was expected")),
        }
    }
}

/// Everything that an event or a result can be. One pass over the text fills what is there. What is
/// large is boxed, because most of it is not there, and all of it is moved.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a task, a message or an update")]
struct WireEvent {
    kind: Option<String>,
    #[serde(alias = "status_update")]
    status_update: Option<Box<WireUpdate>>,
    #[serde(alias = "artifact_update")]
    artifact_update: Option<Box<WireUpdate>>,
    task: Option<Box<WireTask>>,
    // Kept raw: in a v0.1 task it can be anything. v0.3's protobuf calls it `msg`.
    #[serde(alias = "msg")]
    message: Option<Box<RawValue>>,
    id: Option<Id>,
    #[serde(alias = "task_id")]
    task_id: Option<Id>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    session_id: Option<String>,
    status: Option<Box<WireStatus>>,
    artifact: Option<Box<WireArtifact>>,
    artifacts: Option<Vec<WireArtifact>>,
    history: Option<Vec<WireMessage>>,
    #[serde(rename = "final")]
    is_final: Option<bool>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
    #[serde(alias = "message_id")]
    message_id: Option<Id>,
    role: Option<Id>,
    parts: Option<Vec<WirePart>>,
    content: Option<Content>,
    metadata: Option<Box<RawValue>>,
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
            metadata: self.metadata,
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
#[serde(rename_all = "camelCase", expecting = "an update")]
struct WireUpdate {
    #[serde(alias = "task_id", alias = "id")]
    task_id: Option<Id>,
    #[serde(alias = "context_id", alias = "sessionId")]
    context_id: Option<String>,
    status: Option<Box<WireStatus>>,
    artifact: Option<Box<WireArtifact>>,
    #[serde(rename = "final")]
    is_final: Option<bool>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
    metadata: Option<Box<RawValue>>,
}

impl WireUpdate {
    fn into_event(self) -> Result<Event, serde_json::Error> {
        let task_id = self.task_id.map(|id| id.0).filter(|id| !id.is_empty());
        let context_id = self.context_id.filter(|id| !id.is_empty());
        if let Some(artifact) = self.artifact {
            // v0.1 has these inside the artifact.
            let append = self.append.or(artifact.append).unwrap_or(false);
            let last_chunk = self.last_chunk.or(artifact.last_chunk).unwrap_or(false);
            let artifact = artifact.with_update_metadata(self.metadata);
            return Ok(Event::Artifact(ArtifactUpdate { task_id, context_id, artifact, append, last_chunk }));
        }
        match self.status.map(|status| *status) {
            Some(WireStatus { state: Some(state), message }) => {
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
#[serde(rename_all = "camelCase", expecting = "a task")]
struct WireTask {
    id: Option<Id>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    session_id: Option<String>,
    status: Option<Box<WireStatus>>,
    #[serde(default, deserialize_with = "null_is_default")]
    artifacts: Vec<WireArtifact>,
    #[serde(default, deserialize_with = "null_is_default")]
    history: Vec<WireMessage>,
}

#[derive(Deserialize)]
#[serde(expecting = "a status")]
struct WireStatus {
    state: Option<TaskState>,
    message: Option<WireMessage>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a message")]
struct WireMessage {
    #[serde(alias = "message_id")]
    message_id: Option<Id>,
    role: Option<Id>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    parts: Vec<WirePart>,
    content: Option<Content>,
}

impl WireMessage {
    fn into_parts(self) -> Vec<Part> {
        let content = self.content.map(|content| content.0).unwrap_or_default();
        let parts = if self.parts.is_empty() { content } else { self.parts };
        parts.into_iter().filter_map(WirePart::into_part).collect()
    }
}

/// An id or a role that should be a string and sometimes is a number.
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
        let Some(WireStatus { state: Some(state), message }) = wire.status.map(|status| *status) else {
            return Err(missing("a status"));
        };
        Ok(Self {
            id: wire.id.map(|id| id.0).filter(|id| !id.is_empty()).ok_or_else(|| missing("an id"))?,
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
    fn from(mut wire: WireMessage) -> Self {
        let context_id = wire.context_id.take().or(wire.context_id_snake.take());
        Self {
            id: wire.message_id.take().map(|id| id.0),
            // The number is that of protobuf.
            from_user: wire.role.as_ref().is_some_and(|Id(role)| {
                role.eq_ignore_ascii_case("user") || role == "ROLE_USER" || role == "1"
            }),
            context_id: context_id.filter(|id| !id.is_empty()),
            parts: wire.into_parts(),
        }
    }
}
