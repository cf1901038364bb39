//! A store that fails as a store over the network can, and the guarantees that hold in spite of it.

mod isolation;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::BoxStream;
use rstest::rstest;

use super::follow_ups::{FollowUpState, FollowUps, OpenQuestion};
use super::idempotency::{Idempotency, Reservation};
use super::memory::MemoryStore;
use super::quota::Quotas;
use super::tasks::{Observer, RecordResult, TaskRecord, Tasks};
use super::{
    Lifetime, RecordKey, RecordKind, Revision, StateStore, StoreUnavailable, StoredRecord, WriteError,
};
use crate::a2a::model::TaskState;
use crate::memory::OutOfMemory;
use crate::reply::error::Code;
use crate::reply::outcome::{Outcome, ReplyContent, ReplyStatus, TaskRef};

const HOUR: Duration = Duration::from_secs(3600);

/// What happens to a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Unavailable,
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
struct FaultyStore {
    inner: MemoryStore,
    faults: Mutex<VecDeque<Fault>>,
    ghost: Mutex<Option<Ghost>>,
}

impl FaultyStore {
    fn new(faults: &[Fault]) -> Arc<Self> {
        let faults = Mutex::new(faults.iter().copied().collect());
        Arc::new(Self { inner: MemoryStore::new(&quotas()), faults, ghost: Mutex::default() })
    }
}

impl StateStore for FaultyStore {
    fn read<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
    ) -> BoxFuture<'a, Result<Option<StoredRecord>, StoreUnavailable>> {
        self.inner.read(kind, key)
    }

    fn write<'a>(
        &'a self,
        kind: RecordKind,
        key: &'a RecordKey,
        expected: Revision,
        value: Bytes,
        lifetime: Lifetime,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            let ghost = self.ghost.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(Ghost { kind, key, expected, value, lifetime }) = ghost {
                let _ = self.inner.write(kind, &key, expected, value, lifetime).await;
            }
            let fault = self.faults.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match fault {
                None => self.inner.write(kind, key, expected, value, lifetime).await,
                Some(Fault::Unavailable) => Err(WriteError::Unavailable),
                Some(Fault::Lost) => Err(WriteError::Unknown),
                Some(Fault::Unconfirmed) => {
                    let _ = self.inner.write(kind, key, expected, value, lifetime).await;
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

    fn scan(&self, kind: RecordKind) -> BoxStream<'_, Result<(RecordKey, StoredRecord), StoreUnavailable>> {
        self.inner.scan(kind)
    }
}

/// A working store, for the tests of every module here.
pub(super) fn memory_store() -> Arc<dyn StateStore> {
    Arc::new(MemoryStore::new(&quotas()))
}

/// Memory without a limit, for the tests of every module here.
pub(super) fn free(_: usize) -> Result<(), OutOfMemory> {
    Ok(())
}

/// Quotas for the tests of every module here.
pub(super) fn quotas() -> Arc<Quotas> {
    Quotas::new(512 << 20)
}

fn as_store(store: &Arc<FaultyStore>) -> Arc<dyn StateStore> {
    Arc::clone(store) as Arc<dyn StateStore>
}

pub(super) fn question() -> OpenQuestion {
    OpenQuestion {
        task_id: "t".into(),
        context_id: None,
        skill: None,
        output_modes: Arc::default(),
        fingerprint: "q".into(),
    }
}

#[rstest]
#[tokio::test]
async fn a_claim_whose_write_is_not_confirmed_is_won_once(
    #[values(&[Fault::Lost], &[Fault::Unconfirmed], &[Fault::Ghost], &[Fault::Ghost, Fault::Lost])]
    faults: &[Fault],
) {
    let store = FaultyStore::new(&[]);
    let (one, other) = (FollowUps::new(&as_store(&store)), FollowUps::new(&as_store(&store)));
    let agent: Arc<str> = "a".into();
    let id = one.issue(&agent, question(), HOUR).await.unwrap().id;
    store.faults.lock().unwrap().extend(faults);
    let claim = one.claim(&agent, &id.to_string()).await.unwrap();
    let refused = other.claim(&agent, &id.to_string()).await.expect_err("claimed already");
    assert_eq!(refused.info.code, Code::FollowUpUsed);
    claim.mark_used().await;
    assert_eq!(other.find(&agent, &id).await.unwrap().unwrap().state, FollowUpState::Used);
}

#[tokio::test]
async fn a_claim_that_the_store_refuses_leaves_the_id_valid() {
    let store = FaultyStore::new(&[]);
    let follow_ups = FollowUps::new(&as_store(&store));
    let agent: Arc<str> = "a".into();
    let id = follow_ups.issue(&agent, question(), HOUR).await.unwrap().id.to_string();
    store.faults.lock().unwrap().push_back(Fault::Unavailable);
    let refused = follow_ups.claim(&agent, &id).await.expect_err("the store is unavailable");
    assert_eq!((refused.info.code, refused.info.retryable), (Code::StateUnavailable, true));
    follow_ups.claim(&agent, &id).await.unwrap().mark_used().await;
}

#[rstest]
#[tokio::test(start_paused = true)]
async fn a_key_whose_write_is_not_confirmed_runs_once(
    #[values(Fault::Lost, Fault::Unconfirmed, Fault::Ghost)] fault: Fault,
) {
    let store = FaultyStore::new(&[fault]);
    let (one, other) =
        (Arc::new(Idempotency::new(&as_store(&store))), Arc::new(Idempotency::new(&as_store(&store))));
    let reserve = |keys: Arc<Idempotency>| async move {
        keys.reserve(&"a".into(), "echo", "key", b"body", HOUR).await.unwrap()
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
    let tasks = Tasks::new(&as_store(&store), &quotas());
    let (agent, began): (Arc<str>, _) = ("a".into(), Observer { began: SystemTime::now(), is_lookup: false });
    tasks.record(&agent, "t", submitted(TaskState::Working), began).await.unwrap();
    store.faults.lock().unwrap().push_back(fault);
    let recorded = tasks.record(&agent, "t", submitted(TaskState::Completed), began).await.unwrap();
    assert!(
        matches!(&recorded, RecordResult::Written { previous: Some(previous) } if previous.state == TaskState::Working),
        "{recorded:?}"
    );
    let again = tasks.record(&agent, "t", submitted(TaskState::Completed), began).await.unwrap();
    assert!(matches!(again, RecordResult::Kept), "{again:?}");
}

#[tokio::test]
async fn a_task_is_kept_locally_while_the_store_is_unavailable() {
    let store = FaultyStore::new(&[Fault::Unavailable]);
    let tasks = Tasks::new(&as_store(&store), &quotas());
    let agent: Arc<str> = "a".into();
    tasks
        .record(
            &agent,
            "t",
            submitted(TaskState::Working),
            Observer { began: SystemTime::now(), is_lookup: false },
        )
        .await
        .unwrap();
    assert_eq!(tasks.find(&agent, "t").await.unwrap().unwrap().state, TaskState::Working);
}

fn outcome(state: &TaskState) -> Outcome {
    let task = TaskRef { id: Some("t".into()), context_id: None, agent: "a".into(), skill: None };
    Outcome::new(ReplyStatus::from(state), ReplyContent::default(), task)
}

fn submitted(state: TaskState) -> TaskRecord {
    let outcome = Arc::new(outcome(&state));
    TaskRecord {
        state,
        reply: Ok(outcome),
        follow_up: None,
        is_submitted: true,
        seen_at: SystemTime::now(),
        may_run_for: HOUR,
        ttl: HOUR,
        open_for: HOUR,
    }
}
