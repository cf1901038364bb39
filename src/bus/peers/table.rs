//! What is known about each replica, as a state machine without a clock and without NATS.
//!
//! ```text
//!              sign of life                       three failures in a row, over nine seconds,
//! (unknown) ───────────────> alive ──┐            or a single one after an announced leave
//!     │                       ▲      │ failure                          │
//!     │ named in a record     │      ▼                                  ▼
//!     └─────────────────> unreachable ──────────────────────────────> dead ──sign of life──> alive
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use crate::bus::subject::Token;
use crate::state::peers::{Death, InstanceId, Liveness, RETURN_GRACE};

/// Replicas that are pinged. Each pings all others.
const MAX_PEERS: usize = 256;
/// Dead replicas that are remembered, so that the records of a replica that stopped long ago cause no pings.
const MAX_DEAD: usize = 4096;
/// Agents that are remembered for one replica. One that announces more counts as serving all agents.
const MAX_AGENTS: usize = 1024;
/// After this many failures in a row …
const MAX_FAILURES: u32 = 3;
/// … over at least this time, a replica is dead. A little less than two periods of pings, which are not exact.
const MIN_SILENCE: Duration = Duration::from_secs(9);
/// How long a sign of life counts. A little more than the period of pings.
const FRESH: Duration = Duration::from_secs(6);
/// How long a failure counts, before a request asks again.
const RECENT_FAILURE: Duration = Duration::from_secs(1);

/// What to do to learn whether a replica is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Known(Liveness),
    /// The last sign of life is too old.
    Ask,
    /// There are too many replicas to keep track of this one.
    AskUntracked,
}

#[derive(Debug, Default)]
pub(super) struct PeerTable {
    peers: HashMap<InstanceId, Peer>,
    dead: RecentIds,
}

/// The replicas that serve an agent.
#[derive(Debug, Default)]
pub(super) struct Serving {
    /// Those that have announced it.
    pub certain: HashSet<InstanceId>,
    /// Those of which it is not known.
    pub possible: HashSet<InstanceId>,
    /// Whether one that has announced it does not respond to pings.
    pub has_silent: bool,
}

impl Serving {
    /// Whether there is nobody to ask.
    pub(super) fn is_empty(&self) -> bool {
        self.certain.is_empty() && self.possible.is_empty()
    }
}

#[derive(Debug, Default)]
struct Peer {
    /// `None` if not known, or too many.
    agents: Option<HashSet<Token>>,
    last_seen: Option<Instant>,
    /// Since the last sign of life.
    failures: Failures,
    last_failure: Option<Instant>,
    is_leaving: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct Failures {
    count: u32,
    first: Option<Instant>,
}

impl PeerTable {
    /// Whether a replica is alive, without asking it. A replica that is not known is one from now on.
    pub(super) fn verdict(&mut self, instance: InstanceId, now: Instant) -> Verdict {
        if self.dead.contains(&instance) {
            return Verdict::Known(Liveness::Dead);
        }
        if !self.peers.contains_key(&instance) && !self.make_room() {
            return Verdict::AskUntracked;
        }
        let peer = self.peers.entry(instance).or_default();
        let is_recent = |at: Option<Instant>, within| at.is_some_and(|at| now.duration_since(at) < within);
        if is_recent(peer.last_failure, RECENT_FAILURE) {
            return Verdict::Known(Liveness::Unreachable);
        }
        let is_alive = peer.failures.count == 0 && peer.last_failure < peer.last_seen;
        match is_alive && is_recent(peer.last_seen, FRESH) {
            true => Verdict::Known(Liveness::Alive),
            false => Verdict::Ask,
        }
    }

    /// What is known about a replica that cannot be asked now.
    pub(super) fn without_asking(&mut self, instance: InstanceId) -> Liveness {
        if self.dead.contains(&instance) { Liveness::Dead } else { Liveness::Unreachable }
    }

