//! Replicas of the bridge as operators run them: they find each other, and notice when one stops or is killed.

use std::process::Child;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::support::caller::Call;
use crate::support::commands::{command, command_on, run};
use crate::support::eventually::eventually_within;
use crate::support::{Bridge, DEADLINE, DemoAgent, attached, eventually, processes, wait_until};

/// A bridge, and a second one with the same settings. Both serve the same agent.
async fn replicas() -> (DemoAgent, Bridge, Child) {
    let agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("demo", &agent.url())).start().await;
    let second = command(&["run", "--config"]).arg(bridge.settings_file()).spawn().unwrap();
    bridge.until_logged("found another replica").await;
    // It announces a stop only after its start.
    wait_until(|| async {
        let agents =
            run(&mut command_on(&bridge.nats.url(), &["agents", "--json", "--prefix", &bridge.prefix]), "");
        let agents = agents.json();
        agents.as_array().unwrap().iter().filter(|agent| agent["state"] == "ready").count() == 2
    })
    .await;
    (agent, bridge, second)
}

fn signal(child: &Child, signal: Signal) {
    processes::signal(i32::try_from(child.id()).unwrap(), signal);
}

#[tokio::test]
async fn a_replica_answers_on_the_subject_that_it_announces() {
    let mut bridge = Bridge::with_demo(&[]).await;
    let announced = bridge.announced("demo", |entry| entry["state"] == "ready").await;
    let instance = announced["bridge_instance"].as_str().unwrap().to_owned();
    let info = bridge.info("demo").await;
    assert_eq!(info["metadata"]["bridge_instance"], instance.as_str());
    let ping = Call::new(&bridge.client, format!("{}.peer.{instance}.ping", bridge.prefix), "").await;
    let answered: Value = ping.body.clone();
    assert_eq!(answered["instance"].as_str().unwrap().replace('-', ""), instance);
    let subject = format!("{}.peers.demo", bridge.prefix);
    let find = json!({"from": uuid::Uuid::new_v4(), "kind": "task", "id": "unknown"});
    let found = Call::new(&bridge.client, subject, find).await;
    assert_eq!(found.body, json!({"instance": answered["instance"], "has": false}));
}

#[tokio::test]
async fn an_orderly_stop_is_noticed_before_the_process_has_ended() {
    let (_agent, bridge, mut second) = replicas().await;
    signal(&second, Signal::SIGTERM);
    bridge.until_logged("another replica has stopped").await;
    let status = eventually(|| {
        let status = second.try_wait().unwrap();
        async move { status }
    })
    .await;
    assert!(status.success(), "{status}");
    assert!(!bridge.log().contains("no longer responds"));
}

#[tokio::test]
async fn a_killed_replica_counts_as_dead() {
    let (_agent, bridge, mut second) = replicas().await;
    signal(&second, Signal::SIGKILL);
    second.wait().unwrap();
    // It takes up to 15 seconds.
    let is_dead = || async { bridge.log().contains("another replica no longer responds").then_some(()) };
    eventually_within(3 * DEADLINE, is_dead).await;
    assert!(!bridge.log().contains("another replica has stopped"));
}
