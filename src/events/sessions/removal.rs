//! Deletes sessions. What their forks need stays until the last of these is deleted.

use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::Deserialize;

use super::projector::{self, Projected, SessionRef};
use super::service::{SessionView, Sessions, check_revision, parse, unavailable};
use super::summary::{ChildLink, Summary};
use crate::caller::Caller;
use crate::events::event::index_position;
use crate::events::records::RecordPart;
use crate::events::store::{AppendError, LogUnavailable};
use crate::json::to_bytes;
use crate::reply::error::ActionError;

/// How often a deletion is repeated that another writer was faster than.
const MAX_ATTEMPTS: usize = 50;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct DeleteRequest {
    id: String,
    #[serde(default)]
    revision: Option<u64>,
}

impl Sessions {
    pub(crate) async fn delete(&self, caller: &Caller, body: &[u8]) -> Result<Bytes, ActionError> {
        let DeleteRequest { id, revision } = parse(body)?;
        let session = Self::session(caller, &id)?;
        let found = self.find(&session).await?;
        check_revision(&found, revision)?;
        for run in self.running(&session, &found).await? {
            self.calls.cancel(caller, &run).await;
        }
        for _ in 0..MAX_ATTEMPTS {
            let found = self.find(&session).await?;
            let parent = found.summary.parent.clone();
            match self.remove(&session, &found).await {
                Ok(revision) => {
                    self.log.forget(&session.key);
                    if let Some(link) = parent {
                        self.remove_ancestors(session.sibling(&link.parent)).await?;
                    }
                    let summary = Summary { deleted: true, ..found.summary };
                    return Ok(to_bytes(&SessionView::new(&Projected { summary, revision })));
                }
                Err(AppendError::Exists) => {}
                Err(error) => return Err(unavailable(error)),
            }
        }
        Err(LogUnavailable.into())
    }

    /// Marks a session as deleted, and removes what none of its forks needs.
    async fn remove(&self, session: &SessionRef, found: &Projected) -> Result<u64, AppendError> {
        let summary = &found.summary;
        let children = self.living(session, &summary.children).await?;
        let last_needed = children.iter().map(|child| child.index).max();
        let marker = Summary {
            title: None,
            config: None,
            agents: Vec::new(),
            running: Vec::new(),
            forked_at: Vec::new(),
            deleted: true,
            parent: summary.parent.clone().filter(|_| last_needed.is_some()),
            redactions: if last_needed.is_some() { summary.redactions.clone() } else { Vec::new() },
            children,
            ..summary.clone()
        };
        // First, so that nobody reads half of it.
        let key = session.record(RecordPart::Summary);
        let revision = self.store().write_record(&key, to_bytes(&marker), found.revision).await?;
        self.store().purge_records(&session.runs()).await?;
        match last_needed {
            None => {
                self.store().purge(&session.key).await?;
                self.store().purge_records(&session.positions()).await?;
            }
            Some(last) => {
                let mut later = Vec::new();
                let mut batches = self.store().read(&session.key, index_position(last).0);
                while let Some(batch) = batches.next().await {
                    let sequence = batch?.sequence;
                    if !marker.redactions.iter().any(|redaction| redaction.replaced_by == sequence) {
                        later.push(sequence);
                    }
                }
                for sequence in later {
                    self.store().erase(sequence).await?;
                }
            }
        }
        Ok(revision)
    }

    /// Removes deleted ancestors that no fork needs any more.
    async fn remove_ancestors(&self, mut session: SessionRef) -> Result<(), ActionError> {
        loop {
            let found = projector::stored(self.store(), &session).await?;
            let Some(found) = found.filter(|found| found.summary.deleted) else { return Ok(()) };
            if !self.living(&session, &found.summary.children).await?.is_empty() {
                return Ok(());
            }
            let parent = found.summary.parent.clone();
            match self.remove(&session, &found).await {
                Ok(_) => {}
                // Somebody else does it, or the session begins again.
                Err(AppendError::Exists) => return Ok(()),
                Err(error) => return Err(unavailable(error)),
            }
            let Some(link) = parent else { return Ok(()) };
            session = session.sibling(&link.parent);
        }
    }

    /// The forks that still need the events of a session.
    async fn living(
        &self,
        session: &SessionRef,
        children: &[ChildLink],
    ) -> Result<Vec<ChildLink>, LogUnavailable> {
        let mut living = Vec::new();
        for child in children {
            let of_child = session.sibling(&child.child);
            // What is stored of a fork may have to be made first.
            let found = projector::project(self.store(), &of_child).await?;
            let needs = |found: &Projected| !found.summary.deleted || !found.summary.children.is_empty();
            let is_own = |found: &Projected| {
                found.summary.parent.as_ref().is_some_and(|link| link.parent == session.id)
            };
            if found.is_some_and(|found| needs(&found) && is_own(&found)) {
                living.push(child.clone());
            }
        }
        Ok(living)
    }
}
