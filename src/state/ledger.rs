//! How much of the buckets that replicas share each caller has taken.
//!
//! A record stays in its bucket until it expires, whatever this process has evicted from its memory. So the ledger counts the
//! bytes that this process has written, and when they expire, apart from the rows in memory. It knows no single record: the
//! bytes of one holder are summed up in slots of time, whose width is a fraction of the time to live.
//!
//! A *holder* is a verified caller, or all unverified callers of one agent. It may hold at most as much as is still free: one
//! alone at most a half, two a third each, and there is always room for another one. Each replica has an equal part of the
//! bucket. At the start, and when replicas appear or are gone, a replica takes its part of what it finds in the buckets
//! (`ReplicatedStore::load_usage`).
//!
//! The ledger is an estimate. A record whose row is no longer in memory counts as it was when it was created. An eighth of
//! each bucket is left for that, and for records that grow.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::clock::Instant;
use super::{RecordKey, RecordKind};
use crate::caller::Caller;

/// Bytes of a record in a bucket in addition to its value and its key: the subject, the headers, and what the server adds.
const RECORD_OVERHEAD: usize = 220;
/// A slot is this part of the time to live, and at least this many seconds.
const SLOTS: u64 = 16;
const MIN_SLOT: u64 = 8;
/// What lives longer counts as if it expired then.
const MAX_TTL: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Maximum number of holders in a bucket that are told apart.
const MAX_HOLDERS: usize = 50_000;
/// Stands for all further holders.
const OTHERS: HolderId = 0;

/// The hash of a caller or of an agent.
pub(crate) type HolderId = u128;

/// Who holds a record of an agent.
pub(crate) fn holder(agent: &str, caller: &Caller) -> HolderId {
    let id = match caller.is_verified() {
        true => caller.scoped_id(&["holder"]),
        false => caller.scoped_id(&["holder", agent]),
    };
    u128::from_str_radix(&id, 16).unwrap_or(OTHERS)
}

/// The size of a record in its bucket.
pub(super) fn stored_size(key: &RecordKey, value: usize) -> u64 {
    (key.agent.len() + key.id.len() + value + RECORD_OVERHEAD) as u64
}

/// Bytes in a bucket, and when they expire.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored {
    pub bytes: u64,
    pub expires_in: Duration,
}

#[derive(Debug)]
pub(super) struct Ledger {
    began: Instant,
    replicas: AtomicUsize,
    /// Whether a holder was refused since the last two sweeps began.
    is_tight: [AtomicBool; 2],
    /// In the order of [`RecordKind::ALL`].
    kinds: [Mutex<KindLedger>; RecordKind::ALL.len()],
}

#[derive(Debug, Default)]
struct KindLedger {
    total: Slots,
    holders: HashMap<HolderId, Slots>,
}

impl Ledger {
    pub(super) fn new() -> Self {
        Self {
            began: Instant::now(),
            replicas: AtomicUsize::new(1),
            is_tight: Default::default(),
            kinds: Default::default(),
        }
    }

    /// An empty ledger with the same clock.
    pub(super) fn empty(&self) -> Self {
        Self { began: self.began, ..Self::new() }
    }

    /// Takes over what another ledger has.
    pub(super) fn replace(&self, other: &Self) {
        for kind in RecordKind::ALL {
            let found = std::mem::take(&mut *other.lock(kind));
            *self.lock(kind) = found;
        }
    }

    /// The number of replicas that are alive, including this one.
    pub(super) fn share_among(&self, replicas: usize) {
        self.replicas.store(replicas.max(1), Relaxed);
    }

    pub(super) fn replicas(&self) -> usize {
        self.replicas.load(Relaxed)
    }

    /// Whether a holder was refused lately. Calls check nothing else as long as none was.
    pub(super) fn is_tight(&self) -> bool {
        self.is_tight.iter().any(|is_tight| is_tight.load(Relaxed))
    }

