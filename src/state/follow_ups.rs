//! Follow-up ids: the caller answers an agent's question under such an id.
//!
//! ```text
//! pending ──claim──> answering ──send──> sending ──> used
//!    ^                   │                  │
//!    └──── released ─────┴─── not taken ────┘        pending ──> expired
//! ```
//!
//! A claim is one conditional write, so of several concurrent answers exactly one wins, at whichever replicas they
//! arrive. The claim becomes `sending` before the first byte of the answer leaves the bridge. So when a replica dies,
//! the others know what a claim of it means: an id that it left in `answering` is valid again, because nothing was sent;
//! one that it left in `sending` is used, because the agent may have the answer. For a day after its end an id still
//! says whether it was used or has expired.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use futures_util::{Stream, TryStreamExt as _};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::clock::wall_time;
use super::peers::{ClaimStatus, Holder, InstanceId, Liveness, Peers};
use super::records::{Assumption, Change, Record, TypedRecords};
use super::run_link::RunLink;
use super::tasks::TaskOutline;
use super::{Durability, Lifetime, RecordKey, RecordKind, StateStore, StoreUnavailable};
use crate::caller::Caller;
use crate::failpoint;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::FollowUp;
use crate::text::{rfc3339_to_second, unix_millis};

/// How long the record of an expired id remains.
const TOMBSTONE_TTL: Duration = Duration::from_secs(24 * 3600);
/// A request that has read a task at the agent may need this long to record it.
const RECENTLY_ANSWERED: Duration = Duration::from_secs(15);
/// Attempts of a claim that meets the claims of dead replicas.
const MAX_ATTEMPTS: u32 = 4;
/// Initial and maximum pause between attempts to write the end of a claim, and their number: about half an hour.
const END_RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));
const MAX_END_ATTEMPTS: u32 = 64;
/// Maximum number of open questions of an agent whose expiry this process watches.
const MAX_WATCHED: usize = 100_000;

/// How soon an expired question is looked at again that is being answered, and for how long, in milliseconds.
const CLAIMED_RETRY_MS: u64 = 5_000;
const MAX_CLAIMED_MS: u64 = 3_600_000;

/// The question of a task that waits for its answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct OpenQuestion {
    pub task_id: String,
    pub context_id: Option<String>,
    /// The skill that started the task.
    pub skill: Option<Arc<str>>,
    /// Media types that the caller accepts.
    pub output_modes: Arc<[String]>,
    /// Distinguishes this question from others of the same task.
    pub fingerprint: String,
    /// Who may answer.
    #[serde(default, skip_serializing_if = "Caller::is_shared")]
    pub caller: Caller,
    /// Whether only a process of the replica that asked knows the task, because that replica launched the agent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_local: bool,
    /// Where the call that asked is logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunLink>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FollowUpRecord {
    pub question: OpenQuestion,
    /// The replica that asked, or that has adopted the question.
    owner: InstanceId,
    expires_ms: u64,
    pub state: FollowUpState,
    /// When the store took the record, if it was read.
    #[serde(skip)]
    written_at: Option<SystemTime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub(crate) enum FollowUpState {
    Pending,
    /// Claimed, and nothing has been sent.
    Answering {
        by: InstanceId,
        nonce: Uuid,
    },
    /// Claimed, and the agent may have received the answer.
    Sending {
        by: InstanceId,
        nonce: Uuid,
    },
    Used,
    /// Its time is over, or its task ended without the answer.
    Expired,
}

impl FollowUpState {
    fn is_claimed(self) -> bool {
        matches!(self, Self::Answering { .. } | Self::Sending { .. })
    }

    fn is_claimed_with(self, own: Uuid) -> bool {
        matches!(self, Self::Answering { nonce, .. } | Self::Sending { nonce, .. } if nonce == own)
    }
}

impl Record for FollowUpRecord {
    fn caller(&self) -> Option<&Caller> {
        Some(&self.question.caller)
    }
}

impl FollowUpRecord {
    /// Whether the id stands for the question that a request has seen, so that the question needs no other id.
    pub(crate) fn is_for(&self, fingerprint: &str) -> bool {
        let has_just_changed = || {
            let age = self.written_at.map(|at| wall_time().duration_since(at).unwrap_or_default());
            age.is_some_and(|age| age < RECENTLY_ANSWERED)
        };
        self.question.fingerprint == fingerprint
            && match self.state {
                FollowUpState::Pending | FollowUpState::Answering { .. } | FollowUpState::Sending { .. } => {
                    true
                }
                // The request may have seen the task before the agent took the answer.
                FollowUpState::Used => has_just_changed(),
                FollowUpState::Expired => false,
            }
    }

    /// Whether the time to answer is over.
    pub(crate) fn is_over(&self) -> bool {
        self.expires_ms <= now_ms()
    }

