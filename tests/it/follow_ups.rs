//! Follow-ups: questions of the agent and their answers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rstest::rstest;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::support::peer::{HttpRequest, card, event, streaming_card};
use crate::support::{
    Answer, Bridge, DEADLINE, DemoAgent, Peer, Reply, attached, eventually, launched, wait_until,
};

const NEVER: &str = "00000000-0000-4000-8000-000000000000";

async fn question(bridge: &Bridge, agent: &str) -> Reply {
    let body = json!({"topic": "tides", "audience": "sailors"});
    bridge.call(&format!("{agent}.report"), body).only_reply().await.expect("INPUT_REQUIRED")
}

/// An agent that asks once and accepts any answer.
fn asking_once() -> Peer {
    Peer::agent(|seen| {
        let state = if seen.is_answer() { "COMPLETED" } else { "INPUT_REQUIRED" };
        Answer::task(seen, &format!("TASK_STATE_{state}"), "well")
    })
}

#[rstest]
#[tokio::test]
async fn follow_up_can_take_several_rounds(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let first = question(&bridge, "demo").await.saying("Which format");
    let keys: Vec<_> = first["data"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["follow_up_id", "expires_at"]);
    assert_eq!(first["data_parts"][0]["options"], json!(["PDF", "Markdown"]));

    let second = bridge
        .answer("demo", &first.follow_up_id(), "a painting")
        .only_reply()
        .await
        .expect("INPUT_REQUIRED")
        .saying("I cannot write that");
    assert_ne!(second.follow_up_id(), first.follow_up_id());
    assert_eq!(second.task_id(), first.task_id());

    let done = bridge.answer("demo", &second.follow_up_id(), "PDF").only_reply().await.expect("COMPLETED");
    assert_eq!(done.message(), "Report: Write a report about tides for sailors");
    assert_eq!(done["files"][0]["mime_type"], "application/pdf");
    assert_eq!(done["task"]["skill"], "report");
    assert_eq!(done.task_id(), first.task_id());

    for used in [&first, &second] {
        let late = bridge.answer("demo", &used.follow_up_id(), "PDF").await;
        late.expect_error("follow_up_used");
    }
}

#[rstest]
#[tokio::test]
async fn auth_required_is_answered_or_resolved_outside_the_bridge(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let ask = bridge.prompt("demo.auth", "x").only_reply().await.expect("AUTH_REQUIRED");
    assert_eq!(ask["data_parts"][0]["auth_type"], "api_key");
    let done = bridge.answer("demo", &ask.follow_up_id(), "the key").await;
    done.expect("COMPLETED").saying("Signed in");
    drop(bridge);

    let bridge = Bridge::with_demo(&["--protocol", protocol, "--auth-after", "300ms"]).await;
    let ask = bridge.prompt("demo.auth", "x").await.expect("AUTH_REQUIRED");
    let id = ask.task_id();
    let moved = eventually(|| async {
        let reply = bridge.get_task("demo", &id).await;
        reply.is("COMPLETED").then_some(reply)
    })
    .await;
    moved.expect("COMPLETED").saying("elsewhere");
}

#[tokio::test]
async fn unknown_follow_up_id_or_one_of_another_agent_is_not_found() {
    let bridge = Bridge::with(launched("demo", &[])).and(launched("other", &[])).start().await;
    let asked = question(&bridge, "demo").await.follow_up_id();
    for (agent, id) in [("demo", NEVER), ("demo", "no uuid"), ("demo", ""), ("other", &asked)] {
        bridge.answer(agent, id, "PDF").await.expect_error("not_found");
    }
    bridge.answer("demo", &asked, "PDF").await.expect("COMPLETED");
}

