//! Which dialect is chosen for agents whose cards are wrong, incomplete, or out of date.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::fake::{FakeAgent, FakeResponse, error, not_found, ok, v01, v1, v03};
use crate::a2a::card::{Card, CardError, Interface};
use crate::a2a::choose::{DialectFallback, ProbeFailure};
use crate::a2a::client::{Client, ClientError};
use crate::a2a::dialect::{Dialect, OutgoingMessage};
use crate::a2a::model::{Part, SendResult};
use crate::a2a::retry::{Retries, Retry};
use crate::telemetry::trace_context::TraceContext;

async fn send(client: &Client) -> Result<SendResult, ClientError> {
    send_recording(client, &Retries::new(&"agent".into())).await
}

async fn send_recording(client: &Client, retries: &Retries) -> Result<SendResult, ClientError> {
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
        caller: None,
        run_id: None,
        session_id: None,
        output_modes: &[],
        retries,
    };
    client.send(&message, &TraceContext::default()).await
}

async fn text(client: &Client) -> String {
    match send(client).await.unwrap() {
        SendResult::Task(task) => task.artifacts[0].parts[0].as_text().unwrap().to_owned(),
        SendResult::Message(_) => panic!("a message"),
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
async fn a_correct_card_costs_one_probe() {
    let fake = FakeAgent::start(v03).await;
    let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    assert_eq!(interface.reason, "declared by the card and confirmed by a probe");
    assert_eq!((fake.count("tasks/get"), fake.received().len()), (1, 1));
    assert_eq!(text(&client).await, "done in 0.3");
}

#[tokio::test]
async fn a_card_declares_1_0_and_the_agent_speaks_0_3() {
    let fake = FakeAgent::start(v03).await;
    let (client, interface) = fake.client("", &card_v1(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    assert_eq!(interface.reason, "found by a probe; the card declares another");
    assert_eq!(text(&client).await, "done in 0.3");
}

#[tokio::test]
async fn a_card_declares_0_3_and_the_agent_speaks_1_0() {
    let fake = FakeAgent::start(v1).await;
    let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V1);
    assert_eq!(text(&client).await, "done in 1.0");
}

#[tokio::test]
async fn a_card_without_a_version_is_also_probed_for_0_1() {
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
async fn the_configuration_takes_precedence_over_the_card() {
    let fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "GetTask" | "SendMessage" => v1(request),
        _ => v03(request),
    })
    .await;
    let (client, interface) = fake.client("protocol: 0.3", &card_v1(&fake.url)).await;
    assert_eq!(interface.dialect, Dialect::V03);
    assert!(interface.reason.starts_with("declared by the configuration"), "{}", interface.reason);
    assert_eq!(text(&client).await, "done in 0.3");
}

#[tokio::test]
async fn an_agent_without_tasks_get_is_still_found() {
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
async fn unusable_addresses_and_wrong_slashes_are_corrected() {
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
async fn a_version_error_makes_the_client_choose_again_and_send_once() {
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
    // The old client now gets tasks in the new dialect.
    let lost = client.get("t", &TraceContext::default()).await.unwrap_err();
    assert!(lost.is_task_not_found(), "{lost}");
}

#[tokio::test]
async fn other_errors_are_never_a_reason_to_repeat_a_message() {
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
async fn an_address_that_has_responded_before_is_never_the_wrong_one() {
    for status in [404, 405, 302] {
        let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
            "message/send" | "SendMessage" => (status, "text/plain", "nope".to_owned()),
            // Speaks everything else of two dialects, so that there is another one to try.
            "GetTask" => v1(request),
            _ => v03(request),
        })
        .await;
        let (client, interface) = fake.client("", &card_v03(&fake.url)).await;
        assert!(interface.is_confirmed);
        let error = send(&client).await.unwrap_err();
        assert!(
            matches!(error, ClientError::Refused { http_status: Some(got), .. } if got == status),
            "{error}"
        );
        assert_eq!((fake.count("message/send"), fake.count("SendMessage")), (1, 0));
    }
}

#[tokio::test]
async fn if_the_other_dialect_is_wrong_too_the_first_error_is_reported() {
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
    assert_eq!(fake.count("SendMessage"), 1, "the other dialect was tried");
}

#[tokio::test]
async fn rest_has_its_own_paths_tenant_and_media_type() {
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
    assert!(matches!(send_recording(&client, &retries).await.unwrap(), SendResult::Message(_)));
    assert_eq!(retries.list(), [Retry::MediaType]);
    let sends = fake.received().into_iter().filter(|request| request.path.ends_with(":send"));
    let sent: Vec<Value> = sends.map(|request| request.json()["message"]["messageId"].clone()).collect();
    assert_eq!(sent.len(), 2, "the second is in plain JSON, after a 415");
    assert_eq!(sent[0], sent[1]);
}

#[tokio::test]
async fn the_tenant_is_a_parameter_in_json_rpc() {
    let fake = FakeAgent::start(v1).await;
    let mut card = card_v1(&fake.url);
    card["supportedInterfaces"][0]["tenant"] = json!("acme");
    let (client, _) = fake.client("", &card).await;
    text(&client).await;
    for request in fake.received() {
        assert_eq!(request.json()["params"]["tenant"], "acme", "{}", request.text);
    }
}

#[tokio::test]
async fn the_path_v1_of_v0_3_rest_is_not_doubled() {
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
    let SendResult::Message(message) = send(&client).await.unwrap() else { panic!("not a message") };
    assert_eq!(message.parts[0].as_text(), Some("hi"));
}

#[tokio::test]
async fn an_agent_that_speaks_only_grpc_is_unsupported() {
    let fake = FakeAgent::start(v03).await;
    let mut card = card_v03("x:50051");
    card["preferredTransport"] = json!("GRPC");
    let card = Card::from_value(card).unwrap();
    let error = fake.chooser("").choose(&card).await.unwrap_err();
    assert!(matches!(&error, CardError::Unsupported(declared) if declared == "GRPC 0.3.0"), "{error}");
    assert!(fake.received().is_empty());
}

#[tokio::test]
async fn the_card_decides_if_the_agent_responds_to_no_probe() {
    let fake = FakeAgent::start(v03).await;
    let base = {
        // A port without a listener.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let card = Card::from_value(card_v03(&format!("http://{base}/"))).unwrap();
    let chooser = fake.chooser("use_card_url: true");
    let interface = chooser.choose(&card).await.unwrap();
    assert_eq!(interface.reason, "declared by the card; the agent did not respond to any probe");
}

#[tokio::test]
async fn the_error_shows_the_beginning_of_a_body_that_is_not_a2a() {
    for (content_type, body, expected) in [
        (
            "text/html",
            "<html><body>Log in</body></html>",
            "the content type is text/html; it begins with: <html><body>Log in",
        ),
        ("application/json", "", "the body is empty"),
        ("application/json", r#"{"jsonrpc":"2.0","result":{"id":"t","sta"#, "begins with: {\"jsonrpc\""),
        ("application/json", "[]", "not a JSON object"),
        ("application/json", r#"{"result": {}}"#, "neither a task nor a message"),
        ("application/json", r#"{"result": 7}"#, "begins with: {\"result\": 7}"),
        ("application/json", r#"{"error": []}"#, "`error` is neither an object nor a string"),
        ("text/event-stream", "data: {}\n\n", "the content type is text/event-stream"),
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

/// What an agent of v1.0 is chosen with if it responds to every request like this.
async fn failure_of(response: FakeResponse) -> (FakeAgent, Interface) {
    let fake = FakeAgent::start(move |_| response.clone()).await;
    let interface =
        fake.chooser("bearer_token: t").choose(&Card::from_value(card_v1(&fake.url)).unwrap()).await;
    (fake, interface.unwrap())
}

#[tokio::test]
async fn a_response_that_says_nothing_about_the_dialect_confirms_none() {
    let page = "<html>Log in</html>";
    for (status, content_type, failure) in [
        (401, "text/plain", ProbeFailure::Rejected(401)),
        (403, "text/plain", ProbeFailure::Rejected(403)),
        (429, "text/plain", ProbeFailure::Status(429)),
        (500, "text/plain", ProbeFailure::Status(500)),
        (502, "text/html", ProbeFailure::Status(502)),
        (503, "text/plain", ProbeFailure::Status(503)),
        (404, "text/html", ProbeFailure::Status(404)),
        (200, "text/html", ProbeFailure::NotA2a),
    ] {
        let (_fake, interface) = failure_of((status, content_type, page.to_owned())).await;
        assert_eq!((interface.dialect, interface.is_confirmed), (Dialect::V1, false), "{status}");
        assert_eq!(interface.failure, Some(failure), "{status}");
        assert_eq!(interface.reason, format!("declared by the card; {failure}"), "{status}");
    }
}

#[tokio::test]
async fn rejected_credentials_cost_few_probes_and_are_probed_until_they_are_accepted() {
    let is_accepted = Arc::new(AtomicBool::new(false));
    let switch = Arc::clone(&is_accepted);
    let fake = FakeAgent::start(move |request| match switch.load(Ordering::Relaxed) {
        true => v1(request),
        false => (401, "text/plain", "Unauthorized".to_owned()),
    })
    .await;
    let (chooser, card) = (fake.chooser(""), Card::from_value(card_v1(&fake.url)).unwrap());
    for _ in 0..2 {
        assert_eq!(chooser.choose(&card).await.unwrap().failure, Some(ProbeFailure::Rejected(401)));
    }
    assert_eq!(fake.received().len(), 4, "a task and a message, twice");
    is_accepted.store(true, Ordering::Relaxed);
    let interface = chooser.choose(&card).await.unwrap();
    assert_eq!((interface.failure, interface.is_confirmed), (None, true));
}

#[tokio::test]
async fn an_agent_that_only_refuses_to_look_up_a_task_is_usable() {
    for status in [403, 500] {
        let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
            "SendMessage" => error(-32602, "message is missing"),
            _ => (status, "text/plain", "no".to_owned()),
        })
        .await;
        let (_, interface) = fake.client("", &card_v1(&fake.url)).await;
        assert_eq!((interface.dialect, interface.failure), (Dialect::V1, None), "{status}");
        assert_eq!(interface.reason, "declared by the card; no probe contradicts it");
    }
}

#[tokio::test]
async fn a_call_confirms_what_the_probes_could_not() {
    let fake = FakeAgent::start(|request| match request.json()["params"]["message"].is_object() {
        true => v1(request),
        false => (500, "text/plain", "KeyError: 'message'".to_owned()),
    })
    .await;
    let (chooser, card) = (fake.chooser(""), Arc::new(Card::from_value(card_v1(&fake.url)).unwrap()));
    let interface = chooser.choose(&card).await.unwrap();
    assert_eq!(interface.failure, Some(ProbeFailure::Status(500)));
    let probes = fake.received().len();
    assert_eq!(chooser.choose(&card).await.unwrap(), interface);
    assert_eq!(fake.received().len(), probes, "the agent may log each probe as an error");
    let changed = Arc::new(tokio::sync::Notify::new());
    let fallback =
        DialectFallback { chooser: Arc::clone(&chooser), card: Arc::clone(&card), changed: changed.clone() };
    let client = chooser.client(&card, &interface).unwrap().with_fallback(fallback);
    assert_eq!(text(&client).await, "done in 1.0");
    changed.notified().await;
    let interface = chooser.choose(&card).await.unwrap();
    assert_eq!((interface.failure, interface.is_confirmed), (None, true));
}
