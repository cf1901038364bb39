//! The command line: arguments, commands, exit codes.
//!
//! Results go to stdout, everything else to stderr. Exit codes follow sysexits.h; see the constants below.
//!
//! `run`, `gateway` and `check` read the configuration. `agents`, `skills`, `call`, `task`, `files`, `sessions`, `card`, `logs` and `top` are ordinary NATS
//! clients: they use only the public protocol and work from any machine that reaches the server.

mod agents;
mod attach;
mod call;
mod card;
mod check;
mod client;
mod completion;
mod control;
mod discover;
mod files;
mod gateway;
mod health;
mod init;
mod local_time;
mod logs;
mod nats_args;
mod nats_context;
mod output;
mod plugin;
mod progress;
mod run;
mod sessions;
mod skills;
mod state;
mod systemd;
mod task;
mod terminal;
mod top;

use std::fmt::{self, Display};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use self::client::NoReply;
use self::output::{Colour, StdStream, print_json, println};
use crate::config::{self, Config};
use crate::demo_agent;
use crate::memory;
use crate::telemetry::{self, LogFormat, LogWriter};
use crate::text::error_chain;

/// The action failed, or a check found a problem.
const FAILED: u8 = 1;
const USAGE: u8 = 64;
/// NATS is not reachable, no bridge serves the agent or skill, or the bridge disappeared before it replied.
const UNAVAILABLE: u8 = 69;
const INTERNAL_ERROR: u8 = 70;
const INVALID_CONFIG: u8 = 78;
/// Ctrl-C, as shells report it.
const INTERRUPTED: u8 = 130;

/// Maximum number of threads for synchronous work: offloaded work, name resolution, files. Each keeps some of the memory
/// that it has freed.
const MAX_BLOCKING_THREADS: usize = 32;
/// How long an idle thread for synchronous work lives. The allocator cannot return memory that an idle thread has
/// allocated and another one has freed, so that each thread would hold a few large responses.
const THREAD_KEEP_ALIVE: Duration = Duration::from_millis(50);

const DETAILS: &str = "\
Examples:
  a2a-bridge init --from http://127.0.0.1:9000    # write a configuration for this agent
  a2a-bridge run                                  # publish its skills on NATS
  a2a-bridge agents                               # list the agents on NATS
  a2a-bridge call demo.echo 'hello'               # call a skill

Exit codes:
  0    success
  1    the action failed, the agent's question was not answered, or `check` found a problem
  64   invalid command line
  69   NATS is not reachable, no bridge serves the agent or skill, or the bridge disappeared
  70   internal error
  78   invalid configuration
  130  interrupted with Ctrl-C";

/// Publishes the skills of A2A agents as actions on NATS.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, arg_required_else_help = true, after_help = DETAILS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log filter with the syntax of RUST_LOG, such as `warn` or `info,a2a_bridge=debug`
    #[arg(long, global = true, value_name = "FILTER", env = "A2A_BRIDGE_LOG", help_heading = "Logging")]
    log: Option<String>,
    /// Log format
    #[arg(
        long,
        global = true,
        value_name = "FORMAT",
        env = "A2A_BRIDGE_LOG_FORMAT",
        default_value = "text",
        help_heading = "Logging"
    )]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the configured agents until SIGTERM or Ctrl-C
    Run(run::RunArgs),
    /// Serve the agents on NATS over HTTP until SIGTERM or Ctrl-C
    Gateway(gateway::GatewayArgs),
    /// Check the configuration, the connection to NATS and the agents
    Check(check::CheckArgs),
    /// Write a configuration file to start from
    Init(init::InitArgs),
    /// List, inspect and control agents
    Agents(agents::AgentsArgs),
    /// List the skills of the agents
    Skills(skills::SkillsArgs),
    /// Call a skill of an agent
    Call(Box<call::CallArgs>),
    /// Show a logged call from its beginning, or from a frame on
    Attach(attach::AttachArgs),
    /// Show, follow or cancel a task
    Task(task::TaskArgs),
    /// Upload, download, list and delete files
    Files(files::FilesArgs),
    /// List, show, replay and fork sessions in the event log
    Sessions(sessions::SessionsArgs),
    /// Show the card of an agent
    Card(card::CardArgs),
    /// Show the output of agents that the bridge launched
    Logs(logs::LogsArgs),
    /// Show the load of the agents: calls per second, latency, errors
    Top(top::TopArgs),
    /// Ask a running bridge on this machine whether it works
    Health(health::HealthArgs),
    /// Show the state that bridges share in JetStream
    State(state::StateArgs),
    /// Print the JSON schema of the configuration
    Schema,
    /// Print the plugin manifest
    Plugin,
    /// Print a shell completion script
    Completions {
        /// Shell to generate the script for
        shell: clap_complete::Shell,
    },
    /// Run the bundled A2A agent, for demos and tests
    DemoAgent(demo_agent::DemoAgentArgs),
}

/// The configuration that commands use if it exists and nothing else is chosen.
const DEFAULT_CONFIG: &str = "a2a-bridge.yaml";

#[derive(Debug, clap::Args)]
struct ConfigArgs {
    /// Configuration file
    #[arg(
        long,
        short,
        global = true,
        value_name = "FILE",
        env = "A2A_BRIDGE_CONFIG",
        default_value = DEFAULT_CONFIG
    )]
    config: PathBuf,
}

impl ConfigArgs {
    fn load(&self) -> CliResult<Config> {
        config::load(&self.config).map_err(|error| CliError::new(INVALID_CONFIG, error))
    }
}

type CliResult<T = ExitCode> = Result<T, CliError>;

