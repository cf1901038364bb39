//! The bridge as the last parent: whatever loses its own parent below it ends up here.
//!
//! The runtime waits for the children that it knows, one by one. The others, orphans of guards that
//! were killed, or any orphan when the bridge is the first process of a container, stay zombies
//! until somebody asks for them; [`run`] does. It may not ask for "any child", as it would take the
//! known ones away from the runtime, so it looks at who is there and leaves out those that
//! `spawn` has started.

use std::collections::HashSet;
use std::io;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};

use super::child::pid_of;
use super::procfs::{self, Stat};

static KNOWN: LazyLock<Mutex<HashSet<i32>>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, HashSet<i32>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes this process the parent of orphans below it.
///
/// # Errors
///
/// The kernel's, which is older than 3.4 then.
pub fn become_subreaper() -> io::Result<()> {
    nix::sys::prctl::set_child_subreaper(true).map_err(io::Error::from)
}

/// Reaps orphans until the end. Only for a process whose other children all come from `spawn`.
///
/// # Errors
///
/// When SIGCHLD cannot be listened to.
pub async fn run() -> io::Result<()> {
    let mut ended = signal(SignalKind::child())?;
    let own = i32::try_from(std::process::id()).unwrap_or_default();
    while ended.recv().await.is_some() {
        // Held while looking: a child that is just being spawned is known before it is looked for.
        let known = known();
        for pid in procfs::children(own) {
            if !known.contains(&pid) && Stat::read(pid).is_some_and(|stat| stat.is_over()) {
                let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
            }
        }
    }
    Ok(())
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
