//! Limits for the concurrent requests to one agent.

use std::sync::Arc;

use super::fair_permits::{FairPermit, FairPermits};
use super::request::Operation;
use crate::action::request::ReplyMode;
use crate::caller::Caller;
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

/// Maximum number of callers that are attached to logged calls.
const MAX_ATTACHED: usize = 1024;

#[derive(Debug)]
pub(super) struct Permits {
    agent: Arc<str>,
    in_flight: Arc<FairPermits>,
    lookups: Arc<FairPermits>,
    cancels: Arc<FairPermits>,
    cards: Arc<FairPermits>,
    repeats: Arc<FairPermits>,
    submitted: Arc<FairPermits>,
    attached: Arc<FairPermits>,
}

/// Admits a request until it is dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    _admission: FairPermit,
    /// A submitted task keeps this permit after its reply.
    pub(super) submitted: Option<FairPermit>,
}

impl Permits {
    pub(super) fn new(agent: &Arc<str>, max_in_flight: usize) -> Self {
        Self {
            agent: Arc::clone(agent),
            in_flight: FairPermits::new(max_in_flight),
            lookups: FairPermits::new(MAX_LOOKUPS),
            cancels: FairPermits::new(MAX_CANCELS),
            cards: FairPermits::new(MAX_CARDS),
            repeats: FairPermits::new(MAX_REPEATS),
            submitted: FairPermits::new(MAX_SUBMITTED),
            attached: FairPermits::new(MAX_ATTACHED),
        }
    }

    pub(super) fn take(
        &self,
        operation: &Operation,
        mode: ReplyMode,
        caller: &Caller,
    ) -> Result<Permit, ActionError> {
        match operation {
            Operation::GetTask(_) => return self.lookup(caller),
            Operation::CancelTask(_) => return self.cancel(caller),
            Operation::Invoke { .. } | Operation::Answer(_) => {}
        }
        let in_flight = self.try_acquire(&self.in_flight, caller, "calls in flight (`max_in_flight`)")?;
        let submitted = match mode {
            ReplyMode::Submit => Some(self.try_acquire(&self.submitted, caller, "submitted tasks")?),
            ReplyMode::Final | ReplyMode::Stream => None,
        };
        Ok(Permit { _admission: in_flight, submitted })
    }

    /// Waits for the permit of a call.
    pub(super) async fn wait(&self, caller: &Caller) -> Result<Permit, ActionError> {
        let in_flight = self.in_flight.acquire(caller).await;
        Ok(Permit { _admission: in_flight.ok_or_else(ActionError::internal)?, submitted: None })
    }

    pub(super) fn lookup(&self, caller: &Caller) -> Result<Permit, ActionError> {
        self.try_admit(&self.lookups, caller, "lookups in flight")
    }

    pub(super) fn cancel(&self, caller: &Caller) -> Result<Permit, ActionError> {
        self.try_admit(&self.cancels, caller, "cancels in flight")
    }

    pub(super) fn card(&self, caller: &Caller) -> Result<Permit, ActionError> {
        self.try_admit(&self.cards, caller, "requests for the card in flight")
    }

    pub(super) fn repeat(&self, caller: &Caller) -> Result<Permit, ActionError> {
        self.try_admit(&self.repeats, caller, "repeated requests in flight")
    }

    pub(super) fn attach(&self, caller: &Caller) -> Result<Permit, ActionError> {
        self.try_admit(&self.attached, caller, "attached callers")
    }

    /// The number of requests that can have a permit at the same time. Call it before any permit is taken.
    pub(super) fn total(&self) -> usize {
        let Self { agent: _, in_flight, lookups, cancels, cards, repeats, submitted, attached } = self;
        let all = [in_flight, lookups, cancels, cards, repeats, submitted, attached];
        all.iter().map(|permits| permits.available()).sum()
    }

    fn try_admit(
        &self,
        permits: &Arc<FairPermits>,
        caller: &Caller,
        what: &str,
    ) -> Result<Permit, ActionError> {
        Ok(Permit { _admission: self.try_acquire(permits, caller, what)?, submitted: None })
    }

    fn try_acquire(
        &self,
        permits: &Arc<FairPermits>,
        caller: &Caller,
        what: &str,
    ) -> Result<FairPermit, ActionError> {
        permits.try_acquire(caller).ok_or_else(|| {
            let message = match caller.is_verified() && permits.available() > 0 {
                true => format!(
                    "this caller, or its account, has reached its share of the {what} of agent `{}`; try again",
                    self.agent
                ),
                false => format!("agent `{}` has reached its limit of {what}; try again", self.agent),
            };
            ActionError::new(Code::Busy, message)
        })
    }
}
