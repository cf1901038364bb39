//! How much state each agent may hold.
//!
//! Three sixteenths of `limits.memory` are for state. Every agent has an equal and fixed share of them, and within its share a
//! fixed part for each [kind](QuotaKind) of entry. So the load of one agent never evicts or refuses the entries of
//! another one, and large replies of an agent never evict its idempotency keys. An agent that was removed by a reload
//! has its share until its last entry has expired.
//!
//! # Reservations
//!
//! A call [reserves](AgentQuota::reserve) room for its task and for a question before it reaches the agent. If there
//! is none, the call is `busy` and the agent does not run. So the bridge can always record what the agent has begun:
//! at least its state, if there is no room for its content. The state takes no more than [`SMALL_ENTRY`]. Only an agent
//! with very long ids exceeds that; a task that then cannot be recorded is canceled. Once a running task is recorded, its
//! record counts in place of the reservation.
//!
//! Not every call may take the last of the room ([`CallKind`]), because what runs or waits is never evicted:
//!
//! - Submitted tasks may run for days, so they leave a quarter, in which other calls still run.
//! - Any call may end in a question that stays open for hours, so questions can fill the rest, and then new calls are
//!   `busy`. The last eighth is for answers, which end questions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::RecordKind;
use crate::reply::error::{ActionError, Code};

/// The share of an agent, however many agents there are.
const MIN_SHARE: usize = 2 << 20;
/// Bytes that a call reserves of each kind in [`RESERVED_KINDS`].
pub(super) const SMALL_ENTRY: usize = 1536;
/// The kinds of entry that a call may need: for its task, and for a question.
const RESERVED_KINDS: [QuotaKind; 3] = [QuotaKind::Task, QuotaKind::SharedTask, QuotaKind::FollowUp];

/// The room for each kind of entry has this many parts, of which a [`CallKind`] may take some.
const PARTS: usize = 8;

/// How much of an agent's room a call may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// A new task in mode `submit`.
    Submission,
    /// A new task in another mode, or an answer whose task goes on after the reply.
    Call,
    /// An answer in another mode.
    Answer,
}

impl CallKind {
    /// How much of the room for entries of one kind it may take.
    fn part_of(self, limit: usize) -> usize {
        let parts = match self {
            Self::Submission => 6,
            Self::Call => 7,
            Self::Answer => PARTS,
        };
        limit / PARTS * parts
    }
}

/// What has a quota of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuotaKind {
    /// Tasks that only this process knows.
    Task,
    /// Tasks in the store: submitted ones, and those that wait for an answer.
    SharedTask,
    FollowUp,
    Session,
    IdempotencyKey,
    Reply,
}

impl QuotaKind {
    pub(crate) const ALL: [Self; 6] =
        [Self::Task, Self::SharedTask, Self::FollowUp, Self::Session, Self::IdempotencyKey, Self::Reply];

    /// The label in metrics, the name in messages, and the part of an agent's share, in sixteenths.
    const fn row(self) -> (&'static str, &'static str, usize) {
        match self {
            Self::Task => ("task", "running tasks", 4),
            Self::SharedTask => ("shared_task", "submitted and waiting tasks", 3),
            Self::FollowUp => ("follow_up", "open questions", 3),
            Self::Session => ("session", "sessions", 1),
            Self::IdempotencyKey => ("idempotency_key", "idempotency keys", 3),
            Self::Reply => ("reply", "replies of requests with an idempotency key", 2),
        }
    }

    pub(crate) const fn label(self) -> &'static str {
        self.row().0
    }
}

impl From<RecordKind> for QuotaKind {
    fn from(kind: RecordKind) -> Self {
        match kind {
            RecordKind::FollowUp => Self::FollowUp,
            RecordKind::Task => Self::SharedTask,
            RecordKind::Session => Self::Session,
            RecordKind::IdempotencyKey => Self::IdempotencyKey,
            RecordKind::Reply => Self::Reply,
        }
    }
}

