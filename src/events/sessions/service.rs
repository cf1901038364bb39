//! Requests about sessions.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use uuid::Uuid;

use super::calls::AgentCalls;
use super::fork::ForkLocks;
use super::projector::{self, Projected, SessionRef};
use crate::caller::Caller;
use crate::events::codec::{NewEvent, redacted};
use crate::events::event::{Batch, Event, EventType};
use crate::events::log::{EventLog, MAX_SESSIONS};
use crate::events::store::{AppendError, EventStore, NewBatch, owner};
use crate::json::to_bytes;
use crate::reply::error::{ActionError, Code};
use crate::text::{Timestamp, shorten};

const MAX_ID: usize = 256;
const MAX_TITLE: usize = 500;
const MAX_CONFIG: usize = 16 << 10;

/// Serves requests about sessions.
#[derive(Debug)]
pub(crate) struct Sessions {
    pub log: Arc<EventLog>,
    pub calls: Arc<dyn AgentCalls>,
    pub(super) forks: ForkLocks,
}

/// A session as callers see it.
#[derive(Debug, Serialize)]
pub(crate) struct SessionView<'a> {
    id: &'a str,
    title: Option<&'a str>,
    created_at: &'a str,
    updated_at: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fork_point: Option<u64>,
    message_count: u64,
    revision: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    config: Option<&'a Value>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    deleted: bool,
}

impl<'a> SessionView<'a> {
    pub(super) fn new(Projected { summary, revision }: &'a Projected) -> Self {
        Self {
            id: &summary.id,
            title: summary.title.as_deref(),
            created_at: &summary.created_at,
            updated_at: &summary.updated_at,
            parent: summary.parent.as_ref().map(|parent| &*parent.parent),
            fork_point: summary.parent.as_ref().map(|parent| parent.message_index),
            message_count: summary.message_count,
            revision: *revision,
            agent: summary.agent.as_deref(),
            config: summary.config.as_ref(),
            deleted: summary.deleted,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "an object")]
struct CreateRequest {
    id: Option<String>,
    title: Option<String>,
    agent: Option<String>,
    config: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct RenameRequest {
    id: String,
    title: String,
    #[serde(default)]
    revision: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "an object")]
struct RebuildRequest {
    id: Option<String>,
}

impl Sessions {
    pub(crate) fn new(log: Arc<EventLog>, calls: Arc<dyn AgentCalls>) -> Self {
        Self { log, calls, forks: ForkLocks::default() }
    }

    pub(crate) fn store(&self) -> &dyn EventStore {
        &*self.log.store
    }

    /// A session of the caller as it is now.
    pub(crate) async fn find(&self, session: &SessionRef) -> Result<Projected, ActionError> {
        let found = projector::project(self.store(), session).await?;
        found.filter(|found| !found.summary.deleted).ok_or_else(unknown)
    }

    /// A session id of a request.
    pub(crate) fn session(caller: &Caller, id: &str) -> Result<SessionRef, ActionError> {
        check_id(id)?;
        Ok(SessionRef::new(caller, id))
    }

    /// Appends events of the session itself.
    pub(super) async fn append(
        &self,
        session: &SessionRef,
        events: Vec<NewEvent>,
        expects_first: bool,
    ) -> Result<u64, AppendError> {
        let at = Timestamp(SystemTime::now()).to_string();
        let secrets = self.log.all_secrets();
        let event = |(n, event): (u64, NewEvent)| {
            let redact = |payload: Box<RawValue>, secrets| redacted(&payload, secrets);
            let payload = secrets.iter().fold(event.payload, redact);
            Event { n, kind: event.kind, at: at.clone(), payload, frame: event.frame }
        };
        let events = (0..).zip(events).map(event).collect();
        let batch = Batch::new(Some(Arc::clone(&session.id)), None, 0, [0; 3], events);
        self.append_batch(session, &batch, expects_first).await
    }

    pub(super) async fn append_batch(
        &self,
        session: &SessionRef,
        batch: &Batch,
        expects_first: bool,
    ) -> Result<u64, AppendError> {
        let (id, body) = (Uuid::new_v4().to_string(), batch.encode());
        let batch = NewBatch { key: &session.key, id, run: None, body, is_transient: false, expects_first };
        self.store().append(batch).await
    }

