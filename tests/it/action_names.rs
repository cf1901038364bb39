//! Which skills become actions, and under which names.

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::bridge::AgentSettings;
use crate::support::{Answer, Bridge, Peer, attached, peer};

/// An agent with skills of these ids and names.
fn agent(skills: &[(&str, &str)]) -> Peer {
    let mut card = peer::card(&[]);
    card["skills"] =
        skills.iter().map(|(id, name)| json!({"id": id, "name": name, "description": "Does it"})).collect();
    Peer::agent_with_card(card, |seen| {
        let skill = seen.json()["params"]["message"]["metadata"]["skill_id"].clone();
        Answer::task(seen, "TASK_STATE_COMPLETED", skill.as_str().unwrap_or("none"))
    })
}

fn weather(skills: Value) -> (Peer, AgentSettings) {
    let peer = agent(&[("a-1", "Forecast"), ("b-2", "History"), ("c-3", "Alarm")]);
    let settings = attached("peer", &peer.url()).set("skills", skills);
    (peer, settings)
}

#[rstest]
#[case::all(json!({}), &["a-1", "b-2", "c-3"])]
#[case::allow_by_id(json!({"allow": ["a-1"]}), &["a-1"])]
#[case::allow_by_name(json!({"allow": ["Forecast", "History"]}), &["a-1", "b-2"])]
#[case::deny_by_id(json!({"deny": ["a-1"]}), &["b-2", "c-3"])]
#[case::deny_by_name(json!({"deny": ["Alarm"]}), &["a-1", "b-2"])]
#[case::deny_beats_allow(json!({"allow": ["a-1", "b-2"], "deny": ["History"]}), &["a-1"])]
#[case::rename_by_id(json!({"rename": {"a-1": "forecast"}}), &["forecast", "b-2", "c-3"])]
#[case::rename_by_name(json!({"rename": {"Alarm": "alarm"}}), &["a-1", "b-2", "alarm"])]
#[case::rename_onto_another(json!({"rename": {"b-2": "a-1"}}), &["a-1", "c-3"])]
#[case::rename_to_something_wild(json!({"rename": {"a-1": "x.>"}}), &["_xx_2E_3E", "b-2", "c-3"])]
#[case::none_left(json!({"allow": ["nobody"]}), &["prompt"])]
#[tokio::test]
async fn settings_select_and_rename_actions(#[case] skills: Value, #[case] expected: &[&str]) {
    let (_peer, settings) = weather(skills);
    let bridge = Bridge::with(settings).start().await;
    assert_eq!(bridge.actions("peer").await, expected);
    for action in expected {
        let reply = bridge.prompt(&format!("peer.{action}"), "x").await;
        reply.expect("COMPLETED");
    }
}

#[tokio::test]
async fn duplicate_skill_id_keeps_the_first_skill_and_logs_a_warning() {
    let peer = agent(&[("same", "First"), ("same", "Second"), ("other", "Third")]);
    let bridge = Bridge::with_peer(&peer).await;
    assert_eq!(bridge.actions("peer").await, ["same", "other"]);
    let info = bridge.info("peer").await;
    assert_eq!(info["endpoints"][4]["metadata"]["name"], "First");
    let log = bridge.log();
    assert!(log.lines().any(|line| line.contains("WARN") && line.contains("same")), "{log}");
}

