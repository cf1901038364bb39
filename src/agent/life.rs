//! The loop: start, wait until ready, watch, start again.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::probe;
use super::status::{KnownCard, State, Status};
use crate::a2a::Instance;
use crate::a2a::card::{Card, CardError};
use crate::a2a::choose::{Chooser, SecondThoughts};
use crate::a2a::client::chain;
use crate::config;
use crate::process::child::{Child, Spec};
use crate::process::restart::Backoff;
use crate::tasks::Tasks;

/// Pauses before a launched agent is started again.
const RESTART: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Pauses before an attached agent is looked for again: looking costs little.
const LOOK: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// After this time without trouble the pauses begin small again.
const STABLE_AFTER: Duration = Duration::from_secs(60);
/// How long a launched agent may take to end after SIGTERM.
const STOP_GRACE: Duration = Duration::from_secs(10);
/// How often a launched agent is asked for its card until it shows one.
const STARTUP_POLL: Duration = Duration::from_millis(100);
/// How often an attached agent is checked for its presence; a launched one is a child.
const PRESENCE: Duration = Duration::from_secs(3);
/// How often in a row an agent may fail to show its card before its skills are withdrawn.
const MAX_CARD_FAILURES: u32 = 3;

pub(super) struct Life {
    pub(super) config: Arc<config::Agent>,
    pub(super) name: Arc<str>,
    pub(super) chooser: Arc<Chooser>,
    pub(super) tasks: Tasks,
    pub(super) status: watch::Sender<Status>,
    pub(super) live: watch::Sender<Option<Arc<Instance>>>,
    pub(super) doubt: Arc<Notify>,
    pub(super) stop: CancellationToken,
    pub(super) hurry: CancellationToken,
}

/// How one start of the agent ended.
enum Ended {
    /// The bridge lets it go.
    Stopped,
    /// It is gone, or never came.
    Lost { reason: String, was_ready_for: Duration },
}

impl Life {
    pub(super) async fn run(self) {
        let (first, longest) = if self.config.command.is_some() {
            RESTART
        } else {
            LOOK
        };
        let mut backoff = Backoff::new(first, longest);
        loop {
            let ended = match &self.config.command {
                Some(command) => self.launched(command).await,
                None => self.watched(None, CancellationToken::new()).await,
            };
            let Ended::Lost {
                reason,
                was_ready_for,
            } = ended
            else {
                break;
            };
            if self.config.command.is_some() && !self.config.restart_on_crash {
                tracing::error!(agent = %self.name, reason, "agent ended; `restart_on_crash` is false");
                self.enter(
                    State::Failed,
                    Some(format!(
                        "{reason}; not started again: `restart_on_crash` is false"
                    )),
                );
                self.stop.cancelled().await;
                break;
            }
            if was_ready_for >= STABLE_AFTER {
                backoff.reset();
            }
            let pause = backoff.pause();
            // The same reason every few seconds helps nobody.
            if self.status.borrow().last_error.as_deref() == Some(reason.as_str()) {
                tracing::debug!(agent = %self.name, reason, ?pause, "agent still not available");
            } else {
                tracing::warn!(agent = %self.name, reason, ?pause, "agent not available; trying again");
            }
            self.enter(State::BackingOff, Some(reason));
            tokio::select! {
                biased;
                () = self.stop.cancelled() => break,
                () = tokio::time::sleep(pause) => {}
            }
            if self.config.command.is_some() {
                self.status.send_modify(|status| status.restarts += 1);
                self.enter(State::Starting, None);
            }
        }
        self.withdraw(State::Stopped, None);
    }

    /// One start of a launched agent, from spawn to end.
    async fn launched(&self, command: &[String]) -> Ended {
        let lost = |reason| Ended::Lost {
            reason,
            was_ready_for: Duration::ZERO,
        };
        let spec = Spec {
            command: command.to_vec(),
            working_dir: self.config.working_dir.clone(),
            env: self.config.env.clone(),
        };
        let mut child = match Child::spawn(&spec, &self.name, &self.tasks) {
            Ok(child) => child,
            Err(error) => return lost(chain(&error)),
        };
        tracing::info!(agent = %self.name, pid = child.pid(), "agent launched");
        let gone = CancellationToken::new();
        let ended = tokio::select! {
            biased;
            exit = child.wait() => {
                child.sweep();
                return lost(format!("the agent {exit} before it showed its card{}", last_words(&child)));
            }
            ready = self.until_ready() => match ready {
                Ok(card) => self.watched(Some((&mut child, card)), gone.clone()).await,
                Err(error) => lost(format!(
                    "no usable card within {}s (`startup_timeout`): {}{}",
                    self.config.startup_timeout.as_secs_f64(), chain(&error), last_words(&child)
                )),
            },
            () = self.stop.cancelled() => Ended::Stopped,
        };
        // Its tasks go with it.
        self.live.send_replace(None);
        gone.cancel();
        let started = Instant::now();
        let exit = child.stop(STOP_GRACE, &self.hurry).await;
        tracing::info!(agent = %self.name, took = ?started.elapsed(), "agent {exit}");
        ended
    }

    /// Asks for the card until the agent shows a usable one.
    async fn until_ready(&self) -> Result<KnownCard, CardError> {
        let deadline = Instant::now() + self.config.startup_timeout;
        loop {
            let error = match tokio::time::timeout_at(deadline, self.look()).await {
                Ok(Ok(known)) => return Ok(known),
                Ok(Err(error)) => error,
                Err(_) => CardError::Timeout {
                    url: self.config.url.to_string(),
                },
            };
            if Instant::now() + STARTUP_POLL >= deadline {
                return Err(error);
            }
            tokio::time::sleep(STARTUP_POLL).await;
        }
    }

