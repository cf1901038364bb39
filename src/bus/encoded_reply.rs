//! A reply as a NATS message.

mod question;

use async_nats::{Client, HeaderMap, HeaderValue, Subject};
use bytes::Bytes;

use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::TaskRef;
use crate::text::shorten;

/// Longest `Nats-Service-Error`.
const MAX_ERROR: usize = 400;
/// What a message costs beside payload and headers, at the most.
const FRAMING: usize = 64;

/// A reply as it goes out: its body, and the headers of an error.
#[derive(Debug)]
pub(crate) struct EncodedReply {
    pub body: Bytes,
    /// The two headers of an error.
    pub headers: Option<HeaderMap>,
    /// The number and name of the error, for the counts.
    pub error: Option<(u16, &'static str)>,
}

impl EncodedReply {
    /// Writes a reply. One that does not fit into a message, with `overhead` bytes around it, becomes an
    /// error that does; a question is cut instead.
    pub(crate) fn new(reply: &Reply, max_payload: usize, overhead: usize) -> Self {
        match reply {
            Ok(outcome) => {
                let encoded = Self { body: outcome.to_json(), headers: None, error: None };
                let size = encoded.size(overhead);
                if size <= max_payload {
                    return encoded;
                }
                if outcome.follow_up.is_some()
                    && let Some(body) = question::cut(outcome, max_payload.saturating_sub(overhead))
                {
                    return Self { body, ..encoded };
                }
                Self::too_large(size, Some(outcome.task.clone()), max_payload, overhead)
            }
            Err(error) => {
                let encoded = Self::of_error(error);
                let size = encoded.size(overhead);
                if size <= max_payload {
                    return encoded;
                }
                if error.info.a2a_data.is_some() {
                    // The agent's code and text say more than that they came with much data.
                    let mut error = error.clone();
                    error.info.a2a_data = None;
                    error.message += " (its data is too large for a message and left out)";
                    let encoded = Self::of_error(&error);
                    if encoded.size(overhead) <= max_payload {
                        return encoded;
                    }
                }
                Self::too_large(size, error.task.clone(), max_payload, overhead)
            }
        }
    }

    /// A document that is no reply object, such as a card.
    pub(crate) fn of_document(body: Bytes, max_payload: usize) -> Self {
        if body.len() <= max_payload {
            return Self { body, headers: None, error: None };
        }
        Self::too_large(body.len(), None, max_payload, 0)
    }

    fn too_large(size: usize, task: Option<TaskRef>, max_payload: usize, overhead: usize) -> Self {
        let message =
            format!("the reply has {size} bytes, and the NATS server accepts {max_payload} at most");
        let mut error = ActionError { task, ..ActionError::new(Code::TooLarge, message) };
        let encoded = Self::of_error(&error);
        if encoded.size(overhead) <= max_payload {
            return encoded;
        }
        // The ids are too long as well: an error without its task is better than none.
        error.task = None;
        Self::of_error(&error)
    }

    fn size(&self, overhead: usize) -> usize {
        let headers = if self.headers.is_some() { MAX_ERROR + FRAMING } else { 0 };
        self.body.len() + headers + overhead
    }

    fn of_error(error: &ActionError) -> Self {
        let code = error.info.code;
        let line: String = error.message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Service-Error-Code", HeaderValue::from(u64::from(code.number())));
        headers.insert("Nats-Service-Error", shorten(&line, MAX_ERROR).as_str());
        Self { body: error.to_json(), headers: Some(headers), error: Some((code.number(), code.name())) }
    }

    pub(crate) async fn send(self, client: &Client, to: Subject) -> Result<(), async_nats::PublishError> {
        match self.headers {
            Some(headers) => client.publish_with_headers(to, headers, self.body).await,
            None => client.publish(to, self.body).await,
        }
    }
}
