//! What people and programs get to see: tables, JSON, colour, and texts from strangers made harmless.

use crate::text::duration;
use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;
use std::time::SystemTime;

use clap::ValueEnum;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use unicode_width::UnicodeWidthStr as _;

use super::{DEFECT, Failure, TROUBLE};

/// Width of output that is not cut: somebody may search in it.
const UNLIMITED: usize = usize::MAX;
/// A last column gets at least this much.
const NARROWEST: usize = 20;
const GAP: &str = "  ";

/// How results are written.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct Output {
    /// How to write the result: `table` or `json`
    #[arg(
        long,
        short,
        global = true,
        value_enum,
        hide_possible_values = true,
        value_name = "FORM",
        default_value = "table",
        help_heading = "Output"
    )]
    output: Format,
    /// Short for `--output json`
    #[arg(long, global = true, conflicts_with = "output", help_heading = "Output")]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Table,
    /// For programs
    Json,
}

impl Output {
    pub(super) fn is_json(&self) -> bool {
        self.json || self.output == Format::Json
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

    /// The colour of one of the states that agents have.
    pub(super) fn of_state(state: &str) -> Self {
        match state {
            "ready" => Self::Green,
            "starting" | "unhealthy" | "backing-off" => Self::Yellow,
            "failed" => Self::Red,
            _ => Self::Dim,
        }
    }
}

/// One of the two streams, and whether colours are welcome there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    Stdout,
    Stderr,
}

impl To {
    pub(super) fn is_terminal(self) -> bool {
        match self {
            Self::Stdout => std::io::stdout().is_terminal(),
            Self::Stderr => std::io::stderr().is_terminal(),
        }
    }

    fn has_colours(self) -> bool {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        self.is_terminal() && !dumb && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    /// The text in a colour, where there are colours.
    pub(super) fn paint(self, colour: Colour, text: impl Display) -> String {
        if colour == Colour::Plain || !self.has_colours() {
            return text.to_string();
        }
        format!("\x1b[{}m{text}\x1b[0m", colour.code())
    }

    /// A text of somebody else as it may be shown here. A terminal obeys control characters, so they
    /// are shown instead; a file or a program gets the text as it is.
    pub(super) fn clean(self, text: &str) -> String {
        if self.is_terminal() { harmless(text) } else { text.to_owned() }
    }
}

/// Replaces everything that a terminal would act upon, but line breaks and tabs.
pub(super) fn harmless(text: &str) -> String {
    let is_bidi =
        |c: char| matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{200E}' | '\u{200F}');
    let show = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() || is_bidi(c) => '\u{FFFD}',
        c => c,
    };
    text.replace("\r\n", "\n").chars().map(show).collect()
}

/// The same on one line.
pub(super) fn one_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    harmless(&words.join(" "))
}

/// Talk: goes to stderr, and nobody fails because nobody listens.
pub(super) fn say(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A quiet remark.
pub(super) fn remark(text: impl Display) {
    say(To::Stderr.paint(Colour::Dim, text));
}

/// Data: goes to stdout, at once. A reader that has gone is not an error.
pub(super) fn write(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::new(TROUBLE, error)),
        _ => Ok(()),
    }
}

/// Data, and a line break.
pub(super) fn print(text: &str) -> Result<ExitCode, Failure> {
    write(&format!("{text}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Data as JSON for programs.
pub(super) fn print_json(value: &impl Serialize) -> Result<ExitCode, Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::new(DEFECT, error))?;
    print(&text)
}

/// A table for people: columns as wide as they need to be, the last one cut at the terminal's edge.
#[derive(Debug)]
pub(super) struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<(Colour, String)>>,
}

