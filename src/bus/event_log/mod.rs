//! The event log in a JetStream stream.
//!
//! | operation | request |
//! | --- | --- |
//! | append | a publication to the subject of the log, with an id under which the server recognises repetitions |
//! | read | batches of *direct gets*, and the end from the leader, because a copy of the stream may be behind |
//! | subscribe | a subscription to the subjects on which the server publishes stored messages again |
//!
//! A session, or a call without one, has a subject of its own; the stream has all of them.

mod reader;
mod records;
mod replies;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_nats::{HeaderMap, Message};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::BoxStream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use uuid::Uuid;

use self::reader::Reader;
pub(crate) use self::replies::LogReplies;
pub(crate) use self::stream::{LogLimits, runs_bucket, sessions_bucket, stream_name};
use super::jetstream::api::code;
use super::jetstream::breaker::{Breaker, Passage};
use super::jetstream::{Api, ApiError, JetStreamAbsence};
use super::subject::{Subjects, Token};
use crate::events::records::{LogRecord, RecordFilter, RecordKey};
use crate::events::store::{
    AppendError, EventStore, LogKey, LogScope, LogUnavailable, NewBatch, StoredBatch, TRANSIENT_TTL,
};
use crate::telemetry::log_limit::LogLimit;

/// In the key of a run without a session. The id of the run is unique in any case.
const NO_SESSION: &str = "_";
/// How often the bridge looks for the stream while it cannot be used.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Room in a message for its headers and its subject.
const HEADER_ROOM: usize = 2 << 10;

#[derive(Debug)]
pub(crate) struct JetStreamEventStore {
    api: Api,
    subjects: Subjects,
    stream: String,
    /// The bucket for runs.
    runs: String,
    /// The bucket for sessions.
    sessions: String,
    limits: LogLimits,
    breaker: Breaker,
    /// Whether the stream was found.
    is_found: AtomicBool,
    /// Notified when the stream is gone.
    lost: Notify,
    failures: LogLimit,
}

#[derive(Deserialize)]
struct Confirmation {
    seq: u64,
    #[serde(default)]
    duplicate: bool,
}

impl JetStreamEventStore {
    /// A log that is not available before [`Self::open`] or [`Self::watch`] has found the stream.
    pub(crate) fn new(api: Api, subjects: Subjects, limits: LogLimits) -> Self {
        let (stream, runs) = (stream_name(subjects.prefix()), runs_bucket(subjects.prefix()));
        let sessions = sessions_bucket(subjects.prefix());
        let (breaker, failures) = (Breaker::default(), LogLimit::default());
        Self {
            api,
            subjects,
            stream,
            runs,
            sessions,
            limits,
            breaker,
            is_found: AtomicBool::new(false),
            lost: Notify::new(),
            failures,
        }
    }

    /// Finds the stream, or creates it.
    pub(crate) async fn open(&self) -> Result<(), JetStreamAbsence> {
        stream::ensure(&self.api, &self.subjects, &self.limits).await?;
        self.is_found.store(true, Relaxed);
        self.breaker.close();
        Ok(())
    }

    /// Looks for the stream while it cannot be used. Never returns.
    pub(crate) async fn watch(&self) {
        loop {
            let _ = tokio::time::timeout(RETRY_INTERVAL, self.lost.notified()).await;
            if !self.api.is_connected() || self.is_available() {
                continue;
            }
            match self.open().await {
                Ok(()) => tracing::info!(stream = self.stream, "the event log is available"),
                Err(reason) => tracing::debug!(%reason, "the event log is not available"),
            }
        }
    }

    fn subject(&self, key: &LogKey) -> String {
        let (kind, id) = place(key);
        self.subjects.event(&key.owner, kind, &id)
    }

