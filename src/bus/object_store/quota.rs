//! How much of the bucket each caller and each tenant may take.
//!
//! A caller has at most `files.max_per_caller`. A bucket may be smaller than what all callers may have together, so a verified
//! caller with users beside it takes at most what its tenant leaves, and a tenant at most what remains free: one caller alone
//! at most a third of the bucket, one tenant at most a half, and there is always room for another tenant. The caller that all
//! unverified callers share leaves a quarter.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::RangeInclusive;

use super::metadata;
use crate::caller::Caller;
use crate::files::FileError;

/// Whose file it is: the hash of a caller, and that of its tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) caller: u128,
    pub(super) tenant: u128,
}

impl Owner {
    pub(super) fn new(caller: &Caller) -> Self {
        Self::parse(&metadata::owner(caller), &metadata::tenant(caller))
    }

    /// The owner as the metadata of a file names it.
    pub(super) fn parse(caller: &str, tenant: &str) -> Self {
        let id = |hash| u128::from_str_radix(hash, 16).unwrap_or_default();
        Self { caller: id(caller), tenant: id(tenant) }
    }
}

/// Bytes of callers and tenants.
#[derive(Debug, Default)]
pub(super) struct Usage {
    callers: HashMap<u128, u64>,
    tenants: HashMap<u128, u64>,
    total: u64,
}

impl Usage {
    pub(super) fn add(&mut self, owner: Owner, bytes: u64) {
        *self.callers.entry(owner.caller).or_default() += bytes;
        *self.tenants.entry(owner.tenant).or_default() += bytes;
        self.total += bytes;
    }

    pub(super) fn subtract(&mut self, owner: Owner, bytes: u64) {
        for (map, id) in [(&mut self.callers, owner.caller), (&mut self.tenants, owner.tenant)] {
            if let Entry::Occupied(mut used) = map.entry(id) {
                *used.get_mut() = used.get().saturating_sub(bytes);
                if *used.get() == 0 {
                    used.remove();
                }
            }
        }
        self.total = self.total.saturating_sub(bytes);
    }

    fn of(&self, owner: Owner) -> Held {
        let of = |map: &HashMap<u128, u64>, id| map.get(&id).copied().unwrap_or(0);
        Held { caller: of(&self.callers, owner.caller), tenant: of(&self.tenants, owner.tenant) }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.callers.is_empty() && self.tenants.is_empty() && self.total == 0
    }
}

/// Bytes of one caller, and of its tenant.
struct Held {
    caller: u64,
    tenant: u64,
}

/// The files that this bridge is writing.
#[derive(Debug, Default)]
pub(super) struct OpenWriters {
    /// By content id: the owner, and the bytes that are reserved.
    writers: HashMap<String, (Owner, u64)>,
    usage: Usage,
}

impl OpenWriters {
    pub(super) fn contains(&self, content_id: &str) -> bool {
        self.writers.contains_key(content_id)
    }

    pub(super) fn count(&self) -> usize {
        self.writers.len()
    }

    /// Reserves further bytes for a content.
    pub(super) fn reserve(&mut self, content_id: &str, owner: Owner, bytes: u64) {
        self.writers.entry(content_id.to_owned()).or_insert((owner, 0)).1 += bytes;
        self.usage.add(owner, bytes);
    }

    pub(super) fn remove(&mut self, content_id: &str) {
        if let Some((owner, bytes)) = self.writers.remove(content_id) {
            self.usage.subtract(owner, bytes);
        }
    }
}

/// What limits the files of a caller.
#[derive(Debug)]
pub(super) struct Quota<'a> {
    /// The files in the bucket.
    pub(super) stored: &'a Usage,
    /// The files that this bridge is writing.
    pub(super) open: &'a OpenWriters,
    /// The size of the bucket.
    pub(super) capacity: u64,
    /// What the bucket holds, as the server says. That includes what other bridges are writing.
    pub(super) used: u64,
    pub(super) max_per_caller: u64,
}

