//! Unusual answers of agents that are valid HTTP, JSON or ProtoJSON.

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::peer::{card, event};
use crate::support::{Answer, Bridge, Peer, attached};

fn task(state: impl Into<Value>) -> Value {
    let artifact = json!({"artifactId": "a", "parts": [{"text": "well"}]});
    json!({"task": {"id": "t", "contextId": "c", "status": {"state": state.into()}, "artifacts": [artifact]}})
}

#[tokio::test]
async fn media_type_is_case_insensitive() {
    let peer = Peer::streaming_agent(|_| {
        let headers = vec![("Content-Type", "Text/Event-Stream; Charset=UTF-8".to_owned())];
        Answer::Http(200, headers, event(&task("TASK_STATE_COMPLETED")))
    });
    let bridge = Bridge::with_peer(&peer).await;
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    assert_eq!(stream.result.expect("COMPLETED").message(), "well");
}

#[tokio::test]
async fn byte_order_mark_before_json_is_skipped() {
    let marked = |body: &Value| Answer::text(200, "application/json", &format!("\u{FEFF}{body}"));
    let peer = Peer::start(move |seen| match seen.method.as_str() {
        "GET" => marked(&card(&["ask"])),
        _ => marked(&json!({"jsonrpc": "2.0", "id": 1, "result": task("TASK_STATE_COMPLETED")})),
    });
    let bridge = Bridge::with_peer(&peer).await;
    assert_eq!(bridge.prompt("peer.ask", "x").await.expect("COMPLETED").message(), "well");
}

#[rstest]
#[case::final_("final", "application/json", 200)]
#[case::stream("stream", "text/event-stream", 200)]
#[case::stream_that_is_a_document("stream", "application/json", 200)]
#[case::error("final", "text/html", 503)]
#[tokio::test]
async fn compressed_answer_is_not_requested_and_rejected_with_its_encoding(
    #[case] mode: &str,
    #[case] content_type: &'static str,
    #[case] status: u16,
) {
    let peer = Peer::streaming_agent(move |_| {
        let headers =
            vec![("Content-Type", content_type.to_owned()), ("Content-Encoding", "GZip".to_owned())];
        Answer::Http(status, headers, b"\x1f\x8b\x08\x00".to_vec())
    });
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").reply_in_mode(mode).await;
    let reply = reply.expect_error("agent_error").saying("`Content-Encoding: GZip`");
    assert_eq!(reply["error_info"]["http_status"].as_u64(), Some(status.into()).filter(|_| status != 200));
    for seen in peer.requests() {
        assert_eq!(seen.header("accept-encoding"), Some("identity"), "{} {}", seen.method, seen.path);
    }
}

#[tokio::test]
async fn compressed_card_is_rejected_and_other_encodings_are_ignored() {
    let encoded = |encoding: &str| {
        let headers = vec![("Content-Encoding", encoding.to_owned())];
        Answer::Http(200, headers, card(&["ask"]).to_string().into())
    };
    let compressed = Peer::start(move |_| encoded("identity, br"));
    let plain = Peer::start(move |_| encoded("Identity"));
    let mistaken = Peer::start(move |_| encoded("utf-8"));
    let bridge = Bridge::with(attached("plain", &plain.url())).and(attached("mistaken", &mistaken.url()));
    let mut bridge = bridge.and(attached("compressed", &compressed.url())).start_early().await;
    bridge.until("plain", "ready").await;
    bridge.until("mistaken", "ready").await;
    let names_encoding =
        |object: &Value| object["last_error"].to_string().contains("Content-Encoding: identity, br");
    bridge.announced("compressed", names_encoding).await;
}

#[rstest]
#[case(1, "WORKING")]
#[case(2, "WORKING")]
#[case(3, "COMPLETED")]
#[case(4, "FAILED")]
#[case(5, "CANCELED")]
#[case(6, "INPUT_REQUIRED")]
#[case(7, "REJECTED")]
#[case(8, "AUTH_REQUIRED")]
#[tokio::test]
async fn task_state_may_be_its_protobuf_number(#[case] number: u64, #[case] status: &str) {
    let peer = Peer::agent(move |seen| match seen.rpc_method().as_str() {
        "SendMessage" => Answer::result(seen, &task(number)),
        _ => Answer::result(seen, &task(number)["task"]),
    });
    let bridge = Bridge::with_peer(&peer).await;
    let mode = if status == "WORKING" { "submit" } else { "final" };
    bridge.prompt("peer.ask", "x").mode(mode).await.expect(status);
    bridge.get_task("peer", "t").await.expect(status);
}

#[tokio::test]
async fn role_may_be_its_protobuf_number() {
    let message = |role: u64, text: &str| json!({"messageId": "m", "role": role, "parts": [{"text": text}]});
    let history = json!([message(2, "of an earlier turn"), message(1, "x"), message(2, "now")]);
    let task = json!({"task": {"id": "t", "status": {"state": 3}, "history": history}});
    let peer = Peer::agent(move |seen| Answer::result(seen, &task));
    let bridge = Bridge::with_peer(&peer).await;
    assert_eq!(bridge.prompt("peer.ask", "x").await.expect("COMPLETED").message(), "now");
}
