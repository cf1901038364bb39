//! Tasks as they were last seen, so that callers can look them up, cancel and follow them.
//!
//! A local table holds the tasks of calls in mode `final` or `stream`: every call writes one and few are read
//! again. A task that a request at another replica may need, because it was submitted, waits for an answer or has run
//! for [`LONG_RUNNING`], moves to the store and stays there until it expires.
//!
//! Each task in the store has an owner: the replica that follows it. Only the owner writes the record. When the owner is
//! gone, another replica [adopts](Tasks::adopt) the task. An owner that was cut off for so long notices it, because its
//! next write finds another owner.
//!
//! The changes of a submitted task are published, each with a revision that counts them. The owner publishes a change
//! only after the store has [confirmed] it, so no two replicas publish different changes with the same
//! revision. A replica that adopts the task publishes the last change again, because the owner may have died in between.
//!
//! A record may hold a reply of many megabytes. Most requests do not need it: they get the [outline](TaskOutline) of the
//! task.
//!
//! Every call has [reserved](super::quota::AgentQuota::reserve) room for the state of its task. If there is no room for
//! the content as well, the record is without it.

mod confirmed;
pub(crate) mod list;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use futures_util::{Stream, TryStreamExt as _};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

pub(crate) use self::confirmed::Takeover;
use self::confirmed::Unconfirmed;
use self::turns::Turns;
use super::clock::{Instant, wall_time};
use super::peers::{InstanceId, Peers};
use super::quota::{QuotaKind, Quotas};
use super::records::{Record, TypedRecords};
use super::run_link::RunLink;
use super::table::{self, BoundedTable, Entry, Full, Removed};
use super::task_ends::{TaskEndSubscription, TaskEnds};
use super::{Lifetime, RecordKey, RecordKind, StateStore, StoreUnavailable, quota};
use crate::a2a::model::{ALLOCATION_OVERHEAD, TaskState};
use crate::caller::Caller;
use crate::memory::OutOfMemory;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, ReplyContent, ReplyStatus, TaskRef};
use crate::reply::{self, Reply};
use crate::telemetry::log_limit::LogLimit;
use crate::text;

/// After this time, other replicas can find the task of a call, too.
const LONG_RUNNING: Duration = Duration::from_secs(1);
/// The owner of a task that has ended before this time has published that. Longer than others take to notice that a
/// replica is gone and to search for its tasks.
const RECENT_END: Duration = Duration::from_secs(120);
/// Maximum number of tasks that wait to be shared because they run for long.
const MAX_WAITING_TO_BE_SHARED: usize = 100_000;
/// Maximum bytes of the message of an error that is recorded without its content.
const MAX_ERROR_MESSAGE: usize = 256;

/// A task as it was last seen.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct TaskRecord<R = Reply> {
    #[serde(serialize_with = "write_state", deserialize_with = "read_state")]
    pub state: TaskState,
    /// The reply at that time, or the error because of which the bridge no longer tracks the task.
    pub reply: R,
    /// The open question, if the agent waits for an answer.
    pub follow_up: Option<FollowUp>,
    /// Whether changes of the task are published.
    pub is_submitted: bool,
    /// The number of published changes.
    #[serde(default)]
    pub revision: u64,
    /// Whom the task belongs to.
    #[serde(default, skip_serializing_if = "Caller::is_shared")]
    pub caller: Caller,
    /// The replica that follows the task.
    #[serde(default)]
    pub owner: InstanceId,
    /// Whether only a process of the owner knows the task, because the owner launched the agent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_local: bool,
    pub seen_at: SystemTime,
    /// How long the task may still run.
    pub may_run_for: Duration,
    /// How long the record remains after that.
    pub ttl: Duration,
    /// How long a call follows the task, or the caller can answer. Until then the record must not be evicted.
    #[serde(default)]
    pub open_for: Duration,
    /// Where the call is logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunLink>,
}

/// A task without the content of its reply.
pub(crate) type TaskOutline = TaskRecord<Result<ReplyOutline, ReplyOutline>>;

/// What remains of an outcome, or of an error.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ReplyOutline {
    task: Option<TaskRef>,
}

impl<T, E> TaskRecord<Result<T, E>> {
    fn expires_in(&self) -> Duration {
        self.may_run_for.saturating_add(self.ttl)
    }

