//! A store that fails in the ways of a store over the network, and what must hold all the same.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::BoxStream;
use rstest::rstest;

use super::follow_ups::{FollowUps, Standing, Waiting};
use super::idempotency::{Idempotency, Turn};
use super::memory::MemoryStore;
use super::tasks::{Observer, Recorded, TaskRecord, TaskStore};
use super::{Entry, Key, Kind, Revision, StateStore, Unavailable, WriteError};
use crate::a2a::model::TaskState;
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
    kind: Kind,
    key: Key,
    expected: Revision,
    value: Bytes,
    ttl: Duration,
}

#[derive(Debug, Default)]
struct FaultyStore {
    inner: MemoryStore,
    faults: Mutex<VecDeque<Fault>>,
    ghost: Mutex<Option<Ghost>>,
}

impl FaultyStore {
    fn new(faults: &[Fault]) -> Arc<Self> {
        Arc::new(Self { faults: Mutex::new(faults.iter().copied().collect()), ..Self::default() })
    }
}

impl StateStore for FaultyStore {
    fn read<'a>(&'a self, kind: Kind, key: &'a Key) -> BoxFuture<'a, Result<Option<Entry>, Unavailable>> {
        self.inner.read(kind, key)
    }

    fn write<'a>(
        &'a self,
        kind: Kind,
        key: &'a Key,
        expected: Revision,
        value: Bytes,
        ttl: Duration,
    ) -> BoxFuture<'a, Result<Revision, WriteError>> {
        async move {
            let ghost = self.ghost.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(Ghost { kind, key, expected, value, ttl }) = ghost {
                let _ = self.inner.write(kind, &key, expected, value, ttl).await;
            }
            let fault = self.faults.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match fault {
                None => self.inner.write(kind, key, expected, value, ttl).await,
                Some(Fault::Unavailable) => Err(WriteError::Unavailable),
                Some(Fault::Lost) => Err(WriteError::Unknown),
                Some(Fault::Unconfirmed) => {
                    let _ = self.inner.write(kind, key, expected, value, ttl).await;
                    Err(WriteError::Unknown)
                }
                Some(Fault::Ghost) => {
                    let ghost = Some(Ghost { kind, key: key.clone(), expected, value, ttl });
                    *self.ghost.lock().unwrap_or_else(PoisonError::into_inner) = ghost;
                    Err(WriteError::Unknown)
                }
            }
        }
        .boxed()
    }

    fn scan(&self, kind: Kind) -> BoxStream<'_, Result<(Key, Entry), Unavailable>> {
        self.inner.scan(kind)
    }
}

fn waiting() -> Waiting {
    Waiting {
        task_id: "t".into(),
        context_id: None,
        skill: None,
        output_modes: Arc::default(),
        question: "q".into(),
    }
}

#[rstest]
#[tokio::test]
async fn a_claim_whose_write_is_not_confirmed_is_won_once(
    #[values(&[Fault::Lost], &[Fault::Unconfirmed], &[Fault::Ghost], &[Fault::Ghost, Fault::Lost])]
    faults: &[Fault],
) {
    let store = FaultyStore::new(&[]);
    let (one, other) = (FollowUps::new(store.clone()), FollowUps::new(store.clone()));
    let agent: Arc<str> = "a".into();
    let id = one.park(&agent, waiting(), HOUR).await.unwrap().id;
    store.faults.lock().unwrap().extend(faults);
    let claim = one.claim(&agent, &id.to_string()).await.unwrap();
    let refused = other.claim(&agent, &id.to_string()).await.expect_err("claimed already");
    assert_eq!(refused.info.code, Code::FollowUpUsed);
    claim.used().await;
    assert_eq!(other.standing(&agent, &id).await.unwrap(), Standing::Used);
}

#[tokio::test]
async fn a_claim_that_the_store_refuses_leaves_the_id_valid() {
    let store = FaultyStore::new(&[]);
    let follow_ups = FollowUps::new(store.clone());
    let agent: Arc<str> = "a".into();
    let id = follow_ups.park(&agent, waiting(), HOUR).await.unwrap().id.to_string();
    store.faults.lock().unwrap().push_back(Fault::Unavailable);
    let refused = follow_ups.claim(&agent, &id).await.expect_err("the store is away");
    assert_eq!((refused.info.code, refused.info.retryable), (Code::StateUnavailable, true));
    follow_ups.claim(&agent, &id).await.unwrap().used().await;
}

#[rstest]
#[tokio::test(start_paused = true)]
async fn a_key_whose_write_is_not_confirmed_runs_once(
    #[values(Fault::Lost, Fault::Unconfirmed, Fault::Ghost)] fault: Fault,
) {
    let store = FaultyStore::new(&[fault]);
    let (one, other) = (Arc::new(Idempotency::new(store.clone())), Arc::new(Idempotency::new(store)));
    let begin = |keys: Arc<Idempotency>| async move {
        keys.begin(&"a".into(), "echo", "key", b"body", HOUR).await.unwrap()
    };
    let Turn::First(running) = begin(Arc::clone(&one)).await else { panic!("nobody was before it") };
    let Turn::Repeat(repeat) = begin(other).await else { panic!("ran twice") };
    running.finish(&Ok(Arc::new(outcome(&TaskState::Completed)))).await;
    assert_eq!(repeat.reply().await.unwrap().status, ReplyStatus::Completed);
}

#[rstest]
#[tokio::test]
async fn a_change_of_a_task_is_reported_once_when_its_write_is_not_confirmed(
    #[values(Fault::Lost, Fault::Unconfirmed, Fault::Ghost)] fault: Fault,
) {
    let store = FaultyStore::new(&[]);
    let tasks = TaskStore::new(store.clone());
    let (agent, began): (Arc<str>, _) = ("a".into(), Observer::Call { began: SystemTime::now() });
    tasks.record(&agent, "t", submitted(TaskState::Working), began).await;
    store.faults.lock().unwrap().push_back(fault);
    let recorded = tasks.record(&agent, "t", submitted(TaskState::Completed), began).await;
    assert!(
        matches!(&recorded, Recorded::Written { before: Some(before) } if before.state == TaskState::Working),
        "{recorded:?}"
    );
    let again = tasks.record(&agent, "t", submitted(TaskState::Completed), began).await;
    assert!(matches!(again, Recorded::Kept(_)), "{again:?}");
}

#[tokio::test]
async fn a_task_is_remembered_here_while_the_store_is_away() {
    let store = FaultyStore::new(&[Fault::Unavailable]);
    let tasks = TaskStore::new(store);
    let agent: Arc<str> = "a".into();
    tasks
        .record(&agent, "t", submitted(TaskState::Working), Observer::Call { began: SystemTime::now() })
        .await;
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
        alive: HOUR,
        ttl: HOUR,
    }
}
