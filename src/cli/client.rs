//! The NATS client of the commands: connection, requests and their replies.
//!
//! Every request has its own inbox, whose subscription ends with the request.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, Event, HeaderMap, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::sync::watch;

use super::nats_args::{Connection, NatsArgs};
use super::{CliError, CliResult, UNAVAILABLE, USAGE};
use crate::bus::connect::{self, credentials::NatsCredentials, events::ConnectionEvents};
use crate::bus::subject::Subjects;
use crate::config::without_user_info;
use crate::text::error_chain;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For requests that the bridge answers without calling the agent.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Room in a NATS message for the headers.
const MAX_HEADERS: usize = 1024;

impl NatsArgs {
    pub(super) async fn connect(&self) -> CliResult<NatsClient> {
        let Connection { config, source } = self.resolve()?;
        let subjects = Subjects::new(&config.subject_prefix).map_err(|error| {
            CliError::new(USAGE, error).hint(
                "set `--prefix` (or A2A_BRIDGE_PREFIX) to the bridge's `nats.subject_prefix`; the default is `a2a`",
            )
        })?;
        let servers: Vec<_> = config.url.iter().map(without_user_info).collect();
        let mut servers = servers.join(", ");
        if let Some(source) = &source {
            servers = format!("{servers} ({source})");
        }
        let (denied, denials) = watch::channel(None);
        let credentials = NatsCredentials::new(&config).map_err(|error| {
            CliError::new(USAGE, error).hint(match &source {
                Some(source) => format!("check the credentials file of the {source}, or use `--creds FILE`"),
                None => "check the file given with `--creds` (or NATS_CREDS)".to_owned(),
            })
        })?;
        let options = connect::options(&config, &credentials);
        let events = Arc::<ConnectionEvents>::default();
        let observed = Arc::clone(&events);
        let options = options.connection_timeout(CONNECT_TIMEOUT).event_callback(move |event| {
            let denied = denied.clone();
            observed.observe(&event);
            async move {
                if let Event::ServerError(error) = event {
                    denied.send_replace(Some(error.to_string()));
                }
            }
        });
        let client = options.connect(&config.url).await.map_err(|error| {
            let (code, hint) = match error.kind() {
                ConnectErrorKind::ServerParse => (USAGE, "a server URL looks like `nats://host:4222`"),
                ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => (
                    UNAVAILABLE,
                    "the server rejects these credentials: try `--creds FILE`, `--user` and `--password`, `--token` or `--nkey FILE`",
                ),
                ConnectErrorKind::Tls => (
                    UNAVAILABLE,
                    "try `--tls-ca FILE` with the server's certificate authority, or a `tls://` URL",
                ),
                _ => (UNAVAILABLE, "is a nats-server running there? Set its URL with `--nats` or NATS_URL, or choose a `--context`"),
            };
            CliError::new(code, error).context(format!("cannot connect to NATS at {servers}")).hint(hint)
        })?;
        Ok(NatsClient { client, subjects, servers, denials, events })
    }
}

/// Why a request got no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoReply {
    #[error("no bridge serves this subject")]
    NoResponders,
    #[error("no reply within {}s", .0.as_secs())]
    Timeout(Duration),
    #[error("permission denied by NATS: {0}")]
    Denied(String),
    #[error("the connection to NATS is closed")]
    Closed,
}

impl From<NoReply> for CliError {
    fn from(reason: NoReply) -> Self {
        let hint = match reason {
            NoReply::NoResponders => "`a2a-bridge agents` lists the agents on NATS",
            NoReply::Timeout(_) => "try again; `a2a-bridge agents` lists the agents on NATS",
            NoReply::Denied(_) => {
                "the NATS user lacks a permission for this subject. If it is an inbox, set `--inbox-prefix` (or NATS_INBOX_PREFIX), such as `_INBOX.alice`; see deploy/nats-permissions.conf and \"Security model\" in the manual"
            }
            NoReply::Closed => "try again",
        };
        Self::new(UNAVAILABLE, reason).hint(hint)
    }
}

