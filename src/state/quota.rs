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
//! # Callers
//!
//! Within an agent's share, all callers of a tenant together may hold at most as much of what cannot be evicted as is still
//! free ([`AgentQuota::is_fair`]). So one tenant alone takes at most a half, two of them a third each, and there is always room
//! for another one. In the same way, one caller leaves room for others of its tenant: alone, it takes at most a third.
//! Callers within the account of the bridge share one identity, and may take everything as long as no
//! verified caller has called the agent, and three quarters from then on. An answer is measured by the calls of its caller
//! and its tenant in flight only, because it ends a question. What can be evicted goes first at the tenant, and its caller,
//! that holds the most (`table::holders`).
//!
//! # Kinds of calls
//!
//! Not every call may take the last of the room ([`CallKind`]), because what runs or waits is never evicted:
//!
//! - Submitted tasks may run for days, so they leave a quarter, in which other calls still run.
//! - Any call may end in a question that stays open for hours, so questions can fill the rest, and then new calls are
//!   `busy`. The last eighth is for answers, which end questions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::RecordKind;
use crate::caller::Caller;
use crate::reply::error::{ActionError, Code};

/// The share of an agent, however many agents there are.
const MIN_SHARE: usize = 2 << 20;
/// Bytes that a call reserves of each kind in [`RESERVED_KINDS`].
pub(super) const SMALL_ENTRY: usize = 1536;
/// Bytes that a call of a verified caller reserves in addition: it may be the first of that caller and of its tenant.
const NEW_CALLER: usize = 1024;
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

    /// Whether calls reserve room for entries of this kind.
    pub(super) fn is_reserved(self) -> bool {
        RESERVED_KINDS.contains(&self)
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

/// The error of a caller that has used up its share of a bucket.
pub(super) fn share_refusal(kind: QuotaKind) -> ActionError {
    let (_, what, _) = kind.row();
    let message = format!(
        "this caller, or its account, has used up its share of the JetStream bucket for {what}; it becomes free as they end and \
         expire, so try again later, or ask the operator for a larger bucket"
    );
    ActionError::new(Code::Busy, message)
}

/// The error of a request whose record a full bucket does not take.
pub(super) fn full_bucket(kind: QuotaKind) -> ActionError {
    let (_, what, _) = kind.row();
    let message = format!(
        "the JetStream bucket for {what} is full; try again later, or ask the operator for a larger bucket"
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
            calls: CallCounts::default(),
            calls_of_verified: CallCounts::default(),
            has_verified_callers: AtomicBool::new(false),
            callers: Mutex::default(),
            tenants: Mutex::default(),
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
    calls: CallCounts,
    /// Of these, the calls of verified callers.
    calls_of_verified: CallCounts,
    /// Whether a verified caller has ever called the agent.
    has_verified_callers: AtomicBool,
    /// The verified callers that have calls or entries.
    callers: Mutex<HashMap<Caller, Weak<CallerUsage>>>,
    /// Their tenants.
    tenants: Mutex<HashMap<Caller, Weak<Usage>>>,
}

/// Calls that have reserved room.
#[derive(Debug, Default)]
struct CallCounts {
    all: AtomicUsize,
    /// Of these, the calls whose task is recorded in this process, and counts as an entry. An ordinary call ends before
    /// that.
    recorded_locally: AtomicUsize,
    /// Of these, the calls whose task is recorded in the store as well, because it was submitted.
    recorded_in_store: AtomicUsize,
}

impl CallCounts {
    /// The calls for which room of this kind is reserved.
    fn reserved(&self, kind: QuotaKind) -> usize {
        let calls = self.all.load(Relaxed);
        match kind {
            QuotaKind::Task => calls.saturating_sub(self.recorded_locally.load(Relaxed)),
            QuotaKind::SharedTask => calls.saturating_sub(self.recorded_in_store.load(Relaxed)),
            // Every task may still ask a question.
            _ => calls,
        }
    }
}

/// What a verified caller holds of an agent's share.
#[derive(Debug)]
pub(crate) struct CallerUsage {
    pub(super) own: Usage,
    /// What all callers of its tenant hold.
    pub(super) tenant: Arc<Usage>,
}

/// What a verified caller, or a tenant, holds.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    calls: CallCounts,
    protected_bytes: [AtomicUsize; QuotaKind::ALL.len()],
}

/// Bytes of what cannot be evicted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    /// Of one caller.
    pub own: usize,
    /// Of all callers of its tenant.
    pub of_tenant: usize,
}

