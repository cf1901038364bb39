//! The measurements. What is compared runs in turns within one run, because machines are never
//! equally busy twice.

use std::time::Duration;

use anyhow::{bail, ensure};
use bytes::Bytes;

use crate::load::{self, Body, Crowd, Target, Until};
use crate::report::Goal::{AtLeast, AtMost};
use crate::report::{Goal, Report, Row};
use crate::stage::{Process, Stage};

/// How much to measure.
#[derive(Clone)]
pub struct Extent {
    /// Medians are taken of so many rounds.
    pub rounds: usize,
    /// Turns of each side within a round.
    pub turns: usize,
    /// How long a turn takes.
    pub turn: Duration,
    /// Events of a stream.
    pub events: u32,
    /// The part that needs no patience.
    pub is_short: bool,
    /// Only measurements with this in their name.
    pub only: Option<String>,
}

impl Extent {
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }
}

const MIB: &str = "MiB";
/// What a caller sends to the bridge.
const PROMPT: &str = r#"{"prompt":"What is the weather in Paris tomorrow?"}"#;

/// What the bridge makes of [`PROMPT`]; the floor is given it ready-made.
fn a2a(method: &str) -> Bytes {
    format!(
        r#"{{"jsonrpc":"2.0","id":"0b4cd9a5-3d9e-4b39-8b07-5d4d3b0a6b55","method":"{method}","params":{{"message":{{"messageId":"8f3b5f0e-53a4-44b7-a6f6-ec4a1e5ba1c2","role":"ROLE_USER","parts":[{{"text":"What is the weather in Paris tomorrow?"}}],"metadata":{{"skill_id":"go"}}}},"configuration":{{"acceptedOutputModes":["text/plain"]}}}}}}"#
    )
    .into()
}

fn target(subjects: &[String], body: Bytes, streamed: bool) -> Target {
    Target { subjects: subjects.into(), body: Body::Same(body), streamed }
}

/// Somebody who answers.
struct Side<'a> {
    process: &'a Process,
    target: Target,
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

