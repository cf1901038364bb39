//! Writes tasks to the store, and finds out what the store has confirmed.
//!
//! ```text
//! change ──write──> confirmed ──> published
//!             │         ^
//!             └─> Unconfirmed ──write_late──┘   the store did not respond, or the request was dropped
//! ```
//!
//! A write that was not confirmed may have taken effect, or may do so later. So this process remembers its attempts: if
//! the store has one of them, the change that it made is not published yet, and its revision is used again for the newest
//! state. If another replica has replaced it, that record names the attempt, and the change is published late.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, PoisonError};

use uuid::Uuid;

use super::{
    FindResult, LocalTask, Observer, RecordResult, Replaced, StoredTask, TaskOutline, TaskRecord, Tasks,
    UNSTORED, next_revision,
};
use crate::caller::Caller;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::FollowUp;
use crate::reply::{self, Reply, for_storage};
use crate::state::peers::InstanceId;
use crate::state::quota::{self, QuotaKind};
use crate::state::records::{Assumption, Change};
use crate::state::{Durability, Lifetime, RecordKey, RecordKind};

/// Attempts that are remembered for a task. Each is for another state of the task.
const MAX_ATTEMPTS: usize = 16;

/// Whether an observer makes this replica the owner of a task, whoever was it before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Takeover {
    None,
    /// The call has just begun the task.
    New,
    /// The call has just answered the question with this id. If the record no longer names it, another replica has
    /// followed the task in the meantime.
    Answer(Uuid),
}

impl Takeover {
    /// Whether a call may follow a task that another one has followed, and whose record names this question.
    fn is_from(self, named: Option<&FollowUp>) -> bool {
        match self {
            Self::None => false,
            Self::New => true,
            Self::Answer(id) => named.is_some_and(|named| named.id == id),
        }
    }
}

impl Observer {
    /// Whether no other call of this process follows the task.
    fn continues(self, run: u64) -> bool {
        self.is_lookup || [self.run, run].contains(&0) || self.run == run
    }
}

/// A change of a task that the store has not confirmed.
#[derive(Debug, Clone)]
pub(super) struct Unconfirmed {
    pub record: TaskRecord,
    /// Identifies the writes of the record.
    nonce: Uuid,
    observer: Observer,
    /// Whether a call of this process has begun the task, and the store has never confirmed anything about it.
    is_only_here: bool,
    /// Earlier observers whose changes are not confirmed either. Each has followed the task after the one before.
    earlier: Vec<Observer>,
    /// Writes of this process that may have taken effect.
    attempts: Vec<Attempt>,
}

/// A write that may have taken effect.
#[derive(Debug, Clone)]
struct Attempt {
    nonce: Uuid,
    /// What it replaces.
    base: Option<Uuid>,
    previous: Option<Box<TaskOutline>>,
    update: Option<u64>,
    reply: Reply,
    outline: Option<Arc<TaskOutline>>,
}

/// What became of a change that the store had not confirmed.
#[derive(Debug)]
pub(crate) struct LateWrite {
    /// Changes with their revisions, to be published.
    pub updates: Vec<(u64, Reply)>,
    pub caller: Caller,
    /// A follow-up id that may not be valid any more.
    pub obsolete: Option<Uuid>,
}

/// What became of a record for the store.
struct Written {
    result: RecordResult,
    /// The task as it is in the store now, if this process has written it.
    outline: Option<Arc<TaskOutline>>,
    lifetime: Lifetime,
}

impl Unconfirmed {
    /// `is_known` says whether this process has found the task in the store, or put it there.
    fn new(record: TaskRecord, observer: Observer, is_known: bool) -> Self {
        let is_answer = matches!(observer.takeover, Takeover::Answer(_));
        let is_only_here = !is_known && !is_answer && !observer.is_lookup;
        let (earlier, attempts) = (Vec::new(), Vec::new());
        Self { record, nonce: Uuid::new_v4(), observer, is_only_here, earlier, attempts }
    }