    /// Watches an agent, from its first card to its end: a launched one that is ready, or one
    /// that somebody else runs.
    async fn watched(&self, mut launched: Option<(&mut Child, KnownCard)>, gone: CancellationToken) -> Ended {
        let is_launched = launched.is_some();
        let known = match launched.as_mut() {
            Some((_, known)) => known.clone(),
            None => match self.unless_stopped(self.look()).await {
                None => return Ended::Stopped,
                Some(Ok(known)) => known,
                Some(Err(error)) => {
                    return Ended::Lost {
                        reason: chain(&error),
                        was_ready_for: Duration::ZERO,
                    };
                }
            },
        };
        let since = Instant::now();
        let lost = |reason| Ended::Lost {
            reason,
            was_ready_for: since.elapsed(),
        };
        self.show(known, &gone);
        let mut failures = 0;
        let mut refresh = Instant::now() + self.config.card_refresh;
        loop {
            let exit = async {
                match launched.as_mut() {
                    Some((child, _)) => child.wait().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return Ended::Stopped,
                exit = exit => {
                    self.live.send_replace(None);
                    let words = launched.as_ref().map(|(child, _)| last_words(child)).unwrap_or_default();
                    return lost(format!("the agent {exit}{words}"));
                }
                () = self.doubt.notified() => {}
                () = tokio::time::sleep_until(refresh) => {}
                () = tokio::time::sleep(PRESENCE), if !is_launched => {
                    if probe::accepts_connections(&self.config.url).await {
                        continue;
                    }
                }
            }
            refresh = Instant::now() + self.config.card_refresh;
            match self.unless_stopped(self.look()).await {
                None => return Ended::Stopped,
                Some(Ok(known)) => {
                    failures = 0;
                    self.show(known, &gone);
                }
                // Nobody is there: the skills go at once.
                Some(Err(error)) if !is_launched && error.is_nobody_there() => {
                    self.live.send_replace(None);
                    return lost(chain(&error));
                }
                Some(Err(error)) => {
                    failures += 1;
                    tracing::warn!(agent = %self.name, error = chain(&error), failures, "cannot read the card again");
                    if failures >= MAX_CARD_FAILURES {
                        self.withdraw(State::Unhealthy, Some(chain(&error)));
                    }
                    refresh = refresh.min(Instant::now() + LOOK.1);
                }
            }
        }
    }

    async fn look(&self) -> Result<KnownCard, CardError> {
        let credentials = self.chooser.card_credentials();
        let card = probe::read_card(&self.config, self.chooser.http(), &credentials).await?;
        let interface = self.chooser.choose(&card).await?;
        Ok(KnownCard {
            card: Arc::new(card),
            interface,
        })
    }

    async fn unless_stopped<T>(&self, wait: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            result = wait => Some(result),
        }
    }

    /// Makes the agent ready with this card, or changes the card of a ready one.
    fn show(&self, known: KnownCard, gone: &CancellationToken) {
        let is_new = {
            let status = self.status.borrow();
            status.state != State::Ready || status.known.as_ref() != Some(&known)
        };
        if !is_new {
            return;
        }
        self.warn_about(&known.card);
        let client = match self.chooser.client(&known.card, &known.interface) {
            Ok(client) => client.reconsidering(SecondThoughts {
                chooser: Arc::clone(&self.chooser),
                card: Arc::clone(&known.card),
                changed: Arc::clone(&self.doubt),
            }),
            // Choosing has asked for the same credentials.
            Err(error) => return self.withdraw(State::Unhealthy, Some(chain(&error))),
        };
        let instance = Instance {
            client,
            card: Arc::clone(&known.card),
            interface: known.interface.clone(),
            gone: gone.clone(),
        };
        tracing::info!(
            agent = %self.name,
            skills = known.card.skills.len(),
            protocol = known.interface.dialect.protocol_version(),
            binding = known.interface.dialect.binding(),
            because = known.interface.because,
            endpoint = %known.interface.url,
            "agent ready"
        );
        self.live.send_replace(Some(Arc::new(instance)));
        self.status.send_modify(|status| {
            if status.state != State::Ready {
                status.since = SystemTime::now();
            }
            status.state = State::Ready;
            status.last_error = None;
            status.known = Some(known);
        });
    }

    fn warn_about(&self, card: &Card) {
        let seen = self
            .status
            .borrow()
            .known
            .as_ref()
            .is_some_and(|known| known.card.hash() == card.hash());
        if !seen {
            for warning in &card.warnings {
                tracing::warn!(agent = %self.name, "{warning}");
            }
        }
    }

    fn withdraw(&self, state: State, error: Option<String>) {
        self.live.send_replace(None);
        self.enter(state, error);
    }

    fn enter(&self, state: State, error: Option<String>) {
        self.status.send_modify(|status| {
            if status.state != state {
                status.since = SystemTime::now();
            }
            status.state = state;
            // Starting again does not explain the last end away.
            if state != State::Starting {
                status.last_error = error;
            }
        });
    }
}

/// What the child wrote last, for people who wonder why it ended.
fn last_words(child: &Child) -> String {
    let lines = child.last_lines().tail(3);
    if lines.is_empty() {
        String::new()
    } else {
        format!("; it wrote last: {}", lines.join(" | "))
    }
}
