//! A card's skills as actions: which are published, under which tokens, with which metadata.

use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::service::EndpointInfo;
use super::subject::{Subjects, Token};
use crate::a2a::card::{Card, Interface, Skill};
use crate::action::actions;
use crate::action::params::{Template, files_schema};
use crate::config;
use crate::text::shorten;

/// Most actions of one agent beside the built-in ones: each is a subscription and an entry of INFO.
pub(crate) const MAX_ACTIONS: usize = 500;
/// Most clashes of names that are logged for one card.
const MAX_WARNINGS: usize = 20;
/// The action of an agent whose card leaves no skill.
const PROMPT: &str = "prompt";
/// Longest description in metadata; the whole one is used for placeholders.
const MAX_DESCRIPTION: usize = 2048;
const MAX_NAME: usize = 256;

/// One skill as an action.
#[derive(Debug)]
pub(crate) struct Action {
    /// The last token of its subject.
    pub token: Token,
    pub subject: String,
    /// The same as `token`, for requests to share.
    pub label: Arc<str>,
    /// The skill behind it, with its parameters.
    pub skill: Arc<actions::Skill>,
    pub name: String,
    pub description: String,
    metadata: BTreeMap<String, String>,
}

/// The actions of a card, and what was left out on the way.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    /// What is published, [`MAX_ACTIONS`] at the most.
    pub actions: Vec<Arc<Action>>,
    /// How many skills should be published, going by the settings, and are not.
    pub skills_left_out: usize,
    /// What to know about those.
    pub warnings: Vec<String>,
}

impl Catalog {
    /// The settings choose and name the skills first; the limit is for what they leave.
    pub(crate) fn new(card: &Card, rules: &config::Skills, subjects: &Subjects, agent: &Token) -> Self {
        let rules = Rules::new(rules);
        let (mut this, mut over_limit) = (Self::default(), 0);
        let mut taken: HashMap<Token, &str> = HashMap::new();
        for skill in card.skills.iter().filter(|skill| rules.publish(skill)) {
            if this.actions.len() == MAX_ACTIONS {
                over_limit += 1;
                continue;
            }
            let token = Token::action(rules.name(skill));
            match taken.entry(token.clone()) {
                Occupied(first) => {
                    this.skills_left_out += 1;
                    if this.warnings.len() < MAX_WARNINGS {
                        let (first, second) = (shorten(first.get(), 80), shorten(&skill.id, 80));
                        this.warnings.push(format!(
                            "skills `{first}` and `{second}` would share the action `{token}`; the second is left out"
                        ));
                    }
                }
                Vacant(free) => {
                    free.insert(&skill.id);
                    this.actions.push(Arc::new(Action::of_skill(skill, card, token, subjects, agent)));
                }
            }
        }
        if over_limit > 0 {
            this.skills_left_out += over_limit;
            this.warnings.push(format!(
                "an agent has at most {MAX_ACTIONS} actions; {over_limit} more skills are left out, choose with `skills.allow`"
            ));
        }
        if this.actions.is_empty() {
            this.actions.push(Arc::new(Action::of_agent(card, subjects, agent)));
        }
        this
    }
}

/// An agent's card in v1.0 form. One with very many skills has the first that the settings allow, because a
/// message could not hold the others.
pub(crate) fn card(card: &Card, interface: &Interface, rules: &config::Skills) -> Value {
    if card.skills.len() <= MAX_ACTIONS {
        return card.to_v1(interface, &card.skills);
    }
    let rules = Rules::new(rules);
    card.to_v1(interface, card.skills.iter().filter(|skill| rules.publish(skill)).take(MAX_ACTIONS))
}

/// The settings' choice of skills, for cards and lists of any length.
struct Rules<'a> {
    allow: HashSet<&'a str>,
    deny: HashSet<&'a str>,
    rename: &'a BTreeMap<String, String>,
}

impl<'a> Rules<'a> {
    fn new(rules: &'a config::Skills) -> Self {
        let set = |list: &'a [String]| list.iter().map(String::as_str).collect();
        Self { allow: set(&rules.allow), deny: set(&rules.deny), rename: &rules.rename }
    }

    fn publish(&self, skill: &Skill) -> bool {
        let names =
            |set: &HashSet<&str>| set.contains(skill.id.as_str()) || set.contains(skill.name.as_str());
        (self.allow.is_empty() || names(&self.allow)) && !names(&self.deny)
    }

    /// The name of the skill's action, before it is made a word of a subject.
    fn name<'s>(&self, skill: &'s Skill) -> &'s str
    where
        'a: 's,
    {
        self.rename.get(&skill.id).or_else(|| self.rename.get(&skill.name)).unwrap_or(&skill.id)
    }
}

/// What to know about new names in the settings that cannot be used as they are.
pub(crate) fn rename_warnings(rules: &config::Skills) -> Vec<String> {
    let escaped = rules.rename.iter().filter_map(|(skill, name)| {
        let token = Token::action(name);
        (token.as_str() != name).then(|| {
            let (skill, name) = (shorten(skill, 80), shorten(name, 80));
            format!("skill `{skill}` cannot be called `{name}`, which is reserved or no word of a subject; its action is `{token}`")
        })
    });
    escaped.collect()
}

