//! The front door of the Synadia Agent Protocol for NATS.

use std::time::Duration;

use async_nats::client::RequestErrorKind;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::agent_protocol::{PROMPT, RecordingProxy, Scene, attachment, prompt};
use crate::support::bridge::is_working;
use crate::support::demo_agent::request_agent;
use crate::support::processes::{free_port, program};
use crate::support::{
    Bridge, DemoAgent, NatsServer, eventually, eventually_eq, launched, wait_until, within_deadline,
};

#[tokio::test]
async fn ready_agent_can_be_discovered_and_replies_to_status() {
    let scene = Scene::start("").await;
    let info = scene.info().await.unwrap();
    assert_eq!(info["name"], "agents");
    let metadata = &info["metadata"];
    let expected = json!({"agent": "a2a", "owner": "acme", "session": "demo", "protocol_version": "0.3"});
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&metadata[key], value, "{key}");
    }
    eventually_eq(2, || async { scene.info().await.unwrap()["endpoints"].as_array().unwrap().len() }).await;
    let endpoints = scene.info().await.unwrap()["endpoints"].take();
    assert_eq!(
        endpoints,
        json!([
            {"name": "prompt", "subject": PROMPT, "queue_group": "agents",
             "metadata": {"max_payload": "1MB", "attachments_ok": "true"}},
            {"name": "status", "subject": "agents.status.a2a.acme.demo", "queue_group": "agents", "metadata": {}},
        ])
    );
    let status = scene.caller.request("agents.status.a2a.acme.demo", "".into()).await.unwrap();
    let status: Value = serde_json::from_slice(&status.payload).unwrap();
    assert_eq!(status["instance_id"], info["id"]);
    assert_eq!(status["session"], "demo");
    assert_eq!(status["interval_s"], 30);
}

#[tokio::test]
async fn agent_sends_heartbeats_and_disappears_when_it_ends() {
    let mut scene = Scene::start("card_refresh: 1s").await;
    let mut heartbeats = scene.caller.subscribe("agents.hb.*.*.*").await.unwrap();
    scene.caller.flush().await.unwrap();
    let first = scene.info().await.unwrap()["id"].as_str().unwrap().to_owned();

    scene.agent.kill();
    let ping = format!("$SRV.PING.agents.{first}");
    let ping = || async { scene.caller.request(ping.clone(), "".into()).await };
    eventually_eq(Some(RequestErrorKind::NoResponders), || async {
        ping().await.err().map(|error| error.kind())
    })
    .await;
    let refused = scene.caller.request(PROMPT, "hello".into()).await;
    assert_eq!(refused.unwrap_err().kind(), RequestErrorKind::NoResponders);

    scene.agent.run().await;
    let beat = loop {
        let beat = within_deadline(heartbeats.next()).await.unwrap();
        assert_eq!(beat.subject.as_str(), "agents.hb.a2a.acme.demo");
        let beat: Value = serde_json::from_slice(&beat.payload).unwrap();
        // The first instance may have sent one, too.
        if beat["instance_id"] != json!(first) {
            break beat;
        }
    };
    let info = eventually(|| scene.info()).await;
    assert_eq!(beat["instance_id"], info["id"]);
}

#[tokio::test]
async fn agent_name_with_capitals_gets_a_lower_case_subject() {
    let agent = DemoAgent::start(&[]).await;
    let scene = Scene::with(NatsServer::start().await, agent, "Demo", None, "").await;
    let info = scene.info().await.unwrap();
    assert_eq!(info["endpoints"][0]["subject"], "agents.prompt.a2a.acme._u_demo");
    assert_eq!(info["metadata"]["a2a.agent"], "Demo");
}

#[tokio::test]
async fn answer_is_streamed_between_an_ack_and_an_empty_message() {
    let scene = Scene::start("").await;
    let answer = scene.answer("stream one two three").await;
    assert_eq!(answer.chunks[0], json!({"type": "status", "data": "ack"}));
    assert_eq!(answer.texts, ["one ", "two ", "three"]);
    assert_eq!(answer.error, None);
    eventually_eq((1, 0), || scene.counts()).await;
}

