//! The lifecycle of a supervised agent: a state machine without I/O.
//!
//! The [`Supervisor`](super::supervisor::Supervisor) reports every [`AgentEvent`]; the machine returns the
//! [`Step`] that the supervisor performs next. One event causes one transition and one
//! [`AgentStatus`], so a command and the state that it leads to become visible together.
//!
//! ```text
//!            Launched           CardRead             ProbeFailed, Suspended
//! Starting ──────────> Starting ────────> Ready <────────────────────────────> Unhealthy
//!    ^    (a process)     │                 │              CardRead               │
//!    │                    └─────────────────┴── Exited, unresponsive, Commanded ──┘
//!    │                                            │
//!    │ BackoffElapsed                             v         TreeExited
//! BackingOff <─────────────────────────────── Exiting ──────────────────> Stopped, Failed
//! ```
//!
//! An attached agent has no process: it skips `Exiting` and retries in [`Phase::Retrying`].
//!
//! [`AgentState`] is the public form of the phase. `Exiting` has no public state of its own:
//!
//! | why the process exits | public state until it has exited |
//! | --- | --- |
//! | it exited by itself | the next one: `backing-off`, `stopped` or `failed` |
//! | the supervisor stops it because it is unresponsive | the previous one: `starting` or `unhealthy` |
//! | a command, or the bridge shuts down | `starting`: not callable, and the command is not complete |

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::diagnosis::Diagnosis;
use super::health_check;
use super::probe::ProbeError;
use super::status::{AgentState, AgentStatus, KnownCard};
use crate::config::{self, Restart};
use crate::process::child::Exit;
use crate::process::restart::{Backoff, RestartBudget};
use crate::text::{error_chain, millis};

/// First and maximum back-off before a restart of a launched agent.
const RESTART_BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// First and maximum back-off between probes of an unavailable attached agent.
const PROBE_BACKOFF: (Duration, Duration) = (Duration::from_millis(500), health_check::MAX_RETRY_INTERVAL);

/// The state that the last command asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DesiredState {
    pub(super) running: bool,
    /// Counts the commands, so that a restart is a change too.
    pub(super) generation: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaunchedProcess {
    pub(super) pid: i32,
    pub(super) launched: Instant,
    pub(super) started: SystemTime,
}

/// Consecutive failures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct FailedProbes {
    ready: usize,
    alive: usize,
}

/// An agent that a probe has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reachable {
    process: Option<LaunchedProcess>,
    since: Instant,
    failures: FailedProbes,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    Starting {
        process: Option<LaunchedProcess>,
        /// Why the agent was unavailable before this start.
        problem: Option<Diagnosis>,
        /// Why this start takes longer than usual.
        delay: Option<Diagnosis>,
    },
    /// The supervisor probes an unavailable attached agent again.
    Retrying {
        problem: Diagnosis,
    },
    Ready(Reachable),
    /// Running, but not callable.
    Unhealthy {
        reachable: Reachable,
        /// When SIGSTOP was first observed.
        suspended: Option<Instant>,
        problem: Diagnosis,
    },
    /// The process, or a descendant of it, has not exited yet.
    Exiting {
        process: LaunchedProcess,
        cause: ExitCause,
    },
    BackingOff {
        until: Instant,
        next_try: SystemTime,
        problem: Diagnosis,
    },
    Stopped(StopReason),
    Failed {
        problem: Diagnosis,
    },
}

/// Why a process exits. Determines the next phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ExitCause {
    /// It exited by itself. `next` is already the public state.
    Exited {
        next: Box<Phase>,
    },
    /// It did not respond, or did not become ready.
    Unresponsive {
        shown: AgentState,
        problem: Diagnosis,
        ready_for: Duration,
    },
    /// A command to restart or to stop.
    Commanded {
        running: bool,
    },
    Shutdown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum StopReason {
    OnCommand,
    /// It exited and is not configured to restart.
    Exited(Diagnosis),
    Shutdown,
}

