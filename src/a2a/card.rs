//! The agent card: found, read, and understood.
//!
//! A card is untrusted text. It names skills and the path and dialect of the interface; host,
//! port and credentials come from the settings. Reading takes every version's card.

mod fetch;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use url::Url;

use super::client::ClientError;
use super::dialect::Dialect;
use super::security::Security;
use crate::secrets::Secrets;
use crate::text::{shorten, snippet};
pub(crate) use fetch::fetch;

/// Most problems of skills that are logged for one card.
const MAX_SKILL_WARNINGS: usize = 20;
/// Most interfaces that are taken from one card.
const MAX_OFFERS: usize = 16;

/// Why there is no card.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    #[error("cannot read the agent card from {url}")]
    Fetch {
        /// Where it was looked for.
        url: String,
        #[source]
        source: Box<ClientError>,
    },
    #[error("no answer within {limit:?} from {url}")]
    Timeout {
        /// Where it was looked for.
        url: String,
        limit: Duration,
    },
    /// The card is larger than any card needs to be.
    #[error("the agent card at {url} is larger than {limit} bytes, which is the most that is read")]
    TooLarge { url: String, limit: u64 },
    /// Nobody accepts connections, so a card from the settings is of no use.
    #[error("nobody accepts connections at {url}")]
    NotListening { url: String },
    /// The agent refuses, or has nothing there.
    #[error("no agent card: {0}")]
    Status(String),
    /// What is there is not a card.
    #[error("not an agent card: {0}")]
    Invalid(String),
    /// The agent speaks only what the bridge does not.
    #[error("the agent offers only {0}; this bridge speaks A2A v0.1 to v1.0 over JSON-RPC and REST")]
    Unsupported(String),
    /// The card asks for credentials that the settings do not have.
    #[error("the card asks for {0}; add it to `auth` (or `auth: []` to try without)")]
    Auth(String),
}

impl CardError {
    /// The same without the agent's credentials.
    #[must_use]
    pub fn redacted(mut self, secrets: &Secrets) -> Self {
        match &mut self {
            Self::Fetch { source, .. } => source.redact(secrets),
            Self::Status(text) | Self::Invalid(text) | Self::Unsupported(text) | Self::Auth(text) => {
                secrets.redact(text);
            }
            Self::Timeout { .. } | Self::TooLarge { .. } | Self::NotListening { .. } => {}
        }
        self
    }

    /// Whether there is no agent at all, rather than one without a usable card.
    pub fn is_unreachable(&self) -> bool {
        match self {
            Self::NotListening { .. } => true,
            Self::Fetch { source, .. } => matches!(**source, ClientError::Unreachable(_)),
            _ => false,
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Card {
    /// The agent's name for itself.
    pub name: String,
    /// What it says it is.
    pub description: String,
    pub version: String,
    pub streaming: bool,
    /// Media types it answers with, unless a skill says otherwise.
    pub output_modes: Vec<String>,
    pub input_modes: Vec<String>,
    pub skills: Vec<Skill>,
    /// Things about the card that are worth a warning.
    pub warnings: Vec<String>,
    security: Security,
    hash: String,
    raw: Map<String, Value>,
}

/// One skill of a card.
#[derive(Debug, Clone, PartialEq)]
pub struct Skill {
    /// The agent's id of it.
    pub id: String,
    pub name: String,
    /// What it does; `{identifier}` in it names a parameter.
    pub description: String,
    pub tags: Vec<String>,
    /// Prompts that it is good for.
    pub examples: Vec<String>,
    /// Media types it takes; empty means the card's.
    pub input_modes: Vec<String>,
    /// Media types it answers with; empty means the card's.
    pub output_modes: Vec<String>,
}

/// Where and how the agent is called.
#[derive(Debug, Clone, PartialEq)]
pub struct Interface {
    pub url: Url,
    pub dialect: Dialect,
    /// The tenant that calls are for (v1.0).
    pub tenant: Option<String>,
    pub reason: String,
    /// Whether the agent has answered a probe there, in this wire.
    pub is_confirmed: bool,
}

/// One interface as the card offers it; nothing of it is believed yet.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Offer {
    pub(super) url: String,
    pub(super) binding: String,
    pub(super) version: String,
    pub(super) tenant: Option<String>,
    /// Whether it is among `supportedInterfaces`, which only v1.0 has.
    pub(super) is_v1_shape: bool,
    /// Whether the card has what only v0.1 has.
    pub(super) is_v01_shape: bool,
}

impl Card {
    /// Reads a card from its JSON text.
    pub fn parse(json: &[u8]) -> Result<Self, CardError> {
        let value: Value = serde_json::from_slice(json)
            .map_err(|e| CardError::Invalid(format!("{e}; it begins with: {}", snippet(json, 80))))?;
        Self::from_value(value)
    }

    /// Reads a card from a JSON value, such as one from the settings.
    pub fn from_value(value: Value) -> Result<Self, CardError> {
        let Value::Object(mut raw) = value else {
            return Err(CardError::Invalid("it is not a JSON object".to_owned()));
        };
        let name = text(&raw, "name").ok_or_else(|| CardError::Invalid("it has no `name`".to_owned()))?;
        let mut warnings = Vec::new();
        let skills = match raw.get("skills") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(list)) => skills(list, &mut warnings),
            Some(_) => return Err(CardError::Invalid("its `skills` is not a list".to_owned())),
        };
        let capabilities = raw.get("capabilities").and_then(Value::as_object);
        Ok(Self {
            name,
            description: text(&raw, "description").unwrap_or_default(),
            version: text(&raw, "version").unwrap_or_default(),
            streaming: capabilities
                .and_then(|c| c.get("streaming"))
                .and_then(Value::as_bool)
                .unwrap_or(false),
            output_modes: texts(&raw, "defaultOutputModes", "default_output_modes"),
            input_modes: texts(&raw, "defaultInputModes", "default_input_modes"),
            skills,
            warnings,
            security: Security::of_card(&raw),
            hash: hash(&raw),
            raw: {
                // They are the bulk of a card, and read already.
                raw.remove("skills");
                raw
            },
        })
    }

