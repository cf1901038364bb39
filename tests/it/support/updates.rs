//! The updates of submitted tasks.

use async_nats::{Client, Subscriber};
use futures_util::StreamExt as _;
use serde_json::Value;

use super::eventually::within_deadline;

pub struct TaskUpdates(Subscriber);

impl TaskUpdates {
    pub async fn subscribe(client: &Client, prefix: &str) -> Self {
        let updates = client.subscribe(format!("{prefix}.task.>")).await.unwrap();
        client.flush().await.unwrap();
        Self(updates)
    }

    /// The next update, and the subject it came on.
    pub async fn next(&mut self) -> (String, Value) {
        let message = within_deadline(self.0.next()).await.expect("the connection is up");
        let body = serde_json::from_slice(&message.payload).expect("an update is JSON");
        (message.subject.to_string(), body)
    }

    /// The next update with its revision, however long it takes.
    pub async fn next_revision(&mut self) -> (u64, Value) {
        let message = self.0.next().await.expect("the connection is up");
        let revision = message.headers.as_ref().and_then(|headers| headers.get("A2A-Revision"));
        let revision = revision.and_then(|revision| revision.as_str().parse().ok());
        let body = serde_json::from_slice(&message.payload).expect("an update is JSON");
        (revision.expect("an update has a revision"), body)
    }

    /// The next update with this status, and the subject it came on.
    pub async fn until(&mut self, status: &str) -> (String, Value) {
        loop {
            let (subject, body) = self.next().await;
            if body["status"] == status {
                return (subject, body);
            }
        }
    }
}
