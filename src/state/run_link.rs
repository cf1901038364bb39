//! Where the event log of a task's call is, for the records of tasks and questions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::a2a::model::ALLOCATION_OVERHEAD;

/// The run of a logged call. An answer to its question, and a replica that adopts its task, continue the log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunLink {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<Arc<str>>,
    pub run: Uuid,
    /// Counts the calls of the run.
    pub call: u32,
    /// The sequence of the run's first batch in the log; 0 if it was not known when the record was written.
    #[serde(default)]
    pub start: u64,
    /// The same of the last batch.
    #[serde(default)]
    pub last: u64,
}

impl RunLink {
    /// The memory that it takes in addition to its own size, in bytes.
    pub(crate) fn allocated(&self) -> usize {
        self.session.as_ref().map_or(0, |session| ALLOCATION_OVERHEAD + session.len())
    }

    /// The sequence after which the batches of the run come.
    pub(crate) fn before_start(&self) -> u64 {
        self.start.saturating_sub(1)
    }
}

/// The link of a call in flight. The log moves it on, and records take it as it is.
#[derive(Debug)]
pub(crate) struct LiveRunLink {
    pub session: Option<Arc<str>>,
    pub run: Uuid,
    pub call: u32,
    start: AtomicU64,
    last: AtomicU64,
}

impl LiveRunLink {
    pub(crate) fn new(link: RunLink) -> Self {
        let RunLink { session, run, call, start, last } = link;
        Self { session, run, call, start: start.into(), last: last.into() }
    }

    /// A batch is stored.
    pub(crate) fn stored(&self, sequence: u64) {
        let _ = self.start.compare_exchange(0, sequence, Relaxed, Relaxed);
        self.last.fetch_max(sequence, Relaxed);
    }

    pub(crate) fn now(&self) -> RunLink {
        let Self { session, run, call, start, last } = self;
        let (start, last) = (start.load(Relaxed), last.load(Relaxed));
        RunLink { session: session.clone(), run: *run, call: *call, start, last }
    }
}
