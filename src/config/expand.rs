//! `${NAME}`, `${NAME:-default}`, `${NAME:?hint}` and `$$` in values.
//!
//! Expansion works on the tree, after the file was split into keys and values. The value of a variable can
//! therefore not add keys, and is never parsed as YAML. No message repeats it.

use super::node::{Node, NodeValue};
use super::problems::Problems;

/// Limit of all expanded text, far above any real use.
const MAX_BYTES: usize = 8 << 20;
const FORMS: &str = "the forms are `${NAME}`, `${NAME:-default}` and `${NAME:?hint}`; `$$` is a plain `$`";

pub(super) type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadReference {
    /// The start of the reference, to find its column.
    starts: String,
    message: String,
    hint: String,
}

/// Expands every value below `node`. Keys stay as they are.
pub(super) fn expand(node: &mut Node, env: Env<'_>, problems: &mut Problems<'_>) {
    let mut left = MAX_BYTES;
    expand_node(node, env, problems, &mut left);
}

fn expand_node(node: &mut Node, env: Env<'_>, problems: &mut Problems<'_>, left: &mut usize) {
    match &mut node.value {
        NodeValue::Reported => {}
        NodeValue::List(items) => items.iter_mut().for_each(|item| expand_node(item, env, problems, left)),
        NodeValue::Map(entries) => {
            entries.iter_mut().for_each(|entry| expand_node(&mut entry.value, env, problems, left));
        }
        NodeValue::Scalar(scalar) if !scalar.text.contains('$') => {}
        NodeValue::Scalar(scalar) => match expand_text(&scalar.text, env) {
            Ok((text, expanded)) if text.len() <= *left => {
                *left -= text.len();
                scalar.text = text;
                scalar.expanded = expanded;
            }
            Ok(_) => {
                problems.add(node.at.start, "the variables of this file expand to more than 8 MiB");
                node.value = NodeValue::Reported;
            }
            Err(bad_references) => {
                for bad in bad_references {
                    let raw = problems.text.get(node.at.clone()).unwrap_or_default();
                    let offset = raw.find(&bad.starts).unwrap_or_default();
                    problems.add_with_hint(node.at.start + offset, bad.message, bad.hint);
                }
                node.value = NodeValue::Reported;
            }
        },
    }
}

/// The text with its references replaced, and whether there were any.
pub(super) fn expand_text(text: &str, env: Env<'_>) -> Result<(String, bool), Vec<BadReference>> {
    let mut out = String::with_capacity(text.len());
    let mut expanded = false;
    let mut bad_references = Vec::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let Some(after) = after.strip_prefix('{') else {
            out.push('$');
            rest = after.strip_prefix('$').unwrap_or(after);
            continue;
        };
        let Some((reference, after)) = after.split_once('}') else {
            let (message, hint) = ("`${` without a closing `}`", "write `$${` for a literal `${`");
            bad_references.push(BadReference {
                starts: "${".into(),
                message: message.into(),
                hint: hint.into(),
            });
            break;
        };
        expanded = true;
        match resolve(reference, env) {
            Ok(value) => out.push_str(&value),
            Err(bad) => bad_references.push(bad),
        }
        rest = after;
    }
    out.push_str(rest);
    if bad_references.is_empty() { Ok((out, expanded)) } else { Err(bad_references) }
}

/// The value of a reference: the text between `${` and the first `}`.
fn resolve(reference: &str, env: Env<'_>) -> Result<String, BadReference> {
    let end = reference.bytes().take_while(|byte| byte.is_ascii_alphanumeric() || *byte == b'_').count();
    let (name, operation) = reference.split_at(end);
    let bad = |message: String, hint: String| BadReference { starts: format!("${{{name}"), message, hint };
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        let message = "expected the name of a variable after `${`: letters, digits and `_`";
        return Err(bad(message.into(), FORMS.into()));
    }
    let word = operation.get(2..).unwrap_or_default();
    if word.replace("$$", "").contains("${") {
        let message = format!("`${{{name}` holds another `${{`, which is not supported");
        return Err(bad(message, "use one variable with one default".into()));
    }
    let value = env(name);
    let filled = value.clone().filter(|value| !value.is_empty());
    match operation.get(..2) {
        None if operation.is_empty() => value.ok_or_else(|| {
            let hint = format!("set it, or give a default: `${{{name}:-default}}`");
            bad(format!("the variable `{name}` is not set"), hint)
        }),
        Some(":-") => Ok(filled.unwrap_or_else(|| word.replace("$$", "$"))),
        Some(":?") => filled.ok_or_else(|| {
            let hint = if word.is_empty() { format!("set `{name}`") } else { word.to_owned() };
            bad(format!("the variable `{name}` is not set or is empty"), hint)
        }),
        _ => Err(bad(format!("`${{{name}` is followed by unsupported characters"), FORMS.into())),
    }
}
