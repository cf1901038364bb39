//! `top`: the load of the agents, from the statistics that every bridge reports to `$SRV.STATS`.

mod sample;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::time::Instant;

use self::sample::{Counts, Grouping, Row, Sample};
use super::client::NatsClient;
use super::discover::{discover, stats};
use super::local_time::time_of_day;
use super::nats_args::NatsArgs;
use super::output::{
    Colour, OutputArgs, StdStream, counted, eprintln_dim, height, one_line, print_json, println, table,
    truncate, width,
};
use super::progress::Spinner;
use super::terminal::{Screen, termination};
use super::{CliError, CliResult, USAGE};
use crate::config::values::parse_duration;
use crate::text::seconds;

/// How far back latencies count.
const LATENCY_WINDOW: Duration = Duration::from_secs(60);
/// How far back calls count in calls per second.
const RATE_WINDOW: Duration = Duration::from_secs(10);
/// Width of the other columns, at most.
const OTHER_COLUMNS: usize = 64;
const MIN_NAME: usize = 12;
/// Narrower terminals do not show all columns.
const FULL_WIDTH: usize = 100;
/// Lines on the screen in addition to the rows: title, header, what is left out.
const OTHER_LINES: usize = 4;

const DETAILS: &str = "\
CALLS and ERRORS count since each bridge serves the agent. The live table shows calls per second over the last 10 seconds, \
and the latencies of the last minute. `--once` measures calls per second for one interval and shows the latencies of all \
calls. Look-ups (cards, `get_task`, `cancel_task`) do not count. A call in mode `stream` takes until the stream ends. An \
error is a reply with the status ERROR; a task that the agent reports as failed is not one.

Examples:
  a2a-bridge top
  a2a-bridge top weather                   # its skills
  a2a-bridge top --json | jq '.[] | select(.errors_per_s > 0).name'";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct TopArgs {
    /// Name of an agent, to show its skills; without it, all agents
    agent: Option<String>,
    /// Time between two measurements, such as `5s`
    #[arg(long, short, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// Order of the rows
    #[arg(long, value_name = "COLUMN", default_value = "calls")]
    sort: SortColumn,
    /// Measure once and exit; the default if stdout is not a terminal, and with `--json`
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    nats: NatsArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SortColumn {
    Name,
    Calls,
    Errors,
    P99,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval < Duration::from_millis(500) {
        return Err("expected at least `500ms`".to_owned());
    }
    Ok(interval)
}

/// A row as `--json` prints it.
#[derive(Debug, Serialize)]
struct Load {
    /// The agent, or agent and skill.
    name: String,
    /// `ready` if a replica is.
    state: String,
    replicas: usize,
    ready: usize,
    in_flight: u64,
    calls_per_s: f64,
    errors_per_s: f64,
    /// `null` without calls.
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    /// Since the bridges serve the agent.
    calls: u64,
    errors: u64,
}

impl Load {
    /// `recent` is what happened within `period`; `latency` are the calls whose latency to show.
    fn new(name: &str, row: &Row, recent: &Counts, period: Duration, latency: &Counts) -> Self {
        let ready = row.states.iter().filter(|state| *state == "ready").count();
        let state = if ready > 0 { Some("ready") } else { row.states.first().map(String::as_str) };
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let per_second = |count: u64| round(count as f64 / period.as_secs_f64().max(0.001));
        let millis = |part| latency.percentile(part).map(|time| round(time.as_secs_f64() * 1000.0));
        let total = row.total();
        Self {
            name: name.to_owned(),
            state: state.unwrap_or_default().to_owned(),
            replicas: row.states.len(),
            ready,
            in_flight: row.in_flight,
            calls_per_s: per_second(recent.calls),
            errors_per_s: per_second(recent.errors),
            p50_ms: millis(0.5),
            p99_ms: millis(0.99),
            calls: total.calls,
            errors: total.errors,
        }
    }

    fn cells(&self, grouping: Grouping<'_>) -> Vec<(Colour, String)> {
        let plain = |text: String| (Colour::Plain, text);
        let state = match self.replicas {
            0 | 1 => self.state.clone(),
            count => format!("{} {}/{count}", self.state, self.ready),
        };
        let colour = match Colour::of_agent_state(&self.state) {
            Colour::Green if self.ready < self.replicas => Colour::Yellow,
            colour => colour,
        };
        let time =
            |millis: Option<f64>| match millis.and_then(|ms| Duration::try_from_secs_f64(ms / 1000.0).ok()) {
                Some(time) => plain(seconds(time)),
                None => plain("-".to_owned()),
            };
        let errors = if self.errors_per_s > 0.0 { Colour::Red } else { Colour::Plain };
        let name = match grouping {
            Grouping::Agents => &self.name,
            Grouping::SkillsOf(agent) => self.name.strip_prefix(&format!("{agent}.")).unwrap_or(&self.name),
        };
        let mut cells = vec![
            plain(truncate(&one_line(name), width().saturating_sub(OTHER_COLUMNS).max(MIN_NAME))),
            (colour, state),
            plain(self.in_flight.to_string()),
            plain(format!("{:.1}", self.calls_per_s)),
            time(self.p50_ms),
            time(self.p99_ms),
            (errors, format!("{:.1}", self.errors_per_s)),
            plain(self.errors.to_string()),
            plain(self.calls.to_string()),
        ];
        if width() < FULL_WIDTH {
            cells.pop();
        }
        cells
    }
}

