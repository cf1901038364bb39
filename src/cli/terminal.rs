//! The terminal: questions to the user, Ctrl-C, a screen that is drawn again and again.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};

use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Mutex;

use super::output::{Colour, StdStream};
use super::{CliError, CliResult};

/// Whether the user can answer questions. They are printed to stderr.
pub(super) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Ctrl-C as an event. While this exists, Ctrl-C does not end the program.
#[derive(Debug)]
pub(super) struct Interrupts(Mutex<Signal>);

impl Interrupts {
    pub(super) fn new() -> CliResult<Self> {
        Ok(Self(Mutex::new(signal(SignalKind::interrupt()).map_err(CliError::internal)?)))
    }

    pub(super) async fn next(&self) {
        self.0.lock().await.recv().await;
    }
}

/// Waits for a signal that ends the program, so that it can clean up.
pub(super) async fn termination() -> CliResult<()> {
    let of = |kind| signal(kind).map_err(CliError::internal);
    let (mut interrupt, mut terminate, mut hang_up) =
        (of(SignalKind::interrupt())?, of(SignalKind::terminate())?, of(SignalKind::hangup())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hang_up.recv() => {}
    }
    Ok(())
}

/// Starts a new line after the `^C` that a terminal shows.
pub(super) fn end_interrupted_line() {
    if io::stderr().is_terminal() {
        let _ = writeln!(io::stderr());
    }
}

/// Reads an answer; `None` after Ctrl-C or Ctrl-D. The terminal does not show a secret answer.
pub(super) async fn read_answer(is_secret: bool, interrupts: &Interrupts) -> io::Result<Option<String>> {
    let hidden = is_secret.then(HiddenInput::new).transpose()?;
    let mut err = io::stderr();
    let _ = write!(err, "{}", StdStream::Stderr.paint(Colour::Bold, "> "));
    let _ = err.flush();
    // A blocking read cannot be cancelled; after Ctrl-C the thread ends with the program.
    let read = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).map(|count| (count > 0).then_some(line))
    });
    let answer = tokio::select! {
        read = read => read.map_err(io::Error::other)??,
        () = interrupts.next() => None,
    };
    if hidden.is_some() || answer.is_none() {
        let _ = writeln!(err);
    }
    Ok(answer.map(|line| line.trim_end_matches(['\r', '\n']).to_owned()))
}

/// A screen of its own on stdout, which must be a terminal. Dropping it shows the previous screen again.
#[derive(Debug)]
pub(super) struct Screen(());

impl Screen {
    pub(super) fn enter() -> Self {
        // The alternate screen, without a cursor.
        write_control("\x1b[?1049h\x1b[?25l");
        Self(())
    }

    pub(super) fn draw(&mut self, text: &str) {
        // Overwrites what is there, line by line, so that nothing flickers.
        let text = StdStream::Stdout.sanitize_painted(text).replace('\n', "\x1b[K\r\n");
        write_control(&format!("\x1b[H{text}\x1b[K\x1b[J"));
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        write_control("\x1b[?25h\x1b[?1049l");
    }
}

fn write_control(text: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Turns off the echo of the terminal until it is dropped.
struct HiddenInput {
    terminal: OwnedFd,
    before: Termios,
}

impl HiddenInput {
    fn new() -> io::Result<Self> {
        let terminal = io::stdin().as_fd().try_clone_to_owned()?;
        let before = tcgetattr(&terminal)?;
        let mut hidden = before.clone();
        hidden.local_flags.remove(LocalFlags::ECHO);
        tcsetattr(&terminal, SetArg::TCSAFLUSH, &hidden)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for HiddenInput {
    fn drop(&mut self) {
        let _ = tcsetattr(&self.terminal, SetArg::TCSANOW, &self.before);
    }
}
