//! A store that replicas share, with what this process holds of it.
//!
//! ```text
//! read   deferred write ─> copy, if recent ─> shared store ─> copy, while the shared store is unavailable
//! write  deferred write: replaced here, unless others may have seen it
//!        otherwise: room in this process ─> shared store ─> copy
//!                                                └─ unavailable ─> deferred write, if the caller permits it
//! ```
//!
//! The shared store decides every race. A copy is a hint: it is what this process wrote last, and if another replica has
//! changed the record since, the next write loses, and the copy is dropped.
//!
//! A *deferred write* waits until the shared store takes it. Its revision has the highest bit set, so that it never
//! equals one of the shared store. Only this process knows the record until then. A write that was not confirmed may be in
//! the shared store, so from then on this process no longer decides alone who wins.
//!
//! While the shared store is absent, because the server has no JetStream, this store behaves like a
//! [`MemoryStore`](super::memory::MemoryStore). If the store appears later, the records move there.

mod deferred;
mod flusher;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::Notify;

use self::deferred::{DeferredWrite, DeferredWrites};
use self::flusher::{InFlight, Landing};
use super::clock::{Instant, wall_time};
use super::ledger::{Holder, Ledger, Stored, stored_size};
use super::quota::{Quotas, SMALL_ENTRY};
use super::record_tables::RecordTables;
use super::stats::StoreStats;
use super::table::{Entry, Full, Removed};
use super::{
    ABSENT, Durability, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable,
    StoredRecord, WriteError,
};
use crate::a2a::model::ALLOCATION_OVERHEAD;
use crate::caller::Caller;

/// Marks the revision of a record that is not in the shared store.
const LOCAL: Revision = 1 << 63;
/// A copy that was not checked for this long is read again from the shared store.
const COPY_MAX_AGE: Duration = Duration::from_secs(30);
/// Records of a kind whose size is read.
const MAX_LOADED: usize = 1_000_000;
/// How long a write waits for another write of the same record that is under way in the background.
const IN_FLIGHT_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub(crate) struct ReplicatedStore {
    shared: Arc<dyn StateStore>,
    /// Whether records that cannot reach the shared store are refused instead of deferred.
    is_required: bool,
    rows: RecordTables<Row>,
    deferred: Mutex<DeferredWrites>,
    /// The last revision of this process, without the highest bit.
    revision: AtomicU64,
    /// Wakes the flusher: something waits, or the shared store is available.
    wake: Arc<Notify>,
    /// Notified when a write in the background has ended.
    landed: Notify,
    /// Whether rows may have to move to the shared store.
    has_local_rows: AtomicBool,
    /// What callers have taken of the shared store.
    ledger: Ledger,
}

/// What this process holds of a record.
#[derive(Debug, Clone)]
enum Row {
    /// Room for a write that is under way.
    Reserved { token: Revision, previous: Option<Box<PreviousCopy>> },
    /// What this process has written to the shared store.
    Copy { record: StoredRecord, checked: Instant },
    /// Not in the shared store, where it replaces the revision `base`.
    Local { record: StoredRecord, base: Revision },
}

/// The copy from before a write.
#[derive(Debug, Clone)]
struct PreviousCopy {
    record: StoredRecord,
    checked: Instant,
    lifetime: Lifetime,
}

impl ReplicatedStore {
    /// `wake` is notified when the shared store becomes available.
    pub(crate) fn new(
        shared: Arc<dyn StateStore>,
        quotas: &Arc<Quotas>,
        is_required: bool,
        wake: Arc<Notify>,
    ) -> Self {
        Self {
            shared,
            is_required,
            rows: RecordTables::new(quotas),
            deferred: Mutex::default(),
            revision: AtomicU64::new(0),
            wake,
            landed: Notify::new(),
            has_local_rows: AtomicBool::new(false),
            ledger: Ledger::new(),
        }
    }

