//! Documents made from the declared settings: `config/full.yaml`, `config/schema.json`, and the settings
//! reference of the manual. `UPDATE_SETTINGS=1 cargo test --lib config` writes them.

use std::fmt::Write as _;

use serde_json::Value;

use super::super::declare::{Field, Setting as _};
use super::*;

const COMMENT_WIDTH: usize = 100;

fn fields() -> Vec<Field> {
    Config::FIELDS.unwrap()()
}

fn description(field: &Field) -> String {
    let mut text = field.property()["description"].as_str().unwrap().to_owned();
    for alias in &field.names[1..] {
        let _ = write!(text, " Alias: `{alias}`.");
    }
    text
}

/// Every key with its default and its explanation, as a configuration file that works.
fn full_yaml() -> String {
    let mut out = String::from(
        "# yaml-language-server: $schema=schema.json\n\
         # Every setting of a2a-bridge with its default. Settings without a default are commented-out examples.\n\
         # Values may hold variables: ${NAME}, ${NAME:-default}, ${NAME:?hint}; write $$ for a plain $.\n\
         # Durations: 500ms, 30s, 2m, 1h30m, 1d. Sizes: 64KB, 4MiB.\n",
    );
    write_mapping(&fields(), "", "", &mut out);
    out
}

/// `margin` goes before every line, `first` once before the first key of a list item.
fn write_mapping(fields: &[Field], margin: &str, first: &str, out: &mut String) {
    let mut margin = margin.to_owned();
    let mut item = first;
    for field in fields {
        if margin.is_empty() {
            out.push('\n');
        }
        write_comment(&description(field), &margin, out);
        write_setting(field, &format!("{margin}{item}"), out);
        if !item.is_empty() {
            margin.push_str("  ");
            item = "";
        }
    }
}

fn write_setting(field: &Field, margin: &str, out: &mut String) {
    let key = field.names[0];
    let example = field.example.as_ref().map(flow_yaml).unwrap_or_default();
    let (line, inner) = match (field.fields.filter(|_| example.is_empty()), &field.default) {
        (Some(inner), _) if field.is_optional => {
            (format!("{margin}# {key}:"), Some((inner, format!("{margin}#   "), "")))
        }
        (Some(inner), default) => {
            let item = if default.is_some() { "" } else { "- " };
            (format!("{margin}{key}:"), Some((inner, format!("{margin}  "), item)))
        }
        (None, Some(default)) => (format!("{margin}{key}: {}", flow_yaml(default)), None),
        // Inside a commented-out block the key needs no `#` of its own.
        (None, None) if field.is_required() || margin.contains('#') => {
            (format!("{margin}{key}: {example}"), None)
        }
        (None, None) => (format!("{margin}# {key}: {example}"), None),
    };
    let _ = writeln!(out, "{}", line.trim_end());
    if let Some((inner, margin, item)) = inner {
        write_mapping(&inner(), &margin, item, out);
    }
}

/// Inside a commented-out block, explanations get a second `#`, so that they stay comments when a user uncomments the
/// block.
fn write_comment(text: &str, margin: &str, out: &mut String) {
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

/// A value in YAML, on one line: JSON is YAML, and a simple word needs no quotes.
fn flow_yaml(value: &Value) -> String {
    let is_simple = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '$' || c == '/')
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-./:${}".contains(&byte))
    };
    match value {
        Value::String(text) if is_simple(text) => text.clone(),
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

/// The settings reference: a section with a table for every mapping.
fn reference() -> String {
    let mut out = String::from(
        "# Settings reference\n\n\
         Every setting of the configuration file. The file `config/full.yaml` in the repository shows them all, \
         and `a2a-bridge schema` prints a JSON schema for editors.\n\n\
         Values may hold variables: `${NAME}`, `${NAME:-default}` and `${NAME:?hint}`; `$$` is a plain `$`. \
         Durations are written as `500ms`, `30s`, `2m`, `1h30m` or `1d`, sizes as `64KB` or `4MiB`.\n",
    );
    write_section("Top level", "", &fields(), &mut Vec::new(), &mut out);
    out
}

/// `written` has the tables so far with their titles, as some mappings have the same settings.
fn write_section(
    title: &str,
    path: &str,
    fields: &[Field],
    written: &mut Vec<(String, String)>,
    out: &mut String,
) {
    let table = table(fields);
    let _ = write!(out, "\n## {title}\n\n");
    if let Some((_, same)) = written.iter().find(|(other, _)| *other == table) {
        let _ = writeln!(out, "This mapping has the same settings as {same}.");
        return;
    }
    out.push_str(&table);
    written.push((table, title.to_owned()));
    for field in fields {
        let path = format!("{path}{}", field.names[0]);
        if let Some(inner) = field.fields {
            write_section(&format!("`{path}`"), &format!("{path}."), &inner(), written, out);
        }
    }
}

fn table(fields: &[Field]) -> String {
    let mut table = String::from("| Setting | Type | Default | Meaning |\n| --- | --- | --- | --- |\n");
    for field in fields {
        let type_name = field.type_name.trim_start_matches("a ").trim_start_matches("an ");
        let default = match &field.default {
            Some(default) => format!("`{}`", flow_yaml(default)),
            None if field.is_required() => "required".to_owned(),
            None => "none".to_owned(),
        };
        let text = description(field).replace('|', "\\|");
        let _ = writeln!(table, "| `{}` | {type_name} | {default} | {text} |", field.names[0]);
    }
    table
}

#[test]
fn full_yaml_is_up_to_date() {
    assert_file(&root().join("config/full.yaml"), &full_yaml(), "UPDATE_SETTINGS");
}

#[test]
fn the_settings_reference_is_up_to_date() {
    assert_file(&root().join("docs/src/settings-reference.md"), &reference(), "UPDATE_SETTINGS");
}

#[test]
fn the_schema_for_editors_is_up_to_date() {
    let text = format!("{}\n", serde_json::to_string_pretty(&schema()).unwrap());
    assert_file(&root().join("config/schema.json"), &text, "UPDATE_SETTINGS");
}

#[test]
fn full_yaml_shows_the_actual_defaults() {
    let full = parsed(&full_yaml());
    let least = parsed("agents: [{ name: weather, url: 'http://127.0.0.1:9000' }]");
    assert_eq!(format!("{full:#?}"), format!("{least:#?}"));
}

#[test]
fn commented_out_examples_in_full_yaml_are_valid() {
    let text = full_yaml();
    let one_of: [&str; 3] = ["credentials:", "nkey:", "token:"];
    let lines = text.lines().map(|line| {
        let indent = line.len() - line.trim_start().len();
        let content = line.trim_start();
        // Explanations start with a capital letter or a second `#`, examples with a key.
        let example = content.strip_prefix("# ").filter(|rest| {
            let word = rest.trim_start();
            word.split_once(':')
                .is_some_and(|(key, _)| key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'))
                && !one_of.iter().any(|key| word.starts_with(key))
        });
        match example {
            Some(example) => format!("{}{example}\n", " ".repeat(indent)),
            None => format!("{line}\n"),
        }
    });
    let text: String = lines.collect();
    let config = parse(&text, "full.yaml", &|name| Some(name.to_owned()))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let agent = &config.agents[0];
    assert!(agent.command.is_some() && agent.bearer_token.is_some() && agent.card.is_some());
    let tls = config.nats.tls.unwrap();
    assert!(tls.ca.is_some() && tls.cert.is_some() && tls.key.is_some());
    assert!(config.nats.user.is_some() && config.nats.password.is_some());
}
