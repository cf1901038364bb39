//! What launched agents can and cannot do to the bridge, to each other, and to the machine.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use a2a_bridge::internal::procfs::Stat;
use nix::sys::signal::Signal;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use crate::support::processes::{command_line, free_port, program};
use crate::support::site::{Site, demo, demo_at, guard_of, shell};
use crate::support::{eventually, processes, wait_until, within_deadline};

const NOBODY: u32 = 65534;
const SECRET: &str = "s3cret-in-the-environment";

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The command that runs another one as a user without privileges; `None` if this test cannot do that.
fn as_nobody(site: &Site) -> Option<Vec<String>> {
    if !is_root() {
        return None;
    }
    let wrapper = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"].map(str::to_owned).to_vec();
    std::fs::set_permissions(site.folder(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let tried = Command::new(&wrapper[0]).args(&wrapper[1..]).args([program(), "--version"]).output();
    tried.is_ok_and(|output| output.status.success()).then_some(wrapper)
}

fn environment(pid: i32) -> String {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    String::from_utf8_lossy(&environment).into_owned()
}

/// Soft and hard limit of a process, as `/proc` shows them.
fn limit(pid: i32, name: &str) -> (String, String) {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    let mut words = line.split_ascii_whitespace().map(str::to_owned);
    (words.next().unwrap(), words.next().unwrap())
}

fn status(pid: i32, name: &str) -> Vec<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_ascii_whitespace().map(str::to_owned).collect()
}

#[tokio::test]
async fn secrets_are_in_no_environment_and_no_command_line_but_the_agents_own() {
    let mut site = Site::new().await;
    let agent = |name: &str| format!("{}\nbearer_token: ${{IT_SECRET}}", demo(&format!("--name {name}")));
    site.settings(&[("a", &agent("one")), ("b", &demo(""))]);
    let secret = format!("IT_SECRET={SECRET}");
    let binary = "export IT_BINARY_TOKEN=$(printf 's3cret\\377'); exec \"$@\"";
    let bridge = site.start_through(&[
        "env",
        &secret,
        "IT_OTHER_TOKEN=unused-s3cret",
        "IT_PLAIN=plain",
        "sh",
        "-c",
        binary,
        "sh",
    ]);
    let a = site.until_state("a", "ready").await.pid.unwrap();
    let b = site.until_state("b", "ready").await.pid.unwrap();
    for pid in [bridge, a, guard_of(a), b, guard_of(b)] {
        let shown = format!("{}{}", environment(pid), command_line(pid));
        assert!(!shown.contains("s3cret"), "{shown}");
    }
    assert!(environment(bridge).contains("IT_PLAIN=plain"));
    assert!(environment(bridge).contains("IT_BINARY_TOKEN=\0"));
    // A reload still finds the variable, and an agent gets what its settings say.
    let with_env = agent("two").replace("bearer_token", "env_file: more\nbearer_token");
    std::fs::write(site.folder().join("more"), "FROM_FILE=1\n").unwrap();
    let third = format!("{}\nheaders: {{ X-Key: '${{IT_SECRET:?is not set}}' }}", demo(""));
    site.settings(&[("a", &with_env), ("c", &third)]);
    site.signal(Signal::SIGHUP);
    site.until_state("c", "ready").await;
    let a = site.until("a", |report| report.state == "ready" && report.pid != Some(a)).await.pid.unwrap();
    assert!(environment(a).contains("FROM_FILE=1"));
    assert!(!environment(guard_of(a)).contains("FROM_FILE"));
}

#[tokio::test]
async fn variables_that_the_bridge_reads_itself_are_not_hidden() {
    let mut site = Site::new().await;
    let authorities = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tls/ca.pem");
    let lines = "headers: { X-A: '${SSL_CERT_FILE}', X-B: '${RUST_BACKTRACE}', X-C: '${IT_OTHER}' }";
    site.settings(&[("a", &format!("{}\n{lines}", demo("")))]);
    let variables = [format!("SSL_CERT_FILE={authorities}"), "RUST_BACKTRACE=0".into(), "IT_OTHER=x".into()];
    let wrapper = std::iter::once("env").chain(variables.iter().map(String::as_str));
    let bridge = site.start_through(&wrapper.collect::<Vec<_>>());
    site.until_state("a", "ready").await;
    let shown = environment(bridge);
    assert!(
        shown.contains(&format!("{}\0", variables[0])) && shown.contains("RUST_BACKTRACE=0\0"),
        "{shown}"
    );
    assert!(shown.contains("IT_OTHER=\0"), "{shown}");
}

#[tokio::test]
async fn agent_of_the_same_user_cannot_read_the_bridge() {
    let mut site = Site::new().await;
    let Some(nobody) = as_nobody(&site) else { return println!("skipped: needs root and setpriv") };
    let line = "cd /proc/$(cut -d\" \" -f4 /proc/$PPID/stat); (cat environ mem; ls fd) > FOLDER/seen 2> FOLDER/refused; DEMO";
    site.settings(&[("a", &shell(&line.replace("FOLDER", &site.folder().display().to_string())))]);
    let mut wrapper: Vec<&str> = nobody.iter().map(String::as_str).collect();
    wrapper.extend(["env", "IT_PLAIN=plain"]);
    let bridge = site.start_through(&wrapper);
    let report = site.until_state("a", "ready").await;
    assert_eq!(status(bridge, "Uid:")[0], NOBODY.to_string());
    assert_eq!(status(report.pid.unwrap(), "Uid:")[0], NOBODY.to_string());
    assert_eq!(std::fs::read_to_string(site.folder().join("seen")).unwrap(), "");
    let refused = std::fs::read_to_string(site.folder().join("refused")).unwrap();
    assert_eq!(refused.matches("Permission denied").count(), 3, "{refused}");
    // The bridge verifies the port and stops the agent all the same.
    assert!(!site.log().contains("cannot read which process"), "{}", site.log());
    site.stop_agent("a").await;
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn bridge_works_if_proc_shows_only_readable_processes() {
    let mut site = Site::new().await;
    let Some(nobody) = as_nobody(&site) else { return println!("skipped: needs root and setpriv") };
    // As `ProtectProc=invisible` of systemd.
    let hide =
        ["unshare", "--mount", "sh", "-c", "mount -t proc -o hidepid=2 proc /proc && exec \"$@\"", "sh"];
    if !Command::new(hide[0]).args(&hide[1..]).arg("true").status().is_ok_and(|status| status.success()) {
        return println!("skipped: cannot mount /proc");
    }
    site.settings(&[("a", &demo(""))]);
    site.start_through(&hide.into_iter().chain(nobody.iter().map(String::as_str)).collect::<Vec<_>>());
    let report = site.until_state("a", "ready").await;
    eventually(|| async { site.client.request("a2a.action.a.echo", "hello".into()).await.ok() }).await;
    assert!(!site.log().contains("cannot read which process"), "{}", site.log());
    processes::signal(guard_of(report.pid.unwrap()), Signal::SIGKILL);
    site.until_restarted("a", 1).await;
    site.stop_agent("a").await;
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn agent_suspended_together_with_its_guard_is_replaced() {
    let lines = format!("{}\nliveness: {{ interval: 1s }}", demo(""));
    let site = Site::running(&[("a", &lines)]).await;
    let agent = site.until_state("a", "ready").await.pid.unwrap();
    let guard = guard_of(agent);
    processes::signal(guard, Signal::SIGSTOP);
    processes::signal(agent, Signal::SIGSTOP);
    let report = site.until_within(Duration::from_secs(30), "a", |report| report.restarts == 1).await;
    site.until_restarted("a", 1).await;
    assert_ne!(report.pid, Some(agent));
    assert!(!site.log().contains("still running after SIGKILL"), "{}", site.log());
    // `pkill -f` with the agent's command does not match its guard.
    let guard = command_line(guard_of(site.until_restarted("a", 1).await.pid.unwrap()));
    assert!(guard.contains("guard-process") && !guard.contains("demo-agent"), "{guard}");
}

#[tokio::test]
async fn guard_that_is_suspended_again_and_again_is_killed_with_its_agent() {
    let lines = format!("{}\nstop_grace: 500ms", demo("--ignore-sigterm"));
    let site = Site::running(&[("a", &lines)]).await;
    let agent = site.until_state("a", "ready").await.pid.unwrap();
    let guard = guard_of(agent);
    let stopping = async {
        loop {
            processes::signal(guard, Signal::SIGSTOP);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = site.stop_agent("a") => {}
        () = stopping => {}
    }
    assert_eq!(site.processes(), Vec::<i32>::new());
    assert!(Stat::read(guard).is_none_or(|stat| stat.name != "exe"), "the guard still runs");
}

#[tokio::test]
async fn file_limit_is_raised_for_the_bridge_only() {
    let mut site = Site::new().await;
    site.settings(&[("a", &demo("")), ("b", &format!("{}\nlimits: {{ files: 100 }}", demo("")))]);
    let bridge = site.start_through(&["sh", "-c", "ulimit -Sn 900; ulimit -Hn 3000; exec \"$@\"", "sh"]);
    let a = site.until_state("a", "ready").await.pid.unwrap();
    let b = site.until_state("b", "ready").await.pid.unwrap();
    let of = |pid| limit(pid, "Max open files");
    assert_eq!(of(bridge), ("3000".into(), "3000".into()));
    assert_eq!(of(a), ("900".into(), "3000".into()));
    assert_eq!(of(b), ("100".into(), "100".into()));
}

#[tokio::test]
async fn bridge_without_free_descriptors_ends_no_agent() {
    let mut site = Site::new().await;
    let liveness = "liveness: { interval: 100ms, timeout: 100ms, failures: 2 }";
    let busy = format!("{}\n{liveness}", demo(""));
    let quiet = format!("{}\n{liveness}\nmax_restarts: 1000", demo(""));
    site.settings(&[("busy", &busy), ("quiet", &quiet)]);
    site.start_through(&["sh", "-c", "ulimit -n 60; exec \"$@\"", "sh"]);
    let before = [site.until_state("busy", "ready").await.pid, site.until_state("quiet", "ready").await.pid];
    wait_until(|| async { site.client.request("a2a.action.busy.echo", "hi".into()).await.is_ok() }).await;
    // The first call ends soon. One free descriptor is enough to read which sockets listen, but not who holds them.
    for seconds in std::iter::once(2).chain([60; 100]) {
        let (inbox, text) = (site.client.new_inbox(), format!("slow {seconds}"));
        site.client.publish_with_reply("a2a.action.busy.slow", inbox, text.into()).await.unwrap();
    }
    // Many more checks than an agent may fail.
    tokio::time::sleep(Duration::from_secs(5)).await;
    for (name, pid) in ["busy", "quiet"].into_iter().zip(before) {
        let report = eventually(|| site.show(name)).await;
        assert_eq!((report.pid, report.restarts), (pid, 0), "{name}: {report:?}\n{}", site.log());
    }
    assert!(!site.log().contains("in use by"), "{}", site.log());
    // Once for each agent.
    assert_eq!(site.log().matches("cannot read which process").count(), 2, "{}", site.log());
}

#[tokio::test]
async fn process_that_takes_over_a_released_port_gets_no_request() {
    let mut site = Site::new().await;
    let port = free_port();
    // The agent goes on living without the process that listens. No check notices that before the next call.
    let line = "DEMO & until test -e FOLDER/go; do sleep 0.01; done; kill $!; wait $!; touch FOLDER/released; sleep 1000";
    let line = line.replace("FOLDER", &site.folder().display().to_string());
    let lines = shell(&line).replace("port: auto", &format!("port: {port}"));
    let lines = format!("{lines}\nbearer_token: {SECRET}\ncard_refresh: 1h\nliveness: {{ interval: 1h }}");
    site.settings(&[("a", &lines)]);
    site.start();
    site.until_state("a", "ready").await;
    let call = || site.client.request("a2a.action.a.echo", "private prompt".into());
    wait_until(|| async { call().await.is_ok() }).await;
    std::fs::write(site.folder().join("go"), "").unwrap();
    site.until_file("released").await;
    let foreign = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    let received = async {
        let (mut stream, _) = foreign.accept().await.unwrap();
        let mut received = [0; 4096];
        let count = stream.read(&mut received).await.unwrap_or_default();
        String::from_utf8_lossy(&received[..count]).into_owned()
    };
    let (reply, received) = tokio::join!(call(), within_deadline(received));
    assert_eq!(received, "");
    let reply = String::from_utf8_lossy(&reply.unwrap().payload).into_owned();
    assert!(reply.contains("another process listens on the port of the agent"), "{reply}");
    let report = site.until_state("a", "backing-off").await;
    assert!(report.last_error.unwrap().contains(&format!("port {port} in use by pid")));
}

#[tokio::test]
async fn agent_that_moves_to_another_socket_is_still_called() {
    let port = free_port();
    let site_lines = |site: &Site| {
        let folder = site.folder().display().to_string();
        let line = "while true; do DEMO & until rm FOLDER/go 2>/dev/null; do sleep 0.01; done; kill $!; wait $!; done";
        let lines = shell(&line.replace("FOLDER", &folder)).replace("port: auto", &format!("port: {port}"));
        format!("{lines}\ncard_refresh: 1h\nliveness: {{ interval: 1h, failures: 100000 }}")
    };
    let mut site = Site::new().await;
    site.settings(&[("a", &site_lines(&site))]);
    site.start();
    site.until_state("a", "ready").await;
    let answers = || async {
        let reply = site.client.request("a2a.action.a.echo", "hello".into()).await.ok()?;
        String::from_utf8_lossy(&reply.payload).contains("COMPLETED").then_some(())
    };
    for _ in 0..3 {
        eventually(answers).await;
        std::fs::write(site.folder().join("go"), "").unwrap();
        wait_until(|| async { !site.folder().join("go").exists() }).await;
    }
    eventually(answers).await;
    assert_eq!(site.show("a").await.unwrap().restarts, 0);
}

/// A cgroup that is delegated to a bridge, as by systemd. Dropping it removes it.
struct Delegated(PathBuf);

impl Delegated {
    /// `None` if this test may not create it.
    fn new() -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?.split(' ').nth(4)?;
        let cgroup = Self(Path::new(mount).join(format!("a2a-test-{}", uuid::Uuid::new_v4())));
        std::fs::create_dir_all(cgroup.0.join("bridge")).ok()?;
        Some(cgroup)
    }

    fn groups(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.is_dir()).collect()
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        for group in self.groups() {
            let _ = std::fs::remove_dir(group);
        }
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A process that has left its parent, its session, its environment and its tag, and then kills its guard.
fn with_escaping_process(folder: &Path) -> String {
    let folder = folder.display();
    let script = "guard=$1; until rm $2/go 2>/dev/null; do sleep 0.01; done; echo $$ > $2/escaped; kill -9 $guard; exec sleep 1000";
    std::fs::write(format!("{folder}/escape"), script).unwrap();
    let escape = format!("setsid env -i prlimit --locks=unlimited sh {folder}/escape $PPID {folder}");
    shell(&format!("({escape} &) ; DEMO"))
}

async fn escape(site: &Site) {
    site.until_state("a", "ready").await;
    std::fs::write(site.folder().join("go"), "").unwrap();
    let pid = eventually(|| async {
        std::fs::read_to_string(site.folder().join("escaped")).ok()?.trim().parse::<i32>().ok()
    })
    .await;
    site.until_restarted("a", 1).await;
    let left = Stat::read(pid).filter(|stat| !stat.has_exited());
    if let Some(left) = &left {
        processes::signal(left.pid, Signal::SIGKILL);
    }
    assert_eq!(left, None, "it has escaped");
}

#[tokio::test]
async fn process_without_marks_that_kills_its_guard_does_not_escape() {
    let mut site = Site::new().await;
    site.settings(&[("a", &with_escaping_process(site.folder()))]);
    site.start();
    escape(&site).await;
}

#[tokio::test]
async fn each_agent_gets_a_cgroup_below_a_delegated_one() {
    let Some(delegated) = Delegated::new() else { return println!("skipped: cannot create a cgroup") };
    let mut site = Site::new().await;
    site.settings(&[("a", &with_escaping_process(site.folder()))]);
    let join = format!("echo 0 > {}/bridge/cgroup.procs; exec \"$@\"", delegated.0.display());
    site.start_through(&["sh", "-c", &join, "sh"]);
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    let cgroup = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let name = delegated.0.file_name().unwrap().to_str().unwrap();
    assert!(cgroup.contains(&format!("/{name}/a2a-agent-")), "{cgroup}");
    escape(&site).await;
    assert_eq!(site.stop().await, Some(0));
    assert_eq!(site.processes(), Vec::<i32>::new());
    assert_eq!(delegated.groups(), [delegated.0.join("bridge")]);
}

#[tokio::test]
async fn process_without_marks_that_kills_its_guard_does_not_escape_without_cgroups() {
    let mut site = Site::new().await;
    let Some(nobody) = as_nobody(&site) else { return println!("skipped: needs root and setpriv") };
    site.settings(&[("a", &with_escaping_process(site.folder()))]);
    site.start_through(&nobody.iter().map(String::as_str).collect::<Vec<_>>());
    escape(&site).await;
}

#[tokio::test]
async fn guard_that_outlives_its_bridge_is_found() {
    let mut site = Site::running(&[("a", &demo("--ignore-sigterm"))]).await;
    let agent = site.until_state("a", "ready").await.pid.unwrap();
    let guard = guard_of(agent);
    let found = site.processes();
    assert!(found.len() == 2 && found.contains(&agent) && found.contains(&guard), "{found:?}");
    site.kill_9().await;
    // The guard waits a second for its agent.
    let found = site.processes();
    let has_exited = Stat::read(guard).is_none_or(|stat| stat.has_exited());
    assert!(has_exited || found.contains(&guard), "{found:?}");
    site.until_nothing_runs(Duration::from_secs(30)).await;
}

#[tokio::test]
async fn agent_does_not_inherit_capabilities_of_the_bridge() {
    let mut site = Site::new().await;
    let Some(mut nobody) = as_nobody(&site) else { return println!("skipped: needs root and setpriv") };
    nobody.extend(["--inh-caps=+setuid,+setgid", "--ambient-caps=+setuid,+setgid"].map(str::to_owned));
    let other = format!("{}\nuser: 54321\ngroup: 54321", demo(""));
    site.settings(&[("a", &demo("")), ("b", &other)]);
    let bridge = site.start_through(&nobody.iter().map(String::as_str).collect::<Vec<_>>());
    for (agent, user) in [("a", NOBODY), ("b", 54321)] {
        let pid = eventually(|| async { site.show(agent).await?.pid }).await;
        assert_eq!(status(pid, "Uid:"), vec![user.to_string(); 4]);
        for set in ["CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(status(pid, set), ["0000000000000000"], "{agent} {set}");
        }
    }
    assert_ne!(status(bridge, "CapAmb:"), ["0000000000000000"]);
    // User 54321 is not in the user database.
    let pid = eventually(|| async { site.show("b").await?.pid }).await;
    let environment = environment(pid);
    assert!(environment.contains("PATH="), "{environment}");
    for name in ["HOME=", "USER="] {
        assert!(!environment.split('\0').any(|variable| variable.starts_with(name)), "{environment}");
    }
}

#[tokio::test]
async fn documented_capabilities_suffice_for_agents_with_a_user() {
    let unit = include_str!("../../deploy/a2a-bridge.service");
    let line = unit.lines().find_map(|line| line.strip_prefix("#   CapabilityBoundingSet=")).unwrap();
    let names: Vec<&str> = line.split(' ').map(|name| name.strip_prefix("CAP_").unwrap()).collect();
    let container: Vec<_> = names.iter().map(|name| format!("--cap-add {name}")).collect();
    let containerfile = include_str!("../../deploy/Containerfile");
    assert!(containerfile.contains(&container.join(" ")), "{container:?}");
    if !is_root() {
        return println!("skipped: needs root");
    }
    let added: Vec<_> = names.iter().map(|name| format!(",+{}", name.to_lowercase())).collect();
    let bounding = format!("--bounding-set=-all{}", added.concat());
    let mut site = Site::new().await;
    std::fs::set_permissions(site.folder(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let lines = demo("").replace(program(), &format!("{}/program", site.folder().display()));
    std::fs::copy(program(), site.folder().join("program")).unwrap();
    site.settings(&[("a", &format!("{lines}\nuser: nobody\ngroup: 54321"))]);
    let bridge = site.start_through(&["setpriv", &bounding]);
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    assert_eq!(status(pid, "Uid:"), vec![NOBODY.to_string(); 4]);
    let caps = u64::from_str_radix(&status(bridge, "CapEff:")[0], 16).unwrap();
    assert_eq!(caps.count_ones(), u32::try_from(names.len()).unwrap(), "{caps:x}");
    eventually(|| async { site.client.request("a2a.action.a.echo", "hello".into()).await.ok() }).await;
    assert!(!site.log().contains("cannot read which process"), "{}", site.log());
    site.stop_agent("a").await;
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn agent_runs_as_its_user_and_within_its_limits() {
    if !is_root() {
        return println!("skipped: needs root");
    }
    let mut site = Site::new().await;
    std::fs::set_permissions(site.folder(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let demo = demo("");
    let mut lines = demo.replace(program(), &format!("{}/program", site.folder().display()));
    std::fs::copy(program(), site.folder().join("program")).unwrap();
    write!(
        lines,
        "\nuser: nobody\ngroup: 54321\nlimits: {{ memory: 512MiB, files: 500, processes: 300, cpu: 2 }}"
    )
    .unwrap();
    site.settings(&[("a", &lines), ("b", &format!("{demo}\nuser: no-such-user"))]);
    site.start();
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    assert_eq!(status(pid, "Uid:"), vec![NOBODY.to_string(); 4]);
    assert_eq!(status(pid, "Gid:"), vec!["54321"; 4]);
    assert_eq!(status(pid, "Groups:"), ["54321"]);
    assert_eq!(status(pid, "CapEff:"), ["0000000000000000"]);
    assert!(environment(pid).contains("USER=nobody"), "{}", environment(pid));
    for (name, value) in [("Max data size", 512 << 20), ("Max open files", 500), ("Max processes", 300)] {
        assert_eq!(limit(pid, name), (value.to_string(), value.to_string()), "{name}");
    }
    // The guard keeps the user of the bridge, so that the agent cannot signal it.
    assert_eq!(status(guard_of(pid), "Uid:")[0], "0");
    eventually(|| async { site.client.request("a2a.action.a.echo", "hello".into()).await.ok() }).await;
    site.stop_agent("a").await;
    assert_eq!(site.processes(), Vec::<i32>::new());
    let report = site.until_state("b", "backing-off").await;
    assert_eq!(report.last_error.unwrap(), "user `no-such-user` does not exist");
}

#[tokio::test]
async fn bridge_without_privileges_says_that_it_cannot_change_the_user() {
    let mut site = Site::new().await;
    let lines = format!("{}\nuser: root", demo(""));
    site.settings(&[("a", &lines)]);
    match as_nobody(&site) {
        Some(nobody) => site.start_through(&nobody.iter().map(String::as_str).collect::<Vec<_>>()),
        None if is_root() => return println!("skipped: needs setpriv"),
        None => site.start(),
    };
    let report = site.until_state("a", "backing-off").await;
    let error = report.last_error.unwrap();
    assert!(error.ends_with("as another user: Operation not permitted (os error 1)"), "{error}");
    assert!(report.advice.unwrap().starts_with("run the bridge as root"));
}

#[tokio::test]
async fn start_with_a_missing_command_is_reported_as_before() {
    let missing = demo_at("127.0.0.1", free_port(), "").replace(program(), "/no/such/program");
    let site = Site::running(&[("a", &missing)]).await;
    let report = site.until_state("a", "backing-off").await;
    assert_eq!(report.last_error.unwrap(), "command not found: `/no/such/program`");
}
