//! Whether a message may go to an agent a second time, and why it did.
//!
//! An agent must not run a message twice, so a message goes out again only after an answer which
//! proves that nothing ran. Each [`Retry`] names one such proof, and all proofs are accepted here. What proves
//! nothing: free text in an internal error, a bare 404 or 5xx, a connection that broke after the request was
//! written. (A kept connection that turns out to be closed before the first byte is written is simply replaced.)
//!
//! | the message is sent again | after | by |
//! | --- | --- | --- |
//! | in another dialect of A2A | [`Retry::on_another_wire`] | `Client::send` |
//! | without streaming | [`Retry::without_streaming`] | `CallRun::send` |
//! | without its conversation id | [`Retry::without_context`] | `CallRun::deliver` |
//! | with a new token, or as plain JSON | [`Retry::after_status`] | `Client::exchange` |

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use reqwest::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::client::{ClientError, Origin, code};
use super::dialect::Dialect;

/// Most bytes of an error's message and data that are searched for the names of fields.
const SEARCHED: usize = 16 << 10;

/// What an agent's answer proved. Names are public interface: replies show them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// The parameters are invalid because of the conversation id; sent again without it.
    ContextRefused,
    /// The agent does not stream (`UnsupportedOperationError`); sent again without streaming.
    StreamingUnsupported,
    /// The agent has no such method; sent again with another one.
    MethodNotFound,
    /// The agent does not speak this version of A2A; sent again in another one.
    VersionNotSupported,
    /// The access token was no longer valid (401); sent again with a new one.
    TokenRenewed,
    /// The media type is not accepted (415); sent again as `application/json`.
    MediaType,
    /// The agent wants the client to make all ids; sent again with them.
    MissingIds,
}

impl Retry {
    /// The agent does not speak the wire of the message. `dialect` is what the message was sent in, if that is
    /// known. Only the agent's own error codes prove it: a bare HTTP status may come from anywhere.
    pub fn on_another_wire(error: &ClientError, dialect: Option<Dialect>) -> Option<Self> {
        match error {
            // The agent had accepted the message, so the code may be that of something it called itself.
            ClientError::Refused { origin: Origin::Stream, .. } => None,
            ClientError::Refused { code: Some(code::METHOD_NOT_FOUND), .. } => Some(Self::MethodNotFound),
            ClientError::Refused { code: Some(code::VERSION_NOT_SUPPORTED), .. } => {
                Some(Self::VersionNotSupported)
            }
            // Only these have a form in which the client makes all ids.
            _ if matches!(dialect, None | Some(Dialect::V02 | Dialect::V03)) => {
                wants_ids(error).then_some(Self::MissingIds)
            }
            _ => None,
        }
    }

    /// The agent does not stream. `UnsupportedOperationError` is what A2A prescribes for a stream call to an
    /// agent without streaming: the operation was not performed.
    pub fn without_streaming(error: &ClientError, dialect: Dialect) -> Option<Self> {
        let is_refused = matches!(
            error,
            ClientError::Refused { code: Some(code::UNSUPPORTED_OPERATION), origin: Origin::Agent, .. }
        );
        let refused = is_refused.then_some(Self::StreamingUnsupported);
        refused.or_else(|| Self::on_another_wire(error, Some(dialect)))
    }

    /// The agent refuses the conversation id that came with a new task: its parameters are invalid, and the
    /// error names the field.
    pub fn without_context(error: &ClientError) -> Option<Self> {
        let is_refused = is_invalid(error, &[code::INVALID_PARAMS, code::INVALID_REQUEST])
            && any_text(error, |text| names_id(text, "context") || names_id(text, "session"));
        is_refused.then_some(Self::ContextRefused)
    }

    /// A status which by its definition (RFC 9110) says that the request was not applied.
    pub fn after_status(status: StatusCode) -> Option<Self> {
        match status {
            StatusCode::UNAUTHORIZED => Some(Self::TokenRenewed),
            StatusCode::UNSUPPORTED_MEDIA_TYPE => Some(Self::MediaType),
            _ => None,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::ContextRefused => "context_refused",
            Self::StreamingUnsupported => "streaming_unsupported",
            Self::MethodNotFound => "method_not_found",
            Self::VersionNotSupported => "version_not_supported",
            Self::TokenRenewed => "token_renewed",
            Self::MediaType => "media_type",
            Self::MissingIds => "missing_ids",
        }
    }
}

/// The retries of one message to an agent, in order. Allocates nothing until there is one.
///
/// There are eleven at most. A message is tried as a stream, without streaming and in one other dialect, each of
/// these once more after a status, and all of it once more without its conversation id: twelve requests.
#[derive(Debug)]
pub struct Retries {
    agent: Arc<str>,
    list: Mutex<Vec<Retry>>,
}

impl Retries {
    pub fn new(agent: &Arc<str>) -> Self {
        Self { agent: Arc::clone(agent), list: Mutex::default() }
    }

    /// Records that the message is about to go out again.
    pub fn record(&self, retry: Retry) {
        let (agent, reason) = (&self.agent, retry.name());
        tracing::info!(%agent, reason, "sending the message again: the agent did not run it");
        self.lock().push(retry);
    }

    /// All so far, one for each time the message went out again.
    pub fn list(&self) -> Vec<Retry> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Retry>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the agent wants the client to make the ids of task and conversation, as UUIDs. The request failed
/// its validation, so nothing ran.
fn wants_ids(error: &ClientError) -> bool {
    is_invalid(error, &[code::PARSE_ERROR, code::INVALID_PARAMS, code::INVALID_REQUEST])
        && any_text(error, |text| {
            let is_demand = ["required", "missing", "uuid"].iter().any(|word| text.contains(word));
            // Some validators list the fields of all methods when the method is what is wrong.
            let is_of_method = text.contains("\"method\"");
            is_demand && !is_of_method && (names_id(text, "task") || names_id(text, "context"))
        })
}

fn is_invalid(error: &ClientError, codes: &[i64]) -> bool {
    matches!(error, ClientError::Refused { code: Some(code), origin: Origin::Agent, .. } if codes.contains(code))
}

/// Whether message or data satisfy `test`, in lower case.
fn any_text(error: &ClientError, test: impl Fn(&str) -> bool) -> bool {
    let ClientError::Refused { message, data, .. } = error else {
        return false;
    };
    let texts = [Some(message.as_str()), data.as_deref().map(RawValue::get)];
    texts.into_iter().flatten().any(|text| test(&crate::text::shorten(text, SEARCHED).to_ascii_lowercase()))
}

/// Whether `text`, in lower case, names the id of `what` as a field: `contextid`, `context_id`, `context id`.
fn names_id(text: &str, what: &str) -> bool {
    text.match_indices(what).any(|(at, _)| {
        let rest = text.get(at + what.len()..).unwrap_or_default();
        let rest = rest.strip_prefix(['_', '-', ' ']).unwrap_or(rest);
        let after = rest.strip_prefix("id");
        after.is_some_and(|after| !after.starts_with(|c: char| c.is_alphanumeric()))
    })
}
