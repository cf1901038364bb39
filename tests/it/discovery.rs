//! Discovery of an agent on NATS: the service protocol, the registry, the card.

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::caller::Call;
use crate::support::{Answer, Bridge, Peer, attached, launched, peer};

fn endpoint<'a>(info: &'a Value, name: &str) -> &'a Value {
    let all = info["endpoints"].as_array().unwrap();
    all.iter().find(|endpoint| endpoint["name"] == name).unwrap_or_else(|| panic!("no {name} in {info}"))
}

fn keys(object: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[rstest]
#[tokio::test]
async fn info_describes_the_agent_and_its_actions(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol, "--skills", "echo,report"]).await;
    let info = bridge.info("demo").await;
    assert_eq!(info["type"], "io.nats.micro.v1.info_response");
    assert_eq!(info["name"], "demo");
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    let description = info["description"].as_str().unwrap();
    assert!(description.starts_with("The demo agent"), "{description}");
    assert!(description.ends_with("\nActions: echo, report"), "{description}");
    let metadata = &info["metadata"];
    assert_eq!(
        keys(metadata),
        [
            "a2a.agent",
            "a2a.binding",
            "a2a.bridge_id",
            "a2a.card_hash",
            "a2a.card_version",
            "a2a.chosen_because",
            "a2a.protocol_version",
            "a2a.restarts",
            "a2a.since",
            "a2a.state",
            "bridge",
            "bridge_instance"
        ]
    );
    assert_eq!(metadata["a2a.agent"], "demo");
    assert_eq!(metadata["a2a.state"], "ready");
    assert_eq!(metadata["a2a.protocol_version"], protocol);
    assert_eq!(metadata["a2a.binding"], "JSONRPC");
    assert_eq!(metadata["bridge"], concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")));

    let names: Vec<_> = info["endpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|endpoint| {
            assert_eq!(endpoint["queue_group"], "a2a");
            endpoint["name"].as_str().unwrap()
        })
        .collect();
    assert_eq!(names, ["provide_required_input", "cancel_task", "get_task", "card", "echo", "report"]);
    let report = endpoint(&info, "report");
    assert_eq!(report["subject"], bridge.subject("demo.report"));
    let about = &report["metadata"];
    assert_eq!(
        keys(about),
        ["a2a.skill", "description", "input_modes", "name", "output_modes", "params", "streaming", "tags"]
    );
    assert!(about.as_object().unwrap().values().all(Value::is_string));
    assert_eq!(about["a2a.skill"], "report");
    assert_eq!(about["name"], "Report writer");
    assert_eq!(about["tags"], r#"["writing","questions"]"#);
    assert_eq!(about["output_modes"], r#"["text/plain","text/markdown","application/pdf"]"#);
    assert_eq!(about["input_modes"], r#"["text/plain","application/json"]"#);
    assert_eq!(about["streaming"], "true");
    let params: Value = serde_json::from_str(about["params"].as_str().unwrap()).unwrap();
    assert_eq!(params["type"], "object");
    assert_eq!(params["oneOf"][0]["required"], json!(["topic", "audience"]));
    let params: Value =
        serde_json::from_str(endpoint(&info, "echo")["metadata"]["params"].as_str().unwrap()).unwrap();
    assert_eq!(params["required"], json!(["prompt"]));
    assert_eq!(endpoint(&info, "card")["subject"], format!("{}.card.demo", bridge.prefix));
}

#[tokio::test]
async fn ping_and_stats_reply_for_all_services_one_name_and_one_instance() {
    let bridge = Bridge::with(launched("demo", &[])).and(launched("other", &[])).start().await;
    let id = bridge.info("demo").await["id"].as_str().unwrap().to_owned();
    for name in ["demo".to_owned(), format!("demo.{id}")] {
        let ping = bridge.ask("PING", &name).await.unwrap();
        assert_eq!(ping["type"], "io.nats.micro.v1.ping_response");
        assert_eq!((&ping["name"], &ping["id"]), (&json!("demo"), &json!(id)));
        let stats = bridge.ask("STATS", &name).await.unwrap();
        assert_eq!(stats["type"], "io.nats.micro.v1.stats_response");
        assert!(stats["started"].as_str().unwrap().ends_with('Z'));
    }
    let mut all = Call::new(&bridge.client, "$SRV.PING".into(), "").begin().await;
    let mut names = [all.reply().await.body["name"].clone(), all.reply().await.body["name"].clone()];
    names.sort_by_key(Value::to_string);
    assert_eq!(names, [json!("demo"), json!("other")]);
    assert!(bridge.ask("PING", "demo.unknown").await.is_none());
}

#[tokio::test]
async fn registry_announces_every_state_change_and_the_stop() {
    let mut bridge = Bridge::with_demo(&["--skills", "echo,crash"]).await;
    let ready = bridge.announced("demo", |object| object["state"] == "ready").await;
    assert_eq!(
        keys(&ready),
        [
            "actions",
            "agent",
            "binding",
            "bridge",
            "bridge_instance",
            "card_hash",
            "chosen_because",
            "instance",
            "interval_s",
            "last_error",
            "protocol_version",
            "reason",
            "restarts",
            "since",
            "state"
        ]
    );
    let action = &ready["actions"][0];
    assert_eq!(keys(action), ["action", "description", "name", "params", "skill", "subject"]);
    assert_eq!(action["action"], "echo");
    assert_eq!(action["subject"], bridge.subject("demo.echo"));
    assert_eq!(action["params"]["required"], json!(["prompt"]));
    assert_eq!(ready["restarts"], 0);
    assert_eq!(ready["last_error"], Value::Null);
    assert_eq!(ready["interval_s"], 15);
    let info = bridge.info("demo").await;
    assert_eq!(ready["card_hash"], info["metadata"]["a2a.card_hash"]);
    assert_eq!(ready["instance"], info["id"]);

    bridge.prompt("demo.crash", "x").await;
    let failed = bridge.announced("demo", |object| object["state"] == "backing-off").await;
    assert!(failed["last_error"].as_str().unwrap().contains("exited with code 3"), "{failed}");
    assert_eq!(failed["actions"], json!([]));
    let restarted = bridge.announced("demo", |object| object["state"] == "ready").await;
    assert_eq!(restarted["restarts"], 1);

    bridge.stop().await;
    let stopped = bridge.announced("demo", |object| object["state"] == "stopped").await;
    assert_eq!(stopped["actions"], json!([]));
}

#[rstest]
#[tokio::test]
async fn card_has_the_1_0_form_for_every_protocol_version(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let card = bridge.card("demo").only_reply().await;
    assert_eq!(card["name"], "demo");
    let interface = &card["supportedInterfaces"][0];
    assert_eq!(interface["protocolBinding"], "JSONRPC");
    assert_eq!(interface["protocolVersion"], protocol);
    assert!(interface["url"].as_str().unwrap().starts_with("http://127.0.0.1:"));
    for old in ["url", "protocolVersion", "preferredTransport", "additionalInterfaces"] {
        assert!(card.body.get(old).is_none(), "{old} in {card:?}");
    }
    let skills = card["skills"].as_array().unwrap();
    let echo = skills.iter().find(|skill| skill["id"] == "echo").unwrap();
    assert!(echo["examples"][0].is_string(), "{echo}");
}

#[tokio::test]
async fn card_is_unavailable_until_it_was_read() {
    let bridge = Bridge::with(attached("demo", "http://127.0.0.1:9")).start_early().await;
    bridge.until("demo", "backing-off").await;
    let reply = bridge.card("demo").await.expect_error("agent_unavailable");
    assert_eq!(reply["error_info"]["retryable"], true);
}

#[tokio::test]
async fn card_from_the_settings_replaces_the_agents_own() {
    let peer = Peer::start(|seen| match seen.method.as_str() {
        "GET" => Answer::text(404, "text/plain", "no card"),
        _ => Answer::task(seen, "TASK_STATE_COMPLETED", "done"),
    });
    let mut card = peer::card(&["ask"]);
    card["version"] = "not semantic".into();
    let bridge = Bridge::with(attached("peer", &peer.url()).set("card", card)).start().await;
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(bridge.info("peer").await["version"], "0.0.0");
    assert_eq!(peer.requests().iter().filter(|seen| seen.method == "GET").count(), 0);
}

#[rstest]
#[case("--only-old-card-path")]
#[case("--only-new-card-path")]
#[tokio::test]
async fn card_is_found_at_either_well_known_path(#[case] switch: &str) {
    let bridge = Bridge::with_demo(&[switch]).await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn card_can_be_at_another_path_and_require_credentials() {
    let peer = Peer::start(|seen| match (seen.method.as_str(), seen.path.as_str()) {
        ("GET", "/my/card.json") if seen.header("authorization") == Some("Bearer secret") => {
            Answer::json(&peer::card(&["ask"]))
        }
        ("GET", _) => Answer::text(401, "text/plain", "who are you?"),
        _ => Answer::task(seen, "TASK_STATE_COMPLETED", "done"),
    });
    let agent = attached("peer", &peer.url()).set("card_path", "/my/card.json").set("bearer_token", "secret");
    let bridge = Bridge::with(agent).start().await;
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
}
