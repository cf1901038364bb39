//! Stopping the bridge.

use std::time::{Duration, Instant};

use async_nats::client::RequestErrorKind;
use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::Value;

use crate::support::agent_protocol::Scene;
use crate::support::processes::{memory, until_idle};
use crate::support::proxy::PausableProxy;
use crate::support::{Answer, Bridge, DemoAgent, NatsServer, Peer, attached, launched, wait_until};

fn is_stopped(object: &Value) -> bool {
    object["state"] == "stopped"
}

#[rstest]
#[tokio::test]
async fn calls_in_flight_finish_and_no_process_is_left(
    #[values(Signal::SIGTERM, Signal::SIGINT)] signal: Signal,
) {
    let mut bridge =
        Bridge::with(launched("demo", &["--leave-grandchild"])).shutdown_grace("8s").start().await;
    assert_eq!(bridge.launched().len(), 2, "the agent and its child");
    let slow = bridge.begin_slow("demo", 1).await;
    bridge.until_working("demo").await;
    bridge.signal(signal);
    // Its services are withdrawn while the call still runs.
    wait_until(|| async { bridge.ask("PING", "demo").await.is_none() }).await;
    assert!(bridge.prompt("demo.echo", "x").await.is_no_responders());
    let reply = slow.only_reply().await.expect("COMPLETED");
    assert_eq!(reply.message(), "worked for 1 s");
    let status = bridge.ended().await;
    assert_eq!(status.code(), Some(0));
    assert_eq!(bridge.launched(), Vec::<i32>::new());
    bridge.announced("demo", is_stopped).await;
}

#[tokio::test]
async fn call_beyond_the_grace_period_gets_one_reply_and_is_cancelled() {
    let agent = launched("demo", &["--ignore-blocking"]);
    let mut bridge = Bridge::with(agent).shutdown_grace("500ms").start().await;
    let slow = bridge.begin_slow("demo", 60).await;
    let task = bridge.working_task("demo").await;
    let status = bridge.stop().await;
    let reply = slow.only_reply().await.expect_error("timeout");
    assert_eq!(reply.task_id(), task);
    assert_eq!(reply["error_info"]["cancelled"], true);
    assert_eq!(status.code(), Some(0));
}

#[tokio::test]
async fn call_without_a_known_task_gets_one_reply() {
    let mut bridge = Bridge::with_demo(&[]).await;
    let hang = bridge.prompt("demo.hang", "x").begin().await;
    bridge.prompt("demo.echo", "after it").await.expect("COMPLETED");
    let status = bridge.stop().await;
    let reply = hang.only_reply().await.expect_error("timeout");
    assert_eq!(reply["error_info"]["cancelled"], Value::Null);
    assert_eq!(status.code(), Some(0));
}

#[tokio::test]
async fn second_signal_skips_the_grace_period() {
    // Longer than any test may take.
    let agent = launched("demo", &["--ignore-sigterm", "--leave-grandchild"]).set("stop_grace", "10m");
    let mut bridge = Bridge::with(agent).shutdown_grace("10m").start().await;
    let slow = bridge.begin_slow("demo", 60).await;
    bridge.until_working("demo").await;
    bridge.signal(Signal::SIGINT);
    bridge.until_logged("Send it again to skip the grace period").await;
    bridge.signal(Signal::SIGINT);
    bridge.ended().await;
    slow.only_reply().await.expect_error("timeout");
    assert_eq!(bridge.launched(), Vec::<i32>::new());
}

#[tokio::test]
async fn agent_that_ignores_sigterm_is_killed() {
    let agent = launched("demo", &["--ignore-sigterm", "--leave-grandchild"]);
    let mut bridge = Bridge::with(agent).start().await;
    let began = Instant::now();
    let status = bridge.stop().await;
    assert_eq!(status.code(), Some(0));
    assert!(began.elapsed() >= Duration::from_secs(9), "{:?}", began.elapsed());
    assert_eq!(bridge.launched(), Vec::<i32>::new());
    bridge.announced("demo", is_stopped).await;
}

