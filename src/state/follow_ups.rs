//! Follow-up ids: the caller answers an agent's question under such an id.
//!
//! An id goes from `pending` to `answering` to `used`. A claim is one conditional write, so of several concurrent
//! answers exactly one wins, at whichever replicas they arrive. The claim can be released if the answer never
//! reached the agent. For a day after its end an id still says whether it was used or has expired.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::records::{Change, Record, TypedRecords};
use super::{Lifetime, RecordKey, RecordKind, StateStore, StoreUnavailable};
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::FollowUp;
use crate::text::{rfc3339_to_second, unix_millis};

/// How long the record of an expired id remains.
const TOMBSTONE_TTL: Duration = Duration::from_secs(24 * 3600);

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
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FollowUpRecord {
    pub question: OpenQuestion,
    expires_ms: u64,
    pub state: FollowUpState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub(crate) enum FollowUpState {
    Pending,
    /// Claimed by the request with this nonce.
    Answering {
        nonce: Uuid,
    },
    Used,
    /// Its time is over, or its task ended without the answer.
    Expired,
}

impl Record for FollowUpRecord {}

impl FollowUpRecord {
    fn state_now(&self) -> FollowUpState {
        match self.state {
            FollowUpState::Pending if self.expires_ms <= now_ms() => FollowUpState::Expired,
            state => state,
        }
    }

    /// How long the record remains if it is written now. An open question and one that is being answered are never
    /// evicted.
    fn lifetime(&self) -> Lifetime {
        let open_for = Duration::from_millis(self.expires_ms.saturating_sub(now_ms()));
        let ttl = open_for + TOMBSTONE_TTL;
        match self.state {
            FollowUpState::Pending => Lifetime { ttl, protected_for: open_for },
            FollowUpState::Answering { .. } => Lifetime::protected(ttl),
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
}

impl FollowUps {
    pub(super) fn new(store: &Arc<dyn StateStore>) -> Self {
        Self { records: TypedRecords::new(store, RecordKind::FollowUp) }
    }

    /// Issues a new id for a question.
    pub(crate) async fn issue(
        &self,
        agent: &Arc<str>,
        question: OpenQuestion,
        ttl: Duration,
    ) -> Result<FollowUp, ActionError> {
        let id = Uuid::new_v4();
        let expires = SystemTime::now() + ttl;
        let record =
            FollowUpRecord { question, expires_ms: unix_millis(expires), state: FollowUpState::Pending };
        let write = |known: Option<FollowUpRecord>| {
            Ok(match known {
                // The id is unique, so an earlier attempt of this write was stored after all.
                Some(_) => Change::Keep(()),
                None => Change::Write(record.clone(), record.lifetime(), ()),
            })
        };
        self.records.update(&key(agent, &id), write).await?;
        Ok(FollowUp { id, expires_at: rfc3339_to_second(expires) })
    }

    /// Claims the right to answer. The caller of this function checks whether the task has ended meanwhile.
    pub(crate) async fn claim(&self, agent: &Arc<str>, id: &str) -> Result<Claim, ActionError> {
        let not_found =
            || ActionError::new(Code::NotFound, "this follow-up id is unknown or has been forgotten");
        let id = Uuid::try_parse(id).map_err(|_| not_found())?;
        let key = key(agent, &id);
        let nonce = Uuid::new_v4();
        let claim = |known: Option<FollowUpRecord>| {
            let record = known.ok_or_else(not_found)?;
            let question = record.question.clone();
            match record.state_now() {
                // An earlier attempt of this claim was stored after all.
                FollowUpState::Answering { nonce: by } if by == nonce => Ok(Change::Keep(question)),
                FollowUpState::Answering { .. } | FollowUpState::Used => {
                    Err(ActionError::new(Code::FollowUpUsed, "this follow-up has already been answered"))
                }
                FollowUpState::Expired => Err(expired()),
                FollowUpState::Pending => Ok(record.with_state(FollowUpState::Answering { nonce }, question)),
            }
        };
        let question = self.records.update(&key, claim).await?;
        Ok(Claim { question, held: Some(HeldClaim { records: self.records.clone(), key, nonce }) })
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
        let found = self.records.read(&key(agent, id)).await?.map(|read| read.record);
        Ok(found.map(|record: FollowUpRecord| FollowUpRecord { state: record.state_now(), ..record }))
    }

    /// Counts the questions that wait for an answer.
    pub(crate) async fn pending(&self) -> Result<usize, StoreUnavailable> {
        self.records.count(|record| record.state_now() == FollowUpState::Pending).await
    }
}

/// The right to answer, held by exactly one request. A claim that is dropped marks the id as used, because the agent
/// may have received the answer.
#[derive(Debug)]
#[must_use]
pub(crate) struct Claim {
    pub question: OpenQuestion,
    held: Option<HeldClaim>,
}

#[derive(Debug)]
struct HeldClaim {
    records: TypedRecords<FollowUpRecord>,
    key: RecordKey,
    nonce: Uuid,
}

impl Claim {
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

    async fn end(mut self, state: FollowUpState) {
        if let Some(held) = self.held.take() {
            held.end(state).await;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let (Some(held), Ok(runtime)) = (self.held.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(held.end(FollowUpState::Used));
        }
    }
}

impl HeldClaim {
    async fn end(self, state: FollowUpState) {
        let end = |known: Option<FollowUpRecord>| {
            Ok(match known {
                Some(record) if record.state == FollowUpState::Answering { nonce: self.nonce } => {
                    record.with_state(state, ())
                }
                _ => Change::Keep(()),
            })
        };
        if let Err(error) = self.records.update(&self.key, end).await {
            tracing::warn!(agent = %self.key.agent, error = error.message, "cannot record the state of a follow-up id; it counts as used");
        }
    }
}

pub(crate) fn expired() -> ActionError {
    ActionError::new(Code::FollowUpExpired, "this follow-up has expired; call the skill again to start over")
}

fn key(agent: &Arc<str>, id: &Uuid) -> RecordKey {
    RecordKey::new(agent, id.simple().to_string())
}

fn now_ms() -> u64 {
    unix_millis(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{memory_store, question};
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    async fn issued(ttl: Duration) -> (FollowUps, Arc<str>, Uuid) {
        let follow_ups = FollowUps::new(&memory_store());
        let agent: Arc<str> = "weather".into();
        let id = follow_ups.issue(&agent, question(), ttl).await.unwrap().id;
        (follow_ups, agent, id)
    }

    async fn code(follow_ups: &FollowUps, agent: &Arc<str>, id: &str) -> Code {
        follow_ups.claim(agent, id).await.expect_err("an error").info.code
    }

    #[tokio::test]
    async fn an_id_works_once_and_is_reported_as_used_afterwards() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        let id = id.to_string();
        let claim = follow_ups.claim(&agent, &id).await.unwrap();
        assert_eq!(claim.question.task_id, "t");
        assert_eq!(code(&follow_ups, &agent, &id).await, Code::FollowUpUsed);
        claim.release().await;
        follow_ups.claim(&agent, &id).await.unwrap().mark_used().await;
        assert_eq!(code(&follow_ups, &agent, &id).await, Code::FollowUpUsed);
    }

    #[tokio::test]
    async fn a_claim_that_is_dropped_counts_as_used() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        drop(follow_ups.claim(&agent, &id.to_string()).await.unwrap());
        while follow_ups.find(&agent, &id).await.unwrap().unwrap().state != FollowUpState::Used {
            tokio::task::yield_now().await;
        }
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
        let claim = follow_ups.claim(&agent, &id.to_string()).await.unwrap();
        follow_ups.expire(&agent, &id).await.unwrap();
        claim.mark_used().await;
        assert_eq!(code(&follow_ups, &agent, &id.to_string()).await, Code::FollowUpUsed);
    }

    #[tokio::test]
    async fn an_id_works_only_at_its_agent() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        assert_eq!(code(&follow_ups, &"other".into(), &id.to_string()).await, Code::NotFound);
        follow_ups.claim(&agent, &id.to_string()).await.unwrap().mark_used().await;
    }

    #[tokio::test]
    async fn only_open_questions_are_pending() {
        let (follow_ups, agent, id) = issued(MINUTE).await;
        follow_ups.issue(&agent, question(), MINUTE).await.unwrap();
        follow_ups.issue(&agent, question(), Duration::ZERO).await.unwrap();
        assert_eq!(follow_ups.pending().await.unwrap(), 2);
        follow_ups.claim(&agent, &id.to_string()).await.unwrap().mark_used().await;
        assert_eq!(follow_ups.pending().await.unwrap(), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_many_answers_at_the_same_time_exactly_one_wins_at_all_replicas() {
        let store = memory_store();
        let replicas: [Arc<FollowUps>; 2] = std::array::from_fn(|_| Arc::new(FollowUps::new(&store)));
        let agent: Arc<str> = "weather".into();
        for _ in 0..200 {
            let id = replicas[0].issue(&agent, question(), MINUTE).await.unwrap().id.to_string();
            let mut race = tokio::task::JoinSet::new();
            for number in 0..4 {
                let (follow_ups, agent, id) = (Arc::clone(&replicas[number % 2]), agent.clone(), id.clone());
                race.spawn(async move {
                    match follow_ups.claim(&agent, &id).await {
                        Ok(claim) => {
                            claim.mark_used().await;
                            1
                        }
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
