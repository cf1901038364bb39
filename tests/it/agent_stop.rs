//! How an agent is asked to end: all of it, once, with the grace that the settings give.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::site::{SOON, Site, shell};

#[tokio::test]
async fn an_agent_below_a_shell_that_ends_at_once_has_its_whole_grace() {
    let mut site = Site::new().await;
    let lines = format!("{}\nstop_grace: 4s", shell("DEMO --ignore-sigterm & wait"));
    site.settings(&[("a", &lines)]);
    site.start();
    site.until_state("a", "ready").await;
    let began = Instant::now();
    let (code, out, _) = site.run(&["agents", "stop", "a"]).await;
    assert_eq!(code, 0, "{out}");
    assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn what_a_script_runs_in_order_to_end_is_not_asked_to_end() {
    let mut site = Site::new().await;
    let done = site.folder().join("done");
    let line = format!("trap \"sleep 1 && echo > {}; exit 0\" TERM; DEMO & wait", done.display());
    site.settings(&[("a", &shell(&line))]);
    site.start();
    site.until_state("a", "ready").await;
    let (code, out, _) = site.run(&["agents", "stop", "a"]).await;
    assert_eq!(code, 0, "{out}");
    assert!(done.exists());
}

#[tokio::test]
async fn what_a_script_leaves_behind_when_it_ends_does_not_use_up_the_grace() {
    let mut site = Site::new().await;
    let folder = site.folder().display();
    // A shell that was just forked may miss a signal, so this one is seen to run before the other ends.
    std::fs::write(site.folder().join("leave"), "echo > $1; exec sleep 1000").unwrap();
    let left =
        format!("sh {folder}/leave {folder}/there & until test -e {folder}/there; do sleep 0.01; done");
    let line = format!("trap \"{left}; exit 0\" TERM; DEMO & wait");
    site.settings(&[("a", &format!("{}\nstop_grace: 10m", shell(&line)))]);
    site.start();
    site.until_state("a", "ready").await;
    let (code, out, _) = site.run(&["agents", "stop", "a"]).await;
    assert_eq!(code, 0, "{out}");
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn an_agent_that_was_killed_is_not_said_to_have_written_why() {
    let mut site = Site::new().await;
    site.settings(&[("a", &format!("{}\nrestart: never", shell("exec DEMO")))]);
    site.start();
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let report = site.until_state("a", "failed").await;
    assert!(report.advice.unwrap().contains("memory ran out"));
}

#[tokio::test]
async fn one_that_became_another_program_after_it_was_asked_is_asked_again() {
    let mut site = Site::new().await;
    // What a shell forks is a shell until it has become its program, and may lose the signal until then.
    let late = "(trap : TERM; : > FOLDER/there; sleep 1; sleep 1; exec sleep 1000) & ";
    let late = late.replace("FOLDER", &site.folder().display().to_string());
    let lines =
        shell(&format!("{late} until [ -e {0}/there ]; do :; done; exec DEMO", site.folder().display()));
    site.settings(&[("a", &format!("{lines}\nstop_grace: 10m"))]);
    site.start();
    site.until_state("a", "ready").await;
    let (code, out, _) = site.run(&["agents", "stop", "a"]).await;
    assert_eq!(code, 0, "{out}");
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn an_agent_ended_by_a_real_time_signal_is_restarted_and_leaves_nothing_behind() {
    let mut site = Site::new().await;
    site.settings(&[("a", &format!("{}\nrestart: on-failure", shell("sleep 1000 & exec DEMO")))]);
    site.start();
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    let before = site.processes();
    let signalled = std::process::Command::new("kill").args(["-34", &pid.to_string()]).status().unwrap();
    assert!(signalled.success());
    let report = site.until("a", SOON, |report| report.restarts == 1 && report.state == "ready").await;
    assert_eq!(report.last_exit.unwrap().how, "exited with an unknown status");
    let left: Vec<_> = site.processes().into_iter().filter(|pid| before.contains(pid)).collect();
    assert_eq!(left, Vec::<i32>::new());
}
