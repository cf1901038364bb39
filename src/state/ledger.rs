//! How much of the buckets that replicas share each caller has taken.
//!
//! A record stays in its bucket until it expires, whatever this process has evicted from its memory. So the ledger counts the
//! bytes that this process has written, and when they expire, apart from the rows in memory. It knows no single record: the
//! bytes of one holder are summed up in slots of time, whose width is a fraction of the time to live.
//!
//! A *holder* is a verified caller of a tenant, or all unverified callers of one agent. A tenant may hold at most as much as is
//! still free: one alone at most a half, two a third each, and there is always room for another one. In the same way, a caller
//! leaves room for others of its tenant. The unverified callers of one agent count as a tenant. Each replica has an equal part of the
//! bucket. At the start, and when replicas appear or are gone, a replica takes its part of what it finds in the buckets
//! (`ReplicatedStore::load_usage`).
//!
//! The ledger is an estimate. A record whose row is no longer in memory counts as it was when it was created. An eighth of
//! each bucket is left for that, and for records that grow.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::clock::Instant;
use super::{RecordKey, RecordKind};
use crate::caller::Caller;

/// Bytes of a record in a bucket in addition to its value and its key: the subject, the headers, and what the server adds.
const RECORD_OVERHEAD: usize = 256;
/// A slot is this part of the time to live, and at least this many seconds.
const SLOTS: u64 = 16;
const MIN_SLOT: u64 = 8;
/// What lives longer counts as if it expired then.
const MAX_TTL: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Maximum number of tenants in a bucket that are told apart, and of callers.
const MAX_HOLDERS: usize = 50_000;
/// Stands for all further tenants.
const OTHERS: HolderId = 0;

/// The hash of a tenant, a caller or an agent.
pub(crate) type HolderId = u128;

/// Who holds a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Holder {
    pub tenant: HolderId,
    /// The caller, if it is one of several of its tenant.
    pub caller: Option<HolderId>,
}

impl Holder {
    /// Who holds a record of an agent.
    pub(crate) fn new(agent: &str, caller: &Caller) -> Self {
        let hash = |caller: &Caller, parts: &[&str]| {
            HolderId::from_str_radix(&caller.scoped_id(parts), 16).unwrap_or(OTHERS)
        };
        if !caller.is_verified() {
            return Self { tenant: hash(caller, &["holder", agent]), caller: None };
        }
        let own = (!caller.is_whole_tenant()).then(|| hash(caller, &["holder"]));
        Self { tenant: hash(&caller.tenant(), &["tenant"]), caller: own }
    }

