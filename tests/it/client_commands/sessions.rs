//! `a2a-bridge sessions`.

use serde_json::{Value, json};

use crate::sessions::bridge;
use crate::support::bridge::Bridge;
use crate::support::commands::{CommandOutput, command, run};

fn sessions(bridge: &Bridge, arguments: &[&str]) -> CommandOutput {
    let mut command = command(arguments);
    run(command.env("NATS_URL", bridge.nats.url()).env("A2A_BRIDGE_PREFIX", &bridge.prefix), "")
}

fn ok(bridge: &Bridge, arguments: &[&str]) -> CommandOutput {
    let output = sessions(bridge, arguments);
    assert_eq!(output.code, 0, "{arguments:?}: {output:?}");
    output
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_is_shown_forked_exported_and_deleted() {
    let bridge = bridge(&[]).await;
    let called = ok(&bridge, &["call", "demo.echo", "hello", "--session", "trip"]);
    assert!(called.err.contains("session trip"), "{called:?}");
    ok(&bridge, &["sessions", "rename", "trip", "My trip"]);
    let list = ok(&bridge, &["sessions", "ls"]).out;
    assert!(list.contains("trip") && list.contains("My trip") && list.contains("demo"), "{list}");
    let shown = ok(&bridge, &["sessions", "show", "trip", "--runs"]).out;
    for part in ["My trip", "0 user", "1 assistant", "hello", "completed"] {
        assert!(shown.contains(part), "no {part}: {shown}");
    }
    let session = ok(&bridge, &["sessions", "show", "trip", "--json"]).json();
    assert_eq!(session["messages"][1]["content"], "hello");
    let edited = ok(&bridge, &["sessions", "fork", "trip", "--at", "0", "--content", "good morning"]).out;
    let shown = ok(&bridge, &["sessions", "show", edited.trim()]).out;
    assert!(shown.contains("good morning") && shown.contains("edited"), "{shown}");
    let whole = ok(&bridge, &["sessions", "fork", "trip", "--json"]).json();
    assert_eq!(whole["message_count"], 2, "{whole}");
    let replayed = ok(&bridge, &["sessions", "replay", "trip", "--speed", "0"]).out;
    assert!(replayed.contains("user\nhello") && replayed.contains("demo\nhello"), "{replayed}");
    let exported = ok(&bridge, &["sessions", "export", "trip"]).out;
    let lines: Vec<Value> = exported.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["session"]["id"], "trip");
    assert_eq!(lines[1]["type"], "session_created");
    let events = ok(&bridge, &["sessions", "events", "trip"]).out;
    assert_eq!(events.lines().count(), lines.len() - 1);
    let stats = ok(&bridge, &["sessions", "stats", "--json"]).json();
    assert_eq!((&stats["sessions"], &stats["forks"]), (&json!(3), &json!(2)), "{stats}");
    ok(&bridge, &["sessions", "rebuild"]);
    ok(&bridge, &["sessions", "rm", "trip", edited.trim()]);
    let gone = sessions(&bridge, &["sessions", "show", "trip"]);
    assert_eq!(gone.code, 1);
    assert!(gone.err.contains("there is no such session") && gone.err.contains("hint"), "{gone:?}");
    let state = ok(&bridge, &["state", "--buckets"]).out;
    for name in ["_sessions", "_runs", "_events"] {
        assert!(state.contains(&format!("{}{name}", bridge.prefix)), "{state}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_event_log_the_command_says_what_to_do() {
    let bridge = Bridge::with_demo(&[]).await;
    let output = sessions(&bridge, &["sessions", "ls"]);
    assert_eq!(output.code, 69);
    assert!(output.err.contains("events: {}"), "{output:?}");
}
