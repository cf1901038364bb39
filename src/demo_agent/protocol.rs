//! The JSON of A2A 1.0 and 0.3: the shapes that both share, and every difference between them.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::a2a::model::TaskState;

/// JSON that is already written. Parts stay in this form, so an echo repeats numbers exactly as they came.
pub(super) type RawJson = Arc<RawValue>;

pub(super) fn raw(value: &impl Serialize) -> RawJson {
    to_raw_value(value).expect("all maps have text keys").into()
}

pub(super) fn some(value: impl Serialize) -> Option<RawJson> {
    Some(raw(&value))
}

/// An object of the fields that are present.
pub(super) fn object<const N: usize>(fields: [(&str, Option<RawJson>); N]) -> RawJson {
    raw(&fields.into_iter().filter_map(|(name, value)| Some((name, value?))).collect::<BTreeMap<_, _>>())
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DemoTask {
    #[serde(skip)]
    pub(super) version: ProtocolVersion,
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
    /// Keeps only the last `length` messages.
    pub(super) fn with_history(mut self, length: Option<usize>) -> Self {
        let surplus = self.history.len().saturating_sub(length.unwrap_or(usize::MAX));
        self.history.drain(..surplus);
        self
    }

    pub(super) fn refuse_if_final(&self) -> Result<(), MethodError> {
        if !self.status.state.is_final() {
            return Ok(());
        }
        let code = match self.version {
            ProtocolVersion::V1 => -32004,
            // The public SDK of 0.3 answers this, not -32004.
            ProtocolVersion::V03 => -32602,
        };
        let message = format!("Task {} is in terminal state: {}", self.id, self.status.state_name);
        Err(MethodError::new(code, "UNSUPPORTED_OPERATION", message))
    }

    pub(super) fn status_update(&self) -> RawJson {
        let fields = [
            ("taskId", some(&self.id)),
            ("contextId", some(&self.context_id)),
            ("status", some(&self.status)),
            ("final", self.version.only_03(ends_turn(&self.status.state))),
            ("kind", self.version.only_03("status-update")),
        ];
        self.version.wrap("statusUpdate", &object(fields))
    }

    pub(super) fn artifact_update(&self, artifact: &DemoArtifact, chunk: ArtifactChunk) -> RawJson {
        let (append, last_chunk) = match chunk {
            ArtifactChunk::Whole => (None, None),
            ArtifactChunk::First => (Some(false), Some(false)),
            ArtifactChunk::Next => (Some(true), Some(false)),
            ArtifactChunk::Last => (Some(true), Some(true)),
            ArtifactChunk::Only => (Some(false), Some(true)),
        };
        // 1.0 leaves out what is false.
        let written = |flag: Option<bool>| {
            flag.filter(|&flag| flag || self.version == ProtocolVersion::V03).map(|flag| raw(&flag))
        };
        let fields = [
            ("taskId", some(&self.id)),
            ("contextId", some(&self.context_id)),
            ("artifact", some(artifact)),
            ("append", written(append)),
            ("lastChunk", written(last_chunk)),
            ("kind", self.version.only_03("artifact-update")),
        ];
        self.version.wrap("artifactUpdate", &object(fields))
    }
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct DemoStatus {
    #[serde(skip)]
    pub(super) state: TaskState,
    #[serde(rename = "state")]
    pub(super) state_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) message: Option<DemoMessage>,
    /// Missing while a task is only submitted, as with the public SDKs.
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
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
        let parts = self.parts.iter().filter_map(|part| serde_json::from_str::<Value>(part.get()).ok());
        let texts = parts.filter_map(|part| part.get("text")?.as_str().map(str::to_owned));
        texts.collect::<Vec<_>>().join("\n")
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
    /// Both the first and the last chunk.
    Only,
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

/// A JSON-RPC error.
#[derive(Debug)]
pub(super) struct MethodError {
    code: i64,
    /// The `reason` of the `ErrorInfo` that 1.0 adds; the errors of JSON-RPC itself have none.
    reason: &'static str,
    message: String,
}

impl MethodError {
    pub(super) fn new(code: i64, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
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
        if !self.roles().contains(&message.role.as_str()) {
            return Err(MethodError::bad_params(format!("message.role: {:?}", message.role)));
        }
        for (n, part) in message.parts.iter().enumerate() {
            if !self.is_part(&read_params(part.get())?) {
                return Err(MethodError::bad_params(format!("message.parts[{n}]: not a part")));
            }
        }
        message.context_id.take_if(|id| id.is_empty());
        message.task_id.take_if(|id| id.is_empty());
        message.kind = self.kind("message");
        Ok(params)
    }

    /// In 1.0 a part has exactly one content field, in 0.3 `kind` names it.
    fn is_part(self, part: &Value) -> bool {
        let has = |path: &&str| part.pointer(path).is_some_and(|value| !value.is_null());
        match (self, part.get("kind").and_then(Value::as_str)) {
            (Self::V1, _) => ["/text", "/raw", "/url", "/data"].iter().filter(|path| has(path)).count() == 1,
            (Self::V03, Some("text")) => has(&"/text"),
            (Self::V03, Some("data")) => has(&"/data"),
            (Self::V03, Some("file")) => has(&"/file/bytes") != has(&"/file/uri"),
            (Self::V03, _) => false,
        }
    }

    pub(super) fn waits(self, configuration: &SendConfiguration) -> bool {
        match self {
            Self::V1 => !configuration.return_immediately.unwrap_or(false),
            Self::V03 => configuration.blocking.unwrap_or(true),
        }
    }

    pub(super) fn text(self, text: &str) -> RawJson {
        object([("text", some(text)), ("kind", self.only_03("text"))])
    }

    pub(super) fn data(self, data: &Value) -> RawJson {
        object([("data", some(data)), ("kind", self.only_03("data"))])
    }

    pub(super) fn file(self, name: &str, media_type: &str, bytes: &[u8]) -> RawJson {
        let bytes = BASE64.encode(bytes);
        raw(&match self {
            Self::V1 => json!({"raw": bytes, "filename": name, "mediaType": media_type}),
            Self::V03 => {
                json!({"kind": "file", "file": {"bytes": bytes, "mimeType": media_type, "name": name}})
            }
        })
    }

    pub(super) fn agent_message(self, context_id: &str, parts: Vec<RawJson>) -> DemoMessage {
        let [_, agent_role] = self.roles();
        DemoMessage {
            message_id: new_id(),
            context_id: Some(context_id.to_owned()),
            role: agent_role.to_owned(),
            parts,
            kind: self.kind("message"),
            ..DemoMessage::default()
        }
    }

    pub(super) fn new_task(self, context_id: String) -> DemoTask {
        DemoTask {
            version: self,
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
        let (state_name, timestamp) = match self {
            Self::V1 => (format!("TASK_STATE_{state}").to_uppercase().replace('-', "_"), now),
            Self::V03 => (state.to_string(), now.replace('Z', "+00:00")),
        };
        DemoStatus { state, state_name, message, timestamp: Some(timestamp) }
    }

    /// An answer to a send, or an event of a stream: 1.0 names what it is, 0.3 says so in `kind`.
    pub(super) fn wrap(self, name: &str, value: &impl Serialize) -> RawJson {
        match self {
            Self::V1 => raw(&BTreeMap::from([(name, value)])),
            Self::V03 => raw(value),
        }
    }

    pub(super) fn response(self, id: Option<&Value>, outcome: Result<RawJson, MethodError>) -> String {
        let fields = [
            ("result", outcome.as_ref().ok().cloned()),
            ("error", outcome.err().map(|error| self.error(&error))),
            ("id", id.map(raw).or_else(|| self.only_1(Value::Null))),
            ("jsonrpc", some("2.0")),
        ];
        object(fields).get().to_owned()
    }

    fn error(self, error: &MethodError) -> RawJson {
        let info = json!({
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": error.reason,
            "domain": "a2a-protocol.org",
            "metadata": {},
        });
        let data = self.only_1([info]).filter(|_| !error.reason.is_empty());
        object([("code", some(error.code)), ("message", some(&error.message)), ("data", data)])
    }

    pub(super) fn only_1(self, value: impl Serialize) -> Option<RawJson> {
        (self == Self::V1).then(|| raw(&value))
    }

    pub(super) fn only_03(self, value: impl Serialize) -> Option<RawJson> {
        (self == Self::V03).then(|| raw(&value))
    }

    /// The field `kind`, which only 0.3 has.
    fn kind(self, kind: &'static str) -> Option<&'static str> {
        (self == Self::V03).then_some(kind)
    }

    /// The roles of the user and the agent.
    fn roles(self) -> [&'static str; 2] {
        match self {
            Self::V1 => ["ROLE_USER", "ROLE_AGENT"],
            Self::V03 => ["user", "agent"],
        }
    }
}
