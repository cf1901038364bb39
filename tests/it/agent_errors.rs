//! Agents that answer with errors, with something else than A2A, or not at all.

use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, launched, peer, processes};

#[rstest]
#[case(401, false)]
#[case(403, false)]
#[case(429, true)]
#[case(500, false)]
#[case(503, true)]
#[tokio::test]
async fn an_http_error_is_an_agent_error_with_its_status(#[case] status: u16, #[case] retryable: bool) {
    let bridge = Bridge::of_demo(&[]).await;
    let reply =
        bridge.prompt("demo.http", &status.to_string()).only_reply().await.expect_error("agent_error");
    assert_eq!(reply["error_info"]["http_status"], status);
    assert_eq!(reply["error_info"]["retryable"], retryable);
    assert_eq!(reply["error_info"]["a2a_code"], Value::Null);
}

#[rstest]
#[case("html")]
#[case("garbage")]
#[tokio::test]
async fn what_is_not_a2a_is_an_agent_error(#[case] action: &str, #[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::of_demo(&["--protocol", protocol]).await;
    let call = bridge.prompt(&format!("demo.{action}"), "x");
    let reply = call.only_reply().await.expect_error("agent_error").saying("not A2A");
    assert!(reply["error_info"].get("http_status").is_none());
    bridge.prompt("demo.echo", "still there").await.expect("COMPLETED");
}

#[rstest]
#[case::nothing(Vec::new())]
#[case::no_http(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec())]
#[case::cut_in_the_head(b"HTTP/1.1 200 OK\r\nContent-Le".to_vec())]
#[case::cut_in_the_body(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{\"jsonrpc\"".to_vec())]
#[case::cut_in_a_chunk(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n{\"jsonrpc\"".to_vec())]
#[tokio::test]
async fn a_connection_that_breaks_leaves_the_outcome_unknown_and_nothing_is_sent_again(
    #[case] bytes: Vec<u8>,
) {
    let peer = Peer::agent(move |_| Answer::Raw(bytes.clone()));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = call.only_reply().await.expect_error("outcome_unknown");
    assert_eq!(reply["error_info"]["retryable"], false);
    assert_eq!(peer.calls("SendMessage").len(), 1);
}

