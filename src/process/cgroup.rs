//! One control group for each agent, where the system allows it (cgroup v2).
//!
//! A cgroup limits all processes of an agent together, and the kernel kills all of them at once, whatever they have
//! done to their marks and their guard. The bridge uses cgroups only if one was delegated to it:
//!
//! - The bridge runs in a group with the name `bridge`, and no process runs directly in the parent of that group. The
//!   agents get groups in that parent. `Delegate=yes` and `DelegateSubgroup=bridge` of systemd set this up.
//! - The bridge is the only process of its group, and may create groups there although it is not root, or that group is
//!   the root of its cgroup namespace, as in a container. It then moves itself to a new group `bridge` below that group.
//!
//! Never in the root of the hierarchy: that belongs to the machine.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::Instant;

use super::child::Spec;

/// The group of the bridge itself.
const BRIDGE_GROUP: &str = "bridge";
const AGENT_PREFIX: &str = "a2a-agent-";
const CONTROLLERS: [&str; 3] = ["cpu", "memory", "pids"];
/// What a limit of memory implies: the agent does not swap instead, and if it exceeds the limit, the kernel ends all its
/// processes, not one of them.
const MEMORY_DETAILS: [(&str, &str); 2] = [("memory.swap.max", "0"), ("memory.oom.group", "1")];
/// The period of `cpu.max`, in microseconds.
const CPU_PERIOD: u32 = 100_000;
/// How long killed processes may take to leave their group.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Creates groups for agents.
#[derive(Debug)]
pub(crate) struct Cgroups {
    base: PathBuf,
    /// Which of [`CONTROLLERS`] the groups of agents have.
    controllers: Vec<&'static str>,
    /// The beginning of the names of the groups: pids have a meaning only within their namespace.
    prefix: String,
    next: AtomicU64,
}

impl Cgroups {
    /// Finds out whether the system has a place for the groups of agents; may move this process to a group below its own.
    pub(crate) fn detect() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let own = fs::read_to_string("/proc/self/cgroup").ok()?;
        let (mount, group) = own_group(&mounts, &own)?;
        let may_move = group.is_empty() || !nix::unistd::geteuid().is_root();
        let base = base(&mount.join(group), Pid::this().as_raw(), may_move).ok().flatten()?;
        Self::at(base)
    }

    /// Uses this group, if it is possible to create groups in it.
    pub(super) fn at(base: PathBuf) -> Option<Self> {
        let namespace = fs::metadata("/proc/self/ns/pid").ok()?.ino();
        let prefix = format!("{AGENT_PREFIX}{namespace}-");
        remove_abandoned(&base, &prefix);
        let available = fs::read_to_string(base.join("cgroup.controllers")).ok()?;
        let mut controllers = CONTROLLERS.to_vec();
        controllers.retain(|name| {
            available.split_ascii_whitespace().any(|word| word == *name)
                && fs::write(base.join("cgroup.subtree_control"), format!("+{name}")).is_ok()
        });
        let cgroups = Self { base, controllers, prefix, next: AtomicU64::new(0) };
        let path = cgroups.make().ok()?;
        fs::remove_dir(path).ok()?;
        Some(cgroups)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.base
    }

    pub(crate) fn controllers(&self) -> &[&'static str] {
        &self.controllers
    }

    /// A new group with those limits of the agent that the system allows to set. `None` if it cannot be created; this is logged.
    pub(super) fn create(&self, spec: &Spec) -> Option<Cgroup> {
        let agent = &spec.agent;
        let mut cgroup = match self.make() {
            Ok(path) => Cgroup { path, limited: Vec::new() },
            Err(error) => {
                tracing::warn!(%agent, %error, base = %self.base.display(), "cannot create a cgroup for the agent");
                return None;
            }
        };
        for (controller, file, value) in settings(spec) {
            let set = match self.controllers.contains(&controller) {
                true => fs::write(cgroup.path.join(file), &value),
                false => Err(io::ErrorKind::Unsupported.into()),
            };
            match set {
                Ok(()) => cgroup.limited.push(controller),
                Err(error) => {
                    tracing::warn!(%agent, %error, "cannot set {file} of the cgroup of the agent");
                }
            }
        }
        if cgroup.limits("memory") {
            // Systems without swap, or old ones, lack these files.
            for (file, value) in MEMORY_DETAILS {
                let _ = fs::write(cgroup.path.join(file), value);
            }
        }
        Some(cgroup)
    }

    fn make(&self) -> io::Result<PathBuf> {
        let number = self.next.fetch_add(1, Relaxed);
        let path = self.base.join(format!("{}{}-{number}", self.prefix, Pid::this()));
        fs::create_dir(&path)?;
        Ok(path)
    }
}

