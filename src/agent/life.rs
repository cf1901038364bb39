//! The loop: start, wait until ready, watch, start again; or rest, when somebody said so.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::calls::Calls;
use super::probe;
use super::start::Start;
use super::status::{KnownCard, State, Status};
use super::trouble::{LookError, Trouble};
use crate::a2a::Instance;
use crate::a2a::card::{Card, CardError};
use crate::a2a::choose::SecondThoughts;
use crate::config::{self, Restart};
use crate::process::child::{Child, Exit, Host, Spec};
use crate::process::output::Output;
use crate::process::ports::Holder;
use crate::process::restart::{Backoff, Budget};

/// Pauses before a launched agent is started again.
const RESTART: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Pauses before an attached agent is looked for again: looking costs little.
pub(super) const LOOK: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));
/// How many of its last lines go into the log when an agent ends.
const LAST_LINES: usize = 3;

/// What the agent is to do, as last ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) running: bool,
    /// Counts the orders, so that a restart is an order too.
    pub(super) order: u64,
}

pub(super) struct Life {
    pub(super) config: Arc<config::Agent>,
    pub(super) name: Arc<str>,
    pub(super) http: reqwest::Client,
    pub(super) host: Host,
    pub(super) output: Output,
    pub(super) calls: Arc<Calls>,
    pub(super) status: watch::Sender<Status>,
    pub(super) live: watch::Sender<Option<Arc<Instance>>>,
    pub(super) wanted: watch::Receiver<Wanted>,
    pub(super) recheck: Arc<Notify>,
    pub(super) stop: CancellationToken,
    pub(super) hurry: CancellationToken,
}

/// How one start of the agent ended.
pub(super) enum Ended {
    /// The bridge lets it go.
    Stopped,
    /// Somebody ordered something else.
    Ordered,
    /// It is gone, or never came.
    Lost(Lost),
}

pub(super) struct Lost {
    pub(super) trouble: Trouble,
    /// How its process ended, if it ended by itself.
    pub(super) exit: Option<Exit>,
    pub(super) was_ready_for: Duration,
}

impl Lost {
    pub(super) fn before_ready(trouble: Trouble) -> Ended {
        Ended::Lost(Self { trouble, exit: None, was_ready_for: Duration::ZERO })
    }
}

/// What comes after an agent was lost.
enum Next {
    Again(Duration),
    Rest(State, Trouble),
}

impl Life {
    pub(super) async fn run(self) {
        let (first, longest) = if self.config.command.is_some() { RESTART } else { LOOK };
        let mut backoff = Backoff::new(first, longest);
        let mut budget = Budget::new(self.config.max_restarts, self.config.restart_window);
        let (mut last_port, mut said) = (None, String::new());
        while let Some(order) = self.until_wanted().await {
            let ended = match self.config.command {
                Some(_) => self.launched(order, &mut last_port).await,
                None => match self.chooser(&self.config) {
                    Ok(chooser) => {
                        let start = Start::attached(Arc::clone(&self.config), chooser, order);
                        self.watched(&start, None, CancellationToken::new()).await
                    }
                    Err(trouble) => Lost::before_ready(trouble),
                },
            };
            let next = match ended {
                Ended::Stopped => break,
                Ended::Ordered => {
                    backoff.reset();
                    budget.reset();
                    Next::Again(Duration::ZERO)
                }
                Ended::Lost(lost) => self.next(lost, &mut backoff, &mut budget, &mut said),
            };
            let pause = match next {
                Next::Again(pause) => pause,
                Next::Rest(state, trouble) => {
                    self.withdraw(state, Some(trouble));
                    Duration::MAX
                }
            };
            let far = SystemTime::now().checked_add(pause).filter(|_| !pause.is_zero());
            self.status.send_modify(|status| status.next_try = far);
            let rested = tokio::select! {
                biased;
                () = self.interrupted(order) => true,
                () = tokio::time::sleep(pause) => false,
            };
            if self.stop.is_cancelled() {
                break;
            }
            if rested {
                backoff.reset();
                budget.reset();
            }
            self.status.send_modify(|status| status.next_try = None);
            if self.wanted.borrow().running && self.config.command.is_some() {
                self.status.send_modify(|status| status.restarts += 1);
                self.enter(State::Starting, None);
            }
        }
        self.withdraw(State::Stopped, None);
    }

