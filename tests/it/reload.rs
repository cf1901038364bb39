//! Reloads while calls are in flight: no agent waits for calls of another one, and no call is lost.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
#[cfg(target_os = "linux")]
use tokio::net::TcpListener;

use crate::support::bridge::is_working;
use crate::support::processes::free_port;
use crate::support::{Bridge, DemoAgent, NatsServer, attached, launched, processes, proxy, wait_until};

/// Longer than any test: a test that waits for such a call or for the grace period fails.
const LONG: u32 = 600;
const GRACE: &str = "10m";

fn agents(settings: &mut Value) -> &mut Vec<Value> {
    settings["agents"].as_array_mut().unwrap()
}

/// The announcements of an agent up to the first one for which the predicate is true.
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
async fn added_agent_does_not_wait_for_calls_of_a_removed_one() {
    let mut removed = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("removed", &removed.url())).and(launched("other", &[]));
    let mut bridge = bridge.shutdown_grace(GRACE).start().await;
    let long = bridge.begin_slow("removed", LONG).await;
    bridge.until_working("removed").await;
    let new = DemoAgent::start(&[]).await;
    bridge.reload(|settings| {
        agents(settings).remove(0);
        agents(settings).push(json!({"name": "new", "url": new.url()}));
    });
    bridge.until("new", "ready").await;
    bridge.prompt("new.echo", "x").await.expect("COMPLETED");
    // The registry lists no actions that are not served.
    bridge
        .announced("removed", |object| object["state"] == "stopped" && object["actions"] == json!([]))
        .await;
    assert!(!bridge.log().contains("agent drained"), "its call is still running: {}", bridge.log());
    removed.kill();
    long.only_reply().await.expect_error("outcome_unknown");
    bridge.until_logged("agent drained").await;
}

#[tokio::test]
async fn changed_attached_agent_has_no_gap_and_keeps_its_calls_and_follow_ups() {
    let mut agent = DemoAgent::start(&[]).await;
    let port = free_port();
    let bridge = Bridge::with(attached("demo", &agent.url()).set("max_in_flight", 7));
    let bridge = bridge.set("metrics", json!({"listen": format!("127.0.0.1:{port}")}));
    let mut bridge = bridge.shutdown_grace(GRACE).start().await;
    let long = bridge.begin_slow("demo", LONG).await;
    bridge.until_working("demo").await;
    let question = bridge.prompt("demo.report", "report about tides").await.expect("INPUT_REQUIRED");
    let before = instance(&bridge, "demo").await;
    bridge.reload(|settings| {
        agents(settings)[0]["max_in_flight"] = json!(2);
        agents(settings)[0]["headers"] = json!({"X-New": "yes"});
    });
    // Calls without a pause until the new instance has replaced the old one.
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
    // The last announcement comes from the new instance.
    bridge.announced("demo", |object| object["instance"] == *after && object["state"] == "ready").await;
    bridge.answer("demo", &question.follow_up_id(), "PDF").await.expect("COMPLETED");
    let text = reqwest::get(format!("http://127.0.0.1:{port}/metrics")).await.unwrap().text().await.unwrap();
    let in_flight: Vec<_> =
        text.lines().filter(|line| line.starts_with("a2a_bridge_calls_in_flight{")).collect();
    assert_eq!(in_flight, ["a2a_bridge_calls_in_flight{agent=\"demo\"} 1"]);
    let is_completed =
        |line: &&str| line.starts_with("a2a_bridge_calls_total{") && line.contains("outcome=\"COMPLETED\"");
    let count = |line: &str| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap();
    let completed: u64 = text.lines().filter(is_completed).map(count).sum();
    assert!(completed > calls, "the count continues: {completed} of {calls}");
    // The new limit applies: the long call counts for the old instance.
    let (one, two) = (bridge.begin_slow("demo", LONG).await, bridge.begin_slow("demo", LONG).await);
    wait_until(|| async { bridge.tasks("demo").await.iter().filter(|task| is_working(task)).count() == 3 })
        .await;
    bridge.prompt("demo.echo", "x").await.expect_error("busy");
    agent.kill();
    for call in [long, one, two] {
        call.only_reply().await.expect_error("outcome_unknown");
    }
}

#[tokio::test]
async fn changed_launched_agent_waits_for_its_old_process_and_no_other_agent_does() {
    let bridge = Bridge::with(launched("demo", &["--name", "one"])).and(launched("other", &[]));
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
    // A second reload before the first one has completed.
    let new = DemoAgent::start(&[]).await;
    bridge.reload(|settings| {
        named(settings, "three");
        agents(settings).push(json!({"name": "new", "url": new.url()}));
    });
    bridge.until("new", "ready").await;
    bridge.prompt("new.echo", "x").await.expect("COMPLETED");
    bridge.until("demo", "starting").await;
    assert_eq!(bridge.launched(), old, "its port is not free yet");
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
    processes::command_line(pid).split('\0').any(|word| word == name)
}

