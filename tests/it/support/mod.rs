//! What the tests stand on: a real server, the real program, real agents, and waiting without sleeping.

pub mod agent_protocol;
pub mod bridge;
pub mod caller;
#[cfg(feature = "otlp")]
pub mod collector;
pub mod commands;
pub mod demo_agent;
pub mod eventually;
pub mod frames;
pub mod nats;
pub mod peer;
pub mod processes;
pub mod proxy;
#[cfg(target_os = "linux")]
pub mod site;
pub mod weather;

pub use bridge::{Bridge, attached, launched};
pub use caller::Reply;
pub use demo_agent::DemoAgent;
pub use eventually::{eventually, eventually_eq};
pub use nats::NatsServer;
pub use peer::{Answer, Peer};

use std::time::Duration;

/// For things that take a moment.
pub const SOON: Duration = Duration::from_secs(10);
/// For things that take a pause of the bridge: a restart, a look-up of an agent that was away.
pub const LATER: Duration = Duration::from_secs(20);
