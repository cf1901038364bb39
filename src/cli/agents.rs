//! `agents`: who is on the mesh, and how they are.

use std::process::ExitCode;

use super::Failure;
use super::client::Connection;
use super::discover::{DiscoveredAgent, discover};
use super::output::{Colour, Output, Table, age, print_json, remark};
use super::supervise::{Supervise, supervise};

/// Options of `agents`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    output: Output,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// List the agents, as `agents` alone does
    List,
    #[command(flatten)]
    Supervise(Supervise),
}

pub(super) async fn run(args: Args) -> Result<ExitCode, Failure> {
    match args.command {
        None | Some(Command::List) => list(&args.connection, &args.output).await,
        Some(Command::Supervise(command)) => supervise(&args.connection, &args.output, command).await,
    }
}

async fn list(connection: &Connection, output: &Output) -> Result<ExitCode, Failure> {
    let mesh = connection.connect().await?;
    let found = discover(&mesh, None).await?;
    if output.is_json() {
        return print_json(&found.agents);
    }
    if found.agents.is_empty() {
        return Err(found.nobody(&mesh));
    }
    let mut table = Table::new(&["NAME", "STATUS", "SKILLS", "RESTARTS", "AGE", "LAST-ERROR"]);
    for agent in &found.agents {
        table.row(cells(agent));
    }
    table.print()?;
    if let Some(agent) = found.agents.iter().find(|agent| !agent.skills.is_empty()) {
        remark(format_args!("`a2a-bridge skills {}` lists its skills", agent.agent));
    }
    Ok(ExitCode::SUCCESS)
}

fn cells(agent: &DiscoveredAgent) -> Vec<(Colour, String)> {
    let plain = |text: String| (Colour::Plain, text);
    vec![
        plain(agent.agent.clone()),
        (Colour::of_state(&agent.state), agent.state.clone()),
        plain(agent.skills.len().to_string()),
        plain(agent.restarts.map(|count| count.to_string()).unwrap_or_default()),
        plain(agent.since.as_deref().map(age).unwrap_or_default()),
        plain(agent.last_error.clone().unwrap_or_default()),
    ]
}
