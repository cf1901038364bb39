//! Agents as processes: started, watched, started again and ended, by a bridge that is one too.

use std::time::{Duration, Instant, SystemTime};

use a2a_bridge::internal::AgentReport;
use a2a_bridge::internal::procfs::{self, Stat};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use crate::support::eventually::eventually;
use crate::support::site::{SOON, Site, demo, shell};

const TREE: &str =
    "sleep 1000 & setsid sleep 1000 & (setsid setsid sleep 1000 &) ; DEMO --leave-daemon --leave-grandchild";

async fn service_is_published(site: &Site, agent: &str, action: &str) -> bool {
    let subject = format!("$SRV.INFO.{agent}");
    let Ok(reply) = site.client.request(subject, "".into()).await else {
        return false;
    };
    let info: Value = serde_json::from_slice(&reply.payload).unwrap();
    let endpoints = info["endpoints"].as_array().unwrap();
    endpoints.iter().any(|endpoint| endpoint["name"] == action)
}

/// Ready, and its skills are on the mesh.
async fn until_published(site: &Site, agent: &str) -> AgentReport {
    let report = site.until_state(agent, "ready").await;
    eventually(SOON, || async { service_is_published(site, agent, "echo").await.then_some(()) }).await;
    report
}

#[tokio::test]
async fn an_agent_that_exits_at_once_waits_longer_each_time_and_publishes_nothing() {
    let mut site = Site::new().await;
    site.settings(&[("a", &demo("--exit-at-start 3"))]);
    site.start();
    let report = site.until("a", SOON, |report| report.restarts == 2).await;
    assert!(!service_is_published(&site, "a", "echo").await);
    let report =
        if report.state == "backing-off" { report } else { site.until_state("a", "backing-off").await };
    assert!(report.last_error.unwrap().contains("exited with code 3"));
    assert_eq!(report.last_exit.unwrap().how, "exited with code 3");
    // Two pauses are over, so the third is 4 s, less a fifth.
    let pause = report.next_try_ms.unwrap() - report.since_ms;
    assert!((3200..=4800).contains(&pause), "{pause}");
}

#[tokio::test]
async fn a_crash_after_a_stable_time_is_followed_by_the_first_pause_again() {
    let mut site = Site::new().await;
    let lines = format!("{}\nstable_after: 300ms", demo(""));
    site.settings(&[("a", &lines)]);
    site.start();
    for restarts in 0..3 {
        let report =
            site.until("a", SOON, |report| report.state == "ready" && report.restarts == restarts).await;
        let stable = SystemTime::UNIX_EPOCH + Duration::from_millis(report.since_ms + 300);
        eventually(SOON, || async { (SystemTime::now() > stable).then_some(()) }).await;
        kill(Pid::from_raw(report.pid.unwrap()), Signal::SIGKILL).unwrap();
        let report = site.until_state("a", "backing-off").await;
        assert!(report.last_error.unwrap().contains("was killed by SIGKILL"));
        let pause = report.next_try_ms.unwrap() - report.since_ms;
        assert!((790..=1210).contains(&pause), "{pause}");
    }
}

#[tokio::test]
async fn a_foreign_process_on_the_port_is_named_and_is_sent_nothing() {
    let mut site = Site::new().await;
    let foreign = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = foreign.local_addr().unwrap().port();
    let lines = format!(
        "url: http://127.0.0.1:{port}\ncommand: {} demo-agent --port {port}\nbearer_token: s3cret-token",
        crate::support::site::program()
    );
    site.settings(&[("a", &lines)]);
    site.start();
    let own = std::process::id();
    let report = site.until_state("a", "backing-off").await;
    let error = report.last_error.unwrap();
    assert!(error.starts_with(&format!("port {port} in use by pid {own} (")), "{error}");
    assert!(report.advice.unwrap().contains(&format!("kill {own}")));
    assert!(!service_is_published(&site, "a", "echo").await);
    let visited = tokio::time::timeout(Duration::from_millis(300), foreign.accept()).await;
    assert!(visited.is_err(), "somebody has connected");
    // Once it is free, the agent comes.
    drop(foreign);
    site.until_state("a", "ready").await;
}

#[tokio::test]
async fn a_foreign_process_that_takes_the_port_while_the_agent_starts_is_sent_nothing() {
    let mut site = Site::new().await;
    let port = a2a_bridge::internal::ports::free().unwrap();
    let lines = format!(
        "url: http://127.0.0.1:{port}\ncommand: {} demo-agent --port {port} --slow-start 1s\nbearer_token: s3cret-token",
        crate::support::site::program()
    );
    site.settings(&[("a", &lines)]);
    site.start();
    site.until("a", SOON, |report| report.pid.is_some()).await;
    let foreign = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let report = site.until_state("a", "backing-off").await;
    assert!(report.last_error.unwrap().starts_with(&format!("port {port} in use by pid ")));
    let visited = tokio::time::timeout(Duration::from_millis(100), foreign.accept()).await;
    assert!(visited.is_err(), "somebody has connected");
}

