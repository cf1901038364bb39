//! The settings described: a JSON Schema, and `config/full.yaml`, both made from the doc comments.
//!
//! The schema accepts what `check` accepts, key by key, as far as one value can tell: `null` is the
//! default of every key that has one, a text may be written as a number or a boolean, and words of a
//! fixed set are checked. What needs more than a pattern is for `check` alone: whether a URL, host or
//! command line is well formed, whether a duration or size in text is in its range, and rules across
//! keys. A value with a variable passes, as nobody knows yet what is in it.

#[cfg(test)]
use std::fmt::Write;
use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::supervision::STOP_SIGNALS;
use super::{Auth, Config};

/// Extra word of our schemas: other names of a key.
const ALIASES: &str = "x-aliases";
/// Extra word of our schemas: a number or a boolean is not a text here.
const STRICT: &str = "x-strict";
#[cfg(test)]
const COMMENT_WIDTH: usize = 100;
/// RFC 9110 section 5.6.2, as in `values::header_name`.
const HEADER_NAME: &str = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$";
/// As in `values::header_value`.
const HEADER_VALUE: &str = r"^[ -~\t]*$";

/// The JSON Schema of a settings file (draft 2020-12).
pub(crate) fn schema() -> Value {
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

/// Says what is required, what may be null and what may be written as a number, and adds the other names
/// of keys, in all objects.
fn finish(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else {
        return;
    };
    widen(object);
    for word in ["items", "additionalProperties"] {
        object.get_mut(word).into_iter().for_each(finish);
    }
    for word in ["anyOf", "prefixItems"] {
        object.get_mut(word).and_then(Value::as_array_mut).into_iter().flatten().for_each(finish);
    }
    object.remove("required");
    let Some(Value::Object(properties)) = object.get_mut("properties") else {
        return;
    };
    properties.values_mut().for_each(finish);
    let mut required = Vec::new();
    let mut rules = Vec::new();
    let mut others = Map::new();
    for (key, property) in properties.iter_mut() {
        let needed = is_required(property);
        if !needed {
            allow_null(property);
        }
        let aliases = property.as_object_mut().and_then(|property| property.remove(ALIASES));
        let aliases: Vec<_> = aliases.iter().flat_map(Value::as_array).flatten().cloned().collect();
        let names: Vec<_> = aliases.iter().chain([&Value::from(key.as_str())]).cloned().collect();
        if needed && aliases.is_empty() {
            required.push(key.clone());
        } else if needed {
            let given: Vec<_> = names.iter().map(|name| json!({ "required": [name] })).collect();
            rules.push(json!({ "oneOf": given }));
        } else if !aliases.is_empty() {
            rules.push(json!({ "not": { "required": names } }));
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
    if !rules.is_empty() {
        object.insert("allOf".into(), rules.into());
    }
}

/// YAML has no quotes around most texts, so a text may look like a number or a boolean.
fn widen(schema: &mut Map<String, Value>) {
    if schema.remove(STRICT).is_some() {
        return;
    }
    if let Some(types) = types(schema).filter(|types| types.iter().any(|kind| kind == "string")) {
        let more = ["number", "boolean"].map(Value::from);
        let more: Vec<_> = more.into_iter().filter(|kind| !types.contains(kind)).collect();
        schema.insert("type".into(), [types, more].concat().into());
    }
}

/// A key without a value has its default.
fn allow_null(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else {
        return;
    };
    let null = Value::from("null");
    if let Some(types) = types(object).filter(|types| !types.contains(&null)) {
        object.insert("type".into(), [types, vec![null]].concat().into());
    }
    if let Some(Value::Array(branches)) = object.get_mut("anyOf") {
        branches.push(json!({ "type": "null" }));
    }
}

fn types(schema: &Map<String, Value>) -> Option<Vec<Value>> {
    match schema.get("type")? {
        Value::Array(types) => Some(types.clone()),
        kind => Some(vec![kind.clone()]),
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
        let branches = schema.get("anyOf").and_then(Value::as_array);
        branches.into_iter().flatten().for_each(|branch| collect(branch, keys));
    }
    &KEYS
}

/// Every key with its default and its explanation, as a settings file that works.
#[cfg(test)]
pub(crate) fn full_yaml() -> String {
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
#[cfg(test)]
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

#[cfg(test)]
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

#[cfg(test)]
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
#[cfg(test)]
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

/// A variable may stand for anything.
const VARIABLE: &str = r"\$\{";

/// Text that matches one of the patterns, or holds a variable.
fn pattern(patterns: &[&str]) -> String {
    [patterns, &[VARIABLE]].concat().join("|")
}

/// A pattern for one of the words, in upper or lower case; regular expressions in schemas have no flags.
fn any_case<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let word = |word: &str| {
        let letter = |c: char| match (c.to_ascii_lowercase(), c.to_ascii_uppercase()) {
            (lower, upper) if lower != upper => format!("[{lower}{upper}]"),
            (other, _) if other.is_ascii_alphanumeric() => other.to_string(),
            (other, _) => format!("[{other}]"),
        };
        word.chars().map(letter).collect::<String>()
    };
    format!("({})", words.into_iter().map(word).collect::<Vec<_>>().join("|"))
}

/// One of these words, which editors offer, or a text that matches the pattern.
fn words(words: &[&str], also: &str) -> Schema {
    json_schema!({
        "type": "string", STRICT: true,
        "anyOf": [{ "enum": words }, { "type": "string", STRICT: true, "pattern": pattern(&[also]) }],
    })
}

pub(super) fn duration(_: &mut SchemaGenerator) -> Schema {
    let number = r"(\d+\.?\d*|\.\d+)";
    let text = format!(r"^\s*({number}|({number}(ms|s|m|h|d))+)\s*$");
    json_schema!({
        "type": ["string", "number"], STRICT: true,
        "exclusiveMinimum": 0, "maximum": 30 * 24 * 60 * 60, "pattern": pattern(&[&text]),
    })
}

pub(super) fn size(_: &mut SchemaGenerator) -> Schema {
    let text = format!(r"^\s*\d+\s*{}?\s*$", any_case(["b", "kb", "kib", "mb", "mib", "gb", "gib"]));
    json_schema!({
        "type": ["string", "integer"], STRICT: true,
        "minimum": 1024, "maximum": 1 << 30, "pattern": pattern(&[&text]),
    })
}

pub(super) fn count(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["integer", "string"], STRICT: true,
        "minimum": 1, "maximum": 100_000, "pattern": pattern(&[r"^\+?0*([1-9]\d{0,4}|100000)$"]),
    })
}

pub(super) fn truth(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["boolean", "string"], STRICT: true, "pattern": VARIABLE })
}

