//! Idempotency keys: the same request twice runs the agent once.
//!
//! The first request with a key runs; later ones with the same body wait for its reply, whichever
//! replica they reach. A reply is remembered for two minutes after it was given. Errors from
//! before the agent was reached are not remembered.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use uuid::Uuid;

use super::{Change, Key, Kind, StateStore, record, update};
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::stored::StoredReply;
use crate::text::hex;

/// How long a reply is remembered.
const WINDOW: Duration = Duration::from_secs(120);
/// How long a released key stays in the store. It can be claimed at once.
const RELEASED: Duration = Duration::from_secs(1);
/// Initial and maximum poll interval for a key that another replica holds.
const POLL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

#[derive(Debug)]
pub(crate) struct Idempotency {
    store: Arc<dyn StateStore>,
    // Requests of this process that run now.
    running: Mutex<HashMap<Key, Slot>>,
}

#[derive(Debug, Clone)]
struct Slot {
    body: String,
    reply: watch::Receiver<Option<Reply>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    /// SHA-256 of the request's body.
    body: String,
    /// The request that runs, or ran.
    nonce: Uuid,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum State {
    Running,
    /// The reply is in a record of its own: it may be large, and the store may have to drop it.
    Done,
    /// The agent was not reached; anybody may try again.
    Released,
}

#[derive(Debug, Serialize, Deserialize)]
struct ReplyRecord {
    nonce: Uuid,
    reply: StoredReply,
}

/// What a request with a key has to do.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Run, and report what came of it.
    First(Running),
    /// Wait for the reply of the first request.
    Repeat(Repeat),
}

/// The first request with a key, while it runs.
#[derive(Debug)]
#[must_use]
pub(crate) struct Running {
    idempotency: Arc<Idempotency>,
    key: Key,
    body: String,
    nonce: Uuid,
    sender: watch::Sender<Option<Reply>>,
}

/// A later request with the same key and body.
#[derive(Debug)]
pub(crate) struct Repeat {
    idempotency: Arc<Idempotency>,
    key: Key,
    body: String,
    first: First,
}

#[derive(Debug)]
enum First {
    Here(watch::Receiver<Option<Reply>>),
    InStore,
}

impl Idempotency {
    pub(super) fn new(store: Arc<dyn StateStore>) -> Self {
        Self { store, running: Mutex::default() }
    }

    /// Claims the key for a request to `action` of `agent`, which may run for `limit`.
    pub(crate) async fn begin(
        self: &Arc<Self>,
        agent: &Arc<str>,
        action: &str,
        key: &str,
        body: &[u8],
        limit: Duration,
    ) -> Result<Turn, ActionError> {
        // Action names are tokens without a line break.
        let key = Key::new(agent, format!("{action}\n{key}"));
        let body = hex(&Sha256::digest(body));
        let (sender, reply) = watch::channel(None);
        {
            let mut running = self.running();
            if let Some(slot) = running.get(&key) {
                is_same(&slot.body, &body)?;
                let first = First::Here(slot.reply.clone());
                drop(running);
                return Ok(Turn::Repeat(Repeat { idempotency: Arc::clone(self), key, body, first }));
            }
            running.insert(key.clone(), Slot { body: body.clone(), reply });
        }
        // From here on others of this process wait for us; `running` removes the key when it is dropped.
        let (idempotency, nonce) = (Arc::clone(self), Uuid::new_v4());
        let running = Running { idempotency, key: key.clone(), body: body.clone(), nonce, sender };
        match self.claim(&running, limit).await? {
            None => Ok(Turn::First(running)),
            Some(first) => {
                // Others of this process that came meanwhile ask the store as well.
                drop(running);
                Ok(Turn::Repeat(Repeat { idempotency: Arc::clone(self), key, body, first }))
            }
        }
    }

    /// Claims the key in the store; what the first request has come to, if it was another one.
    async fn claim(&self, running: &Running, limit: Duration) -> Result<Option<First>, ActionError> {
        let Running { key, body, nonce, .. } = running;
        let claim = |known: Option<(Record, SystemTime)>| {
            let known = known.map(|(known, _)| known);
            let known = known.filter(|known| !matches!(known.state, State::Released));
            let Some(known) = known else {
                let record = Record { body: body.clone(), nonce: *nonce, state: State::Running };
                return Ok(Change::Write(record, limit.saturating_add(WINDOW), None));
            };
            if known.nonce == *nonce {
                return Ok(Change::Keep(None));
            }
            is_same(&known.body, body)?;
            Ok::<_, ActionError>(Change::Keep(Some(First::InStore)))
        };
        update(&*self.store, Kind::IdempotencyKey, key, claim).await
    }

