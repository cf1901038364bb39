//! Permits that one tenant, or one verified caller, cannot take all of.
//!
//! The rule applies twice: to the [tenant](Caller::tenant) of a caller among all permits, and to the caller among those that
//! its tenant may take. So a tenant with many users leaves permits for other tenants, and a user leaves permits for the
//! other users of its tenant.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::caller::Caller;

/// A tenant with permits gets another one only while it has fewer than this many times those that would then remain free.
/// So one tenant alone takes about two thirds, one of its users about a half, and a tenant that has one never takes the
/// last.
const SHARE: usize = 2;

/// A number of permits. The caller that all unverified callers share may take all of them.
#[derive(Debug)]
pub(crate) struct FairPermits {
    semaphore: Arc<Semaphore>,
    held: Mutex<Held>,
}

/// How many permits each tenant, and each verified caller, has.
#[derive(Debug, Default)]
struct Held {
    tenants: HashMap<Caller, usize>,
    callers: HashMap<Caller, usize>,
}

/// One permit, until it is dropped.
#[derive(Debug)]
pub(crate) struct FairPermit {
    _permit: OwnedSemaphorePermit,
    /// For a verified caller: itself, and its tenant.
    held: Option<(Arc<FairPermits>, Caller, Caller)>,
}

impl FairPermits {
    pub(crate) fn new(permits: usize) -> Arc<Self> {
        Arc::new(Self { semaphore: Arc::new(Semaphore::new(permits)), held: Mutex::default() })
    }

    pub(crate) fn available(&self) -> usize {
        self.semaphore.available_permits()
    }

    /// A permit, if one is free for this caller.
    pub(crate) fn try_acquire(self: &Arc<Self>, caller: &Caller) -> Option<FairPermit> {
        let acquire = || Arc::clone(&self.semaphore).try_acquire_owned().ok();
        if !caller.is_verified() {
            return Some(FairPermit { _permit: acquire()?, held: None });
        }
        let tenant = caller.tenant();
        let mut held = self.held();
        if !held.is_fair(caller, &tenant, self.available().saturating_sub(1)) {
            return None;
        }
        let permit = acquire()?;
        held.add(caller, &tenant);
        Some(FairPermit { _permit: permit, held: Some((Arc::clone(self), caller.clone(), tenant)) })
    }

    /// Waits for a permit. The semaphore serves those who wait in their order. `None` if it is closed.
    pub(crate) async fn acquire(self: &Arc<Self>, caller: &Caller) -> Option<FairPermit> {
        let permit = Arc::clone(&self.semaphore).acquire_owned().await.ok()?;
        let held = caller.is_verified().then(|| {
            let tenant = caller.tenant();
            self.held().add(caller, &tenant);
            (Arc::clone(self), caller.clone(), tenant)
        });
        Some(FairPermit { _permit: permit, held })
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    /// Whether a caller may take a permit, if `would_remain` are then free.
    fn is_fair(&self, caller: &Caller, tenant: &Caller, would_remain: usize) -> bool {
        let of = |counts: &HashMap<Caller, usize>, who| counts.get(who).copied().unwrap_or(0);
        let (of_tenant, own) = (of(&self.tenants, tenant), of(&self.callers, caller));
        if of_tenant > 0 && of_tenant >= SHARE * would_remain {
            return false;
        }
        // A caller may have up to three times what its tenant may still take, and leaves at least one permit of these for
        // another caller.
        own == 0
            || caller.is_whole_tenant()
            || (own + of_tenant < SHARE * would_remain
                && of_tenant + 1 < SHARE * would_remain.saturating_sub(1))
    }

    fn add(&mut self, caller: &Caller, tenant: &Caller) {
        *self.tenants.entry(tenant.clone()).or_default() += 1;
        *self.callers.entry(caller.clone()).or_default() += 1;
    }

    fn remove(&mut self, caller: &Caller, tenant: &Caller) {
        for (counts, who) in [(&mut self.tenants, tenant), (&mut self.callers, caller)] {
            if let Some(count) = counts.get_mut(who) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(who);
                }
            }
        }
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        if let Some((permits, caller, tenant)) = self.held.take() {
            permits.held().remove(&caller, &tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn exhaust(permits: &Arc<FairPermits>, caller: &Caller) -> Vec<FairPermit> {
        std::iter::from_fn(|| permits.try_acquire(caller)).collect()
    }

    #[rstest]
    #[case(1, 1)]
    #[case(2, 1)]
    #[case(3, 2)]
    #[case(256, 170)]
    fn one_tenant_leaves_permits_for_others(#[case] total: usize, #[case] expected: usize) {
        let permits = FairPermits::new(total);
        let of_tenant = exhaust(&permits, &Caller::verified("T"));
        assert_eq!(of_tenant.len(), expected);
        let of_other = exhaust(&permits, &Caller::verified("U"));
        assert_eq!(of_other.is_empty(), total == 1);
        drop((of_tenant, of_other));
        assert!(permits.held().tenants.is_empty() && permits.held().callers.is_empty());
        assert_eq!(permits.available(), total);
    }

    #[rstest]
    #[case(3)]
    #[case(4)]
    #[case(5)]
    #[case(16)]
    #[case(256)]
    fn one_caller_leaves_permits_for_others_of_its_tenant(#[case] total: usize) {
        let permits = FairPermits::new(total);
        let of_alice = exhaust(&permits, &Caller::verified("T/alice"));
        assert!((1..=total / 2).contains(&of_alice.len()), "{}", of_alice.len());
        let of_bob = exhaust(&permits, &Caller::verified("T/bob"));
        assert!((1..=of_alice.len()).contains(&of_bob.len()), "{}", of_bob.len());
        assert!(permits.try_acquire(&Caller::verified("U/carol")).is_some());
    }

    #[test]
    fn one_tenant_with_many_users_leaves_permits_for_other_tenants() {
        let permits = FairPermits::new(256);
        let mut held = Vec::new();
        for number in 0..40 {
            held.extend(exhaust(&permits, &Caller::verified(&format!("T/user{number}"))));
        }
        assert_eq!(held.len(), 170);
        assert!(permits.try_acquire(&Caller::verified("U/bob")).is_some());
    }

    #[test]
    fn one_principal_of_a_gateway_leaves_permits_for_other_principals() {
        let permits = FairPermits::new(64);
        let held = exhaust(&permits, &Caller::verified("gateway:alice"));
        assert!(permits.try_acquire(&Caller::verified("gateway:bob")).is_some(), "{} taken", held.len());
    }

    #[tokio::test]
    async fn unverified_callers_may_take_all_permits() {
        let permits = FairPermits::new(10);
        let shared = Caller::default();
        let mut all = exhaust(&permits, &shared);
        assert_eq!(all.len(), 10);
        let alice = Caller::verified("T/alice");
        assert!(permits.try_acquire(&alice).is_none());
        all.pop();
        // The last one is for a caller that has none.
        let first = permits.try_acquire(&alice).unwrap();
        all.pop();
        assert!(permits.try_acquire(&alice).is_none());
        let second = permits.acquire(&alice).await.unwrap();
        assert_eq!(permits.held().callers[&alice], 2);
        drop((first, second));
        assert!(permits.held().tenants.is_empty() && permits.held().callers.is_empty());
    }
}
