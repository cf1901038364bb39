//! Faults that the supervisor must survive, with measurements: `scripts/stress supervise`.
//!
//! `STRESS=full` runs the full number of repetitions, anything else a short form.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use a2a_bridge::internal::Secrets;
use a2a_bridge::internal::child::{Child, ProcessHost, Spec};
use a2a_bridge::internal::output::Output;
use a2a_bridge::internal::procfs::{self, Stat};
use nix::sys::signal::Signal;
use secrecy::SecretString;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::support::eventually::eventually_within;
use crate::support::processes;
use crate::support::processes::{MARK, marked, memory, program};
use crate::support::site::{Site, back_off, demo, demo_at, shell};

const LONG: Duration = Duration::from_secs(60);
const TREE: &str = "sleep 1000 & setsid sleep 1000 & (setsid setsid sleep 1000 &) ; exec sleep 1000";

fn full() -> bool {
    std::env::var("STRESS").is_ok_and(|form| form == "full")
}

pub(crate) fn times(short: usize, long: usize) -> usize {
    if full() { long } else { short }
}

pub(crate) struct Row {
    fault: String,
    expected: String,
    measured: String,
    pub(crate) held: bool,
}

pub(crate) fn row(
    fault: impl Into<String>,
    expected: impl Into<String>,
    measured: impl Into<String>,
    held: bool,
) -> Row {
    Row { fault: fault.into(), expected: expected.into(), measured: measured.into(), held }
}

