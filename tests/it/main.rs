//! Integration tests against a real nats-server and real agents.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking; clippy.toml allows it in test functions only, not in their helpers"
)]

mod agent_errors;
mod agent_protocol;
mod callers;
mod commands;
mod discovery;
#[cfg(target_os = "linux")]
mod endings;
mod follow_ups;
mod idempotency;
#[cfg(target_os = "linux")]
mod interrupted;
mod leniency;
mod limits;
#[cfg(target_os = "linux")]
mod logging;
mod names;
#[cfg(target_os = "linux")]
mod operator;
#[cfg(target_os = "linux")]
mod orphans;
mod otlp;
mod passing_on;
#[cfg(target_os = "linux")]
mod ports;
mod presence;
mod reconnect;
mod reload;
mod reply_guard;
mod requests;
mod rolling;
mod secrets;
mod service;
mod shutdown;
mod small_payload;
mod states;
mod stream_faults;
mod streams;
#[cfg(target_os = "linux")]
mod stress;
mod submit;
#[cfg(target_os = "linux")]
mod supervision;
mod support;
mod tasks;
