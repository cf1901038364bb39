//! When the bridge may send a message to an agent a second time.
//!
//! An agent must not run a message twice, so the bridge repeats a message only after a response which proves that
//! nothing ran. Each [`Retry`] is one such proof; this file has all of them. No proof: free text in an internal error, a
//! bare 404 or 5xx, a connection that broke after the request was written. (The connection pool replaces a kept
//! connection that turns out to be closed before the first byte is written.)
//!
//! | the message is repeated | after | by |
//! | --- | --- | --- |
//! | in another dialect of A2A | [`Retry::in_another_dialect`] | `Client::send` |
//! | without streaming | [`Retry::without_streaming`] | `CallRun::send` |
//! | without its context id | [`Retry::without_context`] | `CallRun::deliver` |
//! | with a new token, or as plain JSON | [`Retry::after_status`] | `Client::exchange` |

use std::sync::{Arc, Mutex, PoisonError};

use reqwest::StatusCode;
use serde::{Deserialize, Serialize};

use super::client::{ClientError, ErrorOrigin, code};
use super::dialect::Dialect;
use super::error_text;

/// Why a message was repeated. Replies show these names, so they are a public interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// The context id makes the parameters invalid; repeated without it.
    ContextRefused,
    /// The agent does not stream (`UnsupportedOperationError`); repeated without streaming.
    StreamingUnsupported,
    /// The agent does not have the method; repeated with another one.
    MethodNotFound,
    /// The agent does not support this version of A2A; repeated in another one.
    VersionNotSupported,
    /// The access token was no longer valid (401); repeated with a new one.
    TokenRenewed,
    /// The agent does not accept the media type (415); repeated as `application/json`.
    MediaType,
    /// The agent requires ids from the client; repeated with them.
    MissingIds,
}

impl Retry {
    /// The agent does not speak the dialect of the message, which is `dialect` if that is known. Only an error code of
    /// the agent proves it: a bare HTTP status may come from any server on the way.
    pub fn in_another_dialect(error: &ClientError, dialect: Option<Dialect>) -> Option<Self> {
        match error {
            // The agent had accepted the message, so the code may come from a service that the agent called.
            ClientError::Refused { origin: ErrorOrigin::Stream, .. } => None,
            ClientError::Refused { code: Some(code::METHOD_NOT_FOUND), .. } => Some(Self::MethodNotFound),
            ClientError::Refused { code: Some(code::VERSION_NOT_SUPPORTED), .. } => {
                Some(Self::VersionNotSupported)
            }
            // Only these have a variant in which the client assigns the ids of task and context. The request failed
            // the agent's validation, so nothing ran.
            _ if matches!(dialect, None | Some(Dialect::V02 | Dialect::V03)) => {
                let codes = [code::PARSE_ERROR, code::INVALID_PARAMS, code::INVALID_REQUEST];
                is_invalid(error, &codes, error_text::demands_ids).then_some(Self::MissingIds)
            }
            _ => None,
        }
    }

    /// The agent does not stream: A2A prescribes `UnsupportedOperationError` for that case.
    pub fn without_streaming(error: &ClientError, dialect: Dialect) -> Option<Self> {
        let is_refused = matches!(
            error,
            ClientError::Refused { code: Some(code::UNSUPPORTED_OPERATION), origin: ErrorOrigin::Agent, .. }
        );
        let refused = is_refused.then_some(Self::StreamingUnsupported);
        refused.or_else(|| Self::in_another_dialect(error, Some(dialect)))
    }

    /// The agent rejects the context id of a new task: the parameters are invalid, and the error names the field.
    pub fn without_context(error: &ClientError) -> Option<Self> {
        let codes = [code::INVALID_PARAMS, code::INVALID_REQUEST];
        is_invalid(error, &codes, error_text::names_context_id).then_some(Self::ContextRefused)
    }

    /// RFC 9110 defines that a request with one of these statuses was not applied.
    pub fn after_status(status: StatusCode) -> Option<Self> {
        match status {
            StatusCode::UNAUTHORIZED => Some(Self::TokenRenewed),
            StatusCode::UNSUPPORTED_MEDIA_TYPE => Some(Self::MediaType),
            _ => None,
        }
    }
}

/// The retries of one message, in order. Allocates nothing until there is one.
///
/// There are at most eleven: the bridge sends a message as a stream, without streaming and in one other dialect, each
/// of these once more after a status, and all of that once more without its context id, which makes twelve requests.
#[derive(Debug)]
pub struct Retries {
    agent: Arc<str>,
    list: Mutex<Vec<Retry>>,
}

impl Retries {
    pub fn new(agent: &Arc<str>) -> Self {
        Self { agent: Arc::clone(agent), list: Mutex::default() }
    }

    /// Call this before the message is sent again.
    pub fn record(&self, retry: Retry) {
        let reason = serde_json::json!(retry);
        tracing::debug!(agent = %self.agent, reason = reason.as_str(), "retrying the message; the agent did not process it");
        self.list.lock().unwrap_or_else(PoisonError::into_inner).push(retry);
    }

    pub fn list(&self) -> Vec<Retry> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Whether the agent reports invalid parameters with one of `codes`, and the message or the data says why.
fn is_invalid(error: &ClientError, codes: &[i64], says_why: fn(&str) -> bool) -> bool {
    match error {
        ClientError::Refused { code: Some(code), origin: ErrorOrigin::Agent, message, data, .. } => {
            codes.contains(code)
                && (says_why(message) || data.as_ref().is_some_and(|data| says_why(data.get())))
        }
        _ => false,
    }
}
