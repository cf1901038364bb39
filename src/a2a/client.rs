//! Calls to one agent over whichever dialect its card gave: send, get, cancel.
//!
//! A client sends its credentials to one origin, the configured one: it follows no redirect and
//! asks no proxy. It never repeats a call by itself: once a request may have reached the agent,
//! an error says so ([`ClientError::is_delivered`]).

use bytes::{Bytes, BytesMut};
use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde_json::value::RawValue;
use url::Url;

use super::dialect::{Call, Dialect, NotAResult, Outgoing};
use super::model::{Answer, Task};
use super::stream::EventStream;
use crate::json;

/// How much of a body that is not A2A an error shows.
const SNIPPET: usize = 200;

/// JSON-RPC codes of A2A that the bridge acts upon.
pub mod code {
    /// The agent does not know the task.
    pub const TASK_NOT_FOUND: i64 = -32001;
    /// The task cannot be cancelled.
    pub const TASK_NOT_CANCELABLE: i64 = -32002;
    /// The agent does not do this.
    pub const UNSUPPORTED_OPERATION: i64 = -32004;
    /// The agent has no such method.
    pub const METHOD_NOT_FOUND: i64 = -32601;
}

/// Why a call to an agent gave no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No connection: the agent has not seen the call.
    #[error("cannot connect to the agent")]
    Unreachable(#[source] reqwest::Error),
    /// The connection broke after the call may have reached the agent.
    #[error("the connection to the agent broke before it answered")]
    Broken(#[source] reqwest::Error),
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
    if message.is_empty() {
        what
    } else {
        format!("{what}: {message}")
    }
}

impl ClientError {
    /// Whether the agent may have begun to work on the call.
    pub fn is_delivered(&self) -> bool {
        !matches!(self, Self::Unreachable(_))
    }

    /// The JSON-RPC code of the agent's error.
    pub fn rpc_code(&self) -> Option<i64> {
        match self {
            Self::Refused { code, .. } => *code,
            _ => None,
        }
    }
}

/// W3C trace context to hand on.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// `traceparent`, if the caller sent one.
    pub parent: Option<HeaderValue>,
    /// `tracestate`, if the caller sent one.
    pub state: Option<HeaderValue>,
}

/// The way to one agent.
#[derive(Debug, Clone)]
pub struct Client {
    http: reqwest::Client,
    endpoint: Url,
    dialect: Dialect,
    headers: HeaderMap,
    max_response: u64,
}

impl Client {
    /// `headers` hold the credentials; they go to `endpoint` and nowhere else.
    pub fn new(
        http: reqwest::Client,
        endpoint: Url,
        dialect: Dialect,
        mut headers: HeaderMap,
        max_response: u64,
    ) -> Self {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(version) = dialect.version_header() {
            headers.insert(
                HeaderName::from_static("a2a-version"),
                HeaderValue::from_static(version),
            );
        }
        Self {
            http,
            endpoint,
            dialect,
            headers,
            max_response,
        }
    }

    /// The wire that is spoken.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Where calls go.
    pub fn endpoint(&self) -> &Url {
        &self.endpoint
    }

    /// Sends a message and waits until the agent answers.
    pub async fn send(&self, message: &Outgoing<'_>, trace: &Trace) -> Result<Answer, ClientError> {
        let body = self.call(self.dialect.send(message), trace).await?;
        self.dialect
            .read_answer(&body.bytes)
            .map_err(|problem| body.explain(problem))
    }

    /// Asks what became of a task.
    pub async fn get(&self, task_id: &str, trace: &Trace) -> Result<Task, ClientError> {
        let body = self.call(self.dialect.get(task_id), trace).await?;
        self.dialect
            .read_task(&body.bytes)
            .map_err(|problem| body.explain(problem))
    }

    /// Asks to cancel a task.
    pub async fn cancel(&self, task_id: &str, trace: &Trace) -> Result<Task, ClientError> {
        let body = self.call(self.dialect.cancel(task_id), trace).await?;
        self.dialect
            .read_task(&body.bytes)
            .map_err(|problem| body.explain(problem))
    }

    /// Sends a message and takes the events of its answer as they come.
    pub async fn stream(&self, message: &Outgoing<'_>, trace: &Trace) -> Result<EventStream, ClientError> {
        self.events(self.dialect.stream(message), trace).await
    }

    /// Takes the events of a task that is under way.
    pub async fn subscribe(&self, task_id: &str, trace: &Trace) -> Result<EventStream, ClientError> {
        self.events(self.dialect.subscribe(task_id), trace).await
    }

