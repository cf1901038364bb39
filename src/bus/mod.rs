//! NATS and only NATS: the connection, the names, one service per agent, and the front doors.
//!
//! A front door is an adapter between NATS messages and the [dispatcher](crate::dispatch): [`actions`] and
//! [`agent_protocol`].

pub mod actions;
pub mod agent_protocol;
pub mod catalog;
pub mod connect;
pub mod control;
pub mod frames;
pub mod headers;
mod inbox;
pub mod outgoing;
pub mod publication;
pub mod service;
pub mod subject;
