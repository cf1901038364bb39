//! Publishes the messages of one agent, with a limit for those that the NATS server has not taken yet.
//!
//! Each agent has a send window: the bytes that may wait in the client, in the buffers of the connection, and at the
//! server. A message leaves the window when the server has [confirmed](Confirmations) it. Without this limit, one agent
//! with a slow reader would delay the replies of all agents: the server stops reading from the bridge for a while
//! whenever it has to wait for a slow reader, and by then megabytes of frames would be ahead of any other reply. Large
//! messages of all agents together also share a part of the [memory budget](crate::memory). A large reply waits before
//! it is encoded.
//!
//! The sender waits: a stream stops reading from its agent and coalesces text, and a call keeps its permit and its
//! charge, so that further calls get `busy`.
//!
//! The windows of many agents together can still be megabytes. So while the server takes messages
//! [slowly](congestion), messages of agents that have waited for room must also fit into a window that all these agents
//! share, the gate. An agent that has not waited does not use it.

mod confirmations;
mod congestion;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_nats::{Client, HeaderMap, PublishError, Subject};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(crate) use self::confirmations::Confirmations;
use self::congestion::LastWait;
use crate::memory::MemoryAccount;

/// The send window of an agent, in bytes. A single message may be larger. When the server waits for a slow reader, it
/// reads about 6 MB/s from the bridge, so that a full window delays other agents by 20 ms.
const WINDOW: usize = 128 << 10;
/// Bytes that a message takes of the window in addition to its body.
const OVERHEAD: usize = 64;
/// Messages up to this size take nothing of the memory that all agents share.
const SMALL: usize = 4 << 10;
/// A confirmation is requested once a batch fills this fraction of the window: a half. Smaller batches cost more
/// confirmations, and do not make streams faster.
const BATCHES_PER_WINDOW: usize = 2;

#[derive(Debug, Clone)]
pub(crate) struct Outbox {
    pub(super) client: Client,
    /// The name of the agent.
    pub(super) agent: Arc<str>,
    window: Arc<Window>,
    /// What the messages of an agent share with those of others. The bridge's own messages share nothing.
    shared: Option<Shared>,
    /// Without them, a message leaves the window when it is written to the connection.
    confirmations: Option<Arc<Confirmations>>,
    /// Counts the bytes of the messages of one request.
    sent: Option<Arc<AtomicU64>>,
}

#[derive(Debug)]
struct Window {
    /// The size in bytes, which is also the most that a message takes.
    size: usize,
    bytes: Arc<Semaphore>,
    /// The bytes of a complete batch.
    batch: usize,
    incomplete: Mutex<IncompleteBatch>,
    /// The bytes of the batches that the server was asked to confirm.
    unconfirmed: Arc<AtomicUsize>,
}

/// Messages that the server was asked to confirm. They take their room until this is dropped.
#[derive(Debug)]
struct SentBatch {
    room: OwnedSemaphorePermit,
    unconfirmed: Arc<AtomicUsize>,
}

impl Drop for SentBatch {
    fn drop(&mut self) {
        self.unconfirmed.fetch_sub(self.room.num_permits(), Relaxed);
    }
}

