//! Every state in which an agent can leave a task, in every protocol version.

use rstest::rstest;
use serde_json::json;

use crate::support::{Bridge, Reply};

async fn call(protocol: &str, action: &str, prompt: &str) -> Reply {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    bridge.prompt(&format!("demo.{action}"), prompt).only_reply().await
}

#[rstest]
#[tokio::test]
async fn task_that_ends_gets_one_reply_with_its_state(
    #[values("1.0", "0.3")] protocol: &str,
    #[values(
        ("state", "completed", "COMPLETED", "completed as asked"),
        ("state", "failed", "FAILED", "failed as asked"),
        ("state", "canceled", "CANCELED", "canceled as asked"),
        ("state", "rejected", "REJECTED", "rejected as asked"),
        ("fail", "no wind", "FAILED", "planned failure: no wind"),
        ("reject", "x", "REJECTED", "planned rejection"),
        ("state", "submitted", "COMPLETED", "completed in the end"),
        ("state", "working", "COMPLETED", "completed in the end")
    )]
    row: (&str, &str, &str, &str),
) {
    let (action, prompt, status, message) = row;
    let reply = call(protocol, action, prompt).await.expect(status);
    assert_eq!(reply.message(), message);
    let code = match status {
        "FAILED" => "task_failed",
        "REJECTED" => "task_rejected",
        _ => "",
    };
    assert_eq!(reply.code(), code, "{reply:?}");
    assert_eq!(reply["task"]["agent"], "demo");
    assert_eq!(reply["task"]["skill"], action);
    assert!(!reply.task_id().is_empty());
    assert!(reply["task"]["context_id"].is_string());
}

#[rstest]
#[tokio::test]
async fn task_that_waits_gets_one_reply_with_a_follow_up(
    #[values("1.0", "0.3")] protocol: &str,
    #[values(("input-required", "INPUT_REQUIRED"), ("auth-required", "AUTH_REQUIRED"))] row: (&str, &str),
) {
    let (state, status) = row;
    let reply = call(protocol, "state", state).await.expect(status);
    assert_eq!(reply.message(), format!("{state} as asked"));
    let data = reply["data"].as_object().unwrap();
    let keys: Vec<_> = data.keys().map(String::as_str).collect();
    assert_eq!(keys, ["follow_up_id", "expires_at"]);
    assert!(uuid::Uuid::parse_str(&reply.follow_up_id()).is_ok());
    assert!(data["expires_at"].as_str().unwrap().ends_with('Z'));
    assert_eq!(reply.code(), "");
}

#[rstest]
#[tokio::test]
async fn direct_message_is_a_completed_reply_without_a_task_id(#[values("1.0", "0.3")] protocol: &str) {
    let reply = call(protocol, "message", "hello").await.expect("COMPLETED");
    assert!(reply.message().contains("hello"), "{reply:?}");
    assert_eq!(reply["task"]["id"], json!(null));
    assert_eq!(reply["artifacts"], json!([]));
}

#[rstest]
#[tokio::test]
async fn json_rpc_error_keeps_the_agents_code(#[values("1.0", "0.3")] protocol: &str) {
    let reply = call(protocol, "rpc-error", "-32005").await.expect_error("agent_error");
    assert_eq!(reply["error_info"]["a2a_code"], -32005);
    assert_eq!(reply["error_info"]["retryable"], false);
    assert_eq!(reply["task"], json!(null));
}

#[rstest]
#[tokio::test]
async fn task_in_an_unknown_state_is_followed_until_the_timeout(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let call = bridge.prompt("demo.state", "unknown").header("A2A-Timeout", "1s");
    let reply = call.only_reply().await.expect_error("timeout");
    assert_eq!(reply["error_info"]["cancelled"], true);
    bridge.get_task("demo", &reply.task_id()).await.expect("CANCELED");
}