    fn state_now(&self) -> FollowUpState {
        match self.state {
            FollowUpState::Pending if self.is_over() => FollowUpState::Expired,
            state => state,
        }
    }

    /// How long the record remains if it is written now. An open question and one that is being answered are never
    /// evicted.
    fn lifetime(&self) -> Lifetime {
        let open_for = Duration::from_millis(self.expires_ms.saturating_sub(now_ms()));
        let ttl = open_for + failpoint::retention(TOMBSTONE_TTL);
        match self.state {
            FollowUpState::Pending => Lifetime { ttl, protected_for: open_for },
            FollowUpState::Answering { .. } | FollowUpState::Sending { .. } => Lifetime::protected(ttl),
            FollowUpState::Used | FollowUpState::Expired => Lifetime::evictable(ttl),
        }
    }

    fn with_state<T>(self, state: FollowUpState, result: T) -> Change<Self, T> {
        let record = Self { state, ..self };
        let lifetime = record.lifetime();
        Change::Write(record, lifetime, result)
    }
}

#[derive(Debug)]
pub(crate) struct FollowUps {
    records: TypedRecords<FollowUpRecord>,
    peers: Arc<dyn Peers>,
    claims: Arc<HeldClaims>,
    /// The open questions of this process, by agent and the time of their expiry.
    expiries: Mutex<Expiries>,
}

/// For each agent, when its questions expire.
type Expiries = HashMap<Arc<str>, BTreeSet<(u64, Uuid)>>;

/// The claims of this process by their nonces, and whether the answer was released. Other replicas ask for them.
#[derive(Debug, Default)]
struct HeldClaims(Mutex<HashMap<Uuid, ClaimStatus>>);

impl HeldClaims {
    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, ClaimStatus>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A follow-up id that has to be stored before the caller gets it.
#[derive(Debug)]
#[must_use]
pub(crate) struct NewFollowUp {
    pub follow_up: FollowUp,
    record: FollowUpRecord,
}

/// Where an id can be answered.
#[derive(Debug)]
pub(crate) enum ClaimResult {
    Claimed(Box<Claim>),
    /// Only this replica can pass the answer to the agent.
    Elsewhere(InstanceId),
}

/// The question of a task whose replica is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdoptedQuestion {
    /// A caller can answer it, or another replica follows the task because it is sending an answer.
    Open,
    /// It may have been answered, or its record was never stored: only the agent knows what the task does.
    Settled,
}

/// A question that waits for an answer, or to which a replica was sending one.
#[derive(Debug, Clone)]
pub(crate) struct UnsettledQuestion {
    /// The follow-up id.
    pub id: Uuid,
    pub task_id: String,
    fingerprint: String,
    /// The replica that asked, or that has adopted the question.
    pub owner: InstanceId,
    /// The replica that was sending an answer.
    pub sender: Option<InstanceId>,
}

/// What a claim finds.
enum Decision {
    Claimed(Box<OpenQuestion>),
    Elsewhere(InstanceId),
    /// Another request holds a claim; its replica may be dead.
    ClaimedBy(InstanceId, Uuid),
}

/// What became of a question whose time is over.
enum DueQuestion {
    Expired(Box<OpenQuestion>),
    Claimed,
    Ended,
}

impl FollowUps {
    pub(super) fn new(store: &Arc<dyn StateStore>, peers: &Arc<dyn Peers>) -> Self {
        Self {
            records: TypedRecords::new(store, RecordKind::FollowUp),
            peers: Arc::clone(peers),
            claims: Arc::default(),
            expiries: Mutex::default(),
        }
    }

    /// Makes a new id for a question. [`Self::store`] makes it valid.
    pub(crate) fn prepare(&self, question: OpenQuestion, ttl: Duration) -> NewFollowUp {
        let expires = wall_time() + ttl;
        let follow_up = FollowUp { id: Uuid::new_v4(), expires_at: rfc3339_to_second(expires) };
        let owner = self.peers.instance();
        let expires_ms = unix_millis(expires);
        let record =
            FollowUpRecord { question, owner, expires_ms, state: FollowUpState::Pending, written_at: None };
        NewFollowUp { follow_up, record }
    }

    pub(crate) async fn store(&self, agent: &Arc<str>, new: NewFollowUp) -> Result<(), ActionError> {
        let NewFollowUp { follow_up: FollowUp { id, .. }, record } = new;
        let write = |known: Option<FollowUpRecord>| {
            Ok(match known {
                // The id is unique, so an earlier attempt of this write was stored after all.
                Some(_) => Change::Keep(()),
                None => Change::Write(record.clone(), record.lifetime(), ()),
            })
        };
        let key = key(agent, &id).of_caller(&record.question.caller);
        let mut stored = Err(not_found());
        for _ in 0..MAX_ATTEMPTS {
            stored = self.records.update_with(&key, Assumption::Absent, Durability::Deferrable, write).await;
            // The record can be deferred, so only a read after a conflict fails.
            if !stored.as_ref().is_err_and(|error| error.info.code == Code::StateUnavailable) {
                break;
            }
        }
        stored?;
        self.watch_expiry(agent, id, record.expires_ms);
        Ok(())
    }

