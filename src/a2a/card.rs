//! The agent card of every version of A2A.
//!
//! A card is untrusted text. It declares skills and the path and dialect of interfaces; host, port and credentials come
//! from the configuration.

mod fetch;

use std::collections::HashSet;
use std::io;
use std::time::Duration;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};
use url::Url;

use super::choose::ProbeFailure;
use super::client::ClientError;
use super::dialect::Dialect;
use super::security::Security;
use crate::secrets::Secrets;
use crate::text::{hex, shorten, snippet};
pub(crate) use fetch::fetch;

/// Maximum number of warnings about skills of one card.
const MAX_SKILL_WARNINGS: usize = 20;
/// Maximum number of interfaces of one card that the bridge considers.
const MAX_INTERFACES: usize = 16;

/// The fields that are read from a parsed card. The others are most of a card, and take many times their text.
const KEPT_FIELDS: [&str; 13] = [
    "url",
    "provider",
    "documentationUrl",
    "iconUrl",
    "authentication",
    "protocolVersion",
    "protocol_version",
    "preferredTransport",
    "preferred_transport",
    "supportedInterfaces",
    "supported_interfaces",
    "additionalInterfaces",
    "additional_interfaces",
];

/// Why the bridge cannot use an agent's card.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    #[error("cannot read the agent card from {url}")]
    Fetch {
        url: String,
        #[source]
        source: Box<ClientError>,
    },
    #[error("no response within {limit:?} from {url}")]
    Timeout { url: String, limit: Duration },
    #[error("the agent card at {url} is larger than the limit of {limit} bytes")]
    TooLarge { url: String, limit: u64 },
    /// The card is in the configuration, but the agent does not listen.
    #[error("the agent does not accept connections at {url}")]
    NotListening { url: String },
    #[error("no agent card: {responses}")]
    Status {
        responses: String,
        /// The most telling one: that of rejected credentials, else the first that is not 404.
        status: u16,
    },
    #[error("not an agent card: {0}")]
    Invalid(String),
    #[error("the card declares only {0}; the bridge speaks A2A v0.1 to v1.0 over JSON-RPC and REST")]
    Unsupported(String),
    #[error("the card asks for {0}; add it to `auth`, or set `auth: []` to call the agent without it")]
    Auth(String),
    /// The card is usable, but calls would fail.
    #[error("{0}")]
    NotCallable(ProbeFailure),
}

impl CardError {
    #[must_use]
    pub fn redacted(mut self, secrets: &Secrets) -> Self {
        match &mut self {
            Self::Fetch { url, source } => {
                secrets.redact(url);
                source.redact(secrets);
            }
            Self::Status { responses: text, .. }
            | Self::Timeout { url: text, .. }
            | Self::TooLarge { url: text, .. }
            | Self::NotListening { url: text }
            | Self::Invalid(text)
            | Self::Unsupported(text)
            | Self::Auth(text) => secrets.redact(text),
            Self::NotCallable(_) => {}
        }
        self
    }

    /// Whether the agent does not listen at all, in contrast to an agent without a usable card.
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
    pub name: String,
    pub description: String,
    pub version: String,
    pub streaming: bool,
    /// The default for skills without output modes of their own.
    pub output_modes: Vec<String>,
    pub input_modes: Vec<String>,
    pub skills: Vec<Skill>,
    pub warnings: Vec<String>,
    pub security: Security,
    /// Changes when the card does, but not with the order of its keys.
    pub hash: String,
    raw: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Skill {
    pub id: String,
    pub name: String,
    /// `{identifier}` in it is a parameter.
    pub description: String,
    pub tags: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub examples: Vec<String>,
    /// Empty means those of the card.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub input_modes: Vec<String>,
    /// Empty means those of the card.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub output_modes: Vec<String>,
}

/// The URL and dialect that were chosen for an agent.
#[derive(Debug, Clone, PartialEq)]
pub struct Interface {
    pub url: Url,
    pub dialect: Dialect,
    /// Only in v1.0.
    pub tenant: Option<String>,
    /// Why it was chosen, for people.
    pub reason: String,
    /// Whether the agent has responded to a probe there, in this dialect.
    pub is_confirmed: bool,
    /// What speaks against it. `None` if a probe or a call has confirmed it, or nothing contradicts it.
    pub failure: Option<ProbeFailure>,
}

impl Interface {
    pub(super) fn is_same(&self, dialect: Dialect, url: &Url) -> bool {
        self.dialect == dialect && self.url == *url
    }
}

/// An interface as the card declares it, before it is checked.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DeclaredInterface {
    pub(super) url: String,
    pub(super) binding: String,
    pub(super) version: String,
    pub(super) tenant: Option<String>,
    /// Whether it is in `supportedInterfaces`, which only v1.0 has.
    pub(super) is_v1_form: bool,
    /// Whether the card has a field that only v0.1 has.
    pub(super) has_v01_field: bool,
}

