//! `card`: an agent's card as the bridge uses it.

use std::process::ExitCode;

use bytes::Bytes;
use serde_json::Value;

use super::client::{Connection, Fields as _, Mesh, Silence, json};
use super::discover::discover;
use super::output::{Colour, Output, Table, To, one_line, print, print_json};
use super::{Failure, TROUBLE};
use crate::bus::subject::Token;

/// Options of `card`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The agent
    agent: String,
    #[command(flatten)]
    connection: Connection,
    #[command(flatten)]
    output: Output,
}

pub(super) async fn run(args: Args) -> Result<ExitCode, Failure> {
    let mesh = args.connection.connect().await?;
    let card = fetch(&mesh, &args.agent).await?;
    if let Some(info) = card.get("error_info") {
        let why = card.text("/message").unwrap_or("no reason given");
        let error = anyhow::anyhow!("{} ({})", one_line(why), info.text("/code").unwrap_or("?"));
        return Err(Failure::new(TROUBLE, error).hint("`a2a-bridge agents` shows how the agent is"));
    }
    if args.output.is_json() {
        return print_json(&card);
    }
    print(&heading(&card))?;
    let mut table = Table::new(&["SKILL", "NAME", "DESCRIPTION"]);
    for skill in card.list("/skills") {
        let cell = |key: &str| {
            (Colour::Plain, skill.get(key).and_then(Value::as_str).unwrap_or_default().to_owned())
        };
        table.row(vec![cell("id"), cell("name"), cell("description")]);
    }
    table.print()
}

async fn fetch(mesh: &Mesh, agent: &str) -> Result<Value, Failure> {
    let mut token = Token::new(agent);
    let mut second = false;
    loop {
        match mesh.ask(mesh.subjects.card(&token), Bytes::new()).await? {
            Ok(message) => return json(&message),
            Err(Silence::NoResponders) => {}
            Err(silence) => return Err(silence.failure("cannot get the card")),
        }
        // It may be the token of a name that is escaped.
        let found = discover(mesh, None).await?;
        match found.agents_named(agent).first() {
            Some(agent) if !second => token = Token::new(&agent.agent),
            _ => return Err(found.no_agent(agent, mesh)),
        }
        second = true;
    }
}

fn heading(card: &Value) -> String {
    let text = |key: &str| one_line(card.get(key).and_then(Value::as_str).unwrap_or_default());
    let interfaces = card.list("/supportedInterfaces").iter();
    let mut lines = vec![
        To::Stdout.paint(Colour::Bold, format!("{} {}", text("name"), text("version"))),
        text("description"),
    ];
    lines.extend(interfaces.map(|one| {
        let part = |key: &str| one_line(one.get(key).and_then(Value::as_str).unwrap_or_default());
        format!("A2A {} over {} at {}", part("protocolVersion"), part("protocolBinding"), part("url"))
    }));
    let can = card.get("capabilities").and_then(Value::as_object).into_iter().flatten();
    let can: Vec<_> =
        can.filter(|(_, value)| value == &&Value::Bool(true)).map(|(key, _)| one_line(key)).collect();
    if !can.is_empty() {
        lines.push(format!("Capabilities: {}", can.join(", ")));
    }
    lines.retain(|line| !line.is_empty());
    lines.join("\n") + "\n"
}
