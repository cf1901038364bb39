//! Forks, edits, redaction and deletion of sessions.

use std::time::Duration;

use serde_json::{Value, json};

use crate::sessions::{bridge, sessions};
use crate::support::bridge::{Bridge, launched};
use crate::support::event_log::EventLog;
use crate::support::eventually::{eventually, eventually_within};
use crate::support::nats::NatsServer;
use crate::support::sessions::{Sessions, text};

/// All messages of the stream as text.
async fn raw(bridge: &Bridge) -> String {
    let log = EventLog { client: &bridge.client, prefix: &bridge.prefix };
    log.messages().await.into_iter().map(|message| message.text).collect()
}

/// Forks a session, and returns the id of the fork.
async fn fork(sessions: &Sessions<'_>, body: Value) -> String {
    let child = sessions.ok("fork", body.clone()).await;
    assert_eq!((&child["parent"], &child["fork_point"]), (&body["id"], &body["at"]), "{child}");
    assert!(child.get("run_error").is_none(), "{child}");
    text(&child["id"]).to_owned()
}

async fn until_messages(sessions: &Sessions<'_>, id: &str, count: usize) -> Vec<String> {
    eventually(|| async {
        let messages = sessions.messages(id).await;
        (messages.len() >= count).then_some(messages)
    })
    .await
}

#[tokio::test]
async fn a_message_is_edited_and_the_agent_goes_on_from_there() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    sessions.say("demo.echo", "s", "one").await;
    sessions.say("demo.echo", "s", "two").await;
    let body = json!({ "id": "s", "at": 2, "reason": "user_edit", "content": "zwei", "run": true });
    let child = fork(&sessions, body).await;
    let messages = until_messages(&sessions, &child, 4).await;
    assert_eq!(messages[..3], ["user: one", "assistant: one", "user: zwei"]);
    // The agent has not taken part in the fork, so it gets what was said.
    let answer = &messages[3];
    for part in ["assistant: ", "user: one", "zwei"] {
        assert!(answer.contains(part), "{answer}");
    }
    assert!(!answer.contains("two") && answer.matches("zwei").count() == 1, "{answer}");
    // The next call of the fork carries nothing: the agent knows it.
    assert_eq!(sessions.say("demo.echo", &child, "three").await, "three");
    // The parent is as before.
    assert_eq!(sessions.messages("s").await, ["user: one", "assistant: one", "user: two", "assistant: two"]);
    let session = sessions.get(&child).await;
    let edited = &session["messages"][2];
    assert_eq!(
        (&edited["edited"], &edited["history"][0]["content"]),
        (&json!(true), &json!("two")),
        "{session}"
    );

    // An edit of an edit has both.
    let body = json!({ "id": child, "at": 2, "reason": "user_edit", "content": "deux" });
    let second = fork(&sessions, body).await;
    let session = sessions.get(&second).await;
    let history: Vec<_> = session["messages"][2]["history"]
        .as_array()
        .unwrap()
        .iter()
        .map(|old| text(&old["content"]))
        .collect();
    assert_eq!(history, ["two", "zwei"], "{session}");
    assert_eq!(sessions.messages(&second).await, ["user: one", "assistant: one", "user: deux"]);
    let events = sessions.events(&second, 3).await;
    let own = events.iter().filter(|event| event["session"] == second.as_str());
    let own: Vec<_> = own.map(|event| text(&event["type"])).collect();
    assert_eq!(own, ["fork", "edit", "user_message"]);
    assert_eq!(events[0]["session"], "s");
    let on_parent = sessions.events("s", 1000).await.pop().unwrap();
    assert_eq!((&on_parent["type"], &on_parent["payload"]["child"]), (&json!("forked"), &json!(child)));
}

