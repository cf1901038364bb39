//! What the bridge remembers of tasks and conversations, bounded in number, bytes and time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;

use super::follow_up::FollowUp;
use super::outcome::TaskRef;
use crate::a2a::model::TaskState;

/// How long a conversation is remembered after its last call.
const SESSION_TTL: Duration = Duration::from_secs(24 * 3600);
/// Most bytes of remembered replies; the least recently used go first.
const TASK_BYTES: u64 = 64 << 20;
/// What a record costs beside its reply.
const RECORD_OVERHEAD: usize = 512;
/// Most conversations whose agent-made id is remembered.
const SESSIONS: u64 = 50_000;

/// A task as it was last seen.
#[derive(Debug, Clone)]
pub struct Record {
    /// Which one.
    pub task: TaskRef,
    /// Where it stood.
    pub state: TaskState,
    /// The reply object at that time.
    pub reply: Bytes,
    /// The open question, if the agent waits.
    pub follow_up: Option<FollowUp>,
    /// Whether its changes are published.
    pub is_submitted: bool,
    /// How long it is remembered.
    pub ttl: Duration,
}

type Key = (Arc<str>, String);

/// The tasks and conversations that this process has seen.
#[derive(Debug)]
pub struct Ledger {
    tasks: Cache<Key, Arc<Record>>,
    contexts: Cache<Key, String>,
}

impl Default for Ledger {
    fn default() -> Self {
        let tasks = Cache::builder()
            .max_capacity(TASK_BYTES)
            .weigher(|key: &Key, record: &Arc<Record>| {
                let bytes = key.1.len() + record.reply.len() + RECORD_OVERHEAD;
                u32::try_from(bytes).unwrap_or(u32::MAX)
            })
            .eviction_policy(EvictionPolicy::lru())
            .expire_after(AfterItsTtl)
            .build();
        let contexts = Cache::builder()
            .max_capacity(SESSIONS)
            .eviction_policy(EvictionPolicy::lru())
            .time_to_idle(SESSION_TTL)
            .build();
        Self { tasks, contexts }
    }
}

impl Ledger {
    /// Remembers where a task stands.
    pub fn record(&self, agent: &Arc<str>, task_id: &str, record: Record) {
        self.tasks.insert((Arc::clone(agent), task_id.to_owned()), Arc::new(record));
    }

    /// What is known of a task.
    pub fn task(&self, agent: &Arc<str>, task_id: &str) -> Option<Arc<Record>> {
        self.tasks.get(&(Arc::clone(agent), task_id.to_owned()))
    }

    /// The context id to send for a caller's session: the agent's own from the second call on.
    pub fn context(&self, agent: &Arc<str>, session_id: &str) -> String {
        self.contexts
            .get(&(Arc::clone(agent), session_id.to_owned()))
            .unwrap_or_else(|| session_id.to_owned())
    }

    /// Remembers which context id the agent gave to a caller's session.
    pub fn follow_context(&self, agent: &Arc<str>, session_id: &str, context_id: &str) {
        if self.context(agent, session_id) != context_id {
            self.contexts.insert((Arc::clone(agent), session_id.to_owned()), context_id.to_owned());
        }
    }
}

struct AfterItsTtl;

impl moka::Expiry<Key, Arc<Record>> for AfterItsTtl {
    fn expire_after_create(&self, _: &Key, record: &Arc<Record>, _: Instant) -> Option<Duration> {
        Some(record.ttl)
    }

    fn expire_after_update(
        &self,
        _: &Key,
        record: &Arc<Record>,
        _: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(record.ttl)
    }
}
