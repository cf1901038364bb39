//! Confirms that the NATS server has processed this client's commands.
//!
//! The server processes the commands of one connection in order, and `Client::flush` only says that they were
//! written. A message to our own inbox says that they were *processed*: when it comes back, every command
//! before it has taken effect, and every message that the server had sent by then is in its subscription's
//! buffer, because one task reads them all off one socket.
//!
//! It needs the permission to publish to the connection's own inbox, and a connection without `no_echo`.

use std::time::Duration;

use async_nats::Client;
use bytes::Bytes;
use futures_util::StreamExt;

/// How long to wait for the server before continuing without a confirmation.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RoundTripError {
    #[error("the connection to NATS is closed")]
    Closed,
    /// No connection, or no permission to publish to the inbox.
    #[error("NATS did not return a message to the bridge's own inbox within {TIMEOUT:?}")]
    TimedOut,
}

/// Waits until the server has processed every command that this client has sent so far. Before a connection
/// is closed, this also confirms that the last replies have arrived.
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
    match tokio::time::timeout(TIMEOUT, there_and_back).await {
        Ok(Some(())) => Ok(()),
        Ok(None) => Err(RoundTripError::Closed),
        Err(_) => Err(RoundTripError::TimedOut),
    }
}
