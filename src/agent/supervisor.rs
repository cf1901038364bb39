//! The supervisor of one agent: carries out the steps of its [`Lifecycle`] and reports what happens.

use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::{Notify, watch as channel};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::calls::Calls;
use super::lifecycle::{Event, Lifecycle, Process, Step, Wanted};
use super::start::{Start, StartupProbe};
use super::status::{AgentState, AgentStatus, KnownCard};
use super::trouble::{ProbeError, Trouble};
use super::watch::Watch;
use crate::a2a::Instance;
use crate::a2a::card::Card;
use crate::a2a::choose::DialectFallback;
use crate::config;
use crate::process::child::{Child, Exit, Host, Spec};
use crate::process::output::Output;
use crate::secrets::Secrets;

/// How many of its last lines go into the log when an agent exits.
const LAST_LINES: usize = 3;
const HAS_RUN: &str = "a step of an agent that was started comes after its start";

pub(super) struct Supervisor {
    pub(super) config: Arc<config::AgentConfig>,
    pub(super) name: Arc<str>,
    pub(super) http: reqwest::Client,
    pub(super) host: Host,
    pub(super) output: Output,
    pub(super) secrets: Secrets,
    pub(super) calls: Arc<Calls>,
    pub(super) status: channel::Sender<AgentStatus>,
    pub(super) live: channel::Sender<Option<Arc<Instance>>>,
    pub(super) orders: Orders,
    pub(super) recheck: Arc<Notify>,
    /// Skips the grace period of the process.
    pub(super) hurry: CancellationToken,
    /// Cancelled when the agents that have to end before this one starts have ended.
    pub(super) after: Vec<CancellationToken>,
    pub(super) lifecycle: Lifecycle,
    pub(super) run: Option<Run>,
    /// The last port of `port: auto`.
    pub(super) last_port: Option<u16>,
}

/// What others want of the agent.
pub(super) struct Orders {
    pub(super) wanted: channel::Receiver<Wanted>,
    pub(super) stop: CancellationToken,
}

