//! Integration tests against a real nats-server and real agents.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    unreachable_pub,
    reason = "tests fail by panicking; clippy.toml allows it in test functions only, not in their helpers"
)]

mod action_names;
mod agent_errors;
mod agent_lifecycle;
mod agent_protocol;
#[cfg(target_os = "linux")]
mod agent_stop;
mod call_log;
mod callers;
mod client_commands;
mod config_commands;
#[cfg(target_os = "linux")]
mod diagnostics;
mod discovery;
mod events;
mod files;
mod follow_ups;
mod gateway;
mod gateway_files;
mod gateway_safety;
mod health;
mod idempotency;
#[cfg(target_os = "linux")]
mod isolate;
mod lenient_parsing;
mod limits;
#[cfg(target_os = "linux")]
mod logging;
mod malformed_messages;
mod memory;
mod mesh;
mod message_content;
mod metrics;
#[cfg(target_os = "linux")]
mod orphans;
mod otlp;
mod overview;
mod peers;
mod permissions;
#[cfg(target_os = "linux")]
mod ports;
mod probes;
#[cfg(target_os = "linux")]
mod process_isolation;
mod reconnect;
mod reload;
mod replicas;
mod reply_guard;
mod requests;
mod rolling;
mod secrets;
mod service;
mod sessions;
mod sessions_forks;
mod sessions_log;
mod shared_state;
mod shutdown;
mod small_payload;
#[cfg(target_os = "linux")]
mod stop_during_reload;
mod stream_faults;
mod streams;
#[cfg(target_os = "linux")]
mod stress;
mod submit;
#[cfg(target_os = "linux")]
mod supervision;
mod support;
#[cfg(target_os = "linux")]
mod systemd;
mod task_states;
mod tasks;
mod terminal_output;
#[cfg(target_os = "linux")]
mod wait_for_nats;
