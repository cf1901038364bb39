//! Requests about sessions.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::bridge::{Bridge, launched};
use crate::support::nats::NatsServer;
use crate::support::sessions::{Sessions, text};

pub async fn bridge(switches: &[&str]) -> Bridge {
    let nats = NatsServer::with_jetstream().await;
    Bridge::with(launched("demo", switches)).set("events", json!({})).start_on(nats).await
}

pub fn sessions(bridge: &Bridge) -> Sessions<'_> {
    Sessions { client: &bridge.client, prefix: &bridge.prefix, caller: None }
}

#[tokio::test]
async fn a_session_is_created_called_listed_and_read() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    let created = sessions
        .ok("create", json!({ "id": "s", "title": "Tides", "agent": "demo", "config": { "x": 1 } }))
        .await;
    for (key, value) in [("id", json!("s")), ("title", json!("Tides")), ("message_count", json!(0))] {
        assert_eq!(created[key], value, "{created}");
    }
    assert_eq!(created["config"], json!({ "x": 1 }));
    sessions.request("create", json!({ "id": "s" })).await.expect_error("invalid_request").saying("already");
    assert_eq!(sessions.say("demo.echo", "s", "hello").await, "hello");
    // A call creates its session, too.
    sessions.say("demo.echo", "other", "x").await;
    let list = sessions.ok("list", json!({})).await;
    let listed = list["sessions"].as_array().unwrap();
    assert_eq!(listed.len(), 2, "{list}");
    let own = listed.iter().find(|session| session["id"] == "s").unwrap();
    assert_eq!((&own["message_count"], &own["agent"]), (&json!(2), &json!("demo")), "{list}");
    assert_eq!(sessions.messages("s").await, ["user: hello", "assistant: hello"]);
    let session = sessions.get("s").await;
    let message = &session["messages"][1];
    assert!(message["run"].is_string() && message["at"].is_string(), "{session}");

    let events = sessions.events("s", 1000).await;
    let types: Vec<_> = events.iter().map(|event| text(&event["type"])).collect();
    assert_eq!(types[..3], ["session_created", "user_message", "agent_start"], "{types:?}");
    assert_eq!(*types.last().unwrap(), "agent_complete");
    for event in &events {
        for key in ["session", "index", "run", "n", "type", "at", "payload"] {
            assert!(event.get(key).is_some(), "{event}");
        }
        assert_eq!(event.as_object().unwrap().len(), 7, "{event}");
    }
    // Pages make the same.
    assert_eq!(sessions.events("s", 2).await, events);
    let runs = sessions.runs("s").await;
    assert_eq!(runs.len(), 1);
    let run = &runs[0];
    assert_eq!(
        (&run["agent"], &run["skill"], &run["status"]),
        (&json!("demo"), &json!("echo"), &json!("completed"))
    );
    for key in
        ["run", "task_id", "context_id", "input_snapshot_hash", "started_at", "completed_at", "card_hash"]
    {
        assert!(run[key].is_string(), "{key}: {run}");
    }
    assert_eq!(run["input_snapshot_hash"].as_str().unwrap().len(), 64);
    let of_run = events.iter().filter(|event| event["run"] == run["run"]);
    assert_eq!(
        run["events"].as_u64().unwrap(),
        of_run.map(|event| event["n"].as_u64().unwrap() + 1).max().unwrap()
    );
}

