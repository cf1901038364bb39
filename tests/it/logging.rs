//! A log that nobody reads does not hold up the bridge.

use std::io::{PipeReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use a2a_bridge::internal::ports;
use serde_json::json;

use crate::support::site::{Site, demo};
use crate::support::{Answer, Bridge, Peer, SOON, attached, eventually};

/// A bridge whose agent writes megabytes a second, and the end of the pipe that its log goes to.
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
    // More than the pipe takes, and more than waits for it.
    site.until("a", SOON, |report| report.counts.lines - report.counts.dropped_lines > 100).await;
    site
}

#[tokio::test]
async fn a_bridge_whose_log_nobody_reads_serves_and_says_later_what_was_lost() {
    let (site, log) = site().await;
    serves_and_says_later_what_was_lost(site, log).await;
}

#[tokio::test]
async fn a_log_that_does_not_block_loses_nothing_in_silence() {
    let (log, stderr) = UnixStream::pair().unwrap();
    stderr.set_nonblocking(true).unwrap();
    let site = site_with(stderr.into()).await;
    serves_and_says_later_what_was_lost(site, log).await;
}

async fn serves_and_says_later_what_was_lost(mut site: Site, mut log: impl Read + Send + 'static) {
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
    eventually(SOON, || async { read.borrow().contains("log lines were dropped").then_some(()) }).await;
    assert_eq!(site.stop().await, Some(0));
    reader.join().unwrap();
    assert!(read.borrow().contains("NATS closed"), "the last lines are written too");
}

#[tokio::test]
async fn a_bridge_whose_log_nobody_reads_stops() {
    let (mut site, _log) = site().await;
    assert_eq!(site.stop().await, Some(0));
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn a_bridge_that_cannot_start_and_whose_log_nobody_reads_ends_with_its_error() {
    let (mut log, stderr) = std::io::pipe().unwrap();
    // A pipe takes this much and no more.
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
async fn the_words_of_an_agent_make_no_lines_of_their_own_in_the_log() {
    const FORGED: &str = "2026-01-01T00:00:00.000000Z ERROR all agents are lost";
    let words = format!("no\n{FORGED}\r{FORGED}\u{2028}{FORGED}");
    let peer = Peer::agent(move |seen| {
        let error = json!({"code": -32603, "message": words});
        Answer::json(&json!({"jsonrpc": "2.0", "id": seen.json()["id"], "error": error}))
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let reply = bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    assert!(reply.message().contains(&format!("no\n{FORGED}")), "the caller gets it as it is: {reply:?}");
    let log = eventually(SOON, || async { Some(bridge.log()).filter(|log| log.contains(FORGED)) }).await;
    let is_break = |c| matches!(c, '\n' | '\r' | '\u{2028}');
    assert!(!log.split(is_break).any(|line| line.starts_with(FORGED)), "{log}");
}
