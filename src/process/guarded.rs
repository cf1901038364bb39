//! Children under a guard: the bridge's side.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::child::{
    ChildCommand, ChildState, Exit, ProcessHost, SpawnError, Spec, configure, environment, pid_of,
    read_output,
};
use super::credentials::Resolved;
use super::guard;
use super::launch::{Launch, LaunchError, ResourceLimits};
use super::orphans::MARK;
use super::output::Output;
use super::process_tag::ProcessTag;
use super::reaper::{GuardedProcesses, Reaper};
use crate::background::OnPanic;

/// Shown by `ps`. Without the name of the agent, so that `pkill -f` with that name does not match.
const GUARD_NAME: &str = "a2a-bridge";
/// How long a guard and its launcher have to start the command. Any process of the same user can suspend them.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a guard has, after a grace period, to kill its descendants before it is killed itself.
const GUARD_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the pids of the child and of its guard.
pub(super) async fn start(
    reaper: &Arc<Reaper>,
    spec: &Spec,
    host: &ProcessHost,
    output: &Output,
    state: watch::Sender<ChildState>,
    received: mpsc::Receiver<ChildCommand>,
) -> Result<(i32, Option<i32>), SpawnError> {
    let failed = |source| SpawnError::new(spec.program(), source);
    let mut launch = launch(spec, host).await?;
    let cgroup = host.cgroups.as_ref().and_then(|cgroups| cgroups.create(spec));
    if spec.limits.cpu.is_some() && cgroup.is_none() {
        tracing::warn!(agent = %spec.agent, "`limits.cpu` has no effect: no cgroup is delegated to the bridge");
    }
    if let Some(cgroup) = &cgroup {
        launch.limits = launch.limits.beside(cgroup);
    }
    launch.cgroup = cgroup.as_ref().map(|cgroup| cgroup.path().to_owned());
    let launch = serde_json::to_string(&launch).map_err(|error| failed(error.into()))?;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    ours.set_nonblocking(true).map_err(failed)?;
    let mut command = std::process::Command::new(&reaper.guard_program);
    command.arg0(GUARD_NAME).arg(guard::GUARD_ARGUMENT).env_clear();
    let mut command = tokio::process::Command::from(command);
    configure(&mut command, spec);
    let mark = host.records.as_ref().map(|records| records.mark(&spec.agent));
    command.stdin(Stdio::from(OwnedFd::from(theirs))).envs(mark.iter().map(|mark| (MARK, mark)));
    let mut child = reaper.spawn(&mut command).map_err(failed)?;
    // The command holds a copy of the guard's socket; with it, the exit of the guard would go unnoticed.
    drop(command);
    read_output(&mut child, host, output);
    let guard_pid = pid_of(&child);
    // The guard exists until it is waited for.
    let guarded = GuardedProcesses { tag: ProcessTag::of(guard_pid), mark, cgroup };
    let (reports, mut commands) = UnixStream::from_std(ours).map_err(failed)?.into_split();
    let mut reports = BufReader::new(reports).lines();
    let started = async {
        // If the guard has exited, its reports end too.
        let _ = commands.write_all(format!("{launch}\n").as_bytes()).await;
        reports.next_line().await
    };
    let first = match tokio::time::timeout(START_TIMEOUT, started).await {
        Ok(Ok(first)) => first.unwrap_or_default(),
        unread => {
            // It is not reaped yet, so the pid is its own.
            let _ = kill(Pid::from_raw(guard_pid), Signal::SIGKILL);
            reaper.wait(&mut child).await;
            guarded.end(reaper, false).await;
            return Err(failed(match unread {
                Ok(Err(error)) => error,
                Ok(Ok(_)) | Err(_) => {
                    let text = format!(
                        "the guard process did not report a start within {} s",
                        START_TIMEOUT.as_secs()
                    );
                    io::Error::new(io::ErrorKind::TimedOut, text)
                }
            }));
        }
    };
    let pid = match first.split_once(' ') {
        Some(("started", pid)) => pid.parse().ok(),
        Some(("failed", error)) => {
            let has_finished = reaper.wait(&mut child).await;
            guarded.end(reaper, has_finished).await;
            return Err(match LaunchError::parse(error) {
                Some(error) => SpawnError::launch(spec, error),
                None => failed(io::Error::other("the guard process reported an unknown error")),
            });
        }
        _ => None,
    };
    let Some(pid) = pid else {
        reaper.wait(&mut child).await;
        guarded.end(reaper, false).await;
        return Err(failed(io::Error::other("the guard process exited before it reported a start")));
    };
    let (agent, reaper) = (Arc::clone(&spec.agent), Arc::clone(reaper));
    host.tasks.spawn("agent guard", OnPanic::StopBridge, async move {
        let guard = Pid::from_raw(guard_pid);
        let mut exit = relay(reports, commands, received, &state, guard).await;
        let has_finished = reaper.wait(&mut child).await;
        if !has_finished {
            tracing::warn!(%agent, "a guard process was killed; killing the processes it guarded");
            exit = Exit::WithGuard;
        }
        guarded.end(&reaper, has_finished).await;
        state.send_replace(ChildState::TreeExited(exit));
    });
    Ok((pid, Some(guard_pid)))
}

