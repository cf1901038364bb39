//! Follow-up ids: an agent's open question under a name that the caller can answer to.
//!
//! There are two doors: [`FollowUps::park`] and [`FollowUps::take`]. Taking is one step under the
//! entry's lock, so of several answers at the same time exactly one wins; the claim can be given
//! back when the answer never reached the agent. For a day after its end an id still says
//! whether it was used or has expired.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use super::error::{ActionError, Code};

/// How long an id is remembered after its time is over.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);
/// Most bytes that are kept; beyond that the oldest are forgotten.
const CAPACITY: u64 = 128 << 20;
/// What an id costs beside the texts of its task: with short ones there is room for 200,000.
const OVERHEAD: usize = 512;

/// What a caller needs to answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FollowUp {
    /// Works once.
    #[serde(rename = "follow_up_id")]
    pub id: Uuid,
    /// RFC 3339.
    pub expires_at: String,
}

/// The task that waits for the answer.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// The agent's id of the task.
    pub task_id: String,
    /// The conversation.
    pub context_id: Option<String>,
    /// The skill that the task was started with.
    pub skill: Option<Arc<str>>,
    /// Media types that the caller takes.
    pub output_modes: Arc<[String]>,
    /// Tells this question from another one of the same task.
    pub question: u64,
}

/// All follow-ups of this process.
#[derive(Debug)]
pub struct FollowUps {
    entries: Cache<Uuid, Arc<Entry>>,
}

#[derive(Debug)]
struct Entry {
    agent: Arc<str>,
    ttl: Duration,
    expires: Instant,
    size: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Pending(Waiting),
    Answering,
    Used,
}

/// The right to answer, held by exactly one request. It is used up unless given back.
#[derive(Debug)]
pub struct Claim {
    entry: Arc<Entry>,
    /// The task that waits for the answer.
    pub waiting: Waiting,
    next: State,
}

impl Entry {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn size(&self) -> usize {
        let modes = self.output_modes.iter().map(|mode| mode.len() + size_of::<String>());
        self.task_id.len() + self.context_id.as_ref().map_or(0, String::len) + modes.sum::<usize>()
    }
}

impl Default for FollowUps {
    fn default() -> Self {
        Self::new(CAPACITY)
    }
}

impl FollowUps {
    /// Holds about this many bytes.
    fn new(capacity: u64) -> Self {
        let entries = Cache::builder()
            .max_capacity(capacity)
            // Weighed as it is put in; once it is used it is lighter.
            .weigher(|_, entry: &Arc<Entry>| u32::try_from(entry.size).unwrap_or(u32::MAX))
            .eviction_policy(EvictionPolicy::lru())
            .expire_after(ForgottenADayLater)
            .build();
        Self { entries }
    }

    /// Makes a new id for a waiting task.
    pub fn park(&self, agent: &Arc<str>, waiting: Waiting, ttl: Duration) -> FollowUp {
        let id = Uuid::new_v4();
        let entry = Entry {
            agent: Arc::clone(agent),
            ttl,
            expires: Instant::now() + ttl,
            size: OVERHEAD + waiting.size(),
            state: Mutex::new(State::Pending(waiting)),
        };
        self.entries.insert(id, Arc::new(entry));
        FollowUp { id, expires_at: rfc3339(SystemTime::now() + ttl) }
    }

    /// Takes the right to answer.
    pub fn take(&self, agent: &str, id: &str) -> Result<Claim, ActionError> {
        let never =
            || ActionError::new(Code::NotFound, "this follow-up id was never issued here, or is forgotten");
        let id = Uuid::try_parse(id).map_err(|_| never())?;
        let entry = self.entries.get(&id).filter(|entry| *entry.agent == *agent).ok_or_else(never)?;
        let mut state = entry.lock();
        if matches!(*state, State::Answering | State::Used) {
            return Err(ActionError::new(Code::FollowUpUsed, "this follow-up was answered already"));
        }
        if entry.expires <= Instant::now() {
            let message = "this follow-up has expired; call the skill again to start over";
            return Err(ActionError::new(Code::FollowUpExpired, message));
        }
        let State::Pending(waiting) = std::mem::replace(&mut *state, State::Answering) else {
            return Err(ActionError::internal());
        };
        drop(state);
        Ok(Claim { entry, waiting, next: State::Used })
    }

    /// Whether the id was answered and nobody is about to. An open or expired one, or one that is
    /// just being answered, is still the name of its question.
    pub fn is_used(&self, id: &Uuid) -> bool {
        let used = |entry: Arc<Entry>| matches!(*entry.lock(), State::Used);
        self.entries.get(id).is_none_or(used)
    }

