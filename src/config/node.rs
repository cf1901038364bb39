//! The file as a tree: text, lists and mappings, each with its place in the file.
//!
//! `load.rs` makes the tree, [`settle`] takes out duplicate keys and works in merge keys, and
//! `read.rs` turns it into settings. What a text means (number, duration, …) is decided there.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::{Map, Number, Value};

use super::problems::Problems;

#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// Bytes in the file. What an alias stands for keeps the place where it was written.
    pub(super) at: Range<usize>,
    pub(super) value: NodeValue,
}

#[derive(Debug, Clone)]
pub(super) enum NodeValue {
    Scalar(Scalar),
    List(Vec<Node>),
    Map(Vec<KeyValue>),
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
pub(super) struct KeyValue {
    pub(super) key: Node,
    pub(super) value: Node,
}

impl Node {
    pub(super) fn text(&self) -> Option<&str> {
        match &self.value {
            NodeValue::Scalar(scalar) => Some(&scalar.text),
            _ => None,
        }
    }

    /// Nothing was written, or a variable without quotes came out empty.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, NodeValue::Scalar(scalar) if scalar.is_null())
    }

    /// A variable without quotes came out empty: the user wants the thing to be absent.
    pub(super) fn is_absent(&self) -> bool {
        matches!(&self.value, NodeValue::Scalar(scalar) if scalar.is_null() && scalar.expanded)
    }

    pub(super) fn type_name(&self) -> &'static str {
        match &self.value {
            NodeValue::Scalar(scalar) if scalar.is_null() => "nothing",
            NodeValue::Scalar(_) => "text",
            NodeValue::List(_) => "a list",
            NodeValue::Map(_) => "a mapping",
            NodeValue::Reported => "a problem",
        }
    }

    pub(super) fn height(&self) -> usize {
        match &self.value {
            NodeValue::Scalar(_) | NodeValue::Reported => 0,
            NodeValue::List(items) => 1 + items.iter().map(Self::height).max().unwrap_or_default(),
            NodeValue::Map(entries) => {
                let heights = entries.iter().map(|entry| entry.key.height().max(entry.value.height()));
                1 + heights.max().unwrap_or_default()
            }
        }
    }
}

impl Node {
    /// A default, as if it were written at `at`.
    pub(super) fn from_json(value: Value, at: usize) -> Self {
        let scalar = |text, plain| NodeValue::Scalar(Scalar { text, plain, expanded: false });
        let value = match value {
            Value::Array(items) => {
                NodeValue::List(items.into_iter().map(|item| Self::from_json(item, at)).collect())
            }
            Value::Object(entries) => {
                let entry = |(key, value): (String, Value)| KeyValue {
                    key: Self::from_json(key.into(), at),
                    value: Self::from_json(value, at),
                };
                NodeValue::Map(entries.into_iter().map(entry).collect())
            }
            Value::String(text) => scalar(text, false),
            other => scalar(other.to_string(), true),
        };
        Self { at: at..at, value }
    }

    /// Any value, as JSON. Text without quotes has the type that YAML's core schema gives it.
    pub(super) fn to_json(&self) -> Option<Value> {
        match &self.value {
            NodeValue::Reported => None,
            NodeValue::Scalar(scalar) => Some(scalar.to_json()),
            NodeValue::List(items) => items.iter().map(Self::to_json).collect(),
            NodeValue::Map(entries) => {
                let entry = |entry: &KeyValue| Some((entry.key.text()?.to_owned(), entry.value.to_json()?));
                entries.iter().map(entry).collect::<Option<Map<_, _>>>().map(Value::Object)
            }
        }
    }
}

impl Scalar {
    pub(super) fn is_null(&self) -> bool {
        let written = matches!(self.text.as_str(), "" | "~" | "null" | "Null" | "NULL");
        self.plain && (self.text.is_empty() || (written && !self.expanded))
    }

    /// Core schema, YAML 1.2.2 section 10.3.2. JSON has no infinity and no "not a number": they stay text.
    fn to_json(&self) -> Value {
        let text = self.text.as_str();
        match text {
            _ if self.is_null() => Value::Null,
            _ if !self.plain => text.into(),
            "true" | "True" | "TRUE" => true.into(),
            "false" | "False" | "FALSE" => false.into(),
            _ => number(text).map_or_else(|| text.into(), Value::Number),
        }
    }
}

fn number(text: &str) -> Option<Number> {
    let radix = |prefix, radix| text.strip_prefix(prefix).map(|digits| u64::from_str_radix(digits, radix));
    if let Some(number) = radix("0x", 16).or_else(|| radix("0o", 8)) {
        return number.ok().map(Number::from);
    }
    let is_numeric = text.bytes().any(|byte| byte.is_ascii_digit())
        && text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    if !is_numeric {
        return None;
    }
    let digits = text.strip_prefix('+').unwrap_or(text);
    let whole = digits.parse::<i64>().map(Number::from).or_else(|_| digits.parse::<u64>().map(Number::from));
    whole.ok().or_else(|| Number::from_f64(digits.parse().ok()?))
}

/// Takes out what YAML allows and settings do not: keys that are not text, and keys given twice.
/// Merge keys (`<<`) become the keys they bring.
pub(super) fn settle(node: &mut Node, problems: &mut Problems<'_>) {
    match &mut node.value {
        NodeValue::Scalar(_) | NodeValue::Reported => {}
        NodeValue::List(items) => items.iter_mut().for_each(|item| settle(item, problems)),
        NodeValue::Map(entries) => {
            let mut own: Vec<KeyValue> = Vec::new();
            let mut merged = Vec::new();
            for mut entry in std::mem::take(entries) {
                settle(&mut entry.value, problems);
                if matches!(&entry.key.value, NodeValue::Scalar(key) if key.plain && key.text == "<<") {
                    merge(entry, &mut merged, problems);
                } else if entry.key.text().is_some() {
                    own.push(entry);
                } else if !matches!(entry.key.value, NodeValue::Reported) {
                    problems.add(entry.key.at.start, "expected a word as a key");
                }
            }
            *entries = unique(own, merged, problems);
        }
    }
}

fn merge(entry: KeyValue, merged: &mut Vec<KeyValue>, problems: &mut Problems<'_>) {
    let sources = match entry.value.value {
        NodeValue::List(items) => items,
        _ => vec![entry.value],
    };
    for source in sources {
        match source.value {
            NodeValue::Map(entries) => merged.extend(entries),
            NodeValue::Reported => {}
            NodeValue::Scalar(_) | NodeValue::List(_) => {
                problems.add(entry.key.at.start, "expected a mapping, or a list of mappings, after `<<`");
            }
        }
    }
}

/// Own keys may be given once; of merged ones the first counts, and an own key goes before.
fn unique(own: Vec<KeyValue>, merged: Vec<KeyValue>, problems: &mut Problems<'_>) -> Vec<KeyValue> {
    let mut seen = std::collections::HashMap::new();
    let mut kept = Vec::with_capacity(own.len());
    for entry in own {
        let Some(key) = entry.key.text().map(str::to_owned) else {
            continue;
        };
        if let Some(first) = seen.get(&key) {
            let first = problems.line(*first);
            let name = problems.name(&entry.key);
            problems.add(entry.key.at.start, format!("{name} is given twice, first on line {first}"));
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