    fn deferred(&self) -> MutexGuard<'_, DeferredWrites> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many records wait to be written.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.deferred().len()
    }

    fn next_revision(&self) -> Revision {
        (self.revision.fetch_add(1, Relaxed) + 1) | LOCAL
    }

    fn new_record(&self, value: Bytes) -> StoredRecord {
        StoredRecord { value, revision: self.next_revision(), written_at: wall_time() }
    }

    fn row(&self, kind: RecordKind, key: &RecordKey) -> Option<Row> {
        self.rows.lock(kind).get(&key.agent, &key.id, Instant::now()).cloned()
    }

    /// Works on one row, and evicts others if it has grown.
    fn change_row<T>(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        change: impl FnOnce(Entry<'_, Row>) -> T,
    ) -> T {
        let (mut removed, now) = (Removed::default(), Instant::now());
        let mut table = self.rows.lock(kind);
        let result = change(table.entry(&key.agent, &key.id, now, &mut removed).of_caller(&key.caller));
        drop(table);
        removed.evict_rest(|removed| self.rows.lock(kind).evict(&key.agent, now, removed));
        result
    }

    /// Keeps a copy, or nothing if there is no room.
    fn put_copy(&self, kind: RecordKind, key: &RecordKey, record: StoredRecord, lifetime: Lifetime) {
        let bytes = record.value.len() + ALLOCATION_OVERHEAD;
        let row = Row::Copy { record, checked: Instant::now() };
        if self.change_row(kind, key, |entry| entry.put(row, bytes, lifetime)).is_err() {
            self.drop_row(kind, key);
        }
    }

    fn drop_row(&self, kind: RecordKind, key: &RecordKey) {
        self.change_row(kind, key, |entry| entry.remove());
    }

    /// A write without a shared store, as in [`MemoryStore`](super::memory::MemoryStore).
    fn write_locally(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
    ) -> Result<Revision, WriteError> {
        let written = self.change_row(kind, key, |entry| {
            let (current, base) = match entry.value() {
                Some(Row::Local { record, base }) => (record.revision, *base),
                _ => (ABSENT, ABSENT),
            };
            if current != expected {
                return Err(WriteError::Conflict);
            }
            let record = self.new_record(value);
            let (written, bytes) = (record.revision, record.value.len() + ALLOCATION_OVERHEAD);
            entry.put(Row::Local { record, base }, bytes, lifetime).map_err(|Full| WriteError::Full)?;
            Ok(written)
        });
        self.has_local_rows.store(true, Relaxed);
        if self.shared.is_shared() {
            self.wake.notify_one();
        }
        written
    }

    async fn write_shared(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
        durability: Durability,
    ) -> Result<Revision, WriteError> {
        if value.len() > self.shared.max_record() {
            return Err(WriteError::Full);
        }
        let deadline = Instant::now() + IN_FLIGHT_TIMEOUT;
        loop {
            let mut landed = std::pin::pin!(self.landed.notified());
            landed.as_mut().enable();
            match self.find_deferred(kind, key, expected, &value, lifetime, durability)? {
                Found::Replaced(revision) => return Ok(revision),
                Found::Taken(in_flight, base) => {
                    return self.write_over_deferred(in_flight, base, expected, lifetime, durability).await;
                }
                Found::InFlight => {
                    tokio::time::timeout_at(deadline, landed).await.map_err(|_| WriteError::Unavailable)?;
                }
                Found::Nothing => break,
            }
        }
        // A record of this process that has reached the shared store in the meantime.
        if expected & LOCAL != 0 {
            return Err(WriteError::Conflict);
        }
        // This process has written the record, so it exists. The shared store might not say so if it does not respond.
        if expected == ABSENT && matches!(self.row(kind, key), Some(Row::Copy { .. })) {
            return Err(WriteError::Conflict);
        }
        if durability == Durability::Behind {
            return self.write_behind(kind, key, expected, value, lifetime);
        }
        let reservation = self.reserve(kind, key, expected, value.len(), lifetime)?;
        let error = match self.shared.write(kind, key, expected, value.clone(), lifetime, durability).await {
            Ok(revision) => {
                reservation.confirm(StoredRecord { value, revision, written_at: wall_time() });
                return Ok(revision);
            }
            Err(error) => error,
        };
        let is_lost = error == WriteError::Unknown;
        match error {
            WriteError::Unavailable | WriteError::Unknown
                if durability == Durability::Deferrable && !self.is_required =>
            {
                let record = self.new_record(value);
                let mut write = DeferredWrite::new(record, expected, lifetime);
                if is_lost {
                    let value = write.record.value.clone();
                    write.add_unconfirmed(&value);
                }
                reservation.defer(write).ok_or(error)
            }
            WriteError::Unavailable | WriteError::Full | WriteError::ShareUsed | WriteError::StoreFull => {
                reservation.restore();
                Err(error)
            }
            WriteError::Conflict | WriteError::Unknown => Err(error),
        }
    }

    /// Looks for a deferred write of the record, and replaces it if this process alone decides.
    fn find_deferred(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        expected: Revision,
        value: &Bytes,
        lifetime: Lifetime,
        durability: Durability,
    ) -> Result<Found<'_>, WriteError> {
        let mut deferred = self.deferred();
        if deferred.get(kind, key).is_none() {
            self.defer_local_row(&mut deferred, kind, key);
        }
        let Some(write) = deferred.get(kind, key) else { return Ok(Found::Nothing) };
        if write.is_expired() && !write.is_in_flight {
            deferred.remove(kind, key);
            return Ok(Found::Nothing);
        }
        if write.record.revision != expected {
            return Err(WriteError::Conflict);
        }
        if matches!(durability, Durability::Deferrable | Durability::Behind) {
            return self.replace_deferred(&mut deferred, kind, key, value, lifetime).map(Found::Replaced);
        }
        if write.is_in_flight {
            return Ok(Found::InFlight);
        }
        let base = write.base;
        deferred.update(kind, key, |write| write.is_in_flight = true);
        Ok(Found::Taken(InFlight::new(self, kind, key, expected, value.clone()), base))
    }

    fn replace_deferred(
        &self,
        deferred: &mut DeferredWrites,
        kind: RecordKind,
        key: &RecordKey,
        value: &Bytes,
        lifetime: Lifetime,
    ) -> Result<Revision, WriteError> {
        let Some(write) = deferred.get(kind, key) else { return Err(WriteError::Conflict) };
        let (record, base) = (self.new_record(value.clone()), write.base);
        let written = record.revision;
        self.put_local_row(kind, key, record.clone(), base, lifetime)?;
        deferred.update(kind, key, |write| write.replace(record, lifetime));
        self.wake.notify_one();
        Ok(written)
    }

    /// A confirmed write of a record that waits to be written. If nothing of it can be in the shared store, and that is
    /// unavailable, this process alone decides.
    async fn write_over_deferred(
        &self,
        in_flight: InFlight<'_>,
        base: Revision,
        expected: Revision,
        lifetime: Lifetime,
        durability: Durability,
    ) -> Result<Revision, WriteError> {
        let (kind, key, value) = (in_flight.kind, in_flight.key.clone(), in_flight.value.clone());
        let written = self.shared.write(kind, &key, base, value.clone(), lifetime, durability).await;
        match in_flight.land(written, lifetime).await {
            Landing::Stored(revision) => Ok(revision),
            Landing::Rebased(_) | Landing::TakenOver => Err(WriteError::Conflict),
            Landing::Failed(WriteError::Unavailable)
                if durability == Durability::Confirmed && !self.is_required =>
            {
                let mut deferred = self.deferred();
                match deferred.get(kind, &key) {
                    Some(write) if write.record.revision != expected || write.is_in_flight => {
                        Err(WriteError::Conflict)
                    }
                    Some(write) if write.is_unseen() => {
                        self.replace_deferred(&mut deferred, kind, &key, &value, lifetime)
                    }
                    _ => Err(WriteError::Unavailable),
                }
            }
            Landing::Failed(error) => Err(error),
        }
    }

    fn write_behind(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
    ) -> Result<Revision, WriteError> {
        let is_newer =
            matches!(self.row(kind, key), Some(Row::Copy { record, .. }) if record.revision > expected);
        let mut deferred = self.deferred();
        // Another write of this process may have come first.
        if is_newer || deferred.get(kind, key).is_some() {
            return Err(WriteError::Conflict);
        }
        let record = self.new_record(value);
        match self.put_local_row(kind, key, record.clone(), expected, lifetime) {
            Err(error) if expected == ABSENT => return Err(error),
            // The record is in the shared store, so it counts in no quota here.
            Err(_) => self.drop_row(kind, key),
            Ok(()) => {}
        }
        let written = record.revision;
        self.defer(&mut deferred, kind, key, DeferredWrite::new(record, expected, lifetime));
        Ok(written)
    }

    fn put_local_row(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        record: StoredRecord,
        base: Revision,
        lifetime: Lifetime,
    ) -> Result<(), WriteError> {
        let bytes = record.value.len() + ALLOCATION_OVERHEAD;
        let put = self.change_row(kind, key, |entry| entry.put(Row::Local { record, base }, bytes, lifetime));
        put.map_err(|Full| WriteError::Full)
    }

    /// A row that is not in the shared store waits to be written there from now on.
    fn defer_local_row(&self, deferred: &mut DeferredWrites, kind: RecordKind, key: &RecordKey) {
        let local = self.change_row(kind, key, |entry| match (entry.value(), entry.lifetime()) {
            (Some(Row::Local { record, base }), Some(lifetime)) => {
                Some(DeferredWrite::new(record.clone(), *base, lifetime))
            }
            _ => None,
        });
        if let Some(write) = local {
            self.defer(deferred, kind, key, write);
        }
    }

    /// Adds a deferred write, and wakes the flusher.
    fn defer(&self, deferred: &mut DeferredWrites, kind: RecordKind, key: &RecordKey, write: DeferredWrite) {
        let displaced = deferred.insert(kind, key, write);
        if let Some(stats) = self.shared.stats() {
            stats.deferred_total.fetch_add(1, Relaxed);
            stats.dropped.fetch_add(displaced.len() as u64, Relaxed);
            stats.deferred.store(deferred.len(), Relaxed);
        }
        if !displaced.is_empty() {
            // Their rows are tried again later, as long as they exist.
            self.has_local_rows.store(true, Relaxed);
        }
        self.wake.notify_one();
    }

    /// Reserves room for a record that is about to be written to the shared store. A record that exists there may be
    /// written even if there is no room for a copy.
    fn reserve<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        bytes: usize,
        lifetime: Lifetime,
    ) -> Result<Reservation<'a>, WriteError> {
        let token = self.next_revision();
        let bytes = bytes + ALLOCATION_OVERHEAD;
        let reserved = self.change_row(kind, key, |entry| {
            let previous = match (entry.value(), entry.lifetime()) {
                (Some(Row::Copy { record, checked }), Some(lifetime)) => {
                    Some(Box::new(PreviousCopy { record: record.clone(), checked: *checked, lifetime }))
                }
                _ => None,
            };
            entry.put(Row::Reserved { token, previous }, bytes, lifetime)
        });
        match reserved {
            Err(Full) if expected == ABSENT => return Err(WriteError::Full),
            Err(Full) => self.drop_row(kind, key),
            Ok(()) => {}
        }
        Ok(Reservation { store: self, kind, key, token, bytes, lifetime, is_open: true })
    }
}

