//! Reads a session and its ancestors as one log.
//!
//! A fork has the events of its parent up to an index. Indexes increase over the whole stream, so the same bound holds for
//! the parent's ancestors.

use std::collections::BTreeMap;
use std::iter::Peekable;

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;

use super::messages::{self, EarlierMessage, FoundMessage};
use super::projector::{self, PositionChunk, SessionRef};
use super::summary::{CHUNK, Position, Summary};
use crate::events::event::{Batch, Event, EventType, event_index, index_position};
use crate::events::records::RecordPart;
use crate::events::store::{EventStore, LogUnavailable, StoredBatch};

/// Ancestors of a session.
pub(crate) const MAX_DEPTH: u32 = 64;

/// The part of a conversation that is in one log.
#[derive(Debug)]
pub(crate) struct Segment {
    pub session: SessionRef,
    summary: Summary,
    /// Events after `from`, up to and including `until`.
    from: u64,
    until: u64,
}

/// A session and its ancestors, the oldest first.
#[derive(Debug)]
pub(crate) struct Lineage(pub Vec<Segment>);

impl Lineage {
    pub(crate) async fn of(
        store: &dyn EventStore,
        session: &SessionRef,
        summary: Summary,
    ) -> Result<Self, LogUnavailable> {
        let mut segments = Vec::new();
        let mut next = Some((session.clone(), summary, u64::MAX, None));
        while let Some((session, summary, until, start)) = next.take() {
            let parent = summary.parent.clone();
            let from = start.unwrap_or(summary.start);
            if let Some(link) = parent.filter(|_| segments.len() < MAX_DEPTH as usize) {
                let of_parent = session.sibling(&link.parent);
                // Without a record, what is left of the parent has expired.
                next = projector::stored(store, &of_parent).await?.map(|found| {
                    (of_parent, found.summary, until.min(link.parent_index), Some(link.parent_start))
                });
            }
            segments.push(Segment { session, summary, from, until });
        }
        segments.reverse();
        Ok(Self(segments))
    }

    /// Where a message is; `None` if it has expired.
    pub(crate) async fn position(
        &self,
        store: &dyn EventStore,
        message: u64,
    ) -> Result<Option<Position>, LogUnavailable> {
        for segment in self.0.iter().rev() {
            if message < segment.summary.first_message() {
                continue;
            }
            let key = segment.session.record(RecordPart::Positions(message / CHUNK));
            let record = store.read_record(&key).await?;
            let chunk = record.and_then(|record| serde_json::from_slice::<PositionChunk>(&record.value).ok());
            let found = chunk.as_ref().and_then(|chunk| chunk.get(message));
            let is_in =
                |position: &&Position| segment.from < position.event && position.event <= segment.until;
            return Ok(found.filter(is_in).cloned());
        }
        Ok(None)
    }

    /// The events after an index.
    pub(crate) fn events<'a>(&'a self, store: &'a dyn EventStore, after: u64) -> Events<'a> {
        Events { store, segments: self.0.iter(), current: None, after }
    }

    /// The messages after an event.
    pub(crate) async fn messages(
        &self,
        store: &dyn EventStore,
        after: u64,
        mut found: impl FnMut(FoundMessage),
    ) -> Result<(), LogUnavailable> {
        let mut events = self.events(store, after);
        while let Some(batch) = events.next().await? {
            let mut previous = Vec::new();
            for (index, event) in batch.events() {
                if event.kind == EventType::Edit {
                    previous = messages::previous(event);
                }
                let Some(content) = messages::content(event) else { continue };
                found(FoundMessage {
                    content,
                    run: batch.batch.run,
                    at: event.at.clone(),
                    event: index,
                    previous: std::mem::take(&mut previous),
                });
            }
        }
        Ok(())
    }
}

/// What a message was before it was edited.
pub(crate) async fn earlier(
    store: &dyn EventStore,
    indexes: &[u64],
) -> Result<Vec<EarlierMessage>, LogUnavailable> {
    let mut earlier = Vec::with_capacity(indexes.len());
    for index in indexes {
        let (sequence, position) = index_position(*index);
        let batch = store.get(sequence).await?.map(|stored| stored.decode()).transpose()?;
        let event = batch.as_ref().and_then(|batch| batch.events.get(position));
        let content = event.and_then(messages::content);
        earlier.push(EarlierMessage {
            at: event.map(|event| event.at.clone()).unwrap_or_default(),
            event: *index,
            redacted: content.as_ref().is_none_or(|content| content.is_redacted),
            content: content.map(|content| content.text).unwrap_or_default(),
        });
    }
    Ok(earlier)
}

