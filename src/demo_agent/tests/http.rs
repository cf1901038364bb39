//! Cards, errors, tokens, and answers that are wrong on purpose.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::timeout;

use super::{demo, message, request};

#[tokio::test]
async fn the_card_lists_every_skill_and_one_has_placeholders() {
    let demo = demo(&["--name", "Tester"]).await;
    let card = demo.card().await;
    assert_eq!(card["name"], "Tester");
    let interface = json!({"url": demo.url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"});
    assert_eq!(card["supportedInterfaces"], json!([interface]));
    assert_eq!(card.get("url"), None);
    let skills = card["skills"].as_array().unwrap();
    assert_eq!(skills.len(), 20);
    let with_placeholders: Vec<_> =
        skills.iter().filter(|skill| skill["description"].as_str().unwrap().contains('{')).collect();
    assert_eq!(with_placeholders.len(), 1);
    assert_eq!(with_placeholders[0]["description"], "Write a report about {topic} for {audience}");
    for skill in skills {
        assert!(!skill["tags"].as_array().unwrap().is_empty(), "{skill}");
        assert!(!skill["examples"].as_array().unwrap().is_empty(), "{skill}");
    }
}

#[tokio::test]
async fn the_card_lists_only_the_chosen_skills() {
    let card = demo(&["--skills", "echo,rpc-error"]).await.card().await;
    let ids: Vec<_> = card["skills"].as_array().unwrap().iter().map(|skill| &skill["id"]).collect();
    assert_eq!(ids, ["echo", "rpc-error"]);
}

#[tokio::test]
async fn a_card_can_be_at_one_path_only() {
    let old = demo(&["--only-old-card-path"]).await;
    assert_eq!(old.get(".well-known/agent-card.json").await.status(), 404);
    assert_eq!(old.get(".well-known/agent.json").await.status(), 200);
    let new = demo(&["--only-new-card-path"]).await;
    assert_eq!(new.get(".well-known/agent-card.json").await.status(), 200);
    assert_eq!(new.get(".well-known/agent.json").await.status(), 404);
}

#[tokio::test]
async fn a_card_file_is_read_again_for_every_request() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let demo = demo(&["--card-file", file.path().to_str().unwrap()]).await;
    std::fs::write(file.path(), r#"{"name":"one","url":"{url}"}"#).unwrap();
    assert_eq!(demo.card().await, json!({"name": "one", "url": demo.url}));
    std::fs::write(file.path(), r#"{"name":"two"}"#).unwrap();
    assert_eq!(demo.card().await["name"], "two");
}

#[tokio::test]
async fn each_kind_of_broken_card_is_broken_in_its_way() {
    let fetch = async |kind| {
        let demo = demo(&["--broken-card", kind]).await;
        let response = demo.get(".well-known/agent-card.json").await;
        let location = response.headers().get("location").map(|value| value.to_str().unwrap().to_owned());
        (response.status().as_u16(), location, response.text().await.unwrap())
    };
    let (_, _, text) = fetch("invalid-json").await;
    assert!(serde_json::from_str::<Value>(&text).is_err());
    let (_, _, text) = fetch("no-skills").await;
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap()["skills"], json!([]));
    assert!(fetch("html").await.2.starts_with("<!DOCTYPE html>"));
    assert_eq!(fetch("empty").await.2, "{}");
    assert!(fetch("huge").await.2.len() > 20_000_000);
    assert_eq!(fetch("404").await.0, 404);
    let (status, location, _) = fetch("redirect").await;
    assert_eq!(status, 302);
    assert!(location.unwrap().starts_with("http://localhost:"));
}

#[rstest::rstest]
#[case::parse("{oops", -32700, None)]
#[case::batch("[]", -32600, Some("INVALID_REQUEST"))]
#[case::no_method(r#"{"jsonrpc":"2.0","id":1}"#, -32600, Some("INVALID_REQUEST"))]
#[case::odd_id(r#"{"jsonrpc":"2.0","id":{},"method":"GetTask"}"#, -32600, Some("INVALID_REQUEST"))]
#[case::unknown_method(r#"{"jsonrpc":"2.0","id":1,"method":"message/send"}"#, -32601, None)]
#[case::no_message(r#"{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{"x":1}}"#, -32602, Some("INVALID_PARAMS"))]
#[case::no_id(r#"{"jsonrpc":"2.0","id":1,"method":"GetTask"}"#, -32602, Some("INVALID_PARAMS"))]
#[case::no_such_task(r#"{"jsonrpc":"2.0","id":1,"method":"GetTask","params":{"id":"x"}}"#, -32001, Some("TASK_NOT_FOUND"))]
#[case::extended_card(r#"{"jsonrpc":"2.0","id":1,"method":"GetExtendedAgentCard"}"#, -32004, Some("UNSUPPORTED_OPERATION"))]
#[tokio::test]
async fn a_wrong_request_gets_its_json_rpc_error(
    #[case] body: &str,
    #[case] code: i64,
    #[case] reason: Option<&str>,
) {
    let demo = demo(&[]).await;
    let answer = demo.post(body).send().await.unwrap().text().await.unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["error"]["code"], code, "{answer}");
    assert_eq!(answer["error"]["data"][0]["reason"].as_str(), reason);
    assert!(answer.get("id").is_some());
}

#[tokio::test]
async fn a_version_other_than_1_0_is_refused() {
    let demo = demo(&[]).await;
    let code = async |version: &str| {
        let call = demo.post(request("GetTask", json!({"id": "x"}))).header("A2A-Version", version);
        let answer: Value = serde_json::from_str(&call.send().await.unwrap().text().await.unwrap()).unwrap();
        answer["error"]["code"].clone()
    };
    assert_eq!(code("1.0").await, -32001);
    assert_eq!(code("0.3").await, -32009);
    assert_eq!(code("1.0.0").await, -32009);
}

#[tokio::test]
async fn calls_need_the_token_and_the_card_only_with_card_auth() {
    let open_card = demo(&["--bearer", "s3cret"]).await;
    let refused = open_card.post(request("GetTask", json!({"id": "x"}))).send().await.unwrap();
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["www-authenticate"]),
        (401, &"Bearer".parse().unwrap())
    );
    let allowed = open_card.post(request("GetTask", json!({"id": "x"}))).bearer_auth("s3cret");
    assert_eq!(allowed.send().await.unwrap().status(), 200);
    let card = open_card.card().await;
    assert_eq!(card["securitySchemes"]["bearer"]["httpAuthSecurityScheme"]["scheme"], "Bearer");

    let closed_card = demo(&["--bearer", "s3cret", "--card-auth"]).await;
    assert_eq!(closed_card.get(".well-known/agent-card.json").await.status(), 401);
}

