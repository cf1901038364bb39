//! The requests to JetStream that files need.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Message, Subscriber};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};

use super::health::{BucketHealth, Health};
use super::metadata::{self, ObjectMetadata, stream_name};
use crate::background::{BackgroundTasks, OnPanic};
use crate::bus::jetstream::api::{Api, ApiError, TIMEOUT, code};
use crate::config::StateReplicas;
use crate::files::{FileError, ObjectUrl};
use crate::json::to_bytes;

/// Time limit of a chunk, from when it is sent until it is acknowledged. Chunks of many files may be on the way.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a chunk waits until it may be sent.
const SEND_TIMEOUT: Duration = Duration::from_secs(20);
/// Chunks of all files that may wait for their acknowledgements.
const MAX_UNACKNOWLEDGED: usize = 32;
/// Codes for a bucket, an account or a server without room.
pub(super) const NO_ROOM: [u32; 6] = [
    code::STORE_FAILED,
    code::INSUFFICIENT_STORAGE,
    code::INSUFFICIENT_RESOURCES,
    code::MAX_BYTES_EXCEEDED,
    code::INSUFFICIENT_MEMORY,
    code::ACCOUNT_RESOURCES_EXCEEDED,
];
/// A client of JetStream. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct JetStream {
    pub(super) api: Arc<Api>,
    /// `None` if the configuration turns JetStream off.
    pub(super) replicas: Option<StateReplicas>,
    unacknowledged: Arc<Semaphore>,
    pub(super) health: Arc<BucketHealth>,
    tasks: BackgroundTasks,
}

/// The outcome of a message that was sent to be stored.
pub(super) type Acknowledgement = BoxFuture<'static, Result<(), StoreError>>;

/// Why a request to JetStream has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StoreError {
    /// The stream of the bucket does not exist, or nobody listens to JetStream.
    NoBucket,
    /// The bucket has no such message.
    NoMessage,
    NoRoom,
    Unavailable(String),
}

impl From<StoreError> for FileError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NoBucket => Self::Unavailable("the bucket for files does not exist".to_owned()),
            StoreError::NoMessage => Self::NotFound,
            StoreError::NoRoom => Self::Full(
                "the bucket for files is full (`files.max_total`); try again when files have expired"
                    .to_owned(),
            ),
            StoreError::Unavailable(why) => Self::Unavailable(why),
        }
    }
}

impl From<ApiError> for StoreError {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::NoResponders { .. } => Self::NoBucket,
            ApiError::Refused { code: code::STREAM_NOT_FOUND, .. } => Self::NoBucket,
            ApiError::Refused { code: code::MESSAGE_NOT_FOUND, .. } => Self::NoMessage,
            ApiError::Refused { code, .. } if NO_ROOM.contains(&code) => Self::NoRoom,
            other => Self::Unavailable(other.to_string()),
        }
    }
}

/// What the leader of a bucket says about it.
#[derive(Debug, Default)]
pub(super) struct BucketInfo {
    /// When the stream was created: a stream that was deleted and created again begins with sequence 1.
    pub(super) created: String,
    pub(super) last_sequence: u64,
    /// `None` if files do not expire.
    pub(super) max_age: Option<Duration>,
    /// The size of the bucket; `None` if it has no limit.
    pub(super) max_bytes: Option<u64>,
    /// The bytes in it.
    pub(super) bytes: u64,
}

impl BucketInfo {
    fn new(info: &Value) -> Self {
        let number = |pointer: &str| info.pointer(pointer).and_then(Value::as_u64).unwrap_or_default();
        Self {
            created: info["created"].as_str().unwrap_or_default().to_owned(),
            last_sequence: number("/state/last_seq"),
            max_age: Some(Duration::from_nanos(number("/config/max_age"))).filter(|age| !age.is_zero()),
            // Without a limit, it is negative.
            max_bytes: Some(number("/config/max_bytes")).filter(|bytes| *bytes > 0),
            bytes: number("/state/bytes"),
        }
    }
}

#[derive(Deserialize)]
struct SubjectsInfo {
    state: SubjectsState,
}

#[derive(Deserialize)]
struct SubjectsState {
    /// With the number of their messages.
    #[serde(default)]
    subjects: Option<HashMap<String, u64>>,
}

#[derive(Deserialize)]
struct LastMessage {
    message: MessageData,
}

#[derive(Deserialize)]
struct MessageData {
    /// In Base64.
    #[serde(default)]
    data: String,
}

