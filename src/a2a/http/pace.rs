//! Limits the rate at which an agent's responses are read while other agents are in use. Decoding and assembling take
//! time in proportion to what is read, so this limits how much of the machine one agent can take from the others.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Bytes per second.
const RATE: u32 = 64 << 20;
/// Bytes that an agent may send at once before the rate applies.
const BURST: u32 = 32 << 20;
const BURST_TIME: Duration = time_of(BURST);
/// The rate applies this long after another agent was used.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// The time that an agent takes for this many bytes at [`RATE`].
const fn time_of(bytes: u32) -> Duration {
    Duration::from_nanos(bytes as u64 * 1_000_000_000 / RATE as u64)
}

/// Whether several agents are in use at the same time. All endpoints of the bridge share it.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// The number of endpoints so far.
    endpoints: AtomicU64,
    /// The endpoint that was used last.
    last: AtomicU64,
    /// When another endpoint was used than the time before.
    shared_at: Mutex<Option<Instant>>,
}

impl Sharing {
    fn used_by(&self, endpoint: u64) {
        if self.last.load(Relaxed) != endpoint {
            self.last.store(endpoint, Relaxed);
            *self.shared_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
    }

    fn is_recent(&self, now: Instant) -> bool {
        let shared_at = *self.shared_at.lock().unwrap_or_else(PoisonError::into_inner);
        shared_at.is_some_and(|at| now.saturating_duration_since(at) < SHARED_FOR)
    }
}

/// The pace of all responses of an endpoint.
#[derive(Debug)]
pub(super) struct Pace {
    endpoint: u64,
    sharing: Arc<Sharing>,
    /// When all that was read so far would have been read at [`RATE`].
    read_at: Mutex<Option<Instant>>,
}

impl Pace {
    pub(super) fn new(sharing: &Arc<Sharing>) -> Self {
        let endpoint = sharing.endpoints.fetch_add(1, Relaxed) + 1;
        Self { endpoint, sharing: Arc::clone(sharing), read_at: Mutex::default() }
    }

    /// A request is sent.
    pub(super) fn begin(&self) {
        self.sharing.used_by(self.endpoint);
    }

    /// Waits until further bytes may be read. `bytes` were read since the last time.
    pub(super) async fn wait(&self, bytes: usize) {
        self.sharing.used_by(self.endpoint);
        let now = Instant::now();
        let is_shared = self.sharing.is_recent(now);
        let read_at = {
            let mut read_at = self.read_at.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = read_at.map_or(now, |read_at| read_at.max(now));
            let end = begin + time_of(u32::try_from(bytes).unwrap_or(u32::MAX));
            // When another agent is used again, no burst is left, and nothing has to be made up for.
            *read_at.insert(if is_shared { end } else { end.min(now + BURST_TIME) })
        };
        match read_at.checked_sub(BURST_TIME) {
            Some(due) if is_shared && due > now => tokio::time::sleep_until(due).await,
            // Other tasks run in any case.
            _ => tokio::task::yield_now().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads this many mebibytes, and returns the seconds that it took.
    async fn read(pace: &Pace, mebibytes: u32) -> f64 {
        let begin = Instant::now();
        for _ in 0..mebibytes * 8 {
            pace.wait(128 << 10).await;
        }
        begin.elapsed().as_secs_f64()
    }

    #[tokio::test(start_paused = true)]
    async fn beside_another_agent_a_burst_is_read_at_once_and_the_rest_at_the_rate() {
        let sharing = Arc::new(Sharing::default());
        let (pace, other) = (Pace::new(&sharing), Pace::new(&sharing));
        other.begin();
        assert!(read(&pace, BURST >> 20).await < 0.01);
        let mut seconds = 0.0;
        for _ in 0..4 {
            other.begin();
            seconds += read(&pace, RATE >> 22).await;
        }
        assert!((0.99..1.01).contains(&seconds), "{seconds}");
        // A pause allows another burst.
        tokio::time::sleep(Duration::from_secs(10)).await;
        other.begin();
        assert!(read(&pace, BURST >> 20).await < 0.01);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_alone_is_read_at_full_speed_and_has_no_burst_left_afterwards() {
        let sharing = Arc::new(Sharing::default());
        let (pace, other) = (Pace::new(&sharing), Pace::new(&sharing));
        pace.begin();
        tokio::time::sleep(SHARED_FOR).await;
        assert!(read(&pace, 10 * (RATE >> 20)).await < 0.01);
        other.begin();
        let seconds = read(&pace, RATE >> 22).await;
        assert!((0.24..0.26).contains(&seconds), "{seconds}");
    }
}