    /// Whether requests at other replicas may need it.
    fn is_shared(&self) -> bool {
        self.is_awaited() || self.run.is_some()
    }

    /// Whether the store must have the record before the caller gets its reply.
    fn is_awaited(&self) -> bool {
        self.is_submitted || self.follow_up.is_some()
    }

    /// Whether this record stays when `observer` has seen `new`.
    ///
    /// A final state stays, unless a call has begun a task with the same id since, because some agents give every task
    /// of a conversation the same one. Anything recorded during a lookup is newer than what the lookup has seen.
    fn takes_precedence_over(&self, new: &TaskRecord, observer: Observer) -> bool {
        let is_newer = self.seen_at >= observer.began;
        match self.state.is_final() {
            true => is_newer || observer.takeover != Takeover::New,
            false => is_newer && observer.is_lookup && !new.state.is_final(),
        }
    }

    /// Whether the task runs or waits, as far as the bridge knows.
    fn is_open(&self) -> bool {
        !self.state.is_final() && self.reply.is_ok()
    }

    /// How long the record remains if `observer` has seen it after `previous`. The record of a task that a call
    /// follows, or that waits for an answer, is never evicted.
    fn lifetime(&self, previous: Option<&TaskOutline>, observer: Observer) -> Lifetime {
        let is_followed =
            !observer.is_lookup || self.follow_up.is_some() || previous.is_some_and(TaskOutline::is_open);
        let protected_for = if self.is_open() && is_followed { self.open_for } else { Duration::ZERO };
        Lifetime { ttl: self.expires_in(), protected_for }
    }

    fn with_reply<R>(self, reply: R) -> TaskRecord<R> {
        let Self { state, reply: _, follow_up, is_submitted, revision, caller, owner, is_local, .. } = self;
        let Self { seen_at, may_run_for, ttl, open_for, run, .. } = self;
        TaskRecord {
            state,
            reply,
            follow_up,
            is_submitted,
            revision,
            caller,
            owner,
            is_local,
            seen_at,
            may_run_for,
            ttl,
            open_for,
            run,
        }
    }

    /// Whether this record, seen after `previous`, is a change to publish.
    fn is_update(&self, previous: Option<&TaskOutline>) -> bool {
        let id = |follow_up: &Option<FollowUp>| follow_up.as_ref().map(|follow_up| follow_up.id);
        self.is_submitted
            && previous.is_none_or(|previous| {
                // After an error, the bridge tracks the task again.
                previous.reply.is_err() != self.reply.is_err()
                    || ReplyStatus::from(&previous.state) != ReplyStatus::from(&self.state)
                    || id(&previous.follow_up) != id(&self.follow_up)
            })
    }
}

impl<T, E> TaskRecord<Result<T, E>> {
    /// Whether another replica takes care of the task when its owner is gone: it runs or waits, or it has ended so
    /// recently that the owner may not have published or logged it.
    fn is_adoptable(&self) -> bool {
        let has_just_ended = || wall_time().duration_since(self.seen_at).is_ok_and(|age| age < RECENT_END);
        self.is_open() || ((self.is_submitted || self.run.is_some()) && has_just_ended())
    }
}

impl TaskOutline {
    pub(crate) fn task(&self) -> Option<&TaskRef> {
        let (Ok(reply) | Err(reply)) = &self.reply;
        reply.task.as_ref()
    }
}

impl TaskRecord {
    fn outline(&self) -> TaskOutline {
        let reply = match &self.reply {
            Ok(outcome) => Ok(ReplyOutline { task: Some(outcome.task.clone()) }),
            Err(error) => Err(ReplyOutline { task: error.task.clone() }),
        };
        TaskRecord {
            state: self.state.clone(),
            reply,
            follow_up: self.follow_up.clone(),
            is_submitted: self.is_submitted,
            revision: self.revision,
            caller: self.caller.clone(),
            owner: self.owner,
            is_local: self.is_local,
            seen_at: self.seen_at,
            may_run_for: self.may_run_for,
            ttl: self.ttl,
            open_for: self.open_for,
            run: self.run.clone(),
        }
    }

