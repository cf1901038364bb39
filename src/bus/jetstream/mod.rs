//! State that replicas share, in buckets of NATS JetStream.
//!
//! | operation | request |
//! | --- | --- |
//! | write | a publication to the subject of the record, with the revision that it expects and a time to live |
//! | read | the last message of the subject, from the leader of the stream |
//! | scan | an ephemeral consumer |
//!
//! Reads go to the leader. A *direct get* may be answered by a follower that is behind: right after a write, 7 % of them
//! miss it on a cluster of three servers. A caller must not get a refusal because of such a read. The leader costs a
//! tenth more there, and half of what it costs to confirm every miss.
//!
//! An outcome is one of four: the write is confirmed; it lost a race; it had no effect; or nothing is known, and it may
//! still take effect, even after a reconnect. The last one is reported as [`WriteError::Unknown`].

pub(super) mod api;
pub(super) mod breaker;
mod bucket;
mod detection;
mod handle;
mod outage;
mod permissions;
mod scan;
pub(crate) mod summary;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use async_nats::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use serde::Deserialize;
use serde_json::json;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::api::code;
use self::breaker::Passage;
use self::bucket::Bucket;
use self::outage::Outage;
use self::scan::Scan;
use crate::config::StateReplicas;
use crate::state::ledger::{Holder, Stored};
use crate::state::stats::{Operation, StoreStats};
use crate::state::{
    ABSENT, Durability, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable,
    StoredRecord, WriteError,
};

pub(crate) use self::api::{Api, ApiError};
pub use self::detection::JetStreamAbsence;
pub(crate) use self::detection::find_jetstream;
pub use self::handle::SharedStore;
pub(crate) use self::permissions::{Permissions, missing_permissions, permissions};

/// Maximum size of a record. The caller keeps the state of a task without its content, if that is too large.
const MAX_VALUE: usize = 256 << 10;
/// The longest time to live; the server cannot represent much more.
const MAX_TTL: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

const EXPECTED_REVISION: &str = "Nats-Expected-Last-Subject-Sequence";
const TTL: &str = "Nats-TTL";
/// For whose quota a record counts.
const HOLDER: &str = "A2A-Holder";

/// A record to write.
struct NewRecord<'a> {
    subject: &'a str,
    holder: Holder,
    value: Bytes,
    ttl: Duration,
}

#[derive(Debug)]
pub(crate) struct JetStreamStore {
    api: Api,
    /// In the order of [`RecordKind::ALL`].
    buckets: [Bucket; RecordKind::ALL.len()],
    replicas: StateReplicas,
    is_detected: AtomicBool,
    /// Whether the last look for JetStream found that there is none.
    is_disabled: AtomicBool,
    outage: Outage,
    stats: Arc<StoreStats>,
    /// Notified when the store is available again.
    available: Arc<Notify>,
}

impl JetStreamStore {
    /// A store that is not available before [`Self::detect_at_start`] or [`Self::watch`] has found JetStream. It notifies
    /// `available` whenever it becomes available.
    pub(crate) fn new(
        api: Api,
        subject_prefix: &str,
        replicas: StateReplicas,
        stats: Arc<StoreStats>,
        available: Arc<Notify>,
    ) -> Self {
        Self {
            api,
            buckets: RecordKind::ALL.map(|kind| Bucket::new(subject_prefix, kind)),
            replicas,
            is_detected: AtomicBool::new(false),
            is_disabled: AtomicBool::new(false),
            outage: Outage::default(),
            stats,
            available,
        }
    }

    fn bucket(&self, kind: RecordKind) -> &Bucket {
        let [follow_ups, tasks, sessions, keys, replies] = &self.buckets;
        match kind {
            RecordKind::FollowUp => follow_ups,
            RecordKind::Task => tasks,
            RecordKind::Session => sessions,
            RecordKind::IdempotencyKey => keys,
            RecordKind::Reply => replies,
        }
    }

    fn is_detected(&self) -> bool {
        self.is_detected.load(Relaxed)
    }

