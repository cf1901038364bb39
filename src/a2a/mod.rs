//! The client side of A2A: an agent's card, its dialect, and requests to it. Knows nothing of NATS.
//!
//! ```text
//! card::fetch ──> Card ──DialectChooser::choose──> Interface ──DialectChooser::client──> Client
//!                                                                                          │ send / stream / get / cancel
//! OutgoingMessage ──Dialect::message_call──> HTTP ──Dialect::read_send_result──> SendResult (Task | Message)
//! ```

mod address;
pub(crate) mod auth;
pub(crate) mod card;
pub(crate) mod choose;
pub(crate) mod client;
mod decode;
pub(crate) mod dialect;
mod error_text;
mod http;
mod meter;
pub(crate) mod model;
mod response_ids;
pub(crate) mod retry;
pub(crate) mod security;
pub(crate) mod sse;
pub(crate) mod stream;
#[cfg(test)]
pub(crate) mod tests;

use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::config;
use crate::memory::MemoryAccount;
use crate::secrets::Secrets;
use auth::{AuthError, Keyring};
use choose::DialectChooser;
pub(crate) use decode::decode_parts;
pub(crate) use http::{HttpClient, PeerCheck, Verdict};

/// One running agent as calls see it; its card is known.
#[derive(Debug)]
pub struct LiveAgent {
    pub client: client::Client,
    pub card: Arc<card::Card>,
    pub interface: card::Interface,
    /// Cancelled when the agent's process exits, or when the supervisor begins to stop it; its tasks are lost then.
    pub exited: CancellationToken,
}

pub(crate) fn http_client() -> reqwest::Result<HttpClient> {
    HttpClient::new()
}

/// Sets up everything that is needed to probe an agent and to call it.
///
/// An agent with `tls` settings gets a client of its own in place of `http`. `secrets` learns the access tokens, so
/// that they are redacted. Responses are charged to `memory`.
pub(crate) fn chooser(
    config: &config::AgentConfig,
    http: &HttpClient,
    secrets: &Secrets,
    memory: Arc<MemoryAccount>,
) -> Result<DialectChooser, AuthError> {
    let http = &http.for_another_agent();
    let Some(tls) = &config.tls else {
        let keyring = Keyring::new(config, &http.reqwest, secrets)?;
        return Ok(DialectChooser::new(config, http.clone(), http.clone(), keyring, memory));
    };
    let with_authorities = || -> Result<reqwest::ClientBuilder, AuthError> {
        let Some(ca) = &tls.ca else {
            return Ok(http::builder());
        };
        let pem = std::fs::read(ca).map_err(|e| tls_error(ca, e.into()))?;
        let certificates =
            reqwest::Certificate::from_pem_bundle(&pem).map_err(|e| tls_error(ca, e.into()))?;
        if certificates.is_empty() {
            return Err(tls_error(ca, "the file contains no certificate".into()));
        }
        Ok(http::builder().tls_certs_only(certificates))
    };
    let with_identity = || {
        let (Some(cert), Some(key)) = (&tls.cert, &tls.key) else {
            return with_authorities();
        };
        let mut pem = std::fs::read(cert).map_err(|e| tls_error(cert, e.into()))?;
        pem.push(b'\n');
        pem.extend(std::fs::read(key).map_err(|e| tls_error(key, e.into()))?);
        let identity = reqwest::Identity::from_pem(&pem).map_err(|e| tls_error(cert, e.into()))?;
        Ok(with_authorities()?.identity(identity))
    };
    // The client certificate is for the agent, not for the token endpoint.
    let without_identity = http.with_tls(with_authorities)?;
    let with_identity = http.with_tls(with_identity)?;
    let keyring = Keyring::new(config, &without_identity.reqwest, secrets)?;
    Ok(DialectChooser::new(config, with_identity, without_identity, keyring, memory))
}

fn tls_error(path: &Path, source: Box<dyn std::error::Error + Send + Sync>) -> AuthError {
    AuthError::Tls { path: path.display().to_string(), source }
}
