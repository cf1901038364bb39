//! Confirms that the NATS server has taken messages, by messages to the bridge's own inbox that come back.
//!
//! The server handles the messages of one connection in order, so when such a message comes back, it has taken every
//! message that was sent before. This needs the permission to publish to the connection's own inbox.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_nats::{Client, Subject, SubscribeError, Subscriber};
use futures_util::StreamExt as _;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::Room;

/// How long a sender waits for confirmations before it continues without them.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);
/// After this many timeouts without a confirmation between them, messages are not confirmed for a while.
const MAX_FAILURES: u32 = 2;
/// How long.
const PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Confirmations {
    client: Client,
    inbox: Subject,
    batches: Mutex<Batches>,
    is_paused: AtomicBool,
    /// Ends the task that reads the inbox.
    _reader: DropGuard,
}

#[derive(Debug, Default)]
struct Batches {
    next: u64,
    /// The room of each batch that the server has not confirmed yet.
    waiting: HashMap<u64, Room>,
    failures: u32,
    paused_until: Option<Instant>,
}

impl Confirmations {
    /// Subscribes to an inbox of this connection.
    pub(crate) async fn start(client: &Client) -> Result<Arc<Self>, SubscribeError> {
        let inbox = Subject::from(client.new_inbox());
        let subscriber = client.subscribe(inbox.clone()).await?;
        let stop = CancellationToken::new();
        let this = Arc::new(Self {
            client: client.clone(),
            inbox,
            batches: Mutex::default(),
            is_paused: AtomicBool::new(false),
            _reader: stop.clone().drop_guard(),
        });
        let confirmations = Arc::downgrade(&this);
        let read = async move |mut subscriber: Subscriber| {
            while let Some(message) = subscriber.next().await {
                let Some(confirmations) = confirmations.upgrade() else { return };
                confirmations.confirm(&message.payload);
            }
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "calls need it during a shutdown; it ends with the last outbox"
        )]
        tokio::spawn(async move { stop.run_until_cancelled(read(subscriber)).await });
        Ok(this)
    }

    /// Whether messages are confirmed at present.
    pub(super) fn arrive(&self) -> bool {
        if !self.is_paused.load(Relaxed) {
            return true;
        }
        let is_over = self.lock().paused_until.is_none_or(|until| Instant::now() >= until);
        if is_over {
            self.is_paused.store(false, Relaxed);
        }
        is_over
    }

    /// Holds the room of a batch until the server has taken everything that was sent before.
    pub(super) async fn request(&self, batch: Room) {
        let id = {
            let mut batches = self.lock();
            batches.next += 1;
            let id = batches.next;
            batches.waiting.insert(id, batch);
            id
        };
        // If the request is lost, a sender that waits for it gives up.
        if self.client.publish(self.inbox.clone(), id.to_string().into()).await.is_err() {
            drop(self.lock().waiting.remove(&id));
        }
    }

    fn confirm(&self, id: &[u8]) {
        let Some(id) = std::str::from_utf8(id).ok().and_then(|id| id.parse().ok()) else { return };
        let batch = {
            let mut batches = self.lock();
            batches.failures = 0;
            batches.waiting.remove(&id)
        };
        // Wakes senders, without the lock.
        drop(batch);
    }

    /// No confirmation arrives: the connection is down or was replaced, or there is no permission.
    pub(super) fn give_up(&self) {
        let mut batches = self.lock();
        let lost = std::mem::take(&mut batches.waiting);
        batches.failures += 1;
        if batches.failures >= MAX_FAILURES {
            batches.failures = 0;
            batches.paused_until = Some(Instant::now() + PAUSE);
            self.is_paused.store(true, Relaxed);
            tracing::warn!(
                "NATS does not return messages to the bridge's own inbox, so a slow reader of one agent's replies may \
                 delay other agents; allow the bridge to publish and to subscribe to its inbox"
            );
        }
        drop(batches);
        drop(lost);
    }

    fn lock(&self) -> MutexGuard<'_, Batches> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
