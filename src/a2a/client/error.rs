//! Why a request to an agent failed, and what the failure proves.

use serde_json::value::RawValue;

use crate::a2a::auth::TokenError;
use crate::a2a::error_text;
use crate::a2a::http::HttpError;
use crate::a2a::retry::Retry;
use crate::files::FileError;
use crate::memory::{self, SizeError};
use crate::secrets::Secrets;

/// The JSON-RPC codes that the bridge acts upon.
pub(crate) mod code {
    pub(crate) const TASK_NOT_FOUND: i64 = -32001;
    pub(crate) const TASK_NOT_CANCELABLE: i64 = -32002;
    pub(crate) const UNSUPPORTED_OPERATION: i64 = -32004;
    pub(crate) const VERSION_NOT_SUPPORTED: i64 = -32009;
    /// Some agents also use it for operations that they do not support.
    pub(crate) const INTERNAL: i64 = -32603;
    pub(crate) const INVALID_PARAMS: i64 = -32602;
    /// Some agents also use it for invalid parameters, and a2a-sdk (Python) 0.2 for an unknown method.
    pub(crate) const INVALID_REQUEST: i64 = -32600;
    /// Some agents also use it for invalid parameters.
    pub(crate) const PARSE_ERROR: i64 = -32700;
    pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
    /// JSON-RPC leaves its meaning to the server.
    pub(crate) const SERVER_ERROR: i64 = -32000;
}

/// Who wrote an error, judged by its form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorOrigin {
    /// An HTTP server, gateway or framework: the body is not an error object of A2A or JSON-RPC.
    Server,
    /// The agent; the error is the whole response.
    Agent,
    /// The agent; the error is an event of a stream, so the agent had accepted the request.
    Stream,
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no connection, so the agent has not seen the request.
    #[error("cannot connect to the agent")]
    Unreachable(#[source] HttpError),
    /// The connection broke after the request may have reached the agent.
    #[error("the connection to the agent broke before its response was complete")]
    Broken(#[source] HttpError),
    #[error("the agent responded {}", describe_refusal(.http_status, .code, .message))]
    Refused {
        /// The HTTP status, unless it is a success.
        http_status: Option<u16>,
        code: Option<i64>,
        /// The agent's message, or the beginning of the body.
        message: String,
        data: Option<Box<RawValue>>,
        origin: ErrorOrigin,
    },
    #[error("the agent's response is not A2A: {reason}; it begins with: {snippet}")]
    NotA2a { reason: String, snippet: String },
    #[error(
        "the agent's response is compressed (`Content-Encoding: {encoding}`), although the bridge requests `identity`; \
         turn compression off in the agent or its proxy"
    )]
    Compressed { encoding: String },
    /// The HTTP client closes the connection.
    #[error("the headers of the agent's response are too large; the limit is 64 KiB and 100 lines")]
    LargeHeaders,
    /// There is no access token, so the bridge has not sent the request.
    #[error("cannot get an access token for the agent")]
    Token(#[source] TokenError),
    /// The size is counted as allocated.
    #[error("the agent's response is larger than {limit} bytes (`max_response_size`)")]
    TooLarge { limit: u64 },
    #[error(
        "the bridge has no memory left for the agent's response (`limits.memory`); the agent may have done the work"
    )]
    OutOfMemory,
    /// A file of the request could not be read, so the agent has not received a complete request.
    #[error(transparent)]
    NotSent(FileError),
    /// A file of the response could not be stored.
    #[error("cannot store a file of the agent's response: {0}")]
    NotStored(FileError),
    /// The response is for another request, so the bridge has closed the connection and shows nothing of it.
    #[error("the agent's response has the id of another request")]
    WrongId,
}

impl From<memory::OutOfMemory> for ClientError {
    fn from(memory::OutOfMemory: memory::OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

fn describe_refusal(status: &Option<u16>, code: &Option<i64>, message: &str) -> String {
    let what = match (status, code) {
        (_, Some(code)) => format!("with error {code}"),
        (Some(status), None) => format!("with HTTP status {status}"),
        (None, None) => "with an error".to_owned(),
    };
    if message.is_empty() { what } else { format!("{what}: {message}") }
}

impl ClientError {
    pub fn redact(&mut self, secrets: &Secrets) {
        match self {
            Self::Refused { message, .. } => secrets.redact(message),
            Self::NotA2a { reason, snippet } => {
                secrets.redact(reason);
                secrets.redact(snippet);
            }
            Self::Compressed { encoding } => secrets.redact(encoding),
            Self::Unreachable(_)
            | Self::Broken(_)
            | Self::LargeHeaders
            | Self::Token(_)
            | Self::TooLarge { .. }
            | Self::OutOfMemory
            | Self::NotSent(_)
            | Self::NotStored(_)
            | Self::WrongId => {}
        }
    }

    pub fn may_have_reached_agent(&self) -> bool {
        !matches!(self, Self::Unreachable(_) | Self::Token(_) | Self::NotSent(_))
    }

    pub fn is_task_not_found(&self) -> bool {
        let Self::Refused { http_status, code, message, .. } = self else {
            return false;
        };
        match code {
            Some(code::TASK_NOT_FOUND) => true,
            Some(code::SERVER_ERROR | code::INVALID_PARAMS | code::INTERNAL) => {
                error_text::says_task_not_found(message)
            }
            None => *http_status == Some(404) && error_text::says_task_not_found(message),
            Some(_) => false,
        }
    }

    /// Whether the agent cannot cancel this task, or any task.
    pub fn is_not_cancelable(&self) -> bool {
        let Self::Refused { code, http_status, message, .. } = self else {
            return false;
        };
        match code {
            Some(code::TASK_NOT_CANCELABLE | code::METHOD_NOT_FOUND | code::UNSUPPORTED_OPERATION) => true,
            // Matching the message text is safe here: at worst the bridge abandons a cancellation; nothing runs
            // twice.
            Some(code::INTERNAL) => error_text::says_unsupported(message),
            Some(code::TASK_NOT_FOUND) => error_text::says_not_cancelable(message),
            Some(_) => false,
            None => matches!(http_status, Some(405 | 409 | 501)),
        }
    }

    /// Whether the agent seems not to speak the dialect of the request. This alone does not prove that the agent has
    /// not run it: [`Retry`] has the proofs.
    pub fn is_wrong_dialect(&self) -> bool {
        self.is_wrong_address() || Retry::in_another_dialect(self, None).is_some()
    }

    /// Whether the HTTP server seems to have no agent at this address. A server may send these after it has done the
    /// work; 302 and 303 mean exactly that, so they are not in the list.
    pub fn is_wrong_address(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                http_status: Some(301 | 307 | 308 | 404 | 405),
                code: None,
                origin: ErrorOrigin::Server,
                ..
            }
        )
    }

    /// Whether the response does not fit, and why.
    pub(crate) fn size_error(&self) -> Option<SizeError> {
        match self {
            Self::TooLarge { .. } => Some(SizeError::TooLarge),
            Self::OutOfMemory => Some(SizeError::OutOfMemory),
            _ => None,
        }
    }

    pub fn rpc_code(&self) -> Option<i64> {
        match self {
            Self::Refused { code, .. } => *code,
            _ => None,
        }
    }
}
