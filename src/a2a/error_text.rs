//! Errors that agents report only in words.
//!
//! A2A has a code for each of these errors, and the bridge goes by the code where there is one. The functions here are
//! for agents that give none, or a misleading one. The recordings in `tests/fixtures/wire` have most of these cases:
//!
//! | SDK | error | what the agent sends |
//! | --- | --- | --- |
//! | a2a-sdk (Python) 0.3 over REST | unknown task | HTTP 404 with `{"message": "Task not found"}` and no code |
//! | python-a2a 0.5 | unknown task | `-32000`, "Task not found: …" |
//! | Bindu 2026.36 | the task cannot be canceled | `-32001` (unknown task), "Task cannot be canceled in …" |
//! | Bindu 2026.36 | ids are missing or are not UUIDs | `-32700` (parse error), the validator's list of fields as data |
//! | agents on a2a-sdk that raise an exception in `cancel` | no cancellation | `-32603`, "cancel not supported" |
//! | agents with their own validation | the context id is rejected | `-32602` or `-32600`, the field in message or data |
//!
//! The comparison ignores case.

/// Maximum bytes of a message that are searched for the names of fields.
const MAX_SEARCHED: usize = 16 << 10;

pub(super) fn says_task_not_found(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    message.contains("task") && contains_any(&message, &["not found", "unknown", "not exist", "no such"])
}

pub(super) fn says_unsupported(message: &str) -> bool {
    contains_any(&message.to_ascii_lowercase(), &["not supported", "unsupported", "not implemented"])
}

pub(super) fn says_not_cancelable(message: &str) -> bool {
    contains_any(&message.to_ascii_lowercase(), &["cannot be cancel", "not cancelable"])
}

/// Whether a validation error demands the id of the task or the context.
pub(super) fn demands_ids(text: &str) -> bool {
    let text = searchable(text);
    // Some validators list the fields of all methods when the method is wrong.
    let is_about_method = text.contains("\"method\"");
    contains_any(&text, &["required", "missing", "uuid"])
        && !is_about_method
        && (names_id(&text, "task") || names_id(&text, "context"))
}

/// Whether a validation error names the id of the conversation.
pub(super) fn names_context_id(text: &str) -> bool {
    let text = searchable(text);
    names_id(&text, "context") || names_id(&text, "session")
}

fn searchable(text: &str) -> String {
    crate::text::shorten(text, MAX_SEARCHED).to_ascii_lowercase()
}

fn contains_any(text: &str, phrases: &[&str]) -> bool {
    phrases.iter().any(|phrase| text.contains(phrase))
}

/// Whether a message names the id of `what` as a field: `contextid`, `context_id`, `context id`.
fn names_id(text: &str, what: &str) -> bool {
    text.match_indices(what).any(|(at, _)| {
        let rest = text.get(at + what.len()..).unwrap_or_default();
        let rest = rest.strip_prefix(['_', '-', ' ']).unwrap_or(rest);
        let after = rest.strip_prefix("id");
        after.is_some_and(|after| !after.starts_with(|c: char| c.is_alphanumeric()))
    })
}
