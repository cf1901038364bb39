//! What is wrong with an agent and what an operator can do about it.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use super::probe::ProbeError;
use crate::a2a::card::CardError;
use crate::a2a::choose::ProbeFailure;
use crate::a2a::client::ClientError;
use crate::config;
use crate::process::child::{Exit, SpawnError};
use crate::text::{duration, error_chain, seconds};

const KILLED: &str = "another process killed it, most often the kernel because memory ran out: check `dmesg` and the \
                      memory limit of the service or container";

const CHECK_OUTPUT: &str = "check its last output";
const TOKEN_ADVICE: &str = "check that the token endpoint responds, and correct `oauth2` under `auth`";
const RESTARTING: &str = "; the bridge restarts it";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Diagnosis {
    pub(crate) text: String,
    pub(crate) advice: String,
    /// The text in a few words, for a table.
    pub(crate) short: String,
}

impl Diagnosis {
    /// A problem whose text is short already.
    pub(crate) fn new(text: impl Into<String>, advice: impl Into<String>) -> Self {
        let (text, advice) = (text.into(), advice.into());
        Self { short: text.clone(), text, advice }
    }

    fn shortly(self, short: impl Into<String>) -> Self {
        Self { short: short.into(), ..self }
    }

    /// Adds the line of output that most likely tells why the process exited.
    pub(super) fn with_last_line(self, line: &str) -> Self {
        let short = format!("{}: {line}", self.short);
        self.shortly(short)
    }

    pub(super) fn spawn(error: &SpawnError) -> Self {
        let advice = match error {
            SpawnError::NotFound { program } if program.contains('/') => {
                "correct the path in `command`; it is resolved from `working_dir`, or else from the directory in which the \
                 bridge was started"
            }
            SpawnError::NotFound { .. } => {
                "install it, or use its full path in `command`; the bridge searches PATH from `env` if set, otherwise its own PATH"
            }
            SpawnError::Denied { .. } => {
                "make it executable (`chmod +x`), and check which user runs the bridge"
            }
            SpawnError::NoSuchDir(_) => "create the directory, or correct `working_dir`",
            SpawnError::Account(_) => "correct `user` and `group`",
            SpawnError::User { .. } => {
                "run the bridge as root, as only root may start processes of other users (see \"Launched agents\" on the \
                 security page), or remove `user` and `group`"
            }
            SpawnError::Capabilities { .. } => {
                "run the bridge without ambient capabilities (`AmbientCapabilities` of systemd)"
            }
            SpawnError::Limits { .. } => "correct `limits`",
            SpawnError::Empty | SpawnError::Other { .. } => "check `command`, `working_dir` and `env`",
        };
        Self::new(error_chain(error), advice)
    }

    pub(super) fn port_taken(
        port: u16,
        process: Option<&(i32, String)>,
        config: &config::AgentConfig,
    ) -> Self {
        let (who, first) = match process {
            Some((pid, name)) => (format!("pid {pid} ({name})"), format!("stop that process (`kill {pid}`)")),
            None => (
                "a process of another user".to_owned(),
                format!("find that process (`ss -ltnp 'sport = :{port}'`, as root)"),
            ),
        };
        let launched = "or use another port: `port: auto` with `{port}` in `command` and `url` finds a free one; \
                        if another program listens on behalf of the agent, as with `docker run -p`, set `verify_port: false`";
        let advice = if config.command.is_some() { format!("{first}, {launched}") } else { first };
        Self::new(format!("port {port} in use by {who}"), advice)
    }

    /// The agent exited before its first card.
    pub(super) fn exit_at_start(exit: Exit, after: Duration) -> Self {
        let advice = if exit.is_success() {
            "keep the command in the foreground: when its process exits, the agent counts as exited"
        } else if exit.is_killed() {
            KILLED
        } else if matches!(exit.code(), Some(126 | 127)) {
            "a shell exits with 127 if it cannot find a program and with 126 if it cannot run it; the last output names the \
             program: use its full path, or set PATH in `env`"
        } else {
            "check its last output, or run its `command` by hand in the same directory with the same environment"
        };
        Self::new(format!("the agent {exit} after {}, before it served a card", seconds(after)), advice)
            .shortly(short_exit(exit))
    }

