//! What a message must not show: the places of secrets in the file.
//!
//! [`secrets`] goes by the names of keys. The value of a key that is not known is shown only if the key
//! looks like a misspelt harmless one. [`unparsed_line`] decides for a file that is no YAML, where there
//! are no keys to go by; there, a line is shown only if it is plainly harmless. Covering too much is
//! fine, too little is not.

use std::ops::Range;

use super::node::{KeyValue, Node, NodeValue};

const SECRET_WORDS: [&str; 7] = ["token", "secret", "pass", "key", "credential", "auth", "bearer"];

/// Whether the value of an environment variable is a secret, by the name of the variable.
///
/// Stricter than [`SECRET_WORDS`], because the bridge redacts the value wherever it occurs in output: with
/// `AUTH_MODE=none`, every "none" would go, and `KEYCLOAK_URL` is no key.
pub(super) fn names_secret(variable: &str) -> bool {
    let name = variable.to_ascii_lowercase();
    let is_key = |word: &str| word.ends_with("key") || word.ends_with("keys");
    ["token", "secret", "password", "credential"].iter().any(|word| name.contains(word))
        || name.split(|c: char| !c.is_alphanumeric()).any(is_key)
}

/// Below these, keys are the user's own.
const FREE: [&str; 2] = ["card", "rename"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// Something to show, or keys to look at.
    Harmless,
    /// A secret, whatever its shape.
    Secret,
    /// A mapping of names to secrets.
    Secrets,
}

fn holds(key: &str, parent: &str, known: &[&str]) -> Holds {
    let letters = letters(key);
    if (parent, key) == ("tls", "key") || (parent, key) == ("nats", "credentials") {
        // Paths, which help more than they harm.
        Holds::Harmless
    } else if SECRET_WORDS.iter().any(|word| letters.contains(word)) {
        Holds::Secret
    } else if letters == "env" || letters.contains("header") {
        Holds::Secrets
    } else if FREE.contains(&parent) || key == "<<" || known.contains(&key) {
        Holds::Harmless
    } else {
        match nearest(&letters, known) {
            Some(meant) if meant != key => holds(meant, parent, known),
            _ => Holds::Secret,
        }
    }
}

/// The key that was meant, if one is close.
fn nearest<'k>(letters: &str, known: &[&'k str]) -> Option<&'k str> {
    let likeness = |name: &&str| strsim::jaro_winkler(name, letters);
    let best = known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(best) > 0.84).then_some(best)
}

/// A key without the marks that a slip of the finger brings in; cut, as comparing takes its time.
fn letters(key: &str) -> String {
    let letters = key.chars().filter(|c| c.is_alphanumeric() || *c == '_').take(28);
    letters.collect::<String>().to_ascii_lowercase()
}

/// The bytes of `text` that hold secrets, in no order. `known` are the keys of the settings.
pub(super) fn secrets(node: &Node, text: &str, known: &[&str]) -> Vec<Range<usize>> {
    let mut masks = passwords_in_urls(text);
    masks.extend(comments(text));
    walk(node, "", text, known, &mut masks);
    masks
}

fn walk(node: &Node, parent: &str, text: &str, known: &[&str], masks: &mut Vec<Range<usize>>) {
    match &node.value {
        NodeValue::Reported => {}
        // A slip has made a text of settings, and these may be secrets.
        NodeValue::Scalar(_) if parent.is_empty() || swallows_settings(node, text) => cover(node, masks),
        NodeValue::Scalar(_) => masks.extend(user_info(node, parent, text)),
        NodeValue::List(items) => items.iter().for_each(|item| walk(item, parent, text, known, masks)),
        // A blank after a colon has made a mapping of an address, and of its password a value.
        NodeValue::Map(_) if parent.ends_with("url") => cover(node, masks),
        NodeValue::Map(entries) => {
            for entry in entries {
                // A mapping or list as a key is no setting at all; nobody knows what is in it.
                let Some(key) = entry.key.text() else {
                    cover(&entry.key, masks);
                    cover_entry(entry, text, masks);
                    continue;
                };
                cover_bare(entry, text, masks);
                match (holds(key, parent, known), &entry.value.value) {
                    (Holds::Harmless, _) if FREE.contains(&parent) => {
                        walk(&entry.value, parent, text, known, masks);
                    }
                    (Holds::Harmless, _) => walk(&entry.value, key, text, known, masks),
                    (Holds::Secrets, NodeValue::Map(inner)) => inner.iter().for_each(|entry| {
                        cover_bare(entry, text, masks);
                        cover_entry(entry, text, masks);
                    }),
                    _ => cover_entry(entry, text, masks),
                }
            }
        }
    }
}

/// Whether a text goes over several lines, or has what looks like a setting in it.
fn swallows_settings(node: &Node, text: &str) -> bool {
    let raw = text.get(node.at.clone()).unwrap_or_default();
    raw.contains(['\n', '\r']) || raw.contains(": ")
}

