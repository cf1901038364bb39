//! The supervisor: it launches, checks, restarts and stops the processes of agents.

use std::time::{Duration, Instant, SystemTime};

use a2a_bridge::internal::AgentReport;
use a2a_bridge::internal::procfs::{self, Stat};
use futures_util::StreamExt as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;

use crate::support::processes::{free_port, program};
use crate::support::site::{Site, back_off, demo, demo_at, guard_of, shell};
use crate::support::{DEADLINE, processes, wait_until, within_deadline};

const TREE: &str =
    "sleep 1000 & setsid sleep 1000 & (setsid setsid sleep 1000 &) ; DEMO --leave-daemon --leave-grandchild";

async fn is_published(site: &Site, agent: &str, action: &str) -> bool {
    let subject = format!("$SRV.INFO.{agent}");
    let Ok(reply) = site.client.request(subject, "".into()).await else {
        return false;
    };
    let info: Value = serde_json::from_slice(&reply.payload).unwrap();
    let endpoints = info["endpoints"].as_array().unwrap();
    endpoints.iter().any(|endpoint| endpoint["name"] == action)
}

/// Waits until the agent is ready and its skills are published.
async fn until_published(site: &Site, agent: &str) -> AgentReport {
    let report = site.until_state(agent, "ready").await;
    wait_until(|| async { is_published(site, agent, "echo").await }).await;
    report
}

#[tokio::test]
async fn agent_that_exits_at_once_backs_off_longer_and_publishes_nothing() {
    let site = Site::running(&[("a", &demo("--exit-at-start 3"))]).await;
    let report = site.until("a", |report| report.restarts == 2).await;
    assert!(!is_published(&site, "a", "echo").await);
    let report =
        if report.state == "backing-off" { report } else { site.until_state("a", "backing-off").await };
    // The third pause is 4 s, give or take a fifth.
    let pause = back_off(&report).as_millis();
    assert!((3200..=4800).contains(&pause), "{pause}");
    assert!(report.last_error.unwrap().contains("exited with code 3"));
    assert_eq!(report.last_exit.unwrap().how, "exited with code 3");
}

#[tokio::test]
async fn crash_after_a_stable_time_resets_the_back_off() {
    let lines = format!("{}\nstable_after: 300ms", demo(""));
    let site = Site::running(&[("a", &lines)]).await;
    for restarts in 0..3 {
        let report = site.until_restarted("a", restarts).await;
        let stable = report.since.0 + Duration::from_millis(300);
        wait_until(|| async { SystemTime::now() > stable }).await;
        processes::signal(report.pid.unwrap(), Signal::SIGKILL);
        let report = site.until_state("a", "backing-off").await;
        let pause = back_off(&report).as_millis();
        assert!((790..=1210).contains(&pause), "{pause}");
        assert!(report.last_error.unwrap().contains("was killed by SIGKILL"));
    }
}

#[tokio::test]
async fn foreign_process_on_the_port_is_named_and_gets_no_connection() {
    let foreign = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = foreign.local_addr().unwrap().port();
    let site = Site::running(&[("a", &demo_at("127.0.0.1", port, ""))]).await;
    let own = std::process::id();
    let report = site.until_state("a", "backing-off").await;
    let error = report.last_error.unwrap();
    assert!(error.starts_with(&format!("port {port} in use by pid {own} (")), "{error}");
    assert!(report.advice.unwrap().contains(&format!("kill {own}")));
    assert!(!is_published(&site, "a", "echo").await);
    let accepted = tokio::time::timeout(Duration::from_millis(300), foreign.accept()).await;
    assert!(accepted.is_err(), "it got a connection");
    // The agent starts once the port is free.
    drop(foreign);
    site.until_state("a", "ready").await;
}

#[tokio::test]
async fn foreign_process_that_takes_the_port_during_the_start_gets_no_connection() {
    let port = free_port();
    let site = Site::running(&[("a", &demo_at("127.0.0.1", port, "--slow-start 1s"))]).await;
    site.until("a", |report| report.pid.is_some()).await;
    let foreign = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let report = site.until_state("a", "backing-off").await;
    assert!(report.last_error.unwrap().starts_with(&format!("port {port} in use by pid ")));
    let accepted = tokio::time::timeout(Duration::from_millis(100), foreign.accept()).await;
    assert!(accepted.is_err(), "it got a connection");
}

#[tokio::test]
async fn stopping_an_agent_ends_all_its_processes() {
    let mut site = Site::running(&[("a", &shell(TREE))]).await;
    site.until_state("a", "ready").await;
    // A guard, a shell, the agent and five `sleep` processes.
    wait_until(|| async { site.processes().len() >= 8 }).await;
    site.stop_agent("a").await;
    assert_eq!(site.processes(), Vec::<i32>::new());
    assert_eq!(site.stop().await, Some(0));
}

