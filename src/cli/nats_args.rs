//! Where NATS is, and with which credentials to connect: from arguments, variables, a context of the `nats` tool or the
//! configuration of a bridge.
//!
//! The URL and the credentials come from one source, so that the credentials of one server do not reach another one:
//! `--context`, else `--config`, else NATS_URL, else NATS_CONTEXT, else A2A_BRIDGE_CONFIG, else `a2a-bridge.yaml` in the
//! current directory, as for `run` and `check`, else the selected context, else the default. An argument replaces a single value of its source; a variable does so only if no argument names
//! the source. The subject prefix is not part of a context; it comes from the configuration of a bridge, whatever the
//! source of the rest is.

use std::path::{Path, PathBuf};

use super::{CliError, CliResult, DEFAULT_CONFIG, INVALID_CONFIG, USAGE, nats_context};
use crate::config::{self, NatsConfig, NatsUrl, TlsFiles, without_user_info};

const DEFAULT_URL: &str = "nats://127.0.0.1:4222";
const DEFAULT_PREFIX: &str = "a2a";
const DEFAULT_INBOX_PREFIX: &str = "_INBOX";

#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "NATS")]
pub(super) struct NatsArgs {
    /// Server URL, or several separated by commas [default: that of `--config`, else of the selected context, else
    /// nats://127.0.0.1:4222]
    #[arg(long, global = true, value_name = "URL", env = "NATS_URL")]
    nats: Option<String>,
    /// Connect with this context of the `nats` command line tool [default: the selected one]
    #[arg(long, global = true, value_name = "NAME", env = "NATS_CONTEXT")]
    context: Option<String>,
    /// Connect as this configuration file of a bridge says, and use its subject prefix [default: a2a-bridge.yaml, if it
    /// exists]
    #[arg(long, short, global = true, value_name = "FILE", env = "A2A_BRIDGE_CONFIG")]
    config: Option<PathBuf>,
    /// Authenticate with a `.creds` file
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CREDS")]
    creds: Option<PathBuf>,
    /// Authenticate with the nkey seed in this file
    #[arg(long, global = true, value_name = "FILE", env = "NATS_NKEY")]
    nkey: Option<PathBuf>,
    /// Authenticate with a token; prefer the variable, because other users can see arguments
    #[arg(long, global = true, env = "NATS_TOKEN")]
    token: Option<String>,
    /// Authenticate with a user name and `--password`
    #[arg(long, global = true, env = "NATS_USER")]
    user: Option<String>,
    /// Password for `--user`; prefer the variable, because other users can see arguments
    #[arg(long, global = true, env = "NATS_PASSWORD", requires = "user")]
    password: Option<String>,
    /// PEM file with the certificate authorities to trust
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CA")]
    tls_ca: Option<PathBuf>,
    /// PEM file with a client certificate
    #[arg(long, global = true, value_name = "FILE", env = "NATS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the private key of the client certificate
    #[arg(long, global = true, value_name = "FILE", env = "NATS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Prefix of the bridge's subjects (`nats.subject_prefix` in its configuration) [default: a2a]
    #[arg(long, global = true, env = "A2A_BRIDGE_PREFIX")]
    prefix: Option<String>,
    /// Prefix of the subjects for replies; with private inboxes, the one that the NATS user may subscribe to
    /// [default: _INBOX]
    #[arg(long, global = true, value_name = "PREFIX", env = "NATS_INBOX_PREFIX", value_parser = checked_inbox_prefix)]
    inbox_prefix: Option<String>,
}

fn checked_inbox_prefix(text: &str) -> Result<String, String> {
    config::values::inbox_prefix(text)
}

/// How to connect.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) config: NatsConfig,
    /// Where the URL comes from, unless the user has just given it.
    pub(super) source: Option<String>,
}

/// A source of the URL and the credentials.
enum Source<'a> {
    Context(&'a str),
    SelectedContext(String),
    Config,
    /// The configuration in the current directory.
    Local(Box<NatsConfig>),
    None,
}