/// The error of a request for which its agent has no room.
pub(super) fn refusal(agent: &str, kind: QuotaKind) -> ActionError {
    let (_, what, _) = kind.row();
    let message = format!(
        "agent `{agent}` has reached its limit of {what}, which is a share of `limits.memory`; try again"
    );
    ActionError::new(Code::Busy, message)
}

/// The quotas of all agents.
#[derive(Debug)]
pub(crate) struct Quotas {
    total: usize,
    /// The share of each agent, in bytes.
    share: Arc<AtomicUsize>,
    /// The agents that are served or still hold entries.
    agents: Mutex<HashMap<Arc<str>, Weak<AgentQuota>>>,
}

impl Quotas {
    /// `total` is the memory for the state of all agents, in bytes.
    pub(crate) fn new(total: u64) -> Arc<Self> {
        let total = usize::try_from(total).unwrap_or(usize::MAX);
        let share = Arc::new(AtomicUsize::new(total.max(MIN_SHARE)));
        Arc::new(Self { total, share, agents: Mutex::default() })
    }

    /// The quota of an agent. A new agent reduces the shares of the others.
    pub(crate) fn agent(&self, name: &Arc<str>) -> Arc<AgentQuota> {
        let mut agents = self.agents();
        if let Some(quota) = agents.get(name).and_then(Weak::upgrade) {
            return quota;
        }
        let quota = Arc::new(AgentQuota {
            name: Arc::clone(name),
            share: Arc::clone(&self.share),
            kinds: Default::default(),
            calls: AtomicUsize::new(0),
            recorded_locally: AtomicUsize::new(0),
            recorded_in_store: AtomicUsize::new(0),
        });
        agents.insert(Arc::clone(name), Arc::downgrade(&quota));
        self.divide(&mut agents);
        quota
    }

    /// The quota of an agent that is served or still holds entries.
    pub(crate) fn find(&self, name: &str) -> Option<Arc<AgentQuota>> {
        self.agents().get(name).and_then(Weak::upgrade)
    }

    /// Divides the memory between the agents that remain.
    pub(super) fn update_shares(&self) {
        self.divide(&mut self.agents());
    }

    fn divide(&self, agents: &mut HashMap<Arc<str>, Weak<AgentQuota>>) {
        agents.retain(|_, quota| quota.strong_count() > 0);
        self.share.store((self.total / agents.len().max(1)).max(MIN_SHARE), Relaxed);
    }

    fn agents(&self) -> MutexGuard<'_, HashMap<Arc<str>, Weak<AgentQuota>>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The quota of one agent, and what it holds.
#[derive(Debug)]
pub(crate) struct AgentQuota {
    name: Arc<str>,
    share: Arc<AtomicUsize>,
    kinds: [KindUsage; QuotaKind::ALL.len()],
    /// Calls that have reserved room.
    calls: AtomicUsize,
    /// Of these, the calls whose task is recorded in this process, and counts as an entry. An ordinary call ends before
    /// that.
    recorded_locally: AtomicUsize,
    /// Of these, the calls whose task is recorded in the store as well, because it was submitted.
    recorded_in_store: AtomicUsize,
}

/// What an agent holds of one kind.
#[derive(Debug, Default)]
pub(crate) struct KindUsage {
    pub entries: AtomicUsize,
    pub bytes: AtomicUsize,
    /// Of these, the bytes of entries that must not be evicted.
    pub protected_bytes: AtomicUsize,
    pub evictions: AtomicU64,
    pub refusals: AtomicU64,
}

impl AgentQuota {
    pub(crate) fn usage(&self, kind: QuotaKind) -> &KindUsage {
        let [task, shared_task, follow_up, session, idempotency_key, reply] = &self.kinds;
        match kind {
            QuotaKind::Task => task,
            QuotaKind::SharedTask => shared_task,
            QuotaKind::FollowUp => follow_up,
            QuotaKind::Session => session,
            QuotaKind::IdempotencyKey => idempotency_key,
            QuotaKind::Reply => reply,
        }
    }

    /// How many bytes the entries of a kind may take.
    pub(super) fn limit(&self, kind: QuotaKind) -> usize {
        let (_, _, sixteenths) = kind.row();
        self.share.load(Relaxed) / 16 * sixteenths
    }

