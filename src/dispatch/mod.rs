//! The one way in to an agent, whichever front door a request came through.
//!
//! ```text
//! NATS actions ───┐                    ┌─ idempotency ─ permit ─ in-flight ─ panic guard ─┐
//! agent protocol ─┼─Request─> Dispatcher                                               Actions ──> agent
//! (next door) ────┘   <─Reply─         └─ redaction ─ metrics ─ spans ────────────────────┘
//! ```
//!
//! A front door translates and does nothing else: bytes become a [`Request`], [`Progress`] becomes frames,
//! and a [`Reply`] becomes bytes. A rule that two front doors need belongs here. To add a front door, write an
//! adapter such as `bus::actions`, the smallest one, that
//!
//! 1. runs each request in [`Dispatcher::spawn`], so that it has a span and a stop waits for it;
//! 2. makes a [`Request`] and hands it to [`Dispatcher::call`], with a [`Progress`] that tells the caller what happens;
//!    what it cannot read it gives to [`Dispatcher::refuse`], and what needs no agent, such as the card, is read in
//!    [`Dispatcher::look_up`];
//! 3. is started for each agent by `Bridge::open_front_doors` in `bridge.rs`, before anything there that would have to be taken
//!    back, and kept in the `ServedAgent` that this returns (`bridge/served_agent.rs`), whose `withdraw` takes it away again.
//!
//! A front door whose requests have several steps, such as the agent protocol, also has [`Dispatcher::permit`] and
//! [`Dispatcher::guarded`] for what happens between two calls.

mod permits;
pub(crate) mod request;
#[cfg(test)]
mod tests;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt as _;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::action::actions::Actions;
use crate::action::progress::{Frame, Listener, Progress};
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, task_id};
use crate::agent::Agent;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyStatus};
use crate::reply::{self, Reply};
use crate::state::idempotency::{Repeat, Running, Turn};
use crate::telemetry::spans::{self, Arrival, CallSpan};
use crate::telemetry::trace_context::TraceContext;
use permits::{Permit, Permits};
use request::{Admission, IdempotencyKey, Operation, Request};

/// Takes the requests of one agent.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    agent: Agent,
    actions: Actions,
    permits: Permits,
    calls: TaskTracker,
}

impl Dispatcher {
    /// `calls` tracks the requests that are being worked on.
    pub(crate) fn new(agent: Agent, actions: Actions, calls: TaskTracker) -> Self {
        let permits = Permits::new(&agent.name, agent.config.max_in_flight);
        Self { agent, actions, permits, calls }
    }

    pub(crate) fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Runs a front door's work for one request: tracked, so that a stop waits for it, and under the
    /// request's spans.
    pub(crate) fn spawn(
        &self,
        arrival: Arrival<'_>,
        trace: &TraceContext,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        // A span costs as much as the rest of the bookkeeping together, so there is one only with logs at
        // `debug`; warnings name the agent themselves.
        let span = tracing::debug_span!("call", agent = %self.agent.name, skill = arrival.action, trace_id = tracing::field::Empty, task = tracing::field::Empty);
        if let Some(id) = trace.id() {
            span.record("trace_id", id);
        }
        let exported = CallSpan::begin(arrival, || trace.clone());
        self.calls.spawn(exported.around(work.instrument(span)));
    }

    /// Runs a request to its reply.
    ///
    /// In mode `submit` the reply is due when [`Progress::accepted`] is called; what this returns then is the
    /// end of the task, which is published.
    pub(crate) async fn call(&self, mut request: Request, progress: &mut impl Progress) -> Reply {
        let began = Instant::now();
        spans::hand_on(&mut request.options.trace);
        let mut running = None;
        if let Some(key) = request.idempotency_key.take().filter(|_| request.operation.runs_the_agent()) {
            match Box::pin(self.claim(&key, &request)).await {
                Ok(Turn::First(first)) => running = Some(first),
                Ok(Turn::Repeat(repeat)) => {
                    return Box::pin(self.repeat(repeat, &request.options, began)).await;
                }
                Err(error) => return Box::pin(self.refuse(error, progress)).await,
            }
        }
        let permit = match std::mem::replace(&mut request.admission, Admission::Try) {
            Admission::Try => self.permits.take(&request),
            Admission::Permitted(permit) => Ok(permit),
        };
        let permit = match permit {
            Ok(permit) => permit,
            Err(error) => {
                let reply = Box::pin(self.refuse(error, progress)).await;
                finish(running, &reply).await;
                return reply;
            }
        };
        progress.started().await;
        let mut tracked = Tracked {
            dispatcher: self,
            progress,
            began,
            pending: Some(Pending { running, permit }),
            accepted: None,
        };
        let in_flight = request.operation.runs_the_agent().then(|| self.agent.begin_call());
        let reply = self.guarded(self.perform(request.operation, &request.options, &mut tracked)).await;
        drop(in_flight);
        tracked.end(&reply).await;
        reply
    }