#[derive(Debug)]
pub(super) struct NatsClient {
    pub(super) client: Client,
    pub(super) subjects: Subjects,
    pub(super) servers: String,
    /// The latest error of the server. NATS reports a denied permission this way, not as a reply.
    denials: watch::Receiver<Option<String>>,
    pub(super) events: Arc<ConnectionEvents>,
}

impl NatsClient {
    pub(super) async fn request(
        &self,
        subject: String,
        headers: HeaderMap,
        body: Bytes,
    ) -> CliResult<Replies> {
        let max = self.client.max_payload();
        if body.len() + MAX_HEADERS > max {
            let message = format!("the request has {} bytes; NATS accepts at most {max}", body.len());
            return Err(CliError::msg(USAGE, message)
                .hint("send less, or send files as URLs; `max_payload` of nats-server is the limit"));
        }
        let inbox = self.client.new_inbox();
        let mut denials = self.denials.clone();
        denials.mark_unchanged();
        let messages = self.subscribe(inbox.clone()).await?;
        let subjects = [format!("\"{subject}\""), format!("\"{inbox}\"")];
        self.client
            .publish_with_reply_and_headers(subject, inbox, headers, body)
            .await
            .map_err(|error| CliError::msg(UNAVAILABLE, error_chain(&error)))?;
        Ok(Replies { messages, denials, subjects })
    }

    pub(super) async fn subscribe(&self, subject: String) -> CliResult<Subscriber> {
        self.client
            .subscribe(subject)
            .await
            .map_err(|error| CliError::msg(UNAVAILABLE, error_chain(&error)).hint("try again"))
    }

    /// A request with a single reply that the bridge gives without calling the agent.
    pub(super) async fn request_one(&self, subject: String, body: Bytes) -> CliResult<Message> {
        let mut replies = self.request(subject, HeaderMap::new(), body).await?;
        Ok(replies.next_within(REPLY_TIMEOUT).await?)
    }
}

/// The replies to one request. Dropping them ends the subscription.
#[derive(Debug)]
pub(super) struct Replies {
    messages: Subscriber,
    denials: watch::Receiver<Option<String>>,
    /// The subject and the inbox of the request, as errors of the server quote them.
    subjects: [String; 2],
}

impl Replies {
    pub(super) async fn next_within(&mut self, timeout: Duration) -> Result<Message, NoReply> {
        tokio::time::timeout(timeout, self.next()).await.unwrap_or(Err(NoReply::Timeout(timeout)))
    }

    pub(super) async fn next(&mut self) -> Result<Message, NoReply> {
        // A denied discovery request, which runs at the same time, does not end this request.
        let concerns_us = |error: &Option<String>| {
            error.as_ref().is_some_and(|error| {
                !error.contains("Permissions Violation")
                    || self.subjects.iter().any(|subject| error.contains(subject))
            })
        };
        let message = tokio::select! {
            biased;
            message = self.messages.next() => message.ok_or(NoReply::Closed)?,
            Ok(denial) = self.denials.wait_for(concerns_us) => {
                return Err(NoReply::Denied(denial.clone().unwrap_or_default()));
            }
        };
        // The end of a stream is an empty message too, so check the status and not the body.
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            return Err(NoReply::NoResponders);
        }
        Ok(message)
    }
}

pub(super) fn parse_json(message: &Message) -> CliResult<Value> {
    serde_json::from_slice(&message.payload).map_err(|error| {
        CliError::internal(error)
            .context("the reply is not JSON; is this the subject of an a2a-bridge?")
            .hint("`a2a-bridge agents --json` shows which program serves the agent")
    })
}

/// Lenient access to JSON from outside, by JSON pointer: a field of the wrong type counts as missing.
pub(super) trait JsonFields {
    fn text(&self, pointer: &str) -> Option<&str>;
    fn list(&self, pointer: &str) -> &[Value];
}

impl JsonFields for Value {
    fn text(&self, pointer: &str) -> Option<&str> {
        self.pointer(pointer)?.as_str()
    }

    fn list(&self, pointer: &str) -> &[Value] {
        self.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }
}
