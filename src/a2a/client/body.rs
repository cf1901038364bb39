//! What an agent sent back, before it is understood.

use bytes::Bytes;
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;

use super::{ClientError, Origin};
use crate::a2a::dialect::{NotAResult, RpcError};
use crate::a2a::http::Response;
use crate::json;

/// How much of a body that is not A2A an error shows.
const SNIPPET: usize = 200;
/// Longest reason why a body is not A2A; it may quote the body.
const REASON: usize = 400;

/// What came back, before it is understood.
#[derive(Debug)]
pub(in crate::a2a) struct Body {
    came: Came,
    status: StatusCode,
    pub(in crate::a2a) bytes: Bytes,
}

/// How something came, for people who wonder about it.
#[derive(Debug)]
enum Came {
    /// As the body of a response, which may name its type.
    AsBody(Option<String>),
    /// As the data of an event.
    AsEvent,
}

impl Body {
    pub(in crate::a2a) async fn read(response: Response, limit: u64) -> Result<Self, ClientError> {
        let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let came = Came::AsBody(content_type.map(|value| crate::text::shorten(value, 80)));
        let status = response.status();
        let bytes = match response.body(limit).await {
            // The status says most of it.
            Err(error @ ClientError::Compressed { .. }) if !status.is_success() => error.to_string().into(),
            read => read?,
        };
        Ok(Self { came, status, bytes })
    }

    /// The data of one event.
    pub(in crate::a2a) fn of_event(bytes: Bytes) -> Self {
        Self { came: Came::AsEvent, status: StatusCode::OK, bytes }
    }

    #[cfg(test)]
    pub(super) fn recorded(status: u16, content_type: Option<&str>, bytes: &[u8]) -> Self {
        Self {
            came: Came::AsBody(content_type.map(str::to_owned)),
            status: StatusCode::from_u16(status).expect("recordings have a status"),
            bytes: Bytes::copy_from_slice(bytes),
        }
    }

    /// Lets pass what may be a result.
    pub(in crate::a2a) fn check(self) -> Result<Self, ClientError> {
        let is_shallow = json::is_shallow(&self.bytes);
        if self.status.is_success() {
            return match is_shallow {
                true => Ok(self),
                false => Err(self.not_a2a(&format!("it nests deeper than {}", json::MAX_DEPTH))),
            };
        }
        // An error status may still carry an error object, which says more; a result under an
        // error status is an error all the same. What nests too deep is not read as JSON.
        Err(match is_shallow.then(|| RpcError::in_body(&self.bytes)).flatten() {
            Some(error) => self.explain(NotAResult::Error(error)),
            None => ClientError::Refused {
                http_status: Some(self.status.as_u16()),
                code: None,
                message: self.snippet(),
                data: None,
                origin: Origin::Server,
            },
        })
    }

    pub(in crate::a2a) fn explain(&self, problem: NotAResult) -> ClientError {
        match problem {
            NotAResult::Error(error) => ClientError::Refused {
                http_status: Some(self.status.as_u16()).filter(|_| !self.status.is_success()),
                code: error.code,
                message: crate::text::shorten(&error.message, 4096),
                data: error.data,
                origin: match self.came {
                    Came::AsEvent => Origin::Stream,
                    Came::AsBody(_) if error.is_of_framework => Origin::Server,
                    Came::AsBody(_) => Origin::Agent,
                },
            },
            NotAResult::NotA2a(reason) => self.not_a2a(&reason),
        }
    }

    fn not_a2a(&self, reason: &str) -> ClientError {
        let reason = crate::text::shorten(reason, REASON);
        let reason = match &self.came {
            Came::AsBody(Some(content_type)) if !content_type.to_ascii_lowercase().contains("json") => {
                format!("{reason}; it came as {content_type}")
            }
            Came::AsBody(Some(_)) | Came::AsEvent => reason,
            Came::AsBody(None) => format!("{reason}; it came without a content type"),
        };
        ClientError::NotA2a { reason, snippet: self.snippet() }
    }

    fn snippet(&self) -> String {
        crate::text::snippet(&self.bytes, SNIPPET)
    }
}
