//! The HTTP gateway: every route, against a bridge with a real agent.

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::gateway::{Fetch as _, Gateway, SseEvent, token};
use crate::support::{Bridge, Peer, attached, eventually, launched, wait_until};

async fn gateway_with(settings: Value) -> (Bridge, Gateway) {
    let bridge = Bridge::with_demo(&[]).await;
    let gateway = Gateway::start(&bridge, settings).await;
    (bridge, gateway)
}

async fn gateway() -> (Bridge, Gateway) {
    gateway_with(json!({})).await
}

#[tokio::test]
async fn a_call_over_http_has_the_reply_of_the_call_over_nats() {
    let (bridge, gateway) = gateway().await;
    let reply = gateway.call("demo/echo", "hello").reply().await.status(200);
    assert_eq!((&reply.json["status"], &reply.json["message"]), (&json!("COMPLETED"), &json!("hello")));
    assert_eq!(reply.header("content-type"), "application/json");
    let over_nats = bridge.prompt("demo.echo", "hello").await.body;
    let fields = |reply: &Value| reply.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(fields(&reply.json), fields(&over_nats));

    let prompt = gateway.post("agents/demo/skills/echo", &json!("a string is the prompt")).reply().await;
    assert_eq!(prompt.status(200).json["message"], "a string is the prompt");
    // A task that failed has a result, which is no error of HTTP.
    let failed = gateway.call("demo/fail", "no wind").reply().await.status(200);
    assert_eq!(failed.json["status"], "FAILED");
    gateway
        .post("agents/demo/skills/echo", &json!({"unknown": 1}))
        .reply()
        .await
        .error(400, "invalid_request");
    gateway.call("demo/rpc-error", "-32005").reply().await.error(502, "agent_error");
    gateway.call("demo/no-such-skill", "x").reply().await.error(404, "not_found");
    // Built-in actions are not skills.
    gateway
        .post("agents/demo/skills/get_task", &json!({"task_id": "x"}))
        .reply()
        .await
        .error(404, "not_found");
    gateway.call("nobody/echo", "x").reply().await.error(404, "not_found");
    gateway.get("agents/nobody").reply().await.error(404, "not_found");
    gateway.get("agents/nobody/tasks/1").reply().await.error(404, "not_found");
}

#[tokio::test]
async fn an_agent_that_is_away_is_unavailable() {
    let mut bridge = Bridge::with_demo(&[]).await;
    let gateway = Gateway::start(&bridge, json!({})).await;
    gateway.post("agents/demo/stop", &json!({})).reply().await.status(200);
    bridge.until_no_responders("demo.echo").await;
    let reply = gateway.call("demo/echo", "x").reply().await.error(503, "agent_unavailable");
    assert_eq!(reply.json["error_info"]["retryable"], true);
    bridge.stop().await;
    gateway.call("demo/echo", "x").reply().await.error(503, "agent_unavailable");
    gateway.get("agents/demo/tasks").reply().await.error(503, "agent_unavailable");
}

#[tokio::test]
async fn a_stream_has_the_frames_as_events() {
    let (bridge, gateway) = gateway().await;
    let events = gateway.call("demo/stream", "one two three").events().await.all().await;
    let names: Vec<_> = events.iter().map(|event| event.event.as_str()).collect();
    assert_eq!((names.first(), names.last()), (Some(&"status"), Some(&"result")), "{names:?}");
    let ids: Vec<_> = events.iter().map(|event| event.id.unwrap()).collect();
    assert_eq!(ids, (0..ids.len() as u64).collect::<Vec<_>>());
    let frames = bridge.prompt("demo.stream", "one two three").stream().await.frames;
    let types: Vec<_> = frames.iter().map(|(kind, _)| kind.clone()).collect();
    assert_eq!(names, types);
    let is_response = |event: &&SseEvent| event.event == "response";
    let text: String =
        events.iter().filter(is_response).map(|event| event.data["data"].as_str().unwrap()).collect();
    assert_eq!(text, "one two three");
    assert_eq!(events.last().unwrap().data["data"]["status"], "COMPLETED");

    let request = gateway.call("demo/stream", "one two").header("a2a-frames", "text");
    let events = request.events().await.all().await;
    assert!(events.iter().all(|event| event.event != "artifact"), "{events:?}");
    // As on NATS, the stream begins before the request is checked.
    let refused =
        gateway.post("agents/demo/skills/stream", &json!({"unknown": 1})).events().await.all().await;
    assert_eq!(refused.last().unwrap().data["data"]["error_info"]["code"], "invalid_request");
    let absent = gateway.call("nobody/stream", "x").header("accept", "text/event-stream");
    absent.reply().await.error(404, "not_found");
    let by_header = gateway.call("demo/echo", "x").header("a2a-reply", "stream").events().await.all().await;
    assert_eq!(by_header.last().unwrap().event, "result");
}

