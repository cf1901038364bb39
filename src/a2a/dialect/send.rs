//! The parameters of a send: how each dialect writes an [`OutgoingMessage`].
//!
//! From v0.2 on all dialects share [`SendParams`], which has the fields of all of them; each sets those that it
//! knows. v0.1 has a layout of its own. Parts have one form up to v0.3 ([`V0Part`]) and another in v1.0 ([`V1Part`]).

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use uuid::{Builder, Uuid};

use super::OutgoingMessage;
use super::http_call::raw;
use crate::a2a::model::Part;

/// The names for the bytes and the URI of a file over JSON-RPC.
const FILE_KEYS: [&str; 2] = ["bytes", "uri"];

#[derive(Serialize)]
pub(super) struct SendParams<'a, P> {
    message: SentMessage<'a, P>,
    #[serde(skip_serializing_if = "SendConfiguration::is_empty")]
    configuration: SendConfiguration<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct SentMessage<'a, P> {
    /// Only in v0.2 and v0.3 over JSON-RPC.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    message_id: Uuid,
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parts: Option<Vec<P>>,
    /// The name of `parts` in v0.3 over REST.
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Vec<P>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    task_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    reference_task_ids: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<SentMetadata<'a>>,
}

impl<'a, P> SentMessage<'a, P> {
    /// A message without its parts, whose name differs.
    fn new(message: &OutgoingMessage<'a>, role: &'static str) -> Self {
        Self {
            kind: None,
            message_id: message.message_id,
            role,
            parts: None,
            content: None,
            task_id: message.task_id.map(Cow::Borrowed),
            context_id: message.context_id.map(Cow::Borrowed),
            reference_task_ids: message.reference_task_ids,
            metadata: SentMetadata::new(message, &[]),
        }
    }
}

#[derive(Serialize)]
struct SentMetadata<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    skill_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    caller: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    run_id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<&'a str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    reference_task_ids: &'a [String],
}

impl<'a> SentMetadata<'a> {
    /// `reference_task_ids` are for dialects whose messages have no field for them.
    fn new(message: &OutgoingMessage<'a>, reference_task_ids: &'a [String]) -> Option<Self> {
        let OutgoingMessage { skill_id, caller, run_id, session_id, .. } = *message;
        let is_empty =
            skill_id.is_none() && caller.is_none() && run_id.is_none() && reference_task_ids.is_empty();
        (!is_empty).then_some(Self { skill_id, caller, run_id, session_id, reference_task_ids })
    }
}

#[derive(Serialize, Default)]
#[serde(rename_all = "camelCase")]
struct SendConfiguration<'a> {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    accepted_output_modes: Vec<&'a str>,
    /// Up to v0.3, where an agent responds immediately by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    blocking: Option<bool>,
    /// In v1.0, where an agent waits by default.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    return_immediately: bool,
}

impl SendConfiguration<'_> {
    fn is_empty(&self) -> bool {
        self.accepted_output_modes.is_empty() && self.blocking.is_none() && !self.return_immediately
    }
}

/// v0.1: the client assigns the task's id, and parts have a `type`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct V01Params<'a> {
    id: String,
    // Some agents require one, so a call without a session gets one of its own.
    session_id: String,
    message: V01Message<'a>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    accepted_output_modes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<SentMetadata<'a>>,
}

#[derive(Serialize)]
struct V01Message<'a> {
    role: &'static str,
    parts: Vec<V0Part<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<SentMetadata<'a>>,
}

pub(super) fn v01<'a>(message: &OutgoingMessage<'a>) -> V01Params<'a> {
    let new_id = || Uuid::new_v4().to_string();
    let task_id = message.task_id.or(message.new_task_id);
    let part = |part| V0Part { type_name: Some(kind_of(part)), ..V0Part::new(part, FILE_KEYS) };
    V01Params {
        id: task_id.map_or_else(new_id, str::to_owned),
        session_id: message.context_id.map_or_else(new_id, str::to_owned),
        message: V01Message {
            role: "user",
            parts: message.parts.iter().map(part).collect(),
            metadata: SentMetadata::new(message, message.reference_task_ids),
        },
        accepted_output_modes: message.output_modes,
        metadata: SentMetadata::new(message, &[]),
    }
}

/// v0.2 and v0.3 over JSON-RPC: messages and parts have a `kind`.
pub(super) fn v03<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a, V0Part<'a>> {
    let part = |part| V0Part { kind: Some(kind_of(part)), ..V0Part::new(part, FILE_KEYS) };
    let mut accepted_output_modes = output_modes(message);
    if accepted_output_modes.is_empty() {
        // Required up to v0.2.5.
        accepted_output_modes.push("text/plain");
    }
    SendParams {
        message: SentMessage {
            kind: Some("message"),
            parts: Some(message.parts.iter().map(part).collect()),
            ..SentMessage::new(message, "user")
        },
        configuration: SendConfiguration {
            accepted_output_modes,
            blocking: Some(message.blocking),
            ..SendConfiguration::default()
        },
    }
}

