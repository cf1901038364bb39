//! Limits: timeouts, calls in flight, sizes.

use std::time::{Duration, Instant};

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{Answer, Bridge, NatsServer, Peer, attached, eventually, launched, peer};

#[tokio::test]
async fn call_to_a_hanging_agent_times_out_without_a_task() {
    let agent = launched("demo", &[]).set("max_in_flight", 1);
    let bridge = Bridge::with(agent).start().await;
    let began = Instant::now();
    let call = bridge.prompt("demo.hang", "x").header("A2A-Timeout", "1s");
    let reply = call.only_reply().await.expect_error("timeout");
    assert!(began.elapsed() >= Duration::from_secs(1));
    assert_eq!(reply["error_info"]["cancelled"], Value::Null);
    assert!(reply["error_info"].get("cancelled").is_some());
    assert_eq!(reply["task"], Value::Null);
    bridge.prompt("demo.echo", "the slot is free").await.expect("COMPLETED");
}

#[rstest]
#[tokio::test]
async fn task_is_cancelled_at_the_agent_when_its_call_times_out(#[values("1.0", "0.3")] protocol: &str) {
    let agent = launched("demo", &["--ignore-blocking", "--protocol", protocol]).set("max_in_flight", 1);
    let bridge = Bridge::with(agent).start().await;
    let call = bridge.prompt("demo.slow", "60").header("A2A-Timeout", "500ms");
    let reply = call.only_reply().await.expect_error("timeout");
    assert_eq!(reply["error_info"]["cancelled"], true);
    assert_eq!(reply["task"]["skill"], "slow");
    let task = bridge.get_task("demo", &reply.task_id()).await;
    assert!(task.is("CANCELED"), "{task:?}");
    bridge.prompt("demo.echo", "the slot is free").await.expect("COMPLETED");
}

#[tokio::test]
async fn timeout_reports_a_task_that_could_not_be_cancelled() {
    let peer = Peer::agent(|seen| match seen.rpc_method().as_str() {
        "CancelTask" => Answer::text(500, "text/plain", "no"),
        _ => Answer::task(seen, "TASK_STATE_WORKING", "on it"),
    });
    let bridge = Bridge::with_peer(&peer).await;
    let call = bridge.prompt("peer.ask", "x").header("A2A-Timeout", "300ms");
    let reply = call.only_reply().await.expect_error("timeout");
    assert_eq!(reply["error_info"]["cancelled"], false);
    assert_eq!(reply.task_id(), "task-1");
    assert_eq!(peer.calls("SendMessage").len(), 1);
}

#[rstest]
#[tokio::test]
async fn caller_cannot_raise_the_agents_request_timeout(
    #[values("1h", "31d", "99999999999999999999s", "99999999999999999999d", &"9".repeat(400))] limit: &str,
) {
    let agent = launched("demo", &[]).set("request_timeout", "1s");
    let bridge = Bridge::with(agent).start().await;
    let call = bridge.prompt("demo.hang", "x").header("A2A-Timeout", limit);
    call.only_reply().await.expect_error("timeout");
}

#[tokio::test]
async fn call_over_max_in_flight_is_busy_but_get_task_and_cancel_task_work() {
    let agent = launched("demo", &["--ignore-blocking"]).set("max_in_flight", 1);
    let bridge = Bridge::with(agent).start().await;
    let done = bridge.prompt("demo.echo", "x").await.expect("COMPLETED").task_id();
    let mut slow = bridge.begin_slow("demo", 60).await;
    let task = bridge.working_task("demo").await;
    let busy = bridge.prompt("demo.echo", "x").await;
    let busy = busy.expect_error("busy").saying("max_in_flight");
    assert_eq!(busy["error_info"]["retryable"], true);
    bridge.answer("demo", "00000000-0000-4000-8000-000000000000", "x").await.expect_error("busy");
    bridge.get_task("demo", &done).await.expect("COMPLETED");
    assert!(bridge.card("demo").await["name"].is_string());
    let cancelled = bridge.cancel_task("demo", &task).await;
    assert!(cancelled.is("CANCELED"), "{cancelled:?}");
    assert_eq!(cancelled["success"], true);
    slow.reply().await.expect("CANCELED");
    bridge.prompt("demo.echo", "free again").await.expect("COMPLETED");
}

#[tokio::test]
async fn slot_is_free_as_soon_as_the_caller_has_its_reply() {
    let peer = Peer::completing("done");
    let agent = attached("peer", &peer.url()).set("max_in_flight", 1);
    let bridge = Bridge::with(agent).start().await;
    for _ in 0..300 {
        bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    }
}

