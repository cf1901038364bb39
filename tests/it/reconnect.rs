//! The NATS server stops and restarts while the bridge runs.

use serde_json::json;

use crate::support::{Bridge, launched, wait_until};

#[tokio::test]
async fn outage_is_logged_when_it_begins_and_when_it_ends() {
    let mut bridge = Bridge::without_agents().log("info").start_early().await;
    bridge.until_logged("no JetStream for files").await;
    let before = bridge.log().lines().count();
    bridge.nats.end();
    bridge.until_logged("NATS connection is down").await;
    bridge.nats.restart().await;
    bridge.until_logged("NATS connection is up again").await;
    let log = bridge.log();
    let lines: Vec<_> = log.lines().skip(before).collect();
    assert_eq!(lines.len(), 2, "{log}");
    assert!(lines.iter().all(|line| line.contains("INFO")) && lines[1].contains("outage="), "{log}");
}

#[tokio::test]
async fn call_in_flight_gets_its_reply_after_a_nats_restart() {
    let mut bridge = Bridge::with_demo(&[]).await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    let slow = bridge.begin_slow("demo", 3).await;
    bridge.until_working("demo").await;
    bridge.nats.restart().await;
    // The caller's client subscribes to its inbox again when it reconnects.
    let reply = slow.only_reply().await.expect("COMPLETED");
    assert_eq!(reply.message(), "worked for 3 s");

    bridge.prompt("demo.echo", "again").await.expect("COMPLETED");
    let echo = bridge.stats("demo", "echo", 2).await;
    assert_eq!(echo["num_errors"], 0);
    let slow = bridge.stats("demo", "slow", 1).await;
    assert_eq!(slow["num_errors"], 0);
}

#[tokio::test]
async fn actions_and_follow_ups_survive_a_nats_outage() {
    let mut bridge = Bridge::with_demo(&[]).await;
    let body = json!({"topic": "tides", "audience": "sailors"});
    let asked = bridge.call("demo.report", body).await.expect("INPUT_REQUIRED");
    let pids = bridge.launched();
    bridge.nats.end();
    bridge.until_logged("NATS connection is down").await;
    bridge.nats.restart().await;
    wait_until(|| async { bridge.state("demo").await.as_deref() == Some("ready") }).await;
    let done = bridge.answer("demo", &asked.follow_up_id(), "PDF").await;
    done.expect("COMPLETED");
    assert_eq!(bridge.launched(), pids, "the agent keeps running");
}

#[tokio::test]
async fn agent_that_fails_during_a_nats_outage_is_announced_afterwards() {
    let mut bridge = Bridge::with(launched("demo", &[]).set("restart_on_crash", false)).start().await;
    bridge.nats.end();
    bridge.kill_agents();
    bridge.until_logged("not restarting the agent").await;
    bridge.nats.restart().await;
    bridge.until("demo", "failed").await;
    bridge.until_no_responders("demo.echo").await;
    bridge.get_task("demo", "never").await.expect_error("not_found");
}
