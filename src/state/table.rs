//! A table with a limit in bytes and a time to live per row, fair to the agents that share it.
//!
//! Each agent has a map by id, and a map in the order of writing. A full table evicts the oldest row of the agent
//! that holds the most bytes, so that the load of one agent never evicts the rows of a quieter one. A table whose
//! rows must not be evicted refuses new ones instead, with a limit for each agent.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of memory that a row takes in addition to its id and value: its entries in both maps, and its allocations.
const ROW_OVERHEAD: usize = 320;
/// Writes to tolerate before a sweep. Most expired rows are among the oldest and are removed earlier.
const WRITES_BEFORE_SWEEP: usize = 64 << 10;
/// Minimum interval between two sweeps of a full table.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of rows that one step of a sweep visits, which takes well under a millisecond. Only the last step
/// for an agent may take longer, to free the capacity of many rows.
const ROWS_PER_SWEEP_STEP: usize = 1024;
/// Rows for which an agent keeps capacity after a sweep, in addition to twice the rows that it has.
const SPARE_ROWS: usize = 64;

/// The table has no room for another row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WhenFull {
    /// Makes room by evicting rows. The limit applies to all agents together.
    Evict,
    /// Refuses new rows. The limit applies to each agent.
    Refuse,
}

#[derive(Debug)]
pub(super) struct BoundedTable<V> {
    agents: HashMap<Arc<str>, AgentRows<V>>,
    bytes: usize,
    pub(super) max_bytes: usize,
    when_full: WhenFull,
    rows: usize,
    writes_since_sweep: usize,
    last_sweep: Instant,
    current_sweep: Option<Sweep>,
}

/// A sweep that proceeds step by step.
#[derive(Debug)]
struct Sweep {
    /// The agents still to visit; the last one may be visited in part.
    agents: Vec<Arc<str>>,
    /// The number of the last row that was visited of that agent.
    after: u64,
    /// The start of the sweep. Rows that expire later are left to the next one.
    now: Instant,
}

#[derive(Debug)]
struct AgentRows<V> {
    by_id: HashMap<Arc<str>, Row<V>>,
    /// The ids by the number of their last write.
    by_age: BTreeMap<u64, Arc<str>>,
    bytes: usize,
    writes: u64,
}

#[derive(Debug)]
pub(super) struct Row<V> {
    value: V,
    expires: Instant,
    bytes: usize,
    number: u64,
}

/// Runs a sweep to its end and yields between two steps. `step` takes the lock, runs one step and releases the lock.
pub(super) async fn sweep<V>(step: impl Fn() -> Option<Vec<Row<V>>>) {
    while step().is_some() {
        tokio::task::yield_now().await;
    }
}

impl<V> BoundedTable<V> {
    pub(super) fn new(max_bytes: usize, when_full: WhenFull) -> Self {
        Self {
            agents: HashMap::new(),
            bytes: 0,
            max_bytes,
            when_full,
            rows: 0,
            writes_since_sweep: 0,
            last_sweep: Instant::now(),
            current_sweep: None,
        }
    }

    pub(super) fn get(&self, agent: &str, id: &str, now: Instant) -> Option<&V> {
        let row = self.agents.get(agent)?.by_id.get(id)?;
        (row.expires > now).then_some(&row.value)
    }

    /// Inserts or replaces a row of `bytes` bytes, not counting its id. Returns the removed rows, so that the
    /// caller can drop them after it has released its lock.
    pub(super) fn put(
        &mut self,
        agent: &Arc<str>,
        id: &str,
        value: V,
        bytes: usize,
        ttl: Duration,
        now: Instant,
    ) -> Result<Vec<Row<V>>, Full> {
        let mut swept = Vec::new();
        let bytes = ROW_OVERHEAD + id.len() + bytes;
        if self.when_full == WhenFull::Refuse && !self.has_room(agent, id, bytes) {
            if now.duration_since(self.last_sweep) < SWEEP_INTERVAL {
                return Err(Full);
            }
            self.sweep_all(now, &mut swept);
            if !self.has_room(agent, id, bytes) {
                return Err(Full);
            }
        }
        let rows = self.agents.entry(Arc::clone(agent)).or_insert_with(AgentRows::new);
        let expires = now.checked_add(ttl).unwrap_or_else(|| now + Duration::from_secs(u64::from(u32::MAX)));
        let mut removed = Vec::from_iter(rows.put(id, value, bytes, expires));
        let number = rows.writes;
        removed.extend(std::iter::from_fn(|| rows.take_oldest_if(|row| row.expires <= now)));
        self.bytes += bytes;
        self.rows += 1;
        self.subtract(&removed);
        removed.append(&mut swept);
        self.writes_since_sweep += 1;
        if self.writes_since_sweep > 2 * self.rows + WRITES_BEFORE_SWEEP {
            self.sweep_all(now, &mut removed);
        }
        if self.when_full == WhenFull::Evict {
            while self.bytes > self.max_bytes
                && let Some(row) = self.evict(agent, number)
            {
                removed.push(row);
            }
        }
        Ok(removed)
    }

