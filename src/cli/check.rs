//! `check`: the settings, then NATS, then the agents that should be running already.

use crate::text::error_chain;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use super::output::{one_line, print};
use super::{Failure, TROUBLE, UNAVAILABLE};
use crate::a2a::{self, card};
use crate::bus::catalog::rename_warnings;
use crate::bus::connect::connect;
use crate::config::{self, Config};

pub(super) async fn check(file: &Path, config: Config, offline: bool) -> Result<ExitCode, Failure> {
    let mut report =
        format!("{}: settings are valid, {}\n", file.display(), counted(config.agents.len(), "agent"));
    let mut code = 0;
    for agent in &config.agents {
        for warning in rename_warnings(&agent.skills) {
            let _ = writeln!(report, "agent `{}`: warning: {}", agent.name, one_line(&warning));
        }
    }
    if !offline {
        match connect(&config.nats).await {
            Ok(client) => {
                let info = client.server_info();
                let _ = writeln!(report, "NATS: ok, nats-server {}", info.version);
            }
            Err(error) => {
                code = UNAVAILABLE;
                let _ = writeln!(report, "NATS: {}", error_chain(&error));
            }
        }
        let http = a2a::http_client().map_err(|error| Failure::new(super::DEFECT, error))?;
        for agent in &config.agents {
            match look(agent, &http).await {
                Ok(line) => {
                    let _ = writeln!(report, "agent `{}`: {line}", agent.name);
                }
                Err(line) => {
                    code = code.max(TROUBLE);
                    let _ = writeln!(report, "agent `{}`: {line}", agent.name);
                }
            }
        }
    }
    print(report.trim_end())?;
    Ok(ExitCode::from(code))
}

async fn look(agent: &config::AgentConfig, http: &a2a::HttpClient) -> Result<String, String> {
    if let Some(command) = &agent.command {
        let program = command.first().map(String::as_str).unwrap_or_default();
        if let Some(dir) = agent.working_dir.as_deref().filter(|dir| !dir.is_dir()) {
            return Err(format!("there is no folder {} (`working_dir`)", dir.display()));
        }
        return if is_program(program, agent.working_dir.as_deref()) {
            Ok(format!("ok, `{program}` will be launched"))
        } else {
            let advice = match agent.working_dir.as_deref().filter(|_| program.contains('/')) {
                Some(dir) => format!("it is looked for from {} (`working_dir`)", dir.display()),
                None if program.contains('/') => "it is looked for from the folder of the bridge".to_owned(),
                None => "is it installed, and on the PATH?".to_owned(),
            };
            Err(format!("command not found: `{program}`; {advice}"))
        };
    }
    let secrets = agent.secrets();
    let chooser = a2a::chooser(agent, http, &secrets).map_err(|error| error_chain(&error))?;
    let card = match &agent.card {
        Some(card) => card::Card::from_value(card.clone()),
        None => {
            let credentials = chooser.card_credentials();
            card::fetch(chooser.http(), &agent.url, agent.card_path.as_deref(), &credentials).await
        }
    };
    let told = |error: card::CardError| error_chain(&error.redacted(&secrets));
    let card = card.map_err(|error| format!("{}; the bridge would keep trying", told(error)))?;
    let interface = chooser.choose(&card).await.map_err(told)?;
    let version = interface.dialect.protocol_version();
    let skills = counted(card.skills.len(), "skill");
    Ok(format!("ok, A2A {version} at {}, {skills}", interface.url))
}

fn counted(number: usize, what: &str) -> String {
    let s = if number == 1 { "" } else { "s" };
    format!("{number} {what}{s}")
}

/// Whether the program can be found the way `execvp` does it.
fn is_program(program: &str, working_dir: Option<&Path>) -> bool {
    if program.contains('/') {
        return working_dir.unwrap_or(Path::new("")).join(program).is_file();
    }
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}
