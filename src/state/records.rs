//! Typed records on top of a store.
//!
//! A record is JSON with a version field, so that replicas of different releases can share a store: a record of a
//! newer version is reported as `state_unavailable` instead of being misread.
//!
//! A record may hold a reply of many megabytes, so large ones are decoded and encoded as [offloaded](crate::offload)
//! work. Whoever does not need the reply reads a part of the record, which skips the content; whoever needs it charges
//! the memory before the record is decoded.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::{Stream, TryStreamExt as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{
    ABSENT, Durability, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable,
    StoredRecord, WriteError, quota,
};
use crate::caller::Caller;
use crate::memory::OutOfMemory;
use crate::reply::error::ActionError;
use crate::{json, offload};

/// The version of the records that this release writes. Raise it when an older release would misread a record.
const VERSION: u32 = 1;
/// Attempts of a write that conflicts or is not confirmed.
const MAX_ATTEMPTS: u32 = 8;

/// What an update assumes about a record before it has read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Assumption {
    /// Read it first.
    Nothing,
    /// The record is probably new: try to create it, which saves a round trip, and read it only if it exists.
    Absent,
}

/// A record of a store.
pub(super) trait Record: Serialize + DeserializeOwned {
    /// The memory of what may be large in it, in bytes.
    fn allocated(&self) -> usize {
        0
    }

    /// Whose record it is, if that is not the caller of the key.
    fn caller(&self) -> Option<&Caller> {
        None
    }
}

/// The records of one kind.
#[derive(Debug, Clone)]
pub(super) struct TypedRecords<R> {
    store: Arc<dyn StateStore>,
    kind: RecordKind,
    record: PhantomData<fn() -> R>,
}

pub(super) struct ReadRecord<R> {
    pub record: R,
    pub written_at: SystemTime,
    revision: Revision,
}

/// What to do with a record that was just read.
pub(super) enum Change<R, T> {
    /// Replace it, and return the value if the write succeeds.
    Write(R, Lifetime, T),
    /// The same, but the record is written in the background.
    WriteBehind(R, Lifetime, T),
    /// Leave it as it is, and return the value.
    Keep(T),
}

impl<R: Record> TypedRecords<R> {
    pub(super) fn new(store: &Arc<dyn StateStore>, kind: RecordKind) -> Self {
        Self { store: Arc::clone(store), kind, record: PhantomData }
    }

    /// Reads a record of a small kind, or a part of a large one: `P` has only some of the fields.
    pub(super) async fn read<P: DeserializeOwned>(
        &self,
        key: &RecordKey,
    ) -> Result<Option<ReadRecord<P>>, ActionError> {
        let Some(StoredRecord { value, revision, written_at }) = self.store.read(self.kind, key).await?
        else {
            return Ok(None);
        };
        let record = offloaded(key, value.len(), || decode(&value)).await?;
        Ok(Some(ReadRecord { record, written_at, revision }))
    }

    /// Reads a record that may be large. `charge` charges this many bytes in place of what it charged before.
    pub(super) async fn read_charged(
        &self,
        key: &RecordKey,
        charge: impl Fn(usize) -> Result<(), OutOfMemory>,
    ) -> Result<Option<R>, ActionError> {
        let Some(StoredRecord { value, .. }) = self.store.read(self.kind, key).await? else {
            return Ok(None);
        };
        // Few pieces of work run at a time, so it suffices to charge the exact size afterwards.
        charge(value.len())?;
        let decode = || decode(&value).map(|record: R| (record.allocated(), record));
        let (allocated, record) = offloaded(key, value.len(), decode).await?;
        charge(allocated)?;
        Ok(Some(record))
    }

    /// Drops this process's copy of a record, so that the next read sees what other replicas have written.
    pub(super) fn forget(&self, key: &RecordKey) {
        self.store.forget(self.kind, key);
    }

    /// Reads a record, decides, and writes it back. If another write comes first, it reads and decides again.
    ///
    /// A write that the store does not confirm is repeated with the same expected revision: whichever of the two
    /// takes effect first makes the other one conflict, so the decision is never applied twice. `decide`
    /// must recognise its own record in that case. `P` has the fields that it needs.
    pub(super) async fn update<P: DeserializeOwned, T>(
        &self,
        key: &RecordKey,
        decide: impl FnMut(Option<P>) -> Result<Change<R, T>, ActionError>,
    ) -> Result<T, ActionError> {
        self.update_with(key, Assumption::Nothing, Durability::Confirmed, decide).await
    }

