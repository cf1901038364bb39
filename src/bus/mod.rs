//! NATS and only NATS.
pub mod service;
pub mod subject;
