//! Points at which a test can kill the process.
//!
//! With the feature `failpoints`, the environment variable `A2A_BRIDGE_FAILPOINT` names a point and a count, as in
//! `answer-claimed:50`. Requests that reach the point stop there, and the process aborts when that many have. Without the
//! feature, which no release has, a point is nothing.

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
