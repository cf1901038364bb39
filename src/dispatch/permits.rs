//! Limits for the concurrent requests to one agent.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::request::Operation;
use crate::action::request::ReplyMode;
use crate::reply::error::{ActionError, Code};

/// Maximum number of concurrent lookups of tasks, which wait for the agent.
const MAX_LOOKUPS: usize = 1024;
/// Maximum number of concurrent cancels. They have their own limit, so that a task can be canceled while the agent is
/// busy, or does not respond to lookups.
const MAX_CANCELS: usize = 256;
/// Maximum number of concurrent requests for the card, which do not wait for the agent.
const MAX_CARDS: usize = 256;
/// Maximum number of repeated requests that wait for the reply of the first. Each key has a limit of its own, too.
const MAX_REPEATS: usize = 1024;
/// Maximum number of submitted tasks that the bridge follows concurrently.
const MAX_SUBMITTED: usize = 10_000;

#[derive(Debug)]
pub(super) struct Permits {
    agent: Arc<str>,
    in_flight: Arc<Semaphore>,
    lookups: Arc<Semaphore>,
    cancels: Arc<Semaphore>,
    cards: Arc<Semaphore>,
    repeats: Arc<Semaphore>,
    submitted: Arc<Semaphore>,
}

/// Admits a request until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    _admission: OwnedSemaphorePermit,
    /// A submitted task keeps this permit after its reply.
    pub(super) submitted: Option<OwnedSemaphorePermit>,
}

impl Permits {
    pub(super) fn new(agent: &Arc<str>, max_in_flight: usize) -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self {
            agent: Arc::clone(agent),
            in_flight: semaphore(max_in_flight),
            lookups: semaphore(MAX_LOOKUPS),
            cancels: semaphore(MAX_CANCELS),
            cards: semaphore(MAX_CARDS),
            repeats: semaphore(MAX_REPEATS),
            submitted: semaphore(MAX_SUBMITTED),
        }
    }

    pub(super) fn take(&self, operation: &Operation, mode: ReplyMode) -> Result<Permit, ActionError> {
        match operation {
            Operation::GetTask(_) => return self.lookup(),
            Operation::CancelTask(_) => return self.cancel(),
            Operation::Invoke { .. } | Operation::Answer(_) => {}
        }
        let in_flight = self.try_acquire(&self.in_flight, "calls in flight (`max_in_flight`)")?;
        let submitted = match mode {
            ReplyMode::Submit => Some(self.try_acquire(&self.submitted, "submitted tasks")?),
            ReplyMode::Final | ReplyMode::Stream => None,
        };
        Ok(Permit { _admission: in_flight, submitted })
    }

    /// Waits for the permit of a call.
    pub(super) async fn wait(&self) -> Result<Permit, ActionError> {
        let in_flight = Arc::clone(&self.in_flight).acquire_owned().await;
        Ok(Permit { _admission: in_flight.map_err(|_| ActionError::internal())?, submitted: None })
    }

    pub(super) fn lookup(&self) -> Result<Permit, ActionError> {
        self.try_admit(&self.lookups, "lookups in flight")
    }

    pub(super) fn cancel(&self) -> Result<Permit, ActionError> {
        self.try_admit(&self.cancels, "cancels in flight")
    }

    pub(super) fn card(&self) -> Result<Permit, ActionError> {
        self.try_admit(&self.cards, "requests for the card in flight")
    }

    pub(super) fn repeat(&self) -> Result<Permit, ActionError> {
        self.try_admit(&self.repeats, "repeated requests in flight")
    }

    /// The number of requests that can have a permit at the same time. Call it before any permit is taken.
    pub(super) fn total(&self) -> usize {
        let Self { agent: _, in_flight, lookups, cancels, cards, repeats, submitted } = self;
        let all = [in_flight, lookups, cancels, cards, repeats, submitted];
        all.iter().map(|permits| permits.available_permits()).sum()
    }

    fn try_admit(&self, permits: &Arc<Semaphore>, what: &str) -> Result<Permit, ActionError> {
        Ok(Permit { _admission: self.try_acquire(permits, what)?, submitted: None })
    }

    fn try_acquire(&self, permits: &Arc<Semaphore>, what: &str) -> Result<OwnedSemaphorePermit, ActionError> {
        Arc::clone(permits).try_acquire_owned().map_err(|_| {
            let message = format!("agent `{}` has reached its limit of {what}; try again", self.agent);
            ActionError::new(Code::Busy, message)
        })
    }
}
