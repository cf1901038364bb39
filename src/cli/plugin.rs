//! `plugin`: the manifest with which a mesh host deploys the bridge.
//!
//! `plugin.yaml` at the top of the repository is this text; a test keeps them equal. Environment variables
//! come from the command line's definition, the settings from their schema, subjects from the bus.

use std::fmt::Write as _;

use clap::CommandFactory as _;
use serde_json::{Map, Value, json};

use super::Cli;
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};
use crate::config;

/// The prefix that subjects have unless the settings say otherwise.
const PREFIX: &str = "a2a";

/// What the bridge has to be permitted on NATS, with the default prefix.
pub(super) const PUBLISH: [&str; 4] = ["a2a.registry.*", "a2a.task.*.*", "_INBOX.>", "_R_.>"];
/// The same for subscriptions.
pub(super) const SUBSCRIBE: [&str; 5] =
    ["a2a.action.*.*", "a2a.card.*", "a2a.control.*.*", "$SRV.>", "_INBOX.>"];

/// The manifest of this version.
pub(super) fn manifest() -> String {
    let manifest = json!({
        "name": env!("CARGO_PKG_NAME"),
        "version": env!("CARGO_PKG_VERSION"),
        "description": env!("CARGO_PKG_DESCRIPTION"),
        "license": env!("CARGO_PKG_LICENSE"),
        "entry": {
            "command": ["a2a-bridge", "run"],
            "stop_signal": "SIGTERM",
            "stop_timeout": "30s",
            "exit_codes": {
                "0": "stopped as told",
                "64": "command line not understood",
                "69": "NATS cannot be reached",
                "70": "a defect of the bridge",
                "78": "settings are wrong",
            },
        },
        "health": {
            "command": ["a2a-bridge", "agents"],
            "request": verbs(DiscoveryVerb::Ping),
            "explanation": "The command ends with 0 when at least one agent is served, with 69 otherwise; every agent answers to the request.",
        },
        "environment": environment(),
        "serves": serves(),
        "publishes": publishes(),
        "permissions": {"publish": PUBLISH, "subscribe": SUBSCRIBE},
        "settings": {
            "file": "a2a-bridge.yaml",
            "schema": config::schema(),
        },
    });
    let mut text =
        String::from("# The manifest of a2a-bridge for mesh hosts, as `a2a-bridge plugin` prints it.\n");
    yaml(&manifest, 0, &mut text);
    text
}

fn verbs(verb: DiscoveryVerb) -> String {
    let [all, ..] = Subjects::srv(verb, &Token::new("agent"), "");
    all
}

/// The variables that `run` reads.
fn environment() -> Value {
    let mut command = Cli::command();
    command.build();
    let mut variables = Map::new();
    let Some(run) = command.find_subcommand("run") else {
        return variables.into();
    };
    for argument in run.get_arguments() {
        if let Some(name) = argument.get_env() {
            let mut about = Map::new();
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            about.insert("description".to_owned(), help.into());
            if let Some(default) = argument.get_default_values().first() {
                about.insert("default".to_owned(), default.to_string_lossy().into());
            }
            variables.insert(name.to_string_lossy().into_owned(), about.into());
        }
    }
    variables
        .insert("NO_COLOR".to_owned(), json!({"description": "No colours in the log, also on a terminal"}));
    variables.into()
}

fn serves() -> Value {
    json!([
        {"subject": format!("{PREFIX}.action.<agent>.<skill>"), "description": "invoke a skill"},
        {"subject": format!("{PREFIX}.action.<agent>.provide_required_input"), "description": "answer an agent's question"},
        {"subject": format!("{PREFIX}.action.<agent>.cancel_task"), "description": "cancel a task"},
        {"subject": format!("{PREFIX}.action.<agent>.get_task"), "description": "look a task up"},
        {"subject": format!("{PREFIX}.card.<agent>"), "description": "the agent's card"},
        {"subject": format!("{PREFIX}.control.<agent>.<order>"), "description": "for operators: show, start, stop, restart, logs"},
        {"subject": "$SRV.PING|INFO|STATS[.<agent>[.<id>]]", "description": "NATS service discovery and counts"},
    ])
}

fn publishes() -> Value {
    json!([
        {"subject": format!("{PREFIX}.registry.<agent>"), "description": "the agent's state, on every change and every 15 s"},
        {"subject": format!("{PREFIX}.task.<agent>.<task>"), "description": "news of a submitted task"},
    ])
}

/// Writes JSON as YAML in block form. Strings that could be anything else in YAML are quoted.
fn yaml(value: &Value, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let _ = write!(text, "{indent}{}:", scalar(key));
                below(value, depth, text);
            }
        }
        Value::Array(items) => {
            for item in items {
                let mut entry = String::new();
                if is_block(item) {
                    yaml(item, depth + 1, &mut entry);
                    let _ = writeln!(text, "{indent}- {}", entry.trim());
                } else {
                    let _ = writeln!(text, "{indent}- {}", flat(item));
                }
            }
        }
        other => {
            let _ = writeln!(text, "{indent}{}", flat(other));
        }
    }
}