#[tokio::test]
async fn reply_over_the_payload_limit_is_too_large_and_keeps_the_connection() {
    let bridge = Bridge::with_demo(&[]).await;
    let reply = bridge.prompt("demo.big", "2000000").only_reply().await.expect_error("too_large");
    assert_eq!(reply["task"]["skill"], "big");
    let id = reply.task_id();
    bridge.get_task("demo", &id).await.expect_error("too_large");
    let large = bridge.prompt("demo.big", "1000000").await.expect("COMPLETED");
    assert_eq!(large.message().len(), 1_000_000);
    assert!(!bridge.log().contains("NATS connection is down"), "{}", bridge.log());
    let stats = bridge.stats("demo", "big", 2).await;
    assert_eq!(stats["num_errors"], 1);
}

/// An agent with a thousand skills, of which the bridge publishes five hundred.
fn agent_with_many_skills() -> Peer {
    let mut card = peer::card(&[]);
    let skill = |n: usize| json!({"id": format!("skill-{n}"), "name": "n".repeat(60), "description": "d".repeat(850)});
    card["skills"] = (0..1000).map(skill).collect();
    card["description"] = "long ".repeat(5_000).into();
    Peer::agent_with_card(card, |_| Answer::text(500, "text/plain", "no"))
}

#[tokio::test]
async fn info_and_registry_fit_for_a_thousand_skills_with_long_texts() {
    let peer = agent_with_many_skills();
    let mut bridge = Bridge::with_peer(&peer).await;
    let actions = bridge.actions("peer").await;
    assert_eq!(actions.len(), 500);
    let object = bridge.announced("peer", |object| object["state"] == "ready").await;
    assert_eq!(object["actions"].as_array().unwrap().len(), 500);
}

#[tokio::test]
async fn actions_that_do_not_fit_into_registry_or_info_are_counted() {
    let peer = agent_with_many_skills();
    let server = NatsServer::start_configured("max_payload: 32KB").await;
    let mut bridge = Bridge::with(attached("peer", &peer.url())).start_on(server).await;
    let object = bridge.announced("peer", |object| object["state"] == "ready").await;
    let actions = object["actions"].as_array().unwrap();
    assert_eq!(actions[0]["action"], "skill-0");
    assert!(actions.len() > 100, "{}", actions.len());
    assert_eq!(actions.len() as u64 + object["actions_left_out"].as_u64().unwrap(), 500);
    assert_eq!(object["skills_left_out"], 500, "those without an action");
    let info = bridge.info("peer").await;
    let left_out: usize = info["metadata"]["a2a.endpoints_left_out"].as_str().unwrap().parse().unwrap();
    assert_eq!(bridge.actions("peer").await.len() + left_out, 500);
    // An action that INFO leaves out can still be called.
    bridge.prompt("peer.skill-499", "x").await.expect_error("agent_error");
}

#[tokio::test]
async fn running_tasks_and_keys_stay_known_under_the_load_of_the_same_and_of_another_agent() {
    let respond = |seen: &peer::HttpRequest| {
        let (id, state, text) = match &seen.json()["params"]["message"]["parts"][0]["text"] {
            Value::String(prompt) if prompt == "large" => ("large", "COMPLETED", "x".repeat(15_000_000)),
            Value::String(prompt) if prompt == "small" => ("small", "COMPLETED", "hello".to_owned()),
            _ => ("running", "WORKING", String::new()),
        };
        let message = json!({"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": text}]});
        let id = if id == "large" { uuid::Uuid::new_v4().to_string() } else { id.to_owned() };
        let status = json!({"state": format!("TASK_STATE_{state}"), "message": message});
        let task = json!({"id": id, "contextId": "c", "status": status});
        let is_send = seen.rpc_method() == "SendMessage";
        Answer::result(seen, &if is_send { json!({ "task": task }) } else { task })
    };
    let (quiet, busy) = (Peer::agent(respond), Peer::agent(respond));
    let bridge = Bridge::with(attached("quiet", &quiet.url())).and(attached("busy", &busy.url()));
    let bridge = bridge.set("limits", json!({"memory": "2GiB"})).start().await;
    let keyed = || bridge.prompt("quiet.ask", "small").header("Nats-Msg-Id", "k");
    let first = keyed().await.expect("COMPLETED");
    let mut running = Vec::new();
    for agent in ["quiet", "busy"] {
        let call = bridge.prompt(&format!("{agent}.ask"), "running").mode("stream").begin().await;
        eventually(|| async { bridge.get_task(agent, "running").await.is("WORKING").then_some(()) }).await;
        running.push(call);
    }
    for _ in 0..6 {
        bridge.prompt("busy.ask", "large").await.expect_error("too_large");
    }
    assert_eq!(keyed().await.text, first.text);
    bridge.get_task("quiet", "small").await.expect("COMPLETED");
    for agent in ["quiet", "busy"] {
        bridge.get_task(agent, "running").await.expect("WORKING");
    }
}
