//! The settings: what the YAML file may say, checked once, before anything starts.
//!
//! [`Config`] and its parts are the settings as the rest of the bridge sees them. Their doc
//! comments are what users read: `a2a-bridge schema` and `config/full.yaml` are made of them.
//! [`load()`] is the only door: it reads a file, expands `${NAME}`, and reports every problem at
//! once with file, line and column.
//!
//! The way of a file: `load` (YAML -> tree), `mask` (where the secrets are), `node` (duplicate and
//! merge keys), `expand` (variables), `read` (tree -> settings) with `fields`, `values` and `check`.
//! A tree of our own instead of a derived deserializer, because serde stops at the first error and
//! knows no positions.

mod auth;
mod check;
mod expand;
mod fields;
mod load;
mod mask;
mod node;
mod problem;
mod read;
mod schema;
mod supervision;
#[cfg(test)]
mod tests;
pub(crate) mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use schemars::JsonSchema;
use secrecy::SecretString;
use url::Url;

pub(crate) use auth::{AgentTls, Auth, KeyPlace, OAuth2};
pub(crate) use load::load;
pub use load::parse;
pub(crate) use problem::ConfigError;
pub(crate) use schema::schema;
pub(crate) use supervision::{Digest, Liveness, Port, Readiness, Restart, Startup};

/// The settings of one bridge.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Config {
    /// The connection to NATS and the names used there.
    #[schemars(extend("default" = {}))]
    pub nats: NatsConfig,
    /// The agents to bridge; `[]` for none yet.
    pub agents: Vec<AgentConfig>,
    /// How long calls in flight may go on after SIGTERM or Ctrl-C.
    #[schemars(schema_with = "schema::duration", extend("default" = "8s"))]
    pub shutdown_grace: Duration,
    /// Figures for Prometheus, and `/healthz` and `/readyz`, over HTTP.
    pub metrics: Option<MetricsConfig>,
    /// The file these settings came from.
    #[schemars(skip)]
    pub file: Option<PathBuf>,
}

/// Figures for Prometheus, and `/healthz` and `/readyz`, over HTTP.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct MetricsConfig {
    /// Address and port to listen on.
    #[schemars(schema_with = "schema::listen", extend("examples" = ["127.0.0.1:9464"]))]
    pub listen: SocketAddr,
}

/// The connection to NATS and the names used there.
#[derive(Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct NatsConfig {
    /// One server, or several of one cluster: a list, or with commas between them.
    #[schemars(schema_with = "schema::servers", extend("default" = "nats://127.0.0.1:4222"))]
    pub url: Vec<String>,
    /// Log in with a `.creds` file (JWT and nkey seed). Relative to the folder of this file.
    #[schemars(schema_with = "schema::path", extend("examples" = ["bridge.creds"]))]
    pub credentials: Option<PathBuf>,
    /// Log in with an nkey seed.
    #[schemars(schema_with = "schema::optional_token", extend("examples" = ["${NATS_NKEY_SEED}"]))]
    pub nkey: Option<SecretString>,
    /// Log in with a token.
    #[schemars(schema_with = "schema::optional_filled", extend("examples" = ["${NATS_TOKEN}"]))]
    pub token: Option<SecretString>,
    /// Log in with a user name and `password`.
    #[schemars(schema_with = "schema::optional_filled", extend("examples" = ["bridge"]))]
    pub user: Option<String>,
    /// The password of `user`.
    #[schemars(with = "Option<String>", extend("examples" = ["${NATS_PASSWORD}"]))]
    pub password: Option<SecretString>,
    /// TLS with own certificates. The paths are relative to the folder of this file.
    pub tls: Option<TlsFiles>,
    /// First word or words of every subject of the bridge: letters, digits, `_`, `-`, with dots between.
    #[schemars(schema_with = "schema::subject_prefix", extend("default" = "a2a"))]
    pub subject_prefix: String,
    /// Reply subjects that the bridge answers to; `*` stands for a word, `>` for the rest.
    #[schemars(schema_with = "schema::subject_patterns", extend("default" = ["_INBOX.>", "_R_.>"]))]
    pub reply_prefixes: Vec<String>,
    /// Offer the agents to clients of the Synadia Agent Protocol for NATS as well.
    pub agent_protocol: Option<AgentProtocolConfig>,
}

