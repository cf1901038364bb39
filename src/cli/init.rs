//! `init`: writes a configuration file to start from, for a running agent or for the demo agent.

use std::error::Error;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use url::Url;

use super::output::{eprintln, eprintln_dim, one_line, println};
use super::{CliError, CliResult, DEFAULT_CONFIG, FAILED, USAGE};
use crate::a2a;
use crate::a2a::card::{self, Card};
use crate::bus::subject::Token;
use crate::config;
use crate::memory::{self, MemoryBudget};
use crate::text::{error_chain, head, shorten};

/// Maximum number of skills that the comment lists.
const MAX_SKILLS: usize = 50;
const MAX_NAME: usize = 40;
const MAX_COMMENT: usize = 100;
const NO_CARD_HINT: &str =
    "is this an A2A agent? If its card has another path, run `init` without `--from` and set `card_path`";

const DETAILS: &str = "\
An existing file is never overwritten.

Examples:
  a2a-bridge init                                  # for the demo agent, to edit
  a2a-bridge init --from http://127.0.0.1:9000     # for a running agent";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct InitArgs {
    /// File to write; `-` writes to stdout
    #[arg(value_name = "FILE", default_value = DEFAULT_CONFIG)]
    file: PathBuf,
    /// Write a configuration for the agent at this URL
    #[arg(long, value_name = "URL")]
    from: Option<Url>,
}

