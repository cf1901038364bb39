//! `check`: checks the configuration, then NATS, then the agents.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use super::output::{Colour, OutputArgs, StdStream, counted, one_line, print_json, println, width, wrapped};
use super::{CliError, CliResult, ConfigArgs, FAILED, UNAVAILABLE, run};
use crate::a2a::card::{self, Card, Interface};
use crate::a2a::{self, HttpClient};
use crate::agent::diagnosis::Diagnosis;
use crate::agent::{Agent, AgentState, AgentStatus, Predecessors};
use crate::bus::catalog::rename_warnings;
use crate::bus::connect::credentials::NatsCredentials;
use crate::bus::connect::{ConnectError, FirstConnection, connect};
use crate::bus::identity;
use crate::bus::jetstream::{Api, JetStreamAbsence, Permissions, find_jetstream, missing_permissions};
use crate::config::{AgentConfig, Config, JetStreamMode};
use crate::memory::{self, MemoryBudget};
use crate::process::child::ProcessHost;
use crate::text::{error_chain, seconds};

/// Agents that are checked at the same time.
const CONCURRENT: usize = 8;
/// How long to wait for the last output of a process that has exited.
const LAST_OUTPUT: Duration = Duration::from_millis(500);
/// Lines of output to show of an agent that did not start.
const OUTPUT_LINES: usize = 5;
const INDENT: &str = "    ";

const DETAILS: &str = "\
For an agent with a `command`, the check only looks for the program, unless `--launch` starts it. Any other agent must be \
running: the check fetches its card, and sends a request without side effects to find out whether it accepts the credentials.

Examples:
  a2a-bridge check                     # before `run`
  a2a-bridge check --launch            # start each agent once, as `run` would
  a2a-bridge check --offline --json    # in CI";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    output: OutputArgs,
    /// Check the configuration file only
    #[arg(long)]
    offline: bool,
    /// Start each agent with a `command`, wait until it is ready, and stop it again; not while a bridge runs the same
    /// agents on fixed ports
    #[arg(long, conflicts_with = "offline")]
    launch: bool,
}

/// All results, as `--json` prints them.
#[derive(Debug, Serialize)]
struct Report {
    file: String,
    ok: bool,
    /// `None` with `--offline`.
    nats: Option<Finding>,
    /// `None` with `--offline`, with `nats.jetstream.mode: off`, and if NATS is not reachable.
    jetstream: Option<Finding>,
    agents: Vec<AgentFinding>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Verdict {
    Ok,
    /// Not checked, or not used.
    Skipped,
    /// The bridge works without it.
    Warning,
    #[default]
    Failed,
}

impl Verdict {
    fn mark(self) -> String {
        let (mark, colour) = match self {
            Self::Ok => ("✓", Colour::Green),
            Self::Skipped => return "–".to_owned(),
            Self::Warning => ("!", Colour::Yellow),
            Self::Failed => ("✗", Colour::Red),
        };
        StdStream::Stdout.paint(colour, mark)
    }
}

/// The result of one check.
#[derive(Debug, Default, Serialize)]
struct Finding {
    /// Whether this does not keep the bridge from working.
    ok: bool,
    verdict: Verdict,
    /// What was found, or the problem in a few words.
    summary: String,
    problem: Option<String>,
    advice: Option<String>,
    /// The last output of a process that did not start.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    output: Vec<String>,
}

#[derive(Debug, Serialize)]
struct AgentFinding {
    agent: String,
    #[serde(flatten)]
    finding: Finding,
    warnings: Vec<String>,
}

impl Finding {
    fn ok(summary: impl Into<String>) -> Self {
        Self { ok: true, verdict: Verdict::Ok, summary: summary.into(), ..Self::default() }
    }

    fn skipped(summary: impl Into<String>) -> Self {
        Self { verdict: Verdict::Skipped, ..Self::ok(summary) }
    }

