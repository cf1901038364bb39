//! A stop during a start or a reload ends agents as gracefully as any other stop.

use std::path::Path;
use std::time::Duration;

use a2a_bridge::internal::procfs::Stat;
use nix::sys::signal::Signal;
use tokio::net::TcpListener;

use crate::support::site::{Site, demo};
use crate::support::{proxy, wait_until};

/// An agent that is never ready, and that exits when it gets the stop signal and then a line on a pipe. A
/// forked shell may lose signals until it has executed its program, so the agent waits for that before it
/// creates the file `began`.
fn stopped_by_pipe(folder: &Path) -> String {
    let made = std::process::Command::new("mkfifo").arg(folder.join("pipe")).status().unwrap();
    assert!(made.success());
    let line = r#"exec 9<> DIR/pipe
        trap ": > DIR/asked; read line <&9; : > DIR/cleaned; exit 0" TERM
        sleep 1000 &
        until grep -q sleep /proc/$!/comm; do :; done
        : > DIR/began; wait"#;
    let line =
        line.replace("DIR", &folder.display().to_string()).replace("&\n", "&").replace("\n        ", "; ");
    format!("url: http://127.0.0.1:9\nverify_port: false\nshell: true\nstop_grace: 10m\ncommand: '{line}'")
}

/// Lets the agent exit, and checks that the bridge has waited for it.
async fn assert_graceful_stop(site: &mut Site) {
    site.until_file("asked").await;
    let bridge = site.pid();
    let exited = wait_until(|| async { Stat::read(bridge).is_none_or(|stat| stat.has_exited()) });
    // Longer than a bridge waits for processes that it does not know.
    assert!(tokio::time::timeout(Duration::from_secs(4), exited).await.is_err(), "it has not waited");
    std::fs::write(site.folder().join("pipe"), "go\n").unwrap();
    assert_eq!(site.ended().await, Some(0));
    assert!(site.folder().join("cleaned").exists());
    assert!(site.log().contains("agent exited with code 0"), "{}", site.log());
    assert_eq!(site.processes(), Vec::<i32>::new());
}

/// A proxy to a NATS server that drops all subscriptions, so that the server never replies to them.
async fn proxy_without_subscriptions(server: &str) -> String {
    let target = server.strip_prefix("nats://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    proxy::relay(listener, target, |chunk| !String::from_utf8_lossy(chunk).contains("SUB "));
    format!("nats://{address}")
}

#[tokio::test]
async fn stop_during_start_ends_launched_agents_gracefully() {
    let mut site = Site::new().await;
    let url = proxy_without_subscriptions(&site.server.url()).await;
    let elsewhere = "url: http://127.0.0.1:9";
    let agent = stopped_by_pipe(site.folder());
    site.settings_at(&url, "", &[("a", &agent), ("b", elsewhere), ("c", elsewhere), ("d", elsewhere)]);
    site.start();
    site.until_file("began").await;
    assert!(!site.log().contains("serving"), "it waits for the NATS server");
    site.signal(Signal::SIGTERM);
    assert_graceful_stop(&mut site).await;
}

#[tokio::test]
async fn stop_during_reload_ends_removed_agents_gracefully() {
    let mut site = Site::new().await;
    site.settings(&[("a", &stopped_by_pipe(site.folder())), ("b", &demo(""))]);
    site.start();
    site.until_file("began").await;
    site.until_state("b", "ready").await;
    site.settings(&[("c", &demo(""))]);
    site.signal(Signal::SIGHUP);
    site.until_file("asked").await;
    // The new agent does not wait for the removed ones, and stops with them.
    site.until_state("c", "ready").await;
    site.signal(Signal::SIGINT);
    assert_graceful_stop(&mut site).await;
}

#[tokio::test]
async fn second_signal_kills_an_agent_that_a_reload_removes() {
    let mut site = Site::new().await;
    site.settings(&[("a", &stopped_by_pipe(site.folder()))]);
    site.start();
    site.until_file("began").await;
    site.until_logged("serving").await;
    site.settings(&[("b", "url: http://127.0.0.1:9")]);
    site.signal(Signal::SIGHUP);
    site.until_file("asked").await;
    site.signal(Signal::SIGTERM);
    site.until_logged("Send it again to skip the grace period").await;
    site.signal(Signal::SIGTERM);
    assert_eq!(site.ended().await, Some(0));
    assert_eq!(site.processes(), Vec::<i32>::new());
}
