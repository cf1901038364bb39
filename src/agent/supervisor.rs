//! The supervisor of one agent: performs the steps of its [`Lifecycle`] and reports events to it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;
use futures_util::future::OptionFuture;
use tokio::sync::watch as channel;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Agent;
use super::diagnosis::Diagnosis;
use super::health_check::HealthCheck;
use super::lifecycle::{AgentEvent, LaunchedProcess, Lifecycle, Step, at_port_of};
use super::probe::{self, ProbeError};
use super::start::{Start, StartupProbe};
use super::status::{AgentState, AgentStatus, KnownCard};
use crate::a2a::card::CardError;
use crate::a2a::choose::DialectFallback;
use crate::a2a::{HttpClient, LiveAgent};
use crate::config::{AgentConfig, AgentLimits};
use crate::process::child::{Child, Limits, ProcessHost, Spec};
use crate::process::credentials::Account;
use crate::process::output::{Level, Line, Stream};
use crate::text::{millis, shorten};

/// Output lines that the log repeats when an agent exits.
const LAST_LINES: usize = 3;
/// How long to wait for the last output of processes that have exited.
const LAST_OUTPUT_TIMEOUT: Duration = Duration::from_millis(500);
/// Output lines among which the reason for an exit is looked for, and the length of the one that is shown.
const TELLING_LINES: usize = 20;
const MAX_TELLING_LINE: usize = 200;
const STARTED: &str = "the lifecycle asks for this step only after a start";

fn limits(config: &AgentLimits) -> Limits {
    let AgentLimits { memory, cpu, files, processes } = *config;
    let number = |count: Option<usize>| count.map(|count| count as u64);
    Limits { memory, cpu, files: number(files), processes: number(processes) }
}

pub(super) struct Supervisor {
    pub(super) agent: Agent,
    pub(super) http: HttpClient,
    pub(super) host: ProcessHost,
    pub(super) status: channel::Sender<AgentStatus>,
    pub(super) live: channel::Sender<Option<Arc<LiveAgent>>>,
    pub(super) skip_grace: CancellationToken,
    /// The agent starts after all of these are cancelled.
    pub(super) predecessors: Vec<CancellationToken>,
    pub(super) lifecycle: Lifecycle,
    pub(super) started: Option<StartedAgent>,
    /// The port that `port: auto` chose last.
    pub(super) last_port: Option<u16>,
}

/// The agent between a start and the exit of its process.
pub(super) struct StartedAgent {
    start: Start,
    child: Option<Child>,
    /// Cancelled when the process exits, or when the supervisor begins to stop it; its tasks are lost then.
    exited: CancellationToken,
    /// Sequence number of the first output line of this start.
    first_line: u64,
    startup: StartupProbe,
    /// `None` until the first card.
    health_check: Option<HealthCheck>,
}

impl StartedAgent {
    fn new(start: Start, child: Option<Child>, first_line: u64) -> Self {
        let startup = StartupProbe::new(&start.config);
        Self { start, child, exited: CancellationToken::new(), first_line, startup, health_check: None }
    }
}

impl Supervisor {
    pub(super) async fn run(mut self) {
        let mut step = self.lifecycle.step();
        loop {
            let event = match step {
                Step::Start => self.start().await,
                Step::AwaitReady => self.await_ready().await,
                Step::Watch => self.watch().await,
                Step::StopProcess => self.stop_process().await,
                Step::Wait(until) => self.wait(until).await,
                Step::Finish => return,
            };
            step = self.apply(event);
        }
    }

    /// Applies one event and publishes one change of the status.
    fn apply(&mut self, event: AgentEvent) -> Step {
        let (event, live_agent) = match event {
            AgentEvent::CardRead(known) => self.live_agent(known),
            AgentEvent::Reconfigured(config) => self.reconfigure(config),
            other => (other, None),
        };
        let step = self.lifecycle.on(event);
        if step == Step::StopProcess
            && let Some(started) = &self.started
        {
            started.exited.cancel();
        }
        // Publish the live agent before the status, so that a ready agent is always callable.
        match live_agent {
            Some(live_agent) => drop(self.live.send_replace(Some(live_agent))),
            None if self.lifecycle.state() != AgentState::Ready => {
                self.live.send_if_modified(|live| live.take().is_some());
            }
            None => {}
        }
        let status = self.lifecycle.status();
        self.status.send_if_modified(|published| {
            let is_changed = *published != status;
            *published = status;
            is_changed
        });
        step
    }

    /// The live agent for this card; `None` if the current one stays.
    fn live_agent(&self, known: KnownCard) -> (AgentEvent, Option<Arc<LiveAgent>>) {
        let seen = self.lifecycle.known.as_ref();
        if self.lifecycle.state() == AgentState::Ready && seen == Some(&known) {
            return (AgentEvent::CardRead(known), None);
        }
        if seen.is_none_or(|seen| seen.card.hash != known.card.hash) {
            for warning in &known.card.warnings {
                tracing::warn!(agent = %self.agent.name, "{warning}");
            }
        }
        let live_agent = match self.connect(&known) {
            Ok(live_agent) => live_agent,
            Err(error) => {
                let started = self.started.as_ref().expect(STARTED);
                let problem = Diagnosis::probe(&ProbeError::Card(error), &started.start.config);
                return (AgentEvent::CardUnusable(problem), None);
            }
        };
        tracing::info!(
            agent = %self.agent.name,
            skills = known.card.skills.len(),
            protocol = known.interface.dialect.protocol_version(),
            binding = known.interface.dialect.binding(),
            because = known.interface.reason,
            endpoint = %known.interface.url,
            "agent ready"
        );
        (AgentEvent::CardRead(known), Some(live_agent))
    }

