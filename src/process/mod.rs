//! A child process with everything it starts, and the back-off between its starts. No A2A here.
//!
//! On Linux, a child runs under a [`guard`]: a small instance of this program. The guard is a child
//! subreaper, so all descendants of the child stay below it, even those that call `setsid`. A socket
//! connects guard and bridge:
//!
//! ```text
//! bridge ── commands: stop, kill ──> guard ── signals ──> the child and its descendants
//!        <── reports: started, exited ──
//! ```
//!
//! The guard starts the child through a [launcher](launch), which sets user, limits and cgroup, and then executes the
//! command in its own place.
//!
//! Only the bridge holds the other end of the socket. When the bridge dies, the guard reads end of file and
//! stops its descendants. When the guard dies, the bridge, which is a subreaper too, adopts its descendants and
//! identifies them by their process tag, or by the fact that it adopts nothing else. When both die, the next bridge
//! finds the rest: see [`orphans`].
//!
//! On other systems, a child leads a process group and the bridge stops that group. Processes that leave the
//! group with `setsid` are not found, and the children of a bridge that was killed with SIGKILL keep running.

pub(crate) mod agent_port;
#[cfg(target_os = "linux")]
pub(crate) mod cgroup;
pub mod child;
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only a launcher changes the user"))]
pub mod credentials;
#[cfg(target_os = "linux")]
pub mod guard;
#[cfg(target_os = "linux")]
mod guarded;
#[cfg(target_os = "linux")]
mod launch;
pub(crate) mod orphans;
pub mod output;
pub mod ports;
mod process_group;
mod process_tag;
pub mod procfs;
#[cfg(target_os = "linux")]
pub(crate) mod reaper;
pub(crate) mod restart;
#[cfg(target_os = "linux")]
mod sock_diag;
