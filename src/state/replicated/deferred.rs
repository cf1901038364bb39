//! Writes that wait until the shared store takes them: one for each record, the newest.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest as _, Sha256};

use crate::state::clock::Instant;
use crate::state::{Lifetime, RecordKey, RecordKind, Revision, StoredRecord};

/// Limits of what waits. Beyond them, the oldest no longer waits.
const MAX_RECORDS: usize = 10_000;
const MAX_BYTES: usize = 16 << 20;
/// Attempts without confirmation that are remembered for a record. There is at most one a second while the store does
/// not respond.
const MAX_ATTEMPTS: usize = 64;

type ValueHash = [u8; 32];

fn hash(value: &[u8]) -> ValueHash {
    Sha256::digest(value).into()
}

/// A record that is not in the shared store yet.
#[derive(Debug, Clone)]
pub(super) struct DeferredWrite {
    /// Its revision is one of this process.
    pub record: StoredRecord,
    /// The revision in the shared store that it replaces.
    pub base: Revision,
    lifetime: Lifetime,
    since: Instant,
    /// What was written without confirmation, and may be in the shared store.
    unconfirmed: Vec<ValueHash>,
    pub is_in_flight: bool,
    order: u64,
}

impl DeferredWrite {
    pub(super) fn new(record: StoredRecord, base: Revision, lifetime: Lifetime) -> Self {
        let (unconfirmed, since) = (Vec::new(), Instant::now());
        Self { record, base, lifetime, since, unconfirmed, is_in_flight: false, order: 0 }
    }

    /// How long the record remains.
    pub(super) fn lifetime(&self) -> Lifetime {
        let age = self.since.elapsed();
        let Lifetime { ttl, protected_for } = self.lifetime;
        Lifetime { ttl: ttl.saturating_sub(age), protected_for: protected_for.saturating_sub(age) }
    }

    pub(super) fn is_expired(&self) -> bool {
        self.lifetime().ttl.is_zero()
    }

    /// Whether nothing of it can be in the shared store.
    pub(super) fn is_unseen(&self) -> bool {
        self.base == crate::state::ABSENT && self.unconfirmed.is_empty()
    }

    /// Replaces the record. What may be in the shared store remains known.
    pub(super) fn replace(&mut self, record: StoredRecord, lifetime: Lifetime) {
        (self.record, self.lifetime, self.since) = (record, lifetime, Instant::now());
    }

    /// A value may be in the shared store, or may get there later.
    pub(super) fn add_unconfirmed(&mut self, value: &[u8]) {
        let hash = hash(value);
        if !self.unconfirmed.contains(&hash) {
            if self.unconfirmed.len() == MAX_ATTEMPTS {
                self.unconfirmed.remove(0);
            }
            self.unconfirmed.push(hash);
        }
    }

    /// Whether this process has written a value, as far as it remembers.
    pub(super) fn has_written(&self, value: &[u8]) -> bool {
        !self.unconfirmed.is_empty() && self.unconfirmed.contains(&hash(value))
    }

    /// The shared store is known to be at this revision. Writes from before cannot take effect any more.
    pub(super) fn rebase(&mut self, base: Revision) {
        if std::mem::replace(&mut self.base, base) != base {
            self.unconfirmed.clear();
        }
    }

    fn bytes(&self) -> usize {
        self.record.value.len()
    }
}

#[derive(Debug, Default)]
pub(super) struct DeferredWrites {
    /// By kind, in the order of [`RecordKind::ALL`].
    records: [HashMap<RecordKey, DeferredWrite>; RecordKind::ALL.len()],
    /// The records in the order in which they began to wait.
    order: BTreeMap<u64, (RecordKind, RecordKey)>,
    next_order: u64,
    bytes: usize,
}

