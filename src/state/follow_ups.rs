//! Follow-up ids: an agent's open question under a name that the caller can answer to.
//!
//! An id goes from `pending` to `answering` to `used`. Taking it is one conditional write, so of
//! several answers at the same time exactly one wins, at whichever replica they arrive; the claim
//! can be given back when the answer never reached the agent. For a day after its end an id still
//! tells whether it was used or has expired.

use crate::text::{rfc3339, unix_millis};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::TryStreamExt as _;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Change, Key, Kind, StateStore, Unavailable, record, update};
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::FollowUp;

/// How long an id is remembered after its time is over.
const TOMBSTONE: Duration = Duration::from_secs(24 * 3600);

/// The task that waits for the answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Waiting {
    pub task_id: String,
    pub context_id: Option<String>,
    /// The skill that the task was started with.
    pub skill: Option<Arc<str>>,
    /// Media types that the caller accepts.
    pub output_modes: Arc<[String]>,
    /// Tells this question from another one of the same task.
    pub question: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    waiting: Waiting,
    expires_ms: u64,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "is")]
enum State {
    Pending,
    /// Claimed by the request with this nonce.
    Answering {
        nonce: Uuid,
    },
    Used,
    /// Its task has ended without the answer.
    Expired,
}

/// Where a follow-up id stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Standing {
    Open { question: String },
    Answering { question: String },
    Used,
    Expired,
    Unknown,
}

#[derive(Debug)]
pub(crate) struct FollowUps {
    store: Arc<dyn StateStore>,
}

/// The right to answer, held by exactly one request. Settle it with [`Claim::used`] or [`Claim::give_back`];
/// one that is dropped counts as used, because the agent may have the answer.
#[derive(Debug)]
#[must_use]
pub(crate) struct Claim {
    pub waiting: Waiting,
    open: Option<OpenClaim>,
}

#[derive(Debug)]
struct OpenClaim {
    store: Arc<dyn StateStore>,
    key: Key,
    nonce: Uuid,
}

impl Record {
    fn is_over(&self) -> bool {
        self.expires_ms <= now_ms()
    }

    /// How long the record is kept if it is written now.
    fn ttl(&self) -> Duration {
        Duration::from_millis(self.expires_ms.saturating_sub(now_ms())) + TOMBSTONE
    }

    fn change<T>(self, state: State, result: T) -> Change<Self, T> {
        let ttl = self.ttl();
        Change::Write(Self { state, ..self }, ttl, result)
    }
}

impl FollowUps {
    pub(super) fn new(store: Arc<dyn StateStore>) -> Self {
        Self { store }
    }

    /// Issues a new id for a waiting task.
    pub(crate) async fn park(
        &self,
        agent: &Arc<str>,
        waiting: Waiting,
        ttl: Duration,
    ) -> Result<FollowUp, ActionError> {
        let id = Uuid::new_v4();
        let expires = SystemTime::now() + ttl;
        let record = Record { waiting, expires_ms: unix_millis(expires), state: State::Pending };
        let issue = |known: Option<(Record, _)>| {
            Ok::<_, ActionError>(match known {
                // Nobody else makes this id, so the record is ours.
                Some(_) => Change::Keep(()),
                None => Change::Write(record.clone(), record.ttl(), ()),
            })
        };
        update(&*self.store, Kind::FollowUp, &key(agent, &id), issue).await?;
        Ok(FollowUp { id, expires_at: rfc3339(expires) })
    }

    /// Takes the right to answer. Whether its task has ended meanwhile is for the caller to know.
    pub(crate) async fn claim(&self, agent: &Arc<str>, id: &str) -> Result<Claim, ActionError> {
        let never =
            || ActionError::new(Code::NotFound, "this follow-up id was never issued here, or is forgotten");
        let id = Uuid::try_parse(id).map_err(|_| never())?;
        let key = key(agent, &id);
        let nonce = Uuid::new_v4();
        let take = |known: Option<(Record, _)>| {
            let (record, _) = known.ok_or_else(never)?;
            match record.state {
                // An earlier attempt of this claim was stored after all.
                State::Answering { nonce: by } if by == nonce => Ok(Change::Keep(record.waiting)),
                State::Answering { .. } | State::Used => {
                    Err(ActionError::new(Code::FollowUpUsed, "this follow-up was answered already"))
                }
                State::Expired => Err(expired()),
                State::Pending if record.is_over() => Err(expired()),
                State::Pending => {
                    let waiting = record.waiting.clone();
                    Ok(record.change(State::Answering { nonce }, waiting))
                }
            }
        };
        let waiting = update(&*self.store, Kind::FollowUp, &key, take).await?;
        Ok(Claim { waiting, open: Some(OpenClaim { store: Arc::clone(&self.store), key, nonce }) })
    }

