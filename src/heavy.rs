//! Long synchronous work: decoding, assembling and encoding of large responses, and reading of `/proc`.
//!
//! A worker of the runtime that decodes 15 MB serves no other call meanwhile. So work on more than [`INLINE`] bytes
//! runs on a thread that the runtime replaces, and only a few of these run at a time: hundreds of large responses wait
//! for each other, not the calls of other agents.

use std::sync::LazyLock;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

/// Work on this many bytes takes less than a millisecond, and runs immediately.
pub(crate) const INLINE: usize = 64 << 10;

static PERMITS: LazyLock<Semaphore> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Semaphore::new((cores / 2).max(1))
});

/// Runs `work`, which takes time in proportion to `bytes`.
pub(crate) async fn run<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes <= INLINE {
        return work();
    }
    // Never closed, so there is always a permit in the end.
    let _permit = PERMITS.acquire().await;
    block(work)
}

/// Runs `work`, which blocks, on a thread that the runtime replaces. The caller limits how much of it runs at a time.
pub(crate) fn block<T>(work: impl FnOnce() -> T) -> T {
    // A runtime with a single thread (in tests) has no other worker.
    if Handle::current().runtime_flavor() == RuntimeFlavor::CurrentThread {
        return work();
    }
    tokio::task::block_in_place(work)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::{Arc, Barrier};

    use tokio_util::task::TaskTracker;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn other_tasks_run_while_many_pieces_of_long_work_are_under_way() {
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        // The first piece of work ends only after another task has run.
        let barrier = Arc::new(Barrier::new(2));
        let tasks = TaskTracker::new();
        for number in 0..16 {
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            let barrier = Arc::clone(&barrier);
            tasks.spawn(async move {
                run(INLINE + 1, || {
                    most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                    if number == 0 {
                        barrier.wait();
                    }
                    running.fetch_sub(1, SeqCst);
                })
                .await;
            });
        }
        for _ in 0..64 {
            tasks.spawn(tokio::task::yield_now()).await.unwrap();
        }
        run(INLINE, || ()).await;
        tokio::task::spawn_blocking(move || barrier.wait()).await.unwrap();
        tasks.close();
        tasks.wait().await;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        assert!(most.load(SeqCst) <= (cores / 2).max(1));
    }
}
