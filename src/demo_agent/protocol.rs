//! The JSON of A2A 1.0 and 0.3: the shapes that both share, and every difference between them.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use clap::ValueEnum;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::a2a::model::TaskState;

/// JSON that is already written. Parts stay in this form, so an echo repeats numbers exactly as they came.
pub(super) type RawJson = Arc<RawValue>;

/// The reason of the error that the skill `rpc-error` answers with.
pub(super) const PLANNED_ERROR: &str = "PLANNED_ERROR";

pub(super) fn raw(value: &impl Serialize) -> RawJson {
    to_raw_value(value).expect("all maps have text keys").into()
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DemoTask {
    pub(super) id: String,
    pub(super) context_id: String,
    pub(super) status: DemoStatus,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) artifacts: Vec<DemoArtifact>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) history: Vec<DemoMessage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
}

impl DemoTask {
    /// Keeps the last `length` messages.
    pub(super) fn shorten_history(&mut self, length: Option<usize>) {
        if let Some(surplus) = length.and_then(|length| self.history.len().checked_sub(length)) {
            self.history.drain(..surplus);
        }
    }
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct DemoStatus {
    #[serde(skip)]
    pub(super) state: TaskState,
    #[serde(rename = "state")]
    state_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) message: Option<DemoMessage>,
    /// Missing while a task is only submitted, as with the public SDKs.
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DemoMessage {
    message_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) context_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) task_id: Option<String>,
    role: String,
    pub(super) parts: Vec<RawJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) metadata: Option<Value>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) reference_task_ids: Vec<String>,
    #[serde(skip_deserializing, skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
}

impl DemoMessage {
    /// The text parts, one per line.
    pub(super) fn text(&self) -> String {
        let parts = self.parts.iter().filter_map(|part| serde_json::from_str(part.get()).ok());
        parts.filter_map(|part: PartFields| part.text).collect::<Vec<_>>().join("\n")
    }
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DemoArtifact {
    pub(super) artifact_id: String,
    pub(super) name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) description: Option<&'static str>,
    pub(super) parts: Vec<RawJson>,
}

impl DemoArtifact {
    pub(super) fn new(name: &'static str, parts: Vec<RawJson>) -> Self {
        Self { artifact_id: new_id(), name, description: None, parts }
    }
}

/// How an artifact update relates to the earlier ones with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArtifactChunk {
    /// The whole artifact in one update, with neither `append` nor `lastChunk`.
    Whole,
    First,
    Next,
    Last,
    /// The first and last chunk at once.
    Only,
}

/// A status update or an artifact update.
#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
struct TaskUpdate<'a> {
    task_id: &'a str,
    context_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a DemoStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact: Option<&'a DemoArtifact>,
    #[serde(skip_serializing_if = "Option::is_none")]
    append: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_chunk: Option<bool>,
    #[serde(rename = "final", skip_serializing_if = "Option::is_none")]
    is_final: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
}

/// The parameters of a send.
#[derive(Deserialize)]
pub(super) struct SendMessageParams {
    pub(super) message: DemoMessage,
    #[serde(default, deserialize_with = "crate::json::null_is_default")]
    pub(super) configuration: SendConfiguration,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct SendConfiguration {
    pub(super) accepted_output_modes: Vec<String>,
    /// 0.3
    blocking: Option<bool>,
    /// 1.0
    return_immediately: Option<bool>,
    pub(super) history_length: Option<usize>,
}

/// The content of a part: 1.0 has exactly one of the first four, 0.3 has `kind` and the field for it.
#[derive(Deserialize, Default)]
#[serde(default)]
struct PartFields {
    text: Option<String>,
    raw: Option<String>,
    url: Option<String>,
    data: Option<IgnoredAny>,
    kind: String,
    file: PartFile,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct PartFile {
    bytes: Option<String>,
    uri: Option<String>,
}

#[derive(Serialize)]
struct RpcResponse<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a Value>,
    jsonrpc: &'static str,
}

/// A JSON-RPC error.
#[derive(Debug)]
pub(super) struct MethodError {
    code: i64,
    /// 1.0 adds it as the `reason` of an `ErrorInfo`.
    reason: Option<&'static str>,
    message: String,
}

impl MethodError {
    pub(super) fn new(
        code: i64,
        reason: impl Into<Option<&'static str>>,
        message: impl Into<String>,
    ) -> Self {
        Self { code, reason: reason.into(), message: message.into() }
    }

