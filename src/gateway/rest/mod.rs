//! The handlers of the REST API. [`routes`](super::routes) lists them.

pub(super) mod agents;
pub(super) mod calls;
pub(super) mod download;
mod large;
pub(super) mod stats;
pub(super) mod system;
pub(super) mod tasks;
pub(super) mod upload;
