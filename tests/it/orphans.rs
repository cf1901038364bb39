//! Orphaned processes are reparented to the bridge, which kills those of its agents and reaps all.

use std::path::Path;
use std::process::{Command, Stdio};

use a2a_bridge::internal::procfs::{self, Stat};
use nix::sys::signal::Signal;

use crate::support::processes::program;
use crate::support::site::{Site, guard_of, shell};
use crate::support::{eventually, processes, wait_until};

/// An agent with a process that has left its parent, its session and its environment. Its pid is in a file
/// with the name of the agent.
fn with_detached_process(folder: &Path, agent: &str) -> String {
    let folder = folder.display();
    std::fs::write(format!("{folder}/detach"), "echo $$ > $1; exec sleep 1000").unwrap();
    shell(&format!("(setsid env -i sh {folder}/detach {folder}/{agent} &) ; DEMO"))
}

async fn process_in(site: &Site, file: &str) -> Stat {
    let path = site.folder().join(file);
    eventually(|| async {
        Stat::read(std::fs::read_to_string(&path).ok()?.trim().parse().ok()?)
            .filter(|stat| stat.name == "sleep")
    })
    .await
}

fn is_alive(process: &Stat) -> bool {
    Stat::read(process.pid).is_some_and(|stat| stat.start == process.start && !stat.has_exited())
}

#[tokio::test]
async fn orphans_of_a_killed_guard_are_killed_and_no_other_process() {
    let mut site = Site::new().await;
    site.settings(&[
        ("a", &with_detached_process(site.folder(), "a")),
        ("b", &with_detached_process(site.folder(), "b")),
    ]);
    // Two processes that belong to no agent; one of them starts another after the agents have started.
    let sidecars = "sleep 1000 & echo $! > FOLDER/before; \
        (until test -e FOLDER/go; do sleep 0.05; done; (sleep 1000 & echo $! > FOLDER/later); exec sleep 1000) & \
        echo $! > FOLDER/sidecar; exec \"$@\"";
    let sidecars = sidecars.replace("FOLDER", &site.folder().display().to_string());
    let bridge = site.start_through(&["sh", "-c", &sidecars, "sh"]);
    let guard = guard_of(site.until_state("a", "ready").await.pid.unwrap());
    let other = site.until_state("b", "ready").await;
    let (detached, others) = (process_in(&site, "a").await, process_in(&site, "b").await);
    assert_eq!(detached.parent, guard);
    std::fs::write(site.folder().join("go"), "").unwrap();
    let before = process_in(&site, "before").await;
    let later = process_in(&site, "later").await;
    let sidecar = process_in(&site, "sidecar").await;
    let is_orphan = || Stat::read(later.pid).is_some_and(|stat| stat.parent == bridge);
    wait_until(|| async { is_orphan() }).await;
    processes::signal(guard, Signal::SIGKILL);
    site.until_restarted("a", 1).await;
    assert!(!is_alive(&detached));
    assert!(is_alive(&others), "of another agent");
    assert_eq!(site.show("b").await.unwrap().pid, other.pid);
    assert!(is_alive(&before), "a child from before the first agent");
    assert!(is_alive(&later), "an orphan of another process");
    assert_eq!(site.stop().await, Some(0));
    assert!(!is_alive(&others));
    for stranger in [before, later, sidecar] {
        assert!(is_alive(&stranger));
        processes::signal(stranger.pid, Signal::SIGKILL);
    }
}

#[tokio::test]
async fn orphans_of_a_killed_bridge_and_guard_are_killed_before_the_next_start() {
    let mut site = Site::new().await;
    site.settings(&[("a", &with_detached_process(site.folder(), "a"))]);
    site.start();
    let agent = site.until_state("a", "ready").await.pid.unwrap();
    let detached = process_in(&site, "a").await;
    site.kill_9_with_guard_of(agent).await;
    assert!(is_alive(&detached));
    site.start();
    site.until_state("a", "ready").await;
    assert!(!is_alive(&detached));
}

#[tokio::test]
async fn bridge_started_by_an_agent_of_a_killed_bridge_does_not_kill_itself() {
    let mut site = Site::new().await;
    let (folder, file) = (site.folder().display(), site.file());
    // The agent turns into a bridge with the same settings, once.
    let wait = format!("until rm {folder}/go 2>/dev/null; do sleep 0.05; done");
    let line = format!("DEMO & {wait}; exec {} run --config {}", program(), file.display());
    site.settings(&[("a", &shell(&line))]);
    site.start();
    let agent = Stat::read(site.until_state("a", "ready").await.pid.unwrap()).unwrap();
    site.kill_9_with_guard_of(agent.pid).await;
    std::fs::write(site.folder().join("go"), "").unwrap();
    site.until("a", |report| report.state == "ready" && report.pid != Some(agent.pid)).await;
    assert!(is_alive(&agent), "it is now the bridge");
}

#[tokio::test]
async fn bridge_as_pid_1_reaps_orphans_of_other_processes() {
    let is_root = nix::unistd::geteuid().is_root();
    let (make, enter): (&[_], &[_]) = match is_root {
        true => (&[], &[]),
        false => (&["--user", "--map-root-user"], &["--user", "--preserve-credentials"]),
    };
    let make = [&["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"], make].concat();
    let tried = Command::new(make[0]).args(&make[1..]).arg("true").output();
    if !tried.as_ref().is_ok_and(|output| output.status.success()) {
        return println!("skipped: this user cannot make a process namespace here: {tried:?}");
    }
    let mut site = Site::new().await;
    site.settings(&[("a", &with_detached_process(site.folder(), "a"))]);
    let outside = site.start_through(&make);
    site.until_state("a", "ready").await;
    let bridge = procfs::children(outside)[0];
    // Another process enters the namespace, starts a process and exits.
    let entered = Command::new("nsenter")
        .args(["--target", &bridge.to_string(), "--pid"])
        .args(enter)
        .args(["sh", "-c", "sleep 1000 &"])
        .stdout(Stdio::null())
        .status();
    assert!(entered.unwrap().success());
    let left = eventually(|| async {
        procfs::children(bridge).into_iter().filter_map(Stat::read).find(|stat| stat.name == "sleep")
    })
    .await;
    processes::signal(left.pid, Signal::SIGKILL);
    wait_until(|| async { Stat::read(left.pid).is_none_or(|stat| stat.start != left.start) }).await;
    processes::signal(bridge, Signal::SIGTERM);
    assert_eq!(site.ended().await, Some(0));
}
