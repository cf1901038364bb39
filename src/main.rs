//! The `a2a-bridge` program: everything is in the library.

use std::ffi::{c_int, c_long};
use std::process::ExitCode;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    return_freed_memory_soon();
    // A guard is small because nothing else is set up before it.
    #[cfg(target_os = "linux")]
    if let Some(code) = a2a_bridge::guard::main_if_asked() {
        return code;
    }
    // Without the thread, the program only takes more memory.
    let _ = std::thread::Builder::new().name("free-memory".into()).spawn(keep_returning_freed_memory);
    a2a_bridge::main()
}

/// Returns freed memory to the system after 10 ms. By default that is a second, in which a few large responses take
/// twice the memory that the budget counts.
#[expect(unsafe_code, reason = "the crate has no safe function for the allocator's options")]
fn return_freed_memory_soon() {
    /// `mi_option_purge_delay`, in milliseconds; the same number in mimalloc 2 and 3.
    const PURGE_DELAY: c_int = 15;
    unsafe extern "C" {
        fn mi_option_set(option: c_int, value: c_long);
    }
    // SAFETY: the function of the allocator that this program is linked with; it stores a number.
    unsafe { mi_option_set(PURGE_DELAY, 10) }
}

/// Returns freed memory to the system every 10 seconds, even if the allocator has lost its own timer: in mimalloc 3, a
/// thread that schedules a return while another one completes the last return can leave the timer off for ever.
#[expect(unsafe_code, reason = "the crate has no safe function for it")]
#[expect(clippy::disallowed_methods, reason = "a thread of its own may sleep")]
fn keep_returning_freed_memory() {
    unsafe extern "C" {
        fn mi_collect(force: bool);
    }
    loop {
        std::thread::sleep(Duration::from_secs(10));
        // SAFETY: the function of the allocator that this program is linked with; any thread may call it at any time.
        unsafe { mi_collect(true) }
    }
}
