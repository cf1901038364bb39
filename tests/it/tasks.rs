//! `get_task` and `cancel_task`.

use rstest::rstest;
use serde_json::json;

use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, eventually, launched, wait_until};

#[rstest]
#[tokio::test]
async fn get_task_returns_the_reply_of_an_ended_task(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let done = bridge.prompt("demo.echo", "hello").await.expect("COMPLETED");
    let seen = bridge.get_task("demo", &done.task_id()).only_reply().await;
    assert_eq!(seen.expect("COMPLETED").body, done.body);
    let failed = bridge.prompt("demo.fail", "x").await.expect("FAILED");
    let seen = bridge.get_task("demo", &failed.task_id()).await;
    assert_eq!(seen.expect("FAILED").body, failed.body);
}

#[tokio::test]
async fn working_task_can_be_cancelled() {
    let bridge = Bridge::with_demo(&["--ignore-blocking"]).await;
    let slow = bridge.begin_slow("demo", 60).await;
    let id = bridge.working_task("demo").await;
    let working = bridge.get_task("demo", &id).await.expect("WORKING");
    assert_eq!(working["task"]["skill"], "slow");
    let cancelled = bridge.cancel_task("demo", &id).only_reply().await;
    assert!(cancelled.is("CANCELED"), "{cancelled:?}");
    assert_eq!(cancelled["success"], true);
    let reply = slow.only_reply().await.expect("CANCELED");
    assert_eq!(reply.task_id(), id);
    let again = bridge.cancel_task("demo", &id).await;
    again.expect_error("not_cancelable");
    bridge.get_task("demo", &id).await.expect("CANCELED");
}

#[rstest]
#[tokio::test]
async fn cancelling_a_waiting_task_closes_its_follow_up(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let asked = bridge.prompt("demo.state", "input-required").await.expect("INPUT_REQUIRED");
    let cancelled = bridge.cancel_task("demo", &asked.task_id()).await;
    assert!(cancelled.is("CANCELED"), "{cancelled:?}");
    let late = bridge.answer("demo", &asked.follow_up_id(), "x").await;
    assert!(!late.is("COMPLETED"), "{late:?}");
    assert_eq!(late["success"], false);
}

#[tokio::test]
async fn unknown_task_or_one_of_another_agent_is_not_found() {
    let bridge = Bridge::with(launched("demo", &[])).and(launched("other", &[])).start().await;
    let id = bridge.prompt("demo.echo", "x").await.expect("COMPLETED").task_id();
    for (agent, id) in [("demo", "never-seen"), ("other", id.as_str()), ("demo", "")] {
        bridge.get_task(agent, id).await.expect_error("not_found");
        bridge.cancel_task(agent, id).await.expect_error("not_found");
    }
}

#[tokio::test]
async fn task_in_a_final_state_is_not_cancelable() {
    let bridge = Bridge::with_demo(&[]).await;
    let id = bridge.prompt("demo.echo", "x").await.expect("COMPLETED").task_id();
    let reply = bridge.cancel_task("demo", &id).await.expect_error("not_cancelable");
    assert_eq!(reply.task_id(), id);
}

#[tokio::test]
async fn task_is_not_cancelable_if_the_agent_refuses() {
    let peer = Peer::agent(|seen| match seen.rpc_method().as_str() {
        "CancelTask" => Answer::error(seen, &json!({"code": -32002, "message": "Task cannot be canceled"})),
        _ => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which?"),
    });
    let bridge = Bridge::with_peer(&peer).await;
    let id = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED").task_id();
    bridge.cancel_task("peer", &id).await.expect_error("not_cancelable");
    bridge.get_task("peer", &id).await.expect("INPUT_REQUIRED");
}

#[tokio::test]
async fn tasks_of_an_unavailable_agent_come_from_memory_and_cannot_be_cancelled() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("demo", &agent.url())).start().await;
    let done = bridge.prompt("demo.echo", "hello").await.expect("COMPLETED");
    let asked = bridge.prompt("demo.state", "input-required").await.expect("INPUT_REQUIRED");
    agent.kill();
    for _ in 0..2 {
        let seen = bridge.get_task("demo", &done.task_id()).await;
        assert_eq!(seen.expect("COMPLETED").body, done.body);
        let seen = bridge.get_task("demo", &asked.task_id()).await;
        assert_eq!(seen.expect("INPUT_REQUIRED").body, asked.body);
        let refused = bridge.cancel_task("demo", &asked.task_id()).await;
        refused.expect_error("agent_unavailable");
        assert_eq!(bridge.card("demo").await["name"], "demo");
        // In the first round the bridge may not know yet that the agent is down.
        bridge.until("demo", "backing-off").await;
    }
}

#[tokio::test]
async fn task_that_the_agent_forgot_is_lost() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("demo", &agent.url())).start().await;
    let asked = bridge.prompt("demo.state", "input-required").await.expect("INPUT_REQUIRED");
    agent.kill();
    bridge.until("demo", "backing-off").await;
    agent.run().await;
    bridge.until("demo", "ready").await;
    let lost = bridge.get_task("demo", &asked.task_id()).await.expect_error("task_lost");
    assert_eq!(lost.task_id(), asked.task_id());
    let cancel = bridge.cancel_task("demo", &asked.task_id()).await;
    cancel.expect_error("task_lost");
}

#[tokio::test]
async fn task_is_remembered_while_it_runs_and_forgotten_after_task_ttl() {
    let bridge = Bridge::with(launched("demo", &[]).set("task_ttl", "300ms")).start().await;
    let question = json!({"topic": "tides", "audience": "sailors"});
    let asked = bridge.call("demo.report", question).await.expect("INPUT_REQUIRED");
    let running = bridge.prompt("demo.slow", "60").mode("submit").await.expect("WORKING");
    // When this task is forgotten, `task_ttl` has passed for the others as well.
    let ended = bridge.prompt("demo.echo", "x").await.expect("COMPLETED").task_id();
    let forgotten = || async { (bridge.get_task("demo", &ended).await.code() == "not_found").then_some(()) };
    eventually(forgotten).await;
    bridge.get_task("demo", &asked.task_id()).await.expect("INPUT_REQUIRED");
    bridge.get_task("demo", &running.task_id()).await.expect("WORKING");
    bridge.answer("demo", &asked.follow_up_id(), "PDF").await.expect("COMPLETED");
    bridge.cancel_task("demo", &running.task_id()).await;
    wait_until(|| async { bridge.get_task("demo", &running.task_id()).await.code() == "not_found" }).await;
}
