//! What each caller holds of an agent's rows, so that eviction takes from the one that holds the most.
//!
//! A caller that holds less than others never loses a row because of their writes. With a single caller, its oldest row
//! goes first.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use slab::Slab;

use super::Ends;
use crate::caller::Caller;
use crate::state::quota::{AgentQuota, CallerUsage, QuotaKind};

/// The index of a holder.
pub(super) type HolderSlot = u32;

/// Bytes of memory that a verified caller takes in addition to its name and its place in the slab: its entries in the
/// maps, here and in the quota.
const HOLDER_OVERHEAD: usize = 224;

#[derive(Debug)]
pub(super) struct Holder {
    pub(super) caller: Caller,
    /// `None` for the caller that all unverified callers share.
    usage: Option<Arc<CallerUsage>>,
    pub(super) rows: usize,
    pub(super) bytes: usize,
    pub(super) protected_bytes: usize,
    /// The list of the caller's evictable rows.
    pub(super) evictable: Ends,
}

impl Holder {
    /// The memory of the holder itself. Unverified callers have one holder for each agent, which does not count.
    fn overhead(&self) -> usize {
        self.caller.name().map_or(0, |name| {
            HOLDER_OVERHEAD + size_of::<Self>() * 3 / 2 + size_of::<CallerUsage>() + name.len()
        })
    }
}

/// The callers that have rows of one kind at one agent.
#[derive(Debug)]
pub(super) struct Holders {
    kind: QuotaKind,
    all: Slab<Holder>,
    by_caller: HashMap<Caller, HolderSlot>,
    /// Those with evictable rows, by the bytes of all their rows.
    by_size: BTreeSet<(usize, HolderSlot)>,
    /// The memory of the holders themselves, in bytes.
    pub(super) overhead: usize,
}

impl Holders {
    pub(super) fn new(kind: QuotaKind) -> Self {
        Self { kind, all: Slab::new(), by_caller: HashMap::new(), by_size: BTreeSet::new(), overhead: 0 }
    }

    pub(super) fn get(&self, slot: HolderSlot) -> &Holder {
        self.all.get(slot as usize).expect("a holder in use")
    }

    pub(super) fn find(&self, caller: &Caller) -> Option<(HolderSlot, &Holder)> {
        self.by_caller.get(caller).map(|slot| (*slot, self.get(*slot)))
    }

    pub(super) fn protected_bytes(&self, caller: &Caller) -> usize {
        self.by_caller.get(caller).map_or(0, |slot| self.get(*slot).protected_bytes)
    }

    /// The holder for a new row of a caller.
    pub(super) fn add_row(&mut self, caller: &Caller, quota: &AgentQuota) -> HolderSlot {
        let slot = self.by_caller.get(caller).copied().unwrap_or_else(|| {
            let holder = Holder {
                caller: caller.clone(),
                usage: quota.caller(caller),
                rows: 0,
                bytes: 0,
                protected_bytes: 0,
                evictable: Ends::default(),
            };
            self.overhead += holder.overhead();
            let slot = HolderSlot::try_from(self.all.insert(holder)).expect("fewer callers than rows");
            self.by_caller.insert(caller.clone(), slot);
            slot
        });
        if let Some(holder) = self.all.get_mut(slot as usize) {
            holder.rows += 1;
        }
        slot
    }

    /// A row is gone. The holder of the last one goes, too.
    pub(super) fn remove_row(&mut self, slot: HolderSlot) {
        let Some(holder) = self.all.get_mut(slot as usize) else { return };
        holder.rows -= 1;
        if holder.rows == 0 {
            let holder = self.all.remove(slot as usize);
            self.overhead -= holder.overhead();
            self.by_caller.remove(&holder.caller);
        }
    }

    /// Changes what a caller holds.
    pub(super) fn change<T>(&mut self, slot: HolderSlot, change: impl FnOnce(&mut Holder) -> T) -> T {
        let holder = self.all.get_mut(slot as usize).expect("a holder in use");
        self.by_size.remove(&(holder.bytes, slot));
        let result = change(holder);
        if holder.evictable.oldest.is_some() {
            self.by_size.insert((holder.bytes, slot));
        }
        if let Some(usage) = &holder.usage {
            usage.protected_bytes(self.kind).store(holder.protected_bytes, Relaxed);
        }
        result
    }

    /// The callers with evictable rows, the one that holds the most first.
    pub(super) fn largest_first(&self) -> impl Iterator<Item = &Holder> {
        self.by_size.iter().rev().map(|(_, slot)| self.get(*slot))
    }
}
