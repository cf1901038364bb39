//! Children without a guard: each leads a process group.

use std::io;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::child::{ChildCommand, ChildState, Exit, ProcessHost, Spec, configure, pid_of, read_output};
use super::output::Output;
use crate::background::OnPanic;

/// Returns the pid of the child, and no guard.
pub(super) fn start(
    spec: &Spec,
    host: &ProcessHost,
    output: &Output,
    state: watch::Sender<ChildState>,
    commands: mpsc::Receiver<ChildCommand>,
) -> io::Result<(i32, Option<i32>)> {
    let (program, arguments) =
        spec.command.split_first().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut command = tokio::process::Command::new(program);
    command.args(arguments);
    configure(&mut command, spec, host);
    let mut child = command.spawn()?;
    read_output(&mut child, host, output);
    let pid = pid_of(&child);
    let watching = supervise_group(child, Pid::from_raw(pid), spec.stop_signal, state, commands);
    host.tasks.spawn("agent process", OnPanic::StopBridge, watching);
    Ok((pid, None))
}

async fn supervise_group(
    mut child: tokio::process::Child,
    group: Pid,
    stop_signal: Signal,
    state: watch::Sender<ChildState>,
    mut commands: mpsc::Receiver<ChildCommand>,
) {
    let far = Duration::from_secs(24 * 60 * 60 * 365);
    let mut kill_at = Instant::now() + far;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            Some(command) = commands.recv() => match command {
                ChildCommand::Stop(grace) => {
                    signal(group, stop_signal);
                    signal(group, Signal::SIGCONT);
                    kill_at = Instant::now() + grace;
                }
                ChildCommand::Kill => kill_at = Instant::now(),
            },
            () = tokio::time::sleep_until(kill_at) => {
                signal(group, Signal::SIGKILL);
                kill_at = Instant::now() + far;
            }
        }
    };
    // Fails only if another process has reaped the child; then the status is unknown.
    let exit = status.map_or(Exit::Unknown, Exit::Known);
    // Other members of the group may still run.
    signal(group, Signal::SIGKILL);
    state.send_replace(ChildState::TreeExited(exit));
}

fn signal(group: Pid, signal: Signal) {
    // 0 and 1 would address our own group and all processes.
    if group.as_raw() > 1 {
        // ESRCH: the group is empty already.
        let _ = killpg(group, signal);
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::wait::waitpid;

    use super::*;
    use crate::secrets::Secrets;

    #[tokio::test]
    async fn an_exit_status_that_another_reader_took_is_unknown_and_no_success() {
        let spec = Spec {
            agent: "a".into(),
            command: vec!["true".into()],
            working_dir: None,
            env: std::collections::BTreeMap::new(),
            stop_signal: Signal::SIGTERM,
        };
        let output = Output::new("a".into(), Secrets::default());
        // No await between spawn and wait, so this reads the status first.
        let (state_sender, mut state) = watch::channel(ChildState::Running);
        let (_commands, received) = mpsc::channel(1);
        let (pid, _) = start(&spec, &ProcessHost::default(), &output, state_sender, received).unwrap();
        waitpid(Pid::from_raw(pid), None).unwrap();
        let exited = state.wait_for(|state| *state != ChildState::Running).await.unwrap();
        let ChildState::TreeExited(exit) = *exited else { panic!("{exited:?}") };
        assert_eq!(exit, Exit::Unknown);
        assert!(!exit.is_success());
    }
}
