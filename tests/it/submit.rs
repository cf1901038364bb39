//! Reply mode `submit`: an id at once, news at every change, the result whenever it is asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_nats::Subscriber;
use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::caller::Call;
use crate::support::peer::{card, event, streaming_card};
use crate::support::{Answer, Bridge, LATER, Peer, SOON, attached, eventually, launched};

fn submit(call: Call) -> Call {
    call.header("A2A-Reply", "submit")
}

async fn news(bridge: &Bridge) -> Subscriber {
    let news = bridge.client.subscribe(format!("{}.task.>", bridge.prefix)).await.unwrap();
    bridge.client.flush().await.unwrap();
    news
}

/// The next news with this status, and the subject it came on.
async fn until(news: &mut Subscriber, status: &str) -> (String, Value) {
    let wanted = async {
        loop {
            let message = news.next().await.expect("the connection is up");
            let body: Value = serde_json::from_slice(&message.payload).expect("news are JSON");
            if body["status"] == status {
                return (message.subject.to_string(), body);
            }
        }
    };
    tokio::time::timeout(LATER, wanted).await.unwrap_or_else(|_| panic!("no news of {status}"))
}

#[rstest]
#[tokio::test]
async fn every_state_of_a_submitted_task_is_told_and_can_be_looked_up(
    #[values("1.0", "0.3")] protocol: &str,
    #[values(
        ("completed", "COMPLETED"),
        ("failed", "FAILED"),
        ("canceled", "CANCELED"),
        ("rejected", "REJECTED"),
        ("input-required", "INPUT_REQUIRED"),
        ("auth-required", "AUTH_REQUIRED"),
        ("submitted", "COMPLETED"),
        ("working", "COMPLETED")
    )]
    row: (&str, &str),
) {
    let (state, status) = row;
    let bridge = Bridge::of_demo(&["--protocol", protocol]).await;
    let mut news = news(&bridge).await;
    let first = submit(bridge.prompt("demo.state", state)).only_reply().await;
    assert!(first.is("WORKING") || first.is(status), "{first:?}");
    let id = first.task_id();
    let (subject, told) = until(&mut news, status).await;
    assert_eq!(subject, format!("{}.task.demo.{id}", bridge.prefix));
    assert_eq!(told["task"], first["task"]);
    let looked = bridge.get_task("demo", &id).await.expect(status);
    assert_eq!(looked.body, told);
}

#[tokio::test]
async fn a_direct_message_is_the_reply_to_a_submission() {
    let bridge = Bridge::of_demo(&[]).await;
    let reply = submit(bridge.prompt("demo.message", "hello")).only_reply().await.expect("COMPLETED");
    assert_eq!(reply["task"]["id"], json!(null));
    submit(bridge.prompt("demo.rpc-error", "-32005")).only_reply().await.expect_error("agent_error");
}

#[tokio::test]
async fn a_question_of_a_submitted_task_is_in_its_news_and_its_answer_leads_to_more() {
    let bridge = Bridge::of_demo(&[]).await;
    let mut news = news(&bridge).await;
    let body = json!({"topic": "tides", "audience": "sailors"});
    let first = submit(bridge.call("demo.report", body)).only_reply().await;
    let (_, asked) = until(&mut news, "INPUT_REQUIRED").await;
    let follow_up = asked["data"]["follow_up_id"].as_str().unwrap().to_owned();
    let looked = bridge.get_task("demo", &first.task_id()).await.expect("INPUT_REQUIRED");
    assert_eq!(looked.follow_up_id(), follow_up);
    bridge.answer("demo", &follow_up, "PDF").only_reply().await.expect("COMPLETED");
    let (_, done) = until(&mut news, "COMPLETED").await;
    assert_eq!(done["task"]["id"], first["task"]["id"]);
}

#[tokio::test]
async fn a_submitted_task_that_is_authenticated_elsewhere_is_followed_on() {
    let bridge = Bridge::of_demo(&["--auth-after", "1s"]).await;
    let mut news = news(&bridge).await;
    let first = submit(bridge.prompt("demo.auth", "x")).only_reply().await;
    let (_, asked) = until(&mut news, "AUTH_REQUIRED").await;
    assert!(asked["data"]["follow_up_id"].is_string());
    let (_, done) = until(&mut news, "COMPLETED").await;
    assert_eq!(done["task"]["id"], first["task"]["id"]);
}