    /// Refuses a request before it is run.
    pub(crate) async fn refuse(&self, error: ActionError, progress: &mut impl Progress) -> Reply {
        progress.started().await;
        self.count_refusal(&error);
        Err(error)
    }

    /// Counts a request that a front door refuses in a form of its own.
    pub(crate) fn count_refusal(&self, error: &ActionError) {
        self.note(&Err(error.clone()), Instant::now());
    }

    /// Waits for a permit, for the next step of a request that was let in before.
    pub(crate) async fn permit(&self) -> Result<Permit, ActionError> {
        self.permits.wait().await
    }

    /// Reads something that needs neither the agent nor a task, such as the card.
    pub(crate) fn look_up<T>(&self, read: impl FnOnce() -> Result<T, ActionError>) -> Result<T, ActionError> {
        let began = Instant::now();
        let found = self.permits.aside().and_then(|_permit| read());
        match &found {
            Ok(_) => self.agent.calls.ended("ok", began.elapsed()),
            Err(error) => self.count_refusal(error),
        }
        found
    }

    /// Waits until a task that waits for authentication goes on by itself.
    pub(crate) async fn wait_for_authentication(&self, task_id: &str, options: &CallOptions) -> Reply {
        let limit = self.agent.config.input_required_ttl.max(self.agent.config.task_timeout);
        let has_moved = |outcome: &Outcome| outcome.status != ReplyStatus::AuthRequired;
        self.guarded(self.actions.watch_task(task_id, options, limit, has_moved)).await
    }

    /// Waits until a task that goes on has settled. The agent works on it meanwhile.
    pub(crate) async fn wait_until_settled(&self, task_id: &str, options: &CallOptions) -> Reply {
        let _in_flight = self.agent.begin_call();
        let is_settled = |outcome: &Outcome| outcome.status != ReplyStatus::Working;
        let limit = self.agent.config.task_timeout;
        self.guarded(self.actions.watch_task(task_id, options, limit, is_settled)).await
    }

    /// Cancels a task that no caller waits for any more, as well as it can.
    pub(crate) async fn abandon_task(&self, task_id: &str, options: &CallOptions) {
        if let Err(error) = self.actions.cancel_task(task_id, options).await {
            let code = error.info.code.name();
            tracing::debug!(agent = %self.agent.name, code, "an abandoned task could not be cancelled");
        }
    }

    async fn claim(&self, key: &IdempotencyKey, request: &Request) -> Result<Turn, ActionError> {
        let keys = &self.actions.state().idempotency;
        let limit = self.actions.limit(&request.options);
        keys.begin(&self.agent.name, request.operation.name(), &key.key, &key.body, limit).await
    }

    /// The reply of the first request with the same idempotency key.
    async fn repeat(&self, repeat: Repeat, options: &CallOptions, began: Instant) -> Reply {
        let reply = match self.permits.repeat() {
            Ok(_permit) => {
                let waited = tokio::time::timeout(self.actions.limit(options), repeat.reply()).await;
                waited.unwrap_or_else(|_| {
                    let message = "the first request with this key did not end within the limit";
                    let mut error = ActionError::new(Code::Timeout, message);
                    error.info.cancelled = Some(None);
                    Err(error)
                })
            }
            Err(error) => Err(error),
        };
        self.note(&reply, began);
        reply
    }

