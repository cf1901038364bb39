//! Counts the calls of one agent: in flight, by skill, outcome and duration.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

/// Upper bounds of the histogram buckets, in seconds. The last one is the default of `task_timeout`, the longest limit.
pub(crate) const BUCKETS: [f64; 17] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0,
    86_400.0,
];

/// Maximum number of actions that are counted by name. Each has dozens of series, and agents may choose new ids at every
/// start.
const MAX_SKILLS: usize = 50;
/// The name under which the others are counted. A skill with this name is counted with them.
pub(crate) const OTHER_SKILLS: &str = "other";

#[derive(Debug, Default)]
pub struct CallStats {
    in_flight: AtomicUsize,
    followed: AtomicUsize,
    skills: Mutex<BTreeMap<Arc<str>, SkillStats>>,
    last_error: Mutex<Option<CallError>>,
}

/// The finished calls of one action.
#[derive(Debug, Clone, Default)]
pub struct SkillStats {
    /// By status or error code.
    pub outcomes: BTreeMap<&'static str, u64>,
    pub(crate) durations: Histogram,
    /// The time until the first text of an answer, for streamed calls.
    pub(crate) first_tokens: Histogram,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Histogram {
    /// Counts for [`BUCKETS`], not cumulative.
    pub(crate) buckets: [u64; BUCKETS.len()],
    /// Durations longer than the last bucket.
    pub(crate) longer: u64,
    pub(crate) sum: Duration,
}

impl Histogram {
    fn add(&mut self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = BUCKETS.iter().zip(&mut self.buckets).find(|(limit, _)| seconds <= **limit);
        *bucket.map_or(&mut self.longer, |(_, bucket)| bucket) += 1;
        self.sum = self.sum.saturating_add(duration);
    }

    pub(crate) fn count(&self) -> u64 {
        self.buckets.iter().sum::<u64>() + self.longer
    }
}

/// A call that has its reply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndedCall<'a> {
    pub(crate) action: &'a Arc<str>,
    /// Status or error code.
    pub(crate) outcome: &'static str,
    pub(crate) took: Duration,
    /// The time until the first text of the answer, if the call was streamed.
    pub(crate) first_token: Option<Duration>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    pub code: String,
    pub message: String,
    pub at: SystemTime,
}

/// Counts one call as in flight until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlightCall(Arc<CallStats>);

impl Drop for InFlightCall {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// Counts one task as followed until it is dropped.
#[derive(Debug)]
pub(crate) struct FollowedTask(Arc<CallStats>);

impl Drop for FollowedTask {
    fn drop(&mut self) {
        self.0.followed.fetch_sub(1, Relaxed);
    }
}

impl CallStats {
    /// Counts a task that the bridge follows although no call waits for it, until the guard is dropped.
    pub(crate) fn follow(self: &Arc<Self>) -> FollowedTask {
        self.followed.fetch_add(1, Relaxed);
        FollowedTask(Arc::clone(self))
    }

    pub fn followed(&self) -> usize {
        self.followed.load(Relaxed)
    }

    /// Counts a call as in flight until the guard is dropped. A busy agent is not considered hung.
    pub(crate) fn begin(self: &Arc<Self>) -> InFlightCall {
        self.in_flight.fetch_add(1, Relaxed);
        InFlightCall(Arc::clone(self))
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    pub(crate) fn ended(&self, call: EndedCall<'_>) {
        let mut skills = self.lock();
        let has_room = skills.len() < MAX_SKILLS;
        let skill = match skills.get_mut(call.action) {
            Some(skill) => skill,
            None if has_room => skills.entry(Arc::clone(call.action)).or_default(),
            None => skills.entry(OTHER_SKILLS.into()).or_default(),
        };
        *skill.outcomes.entry(call.outcome).or_default() += 1;
        skill.durations.add(call.took);
        if let Some(duration) = call.first_token {
            skill.first_tokens.add(duration);
        }
    }

    pub fn failed(&self, code: &str, message: &str) {
        let error = CallError {
            code: code.to_owned(),
            message: crate::text::shorten(message, 400),
            at: SystemTime::now(),
        };
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    /// The finished calls by action, at most [`MAX_SKILLS`] and [`OTHER_SKILLS`].
    pub fn skills(&self) -> BTreeMap<Arc<str>, SkillStats> {
        self.lock().clone()
    }

    /// The finished calls of all actions by status or error code.
    pub fn outcomes(&self) -> BTreeMap<&'static str, u64> {
        let mut all = BTreeMap::new();
        for (outcome, count) in self.lock().values().flat_map(|skill| &skill.outcomes) {
            *all.entry(*outcome).or_default() += count;
        }
        all
    }

    pub fn last_error(&self) -> Option<CallError> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, SkillStats>> {
        self.skills.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(calls: &CallStats, action: &str, outcome: &'static str, took: Duration) {
        calls.ended(EndedCall { action: &action.into(), outcome, took, first_token: None });
    }

    #[test]
    fn calls_are_counted_in_flight_by_outcome_and_by_time() {
        let calls = Arc::new(CallStats::default());
        let (one, two) = (calls.begin(), calls.begin());
        assert_eq!(calls.in_flight(), 2);
        drop((one, two));
        assert_eq!(calls.in_flight(), 0);
        end(&calls, "echo", "COMPLETED", Duration::from_millis(7));
        end(&calls, "echo", "COMPLETED", Duration::from_secs(100_000));
        end(&calls, "echo", "busy", Duration::ZERO);
        end(&calls, "slow", "busy", Duration::ZERO);
        assert_eq!(calls.outcomes(), BTreeMap::from([("COMPLETED", 2), ("busy", 2)]));
        let echo = &calls.skills()["echo"];
        assert_eq!(echo.outcomes, BTreeMap::from([("COMPLETED", 2), ("busy", 1)]));
        assert_eq!((echo.durations.buckets[0], echo.durations.buckets[1], echo.durations.longer), (1, 1, 1));
        assert_eq!(echo.durations.count(), 3);
        assert_eq!(echo.first_tokens.count(), 0);
    }

    /// Some agents choose new skill ids at every start.
    #[test]
    fn the_number_of_names_is_limited() {
        let calls = CallStats::default();
        for number in 0..MAX_SKILLS + 10 {
            end(&calls, &format!("skill-{number}"), "COMPLETED", Duration::ZERO);
        }
        end(&calls, "skill-0", "COMPLETED", Duration::ZERO);
        let skills = calls.skills();
        assert_eq!(skills.len(), MAX_SKILLS + 1);
        assert_eq!(skills["skill-0"].outcomes["COMPLETED"], 2);
        assert_eq!(skills[OTHER_SKILLS].outcomes["COMPLETED"], 10);
    }
}
