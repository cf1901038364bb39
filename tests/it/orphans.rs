//! Processes that lose their parent come to the bridge: an agent's are ended, all are reaped.

use std::path::Path;
use std::process::{Command, Stdio};

use a2a_bridge::internal::procfs::{self, Stat};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::eventually::eventually;
use crate::support::site::{SOON, Site, program, shell};

/// An agent with a process that has left its parent, its session and its environment behind. Its pid
/// is in a file called as the agent.
fn hiding(folder: &Path, agent: &str) -> String {
    let folder = folder.display();
    std::fs::write(format!("{folder}/hide"), "echo $$ > $1; exec sleep 1000").unwrap();
    shell(&format!("(setsid env -i sh {folder}/hide {folder}/{agent} &) ; DEMO"))
}

async fn process_in(site: &Site, file: &str) -> Stat {
    let path = site.folder().join(file);
    eventually(SOON, || async {
        Stat::read(std::fs::read_to_string(&path).ok()?.trim().parse().ok()?)
            .filter(|stat| stat.name == "sleep")
    })
    .await
}

fn is_alive(process: &Stat) -> bool {
    Stat::read(process.pid).is_some_and(|stat| stat.start == process.start && !stat.has_exited())
}

#[tokio::test]
async fn what_hides_from_a_guard_that_is_killed_is_ended_and_nothing_else_is() {
    let mut site = Site::new().await;
    site.settings(&[("a", &hiding(site.folder(), "a")), ("b", &hiding(site.folder(), "b"))]);
    // Two that are none of the agents', and one of them starts another when there is an agent.
    let sidecars = "sleep 1000 & echo $! > FOLDER/before; \
        (until test -e FOLDER/go; do sleep 0.05; done; (sleep 1000 & echo $! > FOLDER/later); exec sleep 1000) & \
        echo $! > FOLDER/sidecar; exec \"$@\"";
    let sidecars = sidecars.replace("FOLDER", &site.folder().display().to_string());
    let bridge = site.start_by(&["sh", "-c", &sidecars, "sh"]);
    let guard = Stat::read(site.until_state("a", "ready").await.pid.unwrap()).unwrap().parent;
    let other = site.until_state("b", "ready").await;
    let (hidden, others) = (process_in(&site, "a").await, process_in(&site, "b").await);
    assert_eq!(hidden.parent, guard);
    std::fs::write(site.folder().join("go"), "").unwrap();
    let before = process_in(&site, "before").await;
    let later = process_in(&site, "later").await;
    let sidecar = process_in(&site, "sidecar").await;
    let is_orphan = || Stat::read(later.pid).is_some_and(|stat| stat.parent == bridge);
    eventually(SOON, || async { is_orphan().then_some(()) }).await;
    kill(Pid::from_raw(guard), Signal::SIGKILL).unwrap();
    site.until("a", SOON, |report| report.state == "ready" && report.restarts == 1).await;
    assert!(!is_alive(&hidden));
    assert!(is_alive(&others), "another agent's");
    assert_eq!(site.show("b").await.unwrap().pid, other.pid);
    assert!(is_alive(&before), "a child from before there was an agent");
    assert!(is_alive(&later), "an orphan of somebody else");
    assert_eq!(site.stop().await, Some(0));
    assert!(!is_alive(&others));
    for stranger in [before, later, sidecar] {
        assert!(is_alive(&stranger));
        kill(Pid::from_raw(stranger.pid), Signal::SIGKILL).unwrap();
    }
}

#[tokio::test]
async fn what_hides_from_bridge_and_guard_that_are_killed_together_is_ended_before_the_next_start() {
    let mut site = Site::new().await;
    site.settings(&[("a", &hiding(site.folder(), "a"))]);
    site.start();
    let guard = Stat::read(site.until_state("a", "ready").await.pid.unwrap()).unwrap().parent;
    let hidden = process_in(&site, "a").await;
    // Stopped first, or one of them would see the other die.
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        kill(Pid::from_raw(guard), signal).unwrap();
        site.signal(signal);
    }
    site.ended().await;
    assert!(is_alive(&hidden));
    site.start();
    site.until_state("a", "ready").await;
    assert!(!is_alive(&hidden));
}

#[tokio::test]
async fn a_bridge_that_an_agent_of_the_dead_one_has_started_does_not_end_itself() {
    let mut site = Site::new().await;
    let (folder, file) = (site.folder().display(), site.file());
    // The agent becomes a bridge of the same settings, once.
    let wait = format!("until rm {folder}/go 2>/dev/null; do sleep 0.05; done");
    let line = format!("DEMO & {wait}; exec {} run --config {}", program(), file.display());
    site.settings(&[("a", &shell(&line))]);
    site.start();
    let agent = Stat::read(site.until_state("a", "ready").await.pid.unwrap()).unwrap();
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        kill(Pid::from_raw(agent.parent), signal).unwrap();
        site.signal(signal);
    }
    site.ended().await;
    std::fs::write(site.folder().join("go"), "").unwrap();
    site.until("a", SOON, |report| report.state == "ready" && report.pid != Some(agent.pid)).await;
    assert!(is_alive(&agent), "it is the bridge now");
}

#[tokio::test]
async fn the_first_process_of_a_container_reaps_what_others_leave_there() {
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
    site.settings(&[("a", &hiding(site.folder(), "a"))]);
    let outside = site.start_by(&make);
    site.until_state("a", "ready").await;
    let bridge = procfs::children(outside)[0];
    // Somebody comes in, starts something and leaves.
    let entered = Command::new("nsenter")
        .args(["--target", &bridge.to_string(), "--pid"])
        .args(enter)
        .args(["sh", "-c", "sleep 1000 &"])
        .stdout(Stdio::null())
        .status();
    assert!(entered.unwrap().success());
    let left = eventually(SOON, || async {
        procfs::children(bridge).into_iter().filter_map(Stat::read).find(|stat| stat.name == "sleep")
    })
    .await;
    kill(Pid::from_raw(left.pid), Signal::SIGKILL).unwrap();
    eventually(SOON, || async {
        Stat::read(left.pid).is_none_or(|stat| stat.start != left.start).then_some(())
    })
    .await;
    kill(Pid::from_raw(bridge), Signal::SIGTERM).unwrap();
    assert_eq!(site.ended().await, Some(0));
}