    fn set_detected(&self) {
        self.is_detected.store(true, Relaxed);
        self.outage.end();
        self.available.notify_one();
    }

    fn was_disabled(&self) -> bool {
        self.is_disabled.load(Relaxed)
    }

    fn set_disabled(&self, is_disabled: bool) {
        self.is_disabled.store(is_disabled, Relaxed);
    }

    fn is_reachable(&self) -> bool {
        self.api.is_connected() && self.buckets.iter().all(|bucket| bucket.breaker.is_closed())
    }

    /// `None` if a request would most likely fail.
    fn enter(&self, kind: RecordKind) -> Option<Passage<'_>> {
        if !self.is_detected() || !self.api.is_connected() {
            return None;
        }
        self.bucket(kind).breaker.enter()
    }

    /// Whether a request reached the store, for the breaker and the statistics.
    fn finish(&self, passage: Passage<'_>, operation: Operation, began: Instant, failure: Option<&ApiError>) {
        self.stats.add(operation, began.elapsed());
        match failure {
            None => {
                passage.succeeded();
                if self.outage.is_under_way() && self.is_reachable() {
                    self.outage.end();
                    self.available.notify_one();
                }
            }
            // The connection is down, which the connection itself reports, and it comes back without a delay.
            Some(ApiError::Disconnected) => {}
            Some(error) => {
                self.stats.errors.fetch_add(1, Relaxed);
                passage.failed();
                self.outage.begin(error);
            }
        }
    }

    async fn get(&self, bucket: &Bucket, subject: &str) -> Result<Option<LastMessage>, ApiError> {
        let operation = format!("STREAM.MSG.GET.{}", bucket.stream());
        match self.api.call(&operation, Some(&json!({"last_by_subj": subject}))).await {
            Ok(LastMessageResponse { message }) => Ok(Some(message)),
            Err(error) if error.code() == Some(code::MESSAGE_NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn put(&self, record: &NewRecord<'_>, expected: Revision) -> Written {
        let NewRecord { subject, holder, value, ttl } = record;
        let mut headers = HeaderMap::new();
        headers.insert(HOLDER, holder.to_string());
        headers.insert(EXPECTED_REVISION, expected.to_string());
        headers.insert(TTL, ttl_seconds(*ttl).to_string());
        Written(self.api.request(subject, Some(headers), value.clone()).await.map(|Confirmation { seq }| seq))
    }

    /// Creates a record. If an operator has deleted it with a tool for key-value buckets, a marker is in its place.
    async fn create(&self, bucket: &Bucket, record: &NewRecord<'_>) -> Written {
        let created = self.put(record, ABSENT).await;
        if !created.is_conflict() {
            return created;
        }
        match self.get(bucket, record.subject).await {
            Ok(Some(message)) if message.is_marker() => self.put(record, message.seq).await,
            _ => created,
        }
    }
}

impl StateStore for JetStreamStore {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>> {
        async move {
            let passage = self.enter(kind).ok_or(StoreUnavailable)?;
            let (bucket, began) = (self.bucket(kind), Instant::now());
            let read = self.get(bucket, &bucket.subject(key)).await;
            self.finish(passage, Operation::Read, began, read.as_ref().err());
            match read {
                Ok(message) => {
                    let message = message.filter(|message| !message.is_marker());
                    message.map(LastMessage::into_record).transpose()
                }
                Err(_) => Err(StoreUnavailable),
            }
        }
        .boxed()
    }

    fn write<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
        _: Durability,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            if value.len() > MAX_VALUE {
                return Err(WriteError::Full);
            }
            let passage = self.enter(kind).ok_or(WriteError::Unavailable)?;
            let (bucket, began) = (self.bucket(kind), Instant::now());
            let subject = bucket.subject(key);
            let holder = Holder::new(&key.agent, &key.caller);
            let record = NewRecord { subject: &subject, holder, value, ttl: lifetime.ttl };
            let written = match expected {
                ABSENT => self.create(bucket, &record).await,
                _ => self.put(&record, expected).await,
            };
            self.finish(passage, Operation::Write, began, written.failure());
            if written.is_conflict() {
                self.stats.conflicts.fetch_add(1, Relaxed);
            }
            if written.is_full()
                && let Some(refusals) = bucket.refusals.add(std::time::Instant::now())
            {
                tracing::warn!(
                    bucket = bucket.name,
                    refusals,
                    "the bucket is full and takes no new records; `a2a-bridge state` shows what it holds, and \
                     `nats stream edit` can raise its `max_bytes` (logged once a minute)"
                );
            }
            written.result()
        }
        .boxed()
    }

    fn capacity(&self, kind: RecordKind) -> Option<u64> {
        self.bucket(kind).capacity()
    }

    fn sizes(&self, kind: RecordKind) -> BoxStream<'_, Result<(Holder, Stored), StoreUnavailable>> {
        let begin = async move {
            let passage = self.enter(kind).ok_or(StoreUnavailable)?;
            let began = Instant::now();
            let scan = Scan::begin_sizes(&self.api, self.bucket(kind)).await;
            self.finish(passage, Operation::Scan, began, scan.as_ref().err());
            scan.map_err(|_| StoreUnavailable)
        };
        let sizes = begin.into_stream().flat_map(|scan| {
            stream::unfold(Some(scan), |scan| async move {
                match scan? {
                    Err(error) => Some((Err(error), None)),
                    Ok(mut scan) => match scan.next_size().await {
                        Ok(size) => Some((Ok(size?), Some(Ok(scan)))),
                        Err(_) => Some((Err(StoreUnavailable), None)),
                    },
                }
            })
        });
        sizes.boxed()
    }

    fn scan<'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>> {
        let begin = async move {
            let passage = self.enter(kind).ok_or(StoreUnavailable)?;
            let began = Instant::now();
            let scan = Scan::begin(&self.api, self.bucket(kind), agent.map(|agent| &**agent)).await;
            self.finish(passage, Operation::Scan, began, scan.as_ref().err());
            scan.map_err(|_| StoreUnavailable)
        };
        let records = begin.into_stream().flat_map(|scan| {
            stream::unfold(Some(scan), |scan| async move {
                match scan? {
                    Err(error) => Some((Err(error), None)),
                    Ok(mut scan) => match scan.next().await {
                        Ok(record) => Some((Ok(record?), Some(Ok(scan)))),
                        Err(error) => {
                            tracing::debug!(%error, "a scan of shared state has failed");
                            Some((Err(StoreUnavailable), None))
                        }
                    },
                }
            })
        });
        records.boxed()
    }

    fn is_shared(&self) -> bool {
        self.is_detected()
    }

    fn is_available(&self) -> bool {
        self.is_detected() && self.is_reachable()
    }

    fn max_record(&self) -> usize {
        MAX_VALUE
    }

    fn stats(&self) -> Option<&StoreStats> {
        Some(&self.stats)
    }
}

