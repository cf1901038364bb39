//! Sessions: maps the caller's id for a conversation to the agent's context id.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::records::{Change, ReadRecord, Record, TypedRecords};
use super::{Lifetime, RecordKey, RecordKind, StateStore};
use crate::reply::error::ActionError;

/// A session expires this long after its last call.
const TTL: Duration = Duration::from_secs(24 * 3600);
/// A session in use is written again this often, so that it does not expire.
const REFRESH: Duration = Duration::from_secs(3600);

#[derive(Debug, Serialize, Deserialize)]
struct SessionRecord {
    context_id: String,
}

impl Record for SessionRecord {}

impl ReadRecord<SessionRecord> {
    fn needs_refresh(&self) -> bool {
        self.written_at.elapsed().is_ok_and(|age| age >= REFRESH)
    }
}

/// Stores only the sessions whose agent chose another context id. Any other session id is the context id.
#[derive(Debug)]
pub(crate) struct Sessions {
    records: TypedRecords<SessionRecord>,
}

impl Sessions {
    pub(super) fn new(store: &Arc<dyn StateStore>) -> Self {
        Self { records: TypedRecords::new(store, RecordKind::Session) }
    }

    /// The context id to send for a session: from the second call on, the one that the agent chose.
    pub(crate) async fn context_id(&self, agent: &Arc<str>, session_id: &str) -> Result<String, ActionError> {
        let known: Option<ReadRecord<SessionRecord>> =
            self.records.read(&RecordKey::new(agent, session_id)).await?;
        let Some(known) = known else {
            return Ok(session_id.to_owned());
        };
        if known.needs_refresh() {
            self.set_context_id(agent, session_id, &known.record.context_id).await?;
        }
        Ok(known.record.context_id)
    }

    pub(crate) async fn set_context_id(
        &self,
        agent: &Arc<str>,
        session_id: &str,
        context_id: &str,
    ) -> Result<(), ActionError> {
        let key = RecordKey::new(agent, session_id);
        let known: Option<ReadRecord<SessionRecord>> = self.records.read(&key).await?;
        let is_current = match known {
            Some(known) => known.record.context_id == context_id && !known.needs_refresh(),
            None => session_id == context_id,
        };
        if is_current {
            return Ok(());
        }
        let write = |_: Option<SessionRecord>| {
            Ok(Change::Write(
                SessionRecord { context_id: context_id.to_owned() },
                Lifetime::evictable(TTL),
                (),
            ))
        };
        self.records.update(&key, write).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::memory_store;
    use super::*;

    #[tokio::test]
    async fn every_replica_uses_the_context_id_that_the_agent_chose() {
        let store = memory_store();
        let (one, other) = (Sessions::new(&store), Sessions::new(&store));
        let agent: Arc<str> = "weather".into();
        assert_eq!(one.context_id(&agent, "s").await.unwrap(), "s");
        one.set_context_id(&agent, "s", "s").await.unwrap();
        assert!(store.read(RecordKind::Session, &RecordKey::new(&agent, "s")).await.unwrap().is_none());
        one.set_context_id(&agent, "s", "c-1").await.unwrap();
        assert_eq!(other.context_id(&agent, "s").await.unwrap(), "c-1");
        other.set_context_id(&agent, "s", "c-2").await.unwrap();
        assert_eq!(one.context_id(&agent, "s").await.unwrap(), "c-2");
        assert_eq!(one.context_id(&"other".into(), "s").await.unwrap(), "s");
    }
}
