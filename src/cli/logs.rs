//! `logs`: the output of agents that a bridge launched.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;
use unicode_width::UnicodeWidthStr as _;

use super::client::NatsClient;
use super::control::{REPLY_TIMEOUT, parse, request, request_all};
use super::discover::discover;
use super::local_time::time_of_day;
use super::nats_args::NatsArgs;
use super::output::{Colour, StdStream, eprintln, print_json_text, println};
use super::{CliError, CliResult};
use crate::bus::control::{AgentReport, ControlRequest, LogsReply};
use crate::config::values;
use crate::process::output::{Line, Stream};
use crate::text::Timestamp;

/// How long one request follows the logs before the command renews it.
const FOLLOW_S: u64 = 30;
/// The colours of the names, in turn.
const COLOURS: [Colour; 6] =
    [Colour::Cyan, Colour::Yellow, Colour::Green, Colour::Magenta, Colour::Blue, Colour::Bold];
/// Paths at which the bridge reads the card.
const CARD_PATHS: [&str; 2] = ["/.well-known/agent-card.json", "/.well-known/agent.json"];

const DETAILS: &str = "\
Times are in the local time zone. Lines in which an agent logs that the bridge read its card are left out; `--probes` shows \
them.

Examples:
  a2a-bridge logs weather --lines 200
  a2a-bridge logs --since 10m            # all agents
  a2a-bridge logs --follow --json | jq -r 'select(.stream == \"stderr\").text'";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct LogsArgs {
    /// Names of the agents; without any, all agents on NATS
    names: Vec<String>,
    /// Wait for new lines and print them
    #[arg(long, short)]
    follow: bool,
    /// Lines to show per agent [default: 50; with `--since` all that the bridge has kept]
    #[arg(long, short = 'n')]
    lines: Option<usize>,
    /// Show only lines since then: a duration such as `10m`, or a time such as `2026-01-31T08:00:00Z`
    #[arg(long, value_name = "TIME", value_parser = since)]
    since: Option<SystemTime>,
    /// Print each line as a JSON object
    #[arg(long)]
    json: bool,
    /// Show also the lines that are due to the bridge itself, which reads the card again and again
    #[arg(long)]
    probes: bool,
    // Last, because its help heading applies to every argument after it.
    #[command(flatten)]
    nats: NatsArgs,
}

fn since(text: &str) -> Result<SystemTime, String> {
    if let Ok(at) = text.parse::<Timestamp>() {
        return Ok(at.0);
    }
    let before = values::parse_duration(text).ok().and_then(|ago| SystemTime::now().checked_sub(ago));
    before.ok_or_else(|| {
        "expected a duration such as `10m`, or a time such as `2026-01-31T08:00:00Z`".to_owned()
    })
}

