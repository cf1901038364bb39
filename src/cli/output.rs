//! Output for people and programs: tables, JSON, colours, and text from agents that is safe for a terminal.
//!
//! The print functions are named after those of `std`, which panic if the reader has closed the pipe. They are the only
//! way to stdout and stderr, and never send control characters to a terminal, whatever the source of the text: agents and
//! callers choose names, messages, ids and output. What goes to a file or a pipe is not changed, as with `ls`, `git` and
//! `kubectl logs`: programs need the exact bytes, and nothing acts upon them. JSON stays exact on a terminal, too: there
//! such characters are escaped.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use super::{CliError, CliResult, FAILED};
use crate::text::{Timestamp, duration, escape_json, is_unprintable};

/// Width of output that does not go to a terminal: scripts may search in it, so it is not truncated.
const UNLIMITED: usize = usize::MAX;
const MIN_LAST_COLUMN: usize = 20;
const COLUMN_GAP: &str = "  ";
/// Joins emoji; it changes nothing else that matters in answers for people.
const JOINER: char = '\u{200D}';

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

/// A style of the terminal, with its ANSI code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Colour {
    Plain = 0,
    Bold = 1,
    Dim = 2,
    Red = 31,
    Green = 32,
    Yellow = 33,
    Blue = 34,
    Magenta = 35,
    Cyan = 36,
}

/// The escape sequences of [`StdStream::paint`], without the escape character.
const COLOURS: [&str; 9] = ["[0m", "[1m", "[2m", "[31m", "[32m", "[33m", "[34m", "[35m", "[36m"];

impl Colour {
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
        format!("\x1b[{}m{text}\x1b[0m", colour as u8)
    }

    /// Makes text from outside safe to print: a terminal would execute its control characters. Files and
    /// programs get the text unchanged.
    pub(super) fn sanitize(self, text: &str) -> String {
        if self.is_terminal() { sanitize(text) } else { text.to_owned() }
    }

    /// Like [`sanitize`](Self::sanitize), for text that may be painted.
    pub(super) fn sanitize_painted(self, text: &str) -> String {
        if self.is_terminal() { sanitize_painted(text) } else { text.to_owned() }
    }
}

fn sanitize_painted(text: &str) -> String {
    let mut pieces = text.split('\x1b');
    let mut safe = sanitize(pieces.next().unwrap_or_default());
    for piece in pieces {
        let colour = COLOURS.into_iter().find(|colour| piece.starts_with(colour));
        match colour {
            Some(_) => safe.push('\x1b'),
            None => safe.push(char::REPLACEMENT_CHARACTER),
        }
        safe.push_str(&sanitize(piece));
    }
    safe
}

