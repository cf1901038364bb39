//! A running child in its own process group: how it starts, how it ended, how it is ended.
//!
//! A child is not killed on drop, because drop cannot wait: whoever owns one calls
//! [`Child::stop`].

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use secrecy::{ExposeSecret as _, SecretString};

use super::output::{self, LastLines};
use crate::tasks::{OnFailure, Tasks};

/// Variables of the bridge that a child gets too; names ending in `*` are beginnings.
const INHERITED: [&str; 7] = ["PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR"];

/// What to run.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Program and arguments.
    pub command: Vec<String>,
    /// Where; the bridge's own folder if not said.
    pub working_dir: Option<PathBuf>,
    /// Variables beside the inherited ones.
    pub env: BTreeMap<String, SecretString>,
}

/// Why a child did not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// There is nothing to run.
    #[error("the command is empty")]
    Empty,
    /// No such program.
    #[error("command not found: `{program}` (is it installed, and on the bridge's PATH?)")]
    NotFound {
        /// What was looked for.
        program: String,
    },
    /// No such folder.
    #[error("working_dir {} does not exist", .0.display())]
    NoSuchDir(PathBuf),
    /// Anything else.
    #[error("cannot start `{program}`")]
    Other {
        /// What was to be started.
        program: String,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit(ExitStatus);

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.code(), self.0.signal()) {
            (Some(code), _) => write!(f, "exited with code {code}"),
            (None, Some(signal)) => match Signal::try_from(signal) {
                Ok(name) => write!(f, "was killed by {name}"),
                Err(_) => write!(f, "was killed by signal {signal}"),
            },
            (None, None) => f.write_str("ended"),
        }
    }
}

/// A running child and its group.
#[derive(Debug)]
pub struct Child {
    inner: tokio::process::Child,
    group: Pid,
    last: LastLines,
}

impl Child {
    /// Starts a child for `agent`; its output is read by `tasks`.
    pub fn spawn(spec: &Spec, agent: &Arc<str>, tasks: &Tasks) -> Result<Self, SpawnError> {
        let (program, arguments) = spec.command.split_first().ok_or(SpawnError::Empty)?;
        if let Some(dir) = spec.working_dir.as_ref().filter(|dir| !dir.is_dir()) {
            return Err(SpawnError::NoSuchDir(dir.clone()));
        }
        let mut command = tokio::process::Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_inherited)))
            .envs(spec.env.iter().map(|(name, value)| (name, value.expose_secret())))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some(dir) = &spec.working_dir {
            command.current_dir(dir);
        }
        let mut inner = command.spawn().map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => SpawnError::NotFound {
                program: program.clone(),
            },
            _ => SpawnError::Other {
                program: program.clone(),
                source,
            },
        })?;
        let last = LastLines::default();
        if let Some(pipe) = inner.stdout.take() {
            tasks.spawn(
                "agent stdout",
                OnFailure::Log,
                output::pump(pipe, Arc::clone(agent), "stdout", last.clone()),
            );
        }
        if let Some(pipe) = inner.stderr.take() {
            tasks.spawn(
                "agent stderr",
                OnFailure::Log,
                output::pump(pipe, Arc::clone(agent), "stderr", last.clone()),
            );
        }
        // A child that was just spawned and not yet waited for has an id.
        let group = Pid::from_raw(
            inner
                .id()
                .and_then(|id| i32::try_from(id).ok())
                .unwrap_or_default(),
        );
        Ok(Self { inner, group, last })
    }

    /// The leader's process id.
    pub fn pid(&self) -> i32 {
        self.group.as_raw()
    }

    /// What it wrote last.
    pub fn last_lines(&self) -> &LastLines {
        &self.last
    }

    /// Waits until the leader ends. Cancel-safe.
    pub async fn wait(&mut self) -> Exit {
        match self.inner.wait().await {
            Ok(status) => Exit(status),
            // Only possible when somebody else reaped it; then nothing is known but that it ended.
            Err(_) => Exit(ExitStatus::from_raw(0)),
        }
    }

    /// Ends the group: SIGTERM, and SIGKILL when `grace` is over or `hurry` says so.
    pub async fn stop(mut self, grace: Duration, hurry: &tokio_util::sync::CancellationToken) -> Exit {
        self.signal(Signal::SIGTERM);
        let graceful = tokio::select! {
            exit = self.wait() => Some(exit),
            () = tokio::time::sleep(grace) => None,
            () = hurry.cancelled() => None,
        };
        // Also after a graceful end: the leader may have left others of its group behind.
        self.signal(Signal::SIGKILL);
        match graceful {
            Some(exit) => exit,
            None => self.wait().await,
        }
    }

    /// Ends what a leader that is gone has left behind.
    pub fn sweep(&self) {
        self.signal(Signal::SIGKILL);
    }

    fn signal(&self, signal: Signal) {
        // 0 and 1 would mean our own group, or everyone.
        if self.group.as_raw() > 1 {
            // ESRCH: nobody is left, which is what was wanted.
            let _ = killpg(self.group, signal);
        }
    }
}

fn is_inherited(name: &str) -> bool {
    INHERITED.iter().any(|known| match known.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == *known,
    })
}
