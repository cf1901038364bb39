//! Questions of the agent and their answers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::support::peer::{Seen, card, event, streaming_card};
use crate::support::{Answer, Bridge, DemoAgent, LATER, Peer, Reply, SOON, attached, eventually, launched};

const NEVER: &str = "00000000-0000-4000-8000-000000000000";

async fn question(bridge: &Bridge, agent: &str) -> Reply {
    let body = json!({"topic": "tides", "audience": "sailors"});
    bridge.call(&format!("{agent}.report"), body).only_reply().await.expect("INPUT_REQUIRED")
}

/// An agent that asks once and is content with any answer.
fn asking_once() -> Peer {
    Peer::agent(|seen| {
        let is_answer = seen.json()["params"]["message"]["taskId"].is_string();
        let state = if is_answer { "COMPLETED" } else { "INPUT_REQUIRED" };
        Answer::task(seen, &format!("TASK_STATE_{state}"), "well")
    })
}

#[rstest]
#[tokio::test]
async fn a_question_is_answered_in_as_many_rounds_as_it_takes(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::of_demo(&["--protocol", protocol]).await;
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
async fn a_sign_in_is_answered_or_happens_elsewhere(#[values("1.0", "0.3")] protocol: &str) {
    let bridge = Bridge::of_demo(&["--protocol", protocol]).await;
    let ask = bridge.prompt("demo.auth", "x").only_reply().await.expect("AUTH_REQUIRED");
    assert_eq!(ask["data_parts"][0]["auth_type"], "api_key");
    let done = bridge.answer("demo", &ask.follow_up_id(), "the key").await;
    done.expect("COMPLETED").saying("Signed in");
    drop(bridge);

    let bridge = Bridge::of_demo(&["--protocol", protocol, "--auth-after", "300ms"]).await;
    let ask = bridge.prompt("demo.auth", "x").await.expect("AUTH_REQUIRED");
    let id = ask.task_id();
    let moved = eventually(SOON, || async {
        let reply = bridge.get_task("demo", &id).await;
        reply.is("COMPLETED").then_some(reply)
    })
    .await;
    moved.expect("COMPLETED").saying("elsewhere");
}

#[tokio::test]
async fn an_id_that_was_never_issued_or_belongs_to_another_agent_is_not_found() {
    let bridge = Bridge::of(launched("demo", &[])).and(launched("other", &[])).start().await;
    let asked = question(&bridge, "demo").await.follow_up_id();
    for (agent, id) in [("demo", NEVER), ("demo", "no uuid"), ("demo", ""), ("other", &asked)] {
        bridge.answer(agent, id, "PDF").await.expect_error("not_found");
    }
    bridge.answer("demo", &asked, "PDF").await.expect("COMPLETED");
}

#[tokio::test]
async fn an_answer_after_its_time_is_expired() {
    let agent = launched("demo", &[]).set("input_required_ttl", "200ms");
    let bridge = Bridge::of(agent).start().await;
    let asked = question(&bridge, "demo").await;
    let expires_at = asked["data"]["expires_at"].as_str().unwrap();
    let expires_at = OffsetDateTime::parse(expires_at, &Rfc3339).unwrap();
    // To answer earlier would be to answer in time, and the time may be cut to whole seconds.
    let is_over = || OffsetDateTime::now_utc() > expires_at + Duration::from_secs(1);
    eventually(SOON, || async { is_over().then_some(()) }).await;
    let id = asked.follow_up_id();
    let late = bridge.answer("demo", &id, "PDF").await;
    late.expect_error("follow_up_expired");
}

#[tokio::test]
async fn while_the_agent_is_away_an_answer_is_unavailable_and_the_id_stays_valid() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::of(attached("demo", &agent.url())).start().await;
    let asked = question(&bridge, "demo").await;
    agent.kill();
    let away = bridge.answer("demo", &asked.follow_up_id(), "PDF").only_reply().await;
    let away = away.expect_error("agent_unavailable");
    assert_eq!(away["error_info"]["retryable"], true);
    bridge.until("demo", "backing-off").await;
    let away = bridge.answer("demo", &asked.follow_up_id(), "PDF").await;
    away.expect_error("agent_unavailable");
    // Memory answers for the agent, with the same follow-up.
    let seen = bridge.get_task("demo", &asked.task_id()).await.expect("INPUT_REQUIRED");
    assert_eq!(seen["data"], asked["data"]);

    // The new instance never heard of the task.
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
async fn an_answer_that_the_agent_refuses_can_be_given_again(#[case] status: u16) {
    let refusals = AtomicUsize::new(0);
    let peer = Peer::agent(move |seen| {
        if !seen.json()["params"]["message"]["taskId"].is_string() {
            Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which?")
        } else if refusals.fetch_add(1, Ordering::Relaxed) == 0 {
            Answer::text(status, "text/plain", "later")
        } else {
            Answer::task(seen, "TASK_STATE_COMPLETED", "thanks")
        }
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let refused = bridge.answer("peer", &asked.follow_up_id(), "blue").await;
    let refused = refused.expect_error("agent_error");
    assert_eq!(refused["error_info"]["http_status"], status);
    assert_eq!(refused["error_info"]["retryable"], true);
    let done = bridge.answer("peer", &asked.follow_up_id(), "blue").await;
    done.expect("COMPLETED");
    bridge.answer("peer", &asked.follow_up_id(), "blue").await.expect_error("follow_up_used");
}

/// An agent that asks, fails once when it is answered, and is content with the next answer. When it is
/// looked at, it asks as before until it has taken one.
fn failing_once(failure: fn() -> Answer, streams: bool) -> Peer {
    let answers = AtomicUsize::new(0);
    let calls = move |seen: &Seen| {
        let answered = match seen.rpc_method().as_str() {
            "GetTask" => answers.load(Ordering::Relaxed),
            _ if !seen.json()["params"]["message"]["taskId"].is_string() => 0,
            _ => match answers.fetch_add(1, Ordering::Relaxed) {
                0 => return failure(),
                earlier => earlier + 1,
            },
        };
        let (state, text) = if answered > 1 { ("COMPLETED", "thanks") } else { ("INPUT_REQUIRED", "which?") };
        Answer::task(seen, &format!("TASK_STATE_{state}"), text)
    };
    Peer::start(move |seen| match seen.method.as_str() {
        "GET" if streams => Answer::json(&streaming_card(&["ask"])),
        "GET" => Answer::json(&card(&["ask"])),
        _ => calls(seen),
    })
}

#[rstest]
#[case::an_error_of_the_server(|| Answer::text(500, "text/plain", "oops"), "agent_error")]
#[case::something_else(|| Answer::text(200, "text/html", "<p>"), "agent_error")]
#[case::no_answer(|| Answer::Close, "agent_unavailable")]
#[case::a_stream_without_events(|| Answer::Raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\n".into()), "agent_unavailable")]
#[tokio::test]
async fn an_answer_that_failed_and_left_the_question_open_can_be_given_again(
    #[case] failure: fn() -> Answer,
    #[case] code: &str,
    #[values(false, true)] streams: bool,
) {
    let peer = failing_once(failure, streams);
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    // Half of that is what a cut is waited out for.
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

/// An agent that asks, answers an answer by `answered`, and says when it is looked at what `then` makes of the
/// number of looks.
fn looked_at(answered: fn(&Seen) -> Answer, then: fn(usize) -> &'static str) -> Peer {
    let looks = AtomicUsize::new(0);
    Peer::agent(move |seen| match seen.rpc_method().as_str() {
        "GetTask" => Answer::task(seen, then(looks.fetch_add(1, Ordering::Relaxed)), "which?"),
        _ if seen.json()["params"]["message"]["taskId"].is_string() => answered(seen),
        _ => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which?"),
    })
}

#[tokio::test]
async fn an_answer_that_broke_something_inside_the_agent_was_taken() {
    let broken = |seen: &Seen| {
        let error = json!({"code": -32603, "message": "out of luck"});
        Answer::json(&json!({"jsonrpc": "2.0", "id": seen.json()["id"], "error": error}))
    };
    let peer = looked_at(broken, |_| "TASK_STATE_WORKING");
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let failed = bridge.answer("peer", &asked.follow_up_id(), "blue").only_reply().await;
    assert_eq!(failed.expect_error("agent_error")["error_info"]["a2a_code"], -32603);
    bridge.answer("peer", &asked.follow_up_id(), "blue").await.expect_error("follow_up_used");
    assert_eq!(peer.calls("SendMessage").len(), 2);
}

#[tokio::test]
async fn an_agent_that_thinks_before_it_moves_is_waited_for_when_its_answer_was_cut_off() {
    let thinks = |look| if look < 5 { "TASK_STATE_INPUT_REQUIRED" } else { "TASK_STATE_COMPLETED" };
    let peer = looked_at(|_| Answer::Close, thinks);
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let mut answer = bridge.answer("peer", &asked.follow_up_id(), "blue").begin().await;
    answer.reply_within(LATER).await.expect("a reply").expect("COMPLETED");
}

#[tokio::test]
async fn of_twenty_answers_at_once_exactly_one_wins_and_the_agent_sees_one() {
    let peer = asking_once();
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
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
async fn an_answer_takes_files_along_and_goes_to_the_right_task() {
    let peer = asking_once();
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
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

/// An agent that has made a draft when it asks, and answers an answer by `answered`.
fn drafter(streams: bool, answered: impl Fn(&Seen) -> Answer + Send + Sync + 'static) -> Peer {
    Peer::start(move |seen| {
        let is_answer = seen.json()["params"]["message"]["taskId"] == "t";
        let waiting = draft("t", "INPUT_REQUIRED", "draft");
        match (seen.method.as_str(), seen.rpc_method().as_str()) {
            ("GET", _) if streams => Answer::json(&streaming_card(&["ask"])),
            ("GET", _) => Answer::json(&card(&["ask"])),
            (_, "CancelTask") => Answer::result(seen, &draft("t", "CANCELED", "draft")),
            _ if is_answer => answered(seen),
            (_, "SendStreamingMessage") => Answer::Events(event(&json!({"task": waiting})), usize::MAX),
            (_, "SendMessage") => Answer::result(seen, &json!({"task": waiting})),
            _ => Answer::result(seen, &waiting),
        }
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

/// What a task is in the end.
async fn end_of(bridge: &Bridge, id: &str) -> Reply {
    eventually(SOON, || async {
        let seen = bridge.get_task("peer", id).await;
        seen.is("COMPLETED").then_some(seen)
    })
    .await
}

#[rstest]
#[tokio::test]
async fn what_a_task_has_made_before_its_question_is_part_of_the_answer(
    #[values(true, false)] streams: bool,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = drafter(streams, |seen| match seen.rpc_method().as_str() {
        "SendMessage" => Answer::result(seen, &json!({"task": draft("t", "COMPLETED", "draft more")})),
        _ => Answer::Events([event(&more(" more")), event(&completed("t"))].concat(), usize::MAX),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let answer = bridge.answer("peer", &asked.follow_up_id(), "yes").header("A2A-Reply", mode);
    if mode == "stream" {
        let stream = answer.stream().await;
        assert_eq!(stream.response(), " more", "what was told before is not told again");
        assert_eq!(stream.all("task").len(), 1);
        assert_eq!(stream.result.expect("COMPLETED").message(), "draft more");
    } else {
        answer.only_reply().await;
    }
    assert_eq!(end_of(&bridge, "t").await.message(), "draft more");
}

#[rstest]
#[tokio::test]
async fn an_answer_that_begins_a_new_task_is_followed_there(
    #[values(true, false)] streams: bool,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let peer = drafter(streams, |seen| match seen.rpc_method().as_str() {
        "SendMessage" => Answer::result(seen, &json!({"task": draft("new", "COMPLETED", "done")})),
        _ => {
            let begun = json!({"task": draft("new", "WORKING", "done")});
            Answer::Events([event(&begun), event(&completed("new"))].concat(), usize::MAX)
        }
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let answer = bridge.answer("peer", &asked.follow_up_id(), "yes").header("A2A-Reply", mode);
    let reply = if mode == "stream" { answer.stream().await.result } else { answer.only_reply().await };
    assert_eq!(reply.task_id(), "new");
    assert_eq!(end_of(&bridge, "new").await.message(), "done");
}

#[tokio::test]
async fn a_submitted_answer_has_its_reply_as_soon_as_the_agent_goes_on() {
    let peer = drafter(true, |_| Answer::Endless(event(&more("!")), b": ping\n\n".to_vec(), SOON));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let answer = bridge.answer("peer", &asked.follow_up_id(), "yes").header("A2A-Reply", "submit");
    answer.only_reply().await.expect("WORKING");
}

#[tokio::test]
async fn an_end_without_content_after_an_answer_leads_to_a_look_at_the_task() {
    let looks = AtomicUsize::new(0);
    let peer = Peer::start(move |seen| match (seen.method.as_str(), seen.rpc_method().as_str()) {
        ("GET", _) => Answer::json(&streaming_card(&["ask"])),
        (_, "GetTask") if looks.fetch_add(1, Ordering::Relaxed) > 0 => {
            Answer::result(seen, &draft("t", "COMPLETED", "draft more"))
        }
        (_, "GetTask") => Answer::result(seen, &draft("t", "INPUT_REQUIRED", "draft")),
        _ if seen.json()["params"]["message"]["taskId"] == "t" => {
            Answer::Events(event(&completed("t")), usize::MAX)
        }
        _ => Answer::Events(event(&json!({"task": draft("t", "INPUT_REQUIRED", "draft")})), usize::MAX),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").stream().await.result.expect("INPUT_REQUIRED");
    let stream = bridge.answer("peer", &asked.follow_up_id(), "yes").stream().await;
    assert_eq!(stream.result.expect("COMPLETED").message(), "draft more");
}

#[tokio::test]
async fn those_who_follow_a_submitted_task_hear_that_an_answer_to_it_took_too_long() {
    let peer = drafter(false, |_| Answer::Endless(Vec::new(), b" ".to_vec(), Duration::from_millis(50)));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let mut news = bridge.client.subscribe(format!("{}.task.>", bridge.prefix)).await.unwrap();
    let first = bridge.prompt("peer.ask", "x").header("A2A-Reply", "submit").only_reply().await;
    let answer = bridge.answer("peer", &first.expect("INPUT_REQUIRED").follow_up_id(), "yes");
    answer.header("A2A-Timeout", "1s").only_reply().await.expect_error("timeout");
    let mut told = Vec::new();
    while told.last().is_none_or(|status| status != "CANCELED") {
        let message = tokio::time::timeout(SOON, news.next()).await.expect("news").unwrap();
        told.push(serde_json::from_slice::<Value>(&message.payload).unwrap()["status"].clone());
    }
}

#[tokio::test]
async fn looking_a_waiting_task_up_shows_the_same_follow_up() {
    let bridge = Bridge::of_demo(&[]).await;
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
async fn a_question_cannot_be_answered_once_its_task_was_cancelled(
    #[values("1.0", "0.3")] protocol: &str,
    #[values("final", "stream", "submit")] mode: &str,
) {
    let bridge = Bridge::of_demo(&["--protocol", protocol]).await;
    let asked = question(&bridge, "demo").await;
    assert_eq!(bridge.cancel_task("demo", &asked.task_id()).await["status"], "CANCELED");
    let answer = bridge.answer("demo", &asked.follow_up_id(), "PDF").header("A2A-Reply", mode);
    let refused = match mode {
        "stream" => answer.stream().await.result,
        _ => answer.only_reply().await,
    };
    refused.expect_error("follow_up_expired");
    bridge.get_task("demo", &asked.task_id()).await.expect("CANCELED");
}

#[rstest]
#[tokio::test]
async fn an_answer_is_not_sent_to_a_task_that_ended_behind_the_bridges_back(
    #[values("final", "stream")] mode: &str,
) {
    let answers = std::sync::Arc::new(AtomicUsize::new(0));
    let seen_answers = std::sync::Arc::clone(&answers);
    let peer = Peer::agent(move |seen| {
        let state = match seen.rpc_method().as_str() {
            "GetTask" => "CANCELED",
            _ => "INPUT_REQUIRED",
        };
        if seen.json()["params"]["message"]["taskId"].is_string() {
            seen_answers.fetch_add(1, Ordering::Relaxed);
        }
        Answer::task(seen, &format!("TASK_STATE_{state}"), "which one?")
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let asked = bridge.prompt("peer.ask", "x").only_reply().await.expect("INPUT_REQUIRED");
    let answer = bridge.answer("peer", &asked.follow_up_id(), "this one").header("A2A-Reply", mode);
    let refused = match mode {
        "stream" => answer.stream().await.result,
        _ => answer.only_reply().await,
    };
    refused.expect_error("follow_up_expired");
    assert_eq!(answers.load(Ordering::Relaxed), 0);
    bridge.answer("peer", &asked.follow_up_id(), "again").await.expect_error("follow_up_expired");
}
