//! NATS: the connection, the subjects, one service per agent, and the front doors.
//!
//! A front door is an adapter between NATS messages and the [dispatcher](crate::dispatch): [`actions`] and
//! [`agent_protocol`].

pub(crate) mod actions;
pub(crate) mod agent_protocol;
pub(crate) mod attach;
pub(crate) mod catalog;
pub(crate) mod connect;
pub(crate) mod control;
pub(crate) mod encoded_reply;
pub(crate) mod event_log;
pub(crate) mod file_service;
pub(crate) mod frames;
pub(crate) mod headers;
pub(crate) mod identity;
mod inbox;
pub(crate) mod jetstream;
pub(crate) mod object_store;
pub(crate) mod outbox;
pub(crate) mod peers;
mod per_card;
pub(crate) mod publication;
mod reply_files;
pub mod service;
pub(crate) mod sessions;
pub(crate) mod stoppable_task;
pub(crate) mod subject;