impl JetStream {
    /// For the bridge's own bucket, and the `allowed` ones that it may read.
    pub(super) fn new(
        api: Api,
        bucket: &str,
        allowed: &BTreeSet<String>,
        replicas: Option<StateReplicas>,
        tasks: BackgroundTasks,
    ) -> Self {
        let health = Arc::new(BucketHealth::new(bucket, allowed));
        let unacknowledged = Arc::new(Semaphore::new(MAX_UNACKNOWLEDGED));
        Self { api: Arc::new(api), replicas, unacknowledged, health, tasks }
    }

    pub(super) fn client(&self) -> &async_nats::Client {
        self.api.client()
    }

    /// Whether the configuration permits JetStream.
    pub(super) fn is_permitted(&self) -> bool {
        self.replicas.is_some()
    }

    /// Whether a request would most likely reach the bridge's own bucket.
    pub(super) fn is_reachable(&self) -> bool {
        self.api.is_connected() && self.health.own.breaker.is_closed()
    }

    /// A request about the stream of a bucket.
    async fn call<T: serde::de::DeserializeOwned>(
        &self,
        bucket: &str,
        operation: &str,
        body: &impl Serialize,
    ) -> Result<T, StoreError> {
        let health = self.health.of(bucket);
        let passage = health.enter()?;
        let operation = format!("{operation}.{}", stream_name(bucket));
        health.finish(passage, self.api.call(&operation, Some(body)).await)
    }

    /// The last message of a subject, from the leader of the stream: a copy may be behind.
    pub(super) async fn last_message(&self, bucket: &str, subject: &str) -> Result<Bytes, StoreError> {
        let request = json!({ "last_by_subj": subject });
        let last: LastMessage = self.call(bucket, "STREAM.MSG.GET", &request).await?;
        let malformed = |_| StoreError::Unavailable("a message of JetStream cannot be read".to_owned());
        STANDARD.decode(last.message.data).map(Bytes::from).map_err(malformed)
    }

