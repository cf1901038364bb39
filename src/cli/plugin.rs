//! `plugin`: the manifest that plugin hosts use to deploy the bridge.
//!
//! `plugin.yaml` in the root of the repository is this text; a test keeps them equal.

use clap::CommandFactory as _;
use serde_json::{Map, Value, json};

use super::Cli;
use crate::bus::jetstream::{self, Permissions};
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};
use crate::config;
use crate::yaml;

/// The version of the manifest's own format. It changes when a host that reads the previous one would misread the new one.
const FORMAT: u32 = 1;

/// The default subject prefix.
const PREFIX: &str = "a2a";

/// The NATS permissions that the bridge needs, with the default prefix and `nats.inbox_prefix: _INBOX.bridge`. To share
/// state and to store files, it also needs the [`jetstream::permissions`].
const PUBLISH: [&str; 8] = [
    "a2a.registry.*",
    "a2a.task.*.*",
    "_INBOX.>",
    "_R_.>",
    "a2a.peer.*.*",
    "a2a.peer.*.call.*.*",
    "a2a.peers.*",
    "a2a.peer.files",
];
const SUBSCRIBE: [&str; 15] = [
    "a2a.action.*.*",
    "a2a.card.*",
    "a2a.gw.>",
    "a2a.control.*.*",
    "$SRV.>",
    "_INBOX.bridge.>",
    "a2a.peer.*.*",
    "a2a.peer.*.call.*.*",
    "a2a.peers.*",
    "a2a.peer.files",
    "a2a.files.*",
    "a2a.upload.*.*",
    "a2a.attach.*",
    "a2a.sessions.*",
    "a2a.live.>",
];

pub(super) fn manifest() -> String {
    let [ping, ..] = Subjects::srv(DiscoveryVerb::Ping, &Token::new("agent"), "");
    let manifest = json!({
        "format": FORMAT,
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
                "1": "cannot listen on `metrics.listen`, or cannot publish an agent",
                "64": "invalid command line",
                "69": "NATS rejects the credentials, or is not reachable (with `--fail-fast`), or has no JetStream although it is required",
                "70": "internal error",
                "78": "invalid configuration",
            },
        },
        "requires": requires(),
        "health": health(&ping),
        "environment": environment(),
        "serves": serves(),
        "publishes": publishes(),
        "permissions": {"publish": publish_permissions(), "subscribe": SUBSCRIBE},
        "settings": {
            "file": "a2a-bridge.yaml",
            "schema": config::schema(),
        },
    });
    let intro = "# The plugin manifest of a2a-bridge, printed by `a2a-bridge plugin`.";
    format!("{intro}\n{}", yaml::block(&manifest))
}

fn publish_permissions() -> Vec<String> {
    let Permissions { files, other_buckets: _, state, events } = jetstream::permissions(PREFIX, &[]);
    PUBLISH.map(str::to_owned).into_iter().chain(files).chain(state).chain(events).collect()
}

/// The versions that the bridge works with: from `min` on, and below `below`. A version without an upper limit has not been
/// seen to break the bridge.
fn requires() -> Value {
    json!({
        "nats-server": {"min": "2.10.0", "below": "3.0.0", "tested": "2.12.8", "explanation": "JetStream is optional: with nats-server 2.11 or later, replicas share state there, and it survives restarts."},
        "a2a": {"min": "0.1", "max": "1.0", "explanation": "Versions of the A2A protocol that agents may speak, over JSON-RPC or REST."},
        "agent-protocol": {"min": "0.3", "max": "0.3", "explanation": "Synadia Agent Protocol for NATS, if `nats.agent_protocol` is set."},
        "linux": {"min": "3.4", "explanation": "Limits of agents (`limits`) need cgroup v2, Linux 4.5 or later."},
        "systemd": {"min": "252", "explanation": "Only for the unit in deploy/; `DelegateSubgroup=` needs 254."},
    })
}

/// The health checks. The command reads the same configuration as `run`, so that it follows `metrics.listen`.
fn health(ping: &str) -> Value {
    json!({
        "command": ["a2a-bridge", "health"],
        "live_command": ["a2a-bridge", "health", "--live"],
        "http": {
            "listen": {"setting": "metrics.listen"},
            "ready": "/readyz",
            "ready_with_agents": "/readyz?agents=any",
            "live": "/healthz",
        },
        "request": ping,
        "interval": "30s",
        "timeout": "5s",
        "exit_codes": {
            "0": "the bridge serves, and is connected to NATS",
            "1": "it does not; stdout has the reason",
            "69": "nothing answers",
            "78": "not checked: the configuration has no `metrics.listen`",
        },
        "explanation": "The command reads `metrics.listen` in the same configuration file as the entry command, and requests `ready` there. Without `metrics.listen`, only the request remains: every agent answers it on NATS. Do not restart the bridge because it is not ready: it waits for NATS by itself.",
    })
}