    /// A sign of life. Returns whether the replica was not known to be alive before.
    pub(super) fn seen(&mut self, instance: InstanceId, now: Instant) -> bool {
        let was_dead = self.dead.remove(&instance);
        if !self.peers.contains_key(&instance) && !self.make_room() {
            return false;
        }
        let peer = self.peers.entry(instance).or_default();
        let is_new = was_dead || peer.last_seen.is_none();
        peer.last_seen = Some(now);
        peer.failures = Failures::default();
        peer.last_failure = None;
        is_new
    }

    /// The agents that a replica serves, as it announces them.
    pub(super) fn serves(&mut self, instance: InstanceId, agents: Option<HashSet<Token>>) {
        if let Some(peer) = self.peers.get_mut(&instance) {
            peer.agents = agents.filter(|agents| agents.len() <= MAX_AGENTS);
        }
    }

    /// The replica announces that it stops. Returns whether that is new.
    pub(super) fn leaves(&mut self, instance: InstanceId) -> bool {
        match self.peers.get_mut(&instance) {
            Some(peer) => !std::mem::replace(&mut peer.is_leaving, true),
            None => false,
        }
    }

    /// A request got no response. It counts only once in each period of pings, whatever requests find in between.
    pub(super) fn unreachable(&mut self, instance: InstanceId, now: Instant) {
        if let Some(peer) = self.peers.get_mut(&instance) {
            peer.last_failure = Some(now);
        }
    }

    /// The ping of a period failed.
    pub(super) fn ping_failed(&mut self, instance: InstanceId, now: Instant) -> Option<Death> {
        let peer = self.peers.get_mut(&instance)?;
        peer.last_failure = Some(now);
        peer.failures.count += 1;
        let first = *peer.failures.first.get_or_insert(now);
        let is_silent =
            peer.failures.count >= MAX_FAILURES && now.saturating_duration_since(first) >= MIN_SILENCE;
        is_silent.then(|| self.remove(instance, now)).flatten()
    }

    /// A replica has no responders. If it has announced that it leaves, it has stopped.
    pub(super) fn has_left(&mut self, instance: InstanceId, now: Instant) -> Option<Death> {
        let is_leaving = self.peers.get(&instance)?.is_leaving;
        is_leaving.then(|| self.remove(instance, now)).flatten()
    }

    fn remove(&mut self, instance: InstanceId, now: Instant) -> Option<Death> {
        let Peer { is_leaving, last_seen, .. } = self.peers.remove(&instance)?;
        // One that has never responded was gone before this process started.
        let may_return = !is_leaving && last_seen.is_some();
        self.dead.insert(instance, may_return.then(|| now + RETURN_GRACE));
        Some(Death { instance, is_orderly: is_leaving })
    }

    /// The connection of this process was interrupted: failures from before say nothing about others.
    pub(super) fn forgive(&mut self) {
        for peer in self.peers.values_mut() {
            peer.failures = Failures::default();
        }
    }

    /// Everyone to ping.
    pub(super) fn instances(&self) -> Vec<InstanceId> {
        self.peers.keys().copied().collect()
    }

    /// Who serves an agent, as far as is known.
    pub(super) fn serving(&self, agent: &Token) -> Serving {
        let mut serving = Serving::default();
        for (id, peer) in self.peers.iter().filter(|(_, peer)| peer.last_seen.is_some()) {
            match &peer.agents {
                Some(agents) if !agents.contains(agent) => {}
                Some(_) if peer.failures.count > 0 => serving.has_silent = true,
                Some(_) => drop(serving.certain.insert(*id)),
                None if peer.failures.count > 0 => {}
                None => drop(serving.possible.insert(*id)),
            }
        }
        serving
    }

    /// Whether a replica that does not respond may come back with what its process knows.
    pub(super) fn may_return(&self, instance: InstanceId, now: Instant) -> bool {
        match self.dead.ids.get(&instance) {
            Some(may_return_until) => may_return_until.is_some_and(|until| now < until),
            None => true,
        }
    }

