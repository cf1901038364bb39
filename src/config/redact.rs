//! Where the secrets of a file are, so that no message shows them.
//!
//! [`secrets`] decides by the names of keys. It leaves the value of an unknown key visible only if the key
//! looks like a misspelt harmless one. [`unparsed_line`] is for a file that is not valid YAML and has no
//! keys to decide by; it leaves a line visible only if it is plainly harmless. Redacting too much does no
//! harm, redacting too little does.

use std::ops::Range;

use super::node::{KeyValue, Node, NodeValue};

/// A key of the settings that contains one of these holds a secret.
const SECRET_WORDS: [&str; 7] = ["token", "secret", "pass", "key", "credential", "auth", "bearer"];

/// Whether the value of an environment variable is a secret, by the name of the variable.
///
/// Narrower than [`SECRET_WORDS`], because the bridge redacts such a value wherever it occurs in output: with
/// `AUTH_MODE=none`, it would redact every "none". `KEYCLOAK_URL` is not a key either.
pub(super) fn names_secret(variable: &str) -> bool {
    let name = variable.to_ascii_lowercase();
    let is_key = |word: &str| word.ends_with("key") || word.ends_with("keys");
    ["token", "secret", "password", "credential"].iter().any(|word| name.contains(word))
        || name.split(|c: char| !c.is_alphanumeric()).any(is_key)
}

/// Mappings whose keys are chosen by the user.
const USER_KEYED: [&str; 2] = ["card", "rename"];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sensitivity {
    /// Not secret itself; nested keys are classified separately.
    Harmless,
    /// A secret of any type.
    Secret,
    /// A mapping of names to secrets.
    Secrets,
}

fn sensitivity(key: &str, parent: &str, known: &[&str]) -> Sensitivity {
    let letters = letters(key);
    if (parent, key) == ("tls", "key") || (parent, key) == ("nats", "credentials") {
        // Paths are not secrets, and help to find the problem.
        Sensitivity::Harmless
    } else if SECRET_WORDS.iter().any(|word| letters.contains(word)) {
        Sensitivity::Secret
    } else if letters == "env" || letters.contains("header") {
        Sensitivity::Secrets
    } else if USER_KEYED.contains(&parent) || key == "<<" || known.contains(&key) {
        Sensitivity::Harmless
    } else {
        match nearest(&letters, known) {
            Some(meant) if meant != key => sensitivity(meant, parent, known),
            _ => Sensitivity::Secret,
        }
    }
}

/// The known key that is most similar, if it is similar enough.
fn nearest<'k>(letters: &str, known: &[&'k str]) -> Option<&'k str> {
    let similarity = |name: &&str| strsim::jaro_winkler(name, letters);
    let best = known.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)))?;
    (similarity(best) > 0.84).then_some(best)
}

/// A key without stray punctuation, in lower case; cut, because comparing long keys is slow.
fn letters(key: &str) -> String {
    let letters = key.chars().filter(|c| c.is_alphanumeric() || *c == '_').take(28);
    letters.collect::<String>().to_ascii_lowercase()
}

/// The byte ranges of `text` that hold secrets, in no order. `known` are the keys of the settings.
pub(super) fn secrets(node: &Node, text: &str, known: &[&str]) -> Vec<Range<usize>> {
    let mut redacted = passwords_in_urls(text);
    redacted.extend(comments(text));
    walk(node, "", text, known, &mut redacted);
    redacted
}

fn walk(node: &Node, parent: &str, text: &str, known: &[&str], redacted: &mut Vec<Range<usize>>) {
    match &node.value {
        NodeValue::Reported => {}
        // A typo turned settings into text, and they may be secrets.
        NodeValue::Scalar(_) if parent.is_empty() || swallows_settings(node, text) => redact(node, redacted),
        NodeValue::Scalar(_) => redacted.extend(user_info(node, parent, text)),
        NodeValue::List(items) => items.iter().for_each(|item| walk(item, parent, text, known, redacted)),
        // A space after a colon turned a URL into a mapping, and its password into a value.
        NodeValue::Map(_) if parent.ends_with("url") => redact(node, redacted),
        NodeValue::Map(entries) => {
            for entry in entries {
                // A mapping or list as a key is not a setting, so its content is unknown.
                let Some(key) = entry.key.text() else {
                    redact(&entry.key, redacted);
                    redact_entry(entry, text, redacted);
                    continue;
                };
                redact_bare_key(entry, text, redacted);
                match (sensitivity(key, parent, known), &entry.value.value) {
                    (Sensitivity::Harmless, _) if USER_KEYED.contains(&parent) => {
                        walk(&entry.value, parent, text, known, redacted);
                    }
                    (Sensitivity::Harmless, _) => walk(&entry.value, key, text, known, redacted),
                    (Sensitivity::Secrets, NodeValue::Map(inner)) => inner.iter().for_each(|entry| {
                        redact_bare_key(entry, text, redacted);
                        redact_entry(entry, text, redacted);
                    }),
                    _ => redact_entry(entry, text, redacted),
                }
            }
        }
    }
}

