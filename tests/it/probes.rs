//! Agents with a usable card whose responses to probes show that calls fail.

use rstest::rstest;
use serde_json::json;

use crate::support::commands::{command, command_on, run};
use crate::support::peer::card;
use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, launched};

#[rstest]
#[case::missing(None)]
#[case::wrong(Some("wrong"))]
#[tokio::test]
async fn agent_that_rejects_the_credentials_is_not_ready_and_fails_the_check(#[case] token: Option<&str>) {
    let agent = DemoAgent::start(&["--bearer", "right"]).await;
    let attached = |token: Option<&str>| match token {
        Some(token) => attached("demo", &agent.url()).set("auth", json!([{ "bearer": token }])),
        None => attached("demo", &agent.url()).set("auth", json!([])),
    };
    let mut bridge = Bridge::with(attached(token)).start_early().await;
    let seen = bridge.announced("demo", |object| object["state"] == "backing-off").await;
    assert_eq!(seen["last_error"], "the agent rejects the credentials of the bridge: HTTP 401");
    assert_eq!(seen["actions"], json!([]));
    assert!(!bridge.log().contains("confirmed by a probe"), "{}", bridge.log());

    let checked = run(command(&["check", "--config"]).arg(bridge.settings_file()), "");
    assert_eq!(checked.code, 1, "{checked:?}");
    assert!(checked.out.contains("HTTP 401") && checked.out.contains("`bearer_token`"), "{checked:?}");

    bridge.reload(|settings| settings["agents"][0]["auth"] = json!([{ "bearer": "right" }]));
    bridge.until("demo", "ready").await;
    let checked = run(command(&["check", "--config"]).arg(bridge.settings_file()), "");
    assert_eq!(checked.code, 0, "{checked:?}");
}

#[tokio::test]
async fn launched_agent_that_rejects_the_credentials_keeps_its_process() {
    let agent = launched("demo", &["--bearer", "right"]).set("auth", json!([{ "bearer": "wrong" }]));
    let mut bridge = Bridge::with(agent).start_early().await;
    let seen = bridge.announced("demo", |object| object["state"] == "unhealthy").await;
    assert_eq!(seen["last_error"], "the agent rejects the credentials of the bridge: HTTP 401");
    assert_eq!((bridge.launched().len(), &seen["restarts"]), (1, &json!(0)));
}

#[tokio::test]
async fn agent_that_fails_on_every_request_is_shown_with_its_problem() {
    let peer = Peer::start_with_probes(|seen| match seen.method.as_str() {
        "GET" => Answer::json(&card(&["ask"])),
        _ => Answer::text(500, "text/plain", "KeyError"),
    });
    let bridge = Bridge::with(attached("peer", &peer.url())).start().await;
    let text = "the agent responds to A2A requests with HTTP 500";
    let listed = run(&mut command_on(&bridge.nats.url(), &["agents", "--prefix", &bridge.prefix]), "");
    assert!(listed.out.contains("A2A requests: HTTP 500"), "{listed:?}");
    let checked = run(command(&["check", "--config"]).arg(bridge.settings_file()), "");
    assert_eq!(checked.code, 1, "{checked:?}");
    assert!(checked.out.contains(text), "{checked:?}");
}
