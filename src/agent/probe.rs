//! Probes of an agent: whether it accepts connections, and its card.

use std::error::Error;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use url::Url;

use super::start::Start;
use super::status::KnownCard;
use crate::a2a::card::{self, Card, CardError};
use crate::a2a::client::ClientError;
use crate::process::ports::PortOwner;

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

/// Why a probe failed.
#[derive(Debug)]
pub(super) enum ProbeError {
    /// Another process listens on the agent's port.
    Foreign {
        port: u16,
        process: Option<(i32, String)>,
    },
    /// A launched agent does not listen on its port but on `instead`.
    NotListening {
        port: u16,
        instead: Vec<SocketAddr>,
    },
    Card(CardError),
}

impl ProbeError {
    /// Whether the agent cannot be reached at all.
    pub(super) fn is_unreachable(&self) -> bool {
        match self {
            Self::Foreign { .. } | Self::NotListening { .. } => true,
            Self::Card(error) => error.is_unreachable(),
        }
    }

    /// Whether the bridge could not probe at all because it, or the machine, has no descriptors left. This says nothing
    /// about the agent.
    pub(super) fn lacks_descriptors(&self) -> bool {
        let Self::Card(error) = self else { return false };
        let is_exhausted = |error: &io::Error| {
            error
                .raw_os_error()
                .is_some_and(|code| [Errno::EMFILE, Errno::ENFILE].map(|errno| errno as i32).contains(&code))
        };
        let first: &(dyn Error + 'static) = error;
        let mut causes = std::iter::successors(Some(first), |error| (*error).source());
        // Name resolution hides the cause of a failure.
        causes.any(|cause| cause.downcast_ref().is_some_and(is_exhausted))
            || (self.is_unreachable() && File::open("/dev/null").is_err_and(|error| is_exhausted(&error)))
    }

    /// Whether the agent accepts connections but does not respond: hung, or busy.
    pub(super) fn is_timeout(&self) -> bool {
        match self {
            Self::Foreign { .. } | Self::NotListening { .. } => false,
            Self::Card(CardError::Timeout { .. }) => true,
            // Without an access token, no request was sent.
            Self::Card(CardError::Fetch { source, .. }) if matches!(**source, ClientError::Token(_)) => false,
            Self::Card(error @ CardError::Fetch { .. }) => !error.is_unreachable(),
            Self::Card(_) => false,
        }
    }
}

/// Reads the agent's card once, or uses the configured card if the agent accepts connections. Sends nothing if
/// another process owns the port.
pub(super) async fn read_card(start: &Start, limit: Duration) -> Result<KnownCard, ProbeError> {
    if let Some(port) = &start.port {
        match port.owner().await {
            PortOwner::Own { .. } | PortOwner::Unknown => {}
            PortOwner::Free => return Err(ProbeError::NotListening { port: port.number(), instead: vec![] }),
            PortOwner::Other { process } => return Err(ProbeError::Foreign { port: port.number(), process }),
        }
    }
    let (config, chooser) = (&start.config, &start.chooser);
    let credentials = chooser.card_credentials();
    let reading = async {
        let card = match &config.card {
            None => {
                let path = config.card_path.as_deref();
                card::fetch(&chooser.http, &config.url, path, &credentials, &start.secrets).await?
            }
            Some(card) if accepts_connections(&config.url).await => Card::from_value(card.clone())?,
            Some(_) => return Err(CardError::NotListening { url: config.url.to_string() }),
        };
        let interface = chooser.choose(&card).await?;
        if let Some(failure) = interface.failure.filter(|failure| failure.prevents_calls()) {
            return Err(CardError::NotCallable(failure));
        }
        Ok(KnownCard { card: Arc::new(card), interface })
    };
    match tokio::time::timeout(limit, reading).await {
        // An agent may echo the credentials of the request.
        Ok(known) => known.map_err(|error: CardError| ProbeError::Card(error.redacted(&start.secrets))),
        Err(_) => Err(ProbeError::Card(CardError::Timeout { url: config.url.to_string(), limit })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_without_a_descriptor_says_nothing_about_the_agent() {
        let unreachable = |errno: Errno| {
            let source = Box::new(ClientError::Unreachable(io::Error::from(errno).into()));
            ProbeError::Card(CardError::Fetch { url: "http://127.0.0.1:9/".into(), source })
        };
        assert!(unreachable(Errno::EMFILE).lacks_descriptors());
        assert!(unreachable(Errno::ENFILE).lacks_descriptors());
        assert!(!unreachable(Errno::ECONNREFUSED).lacks_descriptors());
    }
}
