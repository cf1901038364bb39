//! One start of an agent: choosing a port, and waiting for readiness.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::Agent;
use super::diagnosis::Diagnosis;
use super::lifecycle::AgentEvent;
use super::probe::{self, ProbeError};
use crate::a2a::card::CardError;
use crate::a2a::choose::DialectChooser;
use crate::a2a::{self, HttpClient, PeerCheck, Verdict};
use crate::config::{self, Port};
use crate::offload;
use crate::process::agent_port::{AgentPort, Peer};
use crate::process::ports::{self, LocalPort, PortOwner};
use crate::secrets::Secrets;
use crate::text::error_chain;

/// First delay between startup probes.
const FIRST_DELAY: Duration = Duration::from_millis(10);
/// How long a starting agent may listen only on other ports before the status reports it. Some agents
/// open other ports first.
const WRONG_PORT_DELAY: Duration = Duration::from_secs(2);

pub(super) struct Start {
    pub(super) config: Arc<config::AgentConfig>,
    pub(super) chooser: Arc<DialectChooser>,
    pub(super) secrets: Secrets,
    /// The port that must belong to the agent; `None` if that is not checked.
    pub(super) port: Option<Arc<AgentPort>>,
    /// The root of the agent's process tree.
    pub(super) tree: Option<i32>,
}

/// Requests go to the agent's own processes only.
impl PeerCheck for AgentPort {
    fn check(&self, peer: SocketAddr, began: Instant) -> BoxFuture<'_, Verdict> {
        Box::pin(async move {
            match self.check_peer(peer, began).await {
                Peer::Agent => Verdict::Use,
                Peer::Changed => Verdict::Reconnect,
                Peer::Other => Verdict::Refuse,
            }
        })
    }
}

impl Start {
    pub(super) fn attached(agent: &Agent, http: &HttpClient) -> Result<Self, Diagnosis> {
        Self::new(Arc::clone(&agent.config), http, agent, None)
    }

    /// Chooses a port for `port: auto`, preferably `last_port`, and checks that no other process uses it.
    /// Cancel-safe.
    pub(super) async fn launched(
        agent: &Agent,
        http: &HttpClient,
        last_port: Option<u16>,
    ) -> Result<Self, Diagnosis> {
        let config = &agent.config;
        let config = match config.port {
            None => Arc::clone(config),
            Some(Port::Fixed(port)) => Arc::new(config.at_port(port)),
            Some(Port::Auto) => {
                // Keep the port while it is free: other programs may have learned it.
                let port = match last_port {
                    Some(port) if is_free(config, port).await => Ok(port),
                    _ => ports::free(),
                };
                let port = port.map_err(|error| {
                    let text = format!("no free port for `port: auto`: {error}");
                    Diagnosis::new(text, "configure a fixed `port`")
                })?;
                Arc::new(config.at_port(port))
            }
        };
        let port = LocalPort::of(&config.url).await.filter(|_| config.verify_port);
        if let Some(local) = &port
            && let PortOwner::Other { process } = offload::block(|| local.owner(None))
        {
            return Err(Diagnosis::port_taken(local.number, process.as_ref(), &config));
        }
        let Some(port) = port else { return Self::new(config, http, agent, None) };
        let port = Arc::new(AgentPort::new(Arc::clone(&agent.name), port));
        let http = http.with_peer_check(Arc::clone(&port) as Arc<dyn PeerCheck>);
        Self::new(config, &http, agent, Some(port))
    }

    /// Sets the root of the agent's process tree.
    pub(super) fn launched_as(&mut self, tree: i32) {
        self.tree = Some(tree);
        if let Some(port) = &self.port {
            port.launched(tree);
        }
    }

    fn new(
        config: Arc<config::AgentConfig>,
        http: &HttpClient,
        agent: &Agent,
        port: Option<Arc<AgentPort>>,
    ) -> Result<Self, Diagnosis> {
        let secrets = &agent.secrets;
        let chooser = a2a::chooser(&config, http, secrets, Arc::clone(&agent.memory)).map_err(|error| {
            let advice = "check the credentials and `tls` in the agent's configuration";
            Diagnosis::new(error_chain(&error), advice)
        })?;
        Ok(Self { config, chooser: Arc::new(chooser), secrets: secrets.clone(), port, tree: None })
    }
}

