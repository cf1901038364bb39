//! Serves `/metrics`, `/healthz` and `/readyz` over HTTP.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::{RawQuery, State as Shared};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::{Metrics, RequiredAgents, encode_unconnected};

/// At most this many connections are served at the same time; more have to wait.
const MAX_CONNECTIONS: usize = 64;
/// Within this time after the connection, a client has to send its request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Within this time after the connection, a client has to read the response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

const NOT_CONNECTED: &str = "waiting for the first connection to NATS";

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the endpoints serve. There are few metrics before the first connection to NATS.
#[derive(Debug, Default)]
pub(crate) struct Endpoints(OnceLock<Arc<Metrics>>);

impl Endpoints {
    pub(crate) fn set_metrics(&self, metrics: Arc<Metrics>) {
        let _ = self.0.set(metrics);
    }
}

/// Binds the address, and returns a future that serves until `stop` is cancelled.
pub(crate) async fn serve(
    listen: SocketAddr,
    endpoints: Arc<Endpoints>,
    stop: CancellationToken,
) -> io::Result<impl Future<Output = ()> + Send> {
    let listener = TcpListener::bind(listen).await?;
    tracing::info!(address = %listener.local_addr()?, "serving /metrics, /healthz and /readyz");
    let routes = Router::new()
        .route("/metrics", get(get_metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(get_ready))
        .with_state(endpoints);
    Ok(serve_connections(listener, routes, stop))
}

/// Serves one request per connection. A client that is silent or slow is disconnected, and cannot keep others waiting
/// for long.
async fn serve_connections(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).keep_alive(false);
    let mut connections = FuturesUnordered::new();
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.next() => continue,
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely.
                    tracing::warn!(%error, "cannot accept a connection for metrics");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        let service = TowerToHyperService::new(routes.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service);
        connections.push(tokio::time::timeout(CONNECTION_TIMEOUT, connection));
    }
    // Requests that have begun are answered.
    let _ = tokio::time::timeout(STOP_TIMEOUT, async { while connections.next().await.is_some() {} }).await;
}

async fn get_metrics(Shared(endpoints): Shared<Arc<Endpoints>>) -> Response {
    let text = match endpoints.0.get() {
        Some(metrics) => metrics.encode().await,
        None => encode_unconnected(),
    };
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn get_ready(Shared(endpoints): Shared<Arc<Endpoints>>, RawQuery(query): RawQuery) -> Response {
    let required = match query.as_deref() {
        None | Some("") => RequiredAgents::None,
        Some("agents=any") => RequiredAgents::Any,
        Some("agents=all") => RequiredAgents::All,
        // The query may be anything, so it is not in the response.
        Some(_) => return (StatusCode::BAD_REQUEST, "use ?agents=any or ?agents=all\n").into_response(),
    };
    match endpoints.0.get().map(|metrics| metrics.not_ready_reason(required)) {
        Some(None) => "ok\n".into_response(),
        Some(Some(reason)) => not_ready(reason),
        None => not_ready(NOT_CONNECTED),
    }
}

fn not_ready(reason: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "the test awaits it")]
    async fn started() -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let routes = Router::new().route("/healthz", get(|| async { "ok\n" }));
        (address, stop.clone(), tokio::spawn(serve_connections(listener, routes, stop)))
    }

    /// Everything that the server sends until it closes the connection.
    async fn received(mut stream: TcpStream) -> String {
        let mut text = String::new();
        let read = stream.read_to_string(&mut text);
        tokio::time::timeout(2 * CONNECTION_TIMEOUT, read).await.expect("the server closes it").unwrap();
        text
    }

    #[tokio::test]
    async fn silent_connections_are_closed_and_do_not_keep_others_waiting() {
        let (address, stop, server) = started().await;
        let mut half = TcpStream::connect(address).await.unwrap();
        half.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n").await.unwrap();
        let mut silent = vec![half];
        while silent.len() < MAX_CONNECTIONS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut whole = TcpStream::connect(address).await.unwrap();
        whole.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let text = received(whole).await;
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("ok\n"), "{text}");
        for stream in silent {
            assert!(!received(stream).await.contains("200"));
        }
        stop.cancel();
        server.await.unwrap();
    }
}
