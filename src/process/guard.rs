//! The guard: a small process between the bridge and one child that stops the child's whole process tree.
//!
//! A guard is this program, started with a special first argument. It sets up neither threads nor a runtime
//! and uses a few hundred kilobytes. Its standard input is a socket to the bridge; its output is that of the child.
//! Its arguments and its environment do not repeat those of the child, so that `pkill -f` does not match it, and so
//! that they show no secrets. It starts the child through a [launcher](super::launch). Both sides exchange lines of
//! text:
//!
//! | from the bridge | meaning |
//! | --- | --- |
//! | a [`Launch`] as JSON | start the child; this is the first line |
//! | `stop MILLISECONDS` | send the stop signal to all descendants, SIGKILL after the grace period |
//! | `kill` | send SIGKILL now |
//! | end of file | the bridge has exited: same as `stop`, with a grace period of one second |
//!
//! | to the bridge | meaning |
//! | --- | --- |
//! | `started PID` · `failed STEP ERRNO` | result of the start |
//! | `exited code N` · `exited signal N` · `exited unknown` | exit status of the child itself |
//! | end of file | no process is left |

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::child::Exit;
use super::launch::{self, LAUNCH_ARGUMENT, Launch, LaunchError, LaunchStep};
use super::process_tag::ProcessTag;
use super::procfs;

/// The first argument that makes this program a guard.
pub const GUARD_ARGUMENT: &str = "guard-process";
/// Grace period after the bridge exits. All processes exit within two seconds of it.
const ORPHAN_GRACE: Duration = Duration::from_secs(1);
/// Grace period of descendants that outlive the child.
const DESCENDANT_GRACE: Duration = Duration::from_secs(2);
/// Poll interval while waiting for processes to exit.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const MAX_COMMAND: usize = 64;

/// Runs a guard or a launcher if the arguments ask for one. Call it before anything else.
pub fn main_if_asked() -> Option<ExitCode> {
    let argument = std::env::args_os().nth(1)?;
    if argument == LAUNCH_ARGUMENT {
        return Some(launch::main());
    }
    if argument != GUARD_ARGUMENT {
        return None;
    }
    Some(match guard() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "a2a-bridge guard: {error}");
            ExitCode::FAILURE
        }
    })
}

fn guard() -> io::Result<()> {
    close_inherited();
    // Without a tag, orphans are still found by the mark in their environment.
    let _ = ProcessTag::of(Pid::this().as_raw()).map(ProcessTag::apply);
    nix::sys::prctl::set_child_subreaper(true)?;
    let mut bridge = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = Vec::new();
    // The bridge sends nothing else before it has read the result of the start.
    let read = BufReader::new(&bridge).read_until(b'\n', &mut line);
    let Some(launch) = read.ok().and_then(|_| serde_json::from_slice::<Launch>(&line).ok()) else {
        let message = format!("{GUARD_ARGUMENT} is an internal command: the bridge runs agents under it");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    };
    let stop_signal = launch.stop_signal.parse().unwrap_or(Signal::SIGTERM);
    drop(launch);
    let leader = match start_launcher(&line) {
        Ok(pid) => pid,
        Err(error) => return writeln!(bridge, "failed {error}"),
    };
    drop(line);
    // Block signals after the spawn: a child inherits the mask and would ignore SIGTERM.
    let signals = SigSet::from_iter([
        Signal::SIGCHLD,
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ]);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&signals), None)?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let _ = writeln!(bridge, "started {leader}");
    bridge.set_nonblocking(true)?;
    Guard {
        leader: Pid::from_raw(leader),
        leader_exited: false,
        stop_signal,
        bridge: Some(bridge),
        signals,
        input: String::new(),
        kill_at: None,
        began: 0,
        signalled: HashMap::new(),
    }
    .run();
    Ok(())
}