/// Three decimals are enough for a rate or for milliseconds.
fn round(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

pub(super) async fn run(args: TopArgs) -> CliResult {
    let mesh = args.nats.connect().await?;
    let grouping = args.agent.as_deref().map_or(Grouping::Agents, Grouping::SkillsOf);
    let first = measure(&mesh, grouping).await?;
    if first.rows.is_empty() && !args.output.is_json() {
        let discovery = discover(&mesh).await?;
        return Err(match &args.agent {
            None => discovery.no_agents_error(&mesh),
            Some(agent) => {
                let known = discovery.instance(agent, &mesh)?;
                CliError::msg(USAGE, format!("`{}` has no statistics", known.agent)).hint(
                    "the bridge that serves it is too old, or the NATS user may not request `$SRV.STATS`",
                )
            }
        });
    }
    if args.once || args.output.is_json() || !StdStream::Stdout.is_terminal() {
        let pause = tokio::time::sleep(args.interval);
        Spinner::new("measuring").until(pause).await;
        let second = measure(&mesh, grouping).await?;
        let mut loads = once(&first, &second);
        sort(&mut loads, args.sort);
        if args.output.is_json() {
            return print_json(&loads);
        }
        println(&rows_text(&loads, grouping))?;
        eprintln_dim(title(&loads, grouping));
        return Ok(ExitCode::SUCCESS);
    }
    live(&mesh, &args, grouping, first).await
}

async fn measure(mesh: &NatsClient, grouping: Grouping<'_>) -> CliResult<Sample> {
    let replies = stats(mesh).await?;
    Ok(Sample::new(Instant::now(), &replies, &mesh.subjects, grouping))
}

/// Calls per second between two measurements, and the latencies of all calls.
fn once(first: &Sample, second: &Sample) -> Vec<Load> {
    let period = second.at - first.at;
    let loads = second.rows.iter().map(|(name, row)| {
        let recent = first.rows.get(name).map(|earlier| row.since(earlier)).unwrap_or_default();
        Load::new(name, row, &recent, period, &row.total())
    });
    loads.collect()
}

/// Draws the table again and again until Ctrl-C, and leaves the last one on the terminal.
async fn live(mesh: &NatsClient, args: &TopArgs, grouping: Grouping<'_>, first: Sample) -> CliResult {
    let mut ended = std::pin::pin!(termination());
    let mut screen = Screen::enter();
    let mut samples = VecDeque::from([first]);
    let mut ticks = tokio::time::interval_at(Instant::now() + args.interval, args.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut text;
    loop {
        let mut loads = recent(&samples);
        sort(&mut loads, args.sort);
        let total = title(&loads, grouping);
        let left_out = loads.len().saturating_sub(height().saturating_sub(OTHER_LINES));
        loads.truncate(loads.len() - left_out);
        text = rows_text(&loads, grouping);
        if left_out > 0 {
            text = format!("{text}\n… and {left_out} more");
        }
        let now = time_of_day(SystemTime::now());
        let now = now.split('.').next().unwrap_or_default();
        let source =
            format!("{now}, every {}, Ctrl-C ends; NATS at {}", seconds(args.interval), mesh.servers);
        let source = StdStream::Stdout.paint(Colour::Dim, truncate(&source, width()));
        screen.draw(&format!("{total}\n{source}\n{text}"));
        let sample = tokio::select! {
            ended = &mut ended => break ended?,
            sample = async { ticks.tick().await; measure(mesh, grouping).await } => sample?,
        };
        samples.push_back(sample);
        while samples.len() > 2 && samples.get(1).is_some_and(|second| second.at.elapsed() >= LATENCY_WINDOW)
        {
            samples.pop_front();
        }
    }
    drop(screen);
    println(&text)
}

/// The load over the last measurements.
fn recent(samples: &VecDeque<Sample>) -> Vec<Load> {
    let (Some(oldest), Some(newest)) = (samples.front(), samples.back()) else { return Vec::new() };
    let is_recent = |sample: &&Sample| newest.at - sample.at <= RATE_WINDOW;
    let base = samples.iter().find(is_recent).filter(|base| base.at < newest.at).unwrap_or(oldest);
    let loads = newest.rows.iter().map(|(name, row)| {
        let since =
            |earlier: &Sample| earlier.rows.get(name).map(|earlier| row.since(earlier)).unwrap_or_default();
        Load::new(name, row, &since(base), newest.at - base.at, &since(oldest))
    });
    loads.collect()
}

fn sort(loads: &mut [Load], column: SortColumn) {
    let key = |load: &Load| match column {
        SortColumn::Name => 0.0,
        SortColumn::Calls => load.calls_per_s,
        SortColumn::Errors => load.errors_per_s,
        SortColumn::P99 => load.p99_ms.unwrap_or_default(),
    };
    // Stable: rows with equal values stay in the order of their names.
    loads.sort_by(|a, b| key(b).total_cmp(&key(a)));
}

fn rows_text(loads: &[Load], grouping: Grouping<'_>) -> String {
    let name = if grouping == Grouping::Agents { "AGENT" } else { "SKILL" };
    let mut header = vec![name, "STATE", "IN FLIGHT", "CALLS/S", "P50", "P99", "ERRORS/S", "ERRORS", "CALLS"];
    if width() < FULL_WIDTH {
        header.pop();
    }
    table(&header, loads.iter().map(|load| load.cells(grouping)))
}

fn title(loads: &[Load], grouping: Grouping<'_>) -> String {
    let [calls, errors] = [|load: &Load| load.calls_per_s, |load: &Load| load.errors_per_s]
        .map(|rate| loads.iter().map(rate).sum::<f64>());
    let rows = counted(loads.len(), if grouping == Grouping::Agents { "agent" } else { "skill" });
    format!("{rows}, {calls:.1} calls/s, {errors:.1} errors/s")
}