pub(super) fn protocol(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["string", "number", "null"], STRICT: true,
        "anyOf": [
            { "enum": ["0.1", "0.2", "0.3", "1.0", "1", 0.1, 0.2, 0.3, 1] },
            { "type": "string", STRICT: true, "pattern": VARIABLE },
        ],
    })
}

pub(super) fn binding(_: &mut SchemaGenerator) -> Schema {
    let mut schema =
        words(&["jsonrpc", "rest"], &format!("^{}$", any_case(["jsonrpc", "rest", "http+json"])));
    schema.insert("type".into(), json!(["string", "null"]));
    schema
}

pub(super) fn port(_: &mut SchemaGenerator) -> Schema {
    let number = r"^\+?0*([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])$";
    json_schema!({
        "type": ["string", "integer", "null"], STRICT: true,
        "minimum": 1, "maximum": 65535, "pattern": pattern(&["^auto$", number]),
    })
}

pub(super) fn restart(_: &mut SchemaGenerator) -> Schema {
    words(&["always", "on-failure", "never"], "^(always|on-failure|never)$")
}

pub(super) fn key_place(_: &mut SchemaGenerator) -> Schema {
    words(&["header", "query", "cookie"], "^(header|query|cookie)$")
}

pub(super) fn signal(_: &mut SchemaGenerator) -> Schema {
    let names = STOP_SIGNALS.iter().map(|name| name.trim_start_matches("SIG"));
    words(&STOP_SIGNALS, &format!("^{}?{}$", any_case(["sig"]), any_case(names)))
}

/// An address for HTTP; whether it is a good one is for `check` to say.
pub(super) fn http_url(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", STRICT: true, "pattern": pattern(&[r"^\s*[hH][tT][tT][pP][sS]?:"]) })
}

pub(super) fn listen(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", STRICT: true, "pattern": pattern(&[r":\d+$"]) })
}

pub(super) fn card_path(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"], STRICT: true, "pattern": pattern(&[r"^/(?![/\\])\S*$"]) })
}

/// A file or folder.
pub(super) fn path(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"], "minLength": 1 })
}

/// Text that is not empty.
pub(super) fn filled(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": r"\S" })
}

pub(super) fn optional_filled(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"], "pattern": r"\S" })
}

/// A token as headers have it.
pub(super) fn optional_token(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "null"], "pattern": pattern(&["^[!-~]+$"]) })
}

pub(super) fn user(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": pattern(&[r"^[^:]*[^:\s][^:]*$"]) })
}

pub(super) fn header_name(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": pattern(&[HEADER_NAME]) })
}

pub(super) fn header_value(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": pattern(&[HEADER_VALUE]) })
}

pub(super) fn owner(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "integer", "boolean"], STRICT: true, "pattern": pattern(&["^[a-z0-9_-]{1,64}$"]) })
}

pub(super) fn subject_prefix(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": pattern(&[r"^(?=.{1,128}$)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$"]) })
}

pub(super) fn filled_list(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": filled(generator) })
}

pub(super) fn subject_patterns(_: &mut SchemaGenerator) -> Schema {
    let token = r"(\*|[^\s.*>]+)";
    let subject = format!(r"^({token}\.)*({token}|>)$");
    json_schema!({ "type": "array", "minItems": 1, "items": { "type": "string", "pattern": pattern(&[&subject]) } })
}

pub(super) fn servers(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["string", "array"], "minItems": 1, "pattern": r"\S", "items": filled(generator) })
}

pub(super) fn command(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": ["string", "array", "null"], "pattern": r"\S",
        "minItems": 1, "prefixItems": [{ "type": "string", "pattern": r"\S" }], "items": { "type": "string" },
    })
}

pub(super) fn env(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "propertyNames": { "pattern": "^[^=]+$" }, "additionalProperties": { "type": "string" },
    })
}

pub(super) fn headers(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "propertyNames": { "pattern": HEADER_NAME }, "additionalProperties": header_value(generator),
    })
}

pub(super) fn rename(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": filled(generator) })
}

/// A list of ways to authenticate, or a single one.
pub(super) fn ways(generator: &mut SchemaGenerator) -> Schema {
    let way = generator.subschema_for::<Auth>();
    json_schema!({ "type": ["array", "object", "null"], "anyOf": [{ "type": "array", "items": way }, way] })
}

/// Exactly one of these keys has a value.
pub(super) fn one_of(keys: &[&str]) -> Value {
    let given =
        |key: &&str| json!({ "required": [key], "properties": { *key: { "not": { "type": "null" } } } });
    keys.iter().map(given).collect()
}

pub(super) fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["object", "null"] })
}
