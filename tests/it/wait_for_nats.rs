//! A bridge that starts before its NATS server.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rstest::rstest;

use crate::support::processes::free_port;
use crate::support::site::{Site, demo};
use crate::support::wait_until;

/// A site whose NATS server is down, and a bridge that waits for it.
async fn waiting() -> Site {
    let mut site = Site::new().await;
    site.server.end();
    site.settings(&[("a", &demo(""))]);
    site.start();
    site.until_logged("cannot connect to NATS").await;
    site
}

#[tokio::test]
async fn run_waits_for_nats_unless_it_has_to_fail_fast() {
    let mut site = waiting().await;
    let (code, out, error) = site.run(&["run", "--fail-fast"]).await;
    assert_eq!(code, 69, "{out}{error}");
    assert!(error.contains("hint: is a nats-server running there?"), "{error}");
    // The other bridge has waited for at least as long.
    site.server.restart().await;
    site.until_state("a", "ready").await;
    let log = site.log();
    assert_eq!(log.matches("cannot connect to NATS").count(), 1, "once a minute: {log}");
    let connected = log.lines().find(|line| line.contains("connected to NATS")).unwrap();
    assert!(connected.contains("INFO") && connected.contains("after="), "{log}");
    assert_eq!(site.stop().await, Some(0));
}

#[rstest]
#[case(Signal::SIGTERM)]
#[case(Signal::SIGINT)]
#[tokio::test]
async fn signal_ends_the_wait_for_nats(#[case] signal: Signal) {
    let mut site = waiting().await;
    let began = Instant::now();
    site.signal(signal);
    assert_eq!(site.ended().await, Some(0), "{}", site.log());
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn health_endpoints_are_served_while_the_bridge_waits_for_nats() {
    let mut site = Site::new().await;
    site.server.end();
    let port = free_port();
    site.settings_with(&format!("metrics: {{ listen: '127.0.0.1:{port}' }}"), &[("a", &demo(""))]);
    site.start();
    site.until_logged("cannot connect to NATS").await;
    let get = |path: &'static str| async move {
        let response = reqwest::get(format!("http://127.0.0.1:{port}{path}")).await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let waiting = (503, "waiting for the first connection to NATS\n".to_owned());
    assert_eq!(get("/healthz").await, (200, "ok\n".to_owned()));
    assert_eq!(get("/readyz").await, waiting);
    let (status, metrics) = get("/metrics").await;
    assert_eq!(status, 200);
    assert!(metrics.contains("a2a_bridge_build_info{") && metrics.contains("a2a_bridge_nats_connected 0"));
    site.server.restart().await;
    wait_until(|| async { get("/readyz").await.0 == 200 }).await;
    assert!(get("/metrics").await.1.contains("a2a_bridge_nats_connected 1"));
    assert_eq!(site.stop().await, Some(0));
}
