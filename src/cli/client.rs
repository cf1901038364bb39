//! The commands' side of the mesh: a connection, and requests that cannot leak or hang unnoticed.
//!
//! Commands use nothing but the contract, so they work from any machine that reaches NATS. Each request
//! has an inbox of its own, which ends with it.

use crate::text::error_chain;
use std::path::PathBuf;
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, Event, HeaderMap, Message, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde_json::Value;
use tokio::sync::watch;

use super::{DEFECT, Failure, UNAVAILABLE, USAGE};
use crate::bus::connect;
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};
use crate::config::{self, without_user_info};

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a reply to a short question may take.
pub(super) const SHORT: Duration = Duration::from_secs(10);
const DEFAULT_URL: &str = "nats://127.0.0.1:4222";
const DEFAULT_PREFIX: &str = "a2a";

/// Where NATS is, and who asks.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "NATS")]
pub(super) struct Connection {
    /// The server, or several with commas between them
    #[arg(long, global = true, value_name = "URL", env = "NATS_URL", hide_env_values = true, default_value = DEFAULT_URL)]
    nats: String,
    /// Log in with a `.creds` file
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CREDS", hide_env_values = true)]
    creds: Option<PathBuf>,
    /// Log in with the nkey seed in this file
    #[arg(long, global = true, value_name = "FILE", env = "NATS_NKEY", hide_env_values = true)]
    nkey: Option<PathBuf>,
    /// Log in with a token; better given by the variable, as others see arguments
    #[arg(long, global = true, env = "NATS_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Log in with a user name and `--password`
    #[arg(long, global = true, env = "NATS_USER", hide_env_values = true)]
    user: Option<String>,
    /// The password of `--user`; better given by the variable, as others see arguments
    #[arg(long, global = true, env = "NATS_PASSWORD", hide_env_values = true, requires = "user")]
    password: Option<String>,
    /// PEM file with the authorities to trust
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CA", hide_env_values = true)]
    tls_ca: Option<PathBuf>,
    /// PEM file with a client certificate
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "NATS_CERT",
        hide_env_values = true,
        requires = "tls_key"
    )]
    tls_cert: Option<PathBuf>,
    /// PEM file with the key of the client certificate
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        env = "NATS_KEY",
        hide_env_values = true,
        requires = "tls_cert"
    )]
    tls_key: Option<PathBuf>,
    /// First word of the bridge's subjects (`nats.subject_prefix` in its settings)
    #[arg(long, global = true, env = "A2A_BRIDGE_PREFIX", hide_env_values = true, default_value = DEFAULT_PREFIX)]
    prefix: String,
}

impl Connection {
    /// Connects, once.
    pub(super) async fn connect(&self) -> Result<Mesh, Failure> {
        let subjects = Subjects::new(&self.prefix).map_err(|error| {
            Failure::new(USAGE, error).hint(
                "give `--prefix` (or A2A_BRIDGE_PREFIX) what the bridge has as `nats.subject_prefix`; it is `a2a` by default",
            )
        })?;
        let settings = self.settings()?;
        let servers: Vec<_> = settings.url.iter().map(without_user_info).collect();
        let servers = servers.join(", ");
        let (refused, refusals) = watch::channel(None);
        let options = connect::options(&settings).await.map_err(|error| {
            Failure::new(USAGE, error).hint("check the file given with `--creds` (or NATS_CREDS)")
        })?;
        let options = options.connection_timeout(CONNECT).event_callback(move |event| {
            let refused = refused.clone();
            async move {
                if let Event::ServerError(error) = event {
                    refused.send_replace(Some(error.to_string()));
                }
            }
        });
        let client = options.connect(&settings.url).await.map_err(|error| {
            let kind = error.kind();
            let code = if kind == ConnectErrorKind::ServerParse {
                USAGE
            } else {
                UNAVAILABLE
            };
            let hint = match kind {
                ConnectErrorKind::ServerParse => "a server looks like `nats://host:4222`",
                ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation => {
                    "the server wants other credentials: try `--creds FILE`, `--user` and `--password`, `--token` or `--nkey FILE`"
                }
                ConnectErrorKind::Tls => "try `--tls-ca FILE` with the server's authority, or a `tls://` address",
                _ => "is a nats-server running there? `--nats URL` or NATS_URL says where to look",
            };
            Failure::new(code, anyhow::anyhow!("cannot connect to NATS at {servers}: {}", error_chain(&error))).hint(hint)
        })?;
        Ok(Mesh { client, subjects, servers, refusals })
    }

