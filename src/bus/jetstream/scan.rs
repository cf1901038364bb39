//! Reads all records of a bucket, by an ephemeral consumer that delivers the last message of each subject.
//!
//! The consumer has flow control, so a slow reader does not have to hold all records at once. The server removes it soon
//! after the subscription has ended. A gap in the messages ends the scan with an error: whoever scans tries again.

use std::time::{Duration, SystemTime};

use async_nats::{HeaderValue, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Deserialize;
use serde_json::json;

use super::api::{Api, ApiError};
use super::bucket::Bucket;
use super::{HOLDER, TTL, is_marker};
use crate::state::StoredRecord;
use crate::state::ledger::{Holder, Stored};

/// Interval of the server's heartbeats, and how long the scan waits for a message.
const HEARTBEAT: Duration = Duration::from_secs(2);
const SILENCE: Duration = Duration::from_secs(5);
/// How long the server keeps the consumer without a subscription.
const INACTIVE_THRESHOLD: Duration = Duration::from_secs(5);
/// The size of a message whose value is left out.
const SIZE: &str = "Nats-Msg-Size";
/// Bytes of a record in addition to its value and its subject.
const OVERHEAD: u64 = 236;

pub(super) struct Scan {
    messages: Subscriber,
    client: async_nats::Client,
    /// Messages that the consumer has delivered.
    delivered: u64,
    pending: u64,
    subject: String,
}

#[derive(Deserialize)]
struct ConsumerInfo {
    #[serde(default)]
    num_pending: u64,
}

impl Scan {
    pub(super) async fn begin(api: &Api, bucket: &Bucket, agent: Option<&str>) -> Result<Self, ApiError> {
        Self::start(api, bucket, agent, false).await
    }

    /// For [`Self::next_size`]: the server sends the headers of the records only.
    pub(super) async fn begin_sizes(api: &Api, bucket: &Bucket) -> Result<Self, ApiError> {
        Self::start(api, bucket, None, true).await
    }

    async fn start(
        api: &Api,
        bucket: &Bucket,
        agent: Option<&str>,
        headers_only: bool,
    ) -> Result<Self, ApiError> {
        let (stream, filter) = (bucket.stream(), bucket.filter(agent));
        let client = api.client().clone();
        let inbox = client.new_inbox();
        let operation = |name: &str| format!("CONSUMER.CREATE.{stream}.{name}.{filter}");
        let name = uuid::Uuid::new_v4().simple().to_string();
        let subject = operation(&name);
        let messages = client.subscribe(inbox.clone()).await.map_err(|_| ApiError::Disconnected)?;
        let config = json!({"stream_name": stream, "config": {
            "name": name, "deliver_subject": inbox, "filter_subject": filter,
            "deliver_policy": "last_per_subject", "ack_policy": "none", "replay_policy": "instant",
            "max_deliver": 1, "flow_control": true, "idle_heartbeat": nanos(HEARTBEAT),
            "inactive_threshold": nanos(INACTIVE_THRESHOLD), "num_replicas": 1, "mem_storage": true,
            "headers_only": headers_only,
        }});
        let info: ConsumerInfo = api.call(&subject, Some(&config)).await?;
        Ok(Self { messages, client, delivered: 0, pending: info.num_pending, subject })
    }

    /// The next record; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<StoredRecord>, ApiError> {
        while let Some((message, position)) = self.next_message().await? {
            if !is_marker(&message.payload, message.headers.as_ref()) {
                let value = Bytes::clone(&message.payload);
                let (revision, written_at) = (position.revision, position.written_at);
                return Ok(Some(StoredRecord { value, revision, written_at }));
            }
        }
        Ok(None)
    }

    /// The size of the next record that says for whose quota it counts; `None` at the end.
    pub(super) async fn next_size(&mut self) -> Result<Option<(Holder, Stored)>, ApiError> {
        while let Some((message, position)) = self.next_message().await? {
            let size = message.headers.as_ref().and_then(|headers| {
                let header = |name| headers.get(name).map(HeaderValue::as_str);
                let holder = Holder::parse(header(HOLDER)?)?;
                let value: u64 = header(SIZE)?.parse().ok()?;
                let ttl = Duration::from_secs(header(TTL)?.parse().ok()?);
                let expires_in = ttl.saturating_sub(position.written_at.elapsed().unwrap_or_default());
                let bytes = value + message.subject.len() as u64 + OVERHEAD;
                Some((holder, Stored { bytes, expires_in }))
            });
            if size.is_some() {
                return Ok(size);
            }
        }
        Ok(None)
    }

    async fn next_message(&mut self) -> Result<Option<(Message, Position)>, ApiError> {
        while self.pending > 0 {
            let message = tokio::time::timeout(SILENCE, self.messages.next()).await;
            let Ok(Some(message)) = message else {
                return Err(ApiError::TimedOut { subject: self.subject.clone() });
            };
            if message.status == Some(StatusCode::IDLE_HEARTBEAT) {
                self.confirm(&message).await?;
                continue;
            }
            let position = message.reply.as_deref().and_then(Position::parse);
            let position = position.ok_or_else(|| self.broken())?;
            if position.delivered != self.delivered + 1 {
                return Err(self.broken());
            }
            (self.delivered, self.pending) = (position.delivered, position.pending);
            return Ok(Some((message, position)));
        }
        Ok(None)
    }

    /// Answers a flow control request, and checks that no message was lost.
    async fn confirm(&self, message: &Message) -> Result<(), ApiError> {
        if let Some(reply) = message.reply.clone() {
            return self.client.publish(reply, Bytes::new()).await.map_err(|_| ApiError::Disconnected);
        }
        let last = message.headers.as_ref().and_then(|headers| headers.get("Nats-Last-Consumer"));
        match last.and_then(|last| last.as_str().parse::<u64>().ok()) {
            Some(last) if last != self.delivered => Err(self.broken()),
            _ => Ok(()),
        }
    }

    fn broken(&self) -> ApiError {
        ApiError::Malformed { subject: self.subject.clone() }
    }
}