    /// A newer state of a task whose last change is not confirmed.
    fn followed_by(&self, record: TaskRecord, observer: Observer) -> Self {
        let is_submitted = record.is_submitted || self.record.is_submitted;
        let is_same = |known: &Observer| known.run == observer.run && known.takeover == observer.takeover;
        let mut earlier = self.earlier.clone();
        if !is_same(&self.observer) {
            earlier.push(self.observer);
        }
        // A lookup does not follow the task.
        let observer = match observer.is_lookup {
            true => Observer { began: observer.began, ..self.observer },
            false => observer,
        };
        Self {
            record: TaskRecord { is_submitted, ..record },
            nonce: Uuid::new_v4(),
            observer,
            is_only_here: self.is_only_here,
            earlier,
            attempts: self.attempts.clone(),
        }
    }

    /// Whether a call has seen the same end of the task as the calls that are known to have seen it.
    fn ends_like(&self, new: &TaskRecord, observer: Observer) -> bool {
        let is_known = self.earlier.iter().chain([&self.observer]).any(|known| known.run == observer.run);
        new.state.is_final() && new.state == self.record.state && !observer.is_lookup && !is_known
    }

    pub(super) fn without_content(self) -> Self {
        Self { record: self.record.without_content(), ..self }
    }

    /// Whether a lookup has seen that a task goes on which waited for an answer. The request that has sent the answer
    /// records that, and follows the task.
    fn is_for_other_request(new: &TaskRecord, known: &TaskOutline, observer: Observer) -> bool {
        observer.is_lookup
            && known.state.awaits_caller()
            && known.follow_up.is_some()
            && !new.state.awaits_caller()
            && !new.state.is_final()
    }

    fn add_attempt(&mut self, attempt: Attempt) {
        self.attempts.retain(|known| known.nonce != attempt.nonce);
        if self.attempts.len() == MAX_ATTEMPTS {
            self.attempts.remove(0);
        }
        self.attempts.push(attempt);
    }
}

/// A write of a task. If the request is dropped, this process finds out later whether it took effect.
struct Writing<'a> {
    tasks: &'a Tasks,
    agent: &'a Arc<str>,
    id: &'a str,
    task: Option<Unconfirmed>,
}

impl Writing<'_> {
    async fn write(&mut self) -> Result<Written, ActionError> {
        let Some(task) = &mut self.task else { return Err(ActionError::internal()) };
        let written = self.tasks.write_to_store(self.agent, self.id, task).await;
        if !written.as_ref().is_err_and(|error| error.info.code == Code::Busy) {
            return written;
        }
        *task = task.clone().without_content();
        self.tasks.write_to_store(self.agent, self.id, task).await
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            self.tasks.keep(self.agent, self.id, task);
        }
    }
}

