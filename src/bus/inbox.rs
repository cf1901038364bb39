//! Sends a streamed reply to the caller's inbox, in order and at the pace of the connection.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Subject, Subscriber};
use bytes::Bytes;
use futures_util::poll;

use super::outbox::{Outbox, Room};
use super::peers::Link;
use crate::text::error_chain;

/// Bytes of a streamed message in addition to its data: the object around it, and its headers.
pub(super) const OVERHEAD: usize = 256;

#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) outbox: Outbox,
    to: Subject,
    keep_alive: Duration,
    last_sent: Instant,
    /// Whether a message had to wait because the connection accepts less than the bridge sends. Reset in a pause,
    /// during which the connection can catch up.
    pub(super) is_behind: bool,
    /// If another replica has forwarded the request: how much of the reply may be on the way to it.
    pub(super) link: Option<Arc<Link>>,
}

impl Inbox {
    pub(super) fn new(outbox: Outbox, to: Subject, keep_alive: Duration) -> Self {
        Self { outbox, to, keep_alive, last_sent: Instant::now(), is_behind: false, link: None }
    }

    pub(super) fn max_payload(&self) -> usize {
        self.outbox.client.max_payload()
    }

    /// The maximum bytes of data in one message.
    pub(super) fn data_room(&self) -> usize {
        self.max_payload().saturating_sub(OVERHEAD)
    }

    /// The time until the next keep-alive is due.
    pub(super) fn until_keep_alive(&self) -> Duration {
        self.keep_alive.saturating_sub(self.last_sent.elapsed())
    }

    /// Waits for room in the send window for a message of `bytes` bytes.
    pub(super) async fn reserve(&mut self, bytes: usize) -> Option<Room> {
        let reserving = self.outbox.reserve(bytes);
        notice_wait(&mut self.is_behind, reserving).await
    }

    /// Sends a message after those before it, in the room that was reserved for it, if any. The server answers to
    /// `reply` if no one is subscribed.
    pub(super) async fn send(
        &mut self,
        room: Option<Room>,
        headers: Option<HeaderMap>,
        reply: Option<Subject>,
        body: Bytes,
    ) {
        self.last_sent = Instant::now();
        let (outbox, to) = (&self.outbox, self.to.clone());
        if let Some(link) = &self.link
            && !notice_wait(&mut self.is_behind, Box::pin(link.pass(body.len()))).await
        {
            return;
        }
        let sending = async {
            match room {
                Some(room) => outbox.publish_in(Some(room), to, headers, reply, body).await,
                None => outbox.publish(to, headers, reply, body).await,
            }
        };
        if let Err(error) = notice_wait(&mut self.is_behind, sending).await {
            tracing::warn!(error = error_chain(&error), "cannot send a part of a streamed reply");
        }
    }
}

/// Sets `is_behind` if the future has to wait.
async fn notice_wait<T>(is_behind: &mut bool, future: impl Future<Output = T>) -> T {
    // Unconstrained, so that `Pending` means a full queue and not an exhausted tokio coop budget.
    let mut future = pin!(tokio::task::unconstrained(future));
    match poll!(&mut future) {
        Poll::Ready(result) => result,
        Poll::Pending => {
            *is_behind = true;
            future.await
        }
    }
}

/// Subscribes to a new subject for one message. Callers learn the subject, and the client would queue thousands of
/// messages for it.
pub(super) async fn subscribe_once(client: &Client) -> Option<(Subject, Subscriber)> {
    let subject = Subject::from(client.new_inbox());
    let mut subscriber = client.subscribe(subject.clone()).await.ok()?;
    subscriber.unsubscribe_after(1).await.ok()?;
    Some((subject, subscriber))
}

/// An outbox whose client never connects, so that messages wait in the client.
#[cfg(test)]
pub(super) async fn unconnected_outbox(agent: &str) -> Outbox {
    let options = async_nats::ConnectOptions::new().retry_on_initial_connect();
    let client = options.connect("127.0.0.1:1").await.expect("a client without a connection");
    Outbox::unconfirmed(client, agent)
}