/// What [`ReplicatedStore::find_deferred`] has found.
enum Found<'a> {
    Nothing,
    Replaced(Revision),
    /// A write is under way.
    InFlight,
    /// To write it to the shared store, in place of this revision.
    Taken(InFlight<'a>, Revision),
}

/// Room for one write to the shared store. If the write is abandoned, nothing is known about the record.
struct Reservation<'a> {
    store: &'a ReplicatedStore,
    kind: RecordKind,
    key: &'a RecordKey,
    token: Revision,
    bytes: usize,
    lifetime: Lifetime,
    is_open: bool,
}

impl Reservation<'_> {
    /// Replaces the row, if it is still the one of this write.
    fn replace(&mut self, row: impl FnOnce(Option<Box<PreviousCopy>>) -> Option<(Row, usize, Lifetime)>) {
        self.is_open = false;
        self.store.change_row(self.kind, self.key, |mut entry| {
            let previous = match entry.value_mut() {
                Some(Row::Reserved { token, previous }) if *token == self.token => previous.take(),
                _ => return,
            };
            match row(previous) {
                Some((row, bytes, lifetime)) => drop(entry.put(row, bytes, lifetime)),
                None => entry.remove(),
            }
        });
    }

    fn confirm(mut self, record: StoredRecord) {
        let (bytes, lifetime) = (self.bytes, self.lifetime);
        self.replace(|_| Some((Row::Copy { record, checked: Instant::now() }, bytes, lifetime)));
    }

    /// Nothing was written.
    fn restore(mut self) {
        self.replace(|previous| {
            let PreviousCopy { record, checked, lifetime } = *previous?;
            let bytes = record.value.len() + ALLOCATION_OVERHEAD;
            Some((Row::Copy { record, checked }, bytes, lifetime))
        });
    }

    /// The write waits. `None` if there is another one already.
    fn defer(mut self, write: DeferredWrite) -> Option<Revision> {
        let (bytes, lifetime, revision) = (self.bytes, self.lifetime, write.record.revision);
        let mut deferred = self.store.deferred();
        if deferred.get(self.kind, self.key).is_some() {
            return None;
        }
        let row = Row::Local { record: write.record.clone(), base: write.base };
        self.replace(|_| Some((row, bytes, lifetime)));
        self.store.defer(&mut deferred, self.kind, self.key, write);
        Some(revision)
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.replace(|_| None);
        }
    }
}

