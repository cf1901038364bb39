//! What a skill does when asked: from a checked request to a reply, independent of who asks.
//!
//! [`request`] reads what is wanted, [`actions::Actions`] does it, and [`crate::reply`] is what comes of it.
//! On the way [`fold`] puts the task together, [`assemble`] makes the message, and [`progress`] reports.

pub(crate) mod actions;
mod answer;
pub(crate) mod assemble;
pub(crate) mod params;
pub(crate) mod progress;
pub(crate) mod request;
#[cfg(test)]
mod retry_tests;
mod run;
pub(crate) mod task_builder;
#[cfg(test)]
mod wire_tests;