/// Variables that `run` or its libraries read, besides those of its arguments.
const OTHER_VARIABLES: [(&str, &str); 14] = [
    ("NO_COLOR", "Disables colours in the log"),
    ("RUST_BACKTRACE", "`1` adds a backtrace to internal errors in the log"),
    (
        "XDG_RUNTIME_DIR",
        "Directory for the records of agent processes; by default the system's directory for temporary files",
    ),
    ("TMPDIR", "Directory for temporary files"),
    ("PATH", "Where to find the commands of agents; agents inherit it"),
    ("HOME, USER, LANG, LC_*, TZ", "Agents inherit them"),
    ("SSL_CERT_FILE, SSL_CERT_DIR", "Certificate authorities to trust instead of the system's"),
    ("NOTIFY_SOCKET", "Set by systemd for a unit with Type=notify"),
    ("WATCHDOG_USEC, WATCHDOG_PID", "Set by systemd for a unit with WatchdogSec="),
    ("TOKIO_WORKER_THREADS", "Number of threads that serve calls; by default the number of processors"),
    (
        "OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "Collector for the spans of calls, in a program with the feature `otlp`",
    ),
    (
        "OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
        "Options of that collector",
    ),
    (
        "OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG, OTEL_BSP_*",
        "Options of those spans, as OpenTelemetry specifies them",
    ),
    ("${NAME} in the configuration", "Any variable that the configuration refers to; most hold secrets"),
];

/// The environment variables of `run`: those of its arguments, and others.
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
    for (names, description) in OTHER_VARIABLES {
        for name in names.split(", ") {
            variables.insert(name.to_owned(), json!({"description": description}));
        }
    }
    variables.into()
}

fn serves() -> Value {
    json!([
        {"subject": format!("{PREFIX}.action.<agent>.<skill>"), "description": "call a skill"},
        {"subject": format!("{PREFIX}.action.<agent>.provide_required_input"), "description": "answer an agent's question"},
        {"subject": format!("{PREFIX}.action.<agent>.cancel_task"), "description": "cancel a task"},
        {"subject": format!("{PREFIX}.action.<agent>.get_task"), "description": "get a task"},
        {"subject": format!("{PREFIX}.card.<agent>"), "description": "the agent's card"},
        {"subject": format!("{PREFIX}.attach.<agent>"), "description": "the frames of a logged call, if `events` is set"},
        {"subject": format!("{PREFIX}.control.<agent>.<command>"), "description": "for operators: show, start, stop, restart, logs"},
        {"subject": format!("{PREFIX}.sessions.<request>"), "description": "requests about sessions, if `events` is set"},
        {"subject": format!("{PREFIX}.gw.>"), "description": "for gateways: the same requests in the name of a principal"},
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
            subjects.attach(&agent),
            subjects.control(&agent, "B"),
        ];
        assert_eq!(listed(&serves())[..7], actions);
        assert_eq!(listed(&publishes()), [subjects.registry(&agent), subjects.task(&agent, &other)]);
    }

    #[test]
    fn the_versions_are_those_of_the_support_matrix_and_of_the_scripts() {
        let (requires, support) = (requires(), read("docs/src/support.md"));
        let nats = &requires["nats-server"];
        let tested = nats["tested"].as_str().unwrap();
        assert!(support.contains(&format!("{tested} tested")), "{tested}");
        assert!(read("scripts/nats-server").contains(tested), "{tested}");
        assert!(support.contains("2.10 is the oldest") && nats["min"] == "2.10.0");
        for version in ["min", "max"].map(|limit| requires["a2a"][limit].as_str().unwrap()) {
            assert!(support.contains(&format!("\n| {version} ")), "{version}");
        }
    }

    /// The variables that `run` reads after it has hidden others are those that a host may have to set.
    #[test]
    fn the_manifest_names_every_variable_that_the_bridge_reads() {
        let named = environment();
        let named = |name: &str| named.get(name).is_some();
        let source = read("src/config/environment.rs");
        let list = source.split_once("const READ_LATER").unwrap().1.split_once("];").unwrap().0;
        let quoted = list.split('"').skip(1).step_by(2);
        // Terminals, and variables of the C library that are not specific to the bridge.
        let general = ["TERM", "COLORTERM", "RUST_LOG", "RUST_LIB_BACKTRACE", "GLIBC_TUNABLES"];
        let general = general.into_iter().chain(["RES_OPTIONS", "LOCALDOMAIN", "HOSTALIASES", "LOGNAME"]);
        let general: Vec<_> = general.collect();
        let missing: Vec<_> = quoted.filter(|name| !general.contains(name) && !named(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(named("A2A_BRIDGE_CONFIG") && named("A2A_BRIDGE_LOG"));
    }

    #[test]
    fn the_health_check_is_a_command_of_the_bridge() {
        let health = health("");
        for command in ["command", "live_command"] {
            let words = health[command].as_array().unwrap().iter().map(|word| word.as_str().unwrap());
            Cli::command().try_get_matches_from(words).unwrap();
        }
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
        let listed = |verb: &str| -> Vec<String> {
            let list = block.split(&format!("{verb}: [")).nth(1).unwrap().split(']').next().unwrap();
            let lines = list.lines().filter(|line| !line.trim().starts_with('#'));
            lines.flat_map(|line| line.split('"').skip(1).step_by(2)).map(str::to_owned).collect()
        };
        assert_eq!(listed("publish"), publish_permissions());
        assert_eq!(listed("subscribe"), SUBSCRIBE);
        assert!(
            read("docs/src/security.md").contains(conf.trim()),
            "docs/src/security.md differs from {conf}"
        );
    }
}
