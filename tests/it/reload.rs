//! Reloads while agents are at work: nobody waits for the calls of others, and nothing is lost.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
#[cfg(target_os = "linux")]
use tokio::net::{TcpListener, TcpStream};
#[cfg(target_os = "linux")]
use tokio_util::task::TaskTracker;

use crate::support::processes::{self, free_port};
use crate::support::{Bridge, DemoAgent, SOON, attached, eventually, launched};

/// Longer than any test: whoever waits for a call or for the grace period waits too long.
const LONG: u32 = 600;
const GRACE: &str = "10m";

fn agents(settings: &mut Value) -> &mut Vec<Value> {
    settings["agents"].as_array_mut().unwrap()
}

/// What is announced of an agent, until `is` the case for one announcement.
async fn announced(bridge: &mut Bridge, agent: &str, is: impl Fn(&Value) -> bool) -> Vec<Value> {
    let seen = std::cell::RefCell::new(Vec::new());
    bridge
        .announced(agent, |object| {
            seen.borrow_mut().push(object.clone());
            is(object)
        })
        .await;
    seen.into_inner()
}

async fn instance(bridge: &Bridge, agent: &str) -> String {
    bridge.info(agent).await["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_added_agent_does_not_wait_for_the_calls_of_one_that_leaves() {
    let mut gone = DemoAgent::start(&[]).await;
    let bridge = Bridge::of(attached("gone", &gone.url())).and(launched("other", &[]));
    let mut bridge = bridge.shutdown_grace(GRACE).start().await;
    let long = bridge.begin_slow("gone", LONG).await;
    bridge.until_working("gone").await;
    let new = DemoAgent::start(&[]).await;
    bridge.reload(|settings| {
        agents(settings).remove(0);
        agents(settings).push(json!({"name": "new", "url": new.url()}));
    });
    bridge.until("new", "ready").await;
    bridge.prompt("new.echo", "x").await.expect("COMPLETED");
    // The registry does not list what nobody serves.
    bridge.announced("gone", |object| object["state"] == "stopped" && object["actions"] == json!([])).await;
    assert!(!bridge.log().contains("agent drained"), "its call goes on: {}", bridge.log());
    gone.kill();
    long.only_reply().await.expect_error("outcome_unknown");
    eventually(SOON, || async { bridge.log().contains("agent drained").then_some(()) }).await;
}

#[tokio::test]
async fn an_attached_agent_with_another_limit_has_no_gap_and_keeps_its_calls_and_questions() {
    let mut agent = DemoAgent::start(&[]).await;
    let port = free_port();
    let bridge = Bridge::of(attached("demo", &agent.url()).set("max_in_flight", 7));
    let bridge = bridge.set("metrics", json!({"listen": format!("127.0.0.1:{port}")}));
    let mut bridge = bridge.shutdown_grace(GRACE).start().await;
    let long = bridge.begin_slow("demo", LONG).await;
    bridge.until_working("demo").await;
    let question = bridge.prompt("demo.report", "report about tides").await.expect("INPUT_REQUIRED");
    let before = instance(&bridge, "demo").await;
    bridge.reload(|settings| agents(settings)[0]["max_in_flight"] = json!(2));
    // Without a pause between calls until the old one has left the mesh and a while longer.
    let mut calls = 0;
    let is_replaced = |bridge: &Bridge| bridge.log().contains("configuration reloaded");
    loop {
        bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
        bridge.get_task("demo", "never").await.expect_error("not_found");
        calls += 1;
        if calls % 5 == 0 && is_replaced(&bridge) && instance(&bridge, "demo").await != before {
            break;
        }
    }
    let after = instance(&bridge, "demo").await;
    let seen = announced(&mut bridge, "demo", |object| {
        object["instance"] == *before && object["state"] == "stopped"
    })
    .await;
    assert!(
        seen.iter().all(|object| object["instance"] != *after || object["state"] == "ready"),
        "{seen:#?}"
    );
    // The last word is the new one's, and it serves.
    bridge.announced("demo", |object| object["instance"] == *after && object["state"] == "ready").await;
    bridge.answer("demo", &question.follow_up_id(), "PDF").await.expect("COMPLETED");
    let text = reqwest::get(format!("http://127.0.0.1:{port}/metrics")).await.unwrap().text().await.unwrap();
    let in_flight: Vec<_> =
        text.lines().filter(|line| line.starts_with("a2a_bridge_calls_in_flight{")).collect();
    assert_eq!(in_flight, ["a2a_bridge_calls_in_flight{agent=\"demo\"} 1"]);
    let completed = text.lines().find(|line| line.contains("outcome=\"COMPLETED\"")).unwrap();
    let completed: u64 = completed.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(completed > calls, "the count goes on: {completed} of {calls}");
    // The new limit holds: the long call counts for the old one.
    let (one, two) = (bridge.begin_slow("demo", LONG).await, bridge.begin_slow("demo", LONG).await);
    eventually(SOON, || async {
        (bridge
            .tasks("demo")
            .await
            .iter()
            .filter(|task| task["status"]["state"] == "TASK_STATE_WORKING")
            .count()
            == 3)
            .then_some(())
    })
    .await;
    bridge.prompt("demo.echo", "x").await.expect_error("busy");
    agent.kill();
    for call in [long, one, two] {
        call.only_reply().await.expect_error("outcome_unknown");
    }
}

#[tokio::test]
async fn a_changed_launched_agent_starts_after_its_old_process_and_nobody_else_waits() {
    let bridge = Bridge::of(launched("demo", &["--name", "one"])).and(launched("other", &[]));
    let mut bridge = bridge.shutdown_grace(GRACE).start().await;
    let old = bridge.launched();
    let long = bridge.begin_slow("demo", LONG).await;
    bridge.until_working("demo").await;
    let named = |settings: &mut Value, name: &str| {
        *agents(settings)[0]["command"].as_array_mut().unwrap().last_mut().unwrap() = json!(name);
    };
    bridge.reload(|settings| named(settings, "two"));
    let waiting = |object: &Value| {
        object["last_error"].as_str().is_some_and(|text| text.contains("previous configuration"))
    };
    let seen =
        announced(&mut bridge, "demo", |object| object["state"] == "starting" && waiting(object)).await;
    assert!(seen.iter().all(|object| object["state"] != "unhealthy"));
    bridge.until_withdrawn("demo.echo").await;
    // A second reload, before the first one is over.
    let new = DemoAgent::start(&[]).await;
    bridge.reload(|settings| {
        named(settings, "three");
        agents(settings).push(json!({"name": "new", "url": new.url()}));
    });
    bridge.until("new", "ready").await;
    bridge.prompt("new.echo", "x").await.expect("COMPLETED");
    bridge.until("demo", "starting").await;
    assert_eq!(bridge.launched(), old, "its port is not free yet");
    // Only the demo agent with a call has one; the other one is asked nothing.
    for pid in old.iter().filter(|pid| is_named(**pid, "one")) {
        processes::signal(*pid, Signal::SIGKILL);
    }
    long.only_reply().await.expect_error("outcome_unknown");
    bridge.until("demo", "ready").await;
    assert_eq!(bridge.card("demo").await["name"], "three");
    assert_eq!(bridge.prompt("demo.echo", "hello").await.expect("COMPLETED").message(), "hello");
    let names = ["one", "two", "three"]
        .map(|name| bridge.launched().iter().filter(|pid| is_named(**pid, name)).count());
    assert_eq!(names, [0, 0, 1]);
}

/// Whether a process is a demo agent with this name.
fn is_named(pid: i32, name: &str) -> bool {
    let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split('\0').any(|word| word == name)
}

#[tokio::test]
async fn an_agent_with_the_port_of_one_that_leaves_starts_when_the_port_is_free() {
    let mut bridge = Bridge::of(launched("old", &[])).shutdown_grace(GRACE).start().await;
    let process = bridge.launched();
    let long = bridge.begin_slow("old", LONG).await;
    bridge.until_working("old").await;
    bridge.reload(|settings| agents(settings)[0]["name"] = json!("new"));
    bridge.until("new", "starting").await;
    bridge.until_withdrawn("old.echo").await;
    for pid in process {
        processes::signal(pid, Signal::SIGKILL);
    }
    long.only_reply().await.expect_error("outcome_unknown");
    let seen = announced(&mut bridge, "new", |object| object["state"] == "ready").await;
    // It was never tried in vain.
    assert!(seen.iter().all(|object| object["state"] != "backing-off"), "{seen:#?}");
}

#[tokio::test]
async fn agents_that_swap_their_ports_both_start_when_the_ports_are_free() {
    let bridge =
        Bridge::of(launched("one", &["--name", "first"])).and(launched("two", &["--name", "second"]));
    let mut bridge = bridge.shutdown_grace(GRACE).start().await;
    let long = bridge.begin_slow("two", LONG).await;
    bridge.until_working("two").await;
    bridge.reload(|settings| {
        let [one, two] = agents(settings).as_mut_slice() else { panic!("{settings}") };
        for key in ["url", "command"] {
            std::mem::swap(&mut one[key], &mut two[key]);
        }
    });
    // The first agent has no call and leaves at once, but the second holds the port that is needed next.
    eventually(SOON, || async { bridge.log().contains("agent drained").then_some(()) }).await;
    bridge.until_withdrawn("two.echo").await;
    bridge.until("one", "starting").await;
    for pid in bridge.launched().into_iter().filter(|pid| is_named(*pid, "second")) {
        processes::signal(pid, Signal::SIGKILL);
    }
    long.only_reply().await.expect_error("outcome_unknown");
    for (agent, name) in [("one", "second"), ("two", "first")] {
        bridge.until(agent, "ready").await;
        assert_eq!(bridge.card(agent).await["name"], name);
        bridge.prompt(&format!("{agent}.echo"), "x").await.expect("COMPLETED");
    }
    // Neither was tried while its port was taken.
    assert!(!bridge.log().contains("in use by"), "{}", bridge.log());
    bridge.stop().await;
}

/// The address of a way to the agent on the same port of another host.
#[cfg(target_os = "linux")]
async fn at_another_host(agent: &DemoAgent) -> String {
    let url = agent.url().replace("127.0.0.1", "127.0.0.2");
    let address = |url: &str| url.trim_start_matches("http://").to_owned();
    let (listener, to) = (TcpListener::bind(address(&url)).await.unwrap(), address(&agent.url()));
    TaskTracker::new().spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let to = to.clone();
            TaskTracker::new().spawn(async move {
                let mut far = TcpStream::connect(to).await?;
                tokio::io::copy_bidirectional(&mut near, &mut far).await
            });
        }
    });
    url
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn attached_agents_on_the_same_port_of_two_hosts_do_not_wait_for_each_other() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge =
        Bridge::of(attached("one", &agent.url())).and(attached("two", &at_another_host(&agent).await));
    let bridge = bridge.shutdown_grace(GRACE).start().await;
    let calls = [bridge.begin_slow("one", LONG).await, bridge.begin_slow("two", LONG).await];
    eventually(SOON, || async { (bridge.tasks("one").await.len() == calls.len()).then_some(()) }).await;
    let before = [instance(&bridge, "one").await, instance(&bridge, "two").await];
    bridge.reload(|settings| {
        for agent in agents(settings) {
            agent["max_in_flight"] = json!(2);
        }
    });
    for (name, before) in ["one", "two"].into_iter().zip(before) {
        eventually(SOON, || async { (instance(&bridge, name).await != before).then_some(()) }).await;
        bridge.until(name, "ready").await;
        bridge.prompt(&format!("{name}.echo"), "x").await.expect("COMPLETED");
    }
    assert!(!bridge.log().contains("agent drained"), "their calls go on: {}", bridge.log());
    agent.kill();
    for call in calls {
        call.only_reply().await.expect_error("outcome_unknown");
    }
}

#[tokio::test]
async fn a_stop_waits_for_agents_that_a_reload_has_replaced() {
    let agent = DemoAgent::start(&["--ignore-blocking"]).await;
    let mut bridge = Bridge::of(attached("demo", &agent.url())).shutdown_grace("4s").start().await;
    let brief = bridge.begin_slow("demo", 2).await;
    bridge.until_working("demo").await;
    bridge.reload(|settings| agents(settings)[0]["max_in_flight"] = json!(2));
    eventually(SOON, || async { bridge.log().contains("configuration reloaded").then_some(()) }).await;
    assert_eq!(bridge.stop().await.code(), Some(0));
    brief.only_reply().await.expect("COMPLETED");
    assert!(bridge.log().contains("agent drained"), "{}", bridge.log());
}
