//! The default store: tables in memory that end with the process.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::{self, BoxStream, StreamExt as _};

use super::table::{self, BoundedTable, Full, WhenFull};
use super::{
    ABSENT, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable, StoredRecord, WriteError,
};

/// Limits per kind, in bytes.
const FOLLOW_UP_BYTES: usize = 128 << 20;
const TASK_BYTES: usize = 64 << 20;
const SESSION_BYTES: usize = 32 << 20;
const REPLY_BYTES: usize = 32 << 20;
/// Limit for the idempotency keys of each agent, in bytes: about 30,000 keys.
const KEY_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(crate) struct MemoryStore {
    follow_ups: Mutex<RecordTable>,
    tasks: Mutex<RecordTable>,
    sessions: Mutex<RecordTable>,
    idempotency_keys: Mutex<RecordTable>,
    replies: Mutex<RecordTable>,
}

#[derive(Debug)]
struct RecordTable {
    table: BoundedTable<StoredRecord>,
    revision: Revision,
}

impl Default for MemoryStore {
    fn default() -> Self {
        let table = |max_bytes, when_full| {
            let table = BoundedTable::new(max_bytes, when_full);
            Mutex::new(RecordTable { table, revision: ABSENT })
        };
        Self {
            follow_ups: table(FOLLOW_UP_BYTES, WhenFull::Evict),
            tasks: table(TASK_BYTES, WhenFull::Evict),
            sessions: table(SESSION_BYTES, WhenFull::Evict),
            idempotency_keys: table(KEY_BYTES, WhenFull::Refuse),
            replies: table(REPLY_BYTES, WhenFull::Evict),
        }
    }
}

impl MemoryStore {
    fn table(&self, kind: RecordKind) -> MutexGuard<'_, RecordTable> {
        let table = match kind {
            RecordKind::FollowUp => &self.follow_ups,
            RecordKind::Task => &self.tasks,
            RecordKind::Session => &self.sessions,
            RecordKind::IdempotencyKey => &self.idempotency_keys,
            RecordKind::Reply => &self.replies,
        };
        table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StateStore for MemoryStore {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>> {
        let record = self.table(kind).table.get(&key.agent, &key.id, Instant::now()).cloned();
        ready(Ok(record)).boxed()
    }

    fn write<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            let now = Instant::now();
            let mut locked = self.table(kind);
            let RecordTable { table, revision } = &mut *locked;
            let current = table.get(&key.agent, &key.id, now).map_or(ABSENT, |record| record.revision);
            if current != expected {
                return Err(WriteError::Conflict);
            }
            let bytes = value.len();
            // One record never evicts all others.
            if bytes > table.max_bytes / 2 {
                return Err(WriteError::Full);
            }
            *revision += 1;
            let written = *revision;
            let record = StoredRecord { value, revision: written, written_at: SystemTime::now() };
            let put = table.put(&key.agent, &key.id, record, bytes, ttl, now);
            drop(locked);
            // The evicted values are dropped after the lock is released.
            put.map(|_evicted| written).map_err(|Full| WriteError::Full)
        }
        .boxed()
    }

    fn scan(&self, kind: RecordKind) -> BoxStream<'_, Result<(RecordKey, StoredRecord), StoreUnavailable>> {
        let locked = self.table(kind);
        let rows = locked.table.iter(Instant::now());
        let all: Vec<_> =
            rows.map(|(agent, id, record)| Ok((RecordKey::new(agent, &**id), record.clone()))).collect();
        stream::iter(all).boxed()
    }

    fn sweep(&self) -> BoxFuture<'_, ()> {
        async {
            for kind in RecordKind::ALL {
                table::sweep(|| self.table(kind).table.sweep_step(Instant::now())).await;
            }
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn key(id: &str) -> RecordKey {
        RecordKey::new(&"agent".into(), id)
    }

    #[tokio::test]
    async fn a_write_wins_only_at_the_revision_that_it_expects() {
        let store = MemoryStore::default();
        let write = |expected, value: &'static str, ttl| {
            let store = &store;
            async move { store.write(RecordKind::Session, &key("s"), expected, value.into(), ttl).await }
        };
        let first = write(ABSENT, "one", HOUR).await.unwrap();
        assert_eq!(write(ABSENT, "two", HOUR).await, Err(WriteError::Conflict));
        let second = write(first, "two", HOUR).await.unwrap();
        assert_eq!(write(first, "three", HOUR).await, Err(WriteError::Conflict));
        let record = store.read(RecordKind::Session, &key("s")).await.unwrap().unwrap();
        assert_eq!((record.value, record.revision), ("two".into(), second));
        assert!(store.read(RecordKind::Task, &key("s")).await.unwrap().is_none(), "another kind");
        let third = write(second, "expired", Duration::ZERO).await.unwrap();
        assert_eq!(write(third, "late", HOUR).await, Err(WriteError::Conflict), "it has expired");
        write(ABSENT, "again", HOUR).await.unwrap();
    }

    #[tokio::test]
    async fn a_scan_sees_every_record_of_its_kind() {
        let store = MemoryStore::default();
        for id in ["a", "b"] {
            store.write(RecordKind::FollowUp, &key(id), ABSENT, "x".into(), HOUR).await.unwrap();
        }
        store.write(RecordKind::Task, &key("c"), ABSENT, "x".into(), HOUR).await.unwrap();
        let mut ids: Vec<_> =
            store.scan(RecordKind::FollowUp).map(|found| found.unwrap().0.id).collect().await;
        ids.sort();
        assert_eq!(ids, ["a", "b"]);
    }

    #[tokio::test]
    async fn a_sweep_frees_only_expired_records_and_in_every_table() {
        let store = MemoryStore::default();
        let kinds = RecordKind::ALL;
        for kind in kinds {
            store.write(kind, &key("lives"), ABSENT, "x".into(), HOUR).await.unwrap();
            store.write(kind, &key("expires"), ABSENT, "x".into(), Duration::from_nanos(1)).await.unwrap();
        }
        assert_eq!(kinds.map(|kind| store.table(kind).table.rows()), [2; 5]);
        store.sweep().await;
        assert_eq!(kinds.map(|kind| store.table(kind).table.rows()), [1; 5]);
    }

    #[tokio::test]
    async fn one_record_never_evicts_all_others() {
        let store = MemoryStore::default();
        let huge = Bytes::from(vec![0; SESSION_BYTES]);
        assert_eq!(
            store.write(RecordKind::Session, &key("s"), ABSENT, huge, HOUR).await,
            Err(WriteError::Full)
        );
    }
}
