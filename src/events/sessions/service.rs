//! Requests about sessions.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use uuid::Uuid;

use super::calls::AgentCalls;
use super::fork::ForkLocks;
use super::lineage::{self, Lineage};
use super::messages::Message;
use super::projector::{self, Projected, SessionRef};
use super::summary::Summary;
use crate::caller::Caller;
use crate::events::codec::{NewEvent, raw, redacted};
use crate::events::event::{Batch, Event, EventType, event_index};
use crate::events::log::{EventLog, MAX_SESSIONS};
use crate::events::records::RecordFilter;
use crate::events::run_record::RunRecord;
use crate::events::store::{AppendError, EventStore, NewBatch, StoredBatch, owner};
use crate::json::to_bytes;
use crate::reply::error::{ActionError, Code};
use crate::text::{Timestamp, shorten};

const MAX_ID: usize = 256;
const MAX_TITLE: usize = 500;
const MAX_CONFIG: usize = 16 << 10;
/// Sessions in one list, and events in one page.
pub(crate) const MAX_LISTED: usize = 1000;
const DEFAULT_LISTED: usize = 100;

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

/// An event as callers see it.
#[derive(Debug, Serialize)]
struct EventView<'a> {
    session: &'a str,
    index: u64,
    run: Option<Uuid>,
    n: u64,
    r#type: EventType,
    at: &'a str,
    payload: &'a RawValue,
}

/// Some events of a session.
#[derive(Debug, Default)]
pub(crate) struct EventPage {
    /// Each as JSON.
    events: Vec<Box<RawValue>>,
    /// The index of the last one.
    pub last: u64,
    /// Whether there are more.
    pub has_more: bool,
    /// Bytes that are left.
    room: usize,
}

impl EventPage {
    fn new(after: u64, room: usize) -> Self {
        Self { last: after, room: room.saturating_sub(64), ..Self::default() }
    }