#[tokio::test]
async fn an_error_with_more_data_than_a_message_holds_keeps_its_code_and_words() {
    let peer = Peer::agent(|seen| {
        let error = json!({"code": -32005, "message": "wrong media type", "data": "d".repeat(3 << 20)});
        Answer::json(&json!({"jsonrpc": "2.0", "id": seen.json()["id"], "error": error}))
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let streamed = bridge.prompt("peer.ask", "x").stream().await.result;
    for reply in [bridge.prompt("peer.ask", "x").only_reply().await, streamed] {
        let reply = reply.expect_error("agent_error").saying("wrong media type").saying("left out");
        assert_eq!(reply["error_info"]["a2a_code"], -32005);
        assert_eq!(reply["error_info"]["a2a_data"], Value::Null);
    }
}

#[rstest]
#[tokio::test]
async fn a_page_where_a2a_was_expected_is_told_with_its_type(
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = Peer::start(|seen| match seen.method.as_str() {
        "GET" => Answer::json(&peer::streaming_card(&["ask"])),
        _ => Answer::text(200, "text/html", "<p>hello"),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = match mode {
        "stream" => call.stream().await.result,
        _ => call.header("A2A-Reply", mode).only_reply().await,
    };
    reply.expect_error("agent_error").saying("the content type is text/html");
}

#[rstest]
#[tokio::test]
async fn a_bare_refusal_of_an_endpoint_that_worked_is_told_and_nothing_is_sent_again(
    #[values(404, 405, 302)] status: u16,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = Peer::start(move |seen| match seen.method.as_str() {
        "GET" => Answer::json(&peer::streaming_card(&["ask"])),
        _ => Answer::text(status, "text/plain", "nope"),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = match mode {
        "stream" => call.stream().await.result,
        _ => call.header("A2A-Reply", mode).only_reply().await,
    };
    let reply = reply.expect_error("agent_error");
    assert_eq!(reply["error_info"]["http_status"], status);
    let sent = peer.seen().into_iter().filter(|seen| seen.method == "POST");
    let sent: Vec<_> = sent.map(|seen| seen.rpc_method()).collect();
    assert_eq!(sent.len(), 1, "{sent:?}");
}

#[rstest]
#[case::bad_utf8(b"{\"jsonrpc\": \"2.0\", \"result\": \"\xff\xfe\"}".to_vec())]
#[case::deep_nesting([b"[".repeat(100_000), b"]".repeat(100_000)].concat())]
#[case::an_empty_body(Vec::new())]
#[case::a_list(b"[]".to_vec())]
#[case::null(b"null".to_vec())]
#[case::a_task_without_an_id(br#"{"jsonrpc": "2.0", "result": {"task": {"status": {"state": "TASK_STATE_COMPLETED"}}}}"#.to_vec())]
#[case::a_file_that_is_no_base64(br#"{"jsonrpc": "2.0", "result": {"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"raw": "%%%"}]}}}"#.to_vec())]
#[tokio::test]
async fn a_body_that_is_wrong_is_an_agent_error(#[case] body: Vec<u8>) {
    let json = vec![("Content-Type", "application/json".to_owned())];
    let peer = Peer::agent(move |_| Answer::Http(200, json.clone(), body.clone()));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let call = bridge.prompt("peer.ask", "x");
    call.only_reply().await.expect_error("agent_error");
    assert_eq!(bridge.state("peer").await.as_deref(), Some("ready"));
}

#[rstest]
#[case::a_result(|long: &str| json!(long))]
#[case::a_status(|long: &str| json!({"task": {"id": "t", "status": long}}))]
#[case::parts(|long: &str| json!({"message": {"role": "ROLE_AGENT", "parts": long}}))]
#[case::the_name_of_a_file(|long: &str| json!({"message": {"role": "ROLE_AGENT", "parts": [{"raw": "%%%", "filename": long}]}}))]
#[tokio::test]
async fn what_is_not_a2a_is_told_in_few_words_however_long_it_is(#[case] result: fn(&str) -> Value) {
    let result = result(&"Z".repeat(2 << 20));
    let peer = Peer::agent(move |seen| Answer::result(seen, &result));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let reply = bridge.prompt("peer.ask", "x").await.expect_error("agent_error").saying("not A2A");
    assert!(reply.text.len() < 2048, "{} bytes", reply.text.len());
}

#[rstest]
#[tokio::test]
async fn an_error_status_counts_whatever_the_body_looks_like(#[values(429, 503)] status: u16) {
    // A traceback in colours.
    let peer = Peer::agent(move |_| Answer::text(status, "text/plain", &"\x1b[31m".repeat(130)));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let reply = bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    assert_eq!(reply["error_info"]["http_status"], status);
    assert_eq!(reply["error_info"]["retryable"], true);
}

#[rstest]
#[case::announced(true)]
#[case::not_announced(false)]
#[tokio::test]
async fn an_answer_over_the_limit_is_too_large(#[case] announced: bool) {
    let peer = Peer::agent(move |_| {
        let body = " ".repeat(4096);
        let head = if announced {
            "HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n"
        } else {
            "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        };
        Answer::Raw((head.to_owned() + &body).into_bytes())
    });
    let agent = attached("peer", &peer.url()).set("max_response_size", "2KiB");
    let bridge = Bridge::of(agent).start().await;
    let call = bridge.prompt("peer.ask", "x");
    call.only_reply().await.expect_error("too_large").saying("max_response_size");
}

#[tokio::test]
async fn a_json_rpc_error_under_an_http_error_keeps_both() {
    let peer = Peer::agent(|seen| {
        let error = json!({"code": -32050, "message": "no\nwind", "data": {"n": 1}});
        let body = json!({"jsonrpc": "2.0", "id": seen.json()["id"], "error": error});
        Answer::text(503, "application/json", &body.to_string())
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = call.only_reply().await.expect_error("agent_error").saying("no\nwind");
    let info = &reply["error_info"];
    assert_eq!(info["a2a_code"], -32050);
    assert_eq!(info["a2a_data"], json!({"n": 1}));
    assert_eq!(info["http_status"], 503);
    assert_eq!(info["retryable"], true);
}

#[rstest]
#[case(301)]
#[case(302)]
#[case(307)]
#[case(308)]
#[tokio::test]
async fn a_redirect_is_not_followed_and_no_credential_goes_elsewhere(#[case] status: u16) {
    let elsewhere = Peer::start(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "trapped"));
    let to = elsewhere.url();
    let peer = Peer::agent(move |_| Answer::Http(status, vec![("Location", to.clone())], Vec::new()));
    let agent = attached("peer", &peer.url())
        .set("bearer_token", "secret")
        .set("headers", json!({"X-API-Key": "secret"}));
    let bridge = Bridge::of(agent).start().await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = call.only_reply().await.expect_error("agent_error");
    assert_eq!(reply["error_info"]["http_status"], status);
    let sent = &peer.calls("SendMessage")[0];
    assert_eq!(sent.header("authorization"), Some("Bearer secret"));
    assert_eq!(sent.header("x-api-key"), Some("secret"));
    assert_eq!(elsewhere.seen().len(), 0);
}

#[tokio::test]
async fn a_card_that_names_another_host_does_not_move_the_calls_there() {
    let elsewhere = Peer::start(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "trapped"));
    let to = elsewhere.url();
    let peer = Peer::start(move |seen| match seen.method.as_str() {
        "GET" => {
            let mut card = peer::card(&["ask"]);
            card["supportedInterfaces"][0]["url"] = format!("{to}/a2a").into();
            Answer::json(&card)
        }
        _ => Answer::task(seen, "TASK_STATE_COMPLETED", "at home"),
    });
    let agent = attached("peer", &peer.url()).set("bearer_token", "secret");
    let bridge = Bridge::of(agent).start().await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(reply.message(), "at home");
    assert_eq!(peer.calls("SendMessage")[0].path, "/a2a");
    assert_eq!(elsewhere.seen().len(), 0);
}

#[tokio::test]
async fn a_call_to_an_agent_that_has_just_gone_is_unavailable_and_then_has_no_responders() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::of(attached("demo", &agent.url())).start().await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    agent.kill();
    // Between the end of the agent and the bridge's knowledge of it.
    let reply = bridge.prompt("demo.echo", "x").only_reply().await;
    if !reply.is_no_responders() {
        let reply = reply.expect_error("agent_unavailable");
        assert_eq!(reply["error_info"]["retryable"], true);
    }
    bridge.until("demo", "backing-off").await;
    bridge.until_no_responders("demo.echo").await;
    agent.run().await;
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn a_launched_agent_that_crashes_during_a_call_leaves_one_error_and_comes_back() {
    let bridge = Bridge::of(launched("demo", &[])).start().await;
    let reply = bridge.prompt("demo.crash", "now").only_reply().await;
    reply.expect_error("outcome_unknown");
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn a_task_under_way_is_lost_with_its_agent() {
    let mut bridge = Bridge::of_demo(&["--ignore-blocking"]).await;
    let mut call = bridge.begin_slow("demo", 60).await;
    let task = bridge.working_task("demo").await;
    for pid in bridge.launched() {
        processes::signal(pid, Signal::SIGKILL);
    }
    let reply = call.reply().await.expect_error("task_lost");
    assert_eq!(reply.task_id(), task);
    bridge.announced("demo", |object| object["state"] == "backing-off").await;
}

#[rstest]
#[case::of_a_task("task", 1025, 1)]
#[case::of_a_conversation("context", 1, 1025)]
#[tokio::test]
async fn an_id_longer_than_is_kept_is_an_agent_error(
    #[case] what: &str,
    #[case] task_id: usize,
    #[case] context_id: usize,
) {
    let peer = Peer::agent(move |seen| {
        let status = json!({"state": "TASK_STATE_INPUT_REQUIRED"});
        let (id, context) = ("t".repeat(task_id), "c".repeat(context_id));
        Answer::result(seen, &json!({"task": {"id": id, "contextId": context, "status": status}}))
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let reply = bridge.prompt("peer.ask", "x").only_reply().await.expect_error("agent_error");
    reply.saying(&format!("the {what} id has 1025 bytes; the limit is 1024"));
}
