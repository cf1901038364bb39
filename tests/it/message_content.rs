//! Data, files, metadata and headers of messages to the agent and of its answers.

use rstest::rstest;
use serde_json::json;

use crate::support::{Answer, Bridge, Peer, launched, peer};

/// A bridge for an agent that answers every message with these artifacts.
async fn answering(artifacts: &'static str) -> (Bridge, Peer) {
    let peer = Peer::agent(move |seen| {
        let task = format!(
            r#"{{"task": {{"id": "t", "contextId": "c", "status": {{"state": "TASK_STATE_COMPLETED"}}, "artifacts": {artifacts}}}}}"#
        );
        let body = format!(r#"{{"jsonrpc": "2.0", "id": {}, "result": {task}}}"#, seen.json()["id"]);
        Answer::text(200, "application/json", &body)
    });
    let bridge = Bridge::with_peer(&peer).await;
    (bridge, peer)
}

#[rstest]
#[tokio::test]
async fn text_data_and_files_are_unchanged_in_both_directions(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let body = r#"{"prompt": "hello", "data": {"int": 1, "float": 1.0, "exp": 1e5, "big": 12345678901234567890123, "list": [1, null, 2.50]},
        "files": [{"name": "a.png", "mime_type": "image/png", "bytes": "iVBORwAB"}, "https://example.org/b.txt"]}"#;
    let reply = bridge.call("demo.echo", body).await.expect("COMPLETED");
    assert_eq!(reply.message(), "hello");
    let data = r#""data":{"int":1,"float":1.0,"exp":1e5,"big":12345678901234567890123,"list":[1,null,2.50]}"#;
    let compact = reply.text.replace(": ", ":").replace(", ", ",");
    assert!(compact.contains(data), "{}", reply.text);
    let [inline, linked] = reply["files"].as_array().unwrap().as_slice() else {
        panic!("not two files: {reply:?}")
    };
    assert_eq!(*inline, json!({"name": "a.png", "mime_type": "image/png", "size": 6, "bytes": "iVBORwAB"}));
    assert_eq!(linked["url"], "https://example.org/b.txt");
    assert!(linked.get("bytes").is_none());
    assert_eq!(reply["artifacts"][0]["name"], "echo");
    assert!(reply["artifacts"][0]["id"].is_string());
}

#[tokio::test]
async fn files_and_data_without_text_are_returned() {
    let bridge = Bridge::with_demo(&[]).await;
    let reply = bridge.prompt("demo.file", "please").await.expect("COMPLETED");
    assert_eq!(reply["files"][0]["name"], "a.png");
    assert_eq!(reply["files"][0]["size"], 6);
    assert_eq!(reply["data"], json!({"n": 1, "f": 1.5, "l": [1, null]}));
    assert!(reply.body.get("data_parts").is_none());
}

#[rstest]
#[case::no_clash(
    r#"[{"parts": [{"data": {"a": 1}}]}, {"parts": [{"data": {"b": 2.0}}]}]"#,
    json!({"a": 1, "b": 2.0}), None
)]
#[case::a_clash(
    r#"[{"parts": [{"data": {"a": 1}}]}, {"parts": [{"data": {"a": 2}}]}]"#,
    json!({}), Some(json!([{"a": 1}, {"a": 2}]))
)]
#[case::no_object(
    r#"[{"parts": [{"data": {"a": 1}}, {"data": [1, 2]}]}]"#,
    json!({}), Some(json!([{"a": 1}, [1, 2]]))
)]
#[tokio::test]
async fn data_parts_are_merged_unless_they_clash(
    #[case] artifacts: &'static str,
    #[case] data: serde_json::Value,
    #[case] parts: Option<serde_json::Value>,
) {
    let (bridge, _peer) = answering(artifacts).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(reply["data"], data);
    assert_eq!(reply.body.get("data_parts"), parts.as_ref());
}

#[tokio::test]
async fn answer_artifacts_are_joined_by_lines_without_progress_artifacts() {
    let (bridge, _peer) = answering(
        r#"[{"artifactId": "1", "name": "execution_plan_update", "parts": [{"text": "the plan"}]},
            {"artifactId": "2", "name": "report", "parts": [{"text": "one "}, {"text": "two"}]},
            {"artifactId": "3", "name": "report", "parts": [{"text": "three"}]},
            {"artifactId": "4", "name": "partial_result", "parts": [{"text": "one two\nthree"}]}]"#,
    )
    .await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(reply.message(), "one two\nthree");
    let ids: Vec<_> = reply["artifacts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|artifact| artifact["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["1", "2", "3", "4"]);
}

