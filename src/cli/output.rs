//! Output for people and programs: tables, JSON, colours, and text from agents that is safe for a terminal.
//!
//! The print functions are named after those of `std`, which panic if the reader is gone.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::ValueEnum;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use unicode_width::UnicodeWidthStr as _;

use super::{CliError, CliResult, FAILED};
use crate::text::duration;

/// Width of output that does not go to a terminal: scripts may search in it, so it is not truncated.
const UNLIMITED: usize = usize::MAX;
const MIN_LAST_COLUMN: usize = 20;
const COLUMN_GAP: &str = "  ";

#[derive(Debug, Clone, clap::Args)]
pub(super) struct OutputArgs {
    /// Output format
    #[arg(
        long,
        short,
        global = true,
        value_name = "FORMAT",
        default_value = "table",
        help_heading = "Output"
    )]
    output: OutputFormat,
    /// Short for `--output json`
    #[arg(long, global = true, conflicts_with = "output", help_heading = "Output")]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OutputFormat {
    Table,
    Json,
}

impl OutputArgs {
    pub(super) fn is_json(&self) -> bool {
        self.json || self.output == OutputFormat::Json
    }
}

/// A colour of the terminal's own palette.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Colour {
    Plain,
    Bold,
    Dim,
    Red,
    Green,
    Yellow,
}

impl Colour {
    fn code(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Bold => "1",
            Self::Dim => "2",
            Self::Red => "31",
            Self::Green => "32",
            Self::Yellow => "33",
        }
    }

    pub(super) fn of_agent_state(state: &str) -> Self {
        match state {
            "ready" => Self::Green,
            "starting" | "unhealthy" | "backing-off" => Self::Yellow,
            "failed" => Self::Red,
            _ => Self::Dim,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StdStream {
    Stdout,
    Stderr,
}

impl StdStream {
    pub(super) fn is_terminal(self) -> bool {
        match self {
            Self::Stdout => std::io::stdout().is_terminal(),
            Self::Stderr => std::io::stderr().is_terminal(),
        }
    }

    fn supports_colour(self) -> bool {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        self.is_terminal() && !dumb && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    /// Colours the text if the stream supports it.
    pub(super) fn paint(self, colour: Colour, text: impl Display) -> String {
        if colour == Colour::Plain || !self.supports_colour() {
            return text.to_string();
        }
        format!("\x1b[{}m{text}\x1b[0m", colour.code())
    }

    /// Makes text from outside safe to print: a terminal would execute its control characters. Files and
    /// programs get the text unchanged.
    pub(super) fn sanitize(self, text: &str) -> String {
        if self.is_terminal() { sanitize(text) } else { text.to_owned() }
    }
}

/// Replaces every character that controls a terminal, except line breaks and tabs.
fn sanitize(text: &str) -> String {
    let is_bidi =
        |c: char| matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{200E}' | '\u{200F}');
    let replace = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() || is_bidi(c) => '\u{FFFD}',
        c => c,
    };
    text.replace("\r\n", "\n").chars().map(replace).collect()
}

/// Sanitized text on one line.
pub(super) fn one_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    sanitize(&words.join(" "))
}

/// Prints to stderr. A closed stderr is not an error.
pub(super) fn eprintln(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

pub(super) fn eprintln_dim(text: impl Display) {
    eprintln(StdStream::Stderr.paint(Colour::Dim, text));
}

/// Prints to stdout and flushes. A reader that has closed the pipe is not an error.
pub(super) fn print(text: &str) -> CliResult<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CliError::new(FAILED, error)),
        _ => Ok(()),
    }
}