/// v0.3 over JSON-RPC as Bindu has it: the client assigns the ids of task and context, as UUIDs. Its validation
/// requires a `text` in parts of every kind, and `bytes` in every file.
pub(super) fn v03_ids<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a, V0Part<'a>> {
    let mut params = v03(message);
    let sent = &mut params.message;
    let new_id = || Cow::Owned(Uuid::new_v4().to_string());
    let task_id = message.task_id.or(message.new_task_id);
    sent.task_id = Some(task_id.map_or_else(new_id, Cow::Borrowed));
    sent.context_id = Some(message.context_id.map_or_else(new_id, as_uuid));
    for part in sent.parts.iter_mut().flatten() {
        part.text.get_or_insert("");
        if let Some(file) = &mut part.file {
            file.entry("bytes").or_insert("");
        }
    }
    params
}

/// Returns the id if it is a UUID; otherwise derives one from it. The same text gives the same UUID in every process, so that a session
/// stays one conversation.
fn as_uuid(id: &str) -> Cow<'_, str> {
    if Uuid::try_parse(id).is_ok() {
        return Cow::Borrowed(id);
    }
    let digest: [u8; 32] = Sha256::digest(id).into();
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(digest).for_each(|(byte, digest)| *byte = digest);
    // With the version bits of a random UUID, which agents check for.
    Cow::Owned(Builder::from_random_bytes(bytes).into_uuid().to_string())
}

/// v0.3 over REST: the JSON of the protocol's protobuf messages, with data one level deeper than elsewhere.
pub(super) fn v03_rest<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a, V0Part<'a>> {
    let part = |part| {
        let part = V0Part::new(part, ["fileWithBytes", "fileWithUri"]);
        let nested = part.data.map(|data| Cow::Owned(raw(&BTreeMap::from([("data", data)]))));
        V0Part { data: nested, ..part }
    };
    SendParams {
        message: SentMessage {
            content: Some(message.parts.iter().map(part).collect()),
            reference_task_ids: &[],
            metadata: SentMetadata::new(message, message.reference_task_ids),
            ..SentMessage::new(message, "ROLE_USER")
        },
        configuration: SendConfiguration {
            accepted_output_modes: output_modes(message),
            blocking: Some(message.blocking),
            ..SendConfiguration::default()
        },
    }
}

pub(super) fn v1<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a, V1Part<'a>> {
    SendParams {
        message: SentMessage {
            parts: Some(message.parts.iter().map(V1Part::from).collect()),
            ..SentMessage::new(message, "ROLE_USER")
        },
        configuration: SendConfiguration {
            accepted_output_modes: output_modes(message),
            return_immediately: !message.blocking,
            ..SendConfiguration::default()
        },
    }
}

fn output_modes<'a>(message: &OutgoingMessage<'a>) -> Vec<&'a str> {
    message.output_modes.iter().map(String::as_str).collect()
}

fn kind_of(part: &Part) -> &'static str {
    match part {
        Part::Text(_) => "text",
        Part::File(_) => "file",
        Part::Data(_) => "data",
    }
}

/// A part up to v0.3.
#[derive(Serialize, Default)]
pub(super) struct V0Part<'a> {
    /// Only in v0.1.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    type_name: Option<&'static str>,
    /// Only in v0.2 and v0.3 over JSON-RPC.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<BTreeMap<&'static str, &'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Cow<'a, RawValue>>,
}

impl<'a> V0Part<'a> {
    /// `file_keys` are the names for the bytes and the URI of a file.
    fn new(part: &'a Part, file_keys: [&'static str; 2]) -> Self {
        match part {
            Part::Text(text) => Self { text: Some(text), ..Self::default() },
            Part::File(file) => {
                let ([bytes_key, uri_key], (bytes, uri)) = (file_keys, file.content.as_bytes_or_uri());
                let (name, media_type) = (file.name.as_deref(), file.media_type.as_deref());
                let fields = [("name", name), ("mimeType", media_type), (bytes_key, bytes), (uri_key, uri)];
                let fields = fields.into_iter().filter_map(|(key, value)| Some((key, value?)));
                Self { file: Some(fields.collect()), ..Self::default() }
            }
            Part::Data(data) => Self { data: Some(Cow::Borrowed(&**data)), ..Self::default() },
        }
    }
}

/// A part of v1.0, which is also the form in which the bridge publishes parts on NATS.
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

