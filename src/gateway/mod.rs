//! The HTTP gateway: a NATS client that serves the agents to HTTP clients.
//!
//! The gateway has no state of its own, so that any number of them can run. It calls below `<prefix>.gw.`, and names the
//! principal of a request in `A2A-Caller`; bridges keep apart what belongs to different principals.
//!
//! | module | owns |
//! | --- | --- |
//! | `routes` | the one table of routes; `router`, `openapi` and `docs_page` are made from it |
//! | `router` | what applies to every request: rules, limits, headers, access log |
//! | `auth`, `rate` | who sends a request, what they may do, and how often |
//! | `mesh`, `directory` | requests over NATS; the agents that bridges announce |
//! | `rest` | the handlers; `context` and `body` have what they get |
//! | `sse` | frames as server-sent events |
//! | `server`, `tls`, `io` | connections and their limits |
//!
//! # The path of a request
//!
//! 1. `server` accepts a connection. A client that is silent, or does not read, is disconnected.
//! 2. `router::observed` gives the request an id. `router::guarded` checks the token, the rate, the role, and what browsers
//!    may do.
//! 3. A handler makes a request on NATS of it. The body of a call, and of its reply, passes unchanged.
//! 4. If no bridge replies, the `directory` knows whether the agent does not exist (404) or is not available (503).

mod auth;
mod body;
mod context;
mod directory;
mod docs_page;
mod error;
mod etag;
mod io;
mod mesh;
mod metrics;
mod openapi;
mod rate;
mod rest;
mod router;
mod routes;
mod schemas;
mod server;
mod sse;
mod tls;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::Router;
use bytes::Bytes;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::auth::AuthRules;
use self::body::BodyUsage;
use self::directory::Directory;
use self::mesh::Mesh;
use self::metrics::GatewayMetrics;
pub(crate) use self::tls::TlsError;
use crate::background::{BackgroundTasks, OnPanic};
use crate::bus::connect::credentials::NatsCredentials;
use crate::bus::connect::{ConnectError, FirstConnection, connect};
use crate::bus::subject::{SubjectError, Subjects};
use crate::config::{CallLogging, Config, GatewayConfig, GatewayLimits};
use crate::json::to_bytes;
use crate::text::{error_chain, millis};