/// The usage of a caller or a tenant, which exists as long as someone refers to it.
fn live_usage<T>(usages: &Mutex<HashMap<Caller, Weak<T>>>, who: &Caller, new: impl FnOnce() -> T) -> Arc<T> {
    let mut usages = usages.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(usage) = usages.get(who).and_then(Weak::upgrade) {
        return usage;
    }
    if usages.len() == usages.capacity() {
        // Before it grows: those that hold nothing make room. It grows to at least twice the rest, so this is rare.
        usages.retain(|_, usage| usage.strong_count() > 0);
        let live = usages.len();
        usages.shrink_to(2 * live);
        usages.reserve(live + 1);
    }
    let usage = Arc::new(new());
    usages.insert(who.clone(), Arc::downgrade(&usage));
    usage
}

impl Usage {
    /// The bytes of entries that must not be evicted.
    pub(super) fn protected_bytes(&self, kind: QuotaKind) -> &AtomicUsize {
        let [task, shared_task, follow_up, session, idempotency_key, reply] = &self.protected_bytes;
        match kind {
            QuotaKind::Task => task,
            QuotaKind::SharedTask => shared_task,
            QuotaKind::FollowUp => follow_up,
            QuotaKind::Session => session,
            QuotaKind::IdempotencyKey => idempotency_key,
            QuotaKind::Reply => reply,
        }
    }
}