    pub(super) fn exit(exit: Exit, after: Duration) -> Self {
        let why = if exit.is_killed() { KILLED } else { CHECK_OUTPUT };
        Self::new(format!("the agent {exit} after {}", seconds(after)), format!("{why}{RESTARTING}"))
            .shortly(short_exit(exit))
    }

    pub(super) fn slow_start(error: &ProbeError, config: &config::AgentConfig) -> Self {
        let seen = Self::probe(error, config);
        let limit = duration(config.startup_timeout);
        let advice = if error.is_unreachable() || error.is_timeout() {
            match error {
                ProbeError::NotListening { instead, .. } if !instead.is_empty() => seen.advice,
                _ => format!(
                    "raise `startup_timeout` (now {limit}) if it needs more time; otherwise {CHECK_OUTPUT}"
                ),
            }
        } else {
            seen.advice
        };
        Self::new(format!("not ready within {limit} (`startup_timeout`): {}", seen.text), advice)
            .shortly(format!("not ready after {limit}: {}", seen.short))
    }

    pub(super) fn probe(error: &ProbeError, config: &config::AgentConfig) -> Self {
        match error {
            ProbeError::Foreign { port, process } => Self::port_taken(*port, process.as_ref(), config),
            ProbeError::NotListening { port, instead } if instead.is_empty() => Self::new(
                format!("the agent does not listen on port {port}"),
                format!("{CHECK_OUTPUT}, and check that it is configured to listen on port {port}"),
            )
            .shortly(format!("not listening on port {port}")),
            ProbeError::NotListening { port, instead } => Self::wrong_address(*port, instead, config),
            ProbeError::Card(error) => Self::card(error, config),
        }
    }

    fn wrong_address(port: u16, instead: &[SocketAddr], config: &config::AgentConfig) -> Self {
        let host = config.url.host_str().unwrap_or_default();
        if let Some(address) = instead.iter().find(|address| address.port() == port) {
            return Self::new(
                format!("the agent listens on {address} instead of {host}, the host in `url`"),
                format!("make it listen on {host} (`command`, `env`), or correct `url`"),
            )
            .shortly(format!("listens on {address} instead of {host}"));
        }
        let mut ports: Vec<u16> = instead.iter().map(SocketAddr::port).collect();
        ports.dedup();
        let word = if ports.len() == 1 { "port" } else { "ports" };
        let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
        let ports = ports.join(", ");
        let advice = format!(
            "correct `url` or `port`, or make it listen on {port} (`{{port}}` in `command`, or `env`)"
        );
        Self::new(format!("the agent listens on {word} {ports} instead of {port}, the port in `url`"), advice)
            .shortly(format!("listens on {word} {ports} instead of {port}"))
    }

    /// The agent has a usable card, but its responses to probes show that calls fail, or may fail.
    pub(crate) fn unconfirmed(failure: ProbeFailure, config: &config::AgentConfig) -> Self {
        let advice = match failure {
            ProbeFailure::Rejected(_) if config.use_card_url => {
                "correct `bearer_token`, `auth` or `headers`; if the card names another host, add that to \
                 `allowed_hosts`, because other hosts get no credentials"
            }
            ProbeFailure::Rejected(_) if has_credentials(config) => {
                "correct `bearer_token`, `auth` or `headers`: check that the value is not empty, and that it is valid for \
                 this agent"
            }
            ProbeFailure::Rejected(_) => {
                "the agent requires credentials: set `bearer_token`, `auth` or `headers`"
            }
            ProbeFailure::NoToken => TOKEN_ADVICE,
            ProbeFailure::Status(500..) if config.command.is_none() => {
                "calls fail like this too, unless only probes do: check the agent's log where it runs"
            }
            ProbeFailure::Status(500..) => {
                "calls fail like this too, unless only probes do: check the agent's output (`a2a-bridge logs`)"
            }
            ProbeFailure::Status(_) | ProbeFailure::NotA2a => {
                "calls may fail: check that `url` and the address in the card are those of the A2A endpoint"
            }
            ProbeFailure::NoResponse => {
                "calls may fail: check that the agent is not busy or blocked, and that the address in its card is right"
            }
        };
        let short = match failure {
            ProbeFailure::Rejected(status) => format!("credentials rejected: HTTP {status}"),
            ProbeFailure::NoToken => "no access token".to_owned(),
            ProbeFailure::Status(status) => format!("A2A requests: HTTP {status}"),
            ProbeFailure::NotA2a => "responses are not A2A".to_owned(),
            ProbeFailure::NoResponse => "no response to A2A requests".to_owned(),
        };
        Self::new(failure.to_string(), advice).shortly(short)
    }

