//! Reply mode `submit`: the task id at once, an update at every change, the result by `get_task`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rstest::rstest;
use serde_json::json;

use crate::support::peer::{card, streaming_card};
use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, eventually, launched, wait_until};

#[rstest]
#[tokio::test]
async fn every_state_of_a_submitted_task_is_published_and_returned_by_get_task(
    #[values("1.0", "0.3")] protocol: &str,
    #[values(
        ("completed", "COMPLETED"),
        ("failed", "FAILED"),
        ("canceled", "CANCELED"),
        ("rejected", "REJECTED"),
        ("input-required", "INPUT_REQUIRED"),
        ("auth-required", "AUTH_REQUIRED"),
        ("submitted", "COMPLETED"),
        ("working", "COMPLETED")
    )]
    row: (&str, &str),
) {
    let (state, status) = row;
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let mut updates = bridge.task_updates().await;
    let first = bridge.prompt("demo.state", state).mode("submit").only_reply().await;
    assert!(first.is("WORKING") || first.is(status), "{first:?}");
    let id = first.task_id();
    let (subject, update) = updates.until(status).await;
    assert_eq!(subject, format!("{}.task.demo.{id}", bridge.prefix));
    assert_eq!(update["task"], first["task"]);
    let polled = bridge.get_task("demo", &id).await.expect(status);
    assert_eq!(polled.body, update);
}

#[tokio::test]
async fn direct_message_or_error_is_the_reply_to_a_submission() {
    let bridge = Bridge::with_demo(&[]).await;
    let reply = bridge.prompt("demo.message", "hello").mode("submit").only_reply().await.expect("COMPLETED");
    assert_eq!(reply["task"]["id"], json!(null));
    bridge.prompt("demo.rpc-error", "-32005").mode("submit").only_reply().await.expect_error("agent_error");
}

#[tokio::test]
async fn question_of_a_submitted_task_is_published_and_its_answer_continues_the_task() {
    let bridge = Bridge::with_demo(&[]).await;
    let mut updates = bridge.task_updates().await;
    let body = json!({"topic": "tides", "audience": "sailors"});
    let first = bridge.call("demo.report", body).mode("submit").only_reply().await;
    let (_, asked) = updates.until("INPUT_REQUIRED").await;
    let follow_up = asked["data"]["follow_up_id"].as_str().unwrap().to_owned();
    let polled = bridge.get_task("demo", &first.task_id()).await.expect("INPUT_REQUIRED");
    assert_eq!(polled.follow_up_id(), follow_up);
    bridge.answer("demo", &follow_up, "PDF").only_reply().await.expect("COMPLETED");
    let (_, done) = updates.until("COMPLETED").await;
    assert_eq!(done["task"]["id"], first["task"]["id"]);
}

#[tokio::test]
async fn submitted_task_is_followed_after_authentication_outside_the_bridge() {
    let bridge = Bridge::with_demo(&["--auth-after", "1s"]).await;
    let mut updates = bridge.task_updates().await;
    let first = bridge.prompt("demo.auth", "x").mode("submit").only_reply().await;
    let (_, asked) = updates.until("AUTH_REQUIRED").await;
    assert!(asked["data"]["follow_up_id"].is_string());
    let (_, done) = updates.until("COMPLETED").await;
    assert_eq!(done["task"]["id"], first["task"]["id"]);
}

#[tokio::test]
async fn submitted_task_that_works_again_after_authentication_publishes_it() {
    let polls = AtomicUsize::new(0);
    let states = ["AUTH_REQUIRED", "AUTH_REQUIRED", "WORKING", "WORKING", "COMPLETED"];
    let peer = Peer::agent(move |seen| {
        let state = match seen.rpc_method().as_str() {
            "GetTask" => states[polls.fetch_add(1, Ordering::Relaxed).min(4)],
            _ => "WORKING",
        };
        Answer::task(seen, &format!("TASK_STATE_{state}"), "well")
    });
    let bridge = Bridge::with_peer(&peer).await;
    let mut updates = bridge.task_updates().await;
    bridge.prompt("peer.ask", "x").mode("submit").only_reply().await.expect("WORKING");
    for status in ["WORKING", "AUTH_REQUIRED", "WORKING", "COMPLETED"] {
        let (_, update) = updates.next().await;
        assert_eq!(update["status"], status);
    }
}

#[tokio::test]
async fn submitted_tasks_do_not_count_towards_max_in_flight() {
    let bridge = Bridge::with(launched("demo", &[]).set("max_in_flight", 1)).start().await;
    let first = bridge.prompt("demo.slow", "30").mode("submit").only_reply().await.expect("WORKING");
    let second = bridge.prompt("demo.slow", "30").mode("submit").only_reply().await.expect("WORKING");
    bridge.prompt("demo.echo", "still there").only_reply().await.expect("COMPLETED");
    for task in [first, second] {
        let cancelled = bridge.cancel_task("demo", &task.task_id()).await;
        assert_eq!(cancelled["status"], "CANCELED", "{cancelled:?}");
    }
}

#[tokio::test]
async fn submitted_task_over_task_timeout_is_cancelled() {
    let bridge = Bridge::with(launched("demo", &[]).set("task_timeout", "1s")).start().await;
    let mut updates = bridge.task_updates().await;
    let first = bridge.prompt("demo.slow", "60").mode("submit").only_reply().await.expect("WORKING");
    updates.until("WORKING").await;
    // One final update, as in the other modes: the reason, and whether the task was cancelled.
    let (_, end) = updates.next().await;
    assert_eq!(
        (&end["error_info"]["code"], &end["error_info"]["cancelled"]),
        (&json!("timeout"), &json!(true))
    );
    assert_eq!(end["task"]["id"], first["task"]["id"]);
    bridge.get_task("demo", &first.task_id()).await.expect("CANCELED");
}

