//! What the bridge remembers of tasks and conversations, bounded in number, bytes and time.

mod tasks;

use std::sync::Arc;
use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;

use super::error::ActionError;
use super::follow_up::FollowUp;
use super::once::Reply;
use super::outcome::TaskRef;
use crate::a2a::model::TaskState;
use tasks::Tasks;

/// How long a conversation is remembered after its last call.
const SESSION_TTL: Duration = Duration::from_secs(24 * 3600);
/// Most bytes of remembered replies; the oldest go first.
const TASK_BYTES: usize = 64 << 20;
/// Most bytes of conversations whose agent-made id is remembered.
const SESSION_BYTES: u64 = 32 << 20;
/// What a conversation costs beside its ids.
const SESSION_OVERHEAD: usize = 256;

/// A task as it was last seen.
#[derive(Debug, Clone)]
pub struct Record {
    /// Which one.
    pub task: TaskRef,
    /// Where it stood.
    pub state: TaskState,
    /// What was told of it at that time: the reply object, or why nobody knows how it goes on.
    pub reply: Reply,
    /// The open question, if the agent waits.
    pub follow_up: Option<FollowUp>,
    /// Whether its changes are published.
    pub is_submitted: bool,
    /// How long it may still go on; while it does, it is remembered.
    pub alive: Duration,
    /// How long it is remembered after that.
    pub ttl: Duration,
}

type Key = (Arc<str>, String);

/// The tasks and conversations that this process has seen.
#[derive(Debug)]
pub struct Ledger {
    tasks: Tasks,
    contexts: Cache<Key, String>,
}

impl Default for Ledger {
    fn default() -> Self {
        let contexts = Cache::builder()
            .max_capacity(SESSION_BYTES)
            .weigher(|(_, session_id): &Key, context_id: &String| {
                u32::try_from(SESSION_OVERHEAD + session_id.len() + context_id.len()).unwrap_or(u32::MAX)
            })
            .eviction_policy(EvictionPolicy::lru())
            .time_to_idle(SESSION_TTL)
            .build();
        Self { tasks: Tasks::new(TASK_BYTES), contexts }
    }
}

impl Ledger {
    /// Remembers where a task stands.
    pub fn record(&self, agent: &Arc<str>, task_id: &str, record: Record) {
        self.tasks.put(agent, task_id, record);
    }

    /// What is known of a task.
    pub fn task(&self, agent: &Arc<str>, task_id: &str) -> Option<Arc<Record>> {
        self.tasks.get(agent, task_id)
    }

    /// Remembers that a task was lost from sight, for those who ask while the agent is away. What has
    /// ended stays so, and so does an open question: it can still be answered.
    pub fn lose(&self, agent: &Arc<str>, task_id: &str, why: &ActionError) {
        let record = self.task(agent, task_id);
        if let Some(record) = record.filter(|record| !record.state.is_settled()) {
            let lost = Record { reply: Err(why.clone()), alive: Duration::ZERO, ..Record::clone(&record) };
            self.record(agent, task_id, lost);
        }
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