pub(super) fn println(text: &str) -> CliResult {
    print(&format!("{text}\n"))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn print_json(value: &impl Serialize) -> CliResult {
    println(&serde_json::to_string_pretty(value).map_err(CliError::internal)?)
}

/// A table whose last column is truncated at the edge of the terminal.
#[derive(Debug)]
pub(super) struct TextTable {
    /// The first row is the header.
    rows: Vec<Vec<(Colour, String)>>,
}

impl TextTable {
    pub(super) fn new(header: &[&str]) -> Self {
        Self { rows: vec![header.iter().map(|cell| (Colour::Bold, (*cell).to_owned())).collect()] }
    }

    pub(super) fn row(&mut self, cells: Vec<(Colour, String)>) {
        self.rows.push(cells.into_iter().map(|(colour, text)| (colour, one_line(&text))).collect());
    }

    pub(super) fn print(&self) -> CliResult {
        let width = match terminal_size::terminal_size_of(std::io::stdout()) {
            Some((width, _)) if StdStream::Stdout.is_terminal() => usize::from(width.0),
            _ => UNLIMITED,
        };
        println(self.text(width, |colour, text| StdStream::Stdout.paint(colour, text)).trim_end())
    }

    fn text(&self, width: usize, paint: impl Fn(Colour, &str) -> String) -> String {
        let mut widths = vec![0; self.rows.first().map_or(0, Vec::len)];
        for row in &self.rows {
            for (width, (_, cell)) in widths.iter_mut().zip(row) {
                *width = cell.width().max(*width);
            }
        }
        widths.pop();
        let before: usize = widths.iter().map(|width| width + COLUMN_GAP.len()).sum();
        let room = width.saturating_sub(before).max(MIN_LAST_COLUMN);
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((colour, cell), width) in row.iter().zip(&widths) {
                let padding = " ".repeat(width.saturating_sub(cell.width()));
                line.extend([&paint(*colour, cell), &padding, COLUMN_GAP]);
            }
            if let Some((colour, cell)) = row.last() {
                line.push_str(&paint(*colour, &truncate(cell, room)));
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Truncates text that is wider than `room`, with an ellipsis.
fn truncate(text: &str, room: usize) -> String {
    if text.width() <= room {
        return text.to_owned();
    }
    let mut short = String::new();
    for c in text.chars() {
        short.push(c);
        if short.width() >= room {
            short.pop();
            break;
        }
    }
    format!("{}…", short.trim_end())
}

/// The time since an RFC 3339 timestamp; empty if it is not valid.
pub(super) fn age(since: &str) -> String {
    let Ok(since) = OffsetDateTime::parse(since, &Rfc3339) else { return String::new() };
    let age = SystemTime::from(since).elapsed().unwrap_or_default();
    duration(Duration::from_secs(age.as_secs()))
}

pub(super) fn format_size(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
    let number = bytes as f64;
    match bytes {
        0..1_024 => format!("{bytes} bytes"),
        1_024..1_048_576 => format!("{:.1} KiB", number / 1_024.0),
        _ => format!("{:.1} MiB", number / 1_048_576.0),
    }
}

/// A number and its noun, such as `2 agents`.
pub(super) fn counted(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Up to three known names that are similar to a misspelled one, the most similar first.
pub(super) fn similar_names<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut similar: Vec<_> = known
        .map(|other| (strsim::jaro_winkler(&name.to_lowercase(), &other.to_lowercase()), other))
        .filter(|(similarity, _)| *similarity > 0.75)
        .collect();
    similar.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    similar.into_iter().map(|(_, other)| other).take(3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(table: &TextTable, width: usize) -> String {
        table.text(width, |_, text| text.to_owned())
    }

    #[test]
    fn a_table_is_aligned_and_its_last_column_is_truncated() {
        let mut table = TextTable::new(&["NAME", "STATUS", "LAST-ERROR"]);
        let cell = |text: &str| (Colour::Plain, text.to_owned());
        table.row(vec![cell("weather"), cell("ready"), cell("")]);
        table.row(vec![cell("天気"), cell("backing-off"), cell("connection refused\nby the host next door")]);
        insta::assert_snapshot!(text(&table, 50), @r"
        NAME     STATUS       LAST-ERROR
        weather  ready
        天気     backing-off  connection refused by the h…
        ");
        assert!(text(&table, UNLIMITED).contains("next door"));
    }

    #[test]
    fn control_characters_from_an_agent_are_replaced() {
        assert_eq!(sanitize("a\x1b[2Jb\r\nc\td\u{202E}"), "a\u{FFFD}[2Jb\nc\td\u{FFFD}");
        assert_eq!(one_line(" a\n b\tc "), "a b c");
    }

    #[test]
    fn ages_and_sizes_are_formatted_briefly() {
        let ago = |seconds| {
            let then = OffsetDateTime::now_utc() - time::Duration::seconds(seconds);
            age(&then.format(&Rfc3339).unwrap())
        };
        assert_eq!(
            [ago(3), ago(119), ago(600), ago(7_300), ago(200_000), ago(-50)],
            ["3s", "1m59s", "10m", "2h1m", "2d7h", "0s"]
        );
        assert_eq!(age("yesterday"), "");
        assert_eq!(
            [format_size(6), format_size(2_048), format_size(3 << 20)],
            ["6 bytes", "2.0 KiB", "3.0 MiB"]
        );
    }

    #[test]
    fn a_misspelled_name_finds_the_most_similar_ones() {
        let known = ["weather", "whether", "report"];
        assert_eq!(similar_names("wether", known.into_iter()), ["weather", "whether"]);
        assert!(similar_names("zzz", known.into_iter()).is_empty());
    }
}
