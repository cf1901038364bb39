//! A2A v0.1 over JSON-RPC: the client makes the task's id, and parts have a `type`.

use serde::Serialize;
use serde_json::value::RawValue;

use super::{Outgoing, v1::Metadata, v03::WireFile};
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

#[derive(Serialize)]
struct MessageMetadata<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    skill_id: Option<&'a str>,
    // v0.1 has no field for them.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    reference_task_ids: &'a [String],
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum WirePart<'a> {
    Text { text: &'a str },
    File { file: WireFile<'a> },
    Data { data: &'a RawValue },
}

pub(super) fn send_params<'a>(message: &Outgoing<'a>) -> SendParams<'a> {
    let new_id = || uuid::Uuid::new_v4().to_string();
    let task_id = message.task_id.or(message.new_task_id);
    let references = message.reference_task_ids;
    SendParams {
        id: task_id.map_or_else(new_id, str::to_owned),
        session_id: message.context_id.map_or_else(new_id, str::to_owned),
        message: Message {
            role: "user",
            parts: message.parts.iter().map(part).collect(),
            metadata: (message.skill_id.is_some() || !references.is_empty())
                .then_some(MessageMetadata { skill_id: message.skill_id, reference_task_ids: references }),
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