    /// Waits until the agent is to run; `None` when the bridge stops first.
    async fn until_wanted(&self) -> Option<u64> {
        if !self.wanted.borrow().running {
            self.withdraw(
                State::Stopped,
                Some(Trouble {
                    text: "stopped on request".into(),
                    advice: format!("`a2a-bridge agents start {}` starts it", self.name),
                }),
            );
            self.status.send_modify(|status| status.order = self.wanted.borrow().order);
            tracing::info!(agent = %self.name, "agent stopped on request");
        }
        let mut wanted = self.wanted.clone();
        let running =
            async { wanted.wait_for(|wanted| wanted.running).await.ok().map(|wanted| wanted.order) };
        let order = tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            order = running => order,
        }?;
        self.status.send_modify(|status| status.order = order);
        if self.status.borrow().state == State::Stopped {
            self.enter(State::Starting, None);
        }
        Some(order)
    }

    /// Resolves when the bridge stops, or an order other than this one holds.
    pub(super) async fn interrupted(&self, order: u64) {
        let mut wanted = self.wanted.clone();
        let ordered = async {
            // Whoever could order is gone: then nothing else will be ordered.
            if wanted.wait_for(|wanted| wanted.order != order).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = ordered => {}
        }
    }

    fn next(&self, lost: Lost, backoff: &mut Backoff, budget: &mut Budget, said: &mut String) -> Next {
        let Lost { trouble, exit, was_ready_for } = lost;
        let config = &self.config;
        if config.command.is_some() {
            let well = exit.is_some_and(Exit::is_success);
            let leave = match config.restart {
                Restart::Always => false,
                Restart::OnFailure => well,
                Restart::Never => true,
            };
            if leave {
                let state = if well { State::Stopped } else { State::Failed };
                let trouble = trouble.left_alone(exit, &self.name, config);
                tracing::warn!(agent = %self.name, reason = trouble.text, "agent ended and is left so");
                return Next::Rest(state, trouble);
            }
            if was_ready_for >= config.stable_after {
                backoff.reset();
                budget.reset();
            }
            if !budget.take(std::time::Instant::now()) {
                let trouble = trouble.crash_loop(&self.name, config);
                tracing::error!(agent = %self.name, reason = trouble.text, "agent failed");
                return Next::Rest(State::Failed, trouble);
            }
        } else if was_ready_for >= config.stable_after {
            backoff.reset();
        }
        let pause = backoff.pause();
        // The same reason every few seconds helps nobody.
        if was_ready_for.is_zero() && *said == trouble.text {
            tracing::debug!(agent = %self.name, reason = trouble.text, ?pause, "agent still not available");
        } else {
            tracing::warn!(agent = %self.name, reason = trouble.text, ?pause, "agent not available; trying again");
        }
        said.clone_from(&trouble.text);
        self.withdraw(State::BackingOff, Some(trouble));
        Next::Again(pause)
    }

    /// One start of a launched agent, from spawn to end.
    async fn launched(&self, order: u64, last_port: &mut Option<u16>) -> Ended {
        // It may have to look up a name.
        let placed = tokio::select! {
            biased;
            () = self.interrupted(order) => return self.interruption(),
            placed = self.place(order, last_port) => placed,
        };
        let mut start = match placed {
            Ok(start) => start,
            Err(trouble) => return Lost::before_ready(trouble),
        };
        let spec = Spec {
            agent: Arc::clone(&self.name),
            command: start.config.command.clone().unwrap_or_default(),
            working_dir: start.config.working_dir.clone(),
            env: start.config.env.clone(),
            stop_signal: start.config.stop_signal,
        };
        let from_line = self.output.next();
        let child = match Child::spawn(&spec, &self.host, &self.output).await {
            Ok(child) => child,
            Err(error) => return Lost::before_ready(Trouble::spawn(&error)),
        };
        let began = Instant::now();
        start.tree = Some(child.guard().unwrap_or(child.pid()));
        tracing::info!(agent = %self.name, pid = child.pid(), url = %start.config.url, "agent launched");
        self.status.send_modify(|status| {
            status.pid = Some(child.pid());
            status.url = start.config.url.to_string();
            status.started = Some(SystemTime::now());
        });
        let gone = CancellationToken::new();
        let ended = tokio::select! {
            biased;
            exit = child.wait() => Ended::Lost(Lost {
                trouble: Trouble::exit_at_start(exit, began.elapsed()),
                exit: Some(exit),
                was_ready_for: Duration::ZERO,
            }),
            ready = self.until_ready(&start) => match ready {
                Ok(card) => self.watched(&start, Some((&child, card)), gone.clone()).await,
                Err(error @ LookError::Foreign { .. }) => Lost::before_ready(Trouble::look(&error, &start.config)),
                Err(error) => Lost::before_ready(Trouble::slow_start(&error, &start.config)),
            },
            () = self.interrupted(order) => self.interruption(),
        };
        // Its tasks go with it.
        self.live.send_replace(None);
        gone.cancel();
        let is_ready = self.status.borrow().state == State::Ready;
        // The end of the process may take its time; its skills are off the mesh meanwhile.
        match &ended {
            Ended::Lost(lost) if is_ready => self.withdraw(State::Unhealthy, Some(lost.trouble.clone())),
            Ended::Ordered if is_ready => self.withdraw(State::Unhealthy, Some(Trouble::ending())),
            Ended::Lost(_) | Ended::Ordered | Ended::Stopped => {}
        }
        let ending = Instant::now();
        let exit = child.stop(start.config.stop_grace, &self.hurry).await;
        tracing::info!(agent = %self.name, took = ?ending.elapsed(), "agent {exit}{}", self.last_words(from_line));
        self.status.send_modify(|status| {
            status.pid = None;
            status.started = None;
            status.last_exit = Some((exit.to_string(), SystemTime::now()));
        });
        ended
    }

    /// One look at the agent's card. Whose port it is comes first: what is not ours is sent nothing.
    pub(super) async fn look(&self, start: &Start, limit: Duration) -> Result<KnownCard, LookError> {
        if let Some(port) = &start.port {
            match port.holder(start.tree) {
                Holder::Ours(_) | Holder::Unknown => {}
                Holder::Nobody => {
                    return Err(LookError::NotListening { port: port.number, instead: Vec::new() });
                }
                Holder::Foreign { process } => {
                    return Err(LookError::Foreign { port: port.number, process });
                }
            }
        }
        let credentials = start.chooser.card_credentials();
        let reading = async {
            let card = probe::read_card(&start.config, start.chooser.http(), &credentials).await?;
            let interface = start.chooser.choose(&card).await?;
            Ok(KnownCard { card: Arc::new(card), interface })
        };
        match tokio::time::timeout(limit, reading).await {
            Ok(known) => known.map_err(LookError::Card),
            Err(_) => Err(LookError::Card(CardError::Timeout { url: start.config.url.to_string(), limit })),
        }
    }

    /// Makes the agent ready with this card, or changes the card of a ready one.
    pub(super) fn show(&self, start: &Start, known: KnownCard, gone: &CancellationToken) {
        let is_new = {
            let status = self.status.borrow();
            status.state != State::Ready || status.known.as_ref() != Some(&known)
        };
        if !is_new {
            return;
        }
        self.warn_about(&known.card);
        let client = match start.chooser.client(&known.card, &known.interface) {
            Ok(client) => client.reconsidering(SecondThoughts {
                chooser: Arc::clone(&start.chooser),
                card: Arc::clone(&known.card),
                changed: Arc::clone(&self.recheck),
            }),
            // Choosing has asked for the same credentials.
            Err(error) => {
                let error = LookError::Card(error);
                return self.withdraw(State::Unhealthy, Some(Trouble::look(&error, &start.config)));
            }
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
            status.advice = None;
            status.known = Some(known);
        });
    }

    fn warn_about(&self, card: &Card) {
        let seen = self.status.borrow().known.as_ref().is_some_and(|known| known.card.hash() == card.hash());
        if !seen {
            for warning in &card.warnings {
                tracing::warn!(agent = %self.name, "{warning}");
            }
        }
    }

    pub(super) fn withdraw(&self, state: State, trouble: Option<Trouble>) {
        self.live.send_replace(None);
        self.enter(state, trouble);
    }

    fn enter(&self, state: State, trouble: Option<Trouble>) {
        self.status.send_modify(|status| {
            if status.state != state {
                status.since = SystemTime::now();
            }
            status.state = state;
            // Starting again does not explain the last end away.
            if state != State::Starting {
                (status.last_error, status.advice) = trouble.map(|t| (t.text, t.advice)).unzip();
            }
        });
    }

    /// What the process wrote last, for people who wonder why it ended.
    fn last_words(&self, from_line: u64) -> String {
        let lines = self.output.tail(from_line, LAST_LINES);
        if lines.is_empty() {
            return String::new();
        }
        let lines: Vec<_> = lines.iter().map(|line| crate::json::shorten(&line.text, 400)).collect();
        format!("; it wrote last: {}", lines.join(" | "))
    }
}
