//! `agents`: lists the agents on NATS, and shows, starts, stops and restarts some of them.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use super::discover::{DiscoveredAgent, discover};
use super::local_time::time_of_day;
use super::nats_args::NatsArgs;
use super::output::{
    Colour, OutputArgs, StdStream, age, counted, eprintln_dim, one_line, print_json, print_wrapped_table,
    println, width, wrapped,
};
use super::{CliResult, FAILED, control};
use crate::bus::control::{AgentReport, ControlRequest};
use crate::text::{Timestamp, duration};

/// Names in a command that is suggested.
const MAX_SUGGESTED: usize = 5;

/// Time limit for `start`, `stop` and `restart`: an agent may use its whole grace period.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(90);

/// Width of the labels in a report.
const LABEL: usize = 17;

const DETAILS: &str = "\
Without a subcommand, `agents` lists the agents, like `agents list`.

An attached agent was not started by the bridge: `stop` only unpublishes its skills, `start` \
publishes them again, and `restart` fails.

Examples:
  a2a-bridge agents
  a2a-bridge agents show weather       # what is wrong, and what to do
  a2a-bridge agents restart weather news";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct AgentsArgs {
    #[command(flatten)]
    nats: NatsArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: Option<AgentsCommand>,
}

#[derive(Debug, clap::Subcommand)]
enum AgentsCommand {
    /// List the agents on NATS (the default)
    List,
    /// Show the state of agents, their last problem and what to do about it
    Show(AgentNames),
    /// Start stopped or failed agents, or retry backing-off agents now
    Start(AgentNames),
    /// Stop agents until `agents start` or a restart of the bridge
    Stop(AgentNames),
    /// Stop agents and start them again
    Restart(AgentNames),
}