#[tokio::test]
async fn answer_after_expires_at_is_refused() {
    let agent = launched("demo", &[]).set("input_required_ttl", "200ms");
    let bridge = Bridge::with(agent).start().await;
    let asked = question(&bridge, "demo").await;
    let expires_at = asked["data"]["expires_at"].as_str().unwrap();
    let expires_at = OffsetDateTime::parse(expires_at, &Rfc3339).unwrap();
    // `expires_at` may be truncated to whole seconds.
    let is_over = || OffsetDateTime::now_utc() > expires_at + Duration::from_secs(1);
    wait_until(|| async { is_over() }).await;
    let id = asked.follow_up_id();
    let late = bridge.answer("demo", &id, "PDF").await;
    late.expect_error("follow_up_expired");
}

#[tokio::test]
async fn answer_to_an_unavailable_agent_fails_and_the_follow_up_stays_valid() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("demo", &agent.url())).start().await;
    let asked = question(&bridge, "demo").await;
    agent.kill();
    let away = bridge.answer("demo", &asked.follow_up_id(), "PDF").only_reply().await;
    let away = away.expect_error("agent_unavailable");
    assert_eq!(away["error_info"]["retryable"], true);
    bridge.until("demo", "backing-off").await;
    let away = bridge.answer("demo", &asked.follow_up_id(), "PDF").await;
    away.expect_error("agent_unavailable");
    // The bridge replies from memory, with the same follow-up.
    let seen = bridge.get_task("demo", &asked.task_id()).await.expect("INPUT_REQUIRED");
    assert_eq!(seen["data"], asked["data"]);

    // The restarted agent does not know the task.
    agent.run().await;
    bridge.until("demo", "ready").await;
    let lost = bridge.answer("demo", &asked.follow_up_id(), "PDF").await;
    let lost = lost.expect_error("task_lost");
    assert_eq!(lost.task_id(), asked.task_id());
}

#[rstest]
#[case::an_http_error(503)]
#[case::too_many_requests(429)]
#[tokio::test]
async fn answer_that_the_agent_refuses_can_be_retried(#[case] status: u16) {
    let refusals = AtomicUsize::new(0);
    let peer = Peer::agent(move |seen| {
        if !seen.is_answer() {
            Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which?")
        } else if refusals.fetch_add(1, Ordering::Relaxed) == 0 {
            Answer::text(status, "text/plain", "later")
        } else {
            Answer::task(seen, "TASK_STATE_COMPLETED", "thanks")
        }
    });
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let refused = bridge.answer("peer", &asked.follow_up_id(), "blue").await;
    let refused = refused.expect_error("agent_error");
    assert_eq!(refused["error_info"]["http_status"], status);
    assert_eq!(refused["error_info"]["retryable"], true);
    let done = bridge.answer("peer", &asked.follow_up_id(), "blue").await;
    done.expect("COMPLETED");
    bridge.answer("peer", &asked.follow_up_id(), "blue").await.expect_error("follow_up_used");
}

/// An agent that asks, fails at the first answer, and accepts the next one. `GetTask` shows the question
/// until it has accepted an answer.
fn failing_once(failure: fn() -> Answer, streams: bool) -> Peer {
    let answers = AtomicUsize::new(0);
    let calls = move |seen: &HttpRequest| {
        let answered = match seen.rpc_method().as_str() {
            "GetTask" => answers.load(Ordering::Relaxed),
            _ if !seen.is_answer() => 0,
            _ => match answers.fetch_add(1, Ordering::Relaxed) {
                0 => return failure(),
                earlier => earlier + 1,
            },
        };
        let (state, text) = if answered > 1 { ("COMPLETED", "thanks") } else { ("INPUT_REQUIRED", "which?") };
        Answer::task(seen, &format!("TASK_STATE_{state}"), text)
    };
    if streams { Peer::streaming_agent(calls) } else { Peer::agent(calls) }
}

