//! The same request twice runs the agent once: idempotency by the caller's key.
//!
//! The first request with a key runs; later ones with the same body wait for its reply. A reply
//! is remembered for two minutes after it was given. Errors from before the agent was reached
//! are not remembered.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;

use super::error::ActionError;

/// How long a reply is remembered.
const WINDOW: Duration = Duration::from_secs(120);
/// Most bytes of remembered replies.
const CAPACITY: u64 = 32 << 20;

/// A finished reply as it goes out, an error too.
pub type Reply = Result<Bytes, ActionError>;

type Key = (Arc<str>, String);

/// All keys of this process.
#[derive(Debug)]
pub struct Once {
    // Apart from the finished ones, which make room for each other: a call that runs is never
    // forgotten. Permits bound their number.
    running: Mutex<HashMap<Key, Slot>>,
    finished: Cache<Key, Slot>,
}

#[derive(Debug, Clone)]
struct Slot {
    body: [u8; 32],
    reply: watch::Receiver<Option<Reply>>,
}

/// What a request with a key has to do.
#[derive(Debug)]
pub enum Turn {
    /// Run, and say what came of it.
    First(Running),
    /// Wait for the first one's reply.
    Later(watch::Receiver<Option<Reply>>),
}

/// The first request with a key, while it runs. Dropped without an end it leaves no trace.
#[derive(Debug)]
pub struct Running {
    once: Arc<Once>,
    key: Key,
    slot: Slot,
    sender: watch::Sender<Option<Reply>>,
}

impl Default for Once {
    fn default() -> Self {
        let finished = Cache::builder()
            .max_capacity(CAPACITY)
            .weigher(|key: &Key, slot: &Slot| {
                let reply = slot.reply.borrow().as_ref().map_or(0, |r| r.as_ref().map_or(256, Bytes::len));
                u32::try_from(key.1.len() + reply + 256).unwrap_or(u32::MAX)
            })
            .eviction_policy(EvictionPolicy::lru())
            .time_to_live(WINDOW)
            .build();
        Self { running: Mutex::default(), finished }
    }
}

impl Once {
    /// Whose turn it is: `action` names agent and action, `key` is the caller's, `body` decides
    /// whether it is the same request.
    pub fn turn(self: &Arc<Self>, action: &Arc<str>, key: &str, body: &[u8]) -> Result<Turn, ActionError> {
        let key: Key = (Arc::clone(action), key.to_owned());
        let hash: [u8; 32] = Sha256::digest(body).into();
        let (sender, receiver) = watch::channel(None);
        let mut running = self.running();
        let seen = running.get(&key).cloned().or_else(|| self.finished.get(&key));
        let Some(slot) = seen else {
            let slot = Slot { body: hash, reply: receiver };
            running.insert(key.clone(), slot.clone());
            return Ok(Turn::First(Running { once: Arc::clone(self), key, slot, sender }));
        };
        if slot.body != hash {
            return Err(ActionError::invalid(
                "this `Nats-Msg-Id` was used with another body within two minutes",
            ));
        }
        Ok(Turn::Later(slot.reply))
    }

    fn running(&self) -> MutexGuard<'_, HashMap<Key, Slot>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the first request's reply.
pub async fn reply_of_first(mut receiver: watch::Receiver<Option<Reply>>) -> Reply {
    match receiver.wait_for(Option::is_some).await {
        Ok(reply) => reply.clone().unwrap_or_else(|| Err(ActionError::internal())),
        // The first one was dropped in the middle; nothing is known of it.
        Err(_) => Err(ActionError::internal()),
    }
}

impl Running {
    /// Tells the reply to all who wait, and remembers it if the agent was reached.
    pub fn finish(self, reply: Reply) {
        let keep = reply.as_ref().map_or_else(|error| error.reached_agent, |_| true);
        self.sender.send_replace(Some(reply));
        if keep {
            self.once.finished.insert(self.key.clone(), self.slot.clone());
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.once.running().remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(once: &Arc<Once>, body: &[u8]) -> Running {
        match once.turn(&"a.b".into(), "k", body).unwrap() {
            Turn::First(running) => running,
            Turn::Later(_) => panic!("not the first"),
        }
    }

    #[tokio::test]
    async fn a_repeat_gets_the_first_ones_reply() {
        let once = Arc::new(Once::default());
        let running = first(&once, b"x");
        let Turn::Later(waiting) = once.turn(&"a.b".into(), "k", b"x").unwrap() else { panic!("ran twice") };
        running.finish(Ok(Bytes::from_static(b"reply")));
        assert_eq!(reply_of_first(waiting).await.unwrap(), "reply");
        let Turn::Later(after) = once.turn(&"a.b".into(), "k", b"x").unwrap() else { panic!("ran twice") };
        assert_eq!(reply_of_first(after).await.unwrap(), "reply");
        once.turn(&"a.b".into(), "k", b"y").expect_err("another body");
        assert!(matches!(once.turn(&"a.c".into(), "k", b"y").unwrap(), Turn::First(_)));
    }

    #[test]
    fn an_error_from_before_the_agent_was_reached_is_not_remembered() {
        let once = Arc::new(Once::default());
        first(&once, b"x").finish(Err(ActionError::unavailable("a", None)));
        first(&once, b"y").finish(Err(ActionError::internal().after_reaching_agent()));
        once.turn(&"a.b".into(), "k", b"x").expect_err("the second one is remembered");
    }

    #[test]
    fn a_request_that_was_dropped_leaves_no_trace() {
        let once = Arc::new(Once::default());
        drop(first(&once, b"x"));
        first(&once, b"y");
    }
}