impl<'a> From<&'a Part> for V1Part<'a> {
    fn from(part: &'a Part) -> Self {
        match part {
            Part::Text(text) => Self { text: Some(text), ..Self::default() },
            Part::Data(data) => Self { data: Some(data), ..Self::default() },
            Part::File(file) => {
                let (filename, media_type) = (file.name.as_deref(), file.media_type.as_deref());
                let (raw, url) = file.content.as_bytes_or_uri();
                Self { raw, url, filename, media_type, ..Self::default() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::a2a::dialect::{A2aMethod, Dialect};
    use crate::a2a::model::{File, FileContent};
    use crate::a2a::retry::Retries;

    #[test]
    fn every_dialect_sends_the_caller_if_the_agent_is_to_know() {
        let message = OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: None,
            new_task_id: None,
            context_id: None,
            reference_task_ids: &[],
            parts: &[],
            skill_id: None,
            caller: Some("T1/alice"),
            run_id: None,
            session_id: None,
            output_modes: &[],
            blocking: true,
            retries: &Retries::new(&"agent".into()),
        };
        let dialects = [
            Dialect::V01,
            Dialect::V01Paths,
            Dialect::V02,
            Dialect::V03,
            Dialect::V03Ids,
            Dialect::V03Rest,
            Dialect::V1,
            Dialect::V1Rest,
        ];
        for dialect in dialects {
            let metadata = |message: &OutgoingMessage<'_>| -> Value {
                let body = dialect.message_call(A2aMethod::Send, message).body(uuid::Uuid::nil()).unwrap();
                let body: Value = serde_json::from_slice(&body).unwrap();
                let params = body.get("params").unwrap_or(&body);
                params["message"]["metadata"].clone()
            };
            assert_eq!(metadata(&message), json!({"caller": "T1/alice"}), "{dialect:?}");
            assert_eq!(metadata(&OutgoingMessage { caller: None, ..message }), Value::Null, "{dialect:?}");
        }
    }

    #[test]
    fn v03_ids_sets_every_field_that_bindu_requires() {
        let file = |content| Part::File(File { name: None, media_type: None, content });
        let parts = [
            Part::Text("hi".to_owned()),
            file(FileContent::Base64("aGk=".to_owned())),
            file(FileContent::Uri("https://example.org/a".to_owned())),
        ];
        let message = OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: None,
            new_task_id: Some("40cf7ab0-0a57-40fe-9b84-83973c0b87da"),
            context_id: Some("s-1"),
            reference_task_ids: &["99596057-153c-4e19-a56b-6fe09489dc61".to_owned()],
            parts: &parts,
            skill_id: None,
            caller: None,
            run_id: None,
            session_id: None,
            output_modes: &[],
            blocking: true,
            retries: &Retries::new(&"agent".into()),
        };
        let body = |call: crate::a2a::dialect::HttpCall| -> Value {
            serde_json::from_slice(&call.body(uuid::Uuid::nil()).unwrap()).unwrap()
        };
        let sent = body(Dialect::V03Ids.message_call(A2aMethod::Send, &message));
        assert!(Uuid::try_parse(sent["id"].as_str().unwrap()).is_ok());
        let params = &sent["params"];
        assert_eq!(params["message"]["taskId"], "40cf7ab0-0a57-40fe-9b84-83973c0b87da");
        assert_eq!(params["message"]["contextId"], *as_uuid("s-1"));
        assert_eq!(params["message"]["referenceTaskIds"], json!(message.reference_task_ids));
        assert_eq!(params["configuration"]["acceptedOutputModes"], json!(["text/plain"]));
        assert_eq!(
            params["message"]["parts"][1],
            json!({"kind": "file", "text": "", "file": {"bytes": "aGk="}})
        );
        let uri = json!({"kind": "file", "text": "", "file": {"bytes": "", "uri": "https://example.org/a"}});
        assert_eq!(params["message"]["parts"][2], uri);
        assert_eq!(body(Dialect::V03Ids.task_call(A2aMethod::Cancel, "t"))["params"], json!({"taskId": "t"}));
        // The agent repeats such parts in its response.
        let read = Dialect::V03Ids.read_send_result(
            br#"{"result": {"role": "agent", "parts": [{"kind": "file", "text": "", "file": {"bytes": "aGk="}}]}}"#,
        );
        let Ok(crate::a2a::model::SendResult::Message(read)) = read else { panic!("not a message") };
        assert!(matches!(read.parts[..], [Part::File(_)]), "{read:?}");
    }

    #[test]
    fn the_same_id_always_gives_the_same_uuid() {
        let own = "99596057-153c-4e19-a56b-6fe09489dc61";
        assert_eq!(as_uuid(own), own);
        assert_eq!(as_uuid("s-1"), as_uuid("s-1"));
        assert_ne!(as_uuid("s-1"), as_uuid("s-2"));
        assert_eq!(Uuid::try_parse(&as_uuid("s-1")).unwrap().get_version_num(), 4);
        assert!(Uuid::try_parse(&as_uuid("")).is_ok());
    }
}