/// What an agent holds of one kind.
#[derive(Debug, Default)]
pub(crate) struct KindUsage {
    pub entries: AtomicUsize,
    pub bytes: AtomicUsize,
    /// Of these, the bytes of entries that must not be evicted.
    pub protected_bytes: AtomicUsize,
    /// Of these, the bytes of the caller that all unverified callers share.
    pub(super) protected_of_unverified: AtomicUsize,
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
        let of_verified = self.calls_of_verified.reserved(kind) * NEW_CALLER;
        self.calls.reserved(kind) * SMALL_ENTRY + of_verified
    }

    /// What a caller holds; `None` for the caller that all unverified callers share.
    pub(super) fn caller(&self, caller: &Caller) -> Option<Arc<CallerUsage>> {
        if !caller.is_verified() {
            return None;
        }
        self.has_verified_callers.store(true, Relaxed);
        let new = || CallerUsage {
            own: Usage::default(),
            tenant: live_usage(&self.tenants, &caller.tenant(), Usage::default),
        };
        Some(live_usage(&self.callers, caller, new))
    }

    /// Whether a caller and its tenant may hold this much. `total` is what all callers then hold of the `limit`.
    pub(super) fn is_fair(&self, caller: &Caller, held: Held, limit: usize, total: usize) -> bool {
        let Held { own, of_tenant } = held;
        let free = limit.saturating_sub(total);
        match caller.is_verified() {
            true if caller.is_whole_tenant() => of_tenant <= free,
            // Every byte of the tenant counts twice, as held and as no longer free. So a tenant may still take half of
            // `free - of_tenant`, and one of its callers holds at most twice of that.
            true => own <= free.saturating_sub(of_tenant),
            false => !self.has_verified_callers.load(Relaxed) || own <= limit / 4 * 3,
        }
    }

    /// The first kind of entry without room for the reservations of this many more calls of a caller.
    fn full_kind(
        &self,
        call: CallKind,
        caller: &Caller,
        usage: Option<&CallerUsage>,
        more: usize,
    ) -> Option<QuotaKind> {
        RESERVED_KINDS.into_iter().find(|&kind| {
            let limit = call.part_of(self.limit(kind));
            let total =
                self.usage(kind).protected_bytes.load(Relaxed) + self.reserved(kind) + more * SMALL_ENTRY;
            let held = |calls: usize, protected: usize| {
                let protected = if call == CallKind::Answer { 0 } else { protected };
                protected + (calls + more) * SMALL_ENTRY
            };
            let of =
                |usage: &Usage| held(usage.calls.reserved(kind), usage.protected_bytes(kind).load(Relaxed));
            let held = match usage {
                Some(usage) => Held { own: of(&usage.own), of_tenant: of(&usage.tenant) },
                None => {
                    let of_verified = self.calls_of_verified.reserved(kind);
                    let calls = self.calls.reserved(kind).saturating_sub(of_verified);
                    let own = held(calls, self.protected_of_unverified(kind));
                    Held { own, of_tenant: own }
                }
            };
            total > limit || !self.is_fair(caller, held, limit, total)
        })
    }

    fn protected_of_unverified(&self, kind: QuotaKind) -> usize {
        self.usage(kind).protected_of_unverified.load(Relaxed)
    }

    pub(super) fn has_room_for(&self, call: CallKind, caller: &Caller) -> bool {
        self.full_kind(call, caller, self.caller(caller).as_deref(), 1).is_none()
    }

    /// Reserves room for what a call may have to record.
    pub(super) fn reserve(
        self: &Arc<Self>,
        call: CallKind,
        caller: &Caller,
    ) -> Result<ReservedRoom, ActionError> {
        let room = ReservedRoom {
            quota: Arc::clone(self),
            caller: self.caller(caller),
            is_recorded_locally: false,
            is_recorded_in_store: false,
        };
        room.each_count(|counts| counts.all.fetch_add(1, Relaxed));
        match self.full_kind(call, caller, room.caller.as_deref(), 0) {
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
    /// The caller, if it is verified.
    caller: Option<Arc<CallerUsage>>,
    is_recorded_locally: bool,
    is_recorded_in_store: bool,
}

impl ReservedRoom {
    /// Changes all counts to which the call belongs.
    fn each_count(&self, change: impl Fn(&CallCounts) -> usize) {
        change(&self.quota.calls);
        if let Some(caller) = &self.caller {
            change(&self.quota.calls_of_verified);
            change(&caller.own.calls);
            change(&caller.tenant.calls);
        }
    }

    /// The running task of the call is recorded: from now on its record counts. Room remains reserved for a question,
    /// and, unless the task is submitted and so is in the store, for the task that waits for the answer.
    pub(crate) fn mark_recorded(&mut self, is_submitted: bool) {
        if !std::mem::replace(&mut self.is_recorded_locally, true) {
            self.each_count(|counts| counts.recorded_locally.fetch_add(1, Relaxed));
        }
        if is_submitted && !std::mem::replace(&mut self.is_recorded_in_store, true) {
            self.each_count(|counts| counts.recorded_in_store.fetch_add(1, Relaxed));
        }
    }
}

impl Drop for ReservedRoom {
    fn drop(&mut self) {
        if self.is_recorded_locally {
            self.each_count(|counts| counts.recorded_locally.fetch_sub(1, Relaxed));
        }
        if self.is_recorded_in_store {
            self.each_count(|counts| counts.recorded_in_store.fetch_sub(1, Relaxed));
        }
        self.each_count(|counts| counts.all.fetch_sub(1, Relaxed));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    static SHARED: LazyLock<Caller> = LazyLock::new(Caller::default);

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
        let reserve = || busy.reserve(CallKind::Call, &SHARED);
        let mut calls: Vec<_> = std::iter::from_fn(|| reserve().ok()).collect();
        assert_eq!(calls.len(), MIN_SHARE / 16 * 3 / SMALL_ENTRY / 8 * 7);
        let refused = reserve().unwrap_err();
        assert_eq!((refused.info.code, refused.info.retryable), (Code::Busy, true));
        assert!(
            refused.message.contains("`busy`") && refused.message.contains("`limits.memory`"),
            "{refused:?}"
        );
        assert_eq!(busy.usage(QuotaKind::SharedTask).refusals.load(Relaxed), 2);
        drop(quiet.reserve(CallKind::Call, &SHARED).unwrap());
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
        let all = |call| std::iter::from_fn(|| agent.reserve(call, &SHARED).ok()).collect::<Vec<_>>();
        let mut submissions = all(CallKind::Submission);
        submissions.iter_mut().for_each(|room| room.mark_recorded(true));
        let calls = all(CallKind::Call);
        agent.reserve(CallKind::Submission, &SHARED).unwrap_err();
        let answers = all(CallKind::Answer);
        agent.reserve(CallKind::Call, &SHARED).unwrap_err();
        assert_eq!([submissions.len(), calls.len(), answers.len()], [192, 32, 32]);
    }

    #[test]
    fn a_caller_that_leaves_questions_open_does_not_block_answers() {
        let agent = Quotas::new(0).agent(&"a".into());
        let open = CallKind::Call.part_of(agent.limit(QuotaKind::FollowUp));
        agent.usage(QuotaKind::FollowUp).protected_bytes.store(open, Relaxed);
        agent.reserve(CallKind::Submission, &SHARED).unwrap_err();
        agent.reserve(CallKind::Call, &SHARED).unwrap_err();
        drop(agent.reserve(CallKind::Answer, &SHARED).unwrap());
    }

    #[test]
    fn a_task_that_is_recorded_reserves_room_only_for_what_it_may_become() {
        let agent = Quotas::new(0).agent(&"a".into());
        let (mut submission, mut call) = (
            agent.reserve(CallKind::Submission, &SHARED).unwrap(),
            agent.reserve(CallKind::Call, &SHARED).unwrap(),
        );
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

    /// All that a caller can reserve.
    fn all(agent: &Arc<AgentQuota>, call: CallKind, caller: &Caller) -> Vec<ReservedRoom> {
        std::iter::from_fn(|| agent.reserve(call, caller).ok()).collect()
    }

    #[test]
    fn a_tenant_leaves_as_much_as_it_takes() {
        let agent = Quotas::new(0).agent(&"a".into());
        let [alice, bob, carol] = ["T", "U", "V"].map(Caller::verified);
        let mut of_alice = all(&agent, CallKind::Call, &alice);
        let of_bob = all(&agent, CallKind::Call, &bob);
        let of_carol = all(&agent, CallKind::Call, &carol);
        let held = [&of_alice, &of_bob, &of_carol].map(Vec::len);
        assert!(held[0] > 80 && held[1] > 30 && held[2] > 10, "{held:?}");
        agent.reserve(CallKind::Call, &alice).unwrap_err();
        // What a caller returns is for those that hold less.
        of_alice.truncate(held[0] / 2);
        let more = all(&agent, CallKind::Call, &bob);
        assert!(!more.is_empty() && of_bob.len() + more.len() < held[0]);
        // Answers of a caller that holds much still run.
        agent.reserve(CallKind::Call, &bob).unwrap_err();
        drop(agent.reserve(CallKind::Answer, &carol).unwrap());
    }

    #[test]
    fn a_verified_caller_leaves_room_for_others_of_its_tenant() {
        let agent = Quotas::new(0).agent(&"a".into());
        let callers = ["T/alice", "T/bob", "T/carol", "U/dave"].map(Caller::verified);
        let held = callers.each_ref().map(|caller| all(&agent, CallKind::Call, caller));
        let counts = held.each_ref().map(Vec::len);
        assert!(counts[0] > 50 && counts[1] > 15 && counts[2] > 3 && counts[3] > 20, "{counts:?}");
        // Answers of a tenant that holds much still run.
        drop(held);
        let (usage, third) = (agent.caller(&callers[0]).unwrap(), agent.limit(QuotaKind::FollowUp) / 3);
        agent.usage(QuotaKind::FollowUp).protected_bytes.store(third, Relaxed);
        for usage in [&usage.own, &usage.tenant] {
            usage.protected_bytes(QuotaKind::FollowUp).store(third, Relaxed);
        }
        agent.reserve(CallKind::Call, &callers[0]).unwrap_err();
        drop(agent.reserve(CallKind::Answer, &callers[0]).unwrap());
        drop(agent.reserve(CallKind::Call, &callers[1]).unwrap());
    }

    #[test]
    fn one_tenant_with_many_users_leaves_room_for_other_tenants() {
        let agent = Quotas::new(64 << 20).agent(&"a".into());
        let mut held = Vec::new();
        for number in 0..60 {
            held.extend(all(&agent, CallKind::Call, &Caller::verified(&format!("T/user{number}"))));
        }
        let bob = agent.reserve(CallKind::Call, &Caller::verified("U/bob"));
        assert!(bob.is_ok(), "{} calls held: {:?}", held.len(), bob.err().map(|e| e.message));
    }

    #[test]
    fn open_questions_of_a_caller_do_not_block_its_answers_or_other_callers() {
        let agent = Quotas::new(0).agent(&"a".into());
        let [alice, bob] = ["T/alice", "U/bob"].map(Caller::verified);
        let (usage, half) = (agent.caller(&alice).unwrap(), agent.limit(QuotaKind::FollowUp) / 2);
        agent.usage(QuotaKind::FollowUp).protected_bytes.store(half, Relaxed);
        for usage in [&usage.own, &usage.tenant] {
            usage.protected_bytes(QuotaKind::FollowUp).store(half, Relaxed);
        }
        agent.reserve(CallKind::Call, &alice).unwrap_err();
        drop(agent.reserve(CallKind::Answer, &alice).unwrap());
        drop(agent.reserve(CallKind::Call, &bob).unwrap());
        drop(agent.reserve(CallKind::Call, &SHARED).unwrap());
    }

    #[test]
    fn unverified_callers_leave_room_once_there_are_verified_ones() {
        let agent = Quotas::new(0).agent(&"a".into());
        let alone = all(&agent, CallKind::Call, &SHARED).len();
        let alice = Caller::verified("T/alice");
        drop(agent.reserve(CallKind::Call, &alice));
        let shared = all(&agent, CallKind::Call, &SHARED);
        assert!((alone / 2..alone * 4 / 5).contains(&shared.len()), "{} of {alone}", shared.len());
        assert!(all(&agent, CallKind::Call, &alice).len() > 10);
    }

    #[test]
    fn callers_that_hold_nothing_take_no_memory() {
        let agent = Quotas::new(0).agent(&"a".into());
        let kept = agent.caller(&Caller::verified("kept")).unwrap();
        kept.own.protected_bytes(QuotaKind::Task).store(7, Relaxed);
        for number in 0..100_000 {
            drop(agent.reserve(CallKind::Call, &Caller::verified(&number.to_string())).unwrap());
        }
        assert!(agent.callers.lock().unwrap().capacity() < 64);
        assert!(agent.tenants.lock().unwrap().capacity() < 64);
        let again = agent.caller(&Caller::verified("kept")).unwrap();
        assert_eq!(again.own.protected_bytes(QuotaKind::Task).load(Relaxed), 7);
    }
}
