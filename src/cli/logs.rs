//! `logs`: the output of agents that a bridge launched.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use tokio::time::Instant;

use super::CliResult;
use super::client::{NatsArgs, NatsClient};
use super::control::{REPLY_TIMEOUT, parse, request, request_all};
use super::discover::discover;
use super::output::{eprintln, println};
use crate::bus::control::{AgentReport, LogsReply, LogsRequest};
use crate::process::output::{Level, Line};

/// How long one request follows the logs before the command renews it.
const FOLLOW_S: u64 = 30;

const EXAMPLES: &str = "\
Examples:
  a2a-bridge logs weather --lines 200
  a2a-bridge logs --follow               # all agents";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct LogsArgs {
    /// Names of the agents; without any, all agents on NATS
    names: Vec<String>,
    /// Wait for new lines and print them
    #[arg(long, short)]
    follow: bool,
    /// Lines to show per agent
    #[arg(long, short = 'n', default_value_t = 50)]
    lines: usize,
    // Last, because its help heading applies to every argument after it.
    #[command(flatten)]
    nats: NatsArgs,
}

pub(super) async fn run(args: LogsArgs) -> CliResult {
    let mesh = args.nats.connect().await?;
    let mut names = args.names;
    if names.is_empty() {
        names.extend(discover(&mesh).await?.agents.into_iter().map(|agent| agent.agent));
        names.dedup();
    }
    let with_name = names.len() > 1;
    let mut lines = BTreeMap::new();
    let mut sources = Vec::new();
    for name in &names {
        let body = LogsRequest { lines: Some(args.lines), ..LogsRequest::default() };
        let replies: Vec<LogsReply> = request_all(&mesh, name, "logs", &body, REPLY_TIMEOUT).await?;
        for logs in replies {
            // No output at all: perhaps the bridge did not launch the agent.
            if logs.next == 0 && !is_launched(&mesh, name, &logs.instance).await? {
                eprintln(format_args!("{name}: the bridge did not launch this agent, so it has no output"));
                continue;
            }
            for (index, line) in logs.lines.into_iter().enumerate() {
                lines.insert((line.at, name, logs.instance.clone(), index), line);
            }
            sources.push((name, logs.instance, logs.next));
        }
    }
    for ((_, name, ..), line) in &lines {
        println(&log_line(with_name.then_some(name), line))?;
    }
    if args.follow {
        let following =
            sources.iter().map(|(name, instance, next)| follow(&mesh, name, instance, *next, with_name));
        for result in futures_util::future::join_all(following).await {
            result?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn is_launched(mesh: &NatsClient, agent: &str, instance: &str) -> CliResult<bool> {
    let body = LogsRequest { instance: Some(instance.to_owned()), ..LogsRequest::default() };
    let reports: Vec<AgentReport> = request_all(mesh, agent, "show", &body, REPLY_TIMEOUT).await?;
    Ok(reports.iter().any(|report| report.program.is_some()))
}

/// Prints new lines from one bridge until it no longer answers.
async fn follow(
    mesh: &NatsClient,
    agent: &str,
    instance: &str,
    mut from: u64,
    with_name: bool,
) -> CliResult<()> {
    loop {
        let body = LogsRequest { instance: Some(instance.to_owned()), lines: None, from, follow_s: FOLLOW_S };
        let mut replies = request(mesh, agent, "logs", &body).await?;
        let deadline = Instant::now() + Duration::from_secs(FOLLOW_S) + REPLY_TIMEOUT;
        loop {
            let Ok(message) = replies.next_within(deadline.saturating_duration_since(Instant::now())).await
            else {
                eprintln(format_args!("{agent}: the bridge {instance} no longer answers"));
                return Ok(());
            };
            let logs: LogsReply = parse(&message)?;
            for line in &logs.lines {
                println(&log_line(with_name.then_some(agent), line))?;
            }
            from = logs.next;
            if !logs.more {
                break;
            }
        }
    }
}

pub(super) fn log_line(agent: Option<&str>, line: &Line) -> String {
    let at = time::OffsetDateTime::from(line.at.0);
    let level = match line.level {
        Level::Debug => "DEBUG",
        Level::Info => " INFO",
        Level::Warn => " WARN",
        Level::Error => "ERROR",
    };
    let agent = agent.map(|agent| format!(" {agent}")).unwrap_or_default();
    let (hour, minute, second) = at.to_hms();
    format!("{hour:02}:{minute:02}:{second:02}.{:03} {level}{agent} {}", at.millisecond(), line.text)
}
