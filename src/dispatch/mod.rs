//! The single entry to an agent, for the requests of every front door.
//!
//! ```text
//! NATS actions ───┐                    ┌─ idempotency ─ permit ─ in-flight ─ panic guard ─┐
//! agent protocol ─┼─Request─> Dispatcher                                               Actions ──> agent
//! (front door) ───┘   <─Reply─         └─ redaction ─ metrics ─ spans ─ call log ─────────┘
//! ```
//!
//! A front door only translates: it turns bytes into a [`Request`], [`Progress`] into frames, and a [`Reply`] into
//! bytes. A rule that two front doors need belongs here. To add a front door, write an adapter, like `bus::actions`
//! (the smallest one), that
//!
//! 1. runs each request in [`Dispatcher::spawn`], which gives it a span and files, and makes a shutdown wait for it;
//! 2. passes a [`Request`] to [`Dispatcher::call`], with a [`Progress`] that reports to the caller; passes requests
//!    that it cannot read to [`Dispatcher::refuse`], and reads the card in [`Dispatcher::read_card`];
//! 3. offers the skills of the agent's `Catalog` (`bus/catalog.rs`), and only while the agent is ready;
//! 4. is started for each agent in `Bridge::open_front_doors`, and stopped by the `ServedAgent` in
//!    `bridge/served_agent.rs`. `AgentProtocol` in `bus/agent_protocol.rs` is an example of both;
//! 5. drops the [`Arrival`] when the reply is sent, counts what it sends in [`Arrival::sent_bytes`], and names
//!    the caller with [`Arrival::identify`], for the [call log](call_log).
//!
//! A front door whose requests have several steps, such as the agent protocol, also uses [`Dispatcher::permit`] and
//! [`Dispatcher::guarded`] between two calls.

pub(crate) mod arrival;
pub(crate) mod call_log;
pub(crate) mod fair_permits;
#[cfg(test)]
pub(crate) mod forwarding;
pub(crate) mod maintenance;
mod permits;
pub(crate) mod request;
#[cfg(test)]
mod tests;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use crate::action::actions::Actions;
use crate::action::follow_up;
use crate::action::progress::{ForwardError, Listener, NoProgress, Progress, ProgressEvent};
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, ReplyMode, task_id};
use crate::agent::Agent;
use crate::agent::call_stats::{EndedCall, FollowedTask};
use crate::caller::Caller;
use crate::events::log::AgentLog;
use crate::events::logged::Logged;
use crate::files::{CallFiles, FileAccess, FileMode};
use crate::offload;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, ReplyStatus};
use crate::reply::{self, Reply};
use crate::state::idempotency::{FirstRequest, RepeatedRequest, Reservation};
use crate::state::peers::{InstanceId, Liveness};
use crate::state::quota::ReservedRoom;
use crate::state::run_link::RunLink;
use crate::telemetry::spans::{self, CallInfo, CallSpan};
use crate::telemetry::trace_context::TraceContext;
use arrival::{Arrival, Arrivals};
use call_log::{CallEntry, CallLog, CallLogSetting};
use fair_permits::FairPermit;
use permits::{Permit, Permits};
use request::{IdempotencyKey, Operation, Request};

/// Runs the requests to one agent.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    agent: Agent,
    actions: Actions,
    permits: Permits,
    arrivals: Arrivals,
    calls: TaskTracker,
    call_log: Arc<CallLog>,
    files: Option<FileAccess>,
    log: Option<AgentLog>,
}

impl Dispatcher {
    /// `calls` tracks the requests in flight.
    pub(crate) fn new(
        agent: Agent,
        actions: Actions,
        calls: TaskTracker,
        call_log: Arc<CallLogSetting>,
    ) -> Self {
        let permits = Permits::new(&agent.name, agent.config.max_in_flight);
        let arrivals = Arrivals::new(Arc::clone(&agent.memory), permits.total());
        let call_log = CallLog::new(&agent.name, call_log);
        Self { agent, actions, permits, arrivals, calls, call_log, files: None, log: None }
    }

    /// Lets calls use a file store.
    pub(crate) fn with_files(self, files: FileAccess) -> Self {
        Self { files: Some(files), ..self }
    }

    /// Logs calls.
    pub(crate) fn with_log(self, log: Option<AgentLog>) -> Self {
        Self { log, ..self }
    }

    /// The event log of the agent's calls, if the configuration has one.
    pub(crate) fn log(&self) -> Option<&AgentLog> {
        self.log.as_ref()
    }