#[tokio::test]
async fn agents_are_listed_and_shown() {
    let bridge = Bridge::with(launched("demo", &[])).and(launched("a b", &[])).start_early().await;
    for token in ["demo", "_xa_20b"] {
        bridge.until(token, "ready").await;
    }
    let gateway = Gateway::start(&bridge, json!({})).await;
    let list = gateway.get("agents").reply().await.status(200);
    let names: Vec<_> = list.json["agents"].as_array().unwrap().iter().map(|one| &one["agent"]).collect();
    assert_eq!(names, ["a b", "demo"]);
    assert_eq!(list.json["agents"][1]["state"], "ready");
    assert!(list.json["agents"][1]["skills"].as_array().unwrap().contains(&json!("echo")));
    let tag = list.header("etag").to_owned();
    gateway.get("agents").header("if-none-match", tag).reply().await.status(304);

    let shown = gateway.get("agents/demo").reply().await.status(200).json;
    assert_eq!((&shown["state"], &shown["card"]["name"]), (&json!("ready"), &json!("demo")));
    let skills = shown["skills"].as_array().unwrap();
    let report = skills.iter().find(|skill| skill["action"] == "report").unwrap();
    assert!(report["params"]["properties"].get("topic").is_some(), "{report}");
    assert_eq!(shown["reports"][0]["agent"], "demo", "without tokens, everyone is an operator");
    // An agent has its name, and the name that is used in subjects.
    for name in ["a%20b", "_xa_20b"] {
        assert_eq!(gateway.get(&format!("agents/{name}")).reply().await.status(200).json["agent"], "a b");
        gateway.call(&format!("{name}/echo"), "x").reply().await.status(200);
    }
    let stats = gateway.get("stats").reply().await.status(200).json;
    let services = stats["services"].as_array().unwrap();
    assert_eq!(services.len(), 2, "{stats}");
    let echo = services[0]["endpoints"].as_array().unwrap().iter().find(|one| one["name"] == "echo").unwrap();
    assert_eq!((&services[0]["agent"], &echo["num_requests"]), (&json!("a b"), &json!(2)));
}

#[tokio::test]
async fn operators_control_agents_and_read_their_output() {
    let (bridge, gateway) = gateway().await;
    let stopped = gateway.post("agents/demo/stop", &json!({})).reply().await.status(200).json;
    assert_eq!(stopped["reports"][0]["state"], "stopped");
    let started = gateway.post("agents/demo/start", &json!({})).reply().await.status(200).json;
    assert_eq!(started["reports"][0]["state"], "ready");
    let restarted = gateway.post("agents/demo/restart", &json!({})).reply().await.status(200).json;
    assert_eq!(restarted["reports"][0]["state"], "ready");
    bridge.until("demo", "ready").await;
    let logs = eventually(|| async {
        let logs = gateway.get("agents/demo/logs?lines=5").reply().await.status(200).json;
        (!logs["instances"][0]["lines"].as_array()?.is_empty()).then_some(logs)
    })
    .await;
    assert!(logs["instances"][0]["lines"].as_array().unwrap().len() <= 5, "{logs}");
    gateway.get("agents/demo/logs?lines=0").reply().await.error(400, "invalid_request");
    gateway.get("agents/demo/logs?lines=x").reply().await.error(400, "invalid_request");
    gateway.post("agents/nobody/stop", &json!({})).reply().await.error(404, "not_found");
}

