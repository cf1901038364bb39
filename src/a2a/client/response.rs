//! The response to a request, from its bytes to a result: limits, ids, and errors.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use reqwest::StatusCode;
use reqwest::header::CONTENT_TYPE;

use super::error::{ClientError, ErrorOrigin};
use crate::a2a::dialect::{Dialect, ReadError, RpcError};
use crate::a2a::http::HttpResponse;
use crate::a2a::meter::Meter;
use crate::a2a::model::Event;
#[cfg(test)]
use crate::a2a::model::SendResult;
use crate::a2a::response_ids::{AgentIds, FoundId, IdCheck, ResponseKind};
use crate::json;
use crate::memory::{MemoryAccount, MemoryCharge, SizeError};
use crate::offload;
use crate::text::{shorten, snippet};

/// How much of a body that is not A2A an error shows.
const MAX_SNIPPET: usize = 200;
/// Maximum length of the reason why a body is not A2A; it may quote the body.
const MAX_REASON: usize = 400;

/// The limits for the responses of one agent.
#[derive(Debug, Clone)]
pub(in crate::a2a) struct ResponseLimits {
    /// For one response or event: its text, and what is decoded from it.
    pub(in crate::a2a) max_size: u64,
    pub(in crate::a2a) memory: Arc<MemoryAccount>,
}

/// How a decoded event becomes the result of a request.
pub(super) type Convert<T> = fn(Event) -> Result<T, serde_json::Error>;

/// Checks the ids of one response.
#[derive(Debug, Clone)]
pub(in crate::a2a) struct ResponseId {
    pub(super) check: IdCheck,
    pub(super) kind: ResponseKind,
    pub(super) agent: AgentIds,
}

impl ResponseId {
    /// For responses whose ids do not matter.
    #[cfg(test)]
    pub(in crate::a2a) fn unchecked() -> Self {
        let (check, agent) = (IdCheck::new(None), AgentIds::default());
        Self { check, kind: ResponseKind::Document, agent }
    }

    /// Judges what was decoded by its id. A result must have the id of the request, unless it certainly belongs to the
    /// request. An error may have no id. What is not A2A has none.
    pub(in crate::a2a) fn judge<T>(
        &self,
        found: FoundId,
        result: Result<T, ClientError>,
        may_be_stray: bool,
    ) -> Result<T, ClientError> {
        if !self.check.is_rpc() {
            return result;
        }
        let is_wrong = match &result {
            Ok(_) => {
                self.agent.learn(self.kind, found == FoundId::Same);
                found != FoundId::Same
            }
            Err(_) if found == FoundId::Other => {
                self.agent.learn(self.kind, false);
                true
            }
            Err(_) => false,
        };
        if is_wrong && may_be_stray { Err(ClientError::WrongId) } else { result }
    }

    /// Whether the connection may serve another request after this response.
    pub(in crate::a2a) fn allows_reuse(&self) -> bool {
        !self.check.is_rpc() || self.agent.are_echoed(self.kind)
    }
}

/// The body of a response, or the data of one event, before it is decoded.
#[derive(Debug)]
pub(in crate::a2a) struct ResponseBody {
    source: BodySource,
    status: StatusCode,
    bytes: Bytes,
    /// For the bytes.
    charge: Option<MemoryCharge>,
    may_be_stray: bool,
}

#[derive(Debug)]
enum BodySource {
    /// With the connection of the response, which is closed unless the id is right.
    Response {
        content_type: Option<String>,
        connection: Option<Box<HttpResponse>>,
    },
    StreamEvent,
}

impl ResponseBody {
    pub(in crate::a2a) async fn read(
        mut response: HttpResponse,
        limits: &ResponseLimits,
    ) -> Result<Self, ClientError> {
        let content_type = response.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let content_type = content_type.map(|value| shorten(value, 80));
        let (status, may_be_stray) = (response.status, response.may_be_stray);
        let mut charge = None;
        let bytes = match response.body(limits.max_size, &limits.memory, &mut charge).await {
            // The status is more informative than the compression.
            Err(error @ ClientError::Compressed { .. }) if !status.is_success() => error.to_string().into(),
            read => read?,
        };
        let source = BodySource::Response { content_type, connection: Some(Box::new(response)) };
        Ok(Self { source, status, bytes, charge, may_be_stray })
    }

    pub(in crate::a2a) fn of_event(bytes: Bytes, charge: Option<MemoryCharge>, may_be_stray: bool) -> Self {
        Self { source: BodySource::StreamEvent, status: StatusCode::OK, bytes, charge, may_be_stray }
    }

    /// Decodes the body if its status is a success, and it is not nested too deeply. Returns the charge for what was
    /// decoded.
    pub(in crate::a2a) async fn decode<T>(
        self,
        dialect: Dialect,
        convert: Convert<T>,
        limits: &ResponseLimits,
        ids: &ResponseId,
    ) -> Result<(T, Option<MemoryCharge>), ClientError> {
        let (agent, size) = (&limits.memory.agent, self.len());
        offload::run(agent, size, || self.decode_now(dialect, convert, limits, ids)).await
    }