impl StateStore for ReplicatedStore {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>> {
        async move {
            let waiting = self.deferred().get(kind, key).filter(|write| !write.is_expired()).cloned();
            if let Some(write) = waiting {
                return Ok(Some(write.record));
            }
            let copy = match self.row(kind, key) {
                Some(Row::Local { record, .. }) => return Ok(Some(record)),
                Some(Row::Copy { record, checked }) if checked.elapsed() < COPY_MAX_AGE => {
                    return Ok(Some(record));
                }
                Some(Row::Copy { record, .. }) => Some(record),
                Some(Row::Reserved { .. }) | None => None,
            };
            if !self.shared.is_shared() {
                return Ok(None);
            }
            match (self.shared.read(kind, key).await, copy) {
                (Ok(found), Some(copy)) => {
                    self.check_copy(kind, key, copy.revision, found.as_ref());
                    Ok(found)
                }
                (Err(_), Some(copy)) => Ok(Some(copy)),
                (result, None) => result,
            }
        }
        .boxed()
    }

    fn write<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
        durability: Durability,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            if !self.shared.is_shared() {
                return self.write_locally(kind, key, expected, value, lifetime);
            }
            let holder = Holder::new(&key.agent, &key.caller);
            let bytes = stored_size(key, value.len());
            if expected == ABSENT
                && let Some(capacity) = self.shared.capacity(kind)
                && !self.ledger.admits(kind, holder, bytes, capacity)
            {
                // A record that exists needs no room.
                return match self.read(kind, key).await {
                    Ok(Some(_)) => Err(WriteError::Conflict),
                    _ => Err(WriteError::ShareUsed),
                };
            }
            let replaced = self.replaced(kind, key);
            let written = self.write_shared(kind, key, expected, value, lifetime, durability).await;
            // Otherwise nothing is known of the record that was replaced, which counts already.
            if written.is_ok() && (expected == ABSENT || replaced.is_some()) {
                self.ledger.add(kind, holder, replaced, Stored { bytes, expires_in: lifetime.ttl });
            }
            written
        }
        .boxed()
    }

    fn used_up(&self, agent: &str, caller: &Caller) -> Option<RecordKind> {
        if !self.ledger.is_tight() || !self.shared.is_shared() {
            return None;
        }
        let holder = Holder::new(agent, caller);
        let bytes = SMALL_ENTRY as u64;
        [RecordKind::FollowUp, RecordKind::Task].into_iter().find(|kind| {
            let capacity = self.shared.capacity(*kind);
            capacity.is_some_and(|capacity| !self.ledger.admits(*kind, holder, bytes, capacity))
        })
    }

    fn share_among(&self, replicas: usize) {
        self.ledger.share_among(replicas);
    }

    fn scan<'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>> {
        let is_local = |row: &Row| matches!(row, Row::Local { .. });
        let collect = async move { self.held(kind, agent, is_local).await };
        let records = collect.into_stream().flat_map(move |(keys, records)| {
            let shared = match self.shared.is_shared() {
                true => self.shared.scan(kind, agent),
                false => stream::empty().boxed(),
            };
            let shared = shared.filter(move |record| {
                let is_replaced = !keys.is_empty()
                    && record.as_ref().ok().and_then(record_key).is_some_and(|key| keys.contains(&key));
                std::future::ready(!is_replaced)
            });
            stream::iter(records).map(Ok).chain(shared)
        });
        records.boxed()
    }

    fn scan_local<'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>> {
        let collect = async move { self.held(kind, agent, |_| true).await };
        collect.into_stream().flat_map(|(_, records)| stream::iter(records).map(Ok)).boxed()
    }

    fn is_shared(&self) -> bool {
        self.shared.is_shared()
    }

    fn is_available(&self) -> bool {
        !self.shared.is_shared() || self.shared.is_available()
    }

    fn max_record(&self) -> usize {
        if self.shared.is_shared() { self.shared.max_record() } else { usize::MAX }
    }

    fn stats(&self) -> Option<&StoreStats> {
        self.shared.stats()
    }

    fn has_local(&self, kind: RecordKind, key: &RecordKey) -> bool {
        self.deferred().get(kind, key).is_some() || matches!(self.row(kind, key), Some(Row::Local { .. }))
    }

    fn forget(&self, kind: RecordKind, key: &RecordKey) {
        self.change_row(kind, key, |entry| {
            if matches!(entry.value(), Some(Row::Copy { .. })) {
                entry.remove();
            }
        });
    }

    fn expire(&self, agent: &str) {
        self.rows.expire(agent);
    }

    fn sweep(&self) -> BoxFuture<'_, ()> {
        self.ledger.sweep();
        self.rows.sweep().boxed()
    }
}

