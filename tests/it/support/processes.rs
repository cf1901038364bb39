//! Ports, signals and what is left of processes.

use std::net::{Ipv4Addr, TcpListener};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The variable that marks every process which a test's bridge has launched.
pub const MARK: &str = "A2A_BRIDGE_TEST_MARK";

/// A port that is free right now, and that no outgoing connection will take: those use higher ones.
pub fn free_port() -> u16 {
    loop {
        let port = fastrand::u16(10_000..32_000);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

/// The processes of this system whose environment has the mark. A zombie has none.
pub fn marked(mark: &str) -> Vec<i32> {
    let wanted = format!("{MARK}={mark}").into_bytes();
    let Ok(all) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            // The guards are the bridge's own; they end with what they guard.
            let is_guard = std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.starts_with(b"a2a-bridge: guard of"));
            !is_guard
                && std::fs::read(format!("/proc/{pid}/environ"))
                    .is_ok_and(|environ| environ.split(|byte| *byte == 0).any(|entry| entry == wanted))
        })
        .collect()
}

/// Sends a signal to one process.
pub fn signal(pid: i32, signal: Signal) {
    // It may have ended by itself.
    let _ = kill(Pid::from_raw(pid), signal);
}