impl Action {
    fn of_skill(skill: &Skill, card: &Card, token: Token, subjects: &Subjects, agent: &Token) -> Self {
        let template = Template::parse(&skill.description);
        let or_cards = |own: &Vec<String>, cards: &Vec<String>| {
            if own.is_empty() { cards.clone() } else { own.clone() }
        };
        let mut metadata = metadata(&skill.name, &skill.description, &template.schema());
        metadata.insert("a2a.skill".to_owned(), skill.id.clone());
        metadata.insert("tags".to_owned(), json(&skill.tags));
        metadata.insert("input_modes".to_owned(), json(&or_cards(&skill.input_modes, &card.input_modes)));
        metadata.insert("output_modes".to_owned(), json(&or_cards(&skill.output_modes, &card.output_modes)));
        metadata.insert("streaming".to_owned(), card.streaming.to_string());
        Self {
            subject: subjects.action(agent, &token),
            label: token.as_str().into(),
            token,
            skill: Arc::new(actions::Skill {
                id: Some(skill.id.as_str().into()),
                output_modes: skill.output_modes.clone(),
                template,
            }),
            name: shorten(&skill.name, MAX_NAME),
            description: shorten(&skill.description, MAX_DESCRIPTION),
            metadata,
        }
    }

    fn of_agent(card: &Card, subjects: &Subjects, agent: &Token) -> Self {
        let token = Token::action(PROMPT);
        let schema = Template::parse("").schema();
        let mut metadata = metadata(&card.name, &card.description, &schema);
        metadata.insert("input_modes".to_owned(), json(&card.input_modes));
        metadata.insert("output_modes".to_owned(), json(&card.output_modes));
        metadata.insert("streaming".to_owned(), card.streaming.to_string());
        Self {
            subject: subjects.action(agent, &token),
            label: token.as_str().into(),
            token,
            skill: Arc::new(actions::Skill::whole_agent()),
            name: shorten(&card.name, MAX_NAME),
            description: shorten(&card.description, MAX_DESCRIPTION),
            metadata,
        }
    }

    /// The action as INFO shows it.
    pub(crate) fn endpoint(&self) -> EndpointInfo {
        EndpointInfo {
            name: self.token.to_string(),
            subject: self.subject.clone(),
            metadata: self.metadata.clone(),
        }
    }

    /// The action as the registry shows it.
    pub(crate) fn entry(&self) -> RegistryEntry<'_> {
        RegistryEntry {
            action: self.token.as_str(),
            subject: &self.subject,
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
    /// Leaves out what is long, for a registry object that would not fit into a message.
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
}

impl BuiltInAction {
    pub(crate) const ALL: [Self; 4] =
        [Self::ProvideRequiredInput, Self::CancelTask, Self::GetTask, Self::Card];

    /// Its name in logs and figures.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ProvideRequiredInput => "provide_required_input",
            Self::CancelTask => "cancel_task",
            Self::GetTask => "get_task",
            Self::Card => "card",
        }
    }

    /// The built-in action as INFO shows it.
    pub(crate) fn endpoint(self, subjects: &Subjects, agent: &Token) -> EndpointInfo {
        let task = serde_json::json!({
            "type": "object", "required": ["task_id"], "additionalProperties": false,
            "properties": {"task_id": {"type": "string"}},
        });
        let (name, subject, title, description, params) = match self {
            Self::ProvideRequiredInput => (
                "provide_required_input",
                subjects.provide_required_input(agent),
                "Provide required input",
                "Answers a question of the agent, by the follow-up id of a reply",
                serde_json::json!({
                    "type": "object", "required": ["follow_up_id", "user_response"], "additionalProperties": false,
                    "properties": {
                        "follow_up_id": {"type": "string", "format": "uuid"},
                        "user_response": {"type": "string"},
                        "files": files_schema(),
                    },
                }),
            ),
            Self::CancelTask => (
                "cancel_task",
                subjects.cancel_task(agent),
                "Cancel task",
                "Cancels a task at the agent",
                task,
            ),
            Self::GetTask => {
                ("get_task", subjects.get_task(agent), "Get task", "Tells where a task stands", task)
            }
            Self::Card => (
                "card",
                subjects.card(agent),
                "Agent card",
                "The agent's card as the bridge uses it, in A2A v1.0 form",
                serde_json::json!({}),
            ),
        };
        EndpointInfo { name: name.to_owned(), subject, metadata: metadata(title, description, &params) }
    }
}

fn metadata(name: &str, description: &str, params: &Value) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("name".to_owned(), shorten(name, MAX_NAME)),
        ("description".to_owned(), shorten(description, MAX_DESCRIPTION)),
        ("params".to_owned(), params.to_string()),
    ])
}

fn json(list: &[String]) -> String {
    serde_json::to_string(list).unwrap_or_default()
}