    /// Issues a new id for a question.
    #[cfg(test)]
    pub(crate) async fn issue(
        &self,
        agent: &Arc<str>,
        question: OpenQuestion,
        ttl: Duration,
    ) -> Result<FollowUp, ActionError> {
        let new = self.prepare(question, ttl);
        let follow_up = new.follow_up.clone();
        self.store(agent, new).await?;
        Ok(follow_up)
    }

    /// Claims the right to answer. The caller of this function checks whether the task has ended meanwhile.
    pub(crate) async fn claim(
        &self,
        agent: &Arc<str>,
        caller: &Caller,
        id: &str,
    ) -> Result<ClaimResult, ActionError> {
        let id = Uuid::try_parse(id).map_err(|_| not_found())?;
        let key = key(agent, &id);
        let own = self.peers.instance();
        let held = HeldClaim {
            records: self.records.clone(),
            claims: Arc::clone(&self.claims),
            key,
            nonce: Uuid::new_v4(),
            instance: own,
        };
        // Before the claim is written: a replica that sees it may ask at once.
        held.set_status(ClaimStatus::Held);
        // A claim whose holder is dead, has released it, or has ended it otherwise.
        let (mut dead, mut released, mut ended) = (None, None, None);
        let mut is_missing = false;
        for _ in 0..MAX_ATTEMPTS {
            let mut owner = own;
            let decide = |known: Option<FollowUpRecord>| {
                let record = known.filter(|known| known.question.caller == *caller).ok_or_else(not_found)?;
                owner = record.owner;
                let question = Box::new(record.question.clone());
                let claimed = FollowUpState::Answering { by: own, nonce: held.nonce };
                match record.state_now() {
                    // An earlier attempt of this claim was stored after all.
                    state if state.is_claimed_with(held.nonce) => {
                        Ok(Change::Keep(Decision::Claimed(question)))
                    }
                    FollowUpState::Expired => Err(expired()),
                    FollowUpState::Used => Err(used()),
                    _ if record.question.is_local && record.owner != own => {
                        Ok(Change::Keep(Decision::Elsewhere(record.owner)))
                    }
                    FollowUpState::Pending => Ok(record.with_state(claimed, Decision::Claimed(question))),
                    FollowUpState::Answering { nonce, .. } | FollowUpState::Sending { nonce, .. }
                        if released == Some(nonce) =>
                    {
                        Ok(record.with_state(claimed, Decision::Claimed(question)))
                    }
                    FollowUpState::Answering { nonce, .. } if [dead, ended].contains(&Some(nonce)) => {
                        Ok(record.with_state(claimed, Decision::Claimed(question)))
                    }
                    // Whoever adopts the task marks the id as used, and follows the task.
                    FollowUpState::Sending { nonce, .. } if dead == Some(nonce) => Err(may_have_been_sent()),
                    // The end of that answer is about to be written.
                    FollowUpState::Sending { nonce, .. } if ended == Some(nonce) => Err(used()),
                    FollowUpState::Answering { by, nonce } | FollowUpState::Sending { by, nonce } => {
                        Ok(Change::Keep(Decision::ClaimedBy(by, nonce)))
                    }
                }
            };
            match self.records.update(&held.key, decide).await {
                Ok(Decision::Claimed(question)) => {
                    if owner != own {
                        self.peers.record_changed(owner, RecordKind::FollowUp, &held.key);
                    }
                    let claim = Claim { question: *question, owner, held: Some(held) };
                    return Ok(ClaimResult::Claimed(Box::new(claim)));
                }
                Ok(Decision::Elsewhere(owner)) => return Ok(ClaimResult::Elsewhere(owner)),
                Ok(Decision::ClaimedBy(by, nonce)) => match self.holder_state(by, nonce).await? {
                    Some(ClaimStatus::Held) => return Err(used()),
                    Some(ClaimStatus::Released) => released = Some(nonce),
                    Some(ClaimStatus::Ended) => ended = Some(nonce),
                    None => dead = Some(nonce),
                },
                Err(error) => match self.find_elsewhere(&held.key, error).await {
                    // The replica that had the record may have written it since it was not found.
                    Err(error) if error.info.code == Code::NotFound && !is_missing => is_missing = true,
                    found => return found,
                },
            }
        }
        let message = "other answers to this question are still being processed; try again";
        Err(ActionError::new(Code::StateUnavailable, message))
    }