    /// Changes when the card does, whatever order its keys come in.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// What the card asks callers to show.
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// The interfaces in words, for people.
    pub(super) fn offered(&self) -> String {
        let offers = self.offers();
        let words = offers.iter().take(8).map(|offer| {
            let words = format!("{} {}", offer.binding, offer.version);
            shorten(words.trim(), 64)
        });
        words.collect::<Vec<_>>().join(", ")
    }

    /// Every interface of the card, the preferred one first.
    pub(super) fn offers(&self) -> Vec<Offer> {
        let get = |map: &Map<String, Value>, key: &str, snake: &str| {
            text(map, key).or_else(|| text(map, snake)).filter(|text| !text.is_empty())
        };
        let list = |key: &str, snake: &str| {
            let value = self.raw.get(key).or_else(|| self.raw.get(snake));
            value
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(Value::as_object)
                .take(MAX_OFFERS)
        };
        let is_v01_shape = self.raw.contains_key("authentication");
        let mut offers: Vec<_> = list("supportedInterfaces", "supported_interfaces")
            .map(|i| Offer {
                url: text(i, "url").unwrap_or_default(),
                binding: get(i, "protocolBinding", "protocol_binding")
                    .or_else(|| text(i, "transport"))
                    .unwrap_or_default(),
                version: get(i, "protocolVersion", "protocol_version").unwrap_or_default(),
                tenant: get(i, "tenant", "tenant"),
                is_v1_shape: true,
                is_v01_shape: false,
            })
            .collect();
        // Cards before v1, and the older half of a merged one.
        let older = |url: String, binding: Option<String>| Offer {
            url,
            binding: binding.unwrap_or_default(),
            version: get(&self.raw, "protocolVersion", "protocol_version").unwrap_or_default(),
            tenant: None,
            is_v1_shape: false,
            is_v01_shape,
        };
        if offers.is_empty() || self.raw.contains_key("url") {
            let url = text(&self.raw, "url").unwrap_or_default();
            offers.push(older(url, get(&self.raw, "preferredTransport", "preferred_transport")));
        }
        let additional = list("additionalInterfaces", "additional_interfaces");
        offers.extend(additional.map(|i| older(text(i, "url").unwrap_or_default(), text(i, "transport"))));
        offers
    }

