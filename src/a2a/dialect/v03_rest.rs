//! A2A v0.3 over REST. Its JSON is that of the protocol's protobuf messages: `content` for parts,
//! `fileWithBytes`, and data one level deeper than elsewhere.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::value::RawValue;

use super::v01::MessageMetadata;
use super::{HttpCall, OutgoingMessage};
use crate::a2a::model::{Answer, Artifact, Event, FileContent, Message, Part, Task, normalize_base64};

const JSON: &str = "application/json";

/// A call to `/v1/message:send` or `/v1/message:stream`.
pub(super) fn message(verb: &str, message: &OutgoingMessage<'_>) -> HttpCall {
    let path = vec!["v1".to_owned(), format!("message:{verb}")];
    HttpCall::post(path, JSON, &send_params(message))
}

/// A call to `/v1/tasks/{id}`, with a verb behind the id or without.
pub(super) fn task(task_id: &str, verb: Option<&str>) -> HttpCall {
    let path = vec!["v1".to_owned(), "tasks".to_owned(), task_segment(task_id, verb)];
    match verb {
        Some("cancel") => HttpCall::post(path, JSON, &serde_json::Map::new()),
        _ => HttpCall::get(path, JSON),
    }
}

/// `{id}` or `{id}:{verb}`.
pub(super) fn task_segment(task_id: &str, verb: Option<&str>) -> String {
    match verb {
        Some(verb) => format!("{task_id}:{verb}"),
        None => task_id.to_owned(),
    }
}

