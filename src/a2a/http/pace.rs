//! Limits the rate at which an agent's responses are read while other agents are in use. Decoding and assembling take
//! time in proportion to what is read, so this limits how much of the machine one agent can take from the others.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Bytes per second.
const RATE: u32 = 64 << 20;
/// Bytes that an agent may send at once before the rate applies.
const BURST: u32 = 32 << 20;
const BURST_TIME: Duration = time_of(BURST);
/// The rate still applies for this long after another agent was used.
const SHARED_FOR: Duration = Duration::from_secs(1);

/// The time that an agent takes for this many bytes at [`RATE`].
const fn time_of(bytes: u32) -> Duration {
    Duration::from_nanos(bytes as u64 * 1_000_000_000 / RATE as u64)
}

/// Whether several agents are in use at the same time. All agents of the bridge share it.
#[derive(Debug, Default)]
pub(super) struct Sharing {
    /// The number of agents so far.
    agents: AtomicUsize,
    /// The agents that are in use now.
    in_use: AtomicUsize,
    /// The agent that was used last.
    last: AtomicUsize,
    /// When `last` most recently changed.
    changed_at: Mutex<Option<Instant>>,
}

impl Sharing {
    fn used_by(&self, agent: usize) {
        if self.last.load(Relaxed) != agent && self.last.swap(agent, Relaxed) != 0 {
            *self.changed_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
    }

    /// Whether another agent is in use, or was a moment ago.
    fn is_shared(&self, now: Instant) -> bool {
        let changed_at = || *self.changed_at.lock().unwrap_or_else(PoisonError::into_inner);
        self.in_use.load(Relaxed) > 1
            || changed_at().is_some_and(|at| now.saturating_duration_since(at) < SHARED_FOR)
    }
}

/// The pace of all responses of an agent.
#[derive(Debug)]
pub(super) struct Pace {
    agent: usize,
    sharing: Arc<Sharing>,
    /// Requests that are not complete.
    open: AtomicUsize,
    /// When all that was read so far would have been read at [`RATE`].
    read_at: Mutex<Option<Instant>>,
}

impl Default for Pace {
    /// The pace of something that is no agent.
    fn default() -> Self {
        Self::new(&Arc::default())
    }
}

impl Pace {
    pub(super) fn new(sharing: &Arc<Sharing>) -> Self {
        let agent = sharing.agents.fetch_add(1, Relaxed) + 1;
        Self { agent, sharing: Arc::clone(sharing), open: AtomicUsize::new(0), read_at: Mutex::default() }
    }

    /// The pace of another agent.
    pub(super) fn of_another(&self) -> Self {
        Self::new(&self.sharing)
    }

    /// The agent is in use until the request is dropped.
    pub(super) fn begin(self: &Arc<Self>) -> OpenRequest {
        self.sharing.used_by(self.agent);
        if self.open.fetch_add(1, Relaxed) == 0 {
            self.sharing.in_use.fetch_add(1, Relaxed);
        }
        OpenRequest(Arc::clone(self))
    }
}

/// A request to an agent, and its response.
#[derive(Debug)]
pub(super) struct OpenRequest(Arc<Pace>);

impl OpenRequest {
    /// Waits until further bytes may be read. `bytes` were read since the last time.
    pub(super) async fn wait(&self, bytes: usize) {
        let Pace { agent, sharing, read_at, .. } = &*self.0;
        sharing.used_by(*agent);
        let now = Instant::now();
        let is_shared = sharing.is_shared(now);
        let read_at = {
            let mut read_at = read_at.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = read_at.map_or(now, |read_at| read_at.max(now));
            let end = begin + time_of(u32::try_from(bytes).unwrap_or(u32::MAX));
            // Alone, an agent uses up its burst, but builds up no debt.
            *read_at.insert(if is_shared { end } else { end.min(now + BURST_TIME) })
        };
        match read_at.checked_sub(BURST_TIME) {
            Some(due) if is_shared && due > now => tokio::time::sleep_until(due).await,
            // Other tasks run in any case.
            _ => tokio::task::yield_now().await,
        }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let pace = &self.0;
        if pace.open.fetch_sub(1, Relaxed) == 1 {
            pace.sharing.in_use.fetch_sub(1, Relaxed);
            pace.sharing.used_by(pace.agent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two agents of a bridge.
    fn agents() -> [Arc<Pace>; 2] {
        let sharing = Arc::default();
        [(); 2].map(|()| Arc::new(Pace::new(&sharing)))
    }

    /// Reads this many mebibytes, and returns the seconds that it took.
    async fn read(agent: &Arc<Pace>, mebibytes: u32) -> f64 {
        let (begin, request) = (Instant::now(), agent.begin());
        for _ in 0..mebibytes * 8 {
            request.wait(128 << 10).await;
        }
        begin.elapsed().as_secs_f64()
    }

    #[tokio::test(start_paused = true)]
    async fn beside_another_agent_a_burst_is_read_at_once_and_the_rest_at_the_rate() {
        let [agent, other] = agents();
        let open = other.begin();
        assert!(read(&agent, BURST >> 20).await < 0.01);
        let seconds = read(&agent, 10 * (RATE >> 20)).await;
        assert!((9.99..10.01).contains(&seconds), "{seconds}");
        // A pause allows another burst.
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(read(&agent, BURST >> 20).await < 0.01);
        // The other agent was used a moment ago.
        drop(open);
        let seconds = read(&agent, RATE >> 22).await;
        assert!((0.24..0.26).contains(&seconds), "{seconds}");
        tokio::time::sleep(SHARED_FOR).await;
        assert!(read(&agent, 10 * (RATE >> 20)).await < 0.01);
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_alone_is_read_at_full_speed_and_has_no_burst_left_afterwards() {
        let [agent, other] = agents();
        assert!(read(&agent, 10 * (RATE >> 20)).await < 0.01);
        drop(other.begin());
        let seconds = read(&agent, RATE >> 22).await;
        assert!((0.24..0.26).contains(&seconds), "{seconds}");
    }

    #[test]
    fn an_agent_is_in_use_until_its_last_request_is_complete() {
        let [agent, other] = agents();
        let requests = [agent.begin(), agent.begin(), other.begin()];
        assert_eq!(agent.sharing.in_use.load(Relaxed), 2);
        let [first, second, third] = requests;
        drop((first, third));
        assert_eq!(agent.sharing.in_use.load(Relaxed), 1);
        drop(second);
        assert_eq!(agent.sharing.in_use.load(Relaxed), 0);
    }
}
