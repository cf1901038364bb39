//! A card's skills as actions: which are published, under which tokens, with which metadata.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::service::Endpoint;
use super::subject::{Subjects, Token};
use crate::a2a::card::{Card, Skill};
use crate::action::actions;
use crate::action::params::{Template, files_schema};
use crate::config;
use crate::json::shorten;

/// The action of an agent whose card leaves no skill.
const PROMPT: &str = "prompt";
/// Longest description in metadata; the whole one is used for placeholders.
const MAX_DESCRIPTION: usize = 2048;
/// Longest name in metadata.
const MAX_NAME: usize = 256;

/// One skill as an action.
#[derive(Debug)]
pub struct Action {
    /// The last token of its subject.
    pub token: Token,
    /// Where it is asked.
    pub subject: String,
    /// The same as `token`, for requests to share.
    pub label: Arc<str>,
    /// The skill behind it, with its parameters.
    pub skill: Arc<actions::Skill>,
    /// For people.
    pub name: String,
    /// For people.
    pub description: String,
    metadata: BTreeMap<String, String>,
}

/// The actions of a card, and what was left out on the way.
pub fn actions(
    card: &Card,
    rules: &config::Skills,
    subjects: &Subjects,
    agent: &Token,
) -> (Vec<Arc<Action>>, Vec<String>) {
    let mut warnings = Vec::new();
    let mut taken: HashMap<Token, String> = HashMap::new();
    let mut actions = Vec::new();
    for skill in card.skills.iter().filter(|skill| is_published(skill, rules)) {
        let wanted = renamed(skill, rules).unwrap_or(&skill.id);
        let token = Token::action(wanted);
        if let Some(first) = taken.get(&token) {
            let (first, second) = (shorten(first, 80), shorten(&skill.id, 80));
            warnings.push(format!(
                "skills `{first}` and `{second}` would share the action `{token}`; the second is left out"
            ));
            continue;
        }
        taken.insert(token.clone(), skill.id.clone());
        actions.push(Arc::new(Action::of_skill(skill, card, token, subjects, agent)));
    }
    if actions.is_empty() {
        actions.push(Arc::new(Action::of_agent(card, subjects, agent)));
    }
    (actions, warnings)
}

/// What to know about new names in the settings that cannot be used as they are.
pub fn rename_warnings(rules: &config::Skills) -> Vec<String> {
    let escaped = rules.rename.iter().filter_map(|(skill, name)| {
        let token = Token::action(name);
        (token.as_str() != name).then(|| {
            let (skill, name) = (shorten(skill, 80), shorten(name, 80));
            format!("skill `{skill}` cannot be called `{name}`, which is reserved or no word of a subject; its action is `{token}`")
        })
    });
    escaped.collect()
}

fn names(skill: &Skill, list: &[String]) -> bool {
    list.iter().any(|entry| *entry == skill.id || *entry == skill.name)
}

fn is_published(skill: &Skill, rules: &config::Skills) -> bool {
    (rules.allow.is_empty() || names(skill, &rules.allow)) && !names(skill, &rules.deny)
}

fn renamed<'a>(skill: &Skill, rules: &'a config::Skills) -> Option<&'a String> {
    rules.rename.get(&skill.id).or_else(|| rules.rename.get(&skill.name))
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
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            name: self.token.to_string(),
            subject: self.subject.clone(),
            metadata: self.metadata.clone(),
        }
    }

    /// The action as the registry shows it.
    pub fn entry(&self) -> Entry<'_> {
        Entry {
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
pub struct Entry<'a> {
    action: &'a str,
    subject: &'a str,
    skill: Option<&'a str>,
    name: &'a str,
    description: &'a str,
    params: Option<Value>,
}

impl Entry<'_> {
    /// Leaves out what is long, for a registry object that would not fit into a message.
    pub fn without_details(self) -> Self {
        Self { description: "", params: None, ..self }
    }
}

/// The actions that every agent has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BuiltIn {
    /// Answers an agent's question.
    ProvideRequiredInput,
    /// Cancels a task.
    CancelTask,
    /// Looks a task up.
    GetTask,
    /// The agent's card.
    Card,
}

impl BuiltIn {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::ProvideRequiredInput, Self::CancelTask, Self::GetTask, Self::Card];

    /// Its name in logs and figures.
    pub fn name(self) -> &'static str {
        match self {
            Self::ProvideRequiredInput => "provide_required_input",
            Self::CancelTask => "cancel_task",
            Self::GetTask => "get_task",
            Self::Card => "card",
        }
    }

    /// The built-in action as INFO shows it.
    pub fn endpoint(self, subjects: &Subjects, agent: &Token) -> Endpoint {
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
        Endpoint { name: name.to_owned(), subject, metadata: metadata(title, description, &params) }
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
