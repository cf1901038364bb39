//! Publishes the skills of A2A agents as actions on a NATS mesh.
pub mod a2a;
pub mod action;
pub mod agent;
pub mod bridge;
pub mod bus;
pub mod cli;
pub mod config;
pub mod demo_agent;
mod json;
pub mod metrics;
pub mod process;
pub mod tasks;
pub mod telemetry;
