//! Whether a hostile agent or caller harms another agent: `scripts/stress isolate`.
//!
//! One bridge serves a victim, which is called 20 times a second, and hostile agents. The [attacks](attacks) run one
//! after the other. For each, the table shows what the victim's callers noticed, and the memory of the bridge.
//!
//! `STRESS=full` attacks with answers of 15 MB, for seconds each; anything else is a short form. Both need an optimised
//! program, because the limits are on latency. `ISOLATE` selects the attacks whose names contain it. `A2A_BRIDGE_BIN` selects another program.

mod arena;
mod attacks;
mod hostile;
mod raw_nats;
mod shapes;
mod victim;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use arena::{Arena, MEMORY, Sampler, Usage};
use attacks::Attack;
use victim::{Calls, Promises, Victim};

/// An attack that takes longer is abandoned.
const ATTACK_LIMIT: Duration = Duration::from_secs(180);
/// The victim's 99th percentile may be this many times the quiet one, …
const MAX_RATIO: f64 = 5.0;
/// … but never more than this.
const MAX_P99: Duration = Duration::from_millis(250);

fn is_full() -> bool {
    std::env::var("STRESS").is_ok_and(|form| form == "full")
}

/// A quiet call takes about a millisecond, which any other process on a machine with few processors multiplies. So
/// the ratio counts only above this time. The short form has few calls, so that its 99th percentile is the slowest one.
fn floor() -> Duration {
    Duration::from_millis(if is_full() { 50 } else { 150 })
}

struct Row {
    attack: String,
    replies: String,
    quiet: Duration,
    calls: Calls,
    peak: Usage,
    after: Usage,
    /// Why the attack did not hold.
    problems: Vec<String>,
}

impl Row {
    fn p99(&self) -> Duration {
        self.calls.quantile(0.99)
    }

    /// Whether only the latency was too high, which another process on the machine can cause too.
    fn is_only_slow(&self) -> bool {
        self.problems.len() == 1 && self.problems[0].starts_with("p99")
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

const HEAD: [&str; 11] =
    ["attack", "calls", "lost", "quiet p99", "p50", "p99", "max", "ratio", "peak MiB", "after", "held"];

fn cells(row: &Row) -> [String; 11] {
    let ratio = row.p99().as_secs_f64() / row.quiet.as_secs_f64().max(1e-6);
    [
        row.attack.clone(),
        row.calls.count().to_string(),
        row.calls.lost.len().to_string(),
        milliseconds(row.quiet),
        milliseconds(row.calls.quantile(0.5)),
        milliseconds(row.p99()),
        milliseconds(row.calls.quantile(1.0)),
        format!("{ratio:.1}"),
        mib(row.peak.memory).to_string(),
        mib(row.after.memory).to_string(),
        if row.problems.is_empty() { "yes".into() } else { "NO".into() },
    ]
}

/// One row for each attack, with the times of the victim's calls in milliseconds.
fn table(rows: &[Row]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(rows.iter().map(cells));
    let widths: [usize; 11] =
        std::array::from_fn(|column| lines.iter().map(|cells| cells[column].len()).max().unwrap_or(0));
    let mut text = String::from("\n");
    let notes = rows.iter().map(|row| {
        let problems = row.problems.join("; ");
        if problems.is_empty() { row.replies.clone() } else { format!("{} | {problems}", row.replies) }
    });
    for (cells, note) in
        lines.iter().zip(std::iter::once("replies to the attack | problems".into()).chain(notes))
    {
        let _ = write!(text, "{:<1$}", cells[0], widths[0]);
        for (cell, width) in cells.iter().zip(widths).skip(1) {
            let _ = write!(text, "  {cell:>width$}");
        }
        let _ = writeln!(text, "  {note}");
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes long; scripts/stress isolate runs it"]
async fn isolate() {
    let wanted = std::env::var("ISOLATE").unwrap_or_default();
    let mut rows: Vec<Row> = Vec::new();
    let mut arena = Arena::start().await;
    let mut victim = Victim::start(arena.site.server.url());
    let (first, mut most) = (warm(&victim, &arena).await, Usage::default());
    for attack in attacks::all().iter().filter(|attack| attack.name.contains(&wanted)) {
        let mut row = run(attack, &arena, &victim).await;
        if row.is_only_slow() {
            row = run(attack, &arena, &victim).await;
        }
        println!("{}", table(std::slice::from_ref(&row)).lines().last().unwrap_or_default());
        most = Usage { memory: most.memory.max(row.peak.memory), files: most.files.max(row.peak.files) };
        let failed = !row.problems.is_empty();
        rows.push(row);
        if failed {
            // The next attack is judged by itself.
            drop(victim);
            drop(arena);
            arena = Arena::start().await;
            victim = Victim::start(arena.site.server.url());
            warm(&victim, &arena).await;
        }
    }
    let last = Usage::of(arena.pid);
    let table = table(&rows);
    println!("{table}");
    for (when, usage) in [("before", first), ("peak", most), ("after", last)] {
        println!("bridge {when}: {} MiB, {} descriptors", mib(usage.memory), usage.files);
    }
    let held = rows.iter().filter(|row| row.problems.is_empty()).count();
    println!("{held} of {} attacks held; limits.memory is {} MiB", rows.len(), mib(MEMORY));
    assert!(held == rows.len(), "{table}");
}

/// The usage of the bridge after the first calls.
async fn warm(victim: &Victim, arena: &Arena) -> Usage {
    victim.measure(Duration::from_secs(1)).await;
    Usage::of(arena.pid)
}

async fn run(attack: &Attack, arena: &Arc<Arena>, victim: &Victim) -> Row {
    let (quiet, settle) = if is_full() { (3_000, 1_000) } else { (500, 50) };
    let quiet = victim.measure(Duration::from_millis(quiet)).await.quantile(0.99);
    let promises = Promises::make(&arena.client).await;
    let sampler = Sampler::start(arena.pid);
    victim.begin();
    let attacked = tokio::time::timeout(ATTACK_LIMIT, (attack.run)(Arc::clone(arena)));
    // Long enough for some calls of the victim, however short the attack is.
    let (tally, ()) = tokio::join!(attacked, tokio::time::sleep(Duration::from_secs(1)));
    arena.hostile.end_attack();
    let calls = victim.end().await;
    let peak = sampler.peak();
    let mut problems = match promises {
        Ok(promises) => promises.broken(&arena.client).await,
        Err(error) => vec![format!("before the attack: {error}")],
    };
    tokio::time::sleep(Duration::from_millis(settle)).await;

    let p99 = calls.quantile(0.99);
    let limit = quiet.mul_f64(MAX_RATIO).max(floor()).min(MAX_P99);
    if p99 > limit {
        problems.push(format!("p99 over {limit:.0?}"));
    }
    if let Some(lost) = calls.lost.first() {
        problems.push(format!("{} lost: {lost}", calls.lost.len()));
    }
    if peak.memory > MEMORY {
        problems.push("memory".into());
    }
    if !arena.is_running() {
        problems.push("the bridge has exited".into());
    } else if arena.site.show("victim").await.is_none_or(|report| report.restarts > 0) {
        problems.push("the victim was restarted".into());
    }
    let replies = match tally {
        Ok(tally) => {
            problems.extend(tally.wrong.clone());
            tally.summary()
        }
        Err(_) => "the attack did not end".into(),
    };
    let after = Usage::of(arena.pid);
    Row { attack: attack.name.clone(), replies, quiet, calls, peak, after, problems }
}