fn below(value: &Value, depth: usize, text: &mut String) {
    if is_block(value) {
        text.push('\n');
        yaml(value, depth + 1, text);
    } else {
        let _ = writeln!(text, " {}", flat(value));
    }
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(object) => !object.is_empty(),
        Value::Array(items) => items.iter().any(Value::is_object),
        _ => false,
    }
}

fn flat(value: &Value) -> String {
    match value {
        Value::String(text) => scalar(text),
        Value::Array(items) => format!("[{}]", items.iter().map(flat).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

fn scalar(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/'));
    let word = matches!(
        text.to_lowercase().as_str(),
        "true" | "false" | "yes" | "no" | "on" | "off" | "null" | "y" | "n"
    );
    if plain && !word { text.to_owned() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_at_the_top_is_what_the_command_prints() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/plugin.yaml");
        if std::env::var_os("UPDATE_FILES").is_some() {
            std::fs::write(path, manifest()).unwrap();
        }
        let file = std::fs::read_to_string(path).unwrap_or_default();
        assert!(file == manifest(), "plugin.yaml is out of date: a2a-bridge plugin > plugin.yaml");
    }

    #[test]
    fn the_subjects_are_those_of_the_bus() {
        let subjects = Subjects::new(PREFIX).unwrap();
        let (agent, other) = (Token::new("A"), Token::new("B"));
        let listed = |list: &Value| -> Vec<String> {
            let names = list.as_array().unwrap().iter().map(|one| one["subject"].as_str().unwrap());
            let filled = |name: &str| {
                name.replace("<agent>", "A")
                    .replace("<skill>", "B")
                    .replace("<task>", "B")
                    .replace("<order>", "B")
            };
            names.map(filled).collect()
        };
        let actions = [
            subjects.action(&agent, &other),
            subjects.provide_required_input(&agent),
            subjects.cancel_task(&agent),
            subjects.get_task(&agent),
            subjects.card(&agent),
            subjects.control(&agent, "B"),
        ];
        assert_eq!(listed(&serves())[..6], actions);
        assert_eq!(listed(&publishes()), [subjects.registry(&agent), subjects.task(&agent, &other)]);
    }

    fn read(name: &str) -> String {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        std::fs::read_to_string(path).unwrap()
    }

    fn variables(command: &clap::Command) -> Vec<String> {
        let own = command.get_arguments().filter_map(clap::Arg::get_env);
        let own = own.map(|name| name.to_string_lossy().into_owned());
        own.chain(command.get_subcommands().flat_map(variables)).collect()
    }

    fn keys(schema: &Value) -> Vec<String> {
        let mut all = Vec::new();
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            all.push(key.clone());
            // What is within these is in full.yaml, where it is explained.
            if !["tls", "auth", "card_auth"].contains(&key.as_str()) {
                all.extend(keys(property));
                all.extend(keys(&property["items"]));
            }
        }
        all
    }

    #[test]
    fn the_manual_names_every_variable_command_subject_and_key() {
        let manual =
            ["commands", "settings", "protocol"].map(|page| read(&format!("docs/src/{page}.md"))).concat();
        let mut command = Cli::command();
        command.build();
        let mut missing: Vec<_> = variables(&command);
        // The demo agent's own variable is in its help.
        missing.retain(|name| name != "PORT");
        let commands = command.get_subcommands().map(|one| one.get_name().to_owned());
        missing.extend(commands.filter(|name| name != "help"));
        missing.extend(keys(&config::schema()));
        missing.retain(|name| !manual.contains(&format!("`{name}`")));
        let (serves, publishes) = (serves(), publishes());
        let subjects = [&serves, &publishes].map(|list| list.as_array().unwrap().clone()).concat();
        let subjects = subjects.iter().map(|one| one["subject"].as_str().unwrap().to_owned());
        missing
            .extend(subjects.filter(|name| !name.starts_with('$') && !manual.contains(&format!("`{name}`"))));
        assert!(missing.is_empty(), "not in the manual: {missing:?}");
    }

    #[test]
    fn the_permissions_are_the_same_everywhere() {
        let conf = read("deploy/nats-permissions.conf");
        let block = conf.split("user: bridge").nth(1).unwrap().split("user: caller").next().unwrap();
        for (verb, list) in [("publish", &PUBLISH[..]), ("subscribe", &SUBSCRIBE[..])] {
            let line = format!("{verb}: {}", serde_json::to_string(&list).unwrap().replace(",", ", "));
            assert!(block.contains(&line), "{line} is not in {block}");
        }
        assert!(
            read("docs/src/security.md").contains(conf.trim()),
            "docs/src/security.md differs from {conf}"
        );
    }

    #[test]
    fn yaml_is_written_so_that_it_reads_back_the_same() {
        let value = json!({"a": [], "b": {}, "on": "on", "c": [{"x": 1, "y": [1, "two: 2"]}, {"z": null}], "d": "line\nbreak"});
        let mut text = String::new();
        yaml(&value, 0, &mut text);
        insta::assert_snapshot!(text, @r#"
        a: []
        b: {}
        "on": "on"
        c:
          - x: 1
            "y": [1, "two: 2"]
          - z: null
        d: "line\nbreak"
        "#);
    }
}
