//! Orphans of a bridge that died together with a guard: the next bridge finds and kills them.
//!
//! Two kinds of evidence identify an orphan. A record per agent, in a directory of this user, lists the
//! processes by pid, start time and boot; descendants of a recorded guard carry its process tag. In addition,
//! every process of an agent has a mark in its environment that names the bridge that started it. Both apply
//! only to bridges with the same configuration file, and only after that bridge has died.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::process_tag::{self, ProcessTag};
use super::procfs::{self, Stat};
use crate::text::hex;

/// The environment variable that marks every process of an agent.
pub(crate) const MARK: &str = "A2A_BRIDGE_AGENT";

/// Identifies a process uniquely within one boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Process {
    pid: i32,
    start: u64,
}

impl Process {
    fn find(pid: i32) -> Option<Self> {
        let stat = Stat::read(pid)?;
        Some(Self { pid, start: stat.start })
    }

    fn is_alive(self) -> bool {
        match Stat::read(self.pid) {
            Some(stat) => stat.start == self.start && !stat.has_exited(),
            // With the option `hidepid` of `/proc`, a running bridge is hidden from others, as it is not dumpable.
            None => kill(Pid::from_raw(self.pid), None) != Err(Errno::ESRCH),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    boot: String,
    bridge: Process,
    agent: String,
    guard: Option<Process>,
    child: Option<Process>,
}

/// The contents of the records of dead bridges.
#[derive(Default)]
struct DeadBridges {
    /// Guards and children that still run, with their descendants.
    left: HashSet<Process>,
    /// The tags of all recorded guards.
    tags: Vec<ProcessTag>,
    files: Vec<PathBuf>,
}

/// The process records of bridges with one configuration file.
#[derive(Debug)]
pub struct ProcessRecords {
    dir: PathBuf,
    key: String,
    boot: String,
    bridge: Process,
}

impl ProcessRecords {
    /// Opens the record directory for a configuration file. Fails if no directory is private to this user, or
    /// without `/proc`.
    pub fn open(settings: &Path) -> io::Result<Self> {
        let no_proc = || io::Error::new(io::ErrorKind::Unsupported, "no /proc to identify processes");
        let bridge = Process::find(Pid::this().as_raw()).ok_or_else(no_proc)?;
        let settings = fs::canonicalize(settings)?;
        let mut hash = Sha256::new();
        hash.update(settings.as_os_str().as_encoded_bytes());
        // Pids have a different meaning in another container.
        hash.update(fs::read_link("/proc/self/ns/pid")?.as_os_str().as_encoded_bytes());
        let key = short_hex(&hash.finalize());
        let dir = base()?.join(&key);
        make_private(&dir)?;
        Ok(Self { dir, key, boot: procfs::boot_id().ok_or_else(no_proc)?, bridge })
    }

    pub(super) fn mark(&self, agent: &str) -> String {
        let Process { pid, start } = self.bridge;
        format!("{}:{pid}:{start}:{}", self.key, short_hex(&Sha256::digest(agent)))
    }

    fn file(&self, agent: &str) -> PathBuf {
        self.dir.join(format!("{}-{}.json", self.bridge.pid, short_hex(&Sha256::digest(agent))))
    }

    pub(super) fn add(&self, agent: &str, guard: Option<i32>, child: i32) {
        let record = Record {
            boot: self.boot.clone(),
            bridge: self.bridge,
            agent: agent.to_owned(),
            guard: guard.and_then(Process::find),
            child: Process::find(child),
        };
        let written = serde_json::to_vec(&record)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(self.file(agent), text));
        if let Err(error) = written {
            tracing::warn!(agent, %error, dir = %self.dir.display(), "cannot record the process of the agent");
        }
    }

    pub(super) fn remove(&self, agent: &str) {
        let _ = fs::remove_file(self.file(agent));
    }

    /// Kills the orphans of earlier bridges with this configuration file and returns their names. Blocks for at
    /// most two seconds.
    pub fn kill_orphans(&self) -> Vec<String> {
        // If an agent started this bridge, the bridge carries the evidence of that agent itself.
        let spared = procfs::ancestors(self.bridge.pid);
        let is_meant = |process: &Process| !spared.contains(&process.pid);
        let DeadBridges { mut left, tags, files } = self.recorded();
        left.retain(is_meant);
        left.extend(self.traced(&tags).filter(is_meant));
        let found = left.iter().filter_map(|process| Stat::read(process.pid));
        let names = found.map(|stat| format!("{} ({})", stat.pid, stat.name)).collect();
        let limit = Instant::now() + Duration::from_secs(2);
        while !left.is_empty() && Instant::now() < limit {
            left.retain(|process| process.is_alive());
            for process in &left {
                let _ = kill(Pid::from_raw(process.pid), Signal::SIGKILL);
            }
            // Processes that they have started since carry the same evidence.
            left.extend(self.traced(&tags).filter(is_meant));
            let _ = nix::poll::poll(&mut [], nix::poll::PollTimeout::from(5_u8));
        }
        for file in files {
            let _ = fs::remove_file(file);
        }
        names
    }

    fn recorded(&self) -> DeadBridges {
        let mut dead = DeadBridges::default();
        for file in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = file.path();
            let record = fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Record>(&text).ok());
            let Some(record) = record else {
                dead.files.push(path);
                continue;
            };
            let same_boot = record.boot == self.boot;
            if same_boot && record.bridge.is_alive() {
                continue;
            }
            dead.files.push(path);
            let guard = record.guard.filter(|_| same_boot);
            dead.tags.extend(guard.and_then(|guard| ProcessTag::new(guard.pid, guard.start)));
            let known = [record.guard, record.child].into_iter().flatten();
            for process in known.filter(|process| same_boot && process.is_alive()) {
                dead.left.extend(procfs::descendants(process.pid).into_iter().filter_map(Process::find));
                dead.left.insert(process);
            }
        }
        dead
    }

    /// Processes with one of the tags, or with the mark of a dead bridge.
    fn traced(&self, tags: &[ProcessTag]) -> impl Iterator<Item = Process> {
        let tagged =
            process_tag::tagged_processes(tags).map(|stat| Process { pid: stat.pid, start: stat.start });
        tagged.chain(self.marked_by_dead_bridges())
    }

    fn marked_by_dead_bridges(&self) -> HashSet<Process> {
        let own = format!("{}:", self.key);
        let is_left = |pid: &i32| {
            let mark = procfs::variable(*pid, MARK);
            let Some(rest) = mark.as_deref().and_then(|mark| mark.strip_prefix(&own)) else {
                return false;
            };
            let mut parts = rest.split(':');
            let mut number = || parts.next()?.parse::<u64>().ok();
            let (Some(pid), Some(start)) = (number(), number()) else {
                return false;
            };
            i32::try_from(pid).is_ok_and(|pid| !Process { pid, start }.is_alive())
        };
        procfs::all().filter(is_left).filter_map(Process::find).collect()
    }
}

/// 64 bits are enough to distinguish names.
fn short_hex(hash: &[u8]) -> String {
    hex(hash.get(..8).unwrap_or(hash))
}

/// `$XDG_RUNTIME_DIR/a2a-bridge`, or a directory per user below the temporary directory.
fn base() -> io::Result<PathBuf> {
    let base = match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_dir()) {
        Some(dir) => Path::new(&dir).join("a2a-bridge"),
        None => std::env::temp_dir().join(format!("a2a-bridge-{}", nix::unistd::getuid())),
    };
    make_private(&base)?;
    Ok(base)
}

/// Ensures that other users cannot write to `dir`: they could make the bridge kill any process.
fn make_private(dir: &Path) -> io::Result<()> {
    let made = fs::DirBuilder::new().mode(0o700).create(dir);
    if let Err(error) = made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(error);
    }
    let found = fs::symlink_metadata(dir)?;
    if found.is_dir() && found.uid() == nix::unistd::getuid().as_raw() && found.mode() & 0o022 == 0 {
        Ok(())
    } else {
        let message = format!("{} is not a directory that only this user can write to", dir.display());
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }
}
