//! Agents that come, go and change.

use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{
    Answer, Bridge, DemoAgent, LATER, Peer, attached, eventually, eventually_eq, launched, peer, processes,
};

/// A card file that can be changed under the agent's feet.
struct CardFile {
    _dir: TempDir,
    path: PathBuf,
}

impl CardFile {
    fn with(skills: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let this = Self { path: dir.path().join("card.json"), _dir: dir };
        this.write(skills);
        this
    }

    fn write(&self, skills: &[&str]) {
        let mut card = peer::card(skills);
        card["supportedInterfaces"][0]["url"] = json!("{url}");
        // In one step: the agent may read it at any time.
        let draft = self.path.with_extension("draft");
        std::fs::write(&draft, card.to_string()).unwrap();
        std::fs::rename(draft, &self.path).unwrap();
    }

    fn switches(&self) -> [&str; 2] {
        ["--card-file", self.path.to_str().unwrap()]
    }
}

#[tokio::test]
async fn a_changed_card_is_republished_and_calls_in_flight_finish() {
    let card = CardFile::with(&["echo", "slow"]);
    let agent = launched("demo", &card.switches()).set("card_refresh", "100ms");
    let mut bridge = Bridge::of(agent).start().await;
    let before = bridge.info("demo").await["metadata"]["a2a.card_hash"].clone();
    let slow = bridge.begin_slow("demo", 2).await;
    bridge.until_working("demo").await;
    card.write(&["echo", "file"]);
    eventually_eq(LATER, vec!["echo".to_owned(), "file".to_owned()], || bridge.actions("demo")).await;
    // It is taken off the list first, then off the mesh.
    eventually(LATER, || async {
        let reply = bridge.prompt("demo.slow", "0").await;
        reply.is_no_responders().then_some(())
    })
    .await;
    bridge.prompt("demo.file", "x").await.expect("COMPLETED");
    assert_ne!(bridge.info("demo").await["metadata"]["a2a.card_hash"], before);
    let told = bridge.announced("demo", |object| object["actions"][1]["action"] == "file").await;
    assert_eq!(told["restarts"], 0);
    slow.only_reply().await.expect("COMPLETED");
}

#[tokio::test]
async fn an_unchanged_skill_has_no_gap_and_keeps_its_counts_while_others_come_and_go() {
    let card = CardFile::with(&["echo"]);
    let agent = launched("demo", &card.switches()).set("card_refresh", "50ms");
    let bridge = Bridge::of(agent).start().await;
    let mut calls = 0;
    for round in 0..6 {
        let skills: &[&str] = if round % 2 == 0 { &["file", "echo"] } else { &["echo"] };
        card.write(skills);
        // Without a pause between calls until the change is there.
        loop {
            bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
            calls += 1;
            if calls % 5 == 0 && bridge.actions("demo").await.len() == skills.len() {
                break;
            }
        }
    }
    let stats = bridge.stats("demo", "echo", calls).await;
    assert_eq!(stats["num_errors"], 0);
}

