//! Agents that start, fail, restart and change their card.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::eventually::eventually_within;
use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, eventually_eq, launched, peer, wait_until};

/// A card file that changes while the agent runs.
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
        // Renamed into place, since the agent may read the file at any time.
        let draft = self.path.with_extension("draft");
        std::fs::write(&draft, card.to_string()).unwrap();
        std::fs::rename(draft, &self.path).unwrap();
    }

    fn switches(&self) -> [&str; 2] {
        ["--card-file", self.path.to_str().unwrap()]
    }
}

#[tokio::test]
async fn changed_card_is_republished_and_calls_in_flight_finish() {
    let card = CardFile::with(&["echo", "slow"]);
    let agent = launched("demo", &card.switches()).set("card_refresh", "100ms");
    let mut bridge = Bridge::with(agent).start().await;
    let before = bridge.info("demo").await["metadata"]["a2a.card_hash"].clone();
    let slow = bridge.begin_slow("demo", 2).await;
    bridge.until_working("demo").await;
    card.write(&["echo", "file"]);
    eventually_eq(vec!["echo".to_owned(), "file".to_owned()], || bridge.actions("demo")).await;
    // INFO drops the skill first, then the bridge unsubscribes.
    wait_until(|| async { bridge.prompt("demo.slow", "0").await.is_no_responders() }).await;
    bridge.prompt("demo.file", "x").await.expect("COMPLETED");
    assert_ne!(bridge.info("demo").await["metadata"]["a2a.card_hash"], before);
    let announced = bridge.announced("demo", |object| object["actions"][1]["action"] == "file").await;
    assert_eq!(announced["restarts"], 0);
    slow.only_reply().await.expect("COMPLETED");
}

#[tokio::test]
async fn unchanged_skill_has_no_gap_and_keeps_its_counts_while_the_card_changes() {
    let card = CardFile::with(&["echo"]);
    let agent = launched("demo", &card.switches()).set("card_refresh", "50ms");
    let bridge = Bridge::with(agent).start().await;
    let mut calls = 0;
    for round in 0..6 {
        let skills: &[&str] = if round % 2 == 0 { &["file", "echo"] } else { &["echo"] };
        card.write(skills);
        // Calls without a pause until the change is published.
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
async fn skills_of_a_killed_agent_are_withdrawn_at_once_and_return_after_the_restart() {
    let mut bridge = Bridge::with_demo(&[]).await;
    bridge.kill_agents();
    eventually_within(Duration::from_secs(2), || async {
        bridge.actions("demo").await.is_empty().then_some(())
    })
    .await;
    bridge.until_no_responders("demo.echo").await;
    // The built-in actions stay.
    bridge.get_task("demo", "never").await.expect_error("not_found");
    bridge
        .answer("demo", "00000000-0000-4000-8000-000000000000", "x")
        .await
        .expect_error("agent_unavailable");
    assert_eq!(bridge.card("demo").await["name"], "demo");
    let failed = bridge.announced("demo", |object| object["state"] == "backing-off").await;
    assert!(failed["last_error"].as_str().unwrap().contains("SIGKILL"), "{failed}");
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn attached_agent_that_starts_late_is_published_and_does_not_delay_others() {
    let mut late = DemoAgent::new(&[]);
    let bridge = Bridge::with(launched("demo", &[])).and(attached("late", &late.url())).start_early().await;
    bridge.until("demo", "ready").await;
    bridge.until("late", "backing-off").await;
    bridge.until_no_responders("late.echo").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    late.run().await;
    bridge.until("late", "ready").await;
    bridge.prompt("late.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn slowly_starting_agent_is_published_when_ready() {
    let bridge = Bridge::with(launched("demo", &["--slow-start", "1s"])).start_early().await;
    assert_eq!(bridge.state("demo").await.as_deref(), Some("starting"));
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn failed_start_is_explained_and_final_if_restarts_are_off() {
    let mut bridge = Bridge::with(launched("exits", &["--exit-at-start", "7"]))
        .and(launched("once", &["--exit-at-start", "7"]).set("restart_on_crash", false))
        .and(attached("missing", "http://127.0.0.1:9").set("command", "no-such-program-at-all --port 1"))
        .and(launched("demo", &[]))
        .start_early()
        .await;
    bridge.until("demo", "ready").await;
    let has_error =
        |object: &Value, what: &str| object["last_error"].as_str().is_some_and(|error| error.contains(what));
    bridge
        .announced("exits", |object| {
            object["state"] == "backing-off" && has_error(object, "exited with code 7")
        })
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
async fn broken_card_is_reported_in_the_registry_and_does_not_affect_others(
    #[case] kind: &str,
    #[case] what: &str,
) {
    let broken = DemoAgent::start(&["--broken-card", kind]).await;
    let mut bridge =
        Bridge::with(attached("broken", &broken.url())).and(launched("demo", &[])).start_early().await;
    let announced = bridge.announced("broken", |object| object["last_error"].is_string()).await;
    assert!(announced["last_error"].as_str().unwrap().contains(what), "{announced}");
    assert_eq!(announced["state"], "backing-off");
    assert_eq!(announced["actions"], json!([]));
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    bridge.card("broken").await.expect_error("agent_unavailable");
}

#[tokio::test]
async fn card_without_skills_gets_the_action_prompt() {
    let bridge = Bridge::with_demo(&["--broken-card", "no-skills"]).await;
    assert_eq!(bridge.actions("demo").await, ["prompt"]);
    let reply = bridge.prompt("demo.prompt", "echo hello").await.expect("COMPLETED");
    assert_eq!(reply.message(), "echo hello");
}

#[tokio::test]
async fn card_that_breaks_later_withdraws_skills_only_after_repeated_failures() {
    let is_broken = Arc::new(AtomicBool::new(false));
    let broken = Arc::clone(&is_broken);
    let peer = Peer::start(move |seen| match seen.method.as_str() {
        "GET" if broken.load(Ordering::Relaxed) => Answer::text(500, "text/plain", "oops"),
        "GET" => Answer::json(&peer::card(&["ask"])),
        _ => Answer::task(seen, "TASK_STATE_COMPLETED", "done"),
    });
    let agent = attached("peer", &peer.url()).set("card_refresh", "1s");
    let bridge = Bridge::with(agent).start().await;
    is_broken.store(true, Ordering::Relaxed);
    bridge.until_logged("card probe failed").await;
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    bridge.until("peer", "unhealthy").await;
    bridge.until_no_responders("peer.ask").await;
    is_broken.store(false, Ordering::Relaxed);
    bridge.until("peer", "ready").await;
}