    /// What the holder of a claim does. `None` if it is dead.
    async fn holder_state(&self, by: InstanceId, nonce: Uuid) -> Result<Option<ClaimStatus>, ActionError> {
        let status = match by == self.peers.instance() {
            true => Some(self.claim_status(nonce)),
            false => self.peers.claim_status(by, nonce).await,
        };
        match status {
            Some(status) => Ok(Some(status)),
            None if self.peers.liveness(by).await == Liveness::Dead => Ok(None),
            None => {
                let message =
                    "the replica that claimed this question does not respond; try again in a few seconds";
                Err(ActionError::new(Code::StateUnavailable, message))
            }
        }
    }

    /// An id that is not in the store may be one that a replica could not write yet.
    async fn find_elsewhere(&self, key: &RecordKey, error: ActionError) -> Result<ClaimResult, ActionError> {
        if !matches!(error.info.code, Code::NotFound | Code::StateUnavailable) {
            return Err(error);
        }
        match self.peers.find(RecordKind::FollowUp, key).await {
            Holder::At(holder) => Ok(ClaimResult::Elsewhere(holder)),
            Holder::Nowhere => Err(error),
            Holder::Unknown => Err(Holder::no_answer()),
        }
    }

    /// The replica whose process has the question, if it is another one.
    pub(crate) async fn other_holder(
        &self,
        agent: &Arc<str>,
        caller: &Caller,
        id: &str,
    ) -> Option<InstanceId> {
        let key = key(agent, &Uuid::try_parse(id).ok()?);
        let own = self.peers.instance();
        match self.records.read::<FollowUpRecord>(&key).await {
            Ok(Some(read)) => {
                let FollowUpRecord { question, owner, .. } = read.record;
                (question.is_local && question.caller == *caller && owner != own).then_some(owner)
            }
            Ok(None) | Err(_) => match self.peers.find(RecordKind::FollowUp, &key).await {
                Holder::At(holder) => Some(holder),
                Holder::Nowhere | Holder::Unknown => None,
            },
        }
    }

    /// What this process does with the claim that has this nonce.
    pub(super) fn claim_status(&self, nonce: Uuid) -> ClaimStatus {
        self.claims.lock().get(&nonce).copied().unwrap_or(ClaimStatus::Ended)
    }

    /// Expires a question because its task has reached a final state.
    pub(crate) async fn expire(&self, agent: &Arc<str>, id: &Uuid) -> Result<(), ActionError> {
        let expire = |known: Option<FollowUpRecord>| {
            Ok(match known {
                Some(record) if record.state == FollowUpState::Pending => {
                    record.with_state(FollowUpState::Expired, ())
                }
                _ => Change::Keep(()),
            })
        };
        self.records.update(&key(agent, id), expire).await
    }

    pub(crate) async fn find(
        &self,
        agent: &Arc<str>,
        id: &Uuid,
    ) -> Result<Option<FollowUpRecord>, ActionError> {
        let found = self.records.read::<FollowUpRecord>(&key(agent, id)).await?;
        Ok(found.map(|read| {
            let state = read.record.state_now();
            FollowUpRecord { state, written_at: Some(read.written_at), ..read.record }
        }))
    }

    /// Counts the questions of one agent, or of all, that this process holds and that wait for an answer.
    pub(crate) async fn pending(&self, agent: Option<&Arc<str>>) -> Result<usize, StoreUnavailable> {
        self.records.count(agent, |record| record.state_now() == FollowUpState::Pending).await
    }

    fn expiries(&self) -> MutexGuard<'_, Expiries> {
        self.expiries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch_expiry(&self, agent: &Arc<str>, id: Uuid, expires_ms: u64) {
        let mut expiries = self.expiries();
        let watched = expiries.entry(Arc::clone(agent)).or_default();
        // What is not watched expires all the same; only its task is not canceled at the agent.
        if watched.len() < MAX_WATCHED {
            watched.insert((expires_ms, id));
        }
    }

    /// Marks the questions of an agent whose time is over as expired, and returns those that no other replica has
    /// marked, so that exactly one replica cancels each task. Questions that cannot be marked now are tried again.
    pub(super) async fn take_expired(&self, agent: &Arc<str>) -> Vec<(Uuid, OpenQuestion)> {
        let now = now_ms();
        let due = {
            let mut expiries = self.expiries();
            let Some(watched) = expiries.get_mut(agent) else { return Vec::new() };
            let later = watched.split_off(&(now + 1, Uuid::nil()));
            let due = std::mem::replace(watched, later);
            if watched.is_empty() {
                expiries.remove(agent);
            }
            due
        };
        let mut expired = Vec::new();
        for (expires_ms, id) in due {
            let (own, mut is_written) = (self.peers.instance(), false);
            let mark = |known: Option<FollowUpRecord>| {
                Ok(match known {
                    Some(record) if record.state == FollowUpState::Pending && record.expires_ms <= now => {
                        is_written = true;
                        let question = record.question.clone();
                        record.with_state(FollowUpState::Expired, DueQuestion::Expired(Box::new(question)))
                    }
                    // An earlier attempt of this write was stored after all.
                    Some(record)
                        if record.state == FollowUpState::Expired && is_written && record.owner == own =>
                    {
                        Change::Keep(DueQuestion::Expired(Box::new(record.question)))
                    }
                    Some(record) if record.state.is_claimed() => Change::Keep(DueQuestion::Claimed),
                    _ => Change::Keep(DueQuestion::Ended),
                })
            };
            match self.records.update(&key(agent, &id), mark).await {
                Ok(DueQuestion::Expired(question)) => expired.push((id, *question)),
                // If the agent does not take the answer, the question is open again.
                Ok(DueQuestion::Claimed) if now < expires_ms + MAX_CLAIMED_MS => {
                    self.watch_expiry(agent, id, now + CLAIMED_RETRY_MS);
                }
                Ok(DueQuestion::Claimed | DueQuestion::Ended) => {}
                Err(_) => self.watch_expiry(agent, id, expires_ms),
            }
        }
        expired
    }