    fn subtract(&mut self, removed: &[Row<V>]) {
        self.bytes -= removed.iter().map(|row| row.bytes).sum::<usize>();
        self.rows -= removed.len();
    }

    fn has_room(&self, agent: &str, id: &str, bytes: usize) -> bool {
        let Some(rows) = self.agents.get(agent) else { return true };
        // Replacing a row is always allowed.
        rows.by_id.contains_key(id) || rows.bytes + bytes <= self.max_bytes
    }

    /// Removes the oldest row of the agent that holds the most, but never the row that was just written.
    fn evict(&mut self, agent: &Arc<str>, number: u64) -> Option<Row<V>> {
        let (largest, rows) = self.agents.iter_mut().max_by_key(|(_, rows)| rows.bytes)?;
        let is_just_written = |row: &Row<V>| largest == agent && row.number == number;
        let row = rows.take_oldest_if(|row| !is_just_written(row))?;
        self.subtract(std::slice::from_ref(&row));
        Some(row)
    }

    fn sweep_all(&mut self, now: Instant, removed: &mut Vec<Row<V>>) {
        (self.writes_since_sweep, self.last_sweep, self.current_sweep) = (0, now, None);
        while let Some(mut swept) = self.sweep_step(now) {
            removed.append(&mut swept);
        }
    }

    /// Begins or continues a sweep, which removes expired rows and frees their capacity. A step is short, so that the
    /// lock is not held for long. Returns the removed rows, or `None` at the end of the sweep.
    pub(super) fn sweep_step(&mut self, now: Instant) -> Option<Vec<Row<V>>> {
        let all = || Sweep { agents: self.agents.keys().cloned().collect(), after: 0, now };
        let mut sweep = self.current_sweep.take().unwrap_or_else(all);
        let agent = sweep.agents.pop()?;
        let mut removed = Vec::new();
        let last = self.agents.get_mut(&agent).and_then(|rows| rows.sweep(&sweep, &mut removed));
        self.subtract(&removed);
        sweep.after = last.unwrap_or(0);
        if last.is_some() {
            sweep.agents.push(agent);
        } else if self.agents.get(&agent).is_some_and(|rows| rows.by_id.is_empty()) {
            self.agents.remove(&agent);
        }
        self.current_sweep = Some(sweep);
        Some(removed)
    }

    /// How many rows take memory, including expired ones.
    #[cfg(test)]
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn iter(&self, now: Instant) -> impl Iterator<Item = (&Arc<str>, &Arc<str>, &V)> {
        self.agents.iter().flat_map(move |(agent, rows)| {
            let live = rows.by_id.iter().filter(move |(_, row)| row.expires > now);
            live.map(move |(id, row)| (agent, id, &row.value))
        })
    }
}

impl<V> AgentRows<V> {
    fn new() -> Self {
        Self { by_id: HashMap::new(), by_age: BTreeMap::new(), bytes: 0, writes: 0 }
    }

    /// Returns the replaced row.
    fn put(&mut self, id: &str, value: V, bytes: usize, expires: Instant) -> Option<Row<V>> {
        self.writes += 1;
        self.bytes += bytes;
        let row = Row { value, expires, bytes, number: self.writes };
        let id = self.by_id.get_key_value(id).map_or_else(|| id.into(), |(id, _)| Arc::clone(id));
        let replaced = self.by_id.insert(Arc::clone(&id), row);
        if let Some(replaced) = &replaced {
            self.bytes -= replaced.bytes;
            self.by_age.remove(&replaced.number);
        }
        self.by_age.insert(self.writes, id);
        replaced
    }

