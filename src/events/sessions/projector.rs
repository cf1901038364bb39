//! Keeps what is stored of sessions up to date with the log.
//!
//! A projection is brought up to date by reading it, folding the events after its last one, and writing it if nobody else
//! has written it meanwhile. So it does not matter which replica does it, how often, or whether two do it at once.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use uuid::Uuid;

use super::runs::{self, RunChange};
use super::summary::{CHUNK, Changes, Position, Summary, VERSION, fold};
use crate::background::OnPanic;
use crate::caller::Caller;
use crate::events::event::{Batch, index_position};
use crate::events::log::EventLog;
use crate::events::records::{RecordFilter, RecordKey, RecordPart};
use crate::events::run_record::RunRecord;
use crate::events::store::{AppendError, EventStore, LogKey, LogUnavailable, owner};
use crate::json;

/// Batches that are folded before the result is written.
const MAX_BATCHES: usize = 2000;
/// Batches that are folded again each time before a summary is written that has not changed otherwise.
const MAX_UNWRITTEN: usize = 500;
/// How often a fold is repeated that another replica was faster with.
const MAX_ATTEMPTS: usize = 50;
/// How long a list waits for the folds of this process.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// A session of a caller.
#[derive(Debug, Clone)]
pub(crate) struct SessionRef {
    pub caller: Caller,
    pub key: LogKey,
    pub id: Arc<str>,
}

impl SessionRef {
    pub(crate) fn new(caller: &Caller, id: &str) -> Self {
        Self { caller: caller.clone(), key: LogKey::session(caller, id), id: id.into() }
    }

    /// Another session of the same caller.
    pub(crate) fn sibling(&self, id: &str) -> Self {
        Self::new(&self.caller, id)
    }

    pub(crate) fn record(&self, part: RecordPart) -> RecordKey {
        RecordKey { owner: Arc::clone(&self.key.owner), session: Arc::clone(&self.id), part }
    }

    pub(crate) fn runs(&self) -> RecordFilter {
        RecordFilter::Runs { owner: Arc::clone(&self.key.owner), session: Arc::clone(&self.id) }
    }

    pub(crate) fn positions(&self) -> RecordFilter {
        RecordFilter::Positions { owner: Arc::clone(&self.key.owner), session: Arc::clone(&self.id) }
    }
}

/// A summary and its revision.
#[derive(Debug, Clone)]
pub(crate) struct Projected {
    pub summary: Summary,
    pub revision: u64,
}

/// Positions of messages with consecutive numbers.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct PositionChunk {
    first: u64,
    positions: Vec<Position>,
}

impl PositionChunk {
    pub(crate) fn get(&self, message: u64) -> Option<&Position> {
        self.positions.get(usize::try_from(message.checked_sub(self.first)?).ok()?)
    }

    /// Returns whether the chunk has changed.
    fn set(&mut self, message: u64, position: Position) -> bool {
        if self.get(message) == Some(&position) {
            return false;
        }
        let next = self.first + self.positions.len() as u64;
        if self.positions.is_empty() || message < self.first || message > next {
            (self.first, self.positions) = (message, Vec::new());
        }
        // Positions that differ are those of an earlier session with the same id.
        let keep = usize::try_from(message - self.first).unwrap_or_default();
        self.positions.truncate(keep);
        self.positions.push(position);
        true
    }
}

/// The sessions of which this process has appended events that are not folded yet.
#[derive(Debug, Default)]
pub(crate) struct Projector {
    /// Whether events were appended since the fold began.
    pending: Mutex<HashMap<LogKey, bool>>,
    changed: Notify,
    failures: AtomicU64,
}

impl Projector {
    /// Sessions whose records are not up to date yet.
    pub(crate) fn pending_sessions(&self) -> usize {
        self.pending().len()
    }

    /// How often a session could not be brought up to date.
    pub(crate) fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, HashMap<LogKey, bool>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until everything that this process has appended is folded.
    pub(crate) async fn settled(&self) {
        let settled = async {
            loop {
                let changed = self.changed.notified();
                if self.pending().is_empty() {
                    return;
                }
                changed.await;
            }
        };
        let _ = tokio::time::timeout(SETTLE_TIMEOUT, settled).await;
    }
}