    /// The state of the task without the content, for which there is no room.
    fn without_content(mut self) -> Self {
        if matches!(self.state, TaskState::Unknown(_)) {
            self.state = TaskState::Working;
        }
        self.reply = match self.reply {
            Ok(outcome) if self.state.is_final() => {
                let message = format!(
                    "the task has ended as {}, but its reply exceeds what the bridge can keep for the agent \
                     (a share of `limits.memory`)",
                    outcome.status.name(),
                );
                let error = ActionError::new(Code::TooLarge, message).after_reaching_agent();
                Err(error.with_task(outcome.task.clone()))
            }
            Ok(outcome) => Ok(Arc::new(Outcome {
                status: outcome.status,
                success: outcome.success,
                content: ReplyContent::default(),
                follow_up: outcome.follow_up.clone(),
                retries: outcome.retries.clone(),
                task: outcome.task.clone(),
            })),
            Err(mut error) => {
                error.message = text::shorten(&error.message, MAX_ERROR_MESSAGE);
                error.info.a2a_data = None;
                Err(error)
            }
        };
        self
    }

    /// The size in memory of everything but the reply, in bytes.
    fn allocated(&self) -> usize {
        let follow_up = self.follow_up.as_ref().map_or(0, FollowUp::allocated);
        let state = match &self.state {
            TaskState::Unknown(name) => name.capacity(),
            _ => 0,
        };
        let run = self.run.as_ref().map_or(0, RunLink::allocated);
        size_of::<Self>() + 2 * ALLOCATION_OVERHEAD + state + follow_up + run
    }
}

/// Who has seen a task: the call that follows it, or a lookup, which reads it once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Observer {
    pub began: SystemTime,
    pub is_lookup: bool,
    /// Whether this replica follows the task from now on, whoever did before.
    pub takeover: Takeover,
    /// Identifies the call that follows the task, among those of this process. 0 for a lookup.
    pub run: u64,
}

#[derive(Debug)]
pub(crate) enum RecordResult {
    Written {
        previous: Option<Box<TaskOutline>>,
        /// The revision of the change, if it is to be published. A change that the store has not confirmed yet has none:
        /// [`Tasks::write_late`] returns it.
        update: Option<u64>,
    },
    /// Nothing was written: the existing record is final, or newer.
    Kept,
    /// Nothing was written: another replica follows the task, or may do so while the store is unavailable.
    TakenOver,
}

/// What became of a record for the local table.
enum LocalResult {
    Recorded(RecordResult),
    /// There is no room for the state of a task that runs.
    NoRoom,
    /// The task is in the store, or belongs there.
    InStore(Box<TaskRecord>),
}

#[derive(Debug)]
pub(crate) struct Tasks {
    local: Mutex<BoundedTable<LocalTask>>,
    records: TypedRecords<StoredTask>,
    ends: TaskEnds,
    store: Arc<dyn StateStore>,
    peers: Arc<dyn Peers>,
    turns: Turns,
    /// The tasks of calls in flight, until they have run for long.
    young: Mutex<VecDeque<(Instant, Arc<str>, String)>>,
    /// The tasks with a change that the store has not confirmed.
    unconfirmed: Mutex<HashSet<RecordKey>>,
    /// Changes that have taken effect before another replica took over, and are not published.
    landed: Mutex<HashMap<RecordKey, (u64, Reply)>>,
    landed_count: AtomicUsize,
    runs: AtomicU64,
}

/// For tasks that the store does not take.
static UNSTORED: LazyLock<LogLimit> = LazyLock::new(LogLimit::default);

type FindResult = Result<Option<TaskOutline>, ActionError>;

/// What this process knows of a task.
#[derive(Debug, Clone)]
enum LocalTask {
    /// The ended task of a call in mode `final` or `stream`. Nearly all tasks are such, so it holds only the outcome.
    Ended {
        outcome: Arc<Outcome>,
        caller: Caller,
        seen_at: SystemTime,
        ttl: Duration,
    },
    Record(Arc<TaskRecord>),
    /// It belongs into the store, which has not confirmed the last change.
    Unconfirmed(Arc<Unconfirmed>),
    /// The store has it. This is what this process has last written there, if it has: the store may not respond when
    /// the bridge stops tracking the task.
    InStore(Option<Arc<TaskOutline>>),
}

impl LocalTask {
    fn new(record: TaskRecord) -> Self {
        match &record.reply {
            Ok(outcome) if record.state.is_final() && !record.is_shared() => Self::Ended {
                outcome: Arc::clone(outcome),
                caller: record.caller.clone(),
                seen_at: record.seen_at,
                ttl: record.expires_in(),
            },
            _ => Self::Record(Arc::new(record)),
        }
    }

