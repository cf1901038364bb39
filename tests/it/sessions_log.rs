//! Sessions as views of the log: at several replicas, with many events, and made again.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::sessions::{bridge, sessions};
use crate::support::bridge::{Bridge, launched};
use crate::support::event_log::EventLog;
use crate::support::mesh::Mesh;
use crate::support::nats::NatsServer;
use crate::support::sessions::{Sessions, text};
use crate::support::{DemoAgent, attached};

async fn api(bridge: &Bridge, operation: &str, body: Value) -> Value {
    let response =
        bridge.client.request(format!("$JS.API.{operation}"), body.to_string().into()).await.unwrap();
    serde_json::from_slice(&response.payload).unwrap()
}

/// Bytes in the stream and in the bucket of sessions.
async fn stored_bytes(bridge: &Bridge) -> (u64, u64) {
    let bytes = async |stream: String| {
        api(bridge, &format!("STREAM.INFO.{stream}"), json!({})).await["state"]["bytes"].as_u64().unwrap()
    };
    (bytes(format!("{}_events", bridge.prefix)).await, bytes(format!("KV_{}_sessions", bridge.prefix)).await)
}

/// Appends a conversation to the log of a session that exists, as calls would.
async fn append_conversation(bridge: &Bridge, session: &str, messages: usize) {
    let log = EventLog { client: &bridge.client, prefix: &bridge.prefix };
    let last = log.messages().await.pop().unwrap();
    for number in 0..messages {
        let (kind, payload) = match number % 2 {
            0 => ("user_message", json!({ "content": format!("question {number}") })),
            _ => (
                "agent_complete",
                json!({ "success": true, "status": "COMPLETED", "message": format!("answer {number}") }),
            ),
        };
        let event =
            json!({ "n": number, "type": kind, "at": "2026-01-01T00:00:00.000Z", "payload": payload });
        let batch = json!({ "v": 1, "session": session, "run": null, "call": 0, "frames": [0, 0, 0], "events": [event] });
        bridge.client.publish(last.subject.clone(), batch.to_string().into()).await.unwrap();
    }
    bridge.client.flush().await.unwrap();
}

#[tokio::test]
async fn sessions_are_known_from_the_log_alone() {
    let bridge = bridge(&["--token-delay", "1ms"]).await;
    let sessions = sessions(&bridge);
    sessions.ok("create", json!({ "id": "s", "title": "Old", "config": { "k": 1 } })).await;
    sessions.say("demo.stream", "s", "one two three").await;
    sessions.say("demo.echo", "s", "four").await;
    sessions.ok("rename", json!({ "id": "s", "title": "New" })).await;
    let fork = json!({ "id": "s", "at": 2, "reason": "user_edit", "content": "vier" });
    let child = text(&sessions.ok("fork", fork).await["id"]).to_owned();
    let view = async |id: &str| {
        let mut session = sessions.get(id).await;
        session["revision"] = Value::Null;
        (session, sessions.runs(id).await, sessions.events(id, 1000).await)
    };
    let before = (view("s").await, view(&child).await);
    for bucket in ["sessions", "runs"] {
        let purged = api(&bridge, &format!("STREAM.PURGE.KV_{}_{bucket}", bridge.prefix), json!({})).await;
        assert_eq!(purged["success"], true, "{purged}");
    }
    assert!(sessions.ids().await.is_empty());
    assert_eq!(sessions.ok("rebuild", json!({})).await["sessions"], 2);
    assert_eq!((view("s").await, view(&child).await), before);
    assert_eq!(sessions.ids().await.len(), 2);
}

#[tokio::test]
async fn an_agent_is_replaced_and_its_caller_sees_no_change() {
    let nats = NatsServer::with_jetstream().await;
    let (old, new) = (DemoAgent::start(&[]).await, DemoAgent::start(&[]).await);
    let builder = Bridge::with(attached("demo", &old.url())).set("events", json!({}));
    let bridge = builder.start_on(nats).await;
    let sessions = sessions(&bridge);
    assert_eq!(sessions.say("demo.echo", "s", "one").await, "one");
    let url = new.url();
    bridge.reload(|settings| settings["agents"][0]["url"] = json!(url));
    bridge.until_logged("configuration reloaded").await;
    drop(old);
    assert_eq!(sessions.say("demo.echo", "s", "two").await, "two");
    assert_eq!(sessions.messages("s").await, ["user: one", "assistant: one", "user: two", "assistant: two"]);
}

