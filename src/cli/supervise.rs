//! `agents show|start|stop|restart` and `logs`: seeing and steering agents over NATS.

use crate::text::duration;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use async_nats::{HeaderMap, Message};
use clap::Subcommand;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::client::{Connection, Mesh, Replies, Silence};
use super::discover::discover;
use super::output::{Output, print, print_json, remark, say};
use super::{DEFECT, Failure, TROUBLE, UNAVAILABLE};
use crate::bus::control::{AgentReport, LogsReply, LogsRequest};
use crate::bus::subject::Token;
use crate::process::output::{Level, Line};

/// How long the first answer may take.
const ANSWER: Duration = Duration::from_secs(5);
/// After so long a silence a person is told what is waited for.
const PATIENCE: Duration = Duration::from_secs(4);
/// How long an order may take.
const ORDER: Duration = Duration::from_secs(90);
/// How long other bridges with the same agent may take to answer after the first one.
const OTHERS: Duration = Duration::from_millis(150);
/// How long logs are followed before the request is renewed.
const FOLLOW_S: u64 = 30;

/// What can be done with one agent.
#[derive(Debug, Subcommand)]
pub(super) enum Supervise {
    /// Show what an agent does, what is wrong with it, and what to do about that
    Show {
        /// The agent
        name: String,
    },
    /// Start an agent that was stopped or has failed; try one now that waits for its next try
    Start {
        /// The agent
        name: String,
    },
    /// Stop an agent; it stays stopped until it is started, or the bridge is
    Stop {
        /// The agent
        name: String,
    },
    /// Stop an agent and start it at once
    Restart {
        /// The agent
        name: String,
    },
}

/// What of the logs is shown.
#[derive(Debug, clap::Args)]
pub(super) struct LogsArgs {
    /// The agents; all that are on the mesh, if none is named
    names: Vec<String>,
    /// Go on with new lines as they come
    #[arg(long, short)]
    follow: bool,
    /// The last so many lines of each
    #[arg(long, short = 'n', default_value_t = 50)]
    lines: usize,
    // Last, as its heading is for all that comes after it.
    #[command(flatten)]
    connection: Connection,
}

pub(super) async fn supervise(
    connection: &Connection,
    output: &Output,
    command: Supervise,
) -> Result<ExitCode, Failure> {
    let mesh = Site(connection.connect().await?);
    let (name, verb) = match command {
        Supervise::Show { name } => (name, "show"),
        Supervise::Start { name } => (name, "start"),
        Supervise::Stop { name } => (name, "stop"),
        Supervise::Restart { name } => (name, "restart"),
    };
    let limit = if verb == "show" { ANSWER } else { ORDER };
    let reports: Vec<AgentReport> = mesh.ask(&name, verb, limit).await?;
    if output.is_json() {
        return print_json(&reports);
    }
    let now = SystemTime::now();
    let shown: Vec<String> = reports
        .iter()
        .map(|report| match verb {
            "show" => show(report, now),
            _ => brief(report),
        })
        .collect();
    print(shown.join("\n").trim_end())?;
    let well = |report: &AgentReport| match verb {
        "start" | "restart" => report.state == "ready",
        "stop" => report.state == "stopped",
        _ => true,
    };
    let code = if reports.iter().all(well) { 0 } else { TROUBLE };
    Ok(ExitCode::from(code))
}