    /// The running agent, to be called as this card says.
    fn connect(&self, known: &KnownCard) -> Result<Arc<LiveAgent>, CardError> {
        let started = self.started.as_ref().expect(STARTED);
        let client = started.start.chooser.client(&known.card, &known.interface)?;
        let client = client.with_fallback(DialectFallback {
            chooser: Arc::clone(&started.start.chooser),
            card: Arc::clone(&known.card),
            changed: Arc::clone(&self.agent.recheck),
        });
        Ok(Arc::new(LiveAgent {
            client,
            card: Arc::clone(&known.card),
            interface: known.interface.clone(),
            exited: started.exited.clone(),
        }))
    }

    /// Applies settings to the agent as it runs. The live agent is a new one, for the size limit of responses.
    fn reconfigure(&mut self, config: Arc<AgentConfig>) -> (AgentEvent, Option<Arc<LiveAgent>>) {
        self.agent.config = Arc::clone(&config);
        if let Some(started) = &mut self.started {
            started.start.config = at_port_of(&config, &started.start.config);
            started.start.chooser.set_max_response_size(config.max_response_size);
            started.health_check = None;
        }
        let known = self.lifecycle.known.as_ref().filter(|_| self.lifecycle.state() == AgentState::Ready);
        let live_agent = known.and_then(|known| self.connect(known).ok());
        (AgentEvent::Reconfigured(config), live_agent)
    }

    async fn start(&mut self) -> AgentEvent {
        let generation = self.lifecycle.generation;
        if self.predecessors.iter().any(|ended| !ended.is_cancelled()) && !self.lifecycle.is_delayed() {
            return AgentEvent::Delayed(Some(Diagnosis::predecessor()));
        }
        let predecessors = async {
            for ended in &self.predecessors {
                ended.cancelled().await;
            }
        };
        tokio::select! {
            biased;
            event = self.agent.commanded(generation) => return event,
            () = predecessors => {}
        }
        self.predecessors.clear();
        if self.lifecycle.is_delayed() {
            return AgentEvent::Delayed(None);
        }
        match self.agent.config.command {
            Some(_) => self.launch(generation).await,
            None => self.attach(generation).await,
        }
    }

    async fn attach(&mut self, generation: u64) -> AgentEvent {
        let start = match Start::attached(&self.agent, &self.http) {
            Ok(start) => start,
            Err(problem) => return AgentEvent::NotStarted(problem),
        };
        let probed = tokio::select! {
            biased;
            event = self.agent.commanded(generation) => return event,
            probed = probe::read_card(&start, start.config.readiness.timeout) => probed,
        };
        match probed {
            Ok(known) => {
                self.started = Some(StartedAgent::new(start, None, 0));
                AgentEvent::CardRead(known)
            }
            Err(error) => AgentEvent::NotStarted(Diagnosis::probe(&error, &start.config)),
        }
    }

    async fn launch(&mut self, generation: u64) -> AgentEvent {
        let prepared = tokio::select! {
            biased;
            event = self.agent.commanded(generation) => return event,
            prepared = Start::launched(&self.agent, &self.http, self.last_port) => prepared,
        };
        let mut start = match prepared {
            Ok(start) => start,
            Err(problem) => return AgentEvent::NotStarted(problem),
        };
        self.last_port = start.config.url.port();
        let spec = Spec {
            agent: Arc::clone(&self.agent.name),
            command: start.config.command.clone().unwrap_or_default(),
            working_dir: start.config.working_dir.clone(),
            env: start.config.env.clone(),
            stop_signal: start.config.stop_signal,
            account: Account { user: start.config.user.clone(), group: start.config.group.clone() },
            limits: limits(&start.config.limits),
        };
        let first_line = self.agent.output.next();
        // Not cancellable: an interrupted spawn could leave a process behind.
        let child = match Child::spawn(&spec, &self.host, &self.agent.output).await {
            Ok(child) => child,
            Err(error) => return AgentEvent::NotStarted(Diagnosis::spawn(&error)),
        };
        start.launched_as(child.guard.unwrap_or(child.pid));
        tracing::info!(agent = %self.agent.name, pid = child.pid, url = %start.config.url, "agent launched");
        let process =
            LaunchedProcess { pid: child.pid, launched: Instant::now(), started: SystemTime::now() };
        let config = Arc::clone(&start.config);
        self.started = Some(StartedAgent::new(start, Some(child), first_line));
        AgentEvent::Launched { process, config }
    }