    pub(super) fn agent(&self) -> &str {
        &self.name
    }

    /// The bytes of a kind that large entries leave free: what calls in flight have reserved, and at least what submitted
    /// tasks leave.
    pub(super) fn free_of_large_entries(&self, kind: QuotaKind) -> usize {
        let limit = self.limit(kind);
        self.reserved(kind).max(limit - CallKind::Submission.part_of(limit))
    }

    /// The bytes of a kind that calls in flight have reserved.
    fn reserved(&self, kind: QuotaKind) -> usize {
        self.reserved_calls(kind) * SMALL_ENTRY
    }

    fn reserved_calls(&self, kind: QuotaKind) -> usize {
        let calls = self.calls.load(Relaxed);
        match kind {
            QuotaKind::Task => calls.saturating_sub(self.recorded_locally.load(Relaxed)),
            QuotaKind::SharedTask => calls.saturating_sub(self.recorded_in_store.load(Relaxed)),
            // Every task may still ask a question.
            _ => calls,
        }
    }

    /// The first kind of entry without room for the reservations of this many more calls.
    fn full_kind(&self, call: CallKind, more: usize) -> Option<QuotaKind> {
        RESERVED_KINDS.into_iter().find(|&kind| {
            let reserved = (self.reserved_calls(kind) + more) * SMALL_ENTRY;
            self.usage(kind).protected_bytes.load(Relaxed) + reserved > call.part_of(self.limit(kind))
        })
    }

    pub(super) fn has_room_for(&self, call: CallKind) -> bool {
        self.full_kind(call, 1).is_none()
    }

    /// Reserves room for what a call may have to record.
    pub(super) fn reserve(self: &Arc<Self>, call: CallKind) -> Result<ReservedRoom, ActionError> {
        self.calls.fetch_add(1, Relaxed);
        let room =
            ReservedRoom { quota: Arc::clone(self), is_recorded_locally: false, is_recorded_in_store: false };
        match self.full_kind(call, 0) {
            None => Ok(room),
            Some(kind) => {
                self.usage(kind).refusals.fetch_add(1, Relaxed);
                Err(refusal(&self.name, kind))
            }
        }
    }
}

/// Room for the task and the question of one call, until it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct ReservedRoom {
    quota: Arc<AgentQuota>,
    is_recorded_locally: bool,
    is_recorded_in_store: bool,
}

impl ReservedRoom {
    /// The running task of the call is recorded: from now on its record counts. Room remains reserved for a question,
    /// and, unless the task is submitted and so is in the store, for the task that waits for the answer.
    pub(crate) fn mark_recorded(&mut self, is_submitted: bool) {
        if !std::mem::replace(&mut self.is_recorded_locally, true) {
            self.quota.recorded_locally.fetch_add(1, Relaxed);
        }
        if is_submitted && !std::mem::replace(&mut self.is_recorded_in_store, true) {
            self.quota.recorded_in_store.fetch_add(1, Relaxed);
        }
    }
}

