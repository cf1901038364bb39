//! The measurements. What is compared runs in turns within one run, because machines are never
//! equally busy twice.

use std::time::Duration;

use anyhow::{bail, ensure};
use bytes::Bytes;

use crate::load::{self, Body, Crowd, Form, Target, Until};
use crate::report::Goal::{AtLeast, AtMost};
use crate::report::{Goal, Report, Row, Sample};
use crate::stage::{Bridge, Process, Program, Stage};

/// How much to measure.
#[derive(Clone)]
pub struct Extent {
    /// Medians are over this many rounds.
    pub rounds: usize,
    /// Turns of each side within a round.
    pub turns: usize,
    /// How long a turn takes.
    pub turn: Duration,
    /// Events of a stream.
    pub events: u32,
    /// The part that needs no patience.
    pub is_short: bool,
    /// Only these measurements.
    pub only: Option<Vec<String>>,
}

impl Extent {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.iter().any(|wanted| wanted == name))
    }
}

/// The measurements by name, in the order of the table.
pub const NAMES: [&str; 6] = ["calls", "streams", "start", "memory", "crowd", "flat"];
/// What the ratio of bridge to baseline may be in CPU or instructions per call.
pub const NO_WORSE: Goal = AtMost(1.03);
const MIB: &str = "MiB";
/// What a caller sends to the bridge.
pub const PROMPT: &str = r#"{"prompt":"What is the weather in Paris tomorrow?"}"#;

/// What the bridge makes of [`PROMPT`]; the floor is given it ready-made.
pub fn a2a(method: &str) -> Bytes {
    format!(
        r#"{{"jsonrpc":"2.0","id":"0b4cd9a5-3d9e-4b39-8b07-5d4d3b0a6b55","method":"{method}","params":{{"message":{{"messageId":"8f3b5f0e-53a4-44b7-a6f6-ec4a1e5ba1c2","role":"ROLE_USER","parts":[{{"text":"What is the weather in Paris tomorrow?"}}],"metadata":{{"skill_id":"go"}}}},"configuration":{{"acceptedOutputModes":["text/plain"]}}}}}}"#
    )
    .into()
}

pub fn target(subjects: &[String], body: Bytes, form: Form) -> Target {
    Target { subjects: subjects.into(), body: Body::Same(body), form }
}

/// A process under load, and the requests that it gets.
struct Side<'a> {
    process: &'a Process,
    target: Target,
}

impl<'a> Side<'a> {
    fn floor(process: &'a Process, subject: &str, method: &str, form: Form) -> Self {
        Self { process, target: target(&[subject.to_owned()], a2a(method), form) }
    }

    fn bridge(bridge: &'a Bridge, form: Form) -> Self {
        Self { process: &bridge.process, target: target(&bridge.subjects, PROMPT.into(), form) }
    }
}

/// What one side did in one round.
struct Round {
    p50: f64,
    p99: f64,
    per_second: f64,
    cpu_per_call: f64,
    messages_per_call: f64,
    pieces_per_call: f64,
}

/// Has the sides work in turns; returns the rounds of each side.
async fn compare(
    stage: &Stage,
    extent: &Extent,
    in_flight: usize,
    sides: &[Side<'_>],
) -> anyhow::Result<Vec<Vec<Round>>> {
    let mut rounds: Vec<Vec<Round>> = sides.iter().map(|_| Vec::new()).collect();
    // Connections are opened and caches are warm before anything counts.
    for side in sides {
        load::call(&stage.client, &side.target, in_flight, Until::Elapsed(extent.turn / 2)).await?;
    }
    for round in 0..extent.rounds {
        let mut all: Vec<(load::Done, Duration)> = sides.iter().map(|_| Default::default()).collect();
        for turn in 0..extent.turns {
            for index in order(round * extent.turns + turn, sides.len()) {
                let (side, (done, cpu)) = (&sides[index], &mut all[index]);
                let before = side.process.cpu()?;
                let more =
                    load::call(&stage.client, &side.target, in_flight, Until::Elapsed(extent.turn)).await?;
                *cpu += side.process.cpu()?.saturating_sub(before);
                done.latencies.extend(more.latencies);
                done.elapsed += more.elapsed;
                done.messages += more.messages;
                done.pieces += more.pieces;
            }
        }
        for (rounds, (mut done, cpu)) in rounds.iter_mut().zip(all) {
            done.latencies.sort_unstable();
            let calls = done.latencies.len() as f64;
            let quantile = |q: f64| micros(done.latencies[((calls - 1.0) * q) as usize]);
            rounds.push(Round {
                p50: quantile(0.5),
                p99: quantile(0.99),
                per_second: calls / done.elapsed.as_secs_f64(),
                cpu_per_call: micros(cpu) / calls,
                messages_per_call: done.messages as f64 / calls,
                pieces_per_call: done.pieces as f64 / calls,
            });
        }
    }
    Ok(rounds)
}

/// The order of the sides in a turn: another side begins each time, and after each full rotation the
/// direction changes, so that no side always comes first or always follows the same other side.
fn order(turn: usize, sides: usize) -> impl Iterator<Item = usize> {
    let is_reversed = (turn / sides) % 2 == 1;
    (0..sides).map(move |position| {
        let position = if is_reversed { sides - position } else { position };
        (turn + position) % sides
    })
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Rounds that were measured in turns with each other.
#[derive(Clone, Copy)]
struct Compared<'a> {
    floor: &'a [Round],
    bridge: &'a [Round],
    baseline: Option<&'a [Round]>,
}

impl Compared<'_> {
    fn row(
        self,
        figure: String,
        unit: &'static str,
        value: impl Fn(&Round) -> f64,
        goal: Option<Goal>,
    ) -> Row {
        let median = |rounds: &[Round]| rounds.iter().map(&value).collect::<Sample>().median();
        let ratio = |to: &[Round]| {
            let pairs = self.bridge.iter().zip(to);
            pairs.map(|(bridge, other)| value(bridge) / value(other)).collect::<Sample>()
        };
        Row {
            floor: Some(median(self.floor)),
            baseline: self.baseline.map(median),
            to_floor: Some(ratio(self.floor)),
            to_baseline: self.baseline.map(ratio),
            ..alone(&figure, unit, median(self.bridge), goal)
        }
    }
}

