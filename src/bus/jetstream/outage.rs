//! Logs when the shared state becomes unavailable, and when it is back.

use std::fmt::Display;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::text::duration;

#[derive(Debug, Default)]
pub(super) struct Outage(Mutex<Option<Instant>>);

impl Outage {
    pub(super) fn begin(&self, reason: &impl Display) {
        let mut since = self.since();
        if since.is_none() {
            *since = Some(Instant::now());
            tracing::warn!(
                %reason,
                "shared state is unavailable; calls continue, and this bridge writes what it can when JetStream is back"
            );
        }
    }

    pub(super) fn end(&self) {
        if let Some(since) = self.since().take() {
            tracing::info!(outage = %duration(since.elapsed()), "shared state is available again");
        }
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.since().is_some()
    }

    fn since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
