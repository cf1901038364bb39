//! Every setting, declared once: key, aliases, kind, default, example, and the text that users read.
//!
//! To add a setting, add it here. [`settings!`] makes the struct, the reader and the JSON schema of it;
//! `config/full.yaml`, `config/schema.json` and the settings reference of the manual follow
//! (`UPDATE_SETTINGS=1 cargo test --lib config`).

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::agent::{Port, SettingsDigest};
use super::declare::{Field, Scope, Setting, joined, merged, object_schema, settings};
use super::kinds::{
    A2aVersion, AgentName, AgentUrl, AnyText, AuthMethods, AuthToken, Binding, BucketName, CallLogging,
    CallerBinding, CommandLine, Count, EnvFile, EnvVars, EventRecord, EventTypes, FileSize, GatewayRole,
    HeaderLines, HeaderName, HeaderValue, HistoryMode, HostPort, InboxPrefix, JetStreamMode, JsonObject,
    KeyPlace, MemorySize, OwnerName, PrincipalName, ProcessorCount, Renames, Restart, Secret, Servers,
    Sha256Digest, Size, StateReplicas, SubjectPatterns, SubjectPrefix, Text, TokenUrl, UrlPath, UserName,
    WebOrigin,
};
use super::node::Node;
use super::rules;

settings! {
    /// Configuration of one bridge.
    pub struct Config, check rules::config {
        nats: NatsConfig, default {};
        /// Agents to bridge; `[]` for none yet.
        agents: Vec<AgentConfig>;
        /// Grace period for calls in flight after SIGTERM or Ctrl-C.
        shutdown_grace: Duration, default "8s";
        metrics: Option<MetricsConfig>;
        logging: Logging, default {};
        limits: BridgeLimits, default {};
        files: FilesConfig, default {};
        events: Option<EventsConfig>;
        gateway: Option<GatewayConfig>;
        + file: Option<PathBuf>;
    }

    /// HTTP endpoint with metrics for Prometheus and with the health checks `/healthz` and `/readyz`.
    pub(crate) struct MetricsConfig {
        /// Address and port to listen on.
        listen: SocketAddr, example "127.0.0.1:9464";
    }

    /// What the bridge logs, in addition to what `--log` selects.
    pub(crate) struct Logging {
        /// One line at level `info` for each call that has ended: `off` for none, `errors` for calls that failed, `all` for
        /// all. A line has the caller, the agent, the skill, the task id, the outcome, the duration and the sizes, but never what
        /// was said. At most 200 lines a second for each agent.
        calls: CallLogging, default "off";
    }

    /// Limits of the bridge itself. Each agent has limits of its own.
    pub(crate) struct BridgeLimits {
        /// Memory that the bridge may use, 64MiB to 1024GiB. By default, a quarter of the memory of the machine or
        /// of the cgroup of the bridge; on a small machine 256MiB, but at most half. When the calls of an agent reach its share, the bridge
        /// rejects more of them with `busy`; the calls of other agents continue.
        memory: Option<MemorySize>, example "1GiB";
    }

    /// Files in requests and replies. The bridge keeps large files in the object store of NATS, which needs JetStream.
    /// Without it, files must fit into a message.
    pub(crate) struct FilesConfig {
        /// Size limit of a file, 1KiB to 1024GiB.
        max_size: FileSize, default "100MiB";
        /// Size limit of all files of one request together, 1KiB to 1024GiB.
        max_request: FileSize, default "256MiB";
        /// Size limit of all files of one caller in the object store, 1KiB to 1024GiB.
        max_per_caller: FileSize, default "1GiB";
        /// Size limit of the object store, 1KiB to 1024GiB.
        max_total: FileSize, default "4GiB";
        /// Time for which a file is kept.
        ttl: Duration, default "24h";
        /// Other object stores of NATS from which callers may send files: `obj://bucket/name`. The bridge reads them for
        /// every caller. Its own bucket, `a2a_files` for the subject prefix `a2a`, is always allowed.
        allowed_buckets: Vec<BucketName>, default [];
        /// Hosts, as `host` or `host:port`, from which the bridge fetches files that a request refers to by URL. The agent
        /// fetches those of all other hosts itself. The bridge connects to an address in a private network only if this
        /// list has the address.
        fetch_hosts: Vec<HostPort>, default [];
    }

    /// The event log, in NATS JetStream: what was said in sessions, so that callers can read it again, and attach to calls that
    /// run. Without this key nothing is logged.
    pub(crate) struct EventsConfig {
        /// Calls to log: `sessions` for those with `meta.session_id`, `all` for all. A caller can ask for others with the header
        /// `A2A-Log: on`.
        record: EventRecord, default "sessions";
        /// Refuse calls that cannot be logged with `state_unavailable`, before the agent gets them. Otherwise they go on without
        /// the log, and their reply has the header `A2A-Log: failed`.
        required: bool, default false;
        /// Time for which messages, states, tool results, questions and answers are kept. Pieces of answers, plans and notices
        /// are kept for one hour. It applies when the bridge creates the stream.
        max_age: Duration, default "30d";
        /// Size limit of the log, 1KiB to 1024GiB; then the oldest events are removed. It applies when the bridge creates the
        /// stream.
        max_bytes: FileSize, default "10GiB";
        history: HistoryConfig, default {};
    }

    /// What an agent gets of a session when it takes part for the first time, or in the first call of a fork.
    pub(crate) struct HistoryConfig {
        /// `text` for a first part of the message that quotes the conversation, `data` for a data part, `none` for nothing.
        mode: HistoryMode, default "text";
        /// Number of messages, the last ones.
        messages: Count, default 50;
        /// Size limit of the quoted messages, 1KiB to 1GiB.
        bytes: Size, default "64KiB";
    }

    /// HTTP gateway to the agents, for `a2a-bridge gateway`; `run` serves it, too, if `listen` is set. A configuration with
    /// this mapping needs no `agents`.
    pub(crate) struct GatewayConfig, check rules::gateway {
        /// Address and port to listen on; `a2a-bridge gateway` listens on 127.0.0.1:8080 by default. Without `tokens`, it must
        /// be a loopback address.
        listen: Option<SocketAddr>, example "127.0.0.1:8080";
        /// Who may use the gateway: `name` of the principal, `sha256` of its token in hexadecimal digits, `role` (`caller` or
        /// `operator`), `agents` that it may use, and `rate` in requests a second. Without tokens, everyone on this machine is
        /// an operator.
        tokens: Vec<GatewayToken>, default [], example [{ "name": "alice", "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef" }];
        /// Origins of web pages, such as `https://app.example.org`, that may use the gateway from a browser. The gateway's own
        /// origin always may.
        allowed_origins: Vec<WebOrigin>, default [];
        tls: Option<GatewayTls>;
        /// One line at level `info` for each HTTP request: `off` for none, `errors` for requests that failed, `all` for all.
        access_log: CallLogging, default "off";
        limits: GatewayLimits, default {};
    }

    /// A token, and what its holder may do.
    pub(crate) struct GatewayToken {
        /// Name of the principal. Tasks, follow-ups and files belong to it. Several tokens may have the same name.
        name: PrincipalName, example "alice";
        /// SHA-256 of the token in hexadecimal digits: `printf %s "$TOKEN" | sha256sum`.
        sha256: Sha256Digest;
        /// `caller`, or `operator`, who may also start and stop agents, read their output, and read `/metrics`.
        role: GatewayRole, default "caller";
        /// Names of the agents that the principal may use; all if absent.
        agents: Option<Vec<AgentName>>, example ["weather"];
        /// Number of requests a second, 1 to 100000; unlimited if absent. Short bursts of as many requests at once are permitted.
        rate: Option<Count>, example 50;
    }

    /// Serve HTTPS. Paths are relative to the directory of the configuration file. A reload (SIGHUP) reads both files again.
    pub(crate) struct GatewayTls {
        /// PEM file with the certificate, followed by those of intermediate authorities.
        cert: PathBuf, example "tls/gateway.pem";
        /// PEM file with the private key.
        key: PathBuf, example "tls/gateway.key";
    }

    /// Limits of the gateway.
    pub(crate) struct GatewayLimits {
        /// Number of connections at the same time; more have to wait.
        connections: Count, default 16384;
        /// Number of event streams of one principal at the same time.
        streams: Count, default 256;
        /// Time within which a client has to send the head of a request, also on an idle connection.
        header_timeout: Duration, default "30s";
        /// Time within which a client has to send a JSON body, or the next part of a file, and has to read the next part of a
        /// response.
        body_timeout: Duration, default "30s";
        /// Time for which the gateway waits for the reply to a call. The limits of the agent apply first.
        call_timeout: Duration, default "1h";
    }

    /// Connection to NATS, and the subjects that the bridge uses there.
    pub(crate) struct NatsConfig, check rules::nats {
        /// NATS server. For several servers of one cluster, write a list, or put commas between them.
        url: Servers, default "nats://127.0.0.1:4222";
        /// Authenticate with a `.creds` file (JWT and nkey seed). The path is relative to the directory of the configuration file.
        credentials: Option<PathBuf>, example "bridge.creds";
        /// Authenticate with an nkey seed.
        nkey: Option<Secret<AuthToken>>, example "${NATS_NKEY_SEED}";
        /// Authenticate with a token.
        token: Option<Secret<Text>>, example "${NATS_TOKEN}";
        /// Authenticate with this user name and `password`.
        user: Option<Text>, example "bridge";
        /// Password of `user`.
        password: Option<Secret<AnyText>>, example "${NATS_PASSWORD}";
        tls: Option<TlsFiles>;
        /// Prefix of every subject of the bridge: tokens of letters, digits, `_` and `-`, with dots between them. The first
        /// token must not be `_INBOX` or `_R_`, below which callers wait for replies.
        subject_prefix: SubjectPrefix, default "a2a";
        /// Reply subjects to which the bridge sends replies; `*` matches one token, `>` all tokens that follow.
        reply_prefixes: SubjectPatterns, default ["_INBOX.>", "_R_.>"];
        /// Prefix of the subjects on which the bridge itself receives replies. With private inboxes, as in
        /// `deploy/nats-permissions.conf`, it is `_INBOX.bridge`.
        inbox_prefix: InboxPrefix, default "_INBOX";
        identity: IdentityOrOff, default {};
        agent_protocol: Option<AgentProtocolConfig>;
        jetstream: JetStreamConfig, default {};
    }

    /// TLS with certificates of your own. Paths are relative to the directory of the configuration file.
    pub(crate) struct TlsFiles, check rules::tls {
        /// PEM file with the certificate authorities to trust instead of the system's.
        ca: Option<PathBuf>, example "tls/ca.pem";
        /// PEM file with the client certificate; needs `key`.
        cert: Option<PathBuf>, example "tls/client.pem";
        /// PEM file with the private key of the client certificate; needs `cert`.
        key: Option<PathBuf>, example "tls/client.key";
        /// Refuse connections without TLS.
        required: bool, default false;
    }

    /// Who a caller of another NATS account is, as the NATS server says in `Nats-Request-Info`; `off` ignores what the
    /// server says. Tasks, follow-ups, sessions and idempotency keys belong to the caller that made them. All callers
    /// within the account of the bridge share one identity. A gateway names its callers itself, also with `off`.
    pub(crate) struct IdentityConfig {
        /// `user`: the account and, where the import of the caller's account has `share: true`, the user. `account`: the
        /// account only. `off`: all callers share one identity.
        bind: CallerBinding, default "user";
        /// Refuse callers without a verified identity with `forbidden`.
        required: bool, default false;
    }

    /// Offer the agents to clients of the Synadia Agent Protocol for NATS, too.
    pub(crate) struct AgentProtocolConfig {
        /// Owner of the agents, as those clients see it: lower-case letters, digits, `_` and `-`.
        owner: OwnerName, example "acme";
    }

    /// State that all replicas of the bridge share, in NATS JetStream (nats-server 2.11 or newer): open questions, submitted
    /// tasks, sessions and idempotency keys. It survives restarts of the bridge.
    pub(crate) struct JetStreamConfig {
        /// `auto` uses JetStream if the server has it, and otherwise keeps the state in memory. With `required`, the bridge
        /// does not start without JetStream, and refuses questions and submissions while JetStream is unavailable. `off`
        /// keeps the state in memory.
        mode: JetStreamMode, default "auto";
        /// Number of servers of a cluster that store the state: 1, 3 or 5. `auto` means 3, or 1 without a cluster.
        replicas: StateReplicas, default "auto";
    }

    /// One agent.
    pub struct AgentConfig, check rules::agent, then Self::complete {
        /// Name of the agent on NATS, unique in the configuration.
        name | agent_name: AgentName, example "weather";
        /// Base URL of the agent: scheme, host, port, and the path prefix, if any, in front of
        /// `/.well-known/agent-card.json`. `{port}` stands for `port`.
        url | a2a_server_url: AgentUrl, example "http://127.0.0.1:9000";
        /// Program and arguments that start the agent, as one line or as a list. The bridge runs them without
        /// a shell unless `shell` is true. Without `command`, the bridge attaches to an agent that is already
        /// running.
        command | a2a_server_command: Option<CommandLine>, example "python -m weather_agent --port 9000";
        /// Pass `command`, which must be one line, to `/bin/sh -c`.
        shell: bool, default false;
        /// Port of a launched agent; `auto` picks a free port at every start. It replaces `{port}` in `command`,
        /// `env` and `url`.
        port: Option<Port>, example 9000;
        /// Send requests to a launched agent only if the port of `url` was free before the start, and one of the
        /// agent's own processes listens on it afterwards. Set it to false if another process listens on
        /// behalf of the agent, as with `docker run -p`.
        verify_port: bool, default true;
        /// Working directory of `command`, relative to the directory of the configuration file.
        working_dir: Option<PathBuf>, example "agents/weather";
        /// Environment variables of `command`. From the environment of the bridge, it inherits only PATH, HOME,
        /// USER, LANG, LC_*, TZ and TMPDIR.
        env: EnvVars, default {};
        /// File with more environment variables of `command`, one `NAME=value` per line; `env` takes precedence.
        /// The path is relative to the directory of the configuration file.
        env_file: Option<EnvFile>, example "weather.env";
        /// User, by name or number, as which `command` runs; by default the user of the bridge. Only a bridge that runs
        /// as root can use this. HOME and USER are those of the user, and its groups apply.
        user: Option<Text>, example "weather";
        /// Group, by name or number, as which `command` runs; by default the group of `user`.
        group: Option<Text>, example "weather";
        limits: AgentLimits, default {};
        /// Time limit for a launched agent to serve its card.
        startup_timeout | a2a_server_startup_timeout: Duration, default "30s";
        startup: Startup, default {};
        readiness: Readiness, default {};
        liveness: Liveness, default {};
        /// When to restart a launched agent that exits on its own: `always`, `on-failure` (unless it exits with
        /// code 0) or `never`. The back-off starts at 1 s and doubles up to 60 s.
        restart: Restart, default "on-failure";
        /// `false` means the same as `restart: never`.
        restart_on_crash | a2a_server_restart_on_crash: bool, default true;
        /// Number of restarts within `restart_window` after which the agent counts as failed; the bridge does
        /// not restart it again.
        max_restarts: Count, default 15;
        /// Period over which `max_restarts` counts.
        restart_window: Duration, default "15m";
        /// Time that an agent must stay ready until the back-off starts at 1 s again.
        stable_after: Duration, default "60s";
        /// Signal that asks a launched agent to exit; all its processes receive it.
        stop_signal: Signal, default "SIGTERM";
        /// Grace period for a launched agent to exit before it receives SIGKILL.
        stop_grace: Duration, default "10s";
        /// Token to send as `Authorization: Bearer …`, only to the origin of `url` and to `allowed_hosts`.
        bearer_token | a2a_bearer_token: Option<Secret<AuthToken>>, example "${WEATHER_TOKEN}";
        /// Other authentication methods, from which the card chooses: `bearer`, `api_key` (`name`, `in`, `value`),
        /// `basic` (`user`, `password`) or `oauth2` (`token_url`, `client_id`, `client_secret`, `scopes`). With
        /// `scheme`, a method is only for the card's security scheme of that name. With `[]`, the bridge ignores
        /// what the card requires.
        auth: Option<AuthMethods>, example [{ "api_key": { "name": "X-API-Key", "value": "${WEATHER_KEY}" } }];
        /// Authentication methods for reading the card, if they differ from those for calls.
        card_auth: Option<AuthMethods>, example [{ "basic": { "user": "bridge", "password": "${CARD_PASSWORD}" } }];
        tls: Option<AgentTls>;
        /// More headers for every request to the origin of `url` and to `allowed_hosts`.
        headers: HeaderLines, default {};
        /// A2A version to use (`0.1`, `0.2`, `0.3` or `1.0`), if the bridge detects the wrong one.
        protocol: Option<A2aVersion>, example "0.3";
        /// Binding to use, `jsonrpc` or `rest`, instead of the one that the card prefers.
        binding: Option<Binding>, example "jsonrpc";
        /// Call the agent at the host and port that its card names instead of those in `url`. The bridge sends
        /// credentials there only if `allowed_hosts` lists that host.
        use_card_url: bool, default false;
        /// Other hosts, as `host` or `host:port`, that the card may name. The bridge sends the agent's credentials
        /// there, too.
        allowed_hosts: Vec<HostPort>, default [];
        /// Path of the card, instead of the two well-known paths.
        card_path: Option<UrlPath>, example "/agent/card.json";
        /// The card itself, for an agent that serves none.
        card: Option<JsonObject>,
            example { "name": "Weather", "skills": [{ "id": "forecast", "name": "Forecast" }] };
        /// Interval at which the bridge reads the card again.
        card_refresh: Duration, default "60s";
        skills: Skills, default {};
        /// Time limit of a whole call in reply mode `final`.
        request_timeout: Duration, default "300s";
        /// Time limit between two events of a stream.
        stream_idle_timeout: Duration, default "300s";
        /// Time limit of a call in the reply modes `stream` and `submit`.
        task_timeout: Duration, default "24h";
        /// Send the verified identity of the caller to the agent, as `caller` in the metadata of the message.
        forward_caller: bool, default false;
        /// Time for which a finished task and its result are kept.
        task_ttl: Duration, default "24h";
        /// Time without an event after which a stream sends a keep-alive.
        stream_keepalive: Duration, default "15s";
        /// Use the agent's stream in reply mode `final`, too. The bridge then learns the task id early, so that it
        /// can cancel the task if the call times out.
        prefer_stream: bool, default false;
        /// Time within which a caller can answer a question of the agent.
        input_required_ttl: Duration, default "300s";
        /// Maximum number of calls at the same time, 1 to 100000; the bridge rejects more with `busy`.
        max_in_flight: Count, default 256;
        /// Size limit of a response from the agent, 1KiB to 1GiB.
        max_response_size: Size, default "16MiB";
        /// Names of artifacts that are part of the answer; `*` matches any characters.
        answer_artifacts: Vec<Text>, default ["*"];
        /// Names of artifacts that are notices, which `message` leaves out; `*` matches any characters. They take
        /// precedence over `answer_artifacts`.
        notice_artifacts: Vec<Text>, default ["execution_plan_*", "tool_notification_*", "tool_result"];
        events: AgentEvents, default {};
        + digest: SettingsDigest;
    }

    /// How the event log shows what the agent says.
    pub(crate) struct AgentEvents {
        /// Event types of artifacts by name; `*` matches any characters, and the longest pattern that matches counts. With
        /// `agent_complete` an artifact is a part of the answer, and no event of its own. Common names have a type already.
        types: EventTypes, default {};
    }

    /// Limits of the processes of a launched agent, on Linux. If the system has delegated a cgroup (v2) to the bridge, they
    /// apply to all processes of the agent together, otherwise to each process.
    pub(crate) struct AgentLimits {
        /// Memory, 64MiB to 1024GiB. Allocations beyond it fail, or the kernel kills the agent.
        memory: Option<MemorySize>, example "512MiB";
        /// Number of processors, 0.01 to 1024. It needs a cgroup.
        cpu: Option<ProcessorCount>, example 1.5;
        /// Number of open files of each process.
        files: Option<Count>, example 4096;
        /// Number of processes and threads. Without a cgroup, it counts all those of `user`, and does not apply to root.
        processes: Option<Count>, example 200;
    }

    /// How the bridge polls a launched agent until it serves its card, for `startup_timeout` at most.
    pub(crate) struct Startup {
        /// Maximum poll interval; the first polls follow each other faster.
        interval: Duration, default "250ms";
        /// Time limit of one poll.
        timeout: Duration, default "5s";
    }

    /// Readiness check: the bridge reads the card every `card_refresh`. After `failures` failed reads in a row it
    /// unpublishes the skills; the next valid card publishes them again.
    pub(crate) struct Readiness {
        /// Time limit of one health check.
        timeout: Duration, default "10s";
        /// Number of failed reads in a row after which the bridge unpublishes the skills.
        failures: Count, default 3;
    }

    /// Liveness check for launched agents. The bridge restarts an agent that fails `failures` checks in a row.
    /// Timeouts do not count while a call is in flight. An agent that stays suspended (SIGSTOP) fails the check even
    /// then. `restart` and `max_restarts` apply.
    pub(crate) struct Liveness {
        /// Interval between two health checks.
        interval: Duration, default "10s";
        /// Time limit of one health check.
        timeout: Duration, default "5s";
        /// Number of failed checks in a row after which the bridge restarts the agent.
        failures: Count, default 3;
    }

    /// Which skills the bridge publishes, and under which names. Refer to a skill by its id or its name.
    pub(crate) struct Skills {
        /// Publish only these skills; `[]` means all. An agent has at most 500 actions: if it has more skills,
        /// the bridge publishes the first ones.
        allow: Vec<Text>, default [];
        /// Do not publish these skills.
        deny: Vec<Text>, default [];
        /// Publish skills under other action names, as in `{ forecast: weather_forecast }`.
        rename: Renames, default {};
    }

    /// TLS with certificates of your own. Paths are relative to the directory of the configuration file.
    pub(crate) struct AgentTls, check rules::tls {
        /// PEM file with the certificate authorities to trust instead of the system's.
        ca: Option<PathBuf>, example "tls/ca.pem";
        /// PEM file with the client certificate; needs `key`.
        cert: Option<PathBuf>, example "tls/client.pem";
        /// PEM file with the private key of the client certificate; needs `cert`.
        key: Option<PathBuf>, example "tls/client.key";
    }

    /// One authentication method: exactly one of `bearer`, `api_key`, `basic` and `oauth2`.
    pub(crate) struct Auth, check rules::auth {
        /// Name of the card's security scheme that this method is for; by default, every scheme of its kind.
        scheme: Option<Text>, example "corporate";
        /// Token to send as `Authorization: Bearer …`.
        bearer: Option<Secret<AuthToken>>, example "${TOKEN}";
        api_key: Option<ApiKey>;
        basic: Option<BasicAuth>;
        oauth2: Option<OAuth2>;
    }

    /// API key to send under a name.
    pub(crate) struct ApiKey {
        /// Name of the header, query parameter or cookie.
        name: HeaderName, example "X-API-Key";
        /// Where to send the key: `header`, `query` or `cookie`.
        place = "in": KeyPlace, default "header";
        /// The key.
        value: Secret<HeaderValue>, example "${API_KEY}";
    }

    /// User name and password.
    pub(crate) struct BasicAuth {
        /// User name; it must not contain a colon.
        user: UserName;
        /// Password.
        password: Secret<AnyText>;
    }

    /// OAuth2 client credentials.
    pub(crate) struct OAuth2 {
        /// URL of the token endpoint; its host may differ from the agent's.
        token_url: TokenUrl, example "https://login.example.org/token";
        /// Client id.
        client_id: Text;
        /// Client secret.
        client_secret: Secret<Text>, example "${CLIENT_SECRET}";
        /// Scopes to request.
        scopes: Vec<Text>, default [];
        /// Audience to request, if the server requires one.
        audience: Option<Text>;
    }
}

