//! What is wrong with an agent, and what to do about it, in words for somebody woken up at night.

use crate::text::duration;
use crate::text::error_chain;
use std::net::SocketAddr;
use std::time::Duration;

use crate::a2a::card::CardError;
use crate::a2a::client::ClientError;
use crate::config;
use crate::process::child::{Exit, SpawnError};

const KILLED: &str = "somebody has killed it, most often the system for lack of memory: see `dmesg`, and the memory \
                      limit of the service or container";

/// A reason and a way out of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trouble {
    pub(super) text: String,
    pub(super) advice: String,
}

/// What a probe found instead of a card.
#[derive(Debug)]
pub(super) enum ProbeError {
    /// Somebody else listens on the agent's port.
    Foreign {
        port: u16,
        process: Option<(i32, String)>,
    },
    /// A launched agent does not listen on its port; this is where it does listen.
    NotListening {
        port: u16,
        instead: Vec<SocketAddr>,
    },
    Card(CardError),
}

impl ProbeError {
    /// Whether there is no agent at all, rather than one without a usable card.
    pub(super) fn is_nobody_there(&self) -> bool {
        match self {
            Self::Foreign { .. } | Self::NotListening { .. } => true,
            Self::Card(error) => error.is_nobody_there(),
        }
    }

    /// Whether somebody is there and says nothing: hung, or busy.
    pub(super) fn is_silence(&self) -> bool {
        match self {
            Self::Foreign { .. } | Self::NotListening { .. } => false,
            Self::Card(CardError::Timeout { .. }) => true,
            // Without an access token nothing was asked.
            Self::Card(CardError::Fetch { source, .. }) if matches!(**source, ClientError::Token(_)) => false,
            Self::Card(error @ CardError::Fetch { .. }) => !error.is_nobody_there(),
            Self::Card(_) => false,
        }
    }
}

impl Trouble {
    pub(super) fn spawn(error: &SpawnError) -> Self {
        let advice = match error {
            SpawnError::NotFound { program } if program.contains('/') => {
                "it is looked for from `working_dir`; correct the path in `command`, or give the full one"
            }
            SpawnError::NotFound { .. } => {
                "install it, or give its full path in `command`; it is looked for on the PATH of the bridge, \
                 or on the one in `env`"
            }
            SpawnError::Denied { .. } => "make it executable (`chmod +x`), and check who the bridge runs as",
            SpawnError::NoSuchDir(_) => "make that folder, or correct `working_dir`",
            SpawnError::Empty | SpawnError::Other { .. } => "check `command`, `working_dir` and `env`",
        };
        Self { text: error_chain(error), advice: advice.into() }
    }

    pub(super) fn port_taken(
        port: u16,
        process: Option<&(i32, String)>,
        config: &config::AgentConfig,
    ) -> Self {
        let (who, first) = match process {
            Some((pid, name)) => (format!("pid {pid} ({name})"), format!("end it (`kill {pid}`)")),
            None => (
                "a process of another user".to_owned(),
                format!("see who it is (`ss -ltnp 'sport = :{port}'`, as root)"),
            ),
        };
        let launched = "or give the agent another port: `port: auto` with `{port}` in `command` and `url` finds a free one; \
                        if others listen for it, as with `docker run -p`, set `verify_port: false`";
        let advice = if config.command.is_some() { format!("{first}, {launched}") } else { first };
        Self { text: format!("port {port} in use by {who}"), advice }
    }

    /// It ended before its card was seen.
    pub(super) fn exit_at_start(exit: Exit, after: Duration) -> Self {
        let advice = if exit.is_success() {
            "let the command stay in the foreground: the bridge takes the end of its process for the end of the agent"
        } else if exit.is_killed() {
            KILLED
        } else if matches!(exit.code(), Some(126 | 127)) {
            "a shell ends so when it cannot find (127) or run (126) a program: its last output names it; give its full \
             path, or set PATH in `env`"
        } else {
            "its last output says why; run its `command` by hand, in the same folder and with the same variables, to \
             see more"
        };
        Self {
            text: format!("the agent {exit} after {}, before it showed its card", duration(after)),
            advice: advice.into(),
        }
    }

