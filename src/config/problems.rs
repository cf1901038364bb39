//! Problems: collected while reading, shown once, with the line they are about.
//!
//! [`Problems`] gathers problems by byte position and renders them at the end. What must not be shown
//! (see `mask.rs`) is covered with `***` before a line leaves this file.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::node::Node;

/// More than this is no help to anyone.
const MOST_PROBLEMS: usize = 100;
/// Longer lines are cut around the caret.
const LINE_WIDTH: usize = 160;

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read the settings file {}\n    hint: `a2a-bridge init` writes a first one (`config/minimal.yaml` is \
         such a file); name another with `--config FILE` or in `A2A_BRIDGE_CONFIG`",
        path.display()
    )]
    Read {
        /// The file that was tried.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file was read, but cannot be used. In the order of the file; never empty.
    #[error("{}", listed(.0))]
    Problems(Vec<Problem>),
}

/// One thing to change in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The file, as the user named it.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What is wrong, without a full stop.
    pub message: String,
    /// What to try.
    pub hint: Option<String>,
    /// The line itself, secrets covered.
    pub source_line: String,
    /// Characters before the caret in `source_line`.
    caret: usize,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, message, hint, source_line, caret } = self;
        write!(f, "{file}:{line}:{column}: {message}")?;
        if !source_line.is_empty() {
            let number = line.to_string();
            let margin = " ".repeat(number.len());
            write!(f, "\n  {number} | {source_line}\n  {margin} | {}^", " ".repeat(*caret))?;
        }
        match hint {
            Some(hint) => write!(f, "\n    hint: {hint}"),
            None => Ok(()),
        }
    }
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("\n")
}

/// The problems of one file so far.
pub(super) struct Problems<'a> {
    pub(super) text: &'a str,
    /// The directory of the file, where relative paths start; nothing if the text is not from a file.
    pub(super) directory: Option<&'a Path>,
    line_starts: Vec<usize>,
    masks: Vec<Range<usize>>,
    found: Vec<Finding>,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    at: usize,
    message: String,
    hint: Option<String>,
}

impl<'a> Problems<'a> {
    pub(super) fn new(text: &'a str, directory: Option<&'a Path>) -> Self {
        let breaks = text.bytes().enumerate().filter(|(at, byte)| match byte {
            b'\n' => true,
            b'\r' => text.as_bytes().get(at + 1) != Some(&b'\n'),
            _ => false,
        });
        let line_starts = std::iter::once(0).chain(breaks.map(|(at, _)| at + 1)).collect();
        Self { text, directory, line_starts, masks: Vec::new(), found: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Byte ranges of the file that are never shown.
    pub(super) fn cover(&mut self, mut masks: Vec<Range<usize>>) {
        masks.retain(|mask| mask.start < mask.end);
        masks.sort_by_key(|mask| mask.start);
        masks.dedup_by(|next, kept| {
            let overlap = next.start <= kept.end;
            if overlap {
                kept.end = kept.end.max(next.end);
            }
            overlap
        });
        self.masks = masks;
    }

    pub(super) fn add(&mut self, at: usize, message: impl Into<String>) {
        self.found.push(Finding { at, message: message.into(), hint: None });
    }

    pub(super) fn add_with_hint(&mut self, at: usize, message: impl Into<String>, hint: impl Into<String>) {
        self.found.push(Finding { at, message: message.into(), hint: Some(hint.into()) });
    }

    /// A key as a message may name it: a key inside something secret is not named.
    pub(super) fn name(&self, key: &Node) -> String {
        match key.text() {
            Some(text) if !self.is_covered(key.at.start) => format!("`{}`", text.escape_debug()),
            _ => "this key".into(),
        }
    }

    fn is_covered(&self, at: usize) -> bool {
        let before = self.masks.partition_point(|mask| mask.start <= at);
        before > 0 && self.masks.get(before - 1).is_some_and(|mask| mask.contains(&at))
    }

    /// The number of the line, from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= at)
    }

    /// The bytes of the line around `at`, without its end.
    pub(super) fn line_range(&self, at: usize) -> Range<usize> {
        let line = self.line(at);
        let start = self.line_starts.get(line.saturating_sub(1)).copied().unwrap_or_default();
        let end = self.line_starts.get(line).copied().unwrap_or(self.text.len());
        let line = self.text.get(start..end).unwrap_or_default();
        start..start + line.trim_end_matches(['\r', '\n']).len()
    }

    pub(super) fn into_problems(mut self, file: &str) -> Vec<Problem> {
        let mut found = std::mem::take(&mut self.found);
        found.sort();
        found.dedup();
        let more = found.len().saturating_sub(MOST_PROBLEMS);
        found.truncate(MOST_PROBLEMS);
        let mut problems: Vec<_> = found.into_iter().map(|found| self.problem(file, found)).collect();
        if more > 0
            && let Some(last) = problems.last_mut()
        {
            last.hint = Some(format!("there are {more} more problems"));
        }
        problems
    }

    fn problem(&self, file: &str, found: Finding) -> Problem {
        let Finding { at, message, hint } = found;
        let range = self.line_range(at);
        let before = self.text.get(range.start..at.min(range.end)).unwrap_or_default();
        let (source_line, caret) = self.shown_line(&range, at);
        let (line, column) = (self.line(at), before.chars().count() + 1);
        Problem { file: file.into(), line, column, message, hint, source_line, caret }
    }

    /// The line with secrets covered, and where its caret goes.
    fn shown_line(&self, range: &Range<usize>, at: usize) -> (String, usize) {
        let mut shown = Vec::new();
        let mut caret = None;
        let mut covered = false;
        let mut indented = true;
        let line = self.text.get(range.clone()).unwrap_or_default();
        for (offset, c) in line.char_indices() {
            let here = range.start + offset;
            if here >= at && caret.is_none() {
                caret = Some(if covered { shown.len().saturating_sub(3) } else { shown.len() });
            }
            // Indentation is shown even inside a secret of several lines.
            indented &= c.is_whitespace();
            let secret = self.is_covered(here) && !indented;
            if secret && !covered {
                shown.extend(['*'; 3]);
            } else if !secret {
                // A terminal acts upon control characters; and a tab would shift the caret.
                shown.push(if c.is_control() { ' ' } else { c });
            }
            covered = secret;
        }
        cut(&shown, caret.unwrap_or(shown.len()))
    }
}

fn cut(line: &[char], caret: usize) -> (String, usize) {
    if line.len() <= LINE_WIDTH {
        return (line.iter().collect::<String>().trim_end().to_owned(), caret);
    }
    let skipped = caret.saturating_sub(LINE_WIDTH / 2);
    let head = if skipped > 0 { "…" } else { "" };
    let tail = if line.len() - skipped > LINE_WIDTH { "…" } else { "" };
    let middle: String = line.iter().skip(skipped).take(LINE_WIDTH).collect();
    (format!("{head}{middle}{tail}"), caret - skipped + head.chars().count())
}
