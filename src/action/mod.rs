//! From a request to a reply, independent of the front door.
//!
//! [`request`] parses the request and [`actions::Actions`] carries it out, which results in a [`crate::reply`].
//! On the way, [`task_builder`] builds the task, [`assemble`] makes the content of the reply, and [`progress`] reports
//! to the front door.

pub(crate) mod actions;
pub(crate) mod adoption;
pub(crate) mod assemble;
mod files;
pub(crate) mod follow_up;
mod location;
pub(crate) mod params;
pub(crate) mod progress;
pub(crate) mod request;
mod response_text;
mod run;
pub(crate) mod task_builder;
#[cfg(test)]
mod tests;
