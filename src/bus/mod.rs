//! NATS and only NATS: the connection, the names, one service per agent, and the envelope around
//! requests and replies.

pub mod catalog;
pub mod connect;
pub mod control;
pub mod desk;
pub mod envelope;
pub mod face;
pub mod frames;
mod inbox;
pub mod publication;
pub mod service;
pub mod subject;
