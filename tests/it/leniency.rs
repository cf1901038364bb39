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
async fn a_compressed_card_is_told_by_its_name_and_identity_is_no_compression() {
    let encoded = |encoding: &str| {
        let headers = vec![("Content-Encoding", encoding.to_owned())];
        Answer::Http(200, headers, card(&["ask"]).to_string().into())
    };
    let zipped = Peer::start(move |_| encoded("br"));
    let plain = Peer::start(move |_| encoded("Identity"));
    let bridge = Bridge::of(attached("plain", &plain.url())).and(attached("zipped", &zipped.url()));
    let mut bridge = bridge.start_early().await;
    bridge.until("plain", "ready").await;
    bridge
        .announced("zipped", |object| object["last_error"].to_string().contains("Content-Encoding: br"))
        .await;
}
