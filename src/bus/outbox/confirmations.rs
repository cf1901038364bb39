//! Confirms that the NATS server has taken messages, by messages to the bridge's own inbox that come back.
//!
//! The server handles the messages of one connection in order, so when such a message comes back, it has taken every
//! message that was sent before. This needs the permission to publish to the connection's own inbox. Without it, and
//! while a new connection replaces a lost one, no message waits for a confirmation: a probe finds out when they arrive
//! (again).

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_nats::{Client, Subject, SubscribeError, Subscriber};
use futures_util::StreamExt as _;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::congestion::Congestion;
use super::{SentBatch, Window};

/// A sender that waits [checks](Confirmations::check) this often whether a confirmation is lost.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// A sender continues without confirmations if none has arrived for this long.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of probes while no confirmations arrive.
const PROBE_INTERVAL: Duration = Duration::from_secs(60);
/// The id of a probe. Batches have higher ids.
const PROBE: u64 = 0;

#[derive(Debug)]
pub(crate) struct Confirmations {
    client: Client,
    inbox: Subject,
    batches: Mutex<Batches>,
    /// Whether confirmations arrive.
    arrive: AtomicBool,
    congestion: Congestion,
    /// Ends the task that reads the inbox.
    _reader: DropGuard,
}

#[derive(Debug, Default)]
struct Batches {
    last: u64,
    /// The batches that the server has not confirmed yet.
    waiting: BTreeMap<u64, Batch>,
    /// When a check last requested a confirmation again.
    repeated_at: Option<Instant>,
    /// When the last confirmation arrived.
    confirmed_at: Option<Instant>,
    /// When a probe was sent that has not come back.
    probed_at: Option<Instant>,
}

#[derive(Debug)]
struct Batch {
    requested_at: Instant,
    /// Of its messages, until the batch is confirmed.
    _messages: SentBatch,
}