#[rstest]
#[case("message hi", "hi")]
#[case("echo plain text", "echo plain text")]
#[case(r#"{"prompt": "echo in an envelope", "x": 1}"#, "echo in an envelope")]
#[tokio::test]
async fn every_kind_of_answer_arrives_once(#[case] prompt: &str, #[case] expected: &str) {
    let scene = Scene::start("").await;
    let answer = scene.answer(prompt).await;
    assert_eq!((answer.text.as_str(), answer.error), (expected, None));
}

#[tokio::test]
async fn acks_are_sent_during_silence_and_while_a_query_is_open() {
    let scene = Scene::start("stream_keepalive: 100ms").await;
    let mut stream = scene.prompt("report about tides").await;
    let query = stream.chunk_of("query").await;
    for _ in 0..3 {
        assert_eq!(stream.chunk().await, json!({"type": "status", "data": "ack"}));
    }
    stream.reply(&query, "PDF").await;
    assert_eq!(stream.rest().await.error, None);

    let answer = scene.answer("slow 1").await;
    let acks = answer.chunks.iter().filter(|chunk| chunk["data"] == "ack").count();
    assert!(acks > 3, "{:?}", answer.chunks);
}

#[tokio::test]
async fn queries_are_answered_on_the_same_stream() {
    let scene = Scene::start("").await;
    let mut stream = scene.prompt("report about tides").await;
    assert_eq!(stream.chunk().await, json!({"type": "status", "data": "ack"}));
    let first = stream.chunk().await;
    assert_eq!(first["type"], "query", "the question is not sent twice");
    let first = &first["data"];
    assert_eq!(first["prompt"], "Which format would you like: PDF or Markdown?");
    assert_eq!(first["attachments"][0]["filename"], "data.json");
    stream.reply(first, "on paper").await;

    let second = stream.chunk_of("query").await;
    assert_ne!(second["id"], first["id"]);
    assert!(second["prompt"].as_str().unwrap().starts_with("I cannot write that."));
    stream.reply(&second, json!({"prompt": "as PDF, please"})).await;

    let answer = stream.rest().await;
    assert_eq!(answer.error, None);
    assert_eq!(answer.text, "Report: report about tides");
    let [report] = answer.attachments.as_slice() else { panic!("{:?}", answer.attachments) };
    assert_eq!(report["filename"], "report.pdf");
    let bytes = STANDARD.decode(report["content"].as_str().unwrap()).unwrap();
    assert!(bytes.starts_with(b"%PDF"));
}

#[tokio::test]
async fn auth_required_is_a_query_unless_authentication_happens_outside_the_bridge() {
    let scene = Scene::start("").await;
    let mut stream = scene.prompt("auth to the archive").await;
    let query = stream.chunk_of("query").await;
    assert!(query["prompt"].as_str().unwrap().starts_with("Please sign in"));
    stream.reply(&query, "key").await;
    assert_eq!(stream.rest().await.text, "Signed in; the work is done.");

    let agent = DemoAgent::start(&["--auth-after", "200ms"]).await;
    let scene = Scene::of(agent, "").await;
    let mut stream = scene.prompt("auth to the archive").await;
    stream.chunk_of("query").await;
    assert_eq!(stream.rest().await.text, "Signed in elsewhere; the work is done.");
}

#[tokio::test]
async fn unanswered_query_ends_in_an_error_and_its_task_is_cancelled() {
    let (proxy, agent) = RecordingProxy::start().await;
    let server = NatsServer::start().await;
    let settings = "input_required_ttl: 300ms";
    let scene = Scene::with(server, agent, "demo", Some(&proxy.url), settings).await;
    let mut stream = scene.prompt("report about tides").await;
    stream.chunk_of("query").await;
    let (code, text) = stream.rest().await.error.unwrap();
    assert_eq!(code, 409);
    assert!(text.starts_with("no answer within 300ms"), "{text}");
    assert!(proxy.has_sent("CancelTask"));
}

#[tokio::test]
async fn malformed_answer_to_a_query_is_refused_and_its_task_is_cancelled() {
    let (proxy, agent) = RecordingProxy::start().await;
    let server = NatsServer::start().await;
    let scene = Scene::with(server, agent, "demo", Some(&proxy.url), "").await;
    let mut stream = scene.prompt("report about tides").await;
    let query = stream.chunk_of("query").await;
    stream.reply(&query, "{not json").await;
    assert_eq!(stream.rest().await.error.unwrap().0, 400);
    assert!(proxy.has_sent("CancelTask"));
}