    /// What a call of this caller may do with files; `None` without a store.
    fn call_files(&self, caller: &Caller, mode: FileMode) -> Option<Arc<CallFiles>> {
        self.files.as_ref().map(|files| files.for_call(caller, mode))
    }

    pub(crate) fn agent(&self) -> &Agent {
        &self.agent
    }

    /// Admits a request of `bytes` bytes for `action`, and drops its body if there is no memory for it. `None` if too many requests
    /// already wait for their replies: even a refusal would cost too much then, and the caller gets no reply.
    pub(crate) fn arrive(&self, action: &Arc<str>, bytes: usize, body: &mut Bytes) -> Option<Arrival> {
        let mut arrival = self.arrivals.arrive(action, bytes)?;
        arrival.log_entry = self.call_log.begin(body.len());
        if arrival.check().is_err() {
            *body = Bytes::new();
        }
        Some(arrival)
    }

    /// Runs a front door's work for one request in the request's spans. A shutdown waits for it.
    ///
    /// The work is boxed: it has several kilobytes, and each layer of a spawned task would move it.
    pub(crate) fn spawn(&self, call_info: CallInfo<'_>, trace: &TraceContext, work: BoxFuture<'static, ()>) {
        // A span costs as much as the rest of the bookkeeping together, so it exists only at log level `debug`;
        // warnings name the agent themselves.
        let span = tracing::debug_span!("call", agent = %self.agent.name, skill = call_info.action, trace_id = tracing::field::Empty, task = tracing::field::Empty);
        if let Some(id) = trace.trace_id() {
            span.record("trace_id", id);
        }
        let exported = CallSpan::start(call_info, || trace.clone());
        self.calls.spawn(CallFiles::scope(exported.instrument(work.instrument(span))));
    }

    /// Runs a request to its reply.
    ///
    /// In mode `submit` the reply is due when [`Progress::accepted`] is called. The return value is then the
    /// end of the task, which is already published.
    pub(crate) async fn call(
        &self,
        request: Request,
        arrival: &mut Arrival,
        progress: &mut impl Progress,
    ) -> Reply {
        let began = Instant::now();
        let Request { operation, mut options, idempotency_key, permit } = request;
        operation.label(&mut arrival.action);
        arrival.identify(&options.caller);
        if let Some(files) = &self.files {
            CallFiles::begin(|| files.for_call(&options.caller, options.files));
        }
        if let Err(error) = arrival.check() {
            return Box::pin(self.refuse(error, arrival, progress)).await;
        }
        spans::propagate(&mut options.trace);
        let mut first = None;
        // The replica that was asked first has reserved the key of a forwarded request.
        let is_first_hop = !options.is_forwarded;
        if let Some(key) = idempotency_key.filter(|_| operation.runs_the_agent() && is_first_hop) {
            let timeout = self.actions.timeout(&options);
            match Box::pin(self.reserve_key(&operation, &options.caller, key, timeout)).await {
                Ok(Reservation::First(request)) => first = Some(request),
                Ok(Reservation::Repeat(repeat)) => {
                    // The body is not needed while the request waits.
                    drop(operation);
                    arrival.release_body();
                    return Box::pin(self.repeat(repeat, timeout, began, &options, arrival)).await;
                }
                Err(error) => return Box::pin(self.refuse(error, arrival, progress)).await,
            }
        }
        let (permit, room) = match self.admit(permit, &operation, &options) {
            Ok(admitted) => admitted,
            Err(error) => {
                let reply = Box::pin(self.refuse(error, arrival, progress)).await;
                finish(first, &reply).await;
                return reply;
            }
        };
        progress.started().await;
        let pending = Some(PendingReply { first, permit });
        let (action, log_entry) = (Arc::clone(&arrival.action), arrival.log_entry.take());
        let mut tracked = TrackedCall {
            dispatcher: self,
            progress,
            action,
            log_entry,
            began,
            first_token: None,
            pending,
            room,
            accepted: None,
        };
        let in_flight = operation.runs_the_agent().then(|| self.agent.calls.begin());
        let reply = self.guarded(self.perform(operation, arrival, &options, &mut tracked)).await;
        drop((in_flight, tracked.room.take()));
        let (permit, log_entry) = tracked.end(&reply).await;
        arrival.log_entry = log_entry;
        arrival.keep(permit, options.reply_memory);
        reply
    }

    async fn reserve_key(
        &self,
        operation: &Operation,
        caller: &Caller,
        key: IdempotencyKey,
        timeout: Duration,
    ) -> Result<Reservation, ActionError> {
        let IdempotencyKey { key, body } = key;
        let keys = &self.actions.state.idempotency;
        let key = (caller, operation.name(), key.as_str());
        keys.reserve(&self.agent.name, key, &body, timeout).await
    }

