//! A running child and everything it started: how it starts, how it ended, how it is ended.
//!
//! A child is not killed on drop, because drop cannot wait: whoever owns one calls [`Child::stop`].

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::orphans::{MARK, Records};
use super::output::{Output, Stream};
use super::process_group;
use crate::tasks::{OnFailure, Tasks};

/// Variables of the bridge that a child gets too; names ending in `*` are beginnings.
const INHERITED: [&str; 7] = ["PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR"];
/// How long after its grace a child may take to be gone: not even SIGKILL ends what hangs in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub struct Spec {
    pub agent: Arc<str>,
    pub command: Vec<String>,
    /// Where; the bridge's own folder if not said.
    pub working_dir: Option<PathBuf>,
    /// Variables beside the inherited ones.
    pub env: BTreeMap<String, SecretString>,
    /// What asks it to end.
    pub stop_signal: Signal,
}

/// Where children run: what they need of the bridge.
#[derive(Debug, Clone, Default)]
pub struct Host {
    pub tasks: Tasks,
    /// Remembers them beyond the bridge's own life.
    pub records: Option<Arc<Records>>,
}

/// Why a child did not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// There is nothing to run.
    #[error("the command is empty")]
    Empty,
    #[error("command not found: `{program}`")]
    NotFound { program: String },
    /// The program is there and may not be run.
    #[error("permission denied: `{program}` may not be executed")]
    Denied {
        /// What was to be started.
        program: String,
    },
    #[error("working_dir {} does not exist", .0.display())]
    NoSuchDir(PathBuf),
    #[error("cannot start `{program}`")]
    Other {
        /// What was to be started.
        program: String,
        #[source]
        source: io::Error,
    },
}

impl SpawnError {
    fn new(program: &str, source: io::Error) -> Self {
        let program = program.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { program },
            io::ErrorKind::PermissionDenied => Self::Denied { program },
            _ => Self::Other { program, source },
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// As the system reported it.
    Known(ExitStatus),
    /// Its guard was killed, and it with it.
    WithGuard,
    /// Nobody could read how it ended. That is no success.
    Unknown,
}

impl Exit {
    /// Whether it left with exit code 0.
    pub fn is_success(self) -> bool {
        matches!(self, Self::Known(status) if status.success())
    }

    /// The code it exited with, unless a signal ended it.
    pub fn code(self) -> Option<i32> {
        match self {
            Self::Known(status) => status.code(),
            Self::WithGuard | Self::Unknown => None,
        }
    }

    /// Whether it was killed from outside, without a chance to say anything.
    pub fn is_killed(self) -> bool {
        matches!(self, Self::Known(status) if status.signal() == Some(Signal::SIGKILL as i32))
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self {
            Self::Known(status) => status,
            Self::WithGuard => return f.write_str("was ended after its guard process was killed"),
            Self::Unknown => return f.write_str("ended with an unknown exit status"),
        };
        match (status.code(), status.signal()) {
            (Some(code), _) => write!(f, "exited with code {code}"),
            (None, Some(signal)) => match Signal::try_from(signal) {
                Ok(name) => write!(f, "was killed by {name}"),
                Err(_) => write!(f, "was killed by signal {signal}"),
            },
            (None, None) => f.write_str("ended"),
        }
    }
}

/// What a child's handle is state_sender.
#[derive(Debug, Clone, Copy)]
pub(super) enum ChildCommand {
    Stop(Duration),
    Kill,
}

/// How far a child has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChildState {
    Running,
    /// The child itself has ended; others below it may not have.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only a guard tells the two ends apart"))]
    Exited(Exit),
    Gone(Exit),
}

/// What both ways to run a child give back.
pub(super) struct SpawnedChild {
    pub(super) pid: i32,
    pub(super) guard: Option<i32>,
    pub(super) state: watch::Receiver<ChildState>,
    pub(super) commands: mpsc::Sender<ChildCommand>,
}

#[derive(Debug)]
pub struct Child {
    agent: Arc<str>,
    pid: i32,
    guard: Option<i32>,
    state: watch::Receiver<ChildState>,
    commands: mpsc::Sender<ChildCommand>,
    records: Option<Arc<Records>>,
}