#[tokio::test]
async fn a_session_is_forked_at_every_message() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    for prompt in ["one", "two"] {
        sessions.say("demo.echo", "s", prompt).await;
    }
    let all = sessions.messages("s").await;
    for at in 0..=4 {
        let child = fork(&sessions, json!({ "id": "s", "at": at, "reason": "branch" })).await;
        assert_eq!(sessions.messages(&child).await, all[..at], "{at}");
    }
    // Nothing runs unless it is asked for; the last message can be asked again.
    let child = fork(&sessions, json!({ "id": "s", "at": 3, "reason": "retry", "run": true })).await;
    let messages = until_messages(&sessions, &child, 4).await;
    assert!(messages[3].contains("two") && messages[3].contains("user: one"), "{messages:?}");
    assert_eq!(sessions.runs(&child).await.len(), 1);
    // The same in a fork in which no agent was asked.
    let silent = fork(&sessions, json!({ "id": child, "at": 3, "reason": "branch" })).await;
    let second = fork(&sessions, json!({ "id": silent, "at": 3, "reason": "retry", "run": true })).await;
    assert!(until_messages(&sessions, &second, 4).await[3].contains("two"));
    // A fork of a fork, before the point where it began.
    let grandchild = fork(&sessions, json!({ "id": child, "at": 1, "reason": "branch" })).await;
    assert_eq!(sessions.messages(&grandchild).await, all[..1]);
    // The limit is ten in a minute; those that are refused do not count.
    for _ in 0..4 {
        let at_wrong_place = json!({ "id": "s", "at": 9, "reason": "branch" });
        sessions.request("fork", at_wrong_place).await.expect_error("invalid_request");
        fork(&sessions, json!({ "id": "s", "at": 0, "reason": "branch" })).await;
    }
    let one_more = json!({ "id": "s", "at": 0, "reason": "branch" });
    sessions.request("fork", one_more).await.expect_error("busy").saying("minute");
    fork(&sessions, json!({ "id": child, "at": 0, "reason": "branch" })).await;
}

#[tokio::test]
async fn forks_have_at_most_64_ancestors() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    sessions.say("demo.echo", "s", "one").await;
    let mut id = "s".to_owned();
    for _ in 0..64 {
        id = fork(&sessions, json!({ "id": id, "at": 2, "reason": "branch" })).await;
    }
    assert_eq!(sessions.messages(&id).await, ["user: one", "assistant: one"]);
    let deeper = json!({ "id": id, "at": 2, "reason": "branch" });
    sessions.request("fork", deeper).await.expect_error("invalid_request").saying("64");
}

#[tokio::test]
async fn a_run_under_way_is_cancelled_or_goes_on_alone() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    for (on_running, status) in [("cancel", "cancelled"), ("orphan", "orphaned")] {
        let session = format!("s-{on_running}");
        let body = json!({ "prompt": "4", "meta": { "session_id": session } });
        let mut call = bridge.call("demo.slow", body).begin().await;
        eventually(|| async {
            let runs = match sessions.request("runs", json!({ "id": session })).await.body["runs"].as_array()
            {
                Some(runs) => runs.clone(),
                None => return None,
            };
            (runs.first()?["task_id"].is_string()).then_some(())
        })
        .await;
        assert_eq!(sessions.runs(&session).await[0]["status"], "running");
        let body = json!({ "id": session, "at": 1, "reason": "branch", "on_running": on_running });
        let child = fork(&sessions, body).await;
        let runs = eventually_within(Duration::from_secs(15), || async {
            let runs = sessions.runs(&session).await;
            (runs[0]["status"] == status).then_some(runs)
        })
        .await;
        assert_eq!(runs.len(), 1);
        let reply = call.reply_within(Duration::from_secs(20)).await.unwrap();
        assert_eq!(
            reply["status"],
            if on_running == "cancel" { "CANCELED" } else { "COMPLETED" },
            "{reply:?}"
        );
        sessions.ok("list", json!({})).await;
        assert_eq!(sessions.runs(&session).await[0]["status"], status);
        assert_eq!(sessions.messages(&child).await, ["user: 4"]);
    }
}

#[tokio::test]
async fn redaction_removes_the_content_and_nothing_else() {
    let bridge = bridge(&["--token-delay", "1ms"]).await;
    let sessions = sessions(&bridge);
    sessions.say("demo.stream", "s", "credit-card-4711").await;
    sessions.say("demo.echo", "s", "harmless").await;
    let child = fork(&sessions, json!({ "id": "s", "at": 4, "reason": "branch" })).await;
    let hashes: Vec<_> =
        sessions.runs("s").await.iter().map(|run| run["input_snapshot_hash"].clone()).collect();
    let before = sessions.get("s").await;
    assert!(raw(&bridge).await.contains("4711"));
    let events = sessions.events("s", 1000).await;
    for message in [0, 1] {
        let index = &before["messages"][message]["event"];
        sessions.ok("redact", json!({ "id": "s", "index": index })).await;
        // Again is harmless.
        sessions.ok("redact", json!({ "id": "s", "index": index })).await;
    }
    let stored = raw(&bridge).await;
    assert!(!stored.contains("4711"), "{stored}");
    let expected = ["user: ", "assistant: ", "user: harmless", "assistant: harmless"];
    assert_eq!(sessions.messages("s").await, expected);
    assert_eq!(sessions.messages(&child).await, expected, "forks do not have it either");
    let session = sessions.get("s").await;
    assert_eq!(session["messages"][0]["redacted"], true, "{session}");
    // The other events of the batch, such as `agent_start`, keep their places and indexes.
    let kept: Vec<_> = sessions.events("s", 1000).await;
    for kind in ["session_created", "agent_start"] {
        let find = |events: &[Value]| events.iter().find(|event| event["type"] == kind).cloned().unwrap();
        assert_eq!(find(&kept), find(&events));
    }
    assert_eq!(kept.iter().filter(|event| event["type"] == "redacted").count(), 2, "{kept:?}");
    // All of that follows from the log alone.
    for id in ["s", &child] {
        let before = sessions.get(id).await;
        sessions.ok("rebuild", json!({ "id": id })).await;
        let mut after = sessions.get(id).await;
        after["revision"] = before["revision"].clone();
        assert_eq!(after, before);
    }
    let rebuilt: Vec<_> =
        sessions.runs("s").await.iter().map(|run| run["input_snapshot_hash"].clone()).collect();
    assert_eq!(rebuilt, hashes);
    let forked = kept.iter().find(|event| event["type"] == "forked").unwrap();
    let body = json!({ "id": "s", "index": forked["index"] });
    sessions.request("redact", body).await.expect_error("invalid_request");
}