#[derive(Debug, clap::Args)]
struct AgentNames {
    /// Names of the agents
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

pub(super) async fn run(args: AgentsArgs) -> CliResult {
    let AgentsArgs { nats, output, command } = args;
    let (AgentNames { names }, verb, expected_state) = match command {
        None | Some(AgentsCommand::List) => return list(&nats, &output).await,
        Some(AgentsCommand::Show(agent)) => (agent, "show", None),
        Some(AgentsCommand::Start(agent)) => (agent, "start", Some("ready")),
        Some(AgentsCommand::Stop(agent)) => (agent, "stop", Some("stopped")),
        Some(AgentsCommand::Restart(agent)) => (agent, "restart", Some("ready")),
    };
    let timeout = if verb == "show" { control::REPLY_TIMEOUT } else { CONTROL_TIMEOUT };
    let mesh = nats.connect().await?;
    let (mut reports, mut failure) = (Vec::<AgentReport>::new(), None);
    for name in &names {
        match control::request_all(&mesh, name, verb, &ControlRequest::default(), timeout).await {
            Ok(found) => reports.extend(found),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    if reports.is_empty() {
        // There is an error instead.
    } else if output.is_json() {
        print_json(&reports)?;
    } else {
        let format = if verb == "show" { full_report } else { short_report };
        println(reports.iter().map(format).collect::<Vec<_>>().join("\n").trim_end())?;
    }
    if let Some(failure) = failure {
        return Err(failure);
    }
    let succeeded = reports.iter().all(|report| expected_state.is_none_or(|state| report.state == state));
    Ok(ExitCode::from(if succeeded { 0 } else { FAILED }))
}

async fn list(nats: &NatsArgs, output: &OutputArgs) -> CliResult {
    let mesh = nats.connect().await?;
    let discovery = discover(&mesh).await?;
    if output.is_json() {
        return print_json(&discovery.agents);
    }
    if discovery.agents.is_empty() {
        return Err(discovery.no_agents_error(&mesh));
    }
    let agents = &discovery.agents;
    // A bridge serves a name once.
    let has_replicas = agents.windows(2).any(|pair| matches!(pair, [one, two] if one.agent == two.agent));
    let mut header = vec!["NAME", "STATE", "SKILLS", "RESTARTS", "AGE", "PROBLEM"];
    if has_replicas {
        header.insert(1, "BRIDGE");
    }
    print_wrapped_table(&header, agents.iter().map(|agent| table_row(agent, has_replicas)))?;
    eprintln_dim(hint(agents, &nats.suggested_flags()));
    Ok(ExitCode::SUCCESS)
}

/// What to do next: look at a problem, otherwise at the skills.
fn hint(agents: &[DiscoveredAgent], flags: &str) -> String {
    let mut broken: Vec<_> =
        agents.iter().filter(|agent| has_problem(agent)).map(|agent| &agent.agent).collect();
    broken.dedup();
    match broken.as_slice() {
        [] => match agents.iter().find(|agent| !agent.skills.is_empty()) {
            Some(agent) => format!("`a2a-bridge skills {}{flags}` lists its skills", agent.agent),
            None => "the agents have no skills yet".to_owned(),
        },
        [one] => format!("`a2a-bridge agents show {one}{flags}` says what is wrong and what to do"),
        several => {
            let shown: Vec<_> = several.iter().take(MAX_SUGGESTED).map(|name| name.as_str()).collect();
            let (count, names) = (several.len(), shown.join(" "));
            format!("{count} agents have problems; `a2a-bridge agents show {names}{flags}` says what to do")
        }
    }
}

/// Whether somebody should look at the agent. One that was stopped on request is as it should be.
fn has_problem(agent: &DiscoveredAgent) -> bool {
    agent.last_error.is_some() && agent.state != "stopped"
}

fn table_row(agent: &DiscoveredAgent, with_bridge: bool) -> Vec<(Colour, String)> {
    let plain = |text: String| (Colour::Plain, text);
    let problem = agent.reason.as_ref().or(agent.last_error.as_ref()).cloned().unwrap_or_default();
    let mut row = vec![
        plain(agent.agent.clone()),
        (state_colour(&agent.state, agent.last_error.is_some()), agent.state.clone()),
        plain(agent.skills.len().to_string()),
        plain(agent.restarts.map(|count| count.to_string()).unwrap_or_default()),
        plain(agent.since.map(age).unwrap_or_default()),
        plain(problem),
    ];
    if with_bridge {
        row.insert(1, plain(agent.bridge_id.clone().unwrap_or_else(|| agent.instance.clone())));
    }
    row
}

/// The colour of a state; `ready` with a problem is not green.
fn state_colour(state: &str, has_problem: bool) -> Colour {
    match Colour::of_agent_state(state) {
        Colour::Green if has_problem => Colour::Yellow,
        colour => colour,
    }
}

fn short_report(report: &AgentReport) -> String {
    let pid = report.pid.map(|pid| format!(", pid {pid}"));
    let is_unpublished = report.program.is_none() && report.state == "stopped";
    let note = is_unpublished.then(|| {
        "\n  the bridge no longer publishes this agent; it did not start it, so the agent may still be running".to_owned()
    });
    let error = report.last_error.as_ref().map(|error| format!("\n  {}", one_line(error)));
    let advice = report.advice.as_ref().map(|advice| format!("\n  what to do: {advice}"));
    let more: String = [pid, note, error, advice].into_iter().flatten().collect();
    format!("{}: {}{more}", report.agent, report.state)
}

fn full_report(report: &AgentReport) -> String {
    let mut text = format!("{}\n", StdStream::Stdout.paint(Colour::Bold, one_line(&report.agent)));
    let mut coloured = |name: &str, value: Option<String>, colour: Colour| {
        if let Some(value) = value {
            let value = wrapped(&one_line(&value), LABEL + 2, width());
            let value = StdStream::Stdout.paint(colour, value);
            let _ = writeln!(text, "  {:<LABEL$}{value}", format!("{name}:"));
        }
    };
    let state = format!("{}, for {}", report.state, time_since(report.since));
    coloured("State", Some(state), state_colour(&report.state, report.last_error.is_some()));
    let (name, colour) =
        if report.state == "stopped" { ("Reason", Colour::Plain) } else { ("Problem", Colour::Red) };
    // A reason in a few words has the line of output that tells most; the error has the rest.
    let (reason, error) = (report.reason.as_ref(), report.last_error.as_ref());
    let details = error.filter(|error| reason.is_some_and(|reason| reason != *error));
    coloured(name, reason.or(error).cloned(), colour);
    coloured("Details", details.cloned(), Colour::Plain);
    let mut row = |name: &str, value: Option<String>| coloured(name, value, Colour::Plain);
    row("What to do", report.advice.clone());
    row("Next retry", report.next_try.map(|at| format!("in {}", time_until(at))));
    let started = report.started.map(|at| format!(", started {} ago", time_since(at))).unwrap_or_default();
    row("Process", report.pid.map(|pid| format!("{pid}{started}")));
    let exit = report.last_exit.as_ref();
    row("Last exit", exit.map(|exit| format!("{}, {} ago", exit.how, time_since(exit.at))));
    let program = report.program.as_ref();
    row("Command", program.map(|program| format!("{program} (arguments not shown)")));
    let policy = report.restart.as_ref();
    row("Restarts", policy.map(|policy| format!("{} (restart: {policy})", report.restarts)));
    row("URL", Some(report.url.clone()));
    if let Some(card) = &report.card {
        let title = format!("{} {}", card.name, card.version);
        let skills = counted(card.skills, "skill");
        row("Card", Some(format!("{}, {skills}, {}", title.trim_end(), card.hash)));
        let (version, binding, endpoint) = (&card.protocol_version, &card.binding, &card.endpoint);
        row("Protocol", Some(format!("A2A {version} over {binding} at {endpoint}")));
    } else {
        row("Card", Some("not fetched yet".to_owned()));
    }
    row("In flight", Some(report.in_flight.to_string()));
    row("Open questions", report.open_questions.map(|count| count.to_string()));
    row("Followed tasks", report.followed_tasks.map(|count| count.to_string()));
    let shared = report.shared_state.map(|is_shared| match is_shared {
        true => "in JetStream, with all replicas",
        false => "no, in the memory of this bridge",
    });
    row("Shared state", shared.map(str::to_owned));
    let error = report.last_call_error.as_ref();
    let error = error.map(|error| format!("{}: {}, {} ago", error.code, error.message, time_since(error.at)));
    row("Last call error", error);
    let (lines, bytes) = (report.counts.dropped_lines, report.counts.dropped_bytes);
    let reason = "the agent writes faster than the bridge can log";
    row("Output", (bytes > 0).then(|| format!("{lines} lines and {bytes} bytes dropped: {reason}")));
    row("Instance", Some(report.instance.clone()));
    if !report.output.is_empty() {
        let _ = writeln!(text, "  Last output:");
        for line in &report.output {
            let _ = writeln!(text, "    {}", format_args!("{} {}", time_of_day(line.at.0), line.text));
        }
    }
    text
}

fn time_since(at: Timestamp) -> String {
    duration(at.0.elapsed().unwrap_or_default())
}

fn time_until(at: Timestamp) -> String {
    duration(at.0.duration_since(SystemTime::now()).unwrap_or_default())
}
