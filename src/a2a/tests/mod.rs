//! Tests of the dialects: recordings of real agents, the bridge's output against a strict parser, and agents that
//! deviate from the specification.

mod choosing;
mod connections;
mod credentials;
pub(crate) mod fake;
mod hostile;
mod recordings;
mod strict;
mod tls;