impl Child {
    /// Starts a child; what it writes goes to `output`.
    pub async fn spawn(spec: &Spec, host: &Host, output: &Output) -> Result<Self, SpawnError> {
        let program = spec.command.first().ok_or(SpawnError::Empty)?;
        if let Some(dir) = spec.working_dir.as_ref().filter(|dir| !dir.is_dir()) {
            return Err(SpawnError::NoSuchDir(dir.clone()));
        }
        #[cfg(target_os = "linux")]
        let started = match super::guard::program() {
            Some(guard) => super::guarded::start(guard, spec, host, output).await,
            None => process_group::start(spec, host, output),
        };
        #[cfg(not(target_os = "linux"))]
        let started = process_group::start(spec, host, output);
        let SpawnedChild { pid, guard, state, commands } =
            started.map_err(|source| SpawnError::new(program, source))?;
        if let Some(records) = &host.records {
            records.add(&spec.agent, guard, pid);
        }
        Ok(Self {
            agent: Arc::clone(&spec.agent),
            pid,
            guard,
            state,
            commands,
            records: host.records.clone(),
        })
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Its guard's process id, where there is one: everything that belongs to the child is below it.
    pub fn guard(&self) -> Option<i32> {
        self.guard
    }

    /// Waits until the child itself ends. Cancel-safe.
    pub async fn wait(&self) -> Exit {
        let mut state = self.state.clone();
        let ended = state.wait_for(|state| *state != ChildState::Running).await;
        match ended.as_deref() {
            Ok(ChildState::Exited(exit) | ChildState::Gone(exit)) => *exit,
            // The handle's task has panicked.
            Ok(ChildState::Running) | Err(_) => Exit::Unknown,
        }
    }

    /// Ends the child and everything it started: the stop signal, and SIGKILL when `grace` is over or
    /// `skip_grace` says so.
    pub async fn stop(self, grace: Duration, skip_grace: &CancellationToken) -> Exit {
        let mut state = self.state.clone();
        let gone = state.wait_for(|state| matches!(state, ChildState::Gone(_)));
        let _ = self.commands.send(ChildCommand::Stop(grace)).await;
        let killed = async {
            skip_grace.cancelled().await;
            let _ = self.commands.send(ChildCommand::Kill).await;
            std::future::pending::<()>().await;
        };
        let in_time = tokio::select! {
            gone = gone => gone.is_ok(),
            () = killed => false,
            () = tokio::time::sleep(grace + KILL_TIMEOUT) => false,
        };
        if in_time {
            if let Some(records) = &self.records {
                records.remove(&self.agent);
            }
        } else {
            tracing::error!(agent = %self.agent, pid = self.pid, "processes of the agent do not end, not even by SIGKILL");
        }
        match *self.state.borrow() {
            ChildState::Exited(exit) | ChildState::Gone(exit) => exit,
            ChildState::Running => Exit::Unknown,
        }
    }
}

/// Gives a command the child's surroundings: variables, folder, pipes, a process group of its own.
pub(super) fn configure(command: &mut tokio::process::Command, spec: &Spec, host: &Host) {
    command
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_inherited)))
        .envs(spec.env.iter().map(|(name, value)| (name, value.expose_secret())))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    if let Some(records) = &host.records {
        command.env(MARK, records.mark(&spec.agent));
    }
    if let Some(dir) = &spec.working_dir {
        command.current_dir(dir);
    }
}

/// Reads both pipes from now on.
pub(super) fn read_output(child: &mut tokio::process::Child, host: &Host, output: &Output) {
    if let Some(pipe) = child.stdout.take() {
        let pump = output.pump(pipe, Stream::Stdout);
        host.tasks.spawn("agent stdout", OnFailure::Log, pump);
    }
    if let Some(pipe) = child.stderr.take() {
        let pump = output.pump(pipe, Stream::Stderr);
        host.tasks.spawn("agent stderr", OnFailure::Log, pump);
    }
}

pub(super) fn pid_of(child: &tokio::process::Child) -> i32 {
    // A child that was just spawned and not yet waited for has an id.
    child.id().and_then(|id| i32::try_from(id).ok()).unwrap_or_default()
}

fn is_inherited(name: &str) -> bool {
    INHERITED.iter().any(|known| match known.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == *known,
    })
}
