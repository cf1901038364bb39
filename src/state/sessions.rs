//! Sessions: maps the caller's id for a conversation to the agent's context id.
//!
//! If replicas share their state, a session of a launched agent belongs to the replica whose process has the
//! conversation, and calls go there. Any replica can continue a session with an attached agent.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::clock::{Instant, wall_time};
use super::peers::{InstanceId, Liveness, Peers};
use super::records::{Change, ReadRecord, Record, TypedRecords};
use super::{Durability, Lifetime, RecordKey, RecordKind, StateStore};
use crate::caller::Caller;
use crate::failpoint;
use crate::reply::error::{ActionError, Code};
use crate::state::records::Assumption;

/// A session expires this long after its last call.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// A session in use is written again this often, so that it does not expire.
const REFRESH: Duration = Duration::from_secs(3600);
/// How long this process knows that a session has no record. Another replica may map it meanwhile.
const UNMAPPED_TTL: Duration = Duration::from_secs(30);
/// Maximum number of callers, and of sessions of one caller, that this process knows to have no record.
const MAX_UNMAPPED: (usize, usize) = (100, 2_000);

#[derive(Debug, Clone, Serialize, Deserialize)]
struct SessionRecord {
    context_id: String,
    /// The replica whose process has the conversation, if it launched the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    owner: Option<InstanceId>,
    #[serde(default, skip_serializing_if = "Caller::is_shared")]
    caller: Caller,
}

impl Record for SessionRecord {
    fn caller(&self) -> Option<&Caller> {
        Some(&self.caller)
    }
}

impl ReadRecord<SessionRecord> {
    fn needs_refresh(&self) -> bool {
        wall_time().duration_since(self.written_at).is_ok_and(|age| age >= REFRESH)
    }
}

/// Whose session it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionId<'a> {
    pub agent: &'a Arc<str>,
    pub caller: &'a Caller,
    /// The caller's id for the session.
    pub id: &'a str,
    /// Whether this replica launches the agent.
    pub is_launched: bool,
}

impl SessionId<'_> {
    fn key(&self) -> RecordKey {
        RecordKey::new(self.agent, self.caller.scoped_id(&[self.id])).of_caller(self.caller)
    }

    /// The context id until the agent chooses another one. A verified caller gets one of its own, because the agent would
    /// take the same session id of two callers for one conversation. It is a UUID, as some agents accept no other.
    pub(crate) fn first_context_id(&self) -> Cow<'_, str> {
        if self.caller.is_shared() {
            return Cow::Borrowed(self.id);
        }
        let hash = self.caller.scoped_id(&["context", self.id]);
        let uuid = u128::from_str_radix(&hash, 16)
            .map(|bits| uuid::Builder::from_custom_bytes(bits.to_be_bytes()).into_uuid().to_string());
        Cow::Owned(uuid.unwrap_or(hash))
    }

    fn record(&self, context_id: &str, owner: Option<InstanceId>) -> SessionRecord {
        SessionRecord { context_id: context_id.to_owned(), owner, caller: self.caller.clone() }
    }
}

/// Where a session continues.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SessionPlace {
    Here {
        context_id: String,
    },
    /// Only this replica's process has the conversation.
    Elsewhere(InstanceId),
}

/// Stores only the sessions whose agent chose another context id, and those that belong to a replica. The context id of
/// any other session follows from its id.
#[derive(Debug)]
pub(crate) struct Sessions {
    records: TypedRecords<SessionRecord>,
    store: Arc<dyn StateStore>,
    peers: Arc<dyn Peers>,
    /// Sessions with a call after which there was no record. It saves two round trips for each further call.
    unmapped: Mutex<Unmapped>,
}

/// Sessions without a record, by caller, and until when that counts.
#[derive(Debug, Default)]
struct Unmapped(HashMap<Caller, HashMap<RecordKey, Instant>>);

impl Unmapped {
    fn contains(&self, key: &RecordKey) -> bool {
        let until = self.0.get(&key.caller).and_then(|keys| keys.get(key));
        until.is_some_and(|until| Instant::now() < *until)
    }

    fn remove(&mut self, key: &RecordKey) {
        if let Some(keys) = self.0.get_mut(&key.caller) {
            keys.remove(key);
        }
    }

