//! Tasks as they were last seen, so that callers can look them up, cancel and follow them.
//!
//! A local table holds the tasks of calls in mode `final` or `stream`: every call writes one and few are read
//! again. A task that a request at another replica may need, because it was submitted or waits for an answer, moves
//! to the store and stays there until it expires.
//!
//! A record may hold a reply of many megabytes. Most requests do not need it: they get the [outline](TaskOutline) of the
//! task.
//!
//! Every call has [reserved](super::quota::AgentQuota::reserve) room for the state of its task. If there is no room for
//! the content as well, the record is without it.

#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;

use super::quota::{QuotaKind, Quotas};
use super::records::{Change, Record, TypedRecords};
use super::table::{self, BoundedTable, Entry, Full, Removed};
use super::task_ends::{TaskEndSubscription, TaskEnds};
use super::{Lifetime, RecordKey, RecordKind, StateStore, quota};
use crate::a2a::model::{ALLOCATION_OVERHEAD, TaskState};
use crate::memory::OutOfMemory;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, ReplyContent, TaskRef};
use crate::reply::{self, Reply, for_storage};
use crate::text;

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
    pub seen_at: SystemTime,
    /// How long the task may still run.
    pub may_run_for: Duration,
    /// How long the record remains after that.
    pub ttl: Duration,
    /// How long a call follows the task, or the caller can answer. Until then the record must not be evicted.
    #[serde(default)]
    pub open_for: Duration,
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
        self.is_submitted || self.follow_up.is_some()
    }

    /// Whether this record stays when `observer` has seen `new`.
    ///
    /// A final state stays, unless it is from before the observing call began: then it belongs to an earlier
    /// use of the same id, because some agents give every task of a conversation the same one. Anything
    /// recorded during a lookup is newer than what the lookup has seen.
    fn takes_precedence_over(&self, new: &TaskRecord, observer: Observer) -> bool {
        let is_older_lookup = observer.is_lookup && !new.state.is_final();
        (self.state.is_final() || is_older_lookup) && self.seen_at >= observer.began
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
        let Self { state, reply: _, follow_up, is_submitted, seen_at, may_run_for, ttl, open_for } = self;
        TaskRecord { state, reply, follow_up, is_submitted, seen_at, may_run_for, ttl, open_for }
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
            seen_at: self.seen_at,
            may_run_for: self.may_run_for,
            ttl: self.ttl,
            open_for: self.open_for,
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
        size_of::<Self>() + 2 * ALLOCATION_OVERHEAD + state + follow_up
    }
}

/// Who has seen a task: the call that follows it, or a lookup, which reads it once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Observer {
    pub began: SystemTime,
    pub is_lookup: bool,
}

#[derive(Debug)]
pub(crate) enum RecordResult {
    Written {
        previous: Option<Box<TaskOutline>>,
    },
    /// Nothing was written: the existing record is final, or newer.
    Kept,
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
}

type FindResult = Result<Option<TaskOutline>, ActionError>;

/// What this process knows of a task.
#[derive(Debug, Clone)]
enum LocalTask {
    /// The ended task of a call in mode `final` or `stream`. Nearly all tasks are such, so it holds only the outcome.
    Ended {
        outcome: Arc<Outcome>,
        seen_at: SystemTime,
        ttl: Duration,
    },
    Record(Arc<TaskRecord>),
    InStore,
}

impl LocalTask {
    fn new(record: TaskRecord) -> Self {
        match &record.reply {
            Ok(outcome) if record.state.is_final() && !record.is_shared() => Self::Ended {
                outcome: Arc::clone(outcome),
                seen_at: record.seen_at,
                ttl: record.expires_in(),
            },
            _ => Self::Record(Arc::new(record)),
        }
    }

    /// The task without the content, for which there is no room.
    fn without_content(self) -> Self {
        match self.record() {
            Some(record) => Self::Record(Arc::new(Arc::unwrap_or_clone(record).without_content())),
            None => Self::InStore,
        }
    }

