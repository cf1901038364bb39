//! A table of entries with a quota in bytes for each agent, and a lifetime for each entry.
//!
//! ```text
//! BoundedTable ──┬── AgentRows of agent a ──┬── by id: a hash table
//!                │                          ├── evictable rows: a list, oldest write first
//!                │                          ├── protected rows: a tree, by the end of their protection
//!                │                          └── by tenant and caller: what each holds, and a list of a caller's evictable rows
//!                └── AgentRows of agent b
//! ```
//!
//! Agents share nothing but the lock. When the rows of an agent exceed its [quota](super::quota), expired rows go
//! first, then the oldest evictable rows of the tenant, and of its caller, that holds the most ([`holders`]); evictions are counted. A row is *protected* while something runs or
//! waits: a running task, an open question, an idempotency key. The table never evicts protected rows. It refuses a
//! row for which only these would make room, and counts the refusal. A row counts for the caller that wrote it first.
//!
//! All work under the lock is bounded, however many rows there are:
//!
//! - A write finds its row by one lookup, and removes rows at the ends of the list and the tree only. It evicts about
//!   twice the bytes that it adds. If a large row replaces more rows than one step may remove, the writer continues
//!   step by step, and releases the lock in between ([`Removed::evict_rest`]).
//! - A sweep visits all rows in steps. It removes the expired ones, and evicts what exceeds the quota. When a reload
//!   adds agents and so reduces the quotas, an agent exceeds its quota until its writes or the next sweep have evicted
//!   enough.
//! - Removed rows are dropped after the lock is released.
//!
//! The exception is the storage of an agent: it doubles when it is full, which moves the rows of that agent. A sweep
//! frees the capacity of removed rows once few rows remain. The capacity is at most what the largest quota so far
//! needed.

mod holders;
#[cfg(test)]
mod tests;

use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap};
use std::hash::BuildHasher as _;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hashbrown::HashTable;
use slab::Slab;

use self::holders::{HolderSlot, Holders};
use super::Lifetime;
use super::clock::Instant;
use super::quota::{AgentQuota, Held, QuotaKind, Quotas, SMALL_ENTRY};
use crate::caller::Caller;

/// Maximum number of rows that a step visits, evicts or moves while it holds the lock, which takes well under a
/// millisecond.
const ROWS_PER_STEP: usize = 1024;
/// Protected rows of all callers that a list of the rows of one caller visits.
const VISITED_PROTECTED: usize = 8 * ROWS_PER_STEP;
/// Maximum number of expired rows that a write removes even if there is room; bounds the cost of a write.
const EXPIRED_PER_WRITE: usize = 4;
/// Rows for which an agent keeps capacity after a sweep, in addition to four times the rows that it has.
const SPARE_ROWS: usize = 64;
/// Bytes by which a row may grow beyond what had room, in all of its writes together, for its next states.
const GROWTH: usize = 128;
/// Bytes of memory that a row takes in addition to its content and its place in the slab: its entries in the hash
/// table and in the tree, and the allocation of its id.
const ROW_OVERHEAD: usize = 128;

/// The table has no room for the row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// The index of a row in the slab of its agent.
type Slot = u32;

/// What a step of a sweep has removed, to drop it after the lock is released: rows, and the storage of an agent.
pub(super) type Swept<V> = (Vec<Row<V>>, Option<AgentRows<V>>);

#[derive(Debug)]
pub(super) struct BoundedTable<V> {
    agents: HashMap<Arc<str>, AgentRows<V>>,
    hasher: RandomState,
    quotas: Arc<Quotas>,
    kind: QuotaKind,
    current_sweep: Option<Sweep>,
}

/// A sweep that proceeds step by step.
#[derive(Debug)]
struct Sweep {
    /// The agents still to visit; the last one may be visited in part.
    agents: Vec<Arc<str>>,
    /// The next slot of that agent.
    next: usize,
    /// The start of the sweep. Rows that expire later are left to the next one.
    now: Instant,
}