impl ReplicatedStore {
    /// A copy was compared with the shared store.
    fn check_copy(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        revision: Revision,
        found: Option<&StoredRecord>,
    ) {
        let is_current = found.is_some_and(|found| found.revision == revision);
        self.change_row(kind, key, |mut entry| match entry.value_mut() {
            Some(Row::Copy { record, checked }) if record.revision == revision => match is_current {
                true => *checked = Instant::now(),
                false => entry.remove(),
            },
            _ => {}
        });
    }

    /// What the shared store has, or soon has, of a record that this process holds.
    fn replaced(&self, kind: RecordKind, key: &RecordKey) -> Option<Stored> {
        self.change_row(kind, key, |entry| match (entry.value(), entry.lifetime()) {
            (Some(Row::Copy { record, .. } | Row::Local { record, .. }), Some(lifetime)) => {
                Some(Stored { bytes: stored_size(key, record.value.len()), expires_in: lifetime.ttl })
            }
            _ => None,
        })
    }

    /// Reads what the shared store has, and counts the part of one of this many replicas. Otherwise callers could take their
    /// share again after a restart.
    async fn load_usage(&self, replicas: usize) -> Result<(), StoreUnavailable> {
        let found = self.ledger.empty();
        for kind in RecordKind::ALL {
            let mut sizes = self.shared.sizes(kind).take(MAX_LOADED);
            while let Some(size) = sizes.next().await {
                tokio::task::coop::consume_budget().await;
                let (holder, Stored { bytes, expires_in }) = size?;
                let part = Stored { bytes: bytes / replicas as u64, expires_in };
                found.add(kind, holder, None, part);
            }
        }
        self.ledger.replace(&found);
        Ok(())
    }

