//! Accepts connections, and serves requests on them within limits.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use super::Gateway;
use super::io::WriteLimit;
use crate::background::OnPanic;

const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Maximum bytes of the head of a request.
const MAX_HEAD: usize = 64 << 10;
/// Connections that the system keeps until the gateway accepts them.
const BACKLOG: u32 = 1024;

/// Listens on an address, with a backlog for many clients at once.
pub(super) fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket =
        if address.is_ipv4() { tokio::net::TcpSocket::new_v4()? } else { tokio::net::TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Serves connections until the gateway stops.
pub(super) async fn serve(gateway: Arc<Gateway>, listener: TcpListener) {
    let places = Arc::new(Semaphore::new(gateway.limits().connections));
    let stop = gateway.stop.clone();
    loop {
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let Some((place, accepted)) = stop.run_until_cancelled(accepted).await else { return };
        let (stream, client) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, most likely.
                tracing::warn!(%error, "cannot accept a connection at the gateway");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let open = gateway.metrics.open_connection();
        let abort = gateway.abort.clone();
        // Boxed, because each wrapper would hold it twice.
        let connection = Box::pin(serve_connection(Arc::clone(&gateway), stream, client));
        let served = gateway.connections.track_future(async move {
            abort.run_until_cancelled(connection).await;
            drop((place, open));
        });
        gateway.tasks.spawn("gateway connection", OnPanic::Log, served);
    }
}

/// Waits for the first bytes of a request. Until then, a connection takes no buffers.
async fn serve_connection(gateway: Arc<Gateway>, stream: TcpStream, client: SocketAddr) {
    let _ = stream.set_nodelay(true);
    let mut byte = [0];
    // Not `readable`, which resolves at once for a new connection.
    let first = tokio::time::timeout(gateway.limits().header_timeout, stream.peek(&mut byte));
    if matches!(gateway.stop.run_until_cancelled(first).await, Some(Ok(Ok(1)))) {
        // Boxed, so that idle connections stay small.
        Box::pin(serve_requests(gateway, stream, client)).await;
    }
}

async fn serve_requests(gateway: Arc<Gateway>, stream: TcpStream, client: SocketAddr) {
    let Some(config) = gateway.tls() else { return serve_http(&gateway, stream, client).await };
    let handshake = TlsAcceptor::from(config).accept(stream);
    match tokio::time::timeout(gateway.limits().header_timeout, handshake).await {
        Ok(Ok(stream)) => serve_http(&gateway, stream, client).await,
        Ok(Err(error)) => tracing::debug!(%client, %error, "a TLS handshake failed"),
        Err(_) => tracing::debug!(%client, "a TLS handshake took too long"),
    }
}

async fn serve_http<S>(gateway: &Arc<Gateway>, stream: S, client: SocketAddr)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let limits = gateway.limits();
    let service = ClientService { router: TowerToHyperService::new(gateway.router()), client };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).max_buf_size(MAX_HEAD);
    let stream = TokioIo::new(WriteLimit::new(stream, limits.body_timeout));
    let mut connection = pin!(http.serve_connection(stream, service));
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = gateway.stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%client, %error, "a connection to the gateway ended");
    }
}

/// The router, with the address of the client.
struct ClientService {
    router: TowerToHyperService<Router>,
    client: SocketAddr,
}

impl Service<Request<Incoming>> for ClientService {
    type Response = axum::response::Response;
    type Error = std::convert::Infallible;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(ConnectInfo(self.client));
        self.router.call(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_future<A, B, C, F>(_: fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn an_idle_connection_is_small() {
        let size = size_of_future(serve_connection);
        assert!(size <= 1024, "{size} bytes; {} with a request", size_of_future(serve_requests));
    }
}
