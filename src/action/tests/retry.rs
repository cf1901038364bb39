//! When the bridge sends a message a second time, and when it must not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rstest::rstest;
use serde_json::{Value, json};

use super::{actions, actions_with, invoke, invoke_in, reply, task};
use crate::a2a::model::Part;
use crate::a2a::tests::fake::{
    FakeAgent, FakeResponse, ReceivedRequest, bindu, error, not_found, ok, v1, v03,
};
use crate::action::progress::NoProgress;
use crate::action::request::{CallOptions, FollowUpAnswer, ReplyMode};

fn streaming_card() -> Value {
    json!({"name": "fake", "protocolVersion": "0.3", "capabilities": {"streaming": true}})
}

fn plain_card() -> Value {
    json!({"name": "fake", "protocolVersion": "0.3"})
}

fn messages(fake: &FakeAgent) -> Vec<Value> {
    let is_send = |seen: &ReceivedRequest| {
        ["message/", "Send"].iter().any(|begin| seen.rpc_method().starts_with(begin))
    };
    let sends = fake.received().into_iter().filter(is_send);
    sends.map(|seen| seen.json()["params"]["message"].clone()).filter(Value::is_object).collect()
}

fn sent(fake: &FakeAgent) -> usize {
    messages(fake).len()
}

/// How often the bridge sent the message, with the same id each time.
fn sent_as_one(fake: &FakeAgent) -> usize {
    let messages = messages(fake);
    let id = &messages[0]["messageId"];
    assert!(uuid::Uuid::try_parse(id.as_str().unwrap()).is_ok(), "{id}");
    assert!(messages.iter().all(|message| message["messageId"] == *id), "{messages:?}");
    messages.len()
}

fn as_event(response: &FakeResponse) -> FakeResponse {
    (200, "text/event-stream", format!("data: {}\n\n", response.2))
}

/// An agent that responds to a stream call with `response`, and would run a send.
async fn refusing_streams(response: impl Fn() -> FakeResponse + Send + Sync + 'static) -> FakeAgent {
    FakeAgent::start(move |request| match request.rpc_method().as_str() {
        "message/stream" => response(),
        _ => v03(request),
    })
    .await
}

#[rstest]
#[case::words_in_an_internal_error(|| error(-32603, "tool call not supported by the model"))]
#[case::not_implemented(|| error(-32603, "NotImplementedError: not implemented"))]
#[case::http_501(|| (501, "text/plain", "Not Implemented".to_owned()))]
#[case::an_event_of_a_stream(|| as_event(&error(-32004, "this tool is not supported")))]
#[case::a_method_that_the_agent_called(|| as_event(&error(-32601, "Method not found")))]
#[case::http_500(|| (500, "text/plain", "streaming is not supported".to_owned()))]
#[tokio::test]
async fn an_error_that_proves_nothing_does_not_turn_a_stream_into_a_send(
    #[case] response: fn() -> FakeResponse,
) {
    let fake = refusing_streams(response).await;
    let actions = actions(&fake, &streaming_card()).await;
    let reply = invoke_in(ReplyMode::Stream, &actions, None, &CallOptions::default()).await;
    assert_eq!(reply["status"], "ERROR", "{reply}");
    assert_eq!(sent(&fake), 1, "the agent may have run it");
    assert!(reply.get("metadata").is_none());
}

#[rstest]
#[case::unsupported_operation(-32004, "streaming_unsupported")]
#[case::method_not_found(-32601, "method_not_found")]
#[tokio::test]
async fn an_agent_that_does_not_stream_gets_the_message_again_and_the_reply_says_so(
    #[case] code: i64,
    #[case] reason: &str,
) {
    let fake = refusing_streams(move || error(code, "no")).await;
    let actions = actions(&fake, &streaming_card()).await;
    let reply = invoke_in(ReplyMode::Stream, &actions, None, &CallOptions::default()).await;
    assert_eq!(reply["message"], "done in 0.3", "{reply}");
    assert_eq!(reply["metadata"], json!({"retries": [reason]}));
    assert_eq!((fake.count("message/stream"), fake.count("message/send")), (1, 1));
    assert_eq!(sent_as_one(&fake), 2);
}

#[tokio::test]
async fn the_reply_has_a_reason_for_each_retry() {
    let is_new = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_new);
    let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
        _ if !switch.load(Ordering::Relaxed) => v03(request),
        "message/stream" | "message/send" => error(-32601, "no"),
        _ => v1(request),
    })
    .await;
    let actions = actions(&fake, &streaming_card()).await;
    is_new.store(true, Ordering::Relaxed);
    let reply = invoke_in(ReplyMode::Stream, &actions, None, &CallOptions::default()).await;
    assert_eq!(reply["message"], "done in 1.0", "{reply}");
    assert_eq!(reply["metadata"], json!({"retries": ["method_not_found", "method_not_found"]}));
    assert_eq!(sent_as_one(&fake), 3);
}