#[derive(Debug)]
pub(super) enum AgentEvent {
    /// The process runs; `config` has the port of this start.
    Launched {
        process: LaunchedProcess,
        config: Arc<config::AgentConfig>,
    },
    /// The start is delayed for this reason; `None` when the delay is over.
    Delayed(Option<Diagnosis>),
    /// The agent could not be launched or reached, or did not become ready in time.
    NotStarted(Diagnosis),
    CardRead(KnownCard),
    /// `busy`: calls are in flight.
    ProbeFailed {
        error: ProbeError,
        busy: bool,
    },
    /// The card is readable, but no client can be built from it.
    CardUnusable(Diagnosis),
    /// SIGSTOP has suspended this process.
    Suspended(i32),
    Resumed,
    /// The process exited by itself.
    Exited(Exit),
    /// The process and all its descendants have exited.
    TreeExited {
        exit: Exit,
        /// The line of its output that most likely tells why.
        last_line: Option<String>,
    },
    BackoffElapsed,
    Commanded(DesiredState),
    /// Settings changed that leave the process as it is.
    Reconfigured(Arc<config::AgentConfig>),
    Shutdown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Launch the process, or probe the attached agent.
    Start,
    /// Probe the launched process until it is ready.
    AwaitReady,
    Watch,
    StopProcess,
    /// Wait for a command, at most until this moment.
    Wait(Option<Instant>),
    Finish,
}

pub(super) struct Lifecycle {
    name: Arc<str>,
    config: Arc<config::AgentConfig>,
    phase: Phase,
    /// When the public state last changed.
    since: SystemTime,
    pub(super) generation: u64,
    restarts: u32,
    backoff: Backoff,
    budget: RestartBudget,
    /// The configuration of the last launch, with its port.
    launched: Option<Arc<config::AgentConfig>>,
    last_exit: Option<(Exit, SystemTime)>,
    pub(super) known: Option<KnownCard>,
    last_logged_problem: String,
}

impl Lifecycle {
    pub(super) fn new(name: Arc<str>, config: Arc<config::AgentConfig>) -> Self {
        let (first, max) = if config.command.is_some() { RESTART_BACKOFF } else { PROBE_BACKOFF };
        Self {
            backoff: Backoff::new(first, max),
            budget: RestartBudget::new(config.max_restarts, config.restart_window),
            name,
            config,
            phase: Phase::Starting { process: None, problem: None, delay: None },
            since: SystemTime::now(),
            generation: 0,
            restarts: 0,
            launched: None,
            last_exit: None,
            known: None,
            last_logged_problem: String::new(),
        }
    }