/// Folds the events of a session behind the call that appended them.
pub(crate) fn project_later(log: &Arc<EventLog>, session: SessionRef) {
    match log.projector.pending().entry(session.key.clone()) {
        Entry::Occupied(mut again) => {
            again.insert(true);
            return;
        }
        Entry::Vacant(entry) => entry.insert(false),
    };
    let log = Arc::clone(log);
    let tasks = log.tasks.clone();
    tasks.spawn("session", OnPanic::Log, async move {
        loop {
            if project_with_room(&log, &session).await.is_err() {
                log.projector.failures.fetch_add(1, Relaxed);
                tracing::debug!(
                    "cannot update what is stored of a session; it is updated with its next event"
                );
            }
            let mut pending = log.projector.pending();
            match pending.get_mut(&session.key) {
                Some(again) if *again => *again = false,
                _ => {
                    pending.remove(&session.key);
                    break;
                }
            }
        }
        log.projector.changed.notify_waiters();
    });
}

/// A caller with very many sessions does not fill the bucket: its new sessions are only in the log.
async fn project_with_room(log: &EventLog, session: &SessionRef) -> Result<(), LogUnavailable> {
    if !log.has_room(&session.key.owner).await? && stored(&*log.store, session).await?.is_none() {
        return Ok(());
    }
    project(&*log.store, session).await.map(drop)
}

/// Reads what is stored of a session, without the events since.
pub(crate) async fn stored(
    store: &dyn EventStore,
    session: &SessionRef,
) -> Result<Option<Projected>, LogUnavailable> {
    let Some(record) = store.read_record(&session.record(RecordPart::Summary)).await? else {
        return Ok(None);
    };
    Ok(Some(Projected { summary: parse_summary(&record.value)?, revision: record.revision }))
}

pub(crate) fn parse_summary(value: &[u8]) -> Result<Summary, LogUnavailable> {
    match serde_json::from_slice::<Summary>(value) {
        Ok(summary) if summary.v <= VERSION => Ok(summary),
        _ => {
            tracing::warn!("cannot read what is stored of a session; a newer release may have written it");
            Err(LogUnavailable)
        }
    }
}

/// Brings what is stored of a session up to date, and returns it.
pub(crate) async fn project(
    store: &dyn EventStore,
    session: &SessionRef,
) -> Result<Option<Projected>, LogUnavailable> {
    for _ in 0..MAX_ATTEMPTS {
        let (mut summary, revision) = match stored(store, session).await? {
            Some(Projected { summary, revision }) => (Some(summary), revision),
            None => (None, 0),
        };
        let before = summary.clone();
        let after = summary.as_ref().map_or(0, |summary| index_position(summary.last_index).0);
        let mut changes = Changes::default();
        let mut batches = store.read(&session.key, after).take(MAX_BATCHES);
        let mut count = 0;
        while let Some(stored) = batches.next().await {
            let stored = stored?;
            let batch = stored.decode()?;
            fold(&mut summary, &mut changes, (&session.id, &session.caller), stored.sequence, &batch);
            count += 1;
        }
        let Some(summary) = summary else { return Ok(None) };
        if count == 0 {
            return Ok(Some(Projected { summary, revision }));
        }
        let is_same =
            before.is_some_and(|before| Summary { last_index: summary.last_index, ..before } == summary);
        if is_same && count < MAX_UNWRITTEN {
            // Pieces of an answer: they are read again next time, and the session keeps its revision.
            write_runs(store, session, changes.runs, false).await.or_else(ignore_conflict)?;
            return Ok(Some(Projected { summary, revision }));
        }
        match write(store, session, &summary, changes, revision, false).await {
            Ok(revision) if count < MAX_BATCHES => return Ok(Some(Projected { summary, revision })),
            // There is more, or another replica was faster.
            Ok(_) | Err(AppendError::Exists) => {}
            Err(AppendError::Unavailable(error)) => return Err(error),
        }
    }
    Err(LogUnavailable)
}

