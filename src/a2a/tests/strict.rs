//! The official types of v1.0 accept everything that the bridge writes, and lose nothing of it.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use url::Url;

use crate::a2a::card::{Card, Interface};
use crate::a2a::dialect::{A2aMethod, Dialect, HttpCall, OutgoingMessage};
use crate::a2a::model::{File, FileContent, Part};
use crate::a2a::retry::Retries;

/// Asserts that `T` accepts `ours` and knows all of its fields.
#[track_caller]
fn assert_strict<T: DeserializeOwned + Serialize>(ours: &Value) {
    let theirs: T = serde_json::from_value(ours.clone()).unwrap_or_else(|error| panic!("{error}: {ours:#}"));
    let theirs = serde_json::to_value(theirs).unwrap();
    assert_kept(ours, &theirs, "");
}

#[track_caller]
fn assert_kept(ours: &Value, theirs: &Value, at: &str) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in ours {
                // Empty fields may be missing.
                let is_empty = value.as_array().is_some_and(Vec::is_empty) || *value == json!("");
                match theirs.get(key) {
                    Some(other) => assert_kept(value, other, &format!("{at}.{key}")),
                    None => assert!(is_empty, "{at}.{key} is not in v1.0"),
                }
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            assert_eq!(ours.len(), theirs.len(), "{at}");
            for (index, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                assert_kept(ours, theirs, &format!("{at}[{index}]"));
            }
        }
        _ => assert_eq!(ours, theirs, "{at}"),
    }
}

fn params<T: DeserializeOwned + Serialize>(call: &HttpCall, method: &str) {
    let body: Value = serde_json::from_slice(&call.body(uuid::Uuid::nil()).unwrap()).unwrap();
    assert_strict::<a2a::JsonRpcRequest>(&body);
    assert_eq!(body["method"], method);
    assert_strict::<T>(&body["params"]);
}

#[test]
fn requests_are_exactly_v1() {
    let raw = |json: &str| RawValue::from_string(json.to_owned()).unwrap();
    let file = |content| {
        Part::File(File { name: Some("a.png".to_owned()), media_type: Some("image/png".to_owned()), content })
    };
    let parts = [
        Part::Text("hi".to_owned()),
        Part::Data(raw(r#"{"n": 1, "l": [1.5, null]}"#)),
        Part::Data(raw("[1]")),
        file(FileContent::Base64("iVBORwAB".to_owned())),
        file(FileContent::Uri("https://example.org/a.png".to_owned())),
    ];
    let modes = ["text/plain".to_owned()];
    let references = ["t-0".to_owned()];
    let full = OutgoingMessage {
        message_id: uuid::Uuid::new_v4(),
        blocking: true,
        task_id: Some("t-1"),
        new_task_id: Some("not in v1.0"),
        context_id: Some("c-1"),
        reference_task_ids: &references,
        parts: &parts,
        skill_id: Some("echo"),
        caller: Some("T1/alice"),
        run_id: None,
        session_id: None,
        output_modes: &modes,
        retries: &Retries::new(&"agent".into()),
    };
    let minimal = OutgoingMessage {
        task_id: None,
        context_id: None,
        reference_task_ids: &[],
        skill_id: None,
        caller: None,
        run_id: None,
        session_id: None,
        output_modes: &[],
        ..full
    };
    for message in [&full, &minimal] {
        for tenant in [None, Some("acme")] {
            let of = |call: HttpCall| match tenant {
                Some(tenant) => call.for_tenant(tenant),
                None => call,
            };
            params::<a2a::SendMessageRequest>(
                &of(Dialect::V1.message_call(A2aMethod::Send, message)),
                "SendMessage",
            );
            params::<a2a::SendMessageRequest>(
                &of(Dialect::V1.message_call(A2aMethod::Stream, message)),
                "SendStreamingMessage",
            );
            params::<a2a::GetTaskRequest>(&of(Dialect::V1.task_call(A2aMethod::Get, "t-1")), "GetTask");
            params::<a2a::CancelTaskRequest>(
                &of(Dialect::V1.task_call(A2aMethod::Cancel, "t-1")),
                "CancelTask",
            );
            params::<a2a::SubscribeToTaskRequest>(
                &of(Dialect::V1.task_call(A2aMethod::Subscribe, "t-1")),
                "SubscribeToTask",
            );
        }
        let rest: Value = serde_json::from_slice(
            &Dialect::V1Rest.message_call(A2aMethod::Send, message).body(uuid::Uuid::nil()).unwrap(),
        )
        .unwrap();
        assert_strict::<a2a::SendMessageRequest>(&rest);
    }
}

#[test]
fn the_card_that_the_bridge_publishes_is_exactly_v1() {
    let old = json!({
        "name": "old", "description": "d", "version": "1", "url": "http://x/", "protocolVersion": "0.2.6",
        "capabilities": {"streaming": true}, "defaultInputModes": ["text/plain"], "iconUrl": "http://x/i",
        "provider": {"organization": "o", "url": "http://o"}, "defaultOutputModes": ["text/plain"],
        "skills": [{"id": "s", "name": "S", "description": "d", "tags": ["t"], "outputModes": ["image/png"]}],
    });
    let interface = Interface {
        url: Url::parse("http://127.0.0.1:9000/").unwrap(),
        dialect: Dialect::V02,
        tenant: Some("acme".to_owned()),
        reason: String::new(),
        is_confirmed: true,
        failure: None,
    };
    assert_strict::<a2a::AgentCard>(&{
        let old = Card::from_value(old).unwrap();
        old.to_v1(&interface, &old.skills)
    });
    let minimal = Card::from_value(json!({"name": "x"})).unwrap();
    assert_strict::<a2a::AgentCard>(&minimal.to_v1(&interface, &minimal.skills));
}