    /// The task without the content, for which there is no room.
    fn without_content(self) -> Self {
        match self {
            Self::Unconfirmed(task) => {
                Self::Unconfirmed(Arc::new(Arc::unwrap_or_clone(task).without_content()))
            }
            local => match local.record() {
                Some(record) => Self::Record(Arc::new(Arc::unwrap_or_clone(record).without_content())),
                None => Self::InStore(None),
            },
        }
    }

    /// The size in memory of what it points to, in bytes, if its reply takes `of_reply`.
    fn allocated(&self, of_reply: usize) -> usize {
        match self {
            Self::Ended { .. } => of_reply,
            Self::Record(record) => record.allocated() + of_reply,
            Self::Unconfirmed(task) => task.record.allocated() + of_reply,
            Self::InStore(written) => {
                let details = |task: &Arc<TaskOutline>| {
                    let follow_up = task.follow_up.as_ref().map_or(0, FollowUp::allocated);
                    follow_up + task.run.as_ref().map_or(0, RunLink::allocated)
                };
                written
                    .as_ref()
                    .map_or(0, |task| size_of::<TaskOutline>() + ALLOCATION_OVERHEAD + details(task))
            }
        }
    }

    fn record(self) -> Option<Arc<TaskRecord>> {
        match self {
            Self::Ended { outcome, caller, seen_at, ttl } => Some(Arc::new(TaskRecord {
                state: outcome.status.into(),
                reply: Ok(outcome),
                follow_up: None,
                is_submitted: false,
                revision: 0,
                caller,
                // A task in the local table has no owner but this process.
                owner: InstanceId::nil(),
                is_local: false,
                seen_at,
                may_run_for: Duration::ZERO,
                ttl,
                open_for: Duration::ZERO,
                run: None,
            })),
            Self::Record(record) => Some(record),
            Self::Unconfirmed(task) => Some(Arc::new(task.record.clone())),
            Self::InStore(_) => None,
        }
    }

    fn outline(&self) -> Option<TaskOutline> {
        self.clone().record().map(|record| record.outline())
    }
}

impl Tasks {
    pub(super) fn new(store: &Arc<dyn StateStore>, quotas: &Arc<Quotas>, peers: &Arc<dyn Peers>) -> Self {
        Self {
            local: Mutex::new(BoundedTable::new(quotas, QuotaKind::Task)),
            records: TypedRecords::new(store, RecordKind::Task),
            ends: TaskEnds::default(),
            store: Arc::clone(store),
            peers: Arc::clone(peers),
            turns: Turns::default(),
            young: Mutex::default(),
            unconfirmed: Mutex::default(),
            landed: Mutex::default(),
            landed_count: AtomicUsize::new(0),
            runs: AtomicU64::new(1),
        }
    }

    /// A number for a call that follows a task.
    pub(crate) fn next_run(&self) -> u64 {
        self.runs.fetch_add(1, Relaxed)
    }

    /// Whether another replica follows a task.
    pub(crate) fn other_owner(&self, outline: &TaskOutline) -> Option<InstanceId> {
        let owner = outline.owner;
        (!owner.is_nil() && owner != self.peers.instance()).then_some(owner)
    }

    /// Whether this process knows a task that may not be in the store.
    pub(super) fn is_known_here(&self, key: &RecordKey) -> bool {
        let local = self.get_local(&key.agent, &key.id);
        local.is_some_and(|local| !matches!(local, LocalTask::InStore(_)))
    }

    /// Whether this process knows that a task belongs to the caller of the key.
    pub(super) fn is_of_caller(&self, key: &RecordKey) -> bool {
        match self.get_local(&key.agent, &key.id) {
            Some(LocalTask::Ended { caller, .. }) => caller == key.caller,
            Some(LocalTask::Record(record)) => record.caller == key.caller,
            Some(LocalTask::Unconfirmed(task)) => task.record.caller == key.caller,
            Some(LocalTask::InStore(Some(task))) => task.caller == key.caller,
            Some(LocalTask::InStore(None)) | None => false,
        }
    }

    /// Finds a task that this process has seen. It reads the store only for tasks that this process put there, so
    /// that a new call does not read the store.
    pub(crate) async fn find_seen_here(&self, agent: &Arc<str>, id: &str) -> FindResult {
        match self.get_local(agent, id) {
            None => Ok(None),
            Some(LocalTask::InStore(_)) => Box::pin(self.find_in_store(agent, id)).await,
            Some(local) => Ok(local.outline()),
        }
    }

