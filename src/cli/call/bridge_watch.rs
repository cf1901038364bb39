//! Detects that the bridge which runs a call is gone, for example because it was killed.
//!
//! The bridge names its instance in the first frame (`A2A-Instance`), and sends a keep-alive after 15 s of silence. It is
//! gone when neither has been seen for [`GONE_AFTER`]: no frame, and no reply of that instance to `$SRV.INFO`.
//!
//! - A replica, or a bridge that has restarted, has another id. It replies to `$SRV.INFO`, but does not have the call.
//! - A bridge that reconnects to NATS in time keeps its id.
//! - A bridge that shuts down no longer replies to `$SRV.INFO`, but still sends keep-alives and the reply. Only with a
//!   `stream_keepalive` longer than [`GONE_AFTER`] can a long `shutdown_grace` look like a bridge that is gone.
//! - Without a first frame, as from a bridge that does not know `A2A-Ack`, any instance of the agent counts.

use std::cell::RefCell;
use std::time::Duration;

use async_nats::Message;
use async_nats::connection::State;
use tokio::time::Instant;

use crate::bus::subject::Token;
use crate::cli::client::NatsClient;
use crate::cli::discover::discover_agent;

/// Longer than the default of `stream_keepalive`, and than a shutdown with the default grace period.
const GONE_AFTER: Duration = Duration::from_secs(16);
/// Poll interval during silence.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(in crate::cli) struct BridgeWatch<'a> {
    mesh: &'a NatsClient,
    agent: &'a Token,
    seen: RefCell<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// The instance that runs the call, if it is known.
    instance: Option<String>,
    last: Instant,
}

impl<'a> BridgeWatch<'a> {
    pub(in crate::cli) fn new(mesh: &'a NatsClient, agent: &'a Token) -> Self {
        Self { mesh, agent, seen: RefCell::new(Seen { instance: None, last: Instant::now() }) }
    }

    /// Takes note of a message from the bridge.
    pub(in crate::cli) fn saw(&self, message: &Message) {
        let mut seen = self.seen.borrow_mut();
        seen.last = Instant::now();
        let instance = message.headers.as_ref().and_then(|headers| headers.get("A2A-Instance"));
        if let Some(instance) = instance {
            seen.instance = Some(instance.as_str().to_owned());
        }
    }

    /// Returns when the bridge is gone. A probe takes up to seconds, so poll the same future until then.
    pub(in crate::cli) async fn gone(&self) {
        loop {
            tokio::time::sleep(PROBE_INTERVAL).await;
            let is_served = self.is_served().await;
            let mut seen = self.seen.borrow_mut();
            if is_served {
                seen.last = Instant::now();
            } else if seen.last.elapsed() >= GONE_AFTER {
                return;
            }
        }
    }

    /// Whether the instance is there, as far as this client can tell.
    async fn is_served(&self) -> bool {
        if self.mesh.client.connection_state() != State::Connected {
            return true;
        }
        match discover_agent(self.mesh, self.agent).await {
            Ok(discovery) => {
                let instance = self.seen.borrow().instance.clone();
                let is_it = |id: &str| instance.as_ref().is_none_or(|instance| id == instance);
                discovery.agents.iter().any(|agent| is_it(&agent.instance))
            }
            // The user has no permission to ask.
            Err(_) => true,
        }
    }
}