    /// Adopts the question of a replica that is gone: this process watches its expiry from now on.
    pub(crate) async fn adopt(
        &self,
        agent: &Arc<str>,
        id: &Uuid,
        from: InstanceId,
    ) -> Result<AdoptedQuestion, ActionError> {
        let (own, key) = (self.peers.instance(), key(agent, id));
        // Another replica may have claimed a question that this process has asked.
        self.records.forget(&key);
        let sender = match self.records.read::<FollowUpRecord>(&key).await?.map(|read| read.record.state) {
            Some(FollowUpState::Sending { by, nonce }) if self.peers.liveness(by).await == Liveness::Dead => {
                Some(nonce)
            }
            _ => None,
        };
        let mut expires_ms = None;
        let adopt = |known: Option<FollowUpRecord>| {
            let Some(record) = known else { return Ok(Change::Keep(AdoptedQuestion::Settled)) };
            Ok(match record.state {
                FollowUpState::Pending | FollowUpState::Answering { .. } => {
                    expires_ms = Some(record.expires_ms);
                    match record.owner == from && record.state == FollowUpState::Pending {
                        true => Self::take_over(record, own, AdoptedQuestion::Open),
                        false => Change::Keep(AdoptedQuestion::Open),
                    }
                }
                // As for a claim: the agent may have received the answer.
                FollowUpState::Sending { nonce, .. } if sender == Some(nonce) => {
                    record.with_state(FollowUpState::Used, AdoptedQuestion::Settled)
                }
                FollowUpState::Sending { .. } => Change::Keep(AdoptedQuestion::Open),
                FollowUpState::Used | FollowUpState::Expired => Change::Keep(AdoptedQuestion::Settled),
            })
        };
        let adopted = self.records.update(&key, adopt).await?;
        if let Some(expires_ms) = expires_ms {
            self.watch_expiry(agent, *id, expires_ms);
        }
        Ok(adopted)
    }

    /// Finds the id of a question that a replica has asked and could not name in the record of the task before it was
    /// gone, among the questions of that task. This process watches its expiry from now on.
    pub(crate) async fn find_open(
        &self,
        agent: &Arc<str>,
        questions: &[UnsettledQuestion],
        fingerprint: &str,
    ) -> Result<Option<FollowUp>, ActionError> {
        let mut open = Vec::new();
        for question in questions.iter().filter(|question| question.fingerprint == fingerprint) {
            // It may have changed since the questions were read.
            let Some(record) = self.find(agent, &question.id).await? else { continue };
            if record.state == FollowUpState::Pending || record.state.is_claimed() {
                open.push((record.expires_ms, question.id, record.owner));
            }
        }
        open.sort_unstable_by_key(|(expires_ms, ..)| std::cmp::Reverse(*expires_ms));
        for (expires_ms, id, owner) in open {
            // A request of a replica that runs may have made the id, and give it up.
            if self.peers.liveness(owner).await == Liveness::Dead {
                self.watch_expiry(agent, id, expires_ms);
                let expires = SystemTime::UNIX_EPOCH + Duration::from_millis(expires_ms);
                return Ok(Some(FollowUp { id, expires_at: rfc3339_to_second(expires) }));
            }
        }
        Ok(None)
    }

    /// The questions of an agent that are not settled.
    pub(crate) fn unsettled<'a>(
        &'a self,
        agent: &'a Arc<str>,
    ) -> impl Stream<Item = Result<UnsettledQuestion, StoreUnavailable>> + Send + 'a {
        self.records.scan(agent).try_filter_map(|(key, record): (RecordKey, FollowUpRecord)| {
            let sender = match record.state {
                FollowUpState::Sending { by, .. } => Some(by),
                _ => None,
            };
            let state = record.state_now();
            let is_unsettled = sender.is_some() || state == FollowUpState::Pending || state.is_claimed();
            let FollowUpRecord { question: OpenQuestion { task_id, fingerprint, .. }, owner, .. } = record;
            let id = Uuid::try_parse(&key.id).ok().filter(|_| is_unsettled);
            std::future::ready(Ok(id.map(|id| UnsettledQuestion { id, task_id, fingerprint, owner, sender })))
        })
    }

    fn take_over<T>(record: FollowUpRecord, owner: InstanceId, result: T) -> Change<FollowUpRecord, T> {
        let record = FollowUpRecord { owner, ..record };
        let lifetime = record.lifetime();
        Change::Write(record, lifetime, result)
    }
}