    fn running(&self) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    /// Passes the reply to all who wait for it, and remembers it if the agent was reached.
    pub(crate) async fn finish(self, reply: &Reply) {
        let is_kept = reply.as_ref().map_or_else(|error| error.reached_agent, |_| true);
        let written = match is_kept {
            // The reply first: a key that is done without one is reported as such.
            true => {
                self.write_reply(reply).await;
                self.write(State::Done, WINDOW).await
            }
            false => self.write(State::Released, RELEASED).await,
        };
        if let Err(error) = written {
            // The key counts as running until its time is over, so nobody runs it again.
            tracing::warn!(agent = %self.key.agent, error = error.message, "cannot record the end of a request with an idempotency key");
        }
        self.sender.send_replace(Some(reply.clone()));
    }

    async fn write_reply(&self, reply: &Reply) {
        let mut record = Some(ReplyRecord { nonce: self.nonce, reply: StoredReply::new(reply) });
        let write = |known: Option<(ReplyRecord, SystemTime)>| {
            let is_written = known.is_some_and(|(known, _)| known.nonce == self.nonce);
            Ok::<_, ActionError>(match record.take().filter(|_| !is_written) {
                Some(record) => Change::Write(record, WINDOW, ()),
                None => Change::Keep(()),
            })
        };
        if let Err(error) = update(&*self.idempotency.store, Kind::Reply, &self.key, write).await {
            tracing::debug!(agent = %self.key.agent, error = error.message, "a reply cannot be kept for repeats");
        }
    }

    async fn write(&self, state: State, ttl: Duration) -> Result<(), ActionError> {
        let Self { idempotency, key, body, nonce, .. } = self;
        let write = |known: Option<(Record, SystemTime)>| {
            let is_ours =
                known.is_none_or(|(known, _)| known.nonce == *nonce && known.state == State::Running);
            Ok::<_, ActionError>(if is_ours {
                Change::Write(Record { body: body.clone(), nonce: *nonce, state }, ttl, ())
            } else {
                Change::Keep(())
            })
        };
        update(&*idempotency.store, Kind::IdempotencyKey, key, write).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.idempotency.running().remove(&self.key);
    }
}

impl Repeat {
    /// Waits for the reply of the first request.
    pub(crate) async fn reply(self) -> Reply {
        match self.first {
            First::Here(mut receiver) => {
                let reply = receiver.wait_for(Option::is_some).await.ok().and_then(|reply| reply.clone());
                match reply {
                    Some(reply) => reply,
                    // It was not the first one after all, or it was dropped before it ended: the store knows.
                    None => self.idempotency.reply_from_store(&self.key, &self.body).await,
                }
            }
            First::InStore => self.idempotency.reply_from_store(&self.key, &self.body).await,
        }
    }
}

