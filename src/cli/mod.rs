//! The edge for people: arguments, commands, exit codes.
//!
//! Data goes to stdout, talk to stderr. Exit codes follow sysexits: 0 well, 1 a check that found
//! trouble, 64 usage, 69 no NATS, 70 a defect, 78 bad settings.

mod check;
mod run;
mod supervise;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::config::{self, Config};
use crate::demo_agent;
use crate::telemetry::{self, LogFormat};

/// Something found trouble.
const TROUBLE: u8 = 1;
/// The command line is not understood.
const USAGE: u8 = 64;
/// NATS is not there.
const UNAVAILABLE: u8 = 69;
/// A defect of the bridge.
const DEFECT: u8 = 70;
/// The settings are wrong.
const CONFIG: u8 = 78;

/// Publishes the skills of A2A agents as actions on a NATS mesh.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What to log, in the form of RUST_LOG, such as `warn` or `info,a2a_bridge=debug`
    #[arg(
        long,
        global = true,
        value_name = "FILTER",
        env = "A2A_BRIDGE_LOG",
        default_value = "info"
    )]
    log: String,
    /// How to log
    #[arg(
        long,
        global = true,
        value_enum,
        env = "A2A_BRIDGE_LOG_FORMAT",
        default_value = "text"
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
    /// See and steer one agent
    Agents {
        #[command(flatten)]
        settings: Settings,
        #[command(subcommand)]
        command: supervise::Supervise,
    },
    /// Show what agents write
    Logs {
        #[command(flatten)]
        settings: Settings,
        #[command(flatten)]
        args: supervise::LogsArgs,
    },
    /// Print the JSON schema of the settings
    Schema,
    /// Run the bundled A2A agent, for trying things out
    DemoAgent(demo_agent::Args),
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
        default_value = "a2a-bridge.yaml"
    )]
    config: PathBuf,
}

impl Settings {
    fn load(&self) -> Result<Config, Failure> {
        config::load(&self.config).map_err(|error| Failure {
            code: CONFIG,
            error: anyhow::Error::new(error),
        })
    }
}

/// An error and the exit code it leads to.
#[derive(Debug)]
struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl Failure {
    fn new(code: u8, error: impl Into<anyhow::Error>) -> Self {
        Self {
            code,
            error: error.into(),
        }
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
        Ok(code) => code,
        Err(Failure { code, error }) => {
            let _ = writeln!(std::io::stderr(), "{}", message(&error));
            ExitCode::from(code)
        }
    }
}

fn dispatch(cli: Cli) -> Result<ExitCode, Failure> {
    // A command that asks for something prints the answer; what the connection says on the way is noise.
    let asks = matches!(cli.command, Command::Agents { .. } | Command::Logs { .. });
    let log = if asks && cli.log == "info" {
        "warn"
    } else {
        &cli.log
    };
    telemetry::start(log, cli.log_format).map_err(|error| {
        let error =
            anyhow::Error::new(error).context("`--log` (or A2A_BRIDGE_LOG) is not a filter; try `info`");
        Failure::new(USAGE, error)
    })?;
    match cli.command {
        Command::Run(settings) => block_on(run::run(settings.load()?)),
        Command::Check { settings, offline } => {
            let config = settings.load()?;
            block_on(check::check(&settings.config, config, offline))
        }
        Command::Agents { settings, command } => block_on(supervise::supervise(&settings, command)),
        Command::Logs { settings, args } => block_on(supervise::logs(&settings, args)),
        Command::Schema => {
            let schema =
                serde_json::to_string_pretty(&config::schema()).map_err(|e| Failure::new(DEFECT, e))?;
            print(&schema)
        }
        Command::DemoAgent(args) => block_on(async {
            demo_agent::run(args)
                .await
                .map_err(|error| Failure::new(TROUBLE, error))?;
            Ok(ExitCode::SUCCESS)
        }),
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

/// Data goes to stdout; a reader that has gone is not an error.
fn print(text: &str) -> Result<ExitCode, Failure> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::new(TROUBLE, error)),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn message(error: &anyhow::Error) -> String {
    // Settings problems are several lines that begin with file names.
    match error.downcast_ref::<config::ConfigError>() {
        Some(problems) => problems.to_string(),
        None => format!("error: {}", crate::a2a::client::chain(error.as_ref())),
    }
}
