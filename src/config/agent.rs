//! The settings of an agent that depend on each other (address and port, command and shell, environment),
//! and what the rest of the bridge derives from an agent's settings.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};
use url::Url;
use url::form_urlencoded::byte_serialize;

use super::declare::{Scope, Setting as _};
use super::kinds::{AgentUrl, AnyText, CommandLine, Restart, read_text};
use super::node::{Node, NodeValue};
use super::redact::names_secret;
use super::settings::{AgentConfig, BasicAuth, OAuth2};
use super::values;
use crate::secrets::Secrets;

/// Stands for the port in `command`, `env` and `url`.
const PORT: &str = "{port}";
/// What `stop_signal` may be. A fixed list, so that the schema is the same on every system. A system that
/// does not know a signal rejects it when the file is read.
pub(super) const STOP_SIGNALS: [&str; 31] = [
    "TERM", "INT", "HUP", "QUIT", "KILL", "USR1", "USR2", "ABRT", "ALRM", "BUS", "CHLD", "CONT", "FPE",
    "ILL", "IO", "PIPE", "PROF", "PWR", "SEGV", "STKFLT", "STOP", "SYS", "TRAP", "TSTP", "TTIN", "TTOU",
    "URG", "VTALRM", "WINCH", "XCPU", "XFSZ",
];
const MAX_ENV_FILE: u64 = 1 << 20;

/// The port of a launched agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Port {
    /// A free one at every start.
    Auto,
    Fixed(u16),
}

pub(super) fn port(text: &str) -> Result<Port, String> {
    if text == "auto" {
        return Ok(Port::Auto);
    }
    let fixed = text.parse().ok().filter(|port| *port > 0).map(Port::Fixed);
    fixed.ok_or_else(|| "expected `auto` or a port from 1 to 65535".into())
}

pub(super) fn signal(text: &str) -> Result<Signal, String> {
    let name = text.to_ascii_uppercase();
    let name = name.strip_prefix("SIG").unwrap_or(&name);
    let known = STOP_SIGNALS.contains(&name).then(|| Signal::from_str(&format!("SIG{name}")).ok()).flatten();
    known.ok_or_else(|| "expected the name of a signal, such as `SIGTERM` or `SIGINT`".into())
}

/// The `port` of the agent, if it is a valid one.
pub(super) fn port_in(scope: &Scope<'_, '_>) -> Option<Port> {
    port(scope.text("port")?).ok()
}

/// The URL of an agent with its port filled in. Port 0 stands for a port that is not known yet.
pub(super) fn url(text: &str, port: Option<Port>) -> Result<Url, String> {
    let number = match port {
        Some(Port::Fixed(port)) => port,
        Some(Port::Auto) => 0,
        None if text.contains(PORT) => {
            return Err("`{port}` in a URL needs the setting `port`: add it, or write a number".into());
        }
        None => return values::agent_url(text),
    };
    let mut url = values::agent_url(&text.replace(PORT, &number.to_string()))?;
    if !text.contains(PORT) && url.port().is_some_and(|given| given != number) {
        return Err("this URL and the setting `port` differ: write `{port}` as the port of the URL".into());
    }
    // Always possible for http and https.
    let _ = url.set_port(Some(number));
    Ok(url)
}

pub(super) fn read_url(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Url> {
    let port = port_in(scope);
    read_text(node, scope, AgentUrl::TYPE, |text| url(text, port))
}

/// The words of a command: a list, a line to split like a shell does, or with `shell` the whole line.
pub(super) fn read_command(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Vec<String>> {
    let is_shell = scope.text("shell") == Some("true");
    if matches!(node.value, NodeValue::List(_)) {
        if is_shell {
            scope.problems.add(node.at.start, "`shell: true` requires `command` as one string, not a list");
        }
        let words = Vec::<AnyText>::read(node, scope)?;
        return values::command(words).map_err(|message| scope.problems.add(node.at.start, message)).ok();
    }
    if is_shell {
        return read_text(node, scope, CommandLine::TYPE, values::non_empty).map(|line| vec![line]);
    }
    read_text(node, scope, CommandLine::TYPE, values::command_line)
}

/// The variables in a file that a setting names.
pub(super) fn read_env_file(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Vec<(String, SecretString)>> {
    let path = PathBuf::read(node, scope)?;
    // Settings that do not come from a file have no directory for the path to start at.
    if scope.problems.directory.is_none() {
        return Some(Vec::new());
    }
    let report = |message| scope.problems.add(node.at.start, format!("{}: {message}", path.display()));
    read_variables(&path).map_err(report).ok()
}

/// Reads `NAME=value` lines. Skips empty lines and lines that start with `#`; a value may be in quotes.
fn read_variables(path: &Path) -> Result<Vec<(String, SecretString)>, String> {
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_ENV_FILE).read_to_string(&mut text))
        .map_err(|error| format!("cannot read this file: {error}"))?;
    let mut variables = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let assignment = line.strip_prefix("export ").unwrap_or(line);
        let (name, value) = assignment
            .split_once('=')
            .map(|(name, value)| (name.trim(), value.trim()))
            .filter(|(name, value)| values::is_env_name(name) && !value.contains('\0'))
            .ok_or_else(|| format!("line {} is not `NAME=value`", index + 1))?;
        let quoted = |quote| value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote));
        let value = quoted('"').or_else(|| quoted('\'')).unwrap_or(value);
        variables.push((name.to_owned(), SecretString::from(value)));
    }
    Ok(variables)
}

