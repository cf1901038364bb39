//! The store of a bridge on its own: maps in memory that end with the process.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::{self, BoxStream, StreamExt as _};

use super::table::{self, Full, Table};
use super::{ABSENT, Entry, Key, Kind, Revision, StateStore, Unavailable, WriteError};

/// Most bytes of each kind.
const FOLLOW_UP_BYTES: usize = 128 << 20;
const TASK_BYTES: usize = 64 << 20;
const SESSION_BYTES: usize = 32 << 20;
const REPLY_BYTES: usize = 32 << 20;
/// Most bytes of idempotency keys, for each agent: about 30,000 keys.
const KEY_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(crate) struct MemoryStore {
    follow_ups: Mutex<Kept>,
    tasks: Mutex<Kept>,
    sessions: Mutex<Kept>,
    idempotency_keys: Mutex<Kept>,
    replies: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    table: Table<Entry>,
    revision: Revision,
}

impl Default for MemoryStore {
    fn default() -> Self {
        let kept = |table| Mutex::new(Kept { table, revision: ABSENT });
        Self {
            follow_ups: kept(Table::evicting(FOLLOW_UP_BYTES)),
            tasks: kept(Table::evicting(TASK_BYTES)),
            sessions: kept(Table::evicting(SESSION_BYTES)),
            idempotency_keys: kept(Table::refusing(KEY_BYTES)),
            replies: kept(Table::evicting(REPLY_BYTES)),
        }
    }
}

impl MemoryStore {
    fn kept(&self, kind: Kind) -> MutexGuard<'_, Kept> {
        let kept = match kind {
            Kind::FollowUp => &self.follow_ups,
            Kind::Task => &self.tasks,
            Kind::Session => &self.sessions,
            Kind::IdempotencyKey => &self.idempotency_keys,
            Kind::Reply => &self.replies,
        };
        kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_now(
        &self,
        kind: Kind,
        key: &Key,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
    ) -> Result<Revision, WriteError> {
        let now = Instant::now();
        let mut kept = self.kept(kind);
        let Kept { table, revision } = &mut *kept;
        let current = table.get(&key.agent, &key.id, now).map_or(ABSENT, |entry| entry.revision);
        if current != expected {
            return Err(WriteError::Conflict);
        }
        let bytes = value.len();
        // One record never takes the place of all others.
        if bytes > table.max_bytes() / 2 {
            return Err(WriteError::Full);
        }
        *revision += 1;
        let entry = Entry { value, revision: *revision, written_at: SystemTime::now() };
        let written = entry.revision;
        let put = table.put(&key.agent, &key.id, entry, bytes, ttl, now);
        drop(kept);
        // Values that had to go are dropped after the lock is released.
        put.map(|_gone| written).map_err(|Full| WriteError::Full)
    }
}

impl StateStore for MemoryStore {
    fn read<'a>(&'a self, kind: Kind, key: &'a Key) -> BoxFuture<'a, Result<Option<Entry>, Unavailable>> {
        let entry = self.kept(kind).table.get(&key.agent, &key.id, Instant::now()).cloned();
        ready(Ok(entry)).boxed()
    }

    fn write<'a>(
        &'a self,
        kind: Kind,
        key: &'a Key,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        ready(self.write_now(kind, key, expected, value, ttl)).boxed()
    }

    fn scan(&self, kind: Kind) -> BoxStream<'_, Result<(Key, Entry), Unavailable>> {
        let kept = self.kept(kind);
        let rows = kept.table.iter(Instant::now());
        let all: Vec<_> =
            rows.map(|(agent, id, entry)| Ok((Key::new(agent, &**id), entry.clone()))).collect();
        stream::iter(all).boxed()
    }

    fn sweep(&self) -> BoxFuture<'_, ()> {
        async {
            for kind in Kind::ALL {
                table::sweep(|| self.kept(kind).table.sweep_step(Instant::now())).await;
            }
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn key(id: &str) -> Key {
        Key::new(&"agent".into(), id)
    }

    #[tokio::test]
    async fn a_write_wins_only_at_the_revision_that_it_expects() {
        let store = MemoryStore::default();
        let write = |expected, value: &'static str, ttl| {
            let store = &store;
            async move { store.write(Kind::Session, &key("s"), expected, value.into(), ttl).await }
        };
        let first = write(ABSENT, "one", HOUR).await.unwrap();
        assert_eq!(write(ABSENT, "two", HOUR).await, Err(WriteError::Conflict));
        let second = write(first, "two", HOUR).await.unwrap();
        assert_eq!(write(first, "three", HOUR).await, Err(WriteError::Conflict));
        let entry = store.read(Kind::Session, &key("s")).await.unwrap().unwrap();
        assert_eq!((entry.value, entry.revision), ("two".into(), second));
        assert!(store.read(Kind::Task, &key("s")).await.unwrap().is_none(), "another kind");
        let third = write(second, "gone", Duration::ZERO).await.unwrap();
        assert_eq!(write(third, "late", HOUR).await, Err(WriteError::Conflict), "it has expired");
        write(ABSENT, "again", HOUR).await.unwrap();
    }

    #[tokio::test]
    async fn a_scan_sees_every_record_of_its_kind() {
        let store = MemoryStore::default();
        for id in ["a", "b"] {
            store.write(Kind::FollowUp, &key(id), ABSENT, "x".into(), HOUR).await.unwrap();
        }
        store.write(Kind::Task, &key("c"), ABSENT, "x".into(), HOUR).await.unwrap();
        let mut ids: Vec<_> = store.scan(Kind::FollowUp).map(|found| found.unwrap().0.id).collect().await;
        ids.sort();
        assert_eq!(ids, ["a", "b"]);
    }

    #[tokio::test]
    async fn a_sweep_frees_what_has_expired_in_every_table_and_nothing_else() {
        let store = MemoryStore::default();
        let kinds = Kind::ALL;
        for kind in kinds {
            store.write(kind, &key("lives"), ABSENT, "x".into(), HOUR).await.unwrap();
            store.write(kind, &key("expires"), ABSENT, "x".into(), Duration::from_nanos(1)).await.unwrap();
        }
        assert_eq!(kinds.map(|kind| store.kept(kind).table.rows()), [2; 5]);
        store.sweep().await;
        assert_eq!(kinds.map(|kind| store.kept(kind).table.rows()), [1; 5]);
    }

    #[tokio::test]
    async fn one_record_never_takes_the_place_of_all_others() {
        let store = MemoryStore::default();
        let huge = Bytes::from(vec![0; SESSION_BYTES]);
        assert_eq!(store.write(Kind::Session, &key("s"), ABSENT, huge, HOUR).await, Err(WriteError::Full));
    }
}
