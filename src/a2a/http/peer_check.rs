//! Checks who is at the other end of a new connection, before anything is sent on it.

use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// How often a connection is opened again while the listener changes.
const MAX_RETRIES: usize = 3;

/// Decides whether a connection that was just opened may be used.
pub(crate) trait PeerCheck: Debug + Send + Sync {
    /// Opening the connection to `peer` began at `began`. This runs for every new connection, so it is mostly ready at
    /// once, and never blocks a worker of the runtime for long.
    fn check(&self, peer: SocketAddr, began: Instant) -> BoxFuture<'_, Verdict>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Use,
    /// Close the connection and open another one.
    Reconnect,
    Refuse,
}

/// Opens a connection that passes the check.
pub(super) async fn connect_checked<F>(
    check: Option<&Arc<dyn PeerCheck>>,
    connect: impl Fn() -> F,
) -> io::Result<TcpStream>
where
    F: Future<Output = io::Result<TcpStream>>,
{
    for _ in 0..=MAX_RETRIES {
        let began = Instant::now();
        let stream = connect().await?;
        let verdict = match check {
            Some(check) => check.check(stream.peer_addr()?, began).await,
            None => Verdict::Use,
        };
        match verdict {
            Verdict::Use => return Ok(stream),
            Verdict::Reconnect => {}
            Verdict::Refuse => break,
        }
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "another process listens on the port of the agent"))
}
