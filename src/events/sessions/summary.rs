//! A session as a fold over its events.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::messages::{self, Role};
use super::runs::RunChange;
use crate::caller::Caller;
use crate::events::event::{Batch, Event, EventType, event_index};

/// The version of the records that this release writes. Raise it when an older release would misread them.
pub(crate) const VERSION: u32 = 1;
/// Messages whose positions are in one record. With the value of the chain, the record stays small enough to be written
/// with every message.
pub(crate) const CHUNK: u64 = 64;
/// Agents that a summary remembers. Later ones count as known.
const MAX_AGENTS: usize = 64;
/// Runs under way that a summary remembers.
const MAX_RUNNING: usize = 256;
/// Times of forks that a summary remembers.
pub(crate) const MAX_FORK_TIMES: usize = 10;

/// A session as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Summary {
    pub v: u32,
    pub id: Arc<str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// RFC 3339.
    pub created_at: String,
    pub updated_at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ParentLink>,
    /// Ancestors' messages included.
    pub message_count: u64,
    /// The index of the last event that was folded.
    pub last_index: u64,
    /// Events up to this index belong to an earlier session with the same id, which was deleted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub start: u64,
    /// The agent that was asked last, or that the session was created for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<Arc<str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skill: Option<Arc<str>>,
    /// The replica that asked it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The agents that have taken part, with their first runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub agents: Vec<(Arc<str>, Uuid)>,
    /// Runs that have not ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub running: Vec<Uuid>,
    /// A hash of all messages.
    #[serde(default)]
    pub chain: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub children: Vec<ChildLink>,
    /// When the session was forked last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forked_at: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub redactions: Vec<Redaction>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<Value>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deleted: bool,
    #[serde(default, skip_serializing_if = "Caller::is_shared")]
    pub caller: Caller,
}

/// The payload of `fork`, with which the log of a fork begins.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ForkPayload {
    #[serde(flatten)]
    pub link: ParentLink,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<Arc<str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skill: Option<Arc<str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<Value>,
}

/// From which session a fork comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ParentLink {
    pub parent: Arc<str>,
    /// The parent's events up to this index belong to the fork.
    pub parent_index: u64,
    /// The parent's events up to this index do not.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub parent_start: u64,
    /// The first message that differs.
    pub message_index: u64,
    pub reason: ForkReason,
    /// How many ancestors the fork has.
    pub depth: u32,
    /// The hash of the messages before.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub chain: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ForkReason {
    UserEdit,
    Branch,
    Retry,
}

/// A fork of the session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChildLink {
    pub child: Arc<str>,
    /// The events up to this index belong to it.
    pub index: u64,
}

/// A batch that was removed, and the one that replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Redaction {
    pub sequence: u64,
    pub replaced_by: u64,
}

/// Where a message is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// The index of its event.
    #[serde(rename = "i")]
    pub event: u64,
    #[serde(rename = "r")]
    pub role: Role,
    /// The hash of the messages up to this one.
    #[serde(rename = "h")]
    pub chain: String,
    /// The events that the message was before it was edited.
    #[serde(rename = "p", default, skip_serializing_if = "Vec::is_empty")]
    pub previous: Vec<u64>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What a fold changes in addition to the summary.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// New messages by their number.
    pub positions: Vec<(u64, Position)>,
    pub runs: BTreeMap<Uuid, Vec<RunChange>>,
    /// Whether events came after the session was deleted that do not begin another one.
    pub has_leftovers: bool,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CreatedPayload {
    title: Option<String>,
    agent: Option<Arc<str>>,
    config: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct TitlePayload {
    title: Option<String>,
}

/// The payload of `forked`, on the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ForkedPayload {
    #[serde(flatten)]
    pub child: ChildLink,
    pub message_index: u64,
    pub reason: ForkReason,
    /// Runs that go on without the parent.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub orphaned: Vec<Uuid>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StartPayload {
    agent: Option<Arc<str>>,
    skill: Option<Arc<str>>,
    instance: Option<String>,
}

impl Summary {
    fn new(id: &Arc<str>, caller: &Caller, at: &str) -> Self {
        Self {
            v: VERSION,
            id: Arc::clone(id),
            title: None,
            created_at: at.to_owned(),
            updated_at: at.to_owned(),
            parent: None,
            message_count: 0,
            last_index: 0,
            start: 0,
            agent: None,
            skill: None,
            instance: None,
            agents: Vec::new(),
            running: Vec::new(),
            chain: String::new(),
            children: Vec::new(),
            forked_at: Vec::new(),
            redactions: Vec::new(),
            config: None,
            deleted: false,
            caller: caller.clone(),
        }
    }

    /// The number of the first message that is the session's own.
    pub(crate) fn first_message(&self) -> u64 {
        self.parent.as_ref().map_or(0, |parent| parent.message_index)
    }

    /// How many ancestors it has.
    pub(crate) fn depth(&self) -> u32 {
        self.parent.as_ref().map_or(0, |parent| parent.depth)
    }