#[tokio::test]
async fn deletion_removes_everything_that_no_fork_needs() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    sessions.say("demo.echo", "s", "first-4711").await;
    sessions.say("demo.echo", "s", "second-4712").await;
    let child = fork(&sessions, json!({ "id": "s", "at": 2, "reason": "branch" })).await;
    let grandchild = fork(&sessions, json!({ "id": child, "at": 2, "reason": "branch" })).await;
    let of_child = sessions.messages(&child).await;
    sessions.ok("delete", json!({ "id": "s" })).await;
    sessions.request("get", json!({ "id": "s" })).await.expect_error("not_found");
    let stored = raw(&bridge).await;
    assert!(stored.contains("first-4711") && !stored.contains("second-4712"), "{stored}");
    for id in [&child, &grandchild] {
        assert_eq!(sessions.messages(id).await, of_child);
    }
    // A new session with the same id has nothing of the old one.
    sessions.say("demo.echo", "s", "again").await;
    assert_eq!(sessions.messages("s").await, ["user: again", "assistant: again"]);
    assert_eq!(sessions.messages(&grandchild).await, of_child);
    sessions.ok("delete", json!({ "id": "s" })).await;
    sessions.ok("delete", json!({ "id": child })).await;
    assert_eq!(sessions.messages(&grandchild).await, of_child);
    sessions.ok("delete", json!({ "id": grandchild })).await;
    let stored = raw(&bridge).await;
    assert!(!stored.contains("4711") && !stored.contains("again"), "{stored}");
    assert!(sessions.ids().await.is_empty());
}

#[tokio::test]
async fn a_deleted_session_does_not_come_back_with_the_end_of_its_call() {
    let bridge = bridge(&[]).await;
    let sessions = sessions(&bridge);
    let body = json!({ "prompt": "2", "meta": { "session_id": "s" } });
    let mut call = bridge.call("demo.slow", body).begin().await;
    eventually(|| async {
        let runs = sessions.request("runs", json!({ "id": "s" })).await;
        runs.body["runs"][0]["task_id"].is_string().then_some(())
    })
    .await;
    sessions.ok("delete", json!({ "id": "s" })).await;
    call.reply_within(Duration::from_secs(20)).await.unwrap();
    eventually(|| async { raw(&bridge).await.is_empty().then_some(()) }).await;
    sessions.request("get", json!({ "id": "s" })).await.expect_error("not_found");
}

#[tokio::test]
async fn what_was_said_goes_to_another_agent_in_the_form_of_the_settings() {
    for (mode, expected) in [("text", true), ("data", true), ("none", false)] {
        let nats = NatsServer::with_jetstream().await;
        let agents = Bridge::with(launched("demo", &[])).and(launched("other", &[]));
        let events = json!({ "history": { "mode": mode, "messages": 2 } });
        let bridge = agents.set("events", events).start_on(nats).await;
        let sessions = sessions(&bridge);
        sessions.say("demo.echo", "s", "left out").await;
        sessions.say("demo.echo", "s", "remember").await;
        let body = json!({ "prompt": "and now", "meta": { "session_id": "s" } });
        let reply = bridge.call("other.echo", body).await.expect("COMPLETED");
        let has = |what: &str| reply.text.contains(what);
        assert_eq!((has("remember"), has("left out")), (expected, false), "{mode}: {reply:?}");
        assert_eq!(has("history"), mode == "data", "{reply:?}");
        // The log has the message as the user sent it.
        assert_eq!(sessions.messages("s").await[4], "user: and now");
        assert_eq!(sessions.say("other.echo", "s", "again").await, "again");
        assert_eq!(sessions.say("demo.echo", "s", "back").await, "back");
    }
}
