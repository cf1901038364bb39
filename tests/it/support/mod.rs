//! What the tests stand on: a real server, and waiting without sleeping.

pub mod eventually;
pub mod face;
pub mod nats;
pub mod weather;
