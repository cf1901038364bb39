//! The default store: tables in memory that end with the process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::{self, BoxStream, StreamExt as _};

use super::quota::{QuotaKind, Quotas};
use super::table::{self, BoundedTable, Full, Removed};
use super::{
    ABSENT, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable, StoredRecord, WriteError,
};
use crate::a2a::model::ALLOCATION_OVERHEAD;

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

impl MemoryStore {
    pub(crate) fn new(quotas: &Arc<Quotas>) -> Self {
        let table = |kind: RecordKind| {
            let table = BoundedTable::new(quotas, QuotaKind::from(kind));
            Mutex::new(RecordTable { table, revision: ABSENT })
        };
        Self {
            follow_ups: table(RecordKind::FollowUp),
            tasks: table(RecordKind::Task),
            sessions: table(RecordKind::Session),
            idempotency_keys: table(RecordKind::IdempotencyKey),
            replies: table(RecordKind::Reply),
        }
    }

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

    /// Some records of an agent, from a position on, and the position of the next ones.
    fn page(&self, kind: RecordKind, agent: &Arc<str>, from: usize) -> (Vec<ScannedRecord>, Option<usize>) {
        let locked = self.table(kind);
        let (rows, next) = locked.table.page(agent, from, Instant::now());
        let records = rows.into_iter().map(|(id, record)| Ok((RecordKey::new(agent, id), record.clone())));
        (records.collect(), next)
    }
}

type ScannedRecord = Result<(RecordKey, StoredRecord), StoreUnavailable>;

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
        lifetime: Lifetime,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            let (mut removed, now) = (Removed::default(), Instant::now());
            let mut locked = self.table(kind);
            let RecordTable { table, revision } = &mut *locked;
            let entry = table.entry(&key.agent, &key.id, now, &mut removed);
            let current = entry.value().map_or(ABSENT, |record| record.revision);
            if current != expected {
                return Err(WriteError::Conflict);
            }
            *revision += 1;
            let (written, bytes) = (*revision, value.len() + ALLOCATION_OVERHEAD);
            let record = StoredRecord { value, revision: written, written_at: SystemTime::now() };
            let put = entry.put(record, bytes, lifetime);
            drop(locked);
            removed.evict_rest(|removed| self.table(kind).table.evict(&key.agent, now, removed));
            put.map(|()| written).map_err(|Full| WriteError::Full)
        }
        .boxed()
    }

    fn scan(&self, kind: RecordKind) -> BoxStream<'_, Result<(RecordKey, StoredRecord), StoreUnavailable>> {
        // In pages, so that the lock is not held for long.
        let agents = self.table(kind).table.agents();
        let pages = stream::unfold((agents, 0), move |(mut agents, from)| async move {
            let agent = agents.pop()?;
            let (page, next) = self.page(kind, &agent, from);
            if next.is_some() {
                agents.push(agent);
            }
            Some((stream::iter(page), (agents, next.unwrap_or(0))))
        });
        pages.flatten().boxed()
    }

    fn expire(&self, agent: &str) {
        for kind in RecordKind::ALL {
            // The removed values are dropped after the lock is released.
            let _removed = { self.table(kind).table.expire(agent, Instant::now()) };
        }
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
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Duration;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const KEPT: Lifetime = Lifetime { ttl: HOUR, protected_for: Duration::ZERO };

    fn store() -> MemoryStore {
        MemoryStore::new(&Quotas::new(16 << 20))
    }

    fn key(id: &str) -> RecordKey {
        RecordKey::new(&"agent".into(), id)
    }

    #[tokio::test]
    async fn a_write_wins_only_at_the_revision_that_it_expects() {
        let store = store();
        let write = |expected, value: &'static str, ttl| {
            let store = &store;
            async move {
                let lifetime = Lifetime::evictable(ttl);
                store.write(RecordKind::Session, &key("s"), expected, value.into(), lifetime).await
            }
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
    async fn a_write_that_conflicts_tells_the_quota_what_is_no_longer_protected() {
        let quotas = Quotas::new(16 << 20);
        let store = MemoryStore::new(&quotas);
        let short = Lifetime { ttl: HOUR, protected_for: Duration::from_nanos(1) };
        store.write(RecordKind::FollowUp, &key("a"), ABSENT, "x".into(), short).await.unwrap();
        let quota = quotas.agent(&"agent".into());
        let protected = || quota.usage(QuotaKind::FollowUp).protected_bytes.load(Relaxed);
        assert!(protected() > 0);
        let conflict = store.write(RecordKind::FollowUp, &key("a"), ABSENT, "x".into(), KEPT).await;
        assert_eq!((conflict, protected()), (Err(WriteError::Conflict), 0));
    }

    #[tokio::test]
    async fn a_scan_sees_every_record_of_its_kind() {
        let store = store();
        for id in ["a", "b"] {
            store.write(RecordKind::FollowUp, &key(id), ABSENT, "x".into(), KEPT).await.unwrap();
        }
        store.write(RecordKind::Task, &key("c"), ABSENT, "x".into(), KEPT).await.unwrap();
        let mut ids: Vec<_> =
            store.scan(RecordKind::FollowUp).map(|found| found.unwrap().0.id).collect().await;
        ids.sort();
        assert_eq!(ids, ["a", "b"]);
    }

    #[tokio::test]
    async fn a_sweep_frees_only_expired_records_and_in_every_table() {
        let store = store();
        let kinds = RecordKind::ALL;
        for kind in kinds {
            store.write(kind, &key("lives"), ABSENT, "x".into(), KEPT).await.unwrap();
            let short = Lifetime::protected(Duration::from_nanos(1));
            store.write(kind, &key("expires"), ABSENT, "x".into(), short).await.unwrap();
        }
        assert_eq!(kinds.map(|kind| store.table(kind).table.rows()), [2; 5]);
        store.sweep().await;
        assert_eq!(kinds.map(|kind| store.table(kind).table.rows()), [1; 5]);
    }

    #[tokio::test]
    async fn one_record_never_evicts_all_others() {
        let store = store();
        let huge = Bytes::from(vec![0; 600 << 10]);
        assert_eq!(
            store.write(RecordKind::Session, &key("s"), ABSENT, huge, KEPT).await,
            Err(WriteError::Full)
        );
    }
}