    pub(crate) fn card(error: &CardError, config: &config::AgentConfig) -> Self {
        if let CardError::NotCallable(failure) = error {
            return Self::unconfirmed(*failure, config);
        }
        let text = error_chain(error);
        let advice = match error {
            CardError::Status { status: 401 | 403, .. } if has_credentials(config) => {
                "the agent rejects the credentials: correct `bearer_token`, `auth`, `card_auth` or `headers`".to_owned()
            }
            CardError::Status { status: 401 | 403, .. } => {
                "the agent requires credentials: set `bearer_token`, `auth`, `card_auth` or `headers`".to_owned()
            }
            CardError::Status { status: 500.., .. } => {
                "check the agent's log for the error".to_owned()
            }
            CardError::Status { .. } => {
                "the server at `url` responds but serves no card: set `card_path` to the card's path, or put the card itself \
                 under `card`"
                    .to_owned()
            }
            CardError::Invalid(_) => format!(
                "check what the agent serves (`curl {}`) and correct it, or set `card_path` or `card`",
                card_url(config)
            ),
            CardError::TooLarge { .. } => {
                "make the agent serve a smaller card, or put a shorter one under `card`".to_owned()
            }
            CardError::Unsupported(_) => "make the agent offer JSON-RPC or REST".to_owned(),
            CardError::Auth(_) => "configure the agent's credentials under `auth`".to_owned(),
            CardError::Fetch { source, .. } if matches!(**source, ClientError::Token(_)) => {
                TOKEN_ADVICE.to_owned()
            }
            CardError::Fetch { source, .. } if matches!(**source, ClientError::Compressed { .. }) => {
                "make the agent, or the proxy in front of it, honor `Accept-Encoding: identity`".to_owned()
            }
            CardError::Timeout { .. } => {
                format!("the agent accepts connections but does not respond: {CHECK_OUTPUT}")
            }
            _ if config.command.is_none() => {
                format!("start the agent, or correct `url` (now {})", config.url)
            }
            _ => CHECK_OUTPUT.to_owned(),
        };
        let mut diagnosis = Self::new(text, advice);
        if let Some(short) = short_card_error(error, config) {
            diagnosis.short = short;
        }
        // `card_path` may contain a key.
        let secrets = config.secrets();
        secrets.redact(&mut diagnosis.text);
        secrets.redact(&mut diagnosis.advice);
        secrets.redact(&mut diagnosis.short);
        diagnosis
    }

    pub(super) fn stopping() -> Self {
        Self::new("stopping on request", "wait; the bridge kills the process after `stop_grace`")
    }

    pub(super) fn stopped_on_request(name: &str) -> Self {
        Self::new("stopped on request", format!("`a2a-bridge agents start {name}` starts it"))
    }

    /// After a reload, the process of the previous configuration still serves calls.
    pub(super) fn predecessor() -> Self {
        Self::new(
            "waiting for the process of the previous configuration to exit",
            "wait; its calls in flight may take `shutdown_grace`, and its exit `stop_grace`",
        )
        .shortly("waiting for the previous process to exit")
    }

    pub(super) fn suspended(pid: i32) -> Self {
        Self::new(
            format!("the agent's process {pid} is suspended (SIGSTOP)"),
            format!("resume it with SIGCONT (`kill -CONT {pid}`)"),
        )
        .shortly("suspended (SIGSTOP)")
    }

