//! The file as a tree: text, lists and mappings, each with its place in the file.
//!
//! `load.rs` makes the tree, [`settle`] takes out duplicate keys and works in merge keys, and
//! `read.rs` turns it into settings. What a text means (number, duration, …) is decided there.

use std::collections::HashSet;
use std::ops::Range;

use super::problem::Report;

#[derive(Debug, Clone)]
pub(super) struct Node {
    /// Bytes in the file. What an alias stands for keeps the place where it was written.
    pub(super) at: Range<usize>,
    pub(super) value: Value,
}

#[derive(Debug, Clone)]
pub(super) enum Value {
    Scalar(Scalar),
    List(Vec<Node>),
    Map(Vec<Entry>),
    /// A problem was reported already; whoever reads this says no more.
    Reported,
}

#[derive(Debug, Clone)]
pub(super) struct Scalar {
    pub(super) text: String,
    /// Written without quotes.
    pub(super) plain: bool,
    /// Holds something from the environment.
    pub(super) expanded: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) key: Node,
    pub(super) value: Node,
}

impl Node {
    pub(super) fn text(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(scalar) => Some(&scalar.text),
            _ => None,
        }
    }

    /// Nothing was written, or a variable without quotes came out empty.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar(scalar) if scalar.is_null())
    }

    /// A variable without quotes came out empty: the user wants the thing to be absent.
    pub(super) fn is_absent(&self) -> bool {
        matches!(&self.value, Value::Scalar(scalar) if scalar.is_null() && scalar.expanded)
    }

    pub(super) fn kind(&self) -> &'static str {
        match &self.value {
            Value::Scalar(scalar) if scalar.is_null() => "nothing",
            Value::Scalar(_) => "text",
            Value::List(_) => "a list",
            Value::Map(_) => "a mapping",
            Value::Reported => "a problem",
        }
    }

    pub(super) fn height(&self) -> usize {
        match &self.value {
            Value::Scalar(_) | Value::Reported => 0,
            Value::List(items) => 1 + items.iter().map(Self::height).max().unwrap_or_default(),
            Value::Map(entries) => {
                let heights = entries.iter().map(|entry| entry.key.height().max(entry.value.height()));
                1 + heights.max().unwrap_or_default()
            }
        }
    }
}

impl Scalar {
    pub(super) fn is_null(&self) -> bool {
        let written = matches!(self.text.as_str(), "" | "~" | "null" | "Null" | "NULL");
        self.plain && (self.text.is_empty() || (written && !self.expanded))
    }
}

/// Takes out what YAML allows and settings do not: keys that are not text, and keys given twice.
/// Merge keys (`<<`) become the keys they bring.
pub(super) fn settle(node: &mut Node, report: &mut Report<'_>) {
    match &mut node.value {
        Value::Scalar(_) | Value::Reported => {}
        Value::List(items) => items.iter_mut().for_each(|item| settle(item, report)),
        Value::Map(entries) => {
            let mut own: Vec<Entry> = Vec::new();
            let mut merged = Vec::new();
            for mut entry in std::mem::take(entries) {
                settle(&mut entry.value, report);
                if matches!(&entry.key.value, Value::Scalar(key) if key.plain && key.text == "<<") {
                    merge(entry, &mut merged, report);
                } else if entry.key.text().is_some() {
                    own.push(entry);
                } else if !matches!(entry.key.value, Value::Reported) {
                    report.add(entry.key.at.start, "expected a word as a key");
                }
            }
            *entries = unique(own, merged, report);
        }
    }
}

fn merge(entry: Entry, merged: &mut Vec<Entry>, report: &mut Report<'_>) {
    let sources = match entry.value.value {
        Value::List(items) => items,
        _ => vec![entry.value],
    };
    for source in sources {
        match source.value {
            Value::Map(entries) => merged.extend(entries),
            Value::Reported => {}
            Value::Scalar(_) | Value::List(_) => {
                report.add(entry.key.at.start, "expected a mapping, or a list of mappings, after `<<`");
            }
        }
    }
}

/// Own keys may be given once; of merged ones the first counts, and an own key goes before.
fn unique(own: Vec<Entry>, merged: Vec<Entry>, report: &mut Report<'_>) -> Vec<Entry> {
    let mut seen = std::collections::HashMap::new();
    let mut kept = Vec::with_capacity(own.len());
    for entry in own {
        let Some(key) = entry.key.text().map(str::to_owned) else {
            continue;
        };
        if let Some(first) = seen.get(&key) {
            let first = report.line(*first);
            let name = report.name(&entry.key);
            report.add(entry.key.at.start, format!("{name} is given twice, first on line {first}"));
        } else {
            seen.insert(key, entry.key.at.start);
            kept.push(entry);
        }
    }
    let mut names: HashSet<String> = seen.into_keys().collect();
    kept.extend(merged.into_iter().filter(|entry| match entry.key.text() {
        Some(key) => names.insert(key.to_owned()),
        None => false,
    }));
    kept
}