    /// Finds a task that any replica has seen.
    pub(crate) async fn find(&self, agent: &Arc<str>, id: &str) -> FindResult {
        match self.get_local(agent, id).and_then(|local| local.outline()) {
            Some(outline) => Ok(Some(outline)),
            None => self.find_in_store(agent, id).await,
        }
    }

    /// Finds a task as the store has it now, in spite of what this process knows.
    pub(crate) async fn find_current(&self, agent: &Arc<str>, id: &str) -> FindResult {
        self.store.forget(RecordKind::Task, &RecordKey::new(agent, id));
        self.find_in_store(agent, id).await
    }

    /// The reply of a task that any replica has seen. `charge` charges its memory in place of what it charged before.
    pub(crate) async fn reply(
        &self,
        agent: &Arc<str>,
        id: &str,
        charge: impl Fn(usize) -> Result<(), OutOfMemory>,
    ) -> Result<Option<Reply>, ActionError> {
        let local =
            self.local().get_sized(agent, id, Instant::now()).map(|(local, size)| (local.clone(), size));
        if let Some((record, size)) = local.and_then(|(local, size)| Some((local.record()?, size))) {
            charge(size)?;
            return Ok(Some(record.reply.clone()));
        }
        let stored = self.records.read_charged(&RecordKey::new(agent, id), charge).await?;
        Ok(stored.map(|stored| stored.task.reply))
    }

    /// Waits until no other request of this process records the task.
    pub(crate) async fn turn(&self, agent: &Arc<str>, id: &str) -> OwnedMutexGuard<()> {
        self.turns.wait(RecordKey::new(agent, id)).await
    }

    /// Records the state of a task, unless the existing record is final or newer. A submitted task stays submitted.
    ///
    /// An error means that there is no room even for the state of a task that runs or waits, for which calls reserve
    /// room. A task that has ended needs none: the caller has the reply.
    pub(crate) async fn record(
        &self,
        agent: &Arc<str>,
        id: &str,
        new: TaskRecord,
        observer: Observer,
    ) -> Result<RecordResult, ActionError> {
        let is_final = new.state.is_final();
        let is_end_in_lookup = is_final && observer.is_lookup;
        let local = match new.is_shared() {
            true => LocalResult::InStore(Box::new(new)),
            false => self.record_locally(agent, id, new, observer),
        };
        let is_followed = observer.takeover != Takeover::None;
        if is_followed && matches!(local, LocalResult::Recorded(_)) && !is_final {
            self.share_later(agent, id);
        }
        let result = match local {
            LocalResult::Recorded(result) => result,
            LocalResult::NoRoom => return Err(quota::refusal(agent, QuotaKind::Task)),
            LocalResult::InStore(new) => Box::pin(self.record_in_store(agent, id, *new, observer)).await?,
        };
        if is_end_in_lookup && matches!(result, RecordResult::Written { .. }) {
            self.ends.notify(agent, id);
        }
        Ok(result)
    }

