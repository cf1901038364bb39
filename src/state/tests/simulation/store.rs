//! The store that the replicas share, with the faults of a store over the network.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, pending};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::oneshot;

use super::super::super::clock::{Instant, wall_time};
use super::super::super::peers::{ClaimStatus, Holder, InstanceId, Liveness, PeerQueries as _, Peers};
use super::super::super::{
    ABSENT, Durability, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable,
    StoredRecord, WriteError,
};
use super::executor::Owner;
use super::world::World;
use uuid::Uuid;

#[derive(Default)]
pub(super) struct SharedRecords {
    records: BTreeMap<(u8, String), (StoredRecord, Instant)>,
    revision: Revision,
}

impl SharedRecords {
    fn key(kind: RecordKind, key: &RecordKey) -> (u8, String) {
        let number = RecordKind::ALL.iter().position(|other| *other == kind).unwrap_or_default();
        (u8::try_from(number).unwrap_or_default(), format!("{}.{}", key.agent, key.id))
    }

    pub(super) fn read(&self, kind: RecordKind, key: &RecordKey) -> Option<StoredRecord> {
        let (record, expires) = self.records.get(&Self::key(kind, key))?;
        (*expires > Instant::now()).then(|| record.clone())
    }

    fn write(
        &mut self,
        kind: RecordKind,
        key: &RecordKey,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
    ) -> Result<Revision, WriteError> {
        if self.read(kind, key).map_or(ABSENT, |record| record.revision) != expected {
            return Err(WriteError::Conflict);
        }
        self.revision += 1;
        let record = StoredRecord { value, revision: self.revision, written_at: wall_time() };
        // The store counts whole seconds.
        let expires = Instant::now() + Duration::from_secs(ttl.as_secs().max(1));
        self.records.insert(Self::key(kind, key), (record, expires));
        Ok(self.revision)
    }

    pub(super) fn all(&self, kind: RecordKind) -> Vec<StoredRecord> {
        let (number, _) = Self::key(kind, &RecordKey::new(&"".into(), ""));
        let now = Instant::now();
        let of_kind = self.records.iter().filter(|((of, _), (_, expires))| *of == number && *expires > now);
        of_kind.map(|(_, (record, _))| record.clone()).collect()
    }
}

/// The shared store as one replica reaches it.
pub(super) struct SharedStore {
    pub world: Arc<World>,
    pub replica: usize,
}

impl fmt::Debug for SharedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SharedStore of {}", self.replica)
    }
}

/// What becomes of a write.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Stored,
    Unavailable,
    /// Another write to the record is in flight.
    SpuriousConflict,
    Lost,
    Unconfirmed,
    Ghost,
}

impl SharedStore {
    fn fate(&self) -> Fate {
        let world = &self.world;
        if !world.has_store(self.replica) {
            return match world.below(10) {
                0 => Fate::Lost,
                1 => Fate::Ghost,
                _ => Fate::Unavailable,
            };
        }
        if !world.fails(world.mix.write_faults) {
            return Fate::Stored;
        }
        match world.below(5) {
            0 => Fate::Unavailable,
            1 => Fate::SpuriousConflict,
            2 => Fate::Lost,
            3 => Fate::Unconfirmed,
            _ => Fate::Ghost,
        }
    }

    async fn read_remote(
        &self,
        kind: RecordKind,
        key: &RecordKey,
    ) -> Result<Option<StoredRecord>, StoreUnavailable> {
        let world = &self.world;
        self.begin().await;
        world.latency().await;
        if !world.has_store(self.replica) || world.fails(world.mix.read_faults) {
            world.count("reads that failed");
            return Err(StoreUnavailable);
        }
        let found = world.records.lock().unwrap().read(kind, key);
        world.latency().await;
        Ok(found)
    }

    /// A replica that has crashed sends nothing any more.
    async fn begin(&self) {
        if !self.world.is_running(self.replica) {
            pending::<()>().await;
        }
    }

    async fn write_remote(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
    ) -> Result<Revision, WriteError> {
        self.begin().await;
        let (world, fate) = (&self.world, self.fate());
        let name = match fate {
            Fate::Stored => "writes",
            Fate::Unavailable => "writes: unavailable",
            Fate::SpuriousConflict => "writes: spurious conflict",
            Fate::Lost => "writes: not confirmed, not stored",
            Fate::Unconfirmed => "writes: not confirmed, stored",
            Fate::Ghost => "writes: not confirmed, stored later",
        };
        world.count(name);
        world.log(|| {
            let record = world.describe(&value);
            format!(
                "replica {} writes {kind:?} {} {record} over {expected} ({name})",
                self.replica,
                world.key_name(key)
            )
        });
        match fate {
            Fate::Unavailable | Fate::SpuriousConflict | Fate::Lost => {
                world.latency().await;
                Err(match fate {
                    Fate::Unavailable => WriteError::Unavailable,
                    Fate::SpuriousConflict => WriteError::Conflict,
                    _ => WriteError::Unknown,
                })
            }
            Fate::Stored | Fate::Unconfirmed => {
                let landed = self.send(kind, key, expected, value, ttl, None);
                let written = landed.await.unwrap_or(Err(WriteError::Unknown));
                world.latency().await;
                match fate {
                    Fate::Stored => written,
                    _ => Err(WriteError::Unknown),
                }
            }
            Fate::Ghost => {
                let later = world.millis(1..12_000);
                drop(self.send(kind, key, expected, value, ttl, Some(later)));
                world.latency().await;
                Err(WriteError::Unknown)
            }
        }
    }