    /// `None` if a request would most likely fail.
    fn enter(&self) -> Result<Passage<'_>, LogUnavailable> {
        if !self.is_found.load(Relaxed) || !self.api.is_connected() {
            return Err(LogUnavailable);
        }
        self.breaker.enter().ok_or(LogUnavailable)
    }

    /// Whether a request reached the stream, for the breaker.
    fn finish<T>(&self, passage: Passage<'_>, result: Result<T, ApiError>) -> Result<T, LogUnavailable> {
        let error = match result {
            Ok(value) => {
                passage.succeeded();
                return Ok(value);
            }
            Err(error) => error,
        };
        match &error {
            // The connection comes back without a delay.
            ApiError::Disconnected => return Err(LogUnavailable),
            // The stream is gone, or has no leader.
            ApiError::NoResponders { .. } | ApiError::Refused { code: code::STREAM_NOT_FOUND, .. } => {
                self.is_found.store(false, Relaxed);
                self.lost.notify_one();
            }
            _ => passage.failed(),
        }
        if let Some(failures) = self.failures.add(std::time::Instant::now()) {
            tracing::warn!(%error, failures, "the event log does not respond; calls go on without it (logged once a minute)");
        }
        Err(LogUnavailable)
    }

    async fn call(&self, operation: &str, body: &Value) -> Result<Value, ApiError> {
        self.api.call(&format!("{operation}.{}", self.stream), Some(body)).await
    }
}

/// The tokens that stand for what a log is about.
fn place(key: &LogKey) -> (&'static str, Token) {
    match &key.scope {
        LogScope::Session(id) => ("s", Token::new(id)),
        LogScope::Run(run) => ("r", Token::new(&run.to_string())),
    }
}

fn number(message: &Message, name: &str) -> Option<u64> {
    message.headers.as_ref()?.get(name)?.as_str().parse().ok()
}

impl EventStore for JetStreamEventStore {
    fn is_available(&self) -> bool {
        self.is_found.load(Relaxed) && self.api.is_connected() && self.breaker.is_closed()
    }

    fn max_batch(&self) -> usize {
        self.api.client().max_payload().saturating_sub(HEADER_ROOM)
    }

    fn append<'a>(&'a self, batch: NewBatch<'a>) -> BoxFuture<'a, Result<u64, AppendError>> {
        async move {
            let NewBatch { key, id, run, body, is_transient, expects_first } = batch;
            let mut headers = HeaderMap::new();
            headers.insert("Nats-Msg-Id", id);
            if let Some(run) = run {
                headers.insert("A2A-Run", run.to_string());
            }
            if is_transient {
                headers.insert("Nats-TTL", format!("{}s", TRANSIENT_TTL.as_secs()));
            }
            if expects_first {
                headers.insert("Nats-Expected-Last-Subject-Sequence", "0");
            }
            if body.len() > self.max_batch() {
                tracing::debug!(bytes = body.len(), "a batch of the event log is too large");
                return Err(LogUnavailable.into());
            }
            let passage = self.enter()?;
            let sent = self.api.request::<Confirmation>(&self.subject(key), Some(headers), body).await;
            if let Err(ApiError::Refused {
                code: code::WRONG_LAST_SEQUENCE | code::WRONG_LAST_SEQUENCE_IN_FLIGHT,
                ..
            }) = &sent
            {
                passage.succeeded();
                return Err(AppendError::Exists);
            }
            let Confirmation { seq, duplicate } = self.finish(passage, sent)?;
            if duplicate {
                tracing::debug!(sequence = seq, "a batch of the event log was stored before");
            }
            Ok(seq)
        }
        .boxed()
    }

    fn read<'a>(&'a self, key: &'a LogKey, after: u64) -> BoxStream<'a, Result<StoredBatch, LogUnavailable>> {
        Reader::new(self, self.stream.clone(), self.subject(key), after).into_stream()
    }

    fn last_sequence<'a>(&'a self, key: &'a LogKey) -> BoxFuture<'a, Result<Option<u64>, LogUnavailable>> {
        async move { Ok(self.last(&self.subject(key)).await?.map(|batch| batch.sequence)) }.boxed()
    }

