//! `call` while bridges are killed, replaced or shut down.

use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;

use crate::support::commands::{BundledBridge, CommandOutput, command_on, demo_settings, run};
use crate::support::{NatsServer, within_deadline};

/// A call of `slow`, which the only bridge on the server has begun to work on.
async fn begin_slow(server: &NatsServer, arguments: &[&str]) -> JoinHandle<CommandOutput> {
    let client = server.connect().await;
    let mut requests = client.subscribe("a2a.action.demo.slow").await.unwrap();
    client.flush().await.unwrap();
    let mut command = command_on(&server.url(), &["call", "demo.slow"]);
    command.args(arguments);
    let call = tokio::task::spawn_blocking(move || run(&mut command, ""));
    within_deadline(requests.next()).await.unwrap();
    call
}

#[tokio::test(flavor = "multi_thread")]
async fn call_ends_when_its_bridge_is_killed_although_another_one_serves_the_agent() {
    let server = NatsServer::start().await;
    let mut killed = BundledBridge::demo(&server).await;
    // This agent names a task of mode `final` only at its end.
    let calls = [
        (begin_slow(&server, &["60"]).await, "`a2a-bridge agents`"),
        (begin_slow(&server, &["60", "--stream"]).await, "`a2a-bridge task get demo "),
    ];
    let _other = BundledBridge::demo(&server).await;
    killed.kill();
    let began = Instant::now();
    for (call, look_up) in calls {
        let output = call.await.unwrap();
        assert_eq!(output.code, 69, "{output:?}");
        assert!(output.err.contains("the bridge disappeared before it replied"), "{output:?}");
        assert!(output.err.contains(look_up), "{output:?}");
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn call_continues_when_another_bridge_of_the_agent_is_killed() {
    let server = NatsServer::start().await;
    let _bridge = BundledBridge::demo(&server).await;
    let call = begin_slow(&server, &["20"]).await;
    let mut other = BundledBridge::demo(&server).await;
    other.kill();
    let output = call.await.unwrap();
    assert_eq!((output.code, output.out.as_str()), (0, "worked for 20 s\n"), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn call_continues_while_its_bridge_waits_for_it_before_it_exits() {
    let server = NatsServer::start().await;
    let bridge = BundledBridge::start(&server, &format!("{}\nshutdown_grace: 30s\n", demo_settings())).await;
    bridge.until_ready(&server.url(), &[]).await;
    let call = begin_slow(&server, &["20"]).await;
    bridge.signal(Signal::SIGTERM);
    let output = call.await.unwrap();
    assert_eq!((output.code, output.out.as_str()), (0, "worked for 20 s\n"), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn call_needs_no_permission_for_discovery() {
    let permissions = "users: [
        { user: bridge, password: one }
        { user: caller, password: two, permissions: { publish: 'a2a.action.*.*', subscribe: '_INBOX.>' } }
    ]";
    let server = NatsServer::start_configured(&format!("authorization: {{ {permissions} }}")).await;
    let settings = demo_settings().replace("nats:\n", "nats:\n  user: bridge\n  password: one\n");
    let bridge = BundledBridge::start(&server, &settings).await;
    bridge.until_ready(&server.url(), &["--user", "bridge", "--password", "one"]).await;
    // Long enough for a discovery request.
    let arguments = ["call", "demo.slow", "4", "--user", "caller", "--password", "two"];
    let output = run(&mut command_on(&server.url(), &arguments), "");
    assert_eq!((output.code, output.out.as_str()), (0, "worked for 4 s\n"), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_ends_when_no_bridge_serves_the_agent() {
    let server = NatsServer::start().await;
    let mut bridge = BundledBridge::demo(&server).await;
    let mut submit = command_on(&server.url(), &["call", "demo.slow", "600", "--submit"]);
    let task = run(&mut submit, "").out.trim().to_owned();
    let client = server.connect().await;
    // The first probe comes after the first look-up of the task.
    let mut probes = client.subscribe("$SRV.INFO.demo").await.unwrap();
    client.flush().await.unwrap();
    let mut command = command_on(&server.url(), &["task", "watch", "demo", &task]);
    let watch = tokio::task::spawn_blocking(move || run(&mut command, ""));
    within_deadline(probes.next()).await.unwrap();
    drop(probes);
    bridge.kill();
    let began = Instant::now();
    let output = watch.await.unwrap();
    assert_eq!(output.code, 69, "{output:?}");
    assert!(
        output.err.contains("no bridge serves `demo` any more; the outcome of the task is unknown"),
        "{output:?}"
    );
    assert!(output.err.contains(&format!("`a2a-bridge task get demo {task}`")), "{output:?}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}