#[derive(Debug)]
struct CliError {
    exit_code: u8,
    error: anyhow::Error,
    /// What the user can try next.
    hint: Option<String>,
}

impl CliError {
    fn new(exit_code: u8, error: impl Into<anyhow::Error>) -> Self {
        Self { exit_code, error: error.into(), hint: None }
    }

    fn msg(exit_code: u8, message: impl Display) -> Self {
        Self::new(exit_code, anyhow::anyhow!("{message}"))
    }

    fn internal(error: impl Into<anyhow::Error>) -> Self {
        Self::new(INTERNAL_ERROR, error)
    }

    fn context(self, what: impl Display) -> Self {
        Self { error: self.error.context(what.to_string()), ..self }
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// The reason, if a request got no reply.
    fn no_reply(&self) -> Option<&NoReply> {
        self.error.downcast_ref()
    }

    fn is_no_responders(&self) -> bool {
        self.no_reply() == Some(&NoReply::NoResponders)
    }
}

impl Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = &self.error;
        match error.downcast_ref::<config::ConfigError>() {
            // These are several lines that start with file names.
            Some(problems) => write!(f, "{problems}")?,
            // The user interrupted the command, so this is not an error.
            None if self.exit_code == INTERRUPTED => write!(f, "{error}")?,
            None => {
                let label = StdStream::Stderr.paint(Colour::Red, "error");
                write!(f, "{label}: {}", error_chain(error.as_ref()))?;
            }
        }
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

pub fn main() -> ExitCode {
    if let Some(words) = completion::requested_words() {
        return block_on(completion::run(words, command())).unwrap_or(ExitCode::SUCCESS);
    }
    let cli = match command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(error) => {
            // `--help` and `--version` arrive here too, and print to stdout.
            let code = if error.use_stderr() { USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let Ok(log) = LogWriter::start() else {
        return ExitCode::from(INTERNAL_ERROR);
    };
    let code = execute(cli, &log).unwrap_or_else(|error| {
        log.write_line(&StdStream::Stderr.sanitize_painted(&error.to_string()));
        ExitCode::from(error.exit_code)
    });
    log.drain();
    code
}

/// The commands and their arguments. Help never shows values from the environment: they may be secrets.
fn command() -> clap::Command {
    fn hide_env_values(command: clap::Command) -> clap::Command {
        command.mut_args(|arg| arg.hide_env_values(true)).mut_subcommands(hide_env_values)
    }
    hide_env_values(Cli::command())
}

fn execute(cli: Cli, log: &LogWriter) -> CliResult {
    let default_filter = match cli.command {
        Command::Run(_) | Command::Gateway(_) | Command::DemoAgent(_) => "info",
        // It reports itself what agents write.
        Command::Check(_) => "off",
        _ => "error",
    };
    // The bridge logs connection events itself; those of the NATS client would repeat them. A filter that names
    // `async_nats` takes precedence, because it comes later.
    let filter = cli.log.as_deref().filter(|filter| !filter.is_empty()).unwrap_or(default_filter);
    let filter = format!("async_nats=off,{filter}");
    telemetry::start_logging(&filter, cli.log_format, log.clone()).map_err(|error| {
        CliError::new(USAGE, error).context("`--log` (or A2A_BRIDGE_LOG) is not a valid filter; try `info`")
    })?;
    match cli.command {
        Command::Run(args) => {
            let (config, environment) = run::prepare(&args)?;
            let _export = telemetry::spans::start_export();
            block_on(run::run(args, config, environment))
        }
        Command::Gateway(args) => block_on(gateway::run(args)),
        Command::Check(args) => block_on(check::run(args)),
        Command::Schema => print_json(&config::schema()),
        Command::Plugin => println(plugin::manifest().trim_end()),
        Command::Completions { shell } => completion::print_script(shell, command()),
        Command::Health(args) => block_on(health::run(args)),
        Command::Init(args) => block_on(init::run(args)),
        Command::Agents(args) => block_on(agents::run(args)),
        Command::Logs(args) => block_on(logs::run(args)),
        Command::Skills(args) => block_on(skills::run(args)),
        Command::State(args) => block_on(state::run(args)),
        Command::Call(args) => block_on(call::run(*args)),
        Command::Attach(args) => block_on(attach::run(args)),
        Command::Task(args) => block_on(task::run(args)),
        Command::Files(args) => block_on(files::run(args)),
        Command::Sessions(args) => block_on(sessions::run(args)),
        Command::Card(args) => block_on(card::run(args)),
        Command::Top(args) => block_on(top::run(args)),
        Command::DemoAgent(args) => block_on(async {
            demo_agent::run(args).await.map_err(demo_agent_error)?;
            Ok(ExitCode::SUCCESS)
        }),
    }
}

fn demo_agent_error(error: anyhow::Error) -> CliError {
    let cause = error.downcast_ref::<io::Error>();
    let is_port_used = cause.is_some_and(|cause| cause.kind() == io::ErrorKind::AddrInUse);
    let hint = "another program uses this port: choose another one, or `--port 0` for a free one";
    CliError { hint: is_port_used.then(|| hint.to_owned()), ..CliError::new(FAILED, error) }
}

fn block_on(command: impl Future<Output = CliResult>) -> CliResult {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .thread_keep_alive(THREAD_KEEP_ALIVE)
        .on_thread_park(memory::reclaimer::collect)
        .enable_all()
        .build();
    let runtime = runtime.map_err(CliError::internal)?;
    let result = runtime.block_on(command);
    // Do not wait for a DNS lookup that still blocks a thread.
    runtime.shutdown_background();
    result
}
