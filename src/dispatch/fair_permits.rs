//! Permits that one verified caller cannot take all of.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::caller::Caller;

/// A verified caller with permits gets another one only while it has fewer than this many times those that would then
/// remain free. So one caller alone takes about two thirds, and a caller that has one never takes the last.
const SHARE: usize = 2;

/// A number of permits. The caller that all unverified callers share may take all of them.
#[derive(Debug)]
pub(crate) struct FairPermits {
    semaphore: Arc<Semaphore>,
    /// How many permits each verified caller has.
    held: Mutex<HashMap<Caller, usize>>,
}

/// One permit, until it is dropped.
#[derive(Debug)]
pub(crate) struct FairPermit {
    _permit: OwnedSemaphorePermit,
    /// For a verified caller.
    held: Option<(Arc<FairPermits>, Caller)>,
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
        let mut held = self.held();
        let own = held.get(caller).copied().unwrap_or(0);
        let would_remain = self.available().saturating_sub(1);
        if own > 0 && own >= SHARE * would_remain {
            return None;
        }
        let permit = acquire()?;
        held.insert(caller.clone(), own + 1);
        Some(FairPermit { _permit: permit, held: Some((Arc::clone(self), caller.clone())) })
    }

    /// Waits for a permit. The semaphore serves those who wait in their order. `None` if it is closed.
    pub(crate) async fn acquire(self: &Arc<Self>, caller: &Caller) -> Option<FairPermit> {
        let permit = Arc::clone(&self.semaphore).acquire_owned().await.ok()?;
        let held = caller.is_verified().then(|| {
            *self.held().entry(caller.clone()).or_default() += 1;
            (Arc::clone(self), caller.clone())
        });
        Some(FairPermit { _permit: permit, held })
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Caller, usize>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for FairPermit {
    fn drop(&mut self) {
        let Some((permits, caller)) = self.held.take() else { return };
        let mut held = permits.held();
        if let Some(own) = held.get_mut(&caller) {
            *own -= 1;
            if *own == 0 {
                held.remove(&caller);
            }
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
    fn one_verified_caller_leaves_permits_for_others(#[case] total: usize, #[case] expected: usize) {
        let [alice, bob] = ["T/alice", "T/bob"].map(Caller::verified);
        let permits = FairPermits::new(total);
        let of_alice = exhaust(&permits, &alice);
        assert_eq!(of_alice.len(), expected);
        let of_bob = exhaust(&permits, &bob);
        assert_eq!(of_bob.is_empty(), total == 1);
        drop((of_alice, of_bob));
        assert!(permits.held().is_empty());
        assert_eq!(permits.available(), total);
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
        assert_eq!(permits.held()[&alice], 2);
        drop((first, second));
        assert!(permits.held().is_empty());
    }
}
