//! Tree -> settings: which keys there are, what each may hold, and what it is when absent.
//!
//! Reading goes on after a problem, so one pass finds them all. A reader that cannot give a value
//! has reported why; the settings are used only if nothing was reported.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use secrecy::SecretString;

use super::fields::{Fields, MAPPING, checked, each, json, list, truth, unexpected, words};
use super::node::{Node, Value};
use super::problem::Report;
use super::{
    AgentConfig, AgentProtocolConfig, Config, Digest, MetricsConfig, NatsConfig, Restart, Skills, TlsFiles,
    auth, check, supervision, values,
};

pub(super) fn config(root: &Node, report: &mut Report<'_>) -> Option<Config> {
    if root.is_null() {
        report.add_with_hint(root.at.start, "the file is empty", "the least it needs is `agents: []`");
        return None;
    }
    let mut f = Fields::open(root, report)?;
    let nats = f.get(&["nats"], nats).unwrap_or_else(NatsConfig::local);
    let agents = f.required(&["agents"], agents);
    let shutdown_grace = f.parsed(&["shutdown_grace"], values::parse_duration);
    let metrics = f.get(&["metrics"], metrics);
    f.close();
    Some(Config {
        nats,
        agents: agents?,
        shutdown_grace: shutdown_grace.unwrap_or(seconds(8)),
        metrics,
        file: None,
    })
}