    pub(super) fn hung(error: &ProbeError, failures: usize, config: &config::AgentConfig) -> Self {
        let seen = Self::probe(error, config);
        Self::new(
            format!("the agent failed {failures} liveness checks in a row: {}", seen.text),
            "if it is only slow, raise `liveness.timeout` or `liveness.failures`",
        )
        .shortly(format!("hung: {}", seen.short))
    }

    pub(super) fn crash_loop(self, name: &str, config: &config::AgentConfig) -> Self {
        let times = if config.max_restarts == 1 { "time" } else { "times" };
        let text = format!(
            "restarted {} {times} within {} (`max_restarts`, `restart_window`), giving up; last problem: {}",
            config.max_restarts,
            duration(config.restart_window),
            self.text
        );
        let advice = format!("{}; then `a2a-bridge agents start {name}`", without_restart(&self.advice));
        Self::new(text, advice).shortly(self.short)
    }

    pub(super) fn not_restarted(self, exit: Option<Exit>, name: &str, config: &config::AgentConfig) -> Self {
        let why = match config.restart {
            config::Restart::OnFailure => "`restart: on-failure` does not restart after exit code 0",
            config::Restart::Always | config::Restart::Never => "`restart` is `never`",
        };
        let start = format!("`a2a-bridge agents start {name}` starts it");
        let advice = if exit.is_some_and(Exit::is_success) {
            format!("{start}; `restart: always` keeps it running")
        } else {
            format!("{}; then {start}", without_restart(&self.advice))
        };
        Self::new(format!("{}; not restarting: {why}", self.text), advice).shortly(self.short)
    }
}

fn short_exit(exit: Exit) -> String {
    match exit.code() {
        Some(code) => format!("exit {code}"),
        None => exit.to_string().trim_start_matches("was ").to_owned(),
    }
}

/// A card error in a few words; `None` if its text has only a few.
fn short_card_error(error: &CardError, config: &config::AgentConfig) -> Option<String> {
    let (host, port) = (config.url.host_str().unwrap_or_default(), config.url.port_or_known_default());
    let address = match port {
        Some(port) if matches!(host, "127.0.0.1" | "localhost" | "[::1]") => format!(":{port}"),
        Some(port) => format!("{host}:{port}"),
        None => host.to_owned(),
    };
    Some(match error {
        CardError::Fetch { source, .. } => match &**source {
            ClientError::Unreachable(cause) => match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(io::ErrorKind::ConnectionRefused) => format!("connection refused {address}"),
                Some(io::ErrorKind::TimedOut) => format!("connection timed out {address}"),
                _ => format!("cannot connect to {address}"),
            },
            ClientError::Token(_) => "no access token".to_owned(),
            _ => "card: the response is broken".to_owned(),
        },
        CardError::Timeout { limit, .. } => format!("card: no response within {}", duration(*limit)),
        CardError::TooLarge { .. } => "card: too large".to_owned(),
        CardError::NotListening { .. } => format!("not listening on {address}"),
        CardError::Status { status: status @ (401 | 403), .. } => {
            format!("card: credentials rejected: HTTP {status}")
        }
        CardError::Status { status, .. } => format!("card: HTTP {status}"),
        CardError::Invalid(why) => format!("card: {why}"),
        CardError::Unsupported(declared) => format!("card: only {declared}"),
        CardError::Auth(missing) => format!("credentials missing: {missing}"),
        CardError::NotCallable(_) => return None,
    })
}

fn has_credentials(config: &config::AgentConfig) -> bool {
    config.bearer_token.is_some()
        || !config.headers.is_empty()
        || config.auth.is_some()
        || config.card_auth.is_some()
}

/// Advice for an agent that is not restarted.
fn without_restart(advice: &str) -> &str {
    advice.strip_suffix(RESTARTING).unwrap_or(advice)
}

fn card_url(config: &config::AgentConfig) -> String {
    let base = config.url.as_str().trim_end_matches('/');
    let path = config.card_path.as_deref().unwrap_or("/.well-known/agent-card.json");
    format!("{base}{path}")
}
