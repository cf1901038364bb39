//! The settings of a launched agent's process: how it is started, watched and started again.

use std::fmt;
use std::path::Path;
use std::str::FromStr as _;
use std::time::Duration;

use nix::sys::signal::Signal;
use schemars::JsonSchema;
use secrecy::{ExposeSecret as _, SecretString};
use sha2::{Digest as _, Sha256};

use super::fields::{Fields, checked};
use super::node::{Node, Value};
use super::problem::Report;
use super::{AgentConfig, schema, values};

/// Stands for the port in `command`, `env` and `url`.
pub(super) const PORT: &str = "{port}";
/// What `stop_signal` may be. A fixed list, so that the schema is the same on every system; where a
/// system does not know a signal, reading says so.
pub(super) const STOP_SIGNALS: [&str; 31] = [
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGQUIT",
    "SIGKILL",
    "SIGUSR1",
    "SIGUSR2",
    "SIGABRT",
    "SIGALRM",
    "SIGBUS",
    "SIGCHLD",
    "SIGCONT",
    "SIGFPE",
    "SIGILL",
    "SIGIO",
    "SIGPIPE",
    "SIGPROF",
    "SIGPWR",
    "SIGSEGV",
    "SIGSTKFLT",
    "SIGSTOP",
    "SIGSYS",
    "SIGTRAP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGVTALRM",
    "SIGWINCH",
    "SIGXCPU",
    "SIGXFSZ",
];
/// Largest `env_file`.
const MAX_ENV_FILE: u64 = 1 << 20;

/// Which port a launched agent gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    /// A free one at every start.
    Auto,
    /// Always this one.
    Fixed(u16),
}

/// When an agent that ended by itself is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// However it ended.
    Always,
    /// Unless it left with exit code 0.
    OnFailure,
    /// Not at all.
    Never,
}

impl Restart {
    /// The word in the settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::OnFailure => "on-failure",
            Self::Never => "never",
        }
    }
}

/// How a launched agent is looked at until its card is there, for `startup_timeout` at the most.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Startup {
    /// Longest pause between two looks; the first ones follow each other faster.
    #[schemars(schema_with = "schema::duration", extend("default" = "250ms"))]
    pub interval: Duration,
    /// Limit of one look.
    #[schemars(schema_with = "schema::duration", extend("default" = "5s"))]
    pub timeout: Duration,
}

/// When an agent that runs loses its place on the mesh: its card, read every `card_refresh`, cannot
/// be read or used. It comes back with the first good card.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Readiness {
    /// Limit of one look.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub timeout: Duration,
    /// Looks in a row that may fail.
    #[schemars(schema_with = "schema::count", extend("default" = 3))]
    pub failures: usize,
}

/// When a launched agent is ended and started again: it does not answer at all, and has no call in
/// flight that would explain it. One that was stopped (SIGSTOP) is started again in any case.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Liveness {
    /// Pause between two looks.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub interval: Duration,
    /// Limit of one look.
    #[schemars(schema_with = "schema::duration", extend("default" = "5s"))]
    pub timeout: Duration,
    /// Looks in a row that may fail.
    #[schemars(schema_with = "schema::count", extend("default" = 3))]
    pub failures: usize,
}

impl Default for Startup {
    fn default() -> Self {
        Self { interval: Duration::from_millis(250), timeout: Duration::from_secs(5) }
    }
}

impl Default for Readiness {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), failures: 3 }
    }
}

impl Default for Liveness {
    fn default() -> Self {
        Self { interval: Duration::from_secs(10), timeout: Duration::from_secs(5), failures: 3 }
    }
}

pub(super) fn startup(node: &Node, report: &mut Report<'_>) -> Option<Startup> {
    let mut f = Fields::open(node, report)?;
    let usual = Startup::default();
    let startup = Startup {
        interval: f.parsed(&["interval"], values::parse_duration).unwrap_or(usual.interval),
        timeout: f.parsed(&["timeout"], values::parse_duration).unwrap_or(usual.timeout),
    };
    f.close();
    Some(startup)
}

pub(super) fn readiness(node: &Node, report: &mut Report<'_>) -> Option<Readiness> {
    let mut f = Fields::open(node, report)?;
    let usual = Readiness::default();
    let readiness = Readiness {
        timeout: f.parsed(&["timeout"], values::parse_duration).unwrap_or(usual.timeout),
        failures: f.parsed(&["failures"], values::count).unwrap_or(usual.failures),
    };
    f.close();
    Some(readiness)
}

pub(super) fn liveness(node: &Node, report: &mut Report<'_>) -> Option<Liveness> {
    let mut f = Fields::open(node, report)?;
    let usual = Liveness::default();
    let liveness = Liveness {
        interval: f.parsed(&["interval"], values::parse_duration).unwrap_or(usual.interval),
        timeout: f.parsed(&["timeout"], values::parse_duration).unwrap_or(usual.timeout),
        failures: f.parsed(&["failures"], values::count).unwrap_or(usual.failures),
    };
    f.close();
    Some(liveness)
}

