//! Integration tests against a real nats-server and real agents.
