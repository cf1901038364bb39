//! The inbox of a caller who is told more than once: in order, and at the caller's pace.

use crate::text::error_chain;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Subject};
use bytes::Bytes;
use futures_util::poll;

/// About how much text of an answer is joined into one message while the connection is behind.
pub(super) const MAX_JOINED: usize = 16 << 10;

/// The way to one caller.
#[derive(Debug)]
pub(super) struct Inbox {
    client: Client,
    to: Subject,
    last_sent: Instant,
    is_behind: bool,
}

impl Inbox {
    pub(super) fn new(client: Client, to: Subject) -> Self {
        Self { client, to, last_sent: Instant::now(), is_behind: false }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    /// How much of `limit` is left since something was sent.
    pub(super) fn silence_left(&self, limit: Duration) -> Duration {
        limit.saturating_sub(self.last_sent.elapsed())
    }

    /// Whether a message had to wait for its turn, as the connection takes less than it is given.
    pub(super) fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Forgets that, when there is a pause in which the connection can catch up.
    pub(super) fn pause(&mut self) {
        self.is_behind = false;
    }

    /// Sends a message, after those before it. `reply` is where the server answers if nobody listens.
    pub(super) async fn send(&mut self, headers: Option<HeaderMap>, reply: Option<Subject>, body: Bytes) {
        self.last_sent = Instant::now();
        let to = self.to.clone();
        let sending = async {
            match (headers, reply) {
                (None, None) => self.client.publish(to, body).await,
                (Some(headers), None) => self.client.publish_with_headers(to, headers, body).await,
                (headers, Some(reply)) => {
                    let headers = headers.unwrap_or_default();
                    self.client.publish_with_reply_and_headers(to, reply, headers, body).await
                }
            }
        };
        // Only a full queue may look like one, not a task that has used up its turn.
        let mut sending = pin!(tokio::task::unconstrained(sending));
        let sent = poll!(&mut sending);
        self.is_behind |= sent.is_pending();
        let sent = match sent {
            Poll::Ready(sent) => sent,
            Poll::Pending => sending.await,
        };
        if let Err(error) = sent {
            tracing::warn!(error = error_chain(&error), "a piece of a streamed answer could not be sent");
        }
    }
}
