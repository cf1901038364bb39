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
/// Places that one step of a sweep looks at, which takes well below a millisecond. Only the last step for an agent may
/// take longer, to give back the room of many rows.
const STEP: usize = 1024;
/// Room that an agent keeps after a sweep, beside twice what it needs.
const SPARE: usize = 64;

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
    sweeping: Option<Sweep>,
}

/// A sweep that goes on step by step.
#[derive(Debug)]
struct Sweep {
    // Agents that were not seen yet, the last of them in part.
    agents: Vec<Arc<str>>,
    // The number of the last place that was seen of that agent.
    after: u64,
    // When it began. What expires later is left to the next one.
    now: Instant,
}

/// What a step of a sweep has removed, to be dropped after the lock is released.
#[derive(Debug)]
pub(super) struct Swept<V> {
    rows: Vec<Row<V>>,
    places: VecDeque<Place>,
    agent: Option<Rows<V>>,
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

/// Takes all steps of a sweep; between two of them, others run. `step` takes one and releases the lock.
pub(super) async fn sweep<V>(step: impl Fn() -> Option<Swept<V>>) {
    while step().is_some() {
        tokio::task::yield_now().await;
    }
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
            sweeping: None,
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

    pub(super) fn sweep(&mut self, now: Instant, gone: &mut Vec<V>) {
        (self.writes_since_sweep, self.swept) = (0, now);
        self.agents.retain(|_, rows| {
            let mut expired = Vec::new();
            rows.sweep(0, usize::MAX, now, &mut expired);
            for row in expired {
                self.bytes -= row.bytes;
                self.rows -= 1;
                gone.push(row.value);
            }
            rows.compact();
            !rows.by_id.is_empty()
        });
    }

    /// Begins or continues to remove what has expired, and to give back the room that it took. One step is short,
    /// so that the lock is not held for long; `None` when all has been seen.
    pub(super) fn sweep_step(&mut self, now: Instant) -> Option<Swept<V>> {
        let all = || Sweep { agents: self.agents.keys().cloned().collect(), after: 0, now };
        let Sweep { mut agents, after, now } = self.sweeping.take().unwrap_or_else(all);
        let agent = agents.pop()?;
        let mut swept = Swept { rows: Vec::new(), places: VecDeque::new(), agent: None };
        let rows = self.agents.get_mut(&agent);
        let seen = rows.and_then(|rows| rows.sweep(after, STEP, now, &mut swept.rows));
        self.bytes -= swept.rows.iter().map(|row| row.bytes).sum::<usize>();
        self.rows -= swept.rows.len();
        let after = match seen {
            Some(number) => {
                agents.push(agent);
                number
            }
            None => {
                self.shrink(&agent, now, &mut swept);
                0
            }
        };
        self.sweeping = Some(Sweep { agents, after, now });
        Some(swept)
    }

    /// Gives back the room that an agent does not need any more after its rows were swept.
    fn shrink(&mut self, agent: &str, now: Instant, swept: &mut Swept<V>) {
        match self.agents.get_mut(agent) {
            Some(rows) if rows.by_id.is_empty() => swept.agent = self.agents.remove(agent),
            Some(rows) => swept.places = rows.shrink(now),
            None => {}
        }
    }

    /// How many rows take memory, those that have expired included.
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

    /// Takes what has expired among the first `limit` places behind number `after`. The number of the last of
    /// these places, if there are more.
    fn sweep(&mut self, after: u64, limit: usize, now: Instant, expired: &mut Vec<Row<V>>) -> Option<u64> {
        let begin = self.queue.partition_point(|place| place.number <= after);
        let mut places = self.queue.range(begin..);
        let mut last = None;
        for Place { id, number, expires } in places.by_ref().take(limit) {
            last = Some(*number);
            if *expires <= now
                && self.by_id.get(id).is_some_and(|row| row.number == *number)
                && let Some(row) = self.by_id.remove(id)
            {
                self.bytes -= row.bytes;
                expired.push(row);
            }
        }
        last.filter(|_| places.len() > 0)
    }

    fn compact(&mut self) {
        if self.queue.len() > 2 * self.by_id.len() + SLACK {
            let by_id = &self.by_id;
            self.queue.retain(|place| by_id.get(&place.id).is_some_and(|row| row.number == place.number));
        }
    }

    /// Gives back room after all rows that had expired at `now` were taken. Returns the places of such rows.
    fn shrink(&mut self, now: Instant) -> VecDeque<Place> {
        let enough = 2 * self.by_id.len() + SPARE;
        let mut outdated = VecDeque::new();
        if self.queue.len() > enough {
            let places = std::mem::take(&mut self.queue).into_iter();
            (self.queue, outdated) = places.partition(|place| place.expires > now);
        }
        if self.queue.capacity() > 2 * enough {
            self.queue.shrink_to(enough);
        }
        if self.by_id.capacity() > 2 * enough {
            self.by_id.shrink_to(enough);
        }
        outdated
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

    /// Sweeps until all has been seen; how many steps that took.
    fn sweep_all(table: &mut Table<usize>, now: Instant) -> usize {
        std::iter::from_fn(|| table.sweep_step(now)).count()
    }

    #[test]
    fn a_sweep_takes_what_has_expired_step_by_step_and_gives_back_its_room() {
        let mut table = Table::evicting(1 << 30);
        let now = Instant::now();
        let (second, rows) = (Duration::from_secs(1), 20 * STEP);
        for id in 0..rows {
            // Some live on, at the front and in between; one is written again.
            let ttl = if id % STEP == 0 { HOUR } else { second };
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
        assert_eq!((a.queue.len(), a.bytes), (21, table.bytes));
        assert_eq!(table.bytes, a.by_id.values().map(|row| row.bytes).sum::<usize>());
        assert!(a.by_id.capacity() < 1000 && a.queue.capacity() < 1000);
        put(&mut table, "a", 2, 1);
        assert_eq!(held(&table, "a"), 22);
    }

    #[test]
    fn a_sweep_goes_on_after_the_table_has_changed() {
        let mut table = Table::evicting(1 << 30);
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        for id in 0..3 * STEP {
            table.put(&"a".into(), &id.to_string(), id, 1, Duration::from_secs(1), now).unwrap();
        }
        table.sweep_step(later).unwrap();
        // The first of these takes all that has expired at once.
        (0..10).for_each(|id| drop(table.put(&"a".into(), &id.to_string(), id, 1, HOUR, later).unwrap()));
        sweep_all(&mut table, later);
        assert_eq!((table.rows, held(&table, "a")), (10, 10));
        assert_eq!(table.bytes, table.agents["a"].bytes);
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
