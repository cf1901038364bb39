//! What agents may write differently from most: all of it is legal HTTP, JSON or ProtoJSON.

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