#[tokio::test]
async fn bridge_with_a_starting_agent_stops_at_once() {
    let agent =
        launched("demo", &["--slow-start", "10m"]).set("startup_timeout", "10m").set("stop_grace", "10m");
    let mut bridge = Bridge::with(agent).start_early().await;
    wait_until(|| async { !bridge.launched().is_empty() }).await;
    assert_eq!(bridge.stop().await.code(), Some(0));
    assert_eq!(bridge.launched(), Vec::<i32>::new());
}

#[rstest]
#[tokio::test]
async fn calls_to_a_removed_agent_get_the_grace_period(
    #[values(None, Some(Signal::SIGTERM))] then: Option<Signal>,
) {
    let agent = launched("removed", &["--ignore-blocking"]);
    let mut bridge = Bridge::with(agent).and(launched("other", &[])).shutdown_grace("4s").start().await;
    let brief = bridge.begin_slow("removed", 1).await;
    let long = bridge.begin_slow("removed", 60).await;
    let other = bridge.begin_slow("other", 60).await;
    bridge.until_working("other").await;
    wait_until(|| async { bridge.tasks("removed").await.len() == 2 }).await;
    bridge.reload(|settings| {
        settings["agents"].as_array_mut().unwrap().remove(0);
    });
    wait_until(|| async { bridge.ask("PING", "removed").await.is_none() }).await;
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
        bridge.announced("removed", is_stopped).await;
        bridge.prompt("other.echo", "still there").await.expect("COMPLETED");
    }
}

#[tokio::test]
async fn reload_does_not_wait_for_submitted_tasks_of_a_removed_agent() {
    let agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("removed", &agent.url())).and(launched("other", &[]));
    let mut bridge = bridge.shutdown_grace("10m").start().await;
    let task = bridge.prompt("removed.slow", "60").mode("submit").await.expect("WORKING");
    bridge.reload(|settings| {
        settings["agents"].as_array_mut().unwrap().remove(0);
    });
    bridge.announced("removed", is_stopped).await;
    bridge.until_logged("agent drained").await;
    assert_eq!(agent.state_of(&task.task_id()).await, "TASK_STATE_WORKING");
    assert!(!bridge.log().contains("cut off"), "{}", bridge.log());
}

#[rstest]
#[case::stopped(None)]
#[case::changed(Some(("demo", "headers: { X-New: yes }")))]
#[case::removed(Some(("other", "")))]
#[tokio::test]
async fn open_queries_end_at_once_when_their_agent_is_no_longer_served(#[case] reload: Option<(&str, &str)>) {
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
        let ping = scene.caller.request("$SRV.PING.agents", "".into()).await;
        assert_eq!(ping.unwrap_err().kind(), RequestErrorKind::NoResponders);
    }
}

#[tokio::test]
async fn open_query_can_be_answered_after_a_change_of_limits() {
    let scene = Scene::start("").await;
    let mut stream = scene.prompt("report about tides").await;
    let query = stream.chunk_of("query").await;
    Box::pin(scene.reload("demo", "request_timeout: 1m")).await;
    stream.reply(&query, "PDF").await;
    assert_eq!(stream.rest().await.error, None);
}

#[tokio::test]
async fn a_server_that_stops_reading_does_not_delay_the_stop() {
    const SIZE: usize = 900_000;
    let nats = NatsServer::start().await;
    let proxy = PausableProxy::start(nats.port());
    let (pause, text) = (proxy.pauser(), "x".repeat(SIZE));
    let peer = Peer::agent(move |seen| {
        pause();
        Answer::task(seen, "TASK_STATE_COMPLETED", &text)
    });
    let settings = attached("peer", &peer.url());
    let mut bridge =
        Bridge::with(settings).nats("url", proxy.url()).shutdown_grace("1s").start_on(nats).await;
    let before = memory(bridge.pid(), "VmHWM");
    // More than the buffers between the bridge and the server hold, so that the agent's send window is full.
    let mut calls = Vec::new();
    for _ in 0..16 {
        calls.push(bridge.prompt("peer.ask", "x").begin().await);
    }
    wait_until(|| async { memory(bridge.pid(), "VmHWM") > before + 16 * SIZE as u64 }).await;
    until_idle(bridge.pid()).await;
    let status = bridge.stop().await;
    assert_eq!(status.code(), Some(0));
}