    fn insert(&mut self, key: RecordKey) {
        let (max_callers, max_keys) = MAX_UNMAPPED;
        let now = Instant::now();
        if self.0.len() >= max_callers && !self.0.contains_key(&key.caller) {
            self.0.retain(|_, keys| keys.values().any(|until| now < *until));
            if self.0.len() >= max_callers {
                return;
            }
        }
        let keys = self.0.entry(key.caller.clone()).or_default();
        if keys.len() >= max_keys {
            keys.clear();
        }
        keys.insert(key, now + UNMAPPED_TTL);
    }
}

impl Sessions {
    pub(super) fn new(store: &Arc<dyn StateStore>, peers: &Arc<dyn Peers>) -> Self {
        Self {
            records: TypedRecords::new(store, RecordKind::Session),
            store: Arc::clone(store),
            peers: Arc::clone(peers),
            unmapped: Mutex::default(),
        }
    }

    /// Where the session continues, and with which context id: from the second call on, the one that the agent chose.
    pub(crate) async fn place(&self, session: SessionId<'_>) -> Result<SessionPlace, ActionError> {
        if self.store.is_shared() && session.is_launched {
            return self.place_launched(session).await;
        }
        let key = session.key();
        let unchanged = || SessionPlace::Here { context_id: session.first_context_id().into_owned() };
        if self.store.is_shared() && self.unmapped().contains(&key) {
            return Ok(unchanged());
        }
        let known: Option<ReadRecord<SessionRecord>> = match self.records.read(&key).await {
            Ok(known) => known,
            // An unknown session is used as it is while the store is unavailable.
            Err(error) if error.info.code == Code::StateUnavailable => None,
            Err(error) => return Err(error),
        };
        let Some(known) = known else { return Ok(unchanged()) };
        if known.needs_refresh() {
            self.set_context_id(session, &known.record.context_id).await?;
        }
        Ok(SessionPlace::Here { context_id: known.record.context_id })
    }

    /// The session of an agent that this replica launches. The first replica with a call owns the session until it is
    /// dead and no longer expected to return; then the conversation starts again at another one.
    async fn place_launched(&self, session: SessionId<'_>) -> Result<SessionPlace, ActionError> {
        let (key, own) = (session.key(), self.peers.instance());
        let mut dead = None;
        loop {
            let place = |known: Option<SessionRecord>| {
                Ok(match known {
                    Some(known) if known.owner == Some(own) => {
                        Change::Keep(SessionPlace::Here { context_id: known.context_id })
                    }
                    Some(SessionRecord { owner: Some(owner), .. }) if dead != Some(owner) => {
                        Change::Keep(SessionPlace::Elsewhere(owner))
                    }
                    _ => {
                        let here = SessionPlace::Here { context_id: session.first_context_id().into_owned() };
                        Change::Write(
                            session.record(&session.first_context_id(), Some(own)),
                            Lifetime::evictable(failpoint::retention(TTL)),
                            here,
                        )
                    }
                })
            };
            let place =
                self.records.update_with(&key, Assumption::Nothing, Durability::Deferrable, place).await;
            let owner = match place {
                Ok(SessionPlace::Elsewhere(owner)) => owner,
                Ok(here) => return Ok(here),
                Err(error) if error.info.code == Code::StateUnavailable => {
                    return Ok(SessionPlace::Here { context_id: session.first_context_id().into_owned() });
                }
                Err(error) => return Err(error),
            };
            match self.peers.liveness(owner).await {
                Liveness::Alive => return Ok(SessionPlace::Elsewhere(owner)),
                Liveness::Dead if !self.peers.may_return(owner) => dead = Some(owner),
                Liveness::Dead | Liveness::Unreachable => {
                    let why = "the replica that has this conversation does not respond";
                    return Err(ActionError::unavailable(session.agent, Some(why)));
                }
            }
        }
    }

    /// Records the context id that the agent uses for the session.
    pub(crate) async fn set_context_id(
        &self,
        session: SessionId<'_>,
        context_id: &str,
    ) -> Result<(), ActionError> {
        let key = session.key();
        let is_unmapped = session.first_context_id() == context_id && !session.is_launched;
        if is_unmapped && self.store.is_shared() && self.unmapped().contains(&key) {
            return Ok(());
        }
        let known: Option<ReadRecord<SessionRecord>> = self.records.read(&key).await?;
        // The process of another replica has the conversation. What this one has besides is not recorded.
        let owner = known.as_ref().and_then(|known| known.record.owner);
        if session.is_launched && owner.is_some_and(|owner| owner != self.peers.instance()) {
            return Ok(());
        }
        let is_current = match &known {
            Some(known) => known.record.context_id == context_id && !known.needs_refresh(),
            None => session.first_context_id() == context_id,
        };
        if is_current {
            if known.is_none() && is_unmapped && self.store.is_shared() {
                self.unmapped().insert(key);
            }
            return Ok(());
        }
        self.unmapped().remove(&key);
        let write = |known: Option<SessionRecord>| {
            let record = session.record(context_id, known.and_then(|known| known.owner));
            Ok(Change::Write(record, Lifetime::evictable(failpoint::retention(TTL)), ()))
        };
        self.records.update_with(&key, Assumption::Nothing, Durability::Deferrable, write).await
    }