impl DeferredWrites {
    fn of_kind(&self, kind: RecordKind) -> &HashMap<RecordKey, DeferredWrite> {
        let [follow_ups, tasks, sessions, keys, replies] = &self.records;
        match kind {
            RecordKind::FollowUp => follow_ups,
            RecordKind::Task => tasks,
            RecordKind::Session => sessions,
            RecordKind::IdempotencyKey => keys,
            RecordKind::Reply => replies,
        }
    }

    fn of_kind_mut(&mut self, kind: RecordKind) -> &mut HashMap<RecordKey, DeferredWrite> {
        let [follow_ups, tasks, sessions, keys, replies] = &mut self.records;
        match kind {
            RecordKind::FollowUp => follow_ups,
            RecordKind::Task => tasks,
            RecordKind::Session => sessions,
            RecordKind::IdempotencyKey => keys,
            RecordKind::Reply => replies,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether another record of this size can wait without displacing others.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.len() < MAX_RECORDS && self.bytes + bytes <= MAX_BYTES
    }

    pub(super) fn get(&self, kind: RecordKind, key: &RecordKey) -> Option<&DeferredWrite> {
        self.of_kind(kind).get(key)
    }

    /// The records of a kind, of one agent or of all.
    pub(super) fn records(&self, kind: RecordKind, agent: Option<&str>) -> Vec<(RecordKey, StoredRecord)> {
        let records = self.of_kind(kind).iter();
        let records = records
            .filter(|(key, write)| agent.is_none_or(|agent| *key.agent == *agent) && !write.is_expired());
        records.map(|(key, write)| (key.clone(), write.record.clone())).collect()
    }

    /// Changes a record that waits.
    pub(super) fn update<T>(
        &mut self,
        kind: RecordKind,
        key: &RecordKey,
        change: impl FnOnce(&mut DeferredWrite) -> T,
    ) -> Option<T> {
        let write = self.of_kind_mut(kind).get_mut(key)?;
        let before = write.bytes();
        let result = change(write);
        let after = write.bytes();
        self.bytes = self.bytes - before + after;
        Some(result)
    }

    /// Adds a record, or replaces the one that waits. Returns the keys of those that no longer wait because of the
    /// limits.
    pub(super) fn insert(
        &mut self,
        kind: RecordKind,
        key: &RecordKey,
        mut write: DeferredWrite,
    ) -> Vec<(RecordKind, RecordKey)> {
        self.remove(kind, key);
        write.order = self.next_order;
        self.next_order += 1;
        self.bytes += write.bytes();
        self.order.insert(write.order, (kind, key.clone()));
        self.of_kind_mut(kind).insert(key.clone(), write);
        let mut displaced = Vec::new();
        while self.len() > MAX_RECORDS || (self.bytes > MAX_BYTES && self.len() > 1) {
            let Some((_, (kind, key))) = self.order.first_key_value() else { break };
            let (kind, key) = (*kind, key.clone());
            self.remove(kind, &key);
            displaced.push((kind, key));
        }
        displaced
    }

    pub(super) fn remove(&mut self, kind: RecordKind, key: &RecordKey) -> Option<DeferredWrite> {
        let write = self.of_kind_mut(kind).remove(key)?;
        self.order.remove(&write.order);
        self.bytes -= write.bytes();
        Some(write)
    }

    /// The oldest records that no write is under way for, and marks them as in flight. Expired ones are removed.
    pub(super) fn take(&mut self, max: usize) -> Vec<(RecordKind, RecordKey, DeferredWrite)> {
        let waiting = self
            .order
            .values()
            .filter(|(kind, key)| self.get(*kind, key).is_some_and(|write| !write.is_in_flight));
        let waiting: Vec<_> = waiting.take(max).cloned().collect();
        let mut taken = Vec::new();
        for (kind, key) in waiting {
            let write = self.update(kind, &key, |write| {
                write.is_in_flight = !write.is_expired();
                write.clone()
            });
            match write {
                Some(write) if write.is_in_flight => taken.push((kind, key, write)),
                _ => drop(self.remove(kind, &key)),
            }
        }
        taken
    }
}
