//! The `a2a-bridge` program: everything is in the library.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // A guard is small because nothing else is set up before it.
    #[cfg(target_os = "linux")]
    if let Some(code) = a2a_bridge::guard::main_if_asked() {
        return code;
    }
    a2a_bridge::main()
}
