//! Valid and invalid requests.

use bytes::Bytes;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{Answer, Bridge, Peer, eventually_eq, peer};

/// A bridge for an agent that echoes, with these descriptions of its skills `one`, `two`, ….
async fn bridge_of(descriptions: &[&str]) -> (Bridge, Peer) {
    let mut card = peer::card(&[]);
    for (name, description) in ["one", "two", "three"].iter().zip(descriptions) {
        let skills = card["skills"].as_array_mut().unwrap();
        skills.push(json!({"id": name, "name": name, "description": description}));
    }
    let peer = Peer::agent_with_card(card, |seen| {
        let text = seen.json()["params"]["message"]["parts"][0]["text"].clone();
        Answer::task(seen, "TASK_STATE_COMPLETED", text.as_str().unwrap_or_default())
    });
    let bridge = Bridge::with_peer(&peer).await;
    (bridge, peer)
}

#[rstest]
#[case::an_object(r#"{"prompt": "hello"}"#, "hello")]
#[case::an_object_with_space_around("\n {\"prompt\": \"hello\"} \n", "hello")]
#[case::a_string(r#""hello \"you\"""#, "hello \"you\"")]
#[case::plain_text("hello you", "hello you")]
#[case::text_with_space_around("  hello\n", "  hello\n")]
#[case::a_number("42", "42")]
#[case::a_number_with_a_fraction("1.50", "1.50")]
#[case::a_boolean("true", "true")]
#[case::null("null", "null")]
#[case::text_that_begins_like_an_object("{hello} you", "{hello} you")]
#[case::text_that_begins_like_an_array("[draft] hello", "[draft] hello")]
#[case::text_that_begins_like_a_string("\"hello\" he said", "\"hello\" he said")]
#[case::unicode("Grüße 🦀", "Grüße 🦀")]
#[case::text_that_ends_like_an_object("hello {you}", "hello {you}")]
#[case::an_object_that_is_cut_off(r#"{"prompt": "hello""#, r#"{"prompt": "hello""#)]
#[case::a_marked_text("\u{feff}hello", "hello")]
#[case::a_marked_string("\u{feff}\"hello\"", "hello")]
#[case::a_marked_object("\u{feff}{\"prompt\": \"hello\"}", "hello")]
#[tokio::test]
async fn request_body_becomes_the_prompt(#[case] body: &'static str, #[case] prompt: &str) {
    let (bridge, peer) = bridge_of(&["Does anything"]).await;
    bridge.call("peer.one", body).await.expect("COMPLETED");
    let sent = peer.calls("SendMessage")[0].json();
    assert_eq!(sent["params"]["message"]["parts"], json!([{ "text": prompt }]));
}

