//! The log as calls see it: which of them are logged, and what a bridge knows about it.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use uuid::Uuid;

use super::mapping::TypeRules;
use super::records::RecordFilter;
use super::run_record::RunRecord;
use super::sessions::projector::Projector;
use super::store::{EventStore, LogKey, LogUnavailable};
use crate::a2a::model::ArtifactUpdate;
use crate::background::BackgroundTasks;
use crate::caller::Caller;
use crate::config::{EventRecord, HistoryConfig};
use crate::memory::MemoryAccount;
use crate::reply::Reply;
use crate::secrets::Secrets;
use crate::state::peers::InstanceId;
use crate::telemetry::log_limit::LogLimit;

/// Sessions of which this process remembers that they exist.
const MAX_KNOWN: usize = 10_000;
/// Sessions of one caller that are listed.
pub(crate) const MAX_SESSIONS: usize = 10_000;
/// How long the number of a caller's sessions is good enough.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// The event log of a bridge.
#[derive(Debug)]
pub(crate) struct EventLog {
    pub store: Arc<dyn EventStore>,
    pub record: EventRecord,
    /// Whether a call that cannot be logged is refused.
    pub is_required: bool,
    pub instance: InstanceId,
    pub tasks: BackgroundTasks,
    pub projector: Projector,
    /// What an agent gets of a session when it takes part for the first time.
    pub history: HistoryConfig,
    known: Mutex<HashSet<LogKey>>,
    /// Agents that have taken part in a session.
    known_agents: Mutex<HashSet<(LogKey, Arc<str>)>>,
    /// How many sessions callers have, as far as it was counted lately.
    session_counts: Mutex<HashMap<Arc<str>, (Instant, usize)>>,
    /// The credentials of agents, by name.
    secrets: Mutex<HashMap<Arc<str>, Secrets>>,
    /// Calls whose log is incomplete.
    failed: AtomicU64,
    failures: LogLimit,
}

impl EventLog {
    pub(crate) fn new(
        store: Arc<dyn EventStore>,
        record: EventRecord,
        is_required: bool,
        instance: InstanceId,
        tasks: BackgroundTasks,
        history: HistoryConfig,
    ) -> Self {
        Self {
            store,
            record,
            is_required,
            instance,
            tasks,
            projector: Projector::default(),
            history,
            known: Mutex::default(),
            known_agents: Mutex::default(),
            session_counts: Mutex::default(),
            secrets: Mutex::default(),
            failed: AtomicU64::new(0),
            failures: LogLimit::default(),
        }
    }

    /// Whether a call is logged: because it belongs to a session, or because its caller asks for it.
    pub(crate) fn wants(&self, has_session: bool, is_asked: bool) -> bool {
        is_asked || has_session || self.record == EventRecord::All
    }

    /// Credentials that never go into the log.
    pub(crate) fn set_secrets(&self, agent: &Arc<str>, secrets: Secrets) {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner).insert(Arc::clone(agent), secrets);
    }

    /// Of all agents.
    pub(super) fn all_secrets(&self) -> Vec<Secrets> {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Whether this process knows that a log has a batch.
    pub(super) fn is_known(&self, key: &LogKey) -> bool {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).contains(key)
    }

    pub(super) fn set_known(&self, key: &LogKey) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_KNOWN {
            // Whoever is forgotten costs one more request later.
            known.clear();
        }
        known.insert(key.clone());
    }

    /// A log was removed.
    pub(crate) fn forget(&self, key: &LogKey) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
        self.known_agents.lock().unwrap_or_else(PoisonError::into_inner).retain(|(known, _)| known != key);
    }

    /// Whether this process knows that an agent has taken part in a session.
    pub(super) fn is_known_agent(&self, key: &LogKey, agent: &Arc<str>) -> bool {
        let known = self.known_agents.lock().unwrap_or_else(PoisonError::into_inner);
        known.contains(&(key.clone(), Arc::clone(agent)))
    }

    pub(super) fn set_known_agent(&self, key: &LogKey, agent: &Arc<str>) {
        let mut known = self.known_agents.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert((key.clone(), Arc::clone(agent)));
    }

    /// Whether a caller can have another session, about.
    pub(crate) async fn has_room(&self, owner: &Arc<str>) -> Result<bool, LogUnavailable> {
        let counts = || self.session_counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((counted, count)) = counts().get(owner)
            && counted.elapsed() < COUNT_INTERVAL
        {
            return Ok(*count < MAX_SESSIONS);
        }
        let filter = RecordFilter::Summaries { owner: Arc::clone(owner) };
        let count = self.store.count_records(&filter).await?;
        let mut counts = counts();
        if counts.len() >= MAX_KNOWN {
            counts.clear();
        }
        counts.insert(Arc::clone(owner), (Instant::now(), count));
        Ok(count < MAX_SESSIONS)
    }

    /// The log of a run of which only the id is known.
    pub(crate) async fn find_run(
        &self,
        caller: &Caller,
        run: Uuid,
    ) -> Result<Option<LogKey>, LogUnavailable> {
        let own = LogKey::run(caller, run);
        if self.store.last_sequence(&own).await?.is_some() {
            return Ok(Some(own));
        }
        let record = self.store.find_run(&own.owner, run).await?;
        let record: Option<RunRecord> = record.and_then(|record| serde_json::from_slice(&record).ok());
        Ok(record.and_then(|record| record.session).map(|session| LogKey::session(caller, &session)))
    }

    /// Counts a call whose log is incomplete.
    pub(super) fn count_failure(&self, agent: &str) {
        self.failed.fetch_add(1, Relaxed);
        if let Some(calls) = self.failures.add(std::time::Instant::now()) {
            tracing::warn!(%agent, calls, "cannot log a call; it goes on without the event log (logged once a minute)");
        }
    }

    /// Calls whose log is incomplete.
    pub(crate) fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }
}

/// Encodes what a call sends as its front door does.
pub(crate) trait ReplyEncoder: fmt::Debug + Send + Sync {
    /// The reply object, in a size that fits into a message of the log. Files go by reference.
    fn encode<'a>(&'a self, reply: &'a Reply) -> BoxFuture<'a, Bytes>;

    /// Stores the files of an artifact, and puts references in their place.
    fn reference_files<'a>(&'a self, update: &'a mut ArtifactUpdate) -> BoxFuture<'a, ()>;
}

/// The log of one agent's calls.
#[derive(Debug, Clone)]
pub(crate) struct AgentLog {
    pub log: Arc<EventLog>,
    pub agent: Arc<str>,
    pub rules: Arc<TypeRules>,
    pub secrets: Secrets,
    pub replies: Arc<dyn ReplyEncoder>,
    /// Charged for what is encoded.
    pub memory: Arc<MemoryAccount>,
}
