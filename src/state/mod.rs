//! What the bridge remembers between calls: follow-ups, tasks, sessions and idempotency keys.
//!
//! All of it rests on [`StateStore`], three operations that a map in memory and a JetStream bucket can both
//! provide: read, conditional write with a time to live, and scan. `Bridge::connect` passes a store to
//! [`State::new`]; no other module knows which store it is.
//!
//! ```text
//! FollowUps ──┐
//! Tasks ──────┤               ┌── MemoryStore   this process only
//! Sessions ───┼─> TypedRecords ─> StateStore
//! Idempotency ┘               └── (a store that replicas share)
//! ```
//!
//! Each agent has a [`quota`] for what it may hold in memory, and the [tables](table) say what happens when it is
//! reached.
//!
//! A call in mode `final` or `stream` writes nothing to the store. Its task stays in a local table of [`Tasks`]
//! until a request at another replica may need it: when the task is submitted, or when it waits for an answer.

pub(crate) mod follow_ups;
pub(crate) mod idempotency;
pub(crate) mod memory;
pub(crate) mod quota;
mod records;
pub(crate) mod sessions;
mod table;
pub(crate) mod task_ends;
pub(crate) mod tasks;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::BoxStream;

use crate::reply::error::{ActionError, Code};
use follow_ups::FollowUps;
use idempotency::Idempotency;
use quota::{AgentQuota, CallKind, Quotas, ReservedRoom};
use sessions::Sessions;
use tasks::Tasks;

const SWEEP_INTERVAL: Duration = Duration::from_secs(30);

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
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct RecordKey {
    pub agent: Arc<str>,
    pub id: String,
}

impl RecordKey {
    pub(crate) fn new(agent: &Arc<str>, id: impl Into<String>) -> Self {
        Self { agent: Arc::clone(agent), id: id.into() }
    }
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
pub(crate) struct StoreUnavailable;

/// Why a write was not confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(not(test), expect(dead_code, reason = "the memory store never loses a write; other stores do"))]
pub(crate) enum WriteError {
    #[error("another write came first")]
    Conflict,
    #[error("the agent has no room left in the state store")]
    Full,
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
    ) -> BoxFuture<'a, Result<Revision, WriteError>>;

    /// All records of a kind, in no particular order.
    fn scan(&self, kind: RecordKind) -> BoxStream<'_, Result<(RecordKey, StoredRecord), StoreUnavailable>>;

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
    store: Arc<dyn StateStore>,
}

impl State {
    /// `quotas` limits what this process holds in memory.
    pub(crate) fn new(store: &Arc<dyn StateStore>, quotas: &Arc<Quotas>) -> Self {
        Self {
            follow_ups: FollowUps::new(store),
            tasks: Tasks::new(store, quotas),
            sessions: Sessions::new(store),
            idempotency: Arc::new(Idempotency::new(store)),
            quotas: Arc::clone(quotas),
            store: Arc::clone(store),
        }
    }

    /// Reserves room for what a call may have to record. Records whose time is over do not count, even if no write and no
    /// sweep has noticed it yet.
    pub(crate) fn reserve(
        &self,
        quota: &Arc<AgentQuota>,
        call: CallKind,
    ) -> Result<ReservedRoom, ActionError> {
        if !quota.has_room_for(call) {
            self.store.expire(quota.agent());
            self.tasks.expire(quota.agent());
        }
        quota.reserve(call)
    }

    /// Frees the memory of expired records at regular intervals. Without it, only a write of the same kind frees
    /// them, and there may be none.
    pub(crate) async fn sweep_periodically(&self) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            self.store.sweep().await;
            self.tasks.sweep().await;
            self.quotas.update_shares();
        }
    }
}

#[cfg(test)]
impl Default for State {
    fn default() -> Self {
        let quotas = Quotas::new(512 << 20);
        let store: Arc<dyn StateStore> = Arc::new(memory::MemoryStore::new(&quotas));
        Self::new(&store, &quotas)
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
            WriteError::Full => Code::Busy,
            WriteError::Conflict | WriteError::Unavailable | WriteError::Unknown => Code::StateUnavailable,
        };
        Self::new(code, format!("{error}; try again"))
    }
}
