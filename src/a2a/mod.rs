//! One agent's HTTP face: its card, its dialect, calls to it. Nothing about NATS.
//!
//! ```text
//! card::fetch ──> Card ──interface──> Interface ──> Client::new
//!                                                     │ send / get / cancel
//! Outgoing ──Dialect::send──> HTTP ──Dialect::read──> Answer (Task | Message)
//! ```

pub mod auth;
pub mod card;
pub mod client;
pub mod dialect;
pub mod model;
mod sse;
pub mod stream;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// A running agent that has shown its card: what a call needs to reach it.
#[derive(Debug)]
pub struct Instance {
    /// Calls go through here.
    pub client: client::Client,
    /// The card it showed.
    pub card: Arc<card::Card>,
    /// Where and how it is called.
    pub interface: card::Interface,
    /// Cancelled when the process behind it is gone, and its tasks with it.
    pub gone: CancellationToken,
}

/// The HTTP client that all agents share.
///
/// Redirects are not followed and proxy variables not read: credentials belong to the configured
/// origin. Idle connections are dropped early because common servers close theirs after five
/// seconds, and a call on a connection that is just being closed has an unknown outcome.
pub fn http_client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder()
        .user_agent(concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(Duration::from_secs(10))
        .pool_idle_timeout(Duration::from_secs(4))
        .tcp_nodelay(true)
        .build()
}