#[derive(Debug)]
pub(super) struct AgentRows<V> {
    quota: Arc<AgentQuota>,
    kind: QuotaKind,
    rows: Slab<Row<V>>,
    by_id: HashTable<Slot>,
    /// The protected rows, by the end of their protection.
    protected: BTreeSet<(Instant, Slot)>,
    protected_bytes: usize,
    /// The evictable rows, in the order of writing.
    evictable: Ends,
    holders: Holders,
    bytes: usize,
}

/// The ends of a list of rows.
#[derive(Debug, Clone, Copy, Default)]
struct Ends {
    oldest: Option<Slot>,
    newest: Option<Slot>,
}

/// The neighbours of a row in a list.
#[derive(Debug, Clone, Copy, Default)]
struct Links {
    older: Option<Slot>,
    newer: Option<Slot>,
}

impl Ends {
    /// Adds a row as the newest. `links` selects its links in this list.
    fn append<V>(&mut self, rows: &mut Slab<Row<V>>, slot: Slot, links: fn(&mut Row<V>) -> &mut Links) {
        let older = self.newest.replace(slot);
        *links(row_mut(rows, slot)) = Links { older, newer: None };
        match older {
            Some(older) => links(row_mut(rows, older)).newer = Some(slot),
            None => self.oldest = Some(slot),
        }
    }

    fn unlink<V>(&mut self, rows: &mut Slab<Row<V>>, slot: Slot, links: fn(&mut Row<V>) -> &mut Links) {
        let Links { older, newer } = *links(row_mut(rows, slot));
        match older {
            Some(older) => links(row_mut(rows, older)).newer = newer,
            None => self.oldest = newer,
        }
        match newer {
            Some(newer) => links(row_mut(rows, newer)).older = older,
            None => self.newest = older,
        }
    }
}

fn row_mut<V>(rows: &mut Slab<Row<V>>, slot: Slot) -> &mut Row<V> {
    rows.get_mut(slot as usize).expect("a slot in use")
}

#[derive(Debug)]
pub(super) struct Row<V> {
    id: Box<str>,
    hash: u64,
    value: V,
    bytes: usize,
    /// By how many of these bytes the row has grown without room, up to [`GROWTH`].
    grown: usize,
    expires: Instant,
    protected_until: Option<Instant>,
    /// In the list of evictable rows.
    links: Links,
    /// In the list of the evictable rows of its caller.
    own_links: Links,
    /// Who wrote it first.
    holder: HolderSlot,
}

/// A row that exists or is about to be written.
pub(super) struct Entry<'a, V> {
    rows: &'a mut AgentRows<V>,
    id: &'a str,
    hash: u64,
    slot: Option<Slot>,
    /// For whom a new row counts.
    caller: Caller,
    now: Instant,
    removed: &'a mut Removed<V>,
}

/// What a write removes. The writer creates it before it takes the lock, so that the rows are dropped after the lock is
/// released.
#[derive(Debug)]
pub(super) struct Removed<V> {
    rows: Vec<Row<V>>,
    /// Bytes of rows that the write may still evict.
    to_evict: usize,
}

impl<V> Default for Removed<V> {
    fn default() -> Self {
        Self { rows: Vec::new(), to_evict: 0 }
    }
}

impl<V> Removed<V> {
    /// Evicts the rest of what the write may evict, which is nothing for a small row. `step` takes the lock, calls
    /// [`BoundedTable::evict`] and releases the lock.
    pub(super) fn evict_rest(mut self, mut step: impl FnMut(&mut Self)) {
        while self.to_evict > 0 {
            self.rows.clear();
            step(&mut self);
        }
    }
}

/// Runs a sweep to its end and yields between two steps. `step` takes the lock, runs one step and releases the lock.
pub(super) async fn sweep<V>(step: impl Fn() -> Option<Swept<V>>) {
    while step().is_some() {
        tokio::task::yield_now().await;
    }
}

impl<V> BoundedTable<V> {
    pub(super) fn new(quotas: &Arc<Quotas>, kind: QuotaKind) -> Self {
        Self {
            agents: HashMap::new(),
            hasher: RandomState::new(),
            quotas: Arc::clone(quotas),
            kind,
            current_sweep: None,
        }
    }

    pub(super) fn get(&self, agent: &str, id: &str, now: Instant) -> Option<&V> {
        self.get_sized(agent, id, now).map(|(value, _)| value)
    }

