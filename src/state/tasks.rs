//! Tasks as they were last seen, so that they can be looked up, cancelled and followed.
//!
//! A task lives in one of two places. A local table holds the tasks of plain calls: every call writes one
//! and hardly any is read again. A task that somebody else may ask for, because it was submitted or
//! waits for an answer, moves to the store, and stays there until it is forgotten.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::followers::{Follower, Followers};
use super::table::{self, Table};
use super::{Change, Key, Kind, StateStore, Unavailable, record, update};
use crate::a2a::model::TaskState;
use crate::reply::Reply;
use crate::reply::error::ActionError;
use crate::reply::outcome::{FollowUp, Outcome, TaskRef};
use crate::reply::stored::StoredReply;

/// Most bytes of tasks of plain calls.
const LOCAL_BYTES: usize = 64 << 20;

/// A task as it was last seen.
#[derive(Debug, Clone)]
pub(crate) struct TaskRecord {
    pub state: TaskState,
    /// The reply at that time, or why nobody knows how the task goes on.
    pub reply: Reply,
    /// The open question, if the agent waits.
    pub follow_up: Option<FollowUp>,
    /// Whether its changes are published.
    pub is_submitted: bool,
    pub seen_at: SystemTime,
    /// How long it may still run; while it does, it is remembered.
    pub alive: Duration,
    /// How long it is remembered after that.
    pub ttl: Duration,
}

impl TaskRecord {
    fn keep_for(&self) -> Duration {
        self.alive.saturating_add(self.ttl)
    }

    /// Whether another replica may be asked about it.
    fn is_shared(&self) -> bool {
        self.is_submitted || self.follow_up.is_some()
    }

    /// Whether this record stays when `new` is observed.
    ///
    /// A final state stays, unless it is from before the observing call began: then it belongs to an earlier
    /// use of the same id, because some agents give every task of a conversation the same one. Anything
    /// that was recorded during a mere look is newer than what the look has seen.
    fn outlives(&self, new: &Self, observer: Observer) -> bool {
        let (Observer::Call { began } | Observer::Look { began }) = observer;
        let is_older_look = matches!(observer, Observer::Look { .. }) && !new.state.is_final();
        (self.state.is_final() || is_older_look) && self.seen_at >= began
    }

    fn allocated(&self) -> usize {
        let reply = match &self.reply {
            Ok(outcome) => outcome.allocated(),
            Err(error) => error.allocated(),
        };
        size_of::<Self>() + reply
    }

    pub(crate) fn task(&self) -> Option<&TaskRef> {
        match &self.reply {
            Ok(outcome) => Some(&outcome.task),
            Err(error) => error.task.as_ref(),
        }
    }
}

/// The task of a plain call that has ended, which nearly all are: no more than its outcome.
#[derive(Debug, Clone)]
struct Ended {
    outcome: Arc<Outcome>,
    seen_at: SystemTime,
    ttl: Duration,
}

impl Ended {
    fn of(record: &TaskRecord) -> Option<Self> {
        let outcome =
            record.reply.as_ref().ok().filter(|_| record.state.is_final() && !record.is_shared())?;
        Some(Self { outcome: Arc::clone(outcome), seen_at: record.seen_at, ttl: record.keep_for() })
    }

