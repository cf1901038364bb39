//! Publishes the messages of one agent, with a limit for those that the NATS server has not taken yet.
//!
//! Each agent has a send window: the bytes that may wait in the client, in the buffers of the connection, and at the
//! server. A message leaves the window when the server has [confirmed](Confirmations) it. Without this limit, one agent
//! with a slow reader would delay the replies of all agents: the server stops reading from the bridge for a while
//! whenever it has to wait for a slow reader, and by then megabytes of frames would be ahead of any other reply. Large
//! messages of all agents together also share a part of the [memory budget](crate::memory). A large reply waits before
//! it is encoded.
//!
//! All agents share one connection. So while several of them have full windows, they share half a window: each message
//! counts as many times, and large messages take turns. An agent without a full window does not wait for them.
//!
//! The sender waits: a stream stops reading from its agent and coalesces text, and a call keeps its permit and its
//! charge, so that further calls get `busy`. One agent's window does not delay another agent.

mod confirmations;

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_nats::{Client, HeaderMap, PublishError, Subject};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(crate) use self::confirmations::Confirmations;
use crate::memory::MemoryAccount;

/// The send window of an agent, in bytes. A single message may be larger. When the server waits for a slow reader, it
/// reads about 6 MB/s from the bridge, so that a full window delays other agents by 20 ms.
const WINDOW: usize = 128 << 10;
/// Bytes that a message takes of the window in addition to its body.
const OVERHEAD: usize = 64;
/// Messages up to this size take nothing of the memory that all agents share.
const SMALL: usize = 4 << 10;
/// Of the agents with full windows, one at a time sends a message of more than this many bytes.
const TAKES_TURNS: usize = 32 << 10;
/// A confirmation is requested once a batch fills this fraction of the window: a half. Smaller batches cost more
/// confirmations, and do not make streams faster.
const BATCHES_PER_WINDOW: usize = 2;

#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    pub(super) client: Client,
    /// The name of the agent.
    pub(super) agent: Arc<str>,
    window: Arc<Window>,
    /// Without them, a message leaves the window when it is written to the connection.
    confirmations: Option<Arc<Confirmations>>,
}

#[derive(Debug)]
struct Window {
    /// The size in bytes, which is also the most that a message takes.
    size: usize,
    bytes: Arc<Semaphore>,
    /// The bytes of a complete batch.
    batch: usize,
    shared: Option<SharedMemory>,
    incomplete: Mutex<IncompleteBatch>,
    /// Senders that wait for room.
    waiting: AtomicUsize,
}

/// The memory for large messages of all agents together.
#[derive(Debug)]
struct SharedMemory {
    bytes: Arc<Semaphore>,
    /// The most that a message takes.
    largest: usize,
}

/// Messages that are sent, but the server was not asked to confirm them.
#[derive(Debug, Default)]
struct IncompleteBatch {
    room: Option<OwnedSemaphorePermit>,
    /// Senders that wait for more room than an incomplete batch leaves. Until they have it, each message is a batch.
    large_senders: usize,
}

/// Room for one message.
#[derive(Debug)]
pub(crate) struct Room {
    /// In the send window.
    own: OwnedSemaphorePermit,
    /// How many times the bytes of the message count in the send window.
    factor: usize,
    /// The turn of a large message.
    turn: Option<OwnedSemaphorePermit>,
    /// In the memory that all agents share. It becomes free as soon as the message is written to the connection, so that
    /// no agent waits for the confirmations of another one.
    shared: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Gives back what a message of `bytes` bytes does not need.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.saturating_add(OVERHEAD);
        let own = (&mut self.own, bytes.saturating_mul(self.factor));
        for (permit, needed) in std::iter::once(own).chain(self.shared.as_mut().map(|shared| (shared, bytes)))
        {
            // Dropping the part gives it back.
            drop(permit.split(permit.num_permits().saturating_sub(needed)));
        }
    }
}

/// A message body that holds its room until the last copy is dropped.
struct AdmittedBody {
    body: Bytes,
    _room: (Option<OwnedSemaphorePermit>, Option<OwnedSemaphorePermit>),
}