    /// Adds an event, unless the page is full.
    fn push(&mut self, session: &str, run: Option<Uuid>, index: u64, event: &Event) -> bool {
        let Event { n, kind, at, payload, .. } = event;
        let view = |payload| raw(&EventView { session, index, run, n: *n, r#type: *kind, at, payload });
        let mut encoded = view(payload);
        if encoded.get().len() >= self.room {
            if !self.events.is_empty() {
                return false;
            }
            // It does not fit into any message.
            let size = payload.get().len();
            encoded = view(&raw(&json!({ "omitted": "too_large", "size": size })));
        }
        self.room = self.room.saturating_sub(encoded.get().len() + 1);
        self.last = index;
        self.events.push(encoded);
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(crate) fn to_json(&self) -> Bytes {
        #[derive(Serialize)]
        struct Body<'a> {
            events: &'a [Box<RawValue>],
            #[serde(skip_serializing_if = "Option::is_none")]
            next: Option<u64>,
        }
        to_bytes(&Body { events: &self.events, next: self.has_more.then_some(self.last) })
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

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "an object")]
struct ListRequest {
    since: Option<u64>,
    limit: Option<usize>,
    cursor: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct GetRequest {
    id: String,
    /// Messages before this one only.
    #[serde(default)]
    before: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct RenameRequest {
    id: String,
    title: String,
    #[serde(default)]
    revision: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct RunsRequest {
    id: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "an object")]
struct RebuildRequest {
    id: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
pub(crate) struct EventsRequest {
    pub id: String,
    #[serde(default)]
    pub after: u64,
    pub limit: Option<usize>,
    #[serde(default)]
    pub follow: bool,
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

    pub(crate) async fn list(&self, caller: &Caller, body: &[u8], room: usize) -> Result<Bytes, ActionError> {
        let ListRequest { since, limit, cursor } = parse(body)?;
        let cursor = cursor.map(|cursor| cursor.parse::<u64>()).transpose();
        let cursor = cursor.map_err(|_| ActionError::invalid("`cursor` is not one of a list"))?;
        let limit = limit.unwrap_or(DEFAULT_LISTED).clamp(1, MAX_LISTED);
        self.log.projector.settled().await;
        let filter = RecordFilter::Summaries { owner: owner(caller) };
        let mut last = cursor.or(since).unwrap_or_default();
        let mut records = self.store().records(&filter, last);
        let (mut sessions, mut deleted): (Vec<Box<RawValue>>, Vec<Arc<str>>) = (Vec::new(), Vec::new());
        let (mut left, mut has_more) = (room.saturating_sub(256), false);
        while let Some(record) = records.next().await {
            let record = record?;
            let summary = projector::parse_summary(&record.value)?;
            let (is_deleted, id) = (summary.deleted, Arc::clone(&summary.id));
            if is_deleted && since.is_none() {
                last = record.revision;
                continue;
            }
            // Settings of the client are not for lists.
            let found = Projected { summary: Summary { config: None, ..summary }, revision: record.revision };
            let view = raw(&SessionView::new(&found));
            let size = if is_deleted { id.len() + 8 } else { view.get().len() + 1 };
            if sessions.len() + deleted.len() >= limit || size > left {
                has_more = true;
                break;
            }
            left -= size;
            last = record.revision;
            match is_deleted {
                true => deleted.push(id),
                false => sessions.push(view),
            }
        }
        let mut reply = json!({ "deleted": deleted, "revision": last });
        if has_more {
            reply["cursor"] = json!(last.to_string());
        }
        #[derive(Serialize)]
        struct Body {
            sessions: Vec<Box<RawValue>>,
            #[serde(flatten)]
            rest: Value,
        }
        Ok(to_bytes(&Body { sessions, rest: reply }))
    }

    pub(crate) async fn get(&self, caller: &Caller, body: &[u8], room: usize) -> Result<Bytes, ActionError> {
        let GetRequest { id, before } = parse(body)?;
        let session = Self::session(caller, &id)?;
        let found = self.find(&session).await?;
        let (count, last) = (found.summary.message_count, found.summary.last_index);
        let end = before.unwrap_or(u64::MAX).min(count);
        let lineage = Lineage::of(self.store(), &session, found.summary.clone()).await?;
        // The newest that fit; their numbers follow from the number of all.
        let (mut newest, mut seen, mut held) = (VecDeque::new(), 0_u64, 0_usize);
        let limit = match end == count {
            true => u64::MAX,
            false => match lineage.position(self.store(), end).await? {
                Some(position) => position.event.saturating_sub(1),
                None => u64::MAX,
            },
        };
        lineage
            .messages(self.store(), 0, |message| {
                if message.event > last || message.event > limit {
                    return;
                }
                seen += 1;
                held += message.content.text.len();
                newest.push_back(message);
                while held > room && newest.len() > 1 {
                    held -= newest
                        .pop_front()
                        .map_or(0, |message: super::messages::FoundMessage| message.content.text.len());
                }
            })
            .await?;
        let first = end.saturating_sub(newest.len() as u64);
        let mut messages: Vec<Message> = Vec::with_capacity(newest.len());
        for (index, message) in (first..).zip(newest) {
            let history = lineage::earlier(self.store(), &message.previous).await?;
            messages.push(message.into_message(index, history));
        }
        let view = raw(&SessionView::new(&found));
        messages.reverse();
        let mut fitting = crate::json::first_that_fit(messages, view.get().len() + 256, room);
        fitting.reverse();
        #[derive(Serialize)]
        struct Body<'a> {
            #[serde(flatten)]
            session: SessionView<'a>,
            messages: &'a [Message],
            /// How many messages before the first one were left out.
            #[serde(skip_serializing_if = "is_none_or_zero")]
            earlier: Option<u64>,
        }
        let earlier = match fitting.first() {
            Some(first) => first.index,
            None => end,
        };
        let body = Body { session: SessionView::new(&found), messages: &fitting, earlier: Some(earlier) };
        Ok(to_bytes(&body))
    }

    /// Some events after an index.
    pub(crate) async fn events(
        &self,
        session: &SessionRef,
        after: u64,
        limit: usize,
        room: usize,
    ) -> Result<EventPage, ActionError> {
        let found = self.find(session).await?;
        let lineage = Lineage::of(self.store(), session, found.summary).await?;
        let mut page = EventPage::new(after, room);
        let mut events = lineage.events(self.store(), after);
        while let Some(batch) = events.next().await? {
            for (index, event) in batch.events() {
                if page.events.len() >= limit || !page.push(&batch.session.id, batch.batch.run, index, event)
                {
                    page.has_more = true;
                    return Ok(page);
                }
            }
        }
        Ok(page)
    }

    /// The events of a batch after an index, in as many pages as they need.
    pub(crate) fn pages(
        session: &SessionRef,
        stored: &StoredBatch,
        mut after: u64,
        room: usize,
    ) -> Result<Vec<EventPage>, ActionError> {
        let batch = stored.decode()?;
        let mut pages = vec![EventPage::new(after, room)];
        for (position, event) in batch.events.iter().enumerate() {
            let index = event_index(stored.sequence, position);
            if index <= after {
                continue;
            }
            let fits = |page: &mut EventPage| page.push(&session.id, batch.run, index, event);
            if !pages.last_mut().is_some_and(fits) {
                let mut page = EventPage::new(after, room);
                page.push(&session.id, batch.run, index, event);
                pages.push(page);
            }
            after = index;
        }
        pages.retain(|page| !page.is_empty());
        Ok(pages)
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

    /// The runs of a session, in the order in which they began.
    pub(crate) async fn runs_of(&self, session: &SessionRef) -> Result<Vec<RunRecord>, ActionError> {
        let filter = session.runs();
        let mut records = self.store().records(&filter, 0);
        let mut runs = Vec::new();
        while let Some(record) = records.next().await {
            // Records of a newer release are left out.
            if let Ok(run) = serde_json::from_slice::<RunRecord>(&record?.value)
                && run.session.as_ref() == Some(&session.id)
            {
                runs.push(run);
            }
        }
        // Their ids have the order of time.
        runs.sort_by_key(|run| run.run);
        Ok(runs)
    }

    pub(crate) async fn runs(&self, caller: &Caller, body: &[u8], room: usize) -> Result<Bytes, ActionError> {
        let RunsRequest { id } = parse(body)?;
        let session = Self::session(caller, &id)?;
        self.find(&session).await?;
        let runs = self.runs_of(&session).await?;
        let newest = runs.iter().rev().map(|run| {
            json!({
                "run": run.run, "agent": run.agent, "skill": run.skill, "task_id": run.task_id,
                "context_id": run.context_id, "status": run.status, "started_at": run.started_at,
                "input_snapshot_hash": run.input_snapshot_hash, "completed_at": run.completed_at,
                "first_token_ms": run.first_token_ms, "events": run.events, "card_hash": run.card_hash,
                "settings": run.settings,
            })
        });
        let mut listed = crate::json::first_that_fit(newest.collect(), 64, room);
        listed.reverse();
        for run in &mut listed {
            if let Some(run) = run.as_object_mut() {
                run.retain(|key, value| {
                    !value.is_null() || !matches!(key.as_str(), "first_token_ms" | "settings")
                });
            }
        }
        Ok(to_bytes(&json!({ "runs": listed })))
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

fn is_none_or_zero(number: &Option<u64>) -> bool {
    number.is_none_or(|number| number == 0)
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
