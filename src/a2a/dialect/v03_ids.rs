//! A2A v0.3 over JSON-RPC for agents that want every id from the client, as UUIDs (Bindu): a message has
//! its task and conversation from the start, task calls have `taskId`, and each part has a `text`.

use std::borrow::Cow;

use serde::Serialize;
use sha2::{Digest as _, Sha256};
use uuid::{Builder, Uuid};

use super::Outgoing;
use super::v03::{self, SendParams, WireFile, WirePart};

/// The parameters of a call about one task.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TaskParams<'a> {
    pub(super) task_id: &'a str,
}

pub(super) fn send_params<'a>(message: &Outgoing<'a>) -> SendParams<'a> {
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
    use super::*;

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