async fn is_free(config: &config::AgentConfig, port: u16) -> bool {
    let local = LocalPort::of(&config.at_port(port).url).await;
    local.is_none_or(|local| matches!(offload::block(|| local.owner(None)), PortOwner::Free))
}

/// Probes a launched agent until it serves a usable card or `startup_timeout` expires.
pub(super) struct StartupProbe {
    deadline: Instant,
    retry_delay: Duration,
    next: Instant,
    last: Option<ProbeError>,
    /// When the agent was first seen listening only on other ports.
    wrong_port_since: Option<Instant>,
    is_delayed: bool,
}

impl StartupProbe {
    pub(super) fn new(config: &config::AgentConfig) -> Self {
        let now = Instant::now();
        Self {
            deadline: now + config.startup_timeout,
            retry_delay: FIRST_DELAY.min(config.startup.interval),
            next: now,
            last: None,
            wrong_port_since: None,
            is_delayed: false,
        }
    }

    /// Probes until there is an event. Cancel-safe: an interrupted probe is repeated.
    pub(super) async fn next(&mut self, start: &Start, name: &str) -> AgentEvent {
        let config = &start.config;
        loop {
            tokio::time::sleep_until(self.next).await;
            let left = self.deadline.saturating_duration_since(Instant::now());
            let is_cut = left < config.startup.timeout;
            match probe::read_card(start, config.startup.timeout.min(left)).await {
                Ok(known) => return AgentEvent::CardRead(known),
                // The port belongs to another process; waiting does not help.
                Err(error @ ProbeError::Foreign { .. }) => {
                    return AgentEvent::NotStarted(Diagnosis::probe(&error, config));
                }
                // A restart does not help against wrong credentials.
                Err(error @ ProbeError::Card(CardError::NotCallable(_))) => {
                    return AgentEvent::CardUnusable(Diagnosis::probe(&error, config));
                }
                // The deadline cut this probe short; the previous error is more useful.
                Err(error) if is_cut && error.is_timeout() && self.last.is_some() => {}
                Err(ProbeError::NotListening { port, .. }) => {
                    let addresses = |tree| offload::block(|| ports::listening_addresses(tree));
                    let instead = start.tree.map(addresses).unwrap_or_default();
                    self.last = Some(ProbeError::NotListening { port, instead });
                }
                Err(error) => self.last = Some(error),
            }
            let lacks_descriptors = self.last.as_ref().is_some_and(ProbeError::lacks_descriptors);
            if Instant::now() + self.retry_delay >= self.deadline && !lacks_descriptors {
                let unreachable = ProbeError::Card(CardError::NotListening { url: config.url.to_string() });
                let error = self.last.take().unwrap_or(unreachable);
                return AgentEvent::NotStarted(Diagnosis::slow_start(&error, config));
            }
            self.next = Instant::now() + self.retry_delay;
            self.retry_delay = (self.retry_delay * 3 / 2).min(config.startup.interval);
            if let Some(event) = self.delay(config, name) {
                return event;
            }
        }
    }

    /// Reports that the agent listens on another port, or that it no longer does.
    fn delay(&mut self, config: &config::AgentConfig, name: &str) -> Option<AgentEvent> {
        let error = self.last.as_ref()?;
        if !matches!(error, ProbeError::NotListening { instead, .. } if !instead.is_empty()) {
            self.wrong_port_since = None;
            return std::mem::take(&mut self.is_delayed).then_some(AgentEvent::Delayed(None));
        }
        let since = *self.wrong_port_since.get_or_insert_with(Instant::now);
        if self.is_delayed || since.elapsed() < WRONG_PORT_DELAY {
            return None;
        }
        self.is_delayed = true;
        let Diagnosis { text, advice, short } = Diagnosis::probe(error, config);
        tracing::warn!(agent = %name, advice, "still starting: {text}");
        Some(AgentEvent::Delayed(Some(Diagnosis { text: format!("still starting: {text}"), advice, short })))
    }
}