    /// The task of this question has reached a final state: nobody can answer it any more.
    pub(crate) async fn expire(&self, agent: &Arc<str>, id: &Uuid) -> Result<(), Unavailable> {
        let end = |known: Option<(Record, _)>| {
            Ok::<_, StoreError>(match known {
                Some((record, _)) if record.state == State::Pending => record.change(State::Expired, ()),
                _ => Change::Keep(()),
            })
        };
        let ended = update(&*self.store, Kind::FollowUp, &key(agent, id), end).await;
        ended.map_err(|StoreError| Unavailable)
    }

    pub(crate) async fn standing(&self, agent: &Arc<str>, id: &Uuid) -> Result<Standing, Unavailable> {
        let Some(entry) = self.store.read(Kind::FollowUp, &key(agent, id)).await? else {
            return Ok(Standing::Unknown);
        };
        let record: Record = record::decode(&entry.value)?;
        Ok(match record.state {
            State::Pending if !record.is_over() => Standing::Open { question: record.waiting.question },
            State::Pending | State::Expired => Standing::Expired,
            State::Answering { .. } => Standing::Answering { question: record.waiting.question },
            State::Used => Standing::Used,
        })
    }

    /// How many questions wait for an answer.
    pub(crate) async fn pending(&self) -> Result<usize, Unavailable> {
        let waits = |pending, (_, entry): (Key, super::Entry)| async move {
            // There may be very many.
            tokio::task::coop::consume_budget().await;
            let waits = |record: Record| record.state == State::Pending && !record.is_over();
            Ok(pending + usize::from(record::decode(&entry.value).is_ok_and(waits)))
        };
        self.store.scan(Kind::FollowUp).try_fold(0, waits).await
    }
}

impl Claim {
    /// The agent has the answer, or may have it.
    pub(crate) async fn used(mut self) {
        if let Some(claim) = self.open.take() {
            claim.settle(State::Used).await;
        }
    }

    /// The task ended before the answer was sent.
    pub(crate) async fn expire(mut self) {
        if let Some(claim) = self.open.take() {
            claim.settle(State::Expired).await;
        }
    }

    /// The answer never reached the agent: the id is valid again.
    pub(crate) async fn give_back(mut self) {
        if let Some(claim) = self.open.take() {
            claim.settle(State::Pending).await;
        }
    }
}

