//! What a supervised agent does next: a state machine without I/O.
//!
//! The [`Supervisor`](super::supervisor::Supervisor) reports every [`Event`], and the machine answers
//! with the [`Step`] that the supervisor carries out next. One event is one transition and one
//! [`AgentStatus`]: an order and the state that it leads to become visible together.
//!
//! ```text
//!            Launched           Found                 Unanswered, Suspended
//! Starting ──────────> Starting ─────> Ready <────────────────────────────> Unhealthy
//!    ^    (a process)     │              │               Found                  │
//!    │                    └──────────────┴──── Exited, given up, Ordered ───────┘
//!    │                                         │
//!    │ Due                                     v            Gone
//! BackingOff <──────────────────────────── Exiting ──────────────────> Stopped, Failed
//! ```
//!
//! An attached agent has no process: it skips `Exiting`, and [`Phase::Retrying`] is its second start.
//!
//! Six words describe an agent to others, see [`AgentState`]. `Exiting` has none of its own:
//!
//! | why the process exits | shown until it has gone |
//! | --- | --- |
//! | it exited by itself | what follows: `backing-off`, `stopped` or `failed` |
//! | the supervisor gave up on it | what it was: `starting` or `unhealthy` |
//! | an order to restart or to stop, or the bridge lets it go | `starting`: it cannot be called, and the order is not fulfilled yet |

use crate::text::error_chain;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::status::{AgentState, AgentStatus, KnownCard};
use super::trouble::{ProbeError, Trouble};
use super::watch;
use crate::config::{self, Restart};
use crate::process::child::Exit;
use crate::process::restart::{Backoff, Budget};

/// Pauses before a launched agent is restarted: the first one and the longest.
const RESTART_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Pauses between two probes of an attached agent that is not available.
const PROBE_PAUSES: (Duration, Duration) = (Duration::from_millis(500), watch::MAX_RETRY_INTERVAL);

/// What the agent should do, as last ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) running: bool,
    /// Counts the orders, so that a restart is an order too.
    pub(super) order: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Process {
    pub(super) pid: i32,
    pub(super) launched: Instant,
    /// The same by the clock on the wall.
    pub(super) started: SystemTime,
}

/// Failed probes in a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Failures {
    ready: usize,
    alive: usize,
}

/// What is known about an agent that was found, beside its card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    process: Option<Process>,
    since: Instant,
    failures: Failures,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// Being launched or looked for.
    Starting {
        process: Option<Process>,
        /// Why it was not available before.
        problem: Option<Trouble>,
        /// Why this start takes long.
        delay: Option<Trouble>,
    },
    /// An attached agent that was not available is probed once more.
    Retrying {
        problem: Trouble,
    },
    Ready(Found),
    /// It runs, and cannot be called.
    Unhealthy {
        found: Found,
        /// Since when its process is stopped by SIGSTOP.
        suspended: Option<Instant>,
        problem: Trouble,
    },
    /// The process is exiting, or has exited and others of its tree have not.
    Exiting {
        process: Process,
        cause: Cause,
    },
    BackingOff {
        until: Instant,
        /// The same by the clock on the wall.
        next_try: SystemTime,
        problem: Trouble,
    },
    Stopped(Reason),
    Failed {
        problem: Trouble,
    },
}

/// Why a process exits, and with it what follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cause {
    /// It exited by itself. What follows is decided, and shown already.
    Exited { next: Box<Phase> },
    /// It hangs, or did not become ready.
    GivenUp { shown: AgentState, problem: Trouble, ready_for: Duration },
    /// An order: to start again, or to stay stopped.
    Ordered { running: bool },
    /// The bridge lets the agent go.
    Shutdown,
}

/// Why an agent does not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reason {
    Ordered,
    /// It exited, and its settings do not ask for a restart.
    Exited(Trouble),
    Shutdown,
}

#[derive(Debug)]
pub(super) enum Event {
    /// The process runs, with these settings: those of the agent at the port of this start.
    Launched {
        process: Process,
        config: Arc<config::AgentConfig>,
    },
    /// The start takes long for this reason, or not any more.
    Delayed(Option<Trouble>),
    /// The agent could not be launched or found, or did not become ready in time.
    NotStarted(Trouble),
    /// A probe has read the card.
    Found(KnownCard),
    /// A probe has failed; `busy` with calls in flight.
    Unanswered {
        error: ProbeError,
        busy: bool,
    },
    /// The card was read, and no client can be made of it.
    Unusable(Trouble),
    /// The process was found stopped by SIGSTOP.
    Suspended(i32),
    Resumed,
    /// The process exited by itself.
    Exited(Exit),
    /// Nothing is left of the process and of what it started.
    Gone(Exit),
    Due,
    Ordered(Wanted),
    /// The bridge lets the agent go.
    Shutdown,
}

