//! Points at which a test can kill the process, and times that a test can shorten.
//!
//! They need the feature `failpoints`, which no release has. Two environment variables control them:
//!
//! - `A2A_BRIDGE_FAILPOINT` names a point and a count, as in `answer-claimed:50`. Requests that reach the point stop
//!   there, and the process aborts when that many have.
//! - `A2A_BRIDGE_RETENTION` is the time in seconds for which records are kept that nobody needs any more.

use std::time::Duration;

/// Stops here, or aborts the process, if a test has chosen this point.
#[cfg(feature = "failpoints")]
pub(crate) async fn hit(name: &str) {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    static REQUESTS: AtomicUsize = AtomicUsize::new(0);
    static CHOSEN: LazyLock<Option<(String, usize)>> = LazyLock::new(|| {
        let chosen = std::env::var("A2A_BRIDGE_FAILPOINT").ok()?;
        let (name, count) = chosen.split_once(':')?;
        Some((name.to_owned(), count.parse().ok()?))
    });
    let Some((_, count)) = CHOSEN.as_ref().filter(|(chosen, _)| chosen == name) else { return };
    if REQUESTS.fetch_add(1, Relaxed) + 1 >= *count {
        std::process::abort();
    }
    std::future::pending::<()>().await;
}

#[cfg(not(feature = "failpoints"))]
#[inline]
#[expect(clippy::unused_async, reason = "as with the feature")]
pub(crate) async fn hit(_: &str) {}

/// How long a record is kept that nobody needs any more.
#[cfg(feature = "failpoints")]
pub(crate) fn retention(default: Duration) -> Duration {
    use std::sync::LazyLock;
    static CHOSEN: LazyLock<Option<Duration>> = LazyLock::new(|| {
        let seconds = std::env::var("A2A_BRIDGE_RETENTION").ok()?;
        Some(Duration::from_secs(seconds.parse().ok()?))
    });
    CHOSEN.unwrap_or(default)
}

#[cfg(not(feature = "failpoints"))]
#[inline]
pub(crate) fn retention(default: Duration) -> Duration {
    default
}