#[tokio::test]
async fn the_bridge_refuses_to_restart_an_attached_agent() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url())).start().await;
    let gateway = Gateway::start(&bridge, json!({})).await;
    let refused = gateway.post("agents/peer/restart", &json!({})).reply().await.error(400, "invalid_request");
    assert!(refused.json["message"].as_str().unwrap().contains("cannot restart"), "{}", refused.json);
}

#[tokio::test]
async fn tasks_are_submitted_listed_shown_and_canceled() {
    let (_bridge, gateway) = gateway().await;
    let submitted = gateway.call("demo/slow", "600").header("a2a-reply", "submit").reply().await.status(200);
    assert_eq!(submitted.json["status"], "WORKING");
    let id = submitted.json["task"]["id"].as_str().unwrap().to_owned();
    let list = gateway.get("agents/demo/tasks").reply().await.status(200).json;
    assert_eq!((&list["tasks"][0]["id"], &list["tasks"][0]["open"]), (&json!(id), &json!(true)), "{list}");
    let task = format!("agents/demo/tasks/{id}");
    assert_eq!(gateway.get(&task).reply().await.status(200).json["status"], "WORKING");
    let canceled = gateway.post(&format!("{task}/cancel"), &json!({})).reply().await.status(200);
    assert_eq!((&canceled.json["success"], &canceled.json["status"]), (&json!(true), &json!("CANCELED")));
    gateway.post(&format!("{task}/cancel"), &json!({})).reply().await.error(409, "not_cancelable");
    gateway.get("agents/demo/tasks/unknown").reply().await.error(404, "not_found");
    gateway.get("agents/demo/tasks?limit=501").reply().await.error(400, "invalid_request");
}

#[rstest]
#[case(false)]
#[case(true)]
#[tokio::test]
async fn a_question_is_answered_by_its_follow_up_id(#[case] is_stream: bool) {
    let (_bridge, gateway) = gateway().await;
    let body = json!({"topic": "tides", "audience": "sailors"});
    let asked = gateway.post("agents/demo/skills/report", &body).reply().await.status(200).json;
    assert_eq!(asked["status"], "INPUT_REQUIRED");
    let path = format!("agents/demo/follow-ups/{}", asked["data"]["follow_up_id"].as_str().unwrap());
    for invalid in [json!({}), json!({"response": 1}), json!({"response": "PDF", "x": 1}), json!("PDF")] {
        let refused = gateway.post(&path, &invalid).reply().await.error(400, "invalid_request");
        assert!(!refused.text().contains("PDF"), "an answer may be a secret");
    }
    let answer = gateway.post(&path, &json!({"response": "PDF"}));
    let reply = match is_stream {
        true => answer.events().await.all().await.pop().unwrap().data["data"].clone(),
        false => answer.reply().await.status(200).json,
    };
    assert_eq!(reply["status"], "COMPLETED", "{reply}");
    gateway.post(&path, &json!({"response": "PDF"})).reply().await.error(409, "follow_up_used");
    let unknown = "agents/demo/follow-ups/00000000-0000-4000-8000-000000000000";
    gateway.post(unknown, &json!({"response": "PDF"})).reply().await.error(404, "not_found");
}

#[tokio::test]
async fn an_idempotency_key_runs_the_agent_once() {
    let (_bridge, gateway) = gateway().await;
    let call = || gateway.call("demo/echo", "x").header("idempotency-key", "k-1").reply();
    let first = call().await.status(200);
    assert_eq!(call().await.status(200).json["task"], first.json["task"]);
    let other = gateway.call("demo/echo", "y").header("idempotency-key", "k-1").reply().await;
    other.error(400, "invalid_request");
    gateway.call("demo/slow", "5").header("a2a-timeout", "100ms").reply().await.error(504, "timeout");
    gateway.call("demo/echo", "x").header("a2a-timeout", "soon").reply().await.error(400, "invalid_request");
}