/// What the supervisor does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Launch the process, or probe the attached agent.
    Start,
    /// Probe the launched process until it is ready.
    AwaitReady,
    Watch,
    EndProcess,
    /// Wait for an order, and for this moment.
    Wait(Option<Instant>),
    Finish,
}

/// Where one agent stands, and the rules by which it moves on.
pub(super) struct Lifecycle {
    name: Arc<str>,
    config: Arc<config::AgentConfig>,
    phase: Phase,
    /// When the public state last changed.
    since: SystemTime,
    order: u64,
    restarts: u32,
    backoff: Backoff,
    budget: Budget,
    /// The settings of the last launch, with its port.
    launched: Option<Arc<config::AgentConfig>>,
    last_exit: Option<(Exit, SystemTime)>,
    known: Option<KnownCard>,
    /// The reason that was logged last.
    logged: String,
}

impl Lifecycle {
    pub(super) fn new(name: Arc<str>, config: Arc<config::AgentConfig>) -> Self {
        let (first, longest) = if config.command.is_some() { RESTART_PAUSES } else { PROBE_PAUSES };
        Self {
            backoff: Backoff::new(first, longest),
            budget: Budget::new(config.max_restarts, config.restart_window),
            name,
            config,
            phase: Phase::Starting { process: None, problem: None, delay: None },
            since: SystemTime::now(),
            order: 0,
            restarts: 0,
            launched: None,
            last_exit: None,
            known: None,
            logged: String::new(),
        }
    }

    /// The transition. An event that does not fit the phase comes too late and changes nothing.
    pub(super) fn on(&mut self, event: Event) -> Step {
        let before = self.state();
        let placeholder = Phase::Stopped(Reason::Shutdown);
        let phase = std::mem::replace(&mut self.phase, placeholder);
        self.phase = match event {
            Event::Ordered(wanted) => self.ordered(phase, wanted),
            Event::Shutdown => match phase.process() {
                Some(process) => Phase::Exiting { process, cause: Cause::Shutdown },
                None => Phase::Stopped(Reason::Shutdown),
            },
            Event::Launched { process, config } => match phase {
                Phase::Starting { process: None, problem, delay } => {
                    self.launched = Some(config);
                    Phase::Starting { process: Some(process), problem, delay }
                }
                other => other,
            },
            Event::Delayed(delay) => match phase {
                Phase::Starting { process, problem, .. } => Phase::Starting { process, problem, delay },
                other => other,
            },
            Event::NotStarted(problem) => match phase {
                Phase::Starting { process, .. } => {
                    self.give_up(process, AgentState::Starting, problem, Duration::ZERO)
                }
                Phase::Retrying { .. } => self.next(problem, None, Duration::ZERO),
                other => other,
            },
            Event::Found(card) => self.found(phase, card),
            Event::Unusable(problem) => match phase.found() {
                Some(found) => Phase::Unhealthy { found, suspended: None, problem },
                None => phase,
            },
            Event::Unanswered { error, busy } => self.unanswered(phase, &error, busy),
            Event::Suspended(pid) => self.suspended(phase, pid),
            Event::Resumed => match phase {
                Phase::Unhealthy { found, problem, .. } => {
                    Phase::Unhealthy { found, suspended: None, problem }
                }
                other => other,
            },
            Event::Exited(exit) => self.exited(phase, exit),
            Event::Gone(exit) => self.gone(phase, exit),
            Event::Due => match phase {
                Phase::BackingOff { problem, .. } if self.is_launched() => {
                    self.restarts += 1;
                    Phase::Starting { process: None, problem: Some(problem), delay: None }
                }
                Phase::BackingOff { problem, .. } => Phase::Retrying { problem },
                other => other,
            },
        };
        if self.state() != before {
            self.since = SystemTime::now();
        }
        self.step()
    }