    async fn events(&self, call: Call, trace: &Trace) -> Result<EventStream, ClientError> {
        let sent = self
            .request(call, "text/event-stream, application/json", trace)
            .send()
            .await;
        let response = sent.map_err(connection_error)?;
        if !response.status().is_success() {
            let status = response.status();
            let body = Body {
                status,
                bytes: read_body(response, self.max_response).await?,
            };
            return Err(body.refusal(self.dialect));
        }
        EventStream::open(response, self.dialect, self.max_response).await
    }

    async fn call(&self, call: Call, trace: &Trace) -> Result<Body, ClientError> {
        let response = self
            .request(call, "application/json", trace)
            .send()
            .await
            .map_err(connection_error)?;
        let body = Body {
            status: response.status(),
            bytes: read_body(response, self.max_response).await?,
        };
        body.check_depth()?;
        if body.status.is_success() {
            Ok(body)
        } else {
            Err(body.refusal(self.dialect))
        }
    }

    fn request(&self, call: Call, accept: &'static str, trace: &Trace) -> reqwest::RequestBuilder {
        let mut headers = self.headers.clone();
        headers.insert(ACCEPT, HeaderValue::from_static(accept));
        if let Some(parent) = &trace.parent {
            headers.insert(HeaderName::from_static("traceparent"), parent.clone());
            if let Some(state) = &trace.state {
                headers.insert(HeaderName::from_static("tracestate"), state.clone());
            }
        }
        self.http
            .post(self.endpoint.clone())
            .headers(headers)
            .body(call.body)
    }
}

/// What came back, before it is understood.
pub(super) struct Body {
    status: reqwest::StatusCode,
    pub(super) bytes: Bytes,
}

impl Body {
    pub(super) fn of_event(bytes: Bytes) -> Self {
        Self {
            status: reqwest::StatusCode::OK,
            bytes,
        }
    }

    pub(super) fn check_depth(&self) -> Result<(), ClientError> {
        if json::is_shallow(&self.bytes) {
            return Ok(());
        }
        Err(self.not_a2a(format!("it nests deeper than {}", json::MAX_DEPTH)))
    }

    /// What an error status means. It may still carry a JSON-RPC error, which says more; a result
    /// under an error status is an error all the same.
    fn refusal(&self, dialect: Dialect) -> ClientError {
        match dialect.read_answer(&self.bytes) {
            Err(problem @ NotAResult::Error(_)) => self.explain(problem),
            Ok(_) | Err(NotAResult::NotA2a(_)) => ClientError::Refused {
                http_status: Some(self.status.as_u16()),
                code: None,
                message: self.snippet(),
                data: None,
            },
        }
    }

    pub(super) fn explain(&self, problem: NotAResult) -> ClientError {
        match problem {
            NotAResult::Error(error) => ClientError::Refused {
                http_status: Some(self.status.as_u16()).filter(|_| !self.status.is_success()),
                code: Some(error.code),
                message: json::shorten(&error.message, 4096),
                data: error.data,
            },
            NotAResult::NotA2a(reason) => self.not_a2a(reason),
        }
    }

    fn not_a2a(&self, reason: String) -> ClientError {
        ClientError::NotA2a {
            reason,
            snippet: self.snippet(),
        }
    }

    fn snippet(&self) -> String {
        let head = self
            .bytes
            .get(..SNIPPET.min(self.bytes.len()))
            .unwrap_or_default();
        let text: String = String::from_utf8_lossy(head)
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        text.trim().to_owned()
    }
}

/// Reads a body up to `limit` bytes.
pub(super) async fn read_body(mut response: reqwest::Response, limit: u64) -> Result<Bytes, ClientError> {
    let too_large = || ClientError::TooLarge { limit };
    if response.content_length().is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut first: Option<Bytes> = None;
    let mut rest = BytesMut::new();
    while let Some(chunk) = response.chunk().await.map_err(ClientError::Broken)? {
        let so_far = first.as_ref().map_or(0, Bytes::len) + rest.len();
        if (so_far + chunk.len()) as u64 > limit {
            return Err(too_large());
        }
        // Most answers are one chunk, which needs no copy.
        match &first {
            None => first = Some(chunk),
            Some(begin) => {
                if rest.is_empty() {
                    rest.extend_from_slice(begin);
                    first = Some(Bytes::new());
                }
                rest.extend_from_slice(&chunk);
            }
        }
    }
    Ok(if rest.is_empty() {
        first.unwrap_or_default()
    } else {
        rest.freeze()
    })
}

/// Tells a call that never left from one that may have arrived.
pub(super) fn connection_error(error: reqwest::Error) -> ClientError {
    // The URL may hold what an operator considers private, and every message names the agent anyway.
    let error = error.without_url();
    if error.is_connect() || error.is_builder() {
        ClientError::Unreachable(error)
    } else {
        ClientError::Broken(error)
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
