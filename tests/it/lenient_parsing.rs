//! What agents may write differently from most: all of it is legal HTTP, JSON or ProtoJSON.

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::peer::{card, streaming_card};
use crate::support::{Answer, Bridge, Peer, attached};

fn event(result: &Value) -> String {
    format!("data: {}\n\n", json!({"jsonrpc": "2.0", "id": 1, "result": result}))
}

fn task(state: impl Into<Value>) -> Value {
    let artifact = json!({"artifactId": "a", "parts": [{"text": "well"}]});
    json!({"task": {"id": "t", "contextId": "c", "status": {"state": state.into()}, "artifacts": [artifact]}})
}

#[tokio::test]
async fn a_media_type_may_be_written_in_any_case() {
    let peer = Peer::start(|seen| match seen.method.as_str() {
        "GET" => Answer::json(&streaming_card(&["ask"])),
        _ => Answer::text(200, "Text/Event-Stream; Charset=UTF-8", &event(&task("TASK_STATE_COMPLETED"))),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    assert_eq!(stream.result.expect("COMPLETED").message(), "well");
}

#[tokio::test]
async fn a_byte_order_mark_before_json_is_skipped() {
    let marked = |body: &Value| Answer::text(200, "application/json", &format!("\u{FEFF}{body}"));
    let peer = Peer::start(move |seen| match seen.method.as_str() {
        "GET" => marked(&card(&["ask"])),
        _ => marked(&json!({"jsonrpc": "2.0", "id": 1, "result": task("TASK_STATE_COMPLETED")})),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    assert_eq!(bridge.prompt("peer.ask", "x").await.expect("COMPLETED").message(), "well");
}

#[rstest]
#[case::final_("final", "application/json", 200)]
#[case::stream("stream", "text/event-stream", 200)]
#[case::stream_that_is_a_document("stream", "application/json", 200)]
#[case::error("final", "text/html", 503)]
#[tokio::test]
async fn a_compressed_answer_is_not_asked_for_and_told_by_its_name(
    #[case] mode: &str,
    #[case] content_type: &'static str,
    #[case] status: u16,
) {
    let peer = Peer::start(move |seen| match seen.method.as_str() {
        "GET" => Answer::json(&streaming_card(&["ask"])),
        _ => {
            let headers =
                vec![("Content-Type", content_type.to_owned()), ("Content-Encoding", "GZip".to_owned())];
            Answer::Http(status, headers, b"\x1f\x8b\x08\x00".to_vec())
        }
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = if mode == "stream" { call.stream().await.result } else { call.await };
    let reply = reply.expect_error("agent_error").saying("`Content-Encoding: GZip`");
    assert_eq!(reply["error_info"]["http_status"].as_u64(), Some(status.into()).filter(|_| status != 200));
    for seen in peer.seen() {
        assert_eq!(seen.header("accept-encoding"), Some("identity"), "{} {}", seen.method, seen.path);
    }
}

#[tokio::test]
async fn a_compressed_card_is_told_by_its_name_and_what_is_no_compression_is_not() {
    let encoded = |encoding: &str| {
        let headers = vec![("Content-Encoding", encoding.to_owned())];
        Answer::Http(200, headers, card(&["ask"]).to_string().into())
    };
    let zipped = Peer::start(move |_| encoded("identity, br"));
    let plain = Peer::start(move |_| encoded("Identity"));
    let mistaken = Peer::start(move |_| encoded("utf-8"));
    let bridge = Bridge::of(attached("plain", &plain.url())).and(attached("mistaken", &mistaken.url()));
    let mut bridge = bridge.and(attached("zipped", &zipped.url())).start_early().await;
    bridge.until("plain", "ready").await;
    bridge.until("mistaken", "ready").await;
    let is_told =
        |object: &Value| object["last_error"].to_string().contains("Content-Encoding: identity, br");
    bridge.announced("zipped", is_told).await;
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
async fn a_state_may_be_its_number(#[case] number: u64, #[case] status: &str) {
    let peer = Peer::agent(move |seen| match seen.rpc_method().as_str() {
        "SendMessage" => Answer::result(seen, &task(number)),
        _ => Answer::result(seen, &task(number)["task"]),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let mode = if status == "WORKING" { "submit" } else { "final" };
    bridge.prompt("peer.ask", "x").header("A2A-Reply", mode).await.expect(status);
    bridge.get_task("peer", "t").await.expect(status);
}

#[tokio::test]
async fn a_role_may_be_its_number() {
    let said = |role: u64, text: &str| json!({"messageId": "m", "role": role, "parts": [{"text": text}]});
    let history = json!([said(2, "of an earlier turn"), said(1, "x"), said(2, "now")]);
    let task = json!({"task": {"id": "t", "status": {"state": 3}, "history": history}});
    let peer = Peer::agent(move |seen| Answer::result(seen, &task));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    assert_eq!(bridge.prompt("peer.ask", "x").await.expect("COMPLETED").message(), "now");
}