    pub(super) fn step(&self) -> Step {
        match &self.phase {
            Phase::Starting { process: None, .. } | Phase::Retrying { .. } => Step::Start,
            Phase::Starting { process: Some(_), .. } => Step::AwaitReady,
            Phase::Ready(_) | Phase::Unhealthy { .. } => Step::Watch,
            Phase::Exiting { .. } => Step::EndProcess,
            Phase::BackingOff { until, .. } => Step::Wait(Some(*until)),
            Phase::Stopped(Reason::Shutdown) => Step::Finish,
            Phase::Stopped(Reason::Ordered | Reason::Exited(_)) | Phase::Failed { .. } => Step::Wait(None),
        }
    }

    pub(super) fn state(&self) -> AgentState {
        self.phase.state()
    }

    /// The order that is being followed.
    pub(super) fn order(&self) -> u64 {
        self.order
    }

    pub(super) fn known(&self) -> Option<&KnownCard> {
        self.known.as_ref()
    }

    pub(super) fn is_delayed(&self) -> bool {
        matches!(self.phase, Phase::Starting { delay: Some(_), .. })
    }

    pub(super) fn is_suspended(&self) -> bool {
        matches!(self.phase, Phase::Unhealthy { suspended: Some(_), .. })
    }

    pub(super) fn status(&self) -> AgentStatus {
        let process = match &self.phase {
            Phase::Exiting { cause: Cause::Exited { .. }, .. } => None,
            phase => phase.process(),
        };
        let (last_error, advice) = self.problem().map(|problem| (problem.text, problem.advice)).unzip();
        AgentStatus {
            state: self.state(),
            since: self.since,
            restarts: self.restarts,
            last_error,
            advice,
            url: self.launched.as_ref().map(|config| config.url.to_string()).unwrap_or_default(),
            pid: process.map(|process| process.pid),
            started: process.map(|process| process.started),
            last_exit: self.last_exit.map(|(exit, at)| (exit.to_string(), at)),
            next_try: self.phase.next_try(),
            order: self.order,
            known: self.known.clone(),
        }
    }

    fn problem(&self) -> Option<Trouble> {
        let ordered = |reason: &Reason| match reason {
            Reason::Ordered => Some(Trouble::stopped_on_request(&self.name)),
            Reason::Exited(problem) => Some(problem.clone()),
            Reason::Shutdown => None,
        };
        match &self.phase {
            Phase::Exiting { cause: Cause::Exited { next }, .. } => match &**next {
                Phase::Stopped(reason) => ordered(reason),
                next => next.own_problem().cloned(),
            },
            Phase::Exiting { cause: Cause::Ordered { .. } | Cause::Shutdown, .. } => Some(Trouble::ending()),
            Phase::Stopped(reason) => ordered(reason),
            phase => phase.own_problem().cloned(),
        }
    }

    fn is_launched(&self) -> bool {
        self.config.command.is_some()
    }

    fn ordered(&mut self, phase: Phase, wanted: Wanted) -> Phase {
        self.order = wanted.order;
        self.backoff.reset();
        self.budget.reset();
        if let Some(process) = phase.process() {
            return Phase::Exiting { process, cause: Cause::Ordered { running: wanted.running } };
        }
        if !wanted.running {
            return self.stopped_on_request();
        }
        let problem = match phase {
            // Nothing was launched, or somebody has stopped it: that is no restart.
            Phase::Starting { problem, .. } => {
                return Phase::Starting { process: None, problem, delay: None };
            }
            Phase::Stopped(Reason::Ordered | Reason::Shutdown) => {
                return Phase::Starting { process: None, problem: None, delay: None };
            }
            Phase::Stopped(Reason::Exited(problem)) => Some(problem),
            phase => phase.own_problem().cloned(),
        };
        self.restarts += u32::from(self.is_launched());
        Phase::Starting { process: None, problem, delay: None }
    }

    fn stopped_on_request(&self) -> Phase {
        tracing::info!(agent = %self.name, "agent stopped on request");
        Phase::Stopped(Reason::Ordered)
    }

    fn found(&mut self, phase: Phase, card: KnownCard) -> Phase {
        let Some(found) = phase.found() else { return phase };
        // The same card again keeps its place, so that nothing compares it twice.
        if self.known.as_ref() != Some(&card) {
            self.known = Some(card);
        }
        Phase::Ready(Found { failures: Failures::default(), ..found })
    }