    /// Deferred writes, and the records of rows that match, with their keys.
    async fn held(
        &self,
        kind: RecordKind,
        agent: Option<&Arc<str>>,
        matches: impl Fn(&Row) -> bool + Copy + Send,
    ) -> (HashSet<RecordKey>, Vec<StoredRecord>) {
        let waiting = self.deferred().records(kind, agent.map(|agent| &**agent));
        let (mut keys, mut records): (HashSet<_>, Vec<_>) = waiting.into_iter().unzip();
        let select = move |_: &str, row: &Row| match row {
            Row::Copy { record, .. } | Row::Local { record, .. } if matches(row) => Some(record.clone()),
            _ => None,
        };
        let mut rows = std::pin::pin!(self.rows.scan(kind, agent.cloned(), select));
        while let Some((key, record)) = rows.next().await {
            tokio::task::coop::consume_budget().await;
            if keys.insert(key) {
                records.push(record);
            }
        }
        (keys, records)
    }
}

/// The key of a record, which every record names.
fn record_key(record: &StoredRecord) -> Option<RecordKey> {
    #[derive(serde::Deserialize)]
    struct Keyed {
        agent: Arc<str>,
        id: String,
    }
    let Keyed { agent, id } = serde_json::from_slice(&record.value).ok()?;
    Some(RecordKey::new(&agent, id))
}
