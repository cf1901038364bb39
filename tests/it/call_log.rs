//! The call log: one line per call through any front door, without what was said.

use std::collections::BTreeMap;

use serde_json::json;

use crate::support::agent_protocol::prompt;
use crate::support::{Answer, Bridge, Peer, attached, eventually, launched};

/// The fields of a line.
type Line = BTreeMap<String, String>;

fn lines(bridge: &Bridge) -> Vec<Line> {
    let log = bridge.log();
    // The bridge may be writing the last line.
    let log = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let calls = log.lines().filter_map(|line| line.split_once(" INFO call "));
    let fields = |line: &str| {
        let fields = line.split_ascii_whitespace().map(|field| field.split_once('=').unwrap());
        fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    };
    calls.map(|(_, line)| fields(line)).collect()
}

/// Waits for this many lines.
async fn until(bridge: &Bridge, count: usize) -> Vec<Line> {
    eventually(|| async { Some(lines(bridge)).filter(|lines| lines.len() >= count) }).await
}

/// Agent, skill and outcome of each line, sorted: the calls of a test may end in any order.
fn outcomes(lines: &[Line]) -> Vec<String> {
    let mut all: Vec<_> =
        lines.iter().map(|line| format!("{} {} {}", line["agent"], line["skill"], line["outcome"])).collect();
    all.sort();
    all
}

#[tokio::test]
async fn every_call_is_one_line_through_every_front_door_and_never_says_what_was_said() {
    let bridge = Bridge::with(launched("demo", &[]))
        .nats("agent_protocol", json!({"owner": "acme"}))
        .set("logging", json!({"calls": "all"}))
        .log("info")
        .start()
        .await;
    let reply = bridge.prompt("demo.echo", "canary-prompt").await.expect("COMPLETED");
    bridge.prompt("demo.stream", "canary-one canary-two").stream().await.result.expect("COMPLETED");
    bridge.prompt("demo.fail", "canary-reason").await.expect("FAILED");
    bridge.call("demo.echo", json!({"canary-parameter": 1})).await.expect_error("invalid_request");
    bridge.call("demo.echo", "x").mode("canary-mode").await.expect_error("invalid_request");
    bridge.get_task("demo", &reply.task_id()).await.expect("COMPLETED");
    bridge.card("demo").await;
    bridge.prompt("demo.slow", "1").mode("submit").await.expect("WORKING");
    let question = bridge.prompt("demo.report", "canary-topic").await.expect("INPUT_REQUIRED");
    bridge.answer("demo", &question.follow_up_id(), "PDF canary-answer").await.expect("COMPLETED");
    assert_eq!(prompt(&bridge.client, r#"{"prompt": "echo canary-chunk"}"#).await.rest().await.error, None);
    let lines = until(&bridge, 11).await;
    assert_eq!(
        outcomes(&lines),
        [
            "demo card ok",
            "demo echo COMPLETED",
            "demo echo invalid_request",
            "demo echo invalid_request",
            "demo fail FAILED",
            "demo get_task COMPLETED",
            "demo prompt COMPLETED",
            "demo provide_required_input COMPLETED",
            "demo report INPUT_REQUIRED",
            "demo slow WORKING",
            "demo stream COMPLETED",
        ]
    );
    let echo = lines.iter().find(|line| line["outcome"] == "COMPLETED" && line["skill"] == "echo").unwrap();
    assert_eq!(echo["task"], reply.task_id());
    assert_eq!(echo["caller"], "-", "callers in the account of the bridge cannot be told apart");
    assert_eq!(echo["bytes_out"], reply.text.len().to_string());
    assert!(echo["took"].ends_with('s'), "{echo:?}");
    for line in &lines {
        assert!(line["bytes_out"].parse::<u64>().unwrap() > 0, "{line:?}");
    }
    let stream = lines.iter().find(|line| line["skill"] == "stream").unwrap();
    assert!(stream["bytes_out"].parse::<usize>().unwrap() > 500, "all frames count: {stream:?}");
    assert!(!bridge.log().contains("canary"), "{}", bridge.log());
}

#[tokio::test]
async fn errors_only_and_a_reload_turns_the_log_on_and_off() {
    let peer = Peer::agent(|seen| match seen.json().to_string().contains("well") {
        true => Answer::task(seen, "completed", "fine"),
        false => Answer::error(seen, &json!({"code": -32603, "message": "canary-error"})),
    });
    let bridge = Bridge::with(attached("peer", &peer.url())).log("info").start().await;
    bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    bridge.reload(|settings| settings["logging"] = json!({"calls": "errors"}));
    bridge.until_logged("configuration reloaded").await;
    bridge.prompt("peer.ask", "well").await.expect("COMPLETED");
    bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    let failed = until(&bridge, 1).await;
    assert_eq!(outcomes(&failed), ["peer ask agent_error"]);
    bridge.reload(|settings| settings["logging"] = json!({"calls": "off"}));
    eventually(|| async { (bridge.log().matches("configuration reloaded").count() == 2).then_some(()) })
        .await;
    bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    assert_eq!(lines(&bridge).len(), 1);
}

#[tokio::test]
async fn json_lines_have_numbers() {
    let bridge = Bridge::with(launched("demo", &[]))
        .set("logging", json!({"calls": "all"}))
        .log("info")
        .variable("A2A_BRIDGE_LOG_FORMAT", "json")
        .start()
        .await;
    bridge.prompt("demo.echo", "hello").await.expect("COMPLETED");
    let line = eventually(|| async {
        let log = bridge.log();
        let mut events = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        events.find(|event| event["target"] == "a2a_bridge::calls")
    })
    .await;
    assert_eq!((&line["message"], &line["level"]), (&json!("call"), &json!("INFO")), "{line}");
    assert!(line["took_ms"].is_u64() && line["bytes_in"].is_u64() && line["bytes_out"].is_u64(), "{line}");
    assert_eq!((&line["agent"], &line["outcome"]), (&json!("demo"), &json!("COMPLETED")), "{line}");
}