    fn unanswered(&mut self, phase: Phase, error: &ProbeError, busy: bool) -> Phase {
        let (mut found, suspended, problem) = match phase {
            Phase::Ready(found) => (found, None, None),
            Phase::Unhealthy { found, suspended, problem } => (found, suspended, Some(problem)),
            other => return other,
        };
        let config = Arc::clone(self.launched.as_ref().unwrap_or(&self.config));
        let failed = Trouble::probe(error, &config);
        // Somebody else's port never becomes ours again, and an attached agent without a listener has gone.
        let is_lost = matches!(error, ProbeError::Foreign { .. })
            || (found.process.is_none() && error.is_nobody_there());
        if is_lost {
            return self.give_up(found.process, AgentState::Unhealthy, failed, found.since.elapsed());
        }
        if error.is_silence() && busy {
            tracing::debug!(agent = %self.name, "no answer to a probe, but calls are in flight");
        } else {
            let failures = &mut found.failures;
            failures.ready += 1;
            failures.alive =
                if error.is_silence() || error.is_nobody_there() { failures.alive + 1 } else { 0 };
            // Once it is unhealthy, each further probe would log the same.
            if failures.ready <= config.readiness.failures {
                let card_error = match error {
                    ProbeError::Card(error) => Some(error_chain(error)),
                    ProbeError::Foreign { .. } | ProbeError::NotListening { .. } => None,
                };
                let error = card_error.as_deref().unwrap_or(&failed.text);
                tracing::warn!(agent = %self.name, error, failures = failures.ready, "the agent does not show its card");
            }
            if found.process.is_some() && failures.alive >= config.liveness.failures {
                let hung = Trouble::hung(error, failures.alive, &config);
                return self.give_up(found.process, AgentState::Unhealthy, hung, found.since.elapsed());
            }
            if failures.ready >= config.readiness.failures {
                return Phase::Unhealthy { found, suspended, problem: failed };
            }
        }
        match problem {
            Some(problem) => Phase::Unhealthy { found, suspended, problem },
            None => Phase::Ready(found),
        }
    }

    /// A process may be stopped for a moment by accident, so it is
    /// restarted only if the next check also finds it stopped.
    fn suspended(&mut self, phase: Phase, pid: i32) -> Phase {
        let (found, suspended) = match &phase {
            Phase::Ready(found) => (*found, None),
            Phase::Unhealthy { found, suspended, .. } => (*found, *suspended),
            _ => return phase,
        };
        let problem = Trouble::stopped(pid);
        match suspended {
            None => {
                tracing::warn!(agent = %self.name, pid, "agent is stopped (SIGSTOP)");
                Phase::Unhealthy { found, suspended: Some(Instant::now()), problem }
            }
            Some(since) if since.elapsed() >= watch::pulse(&self.config) / 2 => {
                self.give_up(found.process, AgentState::Unhealthy, problem, found.since.elapsed())
            }
            Some(_) => phase,
        }
    }

    fn exited(&mut self, phase: Phase, exit: Exit) -> Phase {
        let (process, problem, ready_for) = match &phase {
            Phase::Starting { process: Some(process), .. } => {
                (*process, Trouble::exit_at_start(exit, process.launched.elapsed()), Duration::ZERO)
            }
            Phase::Ready(found) | Phase::Unhealthy { found, .. } => match found.process {
                Some(process) => {
                    let ready_for = found.since.elapsed();
                    (process, Trouble::exit(exit, ready_for), ready_for)
                }
                None => return phase,
            },
            _ => return phase,
        };
        self.last_exit = Some((exit, SystemTime::now()));
        let next = Box::new(self.next(problem, Some(exit), ready_for));
        Phase::Exiting { process, cause: Cause::Exited { next } }
    }

    fn gone(&mut self, phase: Phase, exit: Exit) -> Phase {
        let Phase::Exiting { cause, .. } = phase else { return phase };
        if self.last_exit.is_none_or(|(known, _)| known != exit) || !matches!(cause, Cause::Exited { .. }) {
            self.last_exit = Some((exit, SystemTime::now()));
        }
        match cause {
            Cause::Exited { next } => *next,
            Cause::GivenUp { problem, ready_for, .. } => self.next(problem, None, ready_for),
            Cause::Ordered { running: true } => {
                self.restarts += 1;
                Phase::Starting { process: None, problem: None, delay: None }
            }
            Cause::Ordered { running: false } => self.stopped_on_request(),
            Cause::Shutdown => Phase::Stopped(Reason::Shutdown),
        }
    }

