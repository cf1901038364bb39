//! The bridge as the last parent: whatever loses its own parent below it ends up here.
//!
//! The runtime waits for the children that it knows, one by one. The others, orphans of guards that
//! were killed, or any orphan when the bridge is the first process of a container, stay zombies
//! until somebody asks for them; [`run`] does. It may not ask for "any child", as it would take the
//! known ones away from the runtime, so it looks at who is there and leaves out those that
//! `spawn` has started.
//!
//! When a guard was killed, what it guarded is here and alive; `kill_orphans` ends it.

use std::collections::HashSet;
use std::io;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::child::pid_of;
use super::orphans::MARK;
use super::process_tag::{self, ProcessTag};
use super::procfs::{self, Stat};

/// How long orphans may take to end: not even SIGKILL ends what hangs in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// Poll interval while waiting for processes to exit. Reading all processes of a large machine takes a
/// while, and calls to other agents wait for it.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

static KNOWN: LazyLock<Mutex<HashSet<i32>>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, HashSet<i32>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes this process the parent of orphans below it.
///
/// # Errors
///
/// The kernel's, which is older than 3.4 then.
pub(crate) fn become_subreaper() -> io::Result<()> {
    nix::sys::prctl::set_child_subreaper(true).map_err(io::Error::from)
}

/// Reaps orphans until the end. Only for a process whose other children all come from `spawn`.
///
/// # Errors
///
/// When SIGCHLD cannot be listened to.
pub(crate) async fn run() -> io::Result<()> {
    let mut ended = signal(SignalKind::child())?;
    let own = own();
    while ended.recv().await.is_some() {
        // Held while looking: a child that is just being spawned is known before it is looked for.
        let known = known();
        for pid in procfs::children(own) {
            if !known.contains(&pid) && Stat::read(pid).is_some_and(|stat| stat.has_exited()) {
                let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
            }
        }
    }
    Ok(())
}

/// How those who belong to one guard are known.
#[derive(Debug)]
pub(super) struct GuardedProcesses {
    pub(super) tag: Option<ProcessTag>,
    /// In their environment, for a system without tags.
    pub(super) mark: Option<String>,
}

impl GuardedProcesses {
    fn alive(&self) -> HashSet<i32> {
        let mut found: HashSet<i32> =
            process_tag::tagged_processes(self.tag.as_slice()).map(|stat| stat.pid).collect();
        if let Some(mark) = &self.mark {
            let marked = procfs::all().filter(|pid| procfs::variable(*pid, MARK).as_ref() == Some(mark));
            let alive = marked.filter_map(Stat::read).filter(|stat| !stat.has_exited());
            found.extend(alive.map(|stat| stat.pid));
        }
        found
    }
}

/// Ends what a guard that was killed has left, and nobody else. The first process of a container, or one
/// that took the place of a shell, is the parent of orphans that never were an agent's: whoever cannot
/// be state_sender to be one is left alone, and reaped when it ends.
pub(super) async fn kill_orphans(guarded: &GuardedProcesses) {
    let limit = Instant::now() + KILL_TIMEOUT;
    // One that is just being forked is seen a moment later, so one look is not enough.
    loop {
        let orphans = guarded.alive();
        if orphans.is_empty() {
            return;
        }
        if Instant::now() >= limit {
            return tracing::error!("orphans of an agent do not end, not even by SIGKILL");
        }
        for pid in orphans {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

fn own() -> i32 {
    i32::try_from(std::process::id()).unwrap_or_default()
}

pub(super) fn spawn(command: &mut tokio::process::Command) -> io::Result<tokio::process::Child> {
    let mut known = known();
    let child = command.spawn()?;
    known.insert(pid_of(&child));
    Ok(child)
}

/// Waits for a child from `spawn`; whether it ended well.
pub(super) async fn wait(child: &mut tokio::process::Child) -> bool {
    let pid = pid_of(child);
    let status = child.wait().await;
    known().remove(&pid);
    status.is_ok_and(|status| status.success())
}
