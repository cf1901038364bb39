//! Idempotency keys: the same request sent twice runs the agent once.
//!
//! The first request with a key runs; later ones with the same body wait for its reply, at whichever replica they
//! arrive. A reply is kept for two minutes. Errors from before the agent was reached are not kept. If the replica that
//! runs the first request dies, the later ones get `outcome_unknown`; the request never runs again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use uuid::Uuid;

use super::peers::{InstanceId, Liveness, Peers};
use super::records::{Assumption, Change, ReadRecord, Record, TypedRecords};
use super::{Durability, Lifetime, RecordKey, RecordKind, StateStore};
use crate::caller::Caller;
use crate::memory::OutOfMemory;
use crate::offload;
use crate::reply::error::{ActionError, Code};
use crate::reply::{self, Reply, for_storage};
use crate::text::hex;

/// How long a reply is kept.
const REPLY_TTL: Duration = Duration::from_secs(120);
/// How long a released key remains in the store. A request can reserve it immediately.
const RELEASED_TTL: Duration = Duration::from_secs(1);
/// Initial and maximum poll interval while another replica runs the first request.
const POLL_INTERVAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// Maximum number of requests that wait for the reply of the first request with one key.
const MAX_REPEATS_PER_KEY: usize = 32;

#[derive(Debug)]
pub(crate) struct Idempotency {
    keys: TypedRecords<KeyRecord>,
    replies: TypedRecords<ReplyRecord>,
    peers: Arc<dyn Peers>,
    /// The first requests that run in this process. Their number is limited like that of calls.
    running: Mutex<HashMap<RecordKey, RunningRequest>>,
    /// How many requests of this process wait for the reply of a first one.
    waiting: Mutex<HashMap<RecordKey, usize>>,
}

#[derive(Debug)]
struct RunningRequest {
    body_hash: String,
    reply: watch::Receiver<Option<SizedReply>>,
}

