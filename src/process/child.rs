//! A child process and everything it starts.
//!
//! Dropping a [`Child`] does not kill the process, because drop cannot wait. The owner calls [`Child::stop`].

use std::collections::BTreeMap;
use std::ffi::OsString;
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

#[cfg(target_os = "linux")]
use super::cgroup::Cgroups;
use super::credentials::{Account, Resolved};
#[cfg(target_os = "linux")]
use super::launch::{LaunchError, LaunchStep};
use super::orphans::{MARK, ProcessRecords};
use super::output::{Output, Stream};
use super::process_group;
#[cfg(target_os = "linux")]
use super::reaper::Reaper;
use crate::background::{BackgroundTasks, OnPanic};

/// Variables that a child inherits from the bridge; `*` ends a prefix.
const INHERITED: [&str; 7] = ["PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR"];
/// Those of them that belong to the user of the bridge.
const OF_USER: [&str; 2] = ["HOME", "USER"];
/// How long a killed process may take to exit. A process that hangs in the kernel survives SIGKILL.
const TREE_KILL_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub struct Spec {
    pub agent: Arc<str>,
    pub command: Vec<String>,
    /// Defaults to the working directory of the bridge.
    pub working_dir: Option<PathBuf>,
    /// Variables in addition to the inherited ones.
    pub env: BTreeMap<String, SecretString>,
    pub stop_signal: Signal,
    pub account: Account,
    pub limits: Limits,
}

impl Spec {
    pub(super) fn program(&self) -> &str {
        self.command.first().map_or("", String::as_str)
    }
}

/// What an agent may use. In a cgroup, the limits apply to all its processes together; otherwise to each of them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Limits {
    /// In bytes.
    pub memory: Option<u64>,
    /// Number of processors; only in a cgroup.
    pub cpu: Option<f64>,
    pub files: Option<u64>,
    pub processes: Option<u64>,
}

/// What children need from the bridge.
#[derive(Debug, Clone, Default)]
pub struct ProcessHost {
    pub tasks: BackgroundTasks,
    pub records: Option<Arc<ProcessRecords>>,
    /// Starts a guard for each child; without it, children run in plain process groups.
    #[cfg(target_os = "linux")]
    pub(crate) reaper: Option<Arc<Reaper>>,
    /// The soft limit of open files for children, if the bridge has raised its own.
    pub soft_files: Option<u64>,
    /// One cgroup for each child, if the system has delegated one to the bridge.
    #[cfg(target_os = "linux")]
    pub(crate) cgroups: Option<Arc<Cgroups>>,
}

#[cfg(target_os = "linux")]
impl ProcessHost {
    /// Runs children under guards, which are instances of `program`.
    pub fn guarded(program: impl Into<PathBuf>) -> Self {
        Self { reaper: Some(Arc::new(Reaper::new(program.into(), false))), ..Self::default() }
    }

