//! What a skill does when asked: from a checked request to a reply, independent of who asks.
//!
//! [`request`] reads what is wanted, [`run::Actions`] does it, [`outcome`] and [`error`] are what
//! comes of it. On the way [`fold`] puts the task together, [`assemble`] makes the message, and
//! [`progress`] hears the news.

mod answer;
pub mod assemble;
pub mod error;
pub mod fold;
pub mod follow_up;
mod journey;
pub mod ledger;
pub mod once;
pub mod outcome;
pub mod params;
pub mod progress;
pub mod request;
#[cfg(test)]
mod retry_tests;
pub mod run;
#[cfg(test)]
mod wire_tests;
