//! Whether requests reach the buckets. Each bucket has a state of its own: one of another owner, which the bridge may not read or
//! which does not answer, must not stop requests to the bridge's own bucket.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use super::jetstream::StoreError;
use crate::bus::jetstream::api::ApiError;
use crate::bus::jetstream::breaker::{Breaker, Passage};

/// Whether requests reach one bucket.
#[derive(Debug, Default)]
pub(super) struct Health {
    pub(super) breaker: Breaker,
    /// Why the last request has failed.
    reason: Mutex<String>,
}

/// The health of all buckets that the bridge may use.
#[derive(Debug)]
pub(super) struct BucketHealth {
    pub(super) own: Arc<Health>,
    /// Other buckets that requests may refer to.
    others: HashMap<String, Arc<Health>>,
}

impl BucketHealth {
    pub(super) fn new(own: &str, allowed: &BTreeSet<String>) -> Self {
        let others = allowed.iter().filter(|bucket| *bucket != own);
        Self { own: Arc::default(), others: others.map(|bucket| (bucket.clone(), Arc::default())).collect() }
    }

    pub(super) fn of(&self, bucket: &str) -> &Arc<Health> {
        self.others.get(bucket).unwrap_or(&self.own)
    }
}

impl Health {
    pub(super) fn reason(&self) -> String {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn enter(&self) -> Result<Passage<'_>, StoreError> {
        self.breaker.enter().ok_or_else(|| StoreError::Unavailable(self.reason()))
    }

    /// Reports the result of a request. A store that has made a decision works.
    pub(super) fn finish<T>(
        &self,
        passage: Passage<'_>,
        result: Result<T, ApiError>,
    ) -> Result<T, StoreError> {
        let error = match result {
            Ok(response) => {
                passage.succeeded();
                return Ok(response);
            }
            Err(error) => error,
        };
        // The connection comes back without a delay.
        let is_disconnected = error == ApiError::Disconnected;
        let error = StoreError::from(error);
        match &error {
            StoreError::Unavailable(why) if !is_disconnected => {
                *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = why.clone();
                passage.failed();
            }
            StoreError::Unavailable(_) => {}
            StoreError::NoBucket | StoreError::NoMessage | StoreError::NoRoom => passage.succeeded(),
        }
        Err(error)
    }
}