pub(super) fn port(text: &str) -> Result<Port, String> {
    if text == "auto" {
        return Ok(Port::Auto);
    }
    text.parse()
        .ok()
        .filter(|port| *port > 0)
        .map(Port::Fixed)
        .ok_or_else(|| "expected `auto` or a port from 1 to 65535".into())
}

pub(super) fn restart(text: &str) -> Result<Restart, String> {
    [Restart::Always, Restart::OnFailure, Restart::Never]
        .into_iter()
        .find(|restart| restart.as_str() == text)
        .ok_or_else(|| "expected `always`, `on-failure` or `never`".into())
}

pub(super) fn signal(text: &str) -> Result<Signal, String> {
    let name = text.to_ascii_uppercase();
    let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
    let known = STOP_SIGNALS.contains(&name.as_str()).then(|| Signal::from_str(&name).ok()).flatten();
    known.ok_or_else(|| "expected the name of a signal, such as `SIGTERM` or `SIGINT`".into())
}

/// An address with `{port}` in it: port 0 stands for one that is not known yet.
pub(super) fn url(text: &str, port: Option<Port>) -> Result<url::Url, String> {
    let number = match port {
        Some(Port::Fixed(port)) => port,
        Some(Port::Auto) => 0,
        None if text.contains(PORT) => return Err("`{port}` goes only with the key `port`".into()),
        None => return values::agent_url(text),
    };
    let mut url = values::agent_url(&text.replace(PORT, &number.to_string()))?;
    if !text.contains(PORT) && url.port().is_some_and(|given| given != number) {
        return Err("write `{port}` where this URL has its port, as the key `port` is given".into());
    }
    // Always possible for http and https.
    let _ = url.set_port(Some(number));
    Ok(url)
}

/// The words of a command: from a list, or from a line that a shell gets or that is split like one.
pub(super) fn command(node: &Node, report: &mut Report<'_>, shell: bool) -> Option<Vec<String>> {
    if matches!(node.value, Value::List(_)) {
        if shell {
            report.add(node.at.start, "with `shell: true` the command is one line, not a list");
        }
        let words = super::fields::list(node, report, |text| Ok(text.to_owned()))?;
        return match values::command(words) {
            Ok(words) => Some(words),
            Err(message) => {
                report.add(node.at.start, message);
                None
            }
        };
    }
    if shell {
        let line = checked(node, report, values::filled)?;
        return Some(vec!["/bin/sh".into(), "-c".into(), line]);
    }
    checked(node, report, values::command_line)
}

/// Reads `NAME=value` lines. Empty lines and lines with `#` are left out; a value may be in quotes.
pub(super) fn env_file(
    node: &Node,
    report: &mut Report<'_>,
) -> Option<(std::path::PathBuf, Vec<(String, SecretString)>)> {
    let path = checked(node, report, values::path)?;
    // Text without a file of its own has no folder, and nothing to read there.
    let Some(folder) = report.folder() else {
        return Some((path, Vec::new()));
    };
    let path = folder.join(path);
    match read_env_file(&path) {
        Ok(variables) => Some((path, variables)),
        Err(message) => {
            report.add(node.at.start, format!("{}: {message}", path.display()));
            None
        }
    }
}

fn read_env_file(path: &Path) -> Result<Vec<(String, SecretString)>, String> {
    use std::io::Read as _;
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

/// What an agent's part of the file says, boiled down. Secrets are in it, but cannot be read from it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Digest([u8; 32]);

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest")
    }
}

impl Digest {
    pub(super) fn of(node: &Node, variables: &[(String, SecretString)]) -> Self {
        let mut hash = Sha256::new();
        add(node, &mut hash);
        for (name, value) in variables {
            hash.update(name);
            hash.update([0]);
            hash.update(value.expose_secret());
            hash.update([0]);
        }
        Self(hash.finalize().into())
    }
}

fn add(node: &Node, hash: &mut Sha256) {
    match &node.value {
        Value::Reported => {}
        Value::Scalar(scalar) => {
            hash.update(scalar.text.len().to_le_bytes());
            hash.update(&scalar.text);
            hash.update([u8::from(scalar.plain)]);
        }
        Value::List(items) => {
            hash.update(b"[");
            items.iter().for_each(|item| add(item, hash));
            hash.update(b"]");
        }
        Value::Map(entries) => {
            hash.update(b"{");
            for entry in entries {
                add(&entry.key, hash);
                add(&entry.value, hash);
            }
            hash.update(b"}");
        }
    }
}

impl AgentConfig {
    /// The same agent with `{port}` filled in.
    pub fn at_port(&self, port: u16) -> Self {
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
}
