//! What the bridge remembers between calls: follow-ups, tasks, sessions and idempotency keys.
//!
//! All of it rests on [`StateStore`], three operations that a map in memory and a JetStream bucket can both
//! provide: read, conditional write with a time to live, and scan. `Bridge::connect` passes a store to
//! [`State::new`]; no other module knows which store it is.
//!
//! ```text
//! FollowUps ──┐
//! Tasks ──────┤               ┌── MemoryStore       this process only
//! Sessions ───┼─> TypedRecords ─> StateStore
//! Idempotency ┘               └── ReplicatedStore     copies and deferred writes of this process ...
//!                                   └── StateStore    ... over a store that replicas share
//! ```
//!
//! Each agent has a [`quota`] for what it may hold in memory, and the [tables](table) say what happens when it is
//! reached.
//!
//! A call in mode `final` or `stream` writes nothing to the store. Its task stays in a local table of [`Tasks`]
//! until a request at another replica may need it: when the task is submitted, or when it waits for an answer.

mod clock;
pub(crate) mod follow_ups;
pub(crate) mod idempotency;
pub(crate) mod ledger;
pub(crate) mod memory;
pub(crate) mod peers;
pub(crate) mod quota;
mod record_tables;
mod records;
pub(crate) mod replicated;
pub(crate) mod run_link;
pub(crate) mod sessions;
pub(crate) mod stats;
mod table;
pub(crate) mod task_ends;
pub(crate) mod tasks;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::{BoxStream, StreamExt as _};
use uuid::Uuid;

use crate::caller::Caller;
use crate::reply::error::{ActionError, Code};
use follow_ups::{Claim, FollowUps, OpenQuestion};
use idempotency::Idempotency;
use ledger::{Holder, Stored};
use peers::{ClaimStatus, PeerQueries, Peers};
use quota::{AgentQuota, CallKind, Quotas, ReservedRoom};
use sessions::Sessions;
use tasks::Tasks;

const SWEEP_INTERVAL: Duration = Duration::from_secs(30);
/// How often a claim looks whether the store has confirmed its task.
const CONFIRMATION_INTERVAL: Duration = Duration::from_millis(500);

/// Each kind of record has a table or bucket of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RecordKind {
    FollowUp,
    Task,
    Session,
    /// Which requests have run.
    IdempotencyKey,
    Reply,
}

impl RecordKind {
    pub(crate) const ALL: [Self; 5] =
        [Self::FollowUp, Self::Task, Self::Session, Self::IdempotencyKey, Self::Reply];
}

/// Identifies a record: the agent that it belongs to, and an id within that agent.
///
/// Both come from outside and may contain any character; a store with rules for its keys escapes them.
#[derive(Debug, Clone)]
pub(crate) struct RecordKey {
    pub agent: Arc<str>,
    pub id: String,
    /// The caller for whose quota the record counts. It does not identify the record.
    pub caller: Caller,
}

impl RecordKey {
    pub(crate) fn new(agent: &Arc<str>, id: impl Into<String>) -> Self {
        Self { agent: Arc::clone(agent), id: id.into(), caller: Caller::default() }
    }

    /// A new record with this key counts for the quota of `caller`.
    #[must_use]
    pub(crate) fn of_caller(self, caller: &Caller) -> Self {
        Self { caller: caller.clone(), ..self }
    }
}

impl PartialEq for RecordKey {
    fn eq(&self, other: &Self) -> bool {
        self.agent == other.agent && self.id == other.id
    }
}

impl Eq for RecordKey {}

impl Hash for RecordKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.agent.hash(state);
        self.id.hash(state);
    }
}

/// Whether a write may take effect later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// The write is confirmed, or it fails. While no other replica can know the record, this process confirms it.
    Confirmed,
    /// The shared store confirms the write, or it fails.
    Shared,
    /// While the shared store is unavailable, this process keeps the record and writes it later. Only for records that
    /// no other replica writes.
    Deferrable,
    /// The write returns at once, and the record is written in the background. Only for records that no other replica
    /// writes.
    Behind,
}

/// Counts the writes of a store.
pub(crate) type Revision = u64;

/// The revision that a write expects when the record must not exist yet.
pub(crate) const ABSENT: Revision = 0;

/// How long a record remains after it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lifetime {
    /// After this time the record expires.
    pub ttl: Duration,
    /// How long the record stays even if the store needs room, because something runs or waits.
    pub protected_for: Duration,
}

impl Lifetime {
    /// The store may evict the record when it needs room.
    pub(crate) fn evictable(ttl: Duration) -> Self {
        Self { ttl, protected_for: Duration::ZERO }
    }

