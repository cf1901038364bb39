//! Waiting for something to become true, without guessing how long it takes.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// How often is looked.
const INTERVAL: Duration = Duration::from_millis(5);

/// Asks until there is `Some`, and gives it back; panics at the deadline.
pub async fn eventually<T, F>(deadline: Duration, mut look: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < deadline, "it did not become true within {deadline:?}");
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Asks until the answer is `expected`; panics at the deadline and says what it was instead.
pub async fn eventually_eq<T, F>(deadline: Duration, expected: T, mut look: impl FnMut() -> F)
where
    T: PartialEq + Debug,
    F: Future<Output = T>,
{
    let began = Instant::now();
    loop {
        let found = look().await;
        if found == expected {
            return;
        }
        assert!(began.elapsed() < deadline, "still {found:?} and not {expected:?} after {deadline:?}");
        tokio::time::sleep(INTERVAL).await;
    }
}
