//! Calls to one agent over whichever dialect its card gave: send, get, cancel.
//!
//! A client sends its credentials to one origin, the configured one: it follows no redirect and
//! asks no proxy. It repeats a call only if the agent's answer proves that the agent has not looked
//! at it. Once a request may have reached the agent, an error says so ([`ClientError::is_delivered`]).

use std::borrow::Cow;

use bytes::Bytes;
use reqwest::StatusCode;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde_json::value::RawValue;
use url::Url;

use super::auth::{Credentials, TokenError};
use super::card::Interface;
use super::choose::SecondThoughts;
use super::dialect::{Call, Dialect, NotAResult, Outgoing, RpcError};
use super::http::{Endpoint, HttpError, Response};
use super::model::{Answer, Task};
use super::stream::EventStream;
use crate::json;

/// How much of a body that is not A2A an error shows.
const SNIPPET: usize = 200;
/// Room for the headers that nearly all requests have, those of the HTTP client included.
const HEADERS: usize = 8;

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
    endpoint: Endpoint,
    dialect: Dialect,
    tenant: Option<String>,
    credentials: Credentials,
    max_response: u64,
    second_thoughts: Option<SecondThoughts>,
}

impl Client {
    /// `credentials` go to the interface's address and nowhere else.
    pub fn new(
        http: reqwest::Client,
        interface: &Interface,
        credentials: Credentials,
        max_response: u64,
    ) -> Self {
        Self {
            endpoint: Endpoint::new(interface.url.clone(), http),
            dialect: interface.dialect,
            tenant: interface.tenant.clone(),
            credentials,
            max_response,
            second_thoughts: None,
        }
    }

    /// The same client, which looks for another wire when the agent refuses this one.
    pub fn reconsidering(mut self, second_thoughts: SecondThoughts) -> Self {
        self.second_thoughts = Some(second_thoughts);
        self
    }

    /// The wire that is spoken.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    /// Where calls go.
    pub fn endpoint(&self) -> &Url {
        self.endpoint.url()
    }

    /// Sends a message and waits until the agent answers.
    pub async fn send(&self, message: &Outgoing<'_>, trace: &Trace) -> Result<Answer, ClientError> {
        match self.send_once(message, trace).await {
            Err(error) if error.is_wrong_wire() => match Box::pin(self.on_another_wire()).await {
                Some(other) => Box::pin(other.send_once(message, trace)).await,
                None => Err(error),
            },
            result => result,
        }
    }

    /// Asks what became of a task.
    pub async fn get(&self, task_id: &str, trace: &Trace) -> Result<Task, ClientError> {
        match self.get_once(task_id, trace).await {
            Err(error) if error.is_wrong_wire() => match self.on_the_new_wire() {
                Some(other) => Box::pin(other.get_once(task_id, trace)).await,
                None => Err(error),
            },
            result => result,
        }
    }

    /// Asks to cancel a task.
    pub async fn cancel(&self, task_id: &str, trace: &Trace) -> Result<Task, ClientError> {
        match self.cancel_once(task_id, trace).await {
            Err(error) if error.is_wrong_wire() => match self.on_the_new_wire() {
                Some(other) => Box::pin(other.cancel_once(task_id, trace)).await,
                None => Err(error),
            },
            result => result,
        }
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
        let response = self.exchange(call, "text/event-stream, application/json", trace).await?;
        if response.status().is_success() {
            return EventStream::open(response, self.dialect, self.max_response).await;
        }
        let body = Body::read(response, self.max_response).await?;
        Err(body.check().err().unwrap_or_else(|| unreachable!("an error status is never let pass")))
    }

    async fn cancel_once(&self, task_id: &str, trace: &Trace) -> Result<Task, ClientError> {
        let body = self.call(self.dialect.cancel(task_id), trace).await?;
        self.dialect.read_task(&body.bytes).map_err(|problem| body.explain(problem))
    }