    fn into_record(self) -> TaskRecord {
        TaskRecord {
            state: self.outcome.status.into(),
            reply: Ok(self.outcome),
            follow_up: None,
            is_submitted: false,
            seen_at: self.seen_at,
            alive: Duration::ZERO,
            ttl: self.ttl,
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Observer {
    /// The call that follows it.
    Call { began: SystemTime },
    /// A request that looks at it once.
    Look { began: SystemTime },
}

/// What came of [`TaskStore::record`].
#[derive(Debug)]
pub(crate) enum Recorded {
    /// It was written in place of this record.
    Written { before: Option<Arc<TaskRecord>> },
    /// Nothing was written: this record is final, or newer.
    Kept(Arc<TaskRecord>),
}

#[derive(Debug)]
pub(crate) struct TaskStore {
    local: Mutex<Table<Place>>,
    store: Arc<dyn StateStore>,
    followers: Followers,
}

/// Where a task of this process is.
#[derive(Debug, Clone)]
enum Place {
    Ended(Ended),
    Here(Arc<TaskRecord>),
    InStore,
}

impl Place {
    fn record(self) -> Option<Arc<TaskRecord>> {
        match self {
            Self::Ended(ended) => Some(Arc::new(ended.into_record())),
            Self::Here(record) => Some(record),
            Self::InStore => None,
        }
    }
}

impl TaskStore {
    pub(super) fn new(store: Arc<dyn StateStore>) -> Self {
        Self { local: Mutex::new(Table::evicting(LOCAL_BYTES)), store, followers: Followers::default() }
    }

    /// A task that this process has seen. It asks the store only for tasks that it put there, so that a new
    /// call costs nothing.
    pub(crate) async fn known(
        &self,
        agent: &Arc<str>,
        id: &str,
    ) -> Result<Option<Arc<TaskRecord>>, Unavailable> {
        match self.place(agent, id) {
            None => Ok(None),
            Some(Place::InStore) => Box::pin(self.stored(agent, id)).await,
            Some(here) => Ok(here.record()),
        }
    }

    /// A task that any replica has seen.
    pub(crate) async fn find(
        &self,
        agent: &Arc<str>,
        id: &str,
    ) -> Result<Option<Arc<TaskRecord>>, Unavailable> {
        match self.place(agent, id).and_then(Place::record) {
            Some(record) => Ok(Some(record)),
            None => self.stored(agent, id).await,
        }
    }

    /// Remembers where a task stands, unless what is known of it is final or newer. A task that was submitted
    /// once stays so.
    pub(crate) async fn record(
        &self,
        agent: &Arc<str>,
        id: &str,
        new: TaskRecord,
        observer: Observer,
    ) -> Recorded {
        let is_end_in_look = new.state.is_final() && matches!(observer, Observer::Look { .. });
        let here = match new.is_shared() {
            true => Err(Box::new(new)),
            false => self.record_here(agent, id, new, observer),
        };
        let recorded = match here {
            Ok(recorded) => recorded,
            Err(new) => Box::pin(self.record_in_store(agent, id, *new, observer)).await,
        };
        if is_end_in_look && matches!(recorded, Recorded::Written { .. }) {
            self.followers.end(agent, id);
        }
        recorded
    }

    /// Follows a task for a call, which may not hear of the task's end from the agent when another request,
    /// such as a cancel, has brought it about.
    pub(crate) fn follow(&self, agent: &Arc<str>, id: &str) -> Follower<'_> {
        self.followers.follow(agent, id)
    }

    /// Remembers that a call has lost sight of a task, for those who ask while the agent is away. A final
    /// state stays, and so does an open question: it can still be answered.
    pub(crate) async fn lose(&self, agent: &Arc<str>, id: &str, why: &ActionError) {
        let known = self.known(agent, id).await.ok().flatten();
        if let Some(record) = known.filter(|record| !record.state.is_settled()) {
            let lost = TaskRecord {
                reply: Err(why.clone()),
                alive: Duration::ZERO,
                seen_at: SystemTime::now(),
                ..TaskRecord::clone(&record)
            };
            self.record(agent, id, lost, Observer::Call { began: record.seen_at }).await;
        }
    }

    /// Records the task of a plain call in one step; gives it back if the task is in the store.
    fn record_here(
        &self,
        agent: &Arc<str>,
        id: &str,
        mut new: TaskRecord,
        observer: Observer,
    ) -> Result<Recorded, Box<TaskRecord>> {
        let now = Instant::now();
        let mut local = self.local();
        let before = match local.get(agent, id, now) {
            None => None,
            Some(Place::InStore) => return Err(Box::new(new)),
            Some(here) => here.clone().record(),
        };
        if let Some(before) = before.as_ref().filter(|before| before.outlives(&new, observer)) {
            return Ok(Recorded::Kept(Arc::clone(before)));
        }
        new.is_submitted |= before.as_ref().is_some_and(|before| before.is_submitted);
        let (ttl, bytes) = (new.keep_for(), new.allocated());
        let place = match Ended::of(&new) {
            Some(ended) => Place::Ended(ended),
            None => Place::Here(Arc::new(new)),
        };
        let gone = local.put(agent, id, place, bytes, ttl, now);
        drop(local);
        drop(gone);
        Ok(Recorded::Written { before })
    }

    async fn record_in_store(
        &self,
        agent: &Arc<str>,
        id: &str,
        new: TaskRecord,
        observer: Observer,
    ) -> Recorded {
        let here = self.place(agent, id).and_then(Place::record);
        if let Some(here) = here.as_ref().filter(|here| here.outlives(&new, observer)) {
            return Recorded::Kept(Arc::clone(here));
        }
        let (stored, ttl) = (StoredTask::new(&new), new.keep_for());
        let mut replaced = None;
        let decide = |known: Option<(StoredTask, SystemTime)>| {
            let known = known.map(|(known, _)| known);
            // An earlier attempt of this write was stored after all.
            if known.as_ref().is_some_and(|known| known.nonce == stored.nonce) {
                return Ok(Change::Keep(Recorded::Written { before: replaced.take() }));
            }
            let known = known.map(|known| Arc::new(known.into_record()));
            if let Some(kept) = known.as_ref().filter(|known| known.outlives(&new, observer)) {
                return Ok::<_, ActionError>(Change::Keep(Recorded::Kept(Arc::clone(kept))));
            }
            let before = known.or_else(|| here.clone());
            replaced.clone_from(&before);
            let mut stored = stored.clone();
            stored.is_submitted |= before.as_ref().is_some_and(|before| before.is_submitted);
            Ok(Change::Write(stored, ttl, Recorded::Written { before }))
        };
        match update(&*self.store, Kind::Task, &Key::new(agent, id), decide).await {
            Ok(recorded) => {
                self.put(agent, id, Place::InStore, 0, ttl);
                recorded
            }
            // While the store is away, this process remembers on its own.
            Err(error) => {
                tracing::debug!(%agent, task = id, reason = error.message, "cannot share a task");
                let bytes = new.allocated();
                self.put(agent, id, Place::Here(Arc::new(new)), bytes, ttl);
                Recorded::Written { before: here }
            }
        }
    }

    async fn stored(&self, agent: &Arc<str>, id: &str) -> Result<Option<Arc<TaskRecord>>, Unavailable> {
        let Some(entry) = self.store.read(Kind::Task, &Key::new(agent, id)).await? else {
            return Ok(None);
        };
        let stored: StoredTask = record::decode(&entry.value)?;
        let found = Arc::new(stored.into_record());
        if self.place(agent, id).is_none() {
            self.put(agent, id, Place::InStore, 0, found.keep_for());
        }
        Ok(Some(found))
    }

    fn place(&self, agent: &Arc<str>, id: &str) -> Option<Place> {
        self.local().get(agent, id, Instant::now()).cloned()
    }

    fn put(&self, agent: &Arc<str>, id: &str, place: Place, bytes: usize, ttl: Duration) {
        let gone = self.local().put(agent, id, place, bytes, ttl, Instant::now());
        drop(gone);
    }

    /// Frees the memory of local tasks whose time is over.
    pub(super) async fn sweep(&self) {
        table::sweep(|| self.local().sweep_step(Instant::now())).await;
    }

    // One lock for all agents: it is held for a moment only.
    fn local(&self) -> MutexGuard<'_, Table<Place>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A task as the store has it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct StoredTask {
    state: String,
    reply: StoredReply,
    is_submitted: bool,
    seen_at: SystemTime,
    alive: Duration,
    ttl: Duration,
    nonce: Uuid,
}

impl StoredTask {
    fn new(record: &TaskRecord) -> Self {
        Self {
            state: record.state.to_string(),
            reply: StoredReply::new(&record.reply),
            is_submitted: record.is_submitted,
            seen_at: record.seen_at,
            alive: record.alive,
            ttl: record.ttl,
            nonce: Uuid::new_v4(),
        }
    }

    fn into_record(self) -> TaskRecord {
        let reply = self.reply.into_reply();
        TaskRecord {
            state: TaskState::parse(&self.state),
            follow_up: reply.as_ref().ok().and_then(|outcome| outcome.follow_up.clone()),
            reply,
            is_submitted: self.is_submitted,
            seen_at: self.seen_at,
            alive: self.alive,
            ttl: self.ttl,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::super::memory::MemoryStore;
    use super::super::{SWEEP_INTERVAL, State};
    use super::*;
    use crate::reply::error::Code;
    use crate::reply::outcome::{ReplyContent, ReplyStatus};

    const HOUR: Duration = Duration::from_secs(3600);

    fn task(state: TaskState, message: &str) -> TaskRecord {
        let task = TaskRef { id: Some("t".into()), context_id: None, agent: "a".into(), skill: None };
        let content = ReplyContent { message: message.to_owned(), ..ReplyContent::default() };
        TaskRecord {
            reply: Ok(Arc::new(Outcome::new(ReplyStatus::from(&state), content, task))),
            state,
            follow_up: None,
            is_submitted: false,
            seen_at: SystemTime::now(),
            alive: Duration::ZERO,
            ttl: HOUR,
        }
    }

    fn submitted(state: TaskState, message: &str) -> TaskRecord {
        TaskRecord { is_submitted: true, ..task(state, message) }
    }

    fn replicas() -> (TaskStore, TaskStore, Arc<str>) {
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::default());
        (TaskStore::new(Arc::clone(&store)), TaskStore::new(store), "a".into())
    }

    fn message(record: &TaskRecord) -> &str {
        &record.reply.as_ref().unwrap().content.message
    }

    #[tokio::test]
    async fn the_task_of_a_plain_call_is_known_here_only() {
        let (one, other, agent) = replicas();
        let began = Observer::Call { began: SystemTime::now() };
        one.record(&agent, "t", task(TaskState::Working, "w"), began).await;
        assert_eq!(message(&one.find(&agent, "t").await.unwrap().unwrap()), "w");
        assert!(other.find(&agent, "t").await.unwrap().is_none());
        assert!(one.find(&"b".into(), "t").await.unwrap().is_none(), "another agent's task");
    }

    #[tokio::test]
    async fn a_submitted_task_is_known_at_every_replica_until_its_end() {
        let (one, other, agent) = replicas();
        let began = Observer::Call { began: SystemTime::now() };
        one.record(&agent, "t", task(TaskState::Working, "named"), began).await;
        let recorded = one.record(&agent, "t", submitted(TaskState::Working, "w"), began).await;
        assert!(
            matches!(recorded, Recorded::Written { before: Some(before) } if message(&before) == "named")
        );
        assert!(other.known(&agent, "t").await.unwrap().is_none(), "a new call asks nobody");
        let found = other.find(&agent, "t").await.unwrap().unwrap();
        assert_eq!((message(&found), found.is_submitted), ("w", true));
        other.record(&agent, "t", submitted(TaskState::Canceled, "c"), began).await;
        let late = one.record(&agent, "t", submitted(TaskState::Canceled, "late"), began).await;
        assert!(matches!(late, Recorded::Kept(end) if message(&end) == "c"));
        assert_eq!(message(&one.find(&agent, "t").await.unwrap().unwrap()), "c");
    }

    #[tokio::test]
    async fn the_first_end_of_a_task_stays_but_an_id_can_be_used_again() {
        let (one, _, agent) = replicas();
        let began = Observer::Call { began: SystemTime::now() };
        one.record(&agent, "t", task(TaskState::Completed, "first"), began).await;
        let again = one.record(&agent, "t", task(TaskState::Working, "older look"), began).await;
        assert!(matches!(again, Recorded::Kept(_)));
        let later = Observer::Call { began: SystemTime::now() + Duration::from_millis(1) };
        let next = one.record(&agent, "t", task(TaskState::Working, "next call"), later).await;
        assert!(matches!(next, Recorded::Written { .. }));
    }

    #[tokio::test]
    async fn a_look_does_not_undo_what_was_recorded_meanwhile() {
        let (one, _, agent) = replicas();
        let call = Observer::Call { began: SystemTime::now() };
        let look = Observer::Look { began: SystemTime::now() };
        one.record(&agent, "t", submitted(TaskState::InputRequired, "which?"), call).await;
        let older = one.record(&agent, "t", task(TaskState::Working, "older"), look).await;
        assert!(matches!(older, Recorded::Kept(kept) if message(&kept) == "which?"));
        let end = one.record(&agent, "t", task(TaskState::Completed, "end"), look).await;
        assert!(matches!(end, Recorded::Written { .. }));
        assert!(
            one.find(&agent, "t").await.unwrap().unwrap().is_submitted,
            "once submitted, always submitted"
        );
    }

    #[tokio::test]
    async fn the_end_that_a_look_sees_is_told_to_who_follows_that_task() {
        let (one, _, agent) = replicas();
        let began = SystemTime::now();
        let (call, look) = (Observer::Call { began }, Observer::Look { began });
        let (here, stored, own) =
            (one.follow(&agent, "here"), one.follow(&agent, "stored"), one.follow(&agent, "own"));
        one.record(&agent, "here", task(TaskState::Working, "w"), call).await;
        one.record(&agent, "stored", submitted(TaskState::Working, "w"), call).await;
        one.record(&agent, "own", task(TaskState::Completed, "seen by its call"), call).await;
        let told = || [&here, &stored, &own].map(|follower| follower.ended().now_or_never().is_some());
        assert_eq!(told(), [false, false, false], "nobody needs to be told what its own call has seen");
        one.record(&agent, "here", task(TaskState::Canceled, "c"), look).await;
        assert_eq!(told(), [true, false, false]);
        one.record(&agent, "stored", task(TaskState::Canceled, "c"), look).await;
        assert_eq!(told(), [true, true, false]);
    }

    #[tokio::test]
    async fn a_task_that_is_lost_from_sight_says_why_unless_it_has_ended() {
        let (one, _, agent) = replicas();
        let began = Observer::Call { began: SystemTime::now() };
        let why = ActionError::new(Code::OutcomeUnknown, "cut off");
        one.record(&agent, "t", submitted(TaskState::Working, "w"), began).await;
        one.lose(&agent, "t", &why).await;
        let lost = one.find(&agent, "t").await.unwrap().unwrap();
        assert_eq!(lost.reply.as_ref().unwrap_err().message, "cut off");
        one.record(&agent, "t", submitted(TaskState::Completed, "done"), began).await;
        one.lose(&agent, "t", &why).await;
        assert_eq!(message(&one.find(&agent, "t").await.unwrap().unwrap()), "done");
    }

    #[tokio::test]
    async fn a_task_is_forgotten_when_its_time_is_over() {
        let (one, _, agent) = replicas();
        let began = Observer::Call { began: SystemTime::now() };
        let short = |alive| TaskRecord { alive, ttl: Duration::ZERO, ..task(TaskState::Working, "w") };
        one.record(&agent, "t", short(HOUR), began).await;
        assert!(one.find(&agent, "t").await.unwrap().is_some());
        one.record(&agent, "t", short(Duration::ZERO), began).await;
        assert!(one.find(&agent, "t").await.unwrap().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn the_memory_of_tasks_whose_time_is_over_is_freed_though_nothing_is_written() {
        let (state, agent) = (State::default(), "a".into());
        let began = Observer::Call { began: SystemTime::now() };
        let short = TaskRecord { ttl: Duration::from_nanos(1), ..task(TaskState::Completed, "done") };
        state.tasks.record(&agent, "t", short, began).await;
        assert_eq!(state.tasks.local().rows(), 1);
        let _ = tokio::time::timeout(2 * SWEEP_INTERVAL, state.sweep_periodically()).await;
        assert_eq!(state.tasks.local().rows(), 0);
    }
}
