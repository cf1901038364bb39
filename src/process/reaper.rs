//! The bridge as the last parent: whatever loses its own parent below it ends up here.
//!
//! The runtime waits for the children that it knows, one by one. The others, orphans of guards that
//! were killed, or any orphan when the bridge is the first process of a container, stay zombies
//! until somebody asks for them; [`run`] does. It may not ask for "any child", as it would take the
//! known ones away from the runtime, so it looks at who is there and leaves out those that
//! `spawn` has started.
//!
//! When a guard was killed, what it guarded is here and alive; `end_orphans` ends it.

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
use super::procfs::{self, Stat};

/// How long orphans may take to end: not even SIGKILL ends what hangs in the kernel.
const END: Duration = Duration::from_secs(2);
/// How often is looked whether all have gone.
const LOOK: Duration = Duration::from_millis(5);

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
    let own = own();
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

/// Ends what a guard that was killed has left: it is below us now, whatever it did to its session and
/// its environment. Not so what other guards guard, and not so what is older than the guard, such as
/// what a shell had started before the bridge took its place.
///
/// As the first process of a container we are the parent of all orphans there, and cannot tell an
/// agent's from those of somebody who has entered the container after the guard began.
pub(super) async fn end_orphans(guard_start: u64) {
    let limit = Instant::now() + END;
    // An orphan's own children are here only after its end, so one look is not enough.
    while kill_orphans(guard_start) {
        if Instant::now() >= limit {
            return tracing::error!("orphans of an agent do not end, not even by SIGKILL");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether there were any.
fn kill_orphans(guard_start: u64) -> bool {
    let own = own();
    // Held while looking: a guard that is just being spawned is known before it is looked for.
    let known = known();
    let is_orphan = |stat: &Stat| {
        stat.parent == own && stat.start >= guard_start && !stat.is_over() && !known.contains(&stat.pid)
    };
    // Not by the list of our children, which may leave some out while others end.
    let orphans: Vec<Stat> = procfs::all().filter_map(Stat::read).filter(is_orphan).collect();
    for orphan in &orphans {
        for pid in procfs::descendants(orphan.pid).into_iter().chain([orphan.pid]) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    !orphans.is_empty()
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
