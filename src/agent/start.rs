//! One start of an agent: a free port, probes of its card, and the wait until it is ready.

use crate::text::error_chain;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::lifecycle::Event;
use super::probe;
use super::status::KnownCard;
use super::trouble::{ProbeError, Trouble};
use crate::a2a;
use crate::a2a::card::CardError;
use crate::a2a::choose::Chooser;
use crate::config::{self, Port};
use crate::process::ports::{self, Holder, LocalPort};
use crate::secrets::Secrets;

/// First pause between two probes of an agent that starts.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// How long an agent that starts may listen on other ports only before the status says so: some open
/// other ports first.
const ELSEWHERE: Duration = Duration::from_secs(2);

/// One start of the agent: its settings with the port filled in, and what is known to be its own.
pub(super) struct Start {
    pub(super) config: Arc<config::AgentConfig>,
    /// Chooses among the interfaces of this start, at its address.
    pub(super) chooser: Arc<Chooser>,
    secrets: Secrets,
    /// The port whose listener has to be ours; `None` where that is not asked or not possible.
    pub(super) port: Option<LocalPort>,
    /// The process below which everything is ours.
    pub(super) tree: Option<i32>,
}

impl Start {
    /// Of an agent that somebody else runs.
    pub(super) fn attached(
        config: &Arc<config::AgentConfig>,
        http: &reqwest::Client,
        secrets: &Secrets,
    ) -> Result<Self, Trouble> {
        Self::new(Arc::clone(config), http, secrets, None)
    }

    /// Finds a port if the settings leave that to us, and checks that the port is free. `last_port` was
    /// that of the last start. Cancel-safe.
    pub(super) async fn launched(
        config: &Arc<config::AgentConfig>,
        http: &reqwest::Client,
        secrets: &Secrets,
        last_port: Option<u16>,
    ) -> Result<Self, Trouble> {
        let config = match config.port {
            None => Arc::clone(config),
            Some(Port::Fixed(port)) => Arc::new(config.at_port(port)),
            Some(Port::Auto) => {
                // The same again, as long as it is free: others may have come to know it.
                let port = match last_port {
                    Some(port) if is_free(config, port).await => Ok(port),
                    _ => ports::free(),
                };
                let port = port.map_err(|error| Trouble {
                    text: format!("no free port for `port: auto`: {error}"),
                    advice: "give the agent a fixed port".into(),
                })?;
                Arc::new(config.at_port(port))
            }
        };
        let port = LocalPort::of(&config.url).await.filter(|_| config.verify_port);
        if let Some(local) = &port
            && let Holder::Foreign { process } = local.holder(None)
        {
            return Err(Trouble::port_taken(local.number, process.as_ref(), &config));
        }
        Self::new(config, http, secrets, port)
    }

    fn new(
        config: Arc<config::AgentConfig>,
        http: &reqwest::Client,
        secrets: &Secrets,
        port: Option<LocalPort>,
    ) -> Result<Self, Trouble> {
        let chooser = chooser(&config, http, secrets)?;
        Ok(Self { config, chooser, secrets: secrets.clone(), port, tree: None })
    }

    /// Reads the agent's card once. Whose port it is comes first: what is not ours is sent nothing.
    pub(super) async fn probe(&self, limit: Duration) -> Result<KnownCard, ProbeError> {
        if let Some(port) = &self.port {
            match port.holder(self.tree) {
                Holder::Ours(_) | Holder::Unknown => {}
                Holder::Nobody => {
                    return Err(ProbeError::NotListening { port: port.number, instead: Vec::new() });
                }
                Holder::Foreign { process } => {
                    return Err(ProbeError::Foreign { port: port.number, process });
                }
            }
        }
        let credentials = self.chooser.card_credentials();
        let reading = async {
            let card = probe::read_card(&self.config, self.chooser.http(), &credentials).await?;
            let interface = self.chooser.choose(&card).await?;
            Ok(KnownCard { card: Arc::new(card), interface })
        };
        match tokio::time::timeout(limit, reading).await {
            // An agent may repeat the credentials that it was asked with.
            Ok(known) => known.map_err(|error: CardError| ProbeError::Card(error.redacted(&self.secrets))),
            Err(_) => Err(ProbeError::Card(CardError::Timeout { url: self.config.url.to_string(), limit })),
        }
    }
}

