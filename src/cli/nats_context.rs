//! Contexts of the `nats` command line tool: files with a server URL and credentials, of which the user selects one.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::discover::suggest;
use super::{CliError, CliResult, USAGE};
use crate::config::{NatsConfig, NatsUrl, TlsFiles, values};

const MAX_FILE: u64 = 64 << 10;
/// Maximum number of contexts to list.
const MAX_NAMES: usize = 50;

/// A context as the tool stores it. Unknown keys do not matter.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Context {
    url: String,
    token: String,
    user: String,
    password: String,
    creds: String,
    nkey: String,
    ca: String,
    cert: String,
    key: String,
    inbox_prefix: String,
    // Ways to connect that this program does not have.
    nsc: String,
    user_jwt: String,
    user_seed: String,
    socks_proxy: String,
    tls_first: bool,
}

/// The directory of the tool's configuration.
fn directory() -> Option<PathBuf> {
    let config = std::env::var_os("XDG_CONFIG_HOME").filter(|dir| !dir.is_empty()).map(PathBuf::from);
    config.or_else(|| Some(std::env::home_dir()?.join(".config"))).map(|config| config.join("nats"))
}

/// The name of the context that the user has selected with `nats context select`.
pub(super) fn selected() -> Option<String> {
    let name = read(&directory()?.join("context.txt")).ok()?;
    Some(name.trim().to_owned()).filter(|name| !name.is_empty())
}

/// Adds the settings of a context.
pub(super) fn apply(name: &str, config: &mut NatsConfig) -> CliResult<()> {
    let directory = directory().map(|directory| directory.join("context"));
    let Some(directory) = directory.filter(|_| is_valid_name(name)) else {
        return Err(unknown(name, None));
    };
    let path = directory.join(format!("{name}.json"));
    let text = match read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(unknown(name, Some(&directory))),
        text => text.map_err(|error| unusable(name, format!("cannot read {}: {error}", path.display())))?,
    };
    let context: Context = serde_json::from_str(&text)
        .map_err(|error| unusable(name, format!("{} is not a context: {error}", path.display())))?;
    context.apply(config).map_err(|why| unusable(name, why))
}

impl Context {
    fn apply(self, config: &mut NatsConfig) -> Result<(), String> {
        let unsupported = [
            ("nsc", !self.nsc.is_empty()),
            ("user_jwt", !self.user_jwt.is_empty()),
            ("user_seed", !self.user_seed.is_empty()),
            ("socks_proxy", !self.socks_proxy.is_empty()),
            ("tls_first", self.tls_first),
        ];
        if let Some((key, _)) = unsupported.iter().find(|(_, is_set)| *is_set) {
            return Err(format!("a2a-bridge does not support `{key}`"));
        }
        let filled = |text: String| Some(text).filter(|text| !text.is_empty());
        if !self.url.is_empty() {
            config.url = self.url.split(',').map(|url| NatsUrl(url.trim().to_owned())).collect();
        }
        config.credentials = filled(self.creds).map(|path| expand_home(&path));
        config.nkey = filled(self.nkey).map(|path| read_seed(&expand_home(&path))).transpose()?;
        config.token = filled(self.token).map(Into::into);
        config.user = filled(self.user);
        config.password = filled(self.password).map(Into::into);
        let file = |path: String| filled(path).map(|path| expand_home(&path));
        let tls = TlsFiles { ca: file(self.ca), cert: file(self.cert), key: file(self.key), required: false };
        config.tls = (tls.ca.is_some() || tls.cert.is_some()).then_some(tls);
        if let Some(prefix) = filled(self.inbox_prefix) {
            config.inbox_prefix =
                values::inbox_prefix(&prefix).map_err(|why| format!("`inbox_prefix`: {why}"))?;
        }
        Ok(())
    }
}

/// Reads the nkey seed in a file.
pub(super) fn read_seed(path: &Path) -> Result<secrecy::SecretString, String> {
    let seed =
        read(path).map_err(|error| format!("cannot read the nkey seed file {}: {error}", path.display()))?;
    Ok(seed.trim().to_owned().into())
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(text)
}

/// The tool's own rule: a name is part of a path.
fn is_valid_name(name: &str) -> bool {
    !name.is_empty() && !name.contains("..") && !name.contains(['/', '\\', '\0'])
}

fn expand_home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

/// The names of all contexts.
pub(super) fn names() -> Vec<String> {
    let entries = directory().and_then(|directory| std::fs::read_dir(directory.join("context")).ok());
    let names = entries.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name();
        Some(name.to_str()?.strip_suffix(".json")?.to_owned())
    });
    let mut names: Vec<String> = names.take(MAX_NAMES).collect();
    names.sort_unstable();
    names
}

fn unknown(name: &str, directory: Option<&Path>) -> CliError {
    let error = CliError::msg(USAGE, format!("there is no NATS context `{name}`"));
    let names = directory.map(|_| names()).unwrap_or_default();
    if names.is_empty() {
        return error.hint("`nats context add` creates one; or use `--nats URL`");
    }
    error.hint(suggest(name, names.iter().map(String::as_str).collect(), "the contexts are"))
}

fn unusable(name: &str, why: impl Into<String>) -> CliError {
    CliError::msg(USAGE, format!("cannot use the NATS context `{name}`: {}", why.into()))
        .hint("choose another one with `--context`, or set `--nats` and the credentials")
}