#[tokio::test]
async fn open_query_ends_with_its_agent() {
    let agent = DemoAgent::new(&[]);
    let settings = format!("command: [{}, demo-agent, --port, '{}']", program(), agent.port());
    let scene = Scene::of(agent, &settings).await;
    let mut stream = scene.prompt("report about tides").await;
    stream.chunk_of("query").await;
    scene.answer("crash").await.error.unwrap();
    let (code, text) = stream.rest().await.error.unwrap();
    assert_eq!(
        (code, text.as_str()),
        (500, "the agent exited or was stopped while it waited for the answer")
    );
    scene.bridge.stop().await;
}

#[tokio::test]
async fn attachments_work_in_both_directions() {
    let scene = Scene::start("").await;
    let sent = [attachment("a.png", "iVBORwAB"), attachment("ä ü.bin", "AAEC")];
    let body = json!({"prompt": "echo look at these", "attachments": sent});
    let answer = scene.answer(body).await;
    assert_eq!(answer.error, None);
    assert_eq!(answer.text, "echo look at these");
    assert_eq!(answer.attachments, sent);

    let answer = scene.answer("file please").await;
    let names: Vec<_> = answer.attachments.iter().map(|one| &one["filename"]).collect();
    assert_eq!(names, ["a.png", "data.json"]);
    let data = STANDARD.decode(answer.attachments[1]["content"].as_str().unwrap()).unwrap();
    assert_eq!(data, br#"{"n":1,"f":1.5,"l":[1,null]}"#);
}

#[tokio::test]
async fn content_over_the_payload_limit_is_split_or_named() {
    let server = NatsServer::start_configured("max_payload: 16KB").await;
    let scene = Scene::with(server, DemoAgent::start(&[]).await, "demo", None, "").await;
    let endpoint = &scene.info().await.unwrap()["endpoints"][0];
    assert_eq!(endpoint["metadata"]["max_payload"], "16KB");
    let answer = scene.answer("big 100000").await;
    assert_eq!((answer.text.len(), answer.error), (100_000, None));
    assert!(answer.texts.len() > 5);

    // The agent sends four files back, and two fit into one message.
    let content = STANDARD.encode(vec![7; 2400]);
    let files: Vec<_> = (0..4).map(|n| attachment(&format!("{n}.bin"), &content)).collect();
    let answer = scene.answer(json!({"prompt": "echo files", "attachments": files})).await;
    assert_eq!(answer.error, None);
    assert_eq!(answer.attachments, files);

    let content = STANDARD.encode(vec![7; 12_080]);
    let large = json!({"prompt": "echo a file", "attachments": [attachment("large.bin", &content)]});
    let answer = scene.answer(large).await;
    assert!(answer.attachments.is_empty());
    assert!(
        answer.text.ends_with("large.bin: left out because 12080 bytes are too many for one message"),
        "{}",
        answer.text
    );
}

#[rstest]
#[case::nothing("")]
#[case::blank("  ")]
#[case::broken_json("{\"prompt\": ")]
#[case::no_prompt("{}")]
#[case::empty_prompt("{\"prompt\": \"\"}")]
#[case::prompt_of_another_type("{\"prompt\": [1]}")]
#[case::url_safe_base64(r#"{"prompt": "p", "attachments": [{"filename": "a", "content": "-_8="}]}"#)]
#[case::unpadded_base64(r#"{"prompt": "p", "attachments": [{"filename": "a", "content": "YQ"}]}"#)]
#[case::way_up(r#"{"prompt": "p", "attachments": [{"filename": "../a", "content": ""}]}"#)]
#[case::absolute(r#"{"prompt": "p", "attachments": [{"filename": "/etc/passwd", "content": ""}]}"#)]
#[case::backslash(r#"{"prompt": "p", "attachments": [{"filename": "a\\b", "content": ""}]}"#)]
#[case::dots(r#"{"prompt": "p", "attachments": [{"filename": "..", "content": ""}]}"#)]
#[tokio::test]
async fn invalid_prompt_gets_400_and_the_bridge_keeps_serving(#[case] body: &str) {
    let scene = Scene::start("").await;
    let (code, text) = scene.error(body).await;
    assert_eq!(code, 400, "{text}");
    assert!(!text.is_empty() && text.len() <= 200 && !text.contains('\n'), "{text}");
    assert_eq!(scene.answer("echo still here").await.text, "echo still here");
    eventually_eq((2, 1), || scene.counts()).await;
}

#[tokio::test]
async fn prompt_that_is_not_utf_8_gets_400() {
    let scene = Scene::start("").await;
    let answer = scene.prompt_bytes(vec![0xff, 0xfe]).await.rest().await;
    assert_eq!(answer.error.unwrap().0, 400);
}

#[tokio::test]
async fn prompt_over_the_announced_limit_gets_400() {
    // The bridge announces the limit of its own connection; a caller may connect with another one.
    let server = NatsServer::start_configured("max_payload: 16KB").await;
    let mut scene = Scene::with(server, DemoAgent::start(&[]).await, "demo", None, "").await;
    scene.server.reconfigure("max_payload: 1MB");
    let large = format!("echo {}", "x".repeat(20_000));
    // A client learns the limit when it connects.
    scene.caller = eventually(|| async {
        let caller = scene.server.connect().await;
        caller.max_payload().gt(&20_000).then_some(caller)
    })
    .await;
    let (code, text) = scene.error(large).await;
    assert_eq!(code, 400, "{text}");
}

#[rstest]
#[case("fail for lack of wind", 500, "planned failure: for lack of wind")]
#[case("reject this", 403, "planned rejection")]
#[case("http 401", 401, "")]
#[case("http 403", 403, "")]
#[case("http 429", 429, "")]
#[case("http 503", 500, "")]
#[case("html", 500, "")]
#[case(r#"{"prompt": "hi", "skill": "none"}"#, 404, "no such skill; available skills: echo")]
#[tokio::test]
async fn errors_have_the_codes_of_the_protocol(
    #[case] prompt: &str,
    #[case] expected: u16,
    #[case] beginning: &str,
) {
    let scene = Scene::start("skills: { deny: [hang] }").await;
    let answer = scene.answer(prompt).await;
    let (code, text) = answer.error.unwrap();
    assert_eq!(code, expected, "{text}");
    assert!(text.starts_with(beginning) && text.len() <= 200, "{text}");
    assert_eq!(answer.text, "", "the reason is sent once");
}

#[tokio::test]
async fn credentials_in_the_reason_of_a_failed_task_are_redacted() {
    const TOKEN: &str = "canary-bearer-1f0c";
    let agent = DemoAgent::start(&["--bearer", TOKEN]).await;
    let settings = format!("bearer_token: {TOKEN}");
    let scene = Scene::of(agent, &settings).await;
    let answer = scene.answer(format!("fail after Bearer {TOKEN}")).await;
    assert_eq!(answer.error, Some((500, "planned failure: after Bearer ***".to_owned())));
    assert!(!format!("{answer:?}").contains(TOKEN), "{answer:?}");
}

#[tokio::test]
async fn error_is_one_short_line_even_for_a_long_reason() {
    let scene = Scene::start("").await;
    let (_, text) = scene.error(format!("fail {}\n{}", "a".repeat(150), "é".repeat(150))).await;
    assert!(text.len() <= 200 && !text.contains('\n') && text.ends_with('…'), "{text}");
}

#[tokio::test]
async fn published_skill_can_be_selected() {
    let scene = Scene::start("skills: { deny: [hang], rename: { metadata: about } }").await;
    for name in ["about", "metadata", "Metadata"] {
        let answer = scene.answer(json!({"prompt": "hi", "skill": name})).await;
        assert_eq!(seen_by_agent(&answer.attachments)["metadata"]["skill_id"], "metadata");
    }
    let (code, _) = scene.error(json!({"prompt": "hi", "skill": "hang"})).await;
    assert_eq!(code, 404);
    let answer = scene.answer("metadata of a prompt to the whole agent").await;
    assert_eq!(seen_by_agent(&answer.attachments)["metadata"]["skill_id"], Value::Null);
}

#[tokio::test]
async fn prompts_of_one_session_share_a_context() {
    let scene = Scene::start("").await;
    let context = |session: Option<&'static str>| {
        let scene = &scene;
        async move {
            let mut body = json!({"prompt": "metadata"});
            if let Some(session) = session {
                body["session"] = json!(session);
            }
            let answer = scene.answer(body).await;
            seen_by_agent(&answer.attachments)["contextId"].as_str().unwrap().to_owned()
        }
    };
    let first = context(None).await;
    assert_eq!(context(None).await, first);
    let own = context(Some("mine")).await;
    assert_ne!(own, first);
    assert_eq!(context(Some("mine")).await, own);
    assert_ne!(context(Some("yours")).await, own);
}