fn metrics(node: &Node, report: &mut Report<'_>) -> Option<MetricsConfig> {
    let mut f = Fields::open(node, report)?;
    let listen = f.required(&["listen"], |node, report| {
        checked(node, report, |text| {
            text.parse().map_err(|_| "expected an address with a port, such as `127.0.0.1:9464`".into())
        })
    });
    f.close();
    Some(MetricsConfig { listen: listen? })
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn patterns(list: &[&str]) -> Vec<String> {
    list.iter().map(|pattern| (*pattern).to_owned()).collect()
}

fn nats(node: &Node, report: &mut Report<'_>) -> Option<NatsConfig> {
    let mut f = Fields::open(node, report)?;
    let local = NatsConfig::local();
    let nats = NatsConfig {
        url: f.get(&["url"], servers).unwrap_or(local.url),
        credentials: f.parsed(&["credentials"], values::path),
        nkey: f.secret(&["nkey"], values::bearer_token),
        token: f.secret(&["token"], values::filled),
        user: f.parsed(&["user"], values::filled),
        password: f.secret(&["password"], |text| Ok(text.to_owned())),
        tls: f.get(&["tls"], tls),
        subject_prefix: f.parsed(&["subject_prefix"], values::subject_prefix).unwrap_or(local.subject_prefix),
        reply_prefixes: f.get(&["reply_prefixes"], reply_prefixes).unwrap_or(local.reply_prefixes),
        agent_protocol: f.get(&["agent_protocol"], agent_protocol),
    };
    check::nats(&mut f);
    f.close();
    Some(nats)
}

impl NatsConfig {
    /// What holds when the file says nothing about NATS.
    fn local() -> Self {
        Self {
            url: patterns(&["nats://127.0.0.1:4222"]),
            credentials: None,
            nkey: None,
            token: None,
            user: None,
            password: None,
            tls: None,
            subject_prefix: "a2a".into(),
            reply_prefixes: patterns(&["_INBOX.>", "_R_.>"]),
            agent_protocol: None,
        }
    }
}

fn servers(node: &Node, report: &mut Report<'_>) -> Option<Vec<String>> {
    let Value::List(items) = &node.value else {
        return checked(node, report, values::nats_urls);
    };
    if items.iter().all(Node::is_absent) {
        report.add(node.at.start, "expected at least one server");
    }
    Some(list(node, report, values::nats_urls)?.concat())
}

fn reply_prefixes(node: &Node, report: &mut Report<'_>) -> Option<Vec<String>> {
    if matches!(&node.value, Value::List(items) if items.iter().all(Node::is_absent)) {
        report.add(node.at.start, "expected at least one pattern: the bridge could answer nobody");
    }
    list(node, report, values::subject_pattern)
}

fn tls(node: &Node, report: &mut Report<'_>) -> Option<TlsFiles> {
    let mut f = Fields::open(node, report)?;
    let tls = TlsFiles {
        ca: f.parsed(&["ca"], values::path),
        cert: f.parsed(&["cert"], values::path),
        key: f.parsed(&["key"], values::path),
        required: f.get(&["required"], truth).unwrap_or(false),
    };
    check::tls(&mut f);
    f.close();
    Some(tls)
}

fn agent_protocol(node: &Node, report: &mut Report<'_>) -> Option<AgentProtocolConfig> {
    let mut f = Fields::open(node, report)?;
    let owner = f.required(&["owner"], |node, report| checked(node, report, values::owner));
    f.close();
    Some(AgentProtocolConfig { owner: owner? })
}

fn agents(node: &Node, report: &mut Report<'_>) -> Option<Vec<AgentConfig>> {
    let mut taken = check::Taken::default();
    each(node, report, |node, report| agent(node, report, &mut taken))
}

fn agent(node: &Node, report: &mut Report<'_>, taken: &mut check::Taken) -> Option<AgentConfig> {
    let start = node.at.start;
    let mut f = Fields::open(node, report)?;
    let name = f.required(&["name", "agent_name"], |node, report| {
        let name = checked(node, report, values::agent_name)?;
        // A name may come from an alias or a merge key: then the agent is the place to look at.
        taken.name(&name, node.at.start.max(start), report);
        Some(name)
    });
    let port = f.parsed(&["port"], supervision::port);
    let url = f.required(&["url", "a2a_server_url"], |node, report| {
        checked(node, report, |text| supervision::url(text, port))
    });
    let duration = |f: &mut Fields<'_, '_, '_>, key: &'static str| f.parsed(&[key], values::parse_duration);
    let shell = f.get(&["shell"], truth).unwrap_or(false);
    let command =
        f.get(&["command", "a2a_server_command"], |node, report| supervision::command(node, report, shell));
    let verify_port = f.get(&["verify_port"], truth);
    let working_dir = f.parsed(&["working_dir"], values::path);
    let mut env = f.get(&["env"], env).unwrap_or_default();
    let (env_file, variables) = f.get(&["env_file"], supervision::env_file).unzip();
    let variables = variables.unwrap_or_default();
    let digest = Digest::of(node, &variables);
    let startup_timeout =
        f.parsed(&["startup_timeout", "a2a_server_startup_timeout"], values::parse_duration);
    let startup = f.get(&["startup"], supervision::startup);
    let readiness = f.get(&["readiness"], supervision::readiness);
    let liveness = f.get(&["liveness"], supervision::liveness);
    let restart = f.parsed(&["restart"], supervision::restart);
    let restart_on_crash = f.get(&["restart_on_crash", "a2a_server_restart_on_crash"], truth);
    let max_restarts = f.parsed(&["max_restarts"], values::count);
    let restart_window = duration(&mut f, "restart_window");
    let stable_after = duration(&mut f, "stable_after");
    let stop_signal = f.parsed(&["stop_signal"], supervision::signal);
    let stop_grace = duration(&mut f, "stop_grace");
    let bearer_token = f.secret(&["bearer_token", "a2a_bearer_token"], values::bearer_token);
    let headers = f.get(&["headers"], headers).unwrap_or_default();
    let auth = f.get(&["auth"], auth::ways);
    let card_auth = f.get(&["card_auth"], auth::ways);
    let tls = f.get(&["tls"], auth::tls);
    let protocol = f.parsed(&["protocol"], values::protocol);
    let binding = f.parsed(&["binding"], values::binding);
    let use_card_url = f.get(&["use_card_url"], truth);
    let allowed_hosts = f.get(&["allowed_hosts"], |node, report| list(node, report, values::host));
    let card_path = f.parsed(&["card_path"], values::card_path);
    let card = f.get(&["card"], card);
    let card_refresh = duration(&mut f, "card_refresh");
    let skills = f.get(&["skills"], skills).unwrap_or_default();
    let request_timeout = duration(&mut f, "request_timeout");
    let stream_idle_timeout = duration(&mut f, "stream_idle_timeout");
    let task_timeout = duration(&mut f, "task_timeout");
    let task_ttl = duration(&mut f, "task_ttl");
    let stream_keepalive = duration(&mut f, "stream_keepalive");
    let prefer_stream = f.get(&["prefer_stream"], truth);
    let input_required_ttl = duration(&mut f, "input_required_ttl");
    let max_in_flight = f.parsed(&["max_in_flight"], values::count);
    let max_response_size = f.parsed(&["max_response_size"], values::response_size);
    let answer_artifacts = f.get(&["answer_artifacts"], filled_list);
    let notice_artifacts = f.get(&["notice_artifacts"], filled_list);
    if let (Some(url), Some(_)) = (&url, &command) {
        let at = ["port", "url", "a2a_server_url"].into_iter().find_map(|key| f.place(key));
        taken.port(url, at.unwrap_or_default().max(start), f.report);
    }
    check::agent(&mut f, &headers, &env);
    check::restart(&mut f, restart, restart_on_crash);
    f.close();
    for (name, value) in variables {
        env.entry(name).or_insert(value);
    }
    Some(AgentConfig {
        name: name?,
        url: url?,
        command,
        shell,
        port,
        verify_port: verify_port.unwrap_or(true),
        working_dir,
        env,
        env_file,
        startup_timeout: startup_timeout.unwrap_or(seconds(30)),
        startup: startup.unwrap_or_default(),
        readiness: readiness.unwrap_or_default(),
        liveness: liveness.unwrap_or_default(),
        restart: if restart_on_crash == Some(false) {
            Restart::Never
        } else {
            restart.unwrap_or(Restart::OnFailure)
        },
        restart_on_crash: restart_on_crash.unwrap_or(true),
        max_restarts: max_restarts.unwrap_or(15),
        restart_window: restart_window.unwrap_or(seconds(15 * 60)),
        stable_after: stable_after.unwrap_or(seconds(60)),
        stop_signal: stop_signal.unwrap_or(Signal::SIGTERM),
        stop_grace: stop_grace.unwrap_or(seconds(10)),
        bearer_token,
        headers,
        auth,
        card_auth,
        tls,
        protocol,
        binding,
        use_card_url: use_card_url.unwrap_or(false),
        allowed_hosts: allowed_hosts.unwrap_or_default(),
        card_path,
        card,
        card_refresh: card_refresh.unwrap_or(seconds(60)),
        skills,
        request_timeout: request_timeout.unwrap_or(seconds(300)),
        stream_idle_timeout: stream_idle_timeout.unwrap_or(seconds(300)),
        task_timeout: task_timeout.unwrap_or(seconds(24 * 60 * 60)),
        task_ttl: task_ttl.unwrap_or(seconds(24 * 60 * 60)),
        stream_keepalive: stream_keepalive.unwrap_or(seconds(15)),
        prefer_stream: prefer_stream.unwrap_or(false),
        input_required_ttl: input_required_ttl.unwrap_or(seconds(300)),
        max_in_flight: max_in_flight.unwrap_or(256),
        max_response_size: max_response_size.unwrap_or(16 << 20),
        answer_artifacts: answer_artifacts.unwrap_or_else(|| patterns(&["*"])),
        notice_artifacts: notice_artifacts
            .unwrap_or_else(|| patterns(&["execution_plan_*", "tool_notification_*", "tool_result"])),
        digest,
    })
}

pub(super) fn filled_list(node: &Node, report: &mut Report<'_>) -> Option<Vec<String>> {
    list(node, report, values::filled)
}

fn env(node: &Node, report: &mut Report<'_>) -> Option<BTreeMap<String, SecretString>> {
    words(node, report, |key, value, report| {
        if !key.text().is_some_and(values::is_env_name) {
            report.add(key.at.start, "expected the name of a variable, without `=`");
        }
        checked(value, report, values::env_value).map(SecretString::from)
    })
}

fn headers(node: &Node, report: &mut Report<'_>) -> Option<BTreeMap<String, SecretString>> {
    let mut seen = BTreeMap::new();
    words(node, report, |key, value, report| {
        let name = key.text().unwrap_or_default();
        let shown = report.name(key);
        if let Err(reason) = values::header_name(name) {
            report.add(key.at.start, format!("{shown} {reason}"));
        } else if let Some(first) = seen.insert(name.to_ascii_lowercase(), key.at.start) {
            let first = report.line(first);
            report.add(key.at.start, format!("{shown} is given twice, first on line {first}"));
        }
        checked(value, report, values::header_value).map(SecretString::from)
    })
}

fn card(node: &Node, report: &mut Report<'_>) -> Option<serde_json::Value> {
    if matches!(node.value, Value::Map(_)) {
        return json(node);
    }
    unexpected(node, report, MAPPING);
    None
}

fn skills(node: &Node, report: &mut Report<'_>) -> Option<Skills> {
    let mut f = Fields::open(node, report)?;
    let skills = Skills {
        allow: f.get(&["allow"], filled_list).unwrap_or_default(),
        deny: f.get(&["deny"], filled_list).unwrap_or_default(),
        rename: f.get(&["rename"], rename).unwrap_or_default(),
    };
    f.close();
    Some(skills)
}

fn rename(node: &Node, report: &mut Report<'_>) -> Option<BTreeMap<String, String>> {
    let mut names = BTreeMap::new();
    words(node, report, |_, value, report| {
        let name = checked(value, report, values::filled)?;
        check::rename(&name, value.at.start, &mut names, report);
        Some(name)
    })
}

impl Config {
    /// Makes relative paths start at the folder of the file.
    pub(super) fn resolve_paths(&mut self, folder: &Path) {
        let tls = self.nats.tls.iter_mut().flat_map(|tls| [&mut tls.ca, &mut tls.cert, &mut tls.key]);
        let agents = self.agents.iter_mut().flat_map(|agent| {
            let tls = agent.tls.iter_mut();
            tls.flat_map(|tls| [&mut tls.ca, &mut tls.cert, &mut tls.key]).chain([&mut agent.working_dir])
        });
        for path in std::iter::once(&mut self.nats.credentials).chain(tls).chain(agents).flatten() {
            *path = folder.join(&*path);
        }
    }
}
