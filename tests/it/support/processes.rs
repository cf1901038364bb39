//! The program under test, ports, signals, and the processes that a test's bridge launched.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::LazyLock;
use std::time::Duration;

use a2a_bridge::guard::GUARD_ARGUMENT;
use a2a_bridge::internal::procfs::{self, Stat};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::within_deadline;

/// The variable that marks every process which a test's bridge launched.
pub const MARK: &str = "A2A_TEST_MARK";

/// The path of the program under test: `A2A_BRIDGE_BIN`, to try the tests with another build, or the one that cargo
/// built with them.
pub fn program() -> &'static str {
    static PROGRAM: LazyLock<String> = LazyLock::new(|| {
        std::env::var("A2A_BRIDGE_BIN").unwrap_or_else(|_| env!("CARGO_BIN_EXE_a2a-bridge").to_owned())
    });
    &PROGRAM
}

/// A port that is free right now, and that no outgoing connection takes: those use higher ones.
pub fn free_port() -> u16 {
    loop {
        let port = fastrand::u16(10_000..32_000);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

/// A figure of a process in bytes: `VmRSS` is its resident memory, `VmHWM` the greatest so far. It is 0 if the process
/// has ended.
pub fn memory(pid: impl Into<i64>, figure: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.into())).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(figure)?.strip_prefix(':'));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024)
}

/// The CPU time of a process in ticks, of which a second has 100.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the bridge runs");
    stat.split(' ').skip(13).take(2).map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

/// Waits until a process uses hardly any CPU time. Its timers may still run.
pub async fn until_idle(pid: u32) {
    const INTERVAL: Duration = Duration::from_millis(300);
    within_deadline(async {
        let mut last = cpu_ticks(pid);
        loop {
            tokio::time::sleep(INTERVAL).await;
            let now = cpu_ticks(pid);
            if now - last <= 3 {
                break;
            }
            last = now;
        }
    })
    .await;
}

/// The living processes whose environment has the mark. A zombie and a guard do not have it.
pub fn marked(mark: &str) -> Vec<i32> {
    procfs::all().filter(|pid| procfs::variable(*pid, MARK).is_some_and(|found| found == mark)).collect()
}

/// The living guards that these bridges have started, even if a bridge has exited.
pub fn guards(bridges: &[i32]) -> Vec<i32> {
    let is_started_by_bridge = |pid: i32| {
        // A mark is `KEY:BRIDGE:…`.
        let mark = procfs::variable(pid, "A2A_BRIDGE_AGENT").unwrap_or_default();
        let bridge = mark.split(':').nth(1).and_then(|bridge| bridge.parse().ok());
        let parent = Stat::read(pid).map(|stat| stat.parent);
        [bridge, parent].into_iter().flatten().any(|pid| bridges.contains(&pid))
    };
    let is_guard = |pid: i32| command_line(pid).split('\0').nth(1) == Some(GUARD_ARGUMENT);
    procfs::all().filter(|pid| is_guard(*pid) && is_started_by_bridge(*pid)).collect()
}

/// The arguments of a process, each followed by a NUL.
pub fn command_line(pid: i32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).into_owned()
}

/// Sends a signal to a process, which may have exited already.
pub fn signal(pid: i32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid), signal);
}
