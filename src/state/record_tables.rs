//! The tables of a store: one for each kind of record.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::stream::{self, Stream, StreamExt as _};

use super::clock::Instant;
use super::quota::{QuotaKind, Quotas};
use super::table::{self, BoundedTable};
use super::{RecordKey, RecordKind};

#[derive(Debug)]
pub(super) struct RecordTables<V> {
    follow_ups: Mutex<BoundedTable<V>>,
    tasks: Mutex<BoundedTable<V>>,
    sessions: Mutex<BoundedTable<V>>,
    idempotency_keys: Mutex<BoundedTable<V>>,
    replies: Mutex<BoundedTable<V>>,
}

impl<V> RecordTables<V> {
    pub(super) fn new(quotas: &Arc<Quotas>) -> Self {
        let table = |kind: RecordKind| Mutex::new(BoundedTable::new(quotas, QuotaKind::from(kind)));
        Self {
            follow_ups: table(RecordKind::FollowUp),
            tasks: table(RecordKind::Task),
            sessions: table(RecordKind::Session),
            idempotency_keys: table(RecordKind::IdempotencyKey),
            replies: table(RecordKind::Reply),
        }
    }

    pub(super) fn lock(&self, kind: RecordKind) -> MutexGuard<'_, BoundedTable<V>> {
        let table = match kind {
            RecordKind::FollowUp => &self.follow_ups,
            RecordKind::Task => &self.tasks,
            RecordKind::Session => &self.sessions,
            RecordKind::IdempotencyKey => &self.idempotency_keys,
            RecordKind::Reply => &self.replies,
        };
        table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `select` selects of the rows of one agent or of all, with their keys. It reads them in pages, so that the
    /// lock is not held for long.
    pub(super) fn scan<'a, T: Send + 'a>(
        &'a self,
        kind: RecordKind,
        agent: Option<Arc<str>>,
        select: impl Fn(&str, &V) -> Option<T> + Copy + Send + 'a,
    ) -> impl Stream<Item = (RecordKey, T)> + Send + 'a
    where
        V: Send,
    {
        let agents = agent.map_or_else(|| self.lock(kind).agents(), |agent| vec![agent]);
        let pages = stream::unfold((agents, 0), move |(mut agents, from)| async move {
            let agent = agents.pop()?;
            let (page, next) = {
                let table = self.lock(kind);
                let (rows, next) = table.page(&agent, from, Instant::now());
                let selected = rows
                    .into_iter()
                    .filter_map(|(id, row)| Some((RecordKey::new(&agent, id), select(id, row)?)));
                (selected.collect::<Vec<_>>(), next)
            };
            if next.is_some() {
                agents.push(agent);
            }
            Some((stream::iter(page), (agents, next.unwrap_or(0))))
        });
        pages.flatten()
    }

    /// Ends the protection of an agent's rows whose time is over.
    pub(super) fn expire(&self, agent: &str) {
        for kind in RecordKind::ALL {
            // The removed values are dropped after the lock is released.
            let _removed = { self.lock(kind).expire(agent, Instant::now()) };
        }
    }

    /// Frees the memory of expired rows.
    pub(super) async fn sweep(&self)
    where
        V: Send,
    {
        for kind in RecordKind::ALL {
            table::sweep(|| self.lock(kind).sweep_step(Instant::now())).await;
        }
    }
}