    /// Removes all messages of a subject. A failure says nothing about other requests, which need other permissions.
    pub(super) async fn purge(&self, bucket: &str, subject: &str) -> Result<(), StoreError> {
        let operation = format!("STREAM.PURGE.{}", stream_name(bucket));
        let purged: Result<Value, _> = self.api.call(&operation, Some(&json!({ "filter": subject }))).await;
        match purged.map_err(StoreError::from) {
            // Nothing is left of it.
            Ok(_) | Err(StoreError::NoBucket) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// What the leader of the bucket says about it.
    pub(super) async fn info(&self, bucket: &str) -> Result<BucketInfo, StoreError> {
        Ok(BucketInfo::new(&self.call(bucket, "STREAM.INFO", &json!({})).await?))
    }

    /// The subjects of messages that match `filter`, after the first `offset` of them. The server sends 100,000 at most.
    pub(super) async fn subjects(
        &self,
        bucket: &str,
        filter: &str,
        offset: usize,
    ) -> Result<Vec<String>, StoreError> {
        let request = json!({ "subjects_filter": filter, "offset": offset });
        let info: SubjectsInfo = self.call(bucket, "STREAM.INFO", &request).await?;
        Ok(info.state.subjects.unwrap_or_default().into_keys().collect())
    }

    /// Sends a chunk to be stored, after those before it. If the future is dropped before it is done, nothing is sent.
    ///
    /// The chunk counts as unacknowledged until JetStream has answered, whether anyone waits for that or not: an upload
    /// that pauses keeps no other one waiting. Chunks wait in their order, and a file has one chunk waiting at a time, so
    /// that all files make progress.
    pub(super) async fn publish(&self, subject: String, body: Bytes) -> Result<Acknowledgement, StoreError> {
        let waiting = Arc::clone(&self.unacknowledged).acquire_owned();
        let Ok(Ok(permit)) = tokio::time::timeout(SEND_TIMEOUT, waiting).await else {
            let seconds = SEND_TIMEOUT.as_secs();
            return Err(StoreError::Unavailable(format!("JetStream took no chunk within {seconds} s")));
        };
        let this = self.clone();
        let store = async move {
            let _permit = permit;
            let health = &this.health.own;
            let passage = health.enter()?;
            let stored = this.api.publish_once::<Value>(&subject, body, CHUNK_TIMEOUT).await;
            health.finish(passage, stored).map(drop)
        };
        // Unconstrained, so that the first poll certainly queues the message.
        let mut stored = Box::pin(tokio::task::unconstrained(store));
        if let Some(stored) = (&mut stored).now_or_never() {
            return stored.map(|()| std::future::ready(Ok(())).boxed());
        }
        let (result, acknowledgement) = oneshot::channel();
        self.tasks.spawn("file chunk", OnPanic::Log, async move {
            // The file may have been given up.
            let _ = result.send(stored.await);
        });
        let ended = |_| StoreError::Unavailable("the bridge stops".to_owned());
        Ok(acknowledgement.map(move |stored| stored.map_err(ended).flatten()).boxed())
    }

    /// Stores the metadata of an object in place of what was there.
    pub(super) async fn write_metadata(
        &self,
        url: &ObjectUrl,
        metadata: &ObjectMetadata,
    ) -> Result<(), StoreError> {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Rollup", "sub");
        let subject = metadata::metadata_subject(url);
        let health = self.health.of(url.bucket());
        let passage = health.enter()?;
        let written = self.api.request::<Value>(&subject, Some(headers), to_bytes(metadata)).await;
        health.finish(passage, written).map(drop)
    }

    /// Requests the messages of a subject from a sequence on: at most `count` messages, and hardly more than `bytes`.
    pub(super) async fn batch(
        &self,
        bucket: &str,
        subject: &str,
        sequence: u64,
        count: usize,
        bytes: usize,
    ) -> Result<Batch, StoreError> {
        let request = json!({ "batch": count, "max_bytes": bytes, "seq": sequence, "next_by_subj": subject });
        self.direct_get(bucket, &request).await
    }

    /// Requests the last messages of these subjects. A copy of the stream that is behind may answer.
    pub(super) async fn last_messages(&self, bucket: &str, subjects: &[String]) -> Result<Batch, StoreError> {
        self.direct_get(bucket, &json!({ "multi_last": subjects, "batch": subjects.len() })).await
    }

    async fn direct_get(&self, bucket: &str, request: &Value) -> Result<Batch, StoreError> {
        let health = Arc::clone(self.health.of(bucket));
        if !health.breaker.is_closed() {
            return Err(StoreError::Unavailable(health.reason()));
        }
        let (client, inbox) = (self.client(), self.client().new_inbox());
        let disconnected = || StoreError::from(ApiError::Disconnected);
        let messages = client.subscribe(inbox.clone()).await.map_err(|_| disconnected())?;
        let (subject, began) = (format!("$JS.API.DIRECT.GET.{}", stream_name(bucket)), Instant::now());
        let sent = client.publish_with_reply(subject.clone(), inbox, to_bytes(request)).await;
        sent.map_err(|_| disconnected())?;
        Ok(Batch { api: Arc::clone(&self.api), health, subject, began, messages })
    }
}

/// Messages that were requested. Dropping it ends the subscription.
#[derive(Debug)]
pub(super) struct Batch {
    api: Arc<Api>,
    health: Arc<Health>,
    /// That of the request.
    subject: String,
    began: Instant,
    messages: Subscriber,
}

/// A message of a stream.
#[derive(Debug)]
pub(super) struct StreamMessage {
    pub(super) sequence: u64,
    /// Messages of the subject that follow.
    pub(super) pending: u64,
    pub(super) payload: Bytes,
}

impl Batch {
    /// The next message; `None` at the end of the batch.
    pub(super) async fn next(&mut self) -> Result<Option<StreamMessage>, StoreError> {
        let received = self.receive().await;
        let health = &self.health;
        match health.breaker.enter() {
            Some(passage) => health.finish(passage, received),
            // Another request has failed meanwhile.
            None => received.map_err(StoreError::from),
        }
    }

    async fn receive(&mut self) -> Result<Option<StreamMessage>, ApiError> {
        let subject = || self.subject.clone();
        let message = tokio::select! {
            message = self.messages.next() => message.ok_or(ApiError::Disconnected)?,
            denied = self.api.denied(&self.subject, self.began) => return Err(denied),
            () = tokio::time::sleep(TIMEOUT) => return Err(ApiError::TimedOut { subject: subject() }),
        };
        match message.status.map(|status| status.as_u16()) {
            None => {}
            // The end of the batch, or no message at all.
            Some(204 | 404) => return Ok(None),
            Some(503) => return Err(ApiError::NoResponders { subject: subject() }),
            Some(status) => {
                let description = format!("JetStream responded to {} with status {status}", self.subject);
                return Err(ApiError::Refused { code: 0, description });
            }
        }
        let number = |name: &str| number(&message, name);
        let (Some(sequence), pending) = (number("Nats-Sequence"), number("Nats-Num-Pending").unwrap_or(0))
        else {
            return Err(ApiError::Malformed { subject: subject() });
        };
        Ok(Some(StreamMessage { sequence, pending, payload: message.payload }))
    }
}

fn number(message: &Message, name: &str) -> Option<u64> {
    message.headers.as_ref()?.get(name)?.as_str().parse().ok()
}