impl NatsArgs {
    pub(super) fn resolve(&self) -> CliResult<Connection> {
        let (source, is_named) = self.source();
        let file = self.config.as_ref().filter(|path| !path.as_os_str().is_empty());
        let bridge = match file.map(|path| (path, config::load_nats(path))) {
            Some((path, Ok(nats))) => Some((path, NatsConfig { agent_protocol: None, ..nats })),
            // A variable that names an unusable file does not matter if the user says where NATS is.
            Some((_, Err(error))) if matches!(source, Source::Config) || self.is_config_argument() => {
                return Err(CliError::new(INVALID_CONFIG, error));
            }
            Some((_, Err(_))) | None => None,
        };
        let mut prefix = bridge.as_ref().map(|(_, nats)| nats.subject_prefix.clone());
        let mut config = default_config();
        let source = match source {
            Source::None => None,
            Source::Context(name) => {
                nats_context::apply(name, &mut config)?;
                Some(format!("NATS context `{name}`"))
            }
            Source::SelectedContext(name) => {
                nats_context::apply(&name, &mut config)?;
                Some(format!("selected NATS context `{name}`"))
            }
            Source::Local(nats) => {
                prefix = Some(nats.subject_prefix.clone());
                config = NatsConfig { agent_protocol: None, ..*nats };
                Some(DEFAULT_CONFIG.to_owned())
            }
            Source::Config => bridge.map(|(path, nats)| {
                config = nats;
                path.display().to_string()
            }),
        };
        let overrides = Overrides { is_named };
        let replaces_url = overrides.value(&self.nats, "NATS_URL");
        if let Some(url) = replaces_url {
            config.url = url.split(',').map(|url| NatsUrl(url.trim().to_owned())).collect();
        }
        self.override_credentials(&mut config, &overrides)?;
        self.override_tls(&mut config, &overrides);
        if let Some(prefix) = overrides.value(&self.inbox_prefix, "NATS_INBOX_PREFIX") {
            config.inbox_prefix.clone_from(prefix);
        }
        // A variable gives way to the configuration that an argument names.
        let overrides = Overrides { is_named: self.is_config_argument() };
        let given = overrides.value(&self.prefix, "A2A_BRIDGE_PREFIX").cloned();
        config.subject_prefix = given.or(prefix).unwrap_or_else(|| DEFAULT_PREFIX.to_owned());
        Ok(Connection { config, source: source.filter(|_| replaces_url.is_none()) })
    }

    /// The source of the URL and the credentials, and whether an argument names it.
    fn source(&self) -> (Source<'_>, bool) {
        let context = self.context.as_deref().filter(|name| !name.is_empty());
        let has_config = self.config.as_ref().is_some_and(|path| !path.as_os_str().is_empty());
        match context {
            Some(name) if is_argument(name, "NATS_CONTEXT") => return (Source::Context(name), true),
            _ if self.is_config_argument() => return (Source::Config, true),
            _ if self.nats.as_ref().is_some_and(|url| !url.is_empty()) => return (Source::None, false),
            Some(name) => return (Source::Context(name), false),
            None if has_config => return (Source::Config, false),
            None => {}
        }
        // A file that cannot be read is reported by the commands that need it.
        if Path::new(DEFAULT_CONFIG).is_file()
            && let Ok(nats) = config::load_nats(Path::new(DEFAULT_CONFIG))
        {
            return (Source::Local(Box::new(nats)), false);
        }
        let selected = nats_context::selected();
        (selected.map_or(Source::None, Source::SelectedContext), false)
    }

    fn is_config_argument(&self) -> bool {
        self.config
            .as_ref()
            .and_then(|path| path.to_str())
            .is_some_and(|path| is_argument(path, "A2A_BRIDGE_CONFIG"))
    }