    /// For a call that follows a task: the agent may not report the end on the stream when another request, such as
    /// a cancel, has caused it.
    pub(crate) fn subscribe_to_end(&self, agent: &Arc<str>, id: &str) -> TaskEndSubscription<'_> {
        self.ends.subscribe(agent, id)
    }

    /// Records why the bridge no longer tracks a task, for lookups while the agent is unavailable. A final state
    /// stays, and so does an open question: a caller can still answer it. Returns the revision of the change if it is to
    /// be published. `run` is the call that has followed the task.
    pub(crate) async fn mark_untracked(
        &self,
        agent: &Arc<str>,
        id: &str,
        why: &ActionError,
        run: u64,
    ) -> Option<u64> {
        let known = match self.find_seen_here(agent, id).await {
            Ok(known) => known,
            Err(_) => self.last_written(agent, id).map(Arc::unwrap_or_clone),
        };
        let known = known.filter(|known| !known.state.is_settled())?;
        let observer = Observer { began: known.seen_at, is_lookup: false, takeover: Takeover::None, run };
        let untracked = TaskRecord {
            may_run_for: Duration::ZERO,
            seen_at: wall_time(),
            ..known.with_reply(Err(why.clone()))
        };
        // It replaces a record, for which there is always room.
        match self.record(agent, id, untracked, observer).await {
            Ok(RecordResult::Written { update, .. }) => update,
            Ok(RecordResult::Kept | RecordResult::TakenOver) | Err(_) => None,
        }
    }

    /// Shares the task of a call if it still runs after [`LONG_RUNNING`].
    fn share_later(&self, agent: &Arc<str>, id: &str) {
        if !self.store.is_shared() {
            return;
        }
        let mut young = self.young.lock().unwrap_or_else(PoisonError::into_inner);
        if young.len() < MAX_WAITING_TO_BE_SHARED {
            young.push_back((Instant::now() + LONG_RUNNING, Arc::clone(agent), id.to_owned()));
        }
    }

    /// Moves the tasks of calls that have run for long to the store. Never returns.
    pub(super) async fn share_long_running(&self) {
        loop {
            let due = {
                let mut young = self.young.lock().unwrap_or_else(PoisonError::into_inner);
                let now = Instant::now();
                let count = young.iter().take_while(|(due, ..)| *due <= now).count();
                young.drain(..count).collect::<Vec<_>>()
            };
            for (_, agent, id) in due {
                self.share(&agent, &id).await;
            }
            tokio::time::sleep(LONG_RUNNING / 4).await;
        }
    }

    async fn share(&self, agent: &Arc<str>, id: &str) {
        let Some(LocalTask::Record(record)) = self.get_local(agent, id) else { return };
        if !record.is_open() {
            return;
        }
        let observer = Observer { began: record.seen_at, is_lookup: false, takeover: Takeover::New, run: 0 };
        let record = Arc::unwrap_or_clone(record);
        if let Err(error) = self.record_in_store(agent, id, record, observer).await {
            tracing::debug!(%agent, task = id, error = error.message, "cannot share a task that runs for long");
        }
    }

    /// What this process has last written of a task in the store.
    fn last_written(&self, agent: &Arc<str>, id: &str) -> Option<Arc<TaskOutline>> {
        match self.get_local(agent, id)? {
            LocalTask::InStore(written) => written,
            LocalTask::Ended { .. } | LocalTask::Record(_) | LocalTask::Unconfirmed(_) => None,
        }
    }

    /// The open tasks of an agent that another replica follows, and those whose end it may not have published.
    pub(crate) fn foreign<'a>(
        &'a self,
        agent: &'a Arc<str>,
    ) -> impl Stream<Item = Result<(String, TaskOutline), StoreUnavailable>> + Send + 'a {
        self.records.scan(agent).try_filter_map(
            move |(key, stored): (RecordKey, StoredTask<TaskOutline>)| async move {
                let task = stored.task;
                let is_found = task.is_adoptable() && self.other_owner(&task).is_some();
                Ok(is_found.then_some((key.id, task)))
            },
        )
    }

    /// Records the task of a call in mode `final` or `stream` in one step.
    fn record_locally(
        &self,
        agent: &Arc<str>,
        id: &str,
        mut new: TaskRecord,
        observer: Observer,
    ) -> LocalResult {
        let of_reply = reply::allocated(&new.reply);
        let (mut removed, now) = (Removed::default(), Instant::now());
        let mut local = self.local();
        let entry = local.entry(agent, id, now, &mut removed).of_caller(&new.caller);
        let previous = match entry.value() {
            None => None,
            Some(LocalTask::InStore(_) | LocalTask::Unconfirmed(_)) => {
                return LocalResult::InStore(Box::new(new));
            }
            Some(known) => known.outline(),
        };
        if previous.as_ref().is_some_and(|known| known.takes_precedence_over(&new, observer)) {
            return LocalResult::Recorded(RecordResult::Kept);
        }
        new.is_submitted |= previous.as_ref().is_some_and(|previous| previous.is_submitted);
        let lifetime = new.lifetime(previous.as_ref(), observer);
        let update = next_revision(&mut new, previous.as_ref());
        let put = put(entry, LocalTask::new(new), of_reply, lifetime);
        drop(local);
        removed.evict_rest(|removed| self.local().evict(agent, now, removed));
        if let Err(Full) = put {
            tracing::warn!(%agent, task = id, "no room to record a task");
            if !lifetime.protected_for.is_zero() {
                return LocalResult::NoRoom;
            }
        }
        LocalResult::Recorded(RecordResult::Written { previous: previous.map(Box::new), update })
    }

    async fn find_in_store(&self, agent: &Arc<str>, id: &str) -> FindResult {
        let Some(read) = self.records.read(&RecordKey::new(agent, id)).await? else {
            return Ok(None);
        };
        let StoredTask::<TaskOutline> { task: found, .. } = read.record;
        if self.get_local(agent, id).is_none() {
            let lifetime = Lifetime::evictable(found.expires_in());
            self.put_local(agent, id, &found.caller, LocalTask::InStore(None), 0, lifetime);
        }
        Ok(Some(found))
    }

    fn get_local(&self, agent: &Arc<str>, id: &str) -> Option<LocalTask> {
        self.local().get(agent, id, Instant::now()).cloned()
    }

    /// Returns whether there was room.
    fn put_local(
        &self,
        agent: &Arc<str>,
        id: &str,
        caller: &Caller,
        task: LocalTask,
        of_reply: usize,
        lifetime: Lifetime,
    ) -> bool {
        let (mut removed, now) = (Removed::default(), Instant::now());
        let mut local = self.local();
        let entry = local.entry(agent, id, now, &mut removed).of_caller(caller);
        let put = put(entry, task, of_reply, lifetime);
        drop(local);
        removed.evict_rest(|removed| self.local().evict(agent, now, removed));
        put.is_ok()
    }

    /// Expires local tasks of an agent whose protection has ended.
    pub(super) fn expire(&self, agent: &str) {
        // The removed tasks are dropped after the lock is released.
        let _removed = { self.local().expire(agent, Instant::now()) };
    }

    /// Frees the memory of expired local tasks.
    pub(super) async fn sweep(&self) {
        table::sweep(|| self.local().sweep_step(Instant::now())).await;
    }

    // One lock for all agents: it is held for a moment only.
    fn local(&self) -> MutexGuard<'_, BoundedTable<LocalTask>> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Gives a record the revision of its change, and returns it if the change is to be published.