/// Where `a2a-bridge gateway` listens if the configuration does not say it.
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// Bytes of messages that wait in the NATS client.
const MAX_WAITING: usize = 128 << 20;
/// When the gateway stops, streams end this long before the end of the grace period.
const LAST_EVENTS: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub(crate) enum GatewayError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("invalid subject under `nats`")]
    Subject(#[from] SubjectError),
    #[error("cannot listen on {listen} (`gateway.listen`)")]
    Listen { listen: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// The parts of the configuration that a reload replaces.
#[derive(Debug)]
struct Settings {
    rules: Arc<AuthRules>,
    limits: GatewayLimits,
    access_log: CallLogging,
    tls: Option<Arc<ServerConfig>>,
}

impl Settings {
    fn new(config: &GatewayConfig) -> Result<Self, TlsError> {
        Ok(Self {
            rules: Arc::new(AuthRules::new(config)),
            limits: config.limits.clone(),
            access_log: config.access_log,
            tls: config.tls.as_ref().map(tls::load).transpose()?,
        })
    }
}

#[derive(Debug)]
struct Documents {
    openapi: Bytes,
    docs: Bytes,
}

/// A running gateway.
#[derive(Debug)]
pub(crate) struct Gateway {
    mesh: Mesh,
    directory: Directory,
    metrics: Arc<GatewayMetrics>,
    documents: Documents,
    settings: RwLock<Arc<Settings>>,
    router: RwLock<Option<Router>>,
    credentials: Arc<NatsCredentials>,
    /// The bodies of clients that are not authenticated yet.
    logins: BodyUsage,
    tasks: BackgroundTasks,
    connections: TaskTracker,
    address: OnceLock<SocketAddr>,
    /// Cancelled when the gateway stops to accept requests.
    stop: CancellationToken,
    /// Cancelled when event streams have to end.
    stop_streams: CancellationToken,
    /// Cancelled to drop the connections that remain.
    abort: CancellationToken,
    grace: Duration,
}

impl Gateway {
    /// Connects to NATS, and serves until [`Gateway::stop`].
    pub(crate) async fn start(config: &Config, first: FirstConnection) -> Result<Arc<Self>, GatewayError> {
        let default = GatewayConfig::default();
        let gateway_config = config.gateway.as_ref().unwrap_or(&default);
        let subjects = Subjects::new(&config.nats.subject_prefix)?;
        let settings = Settings::new(gateway_config)?;
        let listen = gateway_config.listen.unwrap_or(DEFAULT_LISTEN);
        // Before the connection, which may take long.
        let listener = server::bind(listen).map_err(|source| GatewayError::Listen { listen, source })?;
        let credentials = NatsCredentials::new(&config.nats)?;
        let events = Arc::default();
        let client = connect(&config.nats, &credentials, MAX_WAITING, first, &events).await?;
        let gateway = Arc::new(Self {
            mesh: Mesh::new(client, subjects, events),
            directory: Directory::default(),
            metrics: GatewayMetrics::shared(),
            documents: Documents { openapi: to_bytes(&openapi::document()), docs: docs_page::page().into() },
            settings: RwLock::new(Arc::new(settings)),
            router: RwLock::default(),
            credentials,
            logins: BodyUsage::default(),
            tasks: BackgroundTasks::default(),
            connections: TaskTracker::new(),
            address: OnceLock::new(),
            stop: CancellationToken::new(),
            stop_streams: CancellationToken::new(),
            abort: CancellationToken::new(),
            grace: config.shutdown_grace,
        });
        gateway.set_router();
        let address = listener.local_addr().map_err(|source| GatewayError::Listen { listen, source })?;
        let _ = gateway.address.set(address);
        gateway.log_start(gateway_config, address);
        let (follower, stopping) = (Arc::clone(&gateway), gateway.tasks.stop.clone());
        gateway.tasks.spawn("agent directory", OnPanic::StopBridge, async move {
            stopping.run_until_cancelled(follower.directory.run(&follower.mesh)).await;
        });
        gateway.tasks.spawn("gateway", OnPanic::StopBridge, server::serve(Arc::clone(&gateway), listener));
        Ok(gateway)
    }

    fn log_start(&self, config: &GatewayConfig, address: SocketAddr) {
        let scheme = if self.is_tls() { "https" } else { "http" };
        if !config.tokens.is_empty() && !self.is_tls() && !address.ip().is_loopback() {
            tracing::warn!(
                "the gateway receives tokens without TLS; set `gateway.tls`, or use a proxy that ends TLS"
            );
        }
        tracing::info!("serving the gateway at {scheme}://{address}/");
    }

    fn set_router(self: &Arc<Self>) {
        let router = router::router(self);
        *self.router.write().unwrap_or_else(PoisonError::into_inner) = Some(router);
    }

    fn router(&self) -> Router {
        self.router.read().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default()
    }

    fn settings(&self) -> Arc<Settings> {
        Arc::clone(&self.settings.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn rules(&self) -> Arc<AuthRules> {
        Arc::clone(&self.settings().rules)
    }

    fn limits(&self) -> GatewayLimits {
        self.settings().limits.clone()
    }

    fn access_log(&self) -> CallLogging {
        self.settings().access_log
    }

    fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.settings().tls.clone()
    }

    fn is_tls(&self) -> bool {
        self.settings().tls.is_some()
    }

    fn is_stopping(&self) -> bool {
        self.stop.is_cancelled()
    }

    /// Uses the tokens, origins, certificate and limits of a new configuration. New connections use them; the address stays.
    pub(crate) fn reload(self: &Arc<Self>, config: &Config) -> Result<(), GatewayError> {
        let default = GatewayConfig::default();
        let gateway_config = config.gateway.as_ref().unwrap_or(&default);
        let settings = Settings::new(gateway_config)?;
        let listen = gateway_config.listen.unwrap_or(DEFAULT_LISTEN);
        let is_same = self.address.get().is_some_and(|address| {
            address.ip() == listen.ip() && (listen.port() == 0 || address.port() == listen.port())
        });
        if !is_same {
            tracing::warn!("a change of `gateway.listen` takes effect only after a restart");
        }
        *self.settings.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(settings);
        self.set_router();
        if let Err(error) = self.credentials.replace(&config.nats) {
            tracing::warn!(error = error_chain(&error), "the gateway keeps its credentials for NATS");
        }
        Ok(())
    }

    /// Resolves when a task without which the gateway cannot work has panicked.
    pub(crate) async fn failed(&self) {
        self.tasks.stop.cancelled().await;
    }

    /// Stops: requests in flight may finish within the grace period, and streams end with a hint to connect again.
    pub(crate) async fn stop(&self) {
        let began = Instant::now();
        self.stop.cancel();
        self.connections.close();
        let last = LAST_EVENTS.min(self.grace / 2);
        let _ = tokio::time::timeout(self.grace - last, self.connections.wait()).await;
        self.stop_streams.cancel();
        let _ = tokio::time::timeout(last, self.connections.wait()).await;
        self.abort.cancel();
        self.tasks.stop.cancel();
        let _ = tokio::time::timeout(LAST_EVENTS, self.tasks.finished()).await;
        // The router holds the gateway.
        *self.router.write().unwrap_or_else(PoisonError::into_inner) = None;
        let _ = tokio::time::timeout(LAST_EVENTS, self.mesh.client.drain()).await;
        tracing::info!(took_ms = millis(began.elapsed()), "gateway stopped");
    }

    /// Ends the grace period of a concurrent [`Gateway::stop`].
    pub(crate) fn skip_grace_period(&self) {
        self.stop_streams.cancel();
        self.abort.cancel();
    }
}
