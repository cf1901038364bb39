//! Stopping an agent: every process gets the stop signal once, and the grace period of the settings.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::processes;
use crate::support::site::{Site, shell};

#[tokio::test]
async fn agent_gets_the_whole_grace_period_even_if_its_shell_exits_at_once() {
    let lines = format!("{}\nstop_grace: 4s", shell("DEMO --ignore-sigterm & wait"));
    let site = Site::running(&[("a", &lines)]).await;
    site.until_state("a", "ready").await;
    let began = Instant::now();
    site.stop_agent("a").await;
    assert!(began.elapsed() >= Duration::from_secs(4), "{:?}", began.elapsed());
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn cleanup_commands_of_a_script_get_no_signal() {
    let mut site = Site::new().await;
    let done = site.folder().join("done");
    let line = format!("trap \"sleep 1 && echo > {}; exit 0\" TERM; DEMO & wait", done.display());
    site.settings(&[("a", &shell(&line))]);
    site.start();
    site.until_state("a", "ready").await;
    site.stop_agent("a").await;
    assert!(done.exists());
}

#[tokio::test]
async fn leftover_processes_of_a_script_are_killed_without_waiting_for_the_grace_period() {
    let mut site = Site::new().await;
    let folder = site.folder().display();
    // A shell that was just forked may miss a signal, so this one runs before the other exits.
    std::fs::write(site.folder().join("leave"), "echo > $1; exec sleep 1000").unwrap();
    let left =
        format!("sh {folder}/leave {folder}/there & until test -e {folder}/there; do sleep 0.01; done");
    let line = format!("trap \"{left}; exit 0\" TERM; DEMO & wait");
    site.settings(&[("a", &format!("{}\nstop_grace: 10m", shell(&line)))]);
    site.start();
    site.until_state("a", "ready").await;
    site.stop_agent("a").await;
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn advice_for_a_killed_agent_does_not_refer_to_its_output() {
    let site = Site::running(&[("a", &format!("{}\nrestart: never", shell("exec DEMO")))]).await;
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    processes::signal(pid, Signal::SIGKILL);
    let report = site.until_state("a", "failed").await;
    assert!(report.advice.unwrap().contains("memory ran out"));
}

#[tokio::test]
async fn process_that_execs_after_the_signal_is_signalled_again() {
    let mut site = Site::new().await;
    // A forked shell may lose the signal until it has executed its program.
    let late = "(trap : TERM; : > FOLDER/there; sleep 1; sleep 1; exec sleep 1000) & ";
    let late = late.replace("FOLDER", &site.folder().display().to_string());
    let lines =
        shell(&format!("{late} until [ -e {0}/there ]; do :; done; exec DEMO", site.folder().display()));
    site.settings(&[("a", &format!("{lines}\nstop_grace: 10m"))]);
    site.start();
    site.until_state("a", "ready").await;
    site.stop_agent("a").await;
    assert_eq!(site.processes(), Vec::<i32>::new());
}

#[tokio::test]
async fn agent_killed_by_a_real_time_signal_is_restarted_and_leaves_no_process() {
    let site =
        Site::running(&[("a", &format!("{}\nrestart: on-failure", shell("sleep 1000 & exec DEMO")))]).await;
    let pid = site.until_state("a", "ready").await.pid.unwrap();
    let before = site.processes();
    let signalled = std::process::Command::new("kill").args(["-34", &pid.to_string()]).status().unwrap();
    assert!(signalled.success());
    let report = site.until_restarted("a", 1).await;
    assert_eq!(report.last_exit.unwrap().how, "exited with an unknown status");
    let left: Vec<_> = site.processes().into_iter().filter(|pid| before.contains(pid)).collect();
    assert_eq!(left, Vec::<i32>::new());
}
