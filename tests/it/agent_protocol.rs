//! The front door for clients of the Synadia Agent Protocol for NATS.

use std::time::Duration;

use async_nats::client::RequestErrorKind;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::agent_protocol::{DemoAgent, PROMPT, RecordingProxy, SOON, Scene, attachment};
use crate::support::eventually::{eventually, eventually_eq};
use crate::support::nats::NatsServer;

#[tokio::test]
async fn an_agent_that_is_ready_can_be_found_and_asked_for_its_status() {
    let scene = Scene::start("").await;
    let info = scene.info().await.unwrap();
    assert_eq!(info["name"], "agents");
    let metadata = &info["metadata"];
    let expected = json!({"agent": "a2a", "owner": "acme", "session": "demo", "protocol_version": "0.3"});
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&metadata[key], value, "{key}");
    }
    eventually_eq(SOON, 2, || async { scene.info().await.unwrap()["endpoints"].as_array().unwrap().len() })
        .await;
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
async fn an_agent_comes_with_a_heartbeat_and_is_gone_when_it_has_ended() {
    let mut scene = Scene::start("card_refresh: 1s").await;
    let mut heartbeats = scene.caller.subscribe("agents.hb.*.*.*").await.unwrap();
    scene.caller.flush().await.unwrap();
    let first = scene.info().await.unwrap()["id"].as_str().unwrap().to_owned();

    let port = scene.agent.port().to_owned();
    scene.agent.end();
    let ping = format!("$SRV.PING.agents.{first}");
    let ping = || async { scene.caller.request(ping.clone(), "".into()).await };
    eventually_eq(SOON, Some(RequestErrorKind::NoResponders), || async {
        ping().await.err().map(|error| error.kind())
    })
    .await;
    let gone = scene.caller.request(PROMPT, "hello".into()).await;
    assert_eq!(gone.unwrap_err().kind(), RequestErrorKind::NoResponders);

    let _again = DemoAgent::start(&["--port", &port]);
    let beat = loop {
        let beat = tokio::time::timeout(SOON, heartbeats.next()).await.unwrap().unwrap();
        assert_eq!(beat.subject.as_str(), "agents.hb.a2a.acme.demo");
        let beat: Value = serde_json::from_slice(&beat.payload).unwrap();
        // The first instance may have had time for one too.
        if beat["instance_id"] != json!(first) {
            break beat;
        }
    };
    let info = eventually(SOON, || scene.info()).await;
    assert_eq!(beat["instance_id"], info["id"]);
}

#[tokio::test]
async fn an_agent_with_capitals_in_its_name_gets_a_lower_case_subject() {
    let server = NatsServer::start().await;
    let scene = Scene::with(server, DemoAgent::start(&[]), "Demo", None, "").await;
    let info = scene.info().await.unwrap();
    assert_eq!(info["endpoints"][0]["subject"], "agents.prompt.a2a.acme._u_demo");
    assert_eq!(info["metadata"]["a2a.agent"], "Demo");
}

