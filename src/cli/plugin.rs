//! `plugin`: the manifest that plugin hosts use to deploy the bridge.
//!
//! `plugin.yaml` in the root of the repository is this text; a test keeps them equal.

use clap::CommandFactory as _;
use serde_json::{Map, Value, json};

use super::Cli;
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};
use crate::config;
use crate::yaml;

/// The default subject prefix.
const PREFIX: &str = "a2a";

/// The NATS permissions that the bridge needs, with the default prefix and `nats.inbox_prefix: _INBOX.bridge`.
const PUBLISH: [&str; 4] = ["a2a.registry.*", "a2a.task.*.*", "_INBOX.>", "_R_.>"];
const SUBSCRIBE: [&str; 5] = ["a2a.action.*.*", "a2a.card.*", "a2a.control.*.*", "$SRV.>", "_INBOX.bridge.>"];

pub(super) fn manifest() -> String {
    let [ping, ..] = Subjects::srv(DiscoveryVerb::Ping, &Token::new("agent"), "");
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
                "0": "stopped by a signal",
                "64": "invalid command line",
                "69": "NATS rejects the credentials, or is not reachable (with `--fail-fast`)",
                "70": "internal error",
                "78": "invalid configuration",
            },
        },
        "health": {
            "command": ["a2a-bridge", "agents"],
            "request": ping,
            "explanation": "The command exits with 0 if the bridge serves at least one agent, otherwise with 69. Every agent answers the request.",
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
    let intro = "# The plugin manifest of a2a-bridge, printed by `a2a-bridge plugin`.";
    format!("{intro}\n{}", yaml::block(&manifest))
}

/// The environment variables of `run`, from the definition of its arguments.
fn environment() -> Value {
    let mut command = Cli::command();
    command.build();
    let mut variables = Map::new();
    for argument in command.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments) {
        if let Some(name) = argument.get_env() {
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            let about = match argument.get_default_values().first() {
                Some(default) => json!({"description": help, "default": default.to_string_lossy()}),
                None => json!({"description": help}),
            };
            variables.insert(name.to_string_lossy().into_owned(), about);
        }
    }
    variables.insert("NO_COLOR".to_owned(), json!({"description": "Disables colours in the log"}));
    variables.into()
}

fn serves() -> Value {
    json!([
        {"subject": format!("{PREFIX}.action.<agent>.<skill>"), "description": "call a skill"},
        {"subject": format!("{PREFIX}.action.<agent>.provide_required_input"), "description": "answer an agent's question"},
        {"subject": format!("{PREFIX}.action.<agent>.cancel_task"), "description": "cancel a task"},
        {"subject": format!("{PREFIX}.action.<agent>.get_task"), "description": "get a task"},
        {"subject": format!("{PREFIX}.card.<agent>"), "description": "the agent's card"},
        {"subject": format!("{PREFIX}.control.<agent>.<command>"), "description": "for operators: show, start, stop, restart, logs"},
        {"subject": "$SRV.PING|INFO|STATS[.<agent>[.<id>]]", "description": "NATS service discovery and statistics"},
    ])
}

fn publishes() -> Value {
    json!([
        {"subject": format!("{PREFIX}.registry.<agent>"), "description": "the agent's state, on every change and every 15 s"},
        {"subject": format!("{PREFIX}.task.<agent>.<task>"), "description": "updates of a submitted task"},
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_yaml_is_what_the_command_prints() {
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
                    .replace("<command>", "B")
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
            // `config/full.yaml` explains the settings inside these.
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
        // The variable of the demo agent is in its help.
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
        let block = conf.split("user: bridge").nth(1).unwrap().split("user: operator").next().unwrap();
        for (verb, list) in [("publish", &PUBLISH[..]), ("subscribe", &SUBSCRIBE[..])] {
            let line = format!("{verb}: {}", serde_json::to_string(&list).unwrap().replace(",", ", "));
            assert!(block.contains(&line), "{line} is not in {block}");
        }
        assert!(
            read("docs/src/security.md").contains(conf.trim()),
            "docs/src/security.md differs from {conf}"
        );
    }
}