    pub(crate) async fn create(&self, caller: &Caller, body: &[u8]) -> Result<Bytes, ActionError> {
        let CreateRequest { id, title, agent, config } = parse(body)?;
        let id = id.unwrap_or_else(|| Uuid::new_v4().to_string());
        let session = Self::session(caller, &id)?;
        check_title(title.as_deref())?;
        if config.as_ref().is_some_and(|config| !config.is_object() || config.to_string().len() > MAX_CONFIG)
        {
            return Err(ActionError::invalid("`config` must be an object of at most 16 KiB"));
        }
        check_id_of("agent", agent.as_deref())?;
        self.check_room(caller).await?;
        let payload = json!({ "id": id, "title": title, "agent": agent, "config": config });
        let created = || NewEvent::new(EventType::SessionCreated, &payload);
        match self.append(&session, vec![created()], true).await {
            Ok(_) => {}
            Err(AppendError::Unavailable(error)) => return Err(error.into()),
            Err(AppendError::Exists) => {
                // The events of a deleted session stay as long as it has forks.
                let found = projector::project(self.store(), &session).await?;
                if found.is_none_or(|found| !found.summary.deleted) {
                    let message = format!("there is a session `{}` already", shorten(&id, 80));
                    return Err(ActionError::invalid(message));
                }
                self.append(&session, vec![created()], false).await.map_err(unavailable)?;
            }
        }
        Ok(to_bytes(&SessionView::new(&self.find(&session).await?)))
    }

    /// Refuses new sessions of a caller that has very many.
    pub(super) async fn check_room(&self, caller: &Caller) -> Result<(), ActionError> {
        if !self.log.has_room(&owner(caller)).await? {
            let message = format!("you have {MAX_SESSIONS} sessions; delete some of them");
            return Err(ActionError::new(Code::Busy, message));
        }
        Ok(())
    }

    pub(crate) async fn rename(&self, caller: &Caller, body: &[u8]) -> Result<Bytes, ActionError> {
        let RenameRequest { id, title, revision } = parse(body)?;
        let session = Self::session(caller, &id)?;
        check_title(Some(&title))?;
        let found = self.find(&session).await?;
        check_revision(&found, revision)?;
        let event = NewEvent::new(EventType::Title, &json!({ "title": title }));
        self.append(&session, vec![event], false).await.map_err(unavailable)?;
        Ok(to_bytes(&SessionView::new(&self.find(&session).await?)))
    }

    pub(crate) async fn rebuild(&self, caller: &Caller, body: &[u8]) -> Result<Bytes, ActionError> {
        let RebuildRequest { id } = parse(body)?;
        match id {
            Some(id) => {
                let session = Self::session(caller, &id)?;
                projector::rebuild(self.store(), &session).await?;
                Ok(to_bytes(&SessionView::new(&self.find(&session).await?)))
            }
            None => {
                let count = projector::rebuild_all(self.store(), caller).await?;
                Ok(to_bytes(&json!({ "sessions": count })))
            }
        }
    }
}

pub(crate) fn unknown() -> ActionError {
    ActionError::new(Code::NotFound, "there is no such session")
}

pub(super) fn unavailable(error: AppendError) -> ActionError {
    match error {
        AppendError::Unavailable(error) => error.into(),
        AppendError::Exists => ActionError::internal(),
    }
}

pub(super) fn check_revision(found: &Projected, expected: Option<u64>) -> Result<(), ActionError> {
    match expected {
        Some(expected) if expected != found.revision => {
            let now = found.revision;
            Err(ActionError::invalid(format!(
                "revision mismatch: the session is at {now}, not at {expected}"
            )))
        }
        _ => Ok(()),
    }
}

fn check_id(id: &str) -> Result<(), ActionError> {
    check_id_of("id", Some(id))
}

fn check_id_of(name: &str, id: Option<&str>) -> Result<(), ActionError> {
    match id {
        Some(id) if id.is_empty() || id.len() > MAX_ID => {
            Err(ActionError::invalid(format!("`{name}` must be a string of 1 to {MAX_ID} bytes")))
        }
        _ => Ok(()),
    }
}

fn check_title(title: Option<&str>) -> Result<(), ActionError> {
    match title {
        Some(title) if title.len() > MAX_TITLE => {
            Err(ActionError::invalid(format!("`title` must have at most {MAX_TITLE} bytes")))
        }
        _ => Ok(()),
    }
}

pub(crate) fn parse<'b, T: Deserialize<'b>>(body: &'b [u8]) -> Result<T, ActionError> {
    let body = if body.is_empty() { b"{}".as_slice() } else { body };
    serde_json::from_slice(body)
        .map_err(|error| ActionError::invalid(format!("invalid body: {}", shorten(&error.to_string(), 300))))
}
