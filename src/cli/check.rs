//! `check`: checks the configuration, then NATS, then the agents.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use super::output::{counted, one_line, println};
use super::{CliError, CliResult, ConfigArgs, FAILED, UNAVAILABLE};
use crate::a2a::{self, card};
use crate::agent::diagnosis::Diagnosis;
use crate::bus::catalog::rename_warnings;
use crate::bus::connect::credentials::NatsCredentials;
use crate::bus::connect::{FirstConnection, connect};
use crate::config;
use crate::memory::{self, MemoryBudget};
use crate::text::error_chain;

const DETAILS: &str = "\
For an agent with a `command`, the check only looks for the program. Any other agent must be \
running: the check fetches its card.";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Check the configuration file only
    #[arg(long)]
    offline: bool,
}

pub(super) async fn run(args: CheckArgs) -> CliResult {
    let config = args.config.load()?;
    let file = args.config.config.display();
    let mut report = format!("{file}: valid, {}\n", counted(config.agents.len(), "agent"));
    let mut code = 0;
    for agent in &config.agents {
        for warning in rename_warnings(&agent.skills) {
            let _ = writeln!(report, "agent `{}`: warning: {}", agent.name, one_line(&warning));
        }
    }
    if !args.offline {
        let connected = match NatsCredentials::new(&config.nats) {
            Ok(credentials) => {
                connect(&config.nats, &credentials, usize::MAX, FirstConnection::FailFast).await
            }
            Err(error) => Err(error),
        };
        let line = match connected {
            Ok(client) => format!("ok, nats-server {}", client.server_info().version),
            Err(error) => {
                code = UNAVAILABLE;
                error_chain(&error)
            }
        };
        let _ = writeln!(report, "NATS: {line}");
        let http = a2a::http_client().map_err(CliError::internal)?;
        for agent in &config.agents {
            let line = check_agent(agent, &http).await.unwrap_or_else(|problem| {
                code = code.max(FAILED);
                problem
            });
            let _ = writeln!(report, "agent `{}`: {line}", agent.name);
        }
    }
    println(report.trim_end())?;
    Ok(ExitCode::from(code))
}

async fn check_agent(agent: &config::AgentConfig, http: &a2a::HttpClient) -> Result<String, String> {
    let secrets = agent.secrets();
    let memory = MemoryBudget::new(memory::default_limit()).account(&agent.name);
    let chooser = a2a::chooser(agent, http, &secrets, memory).map_err(|error| error_chain(&error))?;
    if let Some(command) = &agent.command {
        let program = command.first().map(String::as_str).unwrap_or_default();
        return check_program(program, agent.working_dir.as_deref());
    }
    let card = match &agent.card {
        Some(card) => card::Card::from_value(card.clone()),
        None => {
            let credentials = chooser.card_credentials();
            let path = agent.card_path.as_deref();
            card::fetch(&chooser.http, &agent.url, path, &credentials, &secrets).await
        }
    };
    let redacted = |error: card::CardError| error_chain(&error.redacted(&secrets));
    let card = card.map_err(|error| format!("{}; `run` would keep retrying", redacted(error)))?;
    let interface = chooser.choose(&card).await.map_err(redacted)?;
    if let Some(failure) = interface.failure {
        let Diagnosis { text, advice } = Diagnosis::unconfirmed(failure, agent);
        return Err(format!("{text}; {advice}"));
    }
    let version = interface.dialect.protocol_version();
    let skills = counted(card.skills.len(), "skill");
    Ok(format!("ok, A2A {version} at {}, {skills}", interface.url))
}

/// Looks for the program the way `execvp` does.
fn check_program(program: &str, working_dir: Option<&Path>) -> Result<String, String> {
    if let Some(dir) = working_dir.filter(|dir| !dir.is_dir()) {
        return Err(format!("no such directory: {} (`working_dir`)", dir.display()));
    }
    let is_path = program.contains('/');
    let is_found = if is_path {
        working_dir.unwrap_or(Path::new("")).join(program).is_file()
    } else {
        std::env::var_os("PATH")
            .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
    };
    if is_found {
        return Ok(format!("ok, the bridge will launch `{program}`"));
    }
    let advice = match working_dir {
        Some(dir) if is_path => format!("the path is relative to {} (`working_dir`)", dir.display()),
        None if is_path => {
            "the path is resolved from the directory in which the bridge is started".to_owned()
        }
        _ => "is it installed and on the PATH?".to_owned(),
    };
    Err(format!("command not found: `{program}`; {advice}"))
}