    /// The reverse of [`Display`](fmt::Display).
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let id = |text| HolderId::from_str_radix(text, 16).ok();
        match text.split_once('.') {
            Some((tenant, caller)) => Some(Self { tenant: id(tenant)?, caller: Some(id(caller)?) }),
            None => Some(Self { tenant: id(text)?, caller: None }),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.tenant)?;
        self.caller.map_or(Ok(()), |caller| write!(f, ".{caller:032x}"))
    }
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
    tenants: HashMap<HolderId, Slots>,
    callers: HashMap<HolderId, Slots>,
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
    pub(super) fn admits(&self, kind: RecordKind, holder: Holder, bytes: u64, capacity: u64) -> bool {
        let share = capacity / self.replicas() as u64 / 8 * 7;
        let now = self.now();
        let mut ledger = self.lock(kind);
        ledger.total.expire(now);
        let bytes_of = |slots: Option<&mut Slots>| {
            bytes
                + slots.map_or(0, |slots| {
                    slots.expire(now);
                    slots.bytes
                })
        };
        let of_tenant = bytes_of(ledger.tenant(holder.tenant));
        let own = holder.caller.map_or(0, |caller| bytes_of(ledger.callers.get_mut(&caller)));
        // As in `AgentQuota::is_fair`.
        let is_admitted = own + of_tenant <= share.saturating_sub(ledger.total.bytes + bytes);
        if !is_admitted {
            self.is_tight[0].store(true, Relaxed);
        }
        is_admitted
    }

    /// A record was written in place of another one.
    pub(super) fn add(&self, kind: RecordKind, holder: Holder, replaced: Option<Stored>, written: Stored) {
        let now = self.now();
        let seconds = |stored: Stored| stored.expires_in.min(MAX_TTL).as_secs();
        let expires = |stored: Stored| now + seconds(stored);
        let width = (seconds(written) / SLOTS).next_power_of_two().max(MIN_SLOT);
        let slot = expires(written).next_multiple_of(width);
        let mut ledger = self.lock(kind);
        let KindLedger { total, tenants, callers } = &mut *ledger;
        let is_known =
            |holders: &HashMap<HolderId, Slots>, id| holders.len() < MAX_HOLDERS || holders.contains_key(&id);
        let tenant = if is_known(tenants, holder.tenant) { holder.tenant } else { OTHERS };
        // Further callers count for their tenant only.
        let caller = holder.caller.filter(|caller| is_known(callers, *caller));
        let own = caller.map(|caller| callers.entry(caller).or_default());
        for slots in [total, tenants.entry(tenant).or_default()].into_iter().chain(own) {
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
            let KindLedger { total, tenants, callers } = &mut *ledger;
            total.expire(now);
            for holders in [tenants, callers] {
                holders.retain(|_, slots| {
                    slots.expire(now);
                    slots.bytes > 0
                });
            }
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
    fn tenant(&mut self, tenant: HolderId) -> Option<&mut Slots> {
        let known = if self.tenants.contains_key(&tenant) { tenant } else { OTHERS };
        // Further tenants count together once there are too many.
        self.tenants.get_mut(&known)
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

    /// A tenant that is not divided.
    fn tenant(tenant: HolderId) -> Holder {
        Holder { tenant, caller: None }
    }

    fn stored(bytes: u64, expires_in: Duration) -> Stored {
        Stored { bytes, expires_in }
    }

    /// Writes records of 10 bytes until one is refused.
    fn fill(ledger: &Ledger, holder: Holder) -> u64 {
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
        assert_eq!(fill(&ledger, tenant(1)), 3500, "half of seven eighths");
        assert!(ledger.is_tight());
        assert_eq!(fill(&ledger, tenant(2)), 1750);
        assert!(ledger.admits(KIND, tenant(3), 10, CAPACITY), "there is room for another one");
        assert!(ledger.admits(RecordKind::Task, tenant(1), 10, CAPACITY), "each bucket counts on its own");
        tokio::time::advance(DAY - Duration::from_secs(1)).await;
        assert!(!ledger.admits(KIND, tenant(1), 10, CAPACITY));
        tokio::time::advance(DAY / 8).await;
        assert_eq!(fill(&ledger, tenant(1)), 3500);
        ledger.sweep();
        assert_eq!(ledger.lock(KIND).tenants.len(), 1);
        tokio::time::advance(2 * DAY).await;
        ledger.sweep();
        ledger.sweep();
        assert!(ledger.lock(KIND).tenants.is_empty() && !ledger.is_tight());
        ledger.share_among(2);
        assert_eq!(fill(&ledger, tenant(1)), 1750, "the other replica has the same share");
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_counts_once_however_often_it_is_written() {
        let ledger = Ledger::new();
        ledger.add(KIND, tenant(1), None, stored(100, DAY));
        for _ in 0..100 {
            tokio::time::advance(Duration::from_secs(600)).await;
            ledger.add(KIND, tenant(1), Some(stored(100, DAY - Duration::from_secs(600))), stored(100, DAY));
        }
        ledger.add(KIND, tenant(1), Some(stored(100, DAY)), stored(300, DAY / 2));
        let kind = ledger.lock(KIND);
        assert_eq!((kind.total.bytes, kind.tenants[&1].bytes), (300, 300));
    }

    #[tokio::test(start_paused = true)]
    async fn the_ledger_is_small() {
        let ledger = Ledger::new();
        for number in 0..100_000 {
            tokio::time::advance(Duration::from_secs(3)).await;
            ledger.add(KIND, tenant(1), None, stored(1, DAY + Duration::from_secs(number % 3600)));
        }
        let slots = ledger.lock(KIND).total.slots.len();
        assert!(slots <= 2 * usize::try_from(SLOTS).unwrap() + 2, "{slots}");
        for holder in 0..60_000 {
            ledger.add(KIND, Holder { tenant: holder + 2, caller: Some(holder) }, None, stored(1, DAY));
        }
        let kind = ledger.lock(KIND);
        assert!(kind.tenants.len() <= MAX_HOLDERS + 1 && kind.callers.len() <= MAX_HOLDERS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_leaves_room_for_others_of_its_tenant_and_the_tenant_for_others() {
        let ledger = Ledger::new();
        let users = (0..40).map(|number| Caller::verified(&format!("T/user{number}")));
        let written: Vec<_> = users.map(|user| fill(&ledger, Holder::new("a", &user))).collect();
        assert!(written[0] > 2000 && written[1] > 600 && written[2] > 200, "{written:?}");
        let of_tenant = written.iter().sum::<u64>();
        assert!((3400..=3500).contains(&of_tenant), "half of seven eighths: {of_tenant}");
        assert!(fill(&ledger, Holder::new("a", &Caller::verified("U/bob"))) > 1000);
    }

    #[test]
    fn unverified_callers_of_an_agent_hold_together_and_a_verified_one_at_all_agents() {
        let [shared, alice, bob] =
            [Caller::default(), Caller::verified("T/alice"), Caller::verified("T/bob")];
        let holder = Holder::new;
        assert_eq!(holder("a", &alice), holder("b", &alice));
        assert_ne!(holder("a", &shared), holder("b", &shared));
        assert_ne!(holder("a", &shared), holder("a", &alice));
        assert_eq!(holder("a", &alice).tenant, holder("a", &bob).tenant);
        assert_ne!(holder("a", &alice).caller, holder("a", &bob).caller);
        for caller in [shared, alice, Caller::verified("T")] {
            let holder = holder("a", &caller);
            assert_eq!(Holder::parse(&holder.to_string()), Some(holder));
        }
        assert_eq!((Holder::parse(""), Holder::parse("1.x")), (None, None));
    }
}
