//! The event log: what was said in sessions and calls, so that it can be read again, continued and attached to.
//!
//! The log is an append-only [store](store::EventStore) of [batches](event::Batch) of events that all replicas share.
//! Everything else is derived from it: the frames of a logged call are decoded from the bytes that were stored, so that a
//! caller that attaches to the call at another replica gets the same frames, byte for byte.
//!
//! This module knows nothing of NATS. `bus::event_log` implements the store, and `dispatch` decides which calls are
//! [logged](logged::Logged).

pub(crate) mod artifact_data;
pub(crate) mod attach;
pub(crate) mod coalescer;
pub(crate) mod codec;
pub(crate) mod event;
pub(crate) mod follow;
mod frame_counter;
pub(crate) mod log;
pub(crate) mod logged;
pub(crate) mod mapping;
#[cfg(test)]
pub(crate) mod memory_store;
pub(crate) mod records;
pub(crate) mod resume;
pub(crate) mod run_log;
pub(crate) mod run_record;
pub(crate) mod selection;
pub(crate) mod sessions;
pub(crate) mod store;
