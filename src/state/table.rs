//! A table that is bounded in bytes and time, and fair to the agents that share it.
//!
//! Every call writes a row and hardly any is read, so a write has to be cheap: one map per agent, and a
//! queue in the order of writing. When the table is full, the oldest row of the agent that
//! holds the most bytes goes first, so that one agent's load never evicts the rows of a quieter one. A table
//! whose rows must stay refuses new ones instead, with a limit for each agent.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a row costs beside its id and value: its places in the map and in the queue, and its allocations.
const ROW: usize = 320;
/// Outdated places in a queue that are tolerated before it is rebuilt.
const SLACK: usize = 1024;
/// Writes that are tolerated before a sweep. Most expired rows are at the front of a queue and go earlier.
const WRITES_BEFORE_SWEEP: usize = 64 << 10;
/// How often a full table looks for expired rows.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The table has no room for another row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WhenFull {
    /// All agents together have the limit.
    Evict,
    /// Each agent has the limit.
    Refuse,
}

#[derive(Debug)]
pub(super) struct Table<V> {
    agents: HashMap<Arc<str>, Rows<V>>,
    bytes: usize,
    max_bytes: usize,
    when_full: WhenFull,
    rows: usize,
    writes_since_sweep: usize,
    swept: Instant,
}

#[derive(Debug)]
struct Rows<V> {
    by_id: HashMap<Arc<str>, Row<V>>,
    // An id is here once for each time it was written; only the place with the row's number counts.
    queue: VecDeque<Place>,
    bytes: usize,
    written: u64,
}

#[derive(Debug)]
struct Place {
    id: Arc<str>,
    number: u64,
    expires: Instant,
}

#[derive(Debug)]
struct Row<V> {
    value: V,
    expires: Instant,
    bytes: usize,
    number: u64,
}

impl<V> Table<V> {
    /// Makes room by evicting rows.
    pub(super) fn evicting(max_bytes: usize) -> Self {
        Self::new(max_bytes, WhenFull::Evict)
    }

    /// Refuses new rows of an agent that holds `max_bytes`.
    pub(super) fn refusing(max_bytes: usize) -> Self {
        Self::new(max_bytes, WhenFull::Refuse)
    }

    fn new(max_bytes: usize, when_full: WhenFull) -> Self {
        Self {
            agents: HashMap::new(),
            bytes: 0,
            max_bytes,
            when_full,
            rows: 0,
            writes_since_sweep: 0,
            swept: Instant::now(),
        }
    }

    pub(super) fn get(&self, agent: &str, id: &str, now: Instant) -> Option<&V> {
        let row = self.agents.get(agent)?.by_id.get(id)?;
        (row.expires > now).then_some(&row.value)
    }

    pub(super) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Inserts or replaces a row of `bytes` bytes beside its id. Returns the values that had to go, so
    /// that the caller can drop them after it has released its lock.
    pub(super) fn put(
        &mut self,
        agent: &Arc<str>,
        id: &str,
        value: V,
        bytes: usize,
        ttl: Duration,
        now: Instant,
    ) -> Result<Vec<V>, Full> {
        let mut gone = Vec::new();
        let bytes = ROW + id.len() + bytes;
        if self.when_full == WhenFull::Refuse && !self.has_room(agent, id, bytes) {
            if now.duration_since(self.swept) < SWEEP_INTERVAL {
                return Err(Full);
            }
            self.sweep(now, &mut gone);
            if !self.has_room(agent, id, bytes) {
                return Err(Full);
            }
        }
        if !self.agents.contains_key(&**agent) {
            self.agents.insert(Arc::clone(agent), Rows::new());
        }
        let Some(rows) = self.agents.get_mut(&**agent) else { return Err(Full) };
        rows.written += 1;
        let number = rows.written;
        let expires = now.checked_add(ttl).unwrap_or_else(|| now + Duration::from_secs(u64::from(u32::MAX)));
        rows.bytes += bytes;
        self.bytes += bytes;
        let row = Row { value, expires, bytes, number };
        match rows.by_id.get_mut(id) {
            Some(known) => {
                let before = std::mem::replace(known, row);
                rows.bytes -= before.bytes;
                self.bytes -= before.bytes;
                gone.push(before.value);
                rows.queue.push_back(Place { id: id.into(), number, expires });
            }
            None => {
                let id: Arc<str> = id.into();
                self.rows += 1;
                rows.by_id.insert(Arc::clone(&id), row);
                rows.queue.push_back(Place { id, number, expires });
            }
        }
        while let Some(expired) = rows.take_expired(now) {
            self.bytes -= expired.bytes;
            self.rows -= 1;
            gone.push(expired.value);
        }
        rows.compact();
        self.writes_since_sweep += 1;
        if self.writes_since_sweep > 2 * self.rows + WRITES_BEFORE_SWEEP {
            self.sweep(now, &mut gone);
        }
        if self.when_full == WhenFull::Evict {
            while self.bytes > self.max_bytes && self.evict(agent, number, &mut gone) {}
        }
        Ok(gone)
    }