pub(super) async fn run(args: LogsArgs) -> CliResult {
    let mesh = args.nats.connect().await?;
    let mut names = args.names.clone();
    let is_named = !names.is_empty();
    if !is_named {
        names.extend(discover(&mesh).await?.agents.into_iter().map(|agent| agent.agent));
        names.dedup();
    }
    let printer = Printer::new(&args, names);
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let (mut sources, mut attached) = (Vec::new(), Vec::new());
    for name in &printer.names {
        let lines = args.lines.or(args.since.is_none().then_some(50));
        let body = ControlRequest { lines, ..ControlRequest::default() };
        let replies: Vec<LogsReply> = request_all(&mesh, name, "logs", &body, REPLY_TIMEOUT).await?;
        for logs in replies {
            // No output at all: perhaps the bridge did not launch the agent.
            if logs.next == 0 && !is_launched(&mesh, name, &logs.instance).await? {
                attached.push(name);
                continue;
            }
            blocks.extend(Block::split(name, &logs.instance, logs.lines));
            sources.push((name, logs.instance, logs.next));
        }
    }
    for name in attached.into_iter().filter(|_| is_named || sources.is_empty()) {
        eprintln(format_args!("{name}: the bridge did not launch this agent, so it has no output"));
    }
    // A stable sort: lines of one agent at the same moment keep their order.
    blocks.sort_by_key(|block| block.at);
    for block in &blocks {
        for line in &block.lines {
            printer.print(block.agent, &block.instance, line)?;
        }
    }
    if args.follow {
        let following =
            sources.iter().map(|(name, instance, next)| follow(&mesh, &printer, name, instance, *next));
        for result in futures_util::future::join_all(following).await {
            result?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Lines of one agent that belong together: a line and the indented ones after it, or a traceback.
struct Block<'a> {
    agent: &'a str,
    instance: String,
    at: Timestamp,
    lines: Vec<Line>,
}

impl<'a> Block<'a> {
    fn split(agent: &'a str, instance: &str, lines: Vec<Line>) -> Vec<Self> {
        let mut blocks: Vec<Self> = Vec::new();
        for line in lines {
            // stdout and stderr may have written at the same time.
            let last = blocks.iter_mut().rev().take(2).find(|block| block.has_stream(line.stream));
            match last {
                Some(block) if block.continues_with(&line) => block.lines.push(line),
                _ => {
                    blocks.push(Self {
                        agent,
                        instance: instance.to_owned(),
                        at: line.at,
                        lines: vec![line],
                    });
                }
            }
        }
        blocks
    }

    fn has_stream(&self, stream: Stream) -> bool {
        self.lines.first().is_some_and(|line| line.stream == stream)
    }

    fn continues_with(&self, line: &Line) -> bool {
        if is_indented(line) {
            return true;
        }
        // The error itself is the line after the indented ones of a traceback.
        let is_traceback = self.lines.first().is_some_and(|first| first.text.starts_with("Traceback "));
        is_traceback && self.lines.last().is_some_and(is_indented)
    }
}

fn is_indented(line: &Line) -> bool {
    line.text.starts_with([' ', '\t'])
}

/// One line as `--json` prints it.
#[derive(Serialize)]
struct JsonLine<'a> {
    agent: &'a str,
    instance: &'a str,
    at: Timestamp,
    stream: Stream,
    text: &'a str,
}

struct Printer {
    names: Vec<String>,
    name_width: usize,
    is_json: bool,
    since: Option<SystemTime>,
    with_probes: bool,
}

impl Printer {
    fn new(args: &LogsArgs, names: Vec<String>) -> Self {
        let name_width = names.iter().map(|name| name.width()).max().unwrap_or_default();
        Self { names, name_width, is_json: args.json, since: args.since, with_probes: args.probes }
    }

    fn print(&self, agent: &str, instance: &str, line: &Line) -> CliResult<()> {
        if self.since.is_some_and(|since| line.at.0 < since) || (!self.with_probes && is_probe(&line.text)) {
            return Ok(());
        }
        if self.is_json {
            let line = JsonLine { agent, instance, at: line.at, stream: line.stream, text: &line.text };
            return print_json_text(&serde_json::to_string(&line).map_err(CliError::internal)?);
        }
        let text = StdStream::Stdout.sanitize(&line.text);
        println(&format!("{}{}", self.label(agent, line), text))?;
        Ok(())
    }

    fn label(&self, agent: &str, line: &Line) -> String {
        let time = StdStream::Stdout.paint(Colour::Dim, time_of_day(line.at.0));
        if self.names.len() < 2 {
            return format!("{time} ");
        }
        let index = self.names.iter().position(|name| name == agent).unwrap_or_default();
        let colour = COLOURS.get(index % COLOURS.len()).copied().unwrap_or(Colour::Plain);
        let pad = " ".repeat(self.name_width.saturating_sub(agent.width()));
        format!("{time} {} ", StdStream::Stdout.paint(colour, format!("{agent}{pad} |")))
    }
}

/// Whether the agent logs that the bridge read its card.
fn is_probe(text: &str) -> bool {
    text.contains("GET") && CARD_PATHS.iter().any(|path| text.contains(path))
}

async fn is_launched(mesh: &NatsClient, agent: &str, instance: &str) -> CliResult<bool> {
    let body = ControlRequest { instance: Some(instance.to_owned()), ..ControlRequest::default() };
    let reports: Vec<AgentReport> = request_all(mesh, agent, "show", &body, REPLY_TIMEOUT).await?;
    Ok(reports.iter().any(|report| report.program.is_some()))
}

/// Prints new lines from one bridge until it no longer answers.
async fn follow(
    mesh: &NatsClient,
    printer: &Printer,
    agent: &str,
    instance: &str,
    mut from: u64,
) -> CliResult<()> {
    loop {
        let body = ControlRequest {
            instance: Some(instance.to_owned()),
            from,
            follow_s: FOLLOW_S,
            ..ControlRequest::default()
        };
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
                printer.print(agent, instance, line)?;
            }
            from = logs.next;
            if !logs.more {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::output::Level;

    fn lines(texts: &[(Stream, &str)]) -> Vec<Line> {
        let at = Timestamp(SystemTime::UNIX_EPOCH);
        let line = |(seq, (stream, text)): (usize, &(Stream, &str))| Line {
            seq: seq as u64,
            at,
            stream: *stream,
            level: Level::Info,
            text: (*text).to_owned(),
        };
        texts.iter().enumerate().map(line).collect()
    }

    #[test]
    fn a_traceback_and_indented_lines_stay_together() {
        use Stream::{Stderr, Stdout};
        let blocks = Block::split(
            "a",
            "i",
            lines(&[
                (Stdout, "one"),
                (Stderr, "Traceback (most recent call last):"),
                (Stdout, "two"),
                (Stderr, "  File \"x.py\", line 1"),
                (Stderr, "ValueError: no"),
                (Stderr, "next"),
                (Stdout, "\tmore of two"),
            ]),
        );
        let texts: Vec<Vec<_>> =
            blocks.iter().map(|block| block.lines.iter().map(|line| line.text.as_str()).collect()).collect();
        let traceback = ["Traceback (most recent call last):", "  File \"x.py\", line 1", "ValueError: no"];
        assert_eq!(texts, [&["one"][..], &traceback, &["two", "\tmore of two"], &["next"]]);
    }

    #[test]
    fn only_reads_of_the_card_are_probes() {
        assert!(is_probe(r#"127.0.0.1 - "GET /.well-known/agent-card.json HTTP/1.1" 200 OK"#));
        assert!(!is_probe("serving /.well-known/agent-card.json") && !is_probe("GET /weather"));
    }

    #[test]
    fn since_is_a_duration_or_a_time() {
        assert_eq!(since("1970-01-01T00:00:00Z"), Ok(SystemTime::UNIX_EPOCH));
        let at = since("10m").unwrap();
        assert!(at.elapsed().unwrap() >= Duration::from_secs(600));
        assert!(since("yesterday").is_err());
    }
}
