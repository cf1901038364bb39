//! What is particular to A2A 0.3.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::model::{Content, Part, State};
use super::super::rpc::{Fault, Method};
use super::{ErrorObject, Raw, raw, read};

pub(super) fn method(name: &str) -> Option<Method> {
    Some(match name {
        "message/send" => Method::Send,
        "message/stream" => Method::Stream,
        "tasks/get" => Method::Get,
        "tasks/cancel" => Method::Cancel,
        "tasks/resubscribe" => Method::Subscribe,
        "agent/getAuthenticatedExtendedCard" => Method::ExtendedCard,
        "tasks/pushNotificationConfig/set"
        | "tasks/pushNotificationConfig/get"
        | "tasks/pushNotificationConfig/list"
        | "tasks/pushNotificationConfig/delete" => Method::Push,
        _ => return None,
    })
}

pub(super) fn state(state: State) -> &'static str {
    match state {
        State::Submitted => "submitted",
        State::Working => "working",
        State::InputRequired => "input-required",
        State::AuthRequired => "auth-required",
        State::Completed => "completed",
        State::Failed => "failed",
        State::Canceled => "canceled",
        State::Rejected => "rejected",
        State::Unheard => "pondering",
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WirePart {
    kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<WireFile>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Raw>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Value>,
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct WireFile {
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uri: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mime_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

pub(super) fn write_part(part: &Part) -> Raw {
    let Part { content, name, media_type: mime_type, metadata } = part.clone();
    let common = |kind: &str| WirePart { kind: kind.into(), text: None, file: None, data: None, metadata };
    let file = WireFile { name, mime_type, ..WireFile::default() };
    raw(&match content {
        Content::Text(text) => WirePart { text: Some(text), ..common("text") },
        Content::Data(data) => WirePart { data: Some(data), ..common("data") },
        Content::Bytes(bytes) => {
            WirePart { file: Some(WireFile { bytes: Some(bytes), ..file }), ..common("file") }
        }
        Content::Url(uri) => WirePart { file: Some(WireFile { uri: Some(uri), ..file }), ..common("file") },
    })
}

pub(super) fn read_part(json: &str) -> Result<Part, Fault> {
    let part: WirePart = read(json)?;
    let file = part.file.unwrap_or_default();
    let content = match (part.kind.as_str(), part.text, part.data, file.bytes, file.uri) {
        ("text", Some(text), ..) => Content::Text(text),
        ("data", _, Some(data), ..) => Content::Data(data),
        ("file", _, _, Some(bytes), None) => Content::Bytes(bytes),
        ("file", _, _, None, Some(uri)) => Content::Url(uri),
        (kind, ..) => {
            return Err(Fault::BadParams(format!("message.parts: not a part of kind {kind:?}")));
        }
    };
    Ok(Part { content, name: file.name, media_type: file.mime_type, metadata: part.metadata })
}

pub(super) fn error(fault: &Fault) -> ErrorObject {
    let (code, message) = match fault {
        Fault::Parse(error) => (-32700, error.clone()),
        Fault::NoSuchMethod => (-32601, "Method not found".into()),
        Fault::BadRequest(why) => (-32600, (*why).into()),
        Fault::BadParams(why) => (-32602, why.clone()),
        Fault::NoSuchTask => (-32001, "Task not found".into()),
        Fault::NotCancelable(at) => {
            (-32002, format!("Task cannot be canceled - current state: {}", state(*at)))
        }
        Fault::NoPush => (-32003, "Push Notification is not supported".into()),
        // Not -32004: this is what the public SDK of this version answers.
        Fault::Finished { id, state: at } => {
            (-32602, format!("Task {id} is in terminal state: {}", state(*at)))
        }
        Fault::Unsupported(what) => (-32004, (*what).into()),
        Fault::Version(asked) => (-32004, format!("no version {asked}")),
        Fault::Planned(code) => {
            return ErrorObject {
                code: *code,
                message: "planned error".into(),
                data: Some(json!({"planned": true})),
            };
        }
    };
    ErrorObject { code, message, data: None }
}