#[derive(Deserialize)]
struct Confirmation {
    seq: Revision,
}

/// The result of a write.
struct Written(Result<Revision, ApiError>);

impl Written {
    fn is_conflict(&self) -> bool {
        let code = self.0.as_ref().err().and_then(ApiError::code);
        matches!(code, Some(code::WRONG_LAST_SEQUENCE | code::WRONG_LAST_SEQUENCE_IN_FLIGHT))
    }

    fn is_too_large(&self) -> bool {
        match &self.0 {
            Err(ApiError::TooLarge) => true,
            Err(error) => error.code() == Some(code::MESSAGE_TOO_LARGE),
            Ok(_) => false,
        }
    }

    fn is_full(&self) -> bool {
        match &self.0 {
            Err(ApiError::Refused { code, .. }) => matches!(
                *code,
                code::STORE_FAILED
                    | code::INSUFFICIENT_RESOURCES
                    | code::INSUFFICIENT_STORAGE
                    | code::INSUFFICIENT_MEMORY
                    | code::ACCOUNT_RESOURCES_EXCEEDED
            ),
            _ => false,
        }
    }

    /// The error, unless the store has made a decision.
    fn failure(&self) -> Option<&ApiError> {
        self.0.as_ref().err().filter(|_| !self.is_conflict() && !self.is_full() && !self.is_too_large())
    }

