//! How the bridge ends.

use std::time::{Duration, Instant};

use async_nats::client::RequestErrorKind;
use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::Value;

use crate::support::agent_protocol::Scene;
use crate::support::{Bridge, DemoAgent, SOON, attached, eventually, launched};

fn is_stopped(object: &Value) -> bool {
    object["state"] == "stopped"
}

#[rstest]
#[tokio::test]
async fn calls_in_flight_finish_and_nothing_is_left(
    #[values(Signal::SIGTERM, Signal::SIGINT)] signal: Signal,
) {
    let mut bridge = Bridge::of(launched("demo", &["--leave-grandchild"])).shutdown_grace("8s").start().await;
    assert_eq!(bridge.launched().len(), 2, "the agent and its child");
    let slow = bridge.begin_slow("demo", 1).await;
    bridge.until_working("demo").await;
    bridge.signal(signal);
    // It is off the mesh while the call goes on.
    eventually(SOON, || async { bridge.ask("PING", "demo").await.is_none().then_some(()) }).await;
    assert!(bridge.prompt("demo.echo", "x").await.is_no_responders());
    let reply = slow.only_reply().await.expect("COMPLETED");
    assert_eq!(reply.message(), "worked for 1 s");
    let status = bridge.ended().await;
    assert_eq!(status.code(), Some(0));
    assert_eq!(bridge.launched(), Vec::<i32>::new());
    bridge.announced("demo", is_stopped).await;
}

#[tokio::test]
async fn a_call_longer_than_the_grace_time_gets_exactly_one_reply_and_is_cancelled() {
    let agent = launched("demo", &["--ignore-blocking"]);
    let mut bridge = Bridge::of(agent).shutdown_grace("500ms").start().await;
    let slow = bridge.begin_slow("demo", 60).await;
    let task = bridge.working_task("demo").await;
    let status = bridge.stop().await;
    let reply = slow.only_reply().await.expect_error("timeout");
    assert_eq!(reply.task_id(), task);
    assert_eq!(reply["error_info"]["cancelled"], true);
    assert_eq!(status.code(), Some(0));
}

#[tokio::test]
async fn a_call_whose_task_is_not_known_gets_exactly_one_reply_too() {
    let mut bridge = Bridge::of_demo(&[]).await;
    let hang = bridge.prompt("demo.hang", "x").begin().await;
    bridge.prompt("demo.echo", "after it").await.expect("COMPLETED");
    let status = bridge.stop().await;
    let reply = hang.only_reply().await.expect_error("timeout");
    assert_eq!(reply["error_info"]["cancelled"], Value::Null);
    assert_eq!(status.code(), Some(0));
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let agent = launched("demo", &["--ignore-sigterm", "--leave-grandchild"]);
    let mut bridge = Bridge::of(agent).shutdown_grace("60s").start().await;
    let slow = bridge.begin_slow("demo", 60).await;
    bridge.until_working("demo").await;
    bridge.signal(Signal::SIGINT);
    eventually(SOON, || async {
        bridge.log().contains("Send it again to skip the grace period").then_some(())
    })
    .await;
    let began = Instant::now();
    bridge.signal(Signal::SIGINT);
    bridge.ended().await;
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    slow.only_reply().await.expect_error("timeout");
    assert_eq!(bridge.launched(), Vec::<i32>::new());
}

#[tokio::test]
async fn an_agent_that_ignores_the_wish_to_end_is_ended_by_force() {
    let agent = launched("demo", &["--ignore-sigterm", "--leave-grandchild"]);
    let mut bridge = Bridge::of(agent).start().await;
    let began = Instant::now();
    let status = bridge.stop().await;
    assert_eq!(status.code(), Some(0));
    assert!(began.elapsed() >= Duration::from_secs(9), "{:?}", began.elapsed());
    assert_eq!(bridge.launched(), Vec::<i32>::new());
    bridge.announced("demo", is_stopped).await;
}

#[tokio::test]
async fn a_bridge_whose_agent_is_still_starting_stops_at_once() {
    let agent = launched("demo", &["--slow-start", "60s"]);
    let mut bridge = Bridge::of(agent).start_early().await;
    eventually(SOON, || async { (!bridge.launched().is_empty()).then_some(()) }).await;
    let began = Instant::now();
    assert_eq!(bridge.stop().await.code(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(bridge.launched(), Vec::<i32>::new());
}

#[rstest]
#[tokio::test]
async fn calls_to_an_agent_that_a_reload_removes_end_as_those_at_a_stop(
    #[values(None, Some(Signal::SIGTERM))] then: Option<Signal>,
) {
    let agent = launched("gone", &["--ignore-blocking"]);
    let mut bridge = Bridge::of(agent).and(launched("other", &[])).shutdown_grace("4s").start().await;
    let brief = bridge.begin_slow("gone", 1).await;
    let long = bridge.begin_slow("gone", 60).await;
    let other = bridge.begin_slow("other", 60).await;
    bridge.until_working("other").await;
    eventually(SOON, || async { (bridge.tasks("gone").await.len() == 2).then_some(()) }).await;
    bridge.reload(|settings| {
        settings["agents"].as_array_mut().unwrap().remove(0);
    });
    eventually(SOON, || async { bridge.ask("PING", "gone").await.is_none().then_some(()) }).await;
    if let Some(signal) = then {
        bridge.signal(signal);
    }
    brief.only_reply().await.expect("COMPLETED");
    let reply = long.only_reply().await.expect_error("timeout");
    assert_eq!(reply["error_info"]["cancelled"], true);
    if then.is_some() {
        assert_eq!(bridge.ended().await.code(), Some(0));
        other.only_reply().await.expect_error("timeout");
    } else {
        bridge.announced("gone", is_stopped).await;
        bridge.prompt("other.echo", "still there").await.expect("COMPLETED");
    }
}

#[tokio::test]
async fn a_reload_does_not_wait_for_submitted_tasks_of_an_agent_that_it_removes() {
    let agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::of(attached("gone", &agent.url())).and(launched("other", &[]));
    let mut bridge = bridge.shutdown_grace("10m").start().await;
    let task = bridge.prompt("gone.slow", "60").header("A2A-Reply", "submit").await.expect("WORKING");
    bridge.reload(|settings| {
        settings["agents"].as_array_mut().unwrap().remove(0);
    });
    bridge.announced("gone", is_stopped).await;
    eventually(SOON, || async { bridge.log().contains("agent drained").then_some(()) }).await;
    assert_eq!(agent.state_of(&task.task_id()).await, "TASK_STATE_WORKING");
    assert!(!bridge.log().contains("cut off"), "{}", bridge.log());
}

#[rstest]
#[case::stopped(None)]
#[case::changed(Some(("demo", "card_refresh: 1m")))]
#[case::removed(Some(("other", "")))]
#[tokio::test]
async fn open_questions_to_an_agent_that_is_no_longer_served_end_at_once(
    #[case] reload: Option<(&str, &str)>,
) {
    let scene = Scene::start("").await;
    let mut stream = scene.prompt("report about tides").await;
    stream.chunk_of("query").await;
    match reload {
        Some((name, settings)) => scene.reload(name, settings).await,
        None => scene.stop().await,
    }
    let (code, text) = stream.rest().await.error.unwrap();
    assert_eq!(code, 500);
    assert!(text.starts_with("the bridge stops serving"), "{text}");
    if reload.is_none() {
        let gone = scene.caller.request("$SRV.PING.agents", "".into()).await;
        assert_eq!(gone.unwrap_err().kind(), RequestErrorKind::NoResponders);
    }
}
