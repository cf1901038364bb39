//! The measurements. The sides of a comparison take turns within one run, because the load of a machine
//! changes from run to run.

use std::time::Duration;

use anyhow::{bail, ensure};
use bytes::Bytes;

use crate::load::{self, Body, Burst, ReplyForm, StopAfter, Target};
use crate::report::Goal::{AtLeast, AtMost};
use crate::report::{Goal, Report, Row, Sample};
use crate::testbed::{Bridge, Process, Program, Testbed};

/// How much to measure.
#[derive(Clone)]
pub struct Plan {
    /// Figures are medians over these rounds.
    pub rounds: usize,
    /// Turns of each side within a round.
    pub turns: usize,
    /// Duration of a turn.
    pub turn: Duration,
    /// Text events of a stream.
    pub events: u32,
    pub is_short: bool,
    /// The measurements to run; all without it.
    pub only: Option<Vec<String>>,
}

impl Plan {
    fn includes(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.iter().any(|wanted| wanted == name))
    }
}

/// The measurements by name, in the order of the table.
pub const NAMES: [&str; 6] = ["calls", "streams", "start", "memory", "crowd", "flat"];
/// The highest ratio of bridge to baseline in CPU or instructions per call.
pub const NO_WORSE: Goal = AtMost(1.03);
const MIB: &str = "MiB";
/// What a caller sends to the bridge.
pub const PROMPT: &str = r#"{"prompt":"What is the weather in Paris tomorrow?"}"#;

/// The A2A request that the bridge makes from [`PROMPT`]. Callers send it to the floor, which only forwards.
pub fn a2a_request(method: &str) -> Bytes {
    format!(
        r#"{{"jsonrpc":"2.0","id":"0b4cd9a5-3d9e-4b39-8b07-5d4d3b0a6b55","method":"{method}","params":{{"message":{{"messageId":"8f3b5f0e-53a4-44b7-a6f6-ec4a1e5ba1c2","role":"ROLE_USER","parts":[{{"text":"What is the weather in Paris tomorrow?"}}],"metadata":{{"skill_id":"go"}}}},"configuration":{{"acceptedOutputModes":["text/plain"]}}}}}}"#
    )
    .into()
}

/// A process under load, and the calls that it gets.
struct Side<'a> {
    process: &'a Process,
    target: Target,
}

impl<'a> Side<'a> {
    fn floor(process: &'a Process, subject: &str, method: &str, form: ReplyForm) -> Self {
        Self { process, target: Target::new(&[subject.to_owned()], a2a_request(method), form) }
    }

    fn bridge(bridge: &'a Bridge, form: ReplyForm) -> Self {
        Self { process: &bridge.process, target: Target::new(&bridge.subjects, PROMPT.into(), form) }
    }
}

/// The figures of one side in one round.
struct Round {
    p50: f64,
    p99: f64,
    per_second: f64,
    cpu_per_call: f64,
    messages_per_call: f64,
    chunks_per_call: f64,
}

impl Round {
    fn new(mut outcome: load::Outcome, cpu: Duration) -> Self {
        outcome.latencies.sort_unstable();
        let calls = outcome.latencies.len() as f64;
        let quantile = |q: f64| micros(outcome.latencies[((calls - 1.0) * q) as usize]);
        Self {
            p50: quantile(0.5),
            p99: quantile(0.99),
            per_second: calls / outcome.elapsed.as_secs_f64(),
            cpu_per_call: micros(cpu) / calls,
            messages_per_call: outcome.messages as f64 / calls,
            chunks_per_call: outcome.chunks as f64 / calls,
        }
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Measures the sides in turns; returns the rounds of each side.
async fn compare(
    testbed: &Testbed,
    plan: &Plan,
    in_flight: usize,
    sides: &[Side<'_>],
) -> anyhow::Result<Vec<Vec<Round>>> {
    let mut rounds: Vec<Vec<Round>> = sides.iter().map(|_| Vec::new()).collect();
    // Opens connections and warms caches before anything counts.
    for side in sides {
        load::call(&testbed.client, &side.target, in_flight, StopAfter::Elapsed(plan.turn / 2)).await?;
    }
    for round in 0..plan.rounds {
        let mut totals: Vec<(load::Outcome, Duration)> = sides.iter().map(|_| Default::default()).collect();
        for turn in 0..plan.turns {
            for index in order(round * plan.turns + turn, sides.len()) {
                let (side, (outcome, cpu)) = (&sides[index], &mut totals[index]);
                let stop = StopAfter::Elapsed(plan.turn);
                let before = side.process.cpu()?;
                let turn = load::call(&testbed.client, &side.target, in_flight, stop).await?;
                *cpu += side.process.cpu()?.saturating_sub(before);
                outcome.add(turn);
            }
        }
        for (rounds, (outcome, cpu)) in rounds.iter_mut().zip(totals) {
            rounds.push(Round::new(outcome, cpu));
        }
    }
    Ok(rounds)
}

/// The order of the sides in a turn: a different side begins each time, and after each full rotation the
/// direction changes, so that no side always comes first or always follows the same other side.
fn order(turn: usize, sides: usize) -> impl Iterator<Item = usize> {
    let is_reversed = (turn / sides) % 2 == 1;
    (0..sides).map(move |position| {
        let position = if is_reversed { sides - position } else { position };
        (turn + position) % sides
    })
}

/// Rounds of sides that took turns.
#[derive(Clone, Copy)]
struct Comparison<'a> {
    floor: Option<&'a [Round]>,
    bridge: &'a [Round],
    baseline: Option<&'a [Round]>,
}

impl Comparison<'_> {
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
            figure,
            unit,
            floor: self.floor.map(median),
            bridge: median(self.bridge),
            baseline: self.baseline.map(median),
            to_floor: self.floor.map(ratio),
            to_baseline: self.baseline.map(ratio),
            goal,
            ..Row::default()
        }
    }
}