    pub(super) fn exit(exit: Exit, after: Duration) -> Self {
        let why = if exit.is_killed() { KILLED } else { "its last output says why" };
        Self {
            text: format!("the agent {exit} after {}", duration(after)),
            advice: format!("{why}; it is started again"),
        }
    }

    /// Nothing usable was seen until the limit.
    pub(super) fn slow_start(error: &ProbeError, config: &config::AgentConfig) -> Self {
        let seen = Self::probe(error, config);
        let limit = duration(config.startup_timeout);
        let advice = if error.is_nobody_there() || error.is_silence() {
            match error {
                ProbeError::NotListening { instead, .. } if !instead.is_empty() => seen.advice,
                _ => format!(
                    "if it needs more time, raise `startup_timeout` (now {limit}); if not, its last output says what it waits for"
                ),
            }
        } else {
            seen.advice
        };
        Self { text: format!("not ready within {limit} (`startup_timeout`): {}", seen.text), advice }
    }

    pub(super) fn probe(error: &ProbeError, config: &config::AgentConfig) -> Self {
        match error {
            ProbeError::Foreign { port, process } => Self::port_taken(*port, process.as_ref(), config),
            ProbeError::NotListening { port, instead } if instead.is_empty() => Self {
                text: format!("the agent does not listen on port {port}"),
                advice: format!(
                    "see in its last output what it waits for, and whether it knows that its port is {port}"
                ),
            },
            ProbeError::NotListening { port, instead } => Self::elsewhere(*port, instead, config),
            ProbeError::Card(error) => Self::card(error, config),
        }
    }

    /// It listens, but not where it is looked for.
    fn elsewhere(port: u16, instead: &[SocketAddr], config: &config::AgentConfig) -> Self {
        let host = config.url.host_str().unwrap_or_default();
        if let Some(address) = instead.iter().find(|address| address.port() == port) {
            return Self {
                text: format!("the agent listens on {address}, and not on {host} as `url` says"),
                advice: format!(
                    "tell it in `command` or `env` to listen on {host}, or correct `url` to where it listens"
                ),
            };
        }
        let mut ports: Vec<u16> = instead.iter().map(SocketAddr::port).collect();
        ports.dedup();
        let word = if ports.len() == 1 { "port" } else { "ports" };
        let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
        let ports = ports.join(", ");
        Self {
            text: format!("the agent listens on {word} {ports}, and not on {port} as `url` says"),
            advice: format!(
                "correct `url` or `port`, or tell it in `command` (`{{port}}`) or `env` to use {port}"
            ),
        }
    }

    fn card(error: &CardError, config: &config::AgentConfig) -> Self {
        let text = error_chain(error);
        let refused = ["answers 401", "answers 403"].iter().any(|words| text.contains(words));
        let has_credentials = config.bearer_token.is_some()
            || !config.headers.is_empty()
            || config.auth.is_some()
            || config.card_auth.is_some();
        let advice = match error {
            CardError::Status(_) if refused && has_credentials => {
                "the agent does not take the credentials: correct `bearer_token`, `auth`, `card_auth` or `headers`".to_owned()
            }
            CardError::Status(_) if refused => {
                "the agent wants credentials: give them in `bearer_token`, `auth`, `card_auth` or `headers`".to_owned()
            }
            CardError::Status(_) => {
                "somebody answers there, but without a card: set `card_path` to where the agent serves it, \
                 or give the card itself under `card`"
                    .to_owned()
            }
            CardError::Invalid(_) => format!(
                "look at what the agent serves (`curl {}`), and correct it there, or set `card_path` or `card`",
                card_url(config)
            ),
            CardError::TooLarge { .. } => {
                "have the agent serve a smaller card, or give a short one under `card`".to_owned()
            }
            CardError::Unsupported(_) => "have the agent offer JSON-RPC or REST as well".to_owned(),
            CardError::Auth(_) => "give the agent's credentials under `auth`".to_owned(),
            CardError::Fetch { source, .. } if matches!(**source, ClientError::Token(_)) => {
                "see whether the token endpoint answers, and correct `oauth2` under `auth`".to_owned()
            }
            CardError::Fetch { source, .. } if matches!(**source, ClientError::Encoded { .. }) => {
                "have the agent, or what stands before it, honour `Accept-Encoding: identity`".to_owned()
            }
            CardError::Timeout { .. } => {
                "the agent takes connections and does not answer: see its last output".to_owned()
            }
            _ if config.command.is_none() => {
                format!("start the agent, or correct `url` (now {})", config.url)
            }
            _ => "see its last output".to_owned(),
        };
        Self { text, advice }
    }