    /// As [`guarded`](Self::guarded), for a process that starts nothing but guards.
    pub(crate) fn only_guarded(program: impl Into<PathBuf>) -> Self {
        Self { reaper: Some(Arc::new(Reaper::new(program.into(), true))), ..Self::default() }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("the command is empty")]
    Empty,
    #[error("command not found: `{program}`")]
    NotFound { program: String },
    #[error("permission denied: `{program}` may not be executed")]
    Denied { program: String },
    #[error("working_dir {} does not exist", .0.display())]
    NoSuchDir(PathBuf),
    #[error("{0}")]
    Account(String),
    /// The bridge lacks the privilege to run processes of other users.
    #[error("cannot run `{program}` as another user")]
    User {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot run `{program}` without the capabilities of the bridge")]
    Capabilities {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot set the limits of `{program}`")]
    Limits {
        program: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot start `{program}`")]
    Other {
        program: String,
        #[source]
        source: io::Error,
    },
}

impl SpawnError {
    #[cfg(target_os = "linux")]
    pub(super) fn launch(spec: &Spec, LaunchError(step, source): LaunchError) -> Self {
        let program = spec.program().to_owned();
        match step {
            LaunchStep::Exec => Self::new(&program, source),
            LaunchStep::User => Self::User { program, source },
            LaunchStep::Capabilities => Self::Capabilities { program, source },
            LaunchStep::Limits | LaunchStep::Cgroup => Self::Limits { program, source },
        }
    }

    pub(super) fn new(program: &str, source: io::Error) -> Self {
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
    Known(ExitStatus),
    /// The child exited because its guard was killed.
    WithGuard,
    /// The exit status could not be read. This does not count as success.
    Unknown,
}

impl Exit {
    pub fn is_success(self) -> bool {
        matches!(self, Self::Known(status) if status.success())
    }

    /// The exit code; `None` if a signal killed the process.
    pub fn code(self) -> Option<i32> {
        match self {
            Self::Known(status) => status.code(),
            Self::WithGuard | Self::Unknown => None,
        }
    }

    pub fn is_killed(self) -> bool {
        matches!(self, Self::Known(status) if status.signal() == Some(Signal::SIGKILL as i32))
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = match self {
            Self::Known(status) => status,
            Self::WithGuard => return f.write_str("was killed after its guard process was killed"),
            Self::Unknown => return f.write_str("exited with an unknown status"),
        };
        match (status.code(), status.signal()) {
            (Some(code), _) => write!(f, "exited with code {code}"),
            (None, Some(signal)) => match Signal::try_from(signal) {
                Ok(name) => write!(f, "was killed by {name}"),
                Err(_) => write!(f, "was killed by signal {signal}"),
            },
            (None, None) => f.write_str("exited"),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum ChildCommand {
    Stop(Duration),
    Kill,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChildState {
    Running,
    /// The child itself has exited; its descendants may still run.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only a guard reports both exits"))]
    Exited(Exit),
    TreeExited(Exit),
}

#[derive(Debug)]
pub struct Child {
    agent: Arc<str>,
    pub pid: i32,
    /// The pid of the guard, which is the root of the child's process tree.
    pub guard: Option<i32>,
    state: watch::Receiver<ChildState>,
    commands: mpsc::Sender<ChildCommand>,
    records: Option<Arc<ProcessRecords>>,
}

impl Child {
    /// Spawns a child. Its output goes to `output`.
    pub async fn spawn(spec: &Spec, host: &ProcessHost, output: &Output) -> Result<Self, SpawnError> {
        if spec.command.is_empty() {
            return Err(SpawnError::Empty);
        }
        if let Some(dir) = spec.working_dir.as_ref().filter(|dir| !dir.is_dir()) {
            return Err(SpawnError::NoSuchDir(dir.clone()));
        }
        let (state_sender, state) = watch::channel(ChildState::Running);
        let (commands, received) = mpsc::channel(4);
        #[cfg(target_os = "linux")]
        let started = match &host.reaper {
            Some(reaper) => super::guarded::start(reaper, spec, host, output, state_sender, received).await,
            None => process_group::start(spec, host, output, state_sender, received),
        };
        #[cfg(not(target_os = "linux"))]
        let started = process_group::start(spec, host, output, state_sender, received);
        let (pid, guard) = started?;
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

    /// Waits until the child itself exits. Cancel-safe.
    pub async fn wait(&self) -> Exit {
        let mut state = self.state.clone();
        let exited = state.wait_for(|state| *state != ChildState::Running).await;
        match exited.as_deref() {
            Ok(ChildState::Exited(exit) | ChildState::TreeExited(exit)) => *exit,
            // The task that watches the child has panicked.
            Ok(ChildState::Running) | Err(_) => Exit::Unknown,
        }
    }

    /// Stops the child and its descendants: first the stop signal, then SIGKILL after `grace` or when
    /// `skip_grace` is cancelled.
    pub async fn stop(self, grace: Duration, skip_grace: &CancellationToken) -> Exit {
        let mut state = self.state.clone();
        let tree_exited = state.wait_for(|state| matches!(state, ChildState::TreeExited(_)));
        let _ = self.commands.send(ChildCommand::Stop(grace)).await;
        let killed = async {
            skip_grace.cancelled().await;
            let _ = self.commands.send(ChildCommand::Kill).await;
            std::future::pending::<()>().await;
        };
        let in_time = tokio::select! {
            exited = tree_exited => exited.is_ok(),
            () = killed => false,
            () = tokio::time::sleep(grace + TREE_KILL_TIMEOUT) => false,
        };
        if in_time {
            if let Some(records) = &self.records {
                records.remove(&self.agent);
            }
        } else {
            tracing::error!(agent = %self.agent, pid = self.pid, "processes of the agent are still running after SIGKILL");
        }
        match *self.state.borrow() {
            ChildState::Exited(exit) | ChildState::TreeExited(exit) => exit,
            ChildState::Running => Exit::Unknown,
        }
    }
}

/// Sets the working directory, output pipes and process group of a child.
pub(super) fn configure(command: &mut tokio::process::Command, spec: &Spec) {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    if let Some(dir) = &spec.working_dir {
        command.current_dir(dir);
    }
}

/// The environment of a child.
pub(super) fn environment(spec: &Spec, host: &ProcessHost, account: &Resolved) -> Vec<(OsString, OsString)> {
    let is_foreign = |name: &str| account.is_other_user && OF_USER.contains(&name);
    let inherited = std::env::vars_os()
        .filter(|(name, _)| name.to_str().is_some_and(|name| is_inherited(name) && !is_foreign(name)));
    let user = account.env.iter().cloned();
    let mark = host.records.iter().map(|records| (MARK.into(), records.mark(&spec.agent).into()));
    let own = spec.env.iter().map(|(name, value)| (name.into(), value.expose_secret().into()));
    // Later ones replace earlier ones.
    let all: BTreeMap<_, _> = inherited.chain(user).chain(own).chain(mark).collect();
    all.into_iter().collect()
}

pub(super) fn read_output(child: &mut tokio::process::Child, host: &ProcessHost, output: &Output) {
    if let Some(pipe) = child.stdout.take() {
        let pump = output.pump(pipe, Stream::Stdout);
        host.tasks.spawn("agent stdout", OnPanic::Log, pump);
    }
    if let Some(pipe) = child.stderr.take() {
        let pump = output.pump(pipe, Stream::Stderr);
        host.tasks.spawn("agent stderr", OnPanic::Log, pump);
    }
}

pub(super) fn pid_of(child: &tokio::process::Child) -> i32 {
    // A child that has not been waited for has a pid.
    child.id().and_then(|id| i32::try_from(id).ok()).unwrap_or_default()
}

/// Whether children inherit this variable from the bridge.
pub(crate) fn is_inherited(name: &str) -> bool {
    INHERITED.iter().any(|known| match known.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == *known,
    })
}

#[cfg(test)]
impl Spec {
    /// A child with this command and nothing else.
    pub(super) fn example(command: &[&str]) -> Self {
        Self {
            agent: "a".into(),
            command: command.iter().map(|word| (*word).to_owned()).collect(),
            working_dir: None,
            env: BTreeMap::new(),
            stop_signal: Signal::SIGTERM,
            account: Account::default(),
            limits: Limits::default(),
        }
    }
}
