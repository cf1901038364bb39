//! What the callers of the victims noticed of an attack, as a table.

use std::fmt::Write as _;
use std::time::Duration;

use super::arena::Usage;
use super::is_full;
use super::victim::{Calls, Target};

/// A victim's 99th percentile may be this many times the quiet one, …
const MAX_RATIO: f64 = 5.0;
/// … but never more than this.
const MAX_P99: Duration = Duration::from_millis(250);

/// The bridge, the server, the agents, and the callers and attackers of this test share as few as two processors, and
/// some attacks keep the server itself busy. So this many times the 99th percentile of the control is added: a call
/// through the bridge waits for a process twice as often as one to the control.
const CONTROL_CALLS: u32 = 2;
/// The short form has so few calls that its 99th percentile is the slowest one, and runs beside other work. There, only
/// a stall counts.
const STALL: Duration = Duration::from_secs(1);

/// The calls of a victim during an attack.
pub(super) struct Measured {
    victim: Target,
    /// The lowest 99th percentile without an attack so far.
    quiet: Duration,
    calls: Calls,
}

impl Measured {
    pub(super) fn new(victim: Target, quiet: Duration, calls: Calls) -> Self {
        Self { victim, quiet, calls }
    }

    fn p99(&self) -> Duration {
        self.calls.quantile(0.99)
    }

    fn ratio(&self) -> f64 {
        self.p99().as_secs_f64() / self.quiet.as_secs_f64().max(1e-6)
    }

    /// `control` is the 99th percentile of the control during the attack.
    pub(super) fn problems(&self, control: Duration) -> Vec<String> {
        let (name, mut problems) = (self.victim.name, Vec::new());
        let limit = match is_full() {
            true => (self.quiet.mul_f64(MAX_RATIO) + control * CONTROL_CALLS).min(MAX_P99),
            false => STALL,
        };
        if self.p99() > limit {
            problems.push(format!("{SLOW} of {name} {:.0?}, over {limit:.0?}", self.p99()));
        }
        if let Some(lost) = self.calls.lost.first() {
            problems.push(format!("{} of {name} lost: {lost}", self.calls.lost.len()));
        }
        problems
    }

    fn cells(&self) -> [String; 6] {
        [
            self.calls.count().to_string(),
            self.calls.lost.len().to_string(),
            milliseconds(self.quiet),
            milliseconds(self.p99()),
            milliseconds(self.calls.quantile(1.0)),
            format!("{:.1}", self.ratio()),
        ]
    }
}

/// How the problem of a high latency begins.
const SLOW: &str = "p99";

pub(super) struct Row {
    pub(super) attack: String,
    pub(super) replies: String,
    pub(super) measured: [Measured; 2],
    /// The 99th percentile of the control.
    pub(super) control: Duration,
    pub(super) peak: Usage,
    pub(super) after: Usage,
    /// Why the attack did not hold.
    pub(super) problems: Vec<String>,
}

impl Row {
    /// Whether the only problem is latency.
    pub(super) fn is_only_slow(&self) -> bool {
        !self.problems.is_empty() && self.problems.iter().all(|problem| problem.starts_with(SLOW))
    }

    fn cells(&self) -> Vec<String> {
        let mut cells = vec![self.attack.clone()];
        cells.extend(self.measured.iter().flat_map(Measured::cells));
        cells.push(milliseconds(self.control));
        cells.extend([mib(self.peak.memory).to_string(), mib(self.after.memory).to_string()]);
        cells.push(if self.problems.is_empty() { "yes".into() } else { "NO".into() });
        cells
    }

    fn note(&self) -> String {
        let mut notes = vec![self.replies.clone()];
        notes.extend((!self.problems.is_empty()).then(|| self.problems.join("; ")));
        notes.join(" | ")
    }
}

fn milliseconds(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}

pub(super) fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

fn head() -> Vec<String> {
    let each = ["calls", "lost", "quiet p99", "p99", "max", "ratio"];
    let large = ["large", "lost", "quiet p99", "p99", "max", "ratio"];
    let cells =
        std::iter::once("attack").chain(each).chain(large).chain(["control", "peak MiB", "after", "held"]);
    cells.map(str::to_owned).collect()
}

/// One row for each attack, with the times of the victims' calls in milliseconds: first of small answers, then of large
/// ones, and last the 99th percentile of the control.
pub(super) fn table(rows: &[Row]) -> String {
    let mut lines = vec![(head(), "replies to the attack | problems".to_owned())];
    lines.extend(rows.iter().map(|row| (row.cells(), row.note())));
    let width = |column: usize| lines.iter().map(|(cells, _)| cells[column].len()).max().unwrap_or(0);
    let widths: Vec<_> = (0..lines[0].0.len()).map(width).collect();
    let mut text = String::from("\n");
    for (cells, note) in &lines {
        let _ = write!(text, "{:<1$}", cells[0], widths[0]);
        for (cell, width) in cells.iter().zip(&widths).skip(1) {
            let _ = write!(text, "  {cell:>width$}");
        }
        let _ = writeln!(text, "  {note}");
    }
    text
}
