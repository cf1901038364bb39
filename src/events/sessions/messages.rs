//! Messages of a conversation, from events.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::events::event::{Event, EventType};
use crate::json;
use crate::text::hex;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    User,
    Assistant,
    System,
    Tool,
}

/// One message, as callers see it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Message {
    /// Counts the messages of the conversation, ancestors included.
    pub index: u64,
    pub role: Role,
    pub content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<Uuid>,
    pub at: String,
    /// The index of its event.
    pub event: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub redacted: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub edited: bool,
    /// What an edited message was before, the oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<EarlierMessage>,
}

/// A message that was edited.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct EarlierMessage {
    pub content: String,
    pub at: String,
    /// The index of its event.
    pub event: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub redacted: bool,
}

/// What an event says as a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Content {
    pub role: Role,
    pub text: String,
    pub files: Vec<Value>,
    pub data: Option<Value>,
    pub is_redacted: bool,
    /// For a redacted message: the value of the chain after it, which can no longer be computed.
    pub chain: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct UserPayload {
    content: String,
    files: Vec<Value>,
    data: Vec<Value>,
    redacted: bool,
    chain: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ReplyPayload {
    message: String,
    files: Vec<Value>,
    redacted: bool,
    chain: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ToolPayload {
    parts: Vec<ToolPart>,
    redacted: bool,
    chain: Option<String>,
}

#[derive(Deserialize)]
struct ToolPart {
    text: Option<String>,
    data: Option<Box<RawValue>>,
}

/// The role of the message that an event of this type is, if it is one.
pub(crate) fn role(kind: EventType) -> Option<Role> {
    match kind {
        EventType::UserMessage => Some(Role::User),
        EventType::AgentComplete | EventType::AgentInputRequired => Some(Role::Assistant),
        EventType::AgentToolResult => Some(Role::Tool),
        _ => None,
    }
}

/// The message that an event is, if it is one.
pub(crate) fn content(event: &Event) -> Option<Content> {
    let (role, payload) = (role(event.kind)?, event.payload.get());
    Some(match role {
        Role::User | Role::System => {
            let payload: UserPayload = serde_json::from_str(payload).unwrap_or_default();
            let UserPayload { content: text, files, mut data, redacted, chain } = payload;
            let data = (!data.is_empty()).then(|| data.swap_remove(0));
            Content { role, text, files, data, is_redacted: redacted, chain }
        }
        Role::Assistant => {
            let payload: ReplyPayload = serde_json::from_str(payload).unwrap_or_default();
            let ReplyPayload { message: text, files, redacted, chain } = payload;
            Content { role, text, files, data: None, is_redacted: redacted, chain }
        }
        Role::Tool => {
            let ToolPayload { parts, redacted, chain } = serde_json::from_str(payload).unwrap_or_default();
            let text = |part: ToolPart| part.text.or_else(|| part.data.map(|data| data.get().to_owned()));
            let text = parts.into_iter().filter_map(text).collect::<Vec<_>>().concat();
            Content { role, text, files: Vec::new(), data: None, is_redacted: redacted, chain }
        }
    })
}

/// The value of the chain after a message: a hash of the value before it, and of the canonical JSON of role and content.
pub(crate) fn next_chain(before: &str, content: &Content) -> String {
    #[derive(Serialize)]
    struct Link<'a> {
        content: &'a str,
        role: Role,
    }
    if let Some(chain) = &content.chain {
        return chain.clone();
    }
    let mut hash = Sha256::new();
    hash.update(before);
    hash.update(json::to_bytes(&Link { content: &content.text, role: content.role }));
    hex(&hash.finalize())
}

/// The indexes of the events that an edited message was before.
pub(crate) fn previous(edit: &Event) -> Vec<u64> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct EditPayload {
        previous: Vec<u64>,
    }
    serde_json::from_str::<EditPayload>(edit.payload.get()).unwrap_or_default().previous
}

/// A message of the conversation, before it has its index, and before its history is read.
#[derive(Debug)]
pub(crate) struct FoundMessage {
    pub content: Content,
    pub run: Option<Uuid>,
    pub at: String,
    pub event: u64,
    pub previous: Vec<u64>,
}

impl FoundMessage {
    pub(crate) fn into_message(self, index: u64, history: Vec<EarlierMessage>) -> Message {
        let Self { content, run, at, event, previous, .. } = self;
        let Content { role, text, files, data, is_redacted, .. } = content;
        let edited = !previous.is_empty();
        Message {
            index,
            role,
            content: text,
            run,
            at,
            event,
            files,
            data,
            redacted: is_redacted,
            edited,
            history,
        }
    }
}