/// The right to answer, held by exactly one request. When a claim is dropped while it is sent, the id counts as used,
/// because the agent may have received the answer.
#[derive(Debug)]
#[must_use]
pub(crate) struct Claim {
    pub question: OpenQuestion,
    /// The replica that asked, or that has adopted the question.
    owner: InstanceId,
    held: Option<HeldClaim>,
}

#[derive(Debug)]
struct HeldClaim {
    records: TypedRecords<FollowUpRecord>,
    claims: Arc<HeldClaims>,
    key: RecordKey,
    nonce: Uuid,
    instance: InstanceId,
}

/// Records that the answer of a claim is about to be sent.
#[derive(Debug)]
pub(crate) struct ClaimSender {
    records: TypedRecords<FollowUpRecord>,
    key: RecordKey,
    nonce: Uuid,
    instance: InstanceId,
    durability: Durability,
}

impl ClaimSender {
    /// The follow-up id.
    pub(crate) fn id(&self) -> Option<Uuid> {
        Uuid::try_parse(&self.key.id).ok()
    }

    /// The answer is about to be sent. An error means that nothing may be sent: the store is unavailable, or another
    /// replica considered this one dead and has taken the claim.
    pub(crate) async fn mark_sending(&self) -> Result<(), ActionError> {
        let sending = FollowUpState::Sending { by: self.instance, nonce: self.nonce };
        let mark = |known: Option<FollowUpRecord>| match known {
            // The answer is sent again, or an earlier attempt of this write was stored after all.
            Some(record) if record.state == sending => Ok(Change::Keep(())),
            Some(record) if record.state.is_claimed_with(self.nonce) => Ok(record.with_state(sending, ())),
            _ => Err(ActionError::new(
                Code::StateUnavailable,
                "another replica has taken over this question; try again",
            )),
        };
        self.records.update_with(&self.key, Assumption::Nothing, self.durability, mark).await
    }
}

impl Claim {
    /// Whether a task names this id for its question. If it does not, the task has gone on, or asks under another id, or
    /// the record that names the id is not in the store yet.
    pub(crate) fn is_named_in(&self, task: &TaskOutline) -> bool {
        let named = task.follow_up.as_ref().map(|follow_up| follow_up.id.simple().to_string());
        self.held.as_ref().is_some_and(|held| named.is_some_and(|named| named == held.key.id))
    }

    /// The replica that asked, or that has adopted the question.
    pub(crate) fn owner(&self) -> InstanceId {
        self.owner
    }

    /// For the request that sends the answer. If no other replica can know the task, this process decides alone while
    /// the store is unavailable. Otherwise another one may have adopted the task, and given the question another id.
    pub(crate) fn sender(&self, is_only_here: bool) -> Option<ClaimSender> {
        let HeldClaim { records, key, nonce, instance, .. } = self.held.as_ref()?;
        let (records, key, nonce, instance) = (records.clone(), key.clone(), *nonce, *instance);
        let durability = if is_only_here { Durability::Confirmed } else { Durability::Shared };
        Some(ClaimSender { records, key, nonce, instance, durability })
    }

    /// The agent has received the answer, or may have.
    pub(crate) async fn mark_used(self) {
        self.end(FollowUpState::Used).await;
    }

    /// The task ended before the answer was sent.
    pub(crate) async fn mark_expired(self) {
        self.end(FollowUpState::Expired).await;
    }

    /// The answer never reached the agent: the id is valid again.
    pub(crate) async fn release(self) {
        self.end(FollowUpState::Pending).await;
    }

    /// The claim ends even if the request is dropped meanwhile.
    async fn end(mut self, state: FollowUpState) {
        let Some(held) = self.held.take() else { return };
        let end = async move { held.end(state).await };
        match tokio::runtime::Handle::try_current() {
            // An error is a panic, which is logged.
            Ok(runtime) => drop(runtime.spawn(end).await),
            Err(_) => end.await,
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let (Some(held), Ok(runtime)) = (self.held.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { held.abandon().await });
        }
    }
}

impl HeldClaim {
    fn set_status(&self, status: ClaimStatus) {
        self.claims.lock().insert(self.nonce, status);
    }

    /// Ends a claim whose request is gone.
    async fn abandon(self) {
        // The state in the store says whether the answer may have been sent.
        self.set_status(ClaimStatus::Ended);
        let answering = FollowUpState::Answering { by: self.instance, nonce: self.nonce };
        let is_unsent = move |state| state == answering;
        let end = move |state| if is_unsent(state) { FollowUpState::Pending } else { FollowUpState::Used };
        self.write_end(end, Durability::Confirmed).await;
    }

