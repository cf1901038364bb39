//! Publishes the messages of one agent, with a limit for those that wait in the NATS client.
//!
//! The client accepts a message as soon as its queue has room, and the queue counts messages, not bytes: while the
//! connection is slow, two thousand replies of a megabyte each would wait there. So a message of more than a few
//! kilobytes first waits for room in the agent's send window, and in that of all agents, which is a part of the
//! [memory budget](crate::memory). It leaves both when the client has written it to the connection. A large reply waits
//! before it is encoded.
//!
//! The sender waits: a stream stops reading from its agent, and a call keeps its permit and its charge, so that further
//! calls get `busy`. One agent has at most a quarter of the common window, so it does not delay another agent.

use std::sync::Arc;

use async_nats::{Client, HeaderMap, PublishError, Subject};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::memory::MemoryAccount;

/// Messages up to this size do not wait: the client's queue, 2048 messages, is a sufficient limit for them.
const SMALL: usize = 4 << 10;

#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    pub(super) client: Client,
    /// The name of the agent.
    pub(super) agent: Arc<str>,
    window: Arc<Semaphore>,
    /// The bytes of the window. A single message may be larger.
    size: usize,
    /// The window of all agents together.
    shared: Option<Arc<Semaphore>>,
}

/// Room in the send window for one message.
#[derive(Debug)]
pub(crate) struct Room {
    own: Option<OwnedSemaphorePermit>,
    shared: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Gives back what a message of `bytes` bytes does not need.
    pub(super) fn shrink(&mut self, bytes: usize) {
        for permit in [&mut self.own, &mut self.shared].into_iter().flatten() {
            // Dropping the part gives it back.
            drop(permit.split(permit.num_permits().saturating_sub(bytes)));
        }
    }
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
        let (agent, size) = (Arc::clone(&memory.agent), memory.send_window());
        Self { client, agent, window: Arc::new(Semaphore::new(size)), size, shared }
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
            // At least four times the window of one agent, which waits here with at most its own window.
            Some(shared) => acquire(shared, bytes.min(self.size)).await,
            None => None,
        };
        Some(Room { own, shared })
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
