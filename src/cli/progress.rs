//! Progress on a terminal: one line on stderr that is drawn again and again. Without a terminal there is none.
//!
//! Whoever prints something else on the terminal clears the line first; the next step draws it again.

use std::io::Write as _;
use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use unicode_width::UnicodeWidthStr as _;

use super::output::{Colour, StdStream, format_size, one_line, truncate};
use crate::text::seconds;

/// Work that ends sooner shows no progress, which would only flicker.
const SHOW_AFTER: Duration = Duration::from_millis(300);
const FRAME: Duration = Duration::from_millis(100);
const FRAMES: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];
/// Smaller transfers have no progress bar.
const MIN_TRANSFER: u64 = 1 << 20;
const BAR_WIDTH: usize = 24;
/// Width of a terminal that does not tell it.
const DEFAULT_WIDTH: usize = 80;

/// A line at the bottom of the terminal. Dropping it clears it.
#[derive(Debug)]
struct StatusLine {
    is_enabled: bool,
    is_drawn: bool,
}

impl StatusLine {
    fn new() -> Self {
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self { is_enabled: StdStream::Stderr.is_terminal() && !is_dumb, is_drawn: false }
    }

    /// Draws `mark` in colour, then `text`, of which the terminal shows what fits on one line.
    fn draw(&mut self, mark: &str, text: &str) {
        if self.is_enabled {
            let width = terminal_size::terminal_size_of(std::io::stderr())
                .map_or(DEFAULT_WIDTH, |(width, _)| usize::from(width.0));
            // A full last column would wrap on some terminals.
            let text = truncate(&one_line(text), width.saturating_sub(mark.width() + 2));
            let mark = StdStream::Stderr.paint(Colour::Cyan, mark);
            let text = StdStream::Stderr.paint(Colour::Dim, text);
            let mut err = std::io::stderr().lock();
            let _ = write!(err, "\r\x1b[2K{mark} {text}").and_then(|()| err.flush());
            self.is_drawn = true;
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_drawn) {
            let mut err = std::io::stderr().lock();
            let _ = write!(err, "\r\x1b[2K").and_then(|()| err.flush());
        }
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Shows how long something takes, and what it is doing.
#[derive(Debug)]
pub(super) struct Spinner {
    line: StatusLine,
    began: Instant,
    ticks: Interval,
    status: String,
    frame: usize,
}

impl Spinner {
    pub(super) fn new(status: impl Into<String>) -> Self {
        let mut ticks = interval(FRAME);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        Self { line: StatusLine::new(), began: Instant::now(), ticks, status: status.into(), frame: 0 }
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.line.is_enabled
    }

    pub(super) fn set_status(&mut self, status: impl Into<String>) {
        self.status = status.into();
    }

    /// Waits until it is time to [`draw`](Self::draw). Never returns without a terminal. Cancel-safe.
    pub(super) async fn tick(&mut self) {
        match self.line.is_enabled {
            true => drop(self.ticks.tick().await),
            false => std::future::pending().await,
        }
    }

    pub(super) fn draw(&mut self) {
        let elapsed = self.began.elapsed();
        if elapsed >= SHOW_AFTER {
            let mark = FRAMES.get(self.frame % FRAMES.len()).copied().unwrap_or_default();
            self.frame += 1;
            self.line.draw(mark, &format!("{} {}", whole_seconds(elapsed), self.status));
        }
    }

    /// Clears the line, so that something else can be printed.
    pub(super) fn clear(&mut self) {
        self.line.clear();
    }

    /// Runs `work` and spins until it ends.
    pub(super) async fn until<T>(mut self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                biased;
                result = &mut work => return result,
                () = self.tick() => self.draw(),
            }
        }
    }
}

/// Elapsed time that changes once a second.
fn whole_seconds(elapsed: Duration) -> String {
    match elapsed.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        _ => seconds(elapsed),
    }
}

/// Shows how much of a file is transferred, for files of 1 MiB and more. Dropping it clears it.
#[derive(Debug)]
pub(super) struct ProgressBar {
    line: StatusLine,
    name: String,
    total: u64,
    began: Instant,
    drawn_at: Option<Instant>,
}

impl ProgressBar {
    pub(super) fn new(name: &str, total: u64) -> Self {
        let mut line = StatusLine::new();
        line.is_enabled &= total >= MIN_TRANSFER;
        Self { line, name: one_line(name), total, began: Instant::now(), drawn_at: None }
    }

    /// `done` bytes are transferred.
    pub(super) fn set(&mut self, done: u64) {
        let now = Instant::now();
        let is_due = self.drawn_at.map_or(SHOW_AFTER <= now - self.began, |at| FRAME <= now - at);
        if self.line.is_enabled && is_due {
            self.drawn_at = Some(now);
            let text = transfer_text(&self.name, done, self.total, now - self.began);
            self.line.draw("↕", &text);
        }
    }
}

fn transfer_text(name: &str, done: u64, total: u64, elapsed: Duration) -> String {
    let done = done.min(total);
    #[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
    let (fraction, rate) =
        (done as f64 / total.max(1) as f64, done as f64 / elapsed.as_secs_f64().max(0.001));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 0 and the width")]
    let filled = (fraction * BAR_WIDTH as f64) as usize;
    let bar = "█".repeat(filled) + &"░".repeat(BAR_WIDTH.saturating_sub(filled));
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate is positive")]
    let per_second = format_size(rate as u64);
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    let left = if rate > 0.0 { (total - done) as f64 / rate } else { f64::INFINITY };
    let left = match Duration::try_from_secs_f64(left.ceil()) {
        Ok(left) if done > 0 && left < Duration::from_secs(86_400) => {
            format!("  {} left", whole_seconds(left))
        }
        _ => String::new(),
    };
    let percent = fraction * 100.0;
    format!(
        "{name}  {bar} {percent:3.0} %  {} of {}  {per_second}/s{left}",
        format_size(done),
        format_size(total)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transfer_shows_how_far_it_is_and_how_long_it_takes() {
        let text = |done, seconds| transfer_text("a.pdf", done, 10 << 20, Duration::from_secs(seconds));
        assert_eq!(
            text(5 << 20, 5),
            "a.pdf  ████████████░░░░░░░░░░░░  50 %  5.0 MiB of 10.0 MiB  1.0 MiB/s  5 s left"
        );
        assert_eq!(text(0, 1), "a.pdf  ░░░░░░░░░░░░░░░░░░░░░░░░   0 %  0 bytes of 10.0 MiB  0 bytes/s");
        assert!(text(11 << 20, 100).contains("100 %  10.0 MiB of 10.0 MiB"));
        assert!(transfer_text("a", 0, 0, Duration::ZERO).contains("  0 %"));
    }

    #[test]
    fn elapsed_time_has_no_fractions() {
        let shown = [9, 59, 61].map(|seconds| whole_seconds(Duration::from_secs(seconds)));
        assert_eq!(shown, ["9 s", "59 s", "1 min 1 s"]);
    }
}
