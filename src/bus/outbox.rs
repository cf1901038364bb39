//! Publishes the messages of one agent, with a limit for those that wait in the NATS client.
//!
//! The client accepts a message as soon as its queue has room, and the queue counts messages, not bytes: while the
//! connection is slow, two thousand replies of a megabyte each would wait there. So a message of more than a few
//! kilobytes first waits for room in the agent's send window, and in that of all agents, which is a part of the
//! [memory budget](crate::memory). It leaves both when the client has written it to the connection. A large reply waits
//! before it is encoded.
//!
//! Whoever sends waits, and keeps what it holds meanwhile: a stream stops reading from its agent, and a call keeps its
//! permit, so that further calls get `busy`. One agent's window does not delay another agent.

use std::sync::Arc;

use async_nats::{Client, HeaderMap, PublishError, Subject};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::memory::MemoryAccount;

/// Bytes that may wait in the client for each agent. A single message may be larger.
const WINDOW: usize = 8 << 20;
/// Messages up to this size do not wait: the client's queue, 2048 messages, is a sufficient limit for them.
const SMALL: usize = 4 << 10;

#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    pub(super) client: Client,
    /// The name of the agent.
    pub(super) agent: Arc<str>,
    window: Arc<Semaphore>,
    /// The bytes of the window.
    size: usize,
    /// The window of all agents together.
    shared: Option<Arc<Semaphore>>,
}

/// Room in the send window for one message.
#[derive(Debug)]
pub(crate) struct Room {
    _own: Option<OwnedSemaphorePermit>,
    _shared: Option<OwnedSemaphorePermit>,
}

/// A message body that holds its room in the send window until the last copy is dropped.
struct AdmittedBody {
    body: Bytes,
    _room: Room,
}

impl AsRef<[u8]> for AdmittedBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl Outbox {
    pub(crate) fn new(client: Client, memory: &MemoryAccount) -> Self {
        let shared = Some(Arc::clone(memory.sending()));
        let agent = Arc::clone(&memory.agent);
        Self { client, agent, window: Arc::new(Semaphore::new(WINDOW)), size: WINDOW, shared }
    }

    /// Lets messages that are not small wait for each other, so that at most one of them waits in the client.
    pub(super) fn one_at_a_time(client: Client) -> Self {
        Self { client, agent: "".into(), window: Arc::new(Semaphore::new(1)), size: 1, shared: None }
    }

    pub(super) fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    /// Waits for room for a message of `bytes` bytes. Small messages need none.
    pub(super) async fn reserve(&self, bytes: usize) -> Option<Room> {
        if bytes <= SMALL {
            return None;
        }
        let own = acquire(&self.window, bytes.min(self.size)).await;
        let shared = match &self.shared {
            // At least as large as the window of one agent, because `limits.memory` is at least 64 MiB. One agent waits
            // here with at most its own window.
            Some(shared) => acquire(shared, bytes.min(WINDOW)).await,
            None => None,
        };
        Some(Room { _own: own, _shared: shared })
    }

    /// Publishes a message after those before it. The server answers to `reply` if no one is subscribed to `to`.
    pub(super) async fn publish(
        &self,
        to: Subject,
        headers: Option<HeaderMap>,
        reply: Option<Subject>,
        body: Bytes,
    ) -> Result<(), PublishError> {
        let room = self.reserve(body.len()).await;
        self.publish_in(room, to, headers, reply, body).await
    }

    /// Like [`Outbox::publish`], with room that was reserved before the message was encoded.
    pub(super) async fn publish_in(
        &self,
        room: Option<Room>,
        to: Subject,
        headers: Option<HeaderMap>,
        reply: Option<Subject>,
        body: Bytes,
    ) -> Result<(), PublishError> {
        let body = match room {
            Some(room) => Bytes::from_owner(AdmittedBody { body, _room: room }),
            None => body,
        };
        match (headers, reply) {
            (None, None) => self.client.publish(to, body).await,
            (Some(headers), None) => self.client.publish_with_headers(to, headers, body).await,
            (headers, Some(reply)) => {
                let headers = headers.unwrap_or_default();
                self.client.publish_with_reply_and_headers(to, reply, headers, body).await
            }
        }
    }
}

async fn acquire(window: &Arc<Semaphore>, bytes: usize) -> Option<OwnedSemaphorePermit> {
    let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
    // The semaphore is never closed.
    Arc::clone(window).acquire_many_owned(bytes).await.ok()
}
