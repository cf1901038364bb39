//! Reads the batches of one subject in order.
//!
//! Batches of direct gets are fast, and may be answered by a copy of the stream that is behind. So the end comes from the
//! leader: what a copy does not have yet is read there.

use std::time::Instant;

use async_nats::Subscriber;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{JetStreamEventStore, number};
use crate::bus::jetstream::ApiError;
use crate::bus::jetstream::api::{TIMEOUT, code};
use crate::events::store::{LogUnavailable, StoredBatch};
use crate::json::to_bytes;

/// Messages and bytes of one request.
const MAX_MESSAGES: usize = 1000;
const MAX_BYTES: usize = 4 << 20;

pub(super) struct Reader<'a> {
    store: &'a JetStreamEventStore,
    stream: String,
    /// May have wildcards.
    subject: String,
    /// The sequence of the last message that was read.
    last: u64,
    phase: Phase,
}

enum Phase {
    /// Requests messages from any copy of the stream.
    Requesting,
    Receiving(Box<Receiving>),
    /// Compares with the leader.
    Confirming,
    Ended,
}

struct Receiving {
    messages: Subscriber,
    began: Instant,
    /// Whether more messages follow the last one that was received.
    has_more: bool,
}

#[derive(Deserialize)]
struct LeaderMessage {
    message: MessageData,
}

#[derive(Deserialize)]
struct MessageData {
    seq: u64,
    /// In Base64.
    #[serde(default)]
    data: String,
}

impl<'a> Reader<'a> {
    pub(super) fn new(store: &'a JetStreamEventStore, stream: String, subject: String, after: u64) -> Self {
        Self { store, stream, subject, last: after, phase: Phase::Requesting }
    }

    pub(super) fn into_stream(self) -> BoxStream<'a, Result<StoredBatch, LogUnavailable>> {
        stream::unfold(self, |mut reader| async move {
            match reader.next().await {
                Ok(batch) => Some((Ok(batch?), reader)),
                Err(error) => {
                    reader.phase = Phase::Ended;
                    Some((Err(error), reader))
                }
            }
        })
        .boxed()
    }

    async fn next(&mut self) -> Result<Option<StoredBatch>, LogUnavailable> {
        loop {
            match &mut self.phase {
                Phase::Ended => return Ok(None),
                Phase::Requesting => {
                    let receiving = self.request().await?;
                    self.phase = Phase::Receiving(Box::new(receiving));
                }
                Phase::Receiving(receiving) => {
                    let passage = self.store.enter()?;
                    let received = receive(self.store, &self.stream, receiving).await;
                    match self.store.finish(passage, received)? {
                        Some(batch) => {
                            self.last = batch.sequence;
                            return Ok(Some(batch));
                        }
                        None if receiving.has_more => self.phase = Phase::Requesting,
                        None => self.phase = Phase::Confirming,
                    }
                }
                Phase::Confirming => {
                    let next = json!({ "seq": self.last + 1, "next_by_subj": self.subject });
                    match self.store.get_from(&self.stream, &next).await? {
                        Some(batch) => {
                            self.last = batch.sequence;
                            return Ok(Some(batch));
                        }
                        None => self.phase = Phase::Ended,
                    }
                }
            }
        }
    }

    async fn request(&self) -> Result<Receiving, LogUnavailable> {
        drop(self.store.enter()?);
        let request = json!({
            "seq": self.last + 1, "batch": MAX_MESSAGES, "max_bytes": MAX_BYTES, "next_by_subj": self.subject,
        });
        let client = self.store.api.client();
        let inbox = client.new_inbox();
        let messages = client.subscribe(inbox.clone()).await.map_err(|_| LogUnavailable)?;
        let sent = client.publish_with_reply(direct_get(&self.stream), inbox, to_bytes(&request)).await;
        sent.map_err(|_| LogUnavailable)?;
        Ok(Receiving { messages, began: Instant::now(), has_more: false })
    }
}

/// The next message; `None` at the end of the batch.
async fn receive(
    store: &JetStreamEventStore,
    stream: &str,
    receiving: &mut Receiving,
) -> Result<Option<StoredBatch>, ApiError> {
    let subject = direct_get(stream);
    let message = tokio::select! {
        message = receiving.messages.next() => message.ok_or(ApiError::Disconnected)?,
        denied = store.api.denied(&subject, receiving.began) => return Err(denied),
        () = tokio::time::sleep(TIMEOUT) => return Err(ApiError::TimedOut { subject }),
    };
    match message.status.map(|status| status.as_u16()) {
        None => {}
        Some(204) => {
            receiving.has_more = number(&message, "Nats-Num-Pending").is_some_and(|pending| pending > 0);
            return Ok(None);
        }
        Some(404) => {
            receiving.has_more = false;
            return Ok(None);
        }
        Some(503) => return Err(ApiError::NoResponders { subject }),
        Some(status) => {
            let description = format!("JetStream responded to {subject} with status {status}");
            return Err(ApiError::Refused { code: 0, description });
        }
    }
    let Some(sequence) = number(&message, "Nats-Sequence") else {
        return Err(ApiError::Malformed { subject });
    };
    Ok(Some(StoredBatch { sequence, previous: None, body: message.payload }))
}

fn direct_get(stream: &str) -> String {
    format!("$JS.API.DIRECT.GET.{stream}")
}

impl JetStreamEventStore {
    /// The last message of a subject, from the leader.
    pub(super) async fn last(&self, subject: &str) -> Result<Option<StoredBatch>, LogUnavailable> {
        self.get_one(&json!({ "last_by_subj": subject })).await
    }

    /// One message, from the leader.
    pub(super) async fn get_one(&self, which: &Value) -> Result<Option<StoredBatch>, LogUnavailable> {
        self.get_from(&self.stream, which).await
    }

    /// One message of a stream, from its leader.
    pub(super) async fn get_from(
        &self,
        stream: &str,
        which: &Value,
    ) -> Result<Option<StoredBatch>, LogUnavailable> {
        let passage = self.enter()?;
        let operation = format!("STREAM.MSG.GET.{stream}");
        let message = match self.api.call::<LeaderMessage>(&operation, Some(which)).await {
            Err(error) if error.code() == Some(code::MESSAGE_NOT_FOUND) => {
                passage.succeeded();
                return Ok(None);
            }
            result => self.finish(passage, result)?.message,
        };
        let body = STANDARD.decode(message.data).map_err(|_| LogUnavailable)?;
        Ok(Some(StoredBatch { sequence: message.seq, previous: None, body: body.into() }))
    }
}
