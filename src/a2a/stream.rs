//! The stream of events that an agent sends in response to a request.

use futures_util::FutureExt as _;
use reqwest::header::{CONTENT_TYPE, HeaderMap};

use super::client::{ClientError, ResponseBody, ResponseId, ResponseLimits};
use super::dialect::Dialect;
use super::http::HttpResponse;
use super::model::Event;
use super::sse::SseParser;
use crate::memory::MemoryCharge;
use crate::offload;

/// The limit for a whole stream, in multiples of the limit for one event. It bounds the work; other limits bound the
/// memory.
const STREAM_FACTOR: u64 = 64;

/// Dropping it closes the connection.
#[derive(Debug)]
pub struct EventStream {
    source: Source,
    dialect: Dialect,
    limits: ResponseLimits,
    ids: ResponseId,
    /// Data that has arrived. It stays here until it is decoded, so that a caller may stop waiting at any time.
    undecoded: Option<ResponseBody>,
    /// For the event that was returned last.
    event_charge: Option<MemoryCharge>,
    received: u64,
    /// Whether there was an event of A2A. From then on other data is ignored.
    has_event: bool,
    /// The error of the first data that is not A2A, until there is an event.
    first_error: Option<ClientError>,
}

#[derive(Debug)]
enum Source {
    Events {
        response: Box<HttpResponse>,
        parser: Box<SseParser>,
        /// For the data that the parser holds.
        charge: Option<MemoryCharge>,
        ended: bool,
    },
    /// Some agents respond with one JSON document: an error, or the whole task.
    Document(Option<ResponseBody>),
}

