//! What tells the processes of one guard from all others, whatever they did to themselves.
//!
//! A variable in the environment is gone with `env -i`, a session with `setsid`, a descriptor when it is
//! closed. Resource limits stay: they go from parent to child, through every `exec` and change of user,
//! and everybody may read those of others. So a guard sets one that Linux keeps and has not looked at
//! since 2.4, the number of file locks (`RLIMIT_LOCKS`), to a number of its own.
//!
//! It is the soft limit alone, so that an agent that is a bridge can tag its own agents.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::procfs::{self, Stat};

/// More bits than a process id has.
const PID_BITS: u32 = 22;

/// The tag of a guard and of everything below it, until the machine is started anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessTag(u64);

impl ProcessTag {
    /// Of the guard with this process id, which started then.
    pub(super) fn new(pid: i32, start: u64) -> Option<Self> {
        Some(Self(start.checked_mul(1 << PID_BITS)? | u64::try_from(pid).ok()?))
    }

    /// Of the guard with this process id.
    pub(super) fn of(guard: i32) -> Option<Self> {
        Self::new(guard, Stat::read(guard)?.start)
    }

    /// Brands this process, and all that it starts from now on.
    pub(super) fn apply(self) -> nix::Result<()> {
        let (_, hard) = getrlimit(Resource::RLIMIT_LOCKS)?;
        setrlimit(Resource::RLIMIT_LOCKS, self.0, hard)
    }
}

/// The living processes that have one of these.
pub(super) fn tagged_processes(tags: &[ProcessTag]) -> impl Iterator<Item = Stat> {
    let all = (!tags.is_empty()).then(procfs::all);
    all.into_iter()
        .flatten()
        .filter(|pid| procfs::lock_limit(*pid).is_some_and(|limit| tags.contains(&ProcessTag(limit))))
        .filter_map(Stat::read)
        .filter(|stat| !stat.has_exited())
}
