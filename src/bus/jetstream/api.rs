//! Requests to JetStream, as they are on the wire.
//!
//! The bridge needs a few requests only. It does not use the JetStream layer of the client library: that reports error
//! 10164, which is a lost race, like any other error, its writes cannot have both an expected revision and a time to
//! live, and it waits for a timeout when the server denies a subject.

use std::sync::Arc;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, HeaderMap, Message, Request, RequestErrorKind};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::bus::connect::events::ConnectionEvents;
use crate::json;
use crate::text::shorten;

/// Time limit of a request, including retries.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);
/// First and maximum pause before a request is repeated that had no effect.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(400));
/// Requests at the same time; more have to wait.
const MAX_IN_FLIGHT: usize = 1024;
/// Maximum bytes of the server's description of an error.
const MAX_DESCRIPTION: usize = 200;

/// Error codes of the server.
pub(in crate::bus) mod code {
    pub(crate) const ACCOUNT_RESOURCES_EXCEEDED: u32 = 10002;
    pub(crate) const NO_SUITABLE_PEERS: u32 = 10005;
    pub(crate) const TEMPORARILY_UNAVAILABLE: u32 = 10008;
    pub(crate) const INSUFFICIENT_RESOURCES: u32 = 10023;
    pub(crate) const INSUFFICIENT_MEMORY: u32 = 10028;
    pub(crate) const MESSAGE_NOT_FOUND: u32 = 10037;
    pub(crate) const NOT_ENABLED_FOR_ACCOUNT: u32 = 10039;
    pub(crate) const SEQUENCE_NOT_FOUND: u32 = 10043;
    pub(crate) const INSUFFICIENT_STORAGE: u32 = 10047;
    pub(crate) const MESSAGE_TOO_LARGE: u32 = 10054;
    pub(crate) const MESSAGE_NOT_DELETED: u32 = 10057;
    pub(crate) const NAME_IN_USE: u32 = 10058;
    pub(crate) const STREAM_NOT_FOUND: u32 = 10059;
    pub(crate) const WRONG_LAST_SEQUENCE: u32 = 10071;
    pub(crate) const REPLICAS_NOT_SUPPORTED: u32 = 10074;
    pub(crate) const NOT_ENABLED: u32 = 10076;
    /// The bucket is full.
    pub(crate) const STORE_FAILED: u32 = 10077;
    /// The limit of the account, or of the server, for the sizes of streams.
    pub(crate) const MAX_BYTES_EXCEEDED: u32 = 10122;
    /// On a cluster: another write to the same key is in progress.
    pub(crate) const WRONG_LAST_SEQUENCE_IN_FLIGHT: u32 = 10164;
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApiError {
    /// JetStream is disabled, or a stream has no leader. The request had no effect.
    #[error("no server responds to {subject}; JetStream is disabled, or a stream has no leader")]
    NoResponders { subject: String },
    /// The request was not sent.
    #[error("the bridge is not connected to NATS")]
    Disconnected,
    /// The request may still take effect.
    #[error("no response to {subject} in time")]
    TimedOut { subject: String },
    /// The request had no effect.
    #[error("the NATS user of the bridge may not publish to {subject}")]
    Denied { subject: String },
    #[error("the request exceeds `max_payload` of the NATS server")]
    TooLarge,
    #[error("{description} (JetStream error {code})")]
    Refused { code: u32, description: String },
    #[error("the response to {subject} cannot be read")]
    Malformed { subject: String },
}

impl ApiError {
    pub(in crate::bus) fn code(&self) -> Option<u32> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the request had no effect and may succeed soon, for example after the election of a leader.
    fn is_temporary(&self) -> bool {
        matches!(self, Self::NoResponders { .. })
            || self.code().is_some_and(|code| code == code::TEMPORARILY_UNAVAILABLE || code == 0)
    }
}

/// The part of a response that says whether it is an error.
#[derive(Deserialize)]
struct Failure {
    error: Option<ServerError>,
}

#[derive(Deserialize)]
struct ServerError {
    #[serde(default)]
    err_code: u32,
    #[serde(default)]
    description: String,
}

#[derive(Debug)]
pub(crate) struct Api {
    client: Client,
    events: Arc<ConnectionEvents>,
    in_flight: Semaphore,
}

impl Api {
    pub(crate) fn new(client: Client, events: Arc<ConnectionEvents>) -> Self {
        Self { client, events, in_flight: Semaphore::new(MAX_IN_FLIGHT) }
    }

