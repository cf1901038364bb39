//! Children under a guard: the bridge's side.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::process::Stdio;
use std::sync::Arc;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};

use super::child::{ChildCommand, ChildState, Exit, ProcessHost, Spec, configure, pid_of, read_output};
use super::guard;
use super::output::Output;
use super::process_tag::ProcessTag;
use super::reaper::{GuardedProcesses, Reaper};
use crate::background::OnPanic;

/// Returns the pids of the child and of its guard.
pub(super) async fn start(
    reaper: &Arc<Reaper>,
    spec: &Spec,
    host: &ProcessHost,
    output: &Output,
    state: watch::Sender<ChildState>,
    received: mpsc::Receiver<ChildCommand>,
) -> io::Result<(i32, Option<i32>)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    let mut command = std::process::Command::new(&reaper.guard_program);
    command
        .arg0(format!("a2a-bridge: guard of {}", spec.agent))
        .arg(guard::GUARD_ARGUMENT)
        .arg(spec.stop_signal.as_str())
        .args(&spec.command);
    let mut command = tokio::process::Command::from(command);
    configure(&mut command, spec, host);
    command.stdin(Stdio::from(OwnedFd::from(theirs)));
    let mut child = reaper.spawn(&mut command)?;
    // The command holds a copy of the guard's socket; with it, the exit of the guard would go unnoticed.
    drop(command);
    read_output(&mut child, host, output);
    let guard_pid = pid_of(&child);
    // The guard exists until it is waited for.
    let tag = ProcessTag::of(guard_pid);
    let mark = host.records.as_ref().map(|records| records.mark(&spec.agent));
    let guarded = GuardedProcesses { tag, mark };
    let (reports, commands) = UnixStream::from_std(ours)?.into_split();
    let mut reports = BufReader::new(reports).lines();
    let first = reports.next_line().await?.unwrap_or_default();
    let pid = match first.split_once(' ') {
        Some(("started", pid)) => pid.parse().ok(),
        Some(("failed", number)) => {
            reaper.wait(&mut child).await;
            return Err(io::Error::from_raw_os_error(number.parse().unwrap_or_default()));
        }
        _ => None,
    };
    let Some(pid) = pid else {
        reaper.wait(&mut child).await;
        guarded.kill().await;
        return Err(io::Error::other("the guard process exited before it reported a start"));
    };
    let (agent, reaper) = (Arc::clone(&spec.agent), Arc::clone(reaper));
    host.tasks.spawn("agent guard", OnPanic::StopBridge, async move {
        let mut exit = relay(reports, commands, received, &state).await;
        if !reaper.wait(&mut child).await {
            tracing::warn!(%agent, "a guard process was killed; killing the processes it guarded");
            guarded.kill().await;
            exit = Exit::WithGuard;
        }
        state.send_replace(ChildState::TreeExited(exit));
    });
    Ok((pid, Some(guard_pid)))
}

/// Sends commands to the guard and receives its reports until it exits. Returns the exit of the child.
async fn relay(
    mut reports: Lines<BufReader<OwnedReadHalf>>,
    mut commands: OwnedWriteHalf,
    mut received: mpsc::Receiver<ChildCommand>,
    state: &watch::Sender<ChildState>,
) -> Exit {
    let mut exit = Exit::Unknown;
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
                let line = match command {
                    ChildCommand::Stop(grace) => format!("stop {}\n", grace.as_millis()),
                    ChildCommand::Kill => "kill\n".to_owned(),
                };
                // If the guard has exited, its reports end too.
                let _ = commands.write_all(line.as_bytes()).await;
            }
        }
    }
}