#[tokio::test]
async fn requests_that_are_wrong_are_refused() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    sessions.say("demo.echo", "s", "hello").await;
    for verb in ["get", "events", "fork", "rename", "delete", "redact", "runs"] {
        let body = match verb {
            "fork" => json!({ "id": "unknown", "at": 0, "reason": "branch" }),
            "rename" => json!({ "id": "unknown", "title": "x" }),
            "redact" => json!({ "id": "unknown", "index": 1 }),
            _ => json!({ "id": "unknown" }),
        };
        sessions.request(verb, body).await.expect_error("not_found");
        sessions.request(verb, json!({})).await.expect_error("invalid_request");
        sessions.request(verb, json!({ "id": "" })).await.expect_error("invalid_request");
        sessions.request(verb, json!([1])).await.expect_error("invalid_request");
    }
    for (verb, body) in [
        ("create", json!({ "id": "" })),
        ("create", json!({ "id": "x".repeat(257) })),
        ("create", json!({ "title": "x".repeat(501) })),
        ("create", json!({ "config": 1 })),
        ("create", json!({ "config": { "x": "x".repeat(16 << 10) } })),
        ("create", json!({ "unknown": 1 })),
        ("list", json!({ "cursor": "x" })),
        ("list", json!({ "since": "x" })),
        ("rename", json!({ "id": "s", "title": "x".repeat(501) })),
        ("rename", json!({ "id": "s", "title": "x", "revision": 1_000_000 })),
        ("delete", json!({ "id": "s", "revision": 1_000_000 })),
        ("fork", json!({ "id": "s", "at": 3, "reason": "branch" })),
        ("fork", json!({ "id": "s", "at": 2, "reason": "because" })),
        ("fork", json!({ "id": "s", "at": 2, "reason": "branch", "on_running": "wait" })),
        ("fork", json!({ "id": "s", "at": 2, "reason": "branch", "run": true })),
        ("fork", json!({ "id": "s", "at": 0, "reason": "branch", "run": true })),
        ("fork", json!({ "id": "s", "at": 2, "reason": "branch", "revision": 1_000_000 })),
    ] {
        sessions.request(verb, body.clone()).await.expect_error("invalid_request");
    }
    sessions.request("redact", json!({ "id": "s", "index": 999_999_000 })).await.expect_error("not_found");
    assert_eq!(sessions.ids().await, ["s"], "nothing was created");
    assert_eq!(sessions.messages("s").await.len(), 2);
}

#[tokio::test]
async fn a_list_shows_what_has_changed_since_a_revision() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    for number in 0..5 {
        sessions.ok("create", json!({ "id": format!("s{number}") })).await;
    }
    let page = sessions.ok("list", json!({ "limit": 3 })).await;
    assert_eq!(page["sessions"].as_array().unwrap().len(), 3);
    let rest = sessions.ok("list", json!({ "limit": 3, "cursor": page["cursor"] })).await;
    assert_eq!(rest["sessions"].as_array().unwrap().len(), 2);
    assert!(rest.get("cursor").is_none(), "{rest}");
    let since = &rest["revision"];
    let nothing = sessions.ok("list", json!({ "since": since })).await;
    assert_eq!(
        (&nothing["sessions"], &nothing["deleted"], &nothing["revision"]),
        (&json!([]), &json!([]), since)
    );
    let renamed = sessions.ok("rename", json!({ "id": "s1", "title": "New" })).await;
    assert_eq!(renamed["title"], "New");
    let deleted =
        sessions.ok("delete", json!({ "id": "s2", "revision": sessions.get("s2").await["revision"] })).await;
    assert_eq!(deleted["deleted"], true);
    let changed = sessions.ok("list", json!({ "since": since })).await;
    assert_eq!(changed["sessions"].as_array().unwrap().len(), 1, "{changed}");
    assert_eq!((&changed["sessions"][0]["title"], &changed["deleted"]), (&json!("New"), &json!(["s2"])));
    assert_eq!(sessions.ids().await.len(), 4);
    sessions.request("get", json!({ "id": "s2" })).await.expect_error("not_found");
    // The id can be used again.
    sessions.ok("create", json!({ "id": "s2" })).await;
    assert_eq!(sessions.say("demo.echo", "s2", "again").await, "again");
    assert_eq!(sessions.messages("s2").await, ["user: again", "assistant: again"]);
}