    fn has_room(&self, agent: &str, id: &str, bytes: usize) -> bool {
        let Some(rows) = self.agents.get(agent) else { return true };
        // What is there already may always change.
        rows.by_id.contains_key(id) || rows.bytes + bytes <= self.max_bytes
    }

    /// Removes the oldest row of the agent that holds the most; but never the row that was just written.
    fn evict(&mut self, agent: &Arc<str>, number: u64, gone: &mut Vec<V>) -> bool {
        let Some((largest, rows)) = self.agents.iter_mut().max_by_key(|(_, rows)| rows.bytes) else {
            return false;
        };
        if largest == agent && rows.oldest() == Some(number) {
            return false;
        }
        let Some(row) = rows.take_oldest() else { return false };
        self.bytes -= row.bytes;
        self.rows -= 1;
        gone.push(row.value);
        true
    }

    /// Removes what has expired.
    pub(super) fn sweep(&mut self, now: Instant, gone: &mut Vec<V>) {
        (self.writes_since_sweep, self.swept) = (0, now);
        self.agents.retain(|_, rows| {
            let expired = rows.by_id.extract_if(|_, row| row.expires <= now).map(|(_, row)| row);
            for row in expired {
                rows.bytes -= row.bytes;
                self.bytes -= row.bytes;
                self.rows -= 1;
                gone.push(row.value);
            }
            rows.compact();
            !rows.by_id.is_empty()
        });
    }

    pub(super) fn iter(&self, now: Instant) -> impl Iterator<Item = (&Arc<str>, &Arc<str>, &V)> {
        self.agents.iter().flat_map(move |(agent, rows)| {
            let live = rows.by_id.iter().filter(move |(_, row)| row.expires > now);
            live.map(move |(id, row)| (agent, id, &row.value))
        })
    }
}

impl<V> Rows<V> {
    fn new() -> Self {
        Self { by_id: HashMap::new(), queue: VecDeque::new(), bytes: 0, written: 0 }
    }

    /// Takes the oldest row if it has expired.
    fn take_expired(&mut self, now: Instant) -> Option<Row<V>> {
        while self.queue.front().is_some_and(|oldest| oldest.expires <= now) {
            let Place { id, number, .. } = self.queue.pop_front()?;
            if let Some(row) = self.take(&id, number) {
                return Some(row);
            }
        }
        None
    }

    /// The number of the oldest row. Forgets the outdated places before it.
    fn oldest(&mut self) -> Option<u64> {
        while let Some(Place { id, number, .. }) = self.queue.front() {
            if self.by_id.get(id).is_some_and(|row| row.number == *number) {
                return Some(*number);
            }
            self.queue.pop_front();
        }
        None
    }

    fn take_oldest(&mut self) -> Option<Row<V>> {
        self.oldest()?;
        let Place { id, number, .. } = self.queue.pop_front()?;
        self.take(&id, number)
    }

    /// Takes a row, unless it was written again since.
    fn take(&mut self, id: &str, number: u64) -> Option<Row<V>> {
        self.by_id.get(id).filter(|row| row.number == number)?;
        let row = self.by_id.remove(id)?;
        self.bytes -= row.bytes;
        Some(row)
    }

