//! Support for the tests: a real nats-server, the real program, real and fake agents, callers, and waiting
//! without sleeping.

pub mod agent_protocol;
pub mod bridge;
pub mod caller;
#[cfg(feature = "otlp")]
pub mod collector;
pub mod commands;
pub mod demo_agent;
pub mod event_log;
pub mod eventually;
pub mod files;
pub mod frames;
pub mod gateway;
pub mod mesh;
pub mod nats;
pub mod nats_cluster;
pub mod peer;
pub mod processes;
pub mod proxy;
#[cfg(target_os = "linux")]
pub mod sessions;
pub mod site;
pub mod updates;
pub mod weather;

pub use bridge::{Bridge, attached, launched, launched_at_any_port};
pub use caller::Reply;
pub use demo_agent::DemoAgent;
pub use eventually::{DEADLINE, eventually, eventually_eq, wait_until, within_deadline};
pub use nats::NatsServer;
pub use peer::{Answer, Peer};
