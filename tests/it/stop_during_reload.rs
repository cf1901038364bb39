//! A stop while a start or a reload is under way: agents are ended as in any other stop.

use std::path::Path;
use std::time::Duration;

use a2a_bridge::internal::procfs::Stat;
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;

use crate::support::eventually::eventually;
use crate::support::site::{SOON, Site, demo};

/// An agent that is never ready, and that ends when it was asked to and then told something by a pipe. A
/// shell's child on its way to its program loses signals, so that is over before it says that it has begun.
fn thorough(folder: &Path) -> String {
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

async fn until_there(site: &Site, file: &str) {
    let path = site.folder().join(file);
    eventually(SOON, || async { path.exists().then_some(()) }).await;
}

/// Tells the agent that it may end, and sees that the bridge has waited for that.
async fn ends_in_order(site: &mut Site) {
    until_there(site, "asked").await;
    let bridge = site.pid();
    let over =
        eventually(SOON, || async { Stat::read(bridge).is_none_or(|stat| stat.has_exited()).then_some(()) });
    // Longer than it waits for what it does not know of.
    assert!(tokio::time::timeout(Duration::from_secs(4), over).await.is_err(), "it has not waited");
    std::fs::write(site.folder().join("pipe"), "go\n").unwrap();
    assert_eq!(site.ended().await, Some(0));
    assert!(site.folder().join("cleaned").exists());
    assert!(site.log().contains("agent exited with code 0"), "{}", site.log());
    assert_eq!(site.processes(), Vec::<i32>::new());
}

/// The way to a broker that falls silent when a client begins to subscribe.
async fn silent_broker(broker: &str) -> String {
    let broker = broker.strip_prefix("nats://").unwrap().to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tasks = TaskTracker::new();
    let relays = tasks.clone();
    tasks.spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let (mut from_server, mut to_server) = TcpStream::connect(broker).await.unwrap().into_split();
        let (mut from_client, mut to_client) = client.into_split();
        relays.spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
        let mut chunk = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from_client.read(&mut chunk).await {
            if !String::from_utf8_lossy(&chunk[..count]).contains("SUB ") {
                to_server.write_all(&chunk[..count]).await.unwrap();
            }
        }
    });
    format!("nats://{address}")
}

#[tokio::test]
async fn an_agent_that_was_launched_by_a_start_under_way_is_ended_in_order() {
    let mut site = Site::new().await;
    let broker = silent_broker(&site.server.url()).await;
    let elsewhere = "url: http://127.0.0.1:9";
    let agent = thorough(site.folder());
    site.settings_at(&broker, "", &[("a", &agent), ("b", elsewhere), ("c", elsewhere), ("d", elsewhere)]);
    site.start();
    until_there(&site, "began").await;
    assert!(!site.log().contains("serving"), "it waits for a word of the broker");
    site.signal(Signal::SIGTERM);
    ends_in_order(&mut site).await;
}

#[tokio::test]
async fn an_agent_that_leaves_by_a_reload_under_way_is_ended_in_order() {
    let mut site = Site::new().await;
    site.settings(&[("a", &thorough(site.folder())), ("b", &demo(""))]);
    site.start();
    until_there(&site, "began").await;
    site.until_state("b", "ready").await;
    site.settings(&[("c", &demo(""))]);
    site.signal(Signal::SIGHUP);
    until_there(&site, "asked").await;
    // What is new does not wait for what leaves, and ends with it.
    site.until_state("c", "ready").await;
    site.signal(Signal::SIGINT);
    ends_in_order(&mut site).await;
}

#[tokio::test]
async fn a_second_signal_ends_an_agent_that_leaves_by_a_reload() {
    let mut site = Site::new().await;
    site.settings(&[("a", &thorough(site.folder()))]);
    site.start();
    until_there(&site, "began").await;
    eventually(SOON, || async { site.log().contains("serving").then_some(()) }).await;
    site.settings(&[("b", "url: http://127.0.0.1:9")]);
    site.signal(Signal::SIGHUP);
    until_there(&site, "asked").await;
    site.signal(Signal::SIGTERM);
    eventually(SOON, || async {
        site.log().contains("Send it again to skip the grace period").then_some(())
    })
    .await;
    site.signal(Signal::SIGTERM);
    assert_eq!(site.ended().await, Some(0));
    assert_eq!(site.processes(), Vec::<i32>::new());
}