impl Card {
    pub fn parse(json: &[u8]) -> Result<Self, CardError> {
        let invalid = |error: serde_json::Error| {
            let problem = match json.trim_ascii_start().first() {
                Some(b'<') => "HTML or XML instead of JSON".to_owned(),
                _ => error.to_string(),
            };
            CardError::Invalid(format!("{problem}; it begins with: {}", snippet(json, 80)))
        };
        Self::from_value(serde_json::from_slice(json).map_err(invalid)?)
    }

    pub fn from_value(value: Value) -> Result<Self, CardError> {
        let Value::Object(mut raw) = value else {
            return Err(CardError::Invalid("it is not a JSON object".to_owned()));
        };
        let name = text(&raw, "name").ok_or_else(|| CardError::Invalid("it has no `name`".to_owned()))?;
        let (skills, warnings) = match raw.get("skills") {
            None | Some(Value::Null) => Default::default(),
            Some(Value::Array(list)) => skills(list),
            Some(_) => return Err(CardError::Invalid("its `skills` is not a list".to_owned())),
        };
        let streaming = raw.get("capabilities").and_then(|capabilities| capabilities.get("streaming"));
        Ok(Self {
            name,
            description: text(&raw, "description").unwrap_or_default(),
            version: text(&raw, "version").unwrap_or_default(),
            streaming: streaming.and_then(Value::as_bool).unwrap_or(false),
            output_modes: strings(&raw, "defaultOutputModes"),
            input_modes: strings(&raw, "defaultInputModes"),
            skills,
            warnings,
            security: Security::of_card(&raw),
            hash: hash(&raw),
            raw: {
                raw.retain(|key, _| KEPT_FIELDS.contains(&key.as_str()));
                for (_, list) in &mut raw {
                    if let Value::Array(list) = list {
                        list.retain(Value::is_object);
                        list.truncate(MAX_INTERFACES);
                        list.shrink_to_fit();
                    }
                }
                raw
            },
        })
    }

    pub(super) fn describe_interfaces(&self) -> String {
        let interfaces = self.declared_interfaces();
        let names = interfaces.iter().take(8).map(|interface| {
            let name = format!("{} {}", interface.binding, interface.version);
            shorten(name.trim(), 64)
        });
        names.collect::<Vec<_>>().join(", ")
    }

    /// All interfaces, the preferred one first.
    pub(super) fn declared_interfaces(&self) -> Vec<DeclaredInterface> {
        let list = |key: &str| {
            let list = field(&self.raw, key).and_then(Value::as_array);
            list.into_iter().flatten().filter_map(Value::as_object)
        };
        let filled = |map: &Map<String, Value>, key: &str| text(map, key).filter(|text| !text.is_empty());
        let has_v01_field = self.raw.contains_key("authentication");
        let mut interfaces: Vec<_> = list("supportedInterfaces")
            .map(|i| DeclaredInterface {
                url: text(i, "url").unwrap_or_default(),
                binding: filled(i, "protocolBinding").or_else(|| text(i, "transport")).unwrap_or_default(),
                version: filled(i, "protocolVersion").unwrap_or_default(),
                tenant: filled(i, "tenant"),
                is_v1_form: true,
                has_v01_field: false,
            })
            .collect();
        // Cards before v1.0, and cards that declare both forms.
        let older = |url: String, binding: Option<String>| DeclaredInterface {
            url,
            binding: binding.unwrap_or_default(),
            version: filled(&self.raw, "protocolVersion").unwrap_or_default(),
            tenant: None,
            is_v1_form: false,
            has_v01_field,
        };
        if interfaces.is_empty() || self.raw.contains_key("url") {
            let url = text(&self.raw, "url").unwrap_or_default();
            interfaces.push(older(url, filled(&self.raw, "preferredTransport")));
        }
        let additional = list("additionalInterfaces");
        interfaces
            .extend(additional.map(|i| older(text(i, "url").unwrap_or_default(), text(i, "transport"))));
        interfaces
    }

    /// The card in the form of v1.0, with the chosen interface and these skills.
    pub fn to_v1<'a>(&self, interface: &Interface, skills: impl IntoIterator<Item = &'a Skill>) -> Value {
        let chosen = without_nulls(json!({
            "url": interface.url.as_str(),
            "protocolBinding": interface.dialect.binding(),
            "protocolVersion": interface.dialect.protocol_version(),
            "tenant": interface.tenant,
        }));
        without_nulls(json!({
            "name": self.name,
            "description": self.description,
            "supportedInterfaces": [chosen],
            "provider": self.raw.get("provider"),
            "documentationUrl": self.raw.get("documentationUrl"),
            "iconUrl": self.raw.get("iconUrl"),
            "version": self.version,
            "capabilities": { "streaming": self.streaming },
            "defaultInputModes": self.input_modes,
            "defaultOutputModes": self.output_modes,
            "skills": skills.into_iter().collect::<Vec<_>>(),
        }))
    }
}

