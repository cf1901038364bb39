//! The launcher: turns itself into the command of an agent, as the right user and with the right limits.
//!
//! A [guard](super::guard) starts this program once more. That process reads a [`Launch`] from its standard input,
//! changes what an agent must not be able to change back, and then executes the command in its own place. The guard
//! keeps its own user and limits. A report follows on the same socket only if something fails: a successful exec
//! closes the socket.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};
use serde::{Deserialize, Serialize};

use super::cgroup::Cgroup;
use super::credentials::Credentials;

/// The first argument that makes this program a launcher.
pub(super) const LAUNCH_ARGUMENT: &str = "launch-process";

/// How to launch the command of an agent. It travels through sockets: arguments and environments are visible to others.
#[derive(Serialize, Deserialize)]
pub(super) struct Launch {
    pub(super) command: Vec<String>,
    /// The whole environment.
    pub(super) env: Vec<(OsString, OsString)>,
    pub(super) stop_signal: String,
    /// `None` to stay the user of the bridge.
    pub(super) credentials: Option<Credentials>,
    pub(super) limits: ResourceLimits,
    /// The cgroup to join.
    pub(super) cgroup: Option<PathBuf>,
}

/// Limits of each process of an agent, unless its cgroup has the same limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ResourceLimits {
    /// Private writable memory in bytes (`RLIMIT_DATA`). Not the address space (`RLIMIT_AS`): many runtimes reserve far
    /// more of that than they use.
    pub(super) memory: Option<u64>,
    /// Open files (`RLIMIT_NOFILE`).
    pub(super) files: Option<u64>,
    /// The soft limit of open files if `files` is not set. The bridge raises its own, but programs that use `select`
    /// break with descriptors above 1023.
    pub(super) soft_files: Option<u64>,
    /// Processes and threads of the user (`RLIMIT_NPROC`).
    pub(super) processes: Option<u64>,
}

/// What failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LaunchStep {
    Cgroup,
    Limits,
    User,
    /// The process would keep capabilities of the bridge.
    Capabilities,
    Exec,
}

impl LaunchStep {
    const ALL: [Self; 5] = [Self::Cgroup, Self::Limits, Self::User, Self::Capabilities, Self::Exec];

    fn as_str(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Limits => "limits",
            Self::User => "user",
            Self::Capabilities => "capabilities",
            Self::Exec => "exec",
        }
    }
}

/// The step that failed, and why.
#[derive(Debug)]
pub(super) struct LaunchError(pub(super) LaunchStep, pub(super) io::Error);

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0.as_str(), self.1.raw_os_error().unwrap_or_default())
    }
}

impl LaunchError {
    /// Reads the text that [`Display`](fmt::Display) writes.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (word, number) = text.trim_end().split_once(' ')?;
        let step = LaunchStep::ALL.into_iter().find(|step| step.as_str() == word)?;
        Some(Self(step, io::Error::from_raw_os_error(number.parse().ok()?)))
    }
}

/// Runs a launcher. Returns only if it fails.
pub(super) fn main() -> ExitCode {
    let mut guard = match io::stdin().as_fd().try_clone_to_owned() {
        Ok(socket) => UnixStream::from(socket),
        Err(_) => return ExitCode::FAILURE,
    };
    let mut text = Vec::new();
    let launch =
        guard.read_to_end(&mut text).map_err(|error| LaunchError(LaunchStep::Exec, error)).and_then(|_| {
            serde_json::from_slice::<Launch>(&text)
                .map_err(|_| LaunchError(LaunchStep::Exec, Errno::EINVAL.into()))
        });
    let error = match launch.and_then(Launch::exec) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    let _ = write!(guard, "{error}");
    ExitCode::FAILURE
}

impl Launch {
    fn exec(self) -> Result<std::convert::Infallible, LaunchError> {
        let failed = |step| move |error: io::Error| LaunchError(step, error);
        if let Some(cgroup) = &self.cgroup {
            // 0 stands for the process that writes.
            std::fs::write(cgroup.join("cgroup.procs"), "0").map_err(failed(LaunchStep::Cgroup))?;
        }
        self.limits.apply().map_err(|errno| LaunchError(LaunchStep::Limits, errno.into()))?;
        clear_ambient_capabilities().map_err(|errno| LaunchError(LaunchStep::Capabilities, errno.into()))?;
        if let Some(credentials) = &self.credentials {
            assume(credentials).map_err(|errno| LaunchError(LaunchStep::User, errno.into()))?;
        }
        let (program, arguments) =
            self.command.split_first().ok_or_else(|| failed(LaunchStep::Exec)(Errno::EINVAL.into()))?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear().envs(self.env).stdin(Stdio::null());
        Err(LaunchError(LaunchStep::Exec, command.exec()))
    }
}

impl ResourceLimits {
    /// The limits that apply in addition to those of a cgroup. `RLIMIT_NPROC` counts the processes of other agents of the
    /// same user too, and `RLIMIT_DATA` counts memory that is only reserved.
    pub(super) fn beside(self, cgroup: &Cgroup) -> Self {
        Self {
            memory: self.memory.filter(|_| !cgroup.limits("memory")),
            processes: self.processes.filter(|_| !cgroup.limits("pids")),
            ..self
        }
    }

    fn apply(self) -> nix::Result<()> {
        for (resource, limit) in [
            (Resource::RLIMIT_DATA, self.memory),
            (Resource::RLIMIT_NOFILE, self.files),
            (Resource::RLIMIT_NPROC, self.processes),
        ] {
            if let Some(limit) = limit {
                // A lower hard limit of the bridge stays.
                let (_, hard) = getrlimit(resource)?;
                let limit = limit.min(hard);
                setrlimit(resource, limit, limit)?;
            }
        }
        if let (None, Some(soft)) = (self.files, self.soft_files) {
            let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
            setrlimit(Resource::RLIMIT_NOFILE, soft.min(hard), hard)?;
        }
        Ok(())
    }
}

/// Becomes another user, for good.
fn assume(credentials: &Credentials) -> nix::Result<()> {
    let Credentials { uid, gid, groups } = credentials;
    // So that the agent can open `/dev/stdout` and `/dev/stderr`.
    let _ = std::os::unix::fs::fchown(io::stdout(), Some(*uid), Some(*gid));
    let _ = std::os::unix::fs::fchown(io::stderr(), Some(*uid), Some(*gid));
    let groups: Vec<Gid> = groups.iter().copied().map(Gid::from_raw).collect();
    setgroups(&groups)?;
    // With the privilege to do so, both also set the saved ids, so that there is no way back.
    setgid(Gid::from_raw(*gid))?;
    setuid(Uid::from_raw(*uid))
}

/// Makes this process lose the capabilities that the bridge was started with, such as by `AmbientCapabilities` of
/// systemd, when it executes the command. Only a command of root has capabilities then.
#[expect(unsafe_code, reason = "`nix` does not have this operation")]
fn clear_ambient_capabilities() -> nix::Result<()> {
    use nix::libc::{PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, prctl};

    // SAFETY: it changes an attribute of this process, and passes no pointers.
    let result = unsafe { prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    match Errno::result(result) {
        // Linux before 4.3 has no ambient capabilities.
        Ok(_) | Err(Errno::EINVAL) => Ok(()),
        Err(errno) => Err(errno),
    }
}