#[tokio::test]
async fn invalid_request_names_the_wrong_field_and_never_reaches_the_agent() {
    let (bridge, peer) =
        bridge_of(&["Does anything", "Forecast for {city} in {days} days", " {word} "]).await;
    let deep = format!(r#"{{"prompt": "x", "data": {{"a": {}1{}}}}}"#, "[".repeat(300), "]".repeat(300));
    let far_too_deep = format!(r#"{{"prompt": "x", "data": {}"#, r#"{"a":"#.repeat(100_000));
    let many_files = json!({"prompt": "x", "files": vec!["http://example.org/a"; 65]}).to_string();
    let long_session = json!({"prompt": "x", "meta": {"session_id": "s".repeat(257)}}).to_string();
    let rows = [
        ("one", "[1, 2]", "array"),
        ("one", "\u{feff}[1, 2]", "array"),
        ("one", "{hello}", "not valid JSON"),
        ("one", r#" {"prompt": "x",} "#, "not valid JSON"),
        ("one", r#"{"prompt": "x"} and {"prompt": "y"}"#, "not valid JSON"),
        ("one", "\u{feff}{'prompt': 'x'}\r\n", "not valid JSON"),
        ("two", "{city}", "not valid JSON"),
        ("one", "", "prompt"),
        ("one", "  ", "prompt"),
        ("one", " \n\u{feff}\t ", "prompt"),
        ("one", "\u{3000}", "prompt"),
        ("one", r#""""#, "prompt"),
        ("one", r#"" \n ""#, "prompt"),
        ("one", r#"{"prompt": ""}"#, "prompt"),
        ("one", r#"{"prompt": " \t "}"#, "prompt"),
        ("one", r#"{"prompt": "", "files": []}"#, "prompt"),
        ("one", r#"{"prompt": "", "data": null}"#, "prompt"),
        ("one", r#"{"files": ["http://example.org/a"]}"#, "prompt"),
        ("one", r#"{"data": {"a": 1}}"#, "prompt"),
        ("two", r#"{"prompt": ""}"#, "prompt"),
        ("three", r#"{"word": "  "}"#, "word"),
        ("one", "{}", "prompt"),
        ("one", r#"{"prompt": null}"#, "prompt"),
        ("one", r#"{"prompt": 1}"#, "prompt"),
        ("one", r#"{"prompt": "x", "prompt": "y"}"#, "prompt"),
        ("one", r#"{"prompt": "x", "colour": "red"}"#, "colour"),
        ("one", r#"{"prompt": "x", "meta": {"colour": "red"}}"#, "meta.colour"),
        ("one", r#"{"prompt": "x", "meta": []}"#, "meta"),
        ("one", r#"{"prompt": "x", "meta": {"session_id": 1}}"#, "meta.session_id"),
        ("one", r#"{"prompt": "x", "meta": {"session_id": ""}}"#, "meta.session_id"),
        ("one", &long_session, "meta.session_id"),
        ("one", r#"{"prompt": "x", "meta": {"output_modes": "text/plain"}}"#, "meta.output_modes"),
        ("one", r#"{"prompt": "x", "meta": {"reference_task_ids": [1]}}"#, "meta.reference_task_ids"),
        ("one", r#"{"prompt": "x", "data": [1]}"#, "data"),
        ("one", r#"{"prompt": "x", "data": "text"}"#, "data"),
        ("one", r#"{"prompt": "x", "files": {}}"#, "files"),
        ("one", r#"{"prompt": "x", "files": [1]}"#, "files[0]"),
        ("one", r#"{"prompt": "x", "files": ["http://a/b", "no url"]}"#, "files[1]"),
        ("one", r#"{"prompt": "x", "files": ["file:///etc/passwd"]}"#, "files[0]"),
        ("one", r#"{"prompt": "x", "files": [{"name": "a"}]}"#, "files[0].bytes"),
        ("one", r#"{"prompt": "x", "files": [{"bytes": "no base64!"}]}"#, "files[0].bytes"),
        ("one", r#"{"prompt": "x", "files": [{"bytes": "AAAA", "path": "/etc"}]}"#, "files[0].path"),
        ("one", &many_files, "files"),
        ("one", &deep, "deep"),
        ("two", r#"{"city": "Paris"}"#, "days"),
        ("two", "{}", "city"),
        ("two", r#"{"city": "Paris", "days": [1]}"#, "days"),
        ("two", r#"{"city": "Paris", "days": 1, "prompt": "x"}"#, "prompt"),
        ("two", r#"{"city": "Paris", "days": 1, "hours": 2}"#, "hours"),
        ("provide_required_input", "hello", "follow_up_id"),
        ("provide_required_input", r#"{"follow_up_id": "x"}"#, "user_response"),
        ("provide_required_input", r#"{"follow_up_id": "x", "user_response": 1}"#, "user_response"),
        ("get_task", r#"{"id": "x"}"#, "task_id"),
        ("get_task", r#"{"task_id": "x", "more": 1}"#, "more"),
        ("cancel_task", r#"{"task_id": 7}"#, "task_id"),
        ("cancel_task", "[]", "task_id"),
        ("cancel_task", "{task_id}", "task_id"),
    ];
    for (action, body, name) in rows {
        let reply = bridge.call(&format!("peer.{action}"), body.to_owned()).await;
        let reply = reply.expect_error("invalid_request").saying(name);
        assert_eq!(reply["error_info"]["retryable"], false);
    }
    // Unclosed, so it is text; no parser may overflow its stack on it.
    bridge.call("peer.one", far_too_deep).await.expect("COMPLETED");
    let not_utf_8 = Bytes::from_static(b"caf\xe9");
    bridge.call("peer.one", not_utf_8).await.expect_error("invalid_request").saying("UTF-8");
    assert_eq!(peer.calls("SendMessage").len(), 1);
}

#[rstest]
#[case("A2A-Timeout", "soon", "A2A-Timeout")]
#[case("A2A-Timeout", "-1s", "A2A-Timeout")]
#[case("A2A-Timeout", "", "A2A-Timeout")]
#[case("A2A-Timeout", "1e30s", "A2A-Timeout")]
#[case("A2A-Timeout", "0s", "A2A-Timeout")]
#[case("A2A-Reply", "twice", "A2A-Reply")]
#[case("a2a-reply", "twice", "A2A-Reply")]
#[tokio::test]
async fn invalid_header_is_refused(#[case] name: &str, #[case] value: &str, #[case] named: &str) {
    let (bridge, peer) = bridge_of(&["Does anything"]).await;
    let reply = bridge.prompt("peer.one", "x").header(name, value).await;
    reply.expect_error("invalid_request").saying(named);
    assert_eq!(peer.calls("SendMessage").len(), 0);
}

#[rstest]
#[tokio::test]
async fn body_declared_as_json_must_be_json(
    #[values("application/json", "Application/JSON; charset=utf-8", "application/json;x=1")]
    content_type: &str,
) {
    let (bridge, peer) = bridge_of(&["Does anything"]).await;
    let declared = |action: &str, body: &'static str| {
        bridge.call(&format!("peer.{action}"), body).header("content-type", content_type)
    };
    for body in ["hello", "{\"prompt\": \"x\"", "\"open", "[draft] hello", "{hello} you", "42 is it", ""] {
        declared("one", body).await.expect_error("invalid_request").saying("JSON");
    }
    declared("get_task", "hello").await.expect_error("invalid_request").saying("JSON");
    assert_eq!(peer.calls("SendMessage").len(), 0);
    for (body, prompt) in
        [(r#"{"prompt": "x"}"#, "x"), ("\u{feff}\"x\"", "x"), ("42", "42"), ("true", "true")]
    {
        assert_eq!(declared("one", body).await.expect("COMPLETED").message(), prompt);
    }
}

#[tokio::test]
async fn body_of_another_content_type_may_be_text() {
    let (bridge, _peer) = bridge_of(&["Does anything"]).await;
    for content_type in ["text/plain", "application/jsonl", ""] {
        let call = bridge.call("peer.one", "[draft] hello").header("Content-Type", content_type);
        assert_eq!(call.await.expect("COMPLETED").message(), "[draft] hello");
    }
}

#[tokio::test]
async fn empty_prompt_is_valid_with_files_or_data() {
    let (bridge, peer) = bridge_of(&["Does anything", "{word}"]).await;
    let rows = [
        ("one", r#"{"prompt": "", "data": {"a": 1}}"#),
        ("one", r#"{"prompt": " ", "files": ["http://example.org/a"]}"#),
        ("two", r#"{"word": "", "files": [{"bytes": "AAAA"}]}"#),
    ];
    for (action, body) in rows {
        bridge.call(&format!("peer.{action}"), body).await.expect("COMPLETED");
    }
    let sent = peer.calls("SendMessage");
    assert!(sent.iter().all(|seen| seen.json()["params"]["message"]["parts"].as_array().unwrap().len() == 2));
    assert_eq!(sent.len(), rows.len());
}

#[tokio::test]
async fn first_value_of_a_repeated_header_and_its_documented_spelling_win() {
    let (bridge, _peer) = bridge_of(&["Does anything"]).await;
    // Repeated, since the order of spellings in the client's header map is random.
    for _ in 0..10 {
        let call = |first: (&str, &str), second: (&str, &str)| {
            bridge.prompt("peer.one", "x").header(first.0, first.1).header(second.0, second.1)
        };
        call(("A2A-Reply", "final"), ("A2A-Reply", "twice")).await.expect("COMPLETED");
        call(("a2a-reply", "final"), ("a2a-reply", "twice")).await.expect("COMPLETED");
        call(("A2A-Reply", "twice"), ("A2A-Reply", "final")).await.expect_error("invalid_request");
        call(("a2a-reply", "twice"), ("A2A-Reply", "final")).await.expect("COMPLETED");
        call(("A2A-Reply", "twice"), ("a2a-reply", "final")).await.expect_error("invalid_request");
        call(("a2a-reply", "twice"), ("A2A-REPLY", "final")).await.expect("COMPLETED");
    }
}

#[tokio::test]
async fn placeholders_are_filled_with_scalars() {
    let (bridge, _peer) = bridge_of(&["Say {what} {times} times, loud: {loud}, {prompt}"]).await;
    let filled = bridge
        .call("peer.one", r#"{"what": "a {times}", "times": 1e5, "loud": true}"#)
        .await
        .expect("COMPLETED");
    assert_eq!(filled.message(), "Say a {times} 1e5 times, loud: true, {prompt}");
    let own = bridge.prompt("peer.one", "my own words").await.expect("COMPLETED");
    assert_eq!(own.message(), "my own words");
    let text = bridge.call("peer.one", "just a text").await.expect("COMPLETED");
    assert_eq!(text.message(), "just a text");
}

#[tokio::test]
async fn every_request_and_error_is_counted_once() {
    let (bridge, _peer) = bridge_of(&["Does anything"]).await;
    for body in ["fine", "[]", "fine too", "{}"] {
        bridge.call("peer.one", body).await;
    }
    let stats = bridge.stats("peer", "one", 4).await;
    assert_eq!(stats["num_errors"], 2);
    assert_eq!(stats["last_error"], "400:invalid_request");
    assert!(stats["processing_time"].as_u64().unwrap() > 0);
    assert_eq!(
        stats["average_processing_time"].as_u64().unwrap(),
        stats["processing_time"].as_u64().unwrap() / 4
    );
    let unused = bridge.stats("peer", "get_task", 0).await;
    assert_eq!(unused["num_errors"], Value::from(0));
    eventually_eq(Some("ready".to_owned()), || bridge.state("peer")).await;
}
