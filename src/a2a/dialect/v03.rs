//! A2A v0.2 and v0.3 over JSON-RPC: everything carries its `kind`, blocking is asked for.

use std::borrow::Cow;

use serde::Serialize;
use serde_json::value::RawValue;

use super::{OutgoingMessage, v1::Metadata};
use crate::a2a::model::{File, FileContent, Part};

#[derive(Serialize)]
pub(super) struct SendParams<'a> {
    pub(super) message: Message<'a>,
    configuration: Configuration<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Message<'a> {
    kind: &'static str,
    message_id: uuid::Uuid,
    role: &'static str,
    pub(super) parts: Vec<WirePart<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) task_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) context_id: Option<Cow<'a, str>>,
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
pub(super) enum WirePart<'a> {
    Text {
        text: &'a str,
    },
    File {
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<&'static str>,
        file: WireFile<'a>,
    },
    Data {
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<&'static str>,
        data: &'a RawValue,
    },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WireFile<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mime_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uri: Option<&'a str>,
}

pub(super) fn send_params<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a> {
    let modes = message.output_modes;
    SendParams {
        message: Message {
            kind: "message",
            message_id: message.message_id,
            role: "user",
            parts: message.parts.iter().map(part).collect(),
            task_id: message.task_id.map(Cow::Borrowed),
            context_id: message.context_id.map(Cow::Borrowed),
            reference_task_ids: message.reference_task_ids,
            metadata: message.skill_id.map(|skill_id| Metadata { skill_id }),
        },
        configuration: Configuration {
            accepted_output_modes: if modes.is_empty() {
                vec!["text/plain"]
            } else {
                modes.iter().map(String::as_str).collect()
            },
            blocking: message.blocking,
        },
    }
}

fn part(part: &Part) -> WirePart<'_> {
    match part {
        Part::Text(text) => WirePart::Text { text },
        Part::Data(data) => WirePart::Data { text: None, data },
        Part::File(file) => WirePart::File { text: None, file: file.into() },
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
