//! Publishes the skills of A2A agents as actions on a NATS mesh.
#![allow(dead_code)]
pub mod a2a;
pub mod action;
pub mod agent;
pub mod bus;
pub mod config;
pub mod demo_agent;
mod json;
pub mod process;
pub mod tasks;
