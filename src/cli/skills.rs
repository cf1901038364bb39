//! `skills`: the skills of the agents, and the parameters they need.

use std::collections::HashSet;
use std::process::ExitCode;

use serde::Serialize;

use super::CliResult;
use super::discover::{DiscoveredSkill, discover};
use super::nats_args::NatsArgs;
use super::output::{Colour, OutputArgs, eprintln_dim, print_json, print_table};

#[derive(Debug, clap::Args)]
pub(super) struct SkillsArgs {
    /// Name of an agent; without it, all agents
    agent: Option<String>,
    #[command(flatten)]
    nats: NatsArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Serialize)]
struct ListedSkill<'a> {
    agent: &'a str,
    #[serde(flatten)]
    skill: &'a DiscoveredSkill,
}

pub(super) async fn run(args: SkillsArgs) -> CliResult {
    let mesh = args.nats.connect().await?;
    let discovery = discover(&mesh).await?;
    if discovery.agents.is_empty() && !args.output.is_json() {
        return Err(discovery.no_agents_error(&mesh));
    }
    let agents: Vec<_> = match &args.agent {
        None => discovery.agents.iter().collect(),
        Some(name) => discovery.instances(name),
    };
    if let (Some(name), true) = (&args.agent, agents.is_empty()) {
        return Err(discovery.unknown_agent_error(name, &mesh));
    }
    // Replicas serve the same skills; each is listed once, in the order of the card.
    let mut seen = HashSet::new();
    let mut skills = Vec::new();
    for agent in &agents {
        let new = agent.skills.iter().filter(|skill| seen.insert(&skill.subject));
        skills.extend(new.map(|skill| (agent, skill)));
    }
    if args.output.is_json() {
        let list = skills.iter().map(|(agent, skill)| ListedSkill { agent: &agent.agent, skill });
        return print_json(&list.collect::<Vec<_>>());
    }
    let Some((agent, skill)) = skills.first() else {
        let states: Vec<_> =
            agents.iter().map(|agent| format!("{} is {}", agent.agent, agent.state)).collect();
        eprintln_dim(format_args!(
            "no skills at the moment: {}; `a2a-bridge agents` shows why",
            states.join(", ")
        ));
        return Ok(ExitCode::SUCCESS);
    };
    let rows = skills.iter().map(|(agent, skill)| {
        vec![
            (Colour::Bold, format!("{}.{}", agent.token, skill.action)),
            (Colour::Plain, skill.required_parameters()),
            (Colour::Plain, skill.name.clone()),
            (Colour::Plain, skill.description.clone()),
        ]
    });
    print_table(&["SKILL", "NEEDS", "NAME", "DESCRIPTION"], rows)?;
    let example = match skill.required_parameters().as_str() {
        "prompt" | "" => "'some text'".to_owned(),
        names => names.split(", ").map(|name| format!("--param {name}=…")).collect::<Vec<_>>().join(" "),
    };
    eprintln_dim(format_args!(
        "to call one: a2a-bridge call {}.{} {example}{}",
        agent.token,
        skill.action,
        args.nats.suggested_flags()
    ));
    Ok(ExitCode::SUCCESS)
}
