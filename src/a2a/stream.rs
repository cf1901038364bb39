//! A stream of events from one agent, read from a socket one at a time.

use futures_util::FutureExt as _;

use super::client::{Body, ClientError};
use super::dialect::Dialect;
use super::http::Response;
use super::model::Event;
use super::sse::Parser;

/// How many times the size of its largest event a stream may have in all. What is held of it is
/// bounded elsewhere; this bounds the work.
const STREAM_FACTOR: u64 = 64;

/// The events of one call. Dropping it closes the connection.
#[derive(Debug)]
pub struct EventStream {
    source: Source,
    dialect: Dialect,
    limit: u64,
    received: u64,
    // The first thing that was no event, while no event has come.
    strange: Strange,
}

/// What is passed over: signs of life have many forms, and newer versions newer kinds of events.
#[derive(Debug)]
enum Strange {
    None,
    First(ClientError),
    // There was an event, so the stream is one of A2A.
    Harmless,
}

#[derive(Debug)]
enum Source {
    Events {
        response: Response,
        parser: Box<Parser>,
        ended: bool,
    },
    /// Some agents answer a stream call with one JSON document: an error, or the whole task.
    Document(Option<Body>),
}

impl EventStream {
    /// Takes an answer that is not an error. No event may be larger than `limit`.
    pub(super) async fn open(response: Response, dialect: Dialect, limit: u64) -> Result<Self, ClientError> {
        response.check_encoding()?;
        let content_type = response.headers().get(reqwest::header::CONTENT_TYPE);
        let is_events = content_type
            .and_then(|value| value.to_str().ok())
            .is_some_and(|value| value.to_ascii_lowercase().contains("event-stream"));
        let source = if is_events {
            let max_event = usize::try_from(limit).unwrap_or(usize::MAX);
            Source::Events { response, parser: Box::new(Parser::new(max_event)), ended: false }
        } else {
            Source::Document(Some(Body::read(response, limit).await?))
        };
        Ok(Self { source, dialect, limit, received: 0, strange: Strange::None })
    }

    /// Takes the end of the stream if it is there already, so that the connection can be used again.
    pub fn close(&mut self) {
        if let Source::Events { response, .. } = &mut self.source {
            let _ = response.chunk().now_or_never();
        }
    }

    /// The next event; `None` when the agent has ended the stream. What is no event of A2A is passed over,
    /// unless there is nothing else.
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        loop {
            let Some(body) = self.next_body().await? else {
                return match std::mem::replace(&mut self.strange, Strange::Harmless) {
                    Strange::First(error) => Err(error),
                    Strange::None | Strange::Harmless => Ok(None),
                };
            };
            let event = body.check().and_then(|body| {
                self.dialect.read_event(&body.bytes).map_err(|problem| body.explain(problem))
            });
            match event {
                Ok(event) => {
                    self.strange = Strange::Harmless;
                    return Ok(Some(event));
                }
                Err(error @ ClientError::NotA2a { .. }) => {
                    // Not what it says: it may repeat a user's answer.
                    tracing::debug!("something in a stream is no event of A2A, and is passed over");
                    if let Strange::None = self.strange {
                        self.strange = Strange::First(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn next_body(&mut self) -> Result<Option<Body>, ClientError> {
        let (response, parser, ended) = match &mut self.source {
            Source::Document(document) => return Ok(document.take()),
            Source::Events { response, parser, ended } => (response, parser, ended),
        };
        loop {
            let parsed = if *ended { parser.finish() } else { parser.next_event() };
            match parsed.map_err(|_| ClientError::TooLarge { limit: self.limit })? {
                Some(data) => return Ok(Some(Body::of_event(data))),
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
