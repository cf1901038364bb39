//! Why a call to an agent gave no result, and what that proves.

use serde_json::value::RawValue;

use crate::a2a::auth::TokenError;
use crate::a2a::http::HttpError;
use crate::a2a::retry::Retry;
use crate::secrets::Secrets;

/// JSON-RPC codes of A2A that the bridge acts upon.
pub(crate) mod code {
    /// The agent does not know the task.
    pub(crate) const TASK_NOT_FOUND: i64 = -32001;
    /// The task cannot be cancelled.
    pub(crate) const TASK_NOT_CANCELABLE: i64 = -32002;
    /// The agent does not do this.
    pub(crate) const UNSUPPORTED_OPERATION: i64 = -32004;
    /// The agent does not speak this version.
    pub(crate) const VERSION_NOT_SUPPORTED: i64 = -32009;
    /// The agent failed; some say with it that they do not do this.
    pub(crate) const INTERNAL: i64 = -32603;
    /// The parameters are not those of the method.
    pub(crate) const INVALID_PARAMS: i64 = -32602;
    /// The request is not one of JSON-RPC; some say it of invalid parameters.
    pub(crate) const INVALID_REQUEST: i64 = -32600;
    /// The request is not JSON; some say it of invalid parameters.
    pub(crate) const PARSE_ERROR: i64 = -32700;
    /// The agent has no such method.
    pub(crate) const METHOD_NOT_FOUND: i64 = -32601;
}

/// Where an error comes from, as far as its form shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// An HTTP server, gateway or framework: the body is no error object of A2A or JSON-RPC.
    Server,
    /// The agent; the error is the whole answer to the call.
    Agent,
    /// The agent; the error is an event of a stream, so the agent had accepted the call.
    Stream,
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
        /// Where the error comes from.
        origin: Origin,
    },
    /// The agent answered with something else than A2A.
    #[error("the agent answered with something that is not A2A: {reason}; it begins with: {snippet}")]
    NotA2a {
        /// What is wrong with it.
        reason: String,
        snippet: String,
    },
    /// The agent's answer is compressed, which it was not asked for.
    #[error(
        "the agent's answer is compressed (`Content-Encoding: {encoding}`), which the bridge does not read \
         and does not ask for"
    )]
    Compressed {
        /// The agent's name for it.
        encoding: String,
    },
    /// There is no access token to call with; the agent has not seen the call.
    #[error("cannot get an access token for the agent")]
    Token(#[source] TokenError),
    /// The agent's answer is larger than allowed.
    #[error("the agent's answer is larger than {limit} bytes (`max_response_size`)")]
    TooLarge { limit: u64 },
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
    /// Takes the agent's credentials out of its own words.
    pub fn redact(&mut self, secrets: &Secrets) {
        match self {
            Self::Refused { message, .. } => secrets.redact(message),
            Self::NotA2a { reason, snippet } => {
                secrets.redact(reason);
                secrets.redact(snippet);
            }
            Self::Compressed { encoding } => secrets.redact(encoding),
            Self::Unreachable(_) | Self::Broken(_) | Self::Token(_) | Self::TooLarge { .. } => {}
        }
    }

    /// Whether the agent may have begun to work on the call.
    pub fn may_have_reached_agent(&self) -> bool {
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
        let Self::Refused { code, http_status, message, .. } = self else {
            return false;
        };
        let says = |words: &[&str]| {
            let message = message.to_ascii_lowercase();
            words.iter().any(|words| message.contains(words))
        };
        match code {
            Some(code::TASK_NOT_CANCELABLE | code::METHOD_NOT_FOUND | code::UNSUPPORTED_OPERATION) => true,
            // Some have no code for it. A cancel that is given up runs nothing twice.
            Some(code::INTERNAL) => says(&["not supported", "unsupported", "not implemented"]),
            Some(code::TASK_NOT_FOUND) => says(&["cannot be cancel", "not cancelable"]),
            Some(_) => false,
            None => matches!(http_status, Some(405 | 409 | 501)),
        }
    }

    /// Whether the agent seems not to speak the wire of the call. This alone proves nothing: [`Retry`] has the
    /// proofs that the agent has not run it.
    pub fn is_wrong_wire(&self) -> bool {
        self.is_wrong_address() || Retry::on_another_wire(self, None).is_some()
    }

    /// Whether the HTTP server seems to have nothing at this address. A server may answer so after the work
    /// was done, and 302 and 303 mean exactly that.
    pub fn is_wrong_address(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                http_status: Some(301 | 307 | 308 | 404 | 405),
                code: None,
                origin: Origin::Server,
                ..
            }
        )
    }

    /// The JSON-RPC code of the agent's error.
    pub fn rpc_code(&self) -> Option<i64> {
        match self {
            Self::Refused { code, .. } => *code,
            _ => None,
        }
    }
}