    /// A row, and its size in bytes.
    pub(super) fn get_sized(&self, agent: &str, id: &str, now: Instant) -> Option<(&V, usize)> {
        let rows = self.agents.get(agent)?;
        let row = rows.row(rows.find(self.hasher.hash_one(id), id)?);
        (row.expires > now).then_some((&row.value, row.bytes))
    }

    /// The row with this id, to read and to write it.
    pub(super) fn entry<'a>(
        &'a mut self,
        agent: &Arc<str>,
        id: &'a str,
        now: Instant,
        removed: &'a mut Removed<V>,
    ) -> Entry<'a, V> {
        let Self { agents, hasher, quotas, kind, .. } = self;
        let rows =
            agents.entry(Arc::clone(agent)).or_insert_with(|| AgentRows::new(quotas.agent(agent), *kind));
        // The caller may find that there is nothing to write.
        if rows.remove_expired(now, EXPIRED_PER_WRITE, &mut removed.rows) {
            rows.publish_usage();
        }
        let hash = hasher.hash_one(id);
        let slot = rows.find(hash, id);
        Entry { rows, id, hash, slot, caller: Caller::default(), now, removed }
    }

    /// Continues the eviction of a write, in one step.
    pub(super) fn evict(&mut self, agent: &str, now: Instant, removed: &mut Removed<V>) {
        let to_evict = std::mem::take(&mut removed.to_evict);
        if let Some(rows) = self.agents.get_mut(agent) {
            // The newest row is the one that was written, if it is evictable.
            removed.to_evict = rows.evict(to_evict, rows.evictable.newest, now, &mut removed.rows);
            rows.publish_usage();
        }
    }

    /// Begins or continues a sweep, which removes expired rows, ends the protection of rows whose time is over, evicts
    /// what exceeds a quota, and frees capacity. A step is short, so that the lock is not held for long. Returns `None`
    /// at the end of the sweep.
    pub(super) fn sweep_step(&mut self, now: Instant) -> Option<Swept<V>> {
        let all = || Sweep { agents: self.agents.keys().cloned().collect(), next: 0, now };
        let mut sweep = self.current_sweep.take().unwrap_or_else(all);
        let agent = sweep.agents.pop()?;
        let mut removed = Vec::new();
        let next =
            self.agents.get_mut(&agent).and_then(|rows| rows.sweep(sweep.next, sweep.now, &mut removed));
        sweep.next = next.unwrap_or(0);
        let storage = match next {
            Some(_) => {
                sweep.agents.push(agent);
                None
            }
            None => self.free_capacity(&agent),
        };
        self.current_sweep = Some(sweep);
        Some((removed, storage))
    }

    /// Frees the capacity of an agent's removed rows. Returns the storage to drop.
    fn free_capacity(&mut self, agent: &str) -> Option<AgentRows<V>> {
        let rows = self.agents.get_mut(agent)?;
        let (count, capacity) = (rows.rows.len(), rows.rows.capacity());
        if count == 0 {
            return self.agents.remove(agent);
        }
        (count <= ROWS_PER_STEP && capacity > 4 * count + 2 * SPARE_ROWS).then(|| rows.compact())
    }

    /// Expires the protected rows of an agent whose time is over, up to the number of one step, so that the quota of the
    /// agent no longer counts them as protected. Returns the removed rows.
    pub(super) fn expire(&mut self, agent: &str, now: Instant) -> Vec<Row<V>> {
        let mut removed = Vec::new();
        if let Some(rows) = self.agents.get_mut(agent) {
            let _ = (0..ROWS_PER_STEP).take_while(|_| rows.remove_lapsed(now, &mut removed)).count();
            rows.publish_usage();
        }
        removed
    }

    pub(super) fn agents(&self) -> Vec<Arc<str>> {
        self.agents.keys().cloned().collect()
    }

    /// Some of the rows of an agent, from a slot on, and the slot at which the next ones begin.
    pub(super) fn page(&self, agent: &str, from: usize, now: Instant) -> (Vec<(&str, &V)>, Option<usize>) {
        let Some(rows) = self.agents.get(agent) else { return (Vec::new(), None) };
        let (to, next) = rows.step(from);
        let live = (from..to).filter_map(|slot| rows.rows.get(slot)).filter(|row| row.expires > now);
        (live.map(|row| (&*row.id, &row.value)).collect(), next)
    }

    /// Up to `limit` rows of an agent, at most those of one step: protected rows first, then the rows that were written
    /// last. Also returns how many more there are.
    pub(super) fn recent(&self, agent: &str, limit: usize, now: Instant) -> (Vec<(&str, &V)>, usize) {
        let Some(rows) = self.agents.get(agent) else { return (Vec::new(), 0) };
        let protected = rows.protected.iter().rev().map(|(_, slot)| *slot);
        let evictable = std::iter::successors(rows.evictable.newest, |slot| rows.row(*slot).links.older);
        let recent: Vec<_> =
            protected.chain(evictable).take(limit.min(ROWS_PER_STEP)).map(|slot| rows.row(slot)).collect();
        let left_out = rows.rows.len() - recent.len();
        let live = recent.into_iter().filter(|row| row.expires > now);
        (live.map(|row| (&*row.id, &row.value)).collect(), left_out)
    }

    /// As [`BoundedTable::recent`], only those that `caller` wrote first. Of the protected rows of all callers, it visits a
    /// limited number.
    pub(super) fn recent_of(
        &self,
        agent: &str,
        caller: &Caller,
        limit: usize,
        now: Instant,
    ) -> (Vec<(&str, &V)>, usize) {
        let Some(rows) = self.agents.get(agent) else { return (Vec::new(), 0) };
        let Some((holder_slot, holder)) = rows.holders.find(caller) else { return (Vec::new(), 0) };
        let protected = rows.protected.iter().rev().take(VISITED_PROTECTED).map(|(_, slot)| *slot);
        let protected = protected.filter(|slot| rows.row(*slot).holder == holder_slot);
        let evictable =
            std::iter::successors(holder.evictable.newest, |slot| rows.row(*slot).own_links.older);
        let recent: Vec<_> =
            protected.chain(evictable).take(limit.min(ROWS_PER_STEP)).map(|slot| rows.row(slot)).collect();
        let left_out = holder.rows.saturating_sub(recent.len());
        let live = recent.into_iter().filter(|row| row.expires > now);
        (live.map(|row| (&*row.id, &row.value)).collect(), left_out)
    }

    /// How many rows take memory, including expired ones.
    #[cfg(test)]
    pub(super) fn rows(&self) -> usize {
        self.agents.values().map(|rows| rows.rows.len()).sum()
    }
}