    fn settings(&self) -> Result<config::NatsConfig, Failure> {
        let seed = |path: &PathBuf| {
            std::fs::read_to_string(path).map(|seed| seed.trim().to_owned().into()).map_err(|error| {
                let error = anyhow::Error::new(error)
                    .context(format!("cannot read the nkey seed file {}", path.display()));
                Failure::new(USAGE, error).hint("check `--nkey` (or NATS_NKEY)")
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
            nkey: self.nkey.as_ref().map(seed).transpose()?,
            token: self.token.clone().map(Into::into),
            user: self.user.clone(),
            password: self.password.clone().map(Into::into),
            tls: (tls.ca.is_some() || tls.cert.is_some()).then_some(tls),
            subject_prefix: self.prefix.clone(),
            reply_prefixes: Vec::new(),
        })
    }

    /// What has to be repeated in a command that is suggested to the user. Secrets are left out.
    pub(super) fn flags(&self) -> String {
        let mut flags = String::new();
        if self.nats != DEFAULT_URL && std::env::var("NATS_URL").as_ref() != Ok(&self.nats) {
            flags.push_str(&format!(" --nats {}", without_user_info(&self.nats)));
        }
        if self.prefix != DEFAULT_PREFIX && std::env::var("A2A_BRIDGE_PREFIX").as_ref() != Ok(&self.prefix) {
            flags.push_str(&format!(" --prefix {}", self.prefix));
        }
        flags
    }
}

/// Why there was no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Silence {
    /// Nobody serves the subject.
    #[error("nobody serves this")]
    NoResponders,
    /// Nobody answered in time.
    #[error("no answer within {}s", .0.as_secs())]
    Timeout(Duration),
    /// The server does not let us.
    #[error("NATS does not permit it: {0}")]
    Refused(String),
    /// The connection is closed.
    #[error("the connection to NATS is closed")]
    Closed,
}

impl Silence {
    /// The failure for people, when nothing better is known.
    pub(super) fn failure(self, what: &str) -> Failure {
        let hint = match self {
            Self::NoResponders => "`a2a-bridge agents` lists who is there",
            Self::Timeout(_) => "try again; `a2a-bridge agents` lists who is there",
            Self::Refused(_) => "this user may not use these subjects; see \"Permissions\" in the README",
            Self::Closed => "try again",
        };
        Failure::new(UNAVAILABLE, anyhow::anyhow!("{what}: {self}")).hint(hint)
    }
}

/// A connection to the mesh.
#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) client: Client,
    pub(super) subjects: Subjects,
    pub(super) servers: String,
    refusals: watch::Receiver<Option<String>>,
}

impl Mesh {
    /// Sends a request with an inbox of its own.
    pub(super) async fn request(
        &self,
        subject: String,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Replies, Failure> {
        let max = self.client.max_payload();
        if body.len() + 1024 > max {
            let error = anyhow::anyhow!("the request has {} bytes, and NATS takes {max} at most", body.len());
            return Err(Failure::new(USAGE, error)
                .hint("send less, or give files as URLs; the server's limit is `max_payload`"));
        }
        let inbox = self.client.new_inbox();
        let gone =
            |error: &dyn std::error::Error| Failure::new(UNAVAILABLE, anyhow::anyhow!(error_chain(error)));
        let mut refusals = self.refusals.clone();
        refusals.mark_unchanged();
        let replies = self.client.subscribe(inbox.clone()).await.map_err(|error| gone(&error))?;
        self.client
            .publish_with_reply_and_headers(subject, inbox, headers, body)
            .await
            .map_err(|error| gone(&error))?;
        Ok(Replies { replies, refusals })
    }

    /// One short question and its one answer.
    pub(super) async fn ask(
        &self,
        subject: String,
        body: Bytes,
    ) -> Result<Result<Message, Silence>, Failure> {
        let mut replies = self.request(subject, HeaderMap::new(), body).await?;
        Ok(replies.next(SHORT).await)
    }

    /// Whether somebody still serves the agent.
    pub(super) async fn is_served(&self, agent: &Token) -> Result<bool, Failure> {
        let [_, named, _] = Subjects::srv(DiscoveryVerb::Ping, agent, "");
        Ok(!matches!(self.ask(named, Bytes::new()).await?, Err(Silence::NoResponders)))
    }
}

/// The replies to one request. Dropping them ends the subscription.
#[derive(Debug)]
pub(super) struct Replies {
    replies: Subscriber,
    refusals: watch::Receiver<Option<String>>,
}

impl Replies {
    /// The next reply.
    pub(super) async fn next(&mut self, limit: Duration) -> Result<Message, Silence> {
        let message = tokio::select! {
            biased;
            message = self.replies.next() => message.ok_or(Silence::Closed)?,
            Ok(refusal) = self.refusals.wait_for(Option::is_some) => {
                return Err(Silence::Refused(refusal.clone().unwrap_or_default()));
            }
            () = tokio::time::sleep(limit) => return Err(Silence::Timeout(limit)),
        };
        // An empty message may also be the end of a stream; only the status tells.
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            return Err(Silence::NoResponders);
        }
        Ok(message)
    }
}

/// The body of a reply as JSON.
pub(super) fn json(message: &Message) -> Result<Value, Failure> {
    serde_json::from_slice(&message.payload).map_err(|error| {
        let error =
            anyhow::Error::new(error).context("the reply is not JSON; is this subject an a2a-bridge's?");
        Failure::new(DEFECT, error).hint("`a2a-bridge agents --json` shows which program serves the agent")
    })
}

/// Fields of JSON from others, by JSON pointer: what is missing or of another type is not there.
pub(super) trait Fields {
    fn text(&self, pointer: &str) -> Option<&str>;
    fn list(&self, pointer: &str) -> &[Value];
}

impl Fields for Value {
    fn text(&self, pointer: &str) -> Option<&str> {
        self.pointer(pointer)?.as_str()
    }

    fn list(&self, pointer: &str) -> &[Value] {
        self.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
    }
}
