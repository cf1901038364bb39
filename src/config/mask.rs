//! What a message must not show: the places of secrets in the file.
//!
//! [`secrets`] finds them by the names of keys, so a secret under a misspelt or unknown key is covered
//! too. [`unparsed_line`] decides for a file that is no YAML, where there are no keys to go by; there,
//! a line is shown only if it is plainly harmless. Covering too much is fine, too little is not.

use std::ops::Range;

use super::node::{Entry, Node, Value};

const SECRET_KEYS: [&str; 5] = ["bearer_token", "a2a_bearer_token", "token", "password", "nkey"];
const SECRET_WORDS: [&str; 6] = ["token", "secret", "pass", "key", "credential", "auth"];

/// Whether the value of `key` inside `parent` is a secret, or a mapping of secrets.
fn is_secret(key: &str, parent: &str) -> bool {
    // These two hold paths, which help more than they harm.
    if (parent, key) == ("tls", "key") || (parent, key) == ("nats", "credentials") {
        return false;
    }
    let key = letters(key);
    let close = |name: &str| strsim::damerau_levenshtein(&letters(name), &key) <= name.len() / 4;
    SECRET_WORDS.iter().any(|word| key.contains(word)) || SECRET_KEYS.iter().any(|name| close(name))
}

/// Whether every value inside is a secret.
fn holds_secrets(key: &str) -> bool {
    let key = letters(key);
    key.contains("env") || key.contains("header") || strsim::damerau_levenshtein(&key, "headers") <= 2
}

/// A key without the marks that a slip of the finger brings in; cut, as comparing takes its time.
fn letters(key: &str) -> String {
    key.chars()
        .filter(|c| c.is_alphanumeric())
        .take(64)
        .collect::<String>()
        .to_ascii_lowercase()
}

/// The bytes of `text` that hold secrets, in no order.
pub(super) fn secrets(node: &Node, text: &str) -> Vec<Range<usize>> {
    let mut masks = Vec::new();
    walk(node, "", text, &mut masks);
    masks
}

fn walk(node: &Node, parent: &str, text: &str, masks: &mut Vec<Range<usize>>) {
    match &node.value {
        Value::Reported => {}
        Value::Scalar(_) => masks.extend(user_info(node, parent, text)),
        Value::List(items) => items.iter().for_each(|item| walk(item, parent, text, masks)),
        Value::Map(entries) => {
            for entry in entries {
                let key = entry.key.text().unwrap_or("key");
                cover_bare(entry, text, masks);
                if is_secret(key, parent) {
                    cover_entry(entry, text, masks);
                } else if !holds_secrets(key) {
                    walk(&entry.value, key, text, masks);
                } else if let Value::Map(inner) = &entry.value.value {
                    for entry in inner {
                        cover_bare(entry, text, masks);
                        cover_entry(entry, text, masks);
                    }
                } else {
                    cover_entry(entry, text, masks);
                }
            }
        }
    }
}

/// A key with no colon after it: in `{password: a,b}` the `b` is a key to YAML and a part of the
/// password to its owner.
fn cover_bare(entry: &Entry, text: &str, masks: &mut Vec<Range<usize>>) {
    let after = text.get(entry.key.at.end..).unwrap_or_default();
    if entry.value.is_null() && !after.trim_start().starts_with(':') {
        masks.push(entry.key.at.clone());
    }
}

/// From the colon to the end of the value, with a comment behind it: to its owner, `a #b` is one
/// password.
fn cover_entry(entry: &Entry, text: &str, masks: &mut Vec<Range<usize>>) {
    cover(&entry.value, masks);
    let end = entry.value.at.end.max(entry.key.at.end);
    let after = text.get(entry.key.at.end..).unwrap_or_default();
    let colon = after.len() - after.trim_start().len();
    let after_colon = after.trim_start().strip_prefix(':').unwrap_or_default();
    let space = after_colon.len() - after_colon.trim_start_matches([' ', '\t']).len();
    let start = entry.key.at.end + colon + 1 + space;
    let line = text
        .get(end..)
        .unwrap_or_default()
        .split(['\n', '\r'])
        .next()
        .unwrap_or_default();
    let comment = line
        .trim_start()
        .trim_start_matches(':')
        .trim_start()
        .starts_with('#');
    masks.push(start..if comment { end + line.len() } else { end });
}

/// The node where it is written, and everything in it: an alias stands elsewhere.
fn cover(node: &Node, masks: &mut Vec<Range<usize>>) {
    masks.push(node.at.clone());
    match &node.value {
        Value::Scalar(_) | Value::Reported => {}
        Value::List(items) => items.iter().for_each(|item| cover(item, masks)),
        Value::Map(entries) => entries.iter().for_each(|entry| {
            cover(&entry.key, masks);
            cover(&entry.value, masks);
        }),
    }
}

/// The user and password of a URL.
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
pub(super) fn unparsed_line(line: &str, known: &[String], open: &[String]) -> Option<Range<usize>> {
    let content = line.len() - line.trim_start_matches([' ', '\t', '-']).len();
    let all = Some(content..line.len());
    let Some((key, value)) = line.get(content..).and_then(|content| content.split_once(':')) else {
        return all;
    };
    let key = key.trim_end();
    let parent = if key == "credentials" { "nats" } else { "" };
    let secret = |key: &str| is_secret(key, parent) || holds_secrets(key);
    let inside = open.iter().any(|open| open != key && secret(open));
    if !known.iter().any(|known| known == key) || inside {
        return all;
    }
    let lower = value.to_ascii_lowercase();
    let risky = SECRET_WORDS.iter().any(|word| lower.contains(word)) || value.contains(['{', '@']);
    let start = line.len() - value.trim_start().len();
    (secret(key) || risky).then_some(start..line.len())
}