    /// The record stays until it expires.
    pub(crate) fn protected(ttl: Duration) -> Self {
        Self { ttl, protected_for: ttl }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct StoredRecord {
    pub value: Bytes,
    pub revision: Revision,
    pub written_at: SystemTime,
}

/// The store cannot be reached, or holds a record that this version cannot read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the state store is unavailable")]
pub struct StoreUnavailable;

/// Why a write was not confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    #[error("another write came first")]
    Conflict,
    #[error("the agent has no room left in the state store")]
    Full,
    #[error("the caller has used up its share of the shared state store")]
    ShareUsed,
    #[error("the shared state store is full")]
    StoreFull,
    #[error("the state store is unavailable; nothing was written")]
    Unavailable,
    /// The write may still take effect, even after a later read.
    #[error("the state store did not confirm the write")]
    Unknown,
}

/// A key-value store. Every write is conditional on the revision that the writer has read.
pub(crate) trait StateStore: fmt::Debug + Send + Sync {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>>;

    /// Writes `value` if the record is still at revision `expected`. Its lifetime begins again at every write. A store
    /// that has no room, and finds no unprotected record of the same agent to evict, refuses the write.
    fn write<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
        durability: Durability,
    ) -> BoxFuture<'a, Result<Revision, WriteError>>;

    /// All records of a kind, or those of one agent, in no particular order. A record says itself what its key is.
    fn scan<'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>>;

    /// Whether other replicas see what is written.
    fn is_shared(&self) -> bool {
        false
    }

    /// Whether a write would reach the store now, as far as is known.
    fn is_available(&self) -> bool {
        true
    }

    /// Whether this process has a record that other replicas cannot read.
    fn has_local(&self, _kind: RecordKind, _key: &RecordKey) -> bool {
        false
    }

    /// How many bytes the records of a kind may take, if the store has a limit and does not know callers.
    fn capacity(&self, _kind: RecordKind) -> Option<u64> {
        None
    }

    /// The size of every record of a kind, and who holds it. The store reads no values for this.
    fn sizes(&self, _kind: RecordKind) -> BoxStream<'_, Result<(Holder, Stored), StoreUnavailable>> {
        futures_util::stream::empty().boxed()
    }

    /// The kind of record of which a caller of an agent has used up its share, as far as that was noticed lately.
    fn used_up(&self, _agent: &str, _caller: &Caller) -> Option<RecordKind> {
        None
    }

    /// How many replicas share the store, including this one.
    fn share_among(&self, _replicas: usize) {}

    /// The size limit of a record, in bytes.
    fn max_record(&self) -> usize {
        usize::MAX
    }

    /// The counts of a store that replicas share, for metrics.
    fn stats(&self) -> Option<&stats::StoreStats> {
        None
    }

    /// Like [`Self::scan`], but only records that this process has written or holds. It never waits for a network.
    fn scan_local<'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>> {
        self.scan(kind, agent)
    }

    /// Drops the copy of a record that another replica has changed.
    fn forget(&self, _kind: RecordKind, _key: &RecordKey) {}

    /// Ends the protection of an agent's records whose time is over, in one short step, if the store holds them in this
    /// process.
    fn expire(&self, _agent: &str) {}

    /// Frees the memory of expired records, if the store holds them in this process.
    fn sweep(&self) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }
}

/// The state of all agents of this process.
#[derive(Debug)]
pub(crate) struct State {
    pub follow_ups: FollowUps,
    pub tasks: Tasks,
    pub sessions: Sessions,
    pub idempotency: Arc<Idempotency>,
    pub quotas: Arc<Quotas>,
    pub peers: Arc<dyn Peers>,
    store: Arc<dyn StateStore>,
}

impl State {
    /// `quotas` limits what this process holds in memory.
    pub(crate) fn new(store: &Arc<dyn StateStore>, quotas: &Arc<Quotas>, peers: &Arc<dyn Peers>) -> Self {
        Self {
            follow_ups: FollowUps::new(store, peers),
            tasks: Tasks::new(store, quotas, peers),
            sessions: Sessions::new(store, peers),
            idempotency: Arc::new(Idempotency::new(store, peers)),
            quotas: Arc::clone(quotas),
            peers: Arc::clone(peers),
            store: Arc::clone(store),
        }
    }

    /// Whether other replicas see the state.
    pub(crate) fn is_shared(&self) -> bool {
        self.store.is_shared()
    }

    /// Shares the tasks of calls that run for long.
    pub(crate) async fn share_long_running(&self) {
        self.tasks.share_long_running().await;
    }