pub(super) async fn logs(args: LogsArgs) -> Result<ExitCode, Failure> {
    let mesh = Site(args.connection.connect().await?);
    let mut names = args.names;
    if names.is_empty() {
        let found = discover(&mesh.0, None).await?;
        names.extend(found.agents.into_iter().map(|agent| agent.agent));
        names.dedup();
    }
    let with_name = names.len() > 1;
    let mut lines = BTreeMap::new();
    let mut following = Vec::new();
    for name in &names {
        let request = LogsRequest { lines: Some(args.lines), ..LogsRequest::default() };
        let logs: Vec<LogsReply> = mesh.ask_with(name, "logs", &request, ANSWER).await?;
        for one in logs {
            // Nothing was ever written: perhaps because there is nobody who could.
            if one.next == 0 && !mesh.is_launched(name, &one.instance).await? {
                say(format_args!("{name}: the bridge did not start this agent, so it has no output of it"));
                continue;
            }
            for (index, line) in one.lines.into_iter().enumerate() {
                lines.insert((line.at_ms, name.clone(), one.instance.clone(), index), line);
            }
            following.push((name.clone(), one.instance, one.next));
        }
    }
    for ((_, name, _, _), line) in &lines {
        print(&log_line(with_name.then_some(name), line))?;
    }
    if args.follow {
        let followers = following.into_iter().map(|(name, instance, from)| {
            let mesh = &mesh;
            async move { mesh.follow(&name, &instance, from, with_name).await }
        });
        for result in futures_util::future::join_all(followers).await {
            result?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The mesh, where bridges answer for their agents.
struct Site(Mesh);

impl Site {
    async fn ask<T: DeserializeOwned>(
        &self,
        agent: &str,
        verb: &str,
        limit: Duration,
    ) -> Result<Vec<T>, Failure> {
        self.ask_with(agent, verb, &LogsRequest::default(), limit).await
    }

    /// All answers: there may be several bridges with this agent.
    async fn ask_with<T: DeserializeOwned>(
        &self,
        agent: &str,
        verb: &str,
        request: &LogsRequest,
        limit: Duration,
    ) -> Result<Vec<T>, Failure> {
        let mut replies = self.request(agent, verb, request).await?;
        let mut first = replies.next(limit.min(PATIENCE)).await;
        if limit > PATIENCE && matches!(first, Err(Silence::Timeout(_))) {
            remark(format_args!("no answer yet; waiting {}s at the most", limit.as_secs()));
            first = replies.next(limit.saturating_sub(PATIENCE)).await;
        }
        let first = first.map_err(|silence| self.silent(agent, verb, limit, silence))?;
        let mut answers = vec![read(&first)?];
        while let Ok(message) = replies.next(OTHERS).await {
            answers.push(read(&message)?);
        }
        Ok(answers)
    }

    /// Whether this bridge has started the agent, rather than found it running.
    async fn is_launched(&self, agent: &str, instance: &str) -> Result<bool, Failure> {
        let request = LogsRequest { instance: Some(instance.to_owned()), ..LogsRequest::default() };
        let reports: Vec<AgentReport> = self.ask_with(agent, "show", &request, ANSWER).await?;
        Ok(reports.iter().any(|report| report.program.is_some()))
    }

    async fn request(&self, agent: &str, verb: &str, request: &LogsRequest) -> Result<Replies, Failure> {
        let subject = self.0.subjects.control(&Token::new(agent), verb);
        let body = serde_json::to_vec(request).map_err(|error| Failure::new(DEFECT, error))?;
        self.0.request(subject, HeaderMap::new(), body.into()).await
    }

    /// What to say when nobody answers for an agent.
    fn silent(&self, agent: &str, verb: &str, limit: Duration, silence: Silence) -> Failure {
        let control = format!("{}.control.>", self.0.subjects.prefix());
        let verb = if verb == "logs" { "show the logs of" } else { verb };
        let what = format!("cannot {verb} `{agent}`");
        match silence {
            Silence::NoResponders => {
                let error = anyhow::anyhow!("no bridge serves an agent `{agent}` on this mesh");
                Failure::new(UNAVAILABLE, error).hint("`a2a-bridge agents` lists those that are served")
            }
            Silence::Timeout(_) => Silence::Timeout(limit)
                .failure(&what)
                .hint(format!("this user may not be allowed to publish to `{control}`")),
            silence @ Silence::Refused(_) => {
                silence.failure(&what).hint(format!("only who may publish to `{control}` can do this"))
            }
            Silence::Closed => silence.failure(&what),
        }
    }

    /// Prints lines of one bridge as they come, until nobody answers any more.
    async fn follow(
        &self,
        agent: &str,
        instance: &str,
        mut from: u64,
        with_name: bool,
    ) -> Result<(), Failure> {
        loop {
            let request =
                LogsRequest { instance: Some(instance.to_owned()), lines: None, from, follow_s: FOLLOW_S };
            let mut replies = self.request(agent, "logs", &request).await?;
            let until = Instant::now() + Duration::from_secs(FOLLOW_S) + ANSWER;
            loop {
                let Ok(message) = replies.next(until.saturating_duration_since(Instant::now())).await else {
                    say(format_args!("{agent}: the bridge {instance} is gone"));
                    return Ok(());
                };
                let logs: LogsReply = read(&message)?;
                for line in &logs.lines {
                    print(&log_line(with_name.then_some(agent), line))?;
                }
                from = logs.next;
                if !logs.more {
                    break;
                }
            }
        }
    }
}

fn read<T: DeserializeOwned>(message: &Message) -> Result<T, Failure> {
    #[derive(Deserialize)]
    struct Refusal {
        message: String,
    }
    serde_json::from_slice(&message.payload).map_err(|error| {
        let error = match serde_json::from_slice::<Refusal>(&message.payload) {
            Ok(refusal) => anyhow::anyhow!("{}", refusal.message),
            Err(_) => anyhow::Error::new(error).context("the bridge's answer is not understood"),
        };
        Failure::new(TROUBLE, error)
    })
}

fn log_line(name: Option<impl AsRef<str>>, line: &Line) -> String {
    let at = time::OffsetDateTime::from(SystemTime::UNIX_EPOCH + Duration::from_millis(line.at_ms));
    let level = match line.level {
        Level::Debug => "DEBUG",
        Level::Info => " INFO",
        Level::Warn => " WARN",
        Level::Error => "ERROR",
    };
    let name = name.map(|name| format!(" {}", name.as_ref())).unwrap_or_default();
    let (hour, minute, second) = at.to_hms();
    format!("{hour:02}:{minute:02}:{second:02}.{:03} {level}{name} {}", at.millisecond(), line.text)
}

fn brief(report: &AgentReport) -> String {
    let mut text = format!("{}: {}", report.agent, report.state);
    if let Some(pid) = report.pid {
        let _ = write!(text, ", pid {pid}");
    }
    for (word, what) in [("", &report.last_error), ("what to do: ", &report.advice)] {
        if let Some(what) = what {
            let _ = write!(text, "\n  {word}{what}");
        }
    }
    text
}

/// The report for people: what is wrong comes first, and what to do next.
fn show(report: &AgentReport, now: SystemTime) -> String {
    let ago = |at: u64| format!("{} ago", span(now, at));
    let mut rows: Vec<(&str, String)> =
        vec![("Status", format!("{}, for {}", report.state, span(now, report.since_ms)))];
    let mut row = |name, value: Option<String>| rows.extend(value.map(|value| (name, value)));
    let why = if report.state == "stopped" { "Why" } else { "Problem" };
    row(why, report.last_error.clone());
    row("What to do", report.advice.clone());
    row("Next try", report.next_try_ms.map(|at| format!("in {}", until(now, at))));
    row(
        "Process",
        report.pid.map(|pid| match report.started_ms {
            Some(at) => format!("{pid}, started {}", ago(at)),
            None => pid.to_string(),
        }),
    );
    row("Last exit", report.last_exit.as_ref().map(|exit| format!("{}, {}", exit.how, ago(exit.at_ms))));
    row(
        "Command",
        report.program.as_ref().map(|program| format!("{program} (arguments are in the settings)")),
    );
    row("Restarts", report.restart.as_ref().map(|policy| format!("{} (restart: {policy})", report.restarts)));
    row("URL", Some(report.url.clone()));
    row(
        "Card",
        Some(report.card.as_ref().map_or("none seen yet".to_owned(), |card| {
            let version = if card.version.is_empty() { "" } else { " " };
            format!(
                "{}{version}{}, {} skill{}, {}",
                card.name,
                card.version,
                card.skills,
                if card.skills == 1 { "" } else { "s" },
                card.hash
            )
        })),
    );
    row(
        "Protocol",
        report
            .card
            .as_ref()
            .map(|card| format!("A2A {} over {} at {}", card.protocol_version, card.binding, card.endpoint)),
    );
    row("In flight", Some(report.in_flight.to_string()));
    row(
        "Last error",
        report
            .last_call_error
            .as_ref()
            .map(|error| format!("of a call: {}: {}, {}", error.code, error.message, ago(error.at_ms))),
    );
    let counts = report.counts;
    if counts.dropped_bytes > 0 {
        row(
            "Output",
            Some(format!(
                "{} lines and {} bytes dropped: it writes faster than the log takes",
                counts.dropped_lines, counts.dropped_bytes
            )),
        );
    }
    row("Bridge", Some(report.instance.clone()));
    let mut text = format!("{}\n", report.agent);
    for (name, value) in rows {
        let _ = writeln!(text, "  {:<12}{value}", format!("{name}:"));
    }
    if !report.output.is_empty() {
        let _ = writeln!(text, "  Last output:");
        for line in &report.output {
            let _ = writeln!(text, "    {}", log_line(None::<&str>, line));
        }
    }
    text
}

/// How long ago, as people say it.
fn span(now: SystemTime, at_ms: u64) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(at_ms);
    duration(now.duration_since(at).unwrap_or_default())
}

fn until(now: SystemTime, at_ms: u64) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(at_ms);
    duration(at.duration_since(now).unwrap_or_default())
}
