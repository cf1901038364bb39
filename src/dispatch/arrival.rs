//! What a request holds from its arrival until its reply is sent.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::call_log::CallEntry;
use super::permits::Permit;
use crate::action::request::ReplyMemory;
use crate::caller::Caller;
use crate::memory::{MemoryAccount, MemoryCharge, OutOfMemory};
use crate::reply::error::ActionError;

/// Requests to one agent that may exist in addition to those with a permit: most of them are about to be refused.
const MAX_WITHOUT_PERMIT: usize = 4096;

/// Approximate bytes of the task that serves a request.
const TASK: usize = 4 << 10;

/// A request that has arrived. A front door drops it when the reply is sent; until then the request counts as in
/// flight for the limits of its agent and for the memory budget.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// The memory of the request. Once the message to the agent is parsed from the body, only that of the task that
    /// serves it.
    memory: Result<MemoryCharge, OutOfMemory>,
    /// The memory of the reply, from the end of the call on.
    reply_memory: Option<ReplyMemory>,
    /// From the end of the call on.
    permit: Option<Permit>,
    /// The name of the action in metrics and the call log.
    pub(super) action: Arc<str>,
    /// Written to the call log when the reply is sent; `None` while that log is off.
    pub(super) log_entry: Option<CallEntry>,
    _place: OwnedSemaphorePermit,
}

impl Arrival {
    /// Fails if there is no memory for the request.
    pub(crate) fn check(&self) -> Result<(), ActionError> {
        self.memory.as_ref().map(|_| ()).map_err(|error| (*error).into())
    }

    /// The front door knows who sent the request, so that the call log names the caller of a refused request, too.
    pub(crate) fn identify(&mut self, caller: &Caller) {
        if let Some(entry) = &mut self.log_entry {
            entry.caller = caller.clone();
        }
    }

    /// Counts the bytes that a front door sends to the caller; `None` if nothing needs the number.
    pub(crate) fn sent_bytes(&self) -> Option<Arc<AtomicU64>> {
        self.log_entry.as_ref().map(CallEntry::sent)
    }

    /// The call has ended: keeps its permit, and the charge for its reply.
    pub(super) fn keep(&mut self, permit: Option<Permit>, reply_memory: ReplyMemory) {
        self.permit = permit;
        self.reply_memory = Some(reply_memory);
        self.release_body();
    }

    /// The body is dropped. What was parsed from it has a charge of its own.
    pub(super) fn release_body(&mut self) {
        if let Ok(memory) = &mut self.memory {
            // Shrinking cannot fail.
            let _ = memory.resize(TASK);
        }
    }

    /// Charges a further message of the caller, in place of the first.
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), ActionError> {
        if let Some(entry) = &mut self.log_entry {
            entry.next(bytes);
        }
        let memory = self.memory.as_mut().map_err(|error| *error)?;
        Ok(memory.resize(TASK + bytes)?)
    }

    pub(super) fn keep_permit(&mut self, permit: Permit) {
        self.permit = Some(permit);
    }

    /// Releases the permit, because the request waits for a person.
    pub(crate) fn release_permit(&mut self) {
        self.permit = None;
    }
}

/// Admits requests to one agent.
#[derive(Debug)]
pub(super) struct Arrivals {
    memory: Arc<MemoryAccount>,
    places: Arc<Semaphore>,
}

impl Arrivals {
    pub(super) fn new(memory: Arc<MemoryAccount>, max_permits: usize) -> Self {
        let places = (max_permits + MAX_WITHOUT_PERMIT).min(Semaphore::MAX_PERMITS);
        Self { memory, places: Arc::new(Semaphore::new(places)) }
    }

    pub(super) fn arrive(&self, action: &Arc<str>, bytes: usize) -> Option<Arrival> {
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        let memory = self.memory.charge(TASK + bytes);
        Some(Arrival {
            memory,
            reply_memory: None,
            permit: None,
            action: Arc::clone(action),
            log_entry: None,
            _place: place,
        })
    }
}