    /// Expires a question whose record of the task was not written, unless the task names it all the same. Best effort:
    /// an answer checks what the task names, too.
    pub(crate) async fn expire_unless_named(&self, agent: &Arc<str>, task_id: &str, id: &Uuid) {
        if let Ok(task) = self.tasks.find_current(agent, task_id).await {
            let named = task.filter(|task| !task.state.is_final()).and_then(|task| task.follow_up);
            if named.is_none_or(|named| named.id != *id) {
                let _ = self.follow_ups.expire(agent, id).await;
            }
        }
    }

    /// The questions of an agent whose time is over, so that their tasks have to be canceled. A task that has gone on, or
    /// that asks under another id, is none of them: a request that could not record its id has made that one.
    pub(crate) async fn take_expired(&self, agent: &Arc<str>) -> Vec<OpenQuestion> {
        let mut expired = Vec::new();
        for (id, question) in self.follow_ups.take_expired(agent).await {
            let named = match self.tasks.find_to_answer(agent, &question.task_id).await {
                Ok(Some(task)) => task.follow_up.map(|named| named.id),
                Ok(None) | Err(_) => Some(id),
            };
            if named == Some(id) {
                expired.push(question);
            }
        }
        expired
    }

    /// Ends the claim of an answer that the agent has received, or may have. If this replica dies before the store has
    /// confirmed that it follows the task, the claim tells the others that somebody has to.
    pub(crate) async fn mark_used(self: &Arc<Self>, agent: &Arc<str>, claim: Claim) {
        if !self.tasks.is_unconfirmed(agent, &claim.question.task_id) {
            return claim.mark_used().await;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (state, agent) = (Arc::clone(self), Arc::clone(agent));
        runtime.spawn(async move {
            while state.tasks.is_unconfirmed(&agent, &claim.question.task_id) {
                tokio::time::sleep(CONFIRMATION_INTERVAL).await;
            }
            claim.mark_used().await;
        });
    }

    pub(crate) fn store(&self) -> &dyn StateStore {
        &*self.store
    }

    /// Reserves room for what a call may have to record. Records whose time is over do not count, even if no write and no
    /// sweep has noticed it yet.
    pub(crate) fn reserve(
        &self,
        quota: &Arc<AgentQuota>,
        call: CallKind,
        caller: &Caller,
    ) -> Result<ReservedRoom, ActionError> {
        if !quota.has_room_for(call, caller) {
            self.store.expire(quota.agent());
            self.tasks.expire(quota.agent());
        }
        if call != CallKind::Answer
            && let Some(kind) = self.store.used_up(quota.agent(), caller)
        {
            return Err(quota::share_refusal(kind.into()));
        }
        quota.reserve(call, caller)
    }

    /// Frees the memory of expired records at regular intervals. Without it, only a write of the same kind frees
    /// them, and there may be none.
    pub(crate) async fn sweep_periodically(&self) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            self.store.sweep().await;
            self.tasks.sweep().await;
            self.quotas.update_shares();
            self.store.share_among(self.peers.others() + 1);
        }
    }
}

impl PeerQueries for State {
    /// Records that may not be in the store.
    fn has(&self, kind: RecordKind, key: &RecordKey) -> bool {
        match kind {
            RecordKind::Task if key.caller.is_verified() => self.tasks.is_of_caller(key),
            RecordKind::Task => self.tasks.is_known_here(key) || self.store.has_local(kind, key),
            RecordKind::FollowUp => self.store.has_local(kind, key),
            RecordKind::Session | RecordKind::IdempotencyKey | RecordKind::Reply => false,
        }
    }

    fn claim_status(&self, nonce: Uuid) -> ClaimStatus {
        self.follow_ups.claim_status(nonce)
    }

    fn record_changed(&self, kind: RecordKind, key: &RecordKey) {
        self.store.forget(kind, key);
    }
}

#[cfg(test)]
impl Default for State {
    fn default() -> Self {
        let quotas = Quotas::new(512 << 20);
        let store: Arc<dyn StateStore> = Arc::new(memory::MemoryStore::new(&quotas));
        Self::new(&store, &quotas, &tests::alone())
    }
}

impl From<StoreUnavailable> for ActionError {
    fn from(error: StoreUnavailable) -> Self {
        Self::new(Code::StateUnavailable, format!("{error}; try again"))
    }
}

impl From<WriteError> for ActionError {
    fn from(error: WriteError) -> Self {
        let code = match error {
            WriteError::Full | WriteError::ShareUsed | WriteError::StoreFull => Code::Busy,
            WriteError::Conflict | WriteError::Unavailable | WriteError::Unknown => Code::StateUnavailable,
        };
        Self::new(code, format!("{error}; try again"))
    }
}
