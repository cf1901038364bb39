//! Which wire is chosen for agents whose cards are wrong, silent, or out of date.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::fake::{FakeAgent, error, not_found, ok, v01, v1, v03};
use crate::a2a::card::{Card, CardError};
use crate::a2a::client::{Client, ClientError};
use crate::a2a::dialect::{Dialect, OutgoingMessage};
use crate::a2a::model::{Answer, Part};
use crate::a2a::retry::{Retries, Retry};
use crate::telemetry::trace_context::TraceContext;

async fn send(client: &Client) -> Result<Answer, ClientError> {
    send_recording(client, &Retries::new(&"agent".into())).await
}

async fn send_recording(client: &Client, retries: &Retries) -> Result<Answer, ClientError> {
    let parts = [Part::Text("hi".to_owned())];
    let message = OutgoingMessage {
        message_id: uuid::Uuid::new_v4(),
        blocking: true,
        task_id: None,
        new_task_id: Some("made-here"),
        context_id: None,
        reference_task_ids: &[],
        parts: &parts,
        skill_id: None,
        output_modes: &[],
        retries,
    };
    client.send(&message, &TraceContext::default()).await
}

async fn text(client: &Client) -> String {
    match send(client).await.unwrap() {
        Answer::Task(task) => task.artifacts[0].parts[0].as_text().unwrap().to_owned(),
        Answer::Message(_) => panic!("a message"),
    }
}

fn card_v03(url: &str) -> Value {
    json!({"name": "fake", "url": url, "protocolVersion": "0.3.0", "skills": []})
}

fn card_v1(url: &str) -> Value {
    let interface = json!({"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"});
    json!({"name": "fake", "supportedInterfaces": [interface], "skills": []})
}

#[tokio::test]
async fn a_card_that_tells_the_truth_costs_one_probe() {
    let fake = FakeAgent::start(v03).await;
    let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    assert_eq!(interface.reason, "the card says so, and a probe agrees");
    assert_eq!((fake.count("tasks/get"), fake.received().len()), (1, 1));
    assert_eq!(text(&client).await, "done in 0.3");
}

#[tokio::test]
async fn a_card_that_says_1_0_where_the_wire_is_0_3() {
    let fake = FakeAgent::start(v03).await;
    let (client, interface) = fake.client("", &card_v1(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    assert_eq!(interface.reason, "a probe found it; the card says otherwise");
    assert_eq!(text(&client).await, "done in 0.3");
}

#[tokio::test]
async fn a_card_that_says_0_3_where_the_wire_is_1_0() {
    let fake = FakeAgent::start(v1).await;
    let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V1);
    assert_eq!(text(&client).await, "done in 1.0");
}

#[tokio::test]
async fn a_card_without_a_version_is_probed_for_0_1_too() {
    for (card, fields) in [
        (json!({"name": "fake", "skills": []}), "nothing"),
        (json!({"name": "fake", "authentication": {"schemes": []}}), "a v0.1 field"),
        (json!({"name": "fake", "protocolVersion": null, "url": null}), "nulls"),
    ] {
        let fake = FakeAgent::start(v01).await;
        let (client, interface) = fake.client("", &card).await;
        assert_eq!(interface.dialect, Dialect::V01, "a card with {fields}");
        assert_eq!(text(&client).await, "done in 0.1");
        let fake = FakeAgent::start(v03).await;
        let (_, interface) = fake.client("", &card).await;
        assert_eq!(interface.dialect, Dialect::V03, "a card with {fields}");
    }
}

#[tokio::test]
async fn settings_come_before_the_card() {
    let fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "GetTask" | "SendMessage" => v1(request),
        _ => v03(request),
    })
    .await;
    let (client, interface) = fake.client("protocol: 0.3", &card_v1(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    assert!(interface.reason.starts_with("the settings say so"), "{}", interface.reason);
    assert_eq!(text(&client).await, "done in 0.3");
}

#[tokio::test]
async fn an_agent_without_a_way_to_look_at_tasks_is_still_found() {
    let fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "tasks/get" => error(-32601, "Method not found"),
        _ => v03(request),
    })
    .await;
    let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    assert_eq!(text(&client).await, "done in 0.3");
}