    /// Whether the id can still be answered, and is about this question.
    pub fn is_open_for(&self, id: &Uuid, question: u64) -> bool {
        let open = |entry: Arc<Entry>| match &*entry.lock() {
            State::Pending(waiting) => waiting.question == question && entry.expires > Instant::now(),
            State::Answering | State::Used => false,
        };
        self.entries.get(id).is_some_and(open)
    }

    /// How many questions wait for an answer.
    pub fn pending(&self) -> usize {
        let now = Instant::now();
        let waits = |entry: &Arc<Entry>| entry.expires > now && matches!(*entry.lock(), State::Pending(_));
        self.entries.iter().filter(|(_, entry)| waits(entry)).count()
    }

    /// How many ids are remembered, used and expired ones included.
    pub fn count(&self) -> u64 {
        self.entries.run_pending_tasks();
        self.entries.entry_count()
    }
}

impl Claim {
    /// The answer never reached the agent: the id is valid again.
    pub fn give_back(mut self) {
        self.next = State::Pending(self.waiting.clone());
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        *self.entry.lock() = std::mem::replace(&mut self.next, State::Used);
    }
}

struct ForgottenADayLater;

impl moka::Expiry<Uuid, Arc<Entry>> for ForgottenADayLater {
    fn expire_after_create(&self, _: &Uuid, entry: &Arc<Entry>, _: Instant) -> Option<Duration> {
        Some(entry.ttl + REMEMBERED)
    }
}

fn rfc3339(at: SystemTime) -> String {
    let at = OffsetDateTime::from(at).replace_nanosecond(0).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    at.format(&Rfc3339).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parked(ttl: Duration) -> (FollowUps, Arc<str>, String) {
        let follow_ups = FollowUps::default();
        let agent: Arc<str> = "weather".into();
        let waiting = Waiting {
            task_id: "t".into(),
            context_id: None,
            skill: None,
            output_modes: Arc::default(),
            question: 0,
        };
        let id = follow_ups.park(&agent, waiting, ttl).id.to_string();
        (follow_ups, agent, id)
    }

    fn code(result: Result<Claim, ActionError>) -> Code {
        result.expect_err("an error").info.code
    }

    #[test]
    fn an_id_works_once_and_then_says_so() {
        let (follow_ups, agent, id) = parked(Duration::from_secs(60));
        let claim = follow_ups.take(&agent, &id).unwrap();
        assert_eq!(claim.waiting.task_id, "t");
        assert_eq!(code(follow_ups.take(&agent, &id)), Code::FollowUpUsed);
        claim.give_back();
        follow_ups.take(&agent, &id).unwrap();
        assert_eq!(code(follow_ups.take(&agent, &id)), Code::FollowUpUsed);
    }

    #[test]
    fn an_expired_id_is_told_from_one_that_was_never_issued() {
        let (follow_ups, agent, id) = parked(Duration::ZERO);
        assert_eq!(code(follow_ups.take(&agent, &id)), Code::FollowUpExpired);
        assert_eq!(code(follow_ups.take(&agent, &Uuid::new_v4().to_string())), Code::NotFound);
        assert_eq!(code(follow_ups.take(&agent, "nonsense")), Code::NotFound);
    }

    #[test]
    fn the_oldest_go_when_there_are_too_many_bytes() {
        let (follow_ups, agent): (_, Arc<str>) = (FollowUps::new(1 << 20), "a".into());
        let park = || {
            let waiting = Waiting {
                task_id: "t".into(),
                context_id: None,
                skill: None,
                output_modes: (0..100).map(|_| "m".repeat(256)).collect(),
                question: 0,
            };
            follow_ups.park(&agent, waiting, Duration::from_secs(60)).id.to_string()
        };
        let ids: Vec<String> = (0..200).map(|_| park()).collect();
        assert!((1..=(1 << 20) / 25_600).contains(&follow_ups.count()), "{}", follow_ups.count());
        assert_eq!(code(follow_ups.take(&agent, &ids[0])), Code::NotFound);
        follow_ups.take(&agent, &ids[199]).unwrap();
    }

    #[test]
    fn an_id_works_only_at_its_agent() {
        let (follow_ups, agent, id) = parked(Duration::from_secs(60));
        assert_eq!(code(follow_ups.take("other", &id)), Code::NotFound);
        follow_ups.take(&agent, &id).unwrap();
    }

    #[test]
    fn of_many_answers_at_the_same_time_exactly_one_wins() {
        for _ in 0..200 {
            let (follow_ups, agent, id) = parked(Duration::from_secs(60));
            let winners = std::thread::scope(|scope| {
                let race: Vec<_> =
                    (0..4).map(|_| scope.spawn(|| follow_ups.take(&agent, &id).is_ok())).collect();
                race.into_iter().map(|t| t.join().unwrap()).filter(|won| *won).count()
            });
            assert_eq!(winners, 1);
        }
    }
}