    async fn end(self, state: FollowUpState) {
        if state == FollowUpState::Pending {
            // Until the store has taken the write, a caller who tries again must not be told that the id is used.
            self.set_status(ClaimStatus::Released);
        }
        // Before a release, the store may not have confirmed that the answer is about to be sent. That write may still be
        // under way.
        let durability = match state {
            FollowUpState::Pending => Durability::Confirmed,
            _ => Durability::Behind,
        };
        self.write_end(move |_| state, durability).await;
    }

    /// Writes the end of a claim, in the background if the store does not respond.
    async fn write_end(
        self,
        end: impl Fn(FollowUpState) -> FollowUpState + Send + Sync + 'static,
        durability: Durability,
    ) {
        if self.try_write_end(&end, durability).await {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let (mut pause, max_pause) = END_RETRY;
            for _ in 0..MAX_END_ATTEMPTS {
                tokio::time::sleep(pause).await;
                if self.try_write_end(&end, durability).await {
                    return;
                }
                pause = (pause * 2).min(max_pause);
            }
            tracing::warn!(agent = %self.key.agent, "cannot record the state of a follow-up id");
        });
    }

    async fn try_write_end(
        &self,
        end: &(impl Fn(FollowUpState) -> FollowUpState + Sync),
        durability: Durability,
    ) -> bool {
        let write = |known: Option<FollowUpRecord>| {
            Ok(match known {
                Some(record) if record.state.is_claimed_with(self.nonce) => {
                    let state = end(record.state);
                    record.with_state(state, ())
                }
                _ => Change::Keep(()),
            })
        };
        // No other request writes the record while this one holds the claim.
        let written = self.records.update_with(&self.key, Assumption::Nothing, durability, write).await;
        if let Err(error) = &written {
            tracing::debug!(agent = %self.key.agent, error = error.message, "cannot record the state of a follow-up id yet");
        }
        written.is_ok()
    }
}

impl Drop for HeldClaim {
    /// From now on, a claim with this nonce in the store counts as ended.
    fn drop(&mut self) {
        self.claims.lock().remove(&self.nonce);
    }
}

fn not_found() -> ActionError {
    ActionError::new(Code::NotFound, "this follow-up id is unknown or has been forgotten")
}

fn used() -> ActionError {
    ActionError::new(Code::FollowUpUsed, "this follow-up has already been answered")
}

fn may_have_been_sent() -> ActionError {
    let message = "the replica that sent an earlier answer is gone, and the agent may have received it; look the task up with `get_task`";
    ActionError::new(Code::OutcomeUnknown, message)
}

pub(crate) fn expired() -> ActionError {
    ActionError::new(Code::FollowUpExpired, "this follow-up has expired; call the skill again to start over")
}

fn key(agent: &Arc<str>, id: &Uuid) -> RecordKey {
    RecordKey::new(agent, id.simple().to_string())
}