    /// Takes a permit, and reserves room for what a call may have to record: an agent must not begin what the bridge
    /// cannot remember.
    fn admit(
        &self,
        permit: Option<Permit>,
        operation: &Operation,
        options: &CallOptions,
    ) -> Result<(Permit, Option<ReservedRoom>), ActionError> {
        let CallOptions { mode, caller, .. } = options;
        let permit = permit.map_or_else(|| self.permits.take(operation, *mode, caller), Ok)?;
        let room = operation.call_kind(*mode).map(|call| self.actions.reserve(call, caller)).transpose()?;
        Ok((permit, room))
    }

    pub(crate) async fn refuse(
        &self,
        error: ActionError,
        arrival: &mut Arrival,
        progress: &mut impl Progress,
    ) -> Reply {
        progress.started().await;
        self.count_refusal(&error, arrival);
        Err(error)
    }

    /// Counts a request that a front door refuses in a form of its own.
    pub(crate) fn count_refusal(&self, error: &ActionError, arrival: &mut Arrival) {
        let Arrival { action, log_entry, .. } = arrival;
        self.count(&Err(error.clone()), action, log_entry.as_mut(), Duration::ZERO, None);
    }

    /// Waits for a permit, for the next step of a request that was admitted before.
    pub(crate) async fn permit(&self, caller: &Caller) -> Result<Permit, ActionError> {
        self.permits.wait(caller).await
    }

    /// Counts and limits a request for the card, which needs neither the agent nor a task.
    pub(crate) fn read_card<T>(
        &self,
        arrival: &mut Arrival,
        caller: &Caller,
        read: impl FnOnce() -> Result<T, ActionError>,
    ) -> Result<T, ActionError> {
        let began = Instant::now();
        let found = arrival.check().and_then(|()| self.permits.card(caller)).and_then(|permit| {
            arrival.keep_permit(permit);
            read()
        });
        match &found {
            Ok(_) => {
                let (action, outcome, took) = (&arrival.action, "ok", began.elapsed());
                self.agent.calls.ended(EndedCall { action, outcome, took, first_token: None });
                if let Some(entry) = &mut arrival.log_entry {
                    entry.end_without_task(action, outcome, took);
                }
            }
            Err(error) => self.count_refusal(error, arrival),
        }
        found
    }

    /// Admits a caller that attaches to a logged call, until the arrival is dropped.
    pub(crate) fn admit_attached(&self, arrival: &mut Arrival, caller: &Caller) -> Result<(), ActionError> {
        let admitted = arrival.check().and_then(|()| self.permits.attach(caller));
        match admitted {
            Ok(permit) => {
                arrival.keep_permit(permit);
                Ok(())
            }
            Err(error) => {
                self.count_refusal(&error, arrival);
                Err(error)
            }
        }
    }

    /// Where the call of a task is logged, if it is.
    pub(crate) async fn logged_task(
        &self,
        task_id: &str,
        caller: &Caller,
    ) -> Result<Option<RunLink>, ActionError> {
        self.actions.logged_task(task_id, caller).await
    }

    /// The reply of a task that has ended, or waits for an answer.
    pub(crate) async fn ended_task(&self, task_id: &str, caller: &Caller) -> Option<Reply> {
        let options = CallOptions { caller: caller.clone(), ..CallOptions::default() };
        let reply = self.guarded(self.actions.get_task(task_id, &options, &mut NoProgress)).await;
        match reply {
            Ok(outcome) if outcome.status == ReplyStatus::Working => None,
            Err(error) if error.info.code == Code::StateUnavailable => None,
            reply => Some(reply),
        }
    }

    /// Whether a replica is gone.
    pub(crate) async fn is_gone(&self, instance: InstanceId) -> bool {
        self.actions.state.peers.liveness(instance).await == Liveness::Dead
    }

    /// Waits until a task in state `auth-required` leaves that state.
    pub(crate) async fn wait_for_authentication(&self, task_id: &str, options: &CallOptions) -> Reply {
        let limit = self.agent.config.input_required_ttl.max(self.agent.config.task_timeout);
        let is_past_auth = |outcome: &Outcome| outcome.status != ReplyStatus::AuthRequired;
        self.guarded(self.actions.watch_task(task_id, options, limit, is_past_auth)).await
    }