/// A row without a floor and a baseline.
pub fn alone(figure: &str, unit: &'static str, bridge: f64, goal: Option<Goal>) -> Row {
    Row {
        figure: figure.to_owned(),
        unit,
        floor: None,
        bridge,
        baseline: None,
        to_floor: None,
        to_baseline: None,
        goal,
        baseline_goal: None,
        limit: None,
    }
}

/// Everything, in the order of the table.
pub async fn all(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    if extent.wants("calls") {
        calls(stage, extent, report).await?;
    }
    if extent.wants("streams") {
        streams(stage, extent, report).await?;
    }
    if extent.wants("start") {
        start(stage, extent, report).await?;
    }
    if extent.wants("memory") {
        memory(stage, extent, report).await?;
    }
    if extent.wants("crowd") {
        crowd(stage, extent, report).await?;
    }
    if extent.wants("flat") && !extent.is_short {
        flat_agents(stage, extent, report).await?;
        flat_follow_ups(stage, extent, report).await?;
    }
    Ok(())
}

async fn calls(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let floor = stage.floor(extent.events)?;
    let bridges = stage.bridges(&["/echo/0".to_owned()]).await?;
    let mut sides = vec![Side::floor(&floor, "floor.call", "SendMessage", Form::Single)];
    sides.extend(bridges.iter().map(|bridge| Side::bridge(bridge, Form::Single)));
    let crowds: &[usize] = if extent.is_short { &[1, 64] } else { &[1, 64, 512] };
    for &in_flight in crowds {
        let rounds = compare(stage, extent, in_flight, &sides).await?;
        let compared =
            Compared { floor: &rounds[0], bridge: &rounds[1], baseline: rounds.get(2).map(Vec::as_slice) };
        let named = |figure: &str| format!("{figure}, {in_flight} in flight");
        let is_64 = in_flight == 64;
        if in_flight == 1 {
            let row = compared.row(named("p50"), "µs", |r| r.p50, Some(AtMost(1.10)));
            report.add(Row { limit: Some(AtMost(2.2)), ..row });
        }
        report.add(compared.row(named("p99"), "µs", |r| r.p99, None));
        let goal = is_64.then_some(AtLeast(0.90));
        let row = compared.row(named("calls"), "1/s", |r| r.per_second, goal);
        report.add(Row { limit: is_64.then_some(AtLeast(0.3)), ..row });
        let goal = is_64.then_some(AtMost(1.15));
        let row = compared.row(named("CPU per call"), "µs", |r| r.cpu_per_call, goal);
        let limit = is_64.then_some(AtMost(3.0));
        report.add(Row { limit, baseline_goal: Some(NO_WORSE), ..row });
    }
    Ok(())
}

