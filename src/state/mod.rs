//! What the bridge remembers between calls: follow-ups, tasks, sessions and idempotency keys.
//!
//! Everything is written against [`StateStore`], three operations that a map in memory and a
//! JetStream bucket can both provide: read, conditional write with a time to live, and scan.
//! A store is plugged in at [`State::new`], which `Bridge::connect` calls; nothing above this module knows which one it
//! is.
//!
//! ```text
//! FollowUps ─┐
//! TaskStore ─┤            ┌── MemoryStore   this process only
//! Sessions ──┼─> StateStore
//! Idempotency┘            └── (a store that replicas share)
//! ```
//!
//! Records are JSON with a version field, so that replicas of different releases can share a store:
//! a record of a newer version is reported as `state_unavailable` instead of being misread.
//!
//! A plain call touches no store. Its task stays in a local table of [`TaskStore`] until somebody
//! else may ask for it: when it was submitted, or when it waits for an answer.

#[cfg(test)]
mod faults;
pub(crate) mod follow_ups;
pub(crate) mod followers;
pub(crate) mod idempotency;
pub(crate) mod memory;
mod record;
pub(crate) mod sessions;
mod table;
pub(crate) mod tasks;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::BoxStream;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::reply::error::{ActionError, Code};
use follow_ups::FollowUps;
use idempotency::Idempotency;
use memory::MemoryStore;
use sessions::Sessions;
use tasks::TaskStore;

/// The kinds of record, each with a table or bucket of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    FollowUp,
    Task,
    Session,
    /// Which requests have run. A store never drops such a record before its time is over.
    IdempotencyKey,
    Reply,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] =
        [Self::FollowUp, Self::Task, Self::Session, Self::IdempotencyKey, Self::Reply];
}

/// The name of a record: the agent that it belongs to, and an id within that agent.
///
/// Both come from outside and may contain anything; a store that has rules for its keys escapes them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub agent: Arc<str>,
    pub id: String,
}

impl Key {
    pub(crate) fn new(agent: &Arc<str>, id: impl Into<String>) -> Self {
        Self { agent: Arc::clone(agent), id: id.into() }
    }
}

/// Counts the writes of a store. `0` stands for "no such record".
pub(crate) type Revision = u64;

/// How often the memory of what has expired is freed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);

/// The revision that a write expects when the record must not exist yet.
pub(crate) const ABSENT: Revision = 0;

/// A record as it was read.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub value: Bytes,
    pub revision: Revision,
    pub written_at: SystemTime,
}

/// The store cannot be reached, or holds a record that this version cannot read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the state store is unavailable")]
pub(crate) struct Unavailable;

/// Why a write was not confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(not(test), expect(dead_code, reason = "the memory store never loses a write; other stores do"))]
pub(crate) enum WriteError {
    #[error("another write came first")]
    Conflict,
    #[error("the state store has no room for this record")]
    Full,
    #[error("the state store is unavailable; nothing was written")]
    Unavailable,
    /// The write may still take effect, even after a later read.
    #[error("the state store did not confirm the write")]
    Unknown,
}

/// Values under keys. Every write is conditional on the revision that the writer has seen.
pub(crate) trait StateStore: fmt::Debug + Send + Sync {
    fn read<'a>(&'a self, kind: Kind, key: &'a Key) -> BoxFuture<'a, Result<Option<Entry>, Unavailable>>;

    /// Writes `value` if the record is still at revision `expected`. The record disappears `ttl` after
    /// its last write.
    fn write<'a>(
        &'a self,
        kind: Kind,
        key: &'a Key,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<Revision, WriteError>>;

    /// All records of a kind, in no particular order.
    fn scan(&self, kind: Kind) -> BoxStream<'_, Result<(Key, Entry), Unavailable>>;

    /// Frees the memory of records that have expired, for a store that has them in this process.
    fn sweep(&self) -> BoxFuture<'_, ()> {
        ready(()).boxed()
    }
}

/// Everything that all agents of this process remember together.
#[derive(Debug)]
pub(crate) struct State {
    pub follow_ups: FollowUps,
    pub tasks: TaskStore,
    pub sessions: Sessions,
    pub idempotency: Arc<Idempotency>,
    store: Arc<dyn StateStore>,
}

impl State {
    pub(crate) fn new(store: &Arc<dyn StateStore>) -> Self {
        Self {
            follow_ups: FollowUps::new(Arc::clone(store)),
            tasks: TaskStore::new(Arc::clone(store)),
            sessions: Sessions::new(Arc::clone(store)),
            idempotency: Arc::new(Idempotency::new(Arc::clone(store))),
            store: Arc::clone(store),
        }
    }

    /// Frees the memory of what has expired, again and again. Otherwise it is freed when something of the same
    /// kind is written, which may be never.
    pub(crate) async fn sweep_periodically(&self) {
        loop {
            tokio::time::sleep(SWEEP_INTERVAL).await;
            self.sweep().await;
        }
    }

    async fn sweep(&self) {
        self.store.sweep().await;
        self.tasks.sweep().await;
    }
}

impl Default for State {
    /// State that ends with the process.
    fn default() -> Self {
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::default());
        Self::new(&store)
    }
}

impl From<Unavailable> for ActionError {
    fn from(error: Unavailable) -> Self {
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

/// How often a conflicting write is tried again before the caller has to.
const MAX_CONFLICTS: u32 = 8;

/// What to do with a record that was just read.
enum Change<R, T> {
    /// Replace it, and return the value if the write wins.
    Write(R, Duration, T),
    /// Leave it as it is.
    Keep(T),
}

/// Reads a record, decides, and writes it back. If another write came first, it reads and decides again.
///
/// A write that the store does not confirm is repeated with the same expectation: whichever of the two
/// takes effect first makes the other one conflict, so the decision is never applied twice. `decide`
/// must recognise its own record in that case.
async fn update<R, T, E>(
    store: &dyn StateStore,
    kind: Kind,
    key: &Key,
    mut decide: impl FnMut(Option<(R, SystemTime)>) -> Result<Change<R, T>, E>,
) -> Result<T, E>
where
    R: Serialize + DeserializeOwned,
    E: From<Unavailable> + From<WriteError>,
{
    let mut attempts = 0;
    loop {
        let entry = store.read(kind, key).await?;
        let revision = entry.as_ref().map_or(ABSENT, |entry| entry.revision);
        let known = match entry {
            Some(entry) => Some((record::decode(&entry.value)?, entry.written_at)),
            None => None,
        };
        let (value, ttl, result) = match decide(known)? {
            Change::Keep(result) => return Ok(result),
            Change::Write(value, ttl, result) => (value, ttl, result),
        };
        attempts += 1;
        match store.write(kind, key, revision, record::encode(&value), ttl).await {
            Ok(_) => return Ok(result),
            Err(WriteError::Conflict | WriteError::Unknown) if attempts < MAX_CONFLICTS => {}
            Err(error) => return Err(error.into()),
        }
    }
}