/// The keys of an agent, with their aliases, that a reload applies without a restart of the agent: none of them concerns
/// its process or its credentials.
pub(super) const APPLIED_WITHOUT_RESTART: [&str; 27] = [
    "startup_timeout",
    "a2a_server_startup_timeout",
    "startup",
    "readiness",
    "liveness",
    "restart",
    "restart_on_crash",
    "a2a_server_restart_on_crash",
    "max_restarts",
    "restart_window",
    "stable_after",
    "stop_grace",
    "card_refresh",
    "skills",
    "request_timeout",
    "stream_idle_timeout",
    "task_timeout",
    "task_ttl",
    "forward_caller",
    "stream_keepalive",
    "prefer_stream",
    "input_required_ttl",
    "max_in_flight",
    "max_response_size",
    "answer_artifacts",
    "notice_artifacts",
    "events",
];

/// Hashes of an agent's settings. They cover the secrets but do not reveal them. The order of keys and the way a value is
/// quoted do not matter.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SettingsDigest {
    all: [u8; 32],
    /// Without those of [`APPLIED_WITHOUT_RESTART`].
    of_restart: [u8; 32],
}

impl fmt::Debug for SettingsDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SettingsDigest")
    }
}

impl SettingsDigest {
    fn of(node: &Node, variables: &[(String, SecretString)]) -> Self {
        let hash = |is_covered: &dyn Fn(&str) -> bool| {
            let mut hash = Sha256::new();
            hash_node(node, Quotes::Ignored, is_covered, &mut hash);
            for (name, value) in variables {
                for text in [name, value.expose_secret()] {
                    hash.update(text);
                    hash.update([0]);
                }
            }
            hash.finalize().into()
        };
        Self { all: hash(&|_| true), of_restart: hash(&|key| !APPLIED_WITHOUT_RESTART.contains(&key)) }
    }

    /// Whether both agents have the same process and the same credentials, so that one becomes the other without a restart.
    pub(crate) fn is_same_process(&self, other: &Self) -> bool {
        self.of_restart == other.of_restart
    }
}

/// Whether quotes around a value make a difference.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    /// The kind of the setting decides how to read the text. Only a null without quotes differs.
    Ignored,
    /// In JSON, `1` is a number and `'1'` is a string.
    Count,
}

/// Hashes a node; in a mapping, only the keys that are covered, in alphabetical order.
fn hash_node(node: &Node, quotes: Quotes, is_covered: &dyn Fn(&str) -> bool, hash: &mut Sha256) {
    match &node.value {
        NodeValue::Reported => {}
        NodeValue::Scalar(scalar) => {
            hash.update(scalar.text.len().to_le_bytes());
            hash.update(&scalar.text);
            hash.update([u8::from(scalar.plain && (quotes == Quotes::Count || node.is_null()))]);
        }
        NodeValue::List(items) => {
            hash.update(b"[");
            items.iter().for_each(|item| hash_node(item, quotes, &|_| true, hash));
            hash.update(b"]");
        }
        NodeValue::Map(entries) => {
            hash.update(b"{");
            let mut entries: Vec<_> = entries.iter().collect();
            entries.sort_by_key(|entry| entry.key.text());
            for entry in entries {
                let key = entry.key.text().unwrap_or_default();
                if is_covered(key) {
                    hash_node(&entry.key, Quotes::Ignored, &|_| true, hash);
                    let quotes = if key == "card" { Quotes::Count } else { quotes };
                    hash_node(&entry.value, quotes, &|_| true, hash);
                }
            }
            hash.update(b"]");
        }
    }
}

impl AgentConfig {
    /// Fills in what follows from several settings together.
    pub(super) fn complete(mut self, node: &Node) -> Self {
        let variables = self.env_file.take().unwrap_or_default();
        self.digest = SettingsDigest::of(node, &variables);
        for (name, value) in variables {
            self.env.entry(name).or_insert(value);
        }
        if let Some(command) = self.command.as_mut().filter(|_| self.shell) {
            command.splice(0..0, ["/bin/sh".to_owned(), "-c".to_owned()]);
        }
        if !self.restart_on_crash {
            self.restart = Restart::Never;
        }
        self
    }

