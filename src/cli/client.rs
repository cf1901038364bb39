//! The NATS client of the commands: connection options, requests and their replies.
//!
//! Every request has its own inbox, whose subscription ends with the request.

use std::path::PathBuf;
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, Event, HeaderMap, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::sync::watch;

use super::{CliError, CliResult, UNAVAILABLE, USAGE};
use crate::bus::connect::{self, credentials::NatsCredentials};
use crate::bus::subject::Subjects;
use crate::config::{self, without_user_info};
use crate::text::error_chain;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For requests that the bridge answers without calling the agent.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
const DEFAULT_URL: &str = "nats://127.0.0.1:4222";
const DEFAULT_PREFIX: &str = "a2a";
const DEFAULT_INBOX_PREFIX: &str = "_INBOX";
/// Room in a NATS message for the headers.
const MAX_HEADERS: usize = 1024;

#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "NATS")]
pub(super) struct NatsArgs {
    /// Server URL, or several separated by commas
    #[arg(long, global = true, value_name = "URL", env = "NATS_URL", default_value = DEFAULT_URL)]
    nats: String,
    /// Authenticate with a `.creds` file
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CREDS")]
    creds: Option<PathBuf>,
    /// Authenticate with the nkey seed in this file
    #[arg(long, global = true, value_name = "FILE", env = "NATS_NKEY")]
    nkey: Option<PathBuf>,
    /// Authenticate with a token; prefer the variable, because other users can see arguments
    #[arg(long, global = true, env = "NATS_TOKEN")]
    token: Option<String>,
    /// Authenticate with a user name and `--password`
    #[arg(long, global = true, env = "NATS_USER")]
    user: Option<String>,
    /// Password for `--user`; prefer the variable, because other users can see arguments
    #[arg(long, global = true, env = "NATS_PASSWORD", requires = "user")]
    password: Option<String>,
    /// PEM file with the certificate authorities to trust
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CA")]
    tls_ca: Option<PathBuf>,
    /// PEM file with a client certificate
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the private key of the client certificate
    #[arg(long, global = true, value_name = "FILE", env = "NATS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Prefix of the bridge's subjects (`nats.subject_prefix` in its configuration)
    #[arg(long, global = true, env = "A2A_BRIDGE_PREFIX", default_value = DEFAULT_PREFIX)]
    prefix: String,
    /// Prefix of the subjects for replies; with private inboxes, the one that the NATS user may subscribe to
    #[arg(long, global = true, value_name = "PREFIX", env = "NATS_INBOX_PREFIX", default_value = DEFAULT_INBOX_PREFIX, value_parser = checked_inbox_prefix)]
    inbox_prefix: String,
}

fn checked_inbox_prefix(text: &str) -> Result<String, String> {
    config::values::inbox_prefix(text)
}

impl NatsArgs {
    pub(super) async fn connect(&self) -> CliResult<NatsClient> {
        let subjects = Subjects::new(&self.prefix).map_err(|error| {
            CliError::new(USAGE, error).hint(
                "set `--prefix` (or A2A_BRIDGE_PREFIX) to the bridge's `nats.subject_prefix`; the default is `a2a`",
            )
        })?;
        let config = self.nats_config()?;
        let servers: Vec<_> = config.url.iter().map(without_user_info).collect();
        let servers = servers.join(", ");
        let (denied, denials) = watch::channel(None);
        let credentials = NatsCredentials::new(&config).map_err(|error| {
            CliError::new(USAGE, error).hint("check the file given with `--creds` (or NATS_CREDS)")
        })?;
        let options = connect::options(&config, &credentials);
        let options = options.connection_timeout(CONNECT_TIMEOUT).event_callback(move |event| {
            let denied = denied.clone();
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
                _ => (UNAVAILABLE, "is a nats-server running there? Set its URL with `--nats` or NATS_URL"),
            };
            CliError::new(code, error).context(format!("cannot connect to NATS at {servers}")).hint(hint)
        })?;
        Ok(NatsClient { client, subjects, servers, denials })
    }

    fn nats_config(&self) -> CliResult<config::NatsConfig> {
        let read_seed = |path: &PathBuf| {
            std::fs::read_to_string(path).map(|seed| seed.trim().to_owned().into()).map_err(|error| {
                CliError::new(USAGE, error)
                    .context(format!("cannot read the nkey seed file {}", path.display()))
                    .hint("check `--nkey` (or NATS_NKEY)")
            })
        };
        let tls = config::TlsFiles {
            ca: self.tls_ca.clone(),
            cert: self.tls_cert.clone(),
            key: self.tls_key.clone(),
            required: false,
        };
        Ok(config::NatsConfig {
            agent_protocol: None,
            url: self.nats.split(',').map(|url| config::NatsUrl(url.trim().to_owned())).collect(),
            credentials: self.creds.clone(),
            nkey: self.nkey.as_ref().map(read_seed).transpose()?,
            token: self.token.clone().map(Into::into),
            user: self.user.clone(),
            password: self.password.clone().map(Into::into),
            tls: (tls.ca.is_some() || tls.cert.is_some()).then_some(tls),
            subject_prefix: self.prefix.clone(),
            reply_prefixes: Vec::new(),
            inbox_prefix: self.inbox_prefix.clone(),
        })
    }

    /// The flags to repeat in a command that is suggested to the user, without secrets.
    pub(super) fn suggested_flags(&self) -> String {
        let mut flags = String::new();
        if self.nats != DEFAULT_URL && std::env::var("NATS_URL").as_ref() != Ok(&self.nats) {
            flags.push_str(&format!(" --nats {}", without_user_info(&self.nats)));
        }
        if self.prefix != DEFAULT_PREFIX && std::env::var("A2A_BRIDGE_PREFIX").as_ref() != Ok(&self.prefix) {
            flags.push_str(&format!(" --prefix {}", self.prefix));
        }
        let inbox = &self.inbox_prefix;
        if inbox != DEFAULT_INBOX_PREFIX && std::env::var("NATS_INBOX_PREFIX").as_ref() != Ok(inbox) {
            flags.push_str(&format!(" --inbox-prefix {inbox}"));
        }
        flags
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