#[tokio::test]
async fn an_answer_is_streamed_as_it_comes_between_an_ack_and_an_empty_message() {
    let scene = Scene::start("").await;
    let answer = scene.answer("stream one two three").await;
    assert_eq!(answer.chunks[0], json!({"type": "status", "data": "ack"}));
    assert_eq!(answer.texts, ["one ", "two ", "three"]);
    assert_eq!(answer.error, None);
    eventually_eq(SOON, (1, 0), || scene.counts()).await;
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
async fn silence_is_broken_by_acks_also_while_a_question_is_open() {
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
async fn questions_are_asked_and_answered_on_the_same_stream() {
    let scene = Scene::start("").await;
    let mut stream = scene.prompt("report about tides").await;
    assert_eq!(stream.chunk().await, json!({"type": "status", "data": "ack"}));
    let first = stream.chunk().await;
    assert_eq!(first["type"], "query", "the question is not told twice");
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
async fn a_sign_in_is_a_question_and_a_sign_in_elsewhere_needs_no_answer() {
    let scene = Scene::start("").await;
    let mut stream = scene.prompt("auth to the archive").await;
    let query = stream.chunk_of("query").await;
    assert!(query["prompt"].as_str().unwrap().starts_with("Please sign in"));
    stream.reply(&query, "key").await;
    assert_eq!(stream.rest().await.text, "Signed in; the work is done.");

    let agent = DemoAgent::start(&["--auth-after", "200ms"]);
    let scene = Scene::with(NatsServer::start().await, agent, "demo", None, "").await;
    let mut stream = scene.prompt("auth to the archive").await;
    stream.chunk_of("query").await;
    assert_eq!(stream.rest().await.text, "Signed in elsewhere; the work is done.");
}

#[tokio::test]
async fn a_question_without_an_answer_ends_in_an_error_and_its_task_is_cancelled() {
    let (proxy, agent) = RecordingProxy::start().await;
    let server = NatsServer::start().await;
    let settings = "input_required_ttl: 300ms";
    let scene = Scene::with(server, agent, "demo", Some(&proxy.url), settings).await;
    let mut stream = scene.prompt("report about tides").await;
    stream.chunk_of("query").await;
    let (code, text) = stream.rest().await.error.unwrap();
    assert_eq!(code, 409);
    assert!(text.starts_with("no answer within 300ms"), "{text}");
    assert!(proxy.has_received("CancelTask"));
}

#[tokio::test]
async fn a_malformed_answer_to_a_question_is_refused_and_its_task_is_cancelled() {
    let (proxy, agent) = RecordingProxy::start().await;
    let server = NatsServer::start().await;
    let scene = Scene::with(server, agent, "demo", Some(&proxy.url), "").await;
    let mut stream = scene.prompt("report about tides").await;
    let query = stream.chunk_of("query").await;
    stream.reply(&query, "{not json").await;
    assert_eq!(stream.rest().await.error.unwrap().0, 400);
    assert!(proxy.has_received("CancelTask"));
}

#[tokio::test]
async fn an_agent_that_ends_takes_its_open_questions_with_it() {
    let server = NatsServer::start().await;
    let program = env!("CARGO_BIN_EXE_a2a-bridge");
    // Its port is free for a moment only, but nobody else here asks for that one.
    let port = DemoAgent::start(&[]).port().to_owned();
    let settings = format!("command: [{program}, demo-agent, --port, '{port}']");
    let url = format!("http://127.0.0.1:{port}");
    let unused = DemoAgent::start(&[]);
    let scene = Scene::with(server, unused, "demo", Some(&url), &settings).await;
    let mut stream = scene.prompt("report about tides").await;
    stream.chunk_of("query").await;
    scene.answer("crash").await.error.unwrap();
    let (code, text) = stream.rest().await.error.unwrap();
    assert_eq!((code, text.as_str()), (500, "the agent ended while it waited for the answer"));
    scene.bridge.stop().await;
}

#[tokio::test]
async fn attachments_go_both_ways() {
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
async fn what_is_too_large_for_a_message_is_cut_or_named() {
    let server = NatsServer::start_configured("max_payload: 16KB").await;
    let scene = Scene::with(server, DemoAgent::start(&[]), "demo", None, "").await;
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
async fn a_prompt_that_is_wrong_gets_400_and_the_bridge_goes_on(#[case] body: &str) {
    let scene = Scene::start("").await;
    let (code, text) = scene.error(body).await;
    assert_eq!(code, 400, "{text}");
    assert!(!text.is_empty() && text.len() <= 200 && !text.contains('\n'), "{text}");
    assert_eq!(scene.answer("echo still here").await.text, "echo still here");
    eventually_eq(SOON, (2, 1), || scene.counts()).await;
}

#[tokio::test]
async fn bytes_that_are_no_text_get_400() {
    let scene = Scene::start("").await;
    let answer = scene.prompt_bytes(vec![0xff, 0xfe]).await.rest().await;
    assert_eq!(answer.error.unwrap().0, 400);
}

#[tokio::test]
async fn a_prompt_over_the_limit_that_was_told_gets_400() {
    // The bridge knows the limit of its connection; a caller elsewhere in a cluster may have another.
    let server = NatsServer::start_configured("max_payload: 16KB").await;
    let mut scene = Scene::with(server, DemoAgent::start(&[]), "demo", None, "").await;
    scene.server.reconfigure("max_payload: 1MB");
    let large = format!("echo {}", "x".repeat(20_000));
    // A connection learns the server's limit when it is made.
    scene.caller = eventually(SOON, || async {
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
    assert_eq!(answer.text, "", "the reason is told once");
}

#[tokio::test]
async fn a_failed_task_that_repeats_the_agents_credentials_does_not_betray_them() {
    const TOKEN: &str = "canary-bearer-1f0c";
    let agent = DemoAgent::start(&["--bearer", TOKEN]);
    let settings = format!("bearer_token: {TOKEN}");
    let scene = Scene::with(NatsServer::start().await, agent, "demo", None, &settings).await;
    let answer = scene.answer(format!("fail after Bearer {TOKEN}")).await;
    assert_eq!(answer.error, Some((500, "planned failure: after Bearer ***".to_owned())));
    assert!(!format!("{answer:?}").contains(TOKEN), "{answer:?}");
}

#[tokio::test]
async fn an_error_is_one_short_line_however_long_the_agents_reason() {
    let scene = Scene::start("").await;
    let (_, text) = scene.error(format!("fail {}\n{}", "a".repeat(150), "é".repeat(150))).await;
    assert!(text.len() <= 200 && !text.contains('\n') && text.ends_with('…'), "{text}");
}

#[tokio::test]
async fn a_skill_can_be_chosen_if_it_is_published() {
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
async fn prompts_to_one_session_go_on_in_one_context() {
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

/// The reply of the skill `metadata`.
fn seen_by_agent(attachments: &[Value]) -> Value {
    let content = attachments[0]["content"].as_str().unwrap();
    serde_json::from_slice(&STANDARD.decode(content).unwrap()).unwrap()
}

#[tokio::test]
async fn both_ways_to_an_agent_share_its_places_and_an_open_question_takes_none() {
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
async fn an_answer_waits_for_its_turn() {
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
async fn silence_is_broken_by_acks_while_an_answer_waits_for_its_turn() {
    let scene = Scene::start("max_in_flight: 1\nstream_keepalive: 100ms").await;
    let mut question = scene.prompt("report about tides").await;
    let query = question.chunk_of("query").await;
    let mut slow = scene.prompt("slow 600").await;
    slow.chunk().await;
    question.reply(&query, "PDF").await;
    // Sent after the answer, so that the bridge has the answer when it refuses this one.
    assert_eq!(scene.error("echo hello").await.0, 429);
    question.skip_arrived();
    for _ in 0..3 {
        assert_eq!(question.chunk().await, json!({"type": "status", "data": "ack"}));
    }
    let task = working_task(&scene).await;
    at_the_agent(&scene, "CancelTask", json!({"id": task})).await;
    slow.rest().await.error.unwrap();
    assert_eq!(question.rest().await.text, "Report: report about tides");
}

#[tokio::test]
async fn nobody_can_have_the_bridge_publish_heartbeats_or_prompts() {
    let server = NatsServer::start().await;
    let scene = Scene::with(server, DemoAgent::start(&[]), "demo", None, "").await;
    // Not `agents.hb.>`: the bridge's own heartbeats are published there at any time.
    let elsewhere = "agents.hb.a2a.acme.other";
    let mut forged = scene.caller.subscribe(elsewhere).await.unwrap();
    for subject in [PROMPT, "agents.status.a2a.acme.demo"] {
        scene.caller.publish_with_reply(subject, elsewhere, "hello".into()).await.unwrap();
    }
    eventually_eq(SOON, (1, 1), || scene.counts()).await;
    let heard = tokio::time::timeout(Duration::from_millis(100), forged.next()).await;
    assert!(heard.is_err(), "{heard:?}");
}

/// Calls the agent directly.
async fn at_the_agent(scene: &Scene, method: &str, params: Value) -> Value {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
    let request = reqwest::Client::new().post(&scene.agent.url).header("A2A-Version", "1.0").body(body);
    let answer = request.send().await.unwrap().bytes().await.unwrap();
    serde_json::from_slice::<Value>(&answer).unwrap()["result"].take()
}

/// The id of the one task that the agent works on.
async fn working_task(scene: &Scene) -> String {
    eventually(SOON, || async {
        let tasks = at_the_agent(scene, "ListTasks", json!({})).await;
        let is_working = |task: &&Value| task["status"]["state"] == "TASK_STATE_WORKING";
        tasks["tasks"].as_array()?.iter().find(is_working)?["id"].as_str().map(str::to_owned)
    })
    .await
}

#[tokio::test]
async fn a_prompt_whose_task_was_cancelled_says_so() {
    let scene = Scene::start("").await;
    let mut slow = scene.prompt("slow 60").await;
    slow.chunk().await;
    let task = working_task(&scene).await;
    at_the_agent(&scene, "CancelTask", json!({"id": task})).await;
    let (code, text) = slow.rest().await.error.unwrap();
    assert_eq!(code, 500);
    assert!(text.contains("cancel"), "{text}");
    assert_eq!(scene.last_error().await, "500:task_canceled");
}

#[tokio::test]
async fn a_prompt_is_counted_as_work_so_that_its_agent_is_not_taken_for_hung() {
    let scene = Scene::start("").await;
    let agent = scene.bridge.agents().remove(0);
    assert_eq!(agent.calls.in_flight(), 0);
    let mut slow = scene.prompt("slow 1").await;
    slow.chunk().await;
    eventually_eq(SOON, 1, || async { agent.calls.in_flight() }).await;
    slow.rest().await;
    eventually_eq(SOON, 0, || async { agent.calls.in_flight() }).await;
    assert_eq!(agent.calls.outcomes()["COMPLETED"], 1, "and it is in the metrics");
}
