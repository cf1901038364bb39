//! A2A v0.3 over JSON-RPC for agents that want every id from the client, as UUIDs (Bindu): a message has
//! its task and conversation from the start, task calls have `taskId`, and each part has a `text`.

use std::borrow::Cow;

use serde::Serialize;
use sha2::{Digest as _, Sha256};
use uuid::{Builder, Uuid};

use super::OutgoingMessage;
use super::v03::{self, SendParams, WireFile, WirePart};

/// The parameters of a call about one task.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TaskParams<'a> {
    pub(super) task_id: &'a str,
}

pub(super) fn send_params<'a>(message: &OutgoingMessage<'a>) -> SendParams<'a> {
    let mut params = v03::send_params(message);
    let new_id = || Cow::Owned(Uuid::new_v4().to_string());
    let wire = &mut params.message;
    let task_id = message.task_id.or(message.new_task_id);
    wire.task_id = Some(task_id.map_or_else(new_id, Cow::Borrowed));
    wire.context_id = Some(message.context_id.map_or_else(new_id, as_uuid));
    wire.parts.iter_mut().for_each(complete);
    params
}

/// The id itself if it is a UUID, otherwise one derived from it: the same text gives the same UUID in
/// every process, so a session stays one conversation.
fn as_uuid(id: &str) -> Cow<'_, str> {
    if Uuid::try_parse(id).is_ok() {
        return Cow::Borrowed(id);
    }
    let digest: [u8; 32] = Sha256::digest(id).into();
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(digest).for_each(|(byte, digest)| *byte = digest);
    // With the version bits of a random UUID, the kind that agents check for.
    Cow::Owned(Builder::from_random_bytes(bytes).into_uuid().to_string())
}

/// These agents require the fields of a text, and of a file's bytes, in parts of every kind.
fn complete(part: &mut WirePart<'_>) {
    match part {
        WirePart::Text { .. } => {}
        WirePart::File { text, file: WireFile { bytes, .. } } => {
            *text = Some("");
            bytes.get_or_insert("");
        }
        WirePart::Data { text, .. } => *text = Some(""),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::a2a::dialect::Dialect;
    use crate::a2a::model::{File, FileContent, Part};
    use crate::a2a::retry::Retries;

    #[test]
    fn a_call_has_every_field_that_these_agents_require() {
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
            output_modes: &[],
            blocking: true,
            retries: &Retries::new(&"agent".into()),
        };
        let body = |call: crate::a2a::dialect::HttpCall| -> Value {
            serde_json::from_slice(&call.body().unwrap()).unwrap()
        };
        let sent = body(Dialect::V03Ids.send(&message));
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
        assert_eq!(body(Dialect::V03Ids.cancel("t"))["params"], json!({"taskId": "t"}));
        // The agent repeats such parts, and they are what they were.
        let read = Dialect::V03Ids.read_answer(
            br#"{"result": {"role": "agent", "parts": [{"kind": "file", "text": "", "file": {"bytes": "aGk="}}]}}"#,
        );
        let Ok(crate::a2a::model::Answer::Message(read)) = read else { panic!("no message") };
        assert!(matches!(read.parts[..], [Part::File(_)]), "{read:?}");
    }

    #[test]
    fn an_id_that_is_no_uuid_always_gives_the_same_one() {
        let own = "99596057-153c-4e19-a56b-6fe09489dc61";
        assert_eq!(as_uuid(own), own);
        assert_eq!(as_uuid("s-1"), as_uuid("s-1"));
        assert_ne!(as_uuid("s-1"), as_uuid("s-2"));
        assert_eq!(Uuid::try_parse(&as_uuid("s-1")).unwrap().get_version_num(), 4);
        assert!(Uuid::try_parse(&as_uuid("")).is_ok());
    }
}
