//! One start of an agent: a port that is free, and the wait until its card is there.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::life::Life;
use super::status::KnownCard;
use super::trouble::{LookError, Trouble};
use crate::a2a;
use crate::a2a::card::CardError;
use crate::a2a::choose::Chooser;
use crate::a2a::client::chain;
use crate::config::{self, Port};
use crate::process::ports::{self, Holder, LocalPort};

/// First pause between two looks at an agent that starts.
const FIRST_LOOK: Duration = Duration::from_millis(10);
/// How long an agent that starts may listen elsewhere only, before that is told: some open other
/// ports first.
const ELSEWHERE: Duration = Duration::from_secs(2);

/// One start of the agent: its settings with the port filled in, and what is known to be its own.
pub(super) struct Start {
    pub(super) config: Arc<config::Agent>,
    /// Chooses among the wires of this start, at its address.
    pub(super) chooser: Arc<Chooser>,
    /// The port whose listener has to be ours; `None` where that is not asked or not possible.
    pub(super) port: Option<LocalPort>,
    /// The process below which everything is ours.
    pub(super) tree: Option<i32>,
    order: u64,
}

impl Start {
    /// Of an agent that somebody else runs.
    pub(super) fn attached(config: Arc<config::Agent>, chooser: Arc<Chooser>, order: u64) -> Self {
        Self { config, chooser, port: None, tree: None, order }
    }

    pub(super) fn order(&self) -> u64 {
        self.order
    }
}

impl Life {
    /// Finds a port if the settings leave that to us, and sees that the port is free.
    pub(super) async fn place(&self, order: u64, last_port: &mut Option<u16>) -> Result<Start, Trouble> {
        let config = match self.config.port {
            None => Arc::clone(&self.config),
            Some(Port::Fixed(port)) => Arc::new(self.config.at_port(port)),
            Some(Port::Auto) => {
                // The same again, as long as it is free: others may have come to know it.
                let again = match *last_port {
                    Some(port) if self.is_free(port).await => Ok(port),
                    _ => ports::free(),
                };
                let port = match again {
                    Ok(port) => port,
                    Err(error) => {
                        return Err(Trouble {
                            text: format!("no free port for `port: auto`: {error}"),
                            advice: "give the agent a fixed port".into(),
                        });
                    }
                };
                *last_port = Some(port);
                Arc::new(self.config.at_port(port))
            }
        };
        let port = LocalPort::of(&config.url).await.filter(|_| config.verify_port);
        if let Some(local) = &port
            && let Holder::Foreign { process } = local.holder(None)
        {
            return Err(Trouble::port_taken(local.number, process.as_ref(), &config));
        }
        Ok(Start { chooser: self.chooser(&config)?, config, port, tree: None, order })
    }

    async fn is_free(&self, port: u16) -> bool {
        let local = LocalPort::of(&self.config.at_port(port).url).await;
        local.is_none_or(|local| matches!(local.holder(None), Holder::Nobody))
    }

    /// What chooses among the wires of an agent with these settings.
    pub(super) fn chooser(&self, config: &config::Agent) -> Result<Arc<Chooser>, Trouble> {
        let chooser = a2a::chooser(config, &self.http).map_err(|error| Trouble {
            text: chain(&error),
            advice: "check the agent's credentials and `tls` in the settings".into(),
        });
        chooser.map(Arc::new)
    }

    /// Asks for the card until the agent shows a usable one.
    pub(super) async fn until_ready(&self, start: &Start) -> Result<KnownCard, LookError> {
        let config = &start.config;
        let deadline = Instant::now() + config.startup_timeout;
        let mut pause = FIRST_LOOK.min(config.startup.interval);
        let mut last = None;
        let mut elsewhere = Elsewhere::default();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let cut = left < config.startup.timeout;
            match self.look(start, config.startup.timeout.min(left)).await {
                Ok(known) => return Ok(known),
                // Waiting does not make somebody else's port ours.
                Err(error @ LookError::Foreign { .. }) => return Err(error),
                // A look that the deadline cut short says less than the one before it.
                Err(error) if cut && error.is_silence() && last.is_some() => {}
                Err(LookError::NotListening { port, .. }) => {
                    let instead = start.tree.map(ports::listened_by).unwrap_or_default();
                    last = Some(LookError::NotListening { port, instead });
                }
                Err(error) => last = Some(error),
            }
            if Instant::now() + pause >= deadline {
                let nobody = || LookError::Card(CardError::NobodyThere { url: config.url.to_string() });
                return Err(last.unwrap_or_else(nobody));
            }
            if let Some(error) = &last {
                elsewhere.note(self, error, config);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 3 / 2).min(config.startup.interval);
        }
    }
}

/// Whether an agent that starts listens, but not where it is looked for, and since when.
#[derive(Default)]
struct Elsewhere {
    since: Option<Instant>,
    /// What was known to be wrong before this was told.
    told: Option<(Option<String>, Option<String>)>,
}

impl Elsewhere {
    /// Tells it once, and takes it back when it is over. The agent goes on to start.
    fn note(&mut self, life: &Life, error: &LookError, config: &config::Agent) {
        if !matches!(error, LookError::NotListening { instead, .. } if !instead.is_empty()) {
            self.since = None;
            if let Some(before) = self.told.take() {
                life.status.send_modify(|status| (status.last_error, status.advice) = before);
            }
            return;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.told.is_some() || since.elapsed() < ELSEWHERE {
            return;
        }
        let Trouble { text, advice } = Trouble::look(error, config);
        tracing::warn!(agent = %life.name, advice, "still starting: {text}");
        life.status.send_modify(|status| {
            let error = status.last_error.replace(format!("still starting: {text}"));
            self.told = Some((error, status.advice.replace(advice)));
        });
    }
}
