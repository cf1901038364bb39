//! Processes as Linux reports them in `/proc`: parents, states, start times, sockets.
//!
//! On other systems nothing is found. Every result is a snapshot. A process that exits in the meantime is skipped, not an error.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nix::errno::Errno;

/// One line of `/proc/<pid>/stat`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    pub pid: i32,
    /// The name of the program, truncated to 15 bytes by the kernel.
    pub name: String,
    /// `R`, `S`, `T` (stopped), `Z` (zombie), …
    pub state: char,
    pub parent: i32,
    pub group: i32,
    /// Start time in clock ticks since boot. Together with the pid it identifies a process.
    pub start: u64,
}

impl Stat {
    pub fn read(pid: i32) -> Option<Self> {
        // Not UTF-8 if the kernel has cut the name inside a character.
        Self::parse(&String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?))
    }

    fn parse(line: &str) -> Option<Self> {
        // The name is in parentheses and may contain spaces and parentheses.
        let (head, tail) = line.rsplit_once(')')?;
        let (pid, name) = head.split_once(" (")?;
        let mut fields = tail.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        // proc_pid_stat(5): starttime is field 22, the group is field 5.
        let start = fields.nth(16)?.parse().ok()?;
        Some(Self { pid: pid.parse().ok()?, name: name.to_owned(), state, parent, group, start })
    }

    /// Whether the process has exited, even if it is not reaped yet.
    pub fn has_exited(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Identifies the current boot; start times are comparable only within one boot.
pub fn boot_id() -> Option<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned())
}

/// The current time in the unit of start times: hundredths of a second since boot.
pub fn ticks() -> Option<u64> {
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    uptime.split_ascii_whitespace().next()?.replace('.', "").parse().ok()
}

pub fn all() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// The children of a process, including zombies.
pub fn children(pid: i32) -> Vec<i32> {
    read_children(pid).unwrap_or_default()
}

