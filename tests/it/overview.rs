//! What operators see at a glance: short reasons, replicas, hints, and `check`.

use serde_json::json;

use crate::support::commands::{CommandOutput, command, command_on, run};
use crate::support::peer::card;
use crate::support::processes::{free_port, program};
use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, launched, wait_until};

fn agents(bridge: &Bridge, arguments: &[&str]) -> CommandOutput {
    let mut command = command_on(&bridge.nats.url(), &["agents", "--prefix", &bridge.prefix]);
    run(command.args(arguments), "")
}

#[tokio::test]
async fn agents_are_listed_with_short_reasons_and_a_hint_at_what_is_broken() {
    let fatal =
        json!(["/bin/sh", "-c", "echo starting; echo 'FATAL: OPENAI_API_KEY is not set' >&2; exit 1"]);
    let port = free_port();
    let no_card = Peer::start(|_| Answer::text(500, "text/plain", "oops"));
    let no_token = Peer::start_with_probes(|seen| match seen.method.as_str() {
        "GET" => Answer::json(&card(&["ask"])),
        _ => Answer::text(401, "text/plain", "who are you?"),
    });
    let bridge = Bridge::with(launched("fine", &[]))
        .and(attached("fatal", "http://127.0.0.1:9").set("command", fatal).set("verify_port", false))
        .and(attached("gone", &format!("http://127.0.0.1:{port}")))
        .and(attached("no-card", &no_card.url()))
        .and(attached("no-token", &no_token.url()).set("bearer_token", "wrong-token"))
        .and(
            attached("missing", "http://127.0.0.1:10")
                .set("command", "no-such-program")
                .set("verify_port", false),
        )
        .start_early()
        .await;
    let expected = [
        ("fatal", "exit 1: FATAL: OPENAI_API_KEY is not set".to_owned()),
        ("gone", format!("connection refused :{port}")),
        ("no-card", "card: HTTP 500".to_owned()),
        ("no-token", "credentials rejected: HTTP 401".to_owned()),
        ("missing", "command not found: `no-such-program`".to_owned()),
    ];
    let has = |output: &CommandOutput, (name, reason): &(&str, String)| {
        output.out.lines().any(|line| line.starts_with(&format!("{name} ")) && line.ends_with(reason))
    };
    wait_until(|| async {
        let listed = agents(&bridge, &[]);
        expected.iter().all(|row| has(&listed, row))
    })
    .await;
    bridge.until("fine", "ready").await;
    let listed = agents(&bridge, &[]);
    assert!(!listed.out.contains("BRIDGE"), "{listed:?}");
    assert!(
        listed.err.contains(
            "5 agents have problems; `a2a-bridge agents show fatal gone missing no-card no-token --prefix "
        ),
        "{listed:?}"
    );
    let reasons = agents(&bridge, &["--json"]).json();
    assert_eq!(reasons[0]["reason"], "exit 1: FATAL: OPENAI_API_KEY is not set");

    let unknown = agents(&bridge, &["show", "fatl"]);
    assert_eq!(unknown.code, 69);
    assert!(unknown.err.contains("did you mean `fatal`?"), "{unknown:?}");
    let several = agents(&bridge, &["show", "gone", "missing", "fatl", "fatal"]);
    assert_eq!(several.code, 69);
    let shown: Vec<_> =
        several.out.lines().filter(|line| !line.is_empty() && !line.starts_with(' ')).collect();
    assert_eq!(shown, ["gone", "missing"], "up to the first name that is unknown: {several:?}");
}

#[tokio::test]
async fn lines_of_several_agents_have_their_names() {
    let bridge = Bridge::with(launched("one", &[])).and(launched("another", &[])).start().await;
    let url = bridge.nats.url();
    let logs = run(&mut command_on(&url, &["logs", "--prefix", &bridge.prefix]), "");
    for name in ["one     | listening on", "another | listening on"] {
        assert!(logs.out.lines().any(|line| line.contains(name)), "{logs:?}");
    }
}

