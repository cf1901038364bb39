//! Sessions: the caller's name for a conversation, and the agent's.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Change, Key, Kind, StateStore, record, update};
use crate::reply::error::ActionError;

/// How long a session is remembered after its last call.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// A session that is in use is written again this often, to keep it.
const REFRESH: Duration = Duration::from_secs(3600);

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    context_id: String,
}

/// The sessions whose agent chose a context id of its own. Any other session is its own context id, and
/// is not stored.
#[derive(Debug)]
pub(crate) struct Sessions {
    store: Arc<dyn StateStore>,
}

impl Sessions {
    pub(super) fn new(store: Arc<dyn StateStore>) -> Self {
        Self { store }
    }

    /// The context id to send for a session: the agent's own from the second call on.
    pub(crate) async fn context_id(&self, agent: &Arc<str>, session_id: &str) -> Result<String, ActionError> {
        let entry = self.store.read(Kind::Session, &Key::new(agent, session_id)).await?;
        let Some(entry) = entry else { return Ok(session_id.to_owned()) };
        let record: Record = record::decode(&entry.value)?;
        if entry.written_at.elapsed().is_ok_and(|age| age >= REFRESH) {
            self.follow(agent, session_id, &record.context_id).await?;
        }
        Ok(record.context_id)
    }

    /// Remembers which context id the agent gave to a session.
    pub(crate) async fn follow(
        &self,
        agent: &Arc<str>,
        session_id: &str,
        context_id: &str,
    ) -> Result<(), ActionError> {
        let follow = |known: Option<(Record, std::time::SystemTime)>| {
            let is_known = match &known {
                Some((record, written_at)) => {
                    record.context_id == context_id && written_at.elapsed().is_ok_and(|age| age < REFRESH)
                }
                None => session_id == context_id,
            };
            Ok::<_, ActionError>(if is_known {
                Change::Keep(())
            } else {
                Change::Write(Record { context_id: context_id.to_owned() }, TTL, ())
            })
        };
        update(&*self.store, Kind::Session, &Key::new(agent, session_id), follow).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::memory::MemoryStore;
    use super::*;

    #[tokio::test]
    async fn a_session_follows_the_agents_context_at_every_replica() {
        let store: Arc<dyn StateStore> = Arc::new(MemoryStore::default());
        let (one, other) = (Sessions::new(Arc::clone(&store)), Sessions::new(Arc::clone(&store)));
        let agent: Arc<str> = "weather".into();
        assert_eq!(one.context_id(&agent, "s").await.unwrap(), "s");
        one.follow(&agent, "s", "s").await.unwrap();
        assert!(store.read(Kind::Session, &Key::new(&agent, "s")).await.unwrap().is_none());
        one.follow(&agent, "s", "c-1").await.unwrap();
        assert_eq!(other.context_id(&agent, "s").await.unwrap(), "c-1");
        other.follow(&agent, "s", "c-2").await.unwrap();
        assert_eq!(one.context_id(&agent, "s").await.unwrap(), "c-2");
        assert_eq!(one.context_id(&"other".into(), "s").await.unwrap(), "s");
    }
}
