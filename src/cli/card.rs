//! `card`: the card of an agent, as the bridge uses it.

use bytes::Bytes;
use serde_json::Value;

use super::client::{JsonFields as _, NatsClient, parse_json};
use super::discover::discover;
use super::nats_args::NatsArgs;
use super::output::{Colour, OutputArgs, StdStream, one_line, print_json, print_table, println};
use super::{CliError, CliResult, FAILED};
use crate::bus::subject::Token;

#[derive(Debug, clap::Args)]
pub(super) struct CardArgs {
    /// Name of the agent
    agent: String,
    #[command(flatten)]
    nats: NatsArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn run(args: CardArgs) -> CliResult {
    let mesh = args.nats.connect().await?;
    let card = fetch(&mesh, &args.agent).await?;
    if let Some(info) = card.get("error_info") {
        let reason = one_line(card.text("/message").unwrap_or("no reason given"));
        let code = info.text("/code").unwrap_or("?");
        return Err(CliError::msg(FAILED, format!("{reason} ({code})"))
            .hint("`a2a-bridge agents` shows the state of the agent"));
    }
    if args.output.is_json() {
        return print_json(&card);
    }
    println(&summary(&card))?;
    let rows = card.list("/skills").iter().map(|skill| {
        let cell = |field| (Colour::Plain, skill.text(field).unwrap_or_default().to_owned());
        ["/id", "/name", "/description"].map(cell).into()
    });
    print_table(&["SKILL", "NAME", "DESCRIPTION"], rows)
}

async fn fetch(mesh: &NatsClient, agent: &str) -> CliResult<Value> {
    let request = async |agent: &str| {
        let subject = mesh.subjects.card(&Token::new(agent));
        mesh.request_one(subject, Bytes::new()).await
    };
    let mut reply = request(agent).await;
    if reply.as_ref().is_err_and(CliError::is_no_responders) {
        // The user may have given the escaped form of the name.
        reply = request(&discover(mesh).await?.instance(agent, mesh)?.agent).await;
    }
    parse_json(&reply.map_err(|error| error.context("cannot get the card"))?)
}

fn summary(card: &Value) -> String {
    let text = |value: &Value, field: &str| one_line(value.text(field).unwrap_or_default());
    let title = format!("{} {}", text(card, "/name"), text(card, "/version"));
    let mut lines = vec![StdStream::Stdout.paint(Colour::Bold, title), text(card, "/description")];
    lines.extend(card.list("/supportedInterfaces").iter().map(|interface| {
        let [version, binding, url] =
            ["/protocolVersion", "/protocolBinding", "/url"].map(|field| text(interface, field));
        format!("A2A {version} over {binding} at {url}")
    }));
    let capabilities = card.get("capabilities").and_then(Value::as_object).into_iter().flatten();
    let enabled: Vec<_> = capabilities
        .filter(|(_, value)| **value == Value::Bool(true))
        .map(|(key, _)| one_line(key))
        .collect();
    if !enabled.is_empty() {
        lines.push(format!("Capabilities: {}", enabled.join(", ")));
    }
    lines.retain(|line| !line.is_empty());
    lines.join("\n") + "\n"
}
