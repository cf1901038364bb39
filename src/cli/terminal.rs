//! Talking with whoever sits at the terminal.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};

use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::output::{Colour, To};
use super::{DEFECT, Failure};

/// Whether there is somebody to ask. Questions are talk, so they go to stderr.
pub(super) fn has_somebody() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Whether an answer shows while it is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Echo {
    On,
    Off,
}

/// How a question at the terminal ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// A line.
    Line(String),
    /// Ctrl-D, or Ctrl-C.
    Left,
}

/// Ctrl-C, as something to wait for.
#[derive(Debug)]
pub(super) struct Interrupts(Signal);

impl Interrupts {
    /// From here on Ctrl-C does not end the program by itself.
    pub(super) fn new() -> Result<Self, Failure> {
        let signal = signal(SignalKind::interrupt()).map_err(|error| Failure::new(DEFECT, error))?;
        Ok(Self(signal))
    }

    pub(super) async fn next(&mut self) {
        self.0.recv().await;
    }
}

/// A terminal shows `^C`; what is said next begins on a line of its own.
pub(super) fn after_interrupt() {
    if io::stderr().is_terminal() {
        let _ = writeln!(io::stderr());
    }
}

/// Reads a line.
pub(super) async fn ask(echo: Echo, interrupts: &mut Interrupts) -> io::Result<Answer> {
    let silence = (echo == Echo::Off).then(Silence::begin).transpose()?;
    let mut err = io::stderr();
    let _ = write!(err, "{}", To::Stderr.paint(Colour::Bold, "> "));
    let _ = err.flush();
    // Reading blocks and cannot be called off; after Ctrl-C the thread ends with the program.
    let read = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).map(|count| (count, line))
    });
    let answer = tokio::select! {
        read = read => {
            let (count, line) = read.map_err(io::Error::other)??;
            match count {
                0 => Answer::Left,
                _ => Answer::Line(line.trim_end_matches(['\r', '\n']).to_owned()),
            }
        }
        () = interrupts.next() => Answer::Left,
    };
    if silence.is_some() || answer == Answer::Left {
        let _ = writeln!(err);
    }
    Ok(answer)
}

/// A terminal that does not echo, until this is dropped.
struct Silence {
    terminal: OwnedFd,
    before: Termios,
}

impl Silence {
    fn begin() -> io::Result<Self> {
        let terminal = io::stdin().as_fd().try_clone_to_owned()?;
        let before = tcgetattr(&terminal)?;
        let mut silent = before.clone();
        silent.local_flags.remove(LocalFlags::ECHO);
        tcsetattr(&terminal, SetArg::TCSAFLUSH, &silent)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Silence {
    fn drop(&mut self) {
        let _ = tcsetattr(&self.terminal, SetArg::TCSANOW, &self.before);
    }
}