fn next_revision(new: &mut TaskRecord, previous: Option<&TaskOutline>) -> Option<u64> {
    new.revision = previous.map_or(0, |previous| previous.revision);
    if !new.is_update(previous) {
        return None;
    }
    new.revision += 1;
    Some(new.revision)
}

/// Writes a task to the local table, without its content if there is no room for that.
fn put(
    mut entry: Entry<'_, LocalTask>,
    mut task: LocalTask,
    mut of_reply: usize,
    lifetime: Lifetime,
) -> Result<(), Full> {
    if !entry.has_room(task.allocated(of_reply), lifetime) {
        entry.count_refusal();
        task = task.without_content();
        of_reply = match &task {
            LocalTask::Record(record) => reply::allocated(&record.reply),
            LocalTask::Unconfirmed(task) => reply::allocated(&task.record.reply),
            LocalTask::Ended { .. } | LocalTask::InStore(_) => 0,
        };
    }
    let bytes = task.allocated(of_reply);
    entry.put(task, bytes, lifetime)
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct StoredTask<T = TaskRecord> {
    task: T,
    /// Identifies the write.
    nonce: Uuid,
    #[serde(default, skip_serializing_if = "Replaced::is_empty")]
    replaced: Replaced,
    /// The call of the owner that follows the task; 0 if it is not known.
    #[serde(default)]
    run: u64,
}

/// Takeovers of a task that are remembered.
const MAX_REPLACED: usize = 4;

/// The last writes of earlier owners of a task, oldest first. An owner may not know that its write took effect.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
struct Replaced(Vec<Uuid>);

impl Replaced {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn contains(&self, write: Uuid) -> bool {
        self.0.contains(&write)
    }

    /// Another replica takes over, and replaces this write.
    fn followed_by(&self, write: Uuid) -> Self {
        let first = (self.0.len() + 1).saturating_sub(MAX_REPLACED);
        Self(self.0.iter().copied().skip(first).chain([write]).collect())
    }
}

impl Record for StoredTask {
    fn allocated(&self) -> usize {
        reply::allocated(&self.task.reply)
    }

    fn caller(&self) -> Option<&Caller> {
        Some(&self.task.caller)
    }
}

fn write_state<S: Serializer>(state: &TaskState, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(state)
}

fn read_state<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TaskState, D::Error> {
    Ok(TaskState::parse(&String::deserialize(deserializer)?))
}