impl<V> Entry<'_, V> {
    /// A row that does not exist yet counts for this caller.
    #[must_use]
    pub(super) fn of_caller(mut self, caller: &Caller) -> Self {
        self.caller = caller.clone();
        self
    }

    pub(super) fn value(&self) -> Option<&V> {
        let row = self.rows.row(self.slot?);
        (row.expires > self.now).then_some(&row.value)
    }

    /// How long the row remains.
    pub(super) fn lifetime(&self) -> Option<Lifetime> {
        let row = self.rows.row(self.slot?);
        let rest = |until: Instant| until.saturating_duration_since(self.now);
        Some(Lifetime {
            ttl: rest(row.expires),
            protected_for: row.protected_until.map_or(Duration::ZERO, rest),
        })
    }

    /// Removes the row.
    pub(super) fn remove(self) {
        if let Some(slot) = self.slot {
            self.removed.rows.push(self.rows.detach(slot));
            self.rows.publish_usage();
        }
    }

    /// Replaces the value of a row by one of the same size, without a change of its lifetime.
    pub(super) fn value_mut(&mut self) -> Option<&mut V> {
        let row = self.rows.row_mut(self.slot?);
        (row.expires > self.now).then_some(&mut row.value)
    }

    /// Whether there is room for a row of `bytes` bytes, not counting its id.
    pub(super) fn has_room(&mut self, bytes: usize, lifetime: Lifetime) -> bool {
        self.growth(self.row_bytes(bytes), lifetime).is_some()
    }

    /// By how many bytes a row of `bytes` bytes exceeds what had room; `None` if it may not.
    fn growth(&mut self, bytes: usize, lifetime: Lifetime) -> Option<usize> {
        for _ in 0..ROWS_PER_STEP {
            if self.rows.has_room(bytes, lifetime, self.slot, &self.caller) {
                return Some(0);
            }
            // A row can always be written again if it is small or hardly grows: every change of what runs or waits must
            // be recorded.
            if let Some(row) = self.slot.map(|slot| self.rows.row(slot)) {
                let grown = (row.grown + bytes).saturating_sub(row.bytes);
                if bytes <= SMALL_ENTRY || grown <= GROWTH {
                    return Some(grown.min(GROWTH));
                }
            }
            if !self.rows.remove_lapsed(self.now, &mut self.removed.rows) {
                return None;
            }
            // The row may have been among the expired ones.
            self.slot = self.rows.find(self.hash, self.id);
        }
        None
    }

    /// Counts a row for which there is no room.
    pub(super) fn count_refusal(&self) {
        self.rows.usage().refusals.fetch_add(1, Relaxed);
    }

    /// Inserts or replaces the row, which has `bytes` bytes, not counting its id. The caller then releases its lock and
    /// calls [`Removed::evict_rest`].
    pub(super) fn put(mut self, value: V, bytes: usize, lifetime: Lifetime) -> Result<(), Full> {
        let Lifetime { ttl, protected_for } = lifetime;
        let bytes = self.row_bytes(bytes);
        let growth = self.growth(bytes, lifetime);
        let Self { rows, id, hash, slot, caller, now, removed } = self;
        let Some(grown) = growth else {
            rows.usage().refusals.fetch_add(1, Relaxed);
            rows.publish_usage();
            return Err(Full);
        };
        let after =
            |time| now.checked_add(time).unwrap_or_else(|| now + Duration::from_secs(u32::MAX.into()));
        let mut row = Row {
            id: Box::default(),
            hash,
            value,
            bytes,
            grown,
            expires: after(ttl),
            protected_until: (!protected_for.is_zero()).then(|| after(protected_for)),
            links: Links::default(),
            own_links: Links::default(),
            holder: HolderSlot::MAX,
        };
        let caller = slot.map_or(caller, |slot| rows.holders.get(rows.row(slot).holder).caller.clone());
        match slot.map(|slot| rows.detach(slot)) {
            Some(mut replaced) => {
                row.id = std::mem::take(&mut replaced.id);
                removed.rows.push(replaced);
            }
            None => row.id = id.into(),
        }
        let slot = rows.attach(row, &caller);
        // Twice, so that rows which exceed the quota become fewer with every write.
        removed.to_evict = rows.evict(2 * bytes, Some(slot), now, &mut removed.rows);
        rows.publish_usage();
        Ok(())
    }

    fn row_bytes(&self, bytes: usize) -> usize {
        // The slab grows by doubling, so about a quarter of it is empty.
        ROW_OVERHEAD + size_of::<Row<V>>() * 3 / 2 + self.id.len() + bytes
    }
}