    fn override_credentials(&self, config: &mut NatsConfig, overrides: &Overrides) -> CliResult<()> {
        let creds = overrides.path(&self.creds, "NATS_CREDS");
        let nkey = overrides.path(&self.nkey, "NATS_NKEY");
        let token = overrides.value(&self.token, "NATS_TOKEN");
        let user = overrides.value(&self.user, "NATS_USER");
        if creds.is_none() && nkey.is_none() && token.is_none() && user.is_none() {
            return Ok(());
        }
        let read_seed = |path: &PathBuf| {
            nats_context::read_seed(path)
                .map_err(|error| CliError::msg(USAGE, error).hint("check `--nkey` (or NATS_NKEY)"))
        };
        config.credentials = creds.cloned();
        config.nkey = nkey.map(read_seed).transpose()?;
        config.token = token.cloned().map(Into::into);
        config.user = user.cloned();
        config.password = self.password.clone().map(Into::into);
        Ok(())
    }

    fn override_tls(&self, config: &mut NatsConfig, overrides: &Overrides) {
        let none = TlsFiles { ca: None, cert: None, key: None, required: false };
        let mut tls = config.tls.take().unwrap_or(none);
        for (file, path, variable) in [
            (&mut tls.ca, &self.tls_ca, "NATS_CA"),
            (&mut tls.cert, &self.tls_cert, "NATS_CERT"),
            (&mut tls.key, &self.tls_key, "NATS_KEY"),
        ] {
            if let Some(path) = overrides.path(path, variable) {
                *file = Some(path.clone());
            }
        }
        config.tls = (tls.ca.is_some() || tls.cert.is_some() || tls.required).then_some(tls);
    }

    /// The flags to repeat in a command that is suggested to the user, without secrets.
    pub(super) fn suggested_flags(&self) -> String {
        let config = self.config.as_ref().map(|path| path.display().to_string());
        let flags = [
            ("nats", &self.nats.as_ref().map(without_user_info), "NATS_URL", &self.nats),
            ("context", &self.context, "NATS_CONTEXT", &self.context),
            ("config", &config, "A2A_BRIDGE_CONFIG", &config),
            ("prefix", &self.prefix, "A2A_BRIDGE_PREFIX", &self.prefix),
            ("inbox-prefix", &self.inbox_prefix, "NATS_INBOX_PREFIX", &self.inbox_prefix),
        ];
        let flags = flags.iter().filter_map(|(flag, shown, variable, value)| {
            let is_given = value.as_ref().is_some_and(|value| is_argument(value, variable));
            let shown = shown.as_ref().filter(|_| is_given)?;
            Some(format!(" --{flag} {}", shlex::try_quote(shown).unwrap_or_default()))
        });
        flags.collect()
    }
}

/// Whether a value comes from an argument, and not from this variable.
fn is_argument(value: &str, variable: &str) -> bool {
    !value.is_empty() && std::env::var(variable).as_deref() != Ok(value)
}

/// Which values replace those of the source.
struct Overrides {
    /// An argument names the source, so variables do not count.
    is_named: bool,
}

impl Overrides {
    fn value<'a>(&self, value: &'a Option<String>, variable: &str) -> Option<&'a String> {
        value.as_ref().filter(|value| !value.is_empty() && (!self.is_named || is_argument(value, variable)))
    }

    fn path<'a>(&self, path: &'a Option<PathBuf>, variable: &str) -> Option<&'a PathBuf> {
        let is_argument = |path: &PathBuf| std::env::var_os(variable).is_none_or(|value| value != *path);
        path.as_ref().filter(|path| !path.as_os_str().is_empty() && (!self.is_named || is_argument(path)))
    }
}

fn default_config() -> NatsConfig {
    NatsConfig {
        agent_protocol: None,
        url: vec![NatsUrl(DEFAULT_URL.to_owned())],
        credentials: None,
        nkey: None,
        token: None,
        user: None,
        password: None,
        tls: None,
        subject_prefix: DEFAULT_PREFIX.to_owned(),
        reply_prefixes: Vec::new(),
        identity: crate::config::IdentityConfig::default(),
        jetstream: crate::config::JetStreamConfig {
            mode: crate::config::JetStreamMode::Auto,
            replicas: crate::config::StateReplicas::Auto,
        },
        inbox_prefix: DEFAULT_INBOX_PREFIX.to_owned(),
    }
}