    /// The card as the bridge uses it, in v1.0 form, with these of its skills.
    pub fn to_v1<'a>(&self, interface: &Interface, skills: impl IntoIterator<Item = &'a Skill>) -> Value {
        let mut card = Map::new();
        card.insert("name".into(), json!(self.name));
        card.insert("description".into(), json!(self.description));
        card.insert(
            "supportedInterfaces".into(),
            json!([{
                "url": interface.url.as_str(),
                "protocolBinding": interface.dialect.binding(),
                "protocolVersion": interface.dialect.protocol_version(),
            }]),
        );
        if let Some(tenant) = &interface.tenant
            && let Some(first) = card.get_mut("supportedInterfaces").and_then(|list| list.get_mut(0))
        {
            first["tenant"] = json!(tenant);
        }
        for key in ["provider", "documentationUrl", "iconUrl"] {
            if let Some(value) = self.raw.get(key).filter(|value| !value.is_null()) {
                card.insert(key.to_owned(), value.clone());
            }
        }
        card.insert("version".into(), json!(self.version));
        card.insert("capabilities".into(), json!({ "streaming": self.streaming }));
        card.insert("defaultInputModes".into(), json!(self.input_modes));
        card.insert("defaultOutputModes".into(), json!(self.output_modes));
        card.insert("skills".into(), skills.into_iter().map(Skill::to_v1).collect());
        Value::Object(card)
    }
}

impl Skill {
    fn to_v1(&self) -> Value {
        let mut skill = json!({
            "id": self.id, "name": self.name, "description": self.description, "tags": self.tags,
        });
        let Some(object) = skill.as_object_mut() else {
            return skill;
        };
        let lists = [
            ("examples", &self.examples),
            ("inputModes", &self.input_modes),
            ("outputModes", &self.output_modes),
        ];
        for (key, list) in lists {
            if !list.is_empty() {
                object.insert(key.to_owned(), json!(list));
            }
        }
        skill
    }
}

/// All skills of a card, as which of them are published is for the settings to say. Their number is
/// bounded by the size of a card.
fn skills(list: &[Value], warnings: &mut Vec<String>) -> Vec<Skill> {
    let mut skills: Vec<Skill> = Vec::new();
    let mut ids = HashSet::new();
    let mut problems = Vec::new();
    for (index, value) in list.iter().enumerate() {
        match skill(index, value) {
            Err(problem) => problems.push(problem),
            Ok(skill) if !ids.insert(skill.id.clone()) => {
                problems.push(format!("a second skill with the id `{}` is left out", shorten(&skill.id, 80)));
            }
            Ok(skill) => skills.push(skill),
        }
    }
    let unsaid = problems.len().saturating_sub(MAX_SKILL_WARNINGS);
    problems.truncate(MAX_SKILL_WARNINGS);
    warnings.append(&mut problems);
    if unsaid > 0 {
        warnings.push(format!("{unsaid} more skills are left out for such reasons"));
    }
    skills
}

/// The error says why there is no such skill.
fn skill(index: usize, value: &Value) -> Result<Skill, String> {
    let skill = value.as_object().ok_or_else(|| format!("skill {index} is not an object; it is left out"))?;
    let (id, name) = (text(skill, "id"), text(skill, "name"));
    let id = id
        .or_else(|| name.clone())
        .ok_or_else(|| format!("skill {index} has neither id nor name; it is left out"))?;
    Ok(Skill {
        name: name.unwrap_or_else(|| id.clone()),
        id,
        description: text(skill, "description").unwrap_or_default(),
        tags: texts(skill, "tags", "tags"),
        examples: texts(skill, "examples", "examples"),
        input_modes: texts(skill, "inputModes", "input_modes"),
        output_modes: texts(skill, "outputModes", "output_modes"),
    })
}

fn hash(raw: &Map<String, Value>) -> String {
    // Sorted by key at every level: an agent that serves its card from a hash map changes
    // the order at every start.
    fn sorted(value: &Value) -> Value {
        match value {
            Value::Object(map) => {
                let ordered: std::collections::BTreeMap<_, _> =
                    map.iter().map(|(k, v)| (k.clone(), sorted(v))).collect();
                Value::Object(ordered.into_iter().collect())
            }
            Value::Array(list) => Value::Array(list.iter().map(sorted).collect()),
            other => other.clone(),
        }
    }
    let digest = Sha256::digest(sorted(&Value::Object(raw.clone())).to_string());
    digest.iter().take(16).fold(String::with_capacity(32), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// A string field; numbers are written out, because versions and ids sometimes are ones.
fn text(map: &Map<String, Value>, key: &str) -> Option<String> {
    match map.get(key)? {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn texts(map: &Map<String, Value>, key: &str, snake: &str) -> Vec<String> {
    let list = map.get(key).or_else(|| map.get(snake)).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).take(64).collect()
}
