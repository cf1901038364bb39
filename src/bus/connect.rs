//! The connection to NATS: options, credentials, and log messages about its state.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use async_nats::{Client, ClientError, ConnectErrorKind, ConnectOptions, Event};
use secrecy::ExposeSecret as _;

use crate::config;
use crate::telemetry::log_limit::LogLimit;
use crate::text::error_chain;

/// How long the bridge retries the first connection. Then it exits: a service manager restarts it, and a
/// user at a terminal sees the error.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// First back-off between attempts of the first connection; it doubles after each.
const BACKOFF: Duration = Duration::from_millis(500);
/// The client considers a connection dead after two intervals of silence.
const PING_INTERVAL: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("cannot read the NATS credentials file {path}")]
    Credentials { path: String, source: std::io::Error },
    /// `servers` are the configured URLs without passwords.
    #[error("cannot connect to NATS at {servers}")]
    Connect { servers: String, source: async_nats::ConnectError },
}

impl ConnectError {
    /// Whether the server rejects the credentials.
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if is_refusal(source.kind()))
    }
}

fn is_refusal(kind: ConnectErrorKind) -> bool {
    matches!(kind, ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation)
}

/// Connects, with retries. Afterwards the client reconnects by itself without a limit. Messages that wait to be read
/// take at most `max_waiting` bytes; the client drops further ones.
pub(crate) async fn connect(
    settings: &config::NatsConfig,
    max_waiting: usize,
) -> Result<Client, ConnectError> {
    let servers: Vec<String> = settings.url.iter().map(config::without_user_info).collect();
    let servers = servers.join(", ");
    let deadline = tokio::time::Instant::now() + CONNECT_TIMEOUT;
    let mut backoff = BACKOFF;
    loop {
        let options = options(settings).await?.max_queued_bytes(max_waiting);
        let source = match options.connect(&settings.url).await {
            Ok(client) => {
                tracing::info!(server = %client.server_info().server_name, version = %client.server_info().version, "connected to NATS");
                return Ok(client);
            }
            Err(source) => source,
        };
        // A retry does not help against a wrong password or an invalid URL.
        let is_permanent = is_refusal(source.kind()) || source.kind() == ConnectErrorKind::ServerParse;
        if is_permanent || tokio::time::Instant::now() + backoff > deadline {
            return Err(ConnectError::Connect { servers, source });
        }
        tracing::warn!(
            servers,
            error = error_chain(&source),
            "cannot connect to NATS (`nats.url`); retrying"
        );
        tokio::time::sleep(backoff).await;
        backoff *= 2;
    }
}

/// The connection options, without the URLs.
pub(crate) async fn options(settings: &config::NatsConfig) -> Result<ConnectOptions, ConnectError> {
    let log = Arc::new(EventLog::default());
    let mut options = ConnectOptions::new()
        .name(concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")))
        .ping_interval(PING_INTERVAL)
        .custom_inbox_prefix(&settings.inbox_prefix)
        .event_callback(move |event| {
            log.log(&event);
            std::future::ready(())
        });
    if let Some(path) = &settings.credentials {
        options = options
            .credentials_file(path)
            .await
            .map_err(|source| ConnectError::Credentials { path: path.display().to_string(), source })?;
    }
    if let Some(seed) = &settings.nkey {
        options = options.nkey(seed.expose_secret().to_owned());
    }
    if let Some(token) = &settings.token {
        options = options.token(token.expose_secret().to_owned());
    }
    if let Some(user) = &settings.user {
        let password = settings.password.as_ref().map(|p| p.expose_secret().to_owned()).unwrap_or_default();
        options = options.user_and_password(user.clone(), password);
    }
    if let Some(tls) = &settings.tls {
        options = options.require_tls(tls.required);
        if let Some(ca) = &tls.ca {
            options = options.add_root_certificates(ca.clone());
        }
        if let (Some(cert), Some(key)) = (&tls.cert, &tls.key) {
            options = options.add_client_certificate(cert.clone(), key.clone());
        }
    }
    Ok(options)
}

#[derive(Debug, Default)]
struct EventLog {
    malformed: LogLimit,
    lost: LogLimit,
}

impl EventLog {
    fn log(&self, event: &Event) {
        match event {
            Event::Connected => tracing::debug!("NATS connection is up"),
            Event::Disconnected => tracing::warn!("NATS connection is down; reconnecting"),
            Event::LameDuckMode => tracing::info!("the NATS server is about to shut down (lame duck mode)"),
            // One event for each lost message.
            Event::SlowConsumer(subscription) => {
                if let Some(lost) = self.lost.add(Instant::now()) {
                    tracing::error!(
                        subscription,
                        lost,
                        "requests arrive faster than the bridge reads them; some are lost (slow consumer; logged \
                         once a minute)"
                    );
                }
            }
            Event::ServerError(error) => tracing::warn!(%error, "NATS server error"),
            Event::ClientError(ClientError::MalformedMessage(reason)) => {
                if self.malformed.add(Instant::now()).is_some() {
                    tracing::warn!(
                        reason,
                        "dropped a malformed NATS message; others in the next minute are counted, not logged"
                    );
                }
            }
            Event::ClientError(error) => tracing::warn!(%error, "NATS client error"),
            other => tracing::debug!(event = %other, "NATS connection event"),
        }
    }
}

/// How many messages the client has dropped because their subject or headers cannot be parsed. The NATS server
/// forwards such messages; see `vendor/README.md`.
pub(crate) fn malformed_messages(client: &Client) -> u64 {
    client.statistics().in_malformed.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn lost_and_malformed_messages_are_logged_once_a_minute() {
        let (read, writer) = std::io::pipe().unwrap();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Mutex::new(writer));
        tracing::subscriber::with_default(subscriber.finish(), || {
            let log = EventLog::default();
            for _ in 0..100 {
                log.log(&Event::SlowConsumer(7));
                log.log(&Event::ClientError(ClientError::MalformedMessage("no subject".into())));
            }
        });
        let text = std::io::read_to_string(read).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("lost=1"), "{text}");
    }
}
