//! Records of tasks by agent and id; the oldest go first.
//!
//! Every call writes one and hardly any is read, so writing has to cost little: a map, and a queue
//! in the order of writing. A general cache does more for each entry than the rest of the ledger.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Record;

/// What a record costs beside its reply.
const RECORD_OVERHEAD: usize = 512;
/// Places in the queue that may be out of date before they are looked for.
const SLACK: usize = 64;

type Key = (Arc<str>, Box<str>);

/// All records, up to a number of bytes.
#[derive(Debug)]
pub(super) struct Tasks {
    records: Mutex<Records>,
    max_bytes: usize,
}

#[derive(Debug, Default)]
struct Records {
    by_key: HashMap<Arc<Key>, Kept>,
    // A key is here once for each time it was written; the last one counts.
    queue: VecDeque<(Arc<Key>, u64)>,
    bytes: usize,
    written: u64,
}

#[derive(Debug)]
struct Kept {
    record: Arc<Record>,
    until: Instant,
    bytes: usize,
    number: u64,
}

impl Tasks {
    /// Holds about `max_bytes` altogether.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { records: Mutex::default(), max_bytes }
    }

    /// What was written last.
    pub(super) fn get(&self, agent: &Arc<str>, task_id: &str) -> Option<Arc<Record>> {
        let key: Key = (Arc::clone(agent), task_id.into());
        let records = self.lock();
        let kept = records.by_key.get(&key).filter(|kept| kept.until > Instant::now())?;
        Some(Arc::clone(&kept.record))
    }

    /// Writes a record over the one before it; but what has ended is not undone.
    pub(super) fn put(&self, agent: &Arc<str>, task_id: &str, record: Record) {
        let key = Arc::new((Arc::clone(agent), task_id.into()));
        let now = Instant::now();
        let kept = Kept {
            bytes: RECORD_OVERHEAD + task_id.len() + size(&record),
            until: now + record.alive.saturating_add(record.ttl),
            record: Arc::new(record),
            number: 0,
        };
        let gone = self.lock().put(key, kept, self.max_bytes, now);
        // Not under the lock.
        drop(gone);
    }

    // One lock for all: it is held for a moment, and then what is oldest is known.
    fn lock(&self) -> MutexGuard<'_, Records> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Records {
    /// Writes a record; the ones that had to go for it.
    fn put(&mut self, key: Arc<Key>, mut kept: Kept, max_bytes: usize, now: Instant) -> Vec<Kept> {
        let ended = |kept: &Kept| kept.record.state.is_final();
        if !ended(&kept) && self.by_key.get(&key).is_some_and(|known| ended(known) && known.until > now) {
            return vec![kept];
        }
        self.written += 1;
        kept.number = self.written;
        self.bytes += kept.bytes;
        self.queue.push_back((Arc::clone(&key), self.written));
        let mut gone: Vec<_> = self.by_key.insert(key, kept).into_iter().collect();
        self.bytes -= gone.iter().map(|kept| kept.bytes).sum::<usize>();
        while let Some((key, number)) = self.queue.front() {
            if let Some(kept) = self.by_key.get(key).filter(|kept| kept.number == *number) {
                // What was just written stays, however large it is.
                if (self.bytes <= max_bytes && kept.until > now) || *number == self.written {
                    break;
                }
                self.bytes -= kept.bytes;
                gone.extend(self.by_key.remove(key));
            }
            self.queue.pop_front();
        }
        if self.queue.len() > 2 * self.by_key.len() + SLACK {
            let by_key = &self.by_key;
            self.queue.retain(|(key, number)| by_key.get(key).is_some_and(|kept| kept.number == *number));
        }
        gone
    }
}

fn size(record: &Record) -> usize {
    let reply = match &record.reply {
        Ok(reply) => reply.len(),
        // Its data may be large, and is the agent's.
        Err(error) => error.to_json().len(),
    };
    reply + record.task.context_id.as_ref().map_or(0, String::len)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::a2a::model::TaskState;
    use crate::action::outcome::TaskRef;

    fn record(agent: &Arc<str>, reply: usize, ttl: Duration) -> Record {
        Record {
            task: TaskRef { id: None, context_id: None, agent: Arc::clone(agent), skill: None },
            state: TaskState::Working,
            reply: Ok(vec![b' '; reply].into()),
            follow_up: None,
            is_submitted: false,
            alive: Duration::ZERO,
            ttl,
        }
    }

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn the_oldest_go_when_there_are_too_many_bytes() {
        let (tasks, agent): (_, Arc<str>) = (Tasks::new(40_000), "a".into());
        for number in 0..100 {
            tasks.put(&agent, &number.to_string(), record(&agent, 1000, HOUR));
        }
        assert!(tasks.get(&agent, "0").is_none());
        assert!(tasks.get(&agent, "99").is_some());
        let held: usize = (0..100).filter(|number| tasks.get(&agent, &number.to_string()).is_some()).count();
        assert!((1..=40_000 / 1500).contains(&held), "{held}");
        tasks.put(&agent, "large", record(&agent, 1_000_000, HOUR));
        assert!(tasks.get(&agent, "large").is_some(), "what was just written can be looked up");
    }

    #[test]
    fn a_record_is_gone_when_its_time_is_over() {
        let (tasks, agent): (_, Arc<str>) = (Tasks::new(1 << 20), "a".into());
        tasks.put(&agent, "t", record(&agent, 1, Duration::ZERO));
        assert!(tasks.get(&agent, "t").is_none());
        tasks.put(&agent, "t", record(&agent, 1, HOUR));
        assert!(tasks.get(&agent, "t").is_some());
        assert!(tasks.get(&"b".into(), "t").is_none(), "another agent's task");
    }

    #[test]
    fn the_time_of_a_record_begins_when_its_task_can_no_longer_go_on() {
        let (tasks, agent): (_, Arc<str>) = (Tasks::new(1 << 20), "a".into());
        tasks.put(&agent, "t", Record { alive: HOUR, ..record(&agent, 1, Duration::ZERO) });
        assert!(tasks.get(&agent, "t").is_some());
        tasks.put(&agent, "t", record(&agent, 1, Duration::ZERO));
        assert!(tasks.get(&agent, "t").is_none());
    }

    #[test]
    fn a_record_that_is_written_again_and_again_costs_once() {
        let (tasks, agent): (_, Arc<str>) = (Tasks::new(40_000), "a".into());
        tasks.put(&agent, "first", record(&agent, 1, HOUR));
        for size in 0..10_000 {
            tasks.put(&agent, "again", record(&agent, size % 7, HOUR));
        }
        assert!(tasks.get(&agent, "first").is_some());
        assert_eq!(tasks.get(&agent, "again").unwrap().reply.as_ref().unwrap().len(), 9_999 % 7);
        let records = tasks.lock();
        assert!(records.queue.len() <= 2 * records.by_key.len() + SLACK);
        assert_eq!(records.bytes, records.by_key.values().map(|kept| kept.bytes).sum::<usize>());
    }

    #[test]
    fn what_has_ended_is_not_undone() {
        let (tasks, agent): (_, Arc<str>) = (Tasks::new(1 << 20), "a".into());
        tasks.put(&agent, "t", Record { state: TaskState::Completed, ..record(&agent, 1, HOUR) });
        tasks.put(&agent, "t", record(&agent, 2, HOUR));
        assert_eq!(tasks.get(&agent, "t").unwrap().state, TaskState::Completed);
    }
}