#[tokio::test]
async fn the_api_describes_itself_without_other_hosts() {
    let (_bridge, gateway) = gateway().await;
    let document = gateway.get("/openapi.json").reply().await.status(200);
    assert_eq!(document.json["openapi"], "3.1.0");
    for path in ["/api/v1/agents/{agent}/skills/{skill}", "/api/v1/files/{name}", "/readyz"] {
        assert!(document.json["paths"].get(path).is_some(), "{path}");
    }
    let tag = document.header("etag").to_owned();
    gateway.get("/openapi.json").header("if-none-match", tag).reply().await.status(304);
    let compressed = gateway.get("/openapi.json").header("accept-encoding", "gzip").reply().await.status(200);
    assert_eq!(compressed.header("content-encoding"), "gzip");
    assert!(compressed.bytes.len() < document.bytes.len() / 2);
    let docs = gateway.get("/docs").reply().await.status(200);
    assert!(docs.header("content-security-policy").contains("default-src 'none'"));
    assert!(docs.text().contains("/api/v1/agents/{agent}/skills/{skill}"));
    assert!(!docs.text().contains("http://") && !docs.text().contains("https://"));
    assert_eq!(gateway.get("/healthz").reply().await.status(200).text(), "ok\n");
    let metrics = gateway.get("/metrics").reply().await.status(200).text();
    assert!(metrics.contains("a2a_gateway_requests_total{route=\"/docs\",status=\"200\"} 1\n"), "{metrics}");
    assert!(metrics.contains("a2a_gateway_nats_connected 1\n") && metrics.ends_with("# EOF\n"), "{metrics}");
    gateway.get("/nothing").reply().await.error(404, "not_found");
    gateway.get("login").reply().await.error(405, "invalid_request");
}

#[tokio::test]
async fn the_gateway_can_run_inside_the_bridge() {
    let token = token("alice", json!({}));
    let listen = format!("127.0.0.1:{}", crate::support::processes::free_port());
    let mut bridge = Bridge::with(launched("demo", &[]))
        .set("gateway", json!({"listen": listen, "tokens": [token]}))
        .start()
        .await;
    let call = |name: &str| {
        let request = reqwest::Client::new().post(format!("http://{listen}/api/v1/agents/demo/skills/echo"));
        request.header("content-type", "application/json").body(r#""hi""#).by(name)
    };
    // The bridge may have announced its agent before the gateway listened.
    assert_eq!(call("alice").reply().await.status(200).json["message"], "hi");
    call("bob").reply().await.error(401, "unauthorized");
    bridge.reload(|settings| {
        settings["gateway"]["tokens"] = json!([self::token("bob", json!({}))]);
    });
    wait_until(|| async { call("bob").reply().await.status == 200 }).await;
    call("alice").reply().await.error(401, "unauthorized");
    bridge.stop().await;
    assert!(bridge.log().contains("gateway stopped"), "{}", bridge.log());
}

#[tokio::test]
async fn a_stop_ends_streams_with_a_hint_and_lets_calls_finish() {
    let (_bridge, mut gateway) = gateway().await;
    let mut stream = gateway.call("demo/slow", "600").events().await;
    assert_eq!(stream.next().await.unwrap().event, "status");
    let call = gateway.call("demo/slow", "1").send();
    let (call, _) = tokio::join!(call, async {
        wait_until(|| async { gateway.get("agents/demo/tasks").reply().await.text().contains("slow") }).await;
        gateway.signal(nix::sys::signal::Signal::SIGTERM);
    });
    assert_eq!(call.unwrap().status(), 200, "a call in flight finishes");
    let mut last = String::new();
    while let Some(event) = stream.next().await {
        last = event.text;
    }
    assert!(last.starts_with("retry: "), "{last}");
    assert!(gateway.stop().await.success());
}

#[tokio::test]
async fn a_bridge_that_is_killed_ends_its_streams_with_a_result() {
    let bridge = Bridge::with_demo(&[]).await;
    let gateway = Gateway::start(&bridge, json!({})).await;
    let mut stream = gateway.call("demo/slow", "600").events().await;
    assert_eq!(stream.next().await.unwrap().event, "status");
    bridge.signal(nix::sys::signal::Signal::SIGKILL);
    let mut last = SseEvent::default();
    // The gateway asks for the bridge after 16 s of silence.
    let read = async {
        while let Some(event) = stream.next().await {
            last = event;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), read).await.expect("the stream ends");
    assert_eq!(last.event, "result", "{last:?}");
    assert_eq!(last.data["data"]["error_info"]["code"], "outcome_unknown");
    bridge.forget();
}