/// As [`children`]. Fails if the list cannot be read, for example because this process has no descriptors left.
fn read_children(pid: i32) -> io::Result<Vec<i32>> {
    let mut children = Vec::new();
    let threads = match fs::read_dir(format!("/proc/{pid}/task")) {
        Err(error) if is_exit(&error) => return Ok(children),
        threads => threads?,
    };
    for thread in threads {
        let thread = thread?.path();
        match fs::read_to_string(thread.join("children")) {
            Ok(list) => {
                children.extend(list.split_ascii_whitespace().filter_map(|id| id.parse::<i32>().ok()));
            }
            // The kernel lacks this file.
            Err(error) if error.kind() == io::ErrorKind::NotFound && thread.exists() => {
                let all = all().filter_map(Stat::read);
                return Ok(all.filter(|stat| stat.parent == pid).map(|stat| stat.pid).collect());
            }
            // The thread has just exited.
            Err(error) if is_exit(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(children)
}

/// All descendants of a process, nearest first, without the process itself.
pub fn descendants(pid: i32) -> Vec<i32> {
    let (found, _) = read_descendants(pid);
    found
}

/// As [`descendants`], and whether all of them could be read.
pub(super) fn read_descendants(pid: i32) -> (Vec<i32>, bool) {
    let mut found = Vec::new();
    let mut known = HashSet::from([pid]);
    let mut is_complete = true;
    let mut next = 0;
    let mut parent = Some(pid);
    while let Some(pid) = parent {
        let children = read_children(pid);
        is_complete &= children.is_ok();
        found.extend(children.unwrap_or_default().into_iter().filter(|child| known.insert(*child)));
        parent = found.get(next).copied();
        next += 1;
    }
    (found, is_complete)
}

/// A process and its ancestors, nearest first.
pub fn ancestors(pid: i32) -> Vec<i32> {
    let (found, _) = read_ancestors(pid, Stat::read);
    found
}

/// Whether a process is, or descends from, `ancestor`; `None` if not all its ancestors can be read.
pub(super) fn descends_from(pid: i32, ancestor: i32) -> Option<bool> {
    is_below(pid, ancestor, Stat::read)
}

fn is_below(pid: i32, ancestor: i32, read: impl Fn(i32) -> Option<Stat>) -> Option<bool> {
    let (found, is_complete) = read_ancestors(pid, read);
    let is_found = found.contains(&ancestor);
    (is_found || is_complete).then_some(is_found)
}

/// A process and its ancestors, and whether all of them could be read.
fn read_ancestors(pid: i32, read: impl Fn(i32) -> Option<Stat>) -> (Vec<i32>, bool) {
    let mut found = vec![pid];
    let mut last = pid;
    loop {
        let Some(Stat { parent, .. }) = read(last) else { return (found, false) };
        if parent <= 0 {
            return (found, true);
        }
        found.push(parent);
        last = parent;
    }
}

/// The value of an environment variable at the start of the process.
pub fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    environment.split(|byte| *byte == 0).find_map(|pair| {
        let value = pair.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(String::from_utf8_lossy(value).into_owned())
    })
}

/// The soft limit for file locks; `None` if unlimited.
pub fn lock_limit(pid: i32) -> Option<u64> {
    let limits = fs::read(format!("/proc/{pid}/limits")).ok()?;
    let limits = String::from_utf8_lossy(&limits);
    let line = limits.lines().find_map(|line| line.strip_prefix("Max file locks"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Which processes hold some sockets.
#[derive(Debug, Default)]
pub struct SocketHolders {
    /// The pids, by the inode of the socket.
    pub held: HashMap<u64, Vec<i32>>,
    /// Some descriptors were not read, so that more processes may hold the sockets. The process belongs to
    /// another user or is not dumpable, this process has no descriptors left, or there are more than
    /// [`MAX_DESCRIPTORS`].
    pub is_incomplete: bool,
}

/// How many descriptors of all processes together are read, which takes some 20 ms. Processes themselves count too.
const MAX_DESCRIPTORS: usize = 20_000;

/// The pids among `processes` that hold the `wanted` sockets.
pub fn sockets(processes: impl IntoIterator<Item = i32>, wanted: &HashSet<u64>) -> SocketHolders {
    read_sockets(processes, wanted, MAX_DESCRIPTORS)
}

fn read_sockets(
    processes: impl IntoIterator<Item = i32>,
    wanted: &HashSet<u64>,
    mut left: usize,
) -> SocketHolders {
    let mut holders = SocketHolders::default();
    for pid in processes {
        if let Err(error) = add_sockets(pid, wanted, &mut holders.held, &mut left)
            && !is_exit(&error)
        {
            holders.is_incomplete = true;
        }
    }
    holders
}

/// Reads `left` descriptors at most. Fails if there are more.
fn add_sockets(
    pid: i32,
    wanted: &HashSet<u64>,
    held: &mut HashMap<u64, Vec<i32>>,
    left: &mut usize,
) -> io::Result<()> {
    let mut count = || {
        *left = left.checked_sub(1).ok_or(io::ErrorKind::QuotaExceeded)?;
        io::Result::Ok(())
    };
    count()?;
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd"))? {
        count()?;
        let target = match fs::read_link(descriptor?.path()) {
            Ok(target) => target,
            // Closed in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        let inode =
            target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        if let Some(inode) = inode.filter(|inode| wanted.contains(inode)) {
            held.entry(inode).or_default().push(pid);
        }
    }
    Ok(())
}

/// Whether reading failed because the process has exited.
fn is_exit(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

/// Address, port and inode of a listening TCP socket.
pub(super) type Listener = (IpAddr, u16, u64);

/// All listening TCP sockets; `None` if they cannot be read.
pub(super) fn listeners() -> Option<Vec<Listener>> {
    let mut sockets = Vec::new();
    read_listeners("/proc/net/tcp", &mut sockets).ok()?;
    match read_listeners("/proc/net/tcp6", &mut sockets) {
        // IPv6 is disabled.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        read => read.ok()?,
    }
    Some(sockets)
}

/// The kernel lists listening sockets first and generates lines on demand, so reading stops after the last
/// listening socket; there may be thousands of others.
fn read_listeners(path: &str, sockets: &mut Vec<Listener>) -> io::Result<()> {
    for line in BufReader::new(fs::File::open(path)?).lines().skip(1) {
        match listener(&line?) {
            Some(socket) => sockets.push(socket),
            None => break,
        }
    }
    Ok(())
}

fn listener(line: &str) -> Option<Listener> {
    const LISTEN: &str = "0A";
    let mut fields = line.split_ascii_whitespace();
    let (address, number) = fields.nth(1)?.split_once(':')?;
    if fields.nth(1)? != LISTEN {
        return None;
    }
    let port = u16::from_str_radix(number, 16).ok()?;
    Some((ip(address)?, port, fields.nth(5)?.parse().ok()?))
}

/// 32-bit words in native byte order.
fn ip(text: &str) -> Option<IpAddr> {
    let word = |index: usize| {
        let digits = text.get(index * 8..index * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    if text.len() == 8 {
        return Some(Ipv4Addr::from(word(0)?).into());
    }
    let bytes = [word(0)?, word(1)?, word(2)?, word(3)?].concat();
    Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let line = "42 (a) b (c) T 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 98765 1 2 3";
        let stat = Stat::parse(line).unwrap();
        assert_eq!((stat.pid, stat.name.as_str(), stat.state), (42, "a) b (c", 'T'));
        assert_eq!((stat.parent, stat.group, stat.start), (7, 42, 98765));
    }

    #[test]
    fn a_name_that_is_cut_inside_a_character_does_not_hide_the_process() {
        // The kernel keeps 15 bytes of a name; these are 16, two for each character.
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("öööööööö");
        // Not a copy: a file that a parallel test holds open for writing cannot be executed.
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut child = std::process::Command::new(&program).arg("1000").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let mut attempts = std::iter::repeat_with(|| Stat::read(pid)).take(100_000).flatten();
        let stat = attempts.find(|stat| stat.name.starts_with('ö'));
        let is_above = ancestors(pid).contains(&own);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(stat.map(|stat| (stat.pid, stat.parent)), Some((pid, own)));
        assert!(is_above);
    }

    #[test]
    fn a_process_knows_itself_its_children_and_its_environment() {
        let own = i32::try_from(std::process::id()).unwrap();
        let stat = Stat::read(own).unwrap();
        assert_eq!(stat.pid, own);
        assert!(stat.start <= ticks().unwrap());
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .env("A2A_TEST_MARK", "x=y")
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let found = children(own).contains(&pid) && descendants(own).contains(&pid);
        let above = ancestors(pid);
        // The environment appears a moment after exec.
        let mut attempts = std::iter::repeat_with(|| variable(pid, "A2A_TEST_MARK"));
        let mark = attempts.by_ref().take(100_000).find_map(|mark| mark);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found);
        assert_eq!(above[..3], [pid, own, stat.parent]);
        assert_eq!(mark.as_deref(), Some("x=y"));
        assert!(!children(own).contains(&pid));
    }

    #[test]
    fn without_all_ancestors_it_is_not_known_who_is_not_among_them() {
        let own = i32::try_from(std::process::id()).unwrap();
        let parent = Stat::read(own).unwrap().parent;
        assert_eq!((descends_from(own, own), descends_from(own, parent)), (Some(true), Some(true)));
        assert_eq!(descends_from(own, i32::MAX), Some(false));
        // As without a free descriptor.
        let unreadable = |pid| Stat::read(pid).filter(|_| pid == own);
        assert_eq!(is_below(own, parent, unreadable), Some(true));
        assert_eq!(is_below(own, i32::MAX, unreadable), None);
    }

    #[test]
    fn only_a_limited_number_of_descriptors_is_read() {
        let own = i32::try_from(std::process::id()).unwrap();
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let is_wanted = |listener: &Listener| listener.1 == port;
        let inode = listeners().unwrap().into_iter().find(is_wanted).unwrap().2;
        let wanted = HashSet::from([inode]);
        let all = sockets([own], &wanted);
        assert_eq!((all.held.get(&inode), all.is_incomplete), (Some(&vec![own]), false));
        // The process itself, and its standard streams.
        let few = read_sockets([own, own], &wanted, 4);
        assert_eq!((few.held.len(), few.is_incomplete), (0, true));
    }
}
