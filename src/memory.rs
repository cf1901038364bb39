//! The memory budget of the process (`limits.memory`), shared fairly between agents.
//!
//! Half of the budget is for calls in flight: requests, the responses of agents, and replies until they are encoded.
//! Three sixteenths are for [state](crate::state), a sixteenth for messages that wait for the connection to NATS, another
//! one for requests that the bridge has received and not read yet, and the rest for everything that is not counted:
//! connections, buffers, the allocator's slack, the program itself. Sizes are counted as allocated, not as sent.
//!
//! While the process comes near its budget, because the rest is not enough, the [`reclaimer`] withholds memory from calls.
//!
//! ```text
//! MemoryBudget ──┬── MemoryAccount of agent a ──┬── MemoryCharge of a call
//!                └── MemoryAccount of agent b   └── MemoryCharge of its reply
//! ```
//!
//! # Fairness
//!
//! An agent may hold as much as remains free. So one agent gets at most half of the memory for calls, two agents get
//! at most a third each, and the calls of a quiet agent always find free memory, without any setting per agent. While
//! memory is withheld, little may remain free. Then each agent may still hold a [small share](MemoryBudget::small_share),
//! as long as calls use less than half of the budget.

pub(crate) mod reclaimer;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::Thread;

use tokio::sync::Semaphore;

use crate::reply::error::{ActionError, Code};

/// Larger charges grow in blocks, so that the next token of a stream seldom touches the shared counters.
const BLOCK: usize = 16 << 10;
/// What an agent may hold while memory is withheld: this fraction of the memory for calls, …
const SMALL_SHARE: usize = 32;
/// … but at least this.
const MIN_SMALL_SHARE: usize = 4 << 20;
/// The default budget is a quarter of the machine's memory. On a small machine it is this much, or half of its memory.
const MIN_DEFAULT: u64 = 256 << 20;
/// Assumed memory of the machine if it cannot be read.
const ASSUMED_MACHINE: u64 = 2 << 30;

/// The remaining budget is too small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the bridge has no memory left for calls to this agent (`limits.memory`)")]
pub(crate) struct OutOfMemory;

impl From<OutOfMemory> for ActionError {
    fn from(error: OutOfMemory) -> Self {
        Self::new(Code::Busy, format!("{error}; try again"))
    }
}

/// Why something from an agent does not fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SizeError {
    /// It exceeds its own limit.
    TooLarge,
    OutOfMemory,
}

impl From<OutOfMemory> for SizeError {
    fn from(OutOfMemory: OutOfMemory) -> Self {
        Self::OutOfMemory
    }
}

/// The memory for the calls of all agents.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    limit: usize,
    used: AtomicUsize,
    /// What calls may not use at the moment, because the process takes more memory than the budget counts.
    withheld: AtomicUsize,
    /// The resident memory above which memory is withheld.
    max_resident: usize,
    /// Bytes of messages that may wait for the connection.
    sending: Arc<Semaphore>,
    /// The size of `sending`.
    sending_limit: usize,
    accounts: Mutex<HashMap<Arc<str>, Weak<MemoryAccount>>>,
    /// Returns freed memory to the system; woken when the budget becomes [pressed](MemoryBudget::is_pressed).
    reclaimer: OnceLock<Thread>,
}