#[rstest]
#[case::bad_request(|| (400, "text/plain", "the conversation was too long for the model".to_owned()))]
#[case::conflict(|| (409, "application/json", json!({"error": "session is locked"}).to_string()))]
#[case::unprocessable(|| (422, "application/json", json!({"detail": "context window exceeded"}).to_string()))]
#[case::unknown_task(|| error(-32001, "Task not found in this context"))]
#[case::unsupported(|| error(-32004, "context length not supported"))]
#[case::no_field(|| error(-32602, "context window exceeded while the agent ran"))]
#[case::internal(|| error(-32603, "contextId is wrong"))]
#[tokio::test]
async fn an_error_that_does_not_refuse_the_context_id_causes_no_retry(
    #[case] response: fn() -> FakeResponse,
) {
    let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
        "message/send" => response(),
        _ => v03(request),
    })
    .await;
    let actions = actions(&fake, &plain_card()).await;
    let reply = invoke(&actions, Some("s-1"), &CallOptions::default()).await;
    assert_eq!(reply["status"], "ERROR", "{reply}");
    assert_eq!(sent(&fake), 1, "the agent may have run it");
}

#[rstest]
#[case::in_the_message(-32602, json!(null), "unknown contextId")]
#[case::snake_case(-32600, json!(null), "context_id must be one of ours")]
#[case::in_the_data(-32602, json!([{"loc": ["params", "message", "contextId"]}]), "Invalid params")]
#[case::session(-32602, json!(null), "sessionId is not known")]
#[tokio::test]
async fn invalid_params_that_name_the_context_id_omit_it_once(
    #[case] code: i64,
    #[case] data: Value,
    #[case] message: &'static str,
) {
    let fake = FakeAgent::start(move |request| {
        let context = request.json()["params"]["message"]["contextId"].clone();
        match request.rpc_method().as_str() {
            "message/send" if context.is_string() => {
                ok(&json!({"error": {"code": code, "message": message, "data": data}}))
            }
            _ => v03(request),
        }
    })
    .await;
    let actions = actions(&fake, &plain_card()).await;
    let reply = invoke(&actions, Some("s-1"), &CallOptions::default()).await;
    assert_eq!(reply["metadata"], json!({"retries": ["context_refused"]}), "{reply}");
    assert_eq!(sent_as_one(&fake), 2);
}

/// An agent that refuses all probes, so that they prove nothing, and then responds to the message.
async fn unproven(
    response: impl Fn() -> FakeResponse + Send + Sync + 'static,
) -> (FakeAgent, Arc<AtomicBool>) {
    let is_open = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_open);
    let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
        _ if !switch.load(Ordering::Relaxed) => (403, "text/plain", "not yet".to_owned()),
        "message/send" => response(),
        _ => v1(request),
    })
    .await;
    (fake, is_open)
}

#[rstest]
#[case::an_error_of_the_agent(|| (404, "application/json", json!({"error": "model not found"}).to_string()))]
#[case::a_message_of_the_agent(|| (404, "application/json", json!({"message": "no such page"}).to_string()))]
#[case::found(|| (302, "text/html", "see the result there".to_owned()))]
#[case::gone(|| (410, "text/plain", "Gone".to_owned()))]
#[case::router(not_found)]
#[case::framework(|| (405, "application/json", json!({"detail": "Method Not Allowed"}).to_string()))]
#[case::moved(|| (307, "text/plain", String::new()))]
#[tokio::test]
async fn a_bare_http_status_proves_nothing(#[case] response: fn() -> FakeResponse) {
    let (fake, is_open) = unproven(response).await;
    let actions = actions(&fake, &plain_card()).await;
    is_open.store(true, Ordering::Relaxed);
    let reply = invoke(&actions, None, &CallOptions::default()).await;
    assert_eq!(reply["status"], "ERROR", "{reply}");
    assert_eq!(sent(&fake), 1, "the agent may have run it");
}

#[rstest]
#[case::version(|| error(-32009, "version not supported"), "version_not_supported")]
#[tokio::test]
async fn an_agent_with_another_dialect_gets_the_message_in_it_and_the_reply_says_so(
    #[case] response: fn() -> FakeResponse,
    #[case] reason: &str,
) {
    let (fake, is_open) = unproven(response).await;
    let actions = actions(&fake, &plain_card()).await;
    is_open.store(true, Ordering::Relaxed);
    let reply = invoke(&actions, None, &CallOptions::default()).await;
    assert_eq!(reply["message"], "done in 1.0", "{reply}");
    assert_eq!(reply["metadata"], json!({"retries": [reason]}));
    assert_eq!((sent_as_one(&fake), fake.count("SendMessage")), (2, 1));
}

