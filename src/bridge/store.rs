//! Chooses the store for the state of the bridge.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use tokio::sync::Notify;

use super::BridgeError;
use crate::background::{BackgroundTasks, OnPanic};
use crate::bus::connect::events::ConnectionEvents;
use crate::bus::jetstream::{Api, JetStreamStore};
use crate::config::{JetStreamConfig, JetStreamMode, NatsConfig};
use crate::state::StateStore;
use crate::state::memory::MemoryStore;
use crate::state::quota::Quotas;
use crate::state::replicated::ReplicatedStore;
use crate::state::stats::StoreStats;

/// How long a stop waits until all state is in JetStream.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct OpenStore {
    pub(super) store: Arc<dyn StateStore>,
    replicated: Option<Arc<ReplicatedStore>>,
}

impl OpenStore {
    /// Opens the store that the configuration selects, and starts its background tasks.
    pub(super) async fn open(
        nats: &NatsConfig,
        client: &Client,
        events: &Arc<ConnectionEvents>,
        quotas: &Arc<Quotas>,
        tasks: &BackgroundTasks,
    ) -> Result<Self, BridgeError> {
        let JetStreamConfig { mode, replicas } = nats.jetstream;
        if mode == JetStreamMode::Off {
            return Ok(Self { store: Arc::new(MemoryStore::new(quotas)), replicated: None });
        }
        let api = Api::new(client.clone(), Arc::clone(events));
        let (stats, available) = (Arc::new(StoreStats::default()), Arc::new(Notify::new()));
        let jetstream =
            JetStreamStore::new(api, &nats.subject_prefix, replicas, stats, Arc::clone(&available));
        let jetstream = Arc::new(jetstream);
        match jetstream.detect_at_start().await {
            Ok(()) => tracing::info!("state is shared in JetStream"),
            Err(reason) if mode == JetStreamMode::Required => return Err(BridgeError::JetStream(reason)),
            Err(reason) => {
                tracing::info!(%reason, "state is kept in memory: replicas do not share it, and a restart forgets it");
            }
        }
        let shared: Arc<dyn StateStore> = Arc::clone(&jetstream) as Arc<dyn StateStore>;
        let is_required = mode == JetStreamMode::Required;
        let replicated = Arc::new(ReplicatedStore::new(shared, quotas, is_required, available));
        let stop = tasks.stop.clone();
        tasks.spawn("jetstream", OnPanic::StopBridge, async move {
            stop.run_until_cancelled(jetstream.watch()).await;
        });
        let (flushing, stop) = (Arc::clone(&replicated), tasks.stop.clone());
        tasks.spawn("deferred state", OnPanic::StopBridge, async move {
            stop.run_until_cancelled(flushing.flush_continuously()).await;
        });
        let store = Arc::clone(&replicated) as Arc<dyn StateStore>;
        Ok(Self { store, replicated: Some(replicated) })
    }

    /// Writes what waits to be written, before the bridge stops.
    pub(super) async fn flush(&self) {
        if let Some(replicated) = &self.replicated {
            replicated.flush(FLUSH_TIMEOUT).await;
        }
    }
}
