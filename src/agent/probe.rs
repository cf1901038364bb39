//! Probes of an agent: whether it accepts connections, and its card.

use std::time::Duration;

use url::Url;

use crate::a2a::HttpClient;
use crate::a2a::auth::Credentials;
use crate::a2a::card::{self, Card, CardError};
use crate::config;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Whether a TCP connection to the agent succeeds. Nothing is sent, so frequent checks leave no trace
/// in the agent's log.
pub(super) async fn accepts_connections(url: &Url) -> bool {
    let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else {
        return false;
    };
    // A URL has IPv6 addresses in brackets; name resolution rejects them.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    matches!(
        tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::TcpStream::connect((host, port))).await,
        Ok(Ok(_))
    )
}

/// Reads the agent's card, or uses the configured card if the agent accepts connections.
pub(super) async fn read_card(
    config: &config::AgentConfig,
    http: &HttpClient,
    credentials: &Credentials,
) -> Result<Card, CardError> {
    match &config.card {
        None => card::fetch(http, &config.url, config.card_path.as_deref(), credentials).await,
        Some(card) => {
            if !accepts_connections(&config.url).await {
                return Err(CardError::NotListening { url: config.url.to_string() });
            }
            Card::from_value(card.clone())
        }
    }
}
