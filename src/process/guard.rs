//! The guard: a small process between the bridge and one child, and the end of everything below it.
//!
//! It is this same program, entered before anything else is set up: no threads, no runtime, a few
//! hundred kilobytes of its own. Its standard input is its end of a socket to the bridge; output and
//! environment are the child's. A line of text each way:
//!
//! | from the bridge | meaning |
//! | --- | --- |
//! | `stop MILLISECONDS` | ask everything below to end, SIGKILL after the grace |
//! | `kill` | SIGKILL at once |
//! | end of file | the bridge is gone: as `stop`, with a grace of one second |
//!
//! | to the bridge | meaning |
//! | --- | --- |
//! | `started PID` · `failed ERRNO` | how the start went |
//! | `exited code N` · `exited signal N` · `exited unknown` | how the child itself ended |
//! | end of file | nothing is left |

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::child::Exit;
use super::process_tag::ProcessTag;
use super::procfs;

/// The first argument of a guard.
pub const GUARD_ARGUMENT: &str = "guard-process";
/// Grace when the bridge is gone: everything has to be gone two seconds after it.
const ORPHAN_GRACE: Duration = Duration::from_secs(1);
/// Grace of what a child that ended by itself has left behind.
const DESCENDANT_GRACE: Duration = Duration::from_secs(2);
/// Poll interval while waiting for processes to exit.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const MAX_COMMAND: usize = 64;

/// Runs a guard if the arguments ask for one; call it first of all.
pub fn main_if_asked() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != GUARD_ARGUMENT {
        return None;
    }
    let signal = arguments.next().and_then(|word| word.to_str()?.parse().ok());
    let program = arguments.next();
    let (Some(signal), Some(program)) = (signal, program) else {
        let _ = writeln!(
            io::stderr(),
            "{GUARD_ARGUMENT} is what the bridge runs its agents under, nothing for people"
        );
        return Some(ExitCode::from(64));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    Some(match guard(command, signal) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "a2a-bridge guard: {error}");
            ExitCode::FAILURE
        }
    })
}

fn guard(mut command: Command, stop_signal: Signal) -> io::Result<()> {
    close_inherited();
    // Without a tag, those are found that keep their environment.
    let _ = ProcessTag::of(own()).map(ProcessTag::apply);
    nix::sys::prctl::set_child_subreaper(true)?;
    let mut bridge = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let started = command
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .map(|child| i32::try_from(child.id()).unwrap_or_default());
    let leader = match started {
        Ok(pid) => pid,
        Err(error) => {
            let number = error.raw_os_error().unwrap_or_default();
            return writeln!(bridge, "failed {number}");
        }
    };
    // Only now: a child inherits what is blocked, and would never see a SIGTERM.
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
        ending: None,
        began: 0,
        signalled: HashMap::new(),
    }
    .run();
    Ok(())
}

/// Whoever started the bridge may have left descriptors open for it; the child gets none of them.
fn close_inherited() {
    let open: Vec<i32> = fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for descriptor in open.into_iter().filter(|descriptor| *descriptor > 2) {
        // Nothing is open here that anyone owns; the folder that was just read is closed already.
        let _ = nix::unistd::close(descriptor);
    }
}

struct Guard {
    leader: Pid,
    /// Its process id may belong to somebody else from then on.
    leader_exited: bool,
    stop_signal: Signal,
    /// `None` once the bridge is gone.
    bridge: Option<UnixStream>,
    signals: SignalFd,
    input: String,
    /// When the grace is over, once the end has begun.
    ending: Option<Instant>,
    /// When the end began, in clock ticks since boot.
    began: u64,
    /// Who was asked to end, and the name of its program then.
    signalled: HashMap<i32, String>,
}

impl Guard {
    /// Returns when nothing is left below.
    fn run(mut self) {
        loop {
            if self.reap() {
                return;
            }
            match self.ending {
                Some(limit) if Instant::now() >= limit => signal_all(Signal::SIGKILL),
                Some(_) => self.send_stop_signals(),
                None => {}
            }
            self.wait();
            self.read_commands();
            while let Ok(Some(info)) = self.signals.read_signal() {
                // SIGCHLD only wakes us up; the others are somebody's wish to end this.
                if i32::try_from(info.ssi_signo) != Ok(Signal::SIGCHLD as i32) {
                    self.end(DESCENDANT_GRACE);
                }
            }
        }
    }

