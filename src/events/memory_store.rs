//! An event log in memory, for tests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::records::{LogRecord, RecordFilter, RecordKey, RecordPart};
use super::store::{AppendError, EventStore, LogKey, LogScope, LogUnavailable, NewBatch, StoredBatch};

/// A batch of the log.
#[derive(Debug, Clone)]
pub(crate) struct MemoryBatch {
    pub key: LogKey,
    id: String,
    pub stored: StoredBatch,
}

#[derive(Debug, Default)]
struct Content {
    batches: Vec<MemoryBatch>,
    last: u64,
    subscribers: Vec<(LogKey, mpsc::UnboundedSender<StoredBatch>)>,
    runs: HashMap<(String, Uuid), Bytes>,
    records: Vec<(RecordKey, LogRecord)>,
    last_revision: u64,
}

/// A log that tests can break.
#[derive(Debug, Default)]
pub(crate) struct MemoryEventStore {
    content: Mutex<Content>,
    /// Whether requests fail.
    pub is_down: AtomicBool,
    /// Whether subscribers miss what is appended.
    pub loses_live: AtomicBool,
}

impl MemoryEventStore {
    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self) -> Result<(), LogUnavailable> {
        if self.is_down.load(Relaxed) { Err(LogUnavailable) } else { Ok(()) }
    }

    pub(crate) fn batches(&self) -> Vec<MemoryBatch> {
        self.content().batches.clone()
    }

    fn append_now(&self, batch: NewBatch<'_>) -> Result<u64, AppendError> {
        self.check()?;
        let mut content = self.content();
        if let Some(same) = content.batches.iter().find(|same| same.id == batch.id) {
            return Ok(same.stored.sequence);
        }
        let previous = content.batches.iter().rev().find(|other| other.key == *batch.key);
        let previous = previous.map_or(0, |previous| previous.stored.sequence);
        if batch.expects_first && previous > 0 {
            return Err(AppendError::Exists);
        }
        content.last += 1;
        let stored = StoredBatch { sequence: content.last, previous: Some(previous), body: batch.body };
        let key = batch.key.clone();
        if !self.loses_live.load(Relaxed) {
            let interested = content.subscribers.iter().filter(|(subscribed, _)| *subscribed == key);
            interested.for_each(|(_, sender)| drop(sender.send(stored.clone())));
        }
        let sequence = stored.sequence;
        content.batches.push(MemoryBatch { key, id: batch.id, stored });
        Ok(sequence)
    }
}

impl EventStore for MemoryEventStore {
    fn is_available(&self) -> bool {
        self.check().is_ok()
    }

    fn max_batch(&self) -> usize {
        1 << 20
    }

    fn append<'a>(&'a self, batch: NewBatch<'a>) -> BoxFuture<'a, Result<u64, AppendError>> {
        ready(self.append_now(batch)).boxed()
    }

    fn read<'a>(&'a self, key: &'a LogKey, after: u64) -> BoxStream<'a, Result<StoredBatch, LogUnavailable>> {
        if let Err(error) = self.check() {
            return stream::iter([Err(error)]).boxed();
        }
        let of_key = |batch: &MemoryBatch| batch.key == *key && batch.stored.sequence > after;
        let found: Vec<_> = self.batches().into_iter().filter(of_key).map(|batch| Ok(batch.stored)).collect();
        stream::iter(found).boxed()
    }

    fn last_sequence<'a>(&'a self, key: &'a LogKey) -> BoxFuture<'a, Result<Option<u64>, LogUnavailable>> {
        let last = self.batches().into_iter().rfind(|batch| batch.key == *key);
        ready(self.check().map(|()| last.map(|last| last.stored.sequence))).boxed()
    }

