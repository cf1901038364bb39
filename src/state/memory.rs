//! The default store: tables in memory that end with the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::{BoxStream, StreamExt as _};

use super::clock::{Instant, wall_time};
use super::quota::Quotas;
use super::record_tables::RecordTables;
use super::table::{Full, Removed};
use super::{
    ABSENT, Durability, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable,
    StoredRecord, WriteError,
};
use crate::a2a::model::ALLOCATION_OVERHEAD;

#[derive(Debug)]
pub(crate) struct MemoryStore {
    tables: RecordTables<StoredRecord>,
    revision: AtomicU64,
}

impl MemoryStore {
    pub(crate) fn new(quotas: &Arc<Quotas>) -> Self {
        Self { tables: RecordTables::new(quotas), revision: AtomicU64::new(ABSENT) }
    }
}

impl StateStore for MemoryStore {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>> {
        let record = self.tables.lock(kind).get(&key.agent, &key.id, Instant::now()).cloned();
        ready(Ok(record)).boxed()
    }

    fn write<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
        _: Durability,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            let (mut removed, now) = (Removed::default(), Instant::now());
            let mut table = self.tables.lock(kind);
            let entry = table.entry(&key.agent, &key.id, now, &mut removed).of_caller(&key.caller);
            let current = entry.value().map_or(ABSENT, |record| record.revision);
            if current != expected {
                return Err(WriteError::Conflict);
            }
            let written = self.revision.fetch_add(1, Relaxed) + 1;
            let bytes = value.len() + ALLOCATION_OVERHEAD;
            let record = StoredRecord { value, revision: written, written_at: wall_time() };
            let put = entry.put(record, bytes, lifetime);
            drop(table);
            removed.evict_rest(|removed| self.tables.lock(kind).evict(&key.agent, now, removed));
            put.map(|()| written).map_err(|Full| WriteError::Full)
        }
        .boxed()
    }

    fn scan<'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>> {
        self.tables
            .scan(kind, agent.cloned(), |_, record| Some(record.clone()))
            .map(|(_, record)| Ok(record))
            .boxed()
    }

    fn has_local(&self, kind: RecordKind, key: &RecordKey) -> bool {
        self.tables.lock(kind).get(&key.agent, &key.id, Instant::now()).is_some()
    }

    fn expire(&self, agent: &str) {
        self.tables.expire(agent);
    }

    fn sweep(&self) -> BoxFuture<'_, ()> {
        self.tables.sweep().boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::quota::QuotaKind;
    use super::*;

    const NOW: Durability = Durability::Confirmed;
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
                store.write(RecordKind::Session, &key("s"), expected, value.into(), lifetime, NOW).await
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
        store.write(RecordKind::FollowUp, &key("a"), ABSENT, "x".into(), short, NOW).await.unwrap();
        let quota = quotas.agent(&"agent".into());
        let protected = || quota.usage(QuotaKind::FollowUp).protected_bytes.load(Relaxed);
        assert!(protected() > 0);
        let conflict = store.write(RecordKind::FollowUp, &key("a"), ABSENT, "x".into(), KEPT, NOW).await;
        assert_eq!((conflict, protected()), (Err(WriteError::Conflict), 0));
    }

    #[tokio::test]
    async fn a_scan_sees_every_record_of_its_kind() {
        let store = store();
        for id in ["a", "b"] {
            store.write(RecordKind::FollowUp, &key(id), ABSENT, id.into(), KEPT, NOW).await.unwrap();
        }
        let other = RecordKey::new(&"other".into(), "d");
        store.write(RecordKind::FollowUp, &other, ABSENT, "d".into(), KEPT, NOW).await.unwrap();
        store.write(RecordKind::Task, &key("c"), ABSENT, "x".into(), KEPT, NOW).await.unwrap();
        let scan = async |agent: Option<&Arc<str>>| {
            let found = store.scan(RecordKind::FollowUp, agent).map(|found| found.unwrap().value);
            let mut found: Vec<_> = found.collect().await;
            found.sort();
            found
        };
        assert_eq!(scan(None).await, ["a", "b", "d"]);
        assert_eq!(scan(Some(&"agent".into())).await, ["a", "b"]);
    }

    #[tokio::test]
    async fn a_sweep_frees_only_expired_records_and_in_every_table() {
        let store = store();
        let kinds = RecordKind::ALL;
        for kind in kinds {
            store.write(kind, &key("lives"), ABSENT, "x".into(), KEPT, NOW).await.unwrap();
            let short = Lifetime::protected(Duration::from_nanos(1));
            store.write(kind, &key("expires"), ABSENT, "x".into(), short, NOW).await.unwrap();
        }
        assert_eq!(kinds.map(|kind| store.tables.lock(kind).rows()), [2; 5]);
        store.sweep().await;
        assert_eq!(kinds.map(|kind| store.tables.lock(kind).rows()), [1; 5]);
    }

    #[tokio::test]
    async fn one_record_never_evicts_all_others() {
        let store = store();
        let huge = Bytes::from(vec![0; 600 << 10]);
        assert_eq!(
            store.write(RecordKind::Session, &key("s"), ABSENT, huge, KEPT, NOW).await,
            Err(WriteError::Full)
        );
    }
}