#[derive(Serialize)]
struct SendParams<'a> {
    message: WireMessage<'a>,
    configuration: Configuration<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WireMessage<'a> {
    message_id: uuid::Uuid,
    role: &'static str,
    content: Vec<WirePart<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<MessageMetadata<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Configuration<'a> {
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    accepted_output_modes: &'a [String],
    blocking: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum WirePart<'a> {
    Text(&'a str),
    File(WireFile<'a>),
    Data { data: &'a RawValue },
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WireFile<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    file_with_bytes: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file_with_uri: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mime_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
}

fn send_params<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a> {
    SendParams {
        message: WireMessage {
            message_id: message.message_id,
            role: "ROLE_USER",
            content: message.parts.iter().map(part).collect(),
            task_id: message.task_id,
            context_id: message.context_id,
            metadata: MessageMetadata::of(message),
        },
        configuration: Configuration {
            accepted_output_modes: message.output_modes,
            blocking: message.blocking,
        },
    }
}

fn part(part: &Part) -> WirePart<'_> {
    match part {
        Part::Text(text) => WirePart::Text(text),
        Part::Data(data) => WirePart::Data { data },
        Part::File(file) => {
            let (file_with_bytes, file_with_uri) = match &file.content {
                FileContent::Base64(bytes) => (Some(bytes.as_str()), None),
                FileContent::Uri(uri) => (None, Some(uri.as_str())),
            };
            WirePart::File(WireFile {
                file_with_bytes,
                file_with_uri,
                mime_type: file.media_type.as_deref(),
                name: file.name.as_deref(),
            })
        }
    }
}

/// Takes an answer out of this wire's wrappings.
pub(super) fn unwrap_answer(answer: &mut Answer) {
    match answer {
        Answer::Task(task) => unwrap_task(task),
        Answer::Message(message) => unwrap_message(message),
    }
}

/// Takes an event out of this wire's wrappings.
pub(super) fn unwrap_event(event: &mut Event) {
    match event {
        Event::Task(task) => unwrap_task(task),
        Event::Message(message) => unwrap_message(message),
        Event::Status(update) => update.message.iter_mut().for_each(unwrap_message),
        Event::Artifact(update) => unwrap_artifact(&mut update.artifact),
    }
}

/// Takes a task out of this wire's wrappings.
pub(super) fn unwrap_task(task: &mut Task) {
    task.status_message.iter_mut().for_each(unwrap_message);
    task.history.iter_mut().for_each(unwrap_message);
    task.artifacts.iter_mut().for_each(unwrap_artifact);
}

fn unwrap_message(message: &mut Message) {
    message.parts.iter_mut().for_each(unwrap_part);
}

fn unwrap_artifact(artifact: &mut Artifact) {
    artifact.parts.iter_mut().for_each(unwrap_part);
}

fn unwrap_part(part: &mut Part) {
    match part {
        Part::Text(_) => {}
        Part::Data(data) => {
            if let Some(inner) = inner_data(data) {
                *data = inner;
            }
        }
        Part::File(file) => {
            if let FileContent::Base64(bytes) = &mut file.content
                && let Some(inner) = encoded_twice(bytes, file.media_type.as_deref())
            {
                *bytes = inner;
            }
        }
    }
}

/// What is in `{"data": …}` when nothing else is beside it.
fn inner_data(data: &RawValue) -> Option<Box<RawValue>> {
    let fields: std::collections::BTreeMap<String, &RawValue> = serde_json::from_str(data.get()).ok()?;
    match fields.len() {
        1 => fields.get("data").map(|inner| (*inner).to_owned()),
        _ => None,
    }
}

/// The inner base64 of a file whose bytes were encoded twice, as the Python SDK does. Only when it
/// is certain: a file of a binary type is never made of base64 letters alone, and one of JSON is JSON.
fn encoded_twice(text: &str, media_type: Option<&str>) -> Option<String> {
    let media_type = media_type?.split(';').next()?.trim().to_ascii_lowercase();
    let is_json = media_type == "application/json" || media_type.ends_with("+json");
    if !is_json && !is_binary(&media_type) {
        return None;
    }
    let (text, _) = normalize_base64(text)?;
    let outer = STANDARD.decode(text).ok()?;
    let inner = std::str::from_utf8(&outer).ok()?;
    let content = STANDARD.decode(inner).ok().filter(|content| !content.is_empty())?;
    let json = |bytes: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok();
    if is_json && (json(&outer) || !json(&content)) {
        return None;
    }
    Some(inner.to_owned())
}

fn is_binary(media_type: &str) -> bool {
    let (group, kind) = media_type.split_once('/').unwrap_or_default();
    match group {
        // SVG and its like are text.
        "image" | "audio" | "video" | "font" => !kind.ends_with("+xml"),
        "application" => matches!(
            kind,
            "pdf" | "zip" | "gzip" | "x-gzip" | "x-tar" | "wasm" | "x-7z-compressed" | "vnd.rar"
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_encoded_bytes_are_seen_only_when_it_is_certain() {
        let twice = |bytes: &[u8]| STANDARD.encode(STANDARD.encode(bytes));
        let png = b"\x89PNG\x00\x01";
        assert_eq!(encoded_twice(&twice(png), Some("image/png")).as_deref(), Some("iVBORwAB"));
        assert_eq!(encoded_twice("iVBORwAB", Some("image/png")), None, "encoded once");
        assert_eq!(encoded_twice(&twice(b"hello"), Some("text/plain")), None, "base64 is text, too");
        assert_eq!(encoded_twice(&twice(png), None), None);
        let json = br#"{"a":1}"#;
        assert!(encoded_twice(&twice(json), Some("application/json")).is_some());
        assert_eq!(encoded_twice(&STANDARD.encode(json), Some("application/json")), None);
        assert_eq!(encoded_twice(&STANDARD.encode("true"), Some("application/json")), None);
        assert_eq!(encoded_twice("", Some("image/png")), None);
    }

    #[test]
    fn data_is_unwrapped_once_and_only_alone() {
        let unwrapped = |json: &str| {
            let raw = RawValue::from_string(json.to_owned()).unwrap();
            inner_data(&raw).map(|inner| inner.get().to_owned())
        };
        assert_eq!(unwrapped(r#"{"data": {"data": 1.0}}"#).as_deref(), Some(r#"{"data": 1.0}"#));
        assert_eq!(unwrapped(r#"{"data": 1, "n": 2}"#), None);
        assert_eq!(unwrapped("[1]"), None);
    }
}