#[rstest]
#[tokio::test]
async fn task_that_first_requires_authentication_is_submitted(#[values(true, false)] streams: bool) {
    let waiting = json!({"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_AUTH_REQUIRED"}});
    let card = if streams { streaming_card(&["ask"]) } else { card(&["ask"]) };
    let peer = Peer::agent_with_card(card, move |seen| match seen.rpc_method().as_str() {
        "SendStreamingMessage" => Answer::stream(&[json!({"task": waiting})]),
        "SendMessage" => Answer::result(seen, &json!({"task": waiting})),
        _ => Answer::result(seen, &waiting),
    });
    let bridge = Bridge::with_peer(&peer).await;
    let mut updates = bridge.task_updates().await;
    let first = bridge.prompt("peer.ask", "x").mode("submit").only_reply().await.expect("AUTH_REQUIRED");
    let (_, update) = updates.until("AUTH_REQUIRED").await;
    assert_eq!(update["data"]["follow_up_id"], first.follow_up_id());
}

#[tokio::test]
async fn result_of_a_submitted_task_survives_two_nats_restarts() {
    let mut bridge = Bridge::with_demo(&[]).await;
    let first = bridge.prompt("demo.slow", "4").mode("submit").only_reply().await.expect("WORKING");
    for _ in 0..2 {
        bridge.nats.restart().await;
        eventually(|| async { bridge.state("demo").await.filter(|state| state == "ready") }).await;
    }
    wait_until(|| async { bridge.get_task("demo", &first.task_id()).await.is("COMPLETED") }).await;
}

#[tokio::test]
async fn stop_neither_waits_for_submitted_tasks_nor_cancels_them() {
    let agent = DemoAgent::start(&[]).await;
    // Longer than any test may take.
    let mut bridge = Bridge::with(attached("demo", &agent.url())).shutdown_grace("10m").start().await;
    let first = bridge.prompt("demo.slow", "60").mode("submit").only_reply().await.expect("WORKING");
    assert!(bridge.stop().await.success());
    let state = agent.state_of(&first.task_id()).await;
    assert_eq!(state, "TASK_STATE_WORKING");
}

#[tokio::test]
async fn lost_submitted_task_is_published_and_returned_by_get_task() {
    let agent = launched("demo", &[]).set("restart", "never");
    let bridge = Bridge::with(agent).start().await;
    let mut updates = bridge.task_updates().await;
    let first = bridge.prompt("demo.slow", "60").mode("submit").only_reply().await.expect("WORKING");
    let asked = bridge.prompt("demo.state", "input-required").mode("submit").only_reply().await;
    let (_, question) = updates.until("INPUT_REQUIRED").await;
    bridge.kill_agents();
    let (_, update) = updates.until("ERROR").await;
    assert_eq!(update["error_info"]["code"], "task_lost");
    let polled = bridge.get_task("demo", &first.task_id()).await.expect_error("task_lost");
    assert_eq!(polled.body, update);
    // A follow-up stays open until it expires.
    let polled = bridge.get_task("demo", &asked.task_id()).await.expect("INPUT_REQUIRED");
    assert_eq!(polled.body, question);
}

#[tokio::test]
async fn update_and_get_task_of_a_cancelled_task_agree() {
    let polls_after_cancel = Arc::new(AtomicUsize::new(0));
    let (polls, is_cancelled) = (Arc::clone(&polls_after_cancel), AtomicBool::new(false));
    let peer = Peer::streaming_agent(move |seen| {
        let task = |state: &str| json!({"id": "t", "contextId": "c", "status": {"state": state}});
        let says = |text: &str| {
            let message = json!({"messageId": text, "role": "ROLE_AGENT", "parts": [{"text": text}]});
            let status = json!({"state": "TASK_STATE_WORKING", "message": message});
            json!({"statusUpdate": {"taskId": "t", "contextId": "c", "status": status}})
        };
        match seen.rpc_method().as_str() {
            "SendStreamingMessage" => Answer::stream(&[says("reading"), says("thinking")]),
            "CancelTask" => {
                is_cancelled.store(true, Ordering::Relaxed);
                Answer::result(seen, &task("TASK_STATE_CANCELED"))
            }
            "GetTask" if is_cancelled.load(Ordering::Relaxed) => {
                polls.fetch_add(1, Ordering::Relaxed);
                Answer::result(seen, &task("TASK_STATE_CANCELED"))
            }
            "GetTask" => Answer::result(seen, &task("TASK_STATE_WORKING")),
            _ => Answer::task_not_found(seen),
        }
    });
    let bridge = Bridge::with_peer(&peer).await;
    let mut updates = bridge.task_updates().await;
    let id = bridge.prompt("peer.ask", "x").mode("submit").only_reply().await.expect("WORKING").task_id();
    assert_eq!(bridge.cancel_task("peer", &id).await["status"], "CANCELED");
    let (_, update) = updates.until("CANCELED").await;
    // The run that follows the task sees its end as well.
    wait_until(|| async { polls_after_cancel.load(Ordering::Relaxed) > 0 }).await;
    for _ in 0..50 {
        assert_eq!(bridge.get_task("peer", &id).await.expect("CANCELED").body, update);
    }
}
