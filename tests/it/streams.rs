//! Reply mode `stream`: every frame in order, up to one result.

use std::time::Duration;

use async_nats::client::RequestErrorKind;
use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::frames::Stream;
use crate::support::peer::{event, streaming_card};
use crate::support::proxy::PausableProxy;
use crate::support::{
    Answer, Bridge, DEADLINE, NatsServer, Peer, attached, eventually, launched, within_deadline,
};

#[rstest]
#[tokio::test]
async fn tokens_arrive_one_by_one_and_the_result_joins_them(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let stream = bridge.prompt("demo.stream", "one two three").stream().await;
    assert_eq!(stream.frames[0], ("status".to_owned(), json!("ack")));
    assert_eq!(stream.frames[1].0, "task");
    assert_eq!(stream.all("response"), ["one ", "two ", "three"]);
    assert_eq!(stream.all("artifact").len(), 3);
    assert_eq!(stream.all("artifact")[1]["append"], true);
    assert_eq!(stream.states().last(), Some(&"completed"));
    let result = stream.result.clone().expect("COMPLETED");
    assert_eq!(result.message(), "one two three");
    assert_eq!(stream.all("task")[0]["id"], result["task"]["id"]);
}

#[tokio::test]
async fn six_hundred_events_arrive_in_order_and_the_answer_once() {
    let bridge = Bridge::with_demo(&[]).await;
    let stream = bridge.prompt("demo.supervisor", "show argocd version").stream().await;
    // A task, 598 pieces of artifacts, and the final state.
    assert_eq!(stream.all("task").len() + stream.all("artifact").len() + 1, 600);
    let result = stream.result.clone().expect("COMPLETED");
    let text = |name: &str| -> String {
        let pieces = stream.all("artifact").into_iter().filter(|piece| piece["name"] == name);
        pieces.filter_map(|piece| piece["parts"][0]["text"].as_str()).collect()
    };
    assert_eq!(result.message(), text("streaming_result"));
    assert_eq!(stream.response(), result.message());
    assert!(text("execution_plan_streaming").starts_with('⟦'), "the plan is unchanged");
    assert!(!result.message().contains('⟦'), "the plan is not the answer");
}

/// An agent whose stream is these results.
fn streaming(results: &[Value]) -> Peer {
    let events: Vec<u8> = results.iter().flat_map(event).collect();
    Peer::streaming_agent(move |_| Answer::Events(events.clone(), usize::MAX))
}

