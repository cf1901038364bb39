//! Waiting for a condition, without guessing how long it takes.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// How long a test waits for anything. It is generous, because it only passes when a test fails.
pub const DEADLINE: Duration = Duration::from_secs(20);

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Polls until there is `Some`, and returns it; panics at the deadline.
pub async fn eventually<T, F>(poll: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    eventually_within(DEADLINE, poll).await
}

pub async fn eventually_within<T, F>(limit: Duration, mut poll: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let began = Instant::now();
    loop {
        if let Some(found) = poll().await {
            return found;
        }
        assert!(began.elapsed() < limit, "it did not become true within {limit:?}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Polls until the condition is true; panics at the deadline.
pub async fn wait_until<F>(mut condition: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    eventually(|| {
        let is_true = condition();
        async { is_true.await.then_some(()) }
    })
    .await;
}

/// Polls until the value is `expected`; panics at the deadline and says what it was instead.
pub async fn eventually_eq<T, F>(expected: T, mut poll: impl FnMut() -> F)
where
    T: PartialEq + Debug,
    F: Future<Output = T>,
{
    let began = Instant::now();
    loop {
        let found = poll().await;
        if found == expected {
            return;
        }
        assert!(began.elapsed() < DEADLINE, "still {found:?} and not {expected:?} after {DEADLINE:?}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Awaits something that must happen before the deadline.
pub async fn within_deadline<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future)
        .await
        .unwrap_or_else(|_| panic!("it did not happen within {DEADLINE:?}"))
}
