//! NATS service discovery: the agents and skills on NATS, and errors for unknown ones.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use super::client::{JsonFields as _, NatsClient, NoReply};
use super::output::one_line;
use super::{CliError, CliResult, UNAVAILABLE, USAGE};
use crate::bus::publication::{ACTIONS, CARD_VERSION};
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};
use crate::text::{Timestamp, shorten};

const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Discovery ends when no further reply arrives for this long.
const NEXT_REPLY_TIMEOUT: Duration = Duration::from_millis(300);
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of an agent error in a message, in bytes.
const MAX_ERROR: usize = 200;
/// Maximum length of a list of names in a hint, in bytes.
const MAX_NAMES: usize = 400;

/// One agent as one bridge serves it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DiscoveredAgent {
    /// The name in the bridge's configuration.
    pub(super) agent: String,
    /// The name as it is escaped in subjects.
    pub(super) token: String,
    pub(super) state: String,
    pub(super) since: Option<Timestamp>,
    pub(super) restarts: Option<u64>,
    pub(super) last_error: Option<String>,
    /// The same in a few words.
    pub(super) reason: Option<String>,
    /// The description and version on the card.
    pub(super) description: String,
    pub(super) version: Option<String>,
    pub(super) protocol_version: Option<String>,
    pub(super) binding: Option<String>,
    pub(super) bridge: String,
    /// The host and the process of the bridge.
    pub(super) bridge_id: Option<String>,
    pub(super) instance: String,
    pub(super) skills: Vec<DiscoveredSkill>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct DiscoveredSkill {
    /// The last token of the subject.
    pub(super) action: String,
    pub(super) subject: String,
    /// The skill id on the card; `None` for the action of an agent whose card lists no skills.
    pub(super) skill: Option<String>,
    pub(super) name: String,
    pub(super) description: String,
    pub(super) tags: Value,
    pub(super) input_modes: Value,
    pub(super) output_modes: Value,
    pub(super) streaming: bool,
    /// JSON schema of the parameters.
    pub(super) params: Value,
}

impl DiscoveredSkill {
    fn from_endpoint(endpoint: &Value) -> Option<Self> {
        let metadata = |key: &str| endpoint.get("metadata")?.get(key)?.as_str();
        let text = |key: &str| metadata(key).unwrap_or_default().to_owned();
        let value = |key: &str| serde_json::from_str(metadata(key)?).ok();
        Some(Self {
            action: endpoint.text("/name")?.to_owned(),
            subject: endpoint.text("/subject")?.to_owned(),
            skill: metadata("a2a.skill").map(str::to_owned),
            name: text("name"),
            description: text("description"),
            tags: value("tags").unwrap_or_default(),
            input_modes: value("input_modes").unwrap_or_default(),
            output_modes: value("output_modes").unwrap_or_default(),
            streaming: metadata("streaming") == Some("true"),
            params: value("params").unwrap_or_default(),
        })
    }

    pub(super) fn required_parameters(&self) -> String {
        let mut required = self.params.list("/required");
        if required.is_empty() {
            // A skill with a template takes either its own parameters or a prompt.
            required = self.params.list("/oneOf/0/required");
        }
        let required: Vec<_> = required.iter().filter_map(Value::as_str).collect();
        required.join(", ")
    }
}

#[derive(Debug, Default)]
pub(super) struct Discovery {
    /// The agents with our subject prefix, sorted by name.
    pub(super) agents: Vec<DiscoveredAgent>,
    /// Subject prefixes of other bridges on the same server.
    other_prefixes: Vec<String>,
}

pub(super) async fn discover(mesh: &NatsClient) -> CliResult<Discovery> {
    let [all, ..] = Subjects::srv(DiscoveryVerb::Info, &Token::new(""), "");
    discover_at(mesh, all).await
}

/// Discovers the instances of one agent.
pub(super) async fn discover_agent(mesh: &NatsClient, agent: &Token) -> CliResult<Discovery> {
    let [_, by_name, _] = Subjects::srv(DiscoveryVerb::Info, agent, "");
    discover_at(mesh, by_name).await
}

/// The STATS replies of all services, also of other programs.
pub(super) async fn stats(mesh: &NatsClient) -> CliResult<Vec<Value>> {
    let [all, ..] = Subjects::srv(DiscoveryVerb::Stats, &Token::new(""), "");
    let mut replies = Vec::new();
    collect(mesh, all, |stats| replies.push(stats)).await?;
    Ok(replies)
}

