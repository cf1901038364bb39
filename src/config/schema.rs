//! The settings described: a JSON Schema, and `config/full.yaml`, both made from the doc comments.

use std::fmt::Write;
use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::Config;

/// Extra word of our schemas: other names of a key.
const ALIASES: &str = "x-aliases";
const COMMENT_WIDTH: usize = 100;

/// The JSON Schema of a settings file (draft 2020-12).
pub fn schema() -> Value {
    let mut schema = settings();
    finish(&mut schema);
    schema
}

/// As derived: each key once.
fn settings() -> Value {
    let inline = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let mut schema = inline.into_generator().into_root_schema_for::<Config>().to_value();
    if let Some(object) = schema.as_object_mut() {
        object.insert("title".into(), "Settings of a2a-bridge".into());
    }
    schema
}

/// Says what is required and adds the other names of keys, in all objects.
fn finish(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else {
        return;
    };
    for word in ["items", "additionalProperties"] {
        object.get_mut(word).into_iter().for_each(finish);
    }
    object.remove("required");
    let Some(Value::Object(properties)) = object.get_mut("properties") else {
        return;
    };
    properties.values_mut().for_each(finish);
    let mut required = Vec::new();
    let mut either = Vec::new();
    let mut others = Map::new();
    for (key, property) in properties.iter_mut() {
        let needed = is_required(property);
        let aliases = property.as_object_mut().and_then(|property| property.remove(ALIASES));
        let aliases: Vec<_> = aliases.iter().flat_map(Value::as_array).flatten().cloned().collect();
        if needed && aliases.is_empty() {
            required.push(key.clone());
        } else if needed {
            let names = aliases.iter().chain([&Value::from(key.as_str())]).cloned().collect::<Vec<_>>();
            either.push(json!({ "oneOf": names.iter().map(|name| json!({ "required": [name] })).collect::<Vec<_>>() }));
        }
        for alias in aliases.iter().filter_map(Value::as_str) {
            let mut other = property.clone();
            if let Some(other) = other.as_object_mut() {
                other.insert("description".into(), format!("Another name of `{key}`.").into());
            }
            others.insert(alias.to_owned(), other);
        }
    }
    properties.extend(others);
    if !required.is_empty() {
        object.insert("required".into(), required.into());
    }
    if !either.is_empty() {
        object.insert("allOf".into(), either.into());
    }
}

/// A key is required if it has no default and cannot be null.
fn is_required(property: &Value) -> bool {
    property.get("default").is_none() && !is_nullable(property)
}

fn is_nullable(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "null"),
        kind => kind.is_some_and(|kind| kind == "null"),
    }
}

/// Every key there is, at any depth.
pub(super) fn keys() -> &'static [String] {
    static KEYS: LazyLock<Vec<String>> = LazyLock::new(|| {
        let mut keys = Vec::new();
        collect(&schema(), &mut keys);
        keys
    });
    fn collect(schema: &Value, keys: &mut Vec<String>) {
        if let Some(Value::Object(properties)) = schema.get("properties") {
            for (key, property) in properties {
                keys.push(key.clone());
                collect(property, keys);
            }
        }
        schema.get("items").into_iter().for_each(|items| collect(items, keys));
    }
    &KEYS
}

/// Every key with its default and its explanation, as a settings file that works.
pub fn full_yaml() -> String {
    let mut out = String::from(
        "# yaml-language-server: $schema=schema.json\n\
         # Every setting of a2a-bridge with its default. Keys without a default are examples behind a `#`.\n\
         # Values may hold variables: ${NAME}, ${NAME:-default}, ${NAME:?hint}; write $$ for a plain $.\n\
         # Durations: 500ms, 30s, 2m, 1h30m, 1d. Sizes: 64KB, 4MiB.\n",
    );
    object(&settings(), "", "", &mut out);
    out
}

/// `margin` goes before every line, `first` once before the first key of a list item.
fn object(schema: &Value, margin: &str, first: &str, out: &mut String) {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return;
    };
    let mut margin = margin.to_owned();
    let mut item = first;
    for (key, property) in properties {
        if margin.is_empty() {
            out.push('\n');
        }
        comment(property, &margin, out);
        member(key, property, &format!("{margin}{item}"), out);
        if !item.is_empty() {
            margin.push_str("  ");
            item = "";
        }
    }
}