#[tokio::test]
async fn ending_an_agent_ends_everything_it_started() {
    let mut site = Site::new().await;
    site.settings(&[("a", &shell(TREE))]);
    site.start();
    site.until_state("a", "ready").await;
    // The guard, a shell, the agent and five that sleep.
    eventually(SOON, || async { (site.processes().len() >= 8).then_some(()) }).await;
    let (code, out, _) = site.run(&["agents", "stop", "a"]).await;
    assert_eq!((code, site.processes()), (0, vec![]), "{out}");
    assert_eq!(site.stop().await, Some(0));
}

#[tokio::test]
async fn an_agent_that_ignores_the_signal_is_killed_at_the_grace_limit() {
    let mut site = Site::new().await;
    let lines = format!("{}\nstop_grace: 1s", demo("--ignore-sigterm"));
    site.settings(&[("a", &lines)]);
    site.start();
    site.until_state("a", "ready").await;
    let began = Instant::now();
    site.run(&["agents", "stop", "a"]).await;
    let took = began.elapsed();
    let report = site.until_state("a", "stopped").await;
    assert_eq!(report.last_exit.unwrap().how, "was killed by SIGKILL");
    assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(4), "{took:?}");
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn the_agents_of_a_bridge_that_was_killed_are_gone_within_two_seconds() {
    let mut site = Site::new().await;
    site.settings(&[("a", &shell(TREE)), ("b", &demo("--ignore-sigterm"))]);
    site.start();
    site.until_state("a", "ready").await;
    site.until_state("b", "ready").await;
    site.kill_9().await;
    let took = site.until_nothing_runs(SOON).await;
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[tokio::test]
async fn what_bridge_and_guard_leave_when_killed_together_is_ended_before_the_next_start() {
    let mut site = Site::new().await;
    site.settings(&[("a", &shell(TREE))]);
    site.start();
    let report = site.until_state("a", "ready").await;
    let guard = Stat::read(report.pid.unwrap()).unwrap().parent;
    // Stopped first, or one of them would see the other die.
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        kill(Pid::from_raw(guard), signal).unwrap();
        site.signal(signal);
    }
    site.ended().await;
    let left = site.processes();
    assert!(left.len() >= 6, "{left:?}");
    site.start();
    site.until_state("a", "ready").await;
    let still: Vec<_> = site.processes().into_iter().filter(|pid| left.contains(pid)).collect();
    assert_eq!(still, Vec::<i32>::new());
    assert!(site.log().contains("ended processes that an earlier bridge left running"));
}

#[tokio::test]
async fn an_agent_whose_guard_is_killed_is_ended_and_started_again() {
    let mut site = Site::new().await;
    site.settings(&[("a", &shell(TREE))]);
    let bridge = site.start();
    let report = site.until_state("a", "ready").await;
    let before = site.processes();
    let guard = Stat::read(report.pid.unwrap()).unwrap().parent;
    kill(Pid::from_raw(guard), Signal::SIGKILL).unwrap();
    site.until("a", SOON, |report| report.state == "ready" && report.restarts == 1).await;
    eventually(SOON, || async { (!site.processes().iter().any(|pid| before.contains(pid))).then_some(()) })
        .await;
    // What came to the bridge was reaped there.
    eventually(SOON, || async {
        let mut children = procfs::children(bridge).into_iter().filter_map(Stat::read);
        children.all(|stat| !stat.has_exited()).then_some(())
    })
    .await;
}

/// The states that are announced of the agent `a` from now on, each one once, until `last` comes.
async fn states_until(registry: &mut async_nats::Subscriber, last: &str) -> Vec<String> {
    use futures_util::StreamExt as _;
    let mut states: Vec<String> = Vec::new();
    while states.last().is_none_or(|state| state != last) {
        let message = tokio::time::timeout(SOON, registry.next()).await.expect("it is announced").unwrap();
        let object: Value = serde_json::from_slice(&message.payload).unwrap();
        // Nobody can call it while it is anything but ready.
        assert_eq!(object["actions"] != serde_json::json!([]), object["state"] == "ready", "{object}");
        states.push(object["state"].as_str().unwrap().to_owned());
        states.dedup();
    }
    states
}