/// Starts a launcher and waits until it has become the child.
fn start_launcher(launch: &[u8]) -> Result<i32, LaunchError> {
    let failed = |error| LaunchError(LaunchStep::Exec, error);
    let (mut ours, theirs) = UnixStream::pair().map_err(failed)?;
    let mut launcher = Command::new("/proc/self/exe");
    launcher.arg0("a2a-bridge").arg(LAUNCH_ARGUMENT).env_clear().process_group(0);
    launcher.stdin(Stdio::from(OwnedFd::from(theirs)));
    let child = launcher.spawn().map_err(failed)?;
    // It holds a copy of the launcher's socket.
    drop(launcher);
    let mut report = String::new();
    ours.write_all(launch)
        .and_then(|()| ours.shutdown(Shutdown::Write))
        .and_then(|()| ours.read_to_string(&mut report))
        .map_err(failed)?;
    match LaunchError::parse(&report) {
        Some(error) => Err(error),
        None => Ok(i32::try_from(child.id()).unwrap_or_default()),
    }
}

/// Closes descriptors that the bridge inherited, so that the child does not get them.
fn close_inherited() {
    let open: Vec<i32> = fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > 2) {
        // No descriptor above 2 has an owner here; the directory handle is closed already.
        let _ = nix::unistd::close(descriptor);
    }
}

struct Guard {
    leader: Pid,
    /// From then on, another process may have the same pid.
    leader_exited: bool,
    stop_signal: Signal,
    /// `None` once the bridge has exited.
    bridge: Option<UnixStream>,
    signals: SignalFd,
    input: String,
    /// When to send SIGKILL, once stopping has begun.
    kill_at: Option<Instant>,
    /// When stopping began, in clock ticks since boot.
    began: u64,
    /// The processes that got the stop signal, with their names at that time.
    signalled: HashMap<i32, String>,
}

impl Guard {
    /// Returns when no descendant is left.
    fn run(mut self) {
        loop {
            if self.reap() {
                return;
            }
            match self.kill_at {
                Some(limit) if Instant::now() >= limit => signal_all(Signal::SIGKILL),
                Some(_) => self.send_stop_signals(),
                None => {}
            }
            self.wait();
            self.read_commands();
            while let Ok(Some(info)) = self.signals.read_signal() {
                // SIGCHLD only wakes up the loop; the other signals ask the guard to stop.
                if i32::try_from(info.ssi_signo) != Ok(Signal::SIGCHLD as i32) {
                    self.stop(DESCENDANT_GRACE);
                }
            }
        }
    }

    /// Waits for a signal, a command, or the next poll.
    fn wait(&self) {
        let timeout = match self.kill_at {
            // No SIGCHLD arrives for descendants that another process reaps.
            Some(_) => PollTimeout::try_from(POLL_INTERVAL).unwrap_or(PollTimeout::ZERO),
            None => PollTimeout::NONE,
        };
        let mut watched = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        watched.extend(self.bridge.iter().map(|bridge| PollFd::new(bridge.as_fd(), PollFlags::POLLIN)));
        let _ = poll(&mut watched, timeout);
    }