    async fn await_ready(&mut self) -> AgentEvent {
        let generation = self.lifecycle.generation;
        let started = self.started.as_mut().expect(STARTED);
        tokio::select! {
            biased;
            Some(exit) = OptionFuture::from(started.child.as_ref().map(Child::wait)) => AgentEvent::Exited(exit),
            event = started.startup.next(&started.start, &self.agent.name) => event,
            event = self.agent.commanded(generation) => event,
        }
    }

    /// Commands and exits interrupt a slow probe.
    async fn watch(&mut self) -> AgentEvent {
        let generation = self.lifecycle.generation;
        let is_suspended = self.lifecycle.is_suspended();
        let started = self.started.as_mut().expect(STARTED);
        let child = started.child.as_ref();
        let health_check =
            started.health_check.get_or_insert_with(|| HealthCheck::new(&started.start.config));
        tokio::select! {
            biased;
            event = self.agent.commanded(generation) => event,
            Some(exit) = OptionFuture::from(child.map(Child::wait)) => AgentEvent::Exited(exit),
            event = health_check.next(&started.start, &self.agent.name, child, is_suspended, &self.agent.recheck, &self.agent.calls) => event,
        }
    }

    async fn stop_process(&mut self) -> AgentEvent {
        let StartedAgent { start, child, first_line, .. } = self.started.take().expect(STARTED);
        let child = child.expect("an attached agent never enters Exiting");
        // How long a process takes to exit matters only if it was asked to.
        let began = child.wait().now_or_never().is_none().then(Instant::now);
        let exit = child.stop(start.config.stop_grace, &self.skip_grace).await;
        let _ = tokio::time::timeout(LAST_OUTPUT_TIMEOUT, self.agent.output.read_to_end()).await;
        let took_ms = began.map(|began| millis(began.elapsed()));
        tracing::info!(agent = %self.agent.name, took_ms, "agent {exit}{}", self.last_output(first_line));
        AgentEvent::TreeExited { exit, last_line: self.telling_line(first_line) }
    }

    async fn wait(&mut self, until: Option<Instant>) -> AgentEvent {
        tokio::select! {
            biased;
            event = self.agent.commanded(self.lifecycle.generation) => event,
            Some(()) = OptionFuture::from(until.map(tokio::time::sleep_until)) => AgentEvent::BackoffElapsed,
        }
    }

    fn telling_line(&self, first_line: u64) -> Option<String> {
        let line = telling_line(&self.agent.output.tail(first_line, TELLING_LINES))?;
        Some(shorten(line.trim(), MAX_TELLING_LINE))
    }

    /// The last output lines, which usually tell why the process exited.
    fn last_output(&self, first_line: u64) -> String {
        let lines = self.agent.output.tail(first_line, LAST_LINES);
        if lines.is_empty() {
            return String::new();
        }
        let lines: Vec<_> = lines.iter().map(|line| shorten(&line.text, 400)).collect();
        format!("; last output: {}", lines.join(" | "))
    }
}

/// The line that most likely tells why a process exited: the end of a traceback, otherwise the last line that reports an
/// error, otherwise the last one of stderr, otherwise the last one.
fn telling_line(lines: &[Line]) -> Option<String> {
    let is_text = |line: &Line| !line.text.trim().is_empty();
    let is_error = |line: &Line| line.level == Level::Error && !line.text.starts_with("Traceback ");
    let traceback = lines.iter().rposition(|line| line.text.starts_with("Traceback "));
    let after = traceback.and_then(|start| lines.get(start + 1..)).unwrap_or_default();
    let is_end = |line: &&Line| is_text(line) && !line.text.starts_with([' ', '\t']);
    let last = |is: &dyn Fn(&Line) -> bool| lines.iter().rev().find(|line| is(line));
    let line = after.iter().find(is_end).or_else(|| last(&is_error));
    let line = line
        .or_else(|| last(&|line| line.stream == Stream::Stderr && is_text(line)))
        .or_else(|| last(&is_text))?;
    Some(line.text.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Timestamp;

    #[test]
    fn the_line_that_tells_why_a_process_exited_is_found() {
        let told = |texts: &[&str]| {
            let line = |text: &&str| Line {
                seq: 0,
                at: Timestamp(SystemTime::UNIX_EPOCH),
                stream: if text.starts_with("out") { Stream::Stdout } else { Stream::Stderr },
                level: if text.contains("FATAL") || text.starts_with("Traceback") {
                    Level::Error
                } else {
                    Level::Info
                },
                text: (*text).to_owned(),
            };
            telling_line(&texts.iter().map(line).collect::<Vec<_>>())
        };
        let traceback = [
            "Traceback (most recent call last):",
            "  File \"a.py\"",
            "    import x",
            "ModuleNotFoundError: x",
        ];
        assert_eq!(told(&traceback).as_deref(), Some("ModuleNotFoundError: x"));
        assert_eq!(told(&["FATAL: no key", "bye", "out: end"]).as_deref(), Some("FATAL: no key"));
        assert_eq!(told(&["usage: x", "out: end"]).as_deref(), Some("usage: x"));
        assert_eq!(told(&["out: end", ""]).as_deref(), Some("out: end"));
        assert_eq!(told(&[]), None);
    }
}
