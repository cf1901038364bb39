//! Idempotency keys: a repeated request runs the agent once.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{Answer, Bridge, DemoAgent, Peer, attached, eventually, launched};

const KEY: &str = "Nats-Msg-Id";

/// An agent that numbers its tasks.
fn counting() -> Peer {
    let count = AtomicUsize::new(0);
    Peer::agent(move |seen| {
        let n = count.fetch_add(1, Ordering::Relaxed);
        Answer::task(seen, "TASK_STATE_COMPLETED", &format!("run {n}"))
    })
}

#[tokio::test]
async fn repeated_request_gets_the_first_reply_and_runs_once() {
    let peer = counting();
    let bridge = Bridge::with_peer(&peer).await;
    let first = bridge.prompt("peer.ask", "x").header(KEY, "k-1").await.expect("COMPLETED");
    for _ in 0..3 {
        let again = bridge.prompt("peer.ask", "x").header(KEY, "k-1").only_reply().await;
        assert_eq!(again.text, first.text);
    }
    assert_eq!(peer.calls("SendMessage").len(), 1);
    let other = bridge.prompt("peer.ask", "x").header(KEY, "k-2").await;
    assert_eq!(other.message(), "run 1");
    let none = bridge.prompt("peer.ask", "x").await;
    assert_eq!(none.message(), "run 2");
    bridge.stats("peer", "ask", 6).await;
}

#[tokio::test]
async fn repeated_request_waits_for_the_running_first_one() {
    let bridge = Bridge::with(launched("demo", &[]).set("max_in_flight", 1)).start().await;
    let begin = || bridge.prompt("demo.slow", "1").header(KEY, "k").begin();
    let first = begin().await;
    bridge.until_working("demo").await;
    let (second, third) = (begin().await, begin().await);
    let first = first.only_reply().await.expect("COMPLETED");
    for later in [second, third] {
        assert_eq!(later.only_reply().await.text, first.text);
    }
    assert_eq!(bridge.tasks("demo").await.len(), 1);
}

#[tokio::test]
async fn idempotency_key_with_another_body_is_refused() {
    let peer = counting();
    let bridge = Bridge::with_peer(&peer).await;
    let call = |prompt| bridge.prompt("peer.ask", prompt).header(KEY, "k");
    call("x").await.expect("COMPLETED");
    call("y").await.expect_error("invalid_request").saying("idempotency key");
    assert_eq!(call("x").await.message(), "run 0");
    assert_eq!(peer.calls("SendMessage").len(), 1);
}

#[tokio::test]
async fn agent_errors_are_remembered() {
    let count = AtomicUsize::new(0);
    let peer = Peer::agent(move |seen| match count.fetch_add(1, Ordering::Relaxed) {
        0 => Answer::text(500, "text/plain", "sorry"),
        _ => Answer::task(seen, "TASK_STATE_COMPLETED", "done"),
    });
    let bridge = Bridge::with_peer(&peer).await;
    for _ in 0..2 {
        let reply = bridge.prompt("peer.ask", "x").header(KEY, "k").await;
        reply.expect_error("agent_error");
    }
    assert_eq!(peer.calls("SendMessage").len(), 1);
}

#[tokio::test]
async fn errors_before_the_agent_was_reached_are_not_remembered() {
    let mut agent = DemoAgent::start(&["--ignore-blocking"]).await;
    let settings = attached("demo", &agent.url()).set("max_in_flight", 1);
    let bridge = Bridge::with(settings).start().await;
    let slow = bridge.begin_slow("demo", 60).await;
    let task = bridge.working_task("demo").await;
    let call = || bridge.prompt("demo.echo", "x").header(KEY, "k");
    call().await.expect_error("busy");
    bridge.cancel_task("demo", &task).await;
    slow.only_reply().await.expect("CANCELED");
    call().await.expect("COMPLETED");

    let asked = bridge.prompt("demo.state", "input-required").await;
    agent.kill();
    let answer = || bridge.answer("demo", &asked.follow_up_id(), "x").header(KEY, "k");
    answer().await.expect_error("agent_unavailable");
    agent.run().await;
    // The restarted agent does not know the task, so this reply is not a remembered one.
    let reply = eventually(|| async {
        let reply = answer().await;
        (reply.code() != "agent_unavailable").then_some(reply)
    })
    .await;
    reply.expect_error("task_lost");
}

#[tokio::test]
async fn many_repeats_of_one_key_are_busy_and_block_nothing_else() {
    let settings = launched("demo", &["--ignore-blocking"]).set("max_in_flight", 2);
    let bridge = Bridge::with(settings).start().await;
    let begin = || bridge.prompt("demo.slow", "60").header(KEY, "k").begin();
    let mut first = begin().await;
    let task = bridge.working_task("demo").await;
    let mut repeats = Vec::new();
    for _ in 0..1_100 {
        repeats.push(begin().await);
    }
    // Requests for different endpoints are not in order, so wait until the last repeat has arrived.
    let refused = repeats.last_mut().unwrap().reply().await.expect_error("busy").saying("idempotency key");
    assert_eq!(refused["error_info"]["retryable"], true);
    bridge.get_task("demo", &task).await.expect("WORKING");
    assert!(bridge.card("demo").await["name"].is_string());
    bridge.prompt("demo.echo", "another call").header(KEY, "other").await.expect("COMPLETED");
    let cancelled = bridge.cancel_task("demo", &task).await;
    assert!(cancelled.is("CANCELED"), "{cancelled:?}");
    let first = first.reply().await.expect("CANCELED");
    let mut waited = 0;
    for mut repeat in repeats.drain(..1_099) {
        let reply = repeat.reply().await;
        waited += usize::from(reply.text == first.text);
        assert!(reply.text == first.text || reply.code() == "busy", "{reply:?}");
    }
    assert_eq!(waited, 32);
    assert_eq!(bridge.tasks("demo").await.len(), 2, "the repeats did not run the agent");
}