    /// How many others are alive or may be.
    pub(super) fn len(&self) -> usize {
        self.peers.values().filter(|peer| peer.last_seen.is_some()).count()
    }

    /// Whether there is room for one more. One that has never responded makes room, if need be.
    fn make_room(&mut self) -> bool {
        if self.peers.len() < MAX_PEERS {
            return true;
        }
        let never_seen = self.peers.iter().find(|(_, peer)| peer.last_seen.is_none()).map(|(id, _)| *id);
        never_seen.is_some_and(|id| self.peers.remove(&id).is_some())
    }
}

/// The dead replicas, and until when they may return. It forgets the oldest of too many.
#[derive(Debug, Default)]
struct RecentIds {
    ids: HashMap<InstanceId, Option<Instant>>,
    order: VecDeque<InstanceId>,
}

impl RecentIds {
    fn contains(&self, id: &InstanceId) -> bool {
        self.ids.contains_key(id)
    }

    fn insert(&mut self, id: InstanceId, may_return_until: Option<Instant>) {
        if self.ids.insert(id, may_return_until).is_none() {
            self.order.push_back(id);
        }
        if self.order.len() > MAX_DEAD
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
    }

    fn remove(&mut self, id: &InstanceId) -> bool {
        let was_there = self.ids.remove(id).is_some();
        if was_there {
            self.order.retain(|other| other != id);
        }
        was_there
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    const PERIOD: Duration = Duration::from_secs(5);

    fn id(number: u128) -> InstanceId {
        Uuid::from_u128(number)
    }

    #[test]
    fn a_replica_is_dead_after_three_failed_pings_in_a_row() {
        let (mut table, began) = (PeerTable::default(), Instant::now());
        assert!(table.seen(id(1), began), "it is new");
        assert!(!table.seen(id(1), began));
        assert_eq!(table.verdict(id(1), began + PERIOD), Verdict::Known(Liveness::Alive));
        let first = began + PERIOD;
        assert_eq!(table.ping_failed(id(1), first), None);
        assert_eq!(table.verdict(id(1), first), Verdict::Known(Liveness::Unreachable));
        assert_eq!(table.verdict(id(1), first + RECENT_FAILURE), Verdict::Ask);
        // Requests that fail in between do not hurry.
        table.unreachable(id(1), first + RECENT_FAILURE);
        assert_eq!(table.ping_failed(id(1), first + PERIOD), None);
        let death = table.ping_failed(id(1), first + 2 * PERIOD);
        assert_eq!(death, Some(Death { instance: id(1), is_orderly: false }));
        assert_eq!(table.verdict(id(1), first + 2 * PERIOD), Verdict::Known(Liveness::Dead));
        assert!(table.instances().is_empty(), "the dead are not pinged");
        assert!(table.seen(id(1), first + 3 * PERIOD), "it is back");
        assert_eq!(table.verdict(id(1), first + 3 * PERIOD), Verdict::Known(Liveness::Alive));
    }

    #[test]
    fn quick_failures_and_a_sign_of_life_in_between_are_no_death() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        table.seen(id(1), now);
        for _ in 0..10 {
            assert_eq!(table.ping_failed(id(1), now), None, "a short interruption");
        }
        table.seen(id(1), now + PERIOD);
        for period in 2..4 {
            assert_eq!(table.ping_failed(id(1), now + period * PERIOD), None);
        }
        // The connection of this process was interrupted.
        table.forgive();
        assert_eq!(table.ping_failed(id(1), now + 4 * PERIOD), None);
        assert_eq!(table.ping_failed(id(1), now + 5 * PERIOD), None);
        assert!(table.ping_failed(id(1), now + 6 * PERIOD).is_some());
    }

