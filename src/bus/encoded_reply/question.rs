//! An agent's question that is too large for a message: without the id to answer it, it would be lost.

use bytes::Bytes;

use crate::json;
use crate::reply::outcome::{Content, Outcome};

/// The question in at most `room` bytes: what came along is left out, the largest first, and its text is
/// cut only then. The text ends with a note about it.
pub(super) fn cut(question: &Outcome, room: usize) -> Option<Bytes> {
    let mut cut = question.clone();
    let message = std::mem::take(&mut cut.content.message);
    let mut left_out = Vec::new();
    loop {
        let is_last = match leave_out_largest(&mut cut.content) {
            Some(name) => {
                left_out.push(name);
                false
            }
            None => {
                left_out.push("the rest of the text");
                true
            }
        };
        cut.content.message = format!(" … (too large for a message; left out: {})", left_out.join(", "));
        let text_room = room.checked_sub(cut.to_json().len());
        if is_last && text_room.is_none() {
            return None;
        }
        let text = json::head_written(&message, text_room.unwrap_or_default());
        if is_last || (text_room.is_some() && text.len() == message.len()) {
            cut.content.message.insert_str(0, text);
            return Some(cut.to_json());
        }
    }
}

/// Empties the list that takes the most bytes.
fn leave_out_largest(content: &mut Content) -> Option<&'static str> {
    let Content { files, data, artifacts, .. } = content;
    let sizes = [
        ("files", files.iter().map(|file| json::to_bytes(file).len()).sum::<usize>()),
        ("data parts", data.iter().map(|data| data.get().len()).sum()),
        ("artifacts", artifacts.iter().map(|artifact| json::to_bytes(artifact).len()).sum()),
    ];
    let (name, _) = sizes.into_iter().filter(|(_, size)| *size > 0).max_by_key(|(_, size)| *size)?;
    match name {
        "files" => files.clear(),
        "data parts" => data.clear(),
        _ => artifacts.clear(),
    }
    Some(name)
}
