//! A store that fails as a store over the network can, and the guarantees that hold in spite of it.

mod isolation;
mod simulation;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use futures_util::stream::{self, BoxStream, StreamExt as _};
use rstest::rstest;
use uuid::Uuid;

use super::follow_ups::{Claim, ClaimResult, FollowUpState, FollowUps, OpenQuestion};
use super::idempotency::{Idempotency, Reservation};
use super::memory::MemoryStore;
use super::peers::{ClaimStatus, Holder, InstanceId, Liveness, NoPeers, Peers};
use super::quota::Quotas;
use super::stats::StoreStats;
use super::tasks::{Observer, RecordResult, Takeover, TaskRecord, Tasks};
use super::{
    Durability, Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable, StoredRecord,
    WriteError,
};
use crate::a2a::model::TaskState;
use crate::caller::Caller;
use crate::memory::OutOfMemory;
use crate::reply::error::Code;
use crate::reply::outcome::{Outcome, ReplyContent, ReplyStatus, TaskRef};

const HOUR: Duration = Duration::from_secs(3600);

/// What happens to a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// None: the write succeeds.
    Nothing,
    Unavailable,
    /// Another write came first, although the store has no trace of it.
    Conflict,
    /// Not confirmed, and not stored.
    Lost,
    Unconfirmed,
    /// Not confirmed, and stored just before the next write.
    Ghost,
}

/// A write that takes effect later.
#[derive(Debug)]
struct Ghost {
    kind: RecordKind,
    key: RecordKey,
    expected: Revision,
    value: Bytes,
    lifetime: Lifetime,
}

#[derive(Debug)]
pub(crate) struct FaultyStore {
    inner: MemoryStore,
    pub faults: Mutex<VecDeque<Fault>>,
    ghost: Mutex<Option<Ghost>>,
    /// Whether replicas share the store; `false` while it is absent.
    pub is_shared: AtomicBool,
    pub is_down: AtomicBool,
    /// Counts the writes.
    pub writes: AtomicUsize,
    pub scans: AtomicUsize,
    /// So many of the next scans break after half of the records.
    pub broken_scans: AtomicUsize,
    /// How long a write takes.
    pub latency: Mutex<Duration>,
    /// The writes under way, and the most that there were at the same time.
    under_way: AtomicUsize,
    pub most_under_way: AtomicUsize,
    /// The size of each bucket; 0 for no limit.
    pub capacity: AtomicU64,
    /// Whether writes are refused because the bucket is full.
    pub is_full: AtomicBool,
    /// Writes of this kind never end.
    pub hangs: Mutex<Option<RecordKind>>,
    stats: StoreStats,
}

impl FaultyStore {
    pub(super) fn new(faults: &[Fault]) -> Arc<Self> {
        let faults = Mutex::new(faults.iter().copied().collect());
        Arc::new(Self {
            inner: MemoryStore::new(&quotas()),
            faults,
            ghost: Mutex::default(),
            is_shared: AtomicBool::new(false),
            is_down: AtomicBool::new(false),
            writes: AtomicUsize::new(0),
            scans: AtomicUsize::new(0),
            broken_scans: AtomicUsize::new(0),
            latency: Mutex::default(),
            under_way: AtomicUsize::new(0),
            most_under_way: AtomicUsize::new(0),
            capacity: AtomicU64::new(0),
            is_full: AtomicBool::new(false),
            hangs: Mutex::default(),
            stats: StoreStats::default(),
        })
    }

    /// A store that replicas share.
    pub(crate) fn shared() -> Arc<Self> {
        let store = Self::new(&[]);
        store.is_shared.store(true, Relaxed);
        store
    }

    async fn wait(&self) {
        let latency = *self.latency.lock().unwrap_or_else(PoisonError::into_inner);
        if !latency.is_zero() {
            let under_way = self.under_way.fetch_add(1, Relaxed) + 1;
            self.most_under_way.fetch_max(under_way, Relaxed);
            tokio::time::sleep(latency).await;
            self.under_way.fetch_sub(1, Relaxed);
        }
    }

    /// Lets a late write take effect.
    pub(super) async fn land_ghost(&self) {
        let ghost = self.ghost.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Ghost { kind, key, expected, value, lifetime }) = ghost {
            let _ = self.inner.write(kind, &key, expected, value, lifetime, Durability::Confirmed).await;
        }
    }
}

impl StateStore for FaultyStore {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>> {
        match self.is_down.load(Relaxed) {
            true => std::future::ready(Err(StoreUnavailable)).boxed(),
            false => self.inner.read(kind, key),
        }
    }