#[tokio::test]
async fn a_renewed_token_is_in_the_reply() {
    let tokens =
        FakeAgent::start(|_| ok(&json!({"access_token": uuid::Uuid::new_v4(), "expires_in": 3600}))).await;
    let is_over = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_over);
    let agent = FakeAgent::start(move |request| match request.rpc_method().as_str() {
        // The first message finds its token revoked.
        "message/send" if switch.swap(false, Ordering::Relaxed) => (401, "text/plain", String::new()),
        _ => v03(request),
    })
    .await;
    let lines = format!(
        "auth:\n  - oauth2: {{ token_url: '{}/token', client_id: me, client_secret: s }}",
        tokens.url
    );
    let actions = actions_with(&lines, &agent, &plain_card()).await;
    is_over.store(true, Ordering::Relaxed);
    let reply = invoke(&actions, None, &CallOptions::default()).await;
    assert_eq!(reply["metadata"], json!({"retries": ["token_renewed"]}), "{reply}");
    assert_eq!(sent_as_one(&agent), 2);
}

#[tokio::test]
async fn an_error_after_a_retry_has_its_reason() {
    let fake = FakeAgent::start(|request| {
        let context = request.json()["params"]["message"]["contextId"].clone();
        match request.rpc_method().as_str() {
            "message/send" if context.is_string() => error(-32602, "unknown contextId"),
            "message/send" => error(-32603, "boom"),
            _ => v03(request),
        }
    })
    .await;
    let actions = actions(&fake, &plain_card()).await;
    let reply = invoke(&actions, Some("s-1"), &CallOptions::default()).await;
    assert_eq!(reply["error_info"]["a2a_code"], -32603, "{reply}");
    assert_eq!(reply["metadata"], json!({"retries": ["context_refused"]}));
}

#[tokio::test]
async fn the_host_of_the_card_gets_the_message_without_credentials() {
    let elsewhere = FakeAgent::start(|_| (401, "text/plain", "Unauthorized".to_owned())).await;
    let fake = FakeAgent::start(|request| match request.path.as_str() {
        "/token" => ok(&json!({"access_token": "t0ken", "expires_in": 3600})),
        _ => v03(request),
    })
    .await;
    let card = json!({"name": "fake", "protocolVersion": "0.3.0", "url": elsewhere.url});
    let oauth =
        format!("auth:\n  - oauth2: {{ token_url: '{}/token', client_id: me, client_secret: s }}", fake.url);
    for credentials in ["bearer_token: t0ken\nheaders: { X-API-Key: k }", &oauth] {
        let before = sent(&elsewhere);
        let lines = format!("use_card_url: true\n{credentials}");
        let actions = actions_with(&lines, &fake, &card).await;
        let reply = invoke(&actions, None, &CallOptions::default()).await;
        assert_eq!(reply["error_info"]["http_status"], 401, "{reply}");
        assert_eq!((sent(&fake), sent(&elsewhere)), (0, before + 1));
    }
    for seen in elsewhere.received() {
        assert_eq!((seen.header("authorization"), seen.header("x-api-key")), (None, None), "{seen:?}");
    }
}

#[tokio::test]
async fn a_retry_takes_no_credentials_to_another_host() {
    let is_new = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_new);
    let elsewhere = FakeAgent::start(move |request| match switch.load(Ordering::Relaxed) {
        true => v1(request),
        false => v03(request),
    })
    .await;
    let fake = FakeAgent::start(v03).await;
    let card = json!({"name": "fake", "protocolVersion": "0.3.0", "url": elsewhere.url});
    let lines = "use_card_url: true\nbearer_token: t0ken\nheaders: { X-API-Key: k }";
    let actions = actions_with(lines, &fake, &card).await;
    is_new.store(true, Ordering::Relaxed);
    let reply = invoke(&actions, None, &CallOptions::default()).await;
    assert_eq!(reply["metadata"], json!({"retries": ["version_not_supported"]}), "{reply}");
    assert_eq!((sent(&elsewhere), fake.received().len()), (2, 0));
    for seen in elsewhere.received() {
        assert_eq!((seen.header("authorization"), seen.header("x-api-key")), (None, None), "{seen:?}");
    }
}