#[tokio::test]
async fn unusable_addresses_and_slashes_just_work() {
    for (card_url, served) in [
        ("http://0.0.0.0:1/", "/"),
        ("http://[::]:8080/a2a", "/a2a"),
        ("http://127.0.0.1:2/a2a/", "/a2a"),
        ("http://agent.internal/a2a", "/a2a/"),
        ("http://agent.internal/wrong", "/"),
    ] {
        let fake = FakeAgent::start(move |request| match request.path == served {
            true => v03(request),
            false if request.path.trim_end_matches('/') == served.trim_end_matches('/') => {
                (307, "text/plain", String::new())
            }
            false => not_found(),
        })
        .await;
        let (client, interface) = fake.client("", &card_v03(card_url)).await;
        assert_eq!(interface.url.path(), served, "{card_url}");
        assert_eq!(text(&client).await, "done in 0.3", "{card_url}");
    }
}

#[tokio::test]
async fn a_clear_version_error_makes_it_choose_again_and_send_once() {
    let is_new = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_new);
    let fake = FakeAgent::start(move |request| match switch.load(Ordering::Relaxed) {
        true => v1(request),
        false => v03(request),
    })
    .await;
    let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    is_new.store(true, Ordering::Relaxed);
    assert_eq!(text(&client).await, "done in 1.0");
    assert_eq!(fake.count("SendMessage"), 1);
    // The old client now looks for tasks over the new wire.
    let lost = client.get("t", &TraceContext::default()).await.unwrap_err();
    assert!(lost.is_task_not_found(), "{lost}");
}

#[tokio::test]
async fn other_errors_are_never_a_reason_to_send_again() {
    for (status, content_type, body) in [
        (500, "text/plain", "Internal Server Error"),
        (200, "application/json", r#"{"error": {"code": -32603, "message": "boom"}}"#),
        (200, "text/html", "<html>busy</html>"),
        (503, "application/json", "{}"),
    ] {
        let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
            "message/send" => (status, content_type, body.to_owned()),
            _ => v03(request),
        })
        .await;
        let (client, _) = fake.client("", &card_v03(&fake.url)).await;
        send(&client).await.unwrap_err();
        assert_eq!(fake.count("message/send"), 1, "{body}");
    }
}

#[tokio::test]
async fn an_address_that_has_answered_before_is_not_the_wrong_one() {
    for status in [404, 405, 302] {
        let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
            "message/send" | "SendMessage" => (status, "text/plain", "nope".to_owned()),
            // Speaks everything else of two wires, so that there would be another one to try.
            "GetTask" => v1(request),
            _ => v03(request),
        })
        .await;
        let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
        assert!(interface.is_confirmed);
        let error = send(&client).await.unwrap_err();
        assert!(
            matches!(error, ClientError::Refused { http_status: Some(seen), .. } if seen == status),
            "{error}"
        );
        assert_eq!((fake.count("message/send"), fake.count("SendMessage")), (1, 0));
    }
}

#[tokio::test]
async fn when_the_other_wire_is_wrong_too_the_first_error_is_told() {
    let is_new = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_new);
    let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
        "message/send" if switch.load(Ordering::Relaxed) => error(-32601, "no such method in 0.3"),
        "SendMessage" => error(-32601, "no such method in 1.0"),
        "GetTask" => v1(request),
        _ => v03(request),
    })
    .await;
    let (client, _) = fake.client("", &card_v03(&fake.url)).await;
    is_new.store(true, Ordering::Relaxed);
    let error = send(&client).await.unwrap_err();
    assert!(error.to_string().contains("no such method in 0.3"), "{error}");
    assert_eq!(fake.count("SendMessage"), 1, "it was tried");
}

#[tokio::test]
async fn rest_has_its_own_addresses_tenant_and_media_type() {
    let fake = FakeAgent::start(|request| match (request.method.as_str(), request.path.as_str()) {
        _ if request.header("content-type") == Some("application/a2a+json") => {
            (415, "text/plain", "Unsupported Media Type".to_owned())
        }
        ("GET", path) if path.starts_with("/api/acme%2Fx/tasks/") => (
            404,
            "application/json",
            json!({"error": {"code": 404, "message": "gone", "details": [{"reason": "TASK_NOT_FOUND"}]}})
                .to_string(),
        ),
        ("POST", "/api/acme%2Fx/message:send") => (
            201,
            "application/json",
            json!({"message": {"role": "ROLE_AGENT", "parts": [{"text": "hi"}]}}).to_string(),
        ),
        _ => not_found(),
    })
    .await;
    let interface = json!({"url": "http://x/api/", "protocolBinding": "HTTP+JSON", "protocolVersion": "1.0",
                           "tenant": "acme/x"});
    let card = json!({"name": "fake", "supportedInterfaces": [interface]});
    let (client, interface) = fake.client("", &card).await;
    assert_eq!(interface.dialect, Dialect::V1Rest);
    let retries = Retries::new(&"agent".into());
    assert!(matches!(send_recording(&client, &retries).await.unwrap(), Answer::Message(_)));
    assert_eq!(retries.list(), [Retry::MediaType]);
    let sends = fake.received().into_iter().filter(|seen| seen.path.ends_with(":send"));
    let sent: Vec<Value> = sends.map(|seen| seen.json()["message"]["messageId"].clone()).collect();
    assert_eq!(sent.len(), 2, "the second is in plain JSON, after a 415");
    assert_eq!(sent[0], sent[1]);
}