    fn subscribe<'a>(
        &'a self,
        key: &'a LogKey,
    ) -> BoxFuture<'a, Result<BoxStream<'static, StoredBatch>, LogUnavailable>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        self.content().subscribers.push((key.clone(), sender));
        let batches = stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
        ready(self.check().map(|()| batches.boxed())).boxed()
    }

    fn put_run<'a>(
        &'a self,
        key: &'a LogKey,
        run: Uuid,
        record: Bytes,
    ) -> BoxFuture<'a, Result<(), LogUnavailable>> {
        self.content().runs.insert((key.owner.to_string(), run), record);
        ready(self.check()).boxed()
    }

    fn find_run<'a>(
        &'a self,
        owner: &'a str,
        run: Uuid,
    ) -> BoxFuture<'a, Result<Option<Bytes>, LogUnavailable>> {
        let found = self.content().runs.get(&(owner.to_owned(), run)).cloned();
        ready(self.check().map(|()| found)).boxed()
    }

    fn purge<'a>(&'a self, key: &'a LogKey) -> BoxFuture<'a, Result<(), LogUnavailable>> {
        self.content().batches.retain(|batch| batch.key != *key);
        ready(self.check()).boxed()
    }

    fn erase(&self, sequence: u64) -> BoxFuture<'_, Result<(), LogUnavailable>> {
        self.content().batches.retain(|batch| batch.stored.sequence != sequence);
        ready(self.check()).boxed()
    }

    fn get(&self, sequence: u64) -> BoxFuture<'_, Result<Option<StoredBatch>, LogUnavailable>> {
        let found = self.batches().into_iter().find(|batch| batch.stored.sequence == sequence);
        ready(self.check().map(|()| found.map(|found| found.stored))).boxed()
    }

    fn sessions<'a>(&'a self, owner: &'a str) -> BoxFuture<'a, Result<Vec<Arc<str>>, LogUnavailable>> {
        let mut found: Vec<Arc<str>> = Vec::new();
        for batch in self.batches() {
            if let LogScope::Session(id) = batch.key.scope
                && *batch.key.owner == *owner
                && !found.contains(&id)
            {
                found.push(id);
            }
        }
        ready(self.check().map(|()| found)).boxed()
    }

    fn read_record<'a>(
        &'a self,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<LogRecord>, LogUnavailable>> {
        let content = self.content();
        let found = content.records.iter().find(|(own, _)| own == key).map(|(_, record)| record.clone());
        ready(self.check().map(|()| found)).boxed()
    }

    fn write_record<'a>(
        &'a self,
        key: &'a RecordKey,
        value: Bytes,
        expected: u64,
    ) -> BoxFuture<'a, Result<u64, AppendError>> {
        let mut content = self.content();
        let revision = content.records.iter().find(|(own, _)| own == key).map_or(0, |(_, r)| r.revision);
        if let Err(error) = self.check() {
            return ready(Err(error.into())).boxed();
        }
        if revision != expected {
            return ready(Err(AppendError::Exists)).boxed();
        }
        content.last_revision += 1;
        let revision = content.last_revision;
        content.records.retain(|(own, _)| own != key);
        content.records.push((key.clone(), LogRecord { value, revision }));
        ready(Ok(revision)).boxed()
    }

    fn records<'a>(
        &'a self,
        filter: &'a RecordFilter,
        after: u64,
    ) -> BoxStream<'a, Result<LogRecord, LogUnavailable>> {
        let content = self.content();
        let found =
            content.records.iter().filter(|(key, record)| is_in(key, filter) && record.revision > after);
        let found: Vec<_> = found.map(|(_, record)| Ok(record.clone())).collect();
        stream::iter(found).boxed()
    }

    fn count_records<'a>(&'a self, filter: &'a RecordFilter) -> BoxFuture<'a, Result<usize, LogUnavailable>> {
        let count = self.content().records.iter().filter(|(key, _)| is_in(key, filter)).count();
        ready(self.check().map(|()| count)).boxed()
    }

    fn purge_records<'a>(&'a self, filter: &'a RecordFilter) -> BoxFuture<'a, Result<(), LogUnavailable>> {
        self.content().records.retain(|(key, _)| !is_in(key, filter));
        ready(self.check()).boxed()
    }
}

fn is_in(key: &RecordKey, filter: &RecordFilter) -> bool {
    match (filter, key.part) {
        (RecordFilter::Summaries { owner }, RecordPart::Summary) => *owner == key.owner,
        (RecordFilter::Positions { owner, session }, RecordPart::Positions(_))
        | (RecordFilter::Runs { owner, session }, RecordPart::Run(_)) => {
            *owner == key.owner && *session == key.session
        }
        _ => false,
    }
}