/// A batch of the conversation, and the bounds for its events.
pub(crate) struct LineageBatch<'a> {
    pub session: &'a SessionRef,
    pub sequence: u64,
    pub batch: Batch,
    from: u64,
    until: u64,
}

impl LineageBatch<'_> {
    pub(crate) fn events(&self) -> impl Iterator<Item = (u64, &Event)> {
        let indexed = self.batch.events.iter().enumerate();
        let indexed = indexed.map(|(position, event)| (event_index(self.sequence, position), event));
        indexed.filter(|(index, _)| self.from < *index && *index <= self.until)
    }
}

/// The batches of a conversation, in order. Removed ones are in their place, without what was redacted.
pub(crate) struct Events<'a> {
    store: &'a dyn EventStore,
    segments: std::slice::Iter<'a, Segment>,
    current: Option<SegmentReader<'a>>,
    after: u64,
}

struct SegmentReader<'a> {
    segment: &'a Segment,
    batches: BoxStream<'a, Result<StoredBatch, LogUnavailable>>,
    /// The next one of them, if it was read already.
    next: Option<StoredBatch>,
    kept: Peekable<std::collections::btree_map::IntoIter<u64, Batch>>,
}

impl<'a> Events<'a> {
    pub(crate) async fn next(&mut self) -> Result<Option<LineageBatch<'a>>, LogUnavailable> {
        loop {
            let Some(current) = &mut self.current else {
                let Some(segment) = self.segments.next() else { return Ok(None) };
                if segment.until > self.after.max(segment.from) {
                    self.current = Some(self.open(segment).await?);
                }
                continue;
            };
            let segment = current.segment;
            let from = self.after.max(segment.from);
            let (sequence, batch) = match current.next().await? {
                Some((sequence, batch)) if event_index(sequence, 0) <= segment.until => (sequence, batch),
                _ => {
                    self.current = None;
                    continue;
                }
            };
            let (session, until) = (&segment.session, segment.until);
            return Ok(Some(LineageBatch { session, sequence, batch, from, until }));
        }
    }

    async fn open(&mut self, segment: &'a Segment) -> Result<SegmentReader<'a>, LogUnavailable> {
        let from = self.after.max(segment.from);
        // The batch of the index itself may have more events.
        let after = index_position(from).0.saturating_sub(1);
        let kept = load_kept(self.store, &segment.summary, after).await?;
        let batches = self.store.read(&segment.session.key, after);
        Ok(SegmentReader { segment, batches, next: None, kept: kept.into_iter().peekable() })
    }
}

impl SegmentReader<'_> {
    async fn next(&mut self) -> Result<Option<(u64, Batch)>, LogUnavailable> {
        if self.next.is_none() {
            self.next = self.batches.next().await.transpose()?;
        }
        let next = self.next.as_ref().map(|next| next.sequence);
        if let Some(kept) = self.kept.next_if(|(sequence, _)| next.is_none_or(|next| *sequence <= next)) {
            // A batch that is not removed yet does not count.
            self.next.take_if(|next| next.sequence == kept.0);
            return Ok(Some(kept));
        }
        let Some(stored) = self.next.take() else { return Ok(None) };
        Ok(Some((stored.sequence, stored.decode()?)))
    }
}

/// The batches after a sequence that were removed because of a redaction.
async fn load_kept(
    store: &dyn EventStore,
    summary: &Summary,
    after: u64,
) -> Result<BTreeMap<u64, Batch>, LogUnavailable> {
    let mut kept = BTreeMap::new();
    for redaction in summary.redactions.iter().filter(|redaction| redaction.sequence > after) {
        let stored = store.get(redaction.replaced_by).await?;
        if let Some(replaced) = stored.map(|stored| stored.decode()).transpose()?.and_then(|batch| batch.kept)
        {
            kept.insert(replaced.sequence, replaced.batch);
        }
    }
    Ok(kept)
}