    fn write<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
        durability: Durability,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            self.writes.fetch_add(1, Relaxed);
            let hangs = *self.hangs.lock().unwrap_or_else(PoisonError::into_inner);
            if hangs == Some(kind) {
                std::future::pending::<()>().await;
            }
            if self.is_down.load(Relaxed) {
                return Err(WriteError::Unavailable);
            }
            if self.is_full.load(Relaxed) {
                return Err(WriteError::StoreFull);
            }
            // Requests over a network yield.
            tokio::task::yield_now().await;
            self.wait().await;
            self.land_ghost().await;
            let fault = self.faults.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match fault {
                None | Some(Fault::Nothing) => {
                    self.inner.write(kind, key, expected, value, lifetime, durability).await
                }
                Some(Fault::Conflict) => Err(WriteError::Conflict),
                Some(Fault::Unavailable) => Err(WriteError::Unavailable),
                Some(Fault::Lost) => Err(WriteError::Unknown),
                Some(Fault::Unconfirmed) => {
                    let _ = self.inner.write(kind, key, expected, value, lifetime, durability).await;
                    Err(WriteError::Unknown)
                }
                Some(Fault::Ghost) => {
                    let ghost = Some(Ghost { kind, key: key.clone(), expected, value, lifetime });
                    *self.ghost.lock().unwrap_or_else(PoisonError::into_inner) = ghost;
                    Err(WriteError::Unknown)
                }
            }
        }
        .boxed()
    }

    fn scan<'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<&'a Arc<str>>,
    ) -> BoxStream<'a, Result<StoredRecord, StoreUnavailable>> {
        self.scans.fetch_add(1, Relaxed);
        match self.is_down.load(Relaxed) {
            true => stream::iter([Err(StoreUnavailable)]).boxed(),
            false if self.broken_scans.load(Relaxed) > 0 => {
                self.broken_scans.fetch_sub(1, Relaxed);
                let records = self.inner.scan(kind, agent).collect::<Vec<_>>().into_stream();
                let half = records.flat_map(|mut records| {
                    records.truncate(records.len() / 2);
                    stream::iter(records).chain(stream::iter([Err(StoreUnavailable)]))
                });
                half.boxed()
            }
            false => self.inner.scan(kind, agent),
        }
    }

    fn capacity(&self, _: RecordKind) -> Option<u64> {
        Some(self.capacity.load(Relaxed)).filter(|bytes| *bytes > 0)
    }

    fn is_shared(&self) -> bool {
        self.is_shared.load(Relaxed)
    }

    fn is_available(&self) -> bool {
        self.is_shared() && !self.is_down.load(Relaxed)
    }

    fn stats(&self) -> Option<&StoreStats> {
        Some(&self.stats)
    }
}

/// A working store, for the tests of every module here.
pub(super) fn memory_store() -> Arc<dyn StateStore> {
    Arc::new(MemoryStore::new(&quotas()))
}

/// A process without other replicas, for the tests of every module here.
pub(crate) fn alone() -> Arc<dyn Peers> {
    Arc::new(NoPeers(InstanceId::new_v4()))
}

/// A process whose peers are all alive and hold their claims.
#[derive(Debug)]
struct AllAlive(InstanceId);

impl Peers for AllAlive {
    fn instance(&self) -> InstanceId {
        self.0
    }

    fn is_alone(&self) -> bool {
        false
    }

    fn others(&self) -> usize {
        1
    }

    fn alone_for(&self) -> Option<Duration> {
        None
    }

    fn liveness(&self, _: InstanceId) -> BoxFuture<'_, Liveness> {
        ready(Liveness::Alive).boxed()
    }

    fn may_return(&self, _: InstanceId) -> bool {
        true
    }

    fn claim_status(&self, _: InstanceId, _: Uuid) -> BoxFuture<'_, Option<ClaimStatus>> {
        ready(Some(ClaimStatus::Held)).boxed()
    }

    fn find<'a>(&'a self, _: RecordKind, _: &'a RecordKey) -> BoxFuture<'a, Holder> {
        ready(Holder::Nowhere).boxed()
    }

    fn record_changed(&self, _: InstanceId, _: RecordKind, _: &RecordKey) {}
}

/// A process with live peers, for the tests of every module here.
pub(super) fn all_alive() -> Arc<dyn Peers> {
    Arc::new(AllAlive(InstanceId::new_v4()))
}

/// Memory without a limit, for the tests of every module here.
pub(super) fn free(_: usize) -> Result<(), OutOfMemory> {
    Ok(())
}

/// Quotas for the tests of every module here.
pub(crate) fn quotas() -> Arc<Quotas> {
    Quotas::new(512 << 20)
}

fn as_store(store: &Arc<FaultyStore>) -> Arc<dyn StateStore> {
    Arc::clone(store) as Arc<dyn StateStore>
}

fn replica(store: &Arc<FaultyStore>) -> FollowUps {
    FollowUps::new(&as_store(store), &all_alive())
}

async fn claimed(follow_ups: &FollowUps, agent: &Arc<str>, id: &str) -> Claim {
    match follow_ups.claim(agent, &Caller::default(), id).await.unwrap() {
        ClaimResult::Claimed(claim) => *claim,
        ClaimResult::Elsewhere(_) => panic!("any replica can answer"),
    }
}

pub(crate) fn question() -> OpenQuestion {
    OpenQuestion {
        task_id: "t".into(),
        context_id: None,
        skill: None,
        output_modes: Arc::default(),
        fingerprint: "q".into(),
        caller: Caller::default(),
        is_local: false,
        run: None,
    }
}

