//! Errors of the gateway: the error object of the public protocol, with its number as HTTP status.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::json;

use super::mesh::NoReply;
use crate::json::to_bytes;
use crate::reply::error::{ActionError, Code};

/// Seconds after which a client should try again what was `busy`, and what was unavailable.
const RETRY_BUSY: u64 = 1;
const RETRY_UNAVAILABLE: u64 = 2;

/// An error that the gateway itself reports.
#[derive(Debug)]
pub(super) struct HttpError {
    status: StatusCode,
    code: &'static str,
    message: String,
    retryable: bool,
    retry_after: Option<u64>,
}

pub(super) type HttpResult<T = Response> = Result<T, HttpError>;

impl HttpError {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Self {
        let retryable = matches!(code, Code::Busy | Code::AgentUnavailable | Code::StateUnavailable);
        Self {
            status: StatusCode::from_u16(code.number()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
            code: code.name(),
            message: message.into(),
            retryable,
            retry_after: None,
        }
    }

    pub(super) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    pub(super) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(Code::Forbidden, message)
    }

    pub(super) fn too_large(message: impl Into<String>) -> Self {
        Self::new(Code::TooLarge, message)
    }

    pub(super) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Code::AgentUnavailable, message)
    }

    /// The code has no number for these statuses of HTTP.
    pub(super) fn with_status(self, status: StatusCode) -> Self {
        Self { status, ..self }
    }

    pub(super) fn unauthorized(message: &str) -> Self {
        let error = Self::forbidden(message).with_status(StatusCode::UNAUTHORIZED);
        Self { code: "unauthorized", ..error }
    }

    pub(super) fn too_many_requests(message: &str, retry_after: u64) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(Code::Busy, message) }
    }

    /// The gateway got no reply over NATS.
    pub(super) fn no_reply(reason: &NoReply) -> Self {
        match reason {
            NoReply::NoResponders => Self::unavailable("no bridge replies to this request; try again later"),
            NoReply::Disconnected => {
                Self::unavailable("the gateway is not connected to NATS; try again later")
            }
            NoReply::Denied => {
                Self::unavailable("NATS denies the gateway this request; see the log of the gateway")
            }
            NoReply::Timeout(limit) => {
                let seconds = limit.as_secs();
                Self::new(
                    Code::OutcomeUnknown,
                    format!("no reply within {seconds} s; the request may still run"),
                )
            }
            NoReply::Gone => Self::new(
                Code::OutcomeUnknown,
                "the bridge that ran this request is gone; the task may still run",
            ),
            NoReply::TooLarge { size, max } => Self::too_large(format!(
                "the request has {size} bytes, but NATS accepts at most {max}; upload files and refer to them by URL"
            )),
        }
    }

    /// The body of the response.
    pub(super) fn to_json(&self) -> Bytes {
        to_bytes(&json!({
            "success": false, "status": "ERROR", "message": self.message, "files": [], "data": {}, "artifacts": [],
            "error_info": {
                "code": self.code, "retryable": self.retryable, "a2a_code": null, "a2a_data": null,
            },
            "task": null,
        }))
    }
}

impl From<ActionError> for HttpError {
    fn from(error: ActionError) -> Self {
        Self { retryable: error.info.retryable, ..Self::new(error.info.code, error.message) }
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, self.to_json());
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let challenge = HeaderValue::from_static("Bearer realm=\"a2a-bridge\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        response
    }
}

/// A response with a JSON body. One that says that the server is busy or unavailable says when to try again.
pub(super) fn json_response(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let retry_after = match status {
        StatusCode::TOO_MANY_REQUESTS => Some(RETRY_BUSY),
        StatusCode::SERVICE_UNAVAILABLE => Some(RETRY_UNAVAILABLE),
        _ => None,
    };
    if let Some(seconds) = retry_after {
        headers.insert(header::RETRY_AFTER, seconds.into());
    }
    response
}