    /// Applies an event. An event that the current phase does not expect is late and changes nothing.
    pub(super) fn on(&mut self, event: AgentEvent) -> Step {
        let before = self.state();
        let phase = std::mem::replace(&mut self.phase, Phase::Stopped(StopReason::Shutdown));
        self.phase = match (event, phase) {
            (AgentEvent::Commanded(desired), phase) => self.commanded(phase, desired),
            (AgentEvent::Shutdown, phase) => match phase.process() {
                Some(process) => Phase::Exiting { process, cause: ExitCause::Shutdown },
                None => Phase::Stopped(StopReason::Shutdown),
            },
            (AgentEvent::Launched { process, config }, Phase::Starting { process: None, problem, delay }) => {
                self.launched = Some(config);
                Phase::Starting { process: Some(process), problem, delay }
            }
            (AgentEvent::Delayed(delay), Phase::Starting { process, problem, .. }) => {
                Phase::Starting { process, problem, delay }
            }
            (AgentEvent::NotStarted(problem), Phase::Starting { process, .. }) => {
                self.stop_unresponsive(process, AgentState::Starting, problem, Duration::ZERO)
            }
            (AgentEvent::NotStarted(problem), Phase::Retrying { .. }) => {
                self.after_failure(problem, None, Duration::ZERO)
            }
            (AgentEvent::Reconfigured(config), phase) => {
                self.reconfigure(config);
                phase
            }
            (AgentEvent::CardRead(card), phase) => self.card_read(phase, card),
            (AgentEvent::CardUnusable(problem), phase) => match phase.reachable() {
                Some(reachable) => Phase::Unhealthy { reachable, suspended: None, problem },
                None => phase,
            },
            (AgentEvent::ProbeFailed { error, busy }, phase) => self.probe_failed(phase, &error, busy),
            (AgentEvent::Suspended(pid), phase) => self.suspended(phase, pid),
            (AgentEvent::Resumed, Phase::Unhealthy { reachable, problem, .. }) => {
                Phase::Unhealthy { reachable, suspended: None, problem }
            }
            (AgentEvent::Exited(exit), phase) => self.exited(phase, exit),
            (AgentEvent::TreeExited { exit, last_line }, phase) => self.tree_exited(phase, exit, last_line),
            (AgentEvent::BackoffElapsed, Phase::BackingOff { problem, .. }) if self.is_launched() => {
                self.restarts += 1;
                Phase::Starting { process: None, problem: Some(problem), delay: None }
            }
            (AgentEvent::BackoffElapsed, Phase::BackingOff { problem, .. }) => Phase::Retrying { problem },
            (
                AgentEvent::Launched { .. }
                | AgentEvent::Delayed(_)
                | AgentEvent::NotStarted(_)
                | AgentEvent::Resumed
                | AgentEvent::BackoffElapsed,
                late_for,
            ) => late_for,
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
            Phase::Exiting { .. } => Step::StopProcess,
            Phase::BackingOff { until, .. } => Step::Wait(Some(*until)),
            Phase::Stopped(StopReason::Shutdown) => Step::Finish,
            Phase::Stopped(StopReason::OnCommand | StopReason::Exited(_)) | Phase::Failed { .. } => {
                Step::Wait(None)
            }
        }
    }

    pub(super) fn state(&self) -> AgentState {
        self.phase.state()
    }

    pub(super) fn is_delayed(&self) -> bool {
        matches!(self.phase, Phase::Starting { delay: Some(_), .. })
    }

    pub(super) fn is_suspended(&self) -> bool {
        matches!(self.phase, Phase::Unhealthy { suspended: Some(_), .. })
    }

    pub(super) fn status(&self) -> AgentStatus {
        let process = match &self.phase {
            Phase::Exiting { cause: ExitCause::Exited { .. }, .. } => None,
            phase => phase.process(),
        };
        let problem = self.problem();
        let (last_error, advice) =
            problem.as_ref().map(|problem| (problem.text.clone(), problem.advice.clone())).unzip();
        AgentStatus {
            state: self.state(),
            since: self.since,
            restarts: self.restarts,
            last_error,
            advice,
            reason: problem.map(|problem| problem.short),
            url: self.launched.as_ref().map(|config| config.url.to_string()).unwrap_or_default(),
            pid: process.map(|process| process.pid),
            started: process.map(|process| process.started),
            last_exit: self.last_exit.map(|(exit, at)| (exit.to_string(), at)),
            next_try: self.phase.next_try(),
            generation: self.generation,
            known: self.known.clone(),
        }
    }

    fn problem(&self) -> Option<Diagnosis> {
        let phase = match &self.phase {
            Phase::Exiting { cause: ExitCause::Exited { next }, .. } => next,
            phase => phase,
        };
        match phase {
            Phase::Exiting { cause: ExitCause::Commanded { .. } | ExitCause::Shutdown, .. } => {
                Some(Diagnosis::stopping())
            }
            Phase::Stopped(StopReason::OnCommand) => Some(Diagnosis::stopped_on_request(&self.name)),
            Phase::Ready(_) => {
                let failure = self.known.as_ref().and_then(|known| known.interface.failure)?;
                Some(Diagnosis::unconfirmed(failure, &self.config))
            }
            phase => phase.phase_problem().cloned(),
        }
    }

    fn is_launched(&self) -> bool {
        self.config.command.is_some()
    }