impl fmt::Debug for NatsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url,
            credentials,
            nkey,
            token,
            user,
            password,
            tls,
            subject_prefix,
            reply_prefixes,
            agent_protocol,
        } = self;
        // A NATS URL may hold a password, which the derived output would show.
        let url: Vec<_> = url.iter().map(|url| without_user_info(url)).collect();
        f.debug_struct("Nats")
            .field("url", &url)
            .field("credentials", credentials)
            .field("nkey", nkey)
            .field("token", token)
            .field("user", user)
            .field("password", password)
            .field("tls", tls)
            .field("subject_prefix", subject_prefix)
            .field("reply_prefixes", reply_prefixes)
            .field("agent_protocol", agent_protocol)
            .finish()
    }
}

/// A NATS URL as it may be shown: user and password are `***`.
pub(crate) fn without_user_info(url: &str) -> String {
    match url.rsplit_once('@') {
        None => url.to_owned(),
        Some((before, host)) => match before.split_once("://") {
            Some((scheme, _)) => format!("{scheme}://***@{host}"),
            None => format!("***@{host}"),
        },
    }
}

/// TLS towards NATS.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct TlsFiles {
    /// PEM file with the authorities to trust instead of the system's.
    #[schemars(schema_with = "schema::path", extend("examples" = ["tls/ca.pem"]))]
    pub ca: Option<PathBuf>,
    /// PEM file with the client certificate; goes with `key`.
    #[schemars(schema_with = "schema::path", extend("examples" = ["tls/client.pem"]))]
    pub cert: Option<PathBuf>,
    /// PEM file with the key of the client certificate.
    #[schemars(schema_with = "schema::path", extend("examples" = ["tls/client.key"]))]
    pub key: Option<PathBuf>,
    /// Refuse to talk without TLS.
    #[schemars(schema_with = "schema::truth", extend("default" = false))]
    pub required: bool,
}

/// The agents for clients of the Synadia Agent Protocol for NATS.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct AgentProtocolConfig {
    /// Whose agents they are, as those clients see it: lower-case letters, digits, `_` and `-`.
    #[schemars(schema_with = "schema::owner", extend("examples" = ["acme"]))]
    pub owner: String,
}

