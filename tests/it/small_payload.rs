//! A NATS server with a small payload limit: the bridge splits or drops what does not fit, and keeps what callers
//! need.

use std::sync::atomic::{AtomicBool, Ordering};

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::frames::Stream;
use crate::support::peer::event;
use crate::support::{Answer, Bridge, NatsServer, Peer, attached};

/// A bridge on a server with a payload limit of 4096 bytes.
async fn bridge_of(peer: &Peer) -> Bridge {
    let server = NatsServer::start_configured("max_payload: 4096").await;
    Bridge::with(attached("peer", &peer.url())).start_on(server).await
}

/// The frames that a caller receives when the agent streams these results.
async fn stream_of(results: &[Value]) -> Stream {
    let events: Vec<u8> = results.iter().flat_map(event).collect();
    let peer = Peer::streaming_agent(move |seen| match seen.rpc_method().as_str() {
        "SendStreamingMessage" => Answer::Events(events.clone(), 1000),
        _ => Answer::task_not_found(seen),
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
async fn part_that_does_not_fit_is_sent_without_its_content(
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
    let filename = parts[1]["filename"].as_str().unwrap_or_default();
    assert!(filename == name || filename.starts_with(name) && filename.ends_with('…'), "{filename}");
}

#[rstest]
#[case::name(json!({"artifactId": "a", "name": "n".repeat(9_000)}))]
#[case::id(json!({"artifactId": "\u{1}".repeat(9_000)}))]
#[case::both(json!({"artifactId": "i".repeat(9_000), "name": "\"n".repeat(9_000)}))]
#[case::description(json!({"artifactId": "a", "description": "d".repeat(9_000)}))]
#[tokio::test]
async fn artifact_with_a_long_name_or_id_keeps_its_content(#[case] mut artifact: Value) {
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
    let received: String = frames.iter().filter_map(|frame| frame["parts"][0]["text"].as_str()).collect();
    assert!(received == text, "{} of {} bytes", received.len(), text.len());
    assert!(frames.iter().all(|frame| frame["artifact_id"] == frames[0]["artifact_id"]));
    assert_eq!(frames.last().unwrap()["last_chunk"], true);
}

#[tokio::test]
async fn ids_that_grow_by_escaping_leave_no_gap_in_the_frames() {
    let long = "\u{1}".repeat(1_024);
    let status =
        json!({"state": "TASK_STATE_FAILED", "message": {"parts": [{"text": "\u{2}".repeat(5_000)}]}});
    let update = json!({"statusUpdate": {"taskId": long, "contextId": long, "status": status}});
    let stream = stream_of(&[update]).await;
    assert_eq!(stream.all("task").len(), 1);
    let received: usize =
        stream.all("state").iter().filter_map(|frame| frame["message"].as_str()).map(str::len).sum();
    assert_eq!(received, 5_000);
    stream.result.expect_error("too_large");
}

#[rstest]
#[case::long_question("which? ".repeat(2_000), json!([]), "the rest of the text")]
#[case::escapes("\u{1}".repeat(3_000), json!([]), "the rest of the text")]
#[case::data("which?".to_owned(), json!([{"data": "d".repeat(5_000)}, {"raw": "QQ=="}]), "data parts")]
#[case::file("which?".to_owned(), json!([{"data": {"n": 1}}, {"raw": "A".repeat(8_000)}]), "files")]
#[case::everything("which? ".repeat(2_000), json!([{"data": {"n": 1}}, {"raw": "QQ=="}]), "the rest of the text")]
#[tokio::test]
async fn question_that_does_not_fit_keeps_its_follow_up(
    #[case] question: String,
    #[case] parts: Value,
    #[case] left_out: &str,
    #[values("INPUT_REQUIRED", "AUTH_REQUIRED")] status: &str,
) {
    let message = json!({"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": question}]});
    let artifact = json!({"artifactId": "draft", "parts": parts});
    let status_object = json!({"state": format!("TASK_STATE_{status}"), "message": message});
    let task = json!({"id": "t", "contextId": "c", "status": status_object, "artifacts": [artifact]});
    let peer = Peer::agent(move |seen| match seen.rpc_method().as_str() {
        "SendMessage" if seen.is_answer() => Answer::task(seen, "TASK_STATE_COMPLETED", "thanks"),
        "SendMessage" => Answer::result(seen, &json!({"task": task})),
        _ => Answer::result(seen, &task),
    });
    let bridge = bridge_of(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").only_reply().await;
    let streamed = bridge.prompt("peer.ask", "x").stream().await.result;
    let polled = bridge.get_task("peer", "t").await;
    for reply in [&reply, &streamed, &polled] {
        let reply = reply.clone().expect(status).saying("… (too large").saying(left_out);
        assert!(reply.message().starts_with(&question[..6]), "{}", reply.message());
        assert!(reply["data"]["expires_at"].is_string(), "{reply:?}");
        assert_eq!(reply["task"], json!({"id": "t", "context_id": "c", "agent": "peer", "skill": "ask"}));
    }
    bridge.answer("peer", &reply.follow_up_id(), "red").await.expect("COMPLETED");
}

#[tokio::test]
async fn updates_of_a_submitted_task_keep_the_follow_up_of_a_long_question() {
    let asked = AtomicBool::new(false);
    let peer = Peer::agent(move |seen| match seen.rpc_method().as_str() {
        "SendMessage" => Answer::task(seen, "TASK_STATE_WORKING", "on it"),
        _ if !asked.swap(true, Ordering::Relaxed) => Answer::task(seen, "TASK_STATE_WORKING", "on it"),
        _ => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", &"which? ".repeat(2_000)),
    });
    let bridge = bridge_of(&peer).await;
    let mut updates = bridge.task_updates().await;
    bridge.prompt("peer.ask", "x").mode("submit").await.expect("WORKING");
    let (_, question) = updates.until("INPUT_REQUIRED").await;
    assert!(question["data"]["follow_up_id"].is_string(), "{question}");
}