#[tokio::test]
async fn a_tenant_of_json_rpc_is_a_parameter() {
    let fake = FakeAgent::start(v1).await;
    let mut card = card_v1(&fake.url);
    card["supportedInterfaces"][0]["tenant"] = json!("acme");
    let (client, _) = fake.client("", &card).await;
    text(&client).await;
    for seen in fake.received() {
        assert_eq!(seen.json()["params"]["tenant"], "acme", "{}", seen.text);
    }
}

#[tokio::test]
async fn v0_3_rest_is_not_doubled_below_v1() {
    let fake = FakeAgent::start(|request| match request.path.as_str() {
        "/v1/message:send" => ok(&json!({"msg": {"role": "ROLE_AGENT", "content": [{"text": "hi"}]}})),
        path if path.starts_with("/v1/tasks/") => {
            (404, "application/json", r#"{"message":"Task not found"}"#.into())
        }
        _ => not_found(),
    })
    .await;
    let mut card = card_v03("http://x/v1/");
    card["preferredTransport"] = json!("HTTP+JSON");
    let (client, interface) = fake.client("", &card).await;
    assert_eq!(interface.dialect, Dialect::V03Rest);
    let Answer::Message(message) = send(&client).await.unwrap() else { panic!("no message") };
    assert_eq!(message.parts[0].as_text(), Some("hi"));
}

#[tokio::test]
async fn grpc_alone_is_not_spoken_and_it_says_so() {
    let fake = FakeAgent::start(v03).await;
    let mut card = card_v03("x:50051");
    card["preferredTransport"] = json!("GRPC");
    let card = Card::from_value(card).unwrap();
    let error = fake.chooser("").choose(&card).await.unwrap_err();
    assert!(matches!(&error, CardError::Unsupported(offered) if offered == "GRPC 0.3.0"), "{error}");
    assert!(fake.received().is_empty());
}

#[tokio::test]
async fn the_card_is_believed_when_nobody_answers_a_probe() {
    let fake = FakeAgent::start(v03).await;
    let base = {
        // A port that nobody listens at.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let card = Card::from_value(card_v03(&format!("http://{base}/"))).unwrap();
    let chooser = fake.chooser("use_card_url: true");
    let interface = chooser.choose(&card).await.unwrap();
    assert_eq!(interface.reason, "the card says so; no probe was answered");
}

#[tokio::test]
async fn bodies_that_are_not_a2a_are_told_with_their_first_bytes() {
    for (content_type, body, expected) in [
        (
            "text/html",
            "<html><body>Log in</body></html>",
            "it came as text/html; it begins with: <html><body>Log in",
        ),
        ("application/json", "", "the body is empty"),
        ("application/json", r#"{"jsonrpc":"2.0","result":{"id":"t","sta"#, "begins with: {\"jsonrpc\""),
        ("application/json", "[]", "not a JSON object"),
        ("application/json", r#"{"result": {}}"#, "neither a task nor a message"),
        ("application/json", r#"{"result": 7}"#, "begins with: {\"result\": 7}"),
        ("application/json", r#"{"error": []}"#, "an error that is neither"),
        ("text/event-stream", "data: {}\n\n", "it came as text/event-stream"),
    ] {
        let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
            "message/send" => (200, content_type, body.to_owned()),
            _ => v03(request),
        })
        .await;
        let (client, _) = fake.client("", &card_v03(&fake.url)).await;
        let error = send(&client).await.unwrap_err();
        assert!(matches!(error, ClientError::NotA2a { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}