    /// Whether a holder may write a new record to a bucket of this size.
    pub(super) fn admits(&self, kind: RecordKind, holder: HolderId, bytes: u64, capacity: u64) -> bool {
        let share = capacity / self.replicas() as u64 / 8 * 7;
        let now = self.now();
        let mut ledger = self.lock(kind);
        ledger.total.expire(now);
        let own = ledger.holder(holder).map_or(0, |slots| {
            slots.expire(now);
            slots.bytes
        });
        let is_admitted = own + bytes <= share.saturating_sub(ledger.total.bytes + bytes);
        if !is_admitted {
            self.is_tight[0].store(true, Relaxed);
        }
        is_admitted
    }

    /// A record was written in place of another one.
    pub(super) fn add(&self, kind: RecordKind, holder: HolderId, replaced: Option<Stored>, written: Stored) {
        let now = self.now();
        let seconds = |stored: Stored| stored.expires_in.min(MAX_TTL).as_secs();
        let expires = |stored: Stored| now + seconds(stored);
        let width = (seconds(written) / SLOTS).next_power_of_two().max(MIN_SLOT);
        let slot = expires(written).next_multiple_of(width);
        let mut ledger = self.lock(kind);
        let KindLedger { total, holders } = &mut *ledger;
        let holder = match holders.len() < MAX_HOLDERS || holders.contains_key(&holder) {
            true => holder,
            false => OTHERS,
        };
        for slots in [total, holders.entry(holder).or_default()] {
            slots.expire(now);
            if let Some(replaced) = replaced {
                slots.remove(expires(replaced), replaced.bytes);
            }
            slots.add(slot, written.bytes);
        }
    }

    /// Frees the memory of holders whose records have expired.
    pub(super) fn sweep(&self) {
        let was_tight = self.is_tight[0].swap(false, Relaxed);
        self.is_tight[1].store(was_tight, Relaxed);
        let now = self.now();
        for kind in RecordKind::ALL {
            let mut ledger = self.lock(kind);
            ledger.total.expire(now);
            ledger.holders.retain(|_, slots| {
                slots.expire(now);
                slots.bytes > 0
            });
        }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_secs()
    }

    fn lock(&self, kind: RecordKind) -> MutexGuard<'_, KindLedger> {
        let [follow_ups, tasks, sessions, keys, replies] = &self.kinds;
        let ledger = match kind {
            RecordKind::FollowUp => follow_ups,
            RecordKind::Task => tasks,
            RecordKind::Session => sessions,
            RecordKind::IdempotencyKey => keys,
            RecordKind::Reply => replies,
        };
        ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KindLedger {
    fn holder(&mut self, holder: HolderId) -> Option<&mut Slots> {
        let known = if self.holders.contains_key(&holder) { holder } else { OTHERS };
        // Further holders count together once there are too many.
        self.holders.get_mut(&known)
    }
}

/// Bytes by the time at which they expire, in seconds, in ascending order.
#[derive(Debug, Default)]
struct Slots {
    bytes: u64,
    slots: Vec<(u64, u64)>,
}

impl Slots {
    fn add(&mut self, slot: u64, bytes: u64) {
        self.bytes += bytes;
        match self.slots.binary_search_by_key(&slot, |(slot, _)| *slot) {
            Ok(index) => {
                if let Some((_, sum)) = self.slots.get_mut(index) {
                    *sum += bytes;
                }
            }
            Err(index) => self.slots.insert(index, (slot, bytes)),
        }
    }

    /// Removes bytes that were to expire at about this time.
    fn remove(&mut self, expires: u64, bytes: u64) {
        let mut left = bytes.min(self.bytes);
        self.bytes -= left;
        let from = self.slots.partition_point(|(slot, _)| *slot < expires);
        let (before, after) = self.slots.split_at_mut(from);
        for (_, sum) in after.iter_mut().chain(before.iter_mut().rev()) {
            let taken = left.min(*sum);
            *sum -= taken;
            left -= taken;
        }
        self.slots.retain(|(_, sum)| *sum > 0);
    }