impl Quota<'_> {
    /// How many further bytes the caller may reserve: as many as possible of those in `wanted`.
    pub(super) fn grant(&self, caller: &Caller, wanted: &RangeInclusive<u64>) -> Result<u64, FileError> {
        let owner = Owner::new(caller);
        let (stored, open) = (self.stored.of(owner), self.open.usage.of(owner));
        let (own, of_tenant) = (stored.caller + open.caller, stored.tenant + open.tenant);
        let of_caller = self.max_per_caller.saturating_sub(own);
        if of_caller < *wanted.start() {
            return Err(FileError::Full(format!(
                "the files of this caller would take more than {} bytes (`files.max_per_caller`); delete files, or wait \
                 until they expire",
                self.max_per_caller
            )));
        }
        let used = self.used.max(self.stored.total + self.open.usage.total);
        let free = self.capacity.saturating_sub(used);
        let share = if caller.is_shared() {
            free.min((self.capacity / 4 * 3).saturating_sub(own))
        } else if caller.is_whole_tenant() {
            free.saturating_sub(of_tenant) / 2
        } else {
            free.saturating_sub(of_tenant).saturating_sub(own) / 3
        };
        if share < *wanted.start() {
            return Err(FileError::Full(format!(
                "this caller, or its account or gateway, has reached its share of the bucket for files, which has {} bytes \
                 (`files.max_total`); delete files, or wait until they expire",
                self.capacity
            )));
        }
        Ok(of_caller.min(share).min(*wanted.end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A bucket of 12 MiB, in which a caller reserves as much as it can.
    #[derive(Default)]
    struct Bucket {
        stored: Usage,
        open: OpenWriters,
    }

    impl Bucket {
        fn grant(&self, name: &str, wanted: &RangeInclusive<u64>) -> Result<u64, FileError> {
            let (stored, open) = (&self.stored, &self.open);
            let quota = Quota { stored, open, capacity: 12 * MIB, used: 0, max_per_caller: 100 * MIB };
            quota.grant(&caller(name), wanted)
        }

        fn fill(&mut self, name: &str) -> u64 {
            let owner = Owner::new(&caller(name));
            let mut bytes = 0;
            while let Ok(granted) = self.grant(name, &(1024..=1024)) {
                self.stored.add(owner, granted);
                bytes += granted;
            }
            bytes
        }
    }

    fn caller(name: &str) -> Caller {
        if name.is_empty() { Caller::default() } else { Caller::verified(name) }
    }

    #[test]
    fn one_caller_takes_a_third_one_tenant_a_half_and_unverified_callers_three_quarters() {
        for (name, expected) in [("T/alice", 4), ("T", 6), ("", 9)] {
            let taken = Bucket::default().fill(name);
            assert!((expected * MIB - 1024..=expected * MIB).contains(&taken), "{name}: {taken}");
        }
    }

    #[test]
    fn a_tenant_with_many_users_leaves_room_for_other_tenants() {
        let mut bucket = Bucket::default();
        let taken: u64 = (0..100).map(|number| bucket.fill(&format!("T/user{number}"))).sum();
        assert!(taken <= 6 * MIB, "{taken}");
        assert!(bucket.fill("U/bob") >= MIB);
        assert!(bucket.fill("gateway:carol") >= MIB / 2);
        assert!(bucket.fill("") >= MIB / 4);
    }

    #[test]
    fn unverified_callers_leave_room_for_tenants() {
        let mut bucket = Bucket::default();
        bucket.fill("");
        assert!(bucket.fill("T/alice") >= MIB / 2);
    }

    #[test]
    fn a_reservation_counts_until_it_is_removed() {
        let mut bucket = Bucket::default();
        let alice = Owner::new(&caller("T/alice"));
        bucket.open.reserve("content", alice, MIB);
        bucket.open.reserve("content", alice, 3 * MIB);
        assert!(bucket.grant("T/alice", &(1..=1)).is_err());
        bucket.open.remove("content");
        assert_eq!(bucket.grant("T/alice", &(1..=MIB)), Ok(MIB));
        assert!(bucket.open.usage.is_empty());
    }
}