#[tokio::test]
async fn skill_ids_are_escaped_to_distinct_subject_tokens() {
    let long = ["x".repeat(500), "x".repeat(501), "é.".repeat(200)];
    let mut ids = vec![
        "a.b",
        "a b",
        "a_b",
        "a-b",
        "*",
        ">",
        "a.>",
        "$SYS",
        "$JS.API.>",
        "_x",
        "_xa_2Eb",
        "ünïcode",
        "日本",
        "\u{0}\n\t",
        "provide_required_input",
        "cancel_task",
        "get_task",
        "card",
        "prompt",
        ".",
        "..",
        " ",
        "A-B",
        "a/b",
        "🦀",
    ];
    ids.extend(long.iter().map(String::as_str));
    let skills: Vec<_> = ids.iter().map(|id| (*id, *id)).collect();
    let peer = agent(&skills);
    let bridge = Bridge::with_peer(&peer).await;
    let info = bridge.info("peer").await;
    let endpoints: Vec<_> = info["endpoints"].as_array().unwrap().iter().skip(4).collect();
    assert_eq!(endpoints.len(), ids.len(), "{info}");
    let mut subjects = std::collections::HashSet::new();
    let start = bridge.subject("peer.");
    for (endpoint, id) in endpoints.iter().zip(&ids) {
        let subject = endpoint["subject"].as_str().unwrap();
        let token = subject.strip_prefix(&start).unwrap();
        assert!((1..=64).contains(&token.len()), "{token}");
        assert!(token.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-')), "{token}");
        assert!(subjects.insert(subject.to_owned()), "{subject} twice");
        assert!(!["provide_required_input", "cancel_task", "get_task"].contains(&token));
        assert_eq!(endpoint["metadata"]["a2a.skill"], *id);
        let reply = bridge.prompt(&format!("peer.{token}"), "x").await.expect("COMPLETED");
        assert_eq!(reply.message(), *id);
        assert_eq!(reply["task"]["skill"], *id);
    }
    // The built-in actions still work.
    bridge.get_task("peer", "never").await.expect_error("not_found");
}

#[tokio::test]
async fn agent_name_is_escaped_in_subjects() {
    let peer = agent(&[("ask", "Ask")]);
    let bridge = Bridge::with(attached("my agent.v2", &peer.url())).start_early().await;
    bridge.until("_xmy_20agent_2Ev2", "ready").await;
    let reply = bridge.prompt("_xmy_20agent_2Ev2.ask", "x").await.expect("COMPLETED");
    assert_eq!(reply["task"]["agent"], "my agent.v2");
    let info = bridge.info("_xmy_20agent_2Ev2").await;
    assert_eq!(info["metadata"]["a2a.agent"], "my agent.v2");
}

/// An agent with this many skills, `s0`, `s1`, …
fn agent_with_skills(count: usize) -> Peer {
    let ids: Vec<_> = (0..count).map(|number| format!("s{number}")).collect();
    let skills: Vec<_> = ids.iter().map(|id| (id.as_str(), id.as_str())).collect();
    agent(&skills)
}

#[rstest]
#[case::allow(json!({"allow": ["s9000"]}), &["s9000"])]
#[case::allow_and_rename(json!({"allow": ["s9000", "s9999"], "rename": {"s9999": "last"}}), &["s9000", "last"])]
#[case::allow_and_deny(json!({"allow": ["s9000", "s9001"], "deny": ["s9000"]}), &["s9001"])]
#[tokio::test]
async fn settings_select_among_all_skills_of_a_very_long_card(
    #[case] skills: Value,
    #[case] expected: &[&str],
) {
    let peer = agent_with_skills(10_000);
    let mut bridge = Bridge::with(attached("peer", &peer.url()).set("skills", skills)).start().await;
    assert_eq!(bridge.actions("peer").await, expected);
    let reply = bridge.prompt(&format!("peer.{}", expected[0]), "x").await.expect("COMPLETED");
    assert!(reply.message().starts_with("s9"), "{reply:?}");
    assert_eq!(bridge.info("peer").await["metadata"].get("a2a.skills_left_out"), None);
    let ready = bridge.announced("peer", |object| object["state"] == "ready").await;
    assert_eq!((ready.get("actions_left_out"), ready.get("skills_left_out")), (None, None));
    let card = bridge.card("peer").await;
    let shown: Vec<_> = card["skills"].as_array().unwrap().iter().map(|skill| &skill["id"]).collect();
    assert_eq!(shown.len(), expected.len(), "only published skills");
}

#[tokio::test]
async fn skills_over_the_action_limit_are_counted_in_info_and_registry() {
    let peer = agent_with_skills(10_000);
    let deny: Vec<_> = (0..100).map(|number| format!("s{number}")).collect();
    let settings = attached("peer", &peer.url()).set("skills", json!({"deny": deny}));
    let mut bridge = Bridge::with(settings).start().await;
    let actions = bridge.actions("peer").await;
    assert_eq!((actions.len(), actions[0].as_str(), actions[499].as_str()), (500, "s100", "s599"));
    assert_eq!(bridge.info("peer").await["metadata"]["a2a.skills_left_out"], "9400");
    let ready = bridge.announced("peer", |object| object["state"] == "ready").await;
    assert_eq!(ready["skills_left_out"], 9400);
    assert_eq!(ready["actions"].as_array().unwrap().len(), 500);
    assert_eq!(ready.get("actions_left_out"), None, "all published actions are listed");
    let log = bridge.log();
    assert!(log.contains("at most 500 actions; not publishing 9400 more skills"), "{log}");
    bridge.prompt("peer.s599", "x").await.expect("COMPLETED");
    assert!(bridge.prompt("peer.s600", "x").await.is_no_responders());
    assert_eq!(bridge.card("peer").await["skills"].as_array().unwrap().len(), 500);
}