impl Tasks {
    pub(super) async fn record_in_store(
        &self,
        agent: &Arc<str>,
        id: &str,
        new: TaskRecord,
        observer: Observer,
    ) -> Result<RecordResult, ActionError> {
        let local = self.get_local(agent, id);
        let outline = local.as_ref().and_then(LocalTask::outline);
        if let Some(known) = &outline {
            if known.takes_precedence_over(&new, observer) {
                if let Some(LocalTask::Unconfirmed(task)) = &local
                    && task.ends_like(&new, observer)
                {
                    // The store may say that only this call follows the task.
                    self.keep(agent, id, task.followed_by(task.record.clone(), observer));
                }
                return Ok(RecordResult::Kept);
            }
            if self.store.is_shared() && Unconfirmed::is_for_other_request(&new, known, observer) {
                return Ok(RecordResult::TakenOver);
            }
        }
        let task = match &local {
            Some(LocalTask::Unconfirmed(earlier))
                if !observer.continues(earlier.observer.run)
                    && !observer.takeover.is_from(earlier.record.follow_up.as_ref()) =>
            {
                return Ok(RecordResult::TakenOver);
            }
            Some(LocalTask::Unconfirmed(earlier)) => earlier.followed_by(new, observer),
            local => Unconfirmed::new(new, observer, matches!(local, Some(LocalTask::InStore(_)))),
        };
        let mut writing = Writing { tasks: self, agent, id, task: Some(task) };
        let written = writing.write().await;
        let Some(task) = writing.task.take() else { return Err(ActionError::internal()) };
        match written {
            Ok(written) => {
                self.settle(agent, id, &task, &written);
                Ok(written.result)
            }
            Err(error) => {
                tracing::debug!(%agent, task = id, error = error.message, "cannot write a task to the state store");
                if error.info.code == Code::Busy
                    && let Some(tasks) = UNSTORED.add(std::time::Instant::now())
                {
                    tracing::warn!(
                        %agent, tasks, error = error.message,
                        "tasks are not in JetStream, only in the memory of this bridge (logged once a minute)"
                    );
                }
                let confirmed = self.last_written(agent, id);
                let confirmed = confirmed.as_ref().and_then(|confirmed| confirmed.follow_up.as_ref());
                let is_new = |new: &FollowUp| confirmed.is_none_or(|confirmed| confirmed.id != new.id);
                if task.observer.is_lookup && task.record.follow_up.as_ref().is_some_and(is_new) {
                    // Another replica may follow the task, and give the question another id.
                    self.keep(agent, id, task);
                    return Err(error);
                }
                if !self.counts_unconfirmed(agent, id, &task) {
                    return Ok(RecordResult::TakenOver);
                }
                match self.keep(agent, id, task) {
                    true => Ok(RecordResult::Written { previous: outline.map(Box::new), update: None }),
                    false => Err(quota::refusal(agent, QuotaKind::SharedTask)),
                }
            }
        }
    }

    /// Whether a change counts though the store has not confirmed it. A lookup may be at a replica that does not follow
    /// the task.
    fn counts_unconfirmed(&self, agent: &Arc<str>, id: &str, task: &Unconfirmed) -> bool {
        // This process has written the task before, or waits to do so.
        let is_own = || {
            let local = self.get_local(agent, id);
            matches!(local, Some(LocalTask::InStore(Some(_)) | LocalTask::Unconfirmed(_)))
        };
        !task.observer.is_lookup || !task.attempts.is_empty() || (task.record.state.is_final() && is_own())
    }

    /// A change that this process has written, and not published, because it did not know that the write took effect
    /// before another replica took over. To be published before the change that a [record](Self::record) has made.
    pub(crate) fn take_landed(&self, agent: &Arc<str>, id: &str) -> Option<(u64, Reply)> {
        if self.landed_count.load(Relaxed) == 0 {
            return None;
        }
        let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = landed.remove(&RecordKey::new(agent, id));
        self.landed_count.store(landed.len(), Relaxed);
        taken
    }

    /// Another replica has replaced this write.
    fn add_landed(&self, key: &RecordKey, task: &mut Unconfirmed, replaced: &Replaced) {
        let Some(index) = task.attempts.iter().position(|attempt| replaced.contains(attempt.nonce)) else {
            return;
        };
        if let Attempt { update: Some(revision), reply, .. } = task.attempts.remove(index) {
            let mut landed = self.landed.lock().unwrap_or_else(PoisonError::into_inner);
            landed.insert(key.clone(), (revision, reply));
            self.landed_count.store(landed.len(), Relaxed);
        }
    }

    /// Finds a task as it decides whether a question can be answered: as the store has it now, or as this process could
    /// not write it yet.
    pub(crate) async fn find_to_answer(&self, agent: &Arc<str>, id: &str) -> FindResult {
        if !self.store.is_shared() {
            return self.find(agent, id).await;
        }
        let key = RecordKey::new(agent, id);
        let _turn = self.turn(agent, id).await;
        self.store.forget(RecordKind::Task, &key);
        let stored = self.records.read::<StoredTask<TaskOutline>>(&key).await?.map(|read| read.record);
        let local = self.get_local(agent, id);
        Ok(match (stored, &local) {
            (Some(stored), Some(LocalTask::Unconfirmed(task))) if self.is_taken_over(task, &stored) => {
                Some(stored.task)
            }
            (_, Some(LocalTask::Unconfirmed(task))) => Some(task.record.outline()),
            (Some(stored), _) => Some(stored.task),
            (None, local) => local.as_ref().and_then(LocalTask::outline),
        })
    }