impl EventStream {
    /// Opens a response with a status of success. The limits are for each event.
    pub(super) async fn open(
        mut response: HttpResponse,
        dialect: Dialect,
        limits: ResponseLimits,
        ids: ResponseId,
    ) -> Result<Self, ClientError> {
        response.check_encoding()?;
        let content_type = response.headers.get(CONTENT_TYPE);
        let is_events = content_type
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.to_ascii_lowercase().contains("event-stream"));
        let source = if is_events {
            let max_event = usize::try_from(limits.max_size).unwrap_or(usize::MAX);
            let parser = Box::new(SseParser::new(max_event));
            // A stream may last for hours, and no memory budget counts its headers.
            response.headers = HeaderMap::new();
            Source::Events { response: Box::new(response), parser, charge: None, ended: false }
        } else {
            Source::Document(Some(ResponseBody::read(response, &limits).await?))
        };
        Ok(Self {
            source,
            dialect,
            limits,
            ids,
            undecoded: None,
            event_charge: None,
            received: 0,
            has_event: false,
            first_error: None,
        })
    }

    #[cfg(test)]
    pub(super) fn charge_to(&mut self, memory: std::sync::Arc<crate::memory::MemoryAccount>) {
        self.limits.memory = memory;
    }

    /// Reads the end of the stream if it has already arrived, so that the connection can be reused.
    pub fn close(&mut self) {
        if let Source::Events { response, .. } = &mut self.source {
            let is_ended = matches!(response.chunk().now_or_never(), Some(Ok(None)));
            if is_ended && self.ids.allows_reuse() {
                response.keep_connection();
            }
        }
    }

    /// The next event; `None` when the agent has ended the stream. Skips data that is not an event of A2A, because
    /// keep-alives have many forms and newer versions have new kinds of events, unless the stream has nothing else.
    ///
    /// Cancel-safe: an event that has arrived is returned by the next call.
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            self.event_charge = None;
            if self.undecoded.is_none() {
                self.undecoded = self.next_body().await?;
                if self.undecoded.is_none() {
                    return self.first_error.take().map_or(Ok(None), Err);
                }
            }
            if let Some(event) = self.decode_arrived().await? {
                return Ok(Some(event));
            }
            // A burst of data that is not A2A must not keep other calls waiting.
            tokio::task::coop::consume_budget().await;
        }
    }

    /// Decodes the data that has arrived and still waits for that. `None` if there is none, or if it is not an event
    /// of A2A.
    pub async fn decode_arrived(&mut self) -> Result<Option<Event>, ClientError> {
        let Some(size) = self.undecoded.as_ref().map(ResponseBody::len) else { return Ok(None) };
        let decode = || {
            let body = self.undecoded.take()?;
            Some(body.decode_now(self.dialect, Ok, &self.limits, &self.ids))
        };
        match offload::run(&self.limits.memory.agent, size, decode).await {
            Some(Ok((event, charge))) => {
                self.event_charge = charge;
                self.has_event = true;
                self.first_error = None;
                Ok(Some(event))
            }
            Some(Err(error @ ClientError::NotA2a { .. })) => {
                // The log does not show the data, which may repeat a user's answer.
                tracing::debug!("ignoring data in a stream that is not an event of A2A");
                if !self.has_event {
                    self.first_error.get_or_insert(error);
                }
                Ok(None)
            }
            Some(Err(error)) => Err(error),
            None => Ok(None),
        }
    }

    async fn next_body(&mut self) -> Result<Option<ResponseBody>, ClientError> {
        let (response, parser, charge, ended) = match &mut self.source {
            Source::Document(document) => return Ok(document.take()),
            Source::Events { response, parser, charge, ended } => (response, parser, charge, ended),
        };
        let limit = self.limits.max_size;
        loop {
            let parsed = if *ended { parser.finish() } else { parser.next_event() };
            match parsed.map_err(|_| ClientError::TooLarge { limit })? {
                Some(data) => {
                    let mut data_charge = None;
                    let memory = &self.limits.memory;
                    memory.cover(charge, parser.allocated())?;
                    memory.cover(&mut data_charge, data.len())?;
                    return Ok(Some(ResponseBody::of_event(data, data_charge, response.may_be_stray)));
                }
                None if *ended => return Ok(None),
                None => {}
            }
            match response.chunk().await? {
                Some(chunk) => {
                    self.received += chunk.len() as u64;
                    if self.received > limit.saturating_mul(STREAM_FACTOR) {
                        return Err(ClientError::TooLarge { limit });
                    }
                    parser.feed(&chunk);
                    self.limits.memory.cover(charge, parser.allocated())?;
                }
                None => {
                    *ended = true;
                    if self.ids.allows_reuse() {
                        response.keep_connection();
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use crate::a2a::tests::fake::{FakeAgent, error};
    use crate::memory::MemoryAccount;
    use crate::offload;
    use crate::telemetry::trace_context::TraceContext;

    #[tokio::test]
    async fn an_event_that_waits_to_be_decoded_is_not_lost_when_the_caller_stops_waiting() {
        let text = "x".repeat(2 * offload::INLINE);
        let artifact = json!({"artifactId": "a", "parts": [{"kind": "text", "text": text}]});
        let update = json!({"kind": "artifact-update", "taskId": "t", "artifact": artifact});
        let mut fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
            "tasks/resubscribe" => {
                let event = json!({"jsonrpc": "2.0", "id": request.json()["id"], "result": update});
                (200, "text/event-stream", format!("data: {event}\n\n"))
            }
            _ => error(-32001, "Task not found"),
        })
        .await;
        fake.memory = MemoryAccount::unlimited("an agent whose turn is taken");
        let (client, _) = fake.client("protocol: 0.3", &json!({"name": "fake"})).await;
        let mut events = client.subscribe("t", &TraceContext::default()).await.unwrap();
        let turn = offload::hold_turn(&fake.memory.agent);
        while events.undecoded.is_none() {
            let waited = tokio::time::timeout(Duration::from_millis(20), events.next()).await;
            assert!(waited.is_err(), "it is not the agent's turn");
        }
        drop(turn);
        let arrived = events.decode_arrived().await.unwrap().expect("the event has arrived");
        assert!(arrived.allocated() > 2 * offload::INLINE);
        assert!(events.next().await.unwrap().is_none());
    }
}
