//! An agent's question that is too large for a message: without the id to answer it, it would be lost.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::json;

/// The reply object while the agent waits for the caller.
#[derive(Serialize, Deserialize)]
struct Question<'a> {
    success: bool,
    status: &'a str,
    #[serde(borrow)]
    message: Cow<'a, str>,
    #[serde(borrow)]
    files: Vec<&'a RawValue>,
    #[serde(borrow)]
    data: FollowUp<'a>,
    #[serde(borrow, default, skip_serializing_if = "Vec::is_empty")]
    data_parts: Vec<&'a RawValue>,
    #[serde(borrow)]
    artifacts: Vec<&'a RawValue>,
    #[serde(borrow)]
    task: &'a RawValue,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FollowUp<'a> {
    follow_up_id: &'a str,
    expires_at: &'a str,
}

/// The question in at most `room` bytes, if this is one: what came along is left out, the largest first,
/// and its text is cut only then. The text ends with a note about it.
pub(super) fn cut(reply: &[u8], room: usize) -> Option<Bytes> {
    let mut question: Question<'_> = serde_json::from_slice(reply).ok()?;
    if !matches!(question.status, "INPUT_REQUIRED" | "AUTH_REQUIRED") {
        return None;
    }
    let message = std::mem::take(&mut question.message);
    let mut left_out = Vec::new();
    loop {
        let lists = [
            ("files", &mut question.files),
            ("data parts", &mut question.data_parts),
            ("artifacts", &mut question.artifacts),
        ];
        let size = |list: &[&RawValue]| list.iter().map(|one| one.get().len()).sum::<usize>();
        let largest =
            lists.into_iter().max_by_key(|(_, list)| size(list)).filter(|(_, list)| !list.is_empty());
        let is_last = largest.is_none();
        match largest {
            Some((name, list)) => {
                list.clear();
                left_out.push(name);
            }
            None => left_out.push("the rest of the text"),
        }
        let note = format!(" … (too large for a message; left out: {})", left_out.join(", "));
        question.message = Cow::Owned(note);
        let text_room = room.checked_sub(json::to_bytes(&question).len())?;
        let text = json::head_written(&message, text_room);
        if text.len() == message.len() || is_last {
            question.message.to_mut().insert_str(0, text);
            return Some(json::to_bytes(&question));
        }
    }
}