impl AsRef<[u8]> for AdmittedBody {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

impl Outbox {
    pub(crate) fn new(
        client: Client,
        memory: &MemoryAccount,
        confirmations: Option<Arc<Confirmations>>,
    ) -> Self {
        let shared = SharedMemory { bytes: Arc::clone(memory.sending()), largest: memory.max_sending() };
        let window = Arc::new(Window::new(WINDOW, Some(shared)));
        Self { client, agent: Arc::clone(&memory.agent), window, confirmations }
    }

    /// With room for the messages of a test, which are never sent.
    #[cfg(test)]
    pub(super) fn unconfirmed(client: Client, agent: &str) -> Self {
        Self {
            client,
            agent: agent.into(),
            window: Arc::new(Window::new(8 << 20, None)),
            confirmations: None,
        }
    }

    /// Takes all room that is left.
    #[cfg(test)]
    pub(super) fn fill(&self) -> OwnedSemaphorePermit {
        let left = count(self.window.bytes.available_permits());
        Arc::clone(&self.window.bytes).try_acquire_many_owned(left).expect("the room that is left")
    }

    /// Lets messages wait for each other, so that the server has confirmed all but one of them.
    pub(super) fn one_at_a_time(client: Client, confirmations: Option<Arc<Confirmations>>) -> Self {
        Self { client, agent: "".into(), window: Arc::new(Window::new(1, None)), confirmations }
    }

    pub(super) fn max_payload(&self) -> usize {
        self.client.max_payload()
    }

    /// Waits for room for a message of `bytes` bytes, before it is encoded. A small message gets its room when it is
    /// published.
    pub(super) async fn reserve(&self, bytes: usize) -> Option<Room> {
        if bytes <= SMALL { None } else { Some(self.acquire(bytes).await) }
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
        let confirmations = match self.confirmations.as_deref() {
            Some(confirmations) if confirmations.arrive().await => Some(confirmations),
            _ => None,
        };
        let room = match room {
            None if confirmations.is_some() => Some(self.acquire(body.len()).await),
            room => room,
        };
        let (own, turn, shared) =
            room.map_or((None, None, None), |room| (Some(room.own), room.turn, room.shared));
        let (until_written, until_confirmed) = match confirmations {
            Some(_) => (None, own),
            None => (own, None),
        };
        let body = match (until_written, shared) {
            (None, None) => body,
            room => Bytes::from_owner(AdmittedBody { body, _room: room }),
        };
        match (headers, reply) {
            (None, None) => self.client.publish(to, body).await?,
            (Some(headers), None) => self.client.publish_with_headers(to, headers, body).await?,
            (headers, Some(reply)) => {
                let headers = headers.unwrap_or_default();
                self.client.publish_with_reply_and_headers(to, reply, headers, body).await?;
            }
        }
        if let Some((room, confirmations)) = until_confirmed.zip(confirmations)
            && let Some(batch) = self.window.sent(room)
        {
            confirmations.request(batch, turn).await;
        }
        Ok(())
    }

    async fn acquire(&self, bytes: usize) -> Room {
        let window = &self.window;
        let bytes = bytes.saturating_add(OVERHEAD);
        let factor = match self.confirmations.as_deref().map(Confirmations::competing_agents) {
            None | Some(0 | 1) => 1,
            Some(agents) => 2 * agents,
        };
        let size = bytes.saturating_mul(factor).min(window.size);
        let (own, turn) = match Arc::clone(&window.bytes).try_acquire_many_owned(count(size)) {
            Ok(own) => (own, None),
            // Boxed, because it is rare.
            Err(_) => Box::pin(self.wait_for(size, bytes > TAKES_TURNS)).await,
        };
        let shared = match &window.shared {
            // Larger than the windows of many agents, each of which waits here with at most its own window.
            Some(shared) if bytes > SMALL + OVERHEAD => {
                let size = count(bytes.min(shared.largest));
                Arc::clone(&shared.bytes).acquire_many_owned(size).await.ok()
            }
            _ => None,
        };
        Room { own, factor, turn, shared }
    }

