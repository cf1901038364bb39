//! `init`: a first settings file, blank or for an agent that answers.

use crate::text::error_chain;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use url::Url;

use super::output::{one_line, print, remark, say};
use super::{DEFECT, Failure, TROUBLE, USAGE};
use crate::a2a;
use crate::a2a::card::{self, Card};
use crate::bus::subject::Token;
use crate::config;
use crate::text::{head, shorten};

/// Most skills that are listed in a comment.
const MAX_SKILLS: usize = 50;
/// Longest name that is made from a card's.
const MAX_NAME: usize = 40;

/// Options of `init`.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Where to write; `-` is stdout
    #[arg(value_name = "FILE", default_value = "a2a-bridge.yaml")]
    file: PathBuf,
    /// Write settings for the agent that answers here
    #[arg(long, value_name = "URL")]
    from: Option<Url>,
}

pub(super) async fn run(args: Args) -> Result<ExitCode, Failure> {
    let to_stdout = args.file == Path::new("-");
    // Before anything is asked: the user's file comes first.
    if !to_stdout && args.file.exists() {
        return Err(exists(&args.file));
    }
    let (text, agent) = match &args.from {
        None => (settings("demo", "http://127.0.0.1:9000", &BLANK), "demo".to_owned()),
        Some(url) => {
            let card = read(url).await?;
            let name = name_of(&card);
            (settings(&name, base(url), &comments_of(&card)), name)
        }
    };
    if to_stdout {
        return print(text.trim_end());
    }
    write(&args.file, &text)?;
    let (file, default) = (args.file.display().to_string(), "a2a-bridge.yaml");
    let flag = if file == default { String::new() } else { format!(" --config {file}") };
    say(format_args!("wrote {file}"));
    remark("next:");
    let mut steps = vec![
        (format!("a2a-bridge check{flag}"), "is everything there?"),
        (format!("a2a-bridge run{flag}"), "put the agent on NATS"),
        (format!("a2a-bridge skills {}", Token::new(&agent)), "from any machine that reaches NATS"),
    ];
    if args.from.is_none() {
        let demo = "a2a-bridge demo-agent --port 9000".to_owned();
        steps.insert(0, (demo, "an agent to try it with, in another terminal"));
    }
    let width = steps.iter().map(|(command, _)| command.len()).max().unwrap_or_default();
    for (command, why) in steps {
        remark(format_args!("  {command:width$}   # {why}"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads the card the way the bridge would with these settings.
async fn read(url: &Url) -> Result<Card, Failure> {
    let text = settings("agent", base(url), &BLANK);
    let config = config::parse(&text, "--from", &|name| std::env::var(name).ok()).map_err(|_| {
        let error = anyhow::anyhow!("`{url}` is not an address of an agent");
        Failure::new(USAGE, error).hint("it looks like `http://127.0.0.1:9000`")
    })?;
    let no_agent = |error: &dyn std::error::Error| {
        Failure::new(TROUBLE, anyhow::anyhow!(error_chain(error)))
            .hint("is the agent running there? Without `--from`, `a2a-bridge init` writes a file to fill in")
    };
    let no_card = |error: &card::CardError| {
        match error {
        card::CardError::Status(_) => Failure::new(TROUBLE, anyhow::anyhow!(error_chain(error))).hint(
            "if its card is elsewhere, write the file without `--from` and set `card_path`; is it an A2A agent?",
        ),
        _ => no_agent(error),
    }
    };
    let agent = config
        .agents
        .first()
        .ok_or_else(|| Failure::new(DEFECT, anyhow::anyhow!("no agent in the settings")))?;
    let http = a2a::http_client().map_err(|error| Failure::new(DEFECT, error))?;
    let chooser = a2a::chooser(agent, &http, &agent.secrets()).map_err(|error| no_agent(&error))?;
    let card = card::fetch(chooser.http(), &agent.url, None, &chooser.card_credentials())
        .await
        .map_err(|error| no_card(&error))?;
    chooser.choose(&card).await.map_err(|error| no_agent(&error))?;
    Ok(card)
}

fn base(url: &Url) -> &str {
    url.as_str().trim_end_matches('/')
}

/// A short name for the mesh out of the card's.
fn name_of(card: &Card) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }
    };
    let name: String = card.name.chars().map(plain).collect();
    let words: Vec<_> = name.split('-').filter(|word| !word.is_empty()).collect();
    match head(&words.join("-"), MAX_NAME).trim_matches('-') {
        "" => "agent".to_owned(),
        name => name.to_owned(),
    }
}

struct Comments {
    about: String,
    skills: String,
}

static BLANK: std::sync::LazyLock<Comments> =
    std::sync::LazyLock::new(|| Comments { about: String::new(), skills: String::new() });

/// What the card says, as comments: they cannot become settings, whatever it says.
fn comments_of(card: &Card) -> Comments {
    let mut skills = String::from("    # Its skills:\n");
    if card.skills.is_empty() {
        skills = "    # Its card lists no skills, so it gets one action, `prompt`.\n".to_owned();
    }
    for skill in card.skills.iter().take(MAX_SKILLS) {
        let line = format!("{}: {}", one_line(&skill.id), one_line(&skill.description));
        skills.push_str(&format!("    #   {}\n", shorten(&line, 100)));
    }
    if card.skills.len() > MAX_SKILLS {
        skills.push_str(&format!("    #   and {} more\n", card.skills.len() - MAX_SKILLS));
    }
    let about = format!("{}: {}", one_line(&card.name), one_line(&card.description));
    Comments { about: format!("  # {}\n", shorten(&about, 100)), skills }
}

fn settings(name: &str, url: &str, comments: &Comments) -> String {
    let Comments { about, skills } = comments;
    format!(
        r#"# yaml-language-server: $schema=a2a-bridge.schema.json
# Settings of a2a-bridge. Editors complete and check them after
#   a2a-bridge schema > a2a-bridge.schema.json

nats:
  url: ${{NATS_URL:-nats://127.0.0.1:4222}}

agents:
{about}  - name: {name}
    url: {url}
{skills}    # Let the bridge start the agent, watch over it and start it again:
    # command: python -m my_agent --port 9000
    # A token that the agent wants:
    # bearer_token: ${{AGENT_TOKEN}}
"#
    )
}

fn write(file: &Path, text: &str) -> Result<(), Failure> {
    let mut options = std::fs::OpenOptions::new();
    let opened = options.write(true).create_new(true).open(file);
    opened.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| {
        if error.kind() == std::io::ErrorKind::AlreadyExists {
            return exists(file);
        }
        let error = anyhow::Error::new(error).context(format!("cannot write {}", file.display()));
        Failure::new(TROUBLE, error).hint("choose another file: `a2a-bridge init FILE`")
    })
}

fn exists(file: &Path) -> Failure {
    Failure::new(USAGE, anyhow::anyhow!("{} exists already, and is left as it is", file.display()))
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
    fn what_is_written_is_valid_and_says_what_was_asked_for() {
        let blank = settings("demo", "http://127.0.0.1:9000", &BLANK);
        let config = config::parse(&blank, "a2a-bridge.yaml", &|_| None).unwrap();
        assert_eq!(config.agents[0].name, "demo");
        assert_eq!(config.nats.url[0].as_ref(), "nats://127.0.0.1:4222");
    }

    #[test]
    fn a_card_cannot_write_settings() {
        let card = card("Weather & Co.\nnats: {}", "x\n  - name: evil");
        let text = settings(&name_of(&card), "http://127.0.0.1:9000", &comments_of(&card));
        let config = config::parse(&text, "a2a-bridge.yaml", &|_| None).unwrap();
        assert_eq!(config.agents.len(), 1);
        assert_eq!(config.agents[0].name, "weather-co-nats");
        assert_eq!(name_of(&self::card("天気", "")), "agent");
    }
}
