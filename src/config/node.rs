//! The file as a tree: text, lists and mappings, each with its position in the file.
//!
//! `load.rs` builds the tree, and [`resolve_keys`] reports duplicate keys and resolves merge keys. What a text
//! means (number, duration, …) is for the readers of settings to decide.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use serde_json::{Map, Number, Value};

use super::problems::Problems;

#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// Byte range in the file. The target of an alias keeps the position where it is written.
    pub(super) at: Range<usize>,
    pub(super) value: NodeValue,
}

#[derive(Debug, Clone)]
pub(super) enum NodeValue {
    Scalar(Scalar),
    List(Vec<Node>),
    Map(Vec<KeyValue>),
    /// A problem was reported here; readers report no other.
    Reported,
}

#[derive(Debug, Clone)]
pub(super) struct Scalar {
    pub(super) text: String,
    /// Written without quotes.
    pub(super) plain: bool,
    /// Contains the value of a variable.
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

    /// Whether the value is missing, or an unquoted variable that expanded to nothing.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.value, NodeValue::Scalar(scalar) if scalar.is_null())
    }

    /// Whether the value is an unquoted variable that expanded to nothing; treated as if the key were absent.
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

    /// The items of a list, or the keys and values of a mapping.
    pub(super) fn children(&self) -> impl Iterator<Item = &Self> {
        let (items, entries): (&[Self], &[KeyValue]) = match &self.value {
            NodeValue::Scalar(_) | NodeValue::Reported => (&[], &[]),
            NodeValue::List(items) => (items, &[]),
            NodeValue::Map(entries) => (&[], entries),
        };
        items.iter().chain(entries.iter().flat_map(|entry| [&entry.key, &entry.value]))
    }

    /// How deep lists and mappings are nested.
    pub(super) fn height(&self) -> usize {
        match &self.value {
            NodeValue::Scalar(_) | NodeValue::Reported => 0,
            _ => 1 + self.children().map(Self::height).max().unwrap_or_default(),
        }
    }

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

/// Removes and reports what YAML allows and settings do not: keys that are not text, and duplicate keys.
/// Replaces merge keys (`<<`) with the keys of their mappings.
pub(super) fn resolve_keys(node: &mut Node, problems: &mut Problems<'_>) {
    match &mut node.value {
        NodeValue::Scalar(_) | NodeValue::Reported => {}
        NodeValue::List(items) => items.iter_mut().for_each(|item| resolve_keys(item, problems)),
        NodeValue::Map(entries) => {
            let mut own: Vec<KeyValue> = Vec::new();
            let mut merged = Vec::new();
            for mut entry in std::mem::take(entries) {
                resolve_keys(&mut entry.value, problems);
                if matches!(&entry.key.value, NodeValue::Scalar(key) if key.plain && key.text == "<<") {
                    merge(entry, &mut merged, problems);
                } else if entry.key.text().is_some() {
                    own.push(entry);
                } else if !matches!(entry.key.value, NodeValue::Reported) {
                    problems.add(entry.key.at.start, "expected text as a key");
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

/// A mapping's own keys must not repeat. They take precedence over merged ones, of which the first counts.
fn unique(own: Vec<KeyValue>, merged: Vec<KeyValue>, problems: &mut Problems<'_>) -> Vec<KeyValue> {
    let mut seen = HashMap::new();
    let mut kept = own;
    kept.retain(|entry| problems.check_unique(&mut seen, entry.key.text().unwrap_or_default(), &entry.key));
    let mut names: HashSet<String> = seen.into_keys().collect();
    kept.extend(
        merged.into_iter().filter(|entry| names.insert(entry.key.text().unwrap_or_default().to_owned())),
    );
    kept
}