async fn is_free(config: &config::AgentConfig, port: u16) -> bool {
    let local = LocalPort::of(&config.at_port(port).url).await;
    local.is_none_or(|local| matches!(local.holder(None), Holder::Nobody))
}

fn chooser(
    config: &config::AgentConfig,
    http: &reqwest::Client,
    secrets: &Secrets,
) -> Result<Arc<Chooser>, Trouble> {
    let chooser = a2a::chooser(config, http, secrets).map_err(|error| Trouble {
        text: error_chain(&error),
        advice: "check the agent's credentials and `tls` in the settings".into(),
    });
    chooser.map(Arc::new)
}

/// Probes a launched agent until it shows a usable card or `startup_timeout` is over.
pub(super) struct StartupProbe {
    deadline: Instant,
    pause: Duration,
    next: Instant,
    last: Option<ProbeError>,
    /// Since when it listens, but on other ports only.
    elsewhere: Option<Instant>,
    is_delayed: bool,
}

impl StartupProbe {
    pub(super) fn new(config: &config::AgentConfig) -> Self {
        let now = Instant::now();
        Self {
            deadline: now + config.startup_timeout,
            pause: FIRST_PAUSE.min(config.startup.interval),
            next: now,
            last: None,
            elsewhere: None,
            is_delayed: false,
        }
    }

    /// Probes until there is something to report. Cancel-safe: a probe that was interrupted is repeated.
    pub(super) async fn next(&mut self, start: &Start, name: &str) -> Event {
        let config = &start.config;
        loop {
            tokio::time::sleep_until(self.next).await;
            let left = self.deadline.saturating_duration_since(Instant::now());
            let is_cut = left < config.startup.timeout;
            match start.probe(config.startup.timeout.min(left)).await {
                Ok(known) => return Event::Found(known),
                // Waiting does not make somebody else's port ours.
                Err(error @ ProbeError::Foreign { .. }) => {
                    return Event::NotStarted(Trouble::probe(&error, config));
                }
                // A probe that the deadline cut short says less than the one before it.
                Err(error) if is_cut && error.is_silence() && self.last.is_some() => {}
                Err(ProbeError::NotListening { port, .. }) => {
                    let instead = start.tree.map(ports::listened_by).unwrap_or_default();
                    self.last = Some(ProbeError::NotListening { port, instead });
                }
                Err(error) => self.last = Some(error),
            }
            if Instant::now() + self.pause >= self.deadline {
                let nobody = ProbeError::Card(CardError::NobodyThere { url: config.url.to_string() });
                let error = self.last.take().unwrap_or(nobody);
                return Event::NotStarted(Trouble::slow_start(&error, config));
            }
            self.next = Instant::now() + self.pause;
            self.pause = (self.pause * 3 / 2).min(config.startup.interval);
            if let Some(event) = self.delay(config, name) {
                return event;
            }
        }
    }

    /// Whether the status should say that the agent listens elsewhere, or not any more.
    fn delay(&mut self, config: &config::AgentConfig, name: &str) -> Option<Event> {
        let error = self.last.as_ref()?;
        if !matches!(error, ProbeError::NotListening { instead, .. } if !instead.is_empty()) {
            self.elsewhere = None;
            return std::mem::take(&mut self.is_delayed).then_some(Event::Delayed(None));
        }
        let since = *self.elsewhere.get_or_insert_with(Instant::now);
        if self.is_delayed || since.elapsed() < ELSEWHERE {
            return None;
        }
        self.is_delayed = true;
        let Trouble { text, advice } = Trouble::probe(error, config);
        tracing::warn!(agent = %name, advice, "still starting: {text}");
        Some(Event::Delayed(Some(Trouble { text: format!("still starting: {text}"), advice })))
    }
}
