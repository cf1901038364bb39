//! The server goes and comes back while the bridge runs.

use serde_json::json;

use crate::support::{Bridge, LATER, SOON, eventually, launched};

#[tokio::test]
async fn a_call_in_flight_gets_its_reply_after_the_server_was_restarted() {
    let mut bridge = Bridge::of_demo(&[]).await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    let slow = bridge.begin_slow("demo", 3).await;
    bridge.until_working("demo").await;
    bridge.nats.restart().await;
    // The inbox is subscribed anew by the caller's own client when it is back.
    let reply = slow.only_reply().await.expect("COMPLETED");
    assert_eq!(reply.message(), "worked for 3 s");

    bridge.prompt("demo.echo", "again").await.expect("COMPLETED");
    let echo = bridge.stats("demo", "echo", 2).await;
    assert_eq!(echo["num_errors"], 0);
    let slow = bridge.stats("demo", "slow", 1).await;
    assert_eq!(slow["num_errors"], 0);
}

#[tokio::test]
async fn actions_and_questions_survive_the_servers_absence() {
    let mut bridge = Bridge::of_demo(&[]).await;
    let body = json!({"topic": "tides", "audience": "sailors"});
    let asked = bridge.call("demo.report", body).await.expect("INPUT_REQUIRED");
    let pids = bridge.launched();
    bridge.nats.end();
    eventually(SOON, || async { bridge.log().contains("NATS connection is down").then_some(()) }).await;
    bridge.nats.restart().await;
    eventually(LATER, || async { (bridge.state("demo").await.as_deref() == Some("ready")).then_some(()) })
        .await;
    let done = bridge.answer("demo", &asked.follow_up_id(), "PDF").await;
    done.expect("COMPLETED");
    assert_eq!(bridge.launched(), pids, "the agent was left alone");
}

#[tokio::test]
async fn an_agent_that_changes_while_the_server_is_away_is_right_afterwards() {
    let mut bridge = Bridge::of(launched("demo", &[]).set("restart_on_crash", false)).start().await;
    bridge.nats.end();
    for pid in bridge.launched() {
        crate::support::processes::signal(pid, nix::sys::signal::Signal::SIGKILL);
    }
    eventually(SOON, || async { bridge.log().contains("agent exited; not restarting").then_some(()) }).await;
    bridge.nats.restart().await;
    bridge.until("demo", "failed").await;
    bridge.until_no_responders("demo.echo").await;
    bridge.get_task("demo", "never").await.expect_error("not_found");
}
