//! A log whose reader blocks does not block the bridge.

use std::io::{PipeReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use a2a_bridge::internal::ports;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::support::site::{Site, demo};
use crate::support::{Answer, Bridge, Peer, eventually, wait_until};

/// A bridge whose agent writes megabytes per second, and the pipe with its log, which is not read yet.
async fn site() -> (Site, PipeReader) {
    let (log, stderr) = std::io::pipe().unwrap();
    (site_with(stderr.into()).await, log)
}

async fn site_with(stderr: OwnedFd) -> Site {
    let mut site = Site::new().await;
    let lines = format!("{}\nstop_grace: 1s", demo("--flood --flood-line 60000"));
    site.settings(&[("a", &lines)]);
    site.start_with_stderr(stderr.into());
    site.until_state("a", "ready").await;
    // More than the pipe and the buffer of the bridge hold.
    site.until("a", |report| report.counts.lines - report.counts.dropped_lines > 100).await;
    site
}

#[tokio::test]
async fn bridge_serves_while_its_log_blocks_and_reports_dropped_lines() {
    let (site, log) = site().await;
    assert_serves_and_reports_dropped_lines(site, log).await;
}

#[tokio::test]
async fn nonblocking_log_reports_dropped_lines() {
    let (log, stderr) = UnixStream::pair().unwrap();
    stderr.set_nonblocking(true).unwrap();
    let site = site_with(stderr.into()).await;
    assert_serves_and_reports_dropped_lines(site, log).await;
}

async fn assert_serves_and_reports_dropped_lines(mut site: Site, mut log: impl Read + Send + 'static) {
    let reply = site.client.request("a2a.action.a.echo", "hello".into()).await.unwrap();
    assert!(String::from_utf8_lossy(&reply.payload).contains("COMPLETED"));
    let (seen, read) = tokio::sync::watch::channel(String::new());
    let reader = std::thread::spawn(move || {
        let mut chunk = vec![0; 1 << 16];
        while let Ok(count @ 1..) = log.read(&mut chunk) {
            let text = String::from_utf8_lossy(&chunk[..count]).into_owned();
            seen.send_modify(|seen| seen.push_str(&text));
        }
    });
    wait_until(|| async { read.borrow().contains("log lines were dropped") }).await;
    assert_eq!(site.stop().await, Some(0));
    reader.join().unwrap();
    assert!(read.borrow().contains("NATS closed"), "the last lines are written as well");
}

#[tokio::test]
async fn bridge_stops_while_its_log_blocks() {
    let (mut site, _log) = site().await;
    assert_eq!(site.stop().await, Some(0));
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn failed_start_exits_with_an_error_while_the_log_blocks() {
    let (mut log, stderr) = std::io::pipe().unwrap();
    // The capacity of a pipe.
    let mut full = tokio::process::Command::new("head");
    full.args(["-c", "65536", "/dev/zero"]).stdout(stderr.try_clone().unwrap());
    assert!(full.status().await.unwrap().success());
    drop(full);
    let mut site = Site::new().await;
    let port = ports::free().unwrap();
    site.settings_with(&format!("metrics: {{ listen: '127.0.0.1:{port}' }}"), &[("a", &demo(""))]);
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    site.start_with_stderr(stderr.into());
    assert_eq!(site.ended().await, Some(1));
    let mut all = Vec::new();
    log.read_to_end(&mut all).unwrap();
    assert_eq!(all.len(), 65536);
}

#[tokio::test]
async fn line_breaks_in_agent_texts_do_not_forge_log_lines() {
    const FORGED: &str = "2026-01-01T00:00:00.000000Z ERROR all agents are lost";
    let words = format!("no\n{FORGED}\r{FORGED}\u{2028}{FORGED}");
    let peer = Peer::agent(move |seen| Answer::error(seen, &json!({"code": -32603, "message": words})));
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    assert!(
        reply.message().contains(&format!("no\n{FORGED}")),
        "the caller gets the text unchanged: {reply:?}"
    );
    let log = eventually(|| async { Some(bridge.log()).filter(|log| log.contains(FORGED)) }).await;
    let is_break = |c| matches!(c, '\n' | '\r' | '\u{2028}');
    assert!(!log.split(is_break).any(|line| line.starts_with(FORGED)), "{log}");
}

#[tokio::test]
async fn warnings_and_errors_are_those_of_the_bridge_and_a_repeated_problem_is_one() {
    let mut site = Site::new().await;
    // A port that no other program takes, unlike one from `port: auto`: a foreign listener would be another problem.
    let agent =
        |port: u16, command: &str| format!("url: http://127.0.0.1:{port}\nshell: true\ncommand: '{command}'");
    let crash = agent(9, "sleep 0.0$(date +%N); echo FATAL: no key >&2; exit 1");
    site.settings(&[("crash", &crash), ("talks", &agent(11, "echo ERROR: just talk; sleep 1000"))]);
    site.start();
    site.until_logged("ERROR: just talk").await;
    site.until("crash", |report| report.restarts >= 2).await;
    let log = site.log();
    let levels = |text: &str| -> Vec<String> {
        let lines = log.lines().filter(|line| line.contains(text));
        lines.map(|line| line.split_ascii_whitespace().nth(1).unwrap().to_owned()).collect()
    };
    assert!(levels("FATAL: no key").iter().chain(&levels("just talk")).all(|level| level == "INFO"), "{log}");
    assert_eq!(levels("agent unavailable"), ["WARN"], "{log}");

    site.settings_with("nonsense: 1\nmore: 2", &[("crash", &crash)]);
    site.signal(Signal::SIGHUP);
    site.until_logged("reload failed; keeping the current configuration").await;
    let log = site.log();
    let problems: Vec<_> = log.lines().filter(|line| line.contains("invalid configuration")).collect();
    assert_eq!(problems.len(), 2, "{log}");
    assert!(problems[0].contains("ERROR") && problems[0].contains("unknown key `nonsense`"), "{log}");
    assert!(!problems[0].contains("\\n"), "{log}");
    assert_eq!(site.stop().await, Some(0));
}