impl Default for GatewayConfig {
    fn default() -> Self {
        let mut problems = super::problems::Problems::new("", None);
        let empty = Node::from_json(json!({}), 0);
        Self::read(&empty, &mut Scope::root(&mut problems))
            .expect("every setting of the gateway has a default")
    }
}

impl Default for IdentityConfig {
    fn default() -> Self {
        Self { bind: CallerBinding::User, required: false }
    }
}

/// [`IdentityConfig`], or `off`.
pub(crate) enum IdentityOrOff {}

impl Setting for IdentityOrOff {
    type Value = IdentityConfig;
    const TYPE: &'static str = "a mapping or `off`";
    const FIELDS: Option<fn() -> Vec<Field>> = IdentityConfig::FIELDS;

    fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<IdentityConfig> {
        match node.text() {
            Some("off") => {
                IdentityConfig::read(&Node::from_json(json!({ "bind": "off" }), node.at.start), scope)
            }
            Some(_) => {
                scope.problems.add(node.at.start, "expected a mapping (`key: value`) or `off`");
                None
            }
            None => IdentityConfig::read(node, scope),
        }
    }

    fn schema() -> Value {
        merged(IdentityConfig::schema(), json!({ "type": ["object", "string"], "pattern": r"^off$|\$\{" }))
    }
}

/// The JSON Schema of a configuration file (draft 2020-12).
pub(crate) fn schema() -> Value {
    let head = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Configuration of a2a-bridge",
    });
    let mut schema = merged(head, Config::schema());
    // A gateway alone needs no agents.
    if let Some(object) = schema.as_object_mut() {
        object.remove("required");
        let either = ["agents", "gateway"].map(|key| json!({ "required": [key] }));
        object.insert("anyOf".to_owned(), json!(either));
    }
    schema
}

/// Every key, at any depth, with all its names.
pub(super) fn keys() -> Vec<&'static str> {
    fn collect(fields: Option<fn() -> Vec<Field>>, keys: &mut Vec<&'static str>) {
        for field in fields.map(|fields| fields()).unwrap_or_default() {
            keys.extend(field.names);
            collect(field.fields, keys);
        }
    }
    let mut keys = Vec::new();
    collect(Config::FIELDS, &mut keys);
    keys
}
