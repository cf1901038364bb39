//! Where the log is kept: an append-only stream that all replicas share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use uuid::Uuid;

use super::event::Batch;
use super::records::{LogRecord, RecordFilter, RecordKey};
use crate::caller::Caller;
use crate::reply::error::{ActionError, Code};

/// How long transient batches are kept: deltas of the answer, plans and notices.
pub(crate) const TRANSIENT_TTL: Duration = Duration::from_secs(3600);

/// Whose events, and of what. Two callers may use the same session id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct LogKey {
    /// A hash of the caller.
    pub owner: Arc<str>,
    pub scope: LogScope,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum LogScope {
    /// All events of a session.
    Session(Arc<str>),
    /// The events of a call without a session.
    Run(Uuid),
}

impl LogKey {
    pub(crate) fn session(caller: &Caller, id: &str) -> Self {
        Self { owner: owner(caller), scope: LogScope::Session(id.into()) }
    }

    pub(crate) fn run(caller: &Caller, run: Uuid) -> Self {
        Self { owner: owner(caller), scope: LogScope::Run(run) }
    }
}

/// The hash that stands for a caller in the names of its logs.
pub(crate) fn owner(caller: &Caller) -> Arc<str> {
    caller.scoped_id(&[]).into()
}

/// A batch to append.
#[derive(Debug)]
pub(crate) struct NewBatch<'a> {
    pub key: &'a LogKey,
    /// Identifies the batch: within two minutes, a batch with the same id is not stored again.
    pub id: String,
    pub run: Option<Uuid>,
    pub body: Bytes,
    /// Whether the batch is removed after [`TRANSIENT_TTL`].
    pub is_transient: bool,
    /// Whether the batch must be the first one under its key.
    pub expects_first: bool,
}

/// A batch that was read.
#[derive(Debug, Clone)]
pub(crate) struct StoredBatch {
    /// Increases within the stream.
    pub sequence: u64,
    /// The sequence of the batch before it under the same key, if the store says so. That one may have expired.
    pub previous: Option<u64>,
    pub body: Bytes,
}

impl StoredBatch {
    pub(crate) fn decode(&self) -> Result<Batch, LogUnavailable> {
        Batch::decode(&self.body)
    }
}

/// The log cannot be read or written now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the event log is unavailable; try again")]
pub(crate) struct LogUnavailable;

impl From<LogUnavailable> for ActionError {
    fn from(error: LogUnavailable) -> Self {
        Self::new(Code::StateUnavailable, error.to_string())
    }
}

/// Why a batch was not appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AppendError {
    /// It had to be the first one, and is not.
    #[error("the log exists already")]
    Exists,
    /// It may still be appended later.
    #[error(transparent)]
    Unavailable(#[from] LogUnavailable),
}

/// The stream of batches. Reads see every batch whose append was confirmed before.
pub(crate) trait EventStore: fmt::Debug + Send + Sync {
    /// Whether a request would most likely succeed.
    fn is_available(&self) -> bool;

    /// Maximum bytes of a batch.
    fn max_batch(&self) -> usize;

    /// Appends a batch, and returns its sequence. A repeated append of the same batch returns the same one.
    fn append<'a>(&'a self, batch: NewBatch<'a>) -> BoxFuture<'a, Result<u64, AppendError>>;

    /// The batches of a key after a sequence, in order.
    fn read<'a>(&'a self, key: &'a LogKey, after: u64) -> BoxStream<'a, Result<StoredBatch, LogUnavailable>>;

    /// The sequence of the last batch of a key; `None` if there is none.
    fn last_sequence<'a>(&'a self, key: &'a LogKey) -> BoxFuture<'a, Result<Option<u64>, LogUnavailable>>;

    /// Batches as they are appended, from now on. Some may be missing; [`Follower`](super::follow::Follower) fills the gaps.
    fn subscribe<'a>(
        &'a self,
        key: &'a LogKey,
    ) -> BoxFuture<'a, Result<BoxStream<'static, StoredBatch>, LogUnavailable>>;

    /// Writes what is known of a run, in place of what was there.
    fn put_run<'a>(
        &'a self,
        key: &'a LogKey,
        run: Uuid,
        record: Bytes,
    ) -> BoxFuture<'a, Result<(), LogUnavailable>>;

    /// What is known of a run of an owner, in whatever session it is.
    fn find_run<'a>(
        &'a self,
        owner: &'a str,
        run: Uuid,
    ) -> BoxFuture<'a, Result<Option<Bytes>, LogUnavailable>>;

    /// Removes all batches of a key.
    fn purge<'a>(&'a self, key: &'a LogKey) -> BoxFuture<'a, Result<(), LogUnavailable>>;

    /// Removes one batch, and overwrites what it had in storage.
    fn erase(&self, sequence: u64) -> BoxFuture<'_, Result<(), LogUnavailable>>;

    /// One batch, by its sequence.
    fn get(&self, sequence: u64) -> BoxFuture<'_, Result<Option<StoredBatch>, LogUnavailable>>;

    /// The sessions of an owner of which there are batches.
    fn sessions<'a>(&'a self, owner: &'a str) -> BoxFuture<'a, Result<Vec<Arc<str>>, LogUnavailable>>;

    fn read_record<'a>(
        &'a self,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<LogRecord>, LogUnavailable>>;

    /// Writes a record if it is still at this revision, 0 for a record that does not exist. Returns the new revision.
    fn write_record<'a>(
        &'a self,
        key: &'a RecordKey,
        value: Bytes,
        expected: u64,
    ) -> BoxFuture<'a, Result<u64, AppendError>>;

    /// Records that were written after a revision, in the order of their last writes.
    fn records<'a>(
        &'a self,
        filter: &'a RecordFilter,
        after: u64,
    ) -> BoxStream<'a, Result<LogRecord, LogUnavailable>>;

    fn count_records<'a>(&'a self, filter: &'a RecordFilter) -> BoxFuture<'a, Result<usize, LogUnavailable>>;

    fn purge_records<'a>(&'a self, filter: &'a RecordFilter) -> BoxFuture<'a, Result<(), LogUnavailable>>;
}
