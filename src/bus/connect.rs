//! The connection to NATS: options, and log messages about its state.

pub(crate) mod credentials;
pub(crate) mod events;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use self::credentials::NatsCredentials;
use self::events::ConnectionEvents;
use crate::config;
use crate::telemetry::log_limit::LogLimit;
use crate::text::{error_chain, millis};
use async_nats::{Client, ClientError, ConnectErrorKind, ConnectOptions, Event};

/// How long [`FirstConnection::FailFast`] retries.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// First and maximum back-off between attempts of the first connection; it doubles after each.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// The client considers a connection dead after two intervals of silence.
const PING_INTERVAL: Duration = Duration::from_secs(15);
/// Errors of the server that are logged within a minute: as many as a user without any permissions causes at the start.
const MAX_SERVER_ERRORS: u32 = 20;

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("cannot read the NATS credentials file {path}")]
    Credentials { path: String, source: std::io::Error },
    #[error("cannot use {path} (`nats.tls`)")]
    Tls { path: String, source: Box<dyn std::error::Error + Send + Sync> },
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

/// How long [`connect`] waits for a server that it cannot reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstConnection {
    /// Until there is one: after a reboot, NATS may start later than the bridge.
    Wait,
    /// For ten seconds.
    FailFast,
}

/// Connects, with retries. Afterwards the client reconnects by itself without a limit. Messages that wait to be read
/// take at most `max_waiting` bytes; the client drops further ones.
pub(crate) async fn connect(
    settings: &config::NatsConfig,
    credentials: &Arc<NatsCredentials>,
    max_waiting: usize,
    first: FirstConnection,
    events: &Arc<ConnectionEvents>,
) -> Result<Client, ConnectError> {
    check_tls_files(settings)?;
    let servers: Vec<String> = settings.url.iter().map(config::without_user_info).collect();
    let servers = servers.join(", ");
    let began = Instant::now();
    let failures = LogLimit::default();
    let (mut backoff, max_backoff) = BACKOFF;
    loop {
        let (log, events) = (EventLog::default(), Arc::clone(events));
        let options =
            options(settings, credentials).max_queued_bytes(max_waiting).event_callback(move |event| {
                log.log(&event);
                events.observe(&event);
                std::future::ready(())
            });
        let source = match options.connect(&settings.url).await {
            Ok(client) => {
                let info = client.server_info();
                tracing::info!(
                    server = %info.server_name,
                    version = %info.version,
                    after_ms = millis(began.elapsed()),
                    "connected to NATS"
                );
                return Ok(client);
            }
            Err(source) => source,
        };
        // A retry does not help against a wrong password or an invalid URL.
        let is_permanent = is_refusal(source.kind()) || source.kind() == ConnectErrorKind::ServerParse;
        let is_late = first == FirstConnection::FailFast && began.elapsed() + backoff > CONNECT_TIMEOUT;
        if is_permanent || is_late {
            return Err(ConnectError::Connect { servers, source });
        }
        if failures.add(Instant::now()).is_some() {
            tracing::warn!(
                servers,
                error = error_chain(&source),
                after_ms = millis(began.elapsed()),
                "cannot connect to NATS (`nats.url`); retrying (logged once a minute)"
            );
        }
        tokio::time::sleep(backoff).await;
        backoff = max_backoff.min(2 * backoff);
    }
}