#[rstest]
#[tokio::test]
async fn a_claim_whose_write_is_not_confirmed_is_won_once(
    #[values(&[Fault::Lost], &[Fault::Unconfirmed], &[Fault::Ghost], &[Fault::Ghost, Fault::Lost])]
    faults: &[Fault],
) {
    let store = FaultyStore::new(&[]);
    let (one, other) = (replica(&store), replica(&store));
    let agent: Arc<str> = "a".into();
    let id = one.issue(&agent, question(), HOUR).await.unwrap().id;
    store.faults.lock().unwrap().extend(faults);
    let claim = claimed(&one, &agent, &id.to_string()).await;
    let refused =
        other.claim(&agent, &Caller::default(), &id.to_string()).await.expect_err("claimed already");
    assert_eq!(refused.info.code, Code::FollowUpUsed);
    claim.mark_used().await;
    assert_eq!(other.find(&agent, &id).await.unwrap().unwrap().state, FollowUpState::Used);
}

#[tokio::test]
async fn a_claim_that_the_store_refuses_leaves_the_id_valid() {
    let store = FaultyStore::new(&[]);
    let follow_ups = replica(&store);
    let agent: Arc<str> = "a".into();
    let id = follow_ups.issue(&agent, question(), HOUR).await.unwrap().id.to_string();
    store.faults.lock().unwrap().push_back(Fault::Unavailable);
    let refused =
        follow_ups.claim(&agent, &Caller::default(), &id).await.expect_err("the store is unavailable");
    assert_eq!((refused.info.code, refused.info.retryable), (Code::StateUnavailable, true));
    claimed(&follow_ups, &agent, &id).await.mark_used().await;
}

#[rstest]
#[tokio::test(start_paused = true)]
async fn a_key_whose_write_is_not_confirmed_runs_once(
    #[values(Fault::Lost, Fault::Unconfirmed, Fault::Ghost)] fault: Fault,
) {
    let store = FaultyStore::new(&[fault]);
    let (one, other) = (
        Arc::new(Idempotency::new(&as_store(&store), &all_alive())),
        Arc::new(Idempotency::new(&as_store(&store), &all_alive())),
    );
    let reserve = |keys: Arc<Idempotency>| async move {
        keys.reserve(&"a".into(), (&Caller::default(), "echo", "key"), b"body", HOUR).await.unwrap()
    };
    let Reservation::First(running) = reserve(Arc::clone(&one)).await else {
        panic!("no request came before")
    };
    let Reservation::Repeat(repeat) = reserve(other).await else { panic!("ran twice") };
    running.finish(&Ok(Arc::new(outcome(&TaskState::Completed)))).await;
    assert_eq!(repeat.reply(free).await.unwrap().status, ReplyStatus::Completed);
}

#[rstest]
#[tokio::test]
async fn a_change_of_a_task_is_reported_once_when_its_write_is_not_confirmed(
    #[values(Fault::Lost, Fault::Unconfirmed, Fault::Ghost)] fault: Fault,
) {
    let store = FaultyStore::new(&[]);
    let tasks = Tasks::new(&as_store(&store), &quotas(), &alone());
    let (agent, began): (Arc<str>, _) = (
        "a".into(),
        Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 },
    );
    tasks.record(&agent, "t", submitted(TaskState::Working), began).await.unwrap();
    store.faults.lock().unwrap().push_back(fault);
    let recorded = tasks.record(&agent, "t", submitted(TaskState::Completed), began).await.unwrap();
    assert!(
        matches!(&recorded, RecordResult::Written { previous: Some(previous), update: Some(2) } if previous.state == TaskState::Working),
        "{recorded:?}"
    );
    let again = tasks.record(&agent, "t", submitted(TaskState::Completed), began).await.unwrap();
    assert!(matches!(again, RecordResult::Kept), "{again:?}");
}

#[tokio::test]
async fn a_task_is_kept_locally_while_the_store_is_unavailable() {
    let store = FaultyStore::new(&[Fault::Unavailable]);
    let tasks = Tasks::new(&as_store(&store), &quotas(), &alone());
    let agent: Arc<str> = "a".into();
    tasks
        .record(
            &agent,
            "t",
            submitted(TaskState::Working),
            Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 },
        )
        .await
        .unwrap();
    assert_eq!(tasks.find(&agent, "t").await.unwrap().unwrap().state, TaskState::Working);
}

fn outcome(state: &TaskState) -> Outcome {
    let task = TaskRef { id: Some("t".into()), context_id: None, agent: "a".into(), skill: None };
    Outcome::new(ReplyStatus::from(state), ReplyContent::default(), task)
}

pub(crate) fn submitted(state: TaskState) -> TaskRecord {
    let outcome = Arc::new(outcome(&state));
    TaskRecord {
        state,
        reply: Ok(outcome),
        follow_up: None,
        is_submitted: true,
        revision: 0,
        caller: Caller::default(),
        owner: InstanceId::nil(),
        is_local: false,
        seen_at: SystemTime::now(),
        may_run_for: HOUR,
        ttl: HOUR,
        open_for: HOUR,
        run: None,
    }
}
