//! One child process with everything it starts, and the pauses between its starts. Nothing about A2A.
//!
//! On Linux a child runs under a guard: this program again, in the small form of [`guard`]. The guard
//! is a child subreaper, so whatever the child starts stays below it, also what called `setsid`. The
//! two ends of one socket tie guard and bridge together:
//!
//! ```text
//! bridge ── commands: stop, kill ──> guard ── signals ──> the child and all below it
//!        <── reports: started, exited, gone ──
//! ```
//!
//! Only the bridge holds the other end: when the bridge dies, however it dies, the guard reads the end
//! of the socket and ends everything below it. When the guard dies, its children come to the bridge,
//! which is a subreaper too, and knows them by their `tag`. When both die at once, [`orphans`] finds
//! the rest at the next start.
//!
//! Elsewhere a child leads a process group of its own, and that group is ended. What leaves the group
//! by `setsid` is not found there, and nothing ends the children of a bridge that was killed with -9.

pub mod child;
#[cfg(target_os = "linux")]
pub mod guard;
#[cfg(target_os = "linux")]
mod guarded;
pub(crate) mod orphans;
pub mod output;
pub mod ports;
mod process_group;
#[cfg(target_os = "linux")]
mod process_tag;
#[cfg(target_os = "linux")]
pub mod procfs;
#[cfg(target_os = "linux")]
pub(crate) mod reaper;
pub(crate) mod restart;
