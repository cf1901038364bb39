//! Agents that answer with errors, with something other than A2A, or not at all.

use rstest::rstest;
use serde_json::{Value, json};

use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, launched, peer};

#[rstest]
#[case(401, false)]
#[case(403, false)]
#[case(429, true)]
#[case(500, false)]
#[case(503, true)]
#[tokio::test]
async fn http_error_is_reported_as_agent_error_with_its_status(#[case] status: u16, #[case] retryable: bool) {
    let bridge = Bridge::with_demo(&[]).await;
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
async fn answer_that_is_not_a2a_is_an_agent_error(
    #[case] action: &str,
    #[values("1.0", "0.3")] protocol: &str,
) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
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
async fn broken_connection_leaves_the_outcome_unknown_and_is_not_retried(#[case] bytes: Vec<u8>) {
    let peer = Peer::agent(move |_| Answer::Raw(bytes.clone()));
    let bridge = Bridge::with_peer(&peer).await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = call.only_reply().await.expect_error("outcome_unknown");
    assert_eq!(reply["error_info"]["retryable"], false);
    assert_eq!(peer.calls("SendMessage").len(), 1);
}

#[tokio::test]
async fn error_data_over_the_payload_limit_is_dropped_but_code_and_text_stay() {
    let peer = Peer::agent(|seen| {
        let error = json!({"code": -32005, "message": "wrong media type", "data": "d".repeat(3 << 20)});
        Answer::error(seen, &error)
    });
    let bridge = Bridge::with_peer(&peer).await;
    let streamed = bridge.prompt("peer.ask", "x").stream().await.result;
    for reply in [bridge.prompt("peer.ask", "x").only_reply().await, streamed] {
        let reply = reply.expect_error("agent_error").saying("wrong media type").saying("left out");
        assert_eq!(reply["error_info"]["a2a_code"], -32005);
        assert_eq!(reply["error_info"]["a2a_data"], Value::Null);
    }
}

#[rstest]
#[tokio::test]
async fn answer_of_another_content_type_is_reported_with_that_type(
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = Peer::streaming_agent(|_| Answer::text(200, "text/html", "<p>hello"));
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").reply_in_mode(mode).await;
    reply.expect_error("agent_error").saying("the content type is text/html");
}

#[rstest]
#[tokio::test]
async fn refused_request_is_reported_and_not_retried(
    #[values(404, 405, 302)] status: u16,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = Peer::streaming_agent(move |_| Answer::text(status, "text/plain", "nope"));
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").reply_in_mode(mode).await.expect_error("agent_error");
    assert_eq!(reply["error_info"]["http_status"], status);
    let sent = peer.requests().into_iter().filter(|seen| seen.method == "POST");
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
async fn malformed_body_is_an_agent_error(#[case] body: Vec<u8>) {
    let json = vec![("Content-Type", "application/json".to_owned())];
    let peer = Peer::agent(move |_| Answer::Http(200, json.clone(), body.clone()));
    let bridge = Bridge::with_peer(&peer).await;
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
async fn error_for_an_invalid_result_stays_short(#[case] result: fn(&str) -> Value) {
    let result = result(&"Z".repeat(2 << 20));
    let peer = Peer::agent(move |seen| Answer::result(seen, &result));
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect_error("agent_error").saying("not A2A");
    assert!(reply.text.len() < 2048, "{} bytes", reply.text.len());
}

#[rstest]
#[tokio::test]
async fn error_status_is_reported_for_any_body(#[values(429, 503)] status: u16) {
    // Like a traceback in colours.
    let peer = Peer::agent(move |_| Answer::text(status, "text/plain", &"\x1b[31m".repeat(130)));
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    assert_eq!(reply["error_info"]["http_status"], status);
    assert_eq!(reply["error_info"]["retryable"], true);
}

#[rstest]
#[case::announced(true)]
#[case::not_announced(false)]
#[tokio::test]
async fn answer_over_max_response_size_is_too_large(#[case] announced: bool) {
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
    let bridge = Bridge::with(agent).start().await;
    let call = bridge.prompt("peer.ask", "x");
    call.only_reply().await.expect_error("too_large").saying("max_response_size");
}

#[tokio::test]
async fn json_rpc_error_with_an_http_error_status_keeps_both() {
    let peer = Peer::agent(|seen| {
        let error = json!({"code": -32050, "message": "no\nwind", "data": {"n": 1}});
        let body = json!({"jsonrpc": "2.0", "id": seen.json()["id"], "error": error});
        Answer::text(503, "application/json", &body.to_string())
    });
    let bridge = Bridge::with_peer(&peer).await;
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
async fn redirect_is_not_followed_and_leaks_no_credentials(#[case] status: u16) {
    let elsewhere = Peer::start(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "trapped"));
    let to = elsewhere.url();
    let peer = Peer::agent(move |_| Answer::Http(status, vec![("Location", to.clone())], Vec::new()));
    let agent = attached("peer", &peer.url())
        .set("bearer_token", "secret")
        .set("headers", json!({"X-API-Key": "secret"}));
    let bridge = Bridge::with(agent).start().await;
    let call = bridge.prompt("peer.ask", "x");
    let reply = call.only_reply().await.expect_error("agent_error");
    assert_eq!(reply["error_info"]["http_status"], status);
    let sent = &peer.calls("SendMessage")[0];
    assert_eq!(sent.header("authorization"), Some("Bearer secret"));
    assert_eq!(sent.header("x-api-key"), Some("secret"));
    assert_eq!(elsewhere.requests().len(), 0);
}

#[tokio::test]
async fn card_with_another_host_does_not_redirect_calls() {
    let elsewhere = Peer::start(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "trapped"));
    let mut card = peer::card(&["ask"]);
    card["supportedInterfaces"][0]["url"] = format!("{}/a2a", elsewhere.url()).into();
    let peer = Peer::agent_with_card(card, |seen| Answer::task(seen, "TASK_STATE_COMPLETED", "at home"));
    let agent = attached("peer", &peer.url()).set("bearer_token", "secret");
    let bridge = Bridge::with(agent).start().await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(reply.message(), "at home");
    assert_eq!(peer.calls("SendMessage")[0].path, "/a2a");
    assert_eq!(elsewhere.requests().len(), 0);
}

#[tokio::test]
async fn call_to_a_killed_agent_is_unavailable_then_has_no_responders() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("demo", &agent.url())).start().await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    agent.kill();
    // The bridge may not have noticed yet that the agent was killed.
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
async fn launched_agent_that_crashes_during_a_call_gives_one_error_and_restarts() {
    let bridge = Bridge::with(launched("demo", &[])).start().await;
    let reply = bridge.prompt("demo.crash", "now").only_reply().await;
    reply.expect_error("outcome_unknown");
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
}

#[tokio::test]
async fn running_task_is_lost_when_its_agent_is_killed() {
    let mut bridge = Bridge::with_demo(&["--ignore-blocking"]).await;
    let mut call = bridge.begin_slow("demo", 60).await;
    let task = bridge.working_task("demo").await;
    bridge.kill_agents();
    let reply = call.reply().await.expect_error("task_lost");
    assert_eq!(reply.task_id(), task);
    bridge.announced("demo", |object| object["state"] == "backing-off").await;
}

#[rstest]
#[case::of_a_task("task", 1025, 1)]
#[case::of_a_context("context", 1, 1025)]
#[tokio::test]
async fn task_or_context_id_over_the_length_limit_is_an_agent_error(
    #[case] what: &str,
    #[case] task_id: usize,
    #[case] context_id: usize,
) {
    let peer = Peer::agent(move |seen| {
        let status = json!({"state": "TASK_STATE_INPUT_REQUIRED"});
        let (id, context) = ("t".repeat(task_id), "c".repeat(context_id));
        Answer::result(seen, &json!({"task": {"id": id, "contextId": context, "status": status}}))
    });
    let bridge = Bridge::with_peer(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").only_reply().await.expect_error("agent_error");
    reply.saying(&format!("the {what} id has 1025 bytes; the limit is 1024"));
}