    fn unmapped(&self) -> std::sync::MutexGuard<'_, Unmapped> {
        self.unmapped.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FaultyStore, alone, memory_store};
    use super::*;

    #[tokio::test]
    async fn every_replica_uses_the_context_id_that_the_agent_chose() {
        let store = memory_store();
        let (one, other) = (Sessions::new(&store, &alone()), Sessions::new(&store, &alone()));
        let (agent, caller): (Arc<str>, _) = ("weather".into(), Caller::default());
        let session = SessionId { agent: &agent, caller: &caller, id: "s", is_launched: false };
        let context = async |sessions: &Sessions, session| match sessions.place(session).await.unwrap() {
            SessionPlace::Here { context_id } => context_id,
            SessionPlace::Elsewhere(_) => panic!("any replica can continue it"),
        };
        assert_eq!(context(&one, session).await, "s");
        one.set_context_id(session, "s").await.unwrap();
        assert!(store.read(RecordKind::Session, &session.key()).await.unwrap().is_none());
        one.set_context_id(session, "c-1").await.unwrap();
        assert_eq!(context(&other, session).await, "c-1");
        other.set_context_id(session, "c-2").await.unwrap();
        assert_eq!(context(&one, session).await, "c-2");
        let elsewhere = "other".into();
        assert_eq!(context(&one, SessionId { agent: &elsewhere, ..session }).await, "s");
        // For the agent, the same session id of another caller is another conversation, at every replica the same.
        let [alice, bob] = ["T/alice", "T/bob"].map(Caller::verified);
        let of_alice = SessionId { caller: &alice, ..session };
        let context_id = context(&one, of_alice).await;
        assert!(uuid::Uuid::try_parse(&context_id).is_ok(), "{context_id}");
        assert_eq!(context(&other, of_alice).await, context_id);
        one.set_context_id(of_alice, &context_id).await.unwrap();
        assert!(store.read(RecordKind::Session, &of_alice.key()).await.unwrap().is_none());
        assert_ne!(context(&one, SessionId { caller: &bob, ..session }).await, context_id);
    }

    #[tokio::test(start_paused = true)]
    async fn a_mapping_that_another_replica_makes_is_noticed() {
        let store: Arc<dyn StateStore> = FaultyStore::shared();
        let (one, other) = (Sessions::new(&store, &alone()), Sessions::new(&store, &alone()));
        let (agent, caller): (Arc<str>, _) = ("weather".into(), Caller::default());
        let session = SessionId { agent: &agent, caller: &caller, id: "s", is_launched: false };
        one.set_context_id(session, "s").await.unwrap();
        assert!(one.unmapped().contains(&session.key()));
        other.set_context_id(session, "c-1").await.unwrap();
        tokio::time::advance(UNMAPPED_TTL).await;
        assert_eq!(one.place(session).await.unwrap(), SessionPlace::Here { context_id: "c-1".into() });
    }

    #[tokio::test]
    async fn the_sessions_of_one_caller_do_not_displace_those_of_another() {
        let store: Arc<dyn StateStore> = FaultyStore::shared();
        let sessions = Sessions::new(&store, &alone());
        let agent: Arc<str> = "weather".into();
        let [alice, bob] = ["T/alice", "T/bob"].map(Caller::verified);
        let use_session = async |caller, id: &str| {
            let session = SessionId { agent: &agent, caller, id, is_launched: false };
            sessions.set_context_id(session, &session.first_context_id()).await.unwrap();
        };
        use_session(&alice, "s").await;
        for number in 0..10_001 {
            use_session(&bob, &number.to_string()).await;
        }
        let session = SessionId { agent: &agent, caller: &alice, id: "s", is_launched: false };
        assert!(sessions.unmapped().contains(&session.key()));
    }
}
