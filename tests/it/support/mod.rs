//! What the tests stand on: a real server, and waiting without sleeping.

pub mod eventually;
pub mod nats;
#[cfg(target_os = "linux")]
pub mod supervise;