    pub(super) fn bad_params(message: impl Into<String>) -> Self {
        Self::new(-32602, "INVALID_PARAMS", message)
    }
}

pub(super) fn read_params<'de, T: Deserialize<'de>>(params: &'de str) -> Result<T, MethodError> {
    serde_json::from_str(params).map_err(|error| MethodError::bad_params(error.to_string()))
}

pub(super) fn new_id() -> String {
    uuid::Uuid::new_v4().to_string()
}

/// Whether nothing more happens until the caller acts.
pub(super) fn ends_turn(state: &TaskState) -> bool {
    !matches!(state, TaskState::Submitted | TaskState::Working)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ProtocolVersion {
    #[value(name = "1.0")]
    V1,
    #[value(name = "0.3")]
    V03,
}

impl ProtocolVersion {
    pub(super) fn read_send(self, params: &str) -> Result<SendMessageParams, MethodError> {
        let mut params: SendMessageParams = read_params(params)?;
        let message = &mut params.message;
        if message.parts.is_empty() {
            return Err(MethodError::bad_params("message.parts: at least one part is required"));
        }
        if ![self.user_role(), self.agent_role()].contains(&message.role.as_str()) {
            return Err(MethodError::bad_params(format!("message.role: {:?}", message.role)));
        }
        for part in &message.parts {
            self.check_part(&read_params(part.get())?)?;
        }
        message.context_id.take_if(|id| id.is_empty());
        message.task_id.take_if(|id| id.is_empty());
        message.kind = self.kind("message");
        Ok(params)
    }

    fn check_part(self, part: &PartFields) -> Result<(), MethodError> {
        let (text, data) = (part.text.is_some(), part.data.is_some());
        match self {
            Self::V1 => {
                let fields = [text, data, part.raw.is_some(), part.url.is_some()];
                if fields.into_iter().filter(|&is_set| is_set).count() != 1 {
                    let message = "message.parts: one of text, raw, url and data is required";
                    return Err(MethodError::bad_params(message));
                }
            }
            Self::V03 => {
                let is_complete = match part.kind.as_str() {
                    "text" => text,
                    "data" => data,
                    "file" => part.file.bytes.is_some() != part.file.uri.is_some(),
                    _ => false,
                };
                if !is_complete {
                    let message = format!("message.parts: not a part of kind {:?}", part.kind);
                    return Err(MethodError::bad_params(message));
                }
            }
        }
        Ok(())
    }

    pub(super) fn waits(self, configuration: &SendConfiguration) -> bool {
        match self {
            Self::V1 => !configuration.return_immediately.unwrap_or(false),
            Self::V03 => configuration.blocking.unwrap_or(true),
        }
    }

    pub(super) fn text(self, text: &str) -> RawJson {
        match self {
            Self::V1 => raw(&json!({"text": text})),
            Self::V03 => raw(&json!({"kind": "text", "text": text})),
        }
    }

    pub(super) fn data(self, data: &Value) -> RawJson {
        match self {
            Self::V1 => raw(&json!({"data": data})),
            Self::V03 => raw(&json!({"kind": "data", "data": data})),
        }
    }

    pub(super) fn file(self, name: &str, media_type: &str, bytes: &[u8]) -> RawJson {
        let bytes = BASE64.encode(bytes);
        match self {
            Self::V1 => raw(&json!({"raw": bytes, "filename": name, "mediaType": media_type})),
            Self::V03 => {
                let file = json!({"bytes": bytes, "mimeType": media_type, "name": name});
                raw(&json!({"kind": "file", "file": file}))
            }
        }
    }

    /// `task_id` is `None` for a direct answer.
    pub(super) fn agent_message(
        self,
        context_id: &str,
        task_id: Option<&str>,
        parts: Vec<RawJson>,
    ) -> DemoMessage {
        DemoMessage {
            message_id: new_id(),
            context_id: Some(context_id.to_owned()),
            task_id: task_id.map(str::to_owned),
            role: self.agent_role().to_owned(),
            parts,
            metadata: None,
            reference_task_ids: Vec::new(),
            kind: self.kind("message"),
        }
    }

    pub(super) fn new_task(self, context_id: String) -> DemoTask {
        DemoTask {
            id: new_id(),
            context_id,
            status: DemoStatus { timestamp: None, ..self.status(TaskState::Submitted, None) },
            artifacts: Vec::new(),
            history: Vec::new(),
            kind: self.kind("task"),
        }
    }

    pub(super) fn status(self, state: TaskState, message: Option<DemoMessage>) -> DemoStatus {
        let now = OffsetDateTime::now_utc().truncate_to_microsecond().format(&Rfc3339).unwrap_or_default();
        let timestamp = Some(match self {
            Self::V1 => now,
            Self::V03 => now.replace('Z', "+00:00"),
        });
        DemoStatus { state_name: self.state_name(&state), state, message, timestamp }
    }

    fn state_name(self, state: &TaskState) -> String {
        match self {
            Self::V1 => format!("TASK_STATE_{state}").to_uppercase().replace('-', "_"),
            Self::V03 => state.to_string(),
        }
    }

    pub(super) fn status_update(self, task: &DemoTask) -> RawJson {
        let update = TaskUpdate {
            task_id: &task.id,
            context_id: &task.context_id,
            status: Some(&task.status),
            is_final: (self == Self::V03).then(|| ends_turn(&task.status.state)),
            kind: self.kind("status-update"),
            ..TaskUpdate::default()
        };
        self.wrap("statusUpdate", &update)
    }

    pub(super) fn artifact_update(
        self,
        task: &DemoTask,
        artifact: &DemoArtifact,
        chunk: ArtifactChunk,
    ) -> RawJson {
        let (append, last_chunk) = match chunk {
            ArtifactChunk::Whole => (None, None),
            ArtifactChunk::First => (Some(false), Some(false)),
            ArtifactChunk::Next => (Some(true), Some(false)),
            ArtifactChunk::Last => (Some(true), Some(true)),
            ArtifactChunk::Only => (Some(false), Some(true)),
        };
        let update = TaskUpdate {
            task_id: &task.id,
            context_id: &task.context_id,
            artifact: Some(artifact),
            // 1.0 leaves out what is false.
            append: append.filter(|&append| append || self == Self::V03),
            last_chunk: last_chunk.filter(|&last| last || self == Self::V03),
            kind: self.kind("artifact-update"),
            ..TaskUpdate::default()
        };
        self.wrap("artifactUpdate", &update)
    }

    /// An answer to a send, or an event of a stream: 1.0 names what it is, 0.3 says so in `kind`.
    pub(super) fn wrap(self, name: &str, value: &impl Serialize) -> RawJson {
        match self {
            Self::V1 => raw(&std::collections::BTreeMap::from([(name, value)])),
            Self::V03 => raw(value),
        }
    }

    /// The error for a message to a finished task, or a subscription to one.
    pub(super) fn finished(self, task: &DemoTask) -> MethodError {
        let code = match self {
            Self::V1 => -32004,
            // The public SDK of 0.3 answers this, not -32004.
            Self::V03 => -32602,
        };
        let message = format!("Task {} is in terminal state: {}", task.id, task.status.state_name);
        MethodError::new(code, "UNSUPPORTED_OPERATION", message)
    }

    pub(super) fn not_cancelable(self, task: &DemoTask) -> MethodError {
        let state = match self {
            Self::V1 => String::new(),
            Self::V03 => format!(" - current state: {}", task.status.state_name),
        };
        MethodError::new(-32002, "TASK_NOT_CANCELABLE", format!("Task cannot be canceled{state}"))
    }

    pub(super) fn response(self, id: Option<&Value>, outcome: Result<&RawValue, &MethodError>) -> String {
        let response = RpcResponse {
            result: outcome.ok(),
            error: outcome.err().map(|error| self.error(error)),
            id: match self {
                Self::V1 => id.or(Some(&Value::Null)),
                Self::V03 => id,
            },
            jsonrpc: "2.0",
        };
        raw(&response).get().to_owned()
    }

    fn error(self, error: &MethodError) -> Value {
        let MethodError { code, reason, message } = error;
        match (self, reason) {
            (Self::V1, Some(reason)) => {
                let info = json!({
                    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                    "reason": reason,
                    "domain": "a2a-protocol.org",
                    "metadata": {},
                });
                json!({"code": code, "message": message, "data": [info]})
            }
            (Self::V03, Some(PLANNED_ERROR)) => {
                json!({"code": code, "message": message, "data": {"planned": true}})
            }
            _ => json!({"code": code, "message": message}),
        }
    }

    /// The field `kind`, which only 0.3 has.
    fn kind(self, kind: &'static str) -> Option<&'static str> {
        (self == Self::V03).then_some(kind)
    }

    fn user_role(self) -> &'static str {
        match self {
            Self::V1 => "ROLE_USER",
            Self::V03 => "user",
        }
    }

    fn agent_role(self) -> &'static str {
        match self {
            Self::V1 => "ROLE_AGENT",
            Self::V03 => "agent",
        }
    }
}
