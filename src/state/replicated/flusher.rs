//! Writes deferred records to the shared store.

use std::sync::LazyLock;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::join_all;

use super::{ReplicatedStore, Row};
use crate::state::clock::wall_time;
use crate::state::{ABSENT, Durability, Lifetime, RecordKey, RecordKind, Revision, StoredRecord, WriteError};
use crate::telemetry::log_limit::LogLimit;

/// Writes at the same time.
const CONCURRENT: usize = 32;
/// What begins to wait within this time is written together: nobody waits for it, and the replies of the calls that have
/// caused it go first.
const COALESCING: Duration = Duration::from_millis(20);
/// How often the flusher looks whether the shared store is available while something waits.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// The same when the bridge stops.
const STOP_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// How often the flusher checks whether to read the sizes of the records in the shared store.
const LOAD_INTERVAL: Duration = Duration::from_secs(5);
/// For records that the shared store does not take.
static UNSTORED: LazyLock<LogLimit> = LazyLock::new(LogLimit::default);

/// What became of a write of a deferred record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Landing {
    Stored(Revision),
    /// An earlier write of this process has taken effect, or the record has expired. The next write replaces this
    /// revision.
    Rebased(Revision),
    /// Another replica has written the record, so this process no longer decides about it.
    TakenOver,
    Failed(WriteError),
}

/// A deferred record that is being written. If the write is abandoned, it may still take effect.
pub(super) struct InFlight<'a> {
    store: &'a ReplicatedStore,
    pub kind: RecordKind,
    pub key: RecordKey,
    /// The revision of the deferred record that was found.
    revision: Revision,
    /// What is written.
    pub value: Bytes,
    is_open: bool,
}

impl<'a> InFlight<'a> {
    /// The caller has marked the deferred record as in flight.
    pub(super) fn new(
        store: &'a ReplicatedStore,
        kind: RecordKind,
        key: &RecordKey,
        revision: Revision,
        value: Bytes,
    ) -> Self {
        Self { store, kind, key: key.clone(), revision, value, is_open: true }
    }

    /// Draws the conclusion from the result of the write.
    pub(super) async fn land(mut self, written: Result<Revision, WriteError>, lifetime: Lifetime) -> Landing {
        let landing = match written {
            Ok(revision) => Landing::Stored(revision),
            Err(WriteError::Conflict) => self.resolve_conflict().await,
            Err(error) => Landing::Failed(error),
        };
        self.is_open = false;
        self.apply(landing, lifetime);
        landing
    }

    async fn resolve_conflict(&self) -> Landing {
        let Ok(found) = self.store.shared.read(self.kind, &self.key).await else {
            return Landing::Failed(WriteError::Unavailable);
        };
        let Some(StoredRecord { value, revision, .. }) = found else { return Landing::Rebased(ABSENT) };
        if value == self.value {
            return Landing::Stored(revision);
        }
        let deferred = self.store.deferred();
        match deferred.get(self.kind, &self.key) {
            // The server also reports a conflict while another write to the record is under way. That one has not
            // landed, and may never do so.
            Some(write) if write.base == revision => Landing::Failed(WriteError::Conflict),
            Some(write) if write.has_written(&value) => Landing::Rebased(revision),
            _ => Landing::TakenOver,
        }
    }

    fn apply(&self, landing: Landing, lifetime: Lifetime) {
        let Self { store, kind, key, value, .. } = self;
        let mut deferred = store.deferred();
        let is_newest = deferred.get(*kind, key).is_some_and(|write| write.record.revision == self.revision);
        match landing {
            Landing::Stored(revision) if is_newest => {
                deferred.remove(*kind, key);
                let written_at = wall_time();
                store.put_copy(
                    *kind,
                    key,
                    StoredRecord { value: value.clone(), revision, written_at },
                    lifetime,
                );
            }
            Landing::Stored(revision) | Landing::Rebased(revision) => {
                deferred.update(*kind, key, |write| write.rebase(revision));
            }
            Landing::TakenOver => {
                deferred.remove(*kind, key);
                store.drop_row(*kind, key);
            }
            Landing::Failed(WriteError::Unknown) => {
                deferred.update(*kind, key, |write| write.add_unconfirmed(value));
            }
            Landing::Failed(_) => {}
        }
        deferred.update(*kind, key, |write| write.is_in_flight = false);
        if let Some(stats) = store.shared.stats() {
            stats.deferred.store(deferred.len(), Relaxed);
        }
        drop(deferred);
        store.landed.notify_waiters();
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if self.is_open {
            self.apply(Landing::Failed(WriteError::Unknown), Lifetime::evictable(Duration::ZERO));
        }
    }
}

impl ReplicatedStore {
    /// Writes deferred records whenever the shared store is available. One task runs this.
    pub(crate) async fn flush_continuously(&self) {
        tokio::join!(self.flush_whenever_possible(), self.load_usage_when_needed());
    }

