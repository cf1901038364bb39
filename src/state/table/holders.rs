//! What each tenant and each caller holds of an agent's rows, so that eviction takes from the one that holds the most: first the
//! tenant, then the caller of that tenant.
//!
//! A tenant that holds less than others never loses a row because of their writes, however many users they have. With a
//! single caller, its oldest row goes first.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use slab::Slab;

use super::Ends;
use crate::caller::Caller;
use crate::state::quota::{AgentQuota, CallerUsage, QuotaKind, Usage};

/// The index of a holder.
pub(super) type HolderSlot = u32;
/// The index of a tenant.
type TenantSlot = u32;

/// Bytes of memory that a verified caller takes in addition to its name and its place in the slab: its entries in the
/// maps, here and in the quota. A tenant takes as much.
const HOLDER_OVERHEAD: usize = 224;

#[derive(Debug)]
pub(super) struct Holder {
    pub(super) caller: Caller,
    tenant: TenantSlot,
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

/// The callers of one tenant.
#[derive(Debug)]
struct Tenant {
    name: Caller,
    /// How many callers have rows.
    callers: usize,
    bytes: usize,
    protected_bytes: usize,
    /// Its callers with evictable rows, by the bytes of all their rows.
    by_size: BTreeSet<(usize, HolderSlot)>,
}

impl Tenant {
    fn overhead(&self) -> usize {
        self.name
            .name()
            .map_or(0, |name| HOLDER_OVERHEAD + size_of::<Self>() * 3 / 2 + size_of::<Usage>() + name.len())
    }
}

/// The callers that have rows of one kind at one agent.
#[derive(Debug)]
pub(super) struct Holders {
    kind: QuotaKind,
    all: Slab<Holder>,
    by_caller: HashMap<Caller, HolderSlot>,
    tenants: Slab<Tenant>,
    by_tenant: HashMap<Caller, TenantSlot>,
    /// The tenants with evictable rows, by the bytes of all their rows.
    by_size: BTreeSet<(usize, TenantSlot)>,
    /// The memory of the holders themselves, in bytes.
    pub(super) overhead: usize,
}

impl Holders {
    pub(super) fn new(kind: QuotaKind) -> Self {
        Self {
            kind,
            all: Slab::new(),
            by_caller: HashMap::new(),
            tenants: Slab::new(),
            by_tenant: HashMap::new(),
            by_size: BTreeSet::new(),
            overhead: 0,
        }
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

    /// The protected bytes of all callers of a tenant.
    pub(super) fn protected_bytes_of_tenant(&self, tenant: &Caller) -> usize {
        let tenant = self.by_tenant.get(tenant).and_then(|slot| self.tenants.get(*slot as usize));
        tenant.map_or(0, |tenant| tenant.protected_bytes)
    }

    /// The holder for a new row of a caller.
    pub(super) fn add_row(&mut self, caller: &Caller, quota: &AgentQuota) -> HolderSlot {
        let slot = match self.by_caller.get(caller) {
            Some(slot) => *slot,
            None => {
                let holder = Holder {
                    caller: caller.clone(),
                    tenant: self.add_caller(caller.tenant()),
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
            }
        };
        if let Some(holder) = self.all.get_mut(slot as usize) {
            holder.rows += 1;
        }
        slot
    }

    /// The tenant of a new caller.
    fn add_caller(&mut self, name: Caller) -> TenantSlot {
        let slot = match self.by_tenant.get(&name) {
            Some(slot) => *slot,
            None => {
                let by_size = BTreeSet::new();
                let tenant = Tenant { name: name.clone(), callers: 0, bytes: 0, protected_bytes: 0, by_size };
                self.overhead += tenant.overhead();
                let slot =
                    TenantSlot::try_from(self.tenants.insert(tenant)).expect("fewer tenants than callers");
                self.by_tenant.insert(name, slot);
                slot
            }
        };
        if let Some(tenant) = self.tenants.get_mut(slot as usize) {
            tenant.callers += 1;
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
            self.remove_caller(holder.tenant);
        }
    }

    /// A caller is gone. The tenant of the last one goes, too.
    fn remove_caller(&mut self, slot: TenantSlot) {
        let Some(tenant) = self.tenants.get_mut(slot as usize) else { return };
        tenant.callers -= 1;
        if tenant.callers == 0 {
            let tenant = self.tenants.remove(slot as usize);
            self.overhead -= tenant.overhead();
            self.by_tenant.remove(&tenant.name);
        }
    }

    /// Changes what a caller holds.
    pub(super) fn change<T>(&mut self, slot: HolderSlot, change: impl FnOnce(&mut Holder) -> T) -> T {
        let holder = self.all.get_mut(slot as usize).expect("a holder in use");
        let tenant = self.tenants.get_mut(holder.tenant as usize).expect("a tenant in use");
        self.by_size.remove(&(tenant.bytes, holder.tenant));
        tenant.by_size.remove(&(holder.bytes, slot));
        tenant.bytes -= holder.bytes;
        tenant.protected_bytes -= holder.protected_bytes;
        let result = change(holder);
        tenant.bytes += holder.bytes;
        tenant.protected_bytes += holder.protected_bytes;
        if holder.evictable.oldest.is_some() {
            tenant.by_size.insert((holder.bytes, slot));
        }
        if !tenant.by_size.is_empty() {
            self.by_size.insert((tenant.bytes, holder.tenant));
        }
        if let Some(usage) = &holder.usage {
            usage.own.protected_bytes(self.kind).store(holder.protected_bytes, Relaxed);
            usage.tenant.protected_bytes(self.kind).store(tenant.protected_bytes, Relaxed);
        }
        result
    }

    /// The callers with evictable rows: those of the tenant that holds the most first, and of these the one that holds the most.
    pub(super) fn largest_first(&self) -> impl Iterator<Item = &Holder> {
        let tenants = self.by_size.iter().rev().filter_map(|(_, slot)| self.tenants.get(*slot as usize));
        tenants.flat_map(|tenant| tenant.by_size.iter().rev().map(|(_, slot)| self.get(*slot)))
    }
}
