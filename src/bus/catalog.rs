//! The actions of an agent: which skills of its card are published, under which tokens, with which metadata.

use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Value, json};

use super::service::EndpointInfo;
use super::subject::{Subjects, Token};
use crate::a2a::card::{Card, Interface, Skill};
use crate::action::actions;
use crate::action::params::{Template, files_schema};
use crate::config;
use crate::text::shorten;

/// Maximum number of actions of one agent, not counting the built-in ones: each needs a subscription and an entry
/// in INFO.
pub(crate) const MAX_ACTIONS: usize = 500;
/// Maximum number of name clashes that are logged for one card.
const MAX_WARNINGS: usize = 20;
/// The action of an agent without published skills.
pub(super) const PROMPT: &str = "prompt";
/// Maximum bytes of a description in metadata; placeholders are read from the whole text.
const MAX_DESCRIPTION: usize = 2048;
const MAX_NAME: usize = 256;

/// One skill as an action.
#[derive(Debug)]
pub(crate) struct Action {
    /// The last token of its subject.
    pub token: Token,
    /// The text of `token` in an `Arc`, which requests share.
    pub label: Arc<str>,
    pub skill: Arc<actions::CallableSkill>,
    pub name: String,
    pub description: String,
    pub endpoint: EndpointInfo,
}

/// The published actions of a card.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    /// At most [`MAX_ACTIONS`].
    pub actions: Vec<Arc<Action>>,
    /// Number of skills that the configuration selects but the bridge does not publish.
    pub skills_left_out: usize,
    /// Why skills were left out.
    pub warnings: Vec<String>,
}

impl Catalog {
    /// The configuration selects and renames skills first; the limit applies to the rest.
    pub(crate) fn new(card: &Card, rules: &config::Skills, subjects: &Subjects, agent: &Token) -> Self {
        let selection = SkillSelection::new(rules);
        let (mut this, mut over_limit) = (Self::default(), 0);
        let mut taken: HashMap<Token, &str> = HashMap::new();
        for skill in card.skills.iter().filter(|skill| selection.includes(skill)) {
            if this.actions.len() == MAX_ACTIONS {
                over_limit += 1;
                continue;
            }
            let token = Token::action(selection.action_name(skill));
            match taken.entry(token.clone()) {
                Occupied(first) => {
                    this.skills_left_out += 1;
                    if this.warnings.len() < MAX_WARNINGS {
                        let (first, second) = (shorten(first.get(), 80), shorten(&skill.id, 80));
                        this.warnings.push(format!(
                            "skills `{first}` and `{second}` map to the same action `{token}`; publishing only the first"
                        ));
                    }
                }
                Vacant(free) => {
                    free.insert(&skill.id);
                    this.actions.push(Arc::new(Action::new(Some(skill), card, token, subjects, agent)));
                }
            }
        }
        if over_limit > 0 {
            this.skills_left_out += over_limit;
            this.warnings.push(format!(
                "an agent can have at most {MAX_ACTIONS} actions; not publishing {over_limit} more skills, select skills with `skills.allow`"
            ));
        }
        if this.actions.is_empty() {
            let action = Action::new(None, card, Token::action(PROMPT), subjects, agent);
            this.actions.push(Arc::new(action));
        }
        this
    }
}

/// An agent's card in v1.0 form. A card with more than [`MAX_ACTIONS`] skills shows the first that the
/// configuration selects, because the others would not fit into a message.
pub(crate) fn card(card: &Card, interface: &Interface, rules: &config::Skills) -> Value {
    if card.skills.len() <= MAX_ACTIONS {
        return card.to_v1(interface, &card.skills);
    }
    let selection = SkillSelection::new(rules);
    card.to_v1(interface, card.skills.iter().filter(|skill| selection.includes(skill)).take(MAX_ACTIONS))
}

/// The setting `skills`, with sets in place of lists: both cards and lists can be long.
struct SkillSelection<'a> {
    allow: HashSet<&'a str>,
    deny: HashSet<&'a str>,
    rename: &'a BTreeMap<String, String>,
}

impl<'a> SkillSelection<'a> {
    fn new(rules: &'a config::Skills) -> Self {
        let set = |list: &'a [String]| list.iter().map(String::as_str).collect();
        Self { allow: set(&rules.allow), deny: set(&rules.deny), rename: &rules.rename }
    }

    fn includes(&self, skill: &Skill) -> bool {
        let names =
            |set: &HashSet<&str>| set.contains(skill.id.as_str()) || set.contains(skill.name.as_str());
        (self.allow.is_empty() || names(&self.allow)) && !names(&self.deny)
    }

