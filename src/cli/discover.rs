//! Who is there: the agents and skills that answer to NATS service discovery, and what to say about
//! one that does not.

use std::collections::BTreeMap;
use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;

use super::client::{Fields as _, Mesh, Silence};
use super::output::{nearest, one_line};
use super::{Failure, UNAVAILABLE};
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};
use crate::json::null_is_default;
use crate::text::shorten;

/// How long the first answer may take.
const FIRST: Duration = Duration::from_secs(2);
/// How long the next one may: whoever is slower than this after the others is not there.
const STALL: Duration = Duration::from_millis(300);
/// How long is listened at most.
const TOTAL: Duration = Duration::from_secs(5);
/// Longest error that is shown in a sentence.
const MAX_ERROR: usize = 200;

/// One agent as one bridge serves it.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DiscoveredAgent {
    /// The name in the bridge's settings.
    pub(super) agent: String,
    /// The same as it stands in subjects.
    pub(super) token: String,
    pub(super) state: String,
    pub(super) since: Option<String>,
    pub(super) restarts: Option<u64>,
    pub(super) last_error: Option<String>,
    pub(super) description: String,
    pub(super) version: String,
    pub(super) protocol_version: Option<String>,
    pub(super) binding: Option<String>,
    pub(super) bridge: String,
    pub(super) instance: String,
    pub(super) skills: Vec<DiscoveredSkill>,
}

/// One skill as an action.
#[derive(Debug, Clone, Serialize)]
pub(super) struct DiscoveredSkill {
    /// The last word of the subject.
    pub(super) action: String,
    pub(super) subject: String,
    /// The id on the card; none for the action of an agent without skills.
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
    /// The parameters that a call has to give, in words.
    pub(super) fn parameters(&self) -> String {
        let mut required = self.params.list("/required");
        if required.is_empty() {
            // A template takes its own parameters or, as the other way, a prompt.
            required = self.params.list("/oneOf/0/required");
        }
        let required: Vec<_> = required.iter().filter_map(Value::as_str).collect();
        required.join(", ")
    }
}

/// An INFO response, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Info {
    name: String,
    id: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    description: String,
    #[serde(default, deserialize_with = "null_is_default")]
    metadata: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "null_is_default")]
    endpoints: Vec<Endpoint>,
}

#[derive(Debug, Deserialize)]
struct Endpoint {
    name: String,
    subject: String,
    #[serde(default, deserialize_with = "null_is_default")]
    metadata: BTreeMap<String, String>,
}

/// Who answered.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The agents below our prefix, by name.
    pub(super) agents: Vec<DiscoveredAgent>,
    /// Prefixes of bridges that we do not look at.
    pub(super) other_prefixes: Vec<String>,
}

/// Asks who is there: one agent, or all.
pub(super) async fn discover(mesh: &Mesh, only: Option<&Token>) -> Result<Found, Failure> {
    let name = only.cloned().unwrap_or_else(|| Token::new(""));
    let [all, named, _] = Subjects::srv(DiscoveryVerb::Info, &name, "");
    let subject = if only.is_some() { named } else { all };
    let mut replies = mesh.request(subject, HeaderMap::new(), Bytes::new()).await?;
    let end = Instant::now() + TOTAL;
    let mut found = Found::default();
    let mut patience = FIRST;
    loop {
        match replies.next(patience.min(end.saturating_duration_since(Instant::now()))).await {
            Ok(message) => {
                patience = STALL;
                // Services of other programs answer too; some of them in ways of their own.
                if let Ok(info) = serde_json::from_slice::<Info>(&message.payload) {
                    found.take(info, &mesh.subjects);
                }
            }
            Err(Silence::NoResponders | Silence::Timeout(_)) => break,
            Err(silence) => return Err(silence.failure("cannot ask who is there")),
        }
    }
    found.agents.sort_by(|a, b| (&a.agent, &a.instance).cmp(&(&b.agent, &b.instance)));
    found.other_prefixes.sort();
    found.other_prefixes.dedup();
    Ok(found)
}

impl Found {
    fn take(&mut self, info: Info, subjects: &Subjects) {
        let meta = |key: &str| info.metadata.get(key).cloned();
        let (Some(agent), Some(bridge)) = (meta("a2a.agent"), meta("bridge")) else {
            return;
        };
        let token = Token::new(&agent);
        let ours = subjects.card(&token);
        if let Some(card) = info.endpoints.iter().find(|endpoint| endpoint.name == "card")
            && card.subject != ours
        {
            if let Some(prefix) = card.subject.strip_suffix(&format!(".card.{token}")) {
                self.other_prefixes.push(prefix.to_owned());
            }
            return;
        }
        let built_in = [
            subjects.provide_required_input(&token),
            subjects.cancel_task(&token),
            subjects.get_task(&token),
            ours,
        ];
        let skills = info
            .endpoints
            .into_iter()
            .filter(|endpoint| !built_in.contains(&endpoint.subject))
            .map(skill)
            .collect();
        self.agents.push(DiscoveredAgent {
            state: info.metadata.get("a2a.state").cloned().unwrap_or_default(),
            since: info.metadata.get("a2a.since").cloned(),
            restarts: info.metadata.get("a2a.restarts").and_then(|text| text.parse().ok()),
            last_error: info.metadata.get("a2a.last_error").cloned(),
            protocol_version: info.metadata.get("a2a.protocol_version").cloned(),
            binding: info.metadata.get("a2a.binding").cloned(),
            agent,
            bridge,
            token: info.name,
            instance: info.id,
            description: info.description,
            version: info.version,
            skills,
        });
    }