    fn result(self) -> Result<Revision, WriteError> {
        if self.is_conflict() {
            return Err(WriteError::Conflict);
        }
        if self.is_full() {
            return Err(WriteError::StoreFull);
        }
        if self.is_too_large() {
            return Err(WriteError::Full);
        }
        self.0.map_err(|error| match error {
            ApiError::TimedOut { .. } | ApiError::Malformed { .. } => WriteError::Unknown,
            _ => WriteError::Unavailable,
        })
    }
}

#[derive(Deserialize)]
struct LastMessageResponse {
    message: LastMessage,
}

/// The last message of a subject.
#[derive(Deserialize)]
struct LastMessage {
    seq: Revision,
    time: String,
    /// Both are in Base64.
    #[serde(default)]
    data: String,
    #[serde(default)]
    hdrs: String,
}

impl LastMessage {
    fn is_marker(&self) -> bool {
        // Without content, and with headers that say so.
        self.data.is_empty()
            && STANDARD.decode(&self.hdrs).is_ok_and(|headers| {
                MARKERS.iter().any(|marker| memchr::memmem::find(&headers, marker.as_bytes()).is_some())
            })
    }

    fn into_record(self) -> Result<StoredRecord, StoreUnavailable> {
        let value = STANDARD.decode(self.data).map_err(|_| StoreUnavailable)?;
        let written_at = OffsetDateTime::parse(&self.time, &Rfc3339).map_err(|_| StoreUnavailable)?;
        Ok(StoredRecord { value: value.into(), revision: self.seq, written_at: SystemTime::from(written_at) })
    }
}

/// Headers of a message that stands for a deleted key.
const MARKERS: [&str; 2] = ["KV-Operation", "Nats-Marker-Reason"];

fn is_marker(payload: &[u8], headers: Option<&HeaderMap>) -> bool {
    payload.is_empty()
        && headers.is_some_and(|headers| MARKERS.iter().any(|marker| headers.get(*marker).is_some()))
}

/// Whole seconds, rounded up; the server refuses less than one.
fn ttl_seconds(ttl: Duration) -> u64 {
    let ttl = ttl.min(MAX_TTL);
    (ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_to_live_is_in_whole_seconds() {
        let millis = [0, 1, 999, 1000, 1001, 60_000].map(Duration::from_millis);
        assert_eq!(millis.map(ttl_seconds), [1, 1, 1, 1, 2, 60]);
        assert_eq!(ttl_seconds(Duration::MAX), MAX_TTL.as_secs());
    }

    #[test]
    fn the_outcome_of_a_write_is_never_guessed() {
        let refused = |code| Written(Err(ApiError::Refused { code, description: String::new() })).result();
        assert_eq!(refused(10071), Err(WriteError::Conflict));
        assert_eq!(refused(10164), Err(WriteError::Conflict));
        assert_eq!(refused(10077), Err(WriteError::StoreFull));
        assert_eq!(refused(10054), Err(WriteError::Full));
        assert_eq!(refused(10008), Err(WriteError::Unavailable));
        let failed = |error| Written(Err(error)).result();
        let subject = String::new;
        assert_eq!(failed(ApiError::TimedOut { subject: subject() }), Err(WriteError::Unknown));
        assert_eq!(failed(ApiError::Malformed { subject: subject() }), Err(WriteError::Unknown));
        assert_eq!(failed(ApiError::NoResponders { subject: subject() }), Err(WriteError::Unavailable));
        assert_eq!(failed(ApiError::Denied { subject: subject() }), Err(WriteError::Unavailable));
        assert_eq!(failed(ApiError::Disconnected), Err(WriteError::Unavailable));
    }
}
