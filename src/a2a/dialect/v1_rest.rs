//! A2A v1.0 over REST (HTTP+JSON): the messages of v1.0 at addresses of their own.

use super::v03_rest::task_segment;
use super::{HttpCall, OutgoingMessage, v1};

const A2A_JSON: &str = "application/a2a+json";

/// A call to `/message:send` or `/message:stream`.
pub(super) fn message(verb: &str, message: &OutgoingMessage<'_>) -> HttpCall {
    HttpCall::post(vec![format!("message:{verb}")], A2A_JSON, &v1::send_params(message))
}

/// A call to `/tasks/{id}`, with a verb behind the id or without.
pub(super) fn task(task_id: &str, verb: Option<&str>) -> HttpCall {
    let path = vec!["tasks".to_owned(), task_segment(task_id, verb)];
    match verb {
        Some("cancel") => HttpCall::post(path, A2A_JSON, &serde_json::Map::new()),
        // The specification has GET in one place and POST in another for `:subscribe`; GET is what works.
        _ => HttpCall::get(path, A2A_JSON),
    }
}