    fn subscribe<'a>(
        &'a self,
        key: &'a LogKey,
    ) -> BoxFuture<'a, Result<BoxStream<'static, StoredBatch>, LogUnavailable>> {
        async move {
            let (kind, id) = place(key);
            let subject = self.subjects.live_event(&key.owner, kind, &id);
            let messages = self.api.client().subscribe(subject).await.map_err(|_| LogUnavailable)?;
            let batches = messages.filter_map(|message| {
                let sequence = number(&message, "Nats-Sequence");
                let previous = number(&message, "Nats-Last-Sequence");
                let body = message.payload;
                std::future::ready(sequence.map(|sequence| StoredBatch { sequence, previous, body }))
            });
            Ok(batches.boxed())
        }
        .boxed()
    }

    fn put_run<'a>(
        &'a self,
        key: &'a LogKey,
        run: Uuid,
        record: Bytes,
    ) -> BoxFuture<'a, Result<(), LogUnavailable>> {
        async move {
            let session = match &key.scope {
                LogScope::Session(id) => Token::new(id).to_string(),
                LogScope::Run(_) => NO_SESSION.to_owned(),
            };
            let mut headers = HeaderMap::new();
            headers.insert("Nats-TTL", format!("{}s", self.limits.max_age.as_secs().max(1)));
            let subject = format!("$KV.{}.{}.{session}.{run}", self.runs, key.owner);
            let passage = self.enter()?;
            let written = self.api.request::<Confirmation>(&subject, Some(headers), record).await;
            self.finish(passage, written).map(drop)
        }
        .boxed()
    }

    fn find_run<'a>(
        &'a self,
        owner: &'a str,
        run: Uuid,
    ) -> BoxFuture<'a, Result<Option<Bytes>, LogUnavailable>> {
        async move {
            let which = json!({ "last_by_subj": format!("$KV.{}.{owner}.*.{run}", self.runs) });
            let found = self.get_from(&format!("KV_{}", self.runs), &which).await?;
            Ok(found.map(|found| found.body).filter(|record| !record.is_empty()))
        }
        .boxed()
    }

    fn purge<'a>(&'a self, key: &'a LogKey) -> BoxFuture<'a, Result<(), LogUnavailable>> {
        async move {
            let passage = self.enter()?;
            let purged = self.call("STREAM.PURGE", &json!({ "filter": self.subject(key) })).await;
            self.finish(passage, purged).map(drop)
        }
        .boxed()
    }

    fn erase(&self, sequence: u64) -> BoxFuture<'_, Result<(), LogUnavailable>> {
        async move {
            let passage = self.enter()?;
            let erased = self.call("STREAM.MSG.DELETE", &json!({ "seq": sequence, "no_erase": false })).await;
            match erased {
                Err(ApiError::Refused {
                    code: code::MESSAGE_NOT_FOUND | code::MESSAGE_NOT_DELETED | code::SEQUENCE_NOT_FOUND,
                    ..
                }) => {
                    passage.succeeded();
                    // The server says the same of a message that is gone, and of one that it cannot remove.
                    match self.get_one(&json!({ "seq": sequence })).await? {
                        Some(_) => Err(LogUnavailable),
                        None => Ok(()),
                    }
                }
                erased => self.finish(passage, erased).map(drop),
            }
        }
        .boxed()
    }

    fn get(&self, sequence: u64) -> BoxFuture<'_, Result<Option<StoredBatch>, LogUnavailable>> {
        async move { self.get_one(&json!({ "seq": sequence })).await }.boxed()
    }

    fn sessions<'a>(&'a self, owner: &'a str) -> BoxFuture<'a, Result<Vec<Arc<str>>, LogUnavailable>> {
        self.list_sessions(owner).boxed()
    }

    fn read_record<'a>(
        &'a self,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<LogRecord>, LogUnavailable>> {
        self.get_record(key).boxed()
    }

    fn write_record<'a>(
        &'a self,
        key: &'a RecordKey,
        value: Bytes,
        expected: u64,
    ) -> BoxFuture<'a, Result<u64, AppendError>> {
        self.put_record(key, value, expected).boxed()
    }

    fn records<'a>(
        &'a self,
        filter: &'a RecordFilter,
        after: u64,
    ) -> BoxStream<'a, Result<LogRecord, LogUnavailable>> {
        self.scan_records(filter, after)
    }

    fn count_records<'a>(&'a self, filter: &'a RecordFilter) -> BoxFuture<'a, Result<usize, LogUnavailable>> {
        async move {
            let (stream, subject) = self.record_filter(filter);
            Ok(self.subjects_of(&stream, &subject).await?.len())
        }
        .boxed()
    }

    fn purge_records<'a>(&'a self, filter: &'a RecordFilter) -> BoxFuture<'a, Result<(), LogUnavailable>> {
        self.remove_records(filter).boxed()
    }
}