/// A reply, and its size in memory, in bytes.
type SizedReply = (Reply, usize);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeyRecord {
    body_hash: String,
    /// Identifies the first request.
    nonce: Uuid,
    /// The replica that runs the first request.
    #[serde(default)]
    owner: InstanceId,
    state: KeyState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum KeyState {
    Running,
    /// The reply is in a record of its own: it may be large, and the store may have to evict it.
    Done,
    /// The request did not reach the agent; any request may use the key again.
    Released,
}

#[derive(Debug, Serialize, Deserialize)]
struct ReplyRecord {
    nonce: Uuid,
    reply: Reply,
}

/// The part of a [`ReplyRecord`] that says which request wrote it.
#[derive(Debug, Deserialize)]
struct ReplyWriter {
    nonce: Uuid,
}

impl Record for KeyRecord {}

impl Record for ReplyRecord {
    fn allocated(&self) -> usize {
        reply::allocated(&self.reply)
    }
}

#[derive(Debug)]
pub(crate) enum Reservation {
    /// No other request has used the key: run the request, and pass its reply to [`FirstRequest::finish`].
    First(FirstRequest),
    Repeat(RepeatedRequest),
}

/// The first request with a key, while it runs.
#[derive(Debug)]
#[must_use]
pub(crate) struct FirstRequest {
    idempotency: Arc<Idempotency>,
    key: RecordKey,
    body_hash: String,
    nonce: Uuid,
    reply: watch::Sender<Option<SizedReply>>,
}

/// A later request with the same key and body. It holds neither its body nor a reply while it waits.
#[derive(Debug)]
pub(crate) struct RepeatedRequest {
    idempotency: Arc<Idempotency>,
    /// Counted in `waiting`.
    key: RecordKey,
    body_hash: String,
    /// The reply of the first request, if that runs in this process.
    local_reply: Option<watch::Receiver<Option<SizedReply>>>,
}

impl Idempotency {
    pub(super) fn new(store: &Arc<dyn StateStore>, peers: &Arc<dyn Peers>) -> Self {
        Self {
            keys: TypedRecords::new(store, RecordKind::IdempotencyKey),
            replies: TypedRecords::new(store, RecordKind::Reply),
            peers: Arc::clone(peers),
            running: Mutex::default(),
            waiting: Mutex::default(),
        }
    }

    /// Reserves the key for a request to `action` of `agent`, which may run for `limit`.
    pub(crate) async fn reserve(
        self: &Arc<Self>,
        agent: &Arc<str>,
        (caller, action, key): (&Caller, &str, &str),
        body: &[u8],
        limit: Duration,
    ) -> Result<Reservation, ActionError> {
        let key = RecordKey::new(agent, caller.scoped_id(&[action, key])).of_caller(caller);
        let body_hash = offload::run(agent, body.len(), || hex(&Sha256::digest(body))).await;
        let (sender, reply) = watch::channel(None);
        {
            let mut running = self.running();
            if let Some(first) = running.get(&key) {
                check_body(&first.body_hash, &body_hash)?;
                let reply = first.reply.clone();
                drop(running);
                return self.repeat(key, body_hash, Some(reply));
            }
            running.insert(key.clone(), RunningRequest { body_hash: body_hash.clone(), reply });
        }
        // From here on other requests of this process wait for this one, until `first` is dropped.
        let first = FirstRequest {
            idempotency: Arc::clone(self),
            key: key.clone(),
            body_hash: body_hash.clone(),
            nonce: Uuid::new_v4(),
            reply: sender,
        };
        let is_first = self.reserve_in_store(&first, limit).await?;
        if is_first {
            return Ok(Reservation::First(first));
        }
        drop(first);
        self.repeat(key, body_hash, None)
    }

    fn repeat(
        self: &Arc<Self>,
        key: RecordKey,
        body_hash: String,
        local_reply: Option<watch::Receiver<Option<SizedReply>>>,
    ) -> Result<Reservation, ActionError> {
        {
            let mut waiting = self.waiting();
            let count = waiting.entry(key.clone()).or_default();
            if *count >= MAX_REPEATS_PER_KEY {
                let message = format!(
                    "{MAX_REPEATS_PER_KEY} requests already wait for the reply of the first one with this \
                     idempotency key, which is the limit; try again"
                );
                return Err(ActionError::new(Code::Busy, message));
            }
            *count += 1;
        }
        let idempotency = Arc::clone(self);
        Ok(Reservation::Repeat(RepeatedRequest { idempotency, key, body_hash, local_reply }))
    }

    /// Returns whether `first` is really the first request, among those of all replicas.
    async fn reserve_in_store(&self, first: &FirstRequest, limit: Duration) -> Result<bool, ActionError> {
        let reserve = |known: Option<KeyRecord>| {
            let Some(known) = known.filter(|known| known.state != KeyState::Released) else {
                let lifetime = Lifetime::protected(limit.saturating_add(REPLY_TTL));
                return Ok(Change::Write(first.record(KeyState::Running), lifetime, true));
            };
            if known.nonce == first.nonce {
                return Ok(Change::Keep(true));
            }
            check_body(&known.body_hash, &first.body_hash)?;
            Ok(Change::Keep(false))
        };
        // While the store is unavailable, another replica might run the request, or one that is gone might have run it.
        let remembered_for = limit.saturating_add(REPLY_TTL);
        let durability = match self.peers.alone_for().is_some_and(|alone_for| alone_for > remembered_for) {
            true => Durability::Deferrable,
            false => Durability::Confirmed,
        };
        self.keys.update_with(&first.key, Assumption::Absent, durability, reserve).await
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<RecordKey, usize>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn running(&self) -> MutexGuard<'_, HashMap<RecordKey, RunningRequest>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FirstRequest {
    /// Passes the reply to all repeated requests, and keeps it if the agent was reached.
    pub(crate) async fn finish(self, reply: &Reply) {
        let is_kept = reply.as_ref().map_or_else(|error| error.reached_agent, |_| true);
        let written = if is_kept {
            // The reply first: a key that is done without a reply counts as one whose reply was evicted.
            self.write_reply(reply).await;
            self.write_state(KeyState::Done, Lifetime::protected(REPLY_TTL)).await
        } else {
            self.write_state(KeyState::Released, Lifetime::evictable(RELEASED_TTL)).await
        };
        if let Err(error) = written {
            // The key counts as running until it expires, so no request runs again.
            tracing::warn!(agent = %self.key.agent, error = error.message, "cannot record the end of a request with an idempotency key");
        }
        self.reply.send_replace(Some((reply.clone(), reply::allocated(reply))));
    }

    async fn write_reply(&self, reply: &Reply) {
        let write = |known: Option<ReplyWriter>| {
            Ok(match known {
                Some(known) if known.nonce == self.nonce => Change::Keep(()),
                _ => {
                    let record = ReplyRecord { nonce: self.nonce, reply: for_storage(reply.clone()) };
                    Change::Write(record, Lifetime::evictable(REPLY_TTL), ())
                }
            })
        };
        let written = self
            .idempotency
            .replies
            .update_with(&self.key, Assumption::Absent, Durability::Behind, write)
            .await;
        if let Err(error) = written {
            tracing::debug!(agent = %self.key.agent, error = error.message, "cannot keep a reply for repeated requests");
        }
    }

    async fn write_state(&self, state: KeyState, lifetime: Lifetime) -> Result<(), ActionError> {
        let write = |known: Option<KeyRecord>| {
            let is_own =
                known.is_none_or(|known| known.nonce == self.nonce && known.state == KeyState::Running);
            Ok(if is_own { Change::Write(self.record(state), lifetime, ()) } else { Change::Keep(()) })
        };
        // Only this request writes the key while it runs. Until it is written, other replicas consider it running.
        self.idempotency.keys.update_with(&self.key, Assumption::Nothing, Durability::Behind, write).await
    }

    fn record(&self, state: KeyState) -> KeyRecord {
        let owner = self.idempotency.peers.instance();
        KeyRecord { body_hash: self.body_hash.clone(), nonce: self.nonce, owner, state }
    }
}

impl Drop for FirstRequest {
    fn drop(&mut self) {
        self.idempotency.running().remove(&self.key);
    }
}

impl Drop for RepeatedRequest {
    fn drop(&mut self) {
        let mut waiting = self.idempotency.waiting();
        if let Some(count) = waiting.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.key);
            }
        }
    }
}