    /// Something works, but not all of it.
    fn warning(summary: &str, problem: String, advice: String) -> Self {
        Self { verdict: Verdict::Warning, problem: Some(problem), advice: Some(advice), ..Self::ok(summary) }
    }
}

impl From<Diagnosis> for Finding {
    fn from(Diagnosis { text, advice, short }: Diagnosis) -> Self {
        Self { summary: short, problem: Some(text), advice: Some(advice), ..Self::default() }
    }
}

pub(super) async fn run(args: CheckArgs) -> CliResult {
    let config = args.config.load()?;
    let file = args.config.config.display().to_string();
    let printer = Printer { is_silent: args.output.is_json() };
    let agents = counted(config.agents.len(), "agent");
    printer.print(&Finding::ok(format!("valid, {agents}")), &file)?;
    let (nats, jetstream) = match args.offline {
        true => (None, None),
        false => {
            let (nats, jetstream) = check_nats(&config).await;
            (Some(nats), jetstream)
        }
    };
    for (finding, what) in [(&nats, "NATS"), (&jetstream, "JetStream")] {
        if let Some(finding) = finding {
            printer.print(finding, what)?;
        }
    }
    let agents = check_agents(&config, &args, &printer).await?;
    let is_ok = |finding: &Option<Finding>| finding.as_ref().is_none_or(|finding| finding.ok);
    let has_nats = is_ok(&nats) && is_ok(&jetstream);
    let failed = agents.iter().filter(|agent| !agent.finding.ok).count();
    let code = if !has_nats { UNAVAILABLE } else { u8::from(failed > 0) * FAILED };
    let report = Report { file, ok: code == 0, nats, jetstream, agents };
    if args.output.is_json() {
        print_json(&report)?;
    } else if !args.offline {
        println(&report.totals(failed))?;
    }
    Ok(ExitCode::from(code))
}

impl Report {
    /// The last line for people.
    fn totals(&self, failed: usize) -> String {
        let agents = counted(self.agents.len(), "agent");
        let is_failed = |finding: &Option<Finding>| finding.as_ref().is_some_and(|finding| !finding.ok);
        let nats = match (is_failed(&self.nats), is_failed(&self.jetstream)) {
            (true, _) => ", NATS not reachable",
            (false, true) => ", JetStream not usable",
            (false, false) => "",
        };
        let skipped = self.agents.iter().filter(|agent| agent.finding.verdict == Verdict::Skipped).count();
        let not_tried = match skipped {
            0 => String::new(),
            _ => format!("{skipped} not tried, "),
        };
        let ok = self.agents.len() - failed - skipped;
        let text = format!("{agents}: {ok} ok, {not_tried}{failed} failed{nats}");
        StdStream::Stdout.paint(if self.ok { Colour::Green } else { Colour::Red }, text)
    }
}

/// Prints results as they arrive.
struct Printer {
    is_silent: bool,
}

impl Printer {
    fn print(&self, finding: &Finding, what: &str) -> CliResult<()> {
        if self.is_silent {
            return Ok(());
        }
        let first = format!("{what}: {}", one_line(&finding.summary));
        let mut text = format!("{} {}", finding.verdict.mark(), wrapped(&first, 2, width()));
        let mut add = |line: &str, hanging: usize| {
            text = format!("{text}\n{INDENT}{}", wrapped(&one_line(line), INDENT.len() + hanging, width()));
        };
        if let Some(problem) = finding.problem.as_ref().filter(|problem| **problem != finding.summary) {
            add(problem, 0);
        }
        if let Some(advice) = &finding.advice {
            add(&format!("→ {advice}"), 2);
        }
        for line in &finding.output {
            add(&format!("| {line}"), 2);
        }
        println(&text)?;
        Ok(())
    }

