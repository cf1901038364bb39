//! A2A v0.2 and v0.3 over JSON-RPC: everything carries its `kind`, blocking is asked for.

use serde::Serialize;
use serde_json::value::RawValue;

use super::{Outgoing, Wait, v1::Metadata};
use crate::a2a::model::{File, FileContent, Part};

#[derive(Serialize)]
pub(super) struct SendParams<'a> {
    message: Message<'a>,
    configuration: Configuration<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Message<'a> {
    kind: &'static str,
    message_id: uuid::Uuid,
    role: &'static str,
    parts: Vec<WirePart<'a>>,
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
#[serde(rename_all = "camelCase")]
struct Configuration<'a> {
    // Required up to v0.2.5, so it is there even when nobody said what they take.
    accepted_output_modes: Vec<&'a str>,
    blocking: bool,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum WirePart<'a> {
    Text { text: &'a str },
    File { file: WireFile<'a> },
    Data { data: &'a RawValue },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireFile<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mime_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uri: Option<&'a str>,
}

pub(super) fn send_params<'a>(message: &Outgoing<'a>) -> SendParams<'a> {
    let modes = message.output_modes;
    SendParams {
        message: Message {
            kind: "message",
            message_id: uuid::Uuid::new_v4(),
            role: "user",
            parts: message.parts.iter().map(part).collect(),
            task_id: message.task_id,
            context_id: message.context_id,
            reference_task_ids: message.reference_task_ids,
            metadata: message.skill_id.map(|skill_id| Metadata { skill_id }),
        },
        configuration: Configuration {
            accepted_output_modes: if modes.is_empty() {
                vec!["text/plain"]
            } else {
                modes.iter().map(String::as_str).collect()
            },
            blocking: message.wait == Wait::UntilSettled,
        },
    }
}

fn part(part: &Part) -> WirePart<'_> {
    match part {
        Part::Text(text) => WirePart::Text { text },
        Part::Data(data) => WirePart::Data { data },
        Part::File(file) => WirePart::File { file: file.into() },
    }
}

impl<'a> From<&'a File> for WireFile<'a> {
    fn from(file: &'a File) -> Self {
        let (bytes, uri) = match &file.content {
            FileContent::Base64(bytes) => (Some(bytes.as_str()), None),
            FileContent::Uri(uri) => (None, Some(uri.as_str())),
        };
        Self { name: file.name.as_deref(), mime_type: file.media_type.as_deref(), bytes, uri }
    }
}