    fn commanded(&mut self, phase: Phase, desired: DesiredState) -> Phase {
        self.generation = desired.generation;
        self.backoff.reset();
        self.budget.reset();
        if let Some(process) = phase.process() {
            return Phase::Exiting { process, cause: ExitCause::Commanded { running: desired.running } };
        }
        if !desired.running {
            return self.stopped_on_request();
        }
        let problem = match phase {
            // Starting an agent that did not run is not a restart.
            Phase::Starting { problem, .. } => {
                return Phase::Starting { process: None, problem, delay: None };
            }
            Phase::Stopped(StopReason::OnCommand | StopReason::Shutdown) => {
                return Phase::Starting { process: None, problem: None, delay: None };
            }
            phase => phase.phase_problem().cloned(),
        };
        self.restarts += u32::from(self.is_launched());
        Phase::Starting { process: None, problem, delay: None }
    }

    fn reconfigure(&mut self, config: Arc<config::AgentConfig>) {
        let budget = (config.max_restarts, config.restart_window);
        if budget != (self.config.max_restarts, self.config.restart_window) {
            self.budget = RestartBudget::new(budget.0, budget.1);
        }
        if let Some(launched) = &mut self.launched {
            *launched = at_port_of(&config, launched);
        }
        self.config = config;
    }

    fn stopped_on_request(&self) -> Phase {
        tracing::info!(agent = %self.name, "agent stopped on request");
        Phase::Stopped(StopReason::OnCommand)
    }

    fn card_read(&mut self, phase: Phase, card: KnownCard) -> Phase {
        let Some(reachable) = phase.reachable() else { return phase };
        // An unchanged card keeps its allocation, so that later comparisons are cheap.
        if self.known.as_ref() != Some(&card) {
            self.known = Some(card);
        }
        Phase::Ready(Reachable { failures: FailedProbes::default(), ..reachable })
    }

    fn probe_failed(&mut self, phase: Phase, error: &ProbeError, busy: bool) -> Phase {
        let (mut reachable, suspended, problem) = match phase {
            Phase::Ready(reachable) => (reachable, None, None),
            Phase::Unhealthy { reachable, suspended, problem } => (reachable, suspended, Some(problem)),
            other => return other,
        };
        let (process, ready_for) = (reachable.process, reachable.since.elapsed());
        let config = Arc::clone(self.launched.as_ref().unwrap_or(&self.config));
        let failed = Diagnosis::probe(error, &config);
        // Another process owns the port, or an attached agent has no listener: waiting does not help.
        let is_lost =
            matches!(error, ProbeError::Foreign { .. }) || (process.is_none() && error.is_unreachable());
        if is_lost {
            return self.stop_unresponsive(process, AgentState::Unhealthy, failed, ready_for);
        }
        if error.is_timeout() && busy {
            tracing::debug!(agent = %self.name, "probe timed out while calls are in flight; ignoring it");
        } else {
            let failures = &mut reachable.failures;
            failures.ready += 1;
            failures.alive =
                if error.is_timeout() || error.is_unreachable() { failures.alive + 1 } else { 0 };
            // An unhealthy agent would log the same error at every probe.
            if failures.ready <= config.readiness.failures {
                let card_error = match error {
                    ProbeError::Card(error) => Some(error_chain(error)),
                    ProbeError::Foreign { .. } | ProbeError::NotListening { .. } => None,
                };
                let error = card_error.as_deref().unwrap_or(&failed.text);
                tracing::warn!(agent = %self.name, error, failures = failures.ready, "card probe failed");
            }
            if process.is_some() && failures.alive >= config.liveness.failures {
                let hung = Diagnosis::hung(error, failures.alive, &config);
                return self.stop_unresponsive(process, AgentState::Unhealthy, hung, ready_for);
            }
            if failures.ready >= config.readiness.failures {
                return Phase::Unhealthy { reachable, suspended, problem: failed };
            }
        }
        match problem {
            Some(problem) => Phase::Unhealthy { reachable, suspended, problem },
            None => Phase::Ready(reachable),
        }
    }

