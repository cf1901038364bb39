//! Responses that are small on the wire and large or slow to decode.

use std::sync::Arc;

use futures_util::poll;
use serde_json::json;

use super::fake::{FakeAgent, error};
use crate::a2a::client::{Client, ClientError, ResponseId, ResponseLimits};
use crate::a2a::dialect::Dialect;
use crate::a2a::http::HttpResponse;
use crate::a2a::model::Task;
use crate::a2a::stream::EventStream;
use crate::memory::MemoryAccount;
use crate::telemetry::trace_context::TraceContext;

const MIB: usize = 1 << 20;

/// A client of an agent that responds to every request for a task with this result.
async fn client(result: String) -> Client {
    let fake = FakeAgent::start(move |request| {
        let json = request.json();
        if json["params"]["id"] != "t" {
            return error(-32001, "Task not found");
        }
        let body = format!(r#"{{"jsonrpc":"2.0","id":{},"result":{result}}}"#, json["id"]);
        (200, "application/json", body)
    })
    .await;
    let lines = "max_response_size: 2MiB";
    fake.client(lines, &json!({"name": "a", "protocolVersion": "0.3"})).await.0
}

async fn get(result: String) -> Result<Task, ClientError> {
    client(result).await.get("t", &TraceContext::default()).await
}

fn list(item: &str) -> String {
    vec![item; MIB / (item.len() + 1)].join(",")
}

fn task(fields: &str) -> String {
    format!(r#"{{"kind":"task","id":"t","status":{{"state":"completed"}},{fields}}}"#)
}

#[rstest::rstest]
#[case::artifacts(&format!(r#""artifacts":[{}]"#, list("{}")))]
#[case::messages(&format!(r#""history":[{}]"#, list("{}")))]
#[case::empty_texts(&format!(r#""artifacts":[{{"parts":[{}]}}]"#, list(r#"{"text":""}"#)))]
#[case::empty_urls(&format!(r#""artifacts":[{{"parts":[{}]}}]"#, list(r#"{"url":""}"#)))]
#[case::data(&format!(r#""history":[{{"parts":[{}]}}]"#, list(r#"{"data":1}"#)))]
#[case::content(&format!(r#""history":[{{"content":[{}]}}]"#, list(r#"{"data":1}"#)))]
#[case::extras(&format!(r#""artifacts":[{}]"#, list(r#"{"metadata":1}"#)))]
#[case::extras_of_parts(&format!(r#""artifacts":[{{"parts":[{}]}}]"#, list(r#"{"text":"","metadata":1}"#)))]
#[tokio::test]
async fn what_takes_more_memory_than_the_limit_is_too_large_however_short_its_text(#[case] fields: &str) {
    let error = get(task(fields)).await.unwrap_err();
    assert!(matches!(error, ClientError::TooLarge { .. }), "{error:?}");
}

#[tokio::test]
async fn empty_parts_take_no_memory() {
    let parts = list("{}");
    let decoded = get(task(&format!(r#""artifacts":[{{"parts":[{parts}]}}]"#))).await.unwrap();
    assert_eq!(decoded.artifacts[0].parts.capacity(), 0);
    let decoded = get(task(&format!(r#""history":[{{"parts":[{parts}]}}]"#))).await.unwrap();
    assert_eq!(decoded.history[0].parts.capacity(), 0);
}

#[tokio::test]
async fn an_id_that_is_a_document_is_refused_without_building_it() {
    let fields = format!(r#""artifacts":[{{"artifactId":[{}]}}]"#, list("[]"));
    let error = get(task(&fields)).await.unwrap_err();
    assert!(matches!(&error, ClientError::NotA2a { reason, .. } if reason.contains("1024")), "{error:?}");
}

#[tokio::test]
async fn an_error_that_is_a_document_is_shortened() {
    let body = format!(r#"{{"error":{{"code":-32603,"message":[{}]}}}}"#, list("[]"));
    let error = crate::a2a::client::read_recorded(Dialect::V03, 200, None, body.as_bytes()).unwrap_err();
    assert!(matches!(&error, ClientError::Refused { message, .. } if message.len() <= 4096), "{error:?}");
}

/// A stream whose data has already arrived.
async fn arrived_stream(body: String) -> EventStream {
    let mut response = hyper::Response::new(body);
    let events = reqwest::header::HeaderValue::from_static("text/event-stream");
    response.headers_mut().insert(reqwest::header::CONTENT_TYPE, events);
    let response = HttpResponse::from(reqwest::Response::from(response));
    let limits = ResponseLimits { max_size: 16 << 20, memory: MemoryAccount::unlimited("fake") };
    EventStream::open(response, Dialect::V03, limits, ResponseId::unchecked()).await.unwrap()
}

#[tokio::test]
async fn ignored_events_yield_to_other_tasks() {
    let mut stream = arrived_stream("data: x\n\n".repeat(20_000)).await;
    let mut yields = 0;
    let mut next = std::pin::pin!(stream.next());
    while poll!(&mut next).is_pending() {
        yields += 1;
        tokio::task::yield_now().await;
    }
    assert!(yields >= 100, "{yields}");
}

#[tokio::test]
async fn a_stream_holds_an_event_only_until_the_next() {
    let text = "x".repeat(MIB);
    let event = |text: &str| {
        let parts = json!([{"text": text}]);
        let update = json!({"taskId": "t", "artifact": {"artifactId": "a", "parts": parts}});
        format!("data: {}\n\n", json!({"artifactUpdate": update}))
    };
    let mut stream = arrived_stream(event(&text) + &event("small")).await;
    let memory = MemoryAccount::unlimited("fake");
    stream.charge_to(Arc::clone(&memory));
    stream.next().await.unwrap().unwrap();
    assert!(memory.used() >= MIB, "{}", memory.used());
    stream.next().await.unwrap().unwrap();
    // The parser may keep its buffer.
    let with_buffer = memory.used();
    drop(stream);
    assert!(with_buffer < 4 * MIB);
    assert_eq!(memory.used(), 0);
}