impl<V> AgentRows<V> {
    fn new(quota: Arc<AgentQuota>, kind: QuotaKind) -> Self {
        Self {
            quota,
            kind,
            rows: Slab::new(),
            by_id: HashTable::new(),
            protected: BTreeSet::new(),
            protected_bytes: 0,
            evictable: Ends::default(),
            holders: Holders::new(kind),
            bytes: 0,
        }
    }

    fn find(&self, hash: u64, id: &str) -> Option<Slot> {
        self.by_id.find(hash, |slot| *self.row(*slot).id == *id).copied()
    }

    fn row(&self, slot: Slot) -> &Row<V> {
        self.rows.get(slot as usize).expect("a slot in use")
    }

    fn row_mut(&mut self, slot: Slot) -> &mut Row<V> {
        row_mut(&mut self.rows, slot)
    }

    fn usage(&self) -> &super::quota::KindUsage {
        self.quota.usage(self.kind)
    }

    fn publish_usage(&self) {
        let usage = self.usage();
        usage.entries.store(self.rows.len(), Relaxed);
        usage.bytes.store(self.total(), Relaxed);
        usage.protected_bytes.store(self.protected_total(), Relaxed);
        let of_unverified = self.holders.protected_bytes(&Caller::default());
        usage.protected_of_unverified.store(of_unverified, Relaxed);
    }