/// The message as the agent received it: the skill `metadata` returns it.
fn seen_by_agent(attachments: &[Value]) -> Value {
    let content = attachments[0]["content"].as_str().unwrap();
    serde_json::from_slice(&STANDARD.decode(content).unwrap()).unwrap()
}

#[tokio::test]
async fn prompts_and_actions_share_max_in_flight_and_an_open_query_needs_no_slot() {
    let scene = Scene::start("max_in_flight: 1").await;
    let mut question = scene.prompt("report about tides").await;
    question.chunk_of("query").await;

    let mut slow = scene.prompt("slow 30").await;
    slow.chunk().await;
    assert_eq!(scene.error("echo hello").await.0, 429);
    let action = scene.caller.request("a2a.action.demo.echo", "hello".into()).await.unwrap();
    let action: Value = serde_json::from_slice(&action.payload).unwrap();
    assert_eq!(action["error_info"]["code"], "busy");
}

#[tokio::test]
async fn answer_to_a_query_waits_for_a_free_slot() {
    let scene = Scene::start("max_in_flight: 1\nstream_keepalive: 200ms").await;
    let mut question = scene.prompt("report about tides").await;
    let query = question.chunk_of("query").await;
    let mut slow = scene.prompt("slow 1").await;
    slow.chunk().await;
    question.reply(&query, "PDF").await;
    assert_eq!(slow.rest().await.text, "worked for 1 s");
    assert_eq!(question.rest().await.text, "Report: report about tides");
}