    /// The name of the skill's action, before it becomes a token.
    fn action_name(&self, skill: &'a Skill) -> &'a str {
        self.rename.get(&skill.id).or_else(|| self.rename.get(&skill.name)).unwrap_or(&skill.id)
    }
}

/// Warnings about names in `skills.rename` that cannot be used unchanged.
pub(crate) fn rename_warnings(rules: &config::Skills) -> Vec<String> {
    let escaped = rules.rename.iter().filter_map(|(skill, name)| {
        let token = Token::action(name);
        (token.as_str() != name).then(|| {
            let (skill, name) = (shorten(skill, 80), shorten(name, 80));
            format!("skill `{skill}` cannot be renamed to `{name}`, which is reserved or not a valid subject token; its action is `{token}`")
        })
    });
    escaped.collect()
}

impl Action {
    /// The action of a skill or, without one, of the agent as a whole.
    fn new(skill: Option<&Skill>, card: &Card, token: Token, subjects: &Subjects, agent: &Token) -> Self {
        let (name, description) = match skill {
            Some(skill) => (&skill.name, &skill.description),
            None => (&card.name, &card.description),
        };
        let called_skill = match skill {
            Some(skill) => actions::CallableSkill {
                id: Some(skill.id.as_str().into()),
                output_modes: skill.output_modes.clone(),
                template: Template::parse(&skill.description),
            },
            None => actions::CallableSkill::whole_agent(),
        };
        let modes = |own: Option<&Vec<String>>, default| {
            Value::from(own.filter(|own| !own.is_empty()).unwrap_or(default).as_slice()).to_string()
        };
        let mut metadata = metadata(name, description, &called_skill.template.schema());
        let mut insert = |key: &str, value| metadata.insert(key.to_owned(), value);
        insert("input_modes", modes(skill.map(|skill| &skill.input_modes), &card.input_modes));
        insert("output_modes", modes(skill.map(|skill| &skill.output_modes), &card.output_modes));
        insert("streaming", card.streaming.to_string());
        if let Some(skill) = skill {
            insert("a2a.skill", skill.id.clone());
            insert("tags", Value::from(skill.tags.as_slice()).to_string());
        }
        Self {
            label: token.as_str().into(),
            skill: Arc::new(called_skill),
            name: shorten(name, MAX_NAME),
            description: shorten(description, MAX_DESCRIPTION),
            endpoint: endpoint(token.to_string(), subjects.action(agent, &token), subjects, metadata),
            token,
        }
    }

    pub(crate) fn registry_entry(&self) -> RegistryEntry<'_> {
        RegistryEntry {
            action: self.token.as_str(),
            subject: &self.endpoint.subject,
            skill: self.skill.id.as_deref(),
            name: &self.name,
            description: &self.description,
            params: Some(self.skill.template.schema()),
        }
    }
}

/// One action in the registry.
#[derive(Debug, Serialize)]
pub(crate) struct RegistryEntry<'a> {
    action: &'a str,
    subject: &'a str,
    skill: Option<&'a str>,
    name: &'a str,
    description: &'a str,
    params: Option<Value>,
}

impl RegistryEntry<'_> {
    /// Leaves out the long fields, for an announcement that would not fit into a message.
    pub(crate) fn without_details(self) -> Self {
        Self { description: "", params: None, ..self }
    }
}

/// The actions that every agent has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuiltInAction {
    ProvideRequiredInput,
    CancelTask,
    GetTask,
    Card,
    /// Only where calls are logged.
    Attach,
}

impl BuiltInAction {
    pub(crate) const ALL: [Self; 5] =
        [Self::ProvideRequiredInput, Self::CancelTask, Self::GetTask, Self::Card, Self::Attach];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ProvideRequiredInput => "provide_required_input",
            Self::CancelTask => "cancel_task",
            Self::GetTask => "get_task",
            Self::Card => "card",
            Self::Attach => "attach",
        }
    }

    pub(crate) fn endpoint(self, subjects: &Subjects, agent: &Token) -> EndpointInfo {
        let task_params = json!({
            "type": "object", "required": ["task_id"], "additionalProperties": false,
            "properties": {"task_id": {"type": "string"}},
        });
        let (subject, title, description, params) = match self {
            Self::ProvideRequiredInput => (
                subjects.provide_required_input(agent),
                "Provide required input",
                "Answers a question of the agent, by the follow-up id of a reply",
                json!({
                    "type": "object", "required": ["follow_up_id", "user_response"], "additionalProperties": false,
                    "properties": {
                        "follow_up_id": {"type": "string", "format": "uuid"},
                        "user_response": {"type": "string"},
                        "files": files_schema(),
                    },
                }),
            ),
            Self::CancelTask => {
                (subjects.cancel_task(agent), "Cancel task", "Cancels a task at the agent", task_params)
            }
            Self::GetTask => (subjects.get_task(agent), "Get task", "Shows the state of a task", task_params),
            Self::Card => (
                subjects.card(agent),
                "Agent card",
                "The agent's card as the bridge uses it, in A2A v1.0 form",
                json!({}),
            ),
            Self::Attach => (
                subjects.attach(agent),
                "Attach",
                "Sends the frames of a logged call, from a frame on to its end",
                json!({
                    "type": "object", "additionalProperties": false,
                    "properties": {
                        "task_id": {"type": "string"},
                        "run": {"type": "string", "format": "uuid"},
                        "from": {"type": "integer", "minimum": 0},
                    },
                }),
            ),
        };
        endpoint(self.name().to_owned(), subject, subjects, metadata(title, description, &params))
    }
}

/// An endpoint that gateways can call, too.
fn endpoint(
    name: String,
    subject: String,
    subjects: &Subjects,
    metadata: BTreeMap<String, String>,
) -> EndpointInfo {
    EndpointInfo { name, gateway_subject: subjects.gateway(&subject), subject, metadata }
}

fn metadata(name: &str, description: &str, params: &Value) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("name".to_owned(), shorten(name, MAX_NAME)),
        ("description".to_owned(), shorten(description, MAX_DESCRIPTION)),
        ("params".to_owned(), params.to_string()),
    ])
}