#[tokio::test]
async fn agent_on_the_port_of_a_removed_one_starts_when_the_port_is_free() {
    let mut bridge = Bridge::with(launched("old", &[])).shutdown_grace(GRACE).start().await;
    let long = bridge.begin_slow("old", LONG).await;
    bridge.until_working("old").await;
    bridge.reload(|settings| agents(settings)[0]["name"] = json!("new"));
    bridge.until("new", "starting").await;
    bridge.until_withdrawn("old.echo").await;
    bridge.kill_agents();
    long.only_reply().await.expect_error("outcome_unknown");
    let seen = announced(&mut bridge, "new", |object| object["state"] == "ready").await;
    // The bridge did not try to start it before the port was free.
    assert!(seen.iter().all(|object| object["state"] != "backing-off"), "{seen:#?}");
}

#[tokio::test]
async fn agents_that_swap_ports_both_start_when_the_ports_are_free() {
    let bridge =
        Bridge::with(launched("one", &["--name", "first"])).and(launched("two", &["--name", "second"]));
    let mut bridge = bridge.shutdown_grace(GRACE).start().await;
    let long = bridge.begin_slow("two", LONG).await;
    bridge.until_working("two").await;
    bridge.reload(|settings| {
        let [one, two] = agents(settings).as_mut_slice() else { panic!("{settings}") };
        for key in ["url", "command"] {
            std::mem::swap(&mut one[key], &mut two[key]);
        }
    });
    // The first agent has no call and stops at once, but the second one still uses the other port.
    bridge.until_logged("agent drained").await;
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
    // The bridge did not try to start either one while its port was in use.
    assert!(!bridge.log().contains("in use by"), "{}", bridge.log());
    bridge.stop().await;
}