/// Whether a string has several lines, or contains what looks like a setting.
fn swallows_settings(node: &Node, text: &str) -> bool {
    let raw = text.get(node.at.clone()).unwrap_or_default();
    raw.contains(['\n', '\r']) || raw.contains(": ")
}

/// Redacts a key without a colon: in `{password: a,b}`, `b` is a key to YAML but part of the password to the
/// user.
fn redact_bare_key(entry: &KeyValue, text: &str, redacted: &mut Vec<Range<usize>>) {
    let after = text.get(entry.key.at.end..).unwrap_or_default();
    if entry.value.is_null() && !after.trim_start().starts_with(':') {
        redacted.push(entry.key.at.clone());
    }
}

/// Redacts everything from the colon to the end of the value, and a comment after it: to the user, `a #b` is
/// one password.
fn redact_entry(entry: &KeyValue, text: &str, redacted: &mut Vec<Range<usize>>) {
    redact(&entry.value, redacted);
    let end = entry.value.at.end.max(entry.key.at.end);
    let after = text.get(entry.key.at.end..).unwrap_or_default();
    let colon = after.len() - after.trim_start().len();
    let after_colon = after.trim_start().strip_prefix(':').unwrap_or_default();
    let space = after_colon.len() - after_colon.trim_start_matches([' ', '\t']).len();
    let start = entry.key.at.end + colon + 1 + space;
    let line = text.get(end..).unwrap_or_default().split(['\n', '\r']).next().unwrap_or_default();
    let comment = line.trim_start().trim_start_matches(':').trim_start().starts_with('#');
    redacted.push(start..if comment { end + line.len() } else { end });
}

/// Redacts the node and everything in it, as the target of an alias is written elsewhere.
fn redact(node: &Node, redacted: &mut Vec<Range<usize>>) {
    redacted.push(node.at.clone());
    node.children().for_each(|child| redact(child, redacted));
}

/// Everything after a `#` that may start a comment, because it may be a setting with a secret.
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

/// Users and passwords of URLs anywhere, even in comments and keys.
fn passwords_in_urls(text: &str) -> Vec<Range<usize>> {
    let mut at = 0;
    let mut redacted = Vec::new();
    for word in text.split_inclusive(char::is_whitespace) {
        // There may be a space between the scheme and the rest.
        if let Some((scheme, rest)) = word.split_once("//") {
            let start = scheme.len() + 2;
            match rest.rfind('@') {
                Some(end) => redacted.push(at + start..at + start + end),
                // There may be a line break before the `@`; a port has digits, or is a variable.
                None if rest.split_once(':').is_some_and(|(_, port)| {
                    port.starts_with(|c: char| !c.is_ascii_digit() && !"${/".contains(c))
                }) =>
                {
                    redacted.push(at + start..at + word.trim_end().len());
                }
                None => {}
            }
        }
        at += word.len();
    }
    redacted
}

/// The user and password of a URL that is a value; it may lack the scheme or have several lines.
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

/// What to redact in a line of a file that is not valid YAML.
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
    let secret = |key: &str| sensitivity(key, parent, known) != Sensitivity::Harmless;
    let inside = open.iter().any(|open| *open != key && secret(open));
    if !known.contains(&key) || inside {
        return all;
    }
    let lower = value.to_ascii_lowercase();
    let risky = SECRET_WORDS.iter().any(|word| lower.contains(word)) || value.contains(['{', '@']);
    let start = line.len() - value.trim_start().len();
    (secret(key) || risky).then_some(start..line.len())
}