#[tokio::test]
async fn a_submitted_task_that_works_again_after_a_sign_in_says_so() {
    let looks = AtomicUsize::new(0);
    let states = ["AUTH_REQUIRED", "AUTH_REQUIRED", "WORKING", "WORKING", "COMPLETED"];
    let peer = Peer::agent(move |seen| {
        let state = match seen.rpc_method().as_str() {
            "GetTask" => states[looks.fetch_add(1, Ordering::Relaxed).min(4)],
            _ => "WORKING",
        };
        Answer::task(seen, &format!("TASK_STATE_{state}"), "well")
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let mut news = news(&bridge).await;
    submit(bridge.prompt("peer.ask", "x")).only_reply().await.expect("WORKING");
    for status in ["WORKING", "AUTH_REQUIRED", "WORKING", "COMPLETED"] {
        let told = tokio::time::timeout(LATER, news.next()).await.unwrap().unwrap();
        let told: Value = serde_json::from_slice(&told.payload).unwrap();
        assert_eq!(told["status"], status);
    }
}

#[tokio::test]
async fn submitted_tasks_do_not_take_the_places_of_calls() {
    let bridge = Bridge::of(launched("demo", &[]).set("max_in_flight", 1)).start().await;
    let ids: Vec<_> =
        futures_util::future::join_all((0..1).map(|_| submit(bridge.prompt("demo.slow", "30")).only_reply()))
            .await;
    let second = submit(bridge.prompt("demo.slow", "30")).only_reply().await.expect("WORKING");
    bridge.prompt("demo.echo", "still there").only_reply().await.expect("COMPLETED");
    for task in ids.iter().chain([&second]) {
        let cancelled = bridge.cancel_task("demo", &task.task_id()).await;
        assert_eq!(cancelled["status"], "CANCELED", "{cancelled:?}");
    }
}

#[tokio::test]
async fn a_submitted_task_over_its_limit_is_cancelled() {
    let bridge = Bridge::of(launched("demo", &[]).set("task_timeout", "1s")).start().await;
    let mut news = news(&bridge).await;
    let first = submit(bridge.prompt("demo.slow", "60")).only_reply().await.expect("WORKING");
    until(&mut news, "WORKING").await;
    // One end, as in the other modes: why, and what became of the task.
    let message = tokio::time::timeout(LATER, news.next()).await.unwrap().unwrap();
    let end: Value = serde_json::from_slice(&message.payload).unwrap();
    assert_eq!(
        (&end["error_info"]["code"], &end["error_info"]["cancelled"]),
        (&json!("timeout"), &json!(true))
    );
    assert_eq!(end["task"]["id"], first["task"]["id"]);
    bridge.get_task("demo", &first.task_id()).await.expect("CANCELED");
}

#[rstest]
#[tokio::test]
async fn a_task_that_wants_a_sign_in_first_is_submitted_all_the_same(#[values(true, false)] streams: bool) {
    let waiting = json!({"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_AUTH_REQUIRED"}});
    let peer = Peer::start(move |seen| match (seen.method.as_str(), seen.rpc_method().as_str()) {
        ("GET", _) if streams => Answer::json(&streaming_card(&["ask"])),
        ("GET", _) => Answer::json(&card(&["ask"])),
        (_, "SendStreamingMessage") => {
            let event = json!({"jsonrpc": "2.0", "id": 1, "result": {"task": waiting}});
            Answer::Events(format!("data: {event}\n\n").into_bytes(), usize::MAX)
        }
        (_, "SendMessage") => Answer::result(seen, &json!({"task": waiting})),
        _ => Answer::result(seen, &waiting),
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let mut news = news(&bridge).await;
    let first = submit(bridge.prompt("peer.ask", "x")).only_reply().await.expect("AUTH_REQUIRED");
    let (_, told) = until(&mut news, "AUTH_REQUIRED").await;
    assert_eq!(told["data"]["follow_up_id"], first.follow_up_id());
}

#[tokio::test]
async fn the_result_of_a_submitted_task_survives_two_cuts_of_the_connection() {
    let mut bridge = Bridge::of_demo(&[]).await;
    let first = submit(bridge.prompt("demo.slow", "4")).only_reply().await.expect("WORKING");
    for _ in 0..2 {
        bridge.nats.restart().await;
        eventually(LATER, || async { bridge.state("demo").await.filter(|state| state == "ready") }).await;
    }
    eventually(LATER, || async {
        bridge.get_task("demo", &first.task_id()).await.is("COMPLETED").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_stop_does_not_wait_for_submitted_tasks_and_does_not_cancel_them() {
    let agent = crate::support::DemoAgent::start(&[]).await;
    let mut bridge =
        Bridge::of(crate::support::attached("demo", &agent.url())).shutdown_grace("30s").start().await;
    let first = submit(bridge.prompt("demo.slow", "60")).only_reply().await.expect("WORKING");
    let began = std::time::Instant::now();
    bridge.signal(nix::sys::signal::Signal::SIGTERM);
    assert!(bridge.ended().await.success());
    assert!(began.elapsed() < SOON, "it waited");
    let state = agent.state_of(&first.task_id()).await;
    assert_eq!(state, "TASK_STATE_WORKING");
}

#[tokio::test]
async fn a_submitted_task_that_was_lost_is_so_for_those_who_look_it_up() {
    let agent = launched("demo", &[]).set("restart", "never");
    let bridge = Bridge::of(agent).start().await;
    let mut news = news(&bridge).await;
    let first = submit(bridge.prompt("demo.slow", "60")).only_reply().await.expect("WORKING");
    let asked = submit(bridge.prompt("demo.state", "input-required")).only_reply().await;
    let (_, question) = until(&mut news, "INPUT_REQUIRED").await;
    for pid in bridge.launched() {
        crate::support::processes::signal(pid, nix::sys::signal::Signal::SIGKILL);
    }
    let (_, told) = until(&mut news, "ERROR").await;
    assert_eq!(told["error_info"]["code"], "task_lost");
    let looked = bridge.get_task("demo", &first.task_id()).await.expect_error("task_lost");
    assert_eq!(looked.body, told);
    // A question stays open for as long as its time.
    let looked = bridge.get_task("demo", &asked.task_id()).await.expect("INPUT_REQUIRED");
    assert_eq!(looked.body, question);
}

#[tokio::test]
async fn the_update_of_a_cancelled_task_and_a_look_at_it_say_the_same() {
    let looks_after_cancel = Arc::new(AtomicUsize::new(0));
    let (looks, is_cancelled) = (Arc::clone(&looks_after_cancel), AtomicBool::new(false));
    let peer = Peer::start(move |seen| {
        let task = |state: &str| json!({"id": "t", "contextId": "c", "status": {"state": state}});
        let says = |text: &str| {
            let message = json!({"messageId": text, "role": "ROLE_AGENT", "parts": [{"text": text}]});
            let status = json!({"state": "TASK_STATE_WORKING", "message": message});
            event(&json!({"statusUpdate": {"taskId": "t", "contextId": "c", "status": status}}))
        };
        match (seen.method.as_str(), seen.rpc_method().as_str()) {
            ("GET", _) => Answer::json(&streaming_card(&["ask"])),
            (_, "SendStreamingMessage") => {
                Answer::Events([says("reading"), says("thinking")].concat(), usize::MAX)
            }
            (_, "CancelTask") => {
                is_cancelled.store(true, Ordering::Relaxed);
                Answer::result(seen, &task("TASK_STATE_CANCELED"))
            }
            (_, "GetTask") if is_cancelled.load(Ordering::Relaxed) => {
                looks.fetch_add(1, Ordering::Relaxed);
                Answer::result(seen, &task("TASK_STATE_CANCELED"))
            }
            (_, "GetTask") => Answer::result(seen, &task("TASK_STATE_WORKING")),
            _ => Answer::not_found(seen),
        }
    });
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    let mut news = news(&bridge).await;
    let id = submit(bridge.prompt("peer.ask", "x")).only_reply().await.expect("WORKING").task_id();
    assert_eq!(bridge.cancel_task("peer", &id).await["status"], "CANCELED");
    let (_, told) = until(&mut news, "CANCELED").await;
    // The call that follows the task sees its end as well.
    eventually(LATER, || async { (looks_after_cancel.load(Ordering::Relaxed) > 0).then_some(()) }).await;
    for _ in 0..50 {
        assert_eq!(bridge.get_task("peer", &id).await.expect("CANCELED").body, told);
    }
}
