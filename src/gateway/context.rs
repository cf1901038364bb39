//! What a handler of a request gets: the gateway, who asks, and the parts of the request, with errors of the protocol.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path};
use axum::http::HeaderMap;
use axum::http::request::Parts;
use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::Gateway;
use super::auth::Principal;
use super::body::{self, Charge, MAX_BODY};
use super::error::{HttpError, HttpResult};
use crate::bus::subject::Token;
use crate::text::shorten;

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

    /// Reads a JSON body. The charge counts its memory until the request is sent.
    pub(super) async fn body(&self, headers: &HeaderMap, body: Body) -> HttpResult<(Bytes, Charge)> {
        let mut charge = Charge::new(&self.principal.bodies);
        let timeout = self.gateway.limits().body_timeout;
        let body = body::read(headers, body, MAX_BODY, timeout, &mut charge).await?;
        Ok((body, charge))
    }
}

fn unknown_agent(name: &str) -> HttpError {
    HttpError::not_found(format!("there is no agent `{}`", shorten(name, MAX_NAME)))
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