impl Drop for ReservedRoom {
    fn drop(&mut self) {
        if self.is_recorded_locally {
            self.quota.recorded_locally.fetch_sub(1, Relaxed);
        }
        if self.is_recorded_in_store {
            self.quota.recorded_in_store.fetch_sub(1, Relaxed);
        }
        self.quota.calls.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_all_kinds_are_the_whole_share() {
        assert_eq!(QuotaKind::ALL.map(|kind| kind.row().2).iter().sum::<usize>(), 16);
        let agent = Quotas::new(16 << 20).agent(&"a".into());
        assert_eq!(QuotaKind::ALL.map(|kind| agent.limit(kind)).iter().sum::<usize>(), 16 << 20);
    }

    #[test]
    fn agents_have_equal_shares_until_they_are_gone() {
        let quotas = Quotas::new(64 << 20);
        let names = || (0..4).map(|number| Arc::from(number.to_string()));
        let agents: Vec<_> = names().map(|name| quotas.agent(&name)).collect();
        let again: Vec<_> = names().map(|name| quotas.agent(&name)).collect();
        assert_eq!(agents.iter().map(|agent| agent.limit(QuotaKind::Session)).sum::<usize>(), 4 << 20);
        drop(agents);
        quotas.update_shares();
        assert_eq!(again[0].limit(QuotaKind::Session), 1 << 20);
        let [last, ..] = <[_; 4]>::try_from(again).unwrap();
        quotas.update_shares();
        assert_eq!(last.limit(QuotaKind::Session), 4 << 20);
        let many: Vec<_> = (0..500).map(|number| quotas.agent(&number.to_string().into())).collect();
        assert_eq!(many[0].limit(QuotaKind::Session), MIN_SHARE / 16);
    }

    #[test]
    fn a_call_without_room_for_its_task_or_a_question_is_refused() {
        let quotas = Quotas::new(0);
        let (busy, quiet) = (quotas.agent(&"busy".into()), quotas.agent(&"quiet".into()));
        let reserve = || busy.reserve(CallKind::Call);
        let mut calls: Vec<_> = std::iter::from_fn(|| reserve().ok()).collect();
        assert_eq!(calls.len(), MIN_SHARE / 16 * 3 / SMALL_ENTRY / 8 * 7);
        let refused = reserve().unwrap_err();
        assert_eq!((refused.info.code, refused.info.retryable), (Code::Busy, true));
        assert!(
            refused.message.contains("`busy`") && refused.message.contains("`limits.memory`"),
            "{refused:?}"
        );
        assert_eq!(busy.usage(QuotaKind::SharedTask).refusals.load(Relaxed), 2);
        drop(quiet.reserve(CallKind::Call).unwrap());
        calls.pop();
        busy.usage(QuotaKind::FollowUp).protected_bytes.store(SMALL_ENTRY, Relaxed);
        let refused = reserve().unwrap_err();
        assert!(refused.message.contains("open questions"), "{refused:?}");
        calls.pop();
        drop(reserve().unwrap());
    }

    #[test]
    fn submissions_leave_room_for_calls_and_calls_for_answers() {
        let agent = Quotas::new(0).agent(&"a".into());
        let all = |call| std::iter::from_fn(|| agent.reserve(call).ok()).collect::<Vec<_>>();
        let mut submissions = all(CallKind::Submission);
        submissions.iter_mut().for_each(|room| room.mark_recorded(true));
        let calls = all(CallKind::Call);
        agent.reserve(CallKind::Submission).unwrap_err();
        let answers = all(CallKind::Answer);
        agent.reserve(CallKind::Call).unwrap_err();
        assert_eq!([submissions.len(), calls.len(), answers.len()], [192, 32, 32]);
    }

    #[test]
    fn a_caller_that_leaves_questions_open_does_not_block_answers() {
        let agent = Quotas::new(0).agent(&"a".into());
        let open = CallKind::Call.part_of(agent.limit(QuotaKind::FollowUp));
        agent.usage(QuotaKind::FollowUp).protected_bytes.store(open, Relaxed);
        agent.reserve(CallKind::Submission).unwrap_err();
        agent.reserve(CallKind::Call).unwrap_err();
        drop(agent.reserve(CallKind::Answer).unwrap());
    }

    #[test]
    fn a_task_that_is_recorded_reserves_room_only_for_what_it_may_become() {
        let agent = Quotas::new(0).agent(&"a".into());
        let (mut submission, mut call) =
            (agent.reserve(CallKind::Submission).unwrap(), agent.reserve(CallKind::Call).unwrap());
        let reserved = || RESERVED_KINDS.map(|kind| agent.reserved(kind) / SMALL_ENTRY);
        assert_eq!(reserved(), [2, 2, 2]);
        for _ in 0..2 {
            submission.mark_recorded(true);
            assert_eq!(reserved(), [1, 1, 2]);
        }
        for _ in 0..2 {
            call.mark_recorded(false);
            assert_eq!(reserved(), [0, 1, 2]);
        }
        drop(submission);
        assert_eq!(reserved(), [0, 1, 1]);
        drop(call);
        assert_eq!(reserved(), [0, 0, 0]);
    }
}