/// Has the sides work in turns; the rounds of each.
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
    for _ in 0..extent.rounds {
        let mut all: Vec<(load::Done, Duration)> = sides.iter().map(|_| Default::default()).collect();
        for turn in 0..extent.turns {
            for position in 0..sides.len() {
                // Nobody is always the first.
                let index = (position + turn) % sides.len();
                let (side, (done, cpu)) = (&sides[index], &mut all[index]);
                let before = side.process.cpu()?;
                let more =
                    load::call(&stage.client, &side.target, in_flight, Until::Elapsed(extent.turn)).await?;
                *cpu += side.process.cpu()? - before;
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

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A line for the second side against the first.
fn versus(
    figure: String,
    unit: &'static str,
    (one, other): (&[Round], &[Round]),
    value: impl Fn(&Round) -> f64,
    goal: Option<Goal>,
) -> Row {
    Row {
        figure,
        unit,
        floor: Some(median(one.iter().map(&value))),
        bridge: median(other.iter().map(&value)),
        ratio: Some(median(one.iter().zip(other).map(|(one, other)| value(other) / value(one)))),
        goal,
        limit: None,
    }
}

fn alone(figure: &str, unit: &'static str, bridge: f64, goal: Option<Goal>) -> Row {
    Row { figure: figure.to_owned(), unit, floor: None, bridge, ratio: None, goal, limit: None }
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
    let bridge = stage.bridge(&["/echo/0".to_owned()]).await?;
    let sides = [
        Side { process: &floor, target: target(&["floor.call".to_owned()], a2a("SendMessage"), false) },
        Side { process: &bridge.process, target: target(&bridge.subjects, PROMPT.into(), false) },
    ];
    let crowds: &[usize] = if extent.is_short { &[1, 64] } else { &[1, 64, 512] };
    for &in_flight in crowds {
        let rounds = compare(stage, extent, in_flight, &sides).await?;
        let both = (rounds[0].as_slice(), rounds[1].as_slice());
        let named = |figure: &str| format!("{figure}, {in_flight} in flight");
        let is_64 = in_flight == 64;
        if in_flight == 1 {
            let row = versus(named("p50"), "µs", both, |r| r.p50, Some(AtMost(1.10)));
            report.add(Row { limit: Some(AtMost(2.2)), ..row });
        }
        report.add(versus(named("p99"), "µs", both, |r| r.p99, None));
        let row = versus(named("calls"), "1/s", both, |r| r.per_second, is_64.then_some(AtLeast(0.90)));
        report.add(Row { limit: is_64.then_some(AtLeast(0.3)), ..row });
        let row =
            versus(named("CPU per call"), "µs", both, |r| r.cpu_per_call, is_64.then_some(AtMost(1.25)));
        report.add(Row { limit: is_64.then_some(AtMost(3.0)), ..row });
    }
    Ok(())
}

async fn streams(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let floor = stage.floor(extent.events)?;
    let bridge = stage.bridge(&[format!("/stream/{}", extent.events)]).await?;
    let sides = [
        Side {
            process: &floor,
            target: target(&["floor.stream".to_owned()], a2a("SendStreamingMessage"), true),
        },
        Side { process: &bridge.process, target: target(&bridge.subjects, PROMPT.into(), true) },
    ];
    // The task before and the state after the pieces are events too.
    let events = f64::from(extent.events + 2);
    for in_flight in [1, 64] {
        let rounds = compare(stage, extent, in_flight, &sides).await?;
        let both = (rounds[0].as_slice(), rounds[1].as_slice());
        for round in rounds.iter().flatten() {
            ensure!(round.pieces_per_call == f64::from(extent.events), "pieces of a stream are lost");
        }
        let s = if in_flight == 1 { "" } else { "s" };
        let named = |figure: &str| format!("{figure}, {in_flight} stream{s}");
        let is_64 = in_flight == 64;
        let goal = is_64.then_some(AtLeast(0.85));
        let row = versus(named("stream events"), "1/s", both, |r| r.per_second * events, goal);
        report.add(Row { limit: is_64.then_some(AtLeast(0.12)), ..row });
        report.add(versus(named("CPU per event"), "µs", both, |r| r.cpu_per_call / events, None));
        report.add(versus(named("messages per event"), "", both, |r| r.messages_per_call / events, None));
    }
    drop(sides);
    supervisor(stage, extent, report).await
}

/// The demo agent's supervisor: 600 events, most of them tokens.
async fn supervisor(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    const EVENTS: f64 = 600.0;
    let bridge = stage.supervisor().await?;
    let sides = [Side { process: &bridge.process, target: target(&bridge.subjects, PROMPT.into(), true) }];
    let mut pieces = None;
    for in_flight in [1, 16] {
        let rounds = compare(stage, extent, in_flight, &sides).await?;
        for round in rounds.iter().flatten() {
            let expected = *pieces.get_or_insert(round.pieces_per_call);
            ensure!(round.pieces_per_call == expected, "events of the supervisor are lost");
        }
        let cpu = median(rounds[0].iter().map(|round| round.cpu_per_call / EVENTS));
        let figure = format!("CPU per event, {in_flight} of the demo agent's supervisor");
        report.add(alone(&figure, "µs", cpu, Some(AtMost(10.0))));
    }
    Ok(())
}

async fn start(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let mut times = Vec::new();
    for _ in 0..extent.rounds.max(3) {
        let bridge = stage.bridge(&["/echo/0".to_owned()]).await?;
        times.push(bridge.first_action.as_secs_f64() * 1e3);
    }
    let took = median(times.into_iter());
    report.add(alone("start to first action", "ms", took, Some(AtMost(100.0))));
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
    let bridge = stage.bridge(&paths("echo", 1)).await?;
    settle().await;
    let row = alone("RSS idle, 1 agent", MIB, bridge.process.rss()?, Some(AtMost(20.0)));
    report.add(Row { limit: Some(AtMost(30.0)), ..row });
    let bridge = stage.bridge(&paths("echo", 50)).await?;
    settle().await;
    let row = alone("RSS idle, 50 agents", MIB, bridge.process.rss()?, Some(AtMost(40.0)));
    report.add(Row { limit: Some(AtMost(60.0)), ..row });
    let count = if extent.is_short { 1_000 } else { 10_000 };
    let bridge = stage.bridge(&["/echo/0".to_owned(), "/ask/0".to_owned()]).await?;
    let numbered = |index: usize, body| Target {
        subjects: bridge.subjects[index..=index].into(),
        body: Body::Numbered(body),
        streamed: false,
    };
    let in_session = |number| format!(r#"{{"prompt":"Go on","meta":{{"session_id":"session-{number}"}}}}"#);
    load::call(&stage.client, &numbered(0, in_session), 64, Until::Calls(count)).await?;
    load::call(&stage.client, &numbered(1, in_session), 64, Until::Calls(count)).await?;
    settle().await;
    let figure = format!("RSS after {count} sessions and {count} follow-ups");
    report.add(alone(&figure, MIB, bridge.process.rss()?, Some(AtMost(60.0))));
    Ok(())
}

async fn crowd(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let count = if extent.is_short { 1_000 } else { 10_000 };
    let floor = stage.slow_floor()?;
    let (floor_rss, _) = crowd_at(stage, &floor, "floor.call", &a2a("SendMessage"), count).await?;
    drop(floor);
    let bridge = stage.bridge(&["/slow/0".to_owned()]).await?;
    let (rss, answered) =
        crowd_at(stage, &bridge.process, &bridge.subjects[0], &PROMPT.into(), count).await?;
    let figure = format!("RSS with {count} calls in flight");
    let row = alone(&figure, MIB, rss, Some(AtMost(200.0)));
    report.add(Row { floor: Some(floor_rss), ..row });
    let lost = (count - answered) as f64;
    report.add(alone(&format!("lost of {count} calls"), "", lost, Some(AtMost(0.0))));
    ensure!(answered == count, "{lost} of {count} calls were lost");
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
        stage.bridge(&paths("echo", 1)).await?,
        stage.bridge(&paths("echo", 50)).await?,
        stage.bridge(&paths("echo", 500)).await?,
    ];
    let sides = bridges.each_ref().map(|bridge| Side {
        process: &bridge.process,
        target: target(&bridge.subjects, PROMPT.into(), false),
    });
    let rounds = compare(stage, extent, 64, &sides).await?;
    for (index, agents) in [(1, 50), (2, 500)] {
        let both = (rounds[0].as_slice(), rounds[index].as_slice());
        let figure = format!("CPU per call, {agents} agents against 1");
        report.add(versus(figure, "µs", both, |r| r.cpu_per_call, Some(AtMost(1.10))));
    }
    Ok(())
}

async fn flat_follow_ups(stage: &Stage, extent: &Extent, report: &mut Report) -> anyhow::Result<()> {
    let agents = ["/echo/0".to_owned(), "/ask/0".to_owned()];
    let (none, many) = (stage.bridge(&agents).await?, stage.bridge(&agents).await?);
    // The same number of tasks is remembered by both, so that only the follow-ups differ.
    for (bridge, agent) in [(&none, 0), (&many, 1)] {
        let calls = target(&bridge.subjects[agent..=agent], PROMPT.into(), false);
        load::call(&stage.client, &calls, 64, Until::Calls(100_000)).await?;
    }
    let sides = [&none, &many].map(|bridge| Side {
        process: &bridge.process,
        target: target(&bridge.subjects[..1], PROMPT.into(), false),
    });
    let rounds = compare(stage, extent, 64, &sides).await?;
    let both = (rounds[0].as_slice(), rounds[1].as_slice());
    let figure = "CPU per call, 100000 follow-ups against 0".to_owned();
    report.add(versus(figure, "µs", both, |r| r.cpu_per_call, Some(AtMost(1.10))));
    Ok(())
}
