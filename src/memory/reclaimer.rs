//! Returns freed memory to the system.
//!
//! The allocator keeps freed memory for a second before it returns it. While calls use much memory, that is too long: a
//! few large responses would take twice the memory that the budget counts. But an early return costs a busy bridge
//! without large messages up to 7 % of its CPU time, because the same pages are needed again immediately. So a thread of
//! its own returns memory early, and only [while calls use much of it](MemoryBudget::is_pressed).
//!
//! It also does so every minute regardless: in mimalloc 3, a thread that schedules a return while another one completes
//! the last return can leave the allocator's own timer off for ever.

use std::sync::{Arc, Weak};
use std::time::Duration;

// Links the allocator's functions, also into programs that use another allocator.
use mimalloc as _;

use super::MemoryBudget;

/// The interval while calls use much memory. Also the shortest one: a caller could make each call cross the threshold.
const PRESSED: Duration = Duration::from_millis(10);
/// The interval otherwise.
const IDLE: Duration = Duration::from_secs(60);

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
    let mut was_pressed = false;
    loop {
        let Some(is_pressed) = budget.upgrade().map(|budget| budget.is_pressed()) else { return };
        // Once more after the pressure has ended, for what was freed during the last return.
        if !is_pressed && !was_pressed {
            std::thread::park_timeout(IDLE);
        }
        std::thread::sleep(PRESSED);
        return_freed_memory();
        was_pressed = is_pressed;
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