#[tokio::test]
async fn a_process_that_exited_or_is_ended_on_an_order_is_never_unhealthy() {
    let mut site = Site::new().await;
    // What it leaves behind ignores the signal, so it takes two seconds until all is gone.
    let line = "(trap \"\" TERM; exec sleep 1000) & exec DEMO --ignore-sigterm";
    site.settings(&[("a", &format!("{}\nstop_grace: 1s", shell(line)))]);
    let mut registry = site.client.subscribe("a2a.registry.a").await.unwrap();
    site.client.flush().await.unwrap();
    site.start();
    states_until(&mut registry, "ready").await;
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    assert_eq!(states_until(&mut registry, "ready").await, ["backing-off", "starting", "ready"]);
    let order = async |verb: &str| {
        let subject = format!("a2a.control.a.{verb}");
        let request = async_nats::Request::new().payload("".into()).timeout(Some(SOON));
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
async fn a_start_after_a_stop_reports_the_agent_that_it_has_started() {
    let mut site = Site::new().await;
    site.settings(&[("a", &demo(""))]);
    site.start();
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
async fn a_stopped_agent_is_unpublished_and_started_again_even_with_a_call_in_flight() {
    let mut site = Site::new().await;
    let lines = format!("{}\nliveness: {{ interval: 1s }}", demo(""));
    site.settings(&[("a", &lines)]);
    site.start();
    let report = until_published(&site, "a").await;
    let request = async_nats::Request::new().payload("slow 60".into()).timeout(Some(SOON * 2));
    let call = site.client.send_request("a2a.action.a.slow", request);
    let rest = async {
        site.until("a", SOON, |report| report.in_flight == 1).await;
        kill(Pid::from_raw(report.pid.unwrap()), Signal::SIGSTOP).unwrap();
        let report = site.until("a", SOON, |report| report.state != "ready").await;
        assert!(report.last_error.unwrap().contains("is suspended (SIGSTOP)"));
        eventually(SOON, || async { (!service_is_published(&site, "a", "echo").await).then_some(()) }).await;
        site.until("a", SOON, |report| report.state == "ready" && report.restarts == 1).await;
    };
    let (reply, ()) = tokio::join!(call, rest);
    let reply: Value = serde_json::from_slice(&reply.unwrap().payload).unwrap();
    assert_eq!(reply["success"], false, "{reply}");
}

#[tokio::test]
async fn a_busy_agent_that_is_slow_on_its_card_is_left_in_peace_and_an_idle_one_is_not() {
    let mut site = Site::new().await;
    let probes = "liveness: { interval: 200ms, timeout: 100ms, failures: 2 }\nreadiness: { timeout: 100ms }";
    let lines = format!("{}\n{probes}", demo("--slow-card 60s"));
    site.settings(&[("a", &lines)]);
    site.start();
    until_published(&site, "a").await;
    let reply = site.client.request("a2a.action.a.slow", "slow 3".into()).await.unwrap();
    let reply: Value = serde_json::from_slice(&reply.payload).unwrap();
    assert_eq!(reply["status"], "COMPLETED", "{reply}");
    site.until("a", SOON, |report| report.restarts > 0).await;
    assert!(site.log().contains("failed 2 liveness checks in a row"), "{}", site.log());
}

#[tokio::test]
async fn an_agent_gets_a_clean_environment_and_no_descriptors() {
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
    // The listing itself holds one more, the folder that it reads.
    assert_eq!(descriptors.lines().filter(|line| line.contains(" -> ")).count(), 4, "{descriptors}");
}

#[tokio::test]
async fn exit_code_0_is_a_wanted_end_unless_the_settings_say_always() {
    let mut site = Site::new().await;
    let always = format!("{}\nrestart: always", demo("--exit-at-start 0"));
    let never = format!("{}\nrestart_on_crash: false", demo("--exit-at-start 3"));
    site.settings(&[("quiet", &demo("--exit-at-start 0")), ("always", &always), ("never", &never)]);
    site.start();
    let report = site.until_state("quiet", "stopped").await;
    let error = report.last_error.unwrap();
    assert!(error.contains("exited with code 0") && error.contains("restart: on-failure"), "{error}");
    assert!(report.advice.unwrap().contains("restart: always"));
    let report = site.until_state("never", "failed").await;
    assert!(report.last_error.unwrap().contains("`restart` is `never`"));
    site.until("always", SOON, |report| report.restarts > 0).await;
}

#[tokio::test]
async fn after_too_many_restarts_an_agent_has_failed_until_somebody_starts_it() {
    let mut site = Site::new().await;
    let lines = format!("{}\nmax_restarts: 1\nrestart_window: 1m", demo("--exit-at-start 3"));
    site.settings(&[("a", &lines)]);
    site.start();
    let report = site.until_state("a", "failed").await;
    assert_eq!(report.restarts, 1);
    assert!(report.last_error.unwrap().starts_with("restarted 1 times within 1m"));
    assert!(report.advice.unwrap().contains("agents start a"));
    let (code, _, _) = site.run(&["agents", "start", "a"]).await;
    assert_eq!(code, 1);
    site.until("a", SOON, |report| report.restarts == 2).await;
}

#[tokio::test]
async fn a_reload_keeps_what_did_not_change_and_a_bad_file_changes_nothing() {
    let mut site = Site::new().await;
    let (same, other, gone) = (demo(""), demo("--name one"), demo(""));
    site.settings(&[("same", &same), ("other", &other), ("gone", &gone)]);
    site.start();
    let before = site.until_state("same", "ready").await.pid;
    let changed = site.until_state("other", "ready").await.pid;
    site.until_state("gone", "ready").await;

    std::fs::write(site.file(), "agents: [{ name: x }]").unwrap();
    site.signal(Signal::SIGHUP);
    eventually(SOON, || async { site.log().contains("keeping the current configuration").then_some(()) })
        .await;
    assert!(site.log().contains("`url` is missing"), "{}", site.log());
    assert_eq!(site.show("same").await.unwrap().pid, before);

    site.settings(&[("same", &same), ("other", &demo("--name two")), ("new", &demo(""))]);
    site.signal(Signal::SIGHUP);
    site.until_state("new", "ready").await;
    let other = site.until("other", SOON, |report| report.state == "ready" && report.pid != changed).await;
    assert_eq!(other.card.unwrap().name, "two");
    assert_eq!(site.show("same").await.unwrap().pid, before);
    eventually(SOON, || async { site.show("gone").await.is_none().then_some(()) }).await;
    assert!(!service_is_published(&site, "gone", "get_task").await);
}

#[tokio::test]
async fn logs_show_what_an_agent_wrote_and_follow_what_it_writes() {
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
    assert!(out.contains(" INFO first\n"), "{out}");
    let mut follower = tokio::process::Command::new(crate::support::site::program())
        .args(["logs", "-f", "--lines", "1"])
        .args(site.connection())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut seen = tokio::io::BufReader::new(follower.stdout.take().unwrap());
    let mut first = String::new();
    tokio::io::AsyncBufReadExt::read_line(&mut seen, &mut first).await.unwrap();
    assert!(first.contains("listening on"), "{first}");
    let mut writer = tokio::fs::File::options().write(true).open(&pipe).await.unwrap();
    writer.write_all(b"something new\n").await.unwrap();
    writer.flush().await.unwrap();
    drop(writer);
    let mut next = String::new();
    let read = tokio::io::AsyncBufReadExt::read_line(&mut seen, &mut next);
    tokio::time::timeout(SOON, read).await.unwrap().unwrap();
    assert!(next.contains(" WARN WARN something new"), "{next}");
}

#[tokio::test]
async fn metrics_and_health_are_served() {
    let mut site = Site::new().await;
    let port = a2a_bridge::internal::ports::free().unwrap();
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
        "a2a_bridge_calls_total{agent=\"a\",outcome=\"COMPLETED\"} 1",
        "a2a_bridge_call_duration_seconds_count{agent=\"a\"} 1",
        "a2a_bridge_calls_in_flight{agent=\"a\"} 0",
        "a2a_bridge_follow_ups_pending 0",
        "a2a_bridge_agent_output_dropped_bytes_total{agent=\"a\"} 0",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    assert_eq!(get("/healthz").await.0, 200);
    assert_eq!(get("/readyz").await, (200, "ok\n".into()));
    site.server.end();
    eventually(SOON, || async { (get("/readyz").await.0 == 503).then_some(()) }).await;
}

#[tokio::test]
async fn control_requests_answer_only_to_inboxes() {
    let mut site = Site::new().await;
    site.settings(&[("a", &demo(""))]);
    site.start();
    site.until_state("a", "ready").await;
    let mut forged = site.client.subscribe("a2a.registry.x").await.unwrap();
    let subject = "a2a.control.a.show";
    site.client.publish_with_reply(subject, "a2a.registry.x", "".into()).await.unwrap();
    site.show("a").await.unwrap();
    let none = futures_util::StreamExt::next(&mut forged);
    assert!(tokio::time::timeout(Duration::from_millis(200), none).await.is_err());
}