    /// Whether an agent has taken part before a run.
    pub(crate) fn had(&self, agent: &str, run: Uuid) -> bool {
        match self.agents.iter().find(|(known, _)| **known == *agent) {
            Some((_, first)) => *first != run,
            None => self.agents.len() >= MAX_AGENTS,
        }
    }
}

/// Applies a batch of the log of a session.
pub(crate) fn fold(
    summary: &mut Option<Summary>,
    changes: &mut Changes,
    (id, caller): (&Arc<str>, &Caller),
    sequence: u64,
    batch: &Batch,
) {
    let mut previous = Vec::new();
    for (position, event) in batch.events.iter().enumerate() {
        let index = event_index(sequence, position);
        match summary {
            Some(summary) if index <= summary.last_index => continue,
            Some(deleted) if deleted.deleted => {
                let begins = matches!(
                    event.kind,
                    EventType::SessionCreated | EventType::UserMessage | EventType::Fork
                );
                if !begins {
                    deleted.last_index = index;
                    changes.has_leftovers = true;
                    continue;
                }
                let mut new = Summary::new(id, caller, &event.at);
                new.start = deleted.last_index;
                // The forks of the deleted session need its events.
                new.children = std::mem::take(&mut deleted.children);
                *deleted = new;
            }
            Some(_) => {}
            None => *summary = Some(Summary::new(id, caller, &event.at)),
        }
        let Some(summary) = summary else { continue };
        summary.last_index = index;
        if event.kind == EventType::Edit {
            previous = messages::previous(event);
        }
        apply(summary, changes, index, batch, event, &mut previous, sequence);
    }
}

fn apply(
    summary: &mut Summary,
    changes: &mut Changes,
    index: u64,
    batch: &Batch,
    event: &Event,
    previous: &mut Vec<u64>,
    sequence: u64,
) {
    let payload = event.payload.get();
    if let Some(content) = messages::content(event) {
        summary.chain = messages::next_chain(&summary.chain, &content);
        let previous =
            if event.kind == EventType::UserMessage { std::mem::take(previous) } else { Vec::new() };
        let (role, chain) = (content.role, summary.chain.clone());
        changes.positions.push((summary.message_count, Position { event: index, role, chain, previous }));
        summary.message_count += 1;
        summary.updated_at.clone_from(&event.at);
    }
    match event.kind {
        EventType::SessionCreated => {
            let created: CreatedPayload = serde_json::from_str(payload).unwrap_or_default();
            summary.title = created.title;
            summary.agent = created.agent;
            summary.config = created.config;
        }
        EventType::Fork => {
            if let Ok(ForkPayload { link, title, agent, skill, config }) = serde_json::from_str(payload) {
                (summary.title, summary.agent, summary.skill) = (title, agent, skill);
                summary.config = config;
                summary.message_count = link.message_index;
                summary.chain.clone_from(&link.chain);
                summary.parent = Some(link);
            }
        }
        EventType::AgentStart => {
            let StartPayload { agent, skill, instance } = serde_json::from_str(payload).unwrap_or_default();
            if let (Some(agent), Some(run)) = (&agent, batch.run)
                && summary.agents.len() < MAX_AGENTS
                && !summary.agents.iter().any(|(known, _)| known == agent)
            {
                summary.agents.push((Arc::clone(agent), run));
            }
            (summary.agent, summary.skill, summary.instance) = (agent, skill, instance);
            if let Some(run) = batch.run.filter(|run| !summary.running.contains(run)) {
                if summary.running.len() >= MAX_RUNNING {
                    summary.running.remove(0);
                }
                summary.running.push(run);
            }
        }
        kind if kind.ends_call() => summary.running.retain(|run| batch.run != Some(*run)),
        EventType::Title => {
            summary.title = serde_json::from_str::<TitlePayload>(payload).unwrap_or_default().title;
            summary.updated_at.clone_from(&event.at);
        }
        EventType::Forked => {
            if let Ok(ForkedPayload { child, orphaned, .. }) = serde_json::from_str(payload) {
                summary.children.push(child);
                summary.forked_at.push(event.at.clone());
                if summary.forked_at.len() > MAX_FORK_TIMES {
                    summary.forked_at.remove(0);
                }
                for run in orphaned {
                    summary.running.retain(|running| *running != run);
                    changes.runs.entry(run).or_default().push(RunChange::orphaned(index));
                }
            }
        }
        EventType::Redacted => {
            if let Some(kept) = &batch.kept {
                let redaction = Redaction { sequence: kept.sequence, replaced_by: sequence };
                summary.redactions.retain(|known| known.sequence != kept.sequence);
                summary.redactions.push(redaction);
            }
            summary.updated_at.clone_from(&event.at);
        }
        _ => {}
    }
    if let Some(run) = batch.run
        && let Some(change) = RunChange::new(index, event, &summary.chain)
    {
        changes.runs.entry(run).or_default().push(change);
    }
}
