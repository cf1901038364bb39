//! Whether the NATS server takes messages slowly, and the window that agents share then.
//!
//! nats-server waits for slow readers, up to 10 ms for each read of up to 64 KiB, and does not read from the connection
//! meanwhile. So the time until a confirmation arrives is the delay of every reply of every agent.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Window;

/// Confirmations that take this much longer than twice the time of the fastest ones are slow.
const SLOW: Duration = Duration::from_millis(5);
/// The server counts as slow for this long after a slow confirmation. While the gate limits what is sent, confirmations
/// are fast again; to lift that limit each time would delay the replies of other agents each time.
const SLOW_FOR: Duration = Duration::from_secs(30);
/// The fastest confirmation is forgotten after one to two of these, because the connection may have changed.
const PERIOD: Duration = Duration::from_secs(60);
/// An agent that has waited within this time has filled its window.
const RECENT: Duration = Duration::from_secs(1);
/// The size of the gate in bytes. A single message may be larger.
const GATE: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Congestion {
    pub(super) gate: Window,
    fastest: Mutex<Fastest>,
    /// When the server stops counting as slow.
    slow_until: AtomicU64,
}

/// The shortest times from the request of a confirmation to its arrival.
#[derive(Debug)]
struct Fastest {
    period_ends: Instant,
    current: Duration,
    previous: Duration,
}

impl Default for Congestion {
    fn default() -> Self {
        let fastest =
            Fastest { period_ends: Instant::now(), current: Duration::MAX, previous: Duration::MAX };
        Self { gate: Window::new(GATE), fastest: Mutex::new(fastest), slow_until: AtomicU64::new(0) }
    }
}

impl Congestion {
    pub(super) fn is_slow(&self) -> bool {
        let until = self.slow_until.load(Relaxed);
        until > 0 && milliseconds(Instant::now()) < until
    }

    /// A confirmation took this long.
    pub(super) fn confirmed(&self, took: Duration, now: Instant) {
        let mut fastest = self.fastest.lock().unwrap_or_else(PoisonError::into_inner);
        if now >= fastest.period_ends {
            fastest.previous = fastest.current;
            fastest.current = Duration::MAX;
            fastest.period_ends = now + PERIOD;
        }
        fastest.current = fastest.current.min(took);
        let usual = fastest.current.min(fastest.previous);
        drop(fastest);
        if took > usual.saturating_mul(2).saturating_add(SLOW) {
            self.slow_until.store(milliseconds(now + SLOW_FOR), Relaxed);
        }
    }
}

/// When a sender of an agent last waited for the server.
#[derive(Debug, Default)]
pub(super) struct LastWait(AtomicU64);

impl LastWait {
    pub(super) fn set(&self) {
        self.0.store(milliseconds(Instant::now()), Relaxed);
    }

    pub(super) fn is_recent(&self) -> bool {
        let last = self.0.load(Relaxed);
        last > 0 && milliseconds(Instant::now()).saturating_sub(last) < milliseconds_of(RECENT)
    }
}

/// Milliseconds since the first use, at least 1.
fn milliseconds(at: Instant) -> u64 {
    static FIRST: LazyLock<Instant> = LazyLock::new(Instant::now);
    milliseconds_of(at.saturating_duration_since(*FIRST)) + 1
}

fn milliseconds_of(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_slow_if_confirmations_take_much_longer_than_the_fastest() {
        let (congestion, now) = (Congestion::default(), Instant::now());
        let far_away = Duration::from_millis(80);
        congestion.confirmed(far_away, now);
        congestion.confirmed(far_away * 2, now);
        assert!(!congestion.is_slow(), "a long way is not slow");
        congestion.confirmed(far_away * 2 + SLOW * 2, now);
        assert!(congestion.is_slow());
    }

    #[test]
    fn the_fastest_confirmation_is_forgotten_after_two_periods() {
        let (congestion, now) = (Congestion::default(), Instant::now());
        let far_away = Duration::from_millis(80);
        congestion.confirmed(Duration::ZERO, now);
        congestion.confirmed(far_away, now + PERIOD);
        assert!(congestion.is_slow());
        congestion.slow_until.store(0, Relaxed);
        congestion.confirmed(far_away, now + PERIOD * 2);
        assert!(!congestion.is_slow());
    }

    #[test]
    fn an_agent_has_not_waited_at_first() {
        let last_wait = LastWait::default();
        assert!(!last_wait.is_recent());
        last_wait.set();
        assert!(last_wait.is_recent());
    }
}
