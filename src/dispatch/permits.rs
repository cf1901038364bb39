//! How many requests of one agent may be worked on at the same time.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::request::Request;
use crate::action::request::ReplyMode;
use crate::reply::error::{ActionError, Code};

/// Look-ups and cancels at the same time. They have a limit of their own, so that a task can be cancelled
/// while the agent is busy.
const MAX_ASIDE: usize = 1024;
/// Repeats of a request that wait for its reply.
const MAX_REPEATS: usize = 1024;
/// Submitted tasks that are followed at the same time.
const MAX_SUBMITTED: usize = 10_000;

#[derive(Debug)]
pub(super) struct Permits {
    agent: Arc<str>,
    in_flight: Arc<Semaphore>,
    aside: Arc<Semaphore>,
    repeats: Arc<Semaphore>,
    submitted: Arc<Semaphore>,
}

/// The right to be worked on, until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    _slot: OwnedSemaphorePermit,
    /// A submitted task keeps this place after its reply.
    pub(super) submitted: Option<OwnedSemaphorePermit>,
}

impl Permits {
    pub(super) fn new(agent: &Arc<str>, max_in_flight: usize) -> Self {
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self {
            agent: Arc::clone(agent),
            in_flight: semaphore(max_in_flight),
            aside: semaphore(MAX_ASIDE),
            repeats: semaphore(MAX_REPEATS),
            submitted: semaphore(MAX_SUBMITTED),
        }
    }

    pub(super) fn take(&self, request: &Request) -> Result<Permit, ActionError> {
        if !request.operation.runs_the_agent() {
            return Ok(Permit { _slot: self.aside()?, submitted: None });
        }
        let slot = self.try_acquire(&self.in_flight, "calls in flight (`max_in_flight`)")?;
        Ok(Permit { _slot: slot, submitted: self.submission(request)? })
    }

    /// Waits for the permit of a call.
    pub(super) async fn wait(&self) -> Result<Permit, ActionError> {
        let slot = Arc::clone(&self.in_flight).acquire_owned().await;
        Ok(Permit { _slot: slot.map_err(|_| ActionError::internal())?, submitted: None })
    }

    /// For a request that does not run the agent.
    pub(super) fn aside(&self) -> Result<OwnedSemaphorePermit, ActionError> {
        self.try_acquire(&self.aside, "look-ups and cancels in flight")
    }

    /// For the repeat of a request with an idempotency key.
    pub(super) fn repeat(&self) -> Result<OwnedSemaphorePermit, ActionError> {
        self.try_acquire(&self.repeats, "repeated requests in flight")
    }

    fn submission(&self, request: &Request) -> Result<Option<OwnedSemaphorePermit>, ActionError> {
        let is_submission = request.options.mode == ReplyMode::Submit;
        is_submission.then(|| self.try_acquire(&self.submitted, "submitted tasks")).transpose()
    }

    fn try_acquire(&self, permits: &Arc<Semaphore>, what: &str) -> Result<OwnedSemaphorePermit, ActionError> {
        Arc::clone(permits).try_acquire_owned().map_err(|_| {
            let message = format!("agent `{}` has reached its limit of {what}; try again", self.agent);
            ActionError::new(Code::Busy, message)
        })
    }
}