impl MemoryBudget {
    /// `limit` is the memory for the whole process.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        let part = |divisor| usize::try_from(limit / divisor).unwrap_or(usize::MAX / 2);
        let sending_limit = part(16).min(Semaphore::MAX_PERMITS);
        // A limit that is smaller than the program itself must still leave memory for calls.
        let max_resident = part(16).saturating_mul(13).max(resident().unwrap_or(0).saturating_add(part(2)));
        Arc::new(Self {
            limit: part(2),
            used: AtomicUsize::new(0),
            withheld: AtomicUsize::new(0),
            max_resident,
            sending: Arc::new(Semaphore::new(sending_limit)),
            sending_limit,
            accounts: Mutex::default(),
            reclaimer: OnceLock::new(),
        })
    }

    /// The account of an agent. An agent that replaces another one of the same name continues its account.
    pub(crate) fn account(self: &Arc<Self>, agent: &str) -> Arc<MemoryAccount> {
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = accounts.get(agent).and_then(Weak::upgrade) {
            return account;
        }
        let agent: Arc<str> = agent.into();
        let account = Arc::new(MemoryAccount {
            agent: Arc::clone(&agent),
            budget: Arc::clone(self),
            used: AtomicUsize::new(0),
            refusals: AtomicU64::new(0),
        });
        accounts.retain(|_, account| account.strong_count() > 0);
        accounts.insert(agent, Arc::downgrade(&account));
        account
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes of requests that may wait in the NATS client until the bridge reads them.
    pub(crate) fn max_waiting(&self) -> usize {
        self.limit / 8
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// The process has `resident` bytes. If these are too many, withholds several times the excess from calls, because
    /// only a part of it is freed when calls end.
    fn set_resident(&self, resident: usize) {
        let withheld = resident.saturating_sub(self.max_resident).saturating_mul(4);
        self.withheld.store(withheld.min(self.limit), Relaxed);
    }

    /// What calls may not use at the moment.
    pub(crate) fn withheld(&self) -> usize {
        self.withheld.load(Relaxed)
    }

    /// What an agent may hold while memory is withheld, if there is as much.
    fn small_share(&self) -> usize {
        (self.limit / SMALL_SHARE).max(MIN_SMALL_SHARE)
    }

    /// Whether calls use so much memory that freed memory must not wait long until it returns to the system: a
    /// sixteenth of what they may use.
    fn is_pressed(&self) -> bool {
        self.is_pressed_by(self.used())
    }

    fn is_pressed_by(&self, used: usize) -> bool {
        used > self.limit / 16
    }

    /// Calls use `now` bytes, and used `before`.
    fn has_grown(&self, before: usize, now: usize) {
        if self.is_pressed_by(now)
            && !self.is_pressed_by(before)
            && let Some(reclaimer) = self.reclaimer.get()
        {
            reclaimer.unpark();
        }
    }
}

/// The memory for the calls of one agent.
#[derive(Debug)]
pub(crate) struct MemoryAccount {
    /// The name of the agent.
    pub agent: Arc<str>,
    budget: Arc<MemoryBudget>,
    used: AtomicUsize,
    refusals: AtomicU64,
}

impl MemoryAccount {
    /// An account without a limit.
    #[cfg(test)]
    pub(crate) fn unlimited(agent: &str) -> Arc<Self> {
        MemoryBudget::new(u64::MAX).account(agent)
    }

    /// Charges `bytes` until the charge is dropped.
    pub(crate) fn charge(self: &Arc<Self>, bytes: usize) -> Result<MemoryCharge, OutOfMemory> {
        let mut charge = self.empty_charge();
        charge.resize(bytes)?;
        Ok(charge)
    }

    /// The bytes of messages of all agents that may wait for the connection.
    pub(crate) fn sending(&self) -> &Arc<Semaphore> {
        &self.budget.sending
    }

    /// The most that one message takes of [`MemoryAccount::sending`], so that a few large ones do not take all of it.
    pub(crate) fn max_sending(&self) -> usize {
        self.budget.sending_limit / 4
    }

    /// A charge of zero bytes, to be [resized](MemoryCharge::resize).
    pub(crate) fn empty_charge(self: &Arc<Self>) -> MemoryCharge {
        MemoryCharge { account: Arc::clone(self), bytes: 0 }
    }

    /// Adjusts a charge that exists only while it covers more than a block. Most calls need less, and the number of
    /// calls in flight bounds them, so that they do not touch the shared counters.
    pub(crate) fn cover(
        self: &Arc<Self>,
        charge: &mut Option<MemoryCharge>,
        bytes: usize,
    ) -> Result<(), OutOfMemory> {
        if bytes <= BLOCK {
            *charge = None;
            return Ok(());
        }
        charge.get_or_insert_with(|| self.empty_charge()).resize(bytes)
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// How often the budget refused memory to this agent.
    pub(crate) fn refusals(&self) -> u64 {
        self.refusals.load(Relaxed)
    }

    fn add(&self, bytes: usize) -> Result<(), OutOfMemory> {
        if bytes <= self.budget.limit {
            // To the agent's own counter first, so that concurrent charges of one agent count each other.
            let own = self.used.fetch_add(bytes, Relaxed) + bytes;
            let (withheld, small_share) = (self.budget.withheld(), self.budget.small_share());
            // To the common counter only if there is room: to add first and undo it later would refuse the charges of
            // other agents meanwhile.
            let added = self.budget.used.fetch_update(Relaxed, Relaxed, |used| {
                let used = used + bytes;
                let free = self.budget.limit.checked_sub(used)?;
                (own <= free.saturating_sub(withheld).max(small_share.min(free))).then_some(used)
            });
            if let Ok(before) = added {
                self.budget.has_grown(before, before + bytes);
                return Ok(());
            }
            self.used.fetch_sub(bytes, Relaxed);
        }
        self.refusals.fetch_add(1, Relaxed);
        Err(OutOfMemory)
    }

    fn subtract(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Relaxed);
        self.budget.used.fetch_sub(bytes, Relaxed);
    }
}

/// Memory that is in use until the charge is dropped.
#[derive(Debug)]
pub(crate) struct MemoryCharge {
    account: Arc<MemoryAccount>,
    bytes: usize,
}

impl MemoryCharge {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Charges `bytes` in place of what was charged before. After an error, the charge is as before.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), OutOfMemory> {
        let bytes = match bytes {
            small @ ..BLOCK => small,
            large => large.checked_next_multiple_of(BLOCK).ok_or(OutOfMemory)?,
        };
        if bytes == self.bytes {
            return Ok(());
        }
        if let Some(more) = bytes.checked_sub(self.bytes).filter(|more| *more > 0) {
            self.account.add(more)?;
        } else {
            self.account.subtract(self.bytes - bytes);
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.account.subtract(self.bytes);
    }
}

/// The resident memory of this process.
fn resident() -> Option<usize> {
    usize::try_from(figure_in_bytes("/proc/self/status", "VmRSS:")?).ok()
}

/// A figure in kilobytes of a file in `/proc`, as bytes.
fn figure_in_bytes(file: &str, figure: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(figure))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The default of `limits.memory`: a quarter of the memory of the machine, or of the cgroup that limits the bridge.
pub(crate) fn default_limit() -> u64 {
    let machine = figure_in_bytes("/proc/meminfo", "MemTotal:");
    let total = machine.unwrap_or(ASSUMED_MACHINE).min(cgroup_limit().unwrap_or(u64::MAX));
    (total / 4).max(MIN_DEFAULT.min(total / 2))
}

/// The smallest memory limit of this process's cgroup (v2) and the groups above it.
fn cgroup_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = std::path::Path::new("/sys/fs/cgroup");
    let own = root.join(path);
    let limits = own
        .ancestors()
        .take_while(|group| group.starts_with(root))
        .filter_map(|group| std::fs::read_to_string(group.join("memory.max")).ok()?.trim().parse().ok());
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn one_agent_gets_at_most_half_and_another_one_still_finds_memory() {
        let budget = MemoryBudget::new(24 * MIB as u64);
        let (greedy, quiet) = (budget.account("greedy"), budget.account("quiet"));
        let mut charges = Vec::new();
        while let Ok(charge) = greedy.charge(MIB) {
            charges.push(charge);
        }
        assert_eq!((charges.len(), greedy.refusals()), (6, 1));
        let own: Vec<_> = std::iter::from_fn(|| quiet.charge(MIB).ok()).collect();
        assert_eq!(own.len(), 3, "as much as remains free");
        charges.pop();
        assert_eq!(greedy.charge(MIB).map(drop), Err(OutOfMemory), "it holds more than remains free");
        drop((charges, own));
        assert_eq!((budget.used(), greedy.used(), quiet.used()), (0, 0, 0));
    }

    #[test]
    fn while_the_process_comes_near_its_budget_an_agent_gets_little_more_than_a_small_share() {
        let budget = MemoryBudget::new(64 * MIB as u64);
        let (greedy, quiet) = (budget.account("greedy"), budget.account("quiet"));
        let charged = |account: &Arc<MemoryAccount>| {
            std::iter::from_fn(|| account.charge(MIB / 4).ok()).collect::<Vec<_>>().len()
        };
        budget.set_resident(budget.max_resident);
        assert_eq!(charged(&greedy), 64, "half of the memory for calls");
        budget.set_resident(budget.max_resident + MIB);
        assert_eq!(charged(&greedy), 56, "half of what is not withheld");
        budget.set_resident(usize::MAX);
        assert_eq!((charged(&greedy), charged(&quiet)), (16, 16), "4 MiB");
        let greedy = greedy.charge(4 * MIB).unwrap();
        assert_eq!(charged(&quiet), 16, "also while another agent uses its share");
        drop(greedy);
        budget.set_resident(0);
        assert_eq!(charged(&quiet), 64);
    }

    #[test]
    fn a_charge_follows_the_size_and_keeps_it_after_a_refusal() {
        let budget = MemoryBudget::new(4 * MIB as u64);
        let mut charge = budget.account("a").charge(1).unwrap();
        assert_eq!(budget.used(), 1);
        charge.resize(MIB).unwrap();
        assert_eq!(charge.resize(2 * MIB), Err(OutOfMemory));
        assert_eq!(charge.resize(usize::MAX), Err(OutOfMemory));
        assert_eq!(budget.used(), MIB);
        charge.resize(BLOCK).unwrap();
        charge.resize(BLOCK + 1).unwrap();
        assert_eq!(budget.used(), 2 * BLOCK);
        drop(charge);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn an_agent_that_replaces_another_one_continues_its_account() {
        let budget = MemoryBudget::new(4 * MIB as u64);
        let charge = budget.account("a").charge(MIB).unwrap();
        assert_eq!(budget.account("a").used(), MIB);
        drop(charge);
        assert!(default_limit() > 0);
    }
}