async fn streams(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let floor = stage.floor(extent.events)?;
    let bridges = stage.bridges(&[format!("/stream/{}", extent.events)]).await?;
    let mut sides = vec![
        Side::floor(&floor, "floor.stream", "SendStreamingMessage", Form::Stream),
        Side::bridge(&bridges[0], Form::TextStream),
    ];
    sides.extend(bridges.iter().map(|bridge| Side::bridge(bridge, Form::Stream)));
    for in_flight in [1, 64] {
        let rounds = compare(stage, extent, in_flight, &sides).await?;
        for round in rounds.iter().flatten() {
            ensure!(round.pieces_per_call == f64::from(extent.events), "pieces of a stream are lost");
        }
        let s = if in_flight == 1 { "" } else { "s" };
        let (text, default) = (&rounds[1], &rounds[2]);
        let (goal, limit) = match in_flight {
            1 => (None, None),
            _ => (Some(AtLeast(0.85)), Some(AtLeast(0.12))),
        };
        let baseline = rounds.get(3).map(Vec::as_slice);
        let compared = Compared { floor: &rounds[0], bridge: default, baseline };
        stream_rows(compared, &format!("{in_flight} stream{s}"), extent, (goal, limit), report);
        let (goal, limit) = match in_flight {
            1 => (Some(AtLeast(0.70)), Some(AtLeast(0.15))),
            _ => (None, None),
        };
        // Older programs ignore the header that asks for this form.
        let compared = Compared { floor: &rounds[0], bridge: text, baseline: None };
        stream_rows(compared, &format!("{in_flight} text-only stream{s}"), extent, (goal, limit), report);
    }
    drop(sides);
    supervisor(stage, extent, report).await
}

fn stream_rows(
    compared: Compared<'_>,
    streams: &str,
    extent: &Extent,
    (goal, limit): (Option<Goal>, Option<Goal>),
    report: &mut Report,
) {
    // The task before and the state after the pieces are events too.
    let events = f64::from(extent.events + 2);
    let named = |figure: &str| format!("{figure}, {streams}");
    let row = compared.row(named("stream events"), "1/s", |r| r.per_second * events, goal);
    report.add(Row { limit, ..row });
    report.add(compared.row(named("CPU per event"), "µs", |r| r.cpu_per_call / events, None));
    report.add(compared.row(named("messages per event"), "", |r| r.messages_per_call / events, None));
}

/// The demo agent's supervisor: 600 events, most of them tokens.
async fn supervisor(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    const EVENTS: f64 = 600.0;
    let mut bridges = Vec::new();
    for &program in stage.programs() {
        bridges.push(stage.supervisor(program).await?);
    }
    let sides: Vec<Side<'_>> = bridges.iter().map(|bridge| Side::bridge(bridge, Form::Stream)).collect();
    let mut pieces = None;
    for in_flight in [1, 16] {
        let rounds = compare(stage, extent, in_flight, &sides).await?;
        for round in rounds.iter().flatten() {
            let expected = *pieces.get_or_insert(round.pieces_per_call);
            ensure!(round.pieces_per_call == expected, "events of the supervisor are lost");
        }
        let figure = format!("CPU per event, {in_flight} of the demo agent's supervisor");
        let baseline = rounds.get(1).map(Vec::as_slice);
        let compared = Compared { floor: &[], bridge: &rounds[0], baseline };
        let row = compared.row(figure, "µs", |r| r.cpu_per_call / EVENTS, Some(AtMost(10.0)));
        report.add(Row { floor: None, to_floor: None, ..row });
    }
    Ok(())
}

async fn start(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let programs = stage.programs();
    let mut times = vec![Vec::new(); programs.len()];
    for turn in 0..extent.rounds.max(3) {
        for index in order(turn, programs.len()) {
            let bridge = stage.bridge(programs[index], &["/echo/0".to_owned()]).await?;
            times[index].push(bridge.first_action.as_secs_f64() * 1e3);
        }
    }
    let mut medians = times.into_iter().map(|times| times.into_iter().collect::<Sample>().median());
    let bridge = medians.next().unwrap_or(f64::NAN);
    let row = alone("start to first action", "ms", bridge, Some(AtMost(100.0)));
    report.add(Row { baseline: medians.next(), ..row });
    Ok(())
}

fn paths(kind: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("/{kind}/{number}")).collect()
}

/// Lets what was only needed for a moment go.
async fn settle() {
    tokio::time::sleep(Duration::from_secs(1)).await;
}

