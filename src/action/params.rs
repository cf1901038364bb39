//! The parameters of a skill, and the prompt that their values make.
//!
//! `{identifier}` in a skill's description is a parameter. Without such placeholders, `prompt` is the only parameter.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

/// Parameters of every action, which are never placeholders.
const RESERVED: [&str; 4] = ["prompt", "files", "data", "meta"];
/// Further placeholders of a skill stay text.
const MAX_PLACEHOLDERS: usize = 64;

/// Maximum length of a placeholder's name.
const MAX_NAME: usize = 64;
/// Maximum number of places in a description where a value is filled in. Further ones stay text: the description comes
/// from the agent, and each place may multiply the size of a request.
const MAX_PLACES: usize = 1024;
/// Maximum size of a description with its values, in bytes.
const MAX_FILLED: usize = 1 << 20;

/// A description with placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    description: String,
    /// The parameters, in the order of the description.
    pub(crate) names: Vec<String>,
}

/// The description with its values is larger than [`MAX_FILLED`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the skill's description with these values is larger than {MAX_FILLED} bytes")]
pub(crate) struct FilledTooLarge;

impl Template {
    pub(crate) fn parse(description: &str) -> Self {
        let (mut names, mut known) = (Vec::new(), HashSet::new());
        for (_, name) in placeholders(description) {
            if names.len() < MAX_PLACEHOLDERS && known.insert(name) {
                names.push(name.to_owned());
            }
        }
        Self { description: description.to_owned(), names }
    }

    /// The description with the values filled in. Placeholders in values stay as they are.
    pub(crate) fn fill<'a>(&self, value: impl Fn(&str) -> &'a str) -> Result<String, FilledTooLarge> {
        let values: HashMap<&str, &str> =
            self.names.iter().map(|name| (name.as_str(), value(name))).collect();
        let (mut pieces, mut rest) = (Vec::new(), 0);
        for (at, name) in placeholders(&self.description) {
            if let Some(value) = values.get(name) {
                pieces.push(self.description.get(rest..at).unwrap_or_default());
                pieces.push(value);
                rest = at + name.len() + "{}".len();
            }
        }
        pieces.push(self.description.get(rest..).unwrap_or_default());
        let size: usize = pieces.iter().map(|piece| piece.len()).sum();
        if size > MAX_FILLED { Err(FilledTooLarge) } else { Ok(pieces.concat()) }
    }

    /// The JSON schema of a request body.
    pub(crate) fn schema(&self) -> Value {
        let parameter = |name: &String| (name.clone(), json!({"type": ["string", "number", "boolean"]}));
        let mut properties: Map<_, _> = self.names.iter().map(parameter).collect();
        properties.insert("prompt".into(), json!({"type": "string"}));
        properties.insert("files".into(), files_schema());
        properties.insert("data".into(), json!({"type": "object"}));
        let meta = json!({"type": "object", "additionalProperties": false, "properties": {
            "session_id": {"type": "string"},
            "reference_task_ids": {"type": "array", "items": {"type": "string"}},
            "output_modes": {"type": "array", "items": {"type": "string"}},
        }});
        properties.insert("meta".into(), meta);
        let (key, required) = match self.names.is_empty() {
            true => ("required", json!(["prompt"])),
            false => ("oneOf", json!([{"required": self.names}, {"required": ["prompt"]}])),
        };
        json!({"type": "object", "properties": properties, "additionalProperties": false, key: required})
    }
}

/// The JSON schema of `files`.
pub(crate) fn files_schema() -> Value {
    json!({"type": "array", "items": {"oneOf": [
        {"type": "string", "format": "uri"},
        {"type": "object", "required": ["bytes"], "additionalProperties": false, "properties": {
            "name": {"type": "string"},
            "mime_type": {"type": "string"},
            "bytes": {"type": "string", "contentEncoding": "base64"},
        }},
    ]}})
}

/// The first placeholders of a text, by the position of their brace. Looks at no character more than twice.
fn placeholders(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let braces = memchr::memchr_iter(b'{', text.as_bytes());
    let named = braces.filter_map(|at| {
        let after = text.get(at + 1..)?;
        let is_other = |byte: u8| !(byte.is_ascii_alphanumeric() || byte == b'_');
        let end = after.bytes().take(MAX_NAME + 1).position(is_other)?;
        let name = after.get(..end).filter(|_| after.as_bytes().get(end) == Some(&b'}'))?;
        let is_identifier = name.bytes().next().is_some_and(|first| !first.is_ascii_digit());
        (is_identifier && !RESERVED.contains(&name)).then_some((at, name))
    });
    named.take(MAX_PLACES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_become_parameters_in_order_and_once() {
        let template = Template::parse("Translate {text} into {language}: {text}");
        assert_eq!(template.names, ["text", "language"]);
        let filled = template.fill(|name| if name == "text" { "{language}" } else { "French" });
        assert_eq!(filled.unwrap(), "Translate {language} into French: {language}");
    }

    #[test]
    fn braces_without_an_identifier_stay_text() {
        for text in
            ["a {b c} d", "{}", "{1a}", "json {\"a\": 1}", "{prompt} {files} {data} {meta}", "open {", "{é}"]
        {
            let template = Template::parse(text);
            assert!(template.names.is_empty(), "{text}");
            assert_eq!(template.fill(|_| "").unwrap(), text);
        }
        assert_eq!(Template::parse("{{city}}").names, ["city"]);
    }

    #[test]
    fn a_hostile_description_costs_linear_time_and_is_not_multiplied() {
        // With one search for `}` per brace, each of these took minutes.
        for piece in ["{", "{a", "{a{", "{name_", "{é"] {
            let text = piece.repeat((1 << 20) / piece.len());
            let template = Template::parse(&text);
            assert!(template.names.is_empty());
            assert_eq!(template.fill(|_| "").unwrap().len(), text.len());
        }
        let names: String = (0..300_000).map(|number| format!("{{n{number}}}")).collect();
        assert_eq!(Template::parse(&names).names.len(), MAX_PLACEHOLDERS);
        let repeated = Template::parse(&"{a}".repeat(300_000));
        assert_eq!(repeated.fill(|_| "").unwrap().len(), (300_000 - MAX_PLACES) * 3);
        assert_eq!(repeated.fill(|_| "0123456789".repeat(10_000).leak()), Err(FilledTooLarge));
    }

    #[test]
    fn further_names_stay_text() {
        let names: String = (0..=MAX_PLACEHOLDERS).map(|number| format!("{{n{number}}}")).collect();
        assert_eq!(Template::parse(&names).fill(|_| "").unwrap(), format!("{{n{MAX_PLACEHOLDERS}}}"));
        let long = "n".repeat(MAX_NAME);
        assert_eq!(Template::parse(&format!("{{{long}}} {{{long}n}}")).names, [long]);
    }

    #[test]
    fn the_schema_requires_the_placeholders_or_a_prompt() {
        let schema = Template::parse("Forecast for {city}").schema();
        assert_eq!(schema["oneOf"][0]["required"], json!(["city"]));
        assert_eq!(Template::parse("Anything").schema()["required"], json!(["prompt"]));
    }
}
