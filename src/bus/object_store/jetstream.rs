//! The requests to JetStream that files need.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, HeaderMap, Message, Request, RequestErrorKind, Subscriber};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::metadata::{self, ObjectMetadata, stream_name};
use crate::config::StateReplicas;
use crate::files::{FileError, FileRules, ObjectUrl};
use crate::json::to_bytes;
use crate::text::{error_chain, shorten};

const TIMEOUT: Duration = Duration::from_secs(5);
/// Chunks of all files that may wait for their acknowledgements.
const MAX_UNACKNOWLEDGED: usize = 32;
/// The error of JetStream for a message or stream that does not exist.
const NOT_FOUND: u64 = 404;
/// Codes for a stream that exists with another configuration, and for a stream without room.
const STREAM_NAME_IN_USE: u64 = 10058;
const NO_ROOM: [u64; 6] = [10077, 10047, 10023, 10122, 10028, 10002];
/// Codes for more copies than the server or its cluster can keep.
const NO_REPLICAS: [u64; 2] = [10074, 10005];
/// A smaller bucket is of no use.
const MIN_BUCKET: i64 = 16 << 20;

/// A client of JetStream.
#[derive(Debug, Clone)]
pub(super) struct JetStream {
    client: Client,
    /// `None` if the configuration turns JetStream off.
    replicas: Option<StateReplicas>,
    unacknowledged: Arc<Semaphore>,
}

/// The outcome of a message that was sent to be stored.
pub(super) type Acknowledgement = BoxFuture<'static, Result<(), FileError>>;

/// The stream of a bucket, as ADR-20 describes it.
#[derive(Debug, Serialize)]
struct BucketConfig<'a> {
    name: &'a str,
    description: &'static str,
    subjects: [String; 2],
    retention: &'static str,
    storage: &'static str,
    discard: &'static str,
    /// In nanoseconds.
    max_age: u64,
    max_bytes: i64,
    num_replicas: u64,
    allow_rollup_hdrs: bool,
    allow_direct: bool,
    /// Shows whether the server is new enough.
    allow_msg_ttl: bool,
}

#[derive(Debug, Deserialize)]
struct ApiResponse {
    error: Option<ApiError>,
    #[serde(flatten)]
    rest: Value,
}

#[derive(Debug, Deserialize)]
struct ApiError {
    #[serde(default)]
    code: u64,
    #[serde(default)]
    err_code: u64,
    #[serde(default)]
    description: String,
}

impl ApiError {
    fn into_error(self) -> FileError {
        match self {
            Self { code: NOT_FOUND, .. } => FileError::NotFound,
            Self { err_code, .. } if NO_ROOM.contains(&err_code) => no_room(),
            Self { description, .. } => FileError::Unavailable(shorten(&description, 200)),
        }
    }
}

fn no_room() -> FileError {
    FileError::Full(
        "the bucket for files is full (`files.max_total`); try again when files have expired".to_owned(),
    )
}

