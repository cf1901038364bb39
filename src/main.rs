//! The `a2a-bridge` program: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    a2a_bridge::cli::main()
}
