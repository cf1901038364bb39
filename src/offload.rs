//! Long synchronous work: decoding, assembling, redacting and encoding of large texts, and reading of `/proc`.
//!
//! A worker of the runtime that decodes 15 MB serves no other call meanwhile. So work on more than [`INLINE`] bytes
//! runs on a thread that the runtime replaces, and only a few pieces run at a time. Agents take turns: each agent has at
//! most one piece in the queues, so that hundreds of large responses of one agent wait for each other, and do not delay
//! the calls of other agents. Pieces of up to half a megabyte do not wait behind longer ones.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::Semaphore;

/// Work on this many bytes takes less than a millisecond, and runs immediately.
pub(crate) const INLINE: usize = 64 << 10;

/// Work on more bytes than this has a queue of its own, because a piece of it may take a second.
const LONG: usize = 512 << 10;

/// The queues: one permit for each piece of work that may run.
struct Queues {
    short: Semaphore,
    long: Semaphore,
}

static QUEUES: LazyLock<Queues> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let queue = || Semaphore::new((cores / 2).max(1));
    Queues { short: queue(), long: queue() }
});

/// One permit for each agent: its holder waits in a queue, or runs.
static TURNS: LazyLock<Mutex<HashMap<String, Weak<Semaphore>>>> = LazyLock::new(Mutex::default);

/// Runs `work` for an agent. It takes time in proportion to `bytes`.
pub(crate) async fn run<T>(agent: &str, bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes <= INLINE {
        return work();
    }
    // Neither semaphore is ever closed, so there is always a permit in the end.
    let turn = turn_of(agent);
    let _turn = turn.acquire().await;
    let queue = if bytes > LONG { &QUEUES.long } else { &QUEUES.short };
    let _permit = queue.acquire().await;
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

fn turn_of(agent: &str) -> Arc<Semaphore> {
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(turn) = turns.get(agent).and_then(Weak::upgrade) {
        return turn;
    }
    let turn = Arc::new(Semaphore::new(1));
    turns.retain(|_, turn| turn.strong_count() > 0);
    turns.insert(agent.to_owned(), Arc::downgrade(&turn));
    turn
}

/// Holds the turn of an agent: its long work waits, for the tests of what must be offloaded.
#[cfg(test)]
pub(crate) fn hold_turn(agent: &str) -> tokio::sync::OwnedSemaphorePermit {
    turn_of(agent).try_acquire_owned().expect("a free turn")
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
                run("agent", INLINE + 1, || {
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
        run("agent", INLINE, || ()).await;
        tokio::task::spawn_blocking(move || barrier.wait()).await.unwrap();
        tasks.close();
        tasks.wait().await;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        assert!(most.load(SeqCst) <= (cores / 2).max(1));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn agents_take_turns() {
        const PIECES: usize = 64;
        let order = Arc::new(Mutex::new(Vec::new()));
        let tasks = TaskTracker::new();
        let first = turn_of("greedy").try_acquire_owned().unwrap();
        let work = |agent: &'static str| {
            let order = Arc::clone(&order);
            async move { run(agent, INLINE + 1, || order.lock().unwrap().push(agent)).await }
        };
        (0..PIECES).for_each(|_| drop(tasks.spawn(work("greedy"))));
        tokio::task::yield_now().await;
        work("quiet").await;
        drop(first);
        tasks.close();
        tasks.wait().await;
        let order = order.lock().unwrap();
        assert_eq!((order.first(), order.len()), (Some(&"quiet"), PIECES + 1));
    }
}
