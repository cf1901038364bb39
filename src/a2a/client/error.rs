//! Why a call to an agent gave no result, and what that proves.

use serde_json::value::RawValue;

use crate::a2a::auth::TokenError;
use crate::a2a::http::HttpError;
use crate::a2a::retry::Retry;
use crate::json;
use crate::secrets::Secrets;

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
    /// The parameters are not those of the method.
    pub const INVALID_PARAMS: i64 = -32602;
    /// The request is not one of JSON-RPC; some say it of invalid parameters.
    pub const INVALID_REQUEST: i64 = -32600;
    /// The request is not JSON; some say it of invalid parameters.
    pub const PARSE_ERROR: i64 = -32700;
    /// The agent has no such method.
    pub const METHOD_NOT_FOUND: i64 = -32601;
}

/// Most bytes of an error's message and data that are searched for the names of fields.
const SEARCHED: usize = 16 << 10;

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
    /// Takes the agent's credentials out of its own words.
    pub fn redact(&mut self, secrets: &Secrets) {
        match self {
            Self::Refused { message, .. } => secrets.redact(message),
            Self::NotA2a { reason, snippet } => {
                secrets.redact(reason);
                secrets.redact(snippet);
            }
            Self::Encoded { encoding } => secrets.redact(encoding),
            Self::Unreachable(_) | Self::Broken(_) | Self::Token(_) | Self::TooLarge { .. } => {}
        }
    }

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

    /// What the answer says if the agent does not speak the wire of the call. All but
    /// [`Retry::WrongAddress`] prove that it has not run it.
    pub fn wrong_wire(&self) -> Option<Retry> {
        let Self::Refused { http_status, code, origin, .. } = self else {
            return None;
        };
        match (origin, code) {
            // The agent had accepted the call, so the code may be that of something it called itself.
            (Origin::Stream, _) => None,
            (_, Some(code::METHOD_NOT_FOUND)) => Some(Retry::MethodNotFound),
            (_, Some(code::VERSION_NOT_SUPPORTED)) => Some(Retry::VersionNotSupported),
            (_, Some(_)) => self.is_missing_ids().then_some(Retry::MissingIds),
            // An HTTP router that found no handler for the address or the method. 302 and 303 are no
            // proof: servers answer with them after the work, too.
            (Origin::Server, None) => {
                matches!(http_status, Some(301 | 307 | 308 | 404 | 405)).then_some(Retry::WrongAddress)
            }
            (Origin::Agent, None) => None,
        }
    }

    /// Whether the agent refuses the call because it does not stream. `UnsupportedOperationError` is
    /// what A2A prescribes for a stream call to an agent without streaming: the operation was not performed.
    pub fn is_streaming_refused(&self) -> bool {
        matches!(self, Self::Refused { code: Some(code::UNSUPPORTED_OPERATION), origin: Origin::Agent, .. })
    }

    /// Whether the agent refuses the conversation id that came with a new task: its parameters are
    /// invalid, and the error names the field.
    pub fn is_context_refused(&self) -> bool {
        self.is_invalid(&[code::INVALID_PARAMS, code::INVALID_REQUEST])
            && self.any_text(|text| names_id(text, "context") || names_id(text, "session"))
    }

    /// Whether the agent wants the client to make the ids of task and conversation, as UUIDs. The request
    /// failed its validation, so nothing ran.
    pub fn is_missing_ids(&self) -> bool {
        self.is_invalid(&[code::PARSE_ERROR, code::INVALID_PARAMS, code::INVALID_REQUEST])
            && self.any_text(|text| {
                let is_demand = ["required", "missing", "uuid"].iter().any(|word| text.contains(word));
                // Some validators list the fields of all methods when the method is what is wrong.
                let is_of_method = text.contains("\"method\"");
                is_demand && !is_of_method && (names_id(text, "task") || names_id(text, "context"))
            })
    }

    fn is_invalid(&self, codes: &[i64]) -> bool {
        matches!(self, Self::Refused { code: Some(code), origin: Origin::Agent, .. } if codes.contains(code))
    }

    /// Whether message or data satisfy `test`, in lower case.
    fn any_text(&self, test: impl Fn(&str) -> bool) -> bool {
        let Self::Refused { message, data, .. } = self else {
            return false;
        };
        let texts = [Some(message.as_str()), data.as_deref().map(RawValue::get)];
        texts.into_iter().flatten().any(|text| test(&json::shorten(text, SEARCHED).to_ascii_lowercase()))
    }

    /// The JSON-RPC code of the agent's error.
    pub fn rpc_code(&self) -> Option<i64> {
        match self {
            Self::Refused { code, .. } => *code,
            _ => None,
        }
    }
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
