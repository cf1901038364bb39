//! Tests of the wires: recordings of real agents, our output against a strict reader, and agents
//! that deviate.

mod choosing;
mod connections;
mod credentials;
pub(crate) mod fake;
mod recordings;
mod strict;
mod tls;
