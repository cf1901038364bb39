//! Probing an agent from outside: does it accept connections, and which card does it show.

use std::time::Duration;

use url::Url;

use crate::a2a::auth::Credentials;
use crate::a2a::card::{self, Card, CardError};
use crate::config;

/// How long a bare connection may take.
const CONNECT: Duration = Duration::from_secs(2);

/// Whether somebody accepts connections at the agent's address. It sends nothing, so that it can
/// be done often without a trace in the agent's log.
pub(super) async fn accepts_connections(url: &Url) -> bool {
    let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else {
        return false;
    };
    // IPv6 addresses come in brackets, which name resolution does not take.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    matches!(tokio::time::timeout(CONNECT, tokio::net::TcpStream::connect((host, port))).await, Ok(Ok(_)))
}

/// Reads the agent's card, or takes the one from the settings once somebody is there.
pub(super) async fn read_card(
    config: &config::AgentConfig,
    http: &reqwest::Client,
    credentials: &Credentials,
) -> Result<Card, CardError> {
    match &config.card {
        None => card::fetch(http, &config.url, config.card_path.as_deref(), credentials).await,
        Some(card) => {
            if !accepts_connections(&config.url).await {
                return Err(CardError::NobodyThere { url: config.url.to_string() });
            }
            Card::from_value(card.clone())
        }
    }
}