    /// At the start, and whenever the number of replicas changes.
    async fn load_usage_when_needed(&self) {
        let mut loaded = None;
        loop {
            let replicas = self.ledger.replicas();
            let is_needed = loaded != Some(replicas) && self.shared.is_shared();
            if is_needed && self.shared.is_available() && self.load_usage(replicas).await.is_ok() {
                loaded = Some(replicas);
            }
            tokio::time::sleep(LOAD_INTERVAL).await;
        }
    }

    async fn flush_whenever_possible(&self) {
        loop {
            let woken = self.wake.notified();
            if self.has_work() {
                let _ = tokio::time::timeout(RETRY_INTERVAL, woken).await;
            } else {
                woken.await;
            }
            tokio::time::sleep(COALESCING).await;
            if self.shared.is_shared() && self.shared.is_available() {
                self.flush_round().await;
            }
        }
    }

    /// Writes deferred records when the bridge stops.
    pub(crate) async fn flush(&self, timeout: Duration) {
        if !self.shared.is_shared() {
            return;
        }
        let flush = async {
            while self.has_work() {
                self.flush_round().await;
                if self.has_work() {
                    tokio::time::sleep(STOP_RETRY_INTERVAL).await;
                }
            }
        };
        let _ = tokio::time::timeout(timeout, flush).await;
        let lost = self.deferred().len();
        if lost > 0 {
            tracing::warn!(records = lost, "could not write all state to JetStream before the stop");
        }
    }

    fn has_work(&self) -> bool {
        let has_local_rows = self.shared.is_shared() && self.has_local_rows.load(Relaxed);
        has_local_rows || self.deferred().len() > 0
    }

    /// Writes what waits, until nothing waits or a write fails.
    pub(super) async fn flush_round(&self) {
        loop {
            self.defer_local_rows().await;
            let taken = self.deferred().take(CONCURRENT);
            let taken = taken.into_iter().map(|(kind, key, write)| {
                let value = write.record.value.clone();
                (InFlight::new(self, kind, &key, write.record.revision, value), write.base, write.lifetime())
            });
            let taken: Vec<_> = taken.collect();
            if taken.is_empty() {
                return;
            }
            let landings = join_all(
                taken
                    .into_iter()
                    .map(|(in_flight, base, lifetime)| self.flush_record(in_flight, base, lifetime)),
            );
            if landings.await.into_iter().any(|is_failed| is_failed) {
                return;
            }
        }
    }

    /// Returns whether the shared store did not take the record.
    async fn flush_record(&self, in_flight: InFlight<'_>, base: Revision, lifetime: Lifetime) -> bool {
        let (kind, key, value) = (in_flight.kind, in_flight.key.clone(), in_flight.value.clone());
        let durability = Durability::Confirmed;
        let written = self.shared.write(kind, &key, base, value, lifetime, durability).await;
        match in_flight.land(written, lifetime).await {
            Landing::Stored(_) | Landing::Rebased(_) => false,
            Landing::TakenOver => {
                tracing::debug!(agent = %key.agent, ?kind, "another replica has taken over a record");
                false
            }
            Landing::Failed(WriteError::Full | WriteError::StoreFull) => {
                if let Some(records) = UNSTORED.add(std::time::Instant::now()) {
                    tracing::warn!(
                        agent = %key.agent, ?kind, records,
                        "JetStream does not take records; they are only in the memory of this bridge (logged once a minute)"
                    );
                }
                // The record stays in this process. The room in the shared store does not depend on it.
                let mut deferred = self.deferred();
                deferred.remove(kind, &key);
                if let Some(stats) = self.shared.stats() {
                    stats.dropped.fetch_add(1, Relaxed);
                    stats.deferred.store(deferred.len(), Relaxed);
                }
                false
            }
            Landing::Failed(_) => true,
        }
    }

    /// Lets rows that are not in the shared store wait to be written there, as long as they displace no others.
    async fn defer_local_rows(&self) {
        if !self.has_local_rows.swap(false, Relaxed) {
            return;
        }
        for kind in RecordKind::ALL {
            let select = |_: &str, row: &Row| match row {
                Row::Local { record, .. } => Some(record.value.len()),
                _ => None,
            };
            let mut rows = std::pin::pin!(self.rows.scan(kind, None, select));
            while let Some((key, bytes)) = rows.next().await {
                tokio::task::coop::consume_budget().await;
                let mut deferred = self.deferred();
                if deferred.get(kind, &key).is_some() {
                    continue;
                }
                if !deferred.has_room(bytes) {
                    self.has_local_rows.store(true, Relaxed);
                    return;
                }
                self.defer_local_row(&mut deferred, kind, &key);
            }
        }
    }
}