    async fn wait_for(
        &self,
        size: usize,
        takes_turns: bool,
    ) -> (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>) {
        let _waiting =
            self.confirmations.as_deref().map(|confirmations| Waiting::add(&self.window, confirmations));
        // A large message may need the room of the incomplete batch, which nobody has asked the server to confirm.
        let _large_sender = match self.confirmations.as_deref() {
            Some(confirmations) if self.window.is_large(size) => {
                let (sender, batch) = self.window.add_large_sender();
                if let Some(batch) = batch {
                    confirmations.request(batch, None).await;
                }
                Some(sender)
            }
            _ => None,
        };
        let own = Arc::clone(&self.window.bytes).acquire_many_owned(count(size));
        let (own, turn) = match &self.confirmations {
            Some(confirmations) => {
                let own = confirmations.wait_for(own).await;
                (own, if takes_turns { confirmations.turn().await } else { None })
            }
            None => (own.await, None),
        };
        (own.expect("the semaphore is never closed"), turn)
    }
}

impl Window {
    fn new(size: usize, shared: Option<SharedMemory>) -> Self {
        let bytes = Arc::new(Semaphore::new(size));
        let batch = (size / BATCHES_PER_WINDOW).max(1);
        Self { size, bytes, batch, shared, incomplete: Mutex::default(), waiting: AtomicUsize::new(0) }
    }

    /// A message is sent. Returns its batch, if that is complete.
    fn sent(&self, room: OwnedSemaphorePermit) -> Option<OwnedSemaphorePermit> {
        let mut incomplete = self.incomplete();
        let is_hurried = incomplete.large_senders > 0;
        let batch = match &mut incomplete.room {
            Some(batch) => {
                batch.merge(room);
                batch
            }
            none => none.insert(room),
        };
        let is_complete = is_hurried || batch.num_permits() >= self.batch;
        incomplete.room.take_if(|_| is_complete)
    }

    /// Whether an incomplete batch may leave too little room for a message of this size.
    fn is_large(&self, size: usize) -> bool {
        size > self.size - self.batch
    }

    /// A sender waits for room for a large message, until it drops the first value. Returns the incomplete batch.
    fn add_large_sender(&self) -> (LargeSender<'_>, Option<OwnedSemaphorePermit>) {
        let mut incomplete = self.incomplete();
        incomplete.large_senders += 1;
        (LargeSender(self), incomplete.room.take())
    }

    fn incomplete(&self) -> MutexGuard<'_, IncompleteBatch> {
        self.incomplete.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A sender that waits for room.
struct Waiting<'a> {
    window: &'a Window,
    confirmations: &'a Confirmations,
}

impl<'a> Waiting<'a> {
    fn add(window: &'a Window, confirmations: &'a Confirmations) -> Self {
        if window.waiting.fetch_add(1, Relaxed) == 0 {
            confirmations.add_competing_agent();
        }
        Self { window, confirmations }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.window.waiting.fetch_sub(1, Relaxed) == 1 {
            self.confirmations.remove_competing_agent();
        }
    }
}

struct LargeSender<'a>(&'a Window);

impl Drop for LargeSender<'_> {
    fn drop(&mut self) {
        self.0.incomplete().large_senders -= 1;
    }
}