    /// Like [`Self::update`], with an assumption about the record, and with another durability.
    pub(super) async fn update_with<P: DeserializeOwned, T>(
        &self,
        key: &RecordKey,
        mut assumption: Assumption,
        durability: Durability,
        mut decide: impl FnMut(Option<P>) -> Result<Change<R, T>, ActionError>,
    ) -> Result<T, ActionError> {
        let mut attempts = 0;
        loop {
            let read = match std::mem::replace(&mut assumption, Assumption::Nothing) {
                Assumption::Absent => None,
                Assumption::Nothing => self.read(key).await?,
            };
            let revision = read.as_ref().map_or(ABSENT, |read| read.revision);
            let (record, lifetime, result, durability) = match decide(read.map(|read| read.record))? {
                Change::Keep(result) => return Ok(result),
                Change::Write(record, lifetime, result) => (record, lifetime, result, durability),
                Change::WriteBehind(record, lifetime, result) => {
                    (record, lifetime, result, Durability::Behind)
                }
            };
            attempts += 1;
            let value = offloaded(key, record.allocated(), || encode(key, &record)).await;
            let of_record = record.caller().filter(|caller| **caller != key.caller);
            let of_record = of_record.map(|caller| key.clone().of_caller(caller));
            drop(record);
            let key = of_record.as_ref().unwrap_or(key);
            match self.store.write(self.kind, key, revision, value, lifetime, durability).await {
                Ok(_) => return Ok(result),
                Err(WriteError::Conflict | WriteError::Unknown) if attempts < MAX_ATTEMPTS => {}
                Err(WriteError::Full) => return Err(quota::refusal(&key.agent, self.kind.into())),
                Err(WriteError::ShareUsed) => return Err(quota::share_refusal(self.kind.into())),
                Err(WriteError::StoreFull) => return Err(quota::full_bucket(self.kind.into())),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// All records of an agent, or a part of each: `P` has only some of the fields. Records that cannot be read are left
    /// out.
    pub(super) fn scan<'a, P: DeserializeOwned + Send + 'a>(
        &'a self,
        agent: &'a Arc<str>,
    ) -> impl Stream<Item = Result<(RecordKey, P), StoreUnavailable>> + Send + 'a {
        self.store.scan(self.kind, Some(agent)).try_filter_map(|stored| async move {
            // A scan may return very many records.
            tokio::task::coop::consume_budget().await;
            let Ok(Keyed { agent, id }) = serde_json::from_slice(&stored.value) else { return Ok(None) };
            Ok(decode(&stored.value).ok().map(|record| (RecordKey::new(&agent, id), record)))
        })
    }

    /// Counts the records that this process has written.
    pub(super) async fn count(
        &self,
        agent: Option<&Arc<str>>,
        matches: impl Fn(&R) -> bool,
    ) -> Result<usize, StoreUnavailable> {
        let matches = &matches;
        let add = |count, stored: StoredRecord| async move {
            // A scan may return very many records.
            tokio::task::coop::consume_budget().await;
            Ok(count + usize::from(decode(&stored.value).is_ok_and(|record| matches(&record))))
        };
        self.store.scan_local(self.kind, agent).try_fold(0, add).await
    }
}

/// Runs work on a record. Boxed if it is large, which is rare, so that the future of an ordinary call stays small.
async fn offloaded<T>(key: &RecordKey, bytes: usize, work: impl FnOnce() -> T) -> T {
    if bytes <= offload::INLINE {
        return work();
    }
    Box::pin(offload::run(&key.agent, bytes, work)).await
}

/// The stored form of a record. It names its key, because a store may have to hash the key.
#[derive(Serialize)]
struct Envelope<'a, R> {
    v: u32,
    agent: &'a str,
    id: &'a str,
    record: R,
}

#[derive(Deserialize)]
struct Versioned<R> {
    v: u32,
    record: R,
}

#[derive(Deserialize)]
struct Keyed {
    agent: Arc<str>,
    id: String,
}

fn encode<R: Serialize>(key: &RecordKey, record: &R) -> Bytes {
    json::to_bytes(&Envelope { v: VERSION, agent: &key.agent, id: &key.id, record })
}

fn decode<R: DeserializeOwned>(value: &[u8]) -> Result<R, StoreUnavailable> {
    #[derive(Deserialize)]
    struct Version {
        v: u32,
    }
    let error = match serde_json::from_slice::<Versioned<R>>(value) {
        Ok(Versioned { v, record }) if v <= VERSION => return Ok(record),
        Ok(_) => None,
        Err(error) => Some(error),
    };
    // The record of another version may have another form, so the version is read on its own.
    match (serde_json::from_slice(value), error) {
        (Ok(Version { v }), _) if v > VERSION => {
            tracing::warn!(
                version = v,
                "a newer release wrote a record in the state store; upgrade this bridge"
            );
        }
        (_, error) => {
            // The category only: the text of the error may quote the record.
            let category = error.map(|error| error.classify());
            tracing::warn!(?category, "cannot read a record in the state store");
        }
    }
    Err(StoreUnavailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_a_newer_version_is_not_misread() {
        let key = RecordKey::new(&"agent".into(), "id");
        assert_eq!(decode::<String>(&encode(&key, &"text")), Ok("text".to_owned()));
        assert_eq!(decode::<String>(br#"{"v": 2, "record": "text"}"#), Err(StoreUnavailable));
        assert_eq!(decode::<String>(br#"{"v": 2, "record": ["other form"]}"#), Err(StoreUnavailable));
        assert_eq!(decode::<String>(b"{"), Err(StoreUnavailable));
    }
}