    async fn send_once(&self, message: &Outgoing<'_>, trace: &Trace) -> Result<Answer, ClientError> {
        let body = self.call(self.dialect.send(message), trace).await?;
        self.dialect.read_answer(&body.bytes).map_err(|problem| body.explain(problem))
    }

    pub(super) async fn get_once(&self, task_id: &str, trace: &Trace) -> Result<Task, ClientError> {
        let body = self.call(self.dialect.get(task_id), trace).await?;
        self.dialect.read_task(&body.bytes).map_err(|problem| body.explain(problem))
    }

    /// Makes a call for the sake of the error that it gives.
    pub(super) async fn call_once(&self, call: Call, trace: &Trace) -> Result<(), ClientError> {
        let body = self.call(call, trace).await?;
        match self.dialect.read_answer(&body.bytes) {
            Ok(_) => Ok(()),
            Err(problem) => Err(body.explain(problem)),
        }
    }

    /// A client for another wire that the agent speaks, after it has refused this one.
    pub(super) async fn on_another_wire(&self) -> Option<Self> {
        let thoughts = self.second_thoughts.as_ref()?;
        let other = thoughts.chooser.again(&thoughts.card, &self.interface()).await?;
        thoughts.changed.notify_one();
        thoughts.chooser.client(&thoughts.card, &other).ok()
    }

    /// A client for the wire that was found since this one was made. An agent may lack a method to
    /// look or to cancel, so that alone is no reason to search for a wire.
    fn on_the_new_wire(&self) -> Option<Self> {
        let SecondThoughts { chooser, card, .. } = self.second_thoughts.as_ref()?;
        let other = chooser.changed_from(card, &self.interface())?;
        chooser.client(card, &other).ok()
    }

    fn interface(&self) -> Interface {
        Interface {
            url: self.endpoint().clone(),
            dialect: self.dialect,
            tenant: self.tenant.clone(),
            because: String::new(),
        }
    }

    /// Sends a call with the credentials that are at hand, which `authorization` remembers.
    async fn send_call(
        &self,
        call: &Call,
        accept: &'static str,
        trace: &Trace,
        authorization: &mut Option<HeaderValue>,
    ) -> Result<Response, ClientError> {
        let call = match &self.tenant {
            Some(tenant) => Cow::Owned(call.clone().for_tenant(tenant)),
            None => Cow::Borrowed(call),
        };
        let mut headers = HeaderMap::with_capacity(HEADERS);
        let mut url = None;
        if !call.path.is_empty()
            && let Ok(mut segments) = url.insert(self.endpoint().clone()).path_segments_mut()
        {
            segments.pop_if_empty().extend(&call.path);
        }
        self.credentials.put_into(&mut headers);
        if self.credentials.are_in_url() {
            self.credentials.put_into_url(url.get_or_insert_with(|| self.endpoint().clone()));
        }
        headers.insert(ACCEPT, HeaderValue::from_static(accept));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(call.content_type));
        if let Some(version) = self.dialect.version_header() {
            headers.insert(HeaderName::from_static("a2a-version"), HeaderValue::from_static(version));
        }
        if let Some(parent) = &trace.parent {
            headers.insert(HeaderName::from_static("traceparent"), parent.clone());
            if let Some(state) = &trace.state {
                headers.insert(HeaderName::from_static("tracestate"), state.clone());
            }
        }
        *authorization = headers.get(AUTHORIZATION).cloned();
        self.endpoint.send(call.method.clone(), url, headers, call.body()).await
    }

    /// Sends a call. It goes out a second time only after an answer which says that the agent has
    /// not looked at it: an access token that is over, a media type or HTTP method not taken.
    pub(super) async fn exchange(
        &self,
        mut call: Call,
        accept: &'static str,
        trace: &Trace,
    ) -> Result<Response, ClientError> {
        self.credentials.ready().await.map_err(ClientError::Token)?;
        let mut sent = None;
        let response = self.send_call(&call, accept, trace, &mut sent).await?;
        let is_again = match response.status() {
            StatusCode::UNAUTHORIZED => self.credentials.renew(sent.as_ref()).await,
            StatusCode::UNSUPPORTED_MEDIA_TYPE => call.in_plain_json(),
            StatusCode::METHOD_NOT_ALLOWED => call.subscribe_with_post(),
            _ => false,
        };
        if !is_again {
            return Ok(response);
        }
        drop(response);
        Box::pin(self.send_call(&call, accept, trace, &mut sent)).await
    }

    async fn call(&self, call: Call, trace: &Trace) -> Result<Body, ClientError> {
        let accept = if call.content_type == "application/json" {
            "application/json"
        } else {
            "application/a2a+json, application/json"
        };
        let response = self.exchange(call, accept, trace).await?;
        let body = Body::read(response, self.max_response).await?;
        body.check()
    }
}