impl Confirmations {
    /// Subscribes to an inbox of this connection, and sends the first probe.
    pub(crate) async fn start(client: &Client) -> Result<Arc<Self>, SubscribeError> {
        let inbox = Subject::from(client.new_inbox());
        let subscriber = client.subscribe(inbox.clone()).await?;
        let stop = CancellationToken::new();
        let this = Arc::new(Self {
            client: client.clone(),
            inbox,
            batches: Mutex::default(),
            arrive: AtomicBool::new(false),
            congestion: Congestion::default(),
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
        this.probe().await;
        Ok(this)
    }

    /// Whether the server takes messages slowly, or did so a short time ago.
    pub(super) fn is_slow(&self) -> bool {
        self.congestion.is_slow()
    }

    /// The window that agents share while the server is slow.
    pub(super) fn gate(&self) -> &Window {
        &self.congestion.gate
    }

    /// Waits for room that confirmed messages give back.
    pub(super) async fn wait_for<T>(&self, room: impl Future<Output = T>) -> T {
        let mut room = pin!(room);
        loop {
            match tokio::time::timeout(CHECK_INTERVAL, &mut room).await {
                Ok(room) => return room,
                Err(_) => self.check().await,
            }
        }
    }

    /// Whether confirmations arrive. If not, sends a probe now and then.
    pub(super) async fn arrive(&self) -> bool {
        let arrive = self.arrive.load(Relaxed);
        if !arrive {
            // Boxed, because it is rare.
            Box::pin(self.probe()).await;
        }
        arrive
    }

    async fn probe(&self) {
        let previous = {
            let mut batches = self.lock();
            let previous = batches.probed_at;
            if previous.is_some_and(|at| at.elapsed() < PROBE_INTERVAL) {
                return;
            }
            batches.probed_at = Some(Instant::now());
            previous
        };
        if previous.is_some() {
            tracing::warn!(
                "NATS does not return messages to the bridge's own inbox, so a slow reader of one agent's replies may \
                 delay other agents; allow the bridge to publish and to subscribe to its inbox"
            );
        }
        // If it is lost, another one follows.
        let _ = self.client.publish(self.inbox.clone(), PROBE.to_string().into()).await;
    }

    /// Holds the room of a batch until the server has taken everything that was sent before.
    pub(super) async fn request(&self, messages: SentBatch) {
        let id = {
            let mut batches = self.lock();
            // With the lock, which `give_up` needs for what waits.
            if !self.arrive.load(Relaxed) {
                drop(batches);
                return drop(messages);
            }
            batches.last += 1;
            let id = batches.last;
            batches.waiting.insert(id, Batch { requested_at: Instant::now(), _messages: messages });
            id
        };
        let unsent = Unsent { confirmations: self, id };
        // If the request is lost afterwards, the next confirmation covers it.
        if self.client.publish(self.inbox.clone(), id.to_string().into()).await.is_ok() {
            std::mem::forget(unsent);
        }
    }

    /// The server has taken this batch and those before it, unless they are lost.
    fn confirm(&self, id: &[u8]) {
        let Some(id) = std::str::from_utf8(id).ok().and_then(|id| id.parse::<u64>().ok()) else { return };
        let confirmed = {
            let mut batches = self.lock();
            if id == PROBE {
                batches.probed_at = None;
                self.arrive.store(true, Relaxed);
            }
            let now = Instant::now();
            batches.confirmed_at = Some(now);
            if let Some(batch) = batches.waiting.get(&id) {
                self.congestion.confirmed(now.saturating_duration_since(batch.requested_at), now);
            }
            let later = batches.waiting.split_off(&id.saturating_add(1));
            std::mem::replace(&mut batches.waiting, later)
        };
        // Wakes senders, without the lock.
        drop(confirmed);
    }

    /// A sender has waited for [`CHECK_INTERVAL`]. If a confirmation is overdue, requests one that covers it: the client
    /// drops messages when too many wait to be read, and a lost connection loses them, too. If none has arrived for
    /// [`TIMEOUT`], the connection is down, or the permission is gone. Then the next message sends a probe.
    async fn check(&self) {
        let id = {
            let mut batches = self.lock();
            let Some((_, oldest)) = batches.waiting.first_key_value() else { return };
            let age = oldest.requested_at.elapsed();
            let is_recent = |at: Option<Instant>, limit| at.is_some_and(|at| at.elapsed() < limit);
            if age >= TIMEOUT && !is_recent(batches.confirmed_at, TIMEOUT) {
                drop(batches);
                return self.give_up();
            }
            if age < CHECK_INTERVAL || is_recent(batches.repeated_at, CHECK_INTERVAL) {
                return;
            }
            batches.repeated_at = Some(Instant::now());
            batches.last += 1;
            batches.last
        };
        // If it is lost, another one follows.
        let _ = self.client.publish(self.inbox.clone(), id.to_string().into()).await;
    }

    /// Continues without confirmations.
    pub(super) fn give_up(&self) {
        let mut batches = self.lock();
        self.arrive.store(false, Relaxed);
        let lost = std::mem::take(&mut batches.waiting);
        drop(batches);
        // Wakes senders, without the lock.
        drop(lost);
    }

    /// Of a server that is never reached. Confirms only what a test says.
    #[cfg(test)]
    pub(super) async fn of_nobody() -> Arc<Self> {
        let options = async_nats::ConnectOptions::new().retry_on_initial_connect();
        let client = options.connect("nats://127.0.0.1:1").await.unwrap();
        let confirmations = Self::start(&client).await.unwrap();
        confirmations.confirm(PROBE.to_string().as_bytes());
        confirmations
    }

    #[cfg(test)]
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Confirms everything that was sent so far.
    #[cfg(test)]
    pub(super) fn confirm_all(&self) {
        let last = self.lock().last;
        self.confirm(last.to_string().as_bytes());
    }

    #[cfg(test)]
    pub(super) fn set_slow(&self) {
        let now = Instant::now();
        self.congestion.confirmed(Duration::ZERO, now);
        self.congestion.confirmed(Duration::from_secs(1), now);
    }

    fn lock(&self) -> MutexGuard<'_, Batches> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Releases a batch whose request is not sent.
struct Unsent<'a> {
    confirmations: &'a Confirmations,
    id: u64,
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        let batch = self.confirmations.lock().waiting.remove(&self.id);
        drop(batch);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    /// Confirmations of a server that is never reached, with one batch that was requested this long ago.
    async fn waiting_for(age: Duration) -> (Arc<Confirmations>, Arc<Semaphore>) {
        let confirmations = Confirmations::of_nobody().await;
        let window = Window::new(1);
        let room = Arc::clone(&window.bytes);
        let batch = window.sent(Arc::clone(&room).try_acquire_owned().unwrap()).expect("a batch of its own");
        confirmations.request(batch).await;
        let mut batches = confirmations.lock();
        let requested_at = Instant::now().checked_sub(age).unwrap();
        batches.waiting.values_mut().for_each(|batch| batch.requested_at = requested_at);
        batches.confirmed_at = None;
        drop(batches);
        (confirmations, room)
    }

    #[tokio::test]
    async fn a_lost_confirmation_is_requested_again_and_a_later_one_covers_it() {
        let (confirmations, room) = waiting_for(CHECK_INTERVAL).await;
        confirmations.check().await;
        confirmations.check().await;
        assert_eq!((confirmations.lock().last, room.available_permits()), (2, 0), "requested again, once");
        confirmations.confirm(b"2");
        assert_eq!(room.available_permits(), 1);
        assert!(confirmations.arrive().await);
    }

    #[tokio::test]
    async fn a_confirmation_that_is_not_overdue_is_not_requested_again() {
        let (confirmations, room) = waiting_for(Duration::ZERO).await;
        confirmations.check().await;
        assert_eq!((confirmations.lock().last, room.available_permits()), (1, 0));
    }

    #[tokio::test]
    async fn senders_continue_without_confirmations_only_if_none_has_arrived() {
        let (confirmations, room) = waiting_for(TIMEOUT).await;
        confirmations.lock().confirmed_at = Some(Instant::now());
        confirmations.check().await;
        assert_eq!(room.available_permits(), 0);
        confirmations.lock().confirmed_at = None;
        confirmations.check().await;
        assert_eq!(room.available_permits(), 1);
        assert!(!confirmations.arrive().await);
        // Nothing waits.
        confirmations.check().await;
    }
}
