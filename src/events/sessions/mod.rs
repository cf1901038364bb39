//! Sessions: what the event log says about a conversation.
//!
//! A session is a [fold](summary) over its events. The result is stored, so that nobody has to read a long log to list
//! sessions or to fork one, and [`projector`] keeps it up to date behind the calls. A fork copies nothing: its log begins
//! with a link to its parent, and [`lineage`] reads both as one.

pub(crate) mod calls;
pub(crate) mod fork;
pub(crate) mod history;
pub(crate) mod lineage;
pub(crate) mod messages;
pub(crate) mod page;
pub(crate) mod projector;
pub(crate) mod reading;
pub(crate) mod redaction;
pub(crate) mod removal;
pub(crate) mod runs;
pub(crate) mod service;
pub(crate) mod summary;
#[cfg(test)]
mod tests;