#[tokio::test]
async fn skills_that_open_no_task_answer_as_planned() {
    let demo = demo(&[]).await;
    let ask = async |text: &str| demo.post(request("SendMessage", message(text))).send().await.unwrap();
    let unavailable = ask("http 503").await;
    assert_eq!(unavailable.status(), 503);
    assert!(unavailable.headers()["content-type"].to_str().unwrap().starts_with("text/plain"));
    assert!(ask("html").await.text().await.unwrap().starts_with("<!DOCTYPE html>"));
    assert_eq!(ask("garbage").await.text().await.unwrap(), r#"{"weather":"fine"}"#);
    let error: Value = serde_json::from_str(&ask("rpc-error -32005").await.text().await.unwrap()).unwrap();
    assert_eq!(error["error"]["code"], -32005);
    assert!(error["error"]["data"].is_array());
    let error: Value = serde_json::from_str(&ask("rpc-error").await.text().await.unwrap()).unwrap();
    assert_eq!(error["error"]["code"], -32603);
}

#[tokio::test]
async fn the_agent_stops_while_a_request_hangs() {
    let mut demo = demo(&[]).await;
    let hanging = demo.post(request("SendMessage", message("hang"))).send();
    assert!(timeout(Duration::from_millis(100), hanging).await.is_err());
    demo.stop.cancel();
    (&mut demo.serving).await.unwrap().unwrap();
}
