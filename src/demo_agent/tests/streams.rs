//! Streams over A2A 1.0.

use serde_json::{Value, json};

use super::{all, demo, message, reply, state, text_of};

#[tokio::test]
async fn words_are_streamed_as_appends_to_one_artifact() {
    let demo = demo(&["--token-delay", "1ms"]).await;
    let events = all(demo.stream("SendStreamingMessage", message("stream one two three")).await).await;
    assert_eq!(state(&events[0]["task"]), "TASK_STATE_SUBMITTED");
    assert_eq!(events[0]["task"]["status"], json!({"state": "TASK_STATE_SUBMITTED"}));
    assert_eq!(state(&events[1]["statusUpdate"]), "TASK_STATE_WORKING");
    let flags: Vec<_> = events[2..5]
        .iter()
        .map(|event| &event["artifactUpdate"])
        .map(|update| (text_of(&update["artifact"]), update.get("append"), update.get("lastChunk")))
        .collect();
    let yes = Some(&Value::Bool(true));
    let expected =
        [("one ".to_owned(), None, None), ("two ".to_owned(), yes, None), ("three".to_owned(), yes, yes)];
    assert_eq!(flags, expected);
    let ids: Vec<_> = events[2..5].iter().map(|e| &e["artifactUpdate"]["artifact"]["artifactId"]).collect();
    assert!(ids.iter().all(|id| *id == ids[0]));
    assert_eq!(state(&events[5]["statusUpdate"]), "TASK_STATE_COMPLETED");
    assert_eq!(events.len(), 6);
    let task = demo.call("GetTask", json!({"id": events[0]["task"]["id"]})).await["result"].clone();
    assert_eq!(text_of(&task["artifacts"][0]), "one two three");
}

#[tokio::test]
async fn a_follow_ups_stream_has_only_what_is_new() {
    let demo = demo(&[]).await;
    let events = all(demo.stream("SendStreamingMessage", message("report")).await).await;
    assert_eq!(state(&events.last().unwrap()["statusUpdate"]), "TASK_STATE_INPUT_REQUIRED");
    let reply = reply(&events[0]["task"], "pdf");
    let events = all(demo.stream("SendStreamingMessage", reply).await).await;
    let kinds: Vec<_> = events.iter().flat_map(|event| event.as_object().unwrap().keys()).collect();
    assert_eq!(kinds, ["statusUpdate", "artifactUpdate", "statusUpdate"]);
}

#[tokio::test]
async fn the_supervisor_sends_600_events_and_repeats_its_answer_at_the_end() {
    let demo = demo(&[]).await;
    let events = all(demo.stream("SendStreamingMessage", message("supervisor show version")).await).await;
    assert_eq!(events.len(), 600);
    let task = demo.call("GetTask", json!({"id": events[0]["task"]["id"]})).await["result"].clone();
    let artifacts = task["artifacts"].as_array().unwrap();
    let names: Vec<_> = artifacts.iter().map(|artifact| artifact["name"].as_str().unwrap()).collect();
    let expected = [
        "execution_plan_streaming",
        "execution_plan_update",
        "tool_notification_start",
        "streaming_result",
        "tool_notification_complete",
        "partial_result",
    ];
    assert_eq!(names, expected);
    assert_eq!(text_of(&artifacts[0]), text_of(&artifacts[1]));
    assert_eq!(text_of(&artifacts[3]), text_of(&artifacts[5]));
    assert_eq!(events[598]["artifactUpdate"]["lastChunk"], true);
    assert_eq!(state(&events[599]["statusUpdate"]), "TASK_STATE_COMPLETED");
}
