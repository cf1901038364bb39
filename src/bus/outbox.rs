//! Publishes the messages of one agent, with a limit for those that wait in the NATS client.
//!
//! The client accepts a message as soon as its queue has room, and the queue counts messages, not bytes: while the
//! connection is slow, two thousand replies of a megabyte each would wait there. So a message of more than a few
//! kilobytes first waits for room in the agent's send window. It leaves the window, and the agent's
//! [memory account](crate::memory), when the client has written it to the connection.
//!
//! Whoever sends waits, and keeps what it holds meanwhile: a stream stops reading from its agent, and a call keeps its
//! permit, so that further calls get `busy`. One agent's window does not delay another agent.

use std::sync::Arc;

use async_nats::{Client, HeaderMap, PublishError, Subject};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::memory::{MemoryAccount, MemoryCharge};

/// Bytes that may wait in the client for each agent. A single message may be larger.
const WINDOW: usize = 8 << 20;
/// Messages up to this size do not wait: the client's queue, 2048 messages, is a sufficient limit for them.
const SMALL: usize = 4 << 10;

#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    pub(super) client: Client,
    memory: Option<Arc<MemoryAccount>>,
    window: Arc<Semaphore>,
    window_size: usize,
}

/// A message body that holds its place in the send window until the last copy is dropped.
struct AdmittedBody {
    body: Bytes,
    _room: Option<OwnedSemaphorePermit>,
    _charge: Option<MemoryCharge>,
}

impl AsRef<[u8]> for AdmittedBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl Outbox {
    pub(crate) fn new(client: Client, memory: Arc<MemoryAccount>) -> Self {
        Self { client, memory: Some(memory), window: Arc::new(Semaphore::new(WINDOW)), window_size: WINDOW }
    }

    /// Lets messages that are not small wait for each other, so that at most one of them waits in the client.
    pub(super) fn one_at_a_time(client: Client) -> Self {
        Self { client, memory: None, window: Arc::new(Semaphore::new(1)), window_size: 1 }
    }

    /// Publishes a message after those before it. The server answers to `reply` if no one is subscribed to `to`.
    pub(super) async fn publish(
        &self,
        to: Subject,
        headers: Option<HeaderMap>,
        reply: Option<Subject>,
        body: Bytes,
    ) -> Result<(), PublishError> {
        let body = if body.len() <= SMALL { body } else { self.admit(body).await };
        match (headers, reply) {
            (None, None) => self.client.publish(to, body).await,
            (Some(headers), None) => self.client.publish_with_headers(to, headers, body).await,
            (headers, Some(reply)) => {
                let headers = headers.unwrap_or_default();
                self.client.publish_with_reply_and_headers(to, reply, headers, body).await
            }
        }
    }

    async fn admit(&self, body: Bytes) -> Bytes {
        let size = u32::try_from(body.len().min(self.window_size)).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let room = Arc::clone(&self.window).acquire_many_owned(size).await.ok();
        let charge = self.memory.as_ref().map(|memory| memory.charge_unchecked(body.len()));
        Bytes::from_owner(AdmittedBody { body, _room: room, _charge: charge })
    }
}