#[tokio::test]
async fn acks_are_sent_while_an_answer_waits_for_a_free_slot() {
    let scene = Scene::start("max_in_flight: 1\nstream_keepalive: 100ms").await;
    let mut question = scene.prompt("report about tides").await;
    let query = question.chunk_of("query").await;
    let mut slow = scene.prompt("slow 600").await;
    slow.chunk().await;
    question.reply(&query, "PDF").await;
    // Sent after the answer, so the bridge has received the answer when it refuses this prompt.
    assert_eq!(scene.error("echo hello").await.0, 429);
    question.drop_arrived();
    for _ in 0..3 {
        assert_eq!(question.chunk().await, json!({"type": "status", "data": "ack"}));
    }
    let task = working_task(&scene).await;
    request_agent(&scene.agent.url(), "CancelTask", json!({"id": task})).await;
    slow.rest().await.error.unwrap();
    assert_eq!(question.rest().await.text, "Report: report about tides");
}

#[tokio::test]
async fn answer_without_a_free_slot_is_busy_at_the_end_of_its_time() {
    let scene = Scene::start("max_in_flight: 1\ninput_required_ttl: 1s").await;
    let mut question = scene.prompt("report about tides").await;
    let query = question.chunk_of("query").await;
    let mut slow = scene.prompt("slow 600").await;
    slow.chunk().await;
    question.reply(&query, "PDF").await;
    let (code, text) = question.rest().await.error.unwrap();
    assert_eq!(code, 429, "{text}");
    assert!(text.contains("max_in_flight"), "{text}");
    let task = working_task(&scene).await;
    request_agent(&scene.agent.url(), "CancelTask", json!({"id": task})).await;
    slow.rest().await.error.unwrap();
}

