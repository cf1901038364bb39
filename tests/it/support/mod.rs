//! What the tests stand on: a real server, and waiting without sleeping.

pub mod cli;
pub mod eventually;
pub mod nats;