    /// Runs a part of a front door's work: a panic becomes an error, so that it does not cost the caller the
    /// reply, and errors are redacted, because some agents repeat what they were sent, credentials included.
    pub(crate) fn guarded<T>(
        &self,
        work: impl Future<Output = Result<T, ActionError>>,
    ) -> impl Future<Output = Result<T, ActionError>> {
        // Not an `async fn`, which would hold the work twice: as its argument and while it runs.
        AssertUnwindSafe(work).catch_unwind().map(|done| {
            let done = done.unwrap_or_else(|_| {
                tracing::error!(agent = %self.agent.name, "a request panicked; please report this bug");
                Err(ActionError::internal().after_reaching_agent())
            });
            done.map_err(|error| error.redacted(&self.agent.secrets))
        })
    }

    async fn perform(
        &self,
        operation: Operation,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Reply {
        match operation {
            Operation::Invoke { skill, input, .. } => {
                let invocation = input.read(|body| Invocation::parse(body, &skill.template))?;
                self.actions.invoke(&skill, invocation, options, progress).await
            }
            Operation::Answer(input) => {
                let answer = input.read(FollowUpAnswer::parse)?;
                Box::pin(self.actions.answer(answer, options, progress)).await
            }
            Operation::CancelTask(input) => {
                let task_id = input.read(task_id)?;
                Box::pin(self.actions.cancel_task(&task_id, options)).await
            }
            Operation::GetTask(input) => {
                let task_id = input.read(task_id)?;
                Box::pin(self.actions.get_task(&task_id, options)).await
            }
        }
    }

    /// Counts a request that has its reply.
    fn note(&self, reply: &Reply, began: Instant) {
        let word = reply::word(reply);
        self.agent.calls.ended(word, began.elapsed());
        spans::outcome(word);
        if let Err(error) = reply {
            let (code, message) = (error.info.code, error.for_logs());
            self.agent.calls.failed(code.name(), message);
            if code == Code::AgentUnavailable {
                self.agent.recheck();
            }
            tracing::debug!(agent = %self.agent.name, code = code.name(), message, "request failed");
        }
    }
}

async fn finish(running: Option<Running>, reply: &Reply) {
    if let Some(running) = running {
        Box::pin(running.finish(reply)).await;
    }
}

/// Follows a call for its front door, to see when the reply is due.
struct Tracked<'a, P> {
    dispatcher: &'a Dispatcher,
    progress: &'a mut P,
    began: Instant,
    pending: Option<Pending>,
    /// The submitted task that goes on after its reply, and its place among those.
    accepted: Option<Accepted>,
}

struct Pending {
    running: Option<Running>,
    permit: permits::Permit,
}

struct Accepted {
    task_id: String,
    _place: Option<OwnedSemaphorePermit>,
}

impl<P: Progress> Tracked<'_, P> {
    /// The reply is due: others can use the permit, repeats get the same reply, and the request counts.
    async fn settle(&mut self, reply: &Reply) -> Option<OwnedSemaphorePermit> {
        let Pending { running, permit } = self.pending.take()?;
        finish(running, reply).await;
        self.dispatcher.note(reply, self.began);
        permit.submitted
    }

    async fn end(mut self, reply: &Reply) {
        let Some(Accepted { task_id, .. }) = self.accepted.take() else {
            self.settle(reply).await;
            return;
        };
        // States are published where they are observed, so only errors are left.
        if let Err(error) = reply {
            let (agent, code) = (&self.dispatcher.agent.name, error.info.code.name());
            tracing::debug!(%agent, task_id, code, "lost track of a submitted task");
            self.dispatcher.actions.publish(&task_id, Err(error.clone())).await;
        }
    }
}

impl<P: Progress> Progress for Tracked<'_, P> {
    async fn frame(&mut self, frame: Frame) {
        self.progress.frame(frame).await;
    }

    async fn accepted(&mut self, outcome: &Arc<Outcome>) {
        let place = self.settle(&Ok(Arc::clone(outcome))).await;
        let task_id = outcome.task.id.clone().unwrap_or_default();
        self.accepted = Some(Accepted { task_id, _place: place });
        self.progress.accepted(outcome).await;
    }

    async fn flush(&mut self) {
        self.progress.flush().await;
    }

    fn wants_content(&self) -> bool {
        self.progress.wants_content()
    }

    fn keep_alive_interval(&self) -> Option<std::time::Duration> {
        self.progress.keep_alive_interval()
    }

    async fn keep_alive(&mut self) -> Listener {
        self.progress.keep_alive().await
    }
}
