//! Limits the rate at which an agent's responses are read. Decoding and assembling take time in proportion to what is
//! read, so this limits how much of the machine one agent can use.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Bytes per second.
const RATE: u32 = 96 << 20;
/// Bytes that an agent may send at once before the rate applies.
const BURST: u32 = 32 << 20;

#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When all that was read so far would have been read at [`RATE`].
    read_at: Mutex<Option<Instant>>,
}

impl Pace {
    /// Waits until further bytes may be read. `bytes` were read since the last time.
    pub(super) async fn wait(&self, bytes: usize) {
        let now = Instant::now();
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let read_at = {
            let mut read_at = self.read_at.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = read_at.map_or(now, |read_at| read_at.max(now));
            *read_at.insert(begin + Duration::from_secs(1) * bytes / RATE)
        };
        match read_at.checked_sub(Duration::from_secs(1) * BURST / RATE) {
            Some(due) if due > now => tokio::time::sleep_until(due).await,
            // Other tasks run in any case.
            _ => tokio::task::yield_now().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_read_at_once_and_the_rest_at_the_rate() {
        let (pace, begin) = (Pace::default(), Instant::now());
        let mebibytes = async |count: u32| {
            for _ in 0..count * 8 {
                pace.wait(128 << 10).await;
            }
            begin.elapsed().as_secs_f64()
        };
        assert!(mebibytes(BURST >> 20).await < 0.01);
        let second = mebibytes(RATE >> 20).await;
        assert!((0.99..1.01).contains(&second), "{second}");
        // A pause allows another burst.
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(mebibytes(BURST >> 20).await < 11.02);
    }
}
