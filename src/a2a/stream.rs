//! The stream of events that an agent sends in response to a request.

use futures_util::FutureExt as _;

use super::client::{ClientError, ResponseBody};
use super::dialect::Dialect;
use super::http::HttpResponse;
use super::model::Event;
use super::sse::SseParser;

/// The limit for a whole stream, in multiples of the limit for one event. It bounds the work; other limits bound the
/// memory.
const STREAM_FACTOR: u64 = 64;

/// Dropping it closes the connection.
#[derive(Debug)]
pub struct EventStream {
    source: Source,
    dialect: Dialect,
    limit: u64,
    received: u64,
    /// Whether there was an event of A2A. From then on other data is ignored.
    has_event: bool,
    /// The error of the first data that is not A2A, until there is an event.
    first_error: Option<ClientError>,
}

#[derive(Debug)]
enum Source {
    Events {
        response: HttpResponse,
        parser: Box<SseParser>,
        ended: bool,
    },
    /// Some agents respond with one JSON document: an error, or the whole task.
    Document(Option<ResponseBody>),
}

impl EventStream {
    /// Opens a response with a status of success. No event may be larger than `limit` bytes.
    pub(super) async fn open(
        response: HttpResponse,
        dialect: Dialect,
        limit: u64,
    ) -> Result<Self, ClientError> {
        response.check_encoding()?;
        let content_type = response.headers.get(reqwest::header::CONTENT_TYPE);
        let is_events = content_type
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.to_ascii_lowercase().contains("event-stream"));
        let source = if is_events {
            let max_event = usize::try_from(limit).unwrap_or(usize::MAX);
            Source::Events { response, parser: Box::new(SseParser::new(max_event)), ended: false }
        } else {
            Source::Document(Some(ResponseBody::read(response, limit).await?))
        };
        Ok(Self { source, dialect, limit, received: 0, has_event: false, first_error: None })
    }

    /// Reads the end of the stream if it has already arrived, so that the connection can be reused.
    pub fn close(&mut self) {
        if let Source::Events { response, .. } = &mut self.source {
            let _ = response.chunk().now_or_never();
        }
    }

    /// The next event; `None` when the agent has ended the stream. Skips data that is not an event of A2A, because
    /// keep-alives have many forms and newer versions have new kinds of events, unless the stream has nothing else.
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            let Some(body) = self.next_body().await? else {
                return self.first_error.take().map_or(Ok(None), Err);
            };
            match body.check().and_then(|body| body.decode(self.dialect, Dialect::read_event)) {
                Ok(event) => {
                    self.has_event = true;
                    self.first_error = None;
                    return Ok(Some(event));
                }
                Err(error @ ClientError::NotA2a { .. }) => {
                    // The log does not show the data, which may repeat a user's answer.
                    tracing::debug!("ignoring data in a stream that is not an event of A2A");
                    if !self.has_event {
                        self.first_error.get_or_insert(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn next_body(&mut self) -> Result<Option<ResponseBody>, ClientError> {
        let (response, parser, ended) = match &mut self.source {
            Source::Document(document) => return Ok(document.take()),
            Source::Events { response, parser, ended } => (response, parser, ended),
        };
        loop {
            let parsed = if *ended { parser.finish() } else { parser.next_event() };
            match parsed.map_err(|_| ClientError::TooLarge { limit: self.limit })? {
                Some(data) => return Ok(Some(ResponseBody::of_event(data))),
                None if *ended => return Ok(None),
                None => {}
            }
            match response.chunk().await? {
                Some(chunk) => {
                    self.received += chunk.len() as u64;
                    if self.received > self.limit.saturating_mul(STREAM_FACTOR) {
                        return Err(ClientError::TooLarge { limit: self.limit });
                    }
                    parser.feed(&chunk);
                }
                None => *ended = true,
            }
        }
    }
}
