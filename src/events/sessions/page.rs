//! Events of a session, in pages that fit into a message.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::lineage::Lineage;
use super::projector::SessionRef;
use super::service::Sessions;
use crate::events::codec::raw;
use crate::events::event::{Event, EventType, event_index};
use crate::events::store::StoredBatch;
use crate::json::to_bytes;
use crate::reply::error::ActionError;

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
}
