//! A tag that identifies the descendants of one guard, whatever they do.
//!
//! `env -i` removes an environment variable, `setsid` leaves a session, and a descriptor can be closed.
//! Resource limits persist: children inherit them across `exec` and changes of user, and every process can
//! read those of others. The guard therefore stores a unique number in a limit that Linux keeps but has
//! ignored since 2.4: the number of file locks (`RLIMIT_LOCKS`).
//!
//! The guard sets only the soft limit, so that an agent that is itself a bridge can tag its own agents.

use super::procfs::{self, Stat};

/// Bits of the tag for the pid.
const PID_BITS: u32 = 22;

/// Unique until the machine reboots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessTag(u64);

impl ProcessTag {
    /// The tag of the guard with this pid and start time.
    pub(super) fn new(pid: i32, start: u64) -> Option<Self> {
        Some(Self(start.checked_mul(1 << PID_BITS)? | u64::try_from(pid).ok()?))
    }

    #[cfg(target_os = "linux")]
    pub(super) fn of(guard: i32) -> Option<Self> {
        Self::new(guard, Stat::read(guard)?.start)
    }

    /// Tags this process and everything it starts from now on.
    #[cfg(target_os = "linux")]
    pub(super) fn apply(self) -> nix::Result<()> {
        use nix::sys::resource::{Resource, getrlimit, setrlimit};

        let (_, hard) = getrlimit(Resource::RLIMIT_LOCKS)?;
        setrlimit(Resource::RLIMIT_LOCKS, self.0, hard)
    }
}

/// The running processes that have one of these tags.
pub(super) fn tagged_processes(tags: &[ProcessTag]) -> impl Iterator<Item = Stat> {
    let all = (!tags.is_empty()).then(procfs::all);
    all.into_iter()
        .flatten()
        .filter(|pid| procfs::lock_limit(*pid).is_some_and(|limit| tags.contains(&ProcessTag(limit))))
        .filter_map(Stat::read)
        .filter(|stat| !stat.has_exited())
}
