//! Returns freed memory to the system, and withholds memory from calls while the process is near its budget.
//!
//! The allocator keeps freed memory for a second before it returns it. While calls use much memory, that is too long: a
//! few large responses would take twice the memory that the budget counts. But an early return costs a busy bridge
//! without large messages up to 7 % of its CPU time, because the same pages are needed again immediately. So a thread of
//! its own returns memory early, and only [while calls use much of it](MemoryBudget::is_pressed).
//!
//! A block that one thread has allocated and another one has freed belongs to the first thread until that one collects
//! it. So every worker of the runtime does that, too, when it is idle ([`collect`]), and idle threads for synchronous work
//! end soon.
//!
//! What the budget does not count may still take more than the budget leaves for it: buffers of connections, pages of the
//! allocator that are partly free. So the thread also compares the resident memory of the process with the budget.
//!
//! The thread also returns memory every minute regardless: in mimalloc 3, a thread that schedules a return while another
//! one completes the last return can leave the allocator's own timer off for ever.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

// Links the allocator's functions, also into programs that use another allocator.
use mimalloc as _;

use super::{MemoryBudget, resident};

/// The interval while calls use much memory. Also the shortest one: a caller could make each call cross the threshold.
const PRESSED: Duration = Duration::from_millis(10);
/// How often memory is returned after that, for what calls and threads free when they end.
const AFTERWARDS: u32 = 20;
/// The interval otherwise.
const IDLE: Duration = Duration::from_secs(60);

/// Counts the returns of memory.
static RETURNS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The count when this thread last collected its memory.
    static COLLECTED: Cell<u64> = const { Cell::new(0) };
}

/// Collects the memory of this thread that is free, unless it has done so since the last return of memory. Does almost
/// nothing while calls use little memory.
pub(crate) fn collect() {
    let returns = RETURNS.load(Relaxed);
    if COLLECTED.replace(returns) != returns {
        return_freed_memory();
    }
}

/// Starts the thread, which ends after the budget is dropped.
pub(crate) fn start(budget: &Arc<MemoryBudget>) {
    let weak = Arc::downgrade(budget);
    let thread = std::thread::Builder::new().name("free-memory".into()).spawn(move || run(&weak));
    // Without the thread, the program only takes more memory.
    if let Ok(thread) = thread {
        let _ = budget.reclaimer.set(thread.thread().clone());
    }
}

#[expect(clippy::disallowed_methods, reason = "a thread of its own may sleep")]
fn run(budget: &Weak<MemoryBudget>) {
    let mut remaining = 0_u32;
    loop {
        let Some(current) = budget.upgrade() else { return };
        remaining = if current.is_pressed() { AFTERWARDS } else { remaining.saturating_sub(1) };
        current.set_resident(if remaining > 0 { resident().unwrap_or(0) } else { 0 });
        drop(current);
        if remaining == 0 {
            std::thread::park_timeout(IDLE);
        }
        std::thread::sleep(PRESSED);
        return_freed_memory();
        RETURNS.fetch_add(1, Relaxed);
    }
}

#[expect(unsafe_code, reason = "the crate of the allocator has no safe function for it")]
fn return_freed_memory() {
    unsafe extern "C" {
        fn mi_collect(force: bool);
    }
    // SAFETY: a function of the allocator that is linked above; any thread may call it at any time.
    unsafe { mi_collect(true) }
}