async fn discover_at(mesh: &NatsClient, subject: String) -> CliResult<Discovery> {
    let mut discovery = Discovery::default();
    collect(mesh, subject, |info| _ = discovery.add(&info, &mesh.subjects)).await?;
    discovery.agents.sort_by(|a, b| (&a.agent, &a.instance).cmp(&(&b.agent, &b.instance)));
    discovery.other_prefixes.sort();
    discovery.other_prefixes.dedup();
    Ok(discovery)
}

/// Requests discovery, and passes on each reply that is JSON.
async fn collect(mesh: &NatsClient, subject: String, mut add: impl FnMut(Value)) -> CliResult<()> {
    let mut replies = mesh.request(subject, HeaderMap::new(), Bytes::new()).await?;
    let end = Instant::now() + DISCOVERY_TIMEOUT;
    let mut timeout = FIRST_REPLY_TIMEOUT;
    loop {
        match replies.next_within(timeout.min(end.saturating_duration_since(Instant::now()))).await {
            Ok(message) => {
                timeout = NEXT_REPLY_TIMEOUT;
                if let Ok(reply) = serde_json::from_slice(&message.payload) {
                    add(reply);
                }
            }
            Err(NoReply::NoResponders | NoReply::Timeout(_)) => return Ok(()),
            Err(reason) => return Err(CliError::from(reason).context("cannot discover the agents")),
        }
    }
}

impl Discovery {
    /// Adds the agent of an INFO reply. Services of other programs answer too; they are not agents.
    fn add(&mut self, info: &Value, subjects: &Subjects) -> Option<()> {
        let field = |name: &str| info.get(name)?.as_str().map(str::to_owned);
        let metadata = |key: &str| info.get("metadata")?.get(key)?.as_str().map(str::to_owned);
        let (agent, bridge) = (metadata("a2a.agent")?, metadata("bridge")?);
        // The service of the agent protocol has the name of the agent, but no state.
        let state = metadata("a2a.state")?;
        let token = Token::new(&agent);
        let endpoints = info.list("/endpoints");
        let ours = subjects.card(&token);
        let card = endpoints.iter().find(|endpoint| endpoint.text("/name") == Some("card"));
        if let Some(subject) = card.and_then(|card| card.text("/subject")).filter(|subject| *subject != ours)
        {
            let prefix = subject.strip_suffix(&format!(".card.{token}"))?;
            self.other_prefixes.push(prefix.to_owned());
            return None;
        }
        let built_in = [
            subjects.provide_required_input(&token),
            subjects.cancel_task(&token),
            subjects.get_task(&token),
            ours,
        ];
        let skills = endpoints.iter().filter_map(DiscoveredSkill::from_endpoint);
        let description = field("description").unwrap_or_default();
        let description = description.rsplit_once(ACTIONS).map_or(&*description, |(card, _)| card).to_owned();
        self.agents.push(DiscoveredAgent {
            state,
            since: metadata("a2a.since").and_then(|since| since.parse().ok()),
            restarts: metadata("a2a.restarts").and_then(|text| text.parse().ok()),
            last_error: metadata("a2a.last_error"),
            reason: metadata("a2a.reason"),
            bridge_id: metadata("a2a.bridge_id"),
            protocol_version: metadata("a2a.protocol_version"),
            binding: metadata("a2a.binding"),
            agent,
            bridge,
            token: field("name")?,
            instance: field("id")?,
            description,
            version: metadata(CARD_VERSION),
            skills: skills.filter(|skill| !built_in.contains(&skill.subject)).collect(),
        });
        Some(())
    }

    /// The instances of an agent, found by its name, else by its escaped name.
    pub(super) fn instances(&self, name: &str) -> Vec<&DiscoveredAgent> {
        let by_name: Vec<_> = self.agents.iter().filter(|agent| agent.agent == name).collect();
        if !by_name.is_empty() {
            return by_name;
        }
        self.agents.iter().filter(|agent| agent.token == name).collect()
    }

    /// The first instance of an agent.
    pub(super) fn instance(&self, name: &str, mesh: &NatsClient) -> CliResult<&DiscoveredAgent> {
        let first = self.instances(name).first().copied();
        first.ok_or_else(|| self.unknown_agent_error(name, mesh))
    }