/// Runs the measurements of the plan, in the order of the table.
pub async fn all(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    if plan.includes("calls") {
        calls(testbed, plan, report).await?;
    }
    if plan.includes("streams") {
        streams(testbed, plan, report).await?;
        supervisor(testbed, plan, report).await?;
    }
    if plan.includes("start") {
        start(testbed, plan, report).await?;
    }
    if plan.includes("memory") {
        memory(testbed, plan, report).await?;
    }
    if plan.includes("crowd") {
        burst(testbed, plan, report).await?;
    }
    if plan.includes("flat") && !plan.is_short {
        many_agents(testbed, plan, report).await?;
        many_follow_ups(testbed, plan, report).await?;
    }
    Ok(())
}

async fn calls(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let floor = testbed.floor(plan.events)?;
    let bridges = testbed.bridges(&["/echo/0".to_owned()]).await?;
    let mut sides = vec![Side::floor(&floor, "floor.call", "SendMessage", ReplyForm::Single)];
    sides.extend(bridges.iter().map(|bridge| Side::bridge(bridge, ReplyForm::Single)));
    let loads: &[usize] = if plan.is_short { &[1, 64] } else { &[1, 64, 512] };
    for &in_flight in loads {
        let rounds = compare(testbed, plan, in_flight, &sides).await?;
        let baseline = rounds.get(2).map(Vec::as_slice);
        let comparison = Comparison { floor: Some(&rounds[0]), bridge: &rounds[1], baseline };
        let named = |figure: &str| format!("{figure}, {in_flight} in flight");
        let is_64 = in_flight == 64;
        if in_flight == 1 {
            let row = comparison.row(named("p50"), "µs", |r| r.p50, Some(AtMost(1.10)));
            report.add(Row { limit: Some(AtMost(2.2)), ..row });
        }
        report.add(comparison.row(named("p99"), "µs", |r| r.p99, None));
        let goal = is_64.then_some(AtLeast(0.90));
        let row = comparison.row(named("calls"), "1/s", |r| r.per_second, goal);
        report.add(Row { limit: is_64.then_some(AtLeast(0.3)), ..row });
        let goal = is_64.then_some(AtMost(1.15));
        let row = comparison.row(named("CPU per call"), "µs", |r| r.cpu_per_call, goal);
        let limit = is_64.then_some(AtMost(3.0));
        report.add(Row { limit, baseline_goal: Some(NO_WORSE), ..row });
    }
    Ok(())
}

async fn streams(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let floor = testbed.floor(plan.events)?;
    let bridges = testbed.bridges(&[format!("/stream/{}", plan.events)]).await?;
    let mut sides = vec![
        Side::floor(&floor, "floor.stream", "SendStreamingMessage", ReplyForm::Stream),
        Side::bridge(&bridges[0], ReplyForm::TextStream),
    ];
    sides.extend(bridges.iter().map(|bridge| Side::bridge(bridge, ReplyForm::Stream)));
    for in_flight in [1, 64] {
        let rounds = compare(testbed, plan, in_flight, &sides).await?;
        for round in rounds.iter().flatten() {
            ensure!(round.chunks_per_call == f64::from(plan.events), "a stream lost chunks of text");
        }
        let [floor, text, default] = [0, 1, 2].map(|side| rounds[side].as_slice());
        let baseline = rounds.get(3).map(Vec::as_slice);
        let default = Comparison { floor: Some(floor), bridge: default, baseline };
        // Older programs ignore the header that selects this form.
        let text = Comparison { floor: Some(floor), bridge: text, baseline: None };
        let goal = |goal: f64, limit: f64| Some((AtLeast(goal), AtLeast(limit)));
        if in_flight == 1 {
            stream_rows(default, "1 stream", plan, None, report);
            stream_rows(text, "1 text-only stream", plan, goal(0.70, 0.15), report);
        } else {
            stream_rows(default, &format!("{in_flight} streams"), plan, goal(0.85, 0.12), report);
            stream_rows(text, &format!("{in_flight} text-only streams"), plan, None, report);
        }
    }
    Ok(())
}