/// How to launch the child, without a cgroup.
async fn launch(spec: &Spec, host: &ProcessHost) -> Result<Launch, SpawnError> {
    let account = spec.account.clone();
    let resolved = tokio::task::spawn_blocking(move || account.resolve()).await;
    let resolved = resolved.unwrap_or_else(|_| Err("the lookup of the user failed".into()));
    let resolved: Resolved = resolved.map_err(SpawnError::Account)?;
    Ok(Launch {
        command: spec.command.clone(),
        env: environment(spec, host, &resolved),
        stop_signal: spec.stop_signal.as_str().to_owned(),
        credentials: resolved.credentials,
        limits: ResourceLimits {
            memory: spec.limits.memory,
            files: spec.limits.files,
            soft_files: host.soft_files,
            processes: spec.limits.processes,
        },
        cgroup: None,
    })
}

/// Sends commands to the guard and receives its reports until it exits. Returns the exit of the child. Kills a guard that
/// does not obey.
async fn relay(
    mut reports: Lines<BufReader<OwnedReadHalf>>,
    mut commands: OwnedWriteHalf,
    mut received: mpsc::Receiver<ChildCommand>,
    state: &watch::Sender<ChildState>,
    guard: Pid,
) -> Exit {
    let mut exit = Exit::Unknown;
    let mut kill_at: Option<Instant> = None;
    loop {
        tokio::select! {
            report = reports.next_line() => {
                let Ok(Some(report)) = report else { return exit };
                if let Some(status) = report.strip_prefix("exited ") {
                    exit = guard::read_status(status);
                    state.send_replace(ChildState::Exited(exit));
                }
            }
            Some(command) = received.recv() => {
                let (line, grace) = match command {
                    ChildCommand::Stop(grace) => (format!("stop {}\n", grace.as_millis()), grace),
                    ChildCommand::Kill => ("kill\n".to_owned(), Duration::ZERO),
                };
                // If the guard has exited, its reports end too.
                let _ = commands.write_all(line.as_bytes()).await;
                // A suspended guard reads no command. It is not reaped yet, so the pid is its own.
                let _ = kill(guard, Signal::SIGCONT);
                let limit = Instant::now() + grace + GUARD_TIMEOUT;
                kill_at = Some(kill_at.map_or(limit, |at| at.min(limit)));
            }
            Some(()) = OptionFuture::from(kill_at.map(tokio::time::sleep_until)) => {
                kill_at = None;
                let _ = kill(guard, Signal::SIGKILL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::process::cgroup::Cgroups;
    use crate::process::child::{Child, Limits};
    use crate::process::procfs::{self, Stat};
    use crate::secrets::Secrets;

    /// Time advances while nothing else happens.
    #[tokio::test(start_paused = true)]
    async fn a_guard_that_is_suspended_before_its_report_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("guard");
        std::fs::write(&program, "#!/bin/sh\nkill -STOP $$\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (spec, host) = (Spec::example(&["true"]), ProcessHost::guarded(&program));
        let error =
            Child::spawn(&spec, &host, &Output::new("a".into(), Secrets::default())).await.unwrap_err();
        assert!(
            matches!(&error, SpawnError::Other { source, .. } if source.kind() == io::ErrorKind::TimedOut)
        );
        let own = Pid::this().as_raw();
        let is_left = |pid: &i32| Stat::read(*pid).is_some_and(|stat| stat.name == "guard");
        assert_eq!(procfs::children(own).into_iter().find(is_left), None);
    }

    #[test]
    fn a_limit_of_the_cgroup_is_not_a_limit_of_each_process_too() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        let cgroups = Cgroups::at(dir.path().to_owned()).unwrap();
        let limits = Limits { memory: Some(64 << 20), cpu: None, files: Some(9), processes: Some(50) };
        let cgroup = cgroups.create(&Spec { limits, ..Spec::example(&["true"]) }).unwrap();
        let all = ResourceLimits {
            memory: limits.memory,
            files: limits.files,
            soft_files: None,
            processes: limits.processes,
        };
        assert_eq!(
            all.beside(&cgroup),
            ResourceLimits { memory: None, ..all },
            "there is no controller for processes"
        );
    }
}
