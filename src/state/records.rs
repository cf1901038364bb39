//! Typed records on top of a store.
//!
//! A record is JSON with a version field, so that replicas of different releases can share a store: a record of a
//! newer version is reported as `state_unavailable` instead of being misread.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{
    ABSENT, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable, StoredRecord,
    WriteError, quota,
};
use crate::json;
use crate::reply::error::ActionError;

/// The version of the records that this release writes. Raise it when an older release would misread a record.
const VERSION: u32 = 1;
/// Attempts of a write that conflicts or is not confirmed.
const MAX_ATTEMPTS: u32 = 8;

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
    /// Leave it as it is, and return the value.
    Keep(T),
}

impl<R: Serialize + DeserializeOwned> TypedRecords<R> {
    pub(super) fn new(store: &Arc<dyn StateStore>, kind: RecordKind) -> Self {
        Self { store: Arc::clone(store), kind, record: PhantomData }
    }

    pub(super) async fn read(&self, key: &RecordKey) -> Result<Option<ReadRecord<R>>, ActionError> {
        let Some(StoredRecord { value, revision, written_at }) = self.store.read(self.kind, key).await?
        else {
            return Ok(None);
        };
        Ok(Some(ReadRecord { record: decode(&value)?, written_at, revision }))
    }

    /// Reads a record, decides, and writes it back. If another write comes first, it reads and decides again.
    ///
    /// A write that the store does not confirm is repeated with the same expected revision: whichever of the two
    /// takes effect first makes the other one conflict, so the decision is never applied twice. `decide`
    /// must recognise its own record in that case.
    pub(super) async fn update<T>(
        &self,
        key: &RecordKey,
        mut decide: impl FnMut(Option<R>) -> Result<Change<R, T>, ActionError>,
    ) -> Result<T, ActionError> {
        let mut attempts = 0;
        loop {
            let read = self.read(key).await?;
            let revision = read.as_ref().map_or(ABSENT, |read| read.revision);
            let (record, lifetime, result) = match decide(read.map(|read| read.record))? {
                Change::Keep(result) => return Ok(result),
                Change::Write(record, lifetime, result) => (record, lifetime, result),
            };
            attempts += 1;
            match self.store.write(self.kind, key, revision, encode(&record), lifetime).await {
                Ok(_) => return Ok(result),
                Err(WriteError::Conflict | WriteError::Unknown) if attempts < MAX_ATTEMPTS => {}
                Err(WriteError::Full) => return Err(quota::refusal(&key.agent, self.kind.into())),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(super) async fn count(&self, matches: impl Fn(&R) -> bool) -> Result<usize, StoreUnavailable> {
        let matches = &matches;
        let add = |count, (_, stored): (RecordKey, StoredRecord)| async move {
            // A scan may return very many records.
            tokio::task::coop::consume_budget().await;
            Ok(count + usize::from(decode(&stored.value).is_ok_and(|record| matches(&record))))
        };
        self.store.scan(self.kind).try_fold(0, add).await
    }
}

#[derive(Serialize, Deserialize)]
struct Versioned<R> {
    v: u32,
    record: R,
}

fn encode<R: Serialize>(record: &R) -> Bytes {
    json::to_bytes(&Versioned { v: VERSION, record })
}

fn decode<R: DeserializeOwned>(value: &[u8]) -> Result<R, StoreUnavailable> {
    // Read first: the record of another version may have another form.
    #[derive(Deserialize)]
    struct Version {
        v: u32,
    }
    let unreadable = |error: serde_json::Error| {
        // The category only: the text of the error may quote the record.
        tracing::warn!(category = ?error.classify(), "cannot read a record in the state store");
        StoreUnavailable
    };
    let version: Version = serde_json::from_slice(value).map_err(unreadable)?;
    if version.v > VERSION {
        tracing::warn!(
            version = version.v,
            "a newer release wrote a record in the state store; upgrade this bridge"
        );
        return Err(StoreUnavailable);
    }
    serde_json::from_slice(value).map_err(unreadable).map(|Versioned { record, .. }| record)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_a_newer_version_is_not_misread() {
        assert_eq!(decode::<String>(&encode(&"text")), Ok("text".to_owned()));
        assert_eq!(decode::<String>(br#"{"v": 2, "record": "text"}"#), Err(StoreUnavailable));
        assert_eq!(decode::<String>(b"{"), Err(StoreUnavailable));
    }
}