    fn read_commands(&mut self) {
        let mut text = [0; MAX_COMMAND];
        while let Some(bridge) = &mut self.bridge {
            match bridge.read(&mut text) {
                Ok(count @ 1..) => {
                    let part = text.get(..count).unwrap_or_default();
                    self.input.push_str(&String::from_utf8_lossy(part));
                    while let Some((command, rest)) = self.input.split_once('\n') {
                        let (command, rest) = (command.to_owned(), rest.to_owned());
                        self.execute(&command);
                        self.input = rest;
                    }
                    self.input.truncate(MAX_COMMAND);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // End of file or a broken socket: the bridge has exited.
                Ok(_) | Err(_) => {
                    self.bridge = None;
                    self.stop(ORPHAN_GRACE);
                }
            }
        }
    }

    fn execute(&mut self, command: &str) {
        match command.split_once(' ') {
            Some(("stop", grace)) => {
                self.stop(Duration::from_millis(grace.parse().unwrap_or_default()));
            }
            _ => {
                self.kill_at = Some(Instant::now());
                signal_all(Signal::SIGKILL);
            }
        }
    }

    /// Begins to stop all descendants. A second call can only shorten the grace period.
    fn stop(&mut self, grace: Duration) {
        let limit = Instant::now() + grace;
        if let Some(kill_at) = &mut self.kill_at {
            *kill_at = limit.min(*kill_at);
            return;
        }
        self.kill_at = Some(limit);
        self.began = procfs::ticks().unwrap_or_default();
        self.send_stop_signals();
    }

    /// Sends the stop signal to descendants that have not received it. Each process gets it once, because
    /// some programs treat a second signal as a request to abort. The first pass misses only processes that
    /// are being forked. Processes that start later belong to the shutdown of others, such as a command in a
    /// shell trap, and are left alone while their parent lives.
    fn send_stop_signals(&mut self) {
        let is_first = self.signalled.is_empty();
        let own = Pid::this().as_raw();
        for stat in procfs::descendants(own).into_iter().filter_map(procfs::Stat::read) {
            let is_alone = stat.parent == own;
            let is_due = match self.signalled.get(&stat.pid) {
                None => is_first || stat.start < self.began || is_alone,
                // A shell's child that has since called exec has lost the signal.
                Some(name) => is_alone && stat.pid != self.leader.as_raw() && *name != stat.name,
            };
            if is_due {
                let pid = Pid::from_raw(stat.pid);
                self.signalled.insert(stat.pid, stat.name);
                let _ = kill(pid, self.stop_signal);
                // A suspended process handles a signal only after SIGCONT.
                let _ = kill(pid, Signal::SIGCONT);
            }
        }
    }

    /// Reaps exited descendants. Returns whether none is left.
    fn reap(&mut self) -> bool {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => self.exited(pid, &format!("code {code}")),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    self.exited(pid, &format!("signal {}", signal as i32));
                }
                Ok(WaitStatus::StillAlive) => return false,
                Err(Errno::EINTR) | Ok(_) => {}
                // `nix` cannot name real-time signals, so the pid of the reaped process is unknown.
                Err(Errno::EINVAL) => {
                    if !self.leader_exited && kill(self.leader, None) == Err(Errno::ESRCH) {
                        self.exited(self.leader, "unknown");
                    }
                }
                Err(_) => return true,
            }
        }
    }

    fn exited(&mut self, pid: Pid, status: &str) {
        if pid != self.leader || self.leader_exited {
            return;
        }
        self.leader_exited = true;
        if let Some(bridge) = &mut self.bridge {
            let _ = writeln!(bridge, "exited {status}");
        }
        // After a command, the remaining processes keep the grace period of that command.
        if self.kill_at.is_none() {
            self.stop(DESCENDANT_GRACE);
        }
    }
}

fn signal_all(signal: Signal) {
    for pid in procfs::descendants(Pid::this().as_raw()) {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

/// Parses an exit status from the guard. An unreadable status is unknown, never a success.
pub(super) fn read_status(text: &str) -> Exit {
    let status = text.split_once(' ').and_then(|(kind, number)| {
        let number: i32 = number.parse().ok()?;
        // The layout of wait(2): the exit code is in the second byte, the signal in the first.
        match (kind, number) {
            ("code", 0..=0xff) => Some(ExitStatus::from_raw(number << 8)),
            ("signal", 1..0x7f) => Some(ExitStatus::from_raw(number)),
            _ => None,
        }
    });
    status.map_or(Exit::Unknown, Exit::Known)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("code 0", "exited with code 0", true)]
    #[case("code 255", "exited with code 255", false)]
    #[case("signal 9", "was killed by SIGKILL", false)]
    #[case("signal 34", "was killed by signal 34", false)]
    #[case("unknown", "exited with an unknown status", false)]
    #[case("code 256", "exited with an unknown status", false)]
    #[case("code -256", "exited with an unknown status", false)]
    #[case("signal 0", "exited with an unknown status", false)]
    #[case("signal 128", "exited with an unknown status", false)]
    #[case("code", "exited with an unknown status", false)]
    #[case("", "exited with an unknown status", false)]
    fn a_report_that_cannot_be_read_is_no_success(
        #[case] report: &str,
        #[case] text: &str,
        #[case] is_success: bool,
    ) {
        let exit = read_status(report);
        assert_eq!((exit.to_string().as_str(), exit.is_success()), (text, is_success));
    }
}
