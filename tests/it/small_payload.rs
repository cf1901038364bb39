//! A mesh that takes little at once: what does not fit is cut or left out, and what matters is told.

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::frames::Stream;
use crate::support::peer::{Answer, streaming_card};
use crate::support::{Bridge, NatsServer, Peer, attached};

/// A bridge on a server that takes messages of 4096 bytes.
async fn bridge_of(peer: &Peer) -> Bridge {
    let server = NatsServer::start_configured("max_payload: 4096").await;
    Bridge::of(attached("peer", &peer.url())).start_on(server).await
}

/// What a caller hears when the agent streams these results; gaps in the numbers are refused.
async fn stream_of(results: &[Value]) -> Stream {
    let event = |result| format!("data: {}\n\n", json!({"jsonrpc": "2.0", "id": 1, "result": result}));
    let events: String = results.iter().map(event).collect();
    let peer = Peer::start(move |seen| match seen.rpc_method().as_str() {
        "SendStreamingMessage" => Answer::Events(events.clone().into(), 1000),
        "" => Answer::json(&streaming_card(&["ask"])),
        _ => Answer::not_found(seen),
    });
    bridge_of(&peer).await.prompt("peer.ask", "x").stream().await
}

#[rstest]
#[case::data_uri(json!({"url": format!("data:,{}", "u".repeat(9_000)), "filename": "f", "mediaType": "m"}), "f", 9_006)]
#[case::bytes(json!({"raw": "A".repeat(8_000), "filename": "f"}), "f", 6_000)]
#[case::bytes_that_fit_but_for_their_frame(json!({"raw": "A".repeat(3_800), "filename": "f"}), "f", 2_850)]
#[case::data(json!({"data": "d".repeat(8_000)}), "", 8_002)]
#[case::file_name(json!({"url": "http://x", "filename": "n\n".repeat(4_000)}), "n\nn\n", 8)]
#[case::media_type(json!({"url": "http://x", "filename": "f", "mediaType": "m".repeat(9_000)}), "f", 8)]
#[tokio::test]
async fn a_part_that_does_not_fit_is_told_without_its_content(
    #[case] part: Value,
    #[case] name: &str,
    #[case] size: u64,
) {
    let artifact = json!({"artifactId": "a", "parts": [{"text": "before"}, part, {"text": "after"}]});
    let stream = stream_of(&[
        json!({"artifactUpdate": {"taskId": "t", "artifact": artifact, "lastChunk": true}}),
        json!({"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}),
    ])
    .await;
    let parts: Vec<_> = stream.all("artifact").iter().map(|frame| frame["parts"][0].clone()).collect();
    assert_eq!([&parts[0]["text"], &parts[2]["text"]], ["before", "after"]);
    assert_eq!((&parts[1]["omitted"], &parts[1]["size"]), (&json!("too_large"), &json!(size)));
    let told = parts[1]["filename"].as_str().unwrap_or_default();
    assert!(told == name || told.starts_with(name) && told.ends_with('…'), "{told}");
}

#[rstest]
#[case::name(json!({"artifactId": "a", "name": "n".repeat(9_000)}))]
#[case::id(json!({"artifactId": "\u{1}".repeat(9_000)}))]
#[case::both(json!({"artifactId": "i".repeat(9_000), "name": "\"n".repeat(9_000)}))]
#[case::description(json!({"artifactId": "a", "description": "d".repeat(9_000)}))]
#[tokio::test]
async fn an_artifact_with_a_long_name_or_id_keeps_its_content(#[case] mut artifact: Value) {
    let text = "\u{2}long ".repeat(1_000);
    artifact["parts"] = json!([{"text": text, "filename": "f".repeat(9_000)}]);
    let mut without_parts = artifact.clone();
    without_parts["parts"] = json!([]);
    let stream = stream_of(&[
        json!({"artifactUpdate": {"taskId": "t", "artifact": artifact}}),
        json!({"artifactUpdate": {"taskId": "t", "artifact": without_parts, "append": true, "lastChunk": true}}),
        json!({"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_FAILED"}}}),
    ])
    .await;
    let frames = stream.all("artifact");
    let told: String = frames.iter().filter_map(|frame| frame["parts"][0]["text"].as_str()).collect();
    assert!(told == text, "{} of {} bytes", told.len(), text.len());
    assert!(frames.iter().all(|frame| frame["artifact_id"] == frames[0]["artifact_id"]));
    assert_eq!(frames.last().unwrap()["last_chunk"], true);
}

#[tokio::test]
async fn ids_that_are_hardly_more_than_escapes_leave_no_gap() {
    let long = "\u{1}".repeat(1_024);
    let status =
        json!({"state": "TASK_STATE_FAILED", "message": {"parts": [{"text": "\u{2}".repeat(5_000)}]}});
    let update = json!({"statusUpdate": {"taskId": long, "contextId": long, "status": status}});
    let stream = stream_of(&[update]).await;
    assert_eq!(stream.all("task").len(), 1);
    let told: usize =
        stream.all("state").iter().filter_map(|frame| frame["message"].as_str()).map(str::len).sum();
    assert_eq!(told, 5_000);
    stream.result.expect_error("too_large");
}