    /// Decodes like [`Self::decode`], for a caller that has offloaded it.
    pub(in crate::a2a) fn decode_now<T>(
        mut self,
        dialect: Dialect,
        convert: Convert<T>,
        limits: &ResponseLimits,
        ids: &ResponseId,
    ) -> Result<(T, Option<MemoryCharge>), ClientError> {
        let mut check = ids.check;
        let result = self.decode_checked(dialect, convert, limits, &mut check);
        self.finish(check.found, ids, result)
    }

    /// The size of its text, in bytes.
    pub(in crate::a2a) fn len(&self) -> usize {
        self.bytes.len()
    }

    fn decode_checked<T>(
        &mut self,
        dialect: Dialect,
        convert: Convert<T>,
        limits: &ResponseLimits,
        check: &mut IdCheck,
    ) -> Result<(T, Option<MemoryCharge>), ClientError> {
        if !self.status.is_success() || !json::is_shallow(&self.bytes) {
            return Err(self.status_error(check));
        }
        let limit = usize::try_from(limits.max_size).unwrap_or(usize::MAX);
        let meter = Meter::new(&limits.memory, self.charge.take(), self.bytes.len(), limit);
        match meter.run(|| dialect.read(&self.bytes, check, convert)) {
            Ok((read, charge)) => Ok((read.map_err(|error| self.error(error))?, charge)),
            Err(SizeError::TooLarge) => Err(ClientError::TooLarge { limit: limits.max_size }),
            Err(SizeError::OutOfMemory) => Err(ClientError::OutOfMemory),
        }
    }

    /// The error that the status means.
    pub(in crate::a2a) async fn into_error(mut self, agent: &str, ids: &ResponseId) -> ClientError {
        offload::run(agent, self.bytes.len(), || {
            let mut check = ids.check;
            let error = self.status_error(&mut check);
            let Err(error) = self.finish(check.found, ids, Err::<Infallible, _>(error));
            error
        })
        .await
    }

    /// Judges the id, and keeps the connection if the response is for this request.
    fn finish<T>(
        &mut self,
        found: FoundId,
        ids: &ResponseId,
        result: Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let result = ids.judge(found, result, self.may_be_stray);
        if let BodySource::Response { connection, .. } = &mut self.source
            && let Some(mut connection) = connection.take()
            && !matches!(result, Err(ClientError::WrongId))
            && ids.allows_reuse()
        {
            connection.keep_connection();
        }
        result
    }

    /// The error that the status or the nesting means. A body with an error status may contain an error object, which
    /// is more informative; a result with an error status is still an error. A body that is nested too deeply is not
    /// parsed.
    fn status_error(&self, check: &mut IdCheck) -> ClientError {
        let is_shallow = json::is_shallow(&self.bytes);
        if self.status.is_success() {
            return self.not_a2a(&format!("it is nested more than {} levels deep", json::MAX_DEPTH));
        }
        if is_shallow {
            check.compare_in(&self.bytes);
        }
        match is_shallow.then(|| RpcError::in_body(&self.bytes)).flatten() {
            Some(error) => self.error(ReadError::Agent(error)),
            None => ClientError::Refused {
                http_status: Some(self.status.as_u16()),
                code: None,
                message: snippet(&self.bytes, MAX_SNIPPET),
                data: None,
                origin: ErrorOrigin::Server,
            },
        }
    }

    fn error(&self, error: ReadError) -> ClientError {
        match error {
            ReadError::Agent(error) => ClientError::Refused {
                http_status: Some(self.status.as_u16()).filter(|_| !self.status.is_success()),
                code: error.code,
                message: error.message,
                data: error.data,
                origin: match self.source {
                    BodySource::StreamEvent => ErrorOrigin::Stream,
                    BodySource::Response { .. } if error.is_from_framework => ErrorOrigin::Server,
                    BodySource::Response { .. } => ErrorOrigin::Agent,
                },
            },
            ReadError::NotA2a(reason) => self.not_a2a(&reason),
        }
    }

    fn not_a2a(&self, reason: &str) -> ClientError {
        let reason = shorten(reason, MAX_REASON);
        let reason = match &self.source {
            BodySource::Response { content_type: None, .. } => {
                format!("{reason}; there is no content type")
            }
            BodySource::Response { content_type: Some(content_type), .. }
                if !content_type.to_ascii_lowercase().contains("json") =>
            {
                format!("{reason}; the content type is {content_type}")
            }
            BodySource::Response { .. } | BodySource::StreamEvent => reason,
        };
        ClientError::NotA2a { reason, snippet: snippet(&self.bytes, MAX_SNIPPET) }
    }
}

/// Reads a recorded response like [`Client::send`].
#[cfg(test)]
pub(in crate::a2a) fn read_recorded(
    dialect: Dialect,
    status: u16,
    content_type: Option<&str>,
    bytes: &[u8],
) -> Result<SendResult, ClientError> {
    let limits = ResponseLimits { max_size: u64::MAX, memory: MemoryAccount::unlimited("fake") };
    let mut body = ResponseBody {
        source: BodySource::Response { content_type: content_type.map(str::to_owned), connection: None },
        status: StatusCode::from_u16(status).expect("recordings have a status"),
        bytes: Bytes::copy_from_slice(bytes),
        charge: None,
        may_be_stray: false,
    };
    body.decode_checked(dialect, SendResult::try_from, &limits, &mut IdCheck::new(None))
        .map(|(result, _)| result)
}