    /// The memory of all rows and of their holders, in bytes.
    fn total(&self) -> usize {
        self.bytes + self.holders.overhead
    }

    /// The memory of what cannot be evicted, in bytes.
    fn protected_total(&self) -> usize {
        self.protected_bytes + self.holders.overhead
    }

    /// Whether there is room for a row in place of the one in `slot`, once all evictable rows are evicted. Without one, the
    /// row is `caller`'s.
    fn has_room(&self, bytes: usize, lifetime: Lifetime, slot: Option<Slot>, caller: &Caller) -> bool {
        let limit = self.quota.limit(self.kind);
        let caller = slot.map_or(caller, |slot| &self.holders.get(self.row(slot).holder).caller);
        let replaced = slot.map(|slot| self.row(slot)).filter(|row| row.protected_until.is_some());
        let replaced = replaced.map_or(0, |row| row.bytes);
        let protected = self.protected_total() - replaced;
        let is_large = bytes > SMALL_ENTRY;
        let is_protected = !lifetime.protected_for.is_zero();
        let left = if is_large && is_protected { self.quota.free_of_large_entries(self.kind) } else { 0 };
        let is_fair = || {
            let held = Held {
                own: self.holders.protected_bytes(caller) - replaced + bytes,
                of_tenant: self.holders.protected_bytes_of_tenant(&caller.tenant()) - replaced + bytes,
            };
            self.quota.is_fair(caller, held, limit, protected + bytes + left)
        };
        // One row never evicts all others. A call has reserved room for its small rows.
        bytes <= limit / 2
            && protected + bytes + left <= limit
            && (!is_protected || (!is_large && self.kind.is_reserved()) || is_fair())
    }

    /// Adds a row of a caller.
    fn attach(&mut self, mut row: Row<V>, caller: &Caller) -> Slot {
        let (hash, bytes, protected_until) = (row.hash, row.bytes, row.protected_until);
        let holder = self.holders.add_row(caller, &self.quota);
        row.holder = holder;
        let slot = Slot::try_from(self.rows.insert(row)).expect("fewer rows than bytes of memory");
        let rows = &self.rows;
        self.by_id.insert_unique(hash, slot, |slot| rows.get(*slot as usize).map_or(0, |row| row.hash));
        self.bytes += bytes;
        self.holders.change(holder, |holder| holder.bytes += bytes);
        match protected_until {
            Some(until) => {
                self.protected.insert((until, slot));
                self.protected_bytes += bytes;
                self.holders.change(holder, |holder| holder.protected_bytes += bytes);
            }
            None => self.append(slot),
        }
        slot
    }

    /// Removes a row.
    fn detach(&mut self, slot: Slot) -> Row<V> {
        self.unlink(slot);
        let row = self.rows.remove(slot as usize);
        if let Ok(found) = self.by_id.find_entry(row.hash, |other| *other == slot) {
            found.remove();
        }
        self.bytes -= row.bytes;
        self.holders.change(row.holder, |holder| holder.bytes -= row.bytes);
        self.holders.remove_row(row.holder);
        row
    }

    /// Takes a row out of the list or the tree.
    fn unlink(&mut self, slot: Slot) {
        let &Row { bytes, protected_until, holder, .. } = self.row(slot);
        if let Some(until) = protected_until {
            self.protected.remove(&(until, slot));
            self.protected_bytes -= bytes;
            self.holders.change(holder, |holder| holder.protected_bytes -= bytes);
            return;
        }
        let Self { rows, evictable, holders, .. } = self;
        evictable.unlink(rows, slot, |row| &mut row.links);
        holders.change(holder, |holder| holder.evictable.unlink(rows, slot, |row| &mut row.own_links));
    }