fn stream_rows(
    comparison: Comparison<'_>,
    streams: &str,
    plan: &Plan,
    goal_and_limit: Option<(Goal, Goal)>,
    report: &mut Report,
) {
    // The task before the chunks and the state after them are events too.
    let events = f64::from(plan.events + 2);
    let named = |figure: &str| format!("{figure}, {streams}");
    let (goal, limit) = goal_and_limit.unzip();
    let row = comparison.row(named("stream events"), "1/s", |r| r.per_second * events, goal);
    report.add(Row { limit, ..row });
    report.add(comparison.row(named("CPU per event"), "µs", |r| r.cpu_per_call / events, None));
    report.add(comparison.row(named("messages per event"), "", |r| r.messages_per_call / events, None));
}

/// The demo agent's supervisor skill: 600 events, most of them tokens.
async fn supervisor(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    const EVENTS: f64 = 600.0;
    let mut bridges = Vec::new();
    for &program in testbed.programs() {
        bridges.push(testbed.supervisor(program).await?);
    }
    let sides: Vec<Side<'_>> = bridges.iter().map(|bridge| Side::bridge(bridge, ReplyForm::Stream)).collect();
    let mut chunks = None;
    for in_flight in [1, 16] {
        let rounds = compare(testbed, plan, in_flight, &sides).await?;
        for round in rounds.iter().flatten() {
            let expected = *chunks.get_or_insert(round.chunks_per_call);
            ensure!(round.chunks_per_call == expected, "a stream of the supervisor lost events");
        }
        let figure = format!("CPU per event, {in_flight} of the demo agent's supervisor");
        let baseline = rounds.get(1).map(Vec::as_slice);
        let comparison = Comparison { floor: None, bridge: &rounds[0], baseline };
        report.add(comparison.row(figure, "µs", |r| r.cpu_per_call / EVENTS, Some(AtMost(10.0))));
    }
    Ok(())
}

async fn start(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let programs = testbed.programs();
    let mut times = vec![Vec::new(); programs.len()];
    for turn in 0..plan.rounds.max(3) {
        for index in order(turn, programs.len()) {
            let bridge = testbed.bridge(programs[index], &["/echo/0".to_owned()]).await?;
            times[index].push(bridge.first_action.as_secs_f64() * 1e3);
        }
    }
    let mut medians = times.into_iter().map(|times| times.into_iter().collect::<Sample>().median());
    report.add(Row {
        figure: "start to first action".to_owned(),
        unit: "ms",
        bridge: medians.next().unwrap_or(f64::NAN),
        baseline: medians.next(),
        goal: Some(AtMost(100.0)),
        ..Row::default()
    });
    Ok(())
}

fn paths(kind: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("/{kind}/{number}")).collect()
}

/// Waits until memory that was needed only briefly is released.
async fn settle() {
    tokio::time::sleep(Duration::from_secs(1)).await;
}

