//! Why a call to an agent gave no result, and what that proves.

use serde_json::value::RawValue;

use crate::a2a::auth::TokenError;
use crate::a2a::http::HttpError;

/// JSON-RPC codes of A2A that the bridge acts upon.
pub mod code {
    /// The agent does not know the task.
    pub const TASK_NOT_FOUND: i64 = -32001;
    /// The task cannot be cancelled.
    pub const TASK_NOT_CANCELABLE: i64 = -32002;
    /// The agent does not do this.
    pub const UNSUPPORTED_OPERATION: i64 = -32004;
    /// The agent does not speak this version.
    pub const VERSION_NOT_SUPPORTED: i64 = -32009;
    /// The agent failed; some say with it that they do not do this.
    pub const INTERNAL: i64 = -32603;
    /// The agent has no such method.
    pub const METHOD_NOT_FOUND: i64 = -32601;
}

/// Why a call to an agent gave no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection: the agent has not seen the call.
    #[error("cannot connect to the agent")]
    Unreachable(#[source] HttpError),
    /// The connection broke after the call may have reached the agent.
    #[error("the connection to the agent broke before it answered")]
    Broken(#[source] HttpError),
    /// The agent answered with an error.
    #[error("the agent answered {}", refusal(.http_status, .code, .message))]
    Refused {
        /// The HTTP status when it is not a success.
        http_status: Option<u16>,
        /// The JSON-RPC code when there is one.
        code: Option<i64>,
        /// The agent's words, or the beginning of its body.
        message: String,
        /// The data of the JSON-RPC error.
        data: Option<Box<RawValue>>,
    },
    /// The agent answered with something else than A2A.
    #[error("the agent answered with something that is not A2A: {reason}; it begins with: {snippet}")]
    NotA2a {
        /// What is wrong with it.
        reason: String,
        /// How it begins.
        snippet: String,
    },
    /// The agent's answer is compressed, which it was not asked for.
    #[error(
        "the agent's answer is compressed (`Content-Encoding: {encoding}`), which the bridge does not read \
         and does not ask for"
    )]
    Encoded {
        /// The agent's name for it.
        encoding: String,
    },
    /// There is no access token to call with; the agent has not seen the call.
    #[error("cannot get an access token for the agent")]
    Token(#[source] TokenError),
    /// The agent's answer is larger than allowed.
    #[error("the agent's answer is larger than {limit} bytes (`max_response_size`)")]
    TooLarge {
        /// The configured limit.
        limit: u64,
    },
}

fn refusal(status: &Option<u16>, code: &Option<i64>, message: &str) -> String {
    let what = match (status, code) {
        (_, Some(code)) => format!("with error {code}"),
        (Some(status), None) => format!("with HTTP status {status}"),
        (None, None) => "with an error".to_owned(),
    };
    if message.is_empty() { what } else { format!("{what}: {message}") }
}

impl ClientError {
    /// Whether the agent may have begun to work on the call.
    pub fn is_delivered(&self) -> bool {
        !matches!(self, Self::Unreachable(_) | Self::Token(_))
    }

    /// Whether the agent says that it does not know the task. Some have no code for it.
    pub fn is_task_not_found(&self) -> bool {
        let Self::Refused { http_status, code, message, .. } = self else {
            return false;
        };
        let message = message.to_ascii_lowercase();
        let says_so = message.contains("task")
            && ["not found", "unknown", "not exist", "no such"].iter().any(|words| message.contains(words));
        match code {
            Some(code::TASK_NOT_FOUND) => true,
            Some(-32000 | -32602 | -32603) => says_so,
            None => says_so && *http_status == Some(404),
            Some(_) => false,
        }
    }

    /// Whether the agent says that it does not cancel this task, or none at all.
    pub fn is_not_cancelable(&self) -> bool {
        match self {
            Self::Refused { code: Some(code), .. } => {
                matches!(*code, code::TASK_NOT_CANCELABLE | code::METHOD_NOT_FOUND) || self.is_unsupported()
            }
            Self::Refused { http_status, .. } => matches!(http_status, Some(405 | 409 | 501)),
            _ => false,
        }
    }

    /// Whether the agent says that it does not do this. Some have no code for it.
    pub fn is_unsupported(&self) -> bool {
        match self {
            Self::Refused { code: Some(code::UNSUPPORTED_OPERATION), .. } => true,
            Self::Refused { code: Some(code::INTERNAL), message, .. } => {
                let message = message.to_ascii_lowercase();
                ["not supported", "unsupported", "not implemented"]
                    .iter()
                    .any(|words| message.contains(words))
            }
            Self::Refused { code: None, http_status, .. } => *http_status == Some(501),
            _ => false,
        }
    }

    /// Whether the answer proves that the agent does not speak the wire of the call, and so has
    /// not begun to work on it.
    pub fn is_wrong_wire(&self) -> bool {
        match self {
            Self::Refused { code: Some(code), .. } => {
                matches!(*code, code::METHOD_NOT_FOUND | code::VERSION_NOT_SUPPORTED)
            }
            // Nothing is at that address, or not with that HTTP method; an error of A2A would say more.
            Self::Refused { http_status, message, .. } => {
                matches!(http_status, Some(301 | 302 | 307 | 308 | 404 | 405))
                    && !message.to_ascii_lowercase().contains("task")
            }
            _ => false,
        }
    }

    /// Whether the agent refuses the conversation id that came with a new task, which says that it
    /// has not begun to work.
    pub fn is_context_refused(&self) -> bool {
        let Self::Refused { http_status, code, message, .. } = self else {
            return false;
        };
        let message = message.to_ascii_lowercase();
        let words = ["context", "session", "conversation"];
        let is_refusal = match code {
            Some(code) => matches!(*code, -32602 | -32600 | -32001 | -32004),
            None => matches!(http_status, Some(400 | 404 | 409 | 422)),
        };
        is_refusal && words.iter().any(|word| message.contains(word))
    }

    /// The JSON-RPC code of the agent's error.
    pub fn rpc_code(&self) -> Option<i64> {
        match self {
            Self::Refused { code, .. } => *code,
            _ => None,
        }
    }
}

/// The chain of causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let step = error.to_string();
        if !text.ends_with(&step) {
            text = format!("{text}: {step}");
        }
        cause = error.source();
    }
    text
}
