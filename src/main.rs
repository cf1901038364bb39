//! The `a2a-bridge` program.
fn main() {}
