//! The clocks of the state logic.
//!
//! Time that passes in this process is tokio's, which a test can pause. The wall clock is for what records say to other
//! replicas, whose clocks may differ by up to two seconds.

#[cfg(not(test))]
use std::time::SystemTime;

pub(super) use tokio::time::Instant;

/// The wall clock of this replica.
#[cfg(not(test))]
pub(super) fn wall_time() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
pub(super) use simulated::{set_wall_clock, wall_time};

#[cfg(test)]
mod simulated {
    use std::cell::Cell;
    use std::time::SystemTime;

    use super::Instant;

    thread_local! {
        /// What the wall clock shows at an instant; the clock of the machine if there is none.
        static WALL_CLOCK: Cell<Option<(Instant, SystemTime)>> = const { Cell::new(None) };
    }

    /// Sets the wall clock of the replica whose code runs next on this thread.
    pub(in super::super) fn set_wall_clock(clock: Option<(Instant, SystemTime)>) {
        WALL_CLOCK.set(clock);
    }

    pub(in super::super) fn wall_time() -> SystemTime {
        match WALL_CLOCK.get() {
            Some((at, time)) => time + at.elapsed(),
            None => SystemTime::now(),
        }
    }
}