fn now_ms() -> u64 {
    unix_millis(wall_time())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{all_alive, alone, memory_store, question};
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    async fn issued(ttl: Duration) -> (FollowUps, Arc<str>, Uuid) {
        let follow_ups = FollowUps::new(&memory_store(), &alone());
        let agent: Arc<str> = "weather".into();
        let id = follow_ups.issue(&agent, question(), ttl).await.unwrap().id;
        (follow_ups, agent, id)
    }

    async fn code(follow_ups: &FollowUps, agent: &Arc<str>, id: &str) -> Code {
        follow_ups.claim(agent, &Caller::default(), id).await.expect_err("an error").info.code
    }

    async fn claimed(follow_ups: &FollowUps, agent: &Arc<str>, id: &str) -> Claim {
        match follow_ups.claim(agent, &Caller::default(), id).await.unwrap() {
            ClaimResult::Claimed(claim) => *claim,
            ClaimResult::Elsewhere(_) => panic!("there is one replica"),
        }
    }

    #[tokio::test]
    async fn an_id_works_once_and_is_reported_as_used_afterwards() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        let id = id.to_string();
        let claim = claimed(&follow_ups, &agent, &id).await;
        assert_eq!(claim.question.task_id, "t");
        assert_eq!(code(&follow_ups, &agent, &id).await, Code::FollowUpUsed);
        claim.release().await;
        claimed(&follow_ups, &agent, &id).await.mark_used().await;
        assert_eq!(code(&follow_ups, &agent, &id).await, Code::FollowUpUsed);
    }

    #[tokio::test]
    async fn a_claim_that_is_dropped_counts_as_used_if_the_answer_may_have_been_sent() {
        for (is_sent, state) in [(false, FollowUpState::Pending), (true, FollowUpState::Used)] {
            let (follow_ups, agent, id) = issued(MINUTE).await;
            let claim = claimed(&follow_ups, &agent, &id.to_string()).await;
            if is_sent {
                claim.sender(false).unwrap().mark_sending().await.unwrap();
            }
            drop(claim);
            while follow_ups.find(&agent, &id).await.unwrap().unwrap().state != state {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test]
    async fn another_caller_does_not_find_an_id() {
        let follow_ups = FollowUps::new(&memory_store(), &alone());
        let (agent, alice): (Arc<str>, _) = ("weather".into(), Caller::verified("T/alice"));
        let question = OpenQuestion { caller: alice.clone(), ..question() };
        let id = follow_ups.issue(&agent, question, MINUTE).await.unwrap().id.to_string();
        for other in [Caller::default(), Caller::verified("T/bob")] {
            let error = follow_ups.claim(&agent, &other, &id).await.unwrap_err();
            assert_eq!(error.info.code, Code::NotFound);
        }
        assert!(matches!(follow_ups.claim(&agent, &alice, &id).await.unwrap(), ClaimResult::Claimed(_)));
    }

    #[tokio::test]
    async fn expired_questions_are_returned_once() {
        let (follow_ups, agent, id) = issued(Duration::ZERO).await;
        follow_ups.issue(&agent, question(), MINUTE).await.unwrap();
        tokio::time::sleep(Duration::from_millis(2)).await;
        let expired = follow_ups.take_expired(&agent).await;
        assert_eq!(expired.iter().map(|(_, question)| question.task_id.as_str()).collect::<Vec<_>>(), ["t"]);
        assert_eq!(follow_ups.find(&agent, &id).await.unwrap().unwrap().state, FollowUpState::Expired);
        assert!(follow_ups.take_expired(&agent).await.is_empty());
    }

    #[tokio::test]
    async fn an_expired_id_differs_from_one_that_was_never_issued() {
        let (follow_ups, agent, id) = issued(Duration::ZERO).await;
        assert_eq!(code(&follow_ups, &agent, &id.to_string()).await, Code::FollowUpExpired);
        assert_eq!(code(&follow_ups, &agent, &Uuid::new_v4().to_string()).await, Code::NotFound);
        assert_eq!(code(&follow_ups, &agent, "nonsense").await, Code::NotFound);
    }

    #[tokio::test]
    async fn the_end_of_a_task_expires_an_open_question_but_not_an_answered_one() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        follow_ups.expire(&agent, &id).await.unwrap();
        assert_eq!(code(&follow_ups, &agent, &id.to_string()).await, Code::FollowUpExpired);

        let (follow_ups, agent, id) = issued(MINUTE).await;
        let claim = claimed(&follow_ups, &agent, &id.to_string()).await;
        follow_ups.expire(&agent, &id).await.unwrap();
        claim.mark_used().await;
        assert_eq!(code(&follow_ups, &agent, &id.to_string()).await, Code::FollowUpUsed);
    }

    #[tokio::test]
    async fn an_id_works_only_at_its_agent() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        assert_eq!(code(&follow_ups, &"other".into(), &id.to_string()).await, Code::NotFound);
        claimed(&follow_ups, &agent, &id.to_string()).await.mark_used().await;
    }

    #[tokio::test]
    async fn only_open_questions_are_pending() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        follow_ups.issue(&agent, question(), MINUTE).await.unwrap();
        follow_ups.issue(&agent, question(), Duration::ZERO).await.unwrap();
        assert_eq!(follow_ups.pending(None).await.unwrap(), 2);
        claimed(&follow_ups, &agent, &id.to_string()).await.mark_used().await;
        assert_eq!(follow_ups.pending(None).await.unwrap(), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_many_answers_at_the_same_time_exactly_one_wins_at_all_replicas() {
        let store = memory_store();
        let replicas: [Arc<FollowUps>; 2] =
            std::array::from_fn(|_| Arc::new(FollowUps::new(&store, &all_alive())));
        let agent: Arc<str> = "weather".into();
        for _ in 0..200 {
            let id = replicas[0].issue(&agent, question(), MINUTE).await.unwrap().id.to_string();
            let mut race = tokio::task::JoinSet::new();
            for number in 0..4 {
                let (follow_ups, agent, id) = (Arc::clone(&replicas[number % 2]), agent.clone(), id.clone());
                race.spawn(async move {
                    match follow_ups.claim(&agent, &Caller::default(), &id).await {
                        Ok(ClaimResult::Claimed(claim)) => {
                            claim.sender(false).unwrap().mark_sending().await.unwrap();
                            claim.mark_used().await;
                            1
                        }
                        Ok(ClaimResult::Elsewhere(_)) => panic!("any replica can answer"),
                        Err(error) => {
                            assert_eq!(error.info.code, Code::FollowUpUsed);
                            0
                        }
                    }
                });
            }
            assert_eq!(race.join_all().await.into_iter().sum::<usize>(), 1);
        }
    }
}