/// One agent.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct AgentConfig {
    /// The name of the agent on the mesh, unique in this file.
    #[schemars(
        schema_with = "schema::filled",
        extend("maxLength" = 256, "examples" = ["weather"], "x-aliases" = ["agent_name"])
    )]
    pub name: String,
    /// Where the agent listens: scheme, host, port, and the path above its card if there is one. `{port}`
    /// in it is the `port`.
    #[schemars(
        schema_with = "schema::http_url",
        extend("examples" = ["http://127.0.0.1:9000"], "x-aliases" = ["a2a_server_url"])
    )]
    pub url: Url,
    /// Program and arguments that start the agent, as one line or as a list; no shell is used unless
    /// `shell` says so. Without it the bridge attaches to an agent that runs already.
    #[schemars(
        schema_with = "schema::command",
        extend("examples" = ["python -m weather_agent --port 9000"], "x-aliases" = ["a2a_server_command"])
    )]
    pub command: Option<Vec<String>>,
    /// Give `command`, one line, to `/bin/sh -c`.
    #[schemars(schema_with = "schema::truth", extend("default" = false))]
    pub shell: bool,
    /// The port of a launched agent: `auto` finds a free one at every start. It stands for `{port}` in
    /// `command`, `env` and `url`.
    #[schemars(schema_with = "schema::port", extend("examples" = [9000]))]
    pub port: Option<Port>,
    /// Talk to a launched agent only if the port of `url` was free before the start and is listened to
    /// by the agent's own processes after it. Set it to false where others listen for the agent, as
    /// with `docker run -p`.
    #[schemars(schema_with = "schema::truth", extend("default" = true))]
    pub verify_port: bool,
    /// Folder in which `command` runs, relative to the folder of this file.
    #[schemars(schema_with = "schema::path", extend("examples" = ["agents/weather"]))]
    pub working_dir: Option<PathBuf>,
    /// Environment variables of `command`. Of the bridge's own it gets PATH, HOME, USER, LANG, LC_*, TZ
    /// and TMPDIR only.
    #[schemars(schema_with = "schema::env", extend("default" = {}))]
    pub env: BTreeMap<String, SecretString>,
    /// File with further variables of `command`, one `NAME=value` a line; `env` goes before it. Relative
    /// to the folder of this file.
    #[schemars(schema_with = "schema::path", extend("examples" = ["weather.env"]))]
    pub env_file: Option<PathBuf>,
    /// How long a launched agent may take until its card is served.
    #[schemars(
        schema_with = "schema::duration",
        extend("default" = "30s", "x-aliases" = ["a2a_server_startup_timeout"])
    )]
    pub startup_timeout: Duration,
    /// How a launched agent is looked at until its card is there, for `startup_timeout` at the most.
    #[schemars(extend("default" = {}))]
    pub startup: Startup,
    /// When an agent that runs loses its place on the mesh: its card, read every `card_refresh`, cannot
    /// be read or used. It comes back with the first good card.
    #[schemars(extend("default" = {}))]
    pub readiness: Readiness,
    /// When a launched agent is ended and started again: it does not answer at all, and has no call in
    /// flight that would explain it. One that was stopped (SIGSTOP) is started again in any case.
    #[schemars(extend("default" = {}))]
    pub liveness: Liveness,
    /// When a launched agent that ended by itself is started again: `always`, `on-failure` (any end but
    /// exit code 0) or `never`. The pause is 1 s at first and doubles up to 60 s.
    #[schemars(schema_with = "schema::restart", extend("default" = "on-failure"))]
    pub restart: Restart,
    /// `false` is another way to say `restart: never`.
    #[schemars(
        schema_with = "schema::truth",
        extend("default" = true, "x-aliases" = ["a2a_server_restart_on_crash"])
    )]
    pub restart_on_crash: bool,
    /// Restarts within `restart_window` after which the agent counts as failed and is left alone.
    #[schemars(schema_with = "schema::count", extend("default" = 15))]
    pub max_restarts: usize,
    /// The time over which `max_restarts` counts.
    #[schemars(schema_with = "schema::duration", extend("default" = "15m"))]
    pub restart_window: Duration,
    /// After this time without trouble the pauses between restarts begin small again.
    #[schemars(schema_with = "schema::duration", extend("default" = "60s"))]
    pub stable_after: Duration,
    /// The signal that asks a launched agent to end; all its processes get it.
    #[schemars(schema_with = "schema::signal", extend("default" = "SIGTERM"))]
    pub stop_signal: Signal,
    /// How long a launched agent may take to end before it gets SIGKILL.
    #[schemars(schema_with = "schema::duration", extend("default" = "10s"))]
    pub stop_grace: Duration,
    /// Token sent as `Authorization: Bearer …`, to the origin of `url` and to `allowed_hosts` only.
    #[schemars(
        schema_with = "schema::optional_token",
        extend("examples" = ["${WEATHER_TOKEN}"], "x-aliases" = ["a2a_bearer_token"])
    )]
    pub bearer_token: Option<SecretString>,
    /// Other ways to authenticate, of which the card chooses: `bearer`, `api_key` (`name`, `in`, `value`),
    /// `basic` (`user`, `password`) or `oauth2` (`token_url`, `client_id`, `client_secret`, `scopes`),
    /// each with the name of the card's `scheme` if the kind does not tell. With `[]` it does not
    /// matter what the card asks for.
    #[schemars(
        schema_with = "schema::ways",
        extend("examples" = [[{ "api_key": { "name": "X-API-Key", "value": "${WEATHER_KEY}" } }]])
    )]
    pub auth: Option<Vec<Auth>>,
    /// Ways to authenticate for the card alone, if not those for calls.
    #[schemars(
        schema_with = "schema::ways",
        extend("examples" = [[{ "basic": { "user": "bridge", "password": "${CARD_PASSWORD}" } }]])
    )]
    pub card_auth: Option<Vec<Auth>>,
    /// TLS with own certificates. The paths are relative to the folder of this file.
    pub tls: Option<AgentTls>,
    /// Further headers of every request to the origin of `url` and to `allowed_hosts`.
    #[schemars(schema_with = "schema::headers", extend("default" = {}))]
    pub headers: BTreeMap<String, SecretString>,
    /// The version of A2A to speak (`0.1`, `0.2`, `0.3` or `1.0`), if card and probe get it wrong.
    #[schemars(schema_with = "schema::protocol", extend("examples" = ["0.3"]))]
    pub protocol: Option<Protocol>,
    /// The binding to use, `jsonrpc` or `rest`, if not the one that the card prefers.
    #[schemars(schema_with = "schema::binding", extend("examples" = ["jsonrpc"]))]
    pub binding: Option<Binding>,
    /// Call the agent at the host and port that its card names, not those of `url`. Credentials go
    /// there only if `allowed_hosts` has them.
    #[schemars(schema_with = "schema::truth", extend("default" = false))]
    pub use_card_url: bool,
    /// Other hosts, as `host` or `host:port`, at which the card may place the agent. The agent's
    /// credentials go there, too.
    #[schemars(schema_with = "schema::filled_list", extend("default" = []))]
    pub allowed_hosts: Vec<String>,
    /// Path of the card, instead of the two well-known ones.
    #[schemars(schema_with = "schema::card_path", extend("examples" = ["/agent/card.json"]))]
    pub card_path: Option<String>,
    /// The card itself, for an agent that serves none.
    #[schemars(
        schema_with = "schema::any_object",
        extend("examples" = [{ "name": "Weather", "skills": [{ "id": "forecast", "name": "Forecast" }] }])
    )]
    pub card: Option<serde_json::Value>,
    /// How often the card is read again.
    #[schemars(schema_with = "schema::duration", extend("default" = "60s"))]
    pub card_refresh: Duration,
    /// Which skills are published, and under which names. Skills are named by id or by name.
    #[schemars(extend("default" = {}))]
    pub skills: Skills,
    /// Limit of a whole call in reply mode `final`.
    #[schemars(schema_with = "schema::duration", extend("default" = "300s"))]
    pub request_timeout: Duration,
    /// Limit between two events of a stream.
    #[schemars(schema_with = "schema::duration", extend("default" = "300s"))]
    pub stream_idle_timeout: Duration,
    /// Limit of a submitted task.
    #[schemars(schema_with = "schema::duration", extend("default" = "24h"))]
    pub task_timeout: Duration,
    /// How long a task and its result can be looked up after its end.
    #[schemars(schema_with = "schema::duration", extend("default" = "24h"))]
    pub task_ttl: Duration,
    /// After how much silence a stream says that it is still there.
    #[schemars(schema_with = "schema::duration", extend("default" = "15s"))]
    pub stream_keepalive: Duration,
    /// Use the agent's stream for reply mode `final` too: the task is known early, and can be cancelled.
    #[schemars(schema_with = "schema::truth", extend("default" = false))]
    pub prefer_stream: bool,
    /// How long a question of the agent can be answered.
    #[schemars(schema_with = "schema::duration", extend("default" = "300s"))]
    pub input_required_ttl: Duration,
    /// Calls at the same time, 1 to 100000; more are answered with `busy`.
    #[schemars(schema_with = "schema::count", extend("default" = 256))]
    pub max_in_flight: usize,
    /// Largest answer taken from the agent, 1KiB to 1GiB.
    #[schemars(schema_with = "schema::size", extend("default" = "16MiB"))]
    pub max_response_size: u64,
    /// Names of artifacts that belong to the answer; `*` matches anything.
    #[schemars(schema_with = "schema::filled_list", extend("default" = ["*"]))]
    pub answer_artifacts: Vec<String>,
    /// Names of artifacts that are notices and stay out of `message`; `*` matches anything.
    #[schemars(
        schema_with = "schema::filled_list",
        extend("default" = ["execution_plan_*", "tool_notification_*", "tool_result"])
    )]
    pub notice_artifacts: Vec<String>,
    /// Changes when anything about this agent in the file does.
    #[schemars(skip)]
    pub digest: Digest,
}

/// A version of A2A.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// v0.1.
    V01,
    /// v0.2.
    V02,
    /// v0.3.
    V03,
    /// v1.0.
    V1,
}

/// How A2A is carried over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// JSON-RPC.
    JsonRpc,
    /// REST, which A2A calls HTTP+JSON.
    Rest,
}

/// Which skills are published, and under which names. Skills are named by id or by name.
#[derive(Debug, Clone, Default, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Skills {
    /// Publish these only; empty means all. An agent has at most 500 actions: of more skills the first
    /// are published.
    #[schemars(schema_with = "schema::filled_list", extend("default" = []))]
    pub allow: Vec<String>,
    /// Do not publish these.
    #[schemars(schema_with = "schema::filled_list", extend("default" = []))]
    pub deny: Vec<String>,
    /// Publish a skill under another action name, as in `{ forecast: weather_forecast }`.
    #[schemars(schema_with = "schema::rename", extend("default" = {}))]
    pub rename: BTreeMap<String, String>,
}