    /// Waits until a task that the agent still works on has settled.
    pub(crate) async fn wait_until_settled(&self, task_id: &str, options: &CallOptions) -> Reply {
        let _in_flight = self.agent.calls.begin();
        let is_settled = |outcome: &Outcome| outcome.status != ReplyStatus::Working;
        let limit = self.agent.config.task_timeout;
        self.guarded(self.actions.watch_task(task_id, options, limit, is_settled)).await
    }

    /// Cancels a task that no caller waits for, best effort.
    pub(crate) async fn abandon_task(&self, task_id: &str, options: &CallOptions) {
        if let Err(error) = self.actions.cancel_task(task_id, options, &mut NoProgress).await {
            let code = error.info.code.name();
            tracing::debug!(agent = %self.agent.name, code, "cannot cancel an abandoned task");
        }
    }

    /// Waits for the reply of the first request with the same idempotency key.
    async fn repeat(
        &self,
        repeat: RepeatedRequest,
        timeout: Duration,
        began: Instant,
        options: &CallOptions,
        arrival: &mut Arrival,
    ) -> Reply {
        let reply = match self.permits.repeat(&options.caller) {
            Ok(permit) => {
                let reply = repeat.reply(self.actions.charge_reply(options));
                let waited = tokio::time::timeout(timeout, reply).await;
                arrival.keep(Some(permit), options.reply_memory.clone());
                waited.unwrap_or_else(|_| {
                    let message = "the first request with this key did not end within the timeout";
                    let mut error = ActionError::new(Code::Timeout, message);
                    error.info.cancelled = Some(None);
                    Err(error)
                })
            }
            Err(error) => Err(error),
        };
        let Arrival { action, log_entry, .. } = arrival;
        self.count(&reply, action, log_entry.as_mut(), began.elapsed(), None);
        reply
    }

    /// Turns a panic into an error, so that the caller gets a reply, and redacts errors, because some agents echo
    /// the request, including credentials.
    pub(crate) fn guarded<T>(
        &self,
        work: impl Future<Output = Result<T, ActionError>>,
    ) -> impl Future<Output = Result<T, ActionError>> {
        // Not an `async fn`, whose future would hold the work twice: as its argument and while it runs.
        AssertUnwindSafe(work).catch_unwind().then(async |done| {
            let done = done.unwrap_or_else(|_| {
                tracing::error!(agent = %self.agent.name, "a request panicked; please report this bug");
                Err(ActionError::internal().after_reaching_agent())
            });
            match done {
                Ok(done) => Ok(done),
                Err(error) => {
                    let size = error.allocated();
                    let redact = || error.redacted(&self.agent.secrets);
                    Err(offload::run(&self.agent.name, size, redact).await)
                }
            }
        })
    }

    async fn perform(
        &self,
        operation: Operation,
        arrival: &mut Arrival,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Reply {
        let agent = &self.agent.name;
        #[cfg(test)]
        if let Some(reply) = forwarding::forward(agent, options, progress).await {
            return reply;
        }
        match operation {
            Operation::Invoke { skill, input, .. } => {
                let invocation = input.parse(agent, |body| Invocation::parse(body, &skill.template)).await?;
                arrival.release_body();
                let mut logged = Logged::new(progress, self.log.as_ref(), options);
                let reply = self.guarded(self.actions.invoke(&skill, invocation, options, &mut logged)).await;
                self.end_log(logged, &reply, options).await;
                reply
            }
            Operation::Answer(input) => {
                let input = input.parse(agent, FollowUpAnswer::parse).await?;
                arrival.release_body();
                let mut logged = Logged::new(progress, self.log.as_ref(), options);
                let answer = Box::pin(follow_up::answer(&self.actions, input, options, &mut logged));
                let reply = self.guarded(answer).await;
                self.end_log(logged, &reply, options).await;
                reply
            }
            Operation::CancelTask(input) => {
                let task_id = input.parse(agent, task_id).await?;
                Box::pin(self.actions.cancel_task(&task_id, options, progress)).await
            }
            Operation::GetTask(input) => {
                let task_id = input.parse(agent, task_id).await?;
                Box::pin(self.actions.get_task(&task_id, options, progress)).await
            }
        }
    }

    /// Logs the end of a call, unless another replica continues it.
    async fn end_log<P: Progress>(&self, logged: Logged<'_, P>, reply: &Reply, options: &CallOptions) {
        let is_handed_over =
            options.mode == ReplyMode::Submit && reply.is_err() && self.actions.hands_tasks_over();
        if !is_handed_over && logged.is_active() {
            Box::pin(logged.end(reply)).await;
        }
    }

    /// Counts a request that has its reply.
    fn count(
        &self,
        reply: &Reply,
        action: &Arc<str>,
        log_entry: Option<&mut CallEntry>,
        took: Duration,
        first_token: Option<Duration>,
    ) {
        let outcome = reply::label(reply);
        self.agent.calls.ended(EndedCall { action, outcome, took, first_token });
        spans::set_outcome(outcome);
        if let Some(entry) = log_entry {
            entry.end(action, reply, took);
        }
        if let Err(error) = reply {
            let (code, message) = (error.info.code, error.message_for_logs());
            self.agent.calls.failed(code.name(), message);
            if code == Code::AgentUnavailable {
                self.agent.recheck.notify_one();
            }
            tracing::debug!(agent = %self.agent.name, code = code.name(), message, "request failed");
        }
    }
}

async fn finish(first: Option<FirstRequest>, reply: &Reply) {
    if let Some(first) = first {
        Box::pin(first.finish(reply)).await;
    }
}

/// Passes the progress of a call to its front door, and detects when the reply is due.
struct TrackedCall<'a, P> {
    dispatcher: &'a Dispatcher,
    progress: &'a mut P,
    action: Arc<str>,
    log_entry: Option<CallEntry>,
    began: Instant,
    /// When the first text of the answer came, counted from the beginning.
    first_token: Option<Duration>,
    pending: Option<PendingReply>,
    /// For what the call may have to record.
    room: Option<ReservedRoom>,
    accepted: Option<AcceptedTask>,
}