/// Replaces every character that controls a terminal, except line breaks and tabs.
fn sanitize(text: &str) -> String {
    let replace = |c: char| match c {
        '\n' | '\t' | JOINER => c,
        c if is_unprintable(c) => char::REPLACEMENT_CHARACTER,
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
    let _ = writeln!(std::io::stderr(), "{}", StdStream::Stderr.sanitize_painted(&text.to_string()));
}

pub(super) fn eprintln_dim(text: impl Display) {
    eprintln(StdStream::Stderr.paint(Colour::Dim, text));
}

/// Prints to stdout and flushes. A reader that has closed the pipe is not an error.
pub(super) fn print(text: &str) -> CliResult<()> {
    let text = StdStream::Stdout.sanitize_painted(text);
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
    print_json_text(&serde_json::to_string_pretty(value).map_err(CliError::internal)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a JSON text as it is; on a terminal, with more characters escaped.
pub(super) fn print_json_text(json: &str) -> CliResult<()> {
    let json = if StdStream::Stdout.is_terminal() { escape_json(json) } else { json.to_owned() };
    print(&format!("{json}\n"))
}

/// The width of the terminal on stdout; no limit if stdout is not a terminal.
pub(super) fn width() -> usize {
    match terminal_size::terminal_size_of(std::io::stdout()) {
        Some((width, _)) if StdStream::Stdout.is_terminal() => usize::from(width.0),
        _ => UNLIMITED,
    }
}

/// Breaks text between words, so that it fits into a column that begins at `indent`. The text does not begin with the
/// indentation; further lines do.
pub(super) fn wrapped(text: &str, indent: usize, width: usize) -> String {
    let room = width.saturating_sub(indent).max(MIN_LAST_COLUMN);
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is one line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.width() + 1 + word.width() <= room {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join(&format!("\n{}", " ".repeat(indent)))
}

/// The height of the terminal on stdout.
pub(super) fn height() -> usize {
    terminal_size::terminal_size_of(std::io::stdout()).map_or(UNLIMITED, |(_, height)| usize::from(height.0))
}

/// A table that fits the terminal, with colours if it supports them.
pub(super) fn table(header: &[&str], rows: impl Iterator<Item = Vec<(Colour, String)>>) -> String {
    table_text(header, rows, width(), 1, |colour, text| StdStream::Stdout.paint(colour, text))
}

/// Prints a table whose last column is truncated at the edge of the terminal.
pub(super) fn print_table(header: &[&str], rows: impl Iterator<Item = Vec<(Colour, String)>>) -> CliResult {
    println(&table(header, rows))
}

/// Prints a table whose last column has up to two lines.
pub(super) fn print_wrapped_table(
    header: &[&str],
    rows: impl Iterator<Item = Vec<(Colour, String)>>,
) -> CliResult {
    println(&table_text(header, rows, width(), 2, |colour, text| StdStream::Stdout.paint(colour, text)))
}

fn table_text(
    header: &[&str],
    rows: impl Iterator<Item = Vec<(Colour, String)>>,
    width: usize,
    max_lines: usize,
    paint: impl Fn(Colour, &str) -> String,
) -> String {
    let header = header.iter().map(|cell| (Colour::Bold, (*cell).to_owned())).collect();
    let mut rows: Vec<Vec<_>> = std::iter::once(header).chain(rows).collect();
    let mut widths = vec![0; rows.first().map_or(0, Vec::len)];
    for row in &mut rows {
        for (width, (_, cell)) in widths.iter_mut().zip(row) {
            *cell = one_line(cell);
            *width = cell.width().max(*width);
        }
    }
    if let Some((last, others)) = widths.split_last_mut() {
        let before: usize = others.iter().map(|width| width + COLUMN_GAP.len()).sum();
        *last = width.saturating_sub(before).max(MIN_LAST_COLUMN).min(*last);
    }
    let line = |row: &Vec<(Colour, String)>| {
        let cells = row.iter().zip(&widths).map(|((colour, cell), width)| {
            let cell = truncate(cell, *width);
            paint(*colour, &cell) + &" ".repeat(width.saturating_sub(cell.width()))
        });
        cells.collect::<Vec<_>>().join(COLUMN_GAP).trim_end().to_owned()
    };
    let last_width = widths.last().copied().unwrap_or_default();
    let lines = rows.iter_mut().flat_map(|row| {
        let mut lines = Vec::new();
        if let Some((colour, cell)) = row.pop() {
            let mut pieces = split_lines(&cell, last_width, max_lines).into_iter();
            row.push((colour, pieces.next().unwrap_or_default()));
            lines.push(line(row));
            let empty = |piece| {
                row.iter().map(|_| (Colour::Plain, String::new())).skip(1).chain([(colour, piece)]).collect()
            };
            lines.extend(pieces.map(|piece| line(&empty(piece))));
        }
        lines
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Breaks text into lines of this width; the last one has what is left, and may be longer.
fn split_lines(text: &str, width: usize, max_lines: usize) -> Vec<String> {
    let wrapped = wrapped(text, 0, width);
    let lines: Vec<&str> = wrapped.splitn(max_lines, '\n').collect();
    lines.into_iter().map(|line| line.replace('\n', " ")).collect()
}

/// Truncates text that is wider than `room`, with an ellipsis.
pub(super) fn truncate(text: &str, room: usize) -> String {
    if text.width() <= room {
        return text.to_owned();
    }
    let mut width = 0;
    let fits = |c: &char| {
        width += c.width().unwrap_or_default();
        width < room
    };
    format!("{}…", text.chars().take_while(fits).collect::<String>().trim_end())
}

/// The time since then, in whole seconds.
pub(super) fn age(since: Timestamp) -> String {
    duration(Duration::from_secs(since.0.elapsed().unwrap_or_default().as_secs()))
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

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn a_table_is_aligned_and_its_last_column_is_truncated() {
        let rows =
            [["weather", "ready", ""], ["天気", "backing-off", "connection refused\nby the host next door"]];
        let text = |width: usize, lines: usize| {
            let rows = rows.iter().map(|row| row.map(|cell| (Colour::Plain, cell.to_owned())).into());
            table_text(&["NAME", "STATE", "PROBLEM"], rows, width, lines, |_, text| text.to_owned())
        };
        insta::assert_snapshot!(text(50, 2), @r"
        NAME     STATE        PROBLEM
        weather  ready
        天気     backing-off  connection refused by the
                              host next door
        ");
        insta::assert_snapshot!(text(50, 1), @r"
        NAME     STATE        PROBLEM
        weather  ready
        天気     backing-off  connection refused by the h…
        ");
        assert!(text(UNLIMITED, 1).contains("next door"));
    }

    #[test]
    fn long_text_is_broken_between_words_and_indented() {
        let text =
            "the agent exited with code 1 after 5ms, http://127.0.0.1:9006/.well-known/agent-card.json";
        insta::assert_snapshot!(wrapped(text, 4, 34), @r"
        the agent exited with code 1
            after 5ms,
            http://127.0.0.1:9006/.well-known/agent-card.json
        ");
        assert_eq!(wrapped(text, 4, UNLIMITED), text);
    }

    #[test]
    fn control_characters_from_an_agent_are_replaced() {
        assert_eq!(sanitize("a\x1b[2Jb\r\nc\td\u{202E}"), "a\u{FFFD}[2Jb\nc\td\u{FFFD}");
        assert_eq!(one_line(" a\n b\tc "), "a b c");
        assert_eq!(
            sanitize_painted("\x1b[31mred\x1b[0m\x1b[8m\x1b"),
            "\x1b[31mred\x1b[0m\u{FFFD}[8m\u{FFFD}"
        );
        assert_eq!(escape_json("\"a\u{9b}\u{202e}\u{e0001}é\"\n"), "\"a\\u009b\\u202e\\udb40\\udc01é\"\n");
    }

    #[test]
    fn ages_and_sizes_are_formatted_briefly() {
        let ago = |seconds| age(Timestamp(SystemTime::now() - Duration::from_secs(seconds)));
        assert_eq!(
            [ago(3), ago(119), ago(600), ago(7_300), ago(200_000)],
            ["3s", "1m59s", "10m", "2h1m", "2d7h"]
        );
        assert_eq!(age(Timestamp(SystemTime::now() + Duration::from_secs(50))), "0s");
        assert_eq!(
            [format_size(6), format_size(2_048), format_size(3 << 20)],
            ["6 bytes", "2.0 KiB", "3.0 MiB"]
        );
    }
}