pub(super) async fn run(args: InitArgs) -> CliResult {
    let to_stdout = args.file == Path::new("-");
    if !to_stdout && args.file.exists() {
        return Err(file_exists_error(&args.file));
    }
    let (text, agent) = match &args.from {
        None => (config_text("demo", "http://127.0.0.1:9000", None), "demo".to_owned()),
        Some(url) => {
            let card = fetch_card(url).await?;
            let name = agent_name(&card);
            (config_text(&name, base_url(url), Some(&card)), name)
        }
    };
    if to_stdout {
        return println(text.trim_end());
    }
    write_new(&args.file, &text)?;
    let file = args.file.display().to_string();
    let flag = if file == DEFAULT_CONFIG { String::new() } else { format!(" --config {file}") };
    eprintln(format_args!("wrote {file}"));
    eprintln_dim("next steps:");
    let mut steps = vec![
        (format!("a2a-bridge check{flag}"), "check the configuration, NATS and the agent"),
        (format!("a2a-bridge run{flag}"), "publish the agent's skills on NATS"),
        (format!("a2a-bridge skills {}", Token::new(&agent)), "from any machine that reaches NATS"),
    ];
    if args.from.is_none() {
        let demo = "a2a-bridge demo-agent --port 9000".to_owned();
        steps.insert(0, (demo, "an agent to try it with, in another terminal"));
    }
    let width = steps.iter().map(|(command, _)| command.len()).max().unwrap_or_default();
    for (command, purpose) in steps {
        eprintln_dim(format_args!("  {command:width$}   # {purpose}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Fetches the card the way the bridge does with the new configuration.
async fn fetch_card(url: &Url) -> CliResult<Card> {
    let text = config_text("agent", base_url(url), None);
    let config = config::parse(&text, "--from", &|name| std::env::var(name).ok()).map_err(|_| {
        CliError::msg(USAGE, format!("`{url}` is not the URL of an agent"))
            .hint("a URL looks like `http://127.0.0.1:9000`")
    })?;
    let no_agent = |error: &dyn Error| {
        CliError::msg(FAILED, error_chain(error))
            .hint("is the agent running? Without `--from`, `a2a-bridge init` writes a file for you to edit")
    };
    let no_card = |error: card::CardError| match error {
        card::CardError::Status { .. } => no_agent(&error).hint(NO_CARD_HINT),
        _ => no_agent(&error),
    };
    let agent = config
        .agents
        .first()
        .ok_or_else(|| CliError::internal(anyhow::anyhow!("the new configuration has no agent")))?;
    let http = a2a::http_client().map_err(CliError::internal)?;
    let secrets = agent.secrets();
    let memory = MemoryBudget::new(memory::default_limit()).account(&agent.name);
    let chooser = a2a::chooser(agent, &http, &secrets, memory).map_err(|error| no_agent(&error))?;
    let credentials = chooser.card_credentials();
    let card = card::fetch(&chooser.http, &agent.url, None, &credentials, &secrets).await.map_err(no_card)?;
    chooser.choose(&card).await.map_err(|error| no_agent(&error))?;
    Ok(card)
}

fn base_url(url: &Url) -> &str {
    url.as_str().trim_end_matches('/')
}

/// A short name for subjects, made from the name on the card.
fn agent_name(card: &Card) -> String {
    let simplify = |c: char| {
        if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }
    };
    let name: String = card.name.chars().map(simplify).collect();
    let words: Vec<_> = name.split('-').filter(|word| !word.is_empty()).collect();
    match head(&words.join("-"), MAX_NAME).trim_matches('-') {
        "" => "agent".to_owned(),
        name => name.to_owned(),
    }
}

/// Text from the card goes only into comments, so that it cannot change the configuration.
fn config_text(name: &str, url: &str, card: Option<&Card>) -> String {
    let mut about = String::new();
    let mut skills = String::new();
    if let Some(card) = card {
        let text = format!("{}: {}", one_line(&card.name), one_line(&card.description));
        about = format!("  # {}\n", shorten(&text, MAX_COMMENT));
        skills.push_str(if card.skills.is_empty() {
            "    # The card lists no skills, so the agent gets one action, `prompt`.\n"
        } else {
            "    # Skills:\n"
        });
        for skill in card.skills.iter().take(MAX_SKILLS) {
            let text = format!("{}: {}", one_line(&skill.id), one_line(&skill.description));
            skills.push_str(&format!("    #   {}\n", shorten(&text, MAX_COMMENT)));
        }
        if card.skills.len() > MAX_SKILLS {
            skills.push_str(&format!("    #   and {} more\n", card.skills.len() - MAX_SKILLS));
        }
    }
    format!(
        r#"# yaml-language-server: $schema=a2a-bridge.schema.json
# Configuration of a2a-bridge. For completion and validation in your editor, run
#   a2a-bridge schema > a2a-bridge.schema.json

nats:
  url: ${{NATS_URL:-nats://127.0.0.1:4222}}

agents:
{about}  - name: {name}
    url: {url}
{skills}    # Let the bridge launch the agent and restart it after a crash:
    # command: python -m my_agent --port 9000
    # Send a bearer token to the agent:
    # bearer_token: ${{AGENT_TOKEN}}
"#
    )
}

fn write_new(file: &Path, text: &str) -> CliResult<()> {
    let created = File::create_new(file);
    created.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| {
        if error.kind() == std::io::ErrorKind::AlreadyExists {
            return file_exists_error(file);
        }
        CliError::new(FAILED, error)
            .context(format!("cannot write {}", file.display()))
            .hint("choose another file: `a2a-bridge init FILE`")
    })
}

fn file_exists_error(file: &Path) -> CliError {
    CliError::msg(USAGE, format!("{} already exists; it was not changed", file.display()))
        .hint("choose another file: `a2a-bridge init FILE`, or `-` for stdout")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn card(name: &str, description: &str) -> Card {
        Card::from_value(json!({
            "name": name, "description": description, "url": "http://127.0.0.1:9000/", "version": "1",
            "skills": [{"id": "a\nb: c", "name": "x", "description": "one\r\nagents: []\u{2028}y"}],
        }))
        .unwrap()
    }

    #[test]
    fn the_written_configuration_is_valid() {
        let blank = config_text("demo", "http://127.0.0.1:9000", None);
        let config = config::parse(&blank, "a2a-bridge.yaml", &|_| None).unwrap();
        assert_eq!(config.agents[0].name, "demo");
        assert_eq!(config.nats.url[0].as_ref(), "nats://127.0.0.1:4222");
    }

    #[test]
    fn a_card_cannot_change_the_configuration() {
        let card = card("Weather & Co.\nnats: {}", "x\n  - name: evil");
        let text = config_text(&agent_name(&card), "http://127.0.0.1:9000", Some(&card));
        let config = config::parse(&text, "a2a-bridge.yaml", &|_| None).unwrap();
        assert_eq!(config.agents.len(), 1);
        assert_eq!(config.agents[0].name, "weather-co-nats");
        assert_eq!(agent_name(&self::card("天気", "")), "agent");
    }
}