/// Makes everything that is stored of a session again from its log.
pub(crate) async fn rebuild(
    store: &dyn EventStore,
    session: &SessionRef,
) -> Result<Option<Projected>, LogUnavailable> {
    for _ in 0..MAX_ATTEMPTS {
        let before = stored(store, session).await?;
        if before.as_ref().is_some_and(|before| before.summary.deleted) {
            return Ok(before);
        }
        let revision = before.as_ref().map_or(0, |before| before.revision);
        // Only the record knows which events belong to an earlier session with the same id.
        let start = before.as_ref().map_or(0, |before| before.summary.start);
        let kept = kept_batches(store, session).await?;
        let mut kept = kept.into_iter().peekable();
        let (mut summary, mut changes) = (None, Changes::default());
        let who = (&session.id, &session.caller);
        let mut batches = store.read(&session.key, index_position(start).0);
        while let Some(stored) = batches.next().await {
            let stored = stored?;
            while let Some((sequence, batch)) = kept.next_if(|(sequence, _)| *sequence < stored.sequence) {
                fold(&mut summary, &mut changes, who, sequence, &batch);
            }
            fold(&mut summary, &mut changes, who, stored.sequence, &stored.decode()?);
        }
        let Some(mut summary) = summary else { return Ok(None) };
        summary.start = start;
        match write(store, session, &summary, changes, revision, true).await {
            Ok(revision) => return Ok(Some(Projected { summary, revision })),
            Err(AppendError::Exists) => {}
            Err(AppendError::Unavailable(error)) => return Err(error),
        }
    }
    Err(LogUnavailable)
}

/// The batches that were removed because of a redaction, without what was redacted.
async fn kept_batches(
    store: &dyn EventStore,
    session: &SessionRef,
) -> Result<BTreeMap<u64, Batch>, LogUnavailable> {
    let mut kept = BTreeMap::new();
    let mut batches = store.read(&session.key, 0);
    while let Some(stored) = batches.next().await {
        if let Some(replaced) = stored?.decode()?.kept {
            kept.insert(replaced.sequence, replaced.batch);
        }
    }
    Ok(kept)
}

/// Writes the result of a fold, the summary last: whoever reads it finds the rest.
async fn write(
    store: &dyn EventStore,
    session: &SessionRef,
    summary: &Summary,
    changes: Changes,
    revision: u64,
    is_rebuilt: bool,
) -> Result<u64, AppendError> {
    write_runs(store, session, changes.runs, is_rebuilt).await?;
    let mut chunks: BTreeMap<u64, Vec<(u64, Position)>> = BTreeMap::new();
    for (message, position) in changes.positions {
        chunks.entry(message / CHUNK).or_default().push((message, position));
    }
    for (number, positions) in chunks {
        let key = session.record(RecordPart::Positions(number));
        let found = store.read_record(&key).await?;
        let revision = found.as_ref().map_or(0, |found| found.revision);
        let mut chunk: PositionChunk = match found {
            Some(found) if !is_rebuilt => serde_json::from_slice(&found.value).unwrap_or_default(),
            _ => PositionChunk::default(),
        };
        let mut has_changed = is_rebuilt;
        for (message, position) in positions {
            has_changed |= chunk.set(message, position);
        }
        if has_changed {
            store.write_record(&key, json::to_bytes(&chunk), revision).await?;
        }
    }
    let key = session.record(RecordPart::Summary);
    let revision = store.write_record(&key, json::to_bytes(summary), revision).await?;
    if changes.has_leftovers && summary.deleted && summary.children.is_empty() {
        // A call that was under way when its session was deleted has ended.
        store.purge(&session.key).await?;
    }
    Ok(revision)
}

async fn write_runs(
    store: &dyn EventStore,
    session: &SessionRef,
    changes: BTreeMap<Uuid, Vec<RunChange>>,
    is_rebuilt: bool,
) -> Result<(), AppendError> {
    for (run, changes) in changes {
        let key = session.record(RecordPart::Run(run));
        let found = store.read_record(&key).await?;
        let revision = found.as_ref().map_or(0, |found| found.revision);
        let mut record: Option<RunRecord> = match found {
            Some(found) if !is_rebuilt => serde_json::from_slice(&found.value).ok(),
            _ => None,
        };
        if runs::apply(&mut record, (&session.id, run), &changes)
            && let Some(record) = record
        {
            store.write_record(&key, json::to_bytes(&record), revision).await?;
        }
    }
    Ok(())
}

/// Somebody else has written the record, with the same events or more.
fn ignore_conflict(error: AppendError) -> Result<(), LogUnavailable> {
    match error {
        AppendError::Exists => Ok(()),
        AppendError::Unavailable(error) => Err(error),
    }
}

/// Brings all sessions of a caller up to date, or makes them again. Returns how many there are.
pub(crate) async fn rebuild_all(store: &dyn EventStore, caller: &Caller) -> Result<u64, LogUnavailable> {
    let mut count = 0;
    for id in store.sessions(&owner(caller)).await? {
        rebuild(store, &SessionRef::new(caller, &id)).await?;
        count += 1;
    }
    Ok(count)
}