/// The connection options, without the URLs and without a callback for events.
pub(crate) fn options(settings: &config::NatsConfig, credentials: &Arc<NatsCredentials>) -> ConnectOptions {
    let mut options = credentials
        .options()
        .name(concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")))
        .ping_interval(PING_INTERVAL)
        .custom_inbox_prefix(&settings.inbox_prefix);
    if let Some(tls) = &settings.tls {
        options = options.require_tls(tls.required);
        if let Some(ca) = &tls.ca {
            options = options.add_root_certificates(ca.clone());
        }
        if let (Some(cert), Some(key)) = (&tls.cert, &tls.key) {
            options = options.add_client_certificate(cert.clone(), key.clone());
        }
    }
    options
}

/// Whether the files under `nats.tls` can be used. The client reads them for each connection; a file that is wrong at the
/// start does not become right by waiting.
fn check_tls_files(settings: &config::NatsConfig) -> Result<(), ConnectError> {
    let Some(tls) = &settings.tls else { return Ok(()) };
    let failed = |path: &Path, source| ConnectError::Tls { path: path.display().to_string(), source };
    let read = |path: &Path| std::fs::read(path).map_err(|source| failed(path, source.into()));
    if let Some(ca) = &tls.ca {
        let certificates = reqwest::Certificate::from_pem_bundle(&read(ca)?);
        if certificates.map_err(|error| failed(ca, error.into()))?.is_empty() {
            return Err(failed(ca, "the file contains no certificate".into()));
        }
    }
    if let (Some(cert), Some(key)) = (&tls.cert, &tls.key) {
        let pem = [read(cert)?, b"\n".to_vec(), read(key)?].concat();
        reqwest::Identity::from_pem(&pem).map_err(|error| failed(cert, error.into()))?;
    }
    Ok(())
}

#[derive(Debug)]
struct EventLog {
    /// When the connection was lost; `None` while there is one.
    down_since: Mutex<Option<Instant>>,
    refused: LogLimit,
    malformed: LogLimit,
    lost: LogLimit,
    server_errors: LogLimit,
}

impl Default for EventLog {
    fn default() -> Self {
        Self {
            down_since: Mutex::default(),
            refused: LogLimit::default(),
            malformed: LogLimit::default(),
            lost: LogLimit::default(),
            server_errors: LogLimit::per_minute(MAX_SERVER_ERRORS),
        }
    }
}

impl EventLog {
    fn log(&self, event: &Event) {
        let mut down_since = self.down_since.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Connected => match down_since.take() {
                Some(since) => {
                    tracing::info!(outage_ms = millis(since.elapsed()), "NATS connection is up again");
                }
                None => tracing::debug!("NATS connection is up"),
            },
            Event::Disconnected => {
                *down_since = Some(Instant::now());
                tracing::info!("NATS connection is down; reconnecting");
            }
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
            // One event for each denied message. A caller may choose the subjects of replies.
            Event::ServerError(error) => {
                if let Some(errors) = self.server_errors.add(Instant::now()) {
                    tracing::warn!(%error, errors, "NATS server error");
                }
            }
            Event::ClientError(ClientError::MalformedMessage(reason)) => {
                if self.malformed.add(Instant::now()).is_some() {
                    tracing::warn!(
                        reason,
                        "dropped a malformed NATS message; others in the next minute are counted, not logged"
                    );
                }
            }
            // One event for each attempt to reconnect. That no server is reachable is known already.
            Event::ClientError(error) if down_since.is_some() => {
                if is_unreachable(error) {
                    tracing::debug!(%error, "cannot reconnect to NATS");
                } else if self.refused.add(Instant::now()).is_some() {
                    tracing::warn!(%error, "cannot reconnect to NATS (logged once a minute)");
                }
            }
            Event::ClientError(error) => tracing::warn!(%error, "NATS client error"),
            other => tracing::debug!(event = %other, "NATS connection event"),
        }
    }
}

/// Whether a failed attempt to reconnect did not reach a server. The client reports the kind of the error as text.
fn is_unreachable(error: &ClientError) -> bool {
    let kinds = [ConnectErrorKind::Io, ConnectErrorKind::TimedOut, ConnectErrorKind::Dns];
    matches!(error, ClientError::Other(text) if kinds.iter().any(|kind| kind.to_string() == *text))
}

/// How many messages the client has dropped because their subject or headers cannot be parsed. The NATS server
/// forwards such messages; see `vendor/README.md`.
pub(crate) fn malformed_messages(client: &Client) -> u64 {
    client.statistics().in_malformed.load(Ordering::Relaxed)
}

/// How often the client has connected again after it had lost the connection.
pub(crate) fn reconnects(client: &Client) -> u64 {
    client.statistics().connects.load(Ordering::Relaxed).saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// The log of these events.
    fn logged(events: impl IntoIterator<Item = Event>) -> String {
        let (read, writer) = std::io::pipe().unwrap();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(Mutex::new(writer));
        tracing::subscriber::with_default(subscriber.finish(), || {
            let log = EventLog::default();
            events.into_iter().for_each(|event| log.log(&event));
        });
        std::io::read_to_string(read).unwrap()
    }

    fn failed_attempt(kind: ConnectErrorKind) -> Event {
        Event::ClientError(ClientError::Other(kind.to_string()))
    }

    #[test]
    fn lost_and_malformed_messages_are_logged_once_a_minute() {
        let malformed = Event::ClientError(ClientError::MalformedMessage("no subject".into()));
        let text = logged([Event::SlowConsumer(7), malformed].into_iter().cycle().take(200));
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.contains("lost=1"), "{text}");
    }

    #[test]
    fn an_outage_is_logged_when_it_begins_and_when_it_ends() {
        let unreachable = [ConnectErrorKind::Io, ConnectErrorKind::TimedOut, ConnectErrorKind::Dns];
        let attempts = unreachable.map(failed_attempt);
        let outage = [Event::Disconnected].into_iter().chain(attempts).chain([Event::Connected]);
        let text = logged([Event::Connected].into_iter().chain(outage));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].contains("INFO") && lines[0].contains("NATS connection is down"), "{text}");
        assert!(lines[1].contains("INFO") && lines[1].contains("NATS connection is up again"), "{text}");
        assert!(lines[1].contains("outage_ms="), "{text}");
    }

    #[test]
    fn credentials_that_the_server_no_longer_accepts_are_logged_during_an_outage() {
        let refused = || failed_attempt(ConnectErrorKind::AuthorizationViolation);
        let text = logged([Event::Disconnected, refused(), refused()]);
        assert_eq!(text.matches("authorization violation").count(), 1, "{text}");
    }
}