pub(crate) fn table(rows: &[Row]) -> String {
    let width = |cell: fn(&Row) -> &str| rows.iter().map(|row| cell(row).chars().count()).max().unwrap_or(0);
    let (fault, expected) = (width(|row| &row.fault), width(|row| &row.expected));
    let mut text = format!("\n{:<fault$}  {:<expected$}  held  measured\n", "fault", "expected");
    for row in rows {
        let held = if row.held { "yes" } else { "NO" };
        let _ =
            writeln!(text, "{:<fault$}  {:<expected$}  {held:<4}  {}", row.fault, row.expected, row.measured);
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "minutes long; scripts/stress supervise runs it"]
async fn supervise() {
    let mut rows = Vec::new();
    // The first one mostly waits, so the others run meanwhile.
    let first = exits_at_once();
    let others = async {
        let mut rows = vec![back_off_reset().await, foreign_process().await];
        rows.extend([process_trees().await, ignored_sigterm().await]);
        rows.extend(killed_bridge().await);
        rows.push(flood("").await);
        rows.push(flood("--flood-line 10000000").await);
        rows.extend([suspended().await, busy().await, many_starts().await]);
        rows
    };
    let (one, others) = tokio::join!(first, others);
    rows.push(one);
    rows.extend(others);
    let table = table(&rows);
    println!("{table}");
    assert!(rows.iter().all(|row| row.held), "{table}");
}

async fn exits_at_once() -> Row {
    let mut site = Site::new().await;
    let starts = site.folder().join("starts");
    site.settings(&[("a", &shell(&format!("echo x >> {}; exit 1", starts.display())))]);
    site.start();
    let (seconds, most) = if full() { (120, 8) } else { (10, 4) };
    let began = Instant::now();
    let mut published = false;
    while began.elapsed() < Duration::from_secs(seconds) {
        let info = site.client.request("$SRV.INFO.a", "".into()).await;
        let text = info.map(|reply| String::from_utf8_lossy(&reply.payload).into_owned()).unwrap_or_default();
        published |= text.contains("\"name\":\"prompt\"") || text.contains("\"name\":\"echo\"");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let count = std::fs::read_to_string(starts).unwrap_or_default().lines().count();
    let held = (1..=most).contains(&count) && !published;
    row(
        "1 agent exits at once",
        format!("at most {most} starts in {seconds} s, nothing published"),
        format!("{count} starts, {}", if published { "published" } else { "nothing published" }),
        held,
    )
}

async fn back_off_reset() -> Row {
    let site = Site::running(&[("a", &format!("{}\nstable_after: 300ms", demo("")))]).await;
    let mut pauses = Vec::new();
    for restarts in 0..times(3, 10) {
        let report = site
            .until_within(LONG, "a", |report| report.state == "ready" && report.restarts as usize == restarts)
            .await;
        let stable = report.since.0 + Duration::from_millis(300);
        eventually_within(LONG, || async { (SystemTime::now() > stable).then_some(()) }).await;
        processes::signal(report.pid.unwrap(), Signal::SIGKILL);
        let report = site.until_within(LONG, "a", |report| report.next_try.is_some()).await;
        pauses.push(back_off(&report).as_millis());
    }
    let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
    row(
        "2 crash after a stable time",
        "back-off reset to 0.8 to 1.2 s",
        format!("{} crashes, pauses {least} to {most} ms", pauses.len()),
        *least >= 790 && *most <= 1210,
    )
}

async fn foreign_process() -> Row {
    let (mut named, mut connections) = (0, 0);
    let count = times(3, 20);
    for _ in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let site = Site::running(&[("a", &demo_at("127.0.0.1", port, ""))]).await;
        let report = site.until_within(LONG, "a", |report| report.last_error.is_some()).await;
        let wanted = format!("port {port} in use by pid {}", std::process::id());
        named += usize::from(report.last_error.unwrap().contains(&wanted));
        connections +=
            usize::from(tokio::time::timeout(Duration::from_millis(100), listener.accept()).await.is_ok());
    }
    row(
        "3 foreign process on the port",
        "named with its pid, no connection",
        format!("{named} of {count} named, {connections} connections"),
        named == count && connections == 0,
    )
}

fn spec(mark: &str, line: &str) -> Spec {
    Spec {
        agent: "stress".into(),
        command: vec!["/bin/sh".into(), "-c".into(), line.into()],
        working_dir: None,
        env: [(MARK.to_owned(), SecretString::from(mark))].into(),
        stop_signal: Signal::SIGTERM,
        account: Default::default(),
        limits: Default::default(),
    }
}

fn output() -> Output {
    Output::new(Arc::from("stress"), Secrets::default())
}

async fn process_trees() -> Row {
    let count = times(20, 200);
    let (mut clean, mut slowest) = (0, Duration::ZERO);
    let host = ProcessHost::guarded(program());
    for _ in 0..count {
        let mark = uuid::Uuid::new_v4().to_string();
        let child = Child::spawn(&spec(&mark, TREE), &host, &output()).await.unwrap();
        // Four `sleep` processes; the last one replaces the shell.
        eventually_within(LONG, || async { (marked(&mark).len() >= 4).then_some(()) }).await;
        let (began, guard) = (Instant::now(), child.guard);
        child.stop(Duration::from_secs(10), &CancellationToken::new()).await;
        slowest = slowest.max(began.elapsed());
        clean += usize::from(marked(&mark).is_empty() && guard.and_then(Stat::read).is_none());
    }
    row(
        "4 sh -c \"a & setsid b & c\", stopped",
        format!("no survivor, {count} of {count}"),
        format!("{clean} of {count} without survivor, slowest {slowest:.0?}"),
        clean == count,
    )
}

async fn ignored_sigterm() -> Row {
    let count = times(5, 50);
    let grace = Duration::from_millis(300);
    let (mut clean, mut least, mut most) = (0, LONG, Duration::ZERO);
    let host = ProcessHost::guarded(program());
    for _ in 0..count {
        let mark = uuid::Uuid::new_v4().to_string();
        let line = "trap \"\" TERM; echo up; setsid sleep 1000 & sleep 1000";
        let output = output();
        let child = Child::spawn(&spec(&mark, line), &host, &output).await.unwrap();
        output.wait_for_line(0).await;
        let (began, guard) = (Instant::now(), child.guard);
        child.stop(grace, &CancellationToken::new()).await;
        (least, most) = (least.min(began.elapsed()), most.max(began.elapsed()));
        clean += usize::from(marked(&mark).is_empty() && guard.and_then(Stat::read).is_none());
    }
    row(
        "4 SIGTERM ignored",
        format!("SIGKILL after the grace period ({grace:?})"),
        format!("{clean} of {count} ended, after {least:.0?} to {most:.0?}"),
        clean == count && least >= grace && most < grace * 4,
    )
}

async fn killed_bridge() -> [Row; 2] {
    let count = times(16, 200);
    let mut site = Site::new().await;
    site.settings(&[("a", &shell("sleep 1000 & setsid sleep 1000 & (setsid setsid sleep 1000 &) ; DEMO"))]);
    let (mut ended_alone, mut slowest, mut alone) = (0, Duration::ZERO, 0);
    let (mut found, mut both, mut double) = (0, 0, 0);
    for turn in 0..count {
        site.start();
        let report = site.until_within(LONG, "a", |report| report.state == "ready").await;
        let agents = site.processes().into_iter().filter(|pid| {
            let line = processes::command_line(*pid);
            line.starts_with(program()) && line.contains("demo-agent")
        });
        double += usize::from(agents.count() != 1);
        eventually_within(LONG, || async { (site.processes().len() >= 6).then_some(()) }).await;
        if turn % 4 < 3 {
            alone += 1;
            site.kill_9().await;
            let began = Instant::now();
            let ended = tokio::time::timeout(LONG, async {
                while !site.processes().is_empty() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            });
            ended_alone += usize::from(ended.await.is_ok());
            slowest = slowest.max(began.elapsed());
            continue;
        }
        both += 1;
        site.kill_9_with_guard_of(report.pid.unwrap()).await;
        let left = site.processes();
        site.start();
        // The new agent is launched only when the old processes have exited.
        site.until_within(LONG, "a", |report| report.pid.is_some()).await;
        let still = site.processes().iter().any(|pid| left.contains(pid));
        found += usize::from(!left.is_empty() && !still);
        site.kill_9().await;
        site.until_nothing_runs(LONG).await;
    }
    [
        row(
            "5 bridge killed with -9",
            format!("agents end within 2 s, {alone} of {alone}, no second agent"),
            format!("{ended_alone} of {alone} ended, slowest {slowest:.0?}, {double} second agents"),
            ended_alone == alone && slowest < Duration::from_secs(2) && double == 0,
        ),
        row(
            "5 bridge and guard killed together",
            format!("ended before the next start, {both} of {both}"),
            format!("{found} of {both}"),
            found == both,
        ),
    ]
}

/// The median time of a call.
async fn latency(site: &Site, agent: &str) -> Duration {
    let mut taken = Vec::new();
    for _ in 0..times(50, 500) {
        let began = Instant::now();
        let subject = format!("a2a.action.{agent}.echo");
        site.client.request(subject, "hello".into()).await.unwrap();
        taken.push(began.elapsed());
    }
    taken.sort_unstable();
    taken[taken.len() / 2]
}

async fn flood(line: &str) -> Row {
    let mut site = Site::new().await;
    site.settings(&[
        ("calm", &demo("--skills echo")),
        ("loud", &demo(&format!("--skills echo --flood {line}"))),
    ]);
    let bridge = site.start();
    for agent in ["calm", "loud"] {
        site.until_within(LONG, agent, |report| report.state == "ready").await;
        let subject = format!("a2a.action.{agent}.echo");
        eventually_within(LONG, || async { site.client.request(subject.clone(), "hello".into()).await.ok() })
            .await;
    }
    // The quiet agent shares the machine with the loud one, so the flood alone causes the difference.
    let calm = latency(&site, "calm").await;
    let before = (memory(bridge, "VmRSS") >> 20, site.show("loud").await.unwrap().counts, Instant::now());
    let mut most = before.0;
    while before.2.elapsed() < Duration::from_secs(times(4, 20) as u64) {
        most = most.max(memory(bridge, "VmRSS") >> 20);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let after = site.show("loud").await.unwrap().counts;
    let rate = (after.bytes - before.1.bytes) as f64 / before.2.elapsed().as_secs_f64() / 1e6;
    let loud = latency(&site, "loud").await;
    let grown = most - before.0;
    let slower = loud.as_secs_f64() / calm.as_secs_f64();
    let kind = if line.is_empty() { "lines of 100 bytes" } else { "lines of 10 MB" };
    // The short form runs an unoptimised build on a shared machine, so its limits only show that the bridge
    // buffers little of the flood and that calls get through.
    let (enough, limit) = (times(5, 100), times(20, 2));
    row(
        format!("6 flood on stderr, {kind}"),
        format!("{enough} MB/s or more read, calls less than {limit}x slower, < 32 MiB more"),
        format!(
            "{rate:.0} MB/s, a call {loud:.1?} and {calm:.1?} at a quiet agent ({slower:.2}x), +{grown} MiB"
        ),
        rate >= enough as f64 && grown < 32 && slower < limit as f64,
    )
}

async fn suspended() -> Row {
    let site = Site::running(&[("a", &demo(""))]).await;
    let count = times(1, 5);
    let (mut noticed, mut back) = (Duration::ZERO, Duration::ZERO);
    for restarts in 0..count {
        let report = site
            .until_within(LONG, "a", |report| report.state == "ready" && report.restarts as usize == restarts)
            .await;
        processes::signal(report.pid.unwrap(), Signal::SIGSTOP);
        let began = Instant::now();
        site.until_within(LONG, "a", |report| report.state != "ready").await;
        noticed = noticed.max(began.elapsed());
        site.until_within(LONG, "a", |report| report.state == "ready" && report.restarts as usize > restarts)
            .await;
        back = back.max(began.elapsed());
    }
    row(
        "7 agent suspended (SIGSTOP), default settings",
        "unpublished and restarted within 30 s",
        format!("{count} times, unpublished after {noticed:.1?}, ready again within {back:.1?}"),
        back < Duration::from_secs(30),
    )
}

async fn busy() -> Row {
    let probes = if full() {
        ""
    } else {
        "\nliveness: { interval: 500ms, timeout: 200ms, failures: 2 }\nreadiness: { timeout: 200ms }"
    };
    let site = Site::running(&[("a", &format!("{}{probes}", demo("--slow-card 10m")))]).await;
    site.until_within(LONG, "a", |report| report.state == "ready").await;
    let seconds = times(5, 90);
    eventually_within(LONG, || async { site.client.request("a2a.action.a.echo", "hello".into()).await.ok() })
        .await;
    let mut request = async_nats::Request::new();
    request = request.payload(format!("slow {seconds}").into()).timeout(Some(LONG * 3));
    let reply = site.client.send_request("a2a.action.a.slow", request).await.unwrap();
    let done = String::from_utf8_lossy(&reply.payload).contains("COMPLETED");
    let restarts = site.show("a").await.unwrap().restarts;
    row(
        "7 busy agent with a slow card",
        "not restarted, the task completes",
        format!(
            "{seconds} s of work, {restarts} restarts, {}",
            if done { "completed" } else { "NOT completed" }
        ),
        done && restarts == 0,
    )
}

async fn many_starts() -> Row {
    let count = times(50, 1000);
    let host = ProcessHost::guarded(program());
    let own = i32::try_from(std::process::id()).unwrap();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let one = async || {
        let mark = uuid::Uuid::new_v4().to_string();
        let child = Child::spawn(&spec(&mark, "true & exit 7"), &host, &output()).await.unwrap();
        let exit = child.stop(Duration::from_secs(5), &CancellationToken::new()).await;
        exit.to_string()
    };
    for _ in 0..10 {
        one().await;
    }
    let before = descriptors();
    let began = Instant::now();
    for _ in 0..count {
        one().await;
    }
    let took = began.elapsed();
    // Tasks of their own read the pipes to their end.
    let _ = tokio::time::timeout(Duration::from_secs(5), async {
        while descriptors() > before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    let after = descriptors();
    let zombies = procfs::children(own).into_iter().filter_map(Stat::read).filter(Stat::has_exited).count();
    row(
        format!("8 {count} starts and ends"),
        "no zombies, no leaked descriptors",
        format!(
            "{zombies} zombies, {before} descriptors before and {after} after, {:.1?} each",
            took / u32::try_from(count).unwrap()
        ),
        zombies == 0 && after <= before,
    )
}