#[rstest]
#[case::an_error_of_the_server(|| Answer::text(500, "text/plain", "oops"), "agent_error")]
#[case::something_else(|| Answer::text(200, "text/html", "<p>"), "agent_error")]
#[case::no_answer(|| Answer::Close, "agent_unavailable")]
#[case::a_stream_without_events(|| Answer::Raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\n".into()), "agent_unavailable")]
#[tokio::test]
async fn failed_answer_can_be_retried_if_the_task_still_waits(
    #[case] failure: fn() -> Answer,
    #[case] code: &str,
    #[values(false, true)] streams: bool,
) {
    let peer = failing_once(failure, streams);
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    // The bridge polls the task for half of the timeout after a broken connection.
    let answer = bridge.answer("peer", &asked.follow_up_id(), "blue").header("A2A-Timeout", "6s");
    let failed = answer.only_reply().await.expect_error(code);
    assert!(failed.message().contains("can be used again"), "{}", failed.message());
    assert_eq!(failed.task_id(), asked.task_id());
    if failed.message().contains("oops") {
        assert_eq!(failed["error_info"]["http_status"], 500);
    }
    let seen = bridge.get_task("peer", &asked.task_id()).await.expect("INPUT_REQUIRED");
    assert_eq!(seen["data"], asked["data"]);
    bridge.answer("peer", &asked.follow_up_id(), "blue").await.expect("COMPLETED");
    bridge.answer("peer", &asked.follow_up_id(), "blue").await.expect_error("follow_up_used");
}

/// An agent that asks, and handles an answer by `answered`. `polled` maps the number of earlier `GetTask`
/// calls to the state that the next one returns.
fn polled_agent(answered: fn(&HttpRequest) -> Answer, polled: fn(usize) -> &'static str) -> Peer {
    let polls = AtomicUsize::new(0);
    Peer::agent(move |seen| match seen.rpc_method().as_str() {
        "GetTask" => Answer::task(seen, polled(polls.fetch_add(1, Ordering::Relaxed)), "which?"),
        _ if seen.is_answer() => answered(seen),
        _ => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which?"),
    })
}

#[tokio::test]
async fn answer_that_causes_an_internal_error_of_the_agent_uses_up_the_follow_up() {
    let broken = |seen: &HttpRequest| Answer::error(seen, &json!({"code": -32603, "message": "out of luck"}));
    let peer = polled_agent(broken, |_| "TASK_STATE_WORKING");
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let failed = bridge.answer("peer", &asked.follow_up_id(), "blue").only_reply().await;
    assert_eq!(failed.expect_error("agent_error")["error_info"]["a2a_code"], -32603);
    bridge.answer("peer", &asked.follow_up_id(), "blue").await.expect_error("follow_up_used");
    assert_eq!(peer.calls("SendMessage").len(), 2);
}

#[tokio::test]
async fn answer_whose_connection_breaks_is_resolved_by_polling_the_task() {
    let thinks = |polls| if polls < 5 { "TASK_STATE_INPUT_REQUIRED" } else { "TASK_STATE_COMPLETED" };
    let peer = polled_agent(|_| Answer::Close, thinks);
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    bridge.answer("peer", &asked.follow_up_id(), "blue").await.expect("COMPLETED");
}

#[tokio::test]
async fn only_one_of_twenty_concurrent_answers_reaches_the_agent() {
    let peer = asking_once();
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let answers =
        (0..20).map(|n| bridge.answer("peer", &asked.follow_up_id(), &format!("answer {n}")).only_reply());
    let replies = futures_util::future::join_all(answers).await;
    let won = replies.iter().filter(|reply| reply.is("COMPLETED")).count();
    assert_eq!(won, 1);
    for reply in replies.into_iter().filter(|reply| !reply.is("COMPLETED")) {
        reply.expect_error("follow_up_used");
    }
    assert_eq!(peer.calls("SendMessage").len(), 2);
}

#[tokio::test]
async fn answer_carries_files_and_the_task_id() {
    let peer = asking_once();
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let files = json!([{"name": "a.txt", "mime_type": "text/plain", "bytes": "aGk="}]);
    let body = json!({"follow_up_id": asked.follow_up_id(), "user_response": "blue", "files": files});
    let call = bridge.call("peer.provide_required_input", body);
    call.await.expect("COMPLETED");
    let message = peer.calls("SendMessage")[1].json()["params"]["message"].clone();
    assert_eq!(message["taskId"], "task-1");
    assert_eq!(message["contextId"], "context-1");
    assert_eq!(message["parts"][0]["text"], "blue");
    assert_eq!(message["parts"][1]["raw"], "aGk=");
}