    /// The agent cannot be used any more: its process, if there is one, has to end first.
    fn give_up(
        &mut self,
        process: Option<Process>,
        shown: AgentState,
        problem: Trouble,
        ready_for: Duration,
    ) -> Phase {
        match process {
            Some(process) => Phase::Exiting { process, cause: Cause::GivenUp { shown, problem, ready_for } },
            None => self.next(problem, None, ready_for),
        }
    }

    /// What follows when an agent has gone, or never came.
    fn next(&mut self, problem: Trouble, exit: Option<Exit>, ready_for: Duration) -> Phase {
        let config = Arc::clone(&self.config);
        if self.is_launched() {
            let succeeded = exit.is_some_and(Exit::is_success);
            let restart = match config.restart {
                Restart::Always => true,
                Restart::OnFailure => !succeeded,
                Restart::Never => false,
            };
            if !restart {
                let problem = problem.left_alone(exit, &self.name, &config);
                tracing::warn!(agent = %self.name, reason = problem.text, "agent exited; not restarting");
                return if succeeded {
                    Phase::Stopped(Reason::Exited(problem))
                } else {
                    Phase::Failed { problem }
                };
            }
        }
        if ready_for >= config.stable_after {
            self.backoff.reset();
            self.budget.reset();
        }
        if self.is_launched() && !self.budget.take(Instant::now().into_std()) {
            let problem = problem.crash_loop(&self.name, &config);
            tracing::error!(agent = %self.name, reason = problem.text, "agent failed");
            return Phase::Failed { problem };
        }
        let pause = self.backoff.pause();
        // The same reason every few seconds helps nobody.
        if ready_for.is_zero() && self.logged == problem.text {
            tracing::debug!(agent = %self.name, reason = problem.text, ?pause, "agent still not available");
        } else {
            tracing::warn!(agent = %self.name, reason = problem.text, ?pause, "agent not available; retrying");
        }
        self.logged.clone_from(&problem.text);
        Phase::BackingOff { until: Instant::now() + pause, next_try: SystemTime::now() + pause, problem }
    }
}

impl Phase {
    fn state(&self) -> AgentState {
        match self {
            Self::Starting { .. } => AgentState::Starting,
            Self::Ready(_) => AgentState::Ready,
            Self::Unhealthy { .. } => AgentState::Unhealthy,
            Self::Retrying { .. } | Self::BackingOff { .. } => AgentState::BackingOff,
            Self::Stopped(_) => AgentState::Stopped,
            Self::Failed { .. } => AgentState::Failed,
            Self::Exiting { cause, .. } => match cause {
                Cause::Exited { next } => next.state(),
                Cause::GivenUp { shown, .. } => *shown,
                Cause::Ordered { .. } | Cause::Shutdown => AgentState::Starting,
            },
        }
    }

    fn process(&self) -> Option<Process> {
        match self {
            Self::Starting { process, .. } => *process,
            Self::Ready(found) | Self::Unhealthy { found, .. } => found.process,
            Self::Exiting { process, .. } => Some(*process),
            Self::Retrying { .. } | Self::BackingOff { .. } | Self::Stopped(_) | Self::Failed { .. } => None,
        }
    }

    /// The agent as found by a probe: for the first time, or as before.
    fn found(&self) -> Option<Found> {
        let now = |process| Some(Found { process, since: Instant::now(), failures: Failures::default() });
        match self {
            Self::Starting { process, .. } => now(*process),
            Self::Retrying { .. } => now(None),
            Self::Ready(found) | Self::Unhealthy { found, .. } => Some(*found),
            Self::Exiting { .. } | Self::BackingOff { .. } | Self::Stopped(_) | Self::Failed { .. } => None,
        }
    }

    fn own_problem(&self) -> Option<&Trouble> {
        match self {
            Self::Starting { problem, delay, .. } => delay.as_ref().or(problem.as_ref()),
            Self::Retrying { problem }
            | Self::Unhealthy { problem, .. }
            | Self::BackingOff { problem, .. }
            | Self::Failed { problem }
            | Self::Exiting { cause: Cause::GivenUp { problem, .. }, .. } => Some(problem),
            Self::Ready(_) | Self::Exiting { .. } | Self::Stopped(_) => None,
        }
    }

    fn next_try(&self) -> Option<SystemTime> {
        match self {
            Self::BackingOff { next_try, .. } => Some(*next_try),
            Self::Exiting { cause: Cause::Exited { next }, .. } => next.next_try(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