#[tokio::test]
async fn reply_subject_of_a_query_takes_one_message() {
    let scene = Scene::start("max_in_flight: 1").await;
    let mut question = scene.prompt("report about tides").await;
    let query = question.chunk_of("query").await;
    let mut slow = scene.prompt("slow 1").await;
    slow.chunk().await;
    question.reply(&query, "PDF").await;
    let to = query["reply_subject"].as_str().unwrap().to_owned();
    let unheard = within_deadline(scene.caller.request(to, "Markdown".into())).await;
    assert_eq!(unheard.unwrap_err().kind(), RequestErrorKind::NoResponders);
    slow.rest().await;
    assert_eq!(question.rest().await.text, "Report: report about tides");
}

#[tokio::test]
async fn reply_subjects_of_the_protocol_itself_are_refused() {
    let scene = Scene::start("").await;
    // Not `agents.hb.>`: the bridge publishes its own heartbeats there.
    let elsewhere = "agents.hb.a2a.acme.other";
    let mut forged = scene.caller.subscribe(elsewhere).await.unwrap();
    for subject in [PROMPT, "agents.status.a2a.acme.demo"] {
        scene.caller.publish_with_reply(subject, elsewhere, "hello".into()).await.unwrap();
    }
    eventually_eq((1, 1), || scene.counts()).await;
    let received = tokio::time::timeout(Duration::from_millis(100), forged.next()).await;
    assert!(received.is_err(), "{received:?}");
}

/// The id of the one task that the agent works on.
async fn working_task(scene: &Scene) -> String {
    eventually(|| async {
        let tasks = request_agent(&scene.agent.url(), "ListTasks", json!({})).await;
        tasks["tasks"].as_array()?.iter().find(|task| is_working(task))?["id"].as_str().map(str::to_owned)
    })
    .await
}

#[tokio::test]
async fn prompt_whose_task_was_cancelled_ends_in_an_error() {
    let scene = Scene::start("").await;
    let mut slow = scene.prompt("slow 60").await;
    slow.chunk().await;
    let task = working_task(&scene).await;
    request_agent(&scene.agent.url(), "CancelTask", json!({"id": task})).await;
    let (code, text) = slow.rest().await.error.unwrap();
    assert_eq!(code, 500);
    assert!(text.contains("cancel"), "{text}");
    assert_eq!(scene.last_error().await, "500:task_canceled");
}

#[tokio::test]
async fn prompt_counts_as_call_in_flight() {
    let scene = Scene::start("").await;
    let agent = scene.bridge.agents().remove(0);
    assert_eq!(agent.calls.in_flight(), 0);
    let mut slow = scene.prompt("slow 1").await;
    slow.chunk().await;
    eventually_eq(1, || async { agent.calls.in_flight() }).await;
    slow.rest().await;
    eventually_eq(0, || async { agent.calls.in_flight() }).await;
    assert_eq!(agent.calls.outcomes()["COMPLETED"], 1, "and it is in the metrics");
}

#[tokio::test]
async fn busy_agent_is_not_restarted_under_a_prompt_and_metrics_count_it() {
    let port = free_port();
    let agent = launched("demo", &["--slow-card", "60s"])
        .set("liveness", json!({"interval": "200ms", "timeout": "100ms", "failures": 2}))
        .set("readiness", json!({"timeout": "100ms"}));
    let bridge = Bridge::with(agent)
        .nats("agent_protocol", json!({"owner": "acme"}))
        .set("metrics", json!({"listen": format!("127.0.0.1:{port}")}));
    let mut bridge = bridge.start_early().await;
    let ready = bridge.announced("demo", |object| object["state"] == "ready").await;
    assert_eq!(ready["restarts"], 0);
    let processes = bridge.launched();
    let metrics = || async {
        reqwest::get(format!("http://127.0.0.1:{port}/metrics")).await.unwrap().text().await.unwrap()
    };
    let answer = prompt(&bridge.client, "slow 3").await;
    wait_until(|| async { metrics().await.contains("a2a_bridge_calls_in_flight{agent=\"demo\"} 1") }).await;
    let answer = answer.rest().await;
    assert_eq!((answer.error, bridge.launched()), (None, processes));
    let text = metrics().await;
    let completed = "a2a_bridge_calls_total{agent=\"demo\",skill=\"prompt\",outcome=\"COMPLETED\"} 1";
    assert!(text.contains(completed), "{text}");
    // An idle agent that does not serve its card is hung.
    bridge.until_logged("failed 2 liveness checks in a row").await;
}
