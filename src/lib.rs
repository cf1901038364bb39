//! Publishes the skills of A2A agents as actions on a NATS mesh.
#![allow(dead_code)]
pub mod config;
pub mod bus;
pub mod demo_agent;