#[derive(Debug, Clone)]
struct Shared {
    /// The memory for large messages of all agents together.
    memory: Arc<Semaphore>,
    /// The most that a message takes of it.
    largest: usize,
    /// When a sender of this agent last waited for the server.
    last_wait: Arc<LastWait>,
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
    /// In the memory that all agents share. It becomes free as soon as the message is written to the connection.
    shared: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// Gives back what a message of `bytes` bytes does not need.
    pub(super) fn shrink(&mut self, bytes: usize) {
        for permit in std::iter::once(&mut self.own).chain(&mut self.shared) {
            // Dropping the part gives it back.
            drop(permit.split(permit.num_permits().saturating_sub(bytes.saturating_add(OVERHEAD))));
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
        let shared = Shared {
            memory: Arc::clone(memory.sending()),
            largest: memory.max_sending(),
            last_wait: Arc::default(),
        };
        let window = Arc::new(Window::new(WINDOW));
        Self {
            client,
            agent: Arc::clone(&memory.agent),
            window,
            shared: Some(shared),
            confirmations,
            sent: None,
        }
    }

    /// With room for the messages of a test, which are never sent.
    #[cfg(test)]
    pub(super) fn unconfirmed(client: Client, agent: &str) -> Self {
        Self {
            client,
            agent: agent.into(),
            window: Arc::new(Window::new(8 << 20)),
            shared: None,
            confirmations: None,
            sent: None,
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
        let window = Arc::new(Window::new(1));
        Self { client, agent: "".into(), window, shared: None, confirmations, sent: None }
    }

    /// The same outbox for the messages of one request, whose bodies it adds to `sent`.
    pub(super) fn counting(&self, sent: Option<Arc<AtomicU64>>) -> Self {
        Self { sent, ..self.clone() }
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
        if let Some(sent) = &self.sent {
            sent.fetch_add(body.len() as u64, Relaxed);
        }
        let confirmations = match self.confirmations.as_deref() {
            Some(confirmations) if confirmations.arrive().await => Some(confirmations),
            _ => None,
        };
        let room = match room {
            None if confirmations.is_some() => Some(self.acquire(body.len()).await),
            room => room,
        };
        let gated = match confirmations {
            Some(confirmations) => self.pass_gate(confirmations, body.len()).await,
            None => None,
        };
        let (own, shared) = room.map_or((None, None), |room| (Some(room.own), room.shared));
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
        if let Some(confirmations) = confirmations {
            let own = until_confirmed.and_then(|room| self.window.sent(room));
            let gated = gated.and_then(|room| confirmations.gate().sent(room));
            for batch in own.into_iter().chain(gated) {
                confirmations.request(batch).await;
            }
        }
        Ok(())
    }

    /// Waits for room in the gate, if the server is slow and this agent has filled its window.
    async fn pass_gate(&self, confirmations: &Confirmations, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let shared = self.shared.as_ref()?;
        if !confirmations.is_slow() || !shared.last_wait.is_recent() {
            return None;
        }
        let gate = confirmations.gate();
        let size = bytes.saturating_add(OVERHEAD).min(gate.size);
        match Arc::clone(&gate.bytes).try_acquire_many_owned(count(size)) {
            Ok(room) => Some(room),
            Err(_) => {
                let room = Box::pin(gate.wait_for(size, Some(confirmations))).await;
                shared.last_wait.set();
                Some(room)
            }
        }
    }

    async fn acquire(&self, bytes: usize) -> Room {
        let window = &self.window;
        let bytes = bytes.saturating_add(OVERHEAD);
        let size = bytes.min(window.size);
        let own = match Arc::clone(&window.bytes).try_acquire_many_owned(count(size)) {
            Ok(own) => own,
            Err(_) => {
                // It may also wait for messages that are not sent yet, which say nothing about the server.
                let waits_for_server = window.has_unconfirmed_batch();
                // Boxed, because it is rare.
                let own = Box::pin(window.wait_for(size, self.confirmations.as_deref())).await;
                // Afterwards, because the wait may be long.
                if let Some(shared) = self.shared.as_ref().filter(|_| waits_for_server) {
                    shared.last_wait.set();
                }
                own
            }
        };
        let shared = match &self.shared {
            // Larger than the windows of many agents, each of which waits here with at most its own window.
            Some(shared) if bytes > SMALL + OVERHEAD => {
                let size = count(bytes.min(shared.largest));
                Arc::clone(&shared.memory).acquire_many_owned(size).await.ok()
            }
            _ => None,
        };
        Room { own, shared }
    }
}

impl Window {
    fn new(size: usize) -> Self {
        let bytes = Arc::new(Semaphore::new(size));
        let batch = (size / BATCHES_PER_WINDOW).max(1);
        Self { size, bytes, batch, incomplete: Mutex::default(), unconfirmed: Arc::default() }
    }

    async fn wait_for(&self, size: usize, confirmations: Option<&Confirmations>) -> OwnedSemaphorePermit {
        let room = Arc::clone(&self.bytes).acquire_many_owned(count(size));
        let room = match confirmations {
            Some(confirmations) => {
                // A large message may need the room of the incomplete batch, which nobody has asked the server to confirm.
                let (_large_sender, batch) = self.is_large(size).then(|| self.add_large_sender()).unzip();
                if let Some(batch) = batch.flatten() {
                    confirmations.request(batch).await;
                }
                confirmations.wait_for(room).await
            }
            None => room.await,
        };
        room.expect("the semaphore is never closed")
    }

    /// A message is sent. Returns its batch, if that is complete.
    fn sent(&self, room: OwnedSemaphorePermit) -> Option<SentBatch> {
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
        let complete = incomplete.room.take_if(|_| is_complete);
        complete.map(|room| self.to_confirm(room))
    }

    /// A batch that the server is asked to confirm.
    fn to_confirm(&self, room: OwnedSemaphorePermit) -> SentBatch {
        self.unconfirmed.fetch_add(room.num_permits(), Relaxed);
        SentBatch { room, unconfirmed: Arc::clone(&self.unconfirmed) }
    }

    /// Whether the server has not confirmed at least the bytes of one complete batch.
    fn has_unconfirmed_batch(&self) -> bool {
        self.unconfirmed.load(Relaxed) >= self.batch
    }

    /// Whether an incomplete batch may leave too little room for a message of this size.
    fn is_large(&self, size: usize) -> bool {
        size > self.size - self.batch
    }

    /// A sender waits for room for a large message, until it drops the first value. Returns the incomplete batch.
    fn add_large_sender(&self) -> (LargeSender<'_>, Option<SentBatch>) {
        let mut incomplete = self.incomplete();
        incomplete.large_senders += 1;
        (LargeSender(self), incomplete.room.take().map(|room| self.to_confirm(room)))
    }

    fn incomplete(&self) -> MutexGuard<'_, IncompleteBatch> {
        self.incomplete.lock().unwrap_or_else(PoisonError::into_inner)
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
    use tokio::task::JoinSet;

    use super::*;

    fn room(window: &Window, size: usize) -> OwnedSemaphorePermit {
        Arc::clone(&window.bytes).try_acquire_many_owned(count(size)).unwrap()
    }

    #[test]
    fn a_batch_is_due_when_it_is_complete() {
        let window = Window::new(WINDOW);
        assert!(window.sent(room(&window, window.batch - 1)).is_none());
        // The incomplete batch leaves room for every message that is not large.
        assert!(!window.is_large(window.size - window.batch));
        drop(room(&window, window.size - window.batch));
        let batch = window.sent(room(&window, 1)).unwrap();
        assert_eq!(batch.room.num_permits(), window.batch);
        assert_eq!(window.bytes.available_permits(), WINDOW - window.batch);
        drop(batch);
        assert_eq!(window.bytes.available_permits(), WINDOW);
    }

    #[test]
    fn while_a_large_sender_waits_each_message_is_a_batch() {
        let window = Window::new(WINDOW);
        assert!(window.sent(room(&window, 1)).is_none());
        let (sender, batch) = window.add_large_sender();
        assert_eq!(batch.map(|batch| batch.room.num_permits()), Some(1));
        assert!(window.sent(room(&window, 1)).is_some());
        drop(sender);
        assert!(window.sent(room(&window, 1)).is_none());
    }

    #[test]
    fn in_a_window_of_one_byte_each_message_is_a_batch() {
        let window = Window::new(1);
        assert!(window.sent(room(&window, 1)).is_some());
    }

    /// The outboxes of several agents with one connection.
    async fn outboxes<const N: usize>() -> ([Outbox; N], Arc<Confirmations>) {
        let confirmations = Confirmations::of_nobody().await;
        let outbox = || {
            let memory = MemoryAccount::unlimited("agent");
            Outbox::new(confirmations.client().clone(), &memory, Some(Arc::clone(&confirmations)))
        };
        (std::array::from_fn(|_| outbox()), confirmations)
    }

    /// Sends this many messages at once.
    fn send(sending: &mut JoinSet<()>, outbox: &Outbox, messages: usize, bytes: usize) {
        for _ in 0..messages {
            let outbox = outbox.clone();
            sending.spawn(async move {
                outbox.publish("x".into(), None, None, vec![0; bytes].into()).await.unwrap();
            });
        }
    }

    /// Both agents send this many messages at once.
    fn send_from(outboxes: [&Outbox; 2], messages: usize, bytes: usize) -> JoinSet<()> {
        let mut sending = JoinSet::new();
        outboxes.into_iter().for_each(|outbox| send(&mut sending, outbox, messages, bytes));
        sending
    }

    /// Lets the other tasks run until they wait; how many messages still wait.
    async fn waiting(sending: &mut JoinSet<()>) -> usize {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        while sending.try_join_next().is_some() {}
        sending.len()
    }

    #[tokio::test]
    async fn while_the_server_is_slow_agents_with_full_windows_send_one_large_message_at_a_time() {
        let ([first, second, quiet], confirmations) = outboxes().await;
        confirmations.set_slow();
        let mut sending = send_from([&first, &second], 4, WINDOW);
        assert_eq!(waiting(&mut sending).await, 6, "each has sent one, before it had to wait");
        for left in (0..6).rev() {
            confirmations.confirm_all();
            assert_eq!(waiting(&mut sending).await, left, "one of the two at a time");
            send(&mut sending, &quiet, 10, 1_000);
            assert_eq!(waiting(&mut sending).await, left, "another agent does not wait");
        }
    }

    #[tokio::test]
    async fn small_messages_share_the_gate() {
        let ([first, second], confirmations) = outboxes().await;
        confirmations.set_slow();
        let mut sending = send_from([&first, &second], 100, 8_000);
        // Each window has room for 16 of them.
        assert_eq!(waiting(&mut sending).await, 200 - 32);
        confirmations.confirm_all();
        assert_eq!(waiting(&mut sending).await, 200 - 32 - 8, "as many as fit through the gate");
        // Nothing is stuck.
        while waiting(&mut sending).await > 0 {
            confirmations.confirm_all();
        }
    }

    #[tokio::test]
    async fn an_agent_that_waits_for_its_own_small_messages_does_not_use_the_gate() {
        let ([busy, other, agent], confirmations) = outboxes().await;
        confirmations.set_slow();
        let mut sending = JoinSet::new();
        for outbox in [&busy, &other] {
            send(&mut sending, outbox, 3, WINDOW);
        }
        waiting(&mut sending).await;
        confirmations.confirm_all();
        let at_gate = waiting(&mut sending).await;
        assert_eq!(at_gate, 3, "the gate is full");
        // A small message, which no batch is complete with, and then one that needs the whole window.
        send(&mut sending, &agent, 1, 100);
        waiting(&mut sending).await;
        send(&mut sending, &agent, 1, WINDOW);
        assert_eq!(
            waiting(&mut sending).await,
            at_gate + 1,
            "it waits for the confirmation of the small one"
        );
        confirmations.confirm_all();
        // One of the others has passed the gate, too.
        assert_eq!(waiting(&mut sending).await, at_gate - 1);
        assert_eq!(agent.window.bytes.available_permits(), 0, "the large message is sent");
    }

    #[tokio::test]
    async fn a_fast_server_has_no_gate() {
        let ([first, second], confirmations) = outboxes().await;
        let mut sending = send_from([&first, &second], 2, WINDOW);
        assert_eq!(waiting(&mut sending).await, 2);
        confirmations.confirm_all();
        assert_eq!(waiting(&mut sending).await, 0, "both at once");
    }

    #[tokio::test]
    async fn a_sender_that_gives_up_or_whose_confirmation_is_lost_leaves_the_gate() {
        let ([first, second], confirmations) = outboxes().await;
        confirmations.set_slow();
        let mut sending = send_from([&first, &second], 3, WINDOW);
        waiting(&mut sending).await;
        confirmations.confirm_all();
        assert_eq!(waiting(&mut sending).await, 3, "one has passed the gate");
        // The others are dropped while they wait.
        sending.abort_all();
        while sending.join_next().await.is_some() {}
        confirmations.give_up();
        assert_eq!(confirmations.gate().bytes.available_permits(), confirmations.gate().size);
        assert_eq!(first.window.bytes.available_permits(), WINDOW);
    }

    #[test]
    fn room_that_a_message_does_not_need_is_given_back() {
        let (window, shared) = (Window::new(WINDOW), Arc::new(Semaphore::new(WINDOW)));
        let permit = |from: &Arc<Semaphore>| Arc::clone(from).try_acquire_many_owned(10_000).unwrap();
        let mut room = Room { own: permit(&window.bytes), shared: Some(permit(&shared)) };
        room.shrink(1_000);
        for semaphore in [&window.bytes, &shared] {
            assert_eq!(WINDOW - semaphore.available_permits(), 1_000 + OVERHEAD);
        }
        room.shrink(usize::MAX);
        drop(room);
        assert_eq!((window.bytes.available_permits(), shared.available_permits()), (WINDOW, WINDOW));
    }
}