/// An agent that has a draft as artifact when it asks, and handles an answer by `answered`.
fn drafter(streams: bool, answered: impl Fn(&HttpRequest) -> Answer + Send + Sync + 'static) -> Peer {
    let card = if streams { streaming_card(&["ask"]) } else { card(&["ask"]) };
    let waiting = draft("t", "INPUT_REQUIRED", "draft");
    Peer::agent_with_card(card, move |seen| match seen.rpc_method().as_str() {
        "CancelTask" => Answer::result(seen, &draft("t", "CANCELED", "draft")),
        _ if seen.is_answer() => answered(seen),
        "SendStreamingMessage" => Answer::stream(&[json!({"task": waiting})]),
        "SendMessage" => Answer::result(seen, &json!({"task": waiting})),
        _ => Answer::result(seen, &waiting),
    })
}

fn draft(id: &str, state: &str, text: &str) -> Value {
    let message = json!({"messageId": state, "role": "ROLE_AGENT", "parts": [{"text": "Go on?"}]});
    let artifact = json!({"artifactId": "d", "parts": [{"text": text}]});
    let status = match state {
        "INPUT_REQUIRED" => json!({"state": "TASK_STATE_INPUT_REQUIRED", "message": message}),
        _ => json!({"state": format!("TASK_STATE_{state}")}),
    };
    json!({"id": id, "contextId": "c", "status": status, "artifacts": [artifact]})
}

fn more(text: &str) -> Value {
    let artifact = json!({"artifactId": "d", "parts": [{"text": text}]});
    json!({"artifactUpdate": {"taskId": "t", "artifact": artifact, "append": true}})
}

fn completed(id: &str) -> Value {
    json!({"statusUpdate": {"taskId": id, "status": {"state": "TASK_STATE_COMPLETED"}}})
}

/// Polls a task until it is completed.
async fn completed_task(bridge: &Bridge, id: &str) -> Reply {
    eventually(|| async {
        let seen = bridge.get_task("peer", id).await;
        seen.is("COMPLETED").then_some(seen)
    })
    .await
}

#[rstest]
#[tokio::test]
async fn artifacts_from_before_the_question_are_part_of_the_result(
    #[values(true, false)] streams: bool,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = drafter(streams, |seen| match seen.rpc_method().as_str() {
        "SendMessage" => Answer::result(seen, &json!({"task": draft("t", "COMPLETED", "draft more")})),
        _ => Answer::stream(&[more(" more"), completed("t")]),
    });
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let answer = bridge.answer("peer", &asked.follow_up_id(), "yes");
    if mode == "stream" {
        let stream = answer.stream().await;
        assert_eq!(stream.response(), " more", "text from before the question is not repeated");
        assert_eq!(stream.all("task").len(), 1);
        assert_eq!(stream.result.expect("COMPLETED").message(), "draft more");
    } else {
        answer.mode(mode).only_reply().await;
    }
    assert_eq!(completed_task(&bridge, "t").await.message(), "draft more");
}

#[rstest]
#[tokio::test]
async fn answer_that_starts_a_new_task_follows_that_task(
    #[values(true, false)] streams: bool,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = drafter(streams, |seen| match seen.rpc_method().as_str() {
        "SendMessage" => Answer::result(seen, &json!({"task": draft("new", "COMPLETED", "done")})),
        _ => {
            let begun = json!({"task": draft("new", "WORKING", "done")});
            Answer::stream(&[begun, completed("new")])
        }
    });
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let reply = bridge.answer("peer", &asked.follow_up_id(), "yes").reply_in_mode(mode).await;
    assert_eq!(reply.task_id(), "new");
    assert_eq!(completed_task(&bridge, "new").await.message(), "done");
}

#[tokio::test]
async fn submitted_answer_replies_as_soon_as_the_task_works_again() {
    let peer = drafter(true, |_| Answer::Endless(event(&more("!")), b": ping\n\n".to_vec(), DEADLINE));
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let answer = bridge.answer("peer", &asked.follow_up_id(), "yes").mode("submit");
    answer.only_reply().await.expect("WORKING");
}

