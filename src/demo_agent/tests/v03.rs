//! The demo agent over A2A 0.3.

use serde_json::{Value, json};

use super::{Demo, all, demo, with};

async fn v03() -> Demo {
    demo(&["--protocol", "0.3", "--token-delay", "1ms"]).await
}

fn message(text: &str) -> Value {
    let parts = json!([{"kind": "text", "text": text}]);
    json!({"message": {"kind": "message", "messageId": "m-1", "role": "user", "parts": parts}})
}

#[tokio::test]
async fn a_task_is_in_the_exact_shape_of_0_3() {
    let demo = v03().await;
    let task = demo.call("message/send", message("echo hi")).await["result"].clone();
    let (id, context) = (&task["id"], &task["contextId"]);
    let parts = json!([{"kind": "text", "text": "echo hi"}]);
    let expected = json!({
        "kind": "task",
        "id": id,
        "contextId": context,
        "status": {"state": "completed", "timestamp": task["status"]["timestamp"]},
        "artifacts": [{"artifactId": task["artifacts"][0]["artifactId"], "name": "echo", "parts": parts}],
        "history": [{
            "kind": "message",
            "messageId": "m-1",
            "contextId": context,
            "taskId": id,
            "role": "user",
            "parts": parts,
        }],
    });
    assert_eq!(task, expected);
    assert!(task["status"]["timestamp"].as_str().unwrap().ends_with("+00:00"));
    assert_eq!(demo.call("tasks/get", json!({"id": id})).await["result"], expected);
}

#[tokio::test]
async fn files_and_data_have_their_kinds() {
    let demo = v03().await;
    let task = demo.call("message/send", message("file")).await["result"].clone();
    let file = json!({"bytes": "iVBORwAB", "mimeType": "image/png", "name": "a.png"});
    let data = json!({"n": 1, "f": 1.5, "l": [1, null]});
    let expected = json!([{"kind": "file", "file": file}, {"kind": "data", "data": data}]);
    assert_eq!(task["artifacts"][0]["parts"], expected);

    let echoed = with(message(""), &json!({"parts": expected}));
    let echo = demo.call("message/send", echoed).await["result"].clone();
    assert_eq!(echo["artifacts"][0]["parts"], expected);
}

#[tokio::test]
async fn a_stream_has_kinds_and_says_which_event_is_final() {
    let demo = v03().await;
    let events = all(demo.stream("message/stream", message("stream one two")).await).await;
    let kinds: Vec<_> = events.iter().map(|event| event["kind"].as_str().unwrap()).collect();
    let expected = ["task", "status-update", "artifact-update", "artifact-update", "status-update"];
    assert_eq!(kinds, expected);
    let flags = |n: usize| (events[n]["append"].as_bool(), events[n]["lastChunk"].as_bool());
    assert_eq!(flags(2), (Some(false), Some(false)));
    assert_eq!(flags(3), (Some(true), Some(true)));
    assert_eq!(events[1]["final"], false);
    assert_eq!(events[4]["final"], true);

    let events = all(demo.stream("message/stream", message("report")).await).await;
    let last = events.last().unwrap();
    assert_eq!((&last["status"]["state"], &last["final"]), (&json!("input-required"), &json!(true)));
}

#[tokio::test]
async fn blocking_is_the_default_and_can_be_turned_off() {
    let demo = v03().await;
    let mut params = message("slow 60");
    params["configuration"] = json!({"blocking": false});
    let task = demo.call("message/send", params).await["result"].clone();
    assert_eq!(task["status"], json!({"state": "submitted"}));
    let id = json!({"id": task["id"]});
    assert_eq!(demo.call("tasks/cancel", id.clone()).await["result"]["status"]["state"], "canceled");
    let error = demo.call("tasks/cancel", id).await["error"].clone();
    assert_eq!(
        error,
        json!({"code": -32002, "message": "Task cannot be canceled - current state: canceled"})
    );
}

#[tokio::test]
async fn errors_are_those_of_0_3() {
    let demo = v03().await;
    let task = demo.call("message/send", message("echo")).await["result"].clone();
    let again = with(message("again"), &json!({"taskId": task["id"]}));
    assert_eq!(demo.call("message/send", again).await["error"]["code"], -32602);
    let unknown = demo.call("tasks/get", json!({"id": "nope"})).await;
    let expected =
        json!({"error": {"code": -32001, "message": "Task not found"}, "id": "r-1", "jsonrpc": "2.0"});
    assert_eq!(unknown, expected);
    assert_eq!(demo.call("SendMessage", message("hi")).await["error"]["code"], -32601);
    let answer = demo.post("{oops").send().await.unwrap().text().await.unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((answer.get("id"), &answer["error"]["code"]), (None, &json!(-32700)));
}

#[tokio::test]
async fn the_card_is_one_of_0_3_at_both_paths() {
    let demo = v03().await;
    let card = demo.card().await;
    assert_eq!(card["url"], demo.url);
    assert_eq!(card["protocolVersion"], "0.3.0");
    assert_eq!(card["preferredTransport"], "JSONRPC");
    assert_eq!(card.get("supportedInterfaces"), None);
    let old = demo.get(".well-known/agent.json").await.text().await.unwrap();
    assert_eq!(serde_json::from_str::<Value>(&old).unwrap(), card);
}

#[tokio::test]
async fn a_direct_message_is_bare() {
    let demo = v03().await;
    let answer = demo.call("message/send", message("message hi")).await["result"].clone();
    assert_eq!((&answer["kind"], &answer["role"]), (&json!("message"), &json!("agent")));
    assert_eq!(answer["parts"], json!([{"kind": "text", "text": "hi"}]));
}