#[rstest]
#[tokio::test]
async fn skill_id_output_modes_and_references_reach_the_agent(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let meta = json!({"session_id": "s-1", "reference_task_ids": ["t-1", "t-2"], "output_modes": ["text/x"]});
    let reply = bridge.call("demo.metadata", json!({"prompt": "x", "meta": meta})).await.expect("COMPLETED");
    let data = &reply["data"];
    assert_eq!(data["metadata"]["skill_id"], "metadata");
    assert_eq!(data["referenceTaskIds"], json!(["t-1", "t-2"]));
    assert_eq!(data["acceptedOutputModes"], json!(["text/x"]));
    assert_eq!(data["contextId"], "s-1");
    assert_eq!(reply["task"]["context_id"], "s-1");

    let own = bridge.prompt("demo.metadata", "x").await.expect("COMPLETED");
    assert_eq!(own["data"]["acceptedOutputModes"], json!(["application/json"]));
    let card = bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    assert!(card["task"]["context_id"].is_string());
}

#[tokio::test]
async fn each_call_without_a_session_has_its_own_context() {
    let bridge = Bridge::with_demo(&[]).await;
    let first = bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    let second = bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    assert_ne!(first["task"]["context_id"], second["task"]["context_id"]);
}

#[tokio::test]
async fn session_adopts_the_context_id_that_the_agent_chose() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with_peer(&peer).await;
    for _ in 0..2 {
        let body = json!({"prompt": "x", "meta": {"session_id": "mine"}});
        bridge.call("peer.ask", body).await.expect("COMPLETED");
    }
    let contexts: Vec<_> = peer
        .calls("SendMessage")
        .iter()
        .map(|seen| seen.json()["params"]["message"]["contextId"].clone())
        .collect();
    assert_eq!(contexts, [json!("mine"), json!("context-1")]);
}

#[tokio::test]
async fn headers_credentials_and_trace_context_reach_the_agent() {
    let agent = launched("demo", &["--bearer", "t0ken"])
        .set("bearer_token", "t0ken")
        .set("headers", json!({"X-Team": "weather"}));
    let bridge = Bridge::with(agent).start().await;
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let call = bridge.prompt("demo.headers", "x").header("traceparent", trace);
    let reply = call.await.expect("COMPLETED");
    let headers = &reply["data"];
    assert_eq!(headers["authorization"], "Bearer t0ken");
    assert_eq!(headers["x-team"], "weather");
    assert_eq!(headers["a2a-version"], "1.0");
    let sent = headers["traceparent"].as_str().unwrap();
    assert!(sent.contains("0af7651916cd43dd8448eb211c80319c"), "{sent}");
}

#[tokio::test]
async fn invalid_trace_context_is_not_propagated() {
    let bridge = Bridge::with_demo(&[]).await;
    let headers = async |parent: &'static str| {
        let call = bridge.prompt("demo.headers", "x").header("traceparent", parent);
        call.header("tracestate", "vendor=1").await.expect("COMPLETED")["data"].clone()
    };
    for invalid in [
        "nonsense",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
        "00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01",
    ] {
        let sent = headers(invalid).await;
        assert_ne!(sent["traceparent"], invalid);
        assert_eq!(sent.get("tracestate"), None, "only propagated with a valid traceparent: {invalid}");
    }
    let later = "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
    let sent = headers(later).await;
    assert!(sent["traceparent"].as_str().unwrap().contains("0af7651916cd43dd8448eb211c80319c"), "{sent}");
    assert_eq!(sent["tracestate"], "vendor=1");
}

#[tokio::test]
async fn equal_files_of_different_artifacts_or_names_are_all_returned() {
    let (bridge, _peer) = answering(
        r#"[{"artifactId": "1", "parts": [{"raw": "QQ==", "filename": "a"}, {"raw": "QQ==", "filename": "b"}]},
            {"artifactId": "2", "parts": [{"raw": "QQ==", "filename": "a"}]},
            {"artifactId": "3", "parts": [{"raw": "QQ==", "filename": "a"}]}]"#,
    )
    .await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    let names: Vec<_> = reply["files"].as_array().unwrap().iter().map(|file| file["name"].clone()).collect();
    assert_eq!(names, ["a", "b", "a", "a"]);
}

#[tokio::test]
async fn message_to_an_agent_without_skills_has_no_skill_id() {
    let peer =
        Peer::agent_with_card(peer::card(&[]), |seen| Answer::task(seen, "TASK_STATE_COMPLETED", "done"));
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.prompt", "x").await.expect("COMPLETED");
    assert_eq!(reply["task"]["skill"], json!(null));
    let sent = peer.calls("SendMessage")[0].json();
    assert!(sent["params"]["message"]["metadata"].get("skill_id").is_none());
}
