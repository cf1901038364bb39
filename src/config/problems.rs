//! Problems of a file: collected while it is read, and shown together, each with its line.
//!
//! [`Problems`] collects them by byte position and renders them at the end. It replaces secrets (see
//! `redact.rs`) with `***` before a line leaves this file.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::node::Node;

/// Maximum number of reported problems.
const MAX_PROBLEMS: usize = 100;
/// Longer lines are cut around the caret.
const LINE_WIDTH: usize = 160;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(
        "cannot read the configuration file {}\n    hint: create one with `a2a-bridge init` (`config/minimal.yaml` is an \
         example), or name another with `--config FILE` or `A2A_BRIDGE_CONFIG`",
        path.display()
    )]
    Read { path: PathBuf, source: std::io::Error },
    /// All problems of the file, in its order.
    #[error("{0}")]
    Invalid(String),
}

impl ConfigError {
    /// The problems for a log, in which an event is one line: without the lines of the file that people see.
    pub(crate) fn log_lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        for line in self.to_string().lines() {
            match (line.strip_prefix("    hint: "), lines.last_mut()) {
                (Some(hint), Some(last)) => *last += &format!(" ({hint})"),
                _ if line.starts_with(' ') => {}
                _ => lines.push(line.to_owned()),
            }
        }
        lines
    }
}

/// The problems of one file so far.
pub(super) struct Problems<'a> {
    pub(super) text: &'a str,
    /// The directory of the file, where relative paths start; nothing if the text is not from a file.
    pub(super) directory: Option<&'a Path>,
    line_starts: Vec<usize>,
    redacted: Vec<Range<usize>>,
    found: Vec<Finding>,
}

/// A problem at a byte position.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Finding {
    pub(super) at: usize,
    pub(super) message: String,
    pub(super) hint: Option<String>,
}

impl Finding {
    pub(super) fn new(at: usize, message: impl Into<String>) -> Self {
        Self { at, message: message.into(), hint: None }
    }
}

impl<'a> Problems<'a> {
    pub(super) fn new(text: &'a str, directory: Option<&'a Path>) -> Self {
        let breaks = text.bytes().enumerate().filter(|(at, byte)| match byte {
            b'\n' => true,
            b'\r' => text.as_bytes().get(at + 1) != Some(&b'\n'),
            _ => false,
        });
        let line_starts = std::iter::once(0).chain(breaks.map(|(at, _)| at + 1)).collect();
        Self { text, directory, line_starts, redacted: Vec::new(), found: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// Sets the byte ranges of the file that are never shown.
    pub(super) fn redact(&mut self, mut ranges: Vec<Range<usize>>) {
        ranges.retain(|range| range.start < range.end);
        ranges.sort_by_key(|range| range.start);
        ranges.dedup_by(|next, kept| {
            let overlap = next.start <= kept.end;
            if overlap {
                kept.end = kept.end.max(next.end);
            }
            overlap
        });
        self.redacted = ranges;
    }

    pub(super) fn push(&mut self, finding: Finding) {
        self.found.push(finding);
    }

    pub(super) fn add(&mut self, at: usize, message: impl Into<String>) {
        self.push(Finding::new(at, message));
    }

    pub(super) fn add_with_hint(&mut self, at: usize, message: impl Into<String>, hint: impl Into<String>) {
        self.push(Finding { at, message: message.into(), hint: Some(hint.into()) });
    }

    /// How a message names a key; a key inside a secret is not named.
    pub(super) fn name(&self, key: &Node) -> String {
        match key.text() {
            Some(text) if !self.is_redacted(key.at.start) => format!("`{}`", text.escape_debug()),
            _ => "this key".into(),
        }
    }

    /// Adds `name` to `seen`, or reports `key` as a duplicate. Returns whether it was added.
    pub(super) fn check_unique(&mut self, seen: &mut HashMap<String, usize>, name: &str, key: &Node) -> bool {
        if let Some(first) = seen.get(name) {
            let first = self.line(*first);
            self.add(key.at.start, format!("{} is given twice, first on line {first}", self.name(key)));
            return false;
        }
        seen.insert(name.to_owned(), key.at.start);
        true
    }

    fn is_redacted(&self, at: usize) -> bool {
        let before = self.redacted.partition_point(|range| range.start <= at);
        before > 0 && self.redacted.get(before - 1).is_some_and(|range| range.contains(&at))
    }

    /// The line number, from 1.
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

    pub(super) fn into_error(mut self, file: &str) -> ConfigError {
        let mut found = std::mem::take(&mut self.found);
        found.sort();
        found.dedup();
        let more = found.len().saturating_sub(MAX_PROBLEMS);
        found.truncate(MAX_PROBLEMS);
        if more > 0
            && let Some(last) = found.last_mut()
        {
            last.hint = Some(format!("there are {more} more problems"));
        }
        let shown: Vec<_> = found.iter().map(|finding| self.show(file, finding)).collect();
        ConfigError::Invalid(shown.join("\n"))
    }

    fn show(&self, file: &str, Finding { at, message, hint }: &Finding) -> String {
        let range = self.line_range(*at);
        let before = self.text.get(range.start..(*at).min(range.end)).unwrap_or_default();
        let (line, column) = (self.line(*at).to_string(), before.chars().count() + 1);
        let mut shown = format!("{file}:{line}:{column}: {message}");
        let (source, caret) = self.shown_line(&range, *at);
        if !source.is_empty() {
            let (margin, caret) = (" ".repeat(line.len()), " ".repeat(caret));
            shown += &format!("\n  {line} | {source}\n  {margin} | {caret}^");
        }
        if let Some(hint) = hint {
            shown += &format!("\n    hint: {hint}");
        }
        shown
    }

    /// The line with secrets replaced, and the position of its caret.
    fn shown_line(&self, range: &Range<usize>, at: usize) -> (String, usize) {
        let mut shown = Vec::new();
        let mut caret = None;
        let mut is_hidden = false;
        let mut indented = true;
        let line = self.text.get(range.clone()).unwrap_or_default();
        for (offset, c) in line.char_indices() {
            let here = range.start + offset;
            if here >= at && caret.is_none() {
                caret = Some(if is_hidden { shown.len().saturating_sub(3) } else { shown.len() });
            }
            // Indentation is shown even inside a secret of several lines.
            indented &= c.is_whitespace();
            let secret = self.is_redacted(here) && !indented;
            if secret && !is_hidden {
                shown.extend(['*'; 3]);
            } else if !secret {
                // A terminal interprets control characters, and a tab would shift the caret.
                shown.push(if c.is_control() { ' ' } else { c });
            }
            is_hidden = secret;
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
