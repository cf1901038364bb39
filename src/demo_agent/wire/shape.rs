//! The shapes that both versions share. A field that only one of them writes is optional.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ErrorObject, Raw};

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SendIn {
    pub(super) message: MessageIn,
    pub(super) configuration: Option<ConfigurationIn>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ConfigurationIn {
    pub(super) accepted_output_modes: Vec<String>,
    /// 0.3
    pub(super) blocking: Option<bool>,
    /// 1.0
    pub(super) return_immediately: Option<bool>,
    pub(super) history_length: Option<usize>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MessageIn {
    pub(super) message_id: String,
    pub(super) role: String,
    pub(super) parts: Vec<Raw>,
    pub(super) context_id: Option<String>,
    pub(super) task_id: Option<String>,
    #[serde(default)]
    pub(super) reference_task_ids: Vec<String>,
    pub(super) metadata: Option<Value>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TaskOut<'a> {
    pub(super) id: &'a str,
    pub(super) context_id: &'a str,
    pub(super) status: StatusOut<'a>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) artifacts: Vec<ArtifactOut<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) history: Vec<MessageOut<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
}

#[derive(Serialize)]
pub(super) struct StatusOut<'a> {
    pub(super) state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) message: Option<MessageOut<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) timestamp: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct MessageOut<'a> {
    pub(super) message_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) context_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) task_id: Option<&'a str>,
    pub(super) role: &'static str,
    pub(super) parts: Vec<Raw>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) metadata: Option<&'a Value>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub(super) reference_task_ids: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ArtifactOut<'a> {
    pub(super) artifact_id: &'a str,
    pub(super) name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) description: Option<&'a str>,
    pub(super) parts: Vec<Raw>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct UpdateOut<'a> {
    pub(super) task_id: &'a str,
    pub(super) context_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) status: Option<StatusOut<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) artifact: Option<ArtifactOut<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) append: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) last_chunk: Option<bool>,
    #[serde(rename = "final", skip_serializing_if = "Option::is_none")]
    pub(super) is_final: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) kind: Option<&'static str>,
}

#[derive(Serialize)]
pub(super) struct Envelope<'a, T: Serialize> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) result: Option<T>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<ErrorObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) id: Option<&'a Value>,
    pub(super) jsonrpc: &'static str,
}