async fn memory(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    for (agents, figure, goal, limit) in
        [(1, "RSS idle, 1 agent", 20.0, 30.0), (50, "RSS idle, 50 agents", 40.0, 60.0)]
    {
        let bridges = testbed.bridges(&paths("echo", agents)).await?;
        settle().await;
        let row = memory_row(figure.to_owned(), &bridges, AtMost(goal))?;
        report.add(Row { limit: Some(AtMost(limit)), ..row });
    }
    let count = if plan.is_short { 1_000 } else { 10_000 };
    let bridges = testbed.bridges(&["/echo/0".to_owned(), "/ask/0".to_owned()]).await?;
    let in_session = |number| format!(r#"{{"prompt":"Go on","meta":{{"session_id":"session-{number}"}}}}"#);
    for subject in bridges.iter().flat_map(|bridge| &bridge.subjects) {
        let subjects = [subject.clone()].into();
        let target = Target { subjects, body: Body::Numbered(in_session), form: ReplyForm::Single };
        load::call(&testbed.client, &target, 64, StopAfter::Calls(count)).await?;
    }
    settle().await;
    let figure = format!("RSS after {count} sessions and {count} follow-ups");
    report.add(memory_row(figure, &bridges, AtMost(60.0))?);
    Ok(())
}

fn memory_row(figure: String, bridges: &[Bridge], goal: Goal) -> anyhow::Result<Row> {
    Ok(Row {
        figure,
        unit: MIB,
        bridge: bridges[0].process.rss()?,
        baseline: bridges.get(1).map(|baseline| baseline.process.rss()).transpose()?,
        goal: Some(goal),
        ..Row::default()
    })
}

/// Memory with many calls in flight.
async fn burst(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let count = if plan.is_short { 1_000 } else { 10_000 };
    let floor = testbed.slow_floor()?;
    let request = a2a_request("SendMessage");
    let (floor_rss, _) = send_burst(testbed, &floor, "floor.call", &request, count).await?;
    drop(floor);
    let mut programs = Vec::new();
    for &program in testbed.programs() {
        let bridge = testbed.bridge(program, &["/slow/0".to_owned()]).await?;
        let subject = &bridge.subjects[0];
        let (rss, answered) = send_burst(testbed, &bridge.process, subject, &PROMPT.into(), count).await?;
        programs.push((rss, (count - answered) as f64));
    }
    let ((rss, lost), baseline) = (programs[0], programs.get(1));
    report.add(Row {
        figure: format!("RSS with {count} calls in flight"),
        unit: MIB,
        floor: Some(floor_rss),
        bridge: rss,
        baseline: baseline.map(|(rss, _)| *rss),
        goal: Some(AtMost(200.0)),
        ..Row::default()
    });
    report.add(Row {
        figure: format!("lost of {count} calls"),
        bridge: lost,
        baseline: baseline.map(|(_, lost)| *lost),
        goal: Some(AtMost(0.0)),
        ..Row::default()
    });
    ensure!(lost == 0.0, "{lost} of {count} calls were lost");
    Ok(())
}

/// Returns the memory of a process while `count` calls wait at the slow agent, and how many calls succeed
/// after their release.
async fn send_burst(
    testbed: &Testbed,
    process: &Process,
    subject: &str,
    body: &Bytes,
    count: usize,
) -> anyhow::Result<(f64, usize)> {
    testbed.hold().await?;
    let burst = Burst::send(&testbed.client, subject, body, count).await?;
    let mut polls_left = 600;
    while testbed.waiting().await? < count {
        polls_left -= 1;
        if polls_left == 0 {
            bail!("only {} of {count} calls reached the agent", testbed.waiting().await?);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let rss = process.rss()?;
    testbed.release().await?;
    Ok((rss, burst.count_successes().await))
}

/// Compares a bridge with many agents with one that has a single agent.
async fn many_agents(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let bridges = [
        testbed.bridge(Program::Bridge, &paths("echo", 1)).await?,
        testbed.bridge(Program::Bridge, &paths("echo", 50)).await?,
        testbed.bridge(Program::Bridge, &paths("echo", 500)).await?,
    ];
    let sides = bridges.each_ref().map(|bridge| Side::bridge(bridge, ReplyForm::Single));
    let rounds = compare(testbed, plan, 64, &sides).await?;
    for (index, agents) in [(1, 50), (2, 500)] {
        let comparison = Comparison { floor: Some(&rounds[0]), bridge: &rounds[index], baseline: None };
        let figure = format!("CPU per call, {agents} agents against 1");
        report.add(comparison.row(figure, "µs", |r| r.cpu_per_call, Some(AtMost(1.10))));
    }
    Ok(())
}

/// Compares a bridge with many follow-ups with one that has none.
async fn many_follow_ups(testbed: &Testbed, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let agents = ["/echo/0".to_owned(), "/ask/0".to_owned()];
    let none = testbed.bridge(Program::Bridge, &agents).await?;
    let many = testbed.bridge(Program::Bridge, &agents).await?;
    // Both remember the same number of tasks, so that only the follow-ups differ.
    for (bridge, agent) in [(&none, 0), (&many, 1)] {
        let target = Target::new(&bridge.subjects[agent..=agent], PROMPT.into(), ReplyForm::Single);
        load::call(&testbed.client, &target, 64, StopAfter::Calls(100_000)).await?;
    }
    let sides = [&none, &many].map(|bridge| Side {
        process: &bridge.process,
        target: Target::new(&bridge.subjects[..1], PROMPT.into(), ReplyForm::Single),
    });
    let rounds = compare(testbed, plan, 64, &sides).await?;
    let comparison = Comparison { floor: Some(&rounds[0]), bridge: &rounds[1], baseline: None };
    let figure = "CPU per call, 100000 follow-ups against 0".to_owned();
    report.add(comparison.row(figure, "µs", |r| r.cpu_per_call, Some(AtMost(1.10))));
    Ok(())
}