/// What came back, before it is understood.
pub(super) struct Body {
    content_type: Option<String>,
    status: StatusCode,
    pub(super) bytes: Bytes,
}

impl Body {
    async fn read(response: Response, limit: u64) -> Result<Self, ClientError> {
        let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        Ok(Self {
            content_type: content_type.map(|value| json::shorten(value, 80)),
            status: response.status(),
            bytes: response.body(limit).await?,
        })
    }

    /// The data of one event.
    pub(super) fn of_event(bytes: Bytes) -> Self {
        Self { content_type: None, status: StatusCode::OK, bytes }
    }

    /// Lets pass what may be a result.
    pub(super) fn check(self) -> Result<Self, ClientError> {
        if !json::is_shallow(&self.bytes) {
            return Err(self.not_a2a(format!("it nests deeper than {}", json::MAX_DEPTH)));
        }
        if self.status.is_success() {
            return Ok(self);
        }
        // An error status may still carry an error object, which says more; a result under an
        // error status is an error all the same.
        Err(match RpcError::in_body(&self.bytes) {
            Some(error) => self.explain(NotAResult::Error(error)),
            None => ClientError::Refused {
                http_status: Some(self.status.as_u16()),
                code: None,
                message: self.snippet(),
                data: None,
            },
        })
    }

    pub(super) fn explain(&self, problem: NotAResult) -> ClientError {
        match problem {
            NotAResult::Error(error) => ClientError::Refused {
                http_status: Some(self.status.as_u16()).filter(|_| !self.status.is_success()),
                code: error.code,
                message: json::shorten(&error.message, 4096),
                data: error.data,
            },
            NotAResult::NotA2a(reason) => self.not_a2a(reason),
        }
    }

    fn not_a2a(&self, reason: String) -> ClientError {
        let reason = match &self.content_type {
            Some(content_type) if !content_type.contains("json") => {
                format!("{reason}; it came as {content_type}")
            }
            Some(_) => reason,
            None => format!("{reason}; it came without a content type"),
        };
        ClientError::NotA2a { reason, snippet: self.snippet() }
    }

    fn snippet(&self) -> String {
        let head = self.bytes.get(..SNIPPET.min(self.bytes.len())).unwrap_or_default();
        let text: String =
            String::from_utf8_lossy(head).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        text.trim().to_owned()
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

/// Reads an answer as [`Client::send`] would, from a recording.
#[cfg(test)]
pub(super) fn read_recorded(
    dialect: Dialect,
    status: u16,
    content_type: Option<&str>,
    bytes: &[u8],
) -> Result<Answer, ClientError> {
    let body = Body {
        content_type: content_type.map(str::to_owned),
        status: StatusCode::from_u16(status).expect("recordings have a status"),
        bytes: Bytes::copy_from_slice(bytes),
    };
    let body = body.check()?;
    dialect.read_answer(&body.bytes).map_err(|problem| body.explain(problem))
}