    /// The write is on its way, whatever becomes of the replica.
    fn send(
        &self,
        kind: RecordKind,
        key: &RecordKey,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
        later: Option<Duration>,
    ) -> oneshot::Receiver<Result<Revision, WriteError>> {
        let (sender, landed) = oneshot::channel();
        let (world, key, replica) = (Arc::clone(&self.world), key.clone(), self.replica);
        self.world.spawner.spawn(Owner::World, async move {
            match later {
                Some(later) => tokio::time::sleep(later).await,
                None => world.latency().await,
            }
            let written = world.records.lock().unwrap().write(kind, &key, expected, value, ttl);
            if written == Err(WriteError::Conflict) {
                world.count("conflicts");
            }
            world.log(|| {
                let key = world.key_name(&key);
                format!("replica {replica}: its write of {kind:?} {key} over {expected} landed: {written:?}")
            });
            let _ = sender.send(written);
        });
        landed
    }
}

impl StateStore for SharedStore {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>> {
        self.read_remote(kind, key).boxed()
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
        self.write_remote(kind, key, expected, value, lifetime.ttl).boxed()
    }

    fn scan<'a>(
        &'a self,
        kind: RecordKind,
        _: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>> {
        let records = async move {
            self.begin().await;
            self.world.latency().await;
            if !self.world.has_store(self.replica) || self.world.fails(self.world.mix.read_faults) {
                return vec![Err(StoreUnavailable)];
            }
            let mut found = self.world.records.lock().unwrap().all(kind);
            self.world.latency().await;
            let breaks = self.world.fails(self.world.mix.read_faults);
            if breaks {
                // In the middle.
                found.sort_unstable_by_key(|record| record.revision);
                found.truncate(found.len() / 2);
            }
            let end = breaks.then_some(Err(StoreUnavailable));
            found.into_iter().map(Ok).chain(end).collect()
        };
        records.into_stream().flat_map(stream::iter).boxed()
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn is_available(&self) -> bool {
        self.world.has_store(self.replica)
    }
}

/// The other replicas as one replica sees them.
pub(super) struct SimulatedPeers {
    pub world: Arc<World>,
    pub replica: usize,
    pub instance: InstanceId,
}

impl fmt::Debug for SimulatedPeers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SimulatedPeers of {}", self.replica)
    }
}

impl SimulatedPeers {
    fn others(&self) -> Vec<(usize, InstanceId)> {
        let replicas = self.world.replicas();
        let all = replicas.iter().enumerate().map(|(index, status)| (index, status.instance));
        all.filter(|(index, _)| *index != self.replica).collect()
    }

    fn can_reach(&self, replica: usize) -> bool {
        !self.world.is_cut_off(self.replica) && self.world.is_reachable(replica)
    }
}

impl Peers for SimulatedPeers {
    fn instance(&self) -> InstanceId {
        self.instance
    }

    fn is_alone(&self) -> bool {
        self.others()
            .iter()
            .all(|(_, instance)| self.world.liveness(self.replica, *instance) == Liveness::Dead)
    }

    fn others(&self) -> usize {
        self.others().len()
    }

    fn alone_for(&self) -> Option<Duration> {
        let replicas = self.world.replicas();
        let mut since = replicas.get(self.replica)?.started;
        for other in replicas.iter().filter(|status| status.instance != self.instance) {
            since = since.max(other.dead_since()?);
        }
        Some(since.elapsed()).filter(|_| since <= Instant::now())
    }

    fn liveness(&self, instance: InstanceId) -> BoxFuture<'_, Liveness> {
        async move {
            self.world.latency().await;
            self.world.liveness(self.replica, instance)
        }
        .boxed()
    }

    fn may_return(&self, instance: InstanceId) -> bool {
        self.world.liveness(self.replica, instance) != Liveness::Dead
    }

    fn claim_status(&self, instance: InstanceId, nonce: Uuid) -> BoxFuture<'_, Option<ClaimStatus>> {
        async move {
            self.world.latency().await;
            let to = self.world.index_of(instance)?;
            if !self.can_reach(to) {
                tokio::time::sleep(self.world.millis(0..2000)).await;
                return None;
            }
            let status = self.world.state(to)?.claim_status(nonce);
            self.world.latency().await;
            Some(status)
        }
        .boxed()
    }

    fn find<'a>(&'a self, kind: RecordKind, key: &'a RecordKey) -> BoxFuture<'a, Holder> {
        async move {
            self.world.latency().await;
            let mut found = Holder::Nowhere;
            for (replica, instance) in self.others() {
                if self.can_reach(replica)
                    && self.world.state(replica).is_some_and(|state| state.has(kind, key))
                {
                    found = Holder::At(instance);
                }
            }
            self.world.latency().await;
            found
        }
        .boxed()
    }

    fn record_changed(&self, instance: InstanceId, kind: RecordKind, key: &RecordKey) {
        let Some(to) = self.world.index_of(instance) else { return };
        if !self.can_reach(to) {
            return;
        }
        let (world, key) = (Arc::clone(&self.world), key.clone());
        self.world.spawner.spawn(Owner::World, async move {
            world.latency().await;
            if let Some(state) = world.state(to) {
                state.record_changed(kind, &key);
            }
        });
    }
}