impl OpenClaim {
    async fn settle(self, state: State) {
        let settle = |known: Option<(Record, _)>| {
            Ok::<_, StoreError>(match known {
                Some((record, _)) if record.state == State::Answering { nonce: self.nonce } => {
                    record.change(state.clone(), ())
                }
                _ => Change::Keep(()),
            })
        };
        let settled = update(&*self.store, Kind::FollowUp, &self.key, settle).await;
        if settled.is_err() {
            tracing::warn!(agent = %self.key.agent, "cannot record what became of a follow-up id; it counts as used");
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let (Some(claim), Ok(runtime)) = (self.open.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(claim.settle(State::Used));
        }
    }
}

/// Any failure of the store, where the caller has nothing else to report.
struct StoreError;

impl From<Unavailable> for StoreError {
    fn from(_: Unavailable) -> Self {
        Self
    }
}

impl From<super::WriteError> for StoreError {
    fn from(_: super::WriteError) -> Self {
        Self
    }
}

pub(crate) fn expired() -> ActionError {
    let message = "this follow-up has expired; call the skill again to start over";
    ActionError::new(Code::FollowUpExpired, message)
}

fn key(agent: &Arc<str>, id: &Uuid) -> Key {
    Key::new(agent, id.simple().to_string())
}

fn now_ms() -> u64 {
    unix_millis(SystemTime::now())
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryStore;
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn waiting() -> Waiting {
        Waiting {
            task_id: "t".into(),
            context_id: None,
            skill: None,
            output_modes: Arc::default(),
            question: "q".into(),
        }
    }

    async fn parked(ttl: Duration) -> (FollowUps, Arc<str>, Uuid) {
        let follow_ups = FollowUps::new(Arc::new(MemoryStore::default()));
        let agent: Arc<str> = "weather".into();
        let id = follow_ups.park(&agent, waiting(), ttl).await.unwrap().id;
        (follow_ups, agent, id)
    }

    async fn code(follow_ups: &FollowUps, agent: &Arc<str>, id: &str) -> Code {
        follow_ups.claim(agent, id).await.expect_err("an error").info.code
    }

    #[tokio::test]
    async fn an_id_works_once_and_then_says_so() {
        let (follow_ups, agent, id) = parked(MINUTE).await;
        let id = id.to_string();
        let claim = follow_ups.claim(&agent, &id).await.unwrap();
        assert_eq!(claim.waiting.task_id, "t");
        assert_eq!(code(&follow_ups, &agent, &id).await, Code::FollowUpUsed);
        claim.give_back().await;
        follow_ups.claim(&agent, &id).await.unwrap().used().await;
        assert_eq!(code(&follow_ups, &agent, &id).await, Code::FollowUpUsed);
    }

    #[tokio::test]
    async fn a_claim_that_is_dropped_counts_as_used() {
        let (follow_ups, agent, id) = parked(MINUTE).await;
        drop(follow_ups.claim(&agent, &id.to_string()).await.unwrap());
        while follow_ups.standing(&agent, &id).await.unwrap() != Standing::Used {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn an_expired_id_is_told_from_one_that_was_never_issued() {
        let (follow_ups, agent, id) = parked(Duration::ZERO).await;
        assert_eq!(code(&follow_ups, &agent, &id.to_string()).await, Code::FollowUpExpired);
        assert_eq!(code(&follow_ups, &agent, &Uuid::new_v4().to_string()).await, Code::NotFound);
        assert_eq!(code(&follow_ups, &agent, "nonsense").await, Code::NotFound);
    }

    #[tokio::test]
    async fn the_end_of_its_task_ends_an_open_question_but_not_an_answered_one() {
        let (follow_ups, agent, id) = parked(MINUTE).await;
        follow_ups.expire(&agent, &id).await.unwrap();
        assert_eq!(code(&follow_ups, &agent, &id.to_string()).await, Code::FollowUpExpired);

        let (follow_ups, agent, id) = parked(MINUTE).await;
        let claim = follow_ups.claim(&agent, &id.to_string()).await.unwrap();
        follow_ups.expire(&agent, &id).await.unwrap();
        claim.used().await;
        assert_eq!(code(&follow_ups, &agent, &id.to_string()).await, Code::FollowUpUsed);
    }

    #[tokio::test]
    async fn an_id_works_only_at_its_agent() {
        let (follow_ups, agent, id) = parked(MINUTE).await;
        assert_eq!(code(&follow_ups, &"other".into(), &id.to_string()).await, Code::NotFound);
        follow_ups.claim(&agent, &id.to_string()).await.unwrap().used().await;
    }

    #[tokio::test]
    async fn only_open_questions_are_pending() {
        let (follow_ups, agent, id) = parked(MINUTE).await;
        follow_ups.park(&agent, waiting(), MINUTE).await.unwrap();
        follow_ups.park(&agent, waiting(), Duration::ZERO).await.unwrap();
        assert_eq!(follow_ups.pending().await.unwrap(), 2);
        follow_ups.claim(&agent, &id.to_string()).await.unwrap().used().await;
        assert_eq!(follow_ups.pending().await.unwrap(), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_many_answers_at_the_same_time_exactly_one_wins_at_all_replicas() {
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::default());
        let replicas: [Arc<FollowUps>; 2] =
            std::array::from_fn(|_| Arc::new(FollowUps::new(Arc::clone(&store))));
        let agent: Arc<str> = "weather".into();
        for _ in 0..200 {
            let id = replicas[0].park(&agent, waiting(), MINUTE).await.unwrap().id.to_string();
            let mut race = tokio::task::JoinSet::new();
            for number in 0..4 {
                let (follow_ups, agent, id) = (Arc::clone(&replicas[number % 2]), agent.clone(), id.clone());
                race.spawn(async move {
                    match follow_ups.claim(&agent, &id).await {
                        Ok(claim) => {
                            claim.used().await;
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