/// A key with no colon after it: in `{password: a,b}` the `b` is a key to YAML and a part of the
/// password to its owner.
fn cover_bare(entry: &KeyValue, text: &str, masks: &mut Vec<Range<usize>>) {
    let after = text.get(entry.key.at.end..).unwrap_or_default();
    if entry.value.is_null() && !after.trim_start().starts_with(':') {
        masks.push(entry.key.at.clone());
    }
}

/// From the colon to the end of the value, with a comment behind it: to its owner, `a #b` is one
/// password.
fn cover_entry(entry: &KeyValue, text: &str, masks: &mut Vec<Range<usize>>) {
    cover(&entry.value, masks);
    let end = entry.value.at.end.max(entry.key.at.end);
    let after = text.get(entry.key.at.end..).unwrap_or_default();
    let colon = after.len() - after.trim_start().len();
    let after_colon = after.trim_start().strip_prefix(':').unwrap_or_default();
    let space = after_colon.len() - after_colon.trim_start_matches([' ', '\t']).len();
    let start = entry.key.at.end + colon + 1 + space;
    let line = text.get(end..).unwrap_or_default().split(['\n', '\r']).next().unwrap_or_default();
    let comment = line.trim_start().trim_start_matches(':').trim_start().starts_with('#');
    masks.push(start..if comment { end + line.len() } else { end });
}

/// The node where it is written, and everything in it: an alias stands elsewhere.
fn cover(node: &Node, masks: &mut Vec<Range<usize>>) {
    masks.push(node.at.clone());
    match &node.value {
        NodeValue::Scalar(_) | NodeValue::Reported => {}
        NodeValue::List(items) => items.iter().for_each(|item| cover(item, masks)),
        NodeValue::Map(entries) => entries.iter().for_each(|entry| {
            cover(&entry.key, masks);
            cover(&entry.value, masks);
        }),
    }
}

/// Everything behind a `#` that may begin a comment: it may be what a line said before.
fn comments(text: &str) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    text.split_inclusive(['\n', '\r']).filter_map(move |line| {
        let start = at;
        at += line.len();
        let is_first =
            |sign: usize| line.get(..sign).is_some_and(|before| before.trim_end().len() < sign || sign == 0);
        let sign = line.match_indices('#').map(|(sign, _)| sign).find(|sign| is_first(*sign))?;
        Some(start + sign + 1..start + line.trim_end().len())
    })
}

/// Users and passwords of URLs wherever they stand, be it in a comment or in a key.
fn passwords_in_urls(text: &str) -> Vec<Range<usize>> {
    let mut at = 0;
    let mut masks = Vec::new();
    for word in text.split_inclusive(char::is_whitespace) {
        // A blank may have got between the scheme and the rest.
        if let Some((scheme, rest)) = word.split_once("//") {
            let start = scheme.len() + 2;
            match rest.rfind('@') {
                Some(end) => masks.push(at + start..at + start + end),
                // A line break may have got before the `@`; a port has digits, or is a variable.
                None if rest.split_once(':').is_some_and(|(_, port)| {
                    port.starts_with(|c: char| !c.is_ascii_digit() && !"${/".contains(c))
                }) =>
                {
                    masks.push(at + start..at + word.trim_end().len());
                }
                None => {}
            }
        }
        at += word.len();
    }
    masks
}

/// The user and password of a URL as a value, which may lack the scheme or go over several lines.
fn user_info(node: &Node, key: &str, text: &str) -> Option<Range<usize>> {
    let raw = text.get(node.at.clone())?;
    let end = raw.rfind('@')?;
    let start = match raw.find("://") {
        Some(scheme) => scheme + 3,
        None if key.ends_with("url") => 0,
        None => return None,
    };
    Some(node.at.start + start..node.at.start + end)
}

/// What to cover in a line of a file that is no YAML.
///
/// `known` are the keys of the settings; `open` are the keys whose values were being read.
pub(super) fn unparsed_line(line: &str, known: &[&str], open: &[&str]) -> Option<Range<usize>> {
    let content = line.len() - line.trim_start_matches([' ', '\t', '-']).len();
    let all = Some(content..line.len());
    let Some((key, value)) = line.get(content..).and_then(|content| content.split_once(':')) else {
        return all;
    };
    let key = key.trim_end();
    let parent = if key == "credentials" { "nats" } else { "" };
    let secret = |key: &str| holds(key, parent, known) != Holds::Harmless;
    let inside = open.iter().any(|open| *open != key && secret(open));
    if !known.contains(&key) || inside {
        return all;
    }
    let lower = value.to_ascii_lowercase();
    let risky = SECRET_WORDS.iter().any(|word| lower.contains(word)) || value.contains(['{', '@']);
    let start = line.len() - value.trim_start().len();
    (secret(key) || risky).then_some(start..line.len())
}