    /// Whether no other replica can know a task, because the store was unavailable since it began.
    pub(crate) fn is_only_here(&self, agent: &Arc<str>, id: &str) -> bool {
        matches!(self.get_local(agent, id), Some(LocalTask::Unconfirmed(task)) if task.is_only_here)
    }

    /// Whether the store has not confirmed the last change of a task.
    pub(crate) fn is_unconfirmed(&self, agent: &Arc<str>, id: &str) -> bool {
        matches!(self.get_local(agent, id), Some(LocalTask::Unconfirmed(_)))
    }

    /// Whether another replica decides about a task since this process has seen it.
    fn is_taken_over(&self, task: &Unconfirmed, known: &StoredTask<TaskOutline>) -> bool {
        let mut observers = task.earlier.iter().copied().chain([task.observer]);
        observers.all(|observer| self.is_taken_over_from(observer, task, known))
    }

    fn is_taken_over_from(
        &self,
        observer: Observer,
        task: &Unconfirmed,
        known: &StoredTask<TaskOutline>,
    ) -> bool {
        let attempts = &task.attempts;
        if self.other_owner(&known.task).is_none() && observer.continues(known.run) {
            return false;
        }
        // A lookup may see the end of a task that waits, which nobody follows. Whoever writes it publishes it.
        let has_seen_end =
            observer.is_lookup && task.record.state.is_final() && known.task.state.awaits_caller();
        // The record of a new task may be that of an earlier one with the same id, but it does not change.
        let is_changed = observer.takeover == Takeover::New
            && !attempts.is_empty()
            && !attempts.iter().any(|attempt| attempt.base == Some(known.nonce));
        !has_seen_end && (is_changed || !observer.takeover.is_from(known.task.follow_up.as_ref()))
    }

    /// Keeps a change until the store confirms it. Returns whether there was room.
    fn keep(&self, agent: &Arc<str>, id: &str, task: Unconfirmed) -> bool {
        if !self.counts_unconfirmed(agent, id, &task) {
            return true;
        }
        let lifetime = task.record.lifetime(None, task.observer);
        let (caller, of_reply) = (task.record.caller.clone(), reply::allocated(&task.record.reply));
        let local = LocalTask::Unconfirmed(Arc::new(task));
        let is_kept = self.put_local(agent, id, &caller, local, of_reply, lifetime);
        if is_kept {
            self.unconfirmed.lock().unwrap_or_else(PoisonError::into_inner).insert(RecordKey::new(agent, id));
        }
        is_kept
    }

    /// The store has decided about a change.
    fn settle(&self, agent: &Arc<str>, id: &str, task: &Unconfirmed, written: &Written) {
        let (outline, lifetime) = match written.result {
            // This process no longer decides about the task.
            RecordResult::TakenOver if self.get_local(agent, id).is_none() => return,
            RecordResult::TakenOver => (None, Lifetime::evictable(task.record.expires_in())),
            RecordResult::Written { .. } | RecordResult::Kept => (written.outline.clone(), written.lifetime),
        };
        self.put_local(agent, id, &task.record.caller, LocalTask::InStore(outline), 0, lifetime);
    }

    /// The tasks of an agent with a change that the store has not confirmed. None while the store is unavailable.
    pub(crate) fn unconfirmed(&self, agent: &Arc<str>) -> Vec<String> {
        if !self.store.is_available() {
            return Vec::new();
        }
        let unconfirmed = self.unconfirmed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ids: Vec<_> =
            unconfirmed.iter().filter(|key| key.agent == *agent).map(|key| key.id.clone()).collect();
        ids.sort();
        ids
    }

