//! Returns freed memory to the system.
//!
//! The allocator keeps freed memory for a second before it returns it. While calls use much memory, that is too long: a
//! few large responses would take twice the memory that the budget counts. But an early return costs a busy bridge
//! without large messages up to 7 % of its CPU time, because it takes the same pages again at once. So a thread of its
//! own returns memory early, and only [while calls use much of it](MemoryBudget::is_pressed).
//!
//! It also does so from time to time without a reason: in mimalloc 3, a thread that schedules a return while another
//! one completes the last return can leave the allocator's own timer off for ever.

use std::sync::{Arc, Weak};
use std::time::Duration;

// Links the allocator's functions, also into programs that use another allocator.
use mimalloc as _;

use super::MemoryBudget;

/// How often freed memory is returned while calls use much memory.
const PRESSED: Duration = Duration::from_millis(10);
/// How often otherwise.
const IDLE: Duration = Duration::from_secs(10);

/// Starts the thread, which ends after the budget is dropped.
pub(crate) fn start(budget: &Arc<MemoryBudget>) {
    let weak = Arc::downgrade(budget);
    let thread = std::thread::Builder::new().name("free-memory".into()).spawn(move || run(&weak));
    // Without the thread, the program only takes more memory.
    if let Ok(thread) = thread {
        let _ = budget.reclaimer.set(thread.thread().clone());
    }
}

fn run(budget: &Weak<MemoryBudget>) {
    loop {
        let Some(is_pressed) = budget.upgrade().map(|budget| budget.is_pressed()) else { return };
        std::thread::park_timeout(if is_pressed { PRESSED } else { IDLE });
        return_freed_memory();
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