#[tokio::test]
async fn another_caller_finds_nothing() {
    let bridge = bridge(&[]).await;
    let alice = Sessions { caller: Some("alice"), ..sessions(&bridge) };
    let bob = Sessions { caller: Some("bob"), ..alice };
    alice.say("demo.echo", "s", "a secret of alice").await;
    let event = alice.events("s", 1000).await[1].clone();
    for (verb, body) in [
        ("get", json!({ "id": "s" })),
        ("events", json!({ "id": "s" })),
        ("events", json!({ "id": "s", "follow": true })),
        ("runs", json!({ "id": "s" })),
        ("rename", json!({ "id": "s", "title": "x" })),
        ("fork", json!({ "id": "s", "at": 0, "reason": "branch" })),
        ("redact", json!({ "id": "s", "index": event["index"] })),
        ("delete", json!({ "id": "s" })),
    ] {
        bob.request(verb, body).await.expect_error("not_found");
    }
    assert!(bob.ids().await.is_empty());
    // Two callers can use the same id.
    bob.say("demo.echo", "s", "hello").await;
    assert_eq!(bob.messages("s").await[0], "user: hello");
    bob.request("redact", json!({ "id": "s", "index": event["index"] })).await.expect_error("not_found");
    assert_eq!(alice.messages("s").await[0], "user: a secret of alice");
    let without = format!("{}.gw.sessions.list", bridge.prefix);
    crate::support::caller::Call::new(&bridge.client, without, json!({})).await.expect_error("forbidden");
}

#[tokio::test]
async fn events_can_be_followed_live() {
    let bridge = bridge(&["--token-delay", "10ms"]).await;
    let sessions = sessions(&bridge);
    sessions.say("demo.echo", "s", "before").await;
    let mut inbox = sessions.request("events", json!({ "id": "s", "follow": true })).begin().await;
    let first = inbox.reply().await;
    let mut events: Vec<Value> = first["events"].as_array().unwrap().clone();
    assert_eq!(events.last().unwrap()["type"], "agent_complete");
    let words = (0..30).map(|number| format!("word{number}")).collect::<Vec<_>>().join(" ");
    sessions.say("demo.stream", "s", &words).await;
    while events.iter().filter(|event| event["type"] == "agent_complete").count() < 2 {
        let more = inbox.reply().await;
        assert!(more.body["events"].is_array(), "{more:?}");
        events.extend(more["events"].as_array().unwrap().iter().cloned());
    }
    assert_eq!(events, sessions.events("s", 1000).await);
    // A caller that is gone is noticed.
    drop(inbox);
    let subject = format!("{}.sessions.events", bridge.prefix);
    let in_flight = async || {
        let stats = bridge.ask("STATS", "a2a-sessions").await?;
        let endpoint =
            stats["endpoints"].as_array()?.iter().find(|e| e["subject"] == subject.as_str())?.clone();
        (endpoint["data"]["in_flight"].as_u64().unwrap_or_default() == 0).then_some(())
    };
    crate::support::eventually::eventually_within(Duration::from_secs(40), in_flight).await;
}

#[tokio::test]
async fn questions_and_answers_belong_to_one_run_and_answers_are_never_stored() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    let body = json!({ "topic": "tides", "audience": "sailors", "meta": { "session_id": "s" } });
    let question = bridge.call("demo.report", body).await.expect("INPUT_REQUIRED");
    let runs = sessions.runs("s").await;
    assert_eq!(runs[0]["status"], "input_required", "{runs:?}");
    let question =
        bridge.answer("demo", &question.follow_up_id(), "a-secret-answer").await.expect("INPUT_REQUIRED");
    bridge.answer("demo", &question.follow_up_id(), "as a PDF").await.expect("COMPLETED");
    let runs = sessions.runs("s").await;
    assert_eq!((runs.len(), &runs[0]["status"]), (1, &json!("completed")), "{runs:?}");
    let session = sessions.get("s").await;
    let answer =
        session["messages"].as_array().unwrap().iter().rfind(|message| message["role"] == "user").unwrap();
    assert_eq!((&answer["redacted"], &answer["content"]), (&json!(true), &json!("")), "{session}");
    let log = crate::support::event_log::EventLog { client: &bridge.client, prefix: &bridge.prefix };
    for message in log.messages().await {
        assert!(
            !message.text.contains("a-secret-answer") && !message.text.contains("user_response"),
            "{message:?}"
        );
    }
    let roles: Vec<_> =
        session["messages"].as_array().unwrap().iter().map(|message| text(&message["role"])).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant", "user", "assistant"]);
}