#[tokio::test]
async fn three_agents_share_one_session() {
    let nats = NatsServer::with_jetstream().await;
    let agents = Bridge::with(launched("one", &[])).and(launched("two", &[])).and(launched("three", &[]));
    let bridge = agents.set("events", json!({})).start_on(nats).await;
    let sessions = sessions(&bridge);
    for (number, agent) in ["one", "two", "three"].into_iter().enumerate() {
        let answer = sessions.say(&format!("{agent}.echo"), "s", &format!("to {agent}")).await;
        for earlier in &["one", "two", "three"][..number] {
            assert!(answer.contains(&format!("user: to {earlier}")), "{answer}");
        }
    }
    let runs = sessions.runs("s").await;
    let agents: Vec<_> = runs.iter().map(|run| text(&run["agent"])).collect();
    assert_eq!(agents, ["one", "two", "three"]);
    let contexts: std::collections::BTreeSet<_> =
        runs.iter().map(|run| text(&run["input_snapshot_hash"])).collect();
    assert_eq!(contexts.len(), 3);
    assert_eq!(sessions.messages("s").await.len(), 6);
}

#[tokio::test]
async fn replicas_write_to_one_session_and_nothing_is_lost() {
    let agent = DemoAgent::start(&[]).await;
    let mesh = Mesh::start_with(vec![attached("demo", &agent.url())], 2, json!({ "events": {} })).await;
    let sessions = Sessions { client: &mesh.client, prefix: &mesh.prefix, caller: None };
    let calls = (0..40).map(|number| {
        let prompt = format!("prompt {number}");
        async move { sessions.say("demo.echo", "s", &prompt).await }
    });
    futures_util::future::join_all(calls).await;
    let messages = sessions.messages("s").await;
    assert_eq!(messages.len(), 80);
    for number in 0..40 {
        let asked = messages.iter().filter(|message| **message == format!("user: prompt {number}")).count();
        assert_eq!(asked, 1, "{messages:?}");
    }
    let runs = sessions.runs("s").await;
    assert_eq!(runs.len(), 40);
    assert!(runs.iter().all(|run| run["status"] == "completed"), "{runs:?}");
    let events = sessions.events("s", 100).await;
    assert_eq!(events.iter().filter(|event| event["type"] == "session_created").count(), 1);
    let before = sessions.get("s").await;
    sessions.ok("rebuild", json!({ "id": "s" })).await;
    let mut after = sessions.get("s").await;
    after["revision"] = before["revision"].clone();
    assert_eq!(after, before);
}

/// The figures depend on the machine, so they are printed and not compared.
#[tokio::test]
async fn a_session_of_10_000_events_is_restored_and_forked() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    sessions.ok("create", json!({ "id": "s", "agent": "demo" })).await;
    append_conversation(&bridge, "s", 10_000).await;
    let began = Instant::now();
    let session = sessions.get("s").await;
    println!("the first read of 10,000 messages, with the fold: {:?}", began.elapsed());
    assert_eq!(session["message_count"], 10_000);
    let began = Instant::now();
    let events = sessions.events("s", 1000).await;
    println!("restore of 10,000 events in pages of 1000: {:?}", began.elapsed());
    assert_eq!(events.len(), 10_001);
    // What does not fit into one message is left out, and can be asked for.
    let (mut messages, mut session) = (0, session);
    loop {
        let part = session["messages"].as_array().unwrap();
        messages += part.len();
        let Some(earlier) = session["earlier"].as_u64() else { break };
        assert_eq!(part[0]["index"], earlier);
        session = sessions.ok("get", json!({ "id": "s", "before": earlier })).await;
    }
    assert_eq!(messages, 10_000);
    let before = stored_bytes(&bridge).await;
    let mut times: Vec<Duration> = Vec::new();
    let mut children = Vec::new();
    for at in [1, 5000, 9999, 10_000] {
        let began = Instant::now();
        children.push(sessions.ok("fork", json!({ "id": "s", "at": at, "reason": "branch" })).await);
        times.push(began.elapsed());
    }
    let after = stored_bytes(&bridge).await;
    println!(
        "fork of a session of 10,000 events: {times:?}, {} bytes of events and {} bytes of records each",
        (after.0 - before.0) / 4,
        (after.1 - before.1) / 4
    );
    for (child, at) in children.iter().zip([1, 5000, 9999, 10_000]) {
        assert_eq!(child["message_count"], at, "{child}");
        let events = sessions.events(text(&child["id"]), 1000).await;
        let messages =
            events.iter().filter(|event| matches!(text(&event["type"]), "user_message" | "agent_complete"));
        assert_eq!(messages.count(), at);
    }
}
