//! Children without a guard: each leads a process group.

use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::child::{
    ChildCommand, ChildState, Exit, Limits, ProcessHost, SpawnError, Spec, configure, environment, pid_of,
    read_output,
};
use super::credentials::{Account, Resolved};
use super::output::Output;
use crate::background::OnPanic;

/// Returns the pid of the child, and no guard.
pub(super) fn start(
    spec: &Spec,
    host: &ProcessHost,
    output: &Output,
    state: watch::Sender<ChildState>,
    commands: mpsc::Receiver<ChildCommand>,
) -> Result<(i32, Option<i32>), SpawnError> {
    if spec.account != Account::default() || spec.limits != Limits::default() {
        return Err(SpawnError::Account("`user`, `group` and `limits` of an agent need Linux".into()));
    }
    let (program, arguments) = spec.command.split_first().ok_or(SpawnError::Empty)?;
    let mut command = tokio::process::Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(environment(spec, host, &Resolved::default()))
        .stdin(Stdio::null());
    configure(&mut command, spec);
    let mut child = command.spawn().map_err(|source| SpawnError::new(program, source))?;
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
        let spec = Spec::example(&["true"]);
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