#[tokio::test]
async fn text_that_only_resembles_a_repetition_is_sent_before_the_result() {
    let piece = |id: &str, text: &str| {
        let artifact = json!({"artifactId": id, "parts": [{"text": text}]});
        json!({"artifactUpdate": {"taskId": "t", "artifact": artifact, "append": true}})
    };
    let peer = streaming(&[
        piece("a", "ha"),
        piece("b", "ha"),
        piece("a", "ha"),
        json!({"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}),
    ]);
    let bridge = Bridge::with_peer(&peer).await;
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    let result = stream.result.clone().expect("COMPLETED");
    assert_eq!(result.message(), "haha\nha");
    assert_eq!(stream.response(), result.message());
}

#[tokio::test]
async fn frames_are_coalesced_on_a_slow_connection_without_loss() {
    // More than all buffers on the way hold; each piece has 2 KiB.
    const PIECES: usize = 6_000;
    let nats = NatsServer::start().await;
    let proxy = PausableProxy::start(nats.port());
    let pause = proxy.pauser();
    let piece = |number: usize| format!("{number:2048}");
    let mut results: Vec<_> = (0..PIECES)
        .map(|number| {
            let artifact = json!({"artifactId": "a", "parts": [{"text": piece(number)}]});
            json!({"artifactUpdate": {"taskId": "t", "artifact": artifact, "append": number > 0}})
        })
        .collect();
    results.push(json!({"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}));
    let events: Vec<u8> = results.iter().flat_map(event).collect();
    let peer = Peer::streaming_agent(move |_| {
        pause();
        Answer::Events(events.clone(), usize::MAX)
    });
    let bridge = Bridge::with(attached("peer", &peer.url()).set("max_response_size", "32MiB"))
        .nats("url", proxy.url())
        .start_on(nats)
        .await;
    let inbox = bridge.prompt("peer.ask", "x").mode("stream").begin().await;
    // The connection is full once the bridge uses no more CPU time; most of the answer is unread then.
    eventually(|| async { peer.calls("SendStreamingMessage").pop() }).await;
    let cpu_time = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", bridge.pid())).unwrap();
        stat.split(' ').skip(13).take(2).map(str::to_owned).collect::<Vec<_>>()
    };
    let mut samples = vec![cpu_time()];
    let give_up = std::time::Instant::now() + 3 * DEADLINE;
    while samples.len() < 4 {
        assert!(std::time::Instant::now() < give_up, "it never stops working");
        tokio::time::sleep(Duration::from_millis(250)).await;
        let now = cpu_time();
        samples.retain(|sample| *sample == now);
        samples.push(now);
    }
    proxy.resume();

    let stream = Stream::collect(inbox).await;
    let artifacts = stream.all("artifact");
    let parts: Vec<_> = artifacts.iter().flat_map(|frame| frame["parts"].as_array().unwrap()).collect();
    assert!(artifacts.len() < PIECES, "{} frames for {PIECES} pieces", artifacts.len());
    assert!(parts.iter().enumerate().all(|(number, part)| part["text"] == piece(number)));
    assert_eq!(parts.len(), PIECES);
    assert_eq!(stream.response(), (0..PIECES).map(piece).collect::<String>());
}

#[tokio::test]
async fn artifact_frames_keep_every_field() {
    let parts = json!([
        {"text": "# t", "metadata": {"pm": 1.0}, "mediaType": "text/markdown"},
        {"hologram": 1, "metadata": {"lost": true}},
        {"data": [1, 2.0]},
        {"url": "http://x/a.png", "filename": "a.png", "mediaType": "image/png", "metadata": {"alt": "A"}},
    ]);
    let artifact = json!({
        "artifactId": "a", "name": "n", "description": "d", "metadata": {"am": [1]}, "extensions": ["urn:x"], "parts": parts,
    });
    let done = json!({"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}});
    let v03 = json!({
        "kind": "artifact-update", "taskId": "t", "metadata": {"um": 1}, "append": true, "lastChunk": true,
        "artifact": {"artifactId": "b", "parts": [{"kind": "text", "text": "x", "metadata": {"pm": 2}}, {"kind": "text", "text": "y"}]},
    });
    let peer = streaming(&[
        json!({"artifactUpdate": {"taskId": "t", "artifact": artifact, "append": false, "lastChunk": true}}),
        v03,
        json!({"statusUpdate": done}),
    ]);
    let bridge = Bridge::with_peer(&peer).await;
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    assert_eq!(
        stream.all("artifact"),
        [
            &json!({
                "artifact_id": "a", "name": "n", "description": "d", "append": false, "last_chunk": true,
                "parts": [parts[0], parts[2], parts[3]],
                "metadata": {"am": [1]}, "extensions": ["urn:x"],
            }),
            &json!({
                "artifact_id": "b", "name": null, "append": true, "last_chunk": true,
                "parts": [{"text": "x", "metadata": {"pm": 2}}, {"text": "y"}],
                "update_metadata": {"um": 1},
            }),
        ]
    );
    assert_eq!(stream.result["artifacts"], json!([{"id": "a", "name": "n"}, {"id": "b", "name": null}]));
}

#[tokio::test]
async fn artifact_metadata_is_kept_when_split_or_dropped_if_it_does_not_fit() {
    let text = "long ".repeat(400_000);
    let large = "m".repeat(2 << 20);
    let artifact = |metadata: &str| json!({"artifactId": metadata.len().to_string(), "metadata": {"m": metadata}, "parts": [{"text": text, "mediaType": "text/x"}]});
    let peer = streaming(&[
        json!({"artifactUpdate": {"taskId": "t", "artifact": artifact("small")}}),
        json!({"artifactUpdate": {"taskId": "t", "artifact": artifact(&large)}}),
        json!({"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_FAILED"}}}),
    ]);
    let bridge = Bridge::with_peer(&peer).await;
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    let frames = stream.all("artifact");
    let of = |id: &str| -> Vec<&Value> {
        frames.iter().filter(|frame| frame["artifact_id"] == id).copied().collect()
    };
    let large = large.len().to_string();
    for id in ["5", &large] {
        let joined: String = of(id).iter().filter_map(|frame| frame["parts"][0]["text"].as_str()).collect();
        assert!(joined == text, "{} of {} bytes", joined.len(), text.len());
        assert_eq!(of(id)[0]["parts"][0]["mediaType"], "text/x");
    }
    assert_eq!(of("5")[0]["metadata"], json!({"m": "small"}));
    assert_eq!(of("5")[1].get("metadata"), None);
    assert!(of(&large).iter().all(|frame| frame.get("metadata").is_none()));
    assert_eq!(of(&large)[0]["omitted"], "too_large");
    assert!(frames.iter().filter(|frame| frame.get("omitted").is_some()).count() == 1);
}

#[tokio::test]
async fn end_of_another_task_does_not_end_the_call() {
    let status = |task: &str, state: &str, text: &str| {
        let message = json!({"messageId": text, "role": "ROLE_AGENT", "parts": [{"text": text}]});
        let state = format!("TASK_STATE_{state}");
        json!({"statusUpdate": {"taskId": task, "status": {"state": state, "message": message}}})
    };
    let piece = |task: &str, text: &str| json!({"artifactUpdate": {"taskId": task, "artifact": {"artifactId": text, "parts": [{"text": text}]}}});
    let peer = streaming(&[
        json!({"task": {"id": "ours", "status": {"state": "TASK_STATE_WORKING"}}}),
        status("other", "WORKING", "a helper works"),
        piece("other", "what it found"),
        status("other", "COMPLETED", "a helper is done"),
        json!({"task": {"id": "third", "status": {"state": "TASK_STATE_REJECTED"}}}),
        status("ours", "FAILED", "ours failed"),
    ]);
    let bridge = Bridge::with_peer(&peer).await;
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    let result = stream.result.clone().expect("FAILED");
    assert_eq!(result.task_id(), "ours");
    assert_eq!(stream.all("task").len(), 1);
    assert_eq!(stream.states(), ["working", "working", "failed"]);
    assert_eq!(stream.all("artifact").len(), 1, "results of other tasks are forwarded");
    assert_eq!(stream.all("response")[0], "what it found");
    assert_eq!(result.message(), "ours failed");
}

#[rstest]
#[tokio::test]
async fn every_final_state_ends_a_stream_with_one_result(
    #[values("1.0", "0.3")] protocol: &str,
    #[values(
        ("state", "completed", "COMPLETED"),
        ("state", "failed", "FAILED"),
        ("state", "canceled", "CANCELED"),
        ("state", "rejected", "REJECTED"),
        ("state", "input-required", "INPUT_REQUIRED"),
        ("state", "auth-required", "AUTH_REQUIRED"),
        ("state", "submitted", "COMPLETED"),
        ("state", "working", "COMPLETED"),
        ("message", "hello", "COMPLETED")
    )]
    row: (&str, &str, &str),
) {
    let (action, prompt, status) = row;
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let stream = bridge.prompt(&format!("demo.{action}"), prompt).stream().await;
    let result = stream.result.clone().expect(status);
    assert_eq!(stream.frames[0], ("status".to_owned(), json!("ack")));
    assert_eq!(result["data"]["follow_up_id"].is_string(), status.ends_with("REQUIRED"));
    if action == "state" {
        assert_eq!(stream.all("task")[0]["id"], result["task"]["id"]);
        // The text came only in states, so it is repeated as the answer.
        assert_eq!(stream.all("response").last(), Some(&&result["message"]));
    }
}

#[rstest]
#[tokio::test]
async fn error_ends_a_stream_with_status_and_result(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let stream = bridge.prompt("demo.rpc-error", "-32005").stream().await;
    assert_eq!(stream.outline(), "status result");
    let result = stream.result.expect_error("agent_error");
    assert_eq!(result["error_info"]["a2a_code"], -32005);
    let wrong = bridge.call("demo.echo", json!({"promt": "x"})).stream().await;
    assert_eq!(wrong.outline(), "status result");
    wrong.result.expect_error("invalid_request");
}

#[rstest]
#[tokio::test]
async fn follow_up_is_answered_on_a_stream(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let body = json!({"topic": "tides", "audience": "sailors"});
    let asked = bridge.call("demo.report", body).stream().await.result.expect("INPUT_REQUIRED");
    let done = bridge.answer("demo", &asked.follow_up_id(), "Markdown").stream().await;
    let result = done.result.clone().expect("COMPLETED");
    assert_eq!(result.task_id(), asked.task_id());
    assert!(done.states().contains(&"completed"), "{:?}", done.states());
}

#[tokio::test]
async fn agent_without_streaming_gives_the_same_frames_by_polling() {
    let folder = tempfile::tempdir().unwrap();
    let card = folder.path().join("card.json");
    let skills = json!([{"id": "slow", "name": "Slow", "description": "Slow", "tags": []}]);
    let interfaces = json!([{"url": "{url}", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}]);
    let content = json!({"name": "quiet", "description": "", "version": "1.0.0", "capabilities": {"streaming": false},
        "supportedInterfaces": interfaces, "skills": skills});
    std::fs::write(&card, content.to_string()).unwrap();
    let bridge = Bridge::with_demo(&["--card-file", card.to_str().unwrap()]).await;
    let stream = bridge.prompt("demo.slow", "1").stream().await;
    let result = stream.result.clone().expect("COMPLETED");
    assert_eq!(stream.all("task")[0]["id"], result["task"]["id"]);
    assert!(stream.states().contains(&"working"), "{:?}", stream.states());
    assert_eq!(stream.response(), result.message());
}

#[tokio::test]
async fn acknowledged_call_gets_the_instance_the_task_and_keep_alives_before_its_reply() {
    let agent = launched("demo", &["--ignore-blocking"]).set("stream_keepalive", "200ms");
    let bridge = Bridge::with(agent).start().await;
    let mut inbox = bridge.prompt("demo.slow", "1").header("A2A-Ack", "yes").begin().await;
    let ack = inbox.reply().await;
    assert_eq!(ack.body, json!({"type": "status", "data": "ack"}));
    assert_eq!(ack.header("A2A-Instance"), bridge.info("demo").await["id"].as_str());
    let (mut task, mut keep_alives, mut states) = (Value::Null, 0, Vec::new());
    let reply = loop {
        let message = inbox.reply().await;
        match message["type"].as_str() {
            Some("task") => task = message["data"]["id"].clone(),
            Some("status") => keep_alives += 1,
            Some("state") => states.push(message["data"]["state"].as_str().unwrap().to_owned()),
            Some(other) => panic!("a frame of type {other}"),
            None => break message,
        }
    };
    assert!(reply.is("COMPLETED"), "{reply:?}");
    assert_eq!(reply["task"]["id"], task);
    assert!(keep_alives >= 2, "{keep_alives}");
    assert!(states.contains(&"working".to_owned()), "{states:?}");
}

#[tokio::test]
async fn keep_alives_are_sent_during_silence() {
    let bridge = Bridge::with(launched("demo", &["--token-delay", "1s"]).set("stream_keepalive", "200ms"))
        .start()
        .await;
    let stream = bridge.prompt("demo.stream", "one two").stream().await;
    assert!(stream.keep_alives >= 2, "{stream:?}");
    assert_eq!(stream.all("status").len(), 1, "keep-alives have no number");
    assert_eq!(stream.result.message(), "one two");
}

#[rstest]
#[case("all", true, true)]
#[case("text", false, true)]
#[case("Artifacts", true, false)]
#[tokio::test]
async fn caller_selects_which_frames_carry_text(
    #[case] form: &str,
    #[case] artifacts: bool,
    #[case] responses: bool,
) {
    let bridge = Bridge::with_demo(&[]).await;
    let stream = bridge.prompt("demo.stream", "one two three").header("A2A-Frames", form).stream().await;
    assert_eq!(!stream.all("artifact").is_empty(), artifacts, "{}", stream.outline());
    assert_eq!(!stream.all("response").is_empty(), responses, "{}", stream.outline());
    for kind in ["status", "task", "state", "result"] {
        assert!(!stream.all(kind).is_empty(), "{kind} in {}", stream.outline());
    }
    if responses {
        assert_eq!(stream.response(), "one two three");
    }
    assert_eq!(stream.result.message(), "one two three");
}

#[tokio::test]
async fn files_and_data_are_artifacts_in_a_text_stream() {
    let bridge = Bridge::with_demo(&[]).await;
    let stream = bridge.prompt("demo.file", "please").header("A2A-Frames", "text").stream().await;
    let parts: Vec<_> =
        stream.all("artifact").into_iter().flat_map(|data| data["parts"].as_array()).flatten().collect();
    assert!(!parts.is_empty(), "{}", stream.outline());
    assert!(parts.iter().all(|part| part.get("text").is_none()), "{parts:?}");
}

#[tokio::test]
async fn unknown_frames_selection_is_refused() {
    let bridge = Bridge::with_demo(&[]).await;
    let stream = bridge.prompt("demo.stream", "one").header("A2A-Frames", "tokens").stream().await;
    let error = stream.result.expect_error("invalid_request");
    assert!(error.message().contains("A2A-Frames: tokens"), "{}", error.message());
}

#[tokio::test]
async fn idle_stream_times_out_and_its_task_is_cancelled() {
    let agent = launched("demo", &["--token-delay", "60s"]).set("stream_idle_timeout", "500ms");
    let bridge = Bridge::with(agent).start().await;
    let stream = bridge.prompt("demo.stream", "one two").stream().await;
    let result = stream.result.expect_error("timeout");
    assert_eq!(result["error_info"]["cancelled"], true);
    bridge.get_task("demo", &result.task_id()).await.expect("CANCELED");
}

#[tokio::test]
async fn streaming_task_can_be_cancelled() {
    let bridge = Bridge::with_demo(&[]).await;
    let mut inbox = bridge.prompt("demo.slow", "60").mode("stream").begin().await;
    let task = loop {
        let frame = inbox.reply().await;
        if frame["type"] == "task" {
            break frame["data"]["id"].as_str().unwrap().to_owned();
        }
    };
    let cancelled = bridge.cancel_task("demo", &task).await;
    assert_eq!((&cancelled["status"], &cancelled["success"]), (&json!("CANCELED"), &json!(true)));
    loop {
        let frame = inbox.reply().await;
        if frame["type"] == "result" {
            assert_eq!(frame["data"]["status"], "CANCELED");
            break;
        }
    }
}

#[tokio::test]
async fn disconnected_caller_cancels_the_task_if_requested() {
    let bridge = Bridge::with(launched("demo", &[]).set("stream_keepalive", "200ms")).start().await;
    let hanging = bridge.prompt("demo.hang", "x").mode("stream");
    drop(hanging.header("A2A-On-Disconnect", "cancel").begin().await);
    let streaming = bridge.prompt("demo.stream", &"word ".repeat(3000)).mode("stream");
    drop(streaming.header("A2A-On-Disconnect", "cancel").begin().await);
    let kept = bridge.prompt("demo.slow", "2").mode("stream");
    drop(kept.begin().await);
    // This task sends an update every half second; the bridge checks for the caller in between.
    let slow = bridge.prompt("demo.slow", "50").mode("stream");
    drop(slow.header("A2A-On-Disconnect", "cancel").begin().await);
    // Both, in whichever order they end.
    eventually(|| async {
        let tasks = bridge.tasks("demo").await;
        let has = |state: &str| tasks.iter().any(|task| task["status"]["state"] == state);
        (has("TASK_STATE_CANCELED") && has("TASK_STATE_COMPLETED")).then_some(())
    })
    .await;
}

#[tokio::test]
async fn only_keep_alives_have_a_reply_subject_and_it_takes_one_message() {
    let token = json!({"artifactUpdate": {"taskId": "t", "append": true, "artifact": {"artifactId": "a", "parts": [{"text": "x"}]}}});
    let peer = Peer::streaming_agent(move |seen| match seen.rpc_method().as_str() {
        "SendStreamingMessage" => Answer::Endless(event(&token), event(&token), Duration::from_millis(500)),
        _ => Answer::task(seen, "TASK_STATE_CANCELED", ""),
    });
    let bridge = Bridge::with(attached("peer", &peer.url()).set("stream_keepalive", "100ms")).start().await;
    let inbox = bridge.client.new_inbox();
    let mut frames = bridge.client.subscribe(inbox.clone()).await.unwrap();
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("A2A-Reply", "stream");
    headers.insert("A2A-On-Disconnect", "cancel");
    let body = json!({"prompt": "x"}).to_string();
    let subject = bridge.subject("peer.ask");
    bridge.client.publish_with_reply_and_headers(subject, inbox, headers, body.into()).await.unwrap();
    let mut probe = None;
    loop {
        let frame = within_deadline(frames.next()).await.unwrap();
        let is_numbered = frame.headers.is_some_and(|headers| headers.get("A2A-Seq").is_some());
        assert_ne!(is_numbered, frame.reply.is_some(), "{:?}", frame.payload);
        probe = frame.reply.or(probe);
        // The frame after a keep-alive.
        if is_numbered && probe.is_some() {
            break;
        }
    }
    let probe = probe.unwrap();
    for _ in 0..100 {
        bridge.client.publish(probe.clone(), "x".into()).await.unwrap();
    }
    let unheard = within_deadline(bridge.client.request(probe, "x".into())).await;
    assert_eq!(unheard.unwrap_err().kind(), RequestErrorKind::NoResponders);
    drop(frames);
    eventually(|| async { peer.calls("CancelTask").pop() }).await;
}

#[tokio::test]
async fn text_over_the_payload_limit_is_split_without_loss() {
    let bridge = Bridge::with_demo(&[]).await;
    let stream = bridge.prompt("demo.big", "2500000").stream().await;
    assert!(stream.all("response").len() > 2);
    assert_eq!(stream.response().len(), 2_500_000);
    let pieces: usize = stream
        .all("artifact")
        .iter()
        .filter_map(|piece| piece["parts"][0]["text"].as_str())
        .map(str::len)
        .sum();
    assert_eq!(pieces, 2_500_000);
    let result = stream.result.expect_error("too_large");
    assert!(!result.task_id().is_empty());
}

#[tokio::test]
async fn repeated_stream_request_gets_only_the_result() {
    let bridge = Bridge::with_demo(&[]).await;
    let call = || bridge.prompt("demo.stream", "one two").header("Nats-Msg-Id", "key-1");
    let first = call().stream().await;
    let again = call().stream().await;
    assert_eq!(again.outline(), "result");
    assert_eq!(again.result.body, first.result.body);
}

#[tokio::test]
async fn prefer_stream_lets_a_final_call_cancel_its_task_on_timeout() {
    let bridge = Bridge::with(launched("demo", &[]).set("prefer_stream", true)).start().await;
    let late = bridge.prompt("demo.slow", "60").header("A2A-Timeout", "700ms").only_reply().await;
    let late = late.expect_error("timeout");
    assert_eq!(late["error_info"]["cancelled"], true);
    let done = bridge.prompt("demo.echo", "hello").only_reply().await.expect("COMPLETED");
    assert_eq!(done.message(), "hello");
}

/// The recorded streams with their names and protocol versions.
fn recordings() -> Vec<(String, &'static str, Vec<u8>)> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/wire");
    let mut all = Vec::new();
    for folder in std::fs::read_dir(root).unwrap().flatten() {
        if !folder.path().is_dir() {
            continue;
        }
        let agent = folder.file_name().into_string().unwrap();
        let protocol = if agent.contains("sdk-1.") { "1.0" } else { "0.3" };
        for file in std::fs::read_dir(folder.path()).unwrap().flatten() {
            let name = file.file_name().into_string().unwrap();
            if name.ends_with(".sse") {
                all.push((format!("{agent}/{name}"), protocol, std::fs::read(file.path()).unwrap()));
            }
        }
    }
    all.sort();
    assert!(all.len() >= 30, "only {} recordings", all.len());
    all
}

/// An agent that replays a recording in chunks of this size, and knows no task afterwards.
fn replaying_agent(protocol: &'static str, recording: Vec<u8>, piece: usize) -> Peer {
    let card = match protocol {
        "1.0" => streaming_card(&["ask"]),
        _ => json!({
            "name": "Peer", "description": "", "version": "1.0.0", "protocolVersion": "0.3.0", "url": "/",
            "preferredTransport": "JSONRPC", "capabilities": {"streaming": true}, "skills": [{"id": "ask", "name": "ask"}],
        }),
    };
    Peer::agent_with_card(card, move |seen| match seen.rpc_method().to_lowercase().contains("stream") {
        true => Answer::Events(recording.clone(), piece),
        false => Answer::task_not_found(seen),
    })
}

/// The frames without what differs from call to call.
fn comparable(stream: &Stream) -> Vec<(String, Value)> {
    let mut frames = stream.frames.clone();
    for (_, data) in &mut frames {
        if let Some(task) = data.get_mut("task").and_then(Value::as_object_mut) {
            task.remove("agent");
        }
        if let Some(follow_up) = data.get_mut("data").and_then(Value::as_object_mut) {
            follow_up.remove("follow_up_id");
            follow_up.remove("expires_at");
        }
    }
    frames
}

#[tokio::test]
async fn recorded_streams_give_the_same_frames_for_any_chunk_size() {
    const PIECES: [usize; 3] = [1, 7, 64 << 10];
    let recordings = recordings();
    let mut peers = Vec::new();
    let mut bridge = Bridge::without_agents();
    for (index, (_, protocol, recording)) in recordings.iter().enumerate() {
        for piece in PIECES {
            let peer = replaying_agent(protocol, recording.clone(), piece);
            bridge = bridge.and(attached(&format!("r{index}p{piece}"), &peer.url()));
            peers.push(peer);
        }
    }
    let bridge = bridge.start().await;
    let mut outlines = Vec::new();
    for (index, (name, ..)) in recordings.iter().enumerate() {
        let calls = PIECES.map(|piece| bridge.prompt(&format!("r{index}p{piece}.ask"), "x").stream());
        let streams =
            tokio::time::timeout(Duration::from_secs(20), futures_util::future::join_all(calls)).await;
        let streams = streams.unwrap_or_else(|_| panic!("{name} does not end"));
        for (stream, piece) in streams.iter().zip(PIECES) {
            assert_eq!(comparable(stream), comparable(&streams[0]), "{name} in pieces of {piece}");
        }
        let (outline, status) = (streams[0].outline(), &streams[0].result["status"]);
        outlines.push(format!("{name}: {outline} -> {status}"));
    }
    insta::assert_snapshot!(outlines.join("\n"));
}