    /// Writes a change that the store has not confirmed. The caller of this function has the [turn](Self::turn), and
    /// publishes the change.
    pub(crate) async fn write_late(&self, agent: &Arc<str>, id: &str) -> Option<LateWrite> {
        self.unconfirmed.lock().unwrap_or_else(PoisonError::into_inner).remove(&RecordKey::new(agent, id));
        let Some(LocalTask::Unconfirmed(task)) = self.get_local(agent, id) else { return None };
        let mut writing = Writing { tasks: self, agent, id, task: Some(Unconfirmed::clone(&task)) };
        drop(task);
        // After an error, it is tried again later.
        let written = writing.write().await.ok()?;
        let task = writing.task.take()?;
        self.settle(agent, id, &task, &written);
        let TaskRecord { state, reply, follow_up, caller, .. } = task.record;
        let id_of = |follow_up: Option<FollowUp>| follow_up.map(|follow_up| follow_up.id);
        let (update, obsolete) = match written.result {
            RecordResult::Written { previous, update } => {
                let ended =
                    previous.filter(|_| state.is_final()).and_then(|previous| id_of(previous.follow_up));
                (update.map(|revision| (revision, reply)), ended)
            }
            RecordResult::Kept | RecordResult::TakenOver => (None, id_of(follow_up)),
        };
        let updates = self.take_landed(agent, id).into_iter().chain(update).collect();
        Some(LateWrite { updates, caller, obsolete })
    }

    async fn write_to_store(
        &self,
        agent: &Arc<str>,
        id: &str,
        task: &mut Unconfirmed,
    ) -> Result<Written, ActionError> {
        let (nonce, own, observer) = (task.nonce, self.peers.instance(), task.observer);
        let local = self.get_local(agent, id);
        // A task that this process has not put into the store is most probably not there.
        let is_new = matches!(&local, None | Some(LocalTask::Ended { .. } | LocalTask::Record(_)));
        let local = local.filter(|_| is_new).and_then(|local| local.outline());
        let mut lifetime = task.record.lifetime(local.as_ref(), observer);
        let mut outline = None;
        let key = RecordKey::new(agent, id).of_caller(&task.record.caller);
        let is_first_attempt = task.attempts.is_empty();
        let mut replaced_attempts = Replaced::default();
        let decide = |known: Option<StoredTask<TaskOutline>>| {
            let base = known.as_ref().map(|known| known.nonce);
            let is_foreign = known.as_ref().is_some_and(|known| self.other_owner(&known.task).is_some());
            let replaced = match &known {
                Some(known) if is_foreign => known.replaced.followed_by(known.nonce),
                Some(known) => known.replaced.clone(),
                None => Replaced::default(),
            };
            let run = match (&known, observer.is_lookup) {
                (Some(known), true) if !is_foreign => known.run,
                _ => observer.run,
            };
            let landed = task.attempts.iter().find(|attempt| Some(attempt.nonce) == base);
            let previous = match (landed, known) {
                (Some(landed), _) if landed.nonce == nonce => {
                    outline.clone_from(&landed.outline);
                    let (previous, update) = (landed.previous.clone(), landed.update);
                    return Ok(Change::Keep(RecordResult::Written { previous, update }));
                }
                // The change that this attempt made is not published.
                (Some(landed), _) => landed.previous.as_deref().cloned(),
                (None, Some(stored)) => {
                    let new = &task.record;
                    let is_new_task = is_first_attempt && observer.takeover == Takeover::New;
                    let is_taken_over = !is_new_task && self.is_taken_over(task, &stored);
                    replaced_attempts = stored.replaced;
                    let known = stored.task;
                    if is_taken_over
                        || (self.store.is_shared()
                            && Unconfirmed::is_for_other_request(new, &known, observer))
                    {
                        return Ok(Change::Keep(RecordResult::TakenOver));
                    }
                    if known.takes_precedence_over(new, observer) {
                        return Ok(Change::Keep(RecordResult::Kept));
                    }
                    Some(known)
                }
                (None, None) => local.clone(),
            };
            lifetime = task.record.lifetime(previous.as_ref(), observer);
            let record = task.record.clone();
            let mut record = TaskRecord { reply: for_storage(record.reply), owner: own, ..record };
            record.is_submitted |= previous.as_ref().is_some_and(|previous| previous.is_submitted);
            // A lookup does not know where the call is logged. A new task with the same id is logged elsewhere.
            if record.run.is_none() && observer.takeover != Takeover::New {
                record.run = previous.as_ref().and_then(|previous| previous.run.clone());
            }
            let update = next_revision(&mut record, previous.as_ref());
            let previous = previous.map(Box::new);
            let is_shared = record.is_shared();
            outline = is_shared.then(|| Arc::new(record.outline()));
            let (reply, outline) = (task.record.reply.clone(), outline.clone());
            task.add_attempt(Attempt { nonce, base, previous: previous.clone(), update, reply, outline });
            let result = RecordResult::Written { previous, update };
            let is_new_record = base.is_none() && observer.takeover == Takeover::New;
            let stored = StoredTask { task: record, nonce, replaced, run };
            // Nobody waits for the record of a call that only runs for long. A call that has just asked its first question
            // does not wait either: the question is in the store, and an answer asks this replica for the task until the
            // record is there, too.
            let is_first_question = is_new_record && !stored.task.is_submitted && self.store.is_available();
            Ok(match stored.task.is_awaited() && !is_first_question {
                true => Change::Write(stored, lifetime, result),
                false => Change::WriteBehind(stored, lifetime, result),
            })
        };
        let assumption = match is_new && !observer.is_lookup {
            true => Assumption::Absent,
            false => Assumption::Nothing,
        };
        let result = self.records.update_with(&key, assumption, Durability::Shared, decide).await;
        self.add_landed(&key, task, &replaced_attempts);
        Ok(Written { result: result?, outline, lifetime })
    }