    #[test]
    fn a_replica_that_leaves_is_dead_as_soon_as_it_has_no_responders() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        assert!(!table.leaves(id(1)), "not known");
        table.seen(id(1), now);
        assert_eq!(table.has_left(id(1), now), None, "it has not announced it");
        assert!(table.leaves(id(1)));
        assert!(!table.leaves(id(1)), "announced twice");
        // A response that was under way when it left.
        table.seen(id(1), now);
        assert_eq!(table.has_left(id(1), now), Some(Death { instance: id(1), is_orderly: true }));
        assert_eq!(table.has_left(id(1), now), None, "only once");
    }

    #[test]
    fn a_replica_that_was_only_cut_off_may_return_for_a_minute() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        for number in [1, 2] {
            table.seen(id(number), now);
        }
        let failures = [0, 1, 2].map(|period| table.ping_failed(id(1), now + period * PERIOD));
        assert!(failures[2].is_some());
        let dead = now + 2 * PERIOD;
        assert!(table.may_return(id(1), dead + RETURN_GRACE - PERIOD));
        assert!(!table.may_return(id(1), dead + RETURN_GRACE));
        table.leaves(id(2));
        table.has_left(id(2), now);
        assert!(!table.may_return(id(2), now), "it has stopped");
    }

    #[test]
    fn an_owner_that_nobody_knows_is_pinged_until_it_is_dead() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        assert_eq!(table.verdict(id(1), now), Verdict::Ask);
        table.unreachable(id(1), now);
        assert_eq!(table.instances(), [id(1)]);
        assert!(table.len() == 0 && table.serving(&Token::new("a")).is_empty(), "it has never responded");
        assert_eq!(table.ping_failed(id(1), now), None);
        assert_eq!(table.ping_failed(id(1), now + PERIOD), None);
        assert!(table.ping_failed(id(1), now + 2 * PERIOD).is_some());
        assert!(!table.may_return(id(1), now + 2 * PERIOD), "it was gone before this process started");
    }

    #[test]
    fn only_replicas_that_may_serve_an_agent_count() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        for number in 1..=3 {
            table.seen(id(number), now);
        }
        table.serves(id(1), Some([Token::new("a")].into()));
        table.serves(id(2), Some((0..=MAX_AGENTS).map(|n| Token::new(&n.to_string())).collect()));
        let serving = |table: &PeerTable, agent: &str| {
            let Serving { certain, possible, has_silent } = table.serving(&Token::new(agent));
            (certain.len(), possible.len(), has_silent)
        };
        assert_eq!(serving(&table, "a"), (1, 2, false), "two of them may serve any agent");
        assert_eq!(serving(&table, "b"), (0, 2, false));
        table.ping_failed(id(3), now);
        assert_eq!((serving(&table, "b"), table.len()), ((0, 1, false), 3));
        table.ping_failed(id(1), now);
        assert_eq!((serving(&table, "a"), serving(&table, "b")), ((0, 1, true), (0, 1, false)));
    }

    #[test]
    fn the_tables_are_bounded() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        for number in 0..MAX_PEERS as u128 {
            assert_eq!(table.verdict(id(number), now), Verdict::Ask, "named in a record");
        }
        for number in 1000..1000 + MAX_PEERS as u128 {
            assert!(table.seen(id(number), now), "one that responds takes the place of one that never did");
        }
        assert_eq!(table.len(), MAX_PEERS);
        assert_eq!(table.verdict(id(1), now), Verdict::AskUntracked);
        assert!(!table.seen(id(1), now));
        let mut dead = RecentIds::default();
        for number in 0..2 * MAX_DEAD as u128 {
            dead.insert(id(number), None);
        }
        assert_eq!((dead.ids.len(), dead.order.len()), (MAX_DEAD, MAX_DEAD));
        assert!(dead.remove(&id(2 * MAX_DEAD as u128 - 1)) && !dead.contains(&id(1)));
    }
}