/// Controller, file and value of each limit.
fn settings(spec: &Spec) -> Vec<(&'static str, &'static str, String)> {
    let limits = &spec.limits;
    let memory = limits.memory.map(|bytes| ("memory", "memory.max", bytes.to_string()));
    let pids = limits.processes.map(|count| ("pids", "pids.max", count.to_string()));
    let cpu = limits.cpu.map(|count| {
        let quota = (count * f64::from(CPU_PERIOD)).round();
        ("cpu", "cpu.max", format!("{quota} {CPU_PERIOD}"))
    });
    memory.into_iter().chain(pids).chain(cpu).collect()
}

/// Where the hierarchy is mounted, and the group of this process in it, from `/proc/self/mountinfo` and
/// `/proc/self/cgroup`.
fn own_group<'a>(mounts: &'a str, own: &'a str) -> Option<(&'a Path, &'a str)> {
    let mount = mounts.lines().find_map(|line| {
        let (fields, file_system) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (root == "/" && file_system.starts_with("cgroup2 ")).then_some(point)
    })?;
    let group = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // Outside of the namespace of this process.
    (!group.split('/').any(|part| part == "..")).then(|| (Path::new(mount), group))
}

/// The group for the groups of agents. `may_move` is whether this process may move itself to a group below its own.
fn base(own: &Path, pid: i32, may_move: bool) -> io::Result<Option<PathBuf>> {
    // Only the root has no type.
    let is_root = |group: &Path| !group.join("cgroup.type").exists();
    if let Some(parent) = own.parent().filter(|_| own.file_name().is_some_and(|name| name == BRIDGE_GROUP)) {
        let is_delegated = !is_root(parent) && processes(parent)?.is_empty();
        return Ok(is_delegated.then(|| parent.to_owned()));
    }
    if is_root(own) || !may_move || processes(own)? != [pid] {
        return Ok(None);
    }
    let group = own.join(BRIDGE_GROUP);
    fs::create_dir_all(&group)?;
    fs::write(group.join("cgroup.procs"), pid.to_string())?;
    Ok(Some(own.to_owned()))
}

fn processes(group: &Path) -> io::Result<Vec<i32>> {
    let list = fs::read_to_string(group.join("cgroup.procs"))?;
    Ok(list.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Removes the groups of bridges that no longer run, and kills what is left in them.
fn remove_abandoned(base: &Path, prefix: &str) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let bridge =
            name.to_str().and_then(|name| name.strip_prefix(prefix)?.split_once('-')?.0.parse().ok());
        let is_dead = |pid| kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH);
        if !bridge.is_some_and(is_dead) {
            continue;
        }
        let group = Cgroup { path: entry.path(), limited: Vec::new() };
        let processes = processes(&group.path).unwrap_or_default();
        if !processes.is_empty() {
            group.kill();
            tracing::warn!(?processes, "ended processes that an earlier bridge left running");
        }
        let _ = fs::remove_dir(&group.path);
    }
}

/// The group of one start of an agent.
#[derive(Debug)]
pub(super) struct Cgroup {
    path: PathBuf,
    /// The controllers whose limits are set.
    limited: Vec<&'static str>,
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Fails if `remove` has done this already, or if processes are left.
        let _ = fs::remove_dir(&self.path);
    }
}

impl Cgroup {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the limit of this controller is set.
    pub(super) fn limits(&self, controller: &str) -> bool {
        self.limited.contains(&controller)
    }