fn count(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(window: &Window, size: usize) -> OwnedSemaphorePermit {
        Arc::clone(&window.bytes).try_acquire_many_owned(count(size)).unwrap()
    }

    #[test]
    fn a_batch_is_due_when_it_is_complete() {
        let window = Window::new(WINDOW, None);
        assert!(window.sent(room(&window, window.batch - 1)).is_none());
        // The incomplete batch leaves room for every message that is not large.
        assert!(!window.is_large(window.size - window.batch));
        drop(room(&window, window.size - window.batch));
        let batch = window.sent(room(&window, 1)).unwrap();
        assert_eq!(batch.num_permits(), window.batch);
        assert_eq!(window.bytes.available_permits(), WINDOW - window.batch);
        drop(batch);
        assert_eq!(window.bytes.available_permits(), WINDOW);
    }

    #[test]
    fn while_a_large_sender_waits_each_message_is_a_batch() {
        let window = Window::new(WINDOW, None);
        assert!(window.sent(room(&window, 1)).is_none());
        let (sender, batch) = window.add_large_sender();
        assert_eq!(batch.map(|batch| batch.num_permits()), Some(1));
        assert!(window.sent(room(&window, 1)).is_some());
        drop(sender);
        assert!(window.sent(room(&window, 1)).is_none());
    }

    #[test]
    fn in_a_window_of_one_byte_each_message_is_a_batch() {
        let window = Window::new(1, None);
        assert!(window.sent(room(&window, 1)).is_some());
    }

    /// The outboxes of several agents with one connection.
    async fn outboxes<const N: usize>(names: [&str; N]) -> ([Outbox; N], Arc<Confirmations>) {
        let confirmations = Confirmations::of_nobody().await;
        let outbox = |agent: &str| Outbox {
            client: confirmations.client().clone(),
            agent: agent.into(),
            window: Arc::new(Window::new(WINDOW, None)),
            confirmations: Some(Arc::clone(&confirmations)),
        };
        (names.map(outbox), confirmations)
    }

    async fn send(outbox: Outbox, bytes: usize) {
        outbox.publish("x".into(), None, None, vec![0; bytes].into()).await.unwrap();
    }

    /// Runs the other tasks until they wait.
    async fn until_all_wait() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn agents_with_full_windows_take_turns_and_another_one_does_not_wait() {
        let ([first, second, quiet], confirmations) = outboxes(["first", "second", "quiet"]).await;
        let mut sending = tokio::task::JoinSet::new();
        for outbox in [&first, &second] {
            for _ in 0..3 {
                sending.spawn(send(outbox.clone(), WINDOW));
            }
        }
        until_all_wait().await;
        assert_eq!(confirmations.competing_agents(), 2);
        let unsent = |sending: &mut tokio::task::JoinSet<()>| {
            while sending.try_join_next().is_some() {}
            sending.len()
        };
        assert_eq!(unsent(&mut sending), 4, "each has sent one");

        send(quiet.clone(), 40_000).await;
        assert_eq!(WINDOW - quiet.window.bytes.available_permits(), WINDOW, "it counts four times");
        for left in (0..4).rev() {
            confirmations.confirm_all();
            until_all_wait().await;
            assert_eq!(unsent(&mut sending), left, "one of both agents at a time");
        }
        confirmations.confirm_all();
        assert_eq!(confirmations.competing_agents(), 0);
        assert_eq!(first.window.bytes.available_permits(), WINDOW);
    }

    #[test]
    fn a_message_that_counts_several_times_gives_back_several_times() {
        let window = Window::new(WINDOW, None);
        let mut room = Room { own: room(&window, 3 * 10_000), factor: 3, turn: None, shared: None };
        room.shrink(1_000);
        assert_eq!(WINDOW - window.bytes.available_permits(), 3 * (1_000 + OVERHEAD));
    }

    #[test]
    fn room_that_a_message_does_not_need_is_given_back() {
        let (window, shared) = (Window::new(WINDOW, None), Arc::new(Semaphore::new(WINDOW)));
        let permit = |from: &Arc<Semaphore>| Arc::clone(from).try_acquire_many_owned(10_000).unwrap();
        let mut room =
            Room { own: permit(&window.bytes), factor: 1, turn: None, shared: Some(permit(&shared)) };
        room.shrink(1_000);
        for semaphore in [&window.bytes, &shared] {
            assert_eq!(WINDOW - semaphore.available_permits(), 1_000 + OVERHEAD);
        }
        room.shrink(usize::MAX);
        drop(room);
        assert_eq!((window.bytes.available_permits(), shared.available_permits()), (WINDOW, WINDOW));
    }
}