    pub(super) fn unknown_agent_error(&self, name: &str, mesh: &NatsClient) -> CliError {
        if self.agents.is_empty() {
            return self.no_agents_error(mesh);
        }
        let names = self.agents.iter().map(|agent| agent.agent.as_str()).collect();
        let hint = suggest(name, names, "the agents are");
        CliError::msg(UNAVAILABLE, format!("there is no agent `{name}`")).hint(hint)
    }

    pub(super) fn no_agents_error(&self, mesh: &NatsClient) -> CliError {
        let (servers, prefix) = (&mesh.servers, mesh.subjects.prefix());
        let hint = match self.other_prefixes.first() {
            Some(other) => format!("a bridge there uses another prefix: try `--prefix {other}`"),
            None => {
                "is the bridge running? `a2a-bridge run` starts it, `a2a-bridge init` writes a configuration"
                    .to_owned()
            }
        };
        CliError::msg(UNAVAILABLE, format!("no agents on NATS at {servers} with the prefix `{prefix}`"))
            .hint(hint)
    }

    /// Finds a skill by its action, id or name. An agent with a single skill needs no skill name.
    pub(super) fn skill(&self, agent: &str, skill: &str, mesh: &NatsClient) -> CliResult<&DiscoveredSkill> {
        let first = self.instance(agent, mesh)?;
        let instances = self.instances(agent);
        if let ("", [only]) = (skill, first.skills.as_slice()) {
            return Ok(only);
        }
        let skills = || instances.iter().flat_map(|agent| &agent.skills);
        let found = skills()
            .find(|one| one.action == skill)
            .or_else(|| skills().find(|one| one.skill.as_deref() == Some(skill)))
            .or_else(|| skills().find(|one| one.name.eq_ignore_ascii_case(skill)));
        if let Some(found) = found {
            return Ok(found);
        }
        let (code, error) = if skill.is_empty() {
            (USAGE, format!("no skill given; use `{agent}.SKILL`"))
        } else {
            (UNAVAILABLE, format!("agent `{agent}` has no skill `{skill}`"))
        };
        if skills().next().is_none() {
            return Err(CliError { exit_code: code, ..not_ready_error(first) });
        }
        let mut names: Vec<_> = skills().map(|one| one.action.as_str()).collect();
        names.sort_unstable();
        Err(CliError::msg(code, error).hint(suggest(skill, names, "its skills are")))
    }
}

/// A hint with up to three names that are similar to a misspelled one, or with all names.
pub(super) fn suggest(misspelled: &str, mut names: Vec<&str>, intro: &str) -> String {
    names.dedup();
    let similarity = |name: &str| strsim::jaro_winkler(&misspelled.to_lowercase(), &name.to_lowercase());
    let mut similar = names.clone();
    similar.retain(|name| similarity(name) > 0.75);
    similar.sort_by(|a, b| similarity(b).total_cmp(&similarity(a)));
    similar.truncate(3);
    if similar.is_empty() {
        return format!("{intro}: {}", shorten(&names.join(", "), MAX_NAMES));
    }
    format!("did you mean `{}`?", similar.join("` or `"))
}

/// The error for an agent that has no skills because it is not ready.
fn not_ready_error(agent: &DiscoveredAgent) -> CliError {
    let (name, state) = (&agent.agent, &agent.state);
    let reason = agent.last_error.as_ref().map(|why| format!(": {}", shorten(&one_line(why), MAX_ERROR)));
    let error = format!("agent `{name}` is {state}{}", reason.unwrap_or_default());
    let hint = match state.as_str() {
        "starting" if agent.last_error.is_none() => "try again in a moment".to_owned(),
        "stopped" => format!("`a2a-bridge agents start {name}` starts it"),
        _ => format!("`a2a-bridge agents show {name}` shows what to do"),
    };
    CliError::msg(UNAVAILABLE, error).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_name_finds_the_most_similar_ones() {
        let hint = |name: &str| suggest(name, vec!["report", "weather", "whether"], "the agents are");
        assert_eq!(hint("wether"), "did you mean `weather` or `whether`?");
        assert_eq!(hint("zzz"), "the agents are: report, weather, whether");
    }
}