impl Table {
    pub(super) fn new(head: &[&'static str]) -> Self {
        Self { head: head.to_vec(), rows: Vec::new() }
    }

    pub(super) fn row(&mut self, cells: Vec<(Colour, String)>) {
        self.rows.push(cells.into_iter().map(|(colour, text)| (colour, one_line(&text))).collect());
    }

    pub(super) fn print(&self) -> Result<ExitCode, Failure> {
        let width = match terminal_size::terminal_size_of(std::io::stdout()) {
            Some((width, _)) if To::Stdout.is_terminal() => usize::from(width.0),
            _ => UNLIMITED,
        };
        print(self.text(width, |colour, text| To::Stdout.paint(colour, text)).trim_end())
    }

    fn text(&self, width: usize, paint: impl Fn(Colour, &str) -> String) -> String {
        let mut widths: Vec<usize> = self.head.iter().map(|cell| cell.width()).collect();
        for row in &self.rows {
            for (width, (_, cell)) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.width());
            }
        }
        let last = widths.len().saturating_sub(1);
        let before: usize = widths.iter().take(last).map(|width| width + GAP.len()).sum();
        let room = width.saturating_sub(before).max(NARROWEST);
        let mut text = String::new();
        let head = self.head.iter().map(|cell| (Colour::Bold, (*cell).to_owned()));
        for row in std::iter::once(head.collect()).chain(self.rows.iter().cloned()) {
            let mut line = String::new();
            for (n, ((colour, cell), width)) in row.iter().zip(&widths).enumerate() {
                if n == last {
                    line.push_str(&paint(*colour, &cut(cell, room)));
                } else {
                    let space = " ".repeat(width.saturating_sub(cell.width()) + GAP.len());
                    line.push_str(&paint(*colour, cell));
                    line.push_str(&space);
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// The text, or its beginning with an ellipsis where it is wider than `room`.
fn cut(text: &str, room: usize) -> String {
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

/// The time since an RFC 3339 timestamp.
pub(super) fn age(since: &str) -> String {
    OffsetDateTime::parse(since, &Rfc3339).map_or_else(|_| String::new(), |since| age_at(since.into()))
}

pub(super) fn age_at(since: SystemTime) -> String {
    let age = since.elapsed().unwrap_or_default();
    duration(Duration::from_secs(age.as_secs()))
}

/// A size the way people say it.
pub(super) fn size(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "for people, to one decimal")]
    let number = bytes as f64;
    match bytes {
        0..1_024 => format!("{bytes} bytes"),
        1_024..1_048_576 => format!("{:.1} KiB", number / 1_024.0),
        _ => format!("{:.1} MiB", number / 1_048_576.0),
    }
}

/// The two or three known words that are nearest to a wrong one.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut near: Vec<_> = known
        .map(|other| (strsim::jaro_winkler(&word.to_lowercase(), &other.to_lowercase()), other))
        .filter(|(likeness, _)| *likeness > 0.75)
        .collect();
    near.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    near.into_iter().map(|(_, other)| other).take(3).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(table: &Table, width: usize) -> String {
        table.text(width, |_, text| text.to_owned())
    }

    #[test]
    fn a_table_lines_up_and_its_last_column_is_cut_at_the_edge() {
        let mut table = Table::new(&["NAME", "STATUS", "LAST-ERROR"]);
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
    fn a_terminal_is_not_moved_by_what_an_agent_says() {
        assert_eq!(harmless("a\x1b[2Jb\r\nc\td\u{202E}"), "a\u{FFFD}[2Jb\nc\td\u{FFFD}");
        assert_eq!(one_line(" a\n b\tc "), "a b c");
    }

    #[test]
    fn ages_and_sizes_are_short() {
        let ago = |seconds| {
            let then = OffsetDateTime::now_utc() - time::Duration::seconds(seconds);
            age(&then.format(&Rfc3339).unwrap())
        };
        assert_eq!(
            [ago(3), ago(119), ago(600), ago(7_300), ago(200_000), ago(-50)],
            ["3s", "1m59s", "10m", "2h1m", "2d7h", "0s"]
        );
        assert_eq!(age("yesterday"), "");
        assert_eq!([size(6), size(2_048), size(3 << 20)], ["6 bytes", "2.0 KiB", "3.0 MiB"]);
    }

    #[test]
    fn a_wrong_word_finds_the_nearest_known_ones() {
        let known = ["weather", "whether", "report"];
        assert_eq!(nearest("wether", known.into_iter()), ["weather", "whether"]);
        assert!(nearest("zzz", known.into_iter()).is_empty());
    }
}