    /// Restarts a suspended process only if a second check also finds it suspended.
    fn suspended(&mut self, phase: Phase, pid: i32) -> Phase {
        let (reachable, suspended) = match &phase {
            Phase::Ready(reachable) => (*reachable, None),
            Phase::Unhealthy { reachable, suspended, .. } => (*reachable, *suspended),
            _ => return phase,
        };
        let problem = Diagnosis::suspended(pid);
        match suspended {
            None => {
                tracing::warn!(agent = %self.name, pid, "agent process is suspended (SIGSTOP)");
                Phase::Unhealthy { reachable, suspended: Some(Instant::now()), problem }
            }
            Some(since) if since.elapsed() >= health_check::check_interval(&self.config) / 2 => {
                let ready_for = reachable.since.elapsed();
                self.stop_unresponsive(reachable.process, AgentState::Unhealthy, problem, ready_for)
            }
            Some(_) => phase,
        }
    }

    fn exited(&mut self, phase: Phase, exit: Exit) -> Phase {
        let (process, problem, ready_for) = match &phase {
            Phase::Starting { process: Some(process), .. } => {
                (*process, Diagnosis::exit_at_start(exit, process.launched.elapsed()), Duration::ZERO)
            }
            Phase::Ready(reachable) | Phase::Unhealthy { reachable, .. } => match reachable.process {
                Some(process) => {
                    let ready_for = reachable.since.elapsed();
                    (process, Diagnosis::exit(exit, ready_for), ready_for)
                }
                None => return phase,
            },
            _ => return phase,
        };
        self.last_exit = Some((exit, SystemTime::now()));
        let next = Box::new(self.after_failure(problem, Some(exit), ready_for));
        Phase::Exiting { process, cause: ExitCause::Exited { next } }
    }

    fn tree_exited(&mut self, phase: Phase, exit: Exit, last_line: Option<String>) -> Phase {
        let Phase::Exiting { cause, .. } = phase else { return phase };
        if self.last_exit.is_none_or(|(known, _)| known != exit) || !matches!(cause, ExitCause::Exited { .. })
        {
            self.last_exit = Some((exit, SystemTime::now()));
        }
        match cause {
            ExitCause::Exited { next } => match last_line {
                Some(line) => next.with_last_line(&line),
                None => *next,
            },
            ExitCause::Unresponsive { problem, ready_for, .. } => {
                self.after_failure(problem, None, ready_for)
            }
            ExitCause::Commanded { running: true } => {
                self.restarts += 1;
                Phase::Starting { process: None, problem: None, delay: None }
            }
            ExitCause::Commanded { running: false } => self.stopped_on_request(),
            ExitCause::Shutdown => Phase::Stopped(StopReason::Shutdown),
        }
    }

    /// Stops the process, if there is one; then `after_failure` decides what follows.
    fn stop_unresponsive(
        &mut self,
        process: Option<LaunchedProcess>,
        shown: AgentState,
        problem: Diagnosis,
        ready_for: Duration,
    ) -> Phase {
        let Some(process) = process else { return self.after_failure(problem, None, ready_for) };
        Phase::Exiting { process, cause: ExitCause::Unresponsive { shown, problem, ready_for } }
    }