    /// Adopts the task of a replica that is gone: this process follows it from now on. Of several replicas, one succeeds;
    /// it gets the task with its last reply. `nonce` identifies the adoption: after an error, it has to be tried again,
    /// because it may have taken effect. The caller of this function has the [turn](Self::turn).
    pub(crate) async fn adopt(
        &self,
        agent: &Arc<str>,
        id: &str,
        from: InstanceId,
        nonce: Uuid,
    ) -> Result<Option<TaskRecord>, ActionError> {
        let own = self.peers.instance();
        let adopt = |known: Option<StoredTask>| {
            let Some(known) = known else { return Ok(Change::Keep(None)) };
            // An earlier attempt of this write was stored after all.
            if known.nonce == nonce {
                return Ok(Change::Keep(Some(known.task)));
            }
            if known.task.owner != from || !known.task.is_adoptable() {
                return Ok(Change::Keep(None));
            }
            let task = TaskRecord { owner: own, ..known.task };
            let lifetime = Lifetime { ttl: task.expires_in(), protected_for: task.open_for };
            let (adopted, replaced) = (Some(task.clone()), known.replaced.followed_by(known.nonce));
            Ok(Change::Write(StoredTask { task, nonce, replaced, run: 0 }, lifetime, adopted))
        };
        let adopted = self.records.update(&RecordKey::new(agent, id), adopt).await?;
        if let Some(task) = &adopted {
            let lifetime = Lifetime { ttl: task.expires_in(), protected_for: task.open_for };
            let outline = Arc::new(task.outline());
            self.put_local(agent, id, &task.caller, LocalTask::InStore(Some(outline)), 0, lifetime);
        }
        Ok(adopted)
    }

    /// How many tasks wait to be written.
    #[cfg(test)]
    pub(in crate::state) fn waiting(&self) -> usize {
        self.unconfirmed.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