#[tokio::test]
async fn when_a_launched_agent_is_killed_its_skills_go_at_once_and_come_back_with_it() {
    let mut bridge = Bridge::of_demo(&[]).await;
    for pid in bridge.launched() {
        processes::signal(pid, Signal::SIGKILL);
    }
    eventually(Duration::from_secs(2), || async { bridge.actions("demo").await.is_empty().then_some(()) })
        .await;
    bridge.until_no_responders("demo.echo").await;
    // What is built in stays.
    bridge.get_task("demo", "never").await.expect_error("not_found");
    bridge
        .answer("demo", "00000000-0000-4000-8000-000000000000", "x")
        .await
        .expect_error("agent_unavailable");
    assert_eq!(bridge.card("demo").await["name"], "demo");
    let gone = bridge.announced("demo", |object| object["state"] == "backing-off").await;
    assert!(gone["last_error"].as_str().unwrap().contains("SIGKILL"), "{gone}");
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn an_attached_agent_that_is_not_there_yet_appears_later_and_others_work_meanwhile() {
    let mut late = DemoAgent::new(&[]);
    let bridge = Bridge::of(launched("demo", &[])).and(attached("late", &late.url())).start_early().await;
    bridge.until("demo", "ready").await;
    bridge.until("late", "backing-off").await;
    bridge.until_no_responders("late.echo").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    late.run().await;
    bridge.until("late", "ready").await;
    bridge.prompt("late.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn an_agent_that_starts_slowly_is_waited_for() {
    let bridge = Bridge::of(launched("demo", &["--slow-start", "1s"])).start_early().await;
    assert_eq!(bridge.state("demo").await.as_deref(), Some("starting"));
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn an_agent_that_does_not_start_says_why_and_one_that_may_not_restart_has_failed() {
    let mut bridge = Bridge::of(launched("exits", &["--exit-at-start", "7"]))
        .and(launched("once", &["--exit-at-start", "7"]).set("restart_on_crash", false))
        .and(attached("missing", "http://127.0.0.1:9").set("command", "no-such-program-at-all --port 1"))
        .and(launched("demo", &[]))
        .start_early()
        .await;
    bridge.until("demo", "ready").await;
    let said =
        |object: &Value, what: &str| object["last_error"].as_str().is_some_and(|error| error.contains(what));
    bridge
        .announced("exits", |object| object["state"] == "backing-off" && said(object, "exited with code 7"))
        .await;
    bridge.until("once", "failed").await;
    bridge.until("missing", "backing-off").await;
    let info = bridge.info("missing").await;
    assert_eq!(info["metadata"]["a2a.state"], "backing-off");
    assert!(bridge.log().contains("no-such-program-at-all"));
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[rstest]
#[case("invalid-json", "not an agent card")]
#[case("html", "not an agent card")]
#[case("empty", "name")]
#[case("huge", "larger than the limit of 1048576 bytes")]
#[case("redirect", "does not follow redirects")]
#[case("404", "404")]
#[tokio::test]
async fn a_broken_card_is_told_in_the_registry_and_others_work(#[case] kind: &str, #[case] what: &str) {
    let broken = DemoAgent::start(&["--broken-card", kind]).await;
    let mut bridge =
        Bridge::of(attached("broken", &broken.url())).and(launched("demo", &[])).start_early().await;
    let told = bridge.announced("broken", |object| object["last_error"].is_string()).await;
    assert!(told["last_error"].as_str().unwrap().contains(what), "{told}");
    assert_eq!(told["state"], "backing-off");
    assert_eq!(told["actions"], json!([]));
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    bridge.card("broken").await.expect_error("agent_unavailable");
}

#[tokio::test]
async fn a_card_without_skills_gets_one_action() {
    let bridge = Bridge::of_demo(&["--broken-card", "no-skills"]).await;
    assert_eq!(bridge.actions("demo").await, ["prompt"]);
    let reply = bridge.prompt("demo.prompt", "echo hello").await.expect("COMPLETED");
    assert_eq!(reply.message(), "echo hello");
}

#[tokio::test]
async fn a_card_that_breaks_while_the_agent_runs_does_not_take_its_skills_away_at_once() {
    let is_broken = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let broken = std::sync::Arc::clone(&is_broken);
    let peer = Peer::start(move |seen| match seen.method.as_str() {
        "GET" if broken.load(std::sync::atomic::Ordering::Relaxed) => Answer::text(500, "text/plain", "oops"),
        "GET" => Answer::json(&peer::card(&["ask"])),
        _ => Answer::task(seen, "TASK_STATE_COMPLETED", "done"),
    });
    let agent = attached("peer", &peer.url()).set("card_refresh", "1s");
    let bridge = Bridge::of(agent).start().await;
    is_broken.store(true, std::sync::atomic::Ordering::Relaxed);
    eventually(LATER, || async { bridge.log().contains("card probe failed").then_some(()) }).await;
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    bridge.until("peer", "unhealthy").await;
    bridge.until_no_responders("peer.ask").await;
    is_broken.store(false, std::sync::atomic::Ordering::Relaxed);
    bridge.until("peer", "ready").await;
}
