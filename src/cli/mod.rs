//! The edge for people: arguments, commands, exit codes.
//!
//! Data goes to stdout, talk to stderr. Exit codes follow sysexits: 0 well, 1 the action failed or a check
//! found trouble, 64 usage, 69 no NATS or nobody there, 70 a defect, 78 bad settings; 130 after Ctrl-C.
//!
//! `run` and `check` work on the settings; `agents`, `skills`, `call`, `task` and `card` are callers like
//! any other and know nothing but the contract.

mod agents;
mod call;
mod card;
mod check;
mod client;
mod discover;
mod init;
mod output;
mod plugin;
mod run;
mod skills;
mod supervise;
mod task;
mod terminal;

use crate::text::error_chain;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use self::output::{Colour, To, print};

use crate::config::{self, Config};
use crate::demo_agent;
use crate::telemetry::{self, LogFormat};

/// The action failed, or something found trouble.
const TROUBLE: u8 = 1;
/// The command line is not understood.
const USAGE: u8 = 64;
/// NATS is not there, or nobody on it who serves what is wanted.
const UNAVAILABLE: u8 = 69;
/// A defect of the bridge.
const DEFECT: u8 = 70;
/// The settings are wrong.
const CONFIG: u8 = 78;
/// Ctrl-C, as shells say it.
const INTERRUPTED: u8 = 130;

const EXAMPLES: &str = "\
Examples:
  a2a-bridge init --from http://127.0.0.1:9000    # settings for an agent that runs there
  a2a-bridge run                                  # put it on NATS
  a2a-bridge agents                               # who is there?
  a2a-bridge call demo.echo 'hello'               # ask a skill

Exit codes: 0 well, 1 the action failed, 64 usage, 69 no NATS or nobody there, 70 a defect, 78 bad settings,
130 left with Ctrl-C";

/// Publishes the skills of A2A agents as actions on a NATS mesh.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What to log, in the form of RUST_LOG, such as `warn` or `info,a2a_bridge=debug`
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "A2A_BRIDGE_LOG",
        hide_env_values = true,
        help_heading = "Log"
    )]
    log: Option<String>,
    /// How to log: `text` or `json`
    #[arg(
        long,
        global = true,
        value_enum,
        hide_possible_values = true,
        value_name = "FORM",
        env = "A2A_BRIDGE_LOG_FORMAT",
        hide_env_values = true,
        default_value = "text",
        help_heading = "Log"
    )]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve the agents of the settings until SIGTERM or Ctrl-C
    Run(Settings),
    /// Check the settings, then NATS and the agents
    Check {
        #[command(flatten)]
        settings: Settings,
        /// Look at the file only
        #[arg(long)]
        offline: bool,
    },
    /// Write a first settings file
    Init(init::Args),
    /// List the agents on the mesh
    Agents(agents::Args),
    /// List what the agents can do
    Skills(skills::Args),
    /// Ask a skill of an agent
    Call(Box<call::Args>),
    /// Look up, follow or cancel a task
    Task(task::Args),
    /// Show an agent's card
    Card(card::Args),
    /// Show what agents write
    Logs(supervise::LogsArgs),
    /// Print the JSON schema of the settings
    Schema,
    /// Print the manifest of this plugin
    Plugin,
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Run the bundled A2A agent, for trying things out
    DemoAgent(demo_agent::DemoAgentArgs),
}

/// Where the settings are.
#[derive(Debug, clap::Args)]
struct Settings {
    /// The settings file
    #[arg(
        long,
        short,
        global = true,
        value_name = "FILE",
        env = "A2A_BRIDGE_CONFIG",
        hide_env_values = true,
        default_value = "a2a-bridge.yaml"
    )]
    config: PathBuf,
}

impl Settings {
    fn load(&self) -> Result<Config, Failure> {
        config::load(&self.config).map_err(|error| Failure::new(CONFIG, error))
    }
}

/// An error and the exit code it leads to.
#[derive(Debug)]
struct Failure {
    code: u8,
    error: anyhow::Error,
    hint: Option<String>,
}

impl Failure {
    fn new(code: u8, error: impl Into<anyhow::Error>) -> Self {
        Self { code, error: error.into(), hint: None }
    }

    /// The same, with what to try next.
    fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Runs the program.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are what was asked for; the rest is usage.
            let code = if error.use_stderr() { USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    match dispatch(cli) {
        Ok(code) => {
            telemetry::flush();
            code
        }
        Err(failure) => {
            telemetry::say(&message(&failure));
            ExitCode::from(failure.code)
        }
    }
}

fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    let usual = match cli.command {
        // What happens to the connection is told by us, once; the NATS client would say it again.
        Command::Run(_) | Command::DemoAgent(_) => "info,async_nats=off",
        _ => "error,async_nats=off",
    };
    let filter = cli.log.as_deref().unwrap_or(usual);
    telemetry::start(filter, cli.log_format).map_err(|error| {
        let error =
            anyhow::Error::new(error).context("`--log` (or A2A_BRIDGE_LOG) is not a filter; try `info`");
        Failure::new(USAGE, error)
    })?;
    match cli.command {
        Command::Run(settings) => {
            let config = settings.load()?;
            let _exporting = telemetry::spans::start();
            block_on(run::run(config))
        }
        Command::Check { settings, offline } => {
            let config = settings.load()?;
            block_on(check::check(&settings.config, config, offline))
        }
        Command::Schema => {
            let schema =
                serde_json::to_string_pretty(&config::schema()).map_err(|e| Failure::new(DEFECT, e))?;
            print(&schema)
        }
        Command::Plugin => print(plugin::manifest().trim_end()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "a2a-bridge", &mut script);
            print(String::from_utf8_lossy(&script).trim_end())
        }
        Command::Init(args) => block_on(init::run(args)),
        Command::Agents(args) => block_on(agents::run(args)),
        Command::Logs(args) => block_on(supervise::logs(args)),
        Command::Skills(args) => block_on(skills::run(args)),
        Command::Call(args) => block_on(call::run(*args)),
        Command::Task(args) => block_on(task::run(args)),
        Command::Card(args) => block_on(card::run(args)),
        Command::DemoAgent(args) => block_on(async {
            demo_agent::run(args).await.map_err(demo_agent_failed)?;
            Ok(ExitCode::SUCCESS)
        }),
    }
}

fn demo_agent_failed(error: anyhow::Error) -> Failure {
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    let failure = Failure::new(TROUBLE, error);
    match kind {
        Some(io::ErrorKind::AddrInUse) => failure
            .hint("another program has this port: give another one, or `--port 0` for any that is free"),
        _ => failure,
    }
}

fn block_on(command: impl Future<Output = Result<ExitCode, Failure>>) -> Result<ExitCode, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(DEFECT, error))?;
    let result = runtime.block_on(command);
    // A resolver thread may still hang in a look-up; nobody waits for it.
    runtime.shutdown_background();
    result
}

fn message(failure: &Failure) -> String {
    let error = &failure.error;
    // Settings problems are several lines that begin with file names.
    let mut text = match error.downcast_ref::<config::ConfigError>() {
        Some(problems) => problems.to_string(),
        // Whoever left knows that it is not an error.
        None if failure.code == INTERRUPTED => format!("{error}"),
        None => format!("{}: {}", To::Stderr.paint(Colour::Red, "error"), error_chain(error.as_ref())),
    };
    if let Some(hint) = &failure.hint {
        text.push_str("\nhint: ");
        text.push_str(hint);
    }
    text
}