fn without_nulls(mut object: Value) -> Value {
    if let Value::Object(fields) = &mut object {
        fields.retain(|_, value| !value.is_null());
    }
    object
}

/// All skills of a card, and warnings about those that are ignored; the configuration decides which of them are published. The size of a card bounds their number.
fn skills(list: &[Value]) -> (Vec<Skill>, Vec<String>) {
    let mut skills: Vec<Skill> = Vec::new();
    let mut ids = HashSet::new();
    let (mut warnings, mut omitted) = (Vec::new(), 0);
    for (index, value) in list.iter().enumerate() {
        let warning = match skill(index, value) {
            Err(warning) => warning,
            Ok(skill) if !ids.insert(skill.id.clone()) => {
                format!("ignoring a second skill with the id `{}`", shorten(&skill.id, 80))
            }
            Ok(skill) => {
                skills.push(skill);
                continue;
            }
        };
        if warnings.len() < MAX_SKILL_WARNINGS {
            warnings.push(warning);
        } else {
            omitted += 1;
        }
    }
    if omitted > 0 {
        warnings.push(format!("ignoring {omitted} more skills for similar reasons"));
    }
    (skills, warnings)
}

/// The error is a warning.
fn skill(index: usize, value: &Value) -> Result<Skill, String> {
    let skill = value.as_object().ok_or_else(|| format!("ignoring skill {index}, which is not an object"))?;
    let (id, name) = (text(skill, "id"), text(skill, "name"));
    let id = id
        .or_else(|| name.clone())
        .ok_or_else(|| format!("ignoring skill {index}, which has neither id nor name"))?;
    Ok(Skill {
        name: name.unwrap_or_else(|| id.clone()),
        id,
        description: text(skill, "description").unwrap_or_default(),
        tags: strings(skill, "tags"),
        examples: strings(skill, "examples"),
        input_modes: strings(skill, "inputModes"),
        output_modes: strings(skill, "outputModes"),
    })
}

fn hash(raw: &Map<String, Value>) -> String {
    struct HashWriter(Sha256);

    impl io::Write for HashWriter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut writer = HashWriter(Sha256::new());
    serde_json::to_writer(&mut writer, &SortedMap(raw)).expect("a hash accepts everything");
    let digest = writer.0.finalize();
    hex(digest.get(..16).unwrap_or(&digest))
}

/// JSON with sorted keys: an agent that serves its card from a hash map changes their order at every start.
struct Sorted<'a>(&'a Value);
struct SortedMap<'a>(&'a Map<String, Value>);

impl Serialize for Sorted<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Object(map) => SortedMap(map).serialize(serializer),
            Value::Array(list) => serializer.collect_seq(list.iter().map(Sorted)),
            other => other.serialize(serializer),
        }
    }
}

impl Serialize for SortedMap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields: Vec<_> = self.0.iter().collect();
        fields.sort_unstable_by_key(|(key, _)| *key);
        serializer.collect_map(fields.into_iter().map(|(key, value)| (key, Sorted(value))))
    }
}

/// The value of a key in camelCase, or of the same key in snake_case.
pub(super) fn field<'a>(map: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    map.get(key).filter(|value| !value.is_null()).or_else(|| {
        let snake =
            |c: char| if c.is_ascii_uppercase() { format!("_{}", c.to_ascii_lowercase()) } else { c.into() };
        map.get(&key.chars().map(snake).collect::<String>())
    })
}

/// A string field; also a number, because some versions and ids are numbers.
fn text(map: &Map<String, Value>, key: &str) -> Option<String> {
    match field(map, key)? {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn strings(map: &Map<String, Value>, key: &str) -> Vec<String> {
    let list = field(map, key).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_does_not_depend_on_the_order_of_keys() {
        let one = json!({"name": "a", "x": {"c": [1.5, {"e": null, "d": "é\""}], "b": true}});
        let other = json!({"x": {"b": true, "c": [1.5, {"d": "é\"", "e": null}]}, "name": "a"});
        let hash = |card: &Value| Card::from_value(card.clone()).unwrap().hash;
        assert_eq!(hash(&one), hash(&other));
        let mut sorted = one.clone();
        sorted.sort_all_objects();
        assert_eq!(hash(&one), hex(&Sha256::digest(sorted.to_string())[..16]), "as in earlier releases");
    }

    #[test]
    fn a_card_keeps_only_what_is_used() {
        let many = vec![json!({}); 10_000];
        let card =
            json!({"name": "a", "url": "http://a", "x": many, "supported_interfaces": many, "skills": many});
        let card = Card::from_value(card).unwrap();
        assert_eq!(card.raw.keys().collect::<Vec<_>>(), ["url", "supported_interfaces"]);
        assert_eq!(card.declared_interfaces().len(), MAX_INTERFACES + 1);
        assert_eq!((card.skills.len(), card.warnings.len()), (0, MAX_SKILL_WARNINGS + 1));
    }
}