    /// Replaces `{port}` with this port.
    pub(crate) fn at_port(&self, port: u16) -> Self {
        let mut agent = self.clone();
        let number = port.to_string();
        // Always possible for http and https.
        let _ = agent.url.set_port(Some(port));
        for word in agent.command.iter_mut().flatten() {
            *word = word.replace(PORT, &number);
        }
        for value in agent.env.values_mut() {
            if value.expose_secret().contains(PORT) {
                *value = SecretString::from(value.expose_secret().replace(PORT, &number));
            }
        }
        agent
    }

    /// The credentials in the agent's settings, to redact in its output and in errors.
    pub(crate) fn secrets(&self) -> Secrets {
        let is_harmless = |name: &str| HARMLESS_HEADERS.iter().any(|known| known.eq_ignore_ascii_case(name));
        let headers = self.headers.iter().filter(|(name, _)| !is_harmless(name)).map(|(_, value)| value);
        // An agent may repeat a token without its scheme, or one cookie of several.
        let without_scheme = headers
            .clone()
            .filter_map(|value| value.expose_secret().split_once(' '))
            .map(|(_, value)| SecretString::from(value));
        let cookies = self
            .headers
            .iter()
            .filter(|(name, _)| name.eq_ignore_ascii_case("cookie"))
            .flat_map(|(_, value)| value.expose_secret().split(';'))
            .filter_map(|cookie| cookie.split_once('='))
            .map(|(_, value)| SecretString::from(value.trim()));
        let variables = self.env.iter().filter(|(name, _)| names_secret(name));
        let auth = self.auth.iter().chain(&self.card_auth).flatten();
        // On the wire, a password is part of an encoded pair.
        let pair =
            |user: &str, password: &str| SecretString::from(STANDARD.encode(format!("{user}:{password}")));
        let encoded = |text: &str| byte_serialize(text.as_bytes()).collect::<String>();
        let pairs = auth.clone().filter_map(|auth| match (&auth.basic, &auth.oauth2) {
            (Some(BasicAuth { user, password }), _) => Some(pair(user, password.expose_secret())),
            (None, Some(OAuth2 { client_id, client_secret, .. })) => {
                Some(pair(&encoded(client_id), &encoded(client_secret.expose_secret())))
            }
            (None, None) => None,
        });
        // A short credential may be an ordinary word, but not next to its name.
        let short = |what: String, value: &SecretString| {
            (value.expose_secret().len() < Secrets::MIN_LENGTH)
                .then(|| SecretString::from(format!("{what}{}", value.expose_secret())))
        };
        let bearers = self.bearer_token.iter().chain(auth.clone().filter_map(|auth| auth.bearer.as_ref()));
        let named = bearers.filter_map(|token| short("Bearer ".to_owned(), token)).chain(
            auth.clone().filter_map(|auth| auth.api_key.as_ref()).flat_map(|key| {
                ["=", ": ", "\":\"", "\": \""]
                    .into_iter()
                    .filter_map(|between| short(format!("{}{between}", key.name), &key.value))
            }),
        );
        let in_addresses = queries(self.card_path.as_deref()).chain(
            auth.clone().flat_map(|auth| queries(auth.oauth2.as_ref().map(|oauth| oauth.token_url.as_str()))),
        );
        let auth = auth.clone().flat_map(|auth| {
            let key = auth.api_key.iter().map(|key| &key.value);
            let password = auth.basic.iter().map(|basic| &basic.password);
            let client = auth.oauth2.iter().map(|oauth| &oauth.client_secret);
            auth.bearer.iter().chain(key).chain(password).chain(client)
        });
        let values = headers.chain(variables.map(|(_, value)| value));
        let values = self.bearer_token.iter().chain(auth).chain(values).cloned();
        let values = values.chain(without_scheme).chain(cookies).chain(pairs);
        Secrets::new(values.chain(named).chain(in_addresses))
    }
}

/// Headers whose values are no credentials.
const HARMLESS_HEADERS: [&str; 8] = [
    "accept",
    "accept-encoding",
    "accept-language",
    "content-language",
    "content-type",
    "user-agent",
    "a2a-extensions",
    "a2a-version",
];

/// The values in the query of an address, as written and decoded.
fn queries(address: Option<&str>) -> impl Iterator<Item = SecretString> {
    let query = address.and_then(|address| address.split_once('?')).map_or("", |(_, query)| query);
    let written = query.split('&').filter_map(|pair| pair.split_once('=')).map(|(_, value)| value.into());
    let decoded = url::form_urlencoded::parse(query.as_bytes()).map(|(_, value)| value.into_owned().into());
    written.chain(decoded).collect::<Vec<SecretString>>().into_iter()
}
