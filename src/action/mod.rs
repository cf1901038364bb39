//! What a skill does when asked: from a checked request to a reply, independent of who asks.
pub mod assemble;
pub mod error;
pub mod follow_up;
pub mod ledger;
pub mod once;
pub mod outcome;
pub mod params;
pub mod request;
pub mod run;
#[cfg(test)]
mod wire_tests;