    /// Adds a row to the evictable ones, as the newest.
    fn append(&mut self, slot: Slot) {
        let row = self.row_mut(slot);
        row.protected_until = None;
        let holder = row.holder;
        let Self { rows, evictable, holders, .. } = self;
        evictable.append(rows, slot, |row| &mut row.links);
        holders.change(holder, |holder| holder.evictable.append(rows, slot, |row| &mut row.own_links));
    }

    /// Removes a row that has expired, or ends its protection if that time is over. Returns whether the row changed.
    fn expire(&mut self, slot: Slot, now: Instant, removed: &mut Vec<Row<V>>) -> bool {
        let row = self.row(slot);
        let is_lapsed = row.protected_until.is_some_and(|until| until <= now);
        if row.expires <= now {
            removed.push(self.detach(slot));
        } else if is_lapsed {
            self.unlink(slot);
            self.append(slot);
        } else {
            return false;
        }
        true
    }

    /// Expires the protected row whose protection ends first.
    fn remove_lapsed(&mut self, now: Instant, removed: &mut Vec<Row<V>>) -> bool {
        let first = self.protected.first().map(|(_, slot)| *slot);
        first.is_some_and(|slot| self.expire(slot, now, removed))
    }

    /// Removes up to `max` expired rows from each of the ends of the tree and the list. Returns whether a row changed.
    fn remove_expired(&mut self, now: Instant, max: usize, removed: &mut Vec<Row<V>>) -> bool {
        for step in 0..max {
            let is_lapsed = self.remove_lapsed(now, removed);
            let is_expired = self.evictable.oldest.is_some_and(|slot| self.expire(slot, now, removed));
            if !is_lapsed && !is_expired {
                return step > 0;
            }
        }
        true
    }

    /// Evicts rows, the oldest of the tenant and the caller that hold the most, until the rest fits into the quota, but no more than `bytes` bytes and the rows of one
    /// step, and not the row in `kept`. Returns how many of these bytes are left for the next step.
    fn evict(&mut self, bytes: usize, kept: Option<Slot>, now: Instant, removed: &mut Vec<Row<V>>) -> usize {
        let limit = self.quota.limit(self.kind);
        let mut left = bytes;
        for _ in 0..ROWS_PER_STEP {
            let oldest = self.holders.largest_first().map(|holder| holder.evictable.oldest);
            let oldest = oldest.flatten().find(|slot| Some(*slot) != kept);
            let Some(slot) = oldest.filter(|_| self.total() > limit && left > 0) else { return 0 };
            let row = self.detach(slot);
            left = left.saturating_sub(row.bytes);
            if row.expires > now {
                self.usage().evictions.fetch_add(1, Relaxed);
            }
            removed.push(row);
        }
        left
    }

    /// The end of a step that begins at a slot, and the begin of the next step.
    fn step(&self, from: usize) -> (usize, Option<usize>) {
        let (to, end) = (from + ROWS_PER_STEP, self.rows.capacity());
        (to.min(end), (to < end).then_some(to))
    }

    /// Expires rows from a slot on. Returns the slot at which the next step begins.
    fn sweep(&mut self, from: usize, now: Instant, removed: &mut Vec<Row<V>>) -> Option<usize> {
        let (to, next) = self.step(from);
        for slot in (from..to).filter_map(|slot| Slot::try_from(slot).ok()) {
            if self.rows.contains(slot as usize) {
                self.expire(slot, now, removed);
            }
        }
        // The quota is smaller than before if there are more agents. All steps together can evict every row.
        self.evict(usize::MAX, None, now, removed);
        self.publish_usage();
        next
    }

    /// Moves all rows to a new storage, without the capacity of removed rows. Returns the old storage.
    fn compact(&mut self) -> Self {
        let listed = std::iter::successors(self.evictable.oldest, |slot| self.row(*slot).links.newer);
        let protected = self.protected.iter().map(|(_, slot)| *slot);
        let slots: Vec<Slot> = listed.chain(protected).collect();
        let mut compact = Self::new(Arc::clone(&self.quota), self.kind);
        compact.rows.reserve(slots.len() + SPARE_ROWS);
        for slot in slots {
            let row = self.rows.remove(slot as usize);
            let caller = self.holders.get(row.holder).caller.clone();
            compact.attach(row, &caller);
        }
        std::mem::replace(self, compact)
    }
}