#[tokio::test]
async fn an_agent_that_wants_all_ids_is_found_by_its_errors_and_works() {
    let fake = FakeAgent::start(bindu()).await;
    let card = json!({"name": "fake", "protocolVersion": "1.0.0", "capabilities": {"streaming": false}});
    let actions = actions(&fake, &card).await;
    let options = CallOptions::default();
    let first = invoke(&actions, Some("my session"), &options).await;
    assert_eq!((&first["status"], &first["message"]), (&json!("COMPLETED"), &json!("echo: hi")), "{first}");
    assert!(first.get("metadata").is_none(), "the probe has found it, so nothing is sent twice");
    let second = invoke(&actions, Some("my session"), &options).await;
    assert_eq!(first["task"]["context_id"], second["task"]["context_id"], "one conversation");
    assert_ne!(first["task"]["id"], second["task"]["id"], "a finished task is not changed");
    let other = invoke(&actions, Some("another"), &options).await;
    assert_ne!(first["task"]["context_id"], other["task"]["context_id"]);
    assert_eq!(sent(&fake), 3);
}

#[tokio::test]
async fn an_agent_that_turns_out_to_want_all_ids_gets_them() {
    let is_open = Arc::new(AtomicBool::new(false));
    let (switch, agent) = (Arc::clone(&is_open), bindu());
    let fake = FakeAgent::start(move |request| match switch.load(Ordering::Relaxed) {
        true => agent(request),
        false => (403, "text/plain", "not yet".to_owned()),
    })
    .await;
    let actions = actions_with("bearer_token: t0ken", &fake, &plain_card()).await;
    is_open.store(true, Ordering::Relaxed);
    let reply = invoke(&actions, None, &CallOptions::default()).await;
    assert_eq!(reply["message"], "echo: hi", "{reply}");
    assert_eq!(reply["metadata"], json!({"retries": ["missing_ids"]}));
    assert_eq!(sent_as_one(&fake), 2);
}

#[tokio::test]
async fn a_question_and_a_failure_that_are_only_in_the_history_are_reported() {
    let fake = FakeAgent::start(bindu()).await;
    let actions = actions(&fake, &json!({"name": "fake", "protocolVersion": "1.0.0"})).await;
    let asked = say(&actions, "ask me").await;
    assert_eq!((&asked["status"], &asked["message"]), (&json!("INPUT_REQUIRED"), &json!("which colour?")));
    let answer = FollowUpAnswer {
        follow_up_id: asked["data"]["follow_up_id"].as_str().unwrap().to_owned(),
        parts: vec![Part::Text("blue".to_owned())],
    };
    let done = reply(
        crate::action::follow_up::answer(&actions, answer, &CallOptions::default(), &mut NoProgress).await,
    );
    assert_eq!(
        (&done["message"], &done["task"]["id"]),
        (&json!("echo: blue"), &asked["task"]["id"]),
        "{done}"
    );
    let failed = say(&actions, "fail please").await;
    assert_eq!(failed["status"], "FAILED");
    assert_eq!(failed["message"], "Task execution failed: planned failure");
    let asked = say(&actions, "ask again").await;
    let id = asked["task"]["id"].as_str().unwrap();
    let canceled = actions.cancel_task(id, &CallOptions::default(), &mut NoProgress).await.unwrap();
    assert_eq!(canceled.status.name(), "CANCELED");
}

#[tokio::test]
async fn a_stream_that_completes_before_its_artifact_has_the_artifact() {
    let fake = FakeAgent::start(bindu()).await;
    let card = json!({"name": "fake", "protocolVersion": "1.0.0", "capabilities": {"streaming": true}});
    let actions = actions(&fake, &card).await;
    let reply = invoke_in(ReplyMode::Stream, &actions, Some("s"), &CallOptions::default()).await;
    assert_eq!((&reply["status"], &reply["message"]), (&json!("COMPLETED"), &json!("echo: hi")), "{reply}");
    assert_eq!((fake.count("message/stream"), sent(&fake)), (1, 1));
}

async fn say(actions: &crate::action::actions::Actions, text: &str) -> Value {
    let skill = crate::action::actions::CallableSkill::whole_agent();
    let request = crate::action::request::Invocation {
        parts: vec![Part::Text(text.to_owned())],
        meta: crate::action::request::Meta::default(),
    };
    reply(actions.invoke(&skill, request, &CallOptions::default(), &mut NoProgress).await)
}

#[tokio::test]
async fn a_call_without_a_retry_has_no_metadata() {
    let fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "message/send" => ok(&task("completed", &json!("c"), "done")),
        _ => v03(request),
    })
    .await;
    let reply = invoke(&actions(&fake, &plain_card()).await, Some("s"), &CallOptions::default()).await;
    assert!(reply.get("metadata").is_none(), "{reply}");
}