    /// Decides between a restart after a back-off, `Stopped` and `Failed`. This is the only place that does.
    fn after_failure(&mut self, problem: Diagnosis, exit: Option<Exit>, ready_for: Duration) -> Phase {
        let config = Arc::clone(&self.config);
        if self.is_launched() {
            let succeeded = exit.is_some_and(Exit::is_success);
            let restart = match config.restart {
                Restart::Always => true,
                Restart::OnFailure => !succeeded,
                Restart::Never => false,
            };
            if !restart {
                let problem = problem.not_restarted(exit, &self.name, &config);
                tracing::warn!(agent = %self.name, reason = problem.text, "not restarting the agent");
                return if succeeded {
                    Phase::Stopped(StopReason::Exited(problem))
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
        let delay = self.backoff.next_delay();
        // Log a repeated problem at debug level only.
        if ready_for.is_zero() && self.last_logged_problem == problem.short {
            tracing::debug!(agent = %self.name, reason = problem.text, delay_ms = millis(delay), "agent still unavailable");
        } else {
            tracing::warn!(agent = %self.name, reason = problem.text, delay_ms = millis(delay), "agent unavailable; retrying");
        }
        // The short form: the long one has durations, which differ each time.
        self.last_logged_problem.clone_from(&problem.short);
        Phase::BackingOff { until: Instant::now() + delay, next_try: SystemTime::now() + delay, problem }
    }
}

/// The settings with the port of an earlier start.
pub(super) fn at_port_of(
    config: &Arc<config::AgentConfig>,
    started: &config::AgentConfig,
) -> Arc<config::AgentConfig> {
    match (config.port, started.url.port()) {
        (Some(_), Some(port)) => Arc::new(config.at_port(port)),
        _ => Arc::clone(config),
    }
}

impl Phase {
    /// The phase after an exit, with a line of the output in its problem.
    fn with_last_line(self, line: &str) -> Self {
        match self {
            Self::BackingOff { until, next_try, problem } => {
                Self::BackingOff { until, next_try, problem: problem.with_last_line(line) }
            }
            Self::Failed { problem } => Self::Failed { problem: problem.with_last_line(line) },
            other => other,
        }
    }

    fn state(&self) -> AgentState {
        match self {
            Self::Starting { .. } => AgentState::Starting,
            Self::Ready(_) => AgentState::Ready,
            Self::Unhealthy { .. } => AgentState::Unhealthy,
            Self::Retrying { .. } | Self::BackingOff { .. } => AgentState::BackingOff,
            Self::Stopped(_) => AgentState::Stopped,
            Self::Failed { .. } => AgentState::Failed,
            Self::Exiting { cause, .. } => match cause {
                ExitCause::Exited { next } => next.state(),
                ExitCause::Unresponsive { shown, .. } => *shown,
                ExitCause::Commanded { .. } | ExitCause::Shutdown => AgentState::Starting,
            },
        }
    }

    fn process(&self) -> Option<LaunchedProcess> {
        match self {
            Self::Starting { process, .. } => *process,
            Self::Ready(reachable) | Self::Unhealthy { reachable, .. } => reachable.process,
            Self::Exiting { process, .. } => Some(*process),
            Self::Retrying { .. } | Self::BackingOff { .. } | Self::Stopped(_) | Self::Failed { .. } => None,
        }
    }

    /// The state of the agent after a successful probe in this phase; `None` if the probe is late.
    fn reachable(&self) -> Option<Reachable> {
        let now =
            |process| Some(Reachable { process, since: Instant::now(), failures: FailedProbes::default() });
        match self {
            Self::Starting { process, .. } => now(*process),
            Self::Retrying { .. } => now(None),
            Self::Ready(reachable) | Self::Unhealthy { reachable, .. } => Some(*reachable),
            Self::Exiting { .. } | Self::BackingOff { .. } | Self::Stopped(_) | Self::Failed { .. } => None,
        }
    }

    fn phase_problem(&self) -> Option<&Diagnosis> {
        match self {
            Self::Starting { problem, delay, .. } => delay.as_ref().or(problem.as_ref()),
            Self::Retrying { problem }
            | Self::Unhealthy { problem, .. }
            | Self::BackingOff { problem, .. }
            | Self::Failed { problem }
            | Self::Stopped(StopReason::Exited(problem))
            | Self::Exiting { cause: ExitCause::Unresponsive { problem, .. }, .. } => Some(problem),
            Self::Ready(_) | Self::Exiting { .. } | Self::Stopped(_) => None,
        }
    }

    fn next_try(&self) -> Option<SystemTime> {
        match self {
            Self::BackingOff { next_try, .. } => Some(*next_try),
            Self::Exiting { cause: ExitCause::Exited { next }, .. } => next.next_try(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