impl Orders {
    /// Resolves when the bridge lets the agent go, or when an order other than this one holds. Cancel-safe.
    async fn changed(&self, order: u64) -> Event {
        let mut wanted = self.wanted.clone();
        let ordered = async {
            let wanted = wanted.wait_for(|wanted| wanted.order != order).await.map(|wanted| *wanted);
            match wanted {
                Ok(wanted) => wanted,
                // All who could order are gone.
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.stop.cancelled() => Event::Shutdown,
            wanted = ordered => Event::Ordered(wanted),
        }
    }
}

/// One start of the agent, until it has gone.
pub(super) struct Run {
    start: Start,
    child: Option<Child>,
    /// Cancelled with the process: its tasks are lost.
    gone: CancellationToken,
    /// The first line of this start's output.
    first_line: u64,
    startup: StartupProbe,
    /// From the first card on.
    watch: Option<Watch>,
}

impl Run {
    fn new(start: Start, child: Option<Child>, first_line: u64) -> Self {
        let startup = StartupProbe::new(&start.config);
        Self { start, child, gone: CancellationToken::new(), first_line, startup, watch: None }
    }
}

/// Waits for the process to exit by itself; an attached agent has none.
async fn exit_of(child: Option<&Child>) -> Exit {
    match child {
        Some(child) => child.wait().await,
        None => std::future::pending().await,
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
                Step::EndProcess => self.end_process().await,
                Step::Wait(until) => self.wait(until).await,
                Step::Finish => return,
            };
            step = self.apply(event);
        }
    }

    /// One transition, published as one change of the status.
    fn apply(&mut self, event: Event) -> Step {
        let (event, instance) = match event {
            Event::Found(known) => self.instance(known),
            other => (other, None),
        };
        let step = self.lifecycle.on(event);
        if step == Step::EndProcess
            && let Some(run) = &self.run
        {
            run.gone.cancel();
        }
        // Before the status: who sees a ready agent can call it.
        match instance {
            Some(instance) => drop(self.live.send_replace(Some(instance))),
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

    /// Where calls go from now on, if that changes with this card.
    fn instance(&self, known: KnownCard) -> (Event, Option<Arc<Instance>>) {
        let seen = self.lifecycle.known();
        if self.lifecycle.state() == AgentState::Ready && seen == Some(&known) {
            return (Event::Found(known), None);
        }
        if seen.is_none_or(|seen| seen.card.hash() != known.card.hash()) {
            self.log_warnings(&known.card);
        }
        let run = self.run.as_ref().expect(HAS_RUN);
        let client = match run.start.chooser.client(&known.card, &known.interface) {
            Ok(client) => client.reconsidering(DialectFallback {
                chooser: Arc::clone(&run.start.chooser),
                card: Arc::clone(&known.card),
                changed: Arc::clone(&self.recheck),
            }),
            Err(error) => {
                let problem = Trouble::probe(&ProbeError::Card(error), &run.start.config);
                return (Event::Unusable(problem), None);
            }
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
        let instance = Instance {
            client,
            card: Arc::clone(&known.card),
            interface: known.interface.clone(),
            gone: run.gone.clone(),
        };
        (Event::Found(known), Some(Arc::new(instance)))
    }

    fn log_warnings(&self, card: &Card) {
        for warning in &card.warnings {
            tracing::warn!(agent = %self.name, "{warning}");
        }
    }

    async fn start(&mut self) -> Event {
        let order = self.lifecycle.order();
        if self.after.iter().any(|ended| !ended.is_cancelled()) && !self.lifecycle.is_delayed() {
            return Event::Delayed(Some(Trouble::predecessor()));
        }
        let predecessors = async {
            for ended in &self.after {
                ended.cancelled().await;
            }
        };
        tokio::select! {
            biased;
            event = self.orders.changed(order) => return event,
            () = predecessors => {}
        }
        self.after.clear();
        if self.lifecycle.is_delayed() {
            return Event::Delayed(None);
        }
        match self.config.command {
            Some(_) => self.launch(order).await,
            None => self.attach(order).await,
        }
    }

    async fn attach(&mut self, order: u64) -> Event {
        let start = match Start::attached(&self.config, &self.http, &self.secrets) {
            Ok(start) => start,
            Err(problem) => return Event::NotStarted(problem),
        };
        let probed = tokio::select! {
            biased;
            event = self.orders.changed(order) => return event,
            probed = start.probe(start.config.readiness.timeout) => probed,
        };
        match probed {
            Ok(known) => {
                self.run = Some(Run::new(start, None, 0));
                Event::Found(known)
            }
            Err(error) => Event::NotStarted(Trouble::probe(&error, &start.config)),
        }
    }

    async fn launch(&mut self, order: u64) -> Event {
        let placed = tokio::select! {
            biased;
            event = self.orders.changed(order) => return event,
            placed = Start::launched(&self.config, &self.http, &self.secrets, self.last_port) => placed,
        };
        let mut start = match placed {
            Ok(start) => start,
            Err(problem) => return Event::NotStarted(problem),
        };
        self.last_port = start.config.url.port();
        let spec = Spec {
            agent: Arc::clone(&self.name),
            command: start.config.command.clone().unwrap_or_default(),
            working_dir: start.config.working_dir.clone(),
            env: start.config.env.clone(),
            stop_signal: start.config.stop_signal,
        };
        let first_line = self.output.next();
        // Not interrupted: half a start would leave a process behind.
        let child = match Child::spawn(&spec, &self.host, &self.output).await {
            Ok(child) => child,
            Err(error) => return Event::NotStarted(Trouble::spawn(&error)),
        };
        start.tree = Some(child.guard().unwrap_or(child.pid()));
        tracing::info!(agent = %self.name, pid = child.pid(), url = %start.config.url, "agent launched");
        let process = Process { pid: child.pid(), launched: Instant::now(), started: SystemTime::now() };
        let config = Arc::clone(&start.config);
        self.run = Some(Run::new(start, Some(child), first_line));
        Event::Launched { process, config }
    }

    async fn await_ready(&mut self) -> Event {
        let order = self.lifecycle.order();
        let run = self.run.as_mut().expect(HAS_RUN);
        tokio::select! {
            biased;
            exit = exit_of(run.child.as_ref()) => Event::Exited(exit),
            event = run.startup.next(&run.start, &self.name) => event,
            event = self.orders.changed(order) => event,
        }
    }

    /// A probe can take long, and what happens meanwhile does not wait for it.
    async fn watch(&mut self) -> Event {
        let order = self.lifecycle.order();
        let is_suspended = self.lifecycle.is_suspended();
        let run = self.run.as_mut().expect(HAS_RUN);
        let child = run.child.as_ref();
        let watch = run.watch.get_or_insert_with(|| Watch::new(&run.start.config));
        tokio::select! {
            biased;
            event = self.orders.changed(order) => event,
            exit = exit_of(child) => Event::Exited(exit),
            event = watch.next(&run.start, child, is_suspended, &self.recheck, &self.calls) => event,
        }
    }

    async fn end_process(&mut self) -> Event {
        let Run { start, child, first_line, .. } = self.run.take().expect(HAS_RUN);
        let child = child.expect("only a process can exit");
        let began = Instant::now();
        let exit = child.stop(start.config.stop_grace, &self.hurry).await;
        tracing::info!(agent = %self.name, took = ?began.elapsed(), "agent {exit}{}", self.last_output(first_line));
        Event::Gone(exit)
    }

    async fn wait(&mut self, until: Option<Instant>) -> Event {
        let due = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            event = self.orders.changed(self.lifecycle.order()) => event,
            () = due => Event::Due,
        }
    }

    /// What the process wrote last, for people who wonder why it exited.
    fn last_output(&self, first_line: u64) -> String {
        let lines = self.output.tail(first_line, LAST_LINES);
        if lines.is_empty() {
            return String::new();
        }
        let lines: Vec<_> = lines.iter().map(|line| crate::text::shorten(&line.text, 400)).collect();
        format!("; it wrote last: {}", lines.join(" | "))
    }
}