    /// Until something happens, or it is time to look again.
    fn wait(&self) {
        let timeout = match self.ending {
            // Children that others have to reap end without a signal to us.
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
                // The end, or a broken socket: the bridge is gone.
                Ok(_) | Err(_) => {
                    self.bridge = None;
                    self.end(ORPHAN_GRACE);
                }
            }
        }
    }

    fn execute(&mut self, command: &str) {
        match command.split_once(' ') {
            Some(("stop", grace)) => {
                self.end(Duration::from_millis(grace.parse().unwrap_or_default()));
            }
            _ => {
                self.ending = Some(Instant::now());
                signal_all(Signal::SIGKILL);
            }
        }
    }

    /// Asks everything below to end. A second time only shortens the grace.
    fn end(&mut self, grace: Duration) {
        let limit = Instant::now() + grace;
        if let Some(ending) = &mut self.ending {
            *ending = limit.min(*ending);
            return;
        }
        self.ending = Some(limit);
        self.began = procfs::ticks().unwrap_or_default();
        self.send_stop_signals();
    }

    /// Asks those who were not asked yet; nobody is asked twice, as some take that for impatience. The
    /// first look finds all but those that were just being forked. What is started later is how the
    /// others end, such as what a script runs in its trap, and is left to them while they live.
    fn send_stop_signals(&mut self) {
        let is_first = self.signalled.is_empty();
        for stat in below().into_iter().filter_map(procfs::Stat::read) {
            let is_alone = stat.parent == own();
            let is_due = match self.signalled.get(&stat.pid) {
                None => is_first || stat.start < self.began || is_alone,
                // What was a shell's child on its way to its program has lost the signal.
                Some(name) => is_alone && stat.pid != self.leader.as_raw() && *name != stat.name,
            };
            if is_due {
                let pid = Pid::from_raw(stat.pid);
                self.signalled.insert(stat.pid, stat.name);
                let _ = kill(pid, self.stop_signal);
                // A stopped process acts upon its end only when it goes on.
                let _ = kill(pid, Signal::SIGCONT);
            }
        }
    }

    /// Reaps whoever has ended; whether nobody is left.
    fn reap(&mut self) -> bool {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => self.ended(pid, &format!("code {code}")),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    self.ended(pid, &format!("signal {}", signal as i32));
                }
                Ok(WaitStatus::StillAlive) => return false,
                Err(Errno::EINTR) | Ok(_) => {}
                // One was reaped by a signal that has no name, a real-time signal, and it is not known which one.
                Err(Errno::EINVAL) => {
                    if !self.leader_exited && kill(self.leader, None) == Err(Errno::ESRCH) {
                        self.ended(self.leader, "unknown");
                    }
                }
                Err(_) => return true,
            }
        }
    }

    fn ended(&mut self, pid: Pid, status: &str) {
        if pid != self.leader || self.leader_exited {
            return;
        }
        self.leader_exited = true;
        if let Some(bridge) = &mut self.bridge {
            let _ = writeln!(bridge, "exited {status}");
        }
        // Those who were asked to end have the grace that was ordered, also after a shell above them.
        if self.ending.is_none() {
            self.end(DESCENDANT_GRACE);
        }
    }
}

fn signal_all(signal: Signal) {
    for pid in below() {
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

fn below() -> Vec<i32> {
    procfs::descendants(own())
}

fn own() -> i32 {
    i32::try_from(std::process::id()).unwrap_or_default()
}

/// A status as the guard reported it. Whatever cannot be read is unknown, and never a success.
pub(super) fn read_status(text: &str) -> Exit {
    let status = text.split_once(' ').and_then(|(kind, number)| {
        let number: i32 = number.parse().ok()?;
        // As wait(2) has it: the code in the second byte, or the signal in the first.
        match (kind, number) {
            ("code", 0..=0xff) => Some(ExitStatus::from_raw(number << 8)),
            ("signal", 1..0x7f) => Some(ExitStatus::from_raw(number)),
            _ => None,
        }
    });
    status.map_or(Exit::Unknown, Exit::Known)
}

/// Two ends of a socket: ours, and the one that becomes a guard's standard input.
pub(super) fn socket_pair() -> io::Result<(UnixStream, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    Ok((ours, theirs.into()))
}

static PROGRAM: OnceLock<PathBuf> = OnceLock::new();

/// Names the program that can be a guard. The `a2a-bridge` program names itself; without a name,
/// children run in plain process groups.
pub fn use_program(program: impl Into<PathBuf>) {
    // The first name counts; a second one would be the same.
    let _ = PROGRAM.set(program.into());
}

pub(super) fn program() -> Option<&'static Path> {
    PROGRAM.get().map(PathBuf::as_path)
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
    #[case("unknown", "ended with an unknown exit status", false)]
    #[case("code 256", "ended with an unknown exit status", false)]
    #[case("code -256", "ended with an unknown exit status", false)]
    #[case("signal 0", "ended with an unknown exit status", false)]
    #[case("signal 128", "ended with an unknown exit status", false)]
    #[case("code", "ended with an unknown exit status", false)]
    #[case("", "ended with an unknown exit status", false)]
    fn a_report_that_cannot_be_read_is_no_success(
        #[case] report: &str,
        #[case] text: &str,
        #[case] is_success: bool,
    ) {
        let exit = read_status(report);
        assert_eq!((exit.to_string().as_str(), exit.is_success()), (text, is_success));
    }
}