#[tokio::test]
async fn final_state_without_content_after_an_answer_fetches_the_task() {
    let polls = AtomicUsize::new(0);
    let peer = Peer::streaming_agent(move |seen| match seen.rpc_method().as_str() {
        "GetTask" if polls.fetch_add(1, Ordering::Relaxed) > 0 => {
            Answer::result(seen, &draft("t", "COMPLETED", "draft more"))
        }
        "GetTask" => Answer::result(seen, &draft("t", "INPUT_REQUIRED", "draft")),
        _ if seen.is_answer() => Answer::stream(&[completed("t")]),
        _ => Answer::stream(&[json!({"task": draft("t", "INPUT_REQUIRED", "draft")})]),
    });
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").stream().await.result.expect("INPUT_REQUIRED");
    let stream = bridge.answer("peer", &asked.follow_up_id(), "yes").stream().await;
    assert_eq!(stream.result.expect("COMPLETED").message(), "draft more");
}

#[tokio::test]
async fn timeout_of_an_answer_to_a_submitted_task_is_published_as_update() {
    let peer = drafter(false, |_| Answer::Endless(Vec::new(), b" ".to_vec(), Duration::from_millis(50)));
    let bridge = Bridge::with_peer(&peer).await;
    let mut updates = bridge.task_updates().await;
    let first = bridge.prompt("peer.ask", "x").mode("submit").only_reply().await;
    let answer = bridge.answer("peer", &first.expect("INPUT_REQUIRED").follow_up_id(), "yes");
    answer.header("A2A-Timeout", "1s").only_reply().await.expect_error("timeout");
    updates.until("CANCELED").await;
}

#[tokio::test]
async fn get_task_of_a_waiting_task_returns_the_same_follow_up() {
    let bridge = Bridge::with_demo(&[]).await;
    let asked = question(&bridge, "demo").await;
    for _ in 0..3 {
        let seen = bridge.get_task("demo", &asked.task_id()).await.expect("INPUT_REQUIRED");
        assert_eq!(seen["data"], asked["data"]);
    }
    bridge.answer("demo", &asked.follow_up_id(), "md").await.expect("COMPLETED");
    let seen = bridge.get_task("demo", &asked.task_id()).await.expect("COMPLETED");
    assert_eq!(seen["files"][0]["mime_type"], "text/markdown");
}

#[rstest]
#[tokio::test]
async fn follow_up_of_a_cancelled_task_is_expired(
    #[values("1.0", "0.3")] protocol: &str,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let bridge = Bridge::with_demo(&["--protocol", protocol]).await;
    let asked = question(&bridge, "demo").await;
    assert_eq!(bridge.cancel_task("demo", &asked.task_id()).await["status"], "CANCELED");
    let refused = bridge.answer("demo", &asked.follow_up_id(), "PDF").reply_in_mode(mode).await;
    refused.expect_error("follow_up_expired");
    bridge.get_task("demo", &asked.task_id()).await.expect("CANCELED");
}

#[rstest]
#[tokio::test]
async fn answer_is_not_sent_if_the_task_has_already_ended_at_the_agent(
    #[values("final", "stream")] mode: &str,
) {
    let peer = Peer::agent(|seen| match seen.rpc_method().as_str() {
        "GetTask" => Answer::task(seen, "TASK_STATE_CANCELED", "which one?"),
        _ => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which one?"),
    });
    let bridge = Bridge::with_peer(&peer).await;
    let asked = bridge.prompt("peer.ask", "x").only_reply().await.expect("INPUT_REQUIRED");
    let refused = bridge.answer("peer", &asked.follow_up_id(), "this one").reply_in_mode(mode).await;
    refused.expect_error("follow_up_expired");
    assert!(!peer.requests().iter().any(HttpRequest::is_answer));
    bridge.answer("peer", &asked.follow_up_id(), "again").await.expect_error("follow_up_expired");
}