/// The URL of a proxy to the agent, on the same port of another host.
#[cfg(target_os = "linux")]
async fn at_another_host(agent: &DemoAgent) -> String {
    let listener = TcpListener::bind(("127.0.0.2", agent.port())).await.unwrap();
    proxy::relay(listener, format!("127.0.0.1:{}", agent.port()), |_| true);
    format!("http://127.0.0.2:{}", agent.port())
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn attached_agents_on_the_same_port_of_two_hosts_do_not_wait_for_each_other() {
    let mut agent = DemoAgent::start(&[]).await;
    let bridge =
        Bridge::with(attached("one", &agent.url())).and(attached("two", &at_another_host(&agent).await));
    let bridge = bridge.shutdown_grace(GRACE).start().await;
    let calls = [bridge.begin_slow("one", LONG).await, bridge.begin_slow("two", LONG).await];
    wait_until(|| async { bridge.tasks("one").await.len() == calls.len() }).await;
    let before = [instance(&bridge, "one").await, instance(&bridge, "two").await];
    bridge.reload(|settings| {
        for agent in agents(settings) {
            agent["headers"] = json!({"X-New": "yes"});
        }
    });
    for (name, before) in ["one", "two"].into_iter().zip(before) {
        wait_until(|| async { instance(&bridge, name).await != before }).await;
        bridge.until(name, "ready").await;
        bridge.prompt(&format!("{name}.echo"), "x").await.expect("COMPLETED");
    }
    assert!(!bridge.log().contains("agent drained"), "their calls are still running: {}", bridge.log());
    agent.kill();
    for call in calls {
        call.only_reply().await.expect_error("outcome_unknown");
    }
}

#[tokio::test]
async fn stop_waits_for_calls_of_agents_that_a_reload_replaced() {
    let agent = DemoAgent::start(&["--ignore-blocking"]).await;
    let mut bridge = Bridge::with(attached("demo", &agent.url())).shutdown_grace(GRACE).start().await;
    let brief = bridge.begin_slow("demo", 2).await;
    bridge.until_working("demo").await;
    bridge.reload(|settings| agents(settings)[0]["headers"] = json!({"X-New": "yes"}));
    bridge.until_logged("configuration reloaded").await;
    assert_eq!(bridge.stop().await.code(), Some(0));
    brief.only_reply().await.expect("COMPLETED");
    assert!(bridge.log().contains("agent drained"), "{}", bridge.log());
}

#[tokio::test]
async fn changed_limits_apply_without_a_restart_and_calls_continue() {
    // The grace period is short, and does not matter.
    let mut bridge = Bridge::with(launched("demo", &[])).shutdown_grace("1ms").start().await;
    let processes = bridge.launched();
    let long = bridge.begin_slow("demo", LONG).await;
    bridge.until_working("demo").await;
    let before = instance(&bridge, "demo").await;
    bridge.reload(|settings| {
        agents(settings)[0]["max_in_flight"] = json!(1);
        agents(settings)[0]["max_response_size"] = json!("2KiB");
    });
    bridge.until_logged(r#"updated=["demo"]"#).await;
    let is_stopped = |object: &Value| object["instance"] == *before && object["state"] == "stopped";
    bridge.announced("demo", is_stopped).await;
    let second = bridge.begin_slow("demo", LONG).await;
    wait_until(|| async { bridge.tasks("demo").await.iter().filter(|task| is_working(task)).count() == 2 })
        .await;
    bridge.prompt("demo.echo", "x").await.expect_error("busy");
    // A second change, while calls of the first settings and of the second are in flight.
    bridge.reload(|settings| agents(settings)[0]["max_in_flight"] = json!(5));
    wait_until(|| async { bridge.prompt("demo.echo", "x").await.is("COMPLETED") }).await;
    let large = "x".repeat(4096);
    let code = || async { bridge.prompt("demo.echo", &large).await["error_info"]["code"].clone() };
    wait_until(|| async { code().await == "too_large" }).await;
    assert_eq!(bridge.launched(), processes);
    let report = bridge.announced("demo", |object| object["state"] == "ready").await;
    assert_eq!(report["restarts"], 0);
    bridge.kill_agents();
    for call in [long, second] {
        call.only_reply().await.expect_error("outcome_unknown");
    }
}

#[tokio::test]
async fn stop_waits_for_calls_that_began_before_limits_changed() {
    let bridge = Bridge::with(launched("demo", &["--ignore-blocking"])).shutdown_grace(GRACE);
    let mut bridge = bridge.start().await;
    let brief = bridge.begin_slow("demo", 2).await;
    bridge.until_working("demo").await;
    bridge.reload(|settings| agents(settings)[0]["max_in_flight"] = json!(2));
    bridge.until_logged("configuration reloaded").await;
    assert_eq!(bridge.stop().await.code(), Some(0));
    brief.only_reply().await.expect("COMPLETED");
}

#[tokio::test]
async fn order_of_keys_and_quotes_alone_change_nothing() {
    let bridge = Bridge::with(launched("demo", &[])).start().await;
    let (processes, before) = (bridge.launched(), instance(&bridge, "demo").await);
    bridge.reload(|settings| {
        let agent = agents(settings)[0].as_object_mut().unwrap();
        *agent = std::mem::take(agent).into_iter().rev().collect();
    });
    bridge.until_logged("configuration reloaded").await;
    assert!(bridge.log().contains("kept=1"), "{}", bridge.log());
    assert_eq!((bridge.launched(), instance(&bridge, "demo").await), (processes, before));
}

#[tokio::test]
async fn reload_reports_every_failure_and_names_what_needs_a_restart() {
    let agent = DemoAgent::start(&[]).await;
    let bridge = Bridge::with(attached("one", &agent.url())).and(attached("two", &agent.url())).start().await;
    bridge.reload(|settings| {
        for agent in agents(settings) {
            agent["tls"] = json!({"ca": "/nowhere/ca.pem"});
        }
    });
    bridge.until_logged("keeping the current configuration").await;
    for name in ["one", "two"] {
        assert!(bridge.log().contains(&format!("agent `{name}`: ")), "{}", bridge.log());
        bridge.prompt(&format!("{name}.echo"), "x").await.expect("COMPLETED");
    }
    bridge.reload(|settings| {
        for agent in agents(settings) {
            agent.as_object_mut().unwrap().remove("tls");
        }
        settings["nats"]["url"] = json!("nats://user:secret@127.0.0.1:1");
        settings["shutdown_grace"] = json!("3s");
    });
    bridge.until_logged("only after a restart of the bridge").await;
    let log = bridge.log();
    assert!(log.contains("nats.url, shutdown_grace") && !log.contains("secret"), "{log}");
}

#[tokio::test]
async fn rotated_nats_password_is_used_for_the_next_connection() {
    let conf = |password: &str| {
        format!(
            "authorization {{ users = [{{ user: test }}, {{ user: bridge, password: {password} }}] }}\nno_auth_user: test\n"
        )
    };
    let server = NatsServer::start_configured(&conf("one")).await;
    let bridge = Bridge::with(launched("demo", &[])).nats("user", "bridge").nats("password", "one");
    let bridge = bridge.start_on(server).await;
    bridge.reload(|settings| settings["nats"]["password"] = json!("two"));
    bridge.until_logged("the credentials for NATS have changed").await;
    assert!(!bridge.log().contains("only after a restart"), "{}", bridge.log());
    // The server disconnects users whose password has changed.
    bridge.nats.reconfigure(&conf("two"));
    bridge.until_logged("NATS connection is up again").await;
    bridge.until("demo", "ready").await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    // Credentials in the URL are as good.
    let url = bridge.nats.url();
    bridge.reload(|settings| {
        let nats = settings["nats"].as_object_mut().unwrap();
        nats.retain(|key, _| key != "user" && key != "password");
        nats.insert("url".to_owned(), json!(url.replace("nats://", "nats://bridge:three@")));
    });
    bridge.until_logged_times("the credentials for NATS have changed", 2).await;
    assert!(!bridge.log().contains("only after a restart"), "{}", bridge.log());
    bridge.nats.reconfigure(&conf("three"));
    bridge.until_logged_times("NATS connection is up again", 2).await;
    bridge.prompt("demo.echo", "y").await.expect("COMPLETED");
}
