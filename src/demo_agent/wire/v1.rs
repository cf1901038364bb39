//! What is particular to A2A 1.0.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::model::{Content, Part, State};
use super::super::rpc::{Fault, Method};
use super::{ErrorObject, Raw, raw, read};

pub(super) fn method(name: &str) -> Option<Method> {
    Some(match name {
        "SendMessage" => Method::Send,
        "SendStreamingMessage" => Method::Stream,
        "GetTask" => Method::Get,
        "CancelTask" => Method::Cancel,
        "SubscribeToTask" => Method::Subscribe,
        "ListTasks" => Method::List,
        "GetExtendedAgentCard" => Method::ExtendedCard,
        "CreateTaskPushNotificationConfig"
        | "GetTaskPushNotificationConfig"
        | "ListTaskPushNotificationConfigs"
        | "DeleteTaskPushNotificationConfig" => Method::Push,
        _ => return None,
    })
}

pub(super) fn state(state: State) -> &'static str {
    match state {
        State::Submitted => "TASK_STATE_SUBMITTED",
        State::Working => "TASK_STATE_WORKING",
        State::InputRequired => "TASK_STATE_INPUT_REQUIRED",
        State::AuthRequired => "TASK_STATE_AUTH_REQUIRED",
        State::Completed => "TASK_STATE_COMPLETED",
        State::Failed => "TASK_STATE_FAILED",
        State::Canceled => "TASK_STATE_CANCELED",
        State::Rejected => "TASK_STATE_REJECTED",
        State::Unheard => "TASK_STATE_PONDERING",
    }
}

#[derive(Serialize, Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct WirePart {
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    raw: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Raw>,
    #[serde(skip_serializing_if = "Option::is_none")]
    filename: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Value>,
}

pub(super) fn write_part(part: &Part) -> Raw {
    let Part { content, name, media_type, metadata } = part.clone();
    let common = WirePart { filename: name, media_type, metadata, ..WirePart::default() };
    raw(&match content {
        Content::Text(text) => WirePart { text: Some(text), ..common },
        Content::Bytes(bytes) => WirePart { raw: Some(bytes), ..common },
        Content::Url(url) => WirePart { url: Some(url), ..common },
        Content::Data(data) => WirePart { data: Some(data), ..common },
    })
}

pub(super) fn read_part(json: &str) -> Result<Part, Fault> {
    let part: WirePart = read(json)?;
    let content = match (part.text, part.raw, part.url, part.data) {
        (Some(text), None, None, None) => Content::Text(text),
        (None, Some(bytes), None, None) => Content::Bytes(bytes),
        (None, None, Some(url), None) => Content::Url(url),
        (None, None, None, Some(data)) => Content::Data(data),
        _ => {
            return Err(Fault::BadParams("message.parts: one of text, raw, url and data is required".into()));
        }
    };
    Ok(Part { content, name: part.filename, media_type: part.media_type, metadata: part.metadata })
}

pub(super) fn error(fault: &Fault) -> ErrorObject {
    let (code, reason, message) = match fault {
        Fault::Parse(error) => (-32700, None, error.clone()),
        Fault::NoSuchMethod => (-32601, None, "Method not found".into()),
        Fault::BadRequest(why) => (-32600, Some("INVALID_REQUEST"), (*why).into()),
        Fault::BadParams(why) => (-32602, Some("INVALID_PARAMS"), why.clone()),
        Fault::NoSuchTask => (-32001, Some("TASK_NOT_FOUND"), "Task not found".into()),
        Fault::NotCancelable(_) => (-32002, Some("TASK_NOT_CANCELABLE"), "Task cannot be canceled".into()),
        Fault::NoPush => {
            let message = "Push notifications are not supported".into();
            (-32003, Some("PUSH_NOTIFICATION_NOT_SUPPORTED"), message)
        }
        Fault::Finished { id, state: at } => {
            let message = format!("Task {id} is in terminal state: {}", state(*at));
            (-32004, Some("UNSUPPORTED_OPERATION"), message)
        }
        Fault::Unsupported(what) => (-32004, Some("UNSUPPORTED_OPERATION"), (*what).into()),
        Fault::Version(asked) => {
            let message =
                format!("A2A version '{asked}' is not supported by this handler. Expected version '1.0'.");
            (-32009, Some("VERSION_NOT_SUPPORTED"), message)
        }
        Fault::Planned(code) => (*code, Some("PLANNED_ERROR"), "planned error".into()),
    };
    let info = |reason| {
        json!([{
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": reason,
            "domain": "a2a-protocol.org",
            "metadata": {},
        }])
    };
    ErrorObject { code, message, data: reason.map(info) }
}
