//! Reaps orphans that the bridge adopts.
//!
//! The runtime waits for the children that it has spawned. The bridge also adopts orphans: those of a killed
//! guard and, if it is the first process of a container, those of any process. [`Reaper::run`] reaps them; otherwise
//! they would stay zombies. It cannot wait
//! for "any child", because it would take exit statuses away from the runtime. It therefore skips the children
//! that [`Reaper::spawn`] has started.
//!
//! When a guard is killed, its descendants are adopted alive; [`GuardedProcesses::end`] kills them.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::cgroup::Cgroup;
use super::child::pid_of;
use super::orphans::MARK;
use super::process_tag::{self, ProcessTag};
use super::procfs::{self, Stat};
use crate::offload;

/// How long killed orphans may take to exit. A process that hangs in the kernel survives SIGKILL.
const ORPHAN_KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// Poll interval while waiting for processes to exit. Listing all processes of a large machine is slow and
/// delays calls to other agents.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Starts guards, and reaps orphans.
#[derive(Debug)]
pub(crate) struct Reaper {
    pub(super) guard_program: PathBuf,
    /// The guards, which the runtime waits for.
    guards: Mutex<HashSet<i32>>,
    /// Whether all descendants of this process come from guards. Then every orphan that it adopts belongs to an agent,
    /// even one that has removed its tag and its mark.
    has_only_guards: bool,
}

impl Reaper {
    /// `starts_only_guards`: this process starts nothing else. Ignored if it already has children, or if it is
    /// the first process of a container, which adopts the orphans of all processes.
    pub(super) fn new(guard_program: PathBuf, starts_only_guards: bool) -> Self {
        let own = Pid::this().as_raw();
        let has_only_guards = starts_only_guards && own != 1 && procfs::children(own).is_empty();
        Self { guard_program, guards: Mutex::default(), has_only_guards }
    }

    /// The orphans of killed guards, with their descendants.
    fn adopted(&self) -> Vec<i32> {
        if !self.has_only_guards {
            return Vec::new();
        }
        let mut orphans = procfs::children(Pid::this().as_raw());
        // A guard is known before the lock is released, so list first.
        let guards = self.guards().clone();
        orphans.retain(|pid| !guards.contains(pid));
        orphans.into_iter().flat_map(|pid| std::iter::once(pid).chain(procfs::descendants(pid))).collect()
    }

    /// Reaps orphans forever. All other children of this process must come from `spawn`.
    pub(crate) async fn run(&self) -> io::Result<()> {
        let mut child_exits = signal(SignalKind::child())?;
        while child_exits.recv().await.is_some() {
            let has_exited = |pid: &i32| Stat::read(*pid).is_some_and(|stat| stat.has_exited());
            let exited: Vec<i32> = offload::block(|| {
                procfs::children(Pid::this().as_raw()).into_iter().filter(has_exited).collect()
            });
            // A guard is known before the lock is released, so list first.
            let guards = self.guards();
            for pid in exited.into_iter().filter(|pid| !guards.contains(pid)) {
                let _ = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
            }
        }
        Ok(())
    }

    pub(super) fn spawn(&self, command: &mut tokio::process::Command) -> io::Result<tokio::process::Child> {
        let mut guards = self.guards();
        let child = command.spawn()?;
        guards.insert(pid_of(&child));
        Ok(child)
    }

    /// Waits for a child from `spawn`. Returns whether it exited with code 0.
    pub(super) async fn wait(&self, child: &mut tokio::process::Child) -> bool {
        let pid = pid_of(child);
        let status = child.wait().await;
        self.guards().remove(&pid);
        status.is_ok_and(|status| status.success())
    }

    fn guards(&self) -> MutexGuard<'_, HashSet<i32>> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Identifies the descendants of one guard.
#[derive(Debug)]
pub(super) struct GuardedProcesses {
    pub(super) tag: Option<ProcessTag>,
    /// The mark in their environment, for systems without tags.
    pub(super) mark: Option<String>,
    pub(super) cgroup: Option<Cgroup>,
}

impl GuardedProcesses {
    /// Ends what is left after the guard has exited. A guard that `has_finished` has left nothing.
    pub(super) async fn end(&self, reaper: &Reaper, has_finished: bool) {
        if !has_finished {
            self.kill(reaper).await;
        }
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove().await;
        }
    }

    fn alive(&self, reaper: &Reaper) -> HashSet<i32> {
        let mut found: HashSet<i32> =
            process_tag::tagged_processes(self.tag.as_slice()).map(|stat| stat.pid).collect();
        let marked = self
            .mark
            .as_ref()
            .map(|mark| procfs::all().filter(move |pid| procfs::variable(*pid, MARK).as_ref() == Some(mark)));
        let others = marked.into_iter().flatten().chain(reaper.adopted());
        found.extend(others.filter_map(Stat::read).filter(|stat| !stat.has_exited()).map(|stat| stat.pid));
        found
    }

    /// Kills the descendants of a killed guard and no other process. The first process of a container also
    /// adopts orphans that no agent has started; those are only reaped.
    async fn kill(&self, reaper: &Reaper) {
        let limit = Instant::now() + ORPHAN_KILL_TIMEOUT;
        // A process that is being forked appears a moment later, so repeat.
        loop {
            if let Some(cgroup) = &self.cgroup {
                cgroup.kill();
            }
            let orphans = offload::block(|| self.alive(reaper));
            if orphans.is_empty() {
                return;
            }
            if Instant::now() >= limit {
                return tracing::error!("orphans of an agent are still running after SIGKILL");
            }
            for pid in orphans {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}
