//! The connection to NATS: options, credentials, and what happens to it.

use crate::text::error_chain;
use std::time::Duration;

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event};
use secrecy::ExposeSecret as _;

use crate::config;

/// How long the first connection is tried for before the bridge gives up. A supervisor starts it
/// again; somebody at a terminal wants to know.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between the first two tries of the first connection; then it doubles.
const PAUSE: Duration = Duration::from_millis(500);
/// A connection that is silent for two of these is dead.
const PING: Duration = Duration::from_secs(15);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The credentials file cannot be used.
    #[error("cannot read the NATS credentials file {path}")]
    Credentials {
        path: String,
        /// What is wrong with it.
        #[source]
        source: std::io::Error,
    },
    /// Nobody answers, or nobody lets us in.
    #[error("cannot connect to NATS at {servers}")]
    Connect {
        /// The configured servers, without passwords.
        servers: String,
        #[source]
        source: async_nats::ConnectError,
    },
}

impl ConnectError {
    /// Whether the server is there and does not let us in.
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::Connect { source, .. } if is_refusal(source.kind()))
    }
}

fn is_refusal(kind: ConnectErrorKind) -> bool {
    matches!(kind, ConnectErrorKind::Authentication | ConnectErrorKind::AuthorizationViolation)
}

/// Connects, trying for a while; afterwards the client reconnects by itself for ever.
pub(crate) async fn connect(settings: &config::NatsConfig) -> Result<Client, ConnectError> {
    let servers: Vec<String> = settings.url.iter().map(config::without_user_info).collect();
    let servers = servers.join(", ");
    let give_up = tokio::time::Instant::now() + PATIENCE;
    let mut pause = PAUSE;
    loop {
        let options = options(settings).await?;
        let source = match options.connect(&settings.url).await {
            Ok(client) => {
                tracing::info!(server = %client.server_info().server_name, version = %client.server_info().version, "connected to NATS");
                return Ok(client);
            }
            Err(source) => source,
        };
        // Waiting does not make a wrong password right.
        let is_hopeless = is_refusal(source.kind()) || source.kind() == ConnectErrorKind::ServerParse;
        if is_hopeless || tokio::time::Instant::now() + pause > give_up {
            return Err(ConnectError::Connect { servers, source });
        }
        tracing::warn!(servers, error = error_chain(&source), "no connection to NATS yet (`nats.url`)");
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
}

/// The connection's options, without the addresses.
pub(crate) async fn options(settings: &config::NatsConfig) -> Result<ConnectOptions, ConnectError> {
    let mut options = ConnectOptions::new()
        .name(concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")))
        .ping_interval(PING)
        .event_callback(|event| async move { report(&event) });
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

fn report(event: &Event) {
    match event {
        Event::Connected => tracing::debug!("NATS connection is up"),
        Event::Disconnected => tracing::warn!("NATS connection is down; reconnecting"),
        Event::LameDuckMode => tracing::info!("the NATS server is about to shut down"),
        Event::SlowConsumer(subscription) => {
            tracing::error!(subscription, "requests arrive faster than they are taken; some are lost");
        }
        Event::ServerError(error) => tracing::warn!(%error, "the NATS server refuses something"),
        Event::ClientError(error) => tracing::warn!(%error, "the connection to NATS has trouble"),
        other => tracing::debug!(event = %other, "NATS"),
    }
}
