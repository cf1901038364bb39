//! The parameters of a skill, and the prompt that their values make.
//!
//! `{identifier}` in a skill's description is a parameter. Without such placeholders, `prompt` is the only parameter.

use serde_json::{Map, Value, json};

/// Parameters of every action, which are never placeholders.
const RESERVED: [&str; 4] = ["prompt", "files", "data", "meta"];
/// Further placeholders of a skill stay text.
const MAX_PLACEHOLDERS: usize = 64;

/// A description, divided at its placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    pieces: Vec<Piece>,
    /// The parameters, in the order of the description.
    pub(crate) names: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    Placeholder(String),
}

impl Template {
    pub(crate) fn parse(description: &str) -> Self {
        let (mut pieces, mut names, mut text) = (Vec::new(), Vec::<String>::new(), String::new());
        let mut rest = description;
        while let Some((before, after)) = rest.split_once('{') {
            text.push_str(before);
            rest = after;
            let Some((name, after)) = after.split_once('}').filter(|(name, _)| is_placeholder(name)) else {
                text.push('{');
                continue;
            };
            let is_new = !names.iter().any(|known| known == name);
            if is_new && names.len() == MAX_PLACEHOLDERS {
                text.push('{');
                continue;
            }
            if is_new {
                names.push(name.to_owned());
            }
            pieces.push(Piece::Text(std::mem::take(&mut text)));
            pieces.push(Piece::Placeholder(name.to_owned()));
            rest = after;
        }
        text.push_str(rest);
        pieces.push(Piece::Text(text));
        Self { pieces, names }
    }

    /// The description with the values filled in. Placeholders in values stay as they are.
    pub(crate) fn fill<'a>(&self, value: impl Fn(&str) -> &'a str) -> String {
        self.pieces
            .iter()
            .map(|piece| match piece {
                Piece::Text(text) => text.as_str(),
                Piece::Placeholder(name) => value(name),
            })
            .collect()
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

fn is_placeholder(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
        && name.len() <= 64
        && !RESERVED.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_become_parameters_in_order_and_once() {
        let template = Template::parse("Translate {text} into {language}: {text}");
        assert_eq!(template.names, ["text", "language"]);
        let filled = template.fill(|name| if name == "text" { "{language}" } else { "French" });
        assert_eq!(filled, "Translate {language} into French: {language}");
    }

    #[test]
    fn braces_without_an_identifier_stay_text() {
        for text in
            ["a {b c} d", "{}", "{1a}", "json {\"a\": 1}", "{prompt} {files} {data} {meta}", "open {", "{é}"]
        {
            let template = Template::parse(text);
            assert!(template.names.is_empty(), "{text}");
            assert_eq!(template.fill(|_| ""), text);
        }
        assert_eq!(Template::parse("{{city}}").names, ["city"]);
    }

    #[test]
    fn the_schema_requires_the_placeholders_or_a_prompt() {
        let schema = Template::parse("Forecast for {city}").schema();
        assert_eq!(schema["oneOf"][0]["required"], json!(["city"]));
        assert_eq!(Template::parse("Anything").schema()["required"], json!(["prompt"]));
    }
}