    /// An order, or the end of the bridge.
    pub(super) fn ending() -> Self {
        Self {
            text: "being ended on request".into(),
            advice: "wait for it; `stop_grace` limits how long it takes".into(),
        }
    }

    pub(super) fn stopped_on_request(name: &str) -> Self {
        Self {
            text: "stopped on request".into(),
            advice: format!("`a2a-bridge agents start {name}` starts it"),
        }
    }

    /// After a reload the process of the old settings still serves calls.
    pub(super) fn predecessor() -> Self {
        Self {
            text: "waiting for the process of the previous configuration to exit".into(),
            advice:
                "its calls in flight have `shutdown_grace` to finish, and then it has `stop_grace` to exit"
                    .into(),
        }
    }

    /// It was stopped by SIGSTOP.
    pub(super) fn stopped(pid: i32) -> Self {
        Self {
            text: format!("the agent's process {pid} is stopped (SIGSTOP)"),
            advice: "it is ended and started again, unless SIGCONT comes first".into(),
        }
    }

    pub(super) fn hung(error: &ProbeError, failures: usize, config: &config::AgentConfig) -> Self {
        Self {
            text: format!(
                "the agent did not answer {failures} times in a row (`liveness`): {}",
                Self::probe(error, config).text
            ),
            advice: "it is ended and started again; if it is only slow, raise `liveness.timeout` or `liveness.failures`".into(),
        }
    }

    /// It is left alone after too many restarts.
    pub(super) fn crash_loop(self, name: &str, config: &config::AgentConfig) -> Self {
        Self {
            text: format!(
                "started again {} times within {} (`max_restarts`, `restart_window`) and given up; at last: {}",
                config.max_restarts,
                duration(config.restart_window),
                self.text
            ),
            advice: format!("{}; then `a2a-bridge agents start {name}`", without_restart(&self.advice)),
        }
    }

    /// It is left alone because the settings say so.
    pub(super) fn left_alone(self, exit: Option<Exit>, name: &str, config: &config::AgentConfig) -> Self {
        let why = match config.restart {
            config::Restart::OnFailure => "`restart: on-failure` takes exit code 0 for a wanted end",
            config::Restart::Always | config::Restart::Never => "`restart` is `never`",
        };
        let start = format!("`a2a-bridge agents start {name}` starts it");
        let advice = if exit.is_some_and(Exit::is_success) {
            format!("{start}; `restart: always` keeps it running")
        } else {
            format!("{}; then {start}", without_restart(&self.advice))
        };
        Self { text: format!("{}; not started again: {why}", self.text), advice }
    }
}

/// Advice for an agent that is not started again.
fn without_restart(advice: &str) -> &str {
    advice.split("; it is started again").next().unwrap_or(advice)
}

fn card_url(config: &config::AgentConfig) -> String {
    let base = config.url.as_str().trim_end_matches('/');
    match &config.card_path {
        Some(path) => format!("{base}{path}"),
        None => format!("{base}/.well-known/agent-card.json"),
    }
}