    fn warn(&self, agent: &str, warning: &str) -> CliResult<()> {
        if self.is_silent {
            return Ok(());
        }
        let text = format!("agent {agent}: warning: {}", one_line(warning));
        println(&format!("{} {}", Verdict::Warning.mark(), wrapped(&text, 2, width())))?;
        Ok(())
    }
}

async fn check_nats(config: &Config) -> (Finding, Option<Finding>) {
    let events = Arc::default();
    let connected = match NatsCredentials::new(&config.nats) {
        Ok(credentials) => {
            connect(&config.nats, &credentials, usize::MAX, FirstConnection::FailFast, &events).await
        }
        Err(error) => Err(error),
    };
    match connected {
        Ok(client) => {
            let version = &client.server_info().version;
            let warning = identity::server_warning(version, &config.nats.identity);
            let warning = warning.map(|warning| format!("; warning: {warning}")).unwrap_or_default();
            let finding = Finding::ok(format!("ok, nats-server {version}{warning}"));
            (finding, check_jetstream(config, Api::new(client, events)).await)
        }
        Err(error) => {
            let (summary, advice) = match &error {
                _ if error.is_refused() => ("credentials rejected", run::REJECTED_BY_NATS),
                ConnectError::Connect { .. } => ("no connection", run::NO_NATS),
                ConnectError::Credentials { .. } | ConnectError::Tls { .. } => {
                    ("unusable file", run::UNUSABLE_FILE)
                }
            };
            let diagnosis =
                Diagnosis { text: error_chain(&error), advice: advice.into(), short: summary.into() };
            (diagnosis.into(), None)
        }
    }
}

/// Whether the bridge can share state. Without JetStream it still works, unless that is required.
async fn check_jetstream(config: &Config, api: Api) -> Option<Finding> {
    let mode = config.nats.jetstream.mode;
    if mode == JetStreamMode::Off {
        return None;
    }
    let (prefix, allowed_buckets) = (&config.nats.subject_prefix, &config.files.allowed_buckets);
    let Permissions { files, other_buckets, state, events } =
        missing_permissions(&api, prefix, allowed_buckets).await;
    let events = if config.events.is_some() { events } else { Vec::new() };
    let denied = |subjects: &[String]| {
        let advice =
            "add these subjects to what the user may publish to; deploy/nats-permissions.conf lists them";
        let problem = format!("the NATS user of the bridge may not publish to {}", subjects.join(", "));
        (problem, advice.to_owned())
    };
    let (problem, advice) = match find_jetstream(&api).await {
        // Nobody listens, so the permissions do not matter.
        Err(absence @ (JetStreamAbsence::Disabled | JetStreamAbsence::ServerTooOld)) => {
            if mode != JetStreamMode::Required {
                return Some(Finding::skipped(format!("not used; state is kept in memory ({absence})")));
            }
            (absence.to_string(), run::NO_JETSTREAM.to_owned())
        }
        _ if !state.is_empty() => denied(&[files, other_buckets, state, events].concat()),
        Err(absence) => (absence.to_string(), run::NO_JETSTREAM.to_owned()),
        Ok(()) if !files.is_empty() => {
            let (problem, advice) = denied(&[files, other_buckets].concat());
            let summary = "state is shared, but files must fit into one message";
            return Some(Finding::warning(summary, problem, advice));
        }
        Ok(()) if !other_buckets.is_empty() => {
            let (problem, _) = denied(&other_buckets);
            let advice = "add these subjects to what the user may publish to, or remove the bucket from \
                          `files.allowed_buckets`";
            let summary = "state is shared, but files in other buckets cannot be read";
            return Some(Finding::warning(summary, problem, advice.to_owned()));
        }
        Ok(()) if !events.is_empty() => {
            let (problem, advice) = denied(&events);
            return Some(Finding::warning("state is shared, but calls are not logged", problem, advice));
        }
        Ok(()) => return Some(Finding::ok("ok, state is shared")),
    };
    Some(match mode {
        JetStreamMode::Required => Finding {
            summary: "not usable, but required".to_owned(),
            problem: Some(problem),
            advice: Some(advice),
            ..Finding::default()
        },
        _ => Finding::warning("not usable; state is kept in memory", problem, advice),
    })
}

async fn check_agents(config: &Config, args: &CheckArgs, printer: &Printer) -> CliResult<Vec<AgentFinding>> {
    let http = a2a::http_client().map_err(CliError::internal)?;
    let budget = MemoryBudget::new(memory::default_limit());
    let launcher = args.launch.then(run::process_host);
    let (http, budget, launcher) = (&http, &budget, &launcher);
    let checks = config.agents.iter().map(|agent| async move {
        let finding = match launcher {
            _ if args.offline => Finding::skipped("not checked (--offline)"),
            Some(host) if agent.command.is_some() => launch(agent, http, host, budget).await,
            _ => check_agent(agent, http, budget).await.unwrap_or_else(Into::into),
        };
        (agent, finding)
    });
    let mut results = futures_util::stream::iter(checks).buffered(CONCURRENT);
    let mut findings = Vec::new();
    while let Some((agent, finding)) = results.next().await {
        let warnings = rename_warnings(&agent.skills);
        if !args.offline {
            printer.print(&finding, &format!("agent {}", agent.name))?;
        }
        for warning in &warnings {
            printer.warn(&agent.name, warning)?;
        }
        findings.push(AgentFinding { agent: agent.name.clone(), finding, warnings });
    }
    if let Some(host) = launcher {
        host.tasks.stop.cancel();
    }
    Ok(findings)
}

/// Reads the card of a running agent and probes it, or looks for the program of one that is to be launched.
async fn check_agent(
    agent: &AgentConfig,
    http: &HttpClient,
    budget: &Arc<MemoryBudget>,
) -> Result<Finding, Diagnosis> {
    let secrets = agent.secrets();
    let chooser = a2a::chooser(agent, http, &secrets, budget.account(&agent.name)).map_err(|error| {
        Diagnosis::new(error_chain(&error), "correct `tls` or the credentials in the agent's configuration")
    })?;
    if let Some(command) = &agent.command {
        let program = command.first().map(String::as_str).unwrap_or_default();
        return check_program(program, agent.working_dir.as_deref());
    }
    let card = match &agent.card {
        Some(card) => Card::from_value(card.clone()),
        None => {
            let credentials = chooser.card_credentials();
            let path = agent.card_path.as_deref();
            card::fetch(&chooser.http, &agent.url, path, &credentials, &secrets).await
        }
    };
    let diagnosed = |error: card::CardError| Diagnosis::card(&error.redacted(&secrets), agent);
    let card = card.map_err(diagnosed)?;
    let interface = chooser.choose(&card).await.map_err(diagnosed)?;
    match interface.failure {
        Some(failure) => Err(Diagnosis::unconfirmed(failure, agent)),
        None => Ok(Finding::ok(describe(&card, &interface))),
    }
}

fn describe(card: &Card, interface: &Interface) -> String {
    let skills = counted(card.skills.len(), "skill");
    format!("ok, A2A {} at {}, {skills}", interface.dialect.protocol_version(), interface.url)
}

/// Starts an agent as `run` does, waits until it is ready or has a problem, and stops it.
async fn launch(
    config: &AgentConfig,
    http: &HttpClient,
    host: &ProcessHost,
    budget: &Arc<MemoryBudget>,
) -> Finding {
    let (skip_grace, memory) = (CancellationToken::new(), budget.account(&config.name));
    let began = Instant::now();
    let started = Agent::start(config.clone(), http, host, skip_grace, Predecessors::default(), memory);
    let agent = match started {
        Ok(agent) => agent,
        Err(error) => {
            let advice = "correct `tls` or the credentials in the agent's configuration";
            return Diagnosis::new(error_chain(&error), advice).into();
        }
    };
    let mut status = agent.status.clone();
    // The agent owns the sender.
    let _ = status.wait_for(|status| status.state != AgentState::Starting).await;
    let took = began.elapsed();
    if has_exited(&status.borrow_and_update()) {
        // The next status has the line of output that tells why, if there is one.
        let _ = tokio::time::timeout(LAST_OUTPUT, status.changed()).await;
    }
    let status = status.borrow().clone();
    let lines = agent.output.tail(0, OUTPUT_LINES);
    agent.stop().await;
    match (status.last_error, &status.known) {
        (None, Some(known)) => {
            Finding::ok(format!("{}; ready after {}", describe(&known.card, &known.interface), seconds(took)))
        }
        (text, _) => {
            let text = text.unwrap_or_else(|| status.state.to_string());
            let short = status.reason.unwrap_or_else(|| text.clone());
            let diagnosis = Diagnosis { text, advice: status.advice.unwrap_or_default(), short };
            let output = lines.into_iter().map(|line| line.text).collect();
            Finding { output, ..diagnosis.into() }
        }
    }
}

fn has_exited(status: &AgentStatus) -> bool {
    matches!(status.state, AgentState::BackingOff | AgentState::Failed | AgentState::Stopped)
}

/// Looks for the program the way `execvp` does.
fn check_program(program: &str, working_dir: Option<&Path>) -> Result<Finding, Diagnosis> {
    if let Some(dir) = working_dir.filter(|dir| !dir.is_dir()) {
        let text = format!("no such directory: {} (`working_dir`)", dir.display());
        return Err(Diagnosis::new(text, "create the directory, or correct `working_dir`"));
    }
    let is_path = program.contains('/');
    let is_found = if is_path {
        working_dir.unwrap_or(Path::new("")).join(program).is_file()
    } else {
        std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
    };
    if is_found {
        return Ok(Finding::skipped(format!(
            "not tried; `{program}` exists, and `check --launch` starts it"
        )));
    }
    let advice = match working_dir {
        Some(dir) if is_path => format!("the path is relative to {} (`working_dir`)", dir.display()),
        None if is_path => {
            "the path is resolved from the directory in which the bridge is started".to_owned()
        }
        _ => "is it installed and on the PATH?".to_owned(),
    };
    Err(Diagnosis::new(format!("command not found: `{program}`"), advice))
}