#[tokio::test]
async fn replicas_are_listed_with_the_bridge_that_serves_each() {
    let agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("demo", &agent.url())).start().await;
    let settings = bridge.settings_file();
    let mut second = command(&["run", "--config"]).arg(settings).spawn().unwrap();
    wait_until(|| async { agents(&bridge, &["--json"]).json().as_array().unwrap().len() == 2 }).await;
    let listed = agents(&bridge, &[]);
    let ids: Vec<_> = listed.out.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(ids.first(), Some(&"BRIDGE"), "{listed:?}");
    let own = format!(":{}", second.id());
    assert!(ids.iter().any(|id| id.ends_with(&own)) && ids[1] != ids[2], "{listed:?}");
    second.kill().unwrap();
    second.wait().unwrap();
}

#[tokio::test]
async fn check_launches_each_agent_once_and_ends_it() {
    let agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("demo", &agent.url())).start().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("check.yaml");
    let demo = |port: u16, more: &str| {
        json!([program(), "demo-agent", "--port", port.to_string(), "--bearer", "right"])
            .as_array()
            .unwrap()
            .iter()
            .cloned()
            .chain(more.split_whitespace().map(Into::into))
            .collect::<Vec<_>>()
    };
    let ports = [free_port(), free_port(), free_port()];
    let url = |port: u16| format!("http://127.0.0.1:{port}");
    let settings = json!({"nats": {"url": bridge.nats.url()}, "agents": [
        {"name": "attached", "url": agent.url()},
        {"name": "right", "url": url(ports[0]), "command": demo(ports[0], ""), "bearer_token": "right"},
        {"name": "wrong", "url": url(ports[1]), "command": demo(ports[1], ""), "bearer_token": "wrong-token"},
        {"name": "exits", "url": url(ports[2]), "command": demo(ports[2], "--exit-at-start 3")},
    ]});
    std::fs::write(&file, settings.to_string()).unwrap();
    let output = run(command(&["check", "--launch", "--config"]).arg(&file), "");
    assert_eq!(output.code, 1, "{output:?}");
    let line = |begin: &str| output.out.lines().find(|line| line.starts_with(begin)).unwrap_or_default();
    assert!(line("✓ agent attached: ").contains("ok, A2A 1.0"), "{output:?}");
    assert!(line("✓ agent right: ").contains("ok, A2A 1.0"), "{output:?}");
    assert_eq!(line("✗ agent wrong: "), "✗ agent wrong: credentials rejected: HTTP 401", "{output:?}");
    assert!(line("✗ agent exits: ").contains("exit 3"), "{output:?}");
    assert_eq!(output.out.lines().last(), Some("4 agents: 2 ok, 2 failed"), "{output:?}");
    for port in ports {
        assert!(std::net::TcpListener::bind(("127.0.0.1", port)).is_ok(), "an agent is still running");
    }

    let output = run(command(&["check", "--config"]).arg(&file), "");
    assert!(output.out.contains("\n– agent right: not tried; "), "{output:?}");
    assert_eq!(output.out.lines().last(), Some("4 agents: 1 ok, 3 not tried, 0 failed"), "{output:?}");

    let report = run(command(&["check", "--launch", "--json", "--config"]).arg(&file), "").json();
    assert_eq!((&report["ok"], &report["nats"]["ok"]), (&json!(false), &json!(true)));
    let names: Vec<_> =
        report["agents"].as_array().unwrap().iter().map(|one| (&one["agent"], &one["ok"])).collect();
    let expected = [("attached", true), ("right", true), ("wrong", false), ("exits", false)];
    assert_eq!(json!(names), json!(expected));
    assert_eq!(report["agents"][2]["problem"], "the agent rejects the credentials of the bridge: HTTP 401");
    assert!(report["agents"][2]["advice"].as_str().unwrap().contains("`bearer_token`"));
}