struct PendingReply {
    first: Option<FirstRequest>,
    permit: Permit,
}

/// A submitted task that goes on after its reply.
struct AcceptedTask {
    task_id: String,
    _permit: Option<FairPermit>,
    _followed: FollowedTask,
}

impl<P: Progress> TrackedCall<'_, P> {
    /// The reply is due: passes it to repeated requests and counts the request. Returns its permit.
    async fn reply_due(&mut self, reply: &Reply) -> Option<Permit> {
        let PendingReply { first, permit } = self.pending.take()?;
        finish(first, reply).await;
        let (entry, took) = (self.log_entry.as_mut(), self.began.elapsed());
        self.dispatcher.count(reply, &self.action, entry, took, self.first_token);
        Some(permit)
    }

    /// Returns the permit and the entry of the call log, unless the reply was sent before the call ended.
    async fn end(mut self, reply: &Reply) -> (Option<Permit>, Option<CallEntry>) {
        let Some(AcceptedTask { task_id, .. }) = &self.accepted else {
            return (self.reply_due(reply).await, self.log_entry);
        };
        if let Err(error) = reply {
            let (agent, code) = (&self.dispatcher.agent.name, error.info.code.name());
            tracing::debug!(%agent, task_id, code, "the bridge no longer tracks a submitted task");
        }
        (None, None)
    }
}

impl<P: Progress> Progress for TrackedCall<'_, P> {
    async fn report(&mut self, event: ProgressEvent) {
        if self.first_token.is_none() && matches!(event, ProgressEvent::Response(_)) {
            self.first_token = Some(self.began.elapsed());
        }
        self.progress.report(event).await;
    }

    fn recorded(&mut self, is_submitted: bool) {
        self.room.iter_mut().for_each(|room| room.mark_recorded(is_submitted));
        self.progress.recorded(is_submitted);
    }

    async fn accepted(&mut self, outcome: &Arc<Outcome>) {
        let permit = self.reply_due(&Ok(Arc::clone(outcome))).await;
        let task_id = outcome.task.id.clone().unwrap_or_default();
        self.progress.accepted(outcome).await;
        drop(self.log_entry.take());
        // The reply is sent, and the call no longer counts as in flight.
        let submitted = permit.and_then(|permit| permit.submitted);
        let followed = self.dispatcher.agent.calls.follow();
        self.accepted = Some(AcceptedTask { task_id, _permit: submitted, _followed: followed });
    }

    fn runs_here(&mut self) {
        self.progress.runs_here();
    }

    async fn forward(&mut self, to: InstanceId) -> Result<Reply, ForwardError> {
        self.progress.forward(to).await
    }

    async fn flush(&mut self) {
        self.progress.flush().await;
    }

    fn wants_content(&self) -> bool {
        self.progress.wants_content()
    }

    fn logged(&mut self) {
        self.progress.logged();
    }

    fn log_failed(&mut self) {
        self.progress.log_failed();
    }

    fn logged_result(&mut self, body: Bytes) {
        self.progress.logged_result(body);
    }

    fn keep_alive_interval(&self) -> Option<Duration> {
        self.progress.keep_alive_interval()
    }

    async fn keep_alive(&mut self) -> Listener {
        self.progress.keep_alive().await
    }
}
