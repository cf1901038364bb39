//! Whether a hostile agent or caller harms another agent: `scripts/stress isolate`.
//!
//! One bridge serves two victims and hostile agents. One victim is called 20 times a second; the other, whose answers
//! are large, 5 times a second. A control, which is a plain responder on the same server, is called as well: it shows how
//! much of a delay is not the bridge's. The [attacks](attacks) run one after the other. For each, the table shows what
//! the victims' callers noticed, and the memory of the bridge.
//!
//! `STRESS=full` attacks with answers of 15 MB, for seconds each; anything else is a short form. Both need an optimised
//! program, because the limits are on latency. `ISOLATE` selects the attacks whose names contain one of
//! its parts, separated by `|`. `A2A_BRIDGE_BIN` selects another program.

mod arena;
mod attacks;
mod floods;
mod hostile;
mod raw_agents;
mod raw_nats;
mod shapes;
mod table;
mod victim;

use std::sync::Arc;
use std::time::Duration;

use arena::{ATTACKERS, Arena, MEMORY, Sampler, Usage};
use attacks::Attack;
use table::{Measured, Row, mib, table};
use victim::{CONTROL, Calls, LARGE, Promises, SMALL, Victim, respond};

/// An attack that takes longer is abandoned.
const ATTACK_LIMIT: Duration = Duration::from_secs(180);
/// Idle threads of the bridge for synchronous work end within this time.
const IDLE: Duration = Duration::from_secs(15);

fn is_full() -> bool {
    std::env::var("STRESS").is_ok_and(|form| form == "full")
}

/// Both victims and the control, with callers on runtimes and connections of their own.
struct Victims([Victim; 3]);

/// The lowest 99th percentile of each victim without an attack. A single phase does not suffice: work that an earlier
/// attack has left behind would raise the limit of the next one.
struct Quiet([Duration; 2]);

impl Quiet {
    fn lower(&mut self, calls: &[Calls; 3]) {
        for (quiet, calls) in self.0.iter_mut().zip(calls) {
            *quiet = (*quiet).min(calls.quantile(0.99));
        }
    }
}

impl Victims {
    async fn start(arena: &Arena) -> Self {
        respond(arena.site.server.url()).await;
        let start = |target| Victim::start(arena.site.server.url(), target);
        let victims = Self([SMALL, LARGE, CONTROL].map(start));
        victims.measure(Duration::from_secs(1)).await;
        victims
    }

    fn begin(&self) {
        self.0.iter().for_each(Victim::begin);
    }

    async fn end(&self) -> [Calls; 3] {
        let [small, large, control] = &self.0;
        tokio::join!(small.end(), large.end(), control.end()).into()
    }

    /// A phase of this length.
    async fn measure(&self, length: Duration) -> [Calls; 3] {
        self.begin();
        tokio::time::sleep(length).await;
        self.end().await
    }
}

async fn start() -> (Arc<Arena>, Victims) {
    let arena = Arena::start().await;
    let victims = Victims::start(&arena).await;
    (arena, victims)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes long; scripts/stress isolate runs it"]
async fn isolate() {
    let wanted = std::env::var("ISOLATE").unwrap_or_default();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    println!("load average before: {}, {processors} processors", load.trim());
    let (mut rows, mut quiet) = (Vec::<Row>::new(), Quiet([Duration::MAX; 2]));
    let (mut arena, mut victims) = start().await;
    let (first, mut most) = (Usage::of(arena.pid), Usage::default());
    let is_wanted = |attack: &&Attack| wanted.split('|').any(|part| attack.name.contains(part));
    for attack in attacks::all().iter().filter(is_wanted) {
        let mut row = run(attack, &arena, &victims, &mut quiet).await;
        if row.is_only_slow() {
            // Another process on the machine can cause it, too.
            let problems = row.problems.join("; ");
            if attack.fills_quota {
                drop((victims, arena));
                (arena, victims) = start().await;
            }
            row = run(attack, &arena, &victims, &mut quiet).await;
            row.replies.push_str(&format!("; second run, the first one: {problems}"));
        }
        println!("{}", table(std::slice::from_ref(&row)).lines().last().unwrap_or_default());
        most.raise(row.peak);
        if attack.fills_quota || !row.problems.is_empty() {
            // Each attack is judged by itself.
            drop((victims, arena));
            (arena, victims) = start().await;
        }
        rows.push(row);
    }
    let last = Usage::of(arena.pid);
    let table = table(&rows);
    println!("{table}");
    for (when, usage) in [("before", first), ("peak", most), ("after", last)] {
        println!("bridge {when}: {usage}");
    }
    if is_full() {
        tokio::time::sleep(IDLE).await;
        println!("bridge {} s later: {}", IDLE.as_secs(), Usage::of(arena.pid));
    }
    let again = rows.iter().filter(|row| row.replies.contains("; second run")).count();
    let held = rows.iter().filter(|row| row.problems.is_empty()).count();
    println!(
        "{held} of {} attacks held, {again} needed a second run; limits.memory is {} MiB",
        rows.len(),
        mib(MEMORY)
    );
    assert!(held == rows.len(), "{table}");
}

async fn run(attack: &Attack, arena: &Arc<Arena>, victims: &Victims, quiet: &mut Quiet) -> Row {
    let (before, settle) = if is_full() { (3_000, 1_000) } else { (500, 50) };
    quiet.lower(&victims.measure(Duration::from_millis(before)).await);
    let promises = Promises::make(&arena.caller).await;
    let (sampler, disconnects) = (Sampler::start(arena.pid), arena.disconnects());
    victims.begin();
    let attacked = ATTACKERS.spawn(tokio::time::timeout(ATTACK_LIMIT, (attack.run)(Arc::clone(arena))));
    // Long enough for some calls of the victims, however short the attack is.
    let (tally, ()) =
        tokio::join!(async { attacked.await.unwrap() }, tokio::time::sleep(Duration::from_secs(1)));
    arena.hostile.end_attack();
    let attacked = victims.end().await;
    let peak = sampler.peak();
    let mut problems = match promises {
        Ok(promises) => promises.broken(&arena.caller).await,
        Err(error) => vec![format!("before the attack: {error}")],
    };
    tokio::time::sleep(Duration::from_millis(settle)).await;

    let (Quiet([quiet, quiet_large]), [calls, calls_large, control]) = (quiet, attacked);
    let measured = [Measured::new(SMALL, *quiet, calls), Measured::new(LARGE, *quiet_large, calls_large)];
    let control = control.quantile(0.99);
    problems.extend(measured.iter().flat_map(|measured| measured.problems(control)));
    if peak.memory > MEMORY {
        problems.push("memory".into());
    }
    let disconnects = arena.disconnects() - disconnects;
    if disconnects > 0 {
        problems.push(format!("the bridge was disconnected {disconnects} times"));
    }
    if !arena.is_running() {
        problems.push("the bridge has exited".into());
    }
    for victim in [SMALL.agent, LARGE.agent] {
        if arena.site.show(victim).await.is_none_or(|report| report.restarts > 0) {
            problems.push(format!("{victim} was restarted"));
        }
    }
    let replies = match tally {
        Ok(tally) => {
            problems.extend(tally.wrong.clone());
            tally.summary()
        }
        Err(_) => "the attack did not end".into(),
    };
    let after = Usage::of(arena.pid);
    Row { attack: attack.name.clone(), replies, measured, control, peak, after, problems }
}
