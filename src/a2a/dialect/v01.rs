//! A2A v0.1 over JSON-RPC: the client makes the task's id, and parts have a `type`.

use serde::Serialize;
use serde_json::value::RawValue;

use super::{OutgoingMessage, v1::Metadata, v03::WireFile};
use crate::a2a::model::Part;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SendParams<'a> {
    id: String,
    // Some agents need one, so a call without a conversation gets one of its own.
    session_id: String,
    message: Message<'a>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    accepted_output_modes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Metadata<'a>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    parts: Vec<WirePart<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<MessageMetadata<'a>>,
}

/// What a message says beside its content, on wires that have no other place for it.
#[derive(Serialize)]
pub(super) struct MessageMetadata<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    skill_id: Option<&'a str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    reference_task_ids: &'a [String],
}

impl<'a> MessageMetadata<'a> {
    pub(super) fn of(message: &OutgoingMessage<'a>) -> Option<Self> {
        let (skill_id, reference_task_ids) = (message.skill_id, message.reference_task_ids);
        (skill_id.is_some() || !reference_task_ids.is_empty())
            .then_some(Self { skill_id, reference_task_ids })
    }
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum WirePart<'a> {
    Text { text: &'a str },
    File { file: WireFile<'a> },
    Data { data: &'a RawValue },
}

pub(super) fn send_params<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a> {
    let new_id = || uuid::Uuid::new_v4().to_string();
    let task_id = message.task_id.or(message.new_task_id);
    SendParams {
        id: task_id.map_or_else(new_id, str::to_owned),
        session_id: message.context_id.map_or_else(new_id, str::to_owned),
        message: Message {
            role: "user",
            parts: message.parts.iter().map(part).collect(),
            metadata: MessageMetadata::of(message),
        },
        accepted_output_modes: message.output_modes,
        metadata: message.skill_id.map(|skill_id| Metadata { skill_id }),
    }
}

fn part(part: &Part) -> WirePart<'_> {
    match part {
        Part::Text(text) => WirePart::Text { text },
        Part::Data(data) => WirePart::Data { data },
        Part::File(file) => WirePart::File { file: file.into() },
    }
}
