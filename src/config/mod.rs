//! The settings: what the YAML file may say, checked once, before anything starts.
//!
//! [`Config`] and its parts are the settings as the rest of the bridge sees them. Their doc
//! comments are what users read: `a2a-bridge schema` and `config/full.yaml` are made of them.
//! [`load`] is the only door: it reads a file, expands `${NAME}`, and reports every problem at
//! once with file, line and column.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

/// The whole file.
#[derive(Debug, Clone)]
pub struct Config {
    /// The connection to NATS and the names used there.
    pub nats: Nats,
    /// The agents to bridge.
    pub agents: Vec<Agent>,
    /// How long calls in flight may go on after SIGTERM or Ctrl-C.
    pub shutdown_grace: Duration,
}

/// The connection to NATS and the names used there.
#[derive(Debug, Clone)]
pub struct Nats {
    /// One server or several of one cluster.
    pub url: Vec<String>,
    /// A `.creds` file (JWT and nkey seed).
    pub credentials: Option<PathBuf>,
    /// An nkey seed.
    pub nkey: Option<SecretString>,
    /// A token.
    pub token: Option<SecretString>,
    /// A user name; goes with `password`.
    pub user: Option<String>,
    /// The password of `user`.
    pub password: Option<SecretString>,
    /// TLS, when the server asks for it or a `tls://` URL is given.
    pub tls: Option<Tls>,
    /// First token or tokens of every subject of the bridge.
    pub subject_prefix: String,
    /// Patterns of reply subjects that the bridge answers to.
    pub reply_prefixes: Vec<String>,
}

/// TLS towards NATS.
#[derive(Debug, Clone)]
pub struct Tls {
    /// PEM file with the authorities to trust instead of the system's.
    pub ca: Option<PathBuf>,
    /// PEM file with the client certificate.
    pub cert: Option<PathBuf>,
    /// PEM file with the client certificate's key.
    pub key: Option<PathBuf>,
    /// Refuse to talk without TLS.
    pub required: bool,
}

/// One agent.
#[derive(Debug, Clone)]
pub struct Agent {
    /// The agent's name on the mesh, unique in the file.
    pub name: String,
    /// Where the agent listens: scheme, host and port (and a path, if its card is below one).
    pub url: Url,
    /// Program and arguments that start the agent; without it the bridge attaches to a running one.
    pub command: Option<Vec<String>>,
    /// Folder in which `command` runs.
    pub working_dir: Option<PathBuf>,
    /// Environment variables of `command`, beside a few of the bridge's own.
    pub env: BTreeMap<String, SecretString>,
    /// How long a launched agent may take until its card is served.
    pub startup_timeout: Duration,
    /// Start a launched agent again when it ends by itself.
    pub restart_on_crash: bool,
    /// Token sent as `Authorization: Bearer …`, to this agent's origin only.
    pub bearer_token: Option<SecretString>,
    /// Further headers for every request to this agent's origin.
    pub headers: BTreeMap<String, SecretString>,
    /// Path of the card, instead of the two well-known ones.
    pub card_path: Option<String>,
    /// The card itself, for an agent that serves none.
    pub card: Option<serde_json::Value>,
    /// How often the card is read again.
    pub card_refresh: Duration,
    /// Which skills are published, and under which names.
    pub skills: Skills,
    /// Limit of a whole call in reply mode `final`.
    pub request_timeout: Duration,
    /// Limit between two events of a stream.
    pub stream_idle_timeout: Duration,
    /// Limit of a submitted task.
    pub task_timeout: Duration,
    /// How long an agent's question can be answered.
    pub input_required_ttl: Duration,
    /// Calls at the same time; more are answered with `busy`.
    pub max_in_flight: usize,
    /// Largest answer taken from the agent, in bytes.
    pub max_response_size: u64,
    /// Name patterns (`*` matches anything) of artifacts that belong to the answer.
    pub answer_artifacts: Vec<String>,
    /// Name patterns of artifacts that are notices and stay out of `message`.
    pub notice_artifacts: Vec<String>,
}

/// Which skills are published, and under which names. Skills are named by id or by name.
#[derive(Debug, Clone, Default)]
pub struct Skills {
    /// Publish these only; empty means all.
    pub allow: Vec<String>,
    /// Do not publish these.
    pub deny: Vec<String>,
    /// Publish a skill under another action name.
    pub rename: BTreeMap<String, String>,
}
