//! The NATS service protocol for one agent.