    fn take_oldest_if(&mut self, condition: impl FnOnce(&Row<V>) -> bool) -> Option<Row<V>> {
        let (number, id) = self.by_age.first_key_value()?;
        self.by_id.get(id).filter(|row| condition(row))?;
        self.take(*number)
    }

    fn take(&mut self, number: u64) -> Option<Row<V>> {
        let row = self.by_id.remove(&self.by_age.remove(&number)?)?;
        self.bytes -= row.bytes;
        Some(row)
    }

    /// Takes the expired rows among the next [`ROWS_PER_SWEEP_STEP`] ones. Returns the number of the last of these
    /// if there are more, and frees capacity otherwise.
    fn sweep(&mut self, sweep: &Sweep, expired: &mut Vec<Row<V>>) -> Option<u64> {
        let mut next = self.by_age.range(sweep.after + 1..);
        let step: Vec<(u64, bool)> = next
            .by_ref()
            .take(ROWS_PER_SWEEP_STEP)
            .map(|(number, id)| (*number, self.by_id.get(id).is_some_and(|row| row.expires <= sweep.now)))
            .collect();
        let has_more = next.next().is_some();
        expired.extend(step.iter().filter(|(_, is_expired)| *is_expired).filter_map(|(n, _)| self.take(*n)));
        if has_more {
            return step.last().map(|(number, _)| *number);
        }
        let enough = 2 * self.by_id.len() + SPARE_ROWS;
        if self.by_id.capacity() > 2 * enough {
            self.by_id.shrink_to(enough);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn put(table: &mut BoundedTable<usize>, agent: &str, id: usize, bytes: usize) {
        table.put(&agent.into(), &id.to_string(), id, bytes, HOUR, Instant::now()).unwrap();
    }

    fn held(table: &BoundedTable<usize>, agent: &str) -> usize {
        table.iter(Instant::now()).filter(|(owner, ..)| ***owner == *agent).count()
    }

    #[test]
    fn a_table_over_its_limit_evicts_the_oldest_rows() {
        let mut table = BoundedTable::new(40_000, WhenFull::Evict);
        (0..100).for_each(|id| put(&mut table, "a", id, 1000));
        assert_eq!(table.get("a", "0", Instant::now()), None);
        assert_eq!(table.get("a", "99", Instant::now()), Some(&99));
        assert!((20..=40_000 / (1000 + ROW_OVERHEAD)).contains(&held(&table, "a")), "{}", held(&table, "a"));
    }

    #[test]
    fn a_busy_agent_evicts_only_its_own_rows() {
        let mut table = BoundedTable::new(100_000, WhenFull::Evict);
        (0..10).for_each(|id| put(&mut table, "quiet", id, 100));
        (0..10_000).for_each(|id| put(&mut table, "busy", id, 100));
        assert_eq!(held(&table, "quiet"), 10);
        put(&mut table, "busy", 10_000, 1_000_000);
        assert_eq!(held(&table, "quiet"), 10);
        assert_eq!(
            table.get("busy", "10000", Instant::now()),
            Some(&10_000),
            "the newest row is never evicted"
        );
        put(&mut table, "busy", 10_001, 1);
        assert_eq!(table.get("busy", "10000", Instant::now()), None);
    }

    #[test]
    fn a_row_that_grows_beyond_all_others_is_not_evicted_for_itself() {
        let mut table = BoundedTable::new(10_000, WhenFull::Evict);
        for agent in ["a", "b", "c"] {
            put(&mut table, agent, 0, 2_000);
        }
        put(&mut table, "a", 0, 6_000);
        assert_eq!(table.get("a", "0", Instant::now()), Some(&0));
    }

    #[test]
    fn a_row_that_is_written_repeatedly_counts_once() {
        let mut table = BoundedTable::new(40_000, WhenFull::Evict);
        put(&mut table, "a", 0, 1);
        (0..10_000).for_each(|size| put(&mut table, "a", 1, size % 7));
        assert_eq!(held(&table, "a"), 2);
        let rows = &table.agents["a"];
        assert_eq!(rows.by_age.len(), rows.by_id.len());
        assert_eq!(table.bytes, rows.by_id.values().map(|row| row.bytes).sum::<usize>());
        assert_eq!(rows.bytes, table.bytes);
    }

    #[test]
    fn expired_rows_are_not_found_and_later_writes_remove_them() {
        let mut table = BoundedTable::new(1 << 30, WhenFull::Evict);
        let expired = Duration::ZERO;
        put(&mut table, "a", 0, 1);
        for id in 1..2000 {
            table.put(&"a".into(), &id.to_string(), id, 1, expired, Instant::now()).unwrap();
        }
        assert_eq!(table.get("a", "1", Instant::now()), None);
        // They are newer than a live row, so only a sweep finds them.
        assert_eq!(table.rows, 2000);
        (0..2 * WRITES_BEFORE_SWEEP).for_each(|_| put(&mut table, "b", 0, 1));
        assert_eq!((table.rows, held(&table, "a")), (2, 1));
        for id in 0..2000 {
            table.put(&"c".into(), &id.to_string(), id, 1, expired, Instant::now()).unwrap();
        }
        assert_eq!(table.rows, 2, "the oldest ones are removed immediately");
    }

    /// Sweeps to the end; returns the number of steps.
    fn sweep_all(table: &mut BoundedTable<usize>, now: Instant) -> usize {
        std::iter::from_fn(|| table.sweep_step(now)).count()
    }

    #[test]
    fn a_sweep_removes_expired_rows_step_by_step_and_frees_their_capacity() {
        let mut table = BoundedTable::new(1 << 30, WhenFull::Evict);
        let now = Instant::now();
        let (second, rows) = (Duration::from_secs(1), 20 * ROWS_PER_SWEEP_STEP);
        for id in 0..rows {
            // Some rows do not expire, at the front and in between; one is written again.
            let ttl = if id % ROWS_PER_SWEEP_STEP == 0 { HOUR } else { second };
            table.put(&"a".into(), &id.to_string(), id, 1, ttl, now).unwrap();
        }
        table.put(&"a".into(), "1", 1, 1, HOUR, now).unwrap();
        (0..rows).for_each(|id| drop(table.put(&"b".into(), &id.to_string(), id, 1, second, now).unwrap()));
        sweep_all(&mut table, now);
        assert_eq!(table.rows, 2 * rows, "nothing has expired");
        let steps = sweep_all(&mut table, now + second);
        assert!((40..=42).contains(&steps), "{steps}");
        assert_eq!((table.rows, held(&table, "a"), table.agents.len()), (21, 21, 1));
        let a = &table.agents["a"];
        assert_eq!((a.by_age.len(), a.bytes), (21, table.bytes));
        assert_eq!(table.bytes, a.by_id.values().map(|row| row.bytes).sum::<usize>());
        assert!(a.by_id.capacity() < 1000);
        put(&mut table, "a", 2, 1);
        assert_eq!(held(&table, "a"), 22);
    }

    #[test]
    fn a_sweep_continues_after_the_table_has_changed() {
        let mut table = BoundedTable::new(1 << 30, WhenFull::Evict);
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        for id in 0..3 * ROWS_PER_SWEEP_STEP {
            table.put(&"a".into(), &id.to_string(), id, 1, Duration::from_secs(1), now).unwrap();
        }
        table.sweep_step(later).unwrap();
        // The first of these writes removes all expired rows.
        (0..10).for_each(|id| drop(table.put(&"a".into(), &id.to_string(), id, 1, HOUR, later).unwrap()));
        sweep_all(&mut table, later);
        assert_eq!((table.rows, held(&table, "a")), (10, 10));
        assert_eq!(table.bytes, table.agents["a"].bytes);
    }

    #[test]
    fn a_refusing_table_keeps_its_rows_and_has_room_for_every_agent() {
        let mut table = BoundedTable::new(10 * (ROW_OVERHEAD + 100), WhenFull::Refuse);
        let now = Instant::now();
        let mut put = |agent: &str, id: usize, ttl, now| {
            table.put(&agent.into(), &id.to_string(), id, 90, ttl, now).map(drop)
        };
        (0..10).for_each(|id| put("busy", id, HOUR, now).unwrap());
        assert_eq!(put("busy", 10, HOUR, now), Err(Full));
        put("busy", 0, Duration::from_secs(1), now).expect("a row can be replaced");
        put("quiet", 0, HOUR, now).unwrap();
        assert_eq!(put("busy", 10, HOUR, now), Err(Full));
        put("busy", 10, HOUR, now + Duration::from_secs(2)).expect("one has expired");
    }
}
