//! A2A v1.0: parts by their field, roles as `ROLE_*`, a send that blocks unless told otherwise.

use serde::Serialize;
use serde_json::value::RawValue;

use super::OutgoingMessage;
use crate::a2a::model::{FileContent, Part};

#[derive(Serialize)]
pub(super) struct SendParams<'a> {
    message: Message<'a>,
    #[serde(skip_serializing_if = "Configuration::is_empty")]
    configuration: Configuration<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Message<'a> {
    message_id: uuid::Uuid,
    role: &'static str,
    parts: Vec<V1Part<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_id: Option<&'a str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    reference_task_ids: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Metadata<'a>>,
}

#[derive(Serialize)]
pub(super) struct Metadata<'a> {
    pub(super) skill_id: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Configuration<'a> {
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    accepted_output_modes: &'a [String],
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    return_immediately: bool,
}

impl Configuration<'_> {
    fn is_empty(&self) -> bool {
        self.accepted_output_modes.is_empty() && !self.return_immediately
    }
}

/// A part, exactly as v1.0 has it.
#[derive(Debug, Serialize, Default)]
#[serde(rename_all = "camelCase")]
pub(crate) struct V1Part<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<&'a str>,
    /// A file's bytes, in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub raw: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filename: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub media_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<&'a RawValue>,
}

pub(super) fn send_params<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a> {
    SendParams {
        message: Message {
            message_id: message.message_id,
            role: "ROLE_USER",
            parts: message.parts.iter().map(V1Part::from).collect(),
            task_id: message.task_id,
            context_id: message.context_id,
            reference_task_ids: message.reference_task_ids,
            metadata: message.skill_id.map(|skill_id| Metadata { skill_id }),
        },
        configuration: Configuration {
            accepted_output_modes: message.output_modes,
            return_immediately: !message.blocking,
        },
    }
}

impl<'a> From<&'a Part> for V1Part<'a> {
    fn from(part: &'a Part) -> Self {
        match part {
            Part::Text(text) => Self { text: Some(text), ..Self::default() },
            Part::Data(data) => Self { data: Some(data), ..Self::default() },
            Part::File(file) => {
                let (raw, url) = match &file.content {
                    FileContent::Base64(bytes) => (Some(bytes.as_str()), None),
                    FileContent::Uri(uri) => (None, Some(uri.as_str())),
                };
                Self {
                    raw,
                    url,
                    filename: file.name.as_deref(),
                    media_type: file.media_type.as_deref(),
                    ..Self::default()
                }
            }
        }
    }
}