impl JetStream {
    pub(super) fn new(client: Client, replicas: Option<StateReplicas>) -> Self {
        Self { client, replicas, unacknowledged: Arc::new(Semaphore::new(MAX_UNACKNOWLEDGED)) }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    async fn request(&self, subject: String, body: &impl Serialize) -> Result<Value, ApiFailure> {
        send(self.client.clone(), subject, HeaderMap::new(), to_bytes(body)).await
    }

    /// Creates the bucket, or changes its limits. The error says why there is none.
    pub(super) async fn provision(&self, bucket: &str, rules: &FileRules) -> Result<(), String> {
        let Some(replicas) = self.replicas else {
            return Err("`nats.jetstream.mode` is `off`".to_owned());
        };
        let stream = stream_name(bucket);
        let mut config = BucketConfig {
            name: &stream,
            description: "Files of a2a-bridge",
            subjects: [format!("$O.{bucket}.C.>"), format!("$O.{bucket}.M.>")],
            retention: "limits",
            storage: "file",
            discard: "new",
            max_age: u64::try_from(rules.ttl.as_nanos()).unwrap_or(u64::MAX),
            max_bytes: i64::try_from(rules.max_total).unwrap_or(i64::MAX),
            num_replicas: replicas.first_choice() as u64,
            allow_rollup_hdrs: true,
            allow_direct: true,
            allow_msg_ttl: true,
        };
        let created = self.create(&stream, &mut config, replicas).await;
        let updated = match created {
            Err(ApiFailure::Api(ApiError { err_code: STREAM_NAME_IN_USE, .. })) => {
                // Another bridge may have created it with other replicas, which an operator may have chosen.
                let info = self.request(format!("$JS.API.STREAM.INFO.{stream}"), &json!({})).await;
                let found = |key: &str| info.as_ref().ok()?.get("config")?.get(key).cloned();
                if let Some(replicas) = found("num_replicas").and_then(|found| found.as_u64()) {
                    config.num_replicas = replicas;
                }
                // A bucket that had to be smaller stays as it is.
                if let Some(max_bytes) =
                    found("max_bytes").and_then(|found| found.as_i64()).filter(|found| *found > 0)
                {
                    config.max_bytes = config.max_bytes.min(max_bytes);
                }
                self.request(format!("$JS.API.STREAM.UPDATE.{stream}"), &config).await
            }
            created => created,
        };
        match updated {
            // Older servers drop what they do not know, and have no batches either.
            Ok(info) if info.pointer("/config/allow_msg_ttl").and_then(Value::as_bool) == Some(true) => {
                Ok(())
            }
            Ok(_) => Err("files by reference need nats-server 2.11 or newer".to_owned()),
            Err(ApiFailure::NoResponders) => Err("JetStream is not enabled".to_owned()),
            Err(ApiFailure::Api(error)) => Err(shorten(&error.description, 200)),
            Err(ApiFailure::Failed(why)) => Err(why),
        }
    }

    /// Creates the stream. The number of copies and the size can be smaller than the configuration says, if the server has no
    /// more.
    async fn create(
        &self,
        stream: &str,
        config: &mut BucketConfig<'_>,
        replicas: StateReplicas,
    ) -> Result<Value, ApiFailure> {
        loop {
            let created = self.request(format!("$JS.API.STREAM.CREATE.{stream}"), config).await;
            let Err(ApiFailure::Api(ApiError { err_code, .. })) = &created else { return created };
            let is_reducible = replicas == StateReplicas::Auto && config.num_replicas > 1;
            if NO_REPLICAS.contains(err_code) && is_reducible {
                config.num_replicas = 1;
            } else if NO_ROOM.contains(err_code) && config.max_bytes > MIN_BUCKET {
                config.max_bytes /= 2;
                tracing::debug!(
                    max_bytes = config.max_bytes,
                    "JetStream has little storage left; the bucket for files is smaller"
                );
            } else {
                return created;
            }
        }
    }

    /// The last message of a subject, from the leader of the stream: a copy may be behind.
    pub(super) async fn last_message(&self, bucket: &str, subject: &str) -> Result<Bytes, FileError> {
        let request = format!("$JS.API.STREAM.MSG.GET.{}", stream_name(bucket));
        let reply = self.request(request, &json!({ "last_by_subj": subject })).await?;
        let data = reply.pointer("/message/data").and_then(Value::as_str).unwrap_or_default();
        STANDARD.decode(data).map(Bytes::from).map_err(|_| FileError::NotFound)
    }

    pub(super) async fn purge(&self, bucket: &str, subject: &str) -> Result<(), FileError> {
        let request = format!("$JS.API.STREAM.PURGE.{}", stream_name(bucket));
        self.request(request, &json!({ "filter": subject })).await?;
        Ok(())
    }

    /// The subjects of the bucket that match `filter`, with the number of their messages.
    pub(super) async fn subjects(&self, bucket: &str, filter: &str) -> Result<Vec<(String, u64)>, FileError> {
        let request = format!("$JS.API.STREAM.INFO.{}", stream_name(bucket));
        let info = self.request(request, &json!({ "subjects_filter": filter })).await?;
        let subjects = info.pointer("/state/subjects").and_then(Value::as_object).into_iter().flatten();
        Ok(subjects.map(|(subject, count)| (subject.clone(), count.as_u64().unwrap_or(0))).collect())
    }

    /// Sends a message to be stored, after those before it. If the future is dropped before it is done, nothing is sent.
    pub(super) async fn publish(&self, subject: String, body: Bytes) -> Acknowledgement {
        let permit = Arc::clone(&self.unacknowledged).acquire_owned().await;
        let client = self.client.clone();
        let store = async move {
            let _permit = permit;
            send(client, subject, HeaderMap::new(), body).await.map(drop).map_err(FileError::from)
        };
        // Unconstrained, so that the first poll certainly queues the message.
        let mut acknowledgement = Box::pin(tokio::task::unconstrained(store));
        match (&mut acknowledgement).now_or_never() {
            Some(stored) => Box::pin(std::future::ready(stored)),
            None => acknowledgement,
        }
    }

    /// Stores the metadata of an object in place of what was there.
    pub(super) async fn write_metadata(
        &self,
        url: &ObjectUrl,
        metadata: &ObjectMetadata,
    ) -> Result<(), FileError> {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Rollup", "sub");
        let subject = metadata::metadata_subject(url);
        send(self.client.clone(), subject, headers, to_bytes(metadata)).await?;
        Ok(())
    }

    /// Requests the messages of a subject from a sequence on: at most `count` messages, and hardly more than `bytes`.
    pub(super) async fn batch(
        &self,
        bucket: &str,
        subject: &str,
        sequence: u64,
        count: usize,
        bytes: usize,
    ) -> Result<Batch, FileError> {
        let request = json!({ "batch": count, "max_bytes": bytes, "seq": sequence, "next_by_subj": subject });
        let inbox = self.client.new_inbox();
        let unavailable = |error: String| FileError::Unavailable(error);
        let messages =
            self.client.subscribe(inbox.clone()).await.map_err(|error| unavailable(error_chain(&error)))?;
        let to = format!("$JS.API.DIRECT.GET.{}", stream_name(bucket));
        let sent = self.client.publish_with_reply(to, inbox, to_bytes(&request)).await;
        sent.map_err(|error| unavailable(error_chain(&error)))?;
        Ok(Batch { messages })
    }
}

/// Sends a request to JetStream, or a message to be stored, and returns the reply.
async fn send(client: Client, subject: String, headers: HeaderMap, body: Bytes) -> Result<Value, ApiFailure> {
    let mut request = Request::new().payload(body).timeout(Some(TIMEOUT));
    if !headers.is_empty() {
        request = request.headers(headers);
    }
    let reply = client.send_request(subject, request).await.map_err(|error| match error.kind() {
        RequestErrorKind::NoResponders => ApiFailure::NoResponders,
        RequestErrorKind::TimedOut => {
            ApiFailure::Failed(format!("no reply from JetStream within {} s", TIMEOUT.as_secs()))
        }
        _ => ApiFailure::Failed(error_chain(&error)),
    })?;
    let response: ApiResponse = serde_json::from_slice(&reply.payload)
        .map_err(|error| ApiFailure::Failed(format!("unexpected reply of JetStream: {error}")))?;
    match response.error {
        Some(error) => Err(ApiFailure::Api(error)),
        None => Ok(response.rest),
    }
}

#[derive(Debug)]
enum ApiFailure {
    NoResponders,
    Api(ApiError),
    Failed(String),
}

impl From<ApiFailure> for FileError {
    fn from(failure: ApiFailure) -> Self {
        match failure {
            ApiFailure::NoResponders => Self::Unavailable("JetStream does not respond".to_owned()),
            ApiFailure::Api(error) => error.into_error(),
            ApiFailure::Failed(why) => Self::Unavailable(why),
        }
    }
}

/// Messages that were requested. Dropping it ends the subscription.
#[derive(Debug)]
pub(super) struct Batch {
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
    pub(super) async fn next(&mut self) -> Result<Option<StreamMessage>, FileError> {
        let message = match tokio::time::timeout(TIMEOUT, self.messages.next()).await {
            Ok(Some(message)) => message,
            Ok(None) => return Err(FileError::Unavailable("the connection to NATS is closed".to_owned())),
            Err(_) => return Err(FileError::Unavailable("JetStream does not respond".to_owned())),
        };
        match message.status.map(|status| status.as_u16()) {
            None => {}
            // The end of the batch, or no message at all.
            Some(204 | 404) => return Ok(None),
            Some(503) => {
                return Err(FileError::Unavailable(
                    "the bucket does not exist or allows no direct access".to_owned(),
                ));
            }
            Some(status) => {
                return Err(FileError::Unavailable(format!("JetStream responded with status {status}")));
            }
        }
        let number = |name: &str| number(&message, name);
        let (Some(sequence), pending) = (number("Nats-Sequence"), number("Nats-Num-Pending").unwrap_or(0))
        else {
            return Err(FileError::Unavailable("a message of JetStream has no sequence".to_owned()));
        };
        Ok(Some(StreamMessage { sequence, pending, payload: message.payload }))
    }
}

fn number(message: &Message, name: &str) -> Option<u64> {
    message.headers.as_ref()?.get(name)?.as_str().parse().ok()
}