impl Idempotency {
    async fn reply_from_store(&self, key: &Key, body: &str) -> Reply {
        let (mut pause, longest) = POLL;
        loop {
            let Some(entry) = self.store.read(Kind::IdempotencyKey, key).await? else {
                let message = "the replica that ran the first request with this key did not report its end";
                return Err(ActionError::new(Code::OutcomeUnknown, message));
            };
            let known: Record = record::decode(&entry.value)?;
            is_same(&known.body, body)?;
            match known.state {
                State::Running => {}
                State::Done => return self.stored_reply(key, known.nonce).await,
                State::Released => {
                    let message = "the first request with this key did not reach the agent; try again";
                    return Err(ActionError::new(Code::Busy, message));
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    async fn stored_reply(&self, key: &Key, nonce: Uuid) -> Reply {
        let entry = self.store.read(Kind::Reply, key).await?;
        let record: Option<ReplyRecord> = entry.map(|entry| record::decode(&entry.value)).transpose()?;
        match record.filter(|record| record.nonce == nonce) {
            Some(record) => record.reply.into_reply(),
            None => {
                let message = "the first request with this key has ended, but its reply is no longer kept";
                Err(ActionError::new(Code::OutcomeUnknown, message))
            }
        }
    }
}

fn is_same(one: &str, other: &str) -> Result<(), ActionError> {
    if one == other {
        return Ok(());
    }
    Err(ActionError::invalid("this idempotency key was used with another body within two minutes"))
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryStore;
    use super::*;
    use crate::reply::outcome::{Outcome, ReplyContent, ReplyStatus, TaskRef};

    const LIMIT: Duration = Duration::from_secs(60);

    fn replica(store: &Arc<dyn StateStore>) -> Arc<Idempotency> {
        Arc::new(Idempotency::new(Arc::clone(store)))
    }

    fn store() -> Arc<dyn StateStore> {
        Arc::new(MemoryStore::default())
    }

    async fn begin(keys: &Arc<Idempotency>, action: &str, body: &str) -> Result<Turn, ActionError> {
        keys.begin(&"agent".into(), action, "key", body.as_bytes(), LIMIT).await
    }

    async fn first(keys: &Arc<Idempotency>, body: &str) -> Running {
        match begin(keys, "a", body).await.unwrap() {
            Turn::First(running) => running,
            Turn::Repeat(_) => panic!("not the first"),
        }
    }

    async fn repeat(keys: &Arc<Idempotency>, body: &str) -> Repeat {
        match begin(keys, "a", body).await.unwrap() {
            Turn::First(_) => panic!("ran twice"),
            Turn::Repeat(repeat) => repeat,
        }
    }

    fn outcome(message: &str) -> Reply {
        let task = TaskRef { id: None, context_id: None, agent: "agent".into(), skill: None };
        let content = ReplyContent { message: message.to_owned(), ..ReplyContent::default() };
        Ok(Arc::new(Outcome::new(ReplyStatus::Completed, content, task)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_repeat_gets_the_first_ones_reply_at_every_replica() {
        let store = store();
        let (here, elsewhere) = (replica(&store), replica(&store));
        let running = first(&here, "x").await;
        let waiting = [repeat(&here, "x").await, repeat(&elsewhere, "x").await];
        running.finish(&outcome("reply")).await;
        for waiting in waiting.into_iter().chain([repeat(&here, "x").await, repeat(&elsewhere, "x").await]) {
            assert_eq!(waiting.reply().await.unwrap().content.message, "reply");
        }
        begin(&here, "a", "y").await.expect_err("another body");
        begin(&elsewhere, "a", "y").await.expect_err("another body");
        assert!(matches!(begin(&here, "b", "y").await.unwrap(), Turn::First(_)), "another action");
    }

    #[tokio::test]
    async fn an_error_from_before_the_agent_was_reached_is_not_remembered() {
        let keys = replica(&store());
        first(&keys, "x").await.finish(&Err(ActionError::unavailable("a", None))).await;
        first(&keys, "y").await.finish(&Err(ActionError::internal().after_reaching_agent())).await;
        begin(&keys, "a", "x").await.expect_err("the second one is remembered");
    }

    #[tokio::test]
    async fn a_reply_that_is_too_large_to_keep_never_runs_the_agent_again() {
        let keys = replica(&store());
        first(&keys, "x").await.finish(&outcome(&"x".repeat(20 << 20))).await;
        let again = repeat(&keys, "x").await.reply().await.unwrap_err();
        assert_eq!(again.info.code, Code::OutcomeUnknown);
    }

    #[tokio::test]
    async fn a_key_stays_when_the_store_has_to_drop_its_reply() {
        let keys = replica(&store());
        let begin = |key: String| {
            let keys = Arc::clone(&keys);
            async move { keys.begin(&"agent".into(), "a", &key, b"x", LIMIT).await.unwrap() }
        };
        for number in 0..100 {
            let Turn::First(running) = begin(number.to_string()).await else { panic!("not the first") };
            running.finish(&outcome(&"x".repeat(1 << 20))).await;
        }
        let Turn::Repeat(first) = begin("0".to_owned()).await else { panic!("ran twice") };
        assert_eq!(first.reply().await.unwrap_err().info.code, Code::OutcomeUnknown);
        let Turn::Repeat(last) = begin("99".to_owned()).await else { panic!("ran twice") };
        last.reply().await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_was_dropped_in_the_middle_is_never_run_again() {
        let keys = replica(&store());
        drop(first(&keys, "x").await);
        let waiting = repeat(&keys, "x").await.reply();
        assert!(tokio::time::timeout(LIMIT, waiting).await.is_err(), "it may still run");
    }
}
