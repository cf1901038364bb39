//! Lists sessions, and reads their messages and runs.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use super::lineage::{self, Lineage};
use super::messages::{FoundMessage, Message};
use super::projector::{self, Projected, SessionRef};
use super::service::{SessionView, Sessions, parse};
use super::summary::Summary;
use crate::caller::Caller;
use crate::events::codec::raw;
use crate::events::records::RecordFilter;
use crate::events::run_record::RunRecord;
use crate::events::store::owner;
use crate::json::to_bytes;
use crate::reply::error::ActionError;

/// Sessions in one list, and events in one page.
pub(crate) const MAX_LISTED: usize = 1000;
const DEFAULT_LISTED: usize = 100;

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
struct RunsRequest {
    id: String,
}

impl Sessions {
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
        #[derive(Serialize)]
        struct Body {
            sessions: Vec<Box<RawValue>>,
            deleted: Vec<Arc<str>>,
            revision: u64,
            #[serde(skip_serializing_if = "Option::is_none")]
            cursor: Option<String>,
        }
        let cursor = has_more.then(|| last.to_string());
        Ok(to_bytes(&Body { sessions, deleted, revision: last, cursor }))
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
                    held -= newest.pop_front().map_or(0, |message: FoundMessage| message.content.text.len());
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
}

fn is_none_or_zero(number: &Option<u64>) -> bool {
    number.is_none_or(|number| number == 0)
}