impl RepeatedRequest {
    /// Waits for the reply of the first request. `charge` charges the memory of the reply in place of what it charged
    /// before.
    pub(crate) async fn reply(mut self, charge: impl Fn(usize) -> Result<(), OutOfMemory>) -> Reply {
        if let Some(local) = &mut self.local_reply
            && let Ok(reply) = local.wait_for(Option::is_some).await
            && let Some((reply, allocated)) = &*reply
        {
            charge(*allocated)?;
            return reply.clone();
        }
        // The request in this process was itself a repeat, or ended without a reply: ask the store.
        self.reply_from_store(charge).await
    }

    async fn reply_from_store(&self, charge: impl Fn(usize) -> Result<(), OutOfMemory>) -> Reply {
        let (mut pause, max_pause) = POLL_INTERVAL;
        loop {
            let known: Option<ReadRecord<KeyRecord>> = self.idempotency.keys.read(&self.key).await?;
            let Some(known) = known else {
                let message = "the replica that ran the first request with this key did not report its end";
                return Err(ActionError::new(Code::OutcomeUnknown, message));
            };
            check_body(&known.record.body_hash, &self.body_hash)?;
            match known.record.state {
                KeyState::Running if self.is_owner_dead(&known.record).await => {
                    let message = "the replica that ran the first request with this key is gone";
                    return Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent());
                }
                KeyState::Running => {}
                KeyState::Done => return self.kept_reply(known.record.nonce, charge).await,
                KeyState::Released => {
                    let message = "the first request with this key did not reach the agent; try again";
                    return Err(ActionError::new(Code::Busy, message));
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(max_pause);
        }
    }

    async fn is_owner_dead(&self, record: &KeyRecord) -> bool {
        let peers = &self.idempotency.peers;
        record.owner != peers.instance() && peers.liveness(record.owner).await == Liveness::Dead
    }

    async fn kept_reply(&self, nonce: Uuid, charge: impl Fn(usize) -> Result<(), OutOfMemory>) -> Reply {
        let kept = self.idempotency.replies.read_charged(&self.key, charge).await?;
        match kept.filter(|kept| kept.nonce == nonce) {
            Some(kept) => kept.reply,
            None => {
                let message = "the first request with this key has ended, but its reply is no longer kept";
                Err(ActionError::new(Code::OutcomeUnknown, message))
            }
        }
    }
}

fn check_body(first: &str, repeat: &str) -> Result<(), ActionError> {
    if first == repeat {
        return Ok(());
    }
    Err(ActionError::invalid("this idempotency key is already in use with another body; use a new key"))
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryStore;
    use super::super::quota::Quotas;
    use super::super::tests::{all_alive, free, memory_store};
    use super::*;
    use crate::reply::outcome::{Outcome, ReplyContent, ReplyStatus, TaskRef};

    const LIMIT: Duration = Duration::from_secs(60);

    fn replica(store: &Arc<dyn StateStore>) -> Arc<Idempotency> {
        Arc::new(Idempotency::new(store, &all_alive()))
    }

    async fn reserve(keys: &Arc<Idempotency>, action: &str, body: &str) -> Result<Reservation, ActionError> {
        keys.reserve(&"agent".into(), (&Caller::default(), action, "key"), body.as_bytes(), LIMIT).await
    }

    async fn first(keys: &Arc<Idempotency>, body: &str) -> FirstRequest {
        match reserve(keys, "a", body).await.unwrap() {
            Reservation::First(running) => running,
            Reservation::Repeat(_) => panic!("not the first"),
        }
    }

    async fn repeat(keys: &Arc<Idempotency>, body: &str) -> RepeatedRequest {
        match reserve(keys, "a", body).await.unwrap() {
            Reservation::First(_) => panic!("ran twice"),
            Reservation::Repeat(repeat) => repeat,
        }
    }

    /// A store with 4 MiB for replies.
    fn small_store() -> Arc<dyn StateStore> {
        Arc::new(MemoryStore::new(&Quotas::new(32 << 20)))
    }

    fn outcome(message: &str) -> Reply {
        let task = TaskRef { id: None, context_id: None, agent: "agent".into(), skill: None };
        let content = ReplyContent { message: message.to_owned(), ..ReplyContent::default() };
        Ok(Arc::new(Outcome::new(ReplyStatus::Completed, content, task)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_repeated_request_gets_the_first_reply_at_every_replica() {
        let store = memory_store();
        let (here, elsewhere) = (replica(&store), replica(&store));
        let running = first(&here, "x").await;
        let waiting = [repeat(&here, "x").await, repeat(&elsewhere, "x").await];
        running.finish(&outcome("reply")).await;
        for waiting in waiting.into_iter().chain([repeat(&here, "x").await, repeat(&elsewhere, "x").await]) {
            assert_eq!(waiting.reply(free).await.unwrap().content.message, "reply");
        }
        reserve(&here, "a", "y").await.expect_err("another body");
        reserve(&elsewhere, "a", "y").await.expect_err("another body");
        assert!(matches!(reserve(&here, "b", "y").await.unwrap(), Reservation::First(_)), "another action");
    }

    #[tokio::test(start_paused = true)]
    async fn the_repeats_of_one_key_are_limited_and_others_are_not_affected() {
        let keys = replica(&memory_store());
        let running = first(&keys, "x").await;
        let mut waiting = Vec::new();
        for _ in 0..MAX_REPEATS_PER_KEY {
            waiting.push(repeat(&keys, "x").await);
        }
        let refused = reserve(&keys, "a", "x").await.unwrap_err();
        assert_eq!((refused.info.code, refused.info.retryable), (Code::Busy, true));
        assert!(refused.message.contains("limit"), "{}", refused.message);
        let other = reserve(&keys, "b", "x").await.unwrap();
        assert!(matches!(other, Reservation::First(_)), "another action");
        waiting.pop();
        waiting.push(repeat(&keys, "x").await);
        running.finish(&outcome("reply")).await;
        for waiting in waiting {
            assert_eq!(waiting.reply(free).await.unwrap().content.message, "reply");
        }
        assert!(keys.waiting().is_empty() && keys.running().len() == 1, "only what runs or waits is counted");
    }

    #[tokio::test]
    async fn an_error_from_before_the_agent_was_reached_is_not_remembered() {
        let keys = replica(&memory_store());
        first(&keys, "x").await.finish(&Err(ActionError::unavailable("a", None))).await;
        first(&keys, "y").await.finish(&Err(ActionError::internal().after_reaching_agent())).await;
        reserve(&keys, "a", "x").await.expect_err("the second one is remembered");
    }

    #[tokio::test]
    async fn a_reply_that_is_too_large_to_keep_never_runs_the_agent_again() {
        let keys = replica(&small_store());
        first(&keys, "x").await.finish(&outcome(&"x".repeat(3 << 20))).await;
        let again = repeat(&keys, "x").await.reply(free).await.unwrap_err();
        assert_eq!(again.info.code, Code::OutcomeUnknown);
    }

    #[tokio::test]
    async fn a_key_remains_when_the_store_evicts_its_reply() {
        let keys = replica(&small_store());
        let reserve = |key: String| {
            let keys = Arc::clone(&keys);
            async move {
                keys.reserve(&"agent".into(), (&Caller::default(), "a", &key), b"x", LIMIT).await.unwrap()
            }
        };
        for number in 0..100 {
            let Reservation::First(running) = reserve(number.to_string()).await else {
                panic!("not the first")
            };
            running.finish(&outcome(&"x".repeat(100 << 10))).await;
        }
        let Reservation::Repeat(first) = reserve("0".to_owned()).await else { panic!("ran twice") };
        assert_eq!(first.reply(free).await.unwrap_err().info.code, Code::OutcomeUnknown);
        let Reservation::Repeat(last) = reserve("99".to_owned()).await else { panic!("ran twice") };
        last.reply(free).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_dropped_midway_never_runs_again() {
        let keys = replica(&memory_store());
        drop(first(&keys, "x").await);
        let waiting = repeat(&keys, "x").await.reply(free);
        assert!(tokio::time::timeout(LIMIT, waiting).await.is_err(), "it may still run");
    }
}
