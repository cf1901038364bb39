//! What a handler of a request gets: the gateway, who asks, and the parts of the request, with errors of the protocol.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::Gateway;
use super::auth::Principal;
use super::error::{HttpError, HttpResult};
use crate::bus::subject::Token;
use crate::text::shorten;

/// Maximum bytes of a JSON body.
pub(super) const MAX_BODY: usize = 10 << 20;
/// Maximum bytes of a name in an error message.
const MAX_NAME: usize = 80;

/// The gateway, and who sent the request.
#[derive(Debug, Clone)]
pub(super) struct Context {
    pub(super) gateway: Arc<Gateway>,
    pub(super) principal: Arc<Principal>,
}

/// An agent that the principal may use. It need not exist.
#[derive(Debug)]
pub(super) struct AgentRef {
    pub(super) name: String,
    pub(super) token: Token,
}

impl Context {
    /// The agent with a name from a path, which may also be its token in subjects.
    pub(super) fn agent(&self, name: &str) -> HttpResult<AgentRef> {
        let name = self.gateway.directory.name(name);
        if !self.principal.may_use(&name) {
            return Err(unknown_agent(&name));
        }
        Ok(AgentRef { token: Token::new(&name), name })
    }

    /// The error for an agent that does not reply, and for a skill of it that no one serves.
    pub(super) async fn absent(&self, agent: &AgentRef, action: Option<&Token>) -> HttpError {
        let Some(details) = self.gateway.directory.details(&agent.name).await else {
            return unknown_agent(&agent.name);
        };
        let name = shorten(&agent.name, MAX_NAME);
        if let Some(action) = action.filter(|_| details.state == "ready")
            && !details.skills.iter().any(|skill| skill.action == action.as_str())
        {
            let action = shorten(action.as_str(), MAX_NAME);
            return HttpError::not_found(format!("agent `{name}` has no skill `{action}`"));
        }
        let state = match details.state.as_str() {
            "ready" => "does not reply".to_owned(),
            state => format!("is {}", shorten(state, MAX_NAME)),
        };
        HttpError::unavailable(format!("agent `{name}` {state}; try again later"))
    }

    /// Reads a JSON body.
    pub(super) async fn body(&self, headers: &HeaderMap, body: Body) -> HttpResult<Bytes> {
        read_body(headers, body, self.gateway.limits().body_timeout).await
    }
}

fn unknown_agent(name: &str) -> HttpError {
    HttpError::not_found(format!("there is no agent `{}`", shorten(name, MAX_NAME)))
}

/// Reads a body of at most [`MAX_BODY`] bytes.
pub(super) async fn read_body(headers: &HeaderMap, body: Body, timeout: Duration) -> HttpResult<Bytes> {
    let too_large = || HttpError::too_large(format!("the body has more than {MAX_BODY} bytes; upload files first"));
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > MAX_BODY as u64) {
        return Err(too_large());
    }
    let late = || {
        let message = format!("the body did not arrive within {} s", timeout.as_secs());
        HttpError::invalid(message).with_status(StatusCode::REQUEST_TIMEOUT)
    };
    let collected = tokio::time::timeout(timeout, Limited::new(body, MAX_BODY).collect());
    match collected.await.map_err(|_| late())? {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.downcast_ref::<LengthLimitError>().is_some() => Err(too_large()),
        Err(_) => Err(HttpError::invalid("the body is incomplete")),
    }
}

impl FromRequestParts<Arc<Gateway>> for Context {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, gateway: &Arc<Gateway>) -> HttpResult<Self> {
        let principal = parts.extensions.get::<Arc<Principal>>().cloned();
        let principal = principal.ok_or_else(|| HttpError::unauthorized("this request needs a token"))?;
        Ok(Self { gateway: Arc::clone(gateway), principal })
    }
}

/// The parameters in the path of a request.
#[derive(Debug)]
pub(super) struct Params<T>(pub(super) T);

impl<T: DeserializeOwned + Send> FromRequestParts<Arc<Gateway>> for Params<T> {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, gateway: &Arc<Gateway>) -> HttpResult<Self> {
        let path = Path::<T>::from_request_parts(parts, gateway).await;
        path.map(|Path(params)| Self(params)).map_err(|_| HttpError::invalid("the path is not valid UTF-8"))
    }
}

/// The parameters in the query of a request.
#[derive(Debug)]
pub(super) struct Query(Vec<(String, String)>);

/// Parameters that a query may have.
const MAX_PARAMETERS: usize = 32;

impl Query {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// A whole number in a range.
    pub(super) fn number(&self, name: &str, max: usize) -> HttpResult<Option<usize>> {
        let Some(text) = self.get(name) else { return Ok(None) };
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|number| is_number && (1..=max).contains(number));
        let message = || HttpError::invalid(format!("`{name}` must be a whole number from 1 to {max}"));
        number.map(Some).ok_or_else(message)
    }
}

impl FromRequestParts<Arc<Gateway>> for Query {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Gateway>) -> HttpResult<Self> {
        let pairs = url::form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes());
        let pairs: Vec<_> = pairs.into_owned().take(MAX_PARAMETERS + 1).collect();
        if pairs.len() > MAX_PARAMETERS {
            return Err(HttpError::invalid(format!("the query has more than {MAX_PARAMETERS} parameters")));
        }
        Ok(Self(pairs))
    }
}
