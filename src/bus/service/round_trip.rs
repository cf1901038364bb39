//! Knowing that the server has done what it was told.
//!
//! The server works off one connection's commands in order, and `Client::flush` only says that they
//! were written. A message to ourselves says that they were *done*: when it comes back, every
//! command before it has taken effect, and every message that the server had sent by then is
//! in its subscription's buffer already, because one task reads them all off one socket.
//!
//! It takes the permission to publish to one's own inbox, and a connection without `no_echo`.

use std::time::Duration;

use async_nats::Client;
use bytes::Bytes;
use futures_util::StreamExt;

/// How long to wait for the server, before going on without knowing.
pub(super) const LIMIT: Duration = Duration::from_secs(2);

/// Why nobody knows what the server has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RoundTripError {
    #[error("the connection to NATS is closed")]
    Closed,
    /// Nothing came back: no connection, or publishing to the own inbox is not permitted.
    #[error("NATS did not return a message to the own inbox within {LIMIT:?}")]
    TimedOut,
}

/// Waits until the server has done all that this client told it so far. Also the way to know, before
/// a connection is closed, that the last replies have arrived.
///
/// # Errors
///
/// When the message does not come back within two seconds.
pub async fn round_trip(client: &Client) -> Result<(), RoundTripError> {
    let there_and_back = async {
        let inbox = client.new_inbox();
        let mut echo = client.subscribe(inbox.clone()).await.ok()?;
        client.publish(inbox, Bytes::new()).await.ok()?;
        echo.next().await.map(drop)
    };
    match tokio::time::timeout(LIMIT, there_and_back).await {
        Ok(Some(())) => Ok(()),
        Ok(None) => Err(RoundTripError::Closed),
        Err(_) => Err(RoundTripError::TimedOut),
    }
}
