//! `skills`: what the agents on the mesh can do, and what it takes to ask them.

use std::collections::HashSet;
use std::process::ExitCode;

use serde_json::json;

use super::Failure;
use super::client::Connection;
use super::discover::discover;
use super::output::{Colour, Output, Table, print_json, remark};

/// Options of `skills`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Of this agent only
    agent: Option<String>,
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    output: Output,
}

pub(super) async fn run(args: Args) -> Result<ExitCode, Failure> {
    let mesh = args.connection.connect().await?;
    let found = discover(&mesh, None).await?;
    if found.agents.is_empty() && !args.output.is_json() {
        return Err(found.nobody(&mesh));
    }
    let agents: Vec<_> = match &args.agent {
        None => found.agents.iter().collect(),
        Some(name) => found.agents_named(name),
    };
    if let (Some(name), true) = (&args.agent, agents.is_empty()) {
        return Err(found.no_agent(name, &mesh));
    }
    // Replicas serve the same skills; each is listed once, in the order of the card.
    let mut seen = HashSet::new();
    let mut skills = Vec::new();
    for agent in &agents {
        let new = agent.skills.iter().filter(|skill| seen.insert(&skill.subject));
        skills.extend(new.map(|skill| (agent, skill)));
    }
    if args.output.is_json() {
        let list: Vec<_> = skills
            .iter()
            .map(|(agent, skill)| {
                let mut entry = json!({"agent": agent.agent});
                if let (Some(entry), Ok(serde_json::Value::Object(rest))) =
                    (entry.as_object_mut(), serde_json::to_value(skill))
                {
                    entry.extend(rest);
                }
                entry
            })
            .collect();
        return print_json(&list);
    }
    let mut table = Table::new(&["SKILL", "NEEDS", "NAME", "DESCRIPTION"]);
    for (agent, skill) in &skills {
        table.row(vec![
            (Colour::Bold, format!("{}.{}", agent.token, skill.action)),
            (Colour::Plain, skill.parameters()),
            (Colour::Plain, skill.name.clone()),
            (Colour::Plain, skill.description.clone()),
        ]);
    }
    if skills.is_empty() {
        let states: Vec<_> =
            agents.iter().map(|agent| format!("{} is {}", agent.agent, agent.state)).collect();
        remark(format_args!("no skills just now: {}. `a2a-bridge agents` says why.", states.join(", ")));
        return Ok(ExitCode::SUCCESS);
    }
    table.print()?;
    if let Some((agent, skill)) = skills.first() {
        let example = match skill.parameters().as_str() {
            "prompt" | "" => "'some text'".to_owned(),
            names => names.split(", ").map(|name| format!("--param {name}=…")).collect::<Vec<_>>().join(" "),
        };
        remark(format_args!("ask one: a2a-bridge call {}.{} {example}", agent.token, skill.action));
    }
    Ok(ExitCode::SUCCESS)
}