async fn memory(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    for (agents, figure, goal, limit) in
        [(1, "RSS idle, 1 agent", 20.0, 30.0), (50, "RSS idle, 50 agents", 40.0, 60.0)]
    {
        let bridges = stage.bridges(&paths("echo", agents)).await?;
        settle().await;
        let row = memory_row(figure, &bridges, AtMost(goal))?;
        report.add(Row { limit: Some(AtMost(limit)), ..row });
    }
    let count = if extent.is_short { 1_000 } else { 10_000 };
    let bridges = stage.bridges(&["/echo/0".to_owned(), "/ask/0".to_owned()]).await?;
    let in_session = |number| format!(r#"{{"prompt":"Go on","meta":{{"session_id":"session-{number}"}}}}"#);
    for bridge in &bridges {
        for subject in &bridge.subjects {
            let subjects = [subject.clone()].into();
            let numbered = Target { subjects, body: Body::Numbered(in_session), form: Form::Single };
            load::call(&stage.client, &numbered, 64, Until::Calls(count)).await?;
        }
    }
    settle().await;
    let figure = format!("RSS after {count} sessions and {count} follow-ups");
    report.add(memory_row(&figure, &bridges, AtMost(60.0))?);
    Ok(())
}

fn memory_row(figure: &str, bridges: &[Bridge], goal: Goal) -> anyhow::Result<Row> {
    let row = alone(figure, MIB, bridges[0].process.rss()?, Some(goal));
    Ok(Row { baseline: bridges.get(1).map(|baseline| baseline.process.rss()).transpose()?, ..row })
}

async fn crowd(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let count = if extent.is_short { 1_000 } else { 10_000 };
    let floor = stage.slow_floor()?;
    let (floor_rss, _) = crowd_at(stage, &floor, "floor.call", &a2a("SendMessage"), count).await?;
    drop(floor);
    let mut of_programs = Vec::new();
    for &program in stage.programs() {
        let bridge = stage.bridge(program, &["/slow/0".to_owned()]).await?;
        let subject = &bridge.subjects[0];
        of_programs.push(crowd_at(stage, &bridge.process, subject, &PROMPT.into(), count).await?);
    }
    let (rss, answered) = of_programs[0];
    let lost = |answered: usize| (count - answered) as f64;
    let figure = format!("RSS with {count} calls in flight");
    let row = alone(&figure, MIB, rss, Some(AtMost(200.0)));
    let baseline = of_programs.get(1);
    report.add(Row { floor: Some(floor_rss), baseline: baseline.map(|(rss, _)| *rss), ..row });
    let row = alone(&format!("lost of {count} calls"), "", lost(answered), Some(AtMost(0.0)));
    report.add(Row { baseline: baseline.map(|(_, answered)| lost(*answered)), ..row });
    ensure!(answered == count, "{} of {count} calls were lost", lost(answered));
    Ok(())
}

/// What somebody holds while `count` calls wait at the slow agent, and how many are answered then.
async fn crowd_at(
    stage: &Stage,
    process: &Process,
    subject: &str,
    body: &Bytes,
    count: usize,
) -> anyhow::Result<(f64, usize)> {
    stage.hold().await?;
    let crowd = Crowd::send(&stage.client, subject, body, count).await?;
    let mut patience = 600;
    while stage.waiting().await? < count {
        patience -= 1;
        if patience == 0 {
            bail!("only {} of {count} calls have reached the agent", stage.waiting().await?);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let rss = process.rss()?;
    stage.release().await?;
    Ok((rss, crowd.answered().await))
}

async fn flat_agents(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let bridges = [
        stage.bridge(Program::Bridge, &paths("echo", 1)).await?,
        stage.bridge(Program::Bridge, &paths("echo", 50)).await?,
        stage.bridge(Program::Bridge, &paths("echo", 500)).await?,
    ];
    let sides = bridges.each_ref().map(|bridge| Side::bridge(bridge, Form::Single));
    let rounds = compare(stage, extent, 64, &sides).await?;
    for (index, agents) in [(1, 50), (2, 500)] {
        let compared = Compared { floor: &rounds[0], bridge: &rounds[index], baseline: None };
        let figure = format!("CPU per call, {agents} agents against 1");
        report.add(compared.row(figure, "µs", |r| r.cpu_per_call, Some(AtMost(1.10))));
    }
    Ok(())
}

async fn flat_follow_ups(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let agents = ["/echo/0".to_owned(), "/ask/0".to_owned()];
    let (none, many) =
        (stage.bridge(Program::Bridge, &agents).await?, stage.bridge(Program::Bridge, &agents).await?);
    // The same number of tasks is remembered by both, so that only the follow-ups differ.
    for (bridge, agent) in [(&none, 0), (&many, 1)] {
        let calls = target(&bridge.subjects[agent..=agent], PROMPT.into(), Form::Single);
        load::call(&stage.client, &calls, 64, Until::Calls(100_000)).await?;
    }
    let sides = [&none, &many].map(|bridge| Side {
        process: &bridge.process,
        target: target(&bridge.subjects[..1], PROMPT.into(), Form::Single),
    });
    let rounds = compare(stage, extent, 64, &sides).await?;
    let compared = Compared { floor: &rounds[0], bridge: &rounds[1], baseline: None };
    let figure = "CPU per call, 100000 follow-ups against 0".to_owned();
    report.add(compared.row(figure, "µs", |r| r.cpu_per_call, Some(AtMost(1.10))));
    Ok(())
}