    /// The agent that a user means: by name, else by its token.
    pub(super) fn agents_named(&self, name: &str) -> Vec<&DiscoveredAgent> {
        let by =
            |same: &dyn Fn(&&DiscoveredAgent) -> bool| self.agents.iter().filter(same).collect::<Vec<_>>();
        let named = by(&|agent| agent.agent == name);
        if named.is_empty() { by(&|agent| agent.token == name) } else { named }
    }

    /// The names of all agents, once each.
    pub(super) fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.agents.iter().map(|agent| agent.agent.as_str()).collect();
        names.dedup();
        names
    }

    /// What to say when nobody of that name answers.
    pub(super) fn no_agent(&self, name: &str, mesh: &Mesh) -> Failure {
        if self.agents.is_empty() {
            return self.nobody(mesh);
        }
        let names = self.names();
        let near = nearest(name, names.iter().copied());
        let hint = if near.is_empty() {
            format!("there are: {}", shorten(&names.join(", "), 400))
        } else {
            format!("did you mean {}?", quoted(&near))
        };
        Failure::new(UNAVAILABLE, anyhow::anyhow!("there is no agent `{name}`")).hint(hint)
    }

    /// What to say when there is no agent at all.
    pub(super) fn nobody(&self, mesh: &Mesh) -> Failure {
        let prefix = mesh.subjects.prefix();
        let error = anyhow::anyhow!("no agents on NATS at {} with the prefix `{prefix}`", mesh.servers);
        let hint = match self.other_prefixes.first() {
            Some(other) => format!("there are some with another prefix: try `--prefix {other}`"),
            None => "is the bridge running there? `a2a-bridge run` starts it, `a2a-bridge init` writes its settings".to_owned(),
        };
        Failure::new(UNAVAILABLE, error).hint(hint)
    }

    /// The skill that a user means, by action, id or name; or what to say when there is none.
    pub(super) fn skill(&self, agent: &str, skill: &str, mesh: &Mesh) -> Result<&DiscoveredSkill, Failure> {
        let instances = self.agents_named(agent);
        let Some(first) = instances.first() else {
            return Err(self.no_agent(agent, mesh));
        };
        let skills = || instances.iter().flat_map(|agent| &agent.skills);
        let found = skills()
            .find(|one| one.action == skill)
            .or_else(|| skills().find(|one| one.skill.as_deref() == Some(skill)))
            .or_else(|| skills().find(|one| one.name.eq_ignore_ascii_case(skill)));
        if let Some(found) = found {
            return Ok(found);
        }
        if skills().next().is_none() {
            return Err(not_ready(first));
        }
        let mut names: Vec<_> = skills().map(|one| one.action.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let near = nearest(skill, names.iter().copied());
        let hint = if near.is_empty() {
            format!("it has: {}", shorten(&names.join(", "), 400))
        } else {
            format!("did you mean {}? `a2a-bridge skills {agent}` lists all", quoted(&near))
        };
        let error = if skill.is_empty() {
            anyhow::anyhow!("which skill of agent `{agent}`?")
        } else {
            anyhow::anyhow!("agent `{agent}` has no skill `{skill}`")
        };
        Err(Failure::new(UNAVAILABLE, error).hint(hint))
    }
}

/// What to say about an agent whose skills are withdrawn.
fn not_ready(agent: &DiscoveredAgent) -> Failure {
    let (name, state) = (&agent.agent, &agent.state);
    let why = agent.last_error.as_ref().map(|why| format!(": {}", shorten(&one_line(why), MAX_ERROR)));
    let error = anyhow::anyhow!("agent `{name}` is {state}{}", why.unwrap_or_default());
    let hint = match state.as_str() {
        "starting" => "try again in a moment".to_owned(),
        "stopped" => format!("`a2a-bridge agents start {name}` starts it"),
        _ => format!("`a2a-bridge agents show {name}` says what to do"),
    };
    Failure::new(UNAVAILABLE, error).hint(hint)
}

fn quoted(names: &[&str]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(" or ")
}

fn skill(endpoint: Endpoint) -> DiscoveredSkill {
    let text = |key: &str| endpoint.metadata.get(key).cloned().unwrap_or_default();
    let value = |key: &str| serde_json::from_str(&text(key)).unwrap_or_default();
    DiscoveredSkill {
        skill: endpoint.metadata.get("a2a.skill").cloned(),
        name: text("name"),
        description: text("description"),
        tags: value("tags"),
        input_modes: value("input_modes"),
        output_modes: value("output_modes"),
        streaming: text("streaming") == "true",
        params: value("params"),
        action: endpoint.name,
        subject: endpoint.subject,
    }
}