    /// The size in memory of what it points to, in bytes, if its reply takes `of_reply`.
    fn allocated(&self, of_reply: usize) -> usize {
        match self {
            Self::Ended { .. } => of_reply,
            Self::Record(record) => record.allocated() + of_reply,
            Self::InStore => 0,
        }
    }

    fn record(self) -> Option<Arc<TaskRecord>> {
        match self {
            Self::Ended { outcome, seen_at, ttl } => Some(Arc::new(TaskRecord {
                state: outcome.status.into(),
                reply: Ok(outcome),
                follow_up: None,
                is_submitted: false,
                seen_at,
                may_run_for: Duration::ZERO,
                ttl,
                open_for: Duration::ZERO,
            })),
            Self::Record(record) => Some(record),
            Self::InStore => None,
        }
    }

    fn outline(&self) -> Option<TaskOutline> {
        self.clone().record().map(|record| record.outline())
    }
}

impl Tasks {
    pub(super) fn new(store: &Arc<dyn StateStore>, quotas: &Arc<Quotas>) -> Self {
        Self {
            local: Mutex::new(BoundedTable::new(quotas, QuotaKind::Task)),
            records: TypedRecords::new(store, RecordKind::Task),
            ends: TaskEnds::default(),
        }
    }

    /// Finds a task that this process has seen. It reads the store only for tasks that this process put there, so
    /// that a new call does not read the store.
    pub(crate) async fn find_seen_here(&self, agent: &Arc<str>, id: &str) -> FindResult {
        match self.get_local(agent, id) {
            None => Ok(None),
            Some(LocalTask::InStore) => Box::pin(self.find_in_store(agent, id)).await,
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
        let is_end_in_lookup = new.state.is_final() && observer.is_lookup;
        let local = match new.is_shared() {
            true => LocalResult::InStore(Box::new(new)),
            false => self.record_locally(agent, id, new, observer),
        };
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
    /// stays, and so does an open question: a caller can still answer it.
    pub(crate) async fn mark_untracked(&self, agent: &Arc<str>, id: &str, why: &ActionError) {
        let known = self.find_seen_here(agent, id).await.ok().flatten();
        if let Some(known) = known.filter(|known| !known.state.is_settled()) {
            let observer = Observer { began: known.seen_at, is_lookup: false };
            let untracked = TaskRecord {
                may_run_for: Duration::ZERO,
                seen_at: SystemTime::now(),
                ..known.with_reply(Err(why.clone()))
            };
            // It replaces a record, for which there is always room.
            let _ = self.record(agent, id, untracked, observer).await;
        }
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
        let entry = local.entry(agent, id, now, &mut removed);
        let previous = match entry.value() {
            None => None,
            Some(LocalTask::InStore) => return LocalResult::InStore(Box::new(new)),
            Some(known) => known.outline(),
        };
        if previous.as_ref().is_some_and(|known| known.takes_precedence_over(&new, observer)) {
            return LocalResult::Recorded(RecordResult::Kept);
        }
        new.is_submitted |= previous.as_ref().is_some_and(|previous| previous.is_submitted);
        let lifetime = new.lifetime(previous.as_ref(), observer);
        let put = put(entry, LocalTask::new(new), of_reply, lifetime);
        drop(local);
        removed.evict_rest(|removed| self.local().evict(agent, now, removed));
        if let Err(Full) = put {
            tracing::warn!(%agent, task = id, "no room to record a task");
            if !lifetime.protected_for.is_zero() {
                return LocalResult::NoRoom;
            }
        }
        LocalResult::Recorded(RecordResult::Written { previous: previous.map(Box::new) })
    }

    async fn record_in_store(
        &self,
        agent: &Arc<str>,
        id: &str,
        new: TaskRecord,
        observer: Observer,
    ) -> Result<RecordResult, ActionError> {
        let local = self.get_local(agent, id).and_then(|local| local.outline());
        if local.as_ref().is_some_and(|known| known.takes_precedence_over(&new, observer)) {
            return Ok(RecordResult::Kept);
        }
        let mut written = self.write_to_store(agent, id, &new, local.as_ref(), observer).await;
        let is_full = |error: &ActionError| error.info.code == Code::Busy;
        if written.as_ref().is_err_and(is_full) {
            let state_only = new.clone().without_content();
            written = self.write_to_store(agent, id, &state_only, local.as_ref(), observer).await;
        }
        match written {
            Ok((result, lifetime)) => {
                self.put_local(agent, id, LocalTask::InStore, 0, lifetime);
                Ok(result)
            }
            Err(error) => {
                tracing::debug!(%agent, task = id, error = error.message, "cannot write a task to the state store");
                // While the store is unavailable, this process keeps the record.
                let lifetime = new.lifetime(local.as_ref(), observer);
                let of_reply = reply::allocated(&new.reply);
                match self.put_local(agent, id, LocalTask::Record(Arc::new(new)), of_reply, lifetime) {
                    true => Ok(RecordResult::Written { previous: local.map(Box::new) }),
                    false => Err(quota::refusal(agent, QuotaKind::SharedTask)),
                }
            }
        }
    }

    async fn write_to_store(
        &self,
        agent: &Arc<str>,
        id: &str,
        new: &TaskRecord,
        local: Option<&TaskOutline>,
        observer: Observer,
    ) -> Result<(RecordResult, Lifetime), ActionError> {
        let nonce = Uuid::new_v4();
        let mut lifetime = new.lifetime(local, observer);
        let mut replaced = None;
        let decide = |known: Option<StoredTask<TaskOutline>>| {
            // An earlier attempt of this write was stored after all.
            if known.as_ref().is_some_and(|known| known.nonce == nonce) {
                return Ok(Change::Keep(RecordResult::Written { previous: replaced.take().map(Box::new) }));
            }
            let known = known.map(|known| known.task);
            if known.as_ref().is_some_and(|known| known.takes_precedence_over(new, observer)) {
                return Ok(Change::Keep(RecordResult::Kept));
            }
            let previous = known.or_else(|| local.cloned());
            replaced.clone_from(&previous);
            lifetime = new.lifetime(previous.as_ref(), observer);
            let task = new.clone();
            let mut task = TaskRecord { reply: for_storage(task.reply), ..task };
            task.is_submitted |= previous.as_ref().is_some_and(|previous| previous.is_submitted);
            let written = RecordResult::Written { previous: previous.map(Box::new) };
            Ok(Change::Write(StoredTask { task, nonce }, lifetime, written))
        };
        let result = self.records.update(&RecordKey::new(agent, id), decide).await?;
        Ok((result, lifetime))
    }

    async fn find_in_store(&self, agent: &Arc<str>, id: &str) -> FindResult {
        let Some(read) = self.records.read(&RecordKey::new(agent, id)).await? else {
            return Ok(None);
        };
        let StoredTask::<TaskOutline> { task: found, .. } = read.record;
        if self.get_local(agent, id).is_none() {
            self.put_local(agent, id, LocalTask::InStore, 0, Lifetime::evictable(found.expires_in()));
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
        task: LocalTask,
        of_reply: usize,
        lifetime: Lifetime,
    ) -> bool {
        let (mut removed, now) = (Removed::default(), Instant::now());
        let mut local = self.local();
        let put = put(local.entry(agent, id, now, &mut removed), task, of_reply, lifetime);
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
            LocalTask::Ended { .. } | LocalTask::InStore => 0,
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
}

impl Record for StoredTask {
    fn allocated(&self) -> usize {
        reply::allocated(&self.task.reply)
    }
}

fn write_state<S: Serializer>(state: &TaskState, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(state)
}

fn read_state<'de, D: Deserializer<'de>>(deserializer: D) -> Result<TaskState, D::Error> {
    Ok(TaskState::parse(&String::deserialize(deserializer)?))
}