    /// Kills all processes in the group.
    pub(super) fn kill(&self) {
        // Linux 5.14 or later; it also catches processes that are being forked.
        if fs::write(self.path.join("cgroup.kill"), "1").is_err() {
            for pid in processes(&self.path).unwrap_or_default() {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }

    /// Kills what is left, and removes the group.
    pub(super) async fn remove(&self) {
        let limit = Instant::now() + REMOVE_TIMEOUT;
        while let Err(error) = fs::remove_dir(&self.path) {
            if error.kind() == io::ErrorKind::NotFound {
                return;
            }
            if Instant::now() >= limit {
                return tracing::warn!(%error, cgroup = %self.path.display(), "cannot remove the cgroup of an agent");
            }
            self.kill();
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::child::Limits;

    const MOUNTS: &str = "22 1 0:20 / /proc rw - proc proc rw\n\
                          30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn group(base: &Path, name: &str, processes: &str) -> PathBuf {
        let path = base.join(name);
        fs::create_dir_all(&path).unwrap();
        fs::write(path.join("cgroup.procs"), processes).unwrap();
        fs::write(path.join("cgroup.type"), "domain\n").unwrap();
        fs::write(path.join("cgroup.controllers"), "cpuset cpu io memory\n").unwrap();
        path
    }

    #[test]
    fn the_own_group_is_found_below_the_mount_point() {
        let at = |own| own_group(MOUNTS, own).map(|(mount, group)| mount.join(group).display().to_string());
        assert_eq!(at("1:name=x:/y\n0::/a/b.service\n").as_deref(), Some("/sys/fs/cgroup/a/b.service"));
        assert_eq!(at("0::/../elsewhere\n"), None);
        assert_eq!(at("1:cpu:/a\n"), None);
        assert_eq!(own_group("22 1 0:20 / /proc rw - proc proc rw", "0::/a"), None);
    }

    #[test]
    fn only_a_delegated_group_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let shared = group(dir.path(), "shared", "7\n8\n");
        assert_eq!(base(&shared, 7, true).unwrap(), None);
        let alone = group(dir.path(), "alone", "7\n");
        fs::create_dir(alone.join(BRIDGE_GROUP)).unwrap();
        assert_eq!(base(&alone, 7, false).unwrap(), None);
        assert_eq!(base(&alone, 7, true).unwrap().as_ref(), Some(&alone));
        assert_eq!(fs::read_to_string(alone.join("bridge/cgroup.procs")).unwrap(), "7");
        let delegated = group(dir.path(), "delegated", "");
        let bridge = group(&delegated, BRIDGE_GROUP, "7\n");
        assert_eq!(base(&bridge, 7, false).unwrap(), Some(delegated));
        let bridge = group(&shared, BRIDGE_GROUP, "9\n");
        assert_eq!(base(&bridge, 9, true).unwrap(), None);
        let root = group(dir.path(), "root", "7\n");
        fs::remove_file(root.join("cgroup.type")).unwrap();
        assert_eq!(base(&root, 7, true).unwrap(), None);
        let bridge = group(&root, BRIDGE_GROUP, "9\n");
        fs::write(root.join("cgroup.procs"), "").unwrap();
        assert_eq!(base(&bridge, 9, true).unwrap(), None);
    }

    #[test]
    fn limits_are_written_to_the_files_of_the_group() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = Cgroups::at(group(dir.path(), "base", "")).unwrap();
        assert_eq!(cgroups.controllers(), ["cpu", "memory"]);
        let limits = Limits { memory: Some(64 << 20), cpu: Some(1.5), files: Some(9), processes: Some(50) };
        let spec = Spec { limits, ..Spec::example(&["true"]) };
        let made = cgroups.create(&spec).unwrap();
        let read = |file| fs::read_to_string(made.path().join(file)).ok();
        assert_eq!(read("cpu.max").as_deref(), Some("150000 100000"));
        assert_eq!(read("memory.max").as_deref(), Some("67108864"));
        assert_eq!(read("memory.swap.max").as_deref(), Some("0"));
        assert_eq!(read("memory.oom.group").as_deref(), Some("1"));
        assert_eq!(read("pids.max"), None, "the group has no such controller");
        assert_eq!(["cpu", "memory", "pids"].map(|name| made.limits(name)), [true, true, false]);
        assert_eq!(settings(&spec).len(), 3);
    }
}
