//! Removes the content of an event from the log.
//!
//! A message of the stream is a batch of events, and it can only be removed as a whole. So the other events of the batch,
//! and a place holder for the redacted one, are written again: as part of the event `redacted`, with the sequence that the
//! batch had. Readers put them in their old place. The alternative, a message of the stream for each event with content,
//! would cost every call one more write, and a place holder would be needed all the same.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use uuid::Uuid;

use super::lineage::Lineage;
use super::messages;
use super::projector::{Projected, SessionRef};
use super::service::{SessionView, Sessions, parse, unavailable};
use super::summary::Redaction;
use crate::caller::Caller;
use crate::events::codec::raw;
use crate::events::event::{Batch, Event, EventType, FrameHint, KeptBatch, index_position};
use crate::json::to_bytes;
use crate::reply::error::{ActionError, Code};
use crate::text::Timestamp;

/// Redactions of one session.
const MAX_REDACTIONS: usize = 1000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct RedactRequest {
    id: String,
    /// Of an event.
    index: u64,
}

impl Sessions {
    pub(crate) async fn redact(&self, caller: &Caller, body: &[u8]) -> Result<Bytes, ActionError> {
        let RedactRequest { id, index } = parse(body)?;
        let session = Self::session(caller, &id)?;
        let found = self.find(&session).await?;
        let (sequence, position) = index_position(index);
        let known = found.summary.redactions.iter().find(|known| known.sequence == sequence).copied();
        let unknown = || {
            let message = "the session has no such event; events of an ancestor are redacted in the ancestor";
            ActionError::new(Code::NotFound, message)
        };
        if index <= found.summary.start || index > found.summary.last_index {
            return Err(unknown());
        }
        let mut batch = self.own_batch(&session, sequence, known).await?.ok_or_else(unknown)?;
        let event = batch.events.get(position).ok_or_else(unknown)?;
        if matches!(event.kind, EventType::Fork | EventType::Forked | EventType::Redacted) {
            return Err(ActionError::invalid("events of this type have no content"));
        }
        if known.is_none() && found.summary.redactions.len() >= MAX_REDACTIONS {
            return Err(ActionError::invalid(format!("a session has at most {MAX_REDACTIONS} redactions")));
        }
        let (kind, run, call) = (event.kind, batch.run, batch.call);
        let chain = self.chain_after(&session, &found, index, event).await?;
        if let Some(event) = batch.events.get_mut(position) {
            event.frame = FrameHint::default();
            event.payload = placeholder(event, chain);
        }
        let marker = Event {
            n: 0,
            kind: EventType::Redacted,
            at: Timestamp(std::time::SystemTime::now()).to_string(),
            payload: raw(&json!({ "index": index, "type": kind })),
            frame: FrameHint::default(),
        };
        let mut redacted = Batch::new(Some(Arc::clone(&session.id)), None, 0, [0; 3], vec![marker]);
        redacted.kept = Some(Box::new(KeptBatch { sequence, batch }));
        self.append_batch(&session, &redacted, false).await.map_err(unavailable)?;
        let found = self.find(&session).await?;
        self.store().erase(sequence).await?;
        if let Some(known) = known {
            self.store().erase(known.replaced_by).await?;
        }
        if let Some(run) = run.filter(|_| kind.ends_call()) {
            self.erase_pieces(&session, run, call).await?;
        }
        Ok(to_bytes(&SessionView::new(&found)))
    }

    /// A batch of the session's own log, as it is now.
    async fn own_batch(
        &self,
        session: &SessionRef,
        sequence: u64,
        known: Option<Redaction>,
    ) -> Result<Option<Batch>, ActionError> {
        if let Some(known) = known {
            let stored = self.store().get(known.replaced_by).await?;
            let kept = stored.map(|stored| stored.decode()).transpose()?.and_then(|batch| batch.kept);
            return Ok(kept.map(|kept| kept.batch));
        }
        // Not by the sequence alone: it may be that of another caller's batch.
        let mut batches = self.store().read(&session.key, sequence.saturating_sub(1));
        match batches.next().await.transpose()? {
            Some(stored) if stored.sequence == sequence => Ok(Some(stored.decode()?)),
            _ => Ok(None),
        }
    }

    /// The value of the chain after a message, which cannot be computed without its content.
    async fn chain_after(
        &self,
        session: &SessionRef,
        found: &Projected,
        index: u64,
        event: &Event,
    ) -> Result<Option<String>, ActionError> {
        let Some(content) = messages::content(event) else { return Ok(None) };
        if content.chain.is_some() {
            return Ok(content.chain);
        }
        let summary = &found.summary;
        let lineage = Lineage::of(self.store(), session, summary.clone()).await?;
        // Positions are in order of their events.
        let (mut low, mut high) = (summary.first_message(), summary.message_count);
        while low < high {
            let middle = low + (high - low) / 2;
            let Some(position) = lineage.position(self.store(), middle).await? else { return Ok(None) };
            if position.event == index {
                return Ok(Some(position.chain));
            }
            if position.event < index {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        Ok(None)
    }

    /// Removes the pieces in which an answer was sent.
    async fn erase_pieces(&self, session: &SessionRef, run: Uuid, call: u32) -> Result<(), ActionError> {
        let mut pieces = Vec::new();
        let mut batches = self.store().read(&session.key, 0);
        while let Some(stored) = batches.next().await {
            let stored = stored?;
            let batch = stored.decode()?;
            let is_piece = |event: &Event| {
                event.kind.is_token()
                    || matches!(event.kind, EventType::AgentArtifact | EventType::AgentToolCall)
                    || (event.kind == EventType::AgentStatus && has_text(event))
            };
            if batch.run == Some(run) && batch.call == call && batch.events.iter().any(is_piece) {
                pieces.push(stored.sequence);
            }
        }
        drop(batches);
        for sequence in pieces {
            self.store().erase(sequence).await?;
        }
        Ok(())
    }
}

/// What is left of an event: which task it was about, and that there was something.
fn placeholder(event: &Event, chain: Option<String>) -> Box<RawValue> {
    #[derive(Default, Serialize, Deserialize)]
    #[serde(default)]
    struct Placeholder {
        redacted: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        chain: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        status: Option<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        task: Option<Value>,
    }
    let left = match event.kind.ends_call() {
        true => serde_json::from_str(event.payload.get()).unwrap_or_default(),
        false => Placeholder::default(),
    };
    raw(&Placeholder { redacted: true, chain, ..left })
}

fn has_text(status: &Event) -> bool {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Text {
        message: String,
    }
    !serde_json::from_str::<Text>(status.payload.get()).unwrap_or_default().message.is_empty()
}