fn member(key: &str, property: &Value, margin: &str, out: &mut String) {
    let deeper = format!("{margin}  ");
    let example = property.get("examples").and_then(|examples| examples.get(0));
    let line = if property.get("properties").is_some() && is_nullable(property) {
        let _ = writeln!(out, "{margin}# {key}:");
        return object(property, &format!("{margin}#   "), "", out);
    } else if property.get("properties").is_some() {
        let _ = writeln!(out, "{margin}{key}:");
        return object(property, &deeper, "", out);
    } else if let Some(items) =
        property.get("items").filter(|items| items.get("properties").is_some() && !is_nullable(property))
    {
        let _ = writeln!(out, "{margin}{key}:");
        return object(items, &deeper, "- ", out);
    } else if let Some(default) = property.get("default") {
        format!("{margin}{key}: {}", yaml(default))
    } else if is_required(property) {
        format!("{margin}{key}: {}", example.map(yaml).unwrap_or_default())
    } else {
        // Inside a block that is behind a `#` already, a second one would say nothing.
        let hash = if margin.contains('#') { "" } else { "# " };
        format!("{margin}{hash}{key}: {}", example.map(yaml).unwrap_or_default())
    };
    out.push_str(line.trim_end());
    out.push('\n');
}

fn comment(property: &Value, margin: &str, out: &mut String) {
    let mut text = property.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    let aliases = property.get(ALIASES).and_then(Value::as_array);
    for alias in aliases.into_iter().flatten().filter_map(Value::as_str) {
        let _ = write!(text, " Another name is `{alias}`.");
    }
    // In a block behind a `#`, explanations get a second one and stay comments when it is taken off.
    let mut line = format!("{margin}#");
    for word in text.split_whitespace() {
        if line.chars().count() + word.chars().count() >= COMMENT_WIDTH {
            let _ = writeln!(out, "{line}");
            line = format!("{margin}#");
        }
        let _ = write!(line, " {word}");
    }
    let _ = writeln!(out, "{line}");
}

/// A value in YAML: JSON is YAML, and a simple word needs no quotes.
fn yaml(value: &Value) -> String {
    let plain = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '$' || c == '/')
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-./:${}".contains(&byte))
    };
    match value {
        Value::String(text) if plain(text) => text.clone(),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(Value::to_string).collect::<Vec<_>>().join(", "))
        }
        Value::Object(entries) if !entries.is_empty() => {
            let entries = entries.iter().map(|(key, value)| format!("{key}: {value}")).collect::<Vec<_>>();
            format!("{{ {} }}", entries.join(", "))
        }
        _ => value.to_string(),
    }
}

/// A value that is no text may still be written as a variable.
const VARIABLE: &str = r"\$\{";

pub(super) fn duration(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "number"], "exclusiveMinimum": 0 })
}

pub(super) fn size(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "integer"], "minimum": 1024, "maximum": 1 << 30 })
}

pub(super) fn count(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["integer", "string"], "minimum": 1, "maximum": 100_000, "pattern": VARIABLE })
}

pub(super) fn truth(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["boolean", "string"], "pattern": VARIABLE })
}

pub(super) fn protocol(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "number", "null"] })
}

pub(super) fn binding(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"] })
}

pub(super) fn port(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "integer", "null"], "minimum": 1, "maximum": 65535, "pattern": "^auto$|^[0-9]+$|\\$\\{" })
}

pub(super) fn restart(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": "^(always|on-failure|never)$|\\$\\{" })
}

pub(super) fn signal(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string" })
}

pub(super) fn text_or_list(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "array"], "items": { "type": "string" } })
}

pub(super) fn command(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "array", "null"], "items": { "type": ["string", "number", "boolean"] } })
}

pub(super) fn texts(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": { "type": ["string", "number", "boolean"] } })
}

pub(super) fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["object", "null"] })
}