#[tokio::test]
async fn agent_that_ignores_sigterm_is_killed_after_the_grace_period() {
    let lines = format!("{}\nstop_grace: 1s", demo("--ignore-sigterm"));
    let site = Site::running(&[("a", &lines)]).await;
    site.until_state("a", "ready").await;
    let began = Instant::now();
    site.stop_agent("a").await;
    let took = began.elapsed();
    let report = site.until_state("a", "stopped").await;
    assert_eq!(report.last_exit.unwrap().how, "was killed by SIGKILL");
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(8), "{took:?}");
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn agents_of_a_killed_bridge_end_within_two_seconds() {
    let mut site = Site::running(&[("a", &shell(TREE)), ("b", &demo("--ignore-sigterm"))]).await;
    site.until_state("a", "ready").await;
    site.until_state("b", "ready").await;
    site.kill_9().await;
    let took = site.until_nothing_runs(DEADLINE).await;
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[tokio::test]
async fn agents_of_a_killed_bridge_and_guard_are_killed_before_the_next_start() {
    let mut site = Site::running(&[("a", &shell(TREE))]).await;
    let report = site.until_state("a", "ready").await;
    site.kill_9_with_guard_of(report.pid.unwrap()).await;
    let left = site.processes();
    assert!(left.len() >= 6, "{left:?}");
    site.start();
    site.until_state("a", "ready").await;
    let still: Vec<_> = site.processes().into_iter().filter(|pid| left.contains(pid)).collect();
    assert_eq!(still, Vec::<i32>::new());
    assert!(site.log().contains("ended processes that an earlier bridge left running"));
}

#[tokio::test]
async fn agent_whose_guard_is_killed_is_restarted() {
    let site = Site::running(&[("a", &shell(TREE))]).await;
    let bridge = site.pid();
    let report = site.until_state("a", "ready").await;
    let before = site.processes();
    processes::signal(guard_of(report.pid.unwrap()), Signal::SIGKILL);
    site.until_restarted("a", 1).await;
    wait_until(|| async { !site.processes().iter().any(|pid| before.contains(pid)) }).await;
    // The bridge has reaped the orphans.
    wait_until(|| async {
        let mut children = procfs::children(bridge).into_iter().filter_map(Stat::read);
        children.all(|stat| !stat.has_exited())
    })
    .await;
}

/// The announced states of the agent `a` from now on without repetitions, up to `last`.
async fn states_until(registry: &mut async_nats::Subscriber, last: &str) -> Vec<String> {
    let mut states: Vec<String> = Vec::new();
    while states.last().is_none_or(|state| state != last) {
        let message = within_deadline(registry.next()).await.unwrap();
        let object: Value = serde_json::from_slice(&message.payload).unwrap();
        // Only a ready agent has actions.
        assert_eq!(object["actions"] != json!([]), object["state"] == "ready", "{object}");
        states.push(object["state"].as_str().unwrap().to_owned());
        states.dedup();
    }
    states
}

#[tokio::test]
async fn exited_or_stopped_process_is_never_unhealthy() {
    let mut site = Site::new().await;
    // Its child ignores the signal, so it takes two seconds until all processes have exited.
    let line = "(trap \"\" TERM; exec sleep 1000) & exec DEMO --ignore-sigterm";
    site.settings(&[("a", &format!("{}\nstop_grace: 1s", shell(line)))]);
    let mut registry = site.client.subscribe("a2a.registry.a").await.unwrap();
    site.client.flush().await.unwrap();
    site.start();
    states_until(&mut registry, "ready").await;
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    processes::signal(pid, Signal::SIGKILL);
    assert_eq!(states_until(&mut registry, "ready").await, ["backing-off", "starting", "ready"]);
    let order = async |verb: &str| {
        let subject = format!("a2a.control.a.{verb}");
        let request = async_nats::Request::new().payload("".into()).timeout(Some(DEADLINE));
        let reply = site.client.send_request(subject, request).await.unwrap();
        serde_json::from_slice::<AgentReport>(&reply.payload).unwrap().state
    };
    assert_eq!(order("restart").await, "ready");
    assert_eq!(states_until(&mut registry, "ready").await, ["starting", "ready"]);
    assert_eq!(order("stop").await, "stopped");
    assert_eq!(states_until(&mut registry, "stopped").await, ["starting", "stopped"]);
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn start_after_stop_reports_the_new_process() {
    let site = Site::running(&[("a", &demo(""))]).await;
    site.until_state("a", "ready").await;
    for round in 0..20 {
        for (verb, state) in [("stop", "a: stopped"), ("start", "a: ready")] {
            let (code, out, error) = site.run(&["agents", verb, "a"]).await;
            assert_eq!(code, 0, "{verb} {round}: {out}{error}");
            assert!(out.starts_with(state), "{verb} {round}: {out}");
        }
    }
}

#[tokio::test]
async fn suspended_agent_is_unpublished_and_restarted_even_with_a_call_in_flight() {
    let lines = format!("{}\nliveness: {{ interval: 1s }}", demo(""));
    let site = Site::running(&[("a", &lines)]).await;
    let report = until_published(&site, "a").await;
    let request = async_nats::Request::new().payload("slow 60".into()).timeout(Some(DEADLINE * 2));
    let call = site.client.send_request("a2a.action.a.slow", request);
    let rest = async {
        site.until("a", |report| report.in_flight == 1).await;
        processes::signal(report.pid.unwrap(), Signal::SIGSTOP);
        let report = site.until("a", |report| report.state != "ready").await;
        assert!(report.last_error.unwrap().contains("is suspended (SIGSTOP)"));
        wait_until(|| async { !is_published(&site, "a", "echo").await }).await;
        site.until_restarted("a", 1).await;
    };
    let (reply, ()) = tokio::join!(call, rest);
    let reply: Value = serde_json::from_slice(&reply.unwrap().payload).unwrap();
    assert_eq!(reply["success"], false, "{reply}");
}

#[tokio::test]
async fn liveness_checks_restart_an_idle_agent_but_not_a_busy_one() {
    let probes = "liveness: { interval: 200ms, timeout: 100ms, failures: 2 }\nreadiness: { timeout: 100ms }";
    let lines = format!("{}\n{probes}", demo("--slow-card 60s"));
    let site = Site::running(&[("a", &lines)]).await;
    until_published(&site, "a").await;
    let reply = site.client.request("a2a.action.a.slow", "slow 3".into()).await.unwrap();
    let reply: Value = serde_json::from_slice(&reply.payload).unwrap();
    assert_eq!(reply["status"], "COMPLETED", "{reply}");
    site.until("a", |report| report.restarts > 0).await;
    assert!(site.log().contains("failed 2 liveness checks in a row"), "{}", site.log());
}

#[tokio::test]
async fn agent_gets_a_clean_environment_and_no_descriptors() {
    let mut site = Site::new().await;
    let line = "env > FOLDER/env; ls -l /proc/self/fd > FOLDER/fd; DEMO"
        .replace("FOLDER", &site.folder().display().to_string());
    site.settings(&[("a", &shell(&line))]);
    site.start();
    site.until_state("a", "ready").await;
    let env = std::fs::read_to_string(site.folder().join("env")).unwrap();
    let allowed = [
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "LC_",
        "TZ",
        "TMPDIR",
        "A2A_TEST_MARK",
        "A2A_BRIDGE_AGENT",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    ];
    for line in env.lines() {
        assert!(allowed.iter().any(|name| line.starts_with(name)), "{line}");
    }
    let descriptors = std::fs::read_to_string(site.folder().join("fd")).unwrap();
    // `ls` itself has one more open, the folder that it lists.
    assert_eq!(descriptors.lines().filter(|line| line.contains(" -> ")).count(), 4, "{descriptors}");
}

#[tokio::test]
async fn exit_code_0_is_not_restarted_unless_restart_is_always() {
    let always = format!("{}\nrestart: always", demo("--exit-at-start 0"));
    let never = format!("{}\nrestart_on_crash: false", demo("--exit-at-start 3"));
    let site =
        Site::running(&[("quiet", &demo("--exit-at-start 0")), ("always", &always), ("never", &never)]).await;
    let report = site.until_state("quiet", "stopped").await;
    let error = report.last_error.unwrap();
    assert!(error.contains("exited with code 0") && error.contains("restart: on-failure"), "{error}");
    assert!(report.advice.unwrap().contains("restart: always"));
    let report = site.until_state("never", "failed").await;
    assert!(report.last_error.unwrap().contains("`restart` is `never`"));
    site.until("always", |report| report.restarts > 0).await;
}

#[tokio::test]
async fn agent_over_max_restarts_fails_until_an_operator_starts_it() {
    let lines = format!("{}\nmax_restarts: 1\nrestart_window: 1m", demo("--exit-at-start 3"));
    let site = Site::running(&[("a", &lines)]).await;
    let report = site.until_state("a", "failed").await;
    assert_eq!(report.restarts, 1);
    assert!(report.last_error.unwrap().starts_with("restarted 1 time within 1m"));
    assert!(report.advice.unwrap().contains("agents start a"));
    let (code, _, _) = site.run(&["agents", "start", "a"]).await;
    assert_eq!(code, 1);
    site.until("a", |report| report.restarts == 2).await;
}

#[tokio::test]
async fn reload_keeps_unchanged_agents_and_an_invalid_file_changes_nothing() {
    let (same, other, gone) = (demo(""), demo("--name one"), demo(""));
    let site = Site::running(&[("same", &same), ("other", &other), ("gone", &gone)]).await;
    let before = site.until_state("same", "ready").await.pid;
    let changed = site.until_state("other", "ready").await.pid;
    site.until_state("gone", "ready").await;

    std::fs::write(site.file(), "agents: [{ name: x }]").unwrap();
    site.signal(Signal::SIGHUP);
    site.until_logged("keeping the current configuration").await;
    assert!(site.log().contains("`url` is missing"), "{}", site.log());
    assert_eq!(site.show("same").await.unwrap().pid, before);

    site.settings(&[("same", &same), ("other", &demo("--name two")), ("new", &demo(""))]);
    site.signal(Signal::SIGHUP);
    site.until_state("new", "ready").await;
    let other = site.until("other", |report| report.state == "ready" && report.pid != changed).await;
    assert_eq!(other.card.unwrap().name, "two");
    assert_eq!(site.show("same").await.unwrap().pid, before);
    wait_until(|| async { site.show("gone").await.is_none() }).await;
    assert!(!is_published(&site, "gone", "get_task").await);
}

#[tokio::test]
async fn logs_print_past_output_and_follow_new_output() {
    let mut site = Site::new().await;
    let line = "echo first; (while read line < FOLDER/pipe; do echo \"WARN $line\" >&2; done) & DEMO";
    let folder = site.folder().display().to_string();
    let pipe = site.folder().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    site.settings(&[("a", &shell(&line.replace("FOLDER", &folder)))]);
    site.start();
    site.until_state("a", "ready").await;
    let (code, out, error) = site.run(&["logs", "a"]).await;
    assert_eq!(code, 0, "{error}");
    assert!(out.contains(" first\n") && !out.contains("INFO first"), "{out}");
    let (_, out, _) = site.run(&["logs", "a", "--json", "--since", "1h"]).await;
    let first: Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
    assert_eq!(
        (&first["agent"], &first["stream"], &first["text"]),
        (&json!("a"), &json!("stdout"), &json!("first"))
    );
    let (_, out, _) = site.run(&["logs", "a", "--since", "2100-01-01T00:00:00Z"]).await;
    assert_eq!(out, "");
    let mut follower = tokio::process::Command::new(program())
        .args(["logs", "-f", "--lines", "1"])
        .args(site.connection())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap()).lines();
    let first = within_deadline(lines.next_line()).await.unwrap().unwrap();
    assert!(first.contains("listening on"), "{first}");
    let mut writer = tokio::fs::File::options().write(true).open(&pipe).await.unwrap();
    writer.write_all(b"something new\n").await.unwrap();
    writer.flush().await.unwrap();
    drop(writer);
    let next = within_deadline(lines.next_line()).await.unwrap().unwrap();
    assert!(next.ends_with(" WARN something new") && !next.contains("WARN WARN"), "{next}");
}

#[tokio::test]
async fn metrics_and_health_are_served() {
    let mut site = Site::new().await;
    let port = free_port();
    site.settings_with(&format!("metrics: {{ listen: '127.0.0.1:{port}' }}"), &[("a", &demo(""))]);
    site.start();
    until_published(&site, "a").await;
    site.client.request("a2a.action.a.echo", "hello".into()).await.unwrap();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let get = async |path: &str| {
        let reply = http.get(format!("http://127.0.0.1:{port}{path}")).send().await.unwrap();
        (reply.status().as_u16(), reply.text().await.unwrap())
    };
    let (status, text) = get("/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "a2a_bridge_agents{state=\"ready\"} 1",
        "a2a_bridge_agent_restarts_total{agent=\"a\"} 0",
        "a2a_bridge_calls_total{agent=\"a\",skill=\"echo\",outcome=\"COMPLETED\"} 1",
        "a2a_bridge_call_duration_seconds_count{agent=\"a\",skill=\"echo\"} 1",
        "a2a_bridge_calls_in_flight{agent=\"a\"} 0",
        "a2a_bridge_follow_ups_pending 0",
        "a2a_bridge_agent_output_dropped_bytes_total{agent=\"a\"} 0",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    assert_eq!(get("/healthz").await.0, 200);
    assert_eq!(get("/readyz").await, (200, "ok\n".into()));
    site.server.end();
    wait_until(|| async { get("/readyz").await.0 == 503 }).await;
}

#[tokio::test]
async fn control_requests_reply_only_to_inboxes() {
    let site = Site::running(&[("a", &demo(""))]).await;
    site.until_state("a", "ready").await;
    let mut forged = site.client.subscribe("a2a.registry.x").await.unwrap();
    let subject = "a2a.control.a.show";
    site.client.publish_with_reply(subject, "a2a.registry.x", "".into()).await.unwrap();
    site.show("a").await.unwrap();
    let received = tokio::time::timeout(Duration::from_millis(200), forged.next()).await;
    assert!(received.is_err(), "{received:?}");
}
