//! The shared store on its own, for the integration tests.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use tokio::sync::Notify;

use super::{Api, JetStreamAbsence, JetStreamStore};
use crate::bus::connect::credentials::NatsCredentials;
use crate::bus::connect::{FirstConnection, connect};
use crate::config::Config;
use crate::state::{Durability, Lifetime, RecordKey, RecordKind, StateStore, StoreUnavailable, WriteError};

/// The store that a bridge with this configuration uses.
#[derive(Debug, Clone)]
pub struct SharedStore(Arc<JetStreamStore>);

impl SharedStore {
    /// Connects to NATS and looks for JetStream.
    ///
    /// # Errors
    ///
    /// When JetStream cannot be used.
    ///
    /// # Panics
    ///
    /// When NATS cannot be reached.
    pub async fn open(config: &Config) -> Result<Self, JetStreamAbsence> {
        let events = Arc::default();
        let credentials = NatsCredentials::new(&config.nats).expect("valid credentials");
        let client = connect(&config.nats, &credentials, usize::MAX, FirstConnection::FailFast, &events)
            .await
            .expect("a connection to NATS");
        let api = Api::new(client, events);
        let (prefix, replicas) = (&config.nats.subject_prefix, config.nats.jetstream.replicas);
        let store = JetStreamStore::new(api, prefix, replicas, Arc::default(), Arc::new(Notify::new()));
        store.detect_at_start().await?;
        Ok(Self(Arc::new(store)))
    }

    /// Looks for JetStream again after every reconnect.
    pub async fn watch(&self) {
        self.0.watch().await;
    }

    /// Writes a session, if the record is still at revision `expected`.
    ///
    /// # Errors
    ///
    /// When the write is not confirmed.
    pub async fn write(
        &self,
        agent: &str,
        id: &str,
        expected: u64,
        value: impl Into<Bytes>,
        ttl: Duration,
    ) -> Result<u64, WriteError> {
        let (key, lifetime) = (RecordKey::new(&agent.into(), id), Lifetime::evictable(ttl));
        self.0.write(RecordKind::Session, &key, expected, value.into(), lifetime, Durability::Confirmed).await
    }

    /// The sizes of all sessions, as the ledger of a new process counts them.
    ///
    /// # Errors
    ///
    /// When the store is unavailable.
    pub async fn sizes(&self) -> Result<Vec<(u64, Duration)>, StoreUnavailable> {
        let sizes = self.0.sizes(RecordKind::Session);
        sizes.map_ok(|(_, size)| (size.bytes, size.expires_in)).try_collect().await
    }

    /// The value and the revision of a session.
    ///
    /// # Errors
    ///
    /// When the store is unavailable.
    pub async fn read(&self, agent: &str, id: &str) -> Result<Option<(Bytes, u64)>, StoreUnavailable> {
        let record = self.0.read(RecordKind::Session, &RecordKey::new(&agent.into(), id)).await?;
        Ok(record.map(|record| (record.value, record.revision)))
    }

    /// The values of all sessions, or of those of one agent.
    ///
    /// # Errors
    ///
    /// When the store is unavailable.
    pub async fn scan(&self, agent: Option<&str>) -> Result<Vec<Bytes>, StoreUnavailable> {
        let agent = agent.map(Arc::from);
        let records = self.0.scan(RecordKind::Session, agent.as_ref());
        records.map_ok(|record| record.value).try_collect().await
    }
}