    fn compact(&mut self) {
        if self.queue.len() > 2 * self.by_id.len() + SLACK {
            let by_id = &self.by_id;
            self.queue.retain(|place| by_id.get(&place.id).is_some_and(|row| row.number == place.number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn put(table: &mut Table<usize>, agent: &str, id: usize, bytes: usize) {
        table.put(&agent.into(), &id.to_string(), id, bytes, HOUR, Instant::now()).unwrap();
    }

    fn held(table: &Table<usize>, agent: &str) -> usize {
        table.iter(Instant::now()).filter(|(owner, ..)| ***owner == *agent).count()
    }

    #[test]
    fn the_oldest_rows_go_when_there_are_too_many_bytes() {
        let mut table = Table::evicting(40_000);
        (0..100).for_each(|id| put(&mut table, "a", id, 1000));
        assert_eq!(table.get("a", "0", Instant::now()), None);
        assert_eq!(table.get("a", "99", Instant::now()), Some(&99));
        assert!((20..=40_000 / (1000 + ROW)).contains(&held(&table, "a")), "{}", held(&table, "a"));
    }

    #[test]
    fn a_busy_agent_evicts_only_its_own_rows() {
        let mut table = Table::evicting(100_000);
        (0..10).for_each(|id| put(&mut table, "quiet", id, 100));
        (0..10_000).for_each(|id| put(&mut table, "busy", id, 100));
        assert_eq!(held(&table, "quiet"), 10);
        put(&mut table, "busy", 10_000, 1_000_000);
        assert_eq!(held(&table, "quiet"), 10);
        assert_eq!(
            table.get("busy", "10000", Instant::now()),
            Some(&10_000),
            "the newest row is always there"
        );
        put(&mut table, "busy", 10_001, 1);
        assert_eq!(table.get("busy", "10000", Instant::now()), None);
    }

    #[test]
    fn a_row_that_grows_beyond_all_others_is_not_evicted_for_itself() {
        let mut table = Table::evicting(10_000);
        for agent in ["a", "b", "c"] {
            put(&mut table, agent, 0, 2_000);
        }
        put(&mut table, "a", 0, 6_000);
        assert_eq!(table.get("a", "0", Instant::now()), Some(&0));
    }

    #[test]
    fn a_row_that_is_written_again_and_again_counts_once() {
        let mut table = Table::evicting(40_000);
        put(&mut table, "a", 0, 1);
        (0..10_000).for_each(|size| put(&mut table, "a", 1, size % 7));
        assert_eq!(held(&table, "a"), 2);
        let rows = &table.agents["a"];
        assert!(rows.queue.len() <= 2 * rows.by_id.len() + SLACK);
        assert_eq!(table.bytes, rows.by_id.values().map(|row| row.bytes).sum::<usize>());
        assert_eq!(rows.bytes, table.bytes);
    }

    #[test]
    fn expired_rows_are_gone_and_leave_as_others_are_written() {
        let mut table = Table::evicting(1 << 30);
        let expired = Duration::ZERO;
        put(&mut table, "a", 0, 1);
        for id in 1..2000 {
            table.put(&"a".into(), &id.to_string(), id, 1, expired, Instant::now()).unwrap();
        }
        assert_eq!(table.get("a", "1", Instant::now()), None);
        // They are behind one that lives, so only a sweep finds them.
        assert_eq!(table.rows, 2000);
        (0..2 * WRITES_BEFORE_SWEEP).for_each(|_| put(&mut table, "b", 0, 1));
        assert_eq!((table.rows, held(&table, "a")), (2, 1));
        for id in 0..2000 {
            table.put(&"c".into(), &id.to_string(), id, 1, expired, Instant::now()).unwrap();
        }
        assert_eq!(table.rows, 2, "the oldest ones leave at once");
    }

    #[test]
    fn a_table_that_refuses_keeps_its_rows_and_has_room_for_every_agent() {
        let mut table = Table::refusing(10 * (ROW + 100));
        let now = Instant::now();
        let mut put = |agent: &str, id: usize, ttl, now| {
            table.put(&agent.into(), &id.to_string(), id, 90, ttl, now).map(drop)
        };
        (0..10).for_each(|id| put("busy", id, HOUR, now).unwrap());
        assert_eq!(put("busy", 10, HOUR, now), Err(Full));
        put("busy", 0, Duration::from_secs(1), now).expect("what is there may change");
        put("quiet", 0, HOUR, now).unwrap();
        assert_eq!(put("busy", 10, HOUR, now), Err(Full));
        put("busy", 10, HOUR, now + Duration::from_secs(2)).expect("one has expired");
    }
}