    fn expire(&mut self, now: u64) {
        let expired = self.slots.partition_point(|(slot, _)| *slot <= now);
        self.bytes -= self.slots.drain(..expired).map(|(_, sum)| sum).sum::<u64>().min(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: RecordKind = RecordKind::FollowUp;
    const DAY: Duration = Duration::from_secs(24 * 3600);
    const CAPACITY: u64 = 8000;

    fn stored(bytes: u64, expires_in: Duration) -> Stored {
        Stored { bytes, expires_in }
    }

    /// Writes records of 10 bytes until one is refused.
    fn fill(ledger: &Ledger, holder: HolderId) -> u64 {
        let mut written = 0;
        while ledger.admits(KIND, holder, 10, CAPACITY) {
            ledger.add(KIND, holder, None, stored(10, DAY));
            written += 10;
        }
        written
    }

    #[tokio::test(start_paused = true)]
    async fn a_holder_takes_at_most_what_is_free_until_its_records_expire() {
        let ledger = Ledger::new();
        assert!(!ledger.is_tight());
        assert_eq!(fill(&ledger, 1), 3500, "half of seven eighths");
        assert!(ledger.is_tight());
        assert_eq!(fill(&ledger, 2), 1750);
        assert!(ledger.admits(KIND, 3, 10, CAPACITY), "there is room for another one");
        assert!(ledger.admits(RecordKind::Task, 1, 10, CAPACITY), "each bucket counts on its own");
        tokio::time::advance(DAY - Duration::from_secs(1)).await;
        assert!(!ledger.admits(KIND, 1, 10, CAPACITY));
        tokio::time::advance(DAY / 8).await;
        assert_eq!(fill(&ledger, 1), 3500);
        ledger.sweep();
        assert_eq!(ledger.lock(KIND).holders.len(), 1);
        tokio::time::advance(2 * DAY).await;
        ledger.sweep();
        ledger.sweep();
        assert!(ledger.lock(KIND).holders.is_empty() && !ledger.is_tight());
        ledger.share_among(2);
        assert_eq!(fill(&ledger, 1), 1750, "the other replica has the same share");
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_counts_once_however_often_it_is_written() {
        let ledger = Ledger::new();
        ledger.add(KIND, 1, None, stored(100, DAY));
        for _ in 0..100 {
            tokio::time::advance(Duration::from_secs(600)).await;
            ledger.add(KIND, 1, Some(stored(100, DAY - Duration::from_secs(600))), stored(100, DAY));
        }
        ledger.add(KIND, 1, Some(stored(100, DAY)), stored(300, DAY / 2));
        let kind = ledger.lock(KIND);
        assert_eq!((kind.total.bytes, kind.holders[&1].bytes), (300, 300));
    }

    #[tokio::test(start_paused = true)]
    async fn the_ledger_is_small() {
        let ledger = Ledger::new();
        for number in 0..100_000 {
            tokio::time::advance(Duration::from_secs(3)).await;
            ledger.add(KIND, 1, None, stored(1, DAY + Duration::from_secs(number % 3600)));
        }
        let slots = ledger.lock(KIND).total.slots.len();
        assert!(slots <= 2 * usize::try_from(SLOTS).unwrap() + 2, "{slots}");
        for holder in 0..60_000 {
            ledger.add(KIND, holder + 2, None, stored(1, DAY));
        }
        assert!(ledger.lock(KIND).holders.len() <= MAX_HOLDERS + 1);
    }

    #[test]
    fn unverified_callers_of_an_agent_hold_together_and_a_verified_one_at_all_agents() {
        let [shared, alice] = [Caller::default(), Caller::verified("T/alice")];
        assert_eq!(holder("a", &alice), holder("b", &alice));
        assert_ne!(holder("a", &shared), holder("b", &shared));
        assert_ne!(holder("a", &shared), holder("a", &alice));
    }
}
