//! Rules across keys: which settings need each other or cannot be used together, and which must be unique.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use url::Host;

use super::agent;
use super::declare::Scope;
use super::node::{KeyValue, NodeValue};
use super::problems::Problems;
use super::settings::{AgentConfig, GatewayToken, JetStreamConfig, NatsConfig};

/// The keys of an authentication method, of which exactly one has a value.
pub(super) const AUTH_METHODS: [&str; 4] = ["bearer", "api_key", "basic", "oauth2"];

pub(super) fn nats(scope: &mut Scope<'_, '_>) {
    let mut methods: Vec<_> = ["credentials", "nkey", "token", "user"]
        .into_iter()
        .filter_map(|key| scope.position(key).map(|at| (at, key)))
        .collect();
    methods.sort_unstable();
    if let [(_, first), others @ ..] = methods.as_slice() {
        for (at, key) in others {
            scope.problems.add(*at, format!("`{key}` and `{first}` cannot be used together; remove one"));
        }
    }
    needs(scope, "password", "user");
}

pub(super) fn tls(scope: &mut Scope<'_, '_>) {
    needs(scope, "cert", "key");
    needs(scope, "key", "cert");
}

pub(super) fn auth(scope: &mut Scope<'_, '_>) {
    let given: Vec<_> = AUTH_METHODS.into_iter().filter_map(|key| scope.position(key)).collect();
    match given.as_slice() {
        [] => scope.problems.add(scope.start, "expected one of `bearer`, `api_key`, `basic` and `oauth2`"),
        [_] => {}
        [_, second, ..] => scope.problems.add_with_hint(
            *second,
            "an entry must have only one authentication method",
            "start a new entry of the list with `-`",
        ),
    }
}

pub(super) fn agent(scope: &mut Scope<'_, '_>) {
    for key in ["working_dir", "env_file", "port", "user", "group"] {
        needs(scope, key, "command");
    }
    if scope.entries("env").iter().any(|entry| !entry.value.is_absent()) {
        needs(scope, "env", "command");
    }
    if scope.entries("limits").iter().any(|entry| !entry.value.is_absent() && !entry.value.is_null()) {
        needs(scope, "limits", "command");
    }
    let is_authorization = |entry: &KeyValue| {
        !entry.value.is_absent()
            && entry.key.text().is_some_and(|name| name.eq_ignore_ascii_case("authorization"))
    };
    if let Some(at) = scope.position("bearer_token")
        && scope.entries("headers").iter().any(is_authorization)
    {
        scope
            .problems
            .add(at, "`bearer_token` and the header `Authorization` cannot be used together; remove one");
    }
    if let Some(at) = scope.position("restart")
        && matches!(scope.text("restart"), Some("always" | "on-failure"))
        && scope.text("restart_on_crash") == Some("false")
    {
        scope.problems.add(at, "`restart` contradicts `restart_on_crash: false`; remove `restart_on_crash`");
    }
}

/// Without tokens, the gateway serves this machine only. A token belongs to one entry.
pub(super) fn gateway(scope: &mut Scope<'_, '_>) {
    let tokens = match scope.value("tokens").map(|tokens| &tokens.value) {
        Some(NodeValue::List(tokens)) => tokens.as_slice(),
        _ => &[],
    };
    let listen = scope.text("listen").and_then(|text| text.trim().parse::<SocketAddr>().ok());
    if let (Some(at), Some(listen), true) = (scope.position("listen"), listen, tokens.is_empty())
        && !listen.ip().is_loopback()
    {
        scope.problems.add_with_hint(
            at,
            "without `tokens`, the gateway listens on a loopback address only",
            "add `tokens`, or listen on 127.0.0.1",
        );
    }
    let mut digests = BTreeMap::new();
    for node in tokens {
        let Some(scope) = scope.enter(node, GatewayToken::NAMES) else {
            continue;
        };
        if let Some((text, at)) = scope.value("sha256").and_then(|node| Some((node.text()?, node.at.start))) {
            let what = ("two tokens are the same", "give each entry a token of its own");
            let at = at.max(node.at.start);
            report_duplicate(&mut digests, text.to_ascii_lowercase(), at, what, scope.problems);
        }
    }
}

fn needs(scope: &mut Scope<'_, '_>, key: &str, other: &str) {
    if let (Some(at), None) = (scope.position(key), scope.position(other)) {
        scope.problems.add(at, format!("`{key}` needs `{other}`"));
    }
}

/// The event log is in JetStream.
fn event_log(scope: &mut Scope<'_, '_>) {
    let Some(at) = scope.position("events") else { return };
    let is_off = |scope: &mut Scope<'_, '_>| {
        let nats = scope.value("nats")?;
        let nats = scope.enter(nats, NatsConfig::NAMES)?;
        let jetstream = nats.value("jetstream")?;
        let NodeValue::Map(_) = &jetstream.value else { return None };
        let mut nats = nats;
        let jetstream = nats.enter(jetstream, JetStreamConfig::NAMES)?;
        Some(jetstream.text("mode") == Some("off"))
    };
    if is_off(scope) == Some(true) {
        let message =
            "`events` needs JetStream, which `nats.jetstream.mode: off` turns off; remove one of them";
        scope.problems.add(at, message);
    }
}

/// Names of agents, and ports of launched agents, must be unique.
pub(super) fn config(scope: &mut Scope<'_, '_>) {
    event_log(scope);
    let Some(NodeValue::List(agents)) = scope.value("agents").map(|agents| &agents.value) else {
        return;
    };
    let mut names = BTreeMap::new();
    let mut addresses = BTreeMap::new();
    for node in agents {
        let Some(scope) = scope.enter(node, AgentConfig::NAMES) else {
            continue;
        };
        // Aliases and merge keys are written elsewhere; then the position is that of the agent.
        let position = |at: usize| at.max(node.at.start);
        if let Some((name, at)) = scope.value("name").and_then(|node| Some((node.text()?, node.at.start))) {
            let what = ("two agents have the same name", "give each agent a name of its own");
            report_duplicate(&mut names, name.to_owned(), position(at), what, scope.problems);
        }
        let url = scope.text("url").filter(|_| scope.value("command").is_some());
        if let Some(Ok(url)) = url.map(|url| agent::url(url, agent::port_in(&scope)))
            && let Some(port) = url.port_or_known_default().filter(|port| *port > 0)
        {
            let host = match url.host() {
                Some(Host::Domain("localhost")) => "127.0.0.1".to_owned(),
                Some(Host::Ipv6(address)) if address.is_loopback() => "127.0.0.1".to_owned(),
                host => host.map(|host| host.to_string()).unwrap_or_default(),
            };
            let at = scope.position("port").or_else(|| scope.position("url")).unwrap_or_default();
            let what =
                ("two launched agents have the same port", "give each a port of its own, or `port: auto`");
            report_duplicate(&mut addresses, (host, port), position(at), what, scope.problems);
        }
    }
}

/// Reports a value that occurs a second time, with a hint.
pub(super) fn report_duplicate<K: Ord>(
    seen: &mut BTreeMap<K, usize>,
    key: K,
    at: usize,
    (what, hint): (&str, &str),
    problems: &mut Problems<'_>,
) {
    if let Some(first) = seen.get(&key) {
        let (first, second) = (problems.line(*first), problems.line(at));
        problems.add_with_hint(at, format!("{what}, on lines {first} and {second}"), hint);
    } else {
        seen.insert(key, at);
    }
}
