//! Integration tests against a real nats-server and real agents.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking; clippy.toml allows it in test functions only, not in their helpers"
)]

#[cfg(target_os = "linux")]
mod operator;
mod rolling;
mod service;
#[cfg(target_os = "linux")]
mod stress;
#[cfg(target_os = "linux")]
mod supervision;
mod support;
