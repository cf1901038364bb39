//! The keys of one mapping, asked for by name, and the plain readers below them.
//!
//! [`Fields`] remembers what it was asked for: what is left at the end is unknown, and the names asked
//! for are what a misspelt key may have meant.

use std::collections::BTreeMap;

use secrecy::SecretString;

use super::node::{Entry, Node, Scalar, Value};
use super::problem::Report;

/// A hint that lists more keys than this is not read by anyone.
const MOST_NAMES: usize = 12;

pub(super) const MAPPING: &str = "a mapping (`key: value`)";

pub(super) struct Fields<'n, 'r, 't> {
    at: usize,
    entries: Vec<&'n Entry>,
    asked: Vec<&'static str>,
    pub(super) report: &'r mut Report<'t>,
}

impl<'n, 'r, 't> Fields<'n, 'r, 't> {
    pub(super) fn open(node: &'n Node, report: &'r mut Report<'t>) -> Option<Self> {
        let Value::Map(entries) = &node.value else {
            unexpected(node, report, MAPPING);
            return None;
        };
        Some(Self { at: node.at.start, entries: entries.iter().collect(), asked: Vec::new(), report })
    }

    /// The value under one of `names`, which all mean the same; only one may be given.
    fn entry(&mut self, names: &[&'static str]) -> Option<&'n Entry> {
        self.asked.extend(names);
        let given = |entry: &&&Entry| names.iter().any(|name| entry.key.text() == Some(name));
        let mut entries = self.entries.iter().filter(given).copied();
        let first = entries.next()?;
        if let Some(second) = entries.next() {
            let (first, second) =
                if first.key.at.start > second.key.at.start { (second, first) } else { (first, second) };
            let line = self.report.line(first.key.at.start);
            let message = format!(
                "{} and {} (line {line}) mean the same; give one of them",
                self.report.name(&second.key),
                self.report.name(&first.key)
            );
            self.report.add(second.key.at.start, message);
        }
        Some(first)
    }

    /// Where the key is, if it has a value.
    pub(super) fn place(&self, name: &str) -> Option<usize> {
        let entry = self.entries.iter().find(|entry| entry.key.text() == Some(name))?;
        (!entry.value.is_null()).then_some(entry.key.at.start)
    }

    pub(super) fn get<T>(
        &mut self,
        names: &[&'static str],
        read: impl FnOnce(&'n Node, &mut Report<'t>) -> Option<T>,
    ) -> Option<T> {
        let entry = self.entry(names)?;
        if entry.value.is_null() { None } else { read(&entry.value, self.report) }
    }

    pub(super) fn required<T>(
        &mut self,
        names: &[&'static str],
        read: impl FnOnce(&'n Node, &mut Report<'t>) -> Option<T>,
    ) -> Option<T> {
        match self.entry(names) {
            Some(entry) if entry.value.is_null() => {
                let message = format!("{} has no value", self.report.name(&entry.key));
                self.report.add(entry.key.at.start, message);
                None
            }
            Some(entry) => read(&entry.value, self.report),
            None => {
                let name = names.first().copied().unwrap_or_default();
                self.report.add(self.at, format!("`{name}` is missing"));
                None
            }
        }
    }

    pub(super) fn parsed<T>(
        &mut self,
        names: &[&'static str],
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<T> {
        self.get(names, |node, report| checked(node, report, parse))
    }

    pub(super) fn secret(
        &mut self,
        names: &[&'static str],
        parse: impl Fn(&str) -> Result<String, String>,
    ) -> Option<SecretString> {
        self.parsed(names, parse).map(SecretString::from)
    }

    /// Reports every key that nobody asked for.
    pub(super) fn close(self) {
        for entry in &self.entries {
            let Some(key) = entry.key.text().filter(|key| !self.asked.contains(key)) else {
                continue;
            };
            let message = match self.report.name(&entry.key).as_str() {
                name if name.starts_with('`') => format!("unknown key {name}"),
                _ => "unknown key".to_owned(),
            };
            self.report.add_with_hint(entry.key.at.start, message, self.hint(key));
        }
    }

    fn hint(&self, key: &str) -> String {
        let short: String = key.chars().take(64).collect();
        // Two letters that changed places in a short word make it look unlike itself.
        let likeness = |name: &&str| {
            let is_slip = strsim::osa_distance(name, &short) == 1;
            strsim::jaro_winkler(name, &short).max(if is_slip { 0.9 } else { 0.0 })
        };
        let close = self.asked.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
        match close.filter(|name| likeness(name) > 0.84) {
            Some(name) => format!("did you mean `{name}`?"),
            None if self.asked.len() > MOST_NAMES => {
                "`a2a-bridge schema` and `config/full.yaml` list the keys".into()
            }
            None => format!("the keys here are `{}`", self.asked.join("`, `")),
        }
    }
}

pub(super) fn unexpected(node: &Node, report: &mut Report<'_>, expected: &str) {
    if !matches!(node.value, Value::Reported) {
        report.add(node.at.start, format!("expected {expected}, found {}", node.kind()));
    }
}

fn scalar<'n>(node: &'n Node, report: &mut Report<'_>, expected: &str) -> Option<&'n Scalar> {
    match &node.value {
        Value::Scalar(scalar) if !scalar.is_null() => Some(scalar),
        _ => {
            unexpected(node, report, expected);
            None
        }
    }
}

pub(super) fn checked<T>(
    node: &Node,
    report: &mut Report<'_>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Option<T> {
    match parse(&scalar(node, report, "text")?.text) {
        Ok(value) => Some(value),
        Err(message) => {
            report.add(node.at.start, message);
            None
        }
    }
}

/// `true` or `false`: in quotes they are text, unless they came from the environment.
pub(super) fn truth(node: &Node, report: &mut Report<'_>) -> Option<bool> {
    let scalar = scalar(node, report, "`true` or `false`")?;
    match scalar.text.as_str() {
        "true" if scalar.plain || scalar.expanded => Some(true),
        "false" if scalar.plain || scalar.expanded => Some(false),
        _ => {
            report.add(node.at.start, "expected `true` or `false`, without quotes");
            None
        }
    }
}

/// Reads every item; items that are absent (an empty variable) are left out.
pub(super) fn each<'n, 't, T>(
    node: &'n Node,
    report: &mut Report<'t>,
    mut read: impl FnMut(&'n Node, &mut Report<'t>) -> Option<T>,
) -> Option<Vec<T>> {
    let Value::List(items) = &node.value else {
        unexpected(node, report, "a list");
        return None;
    };
    let given = items.iter().filter(|item| !item.is_absent());
    Some(given.filter_map(|item| read(item, report)).collect())
}

pub(super) fn list<T>(
    node: &Node,
    report: &mut Report<'_>,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Option<Vec<T>> {
    each(node, report, |item, report| checked(item, report, &parse))
}

/// A mapping whose keys are the user's own; values that are absent are left out with their keys.
pub(super) fn words<'n, 't, T>(
    node: &'n Node,
    report: &mut Report<'t>,
    mut read: impl FnMut(&'n Node, &'n Node, &mut Report<'t>) -> Option<T>,
) -> Option<BTreeMap<String, T>> {
    let Value::Map(entries) = &node.value else {
        unexpected(node, report, MAPPING);
        return None;
    };
    let mut words = BTreeMap::new();
    for Entry { key, value } in entries.iter().filter(|entry| !entry.value.is_absent()) {
        if value.is_null() {
            let message = format!("{} has no value", report.name(key));
            report.add_with_hint(key.at.start, message, "write `\"\"` for an empty text");
        } else if let (Some(value), Some(key)) = (read(key, value, report), key.text()) {
            words.insert(key.to_owned(), value);
        }
    }
    Some(words)
}

/// Any value, as JSON. Text without quotes has the type that YAML's core schema gives it.
pub(super) fn json(node: &Node) -> Option<serde_json::Value> {
    match &node.value {
        Value::Reported => None,
        Value::Scalar(scalar) => Some(json_scalar(scalar)),
        Value::List(items) => items.iter().map(json).collect(),
        Value::Map(entries) => {
            let entry = |entry: &Entry| Some((entry.key.text()?.to_owned(), json(&entry.value)?));
            entries
                .iter()
                .map(entry)
                .collect::<Option<serde_json::Map<_, _>>>()
                .map(serde_json::Value::Object)
        }
    }
}

/// Core schema, YAML 1.2.2 section 10.3.2. JSON has no infinity and no "not a number": they stay text.
fn json_scalar(scalar: &Scalar) -> serde_json::Value {
    let text = scalar.text.as_str();
    if scalar.is_null() {
        return serde_json::Value::Null;
    }
    let number = || {
        let radix =
            |prefix, radix| text.strip_prefix(prefix).map(|digits| u64::from_str_radix(digits, radix));
        if let Some(number) = radix("0x", 16).or_else(|| radix("0o", 8)) {
            return number.ok().map(serde_json::Number::from);
        }
        let looks_like = text.bytes().any(|byte| byte.is_ascii_digit())
            && text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
        let digits = text.strip_prefix('+').unwrap_or(text);
        match digits.parse::<i64>() {
            _ if !looks_like => None,
            Ok(number) => Some(number.into()),
            Err(_) => match digits.parse::<u64>() {
                Ok(number) => Some(number.into()),
                Err(_) => digits.parse().ok().and_then(serde_json::Number::from_f64),
            },
        }
    };
    match text {
        _ if !scalar.plain => text.into(),
        "true" | "True" | "TRUE" => true.into(),
        "false" | "False" | "FALSE" => false.into(),
        _ => number().map_or_else(|| text.into(), serde_json::Value::Number),
    }
}