/// What the reply subject of a delivered message says.
#[derive(Debug, PartialEq, Eq)]
struct Position {
    revision: u64,
    delivered: u64,
    written_at: SystemTime,
    pending: u64,
}

impl Position {
    /// `$JS.ACK.<stream>.<consumer>.<deliveries>.<stream sequence>.<consumer sequence>.<time>.<pending>`; newer servers
    /// add the domain and the account before the stream, and a token at the end.
    fn parse(reply: &str) -> Option<Self> {
        let tokens: Vec<&str> = reply.split('.').collect();
        let stream = match tokens.len() {
            9 => 2,
            11.. => 4,
            _ => return None,
        };
        let number = |offset: usize| tokens.get(stream + offset)?.parse().ok();
        let written_at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_nanos(number(5)?))?;
        Some(Self { revision: number(3)?, delivered: number(4)?, written_at, pending: number(6)? })
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_read_in_both_forms() {
        let written_at = SystemTime::UNIX_EPOCH + Duration::from_secs(2);
        let expected = Position { revision: 7, delivered: 3, written_at, pending: 12 };
        assert_eq!(Position::parse("$JS.ACK.KV_a.c.1.7.3.2000000000.12").as_ref(), Some(&expected));
        assert_eq!(Position::parse("$JS.ACK._.hash.KV_a.c.1.7.3.2000000000.12").as_ref(), Some(&expected));
        assert_eq!(
            Position::parse("$JS.ACK.hub.hash.KV_a.c.1.7.3.2000000000.12.random").as_ref(),
            Some(&expected)
        );
        for other in ["", "$JS.ACK.KV_a.c.1.x.3.2000000000.12", "_INBOX.a.b"] {
            assert_eq!(Position::parse(other), None, "{other}");
        }
    }
}
