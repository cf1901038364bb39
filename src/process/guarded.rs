//! Children under a guard: the bridge's side.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};

use super::child::{
    ChildCommand, ChildState, Exit, Host, SpawnedChild, Spec, configure, pid_of, read_output,
};
use super::guard;
use super::output::Output;
use super::process_tag::ProcessTag;
use super::reaper::{self, GuardedProcesses};
use crate::background::OnPanic;

pub(super) async fn start(
    program: &Path,
    spec: &Spec,
    host: &Host,
    output: &Output,
) -> io::Result<SpawnedChild> {
    let (ours, theirs) = guard::socket_pair()?;
    let mut command = std::process::Command::new(program);
    command
        .arg0(format!("a2a-bridge: guard of {}", spec.agent))
        .arg(guard::GUARD_ARGUMENT)
        .arg(spec.stop_signal.as_str())
        .args(&spec.command);
    let mut command = tokio::process::Command::from(command);
    configure(&mut command, spec, host);
    command.stdin(Stdio::from(theirs));
    let mut child = reaper::spawn(&mut command)?;
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
            let number = number.parse().unwrap_or_default();
            reaper::wait(&mut child).await;
            return Err(io::Error::from_raw_os_error(number));
        }
        _ => None,
    };
    let Some(pid) = pid else {
        reaper::wait(&mut child).await;
        reaper::kill_orphans(&guarded).await;
        return Err(io::Error::other("the guard process exited before it reported a start"));
    };
    let (state_sender, state) = watch::channel(ChildState::Running);
    let (sender, received) = mpsc::channel(4);
    let handle = GuardHandle { agent: Arc::clone(&spec.agent), child, guarded, state_sender, commands };
    host.tasks.spawn("agent guard", OnPanic::StopBridge, handle.run(reports, received));
    Ok(SpawnedChild { pid, guard: Some(guard_pid), state, commands: sender })
}

struct GuardHandle {
    agent: Arc<str>,
    child: tokio::process::Child,
    guarded: GuardedProcesses,
    state_sender: watch::Sender<ChildState>,
    commands: OwnedWriteHalf,
}

impl GuardHandle {
    async fn run(
        mut self,
        mut reports: Lines<BufReader<OwnedReadHalf>>,
        mut received: mpsc::Receiver<ChildCommand>,
    ) {
        let mut exit = None;
        let mut open = true;
        loop {
            tokio::select! {
                report = reports.next_line() => {
                    let Ok(Some(report)) = report else { break };
                    if let Some(status) = report.strip_prefix("exited ").map(guard::read_status) {
                        exit = Some(status);
                        self.state_sender.send_replace(ChildState::Exited(status));
                    }
                }
                command = received.recv(), if open => {
                    let line = match command {
                        Some(ChildCommand::Stop(grace)) => format!("stop {}\n", grace.as_millis()),
                        Some(ChildCommand::Kill) => "kill\n".to_owned(),
                        None => {
                            open = false;
                            continue;
                        }
                    };
                    // If the guard has exited, its reports end too.
                    let _ = self.commands.write_all(line.as_bytes()).await;
                }
            }
        }
        let orderly = reaper::wait(&mut self.child).await;
        if !orderly {
            tracing::warn!(agent = %self.agent, "a guard process was killed; killing the processes it guarded");
            reaper::kill_orphans(&self.guarded).await;
        }
        let exit = if orderly { exit.unwrap_or(Exit::Unknown) } else { Exit::WithGuard };
        self.state_sender.send_replace(ChildState::Gone(exit));
    }
}
