//! NATS: the connection, the subjects, one service per agent, and the front doors.
//!
//! A front door is an adapter between NATS messages and the [dispatcher](crate::dispatch): [`actions`] and
//! [`agent_protocol`].

pub(crate) mod actions;
pub(crate) mod agent_protocol;
pub(crate) mod catalog;
pub(crate) mod connect;
pub(crate) mod control;
pub(crate) mod encoded_reply;
pub(crate) mod frames;
pub(crate) mod headers;
mod inbox;
pub(crate) mod outbox;
mod per_card;
pub(crate) mod publication;
pub mod service;
pub(crate) mod stoppable_task;
pub(crate) mod subject;