    pub(in crate::bus) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) async fn connected(&self) {
        self.events.connected().await;
    }

    pub(in crate::bus) fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Waits until the server denies a publication to a subject, from `since` on.
    pub(in crate::bus) async fn denied(&self, subject: &str, since: std::time::Instant) -> ApiError {
        self.events.denied(subject, since).await;
        ApiError::Denied { subject: subject.to_owned() }
    }

    /// A request to the API of JetStream, with JSON in both directions.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        operation: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ApiError> {
        let body = body.map_or_else(Bytes::new, |body| json::to_bytes(body));
        self.request(&format!("$JS.API.{operation}"), None, body).await
    }

    /// Like [`Self::call`], without retries: if nobody listens, that is the answer.
    pub(in crate::bus) async fn call_once<T: DeserializeOwned>(
        &self,
        operation: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, ApiError> {
        let body = body.map_or_else(Bytes::new, |body| json::to_bytes(body));
        self.publish_once(&format!("$JS.API.{operation}"), body, TIMEOUT).await
    }

    /// Sends a message to be stored, without retries: they would change the order of messages. The first poll queues the
    /// message behind those before it.
    pub(in crate::bus) async fn publish_once<T: DeserializeOwned>(
        &self,
        subject: &str,
        body: Bytes,
        timeout: Duration,
    ) -> Result<T, ApiError> {
        let response = self.attempt(subject, None, body, Instant::now() + timeout).await?;
        read(subject, &response)
    }

    /// A request whose response does not matter.
    pub(super) async fn probe(&self, subject: &str, headers: HeaderMap, body: Bytes) -> Result<(), ApiError> {
        self.attempt(subject, Some(headers), body, Instant::now() + TIMEOUT).await.map(drop)
    }

    /// A request that is repeated while it has no effect and may succeed soon.
    pub(in crate::bus) async fn request<T: DeserializeOwned>(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        body: Bytes,
    ) -> Result<T, ApiError> {
        let deadline = Instant::now() + TIMEOUT;
        let (mut pause, max_pause) = RETRY_PAUSE;
        loop {
            let response = self.attempt(subject, headers.clone(), body.clone(), deadline).await;
            match response.and_then(|message| read(subject, &message)) {
                Err(error) if error.is_temporary() && Instant::now() + pause < deadline => {}
                result => return result,
            }
            tokio::time::sleep(pause).await;
            pause = max_pause.min(2 * pause);
        }
    }

    async fn attempt(
        &self,
        subject: &str,
        headers: Option<HeaderMap>,
        body: Bytes,
        deadline: Instant,
    ) -> Result<Message, ApiError> {
        if !self.is_connected() {
            return Err(ApiError::Disconnected);
        }
        let permit = tokio::time::timeout_at(deadline, self.in_flight.acquire()).await;
        // Nothing was sent.
        let Ok(Ok(_permit)) = permit else { return Err(ApiError::Disconnected) };
        let began = std::time::Instant::now();
        let request = Request::new().payload(body).timeout(None);
        let request = match headers {
            Some(headers) => request.headers(headers),
            None => request,
        };
        let named = |error: fn(String) -> ApiError| error(subject.to_owned());
        tokio::select! {
            response = self.client.send_request(subject.to_owned(), request) => response.map_err(|error| {
                match error.kind() {
                    RequestErrorKind::NoResponders => named(|subject| ApiError::NoResponders { subject }),
                    RequestErrorKind::MaxPayloadExceeded => ApiError::TooLarge,
                    _ => named(|subject| ApiError::TimedOut { subject }),
                }
            }),
            denied = self.denied(subject, began) => Err(denied),
            () = tokio::time::sleep_until(deadline) => Err(named(|subject| ApiError::TimedOut { subject })),
        }
    }
}

fn read<T: DeserializeOwned>(subject: &str, message: &Message) -> Result<T, ApiError> {
    let malformed = || ApiError::Malformed { subject: subject.to_owned() };
    let failure: Failure = serde_json::from_slice(&message.payload).map_err(|_| malformed())?;
    match failure.error {
        Some(ServerError { err_code, description }) => {
            Err(ApiError::Refused { code: err_code, description: shorten(&description, MAX_DESCRIPTION) })
        }
        None => serde_json::from_slice(&message.payload).map_err(|_| malformed()),
    }
}
