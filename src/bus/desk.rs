//! Where requests of one agent arrive: taken within limits, run, answered exactly once.
//!
//! ```text
//! Service ──Request──> Desk ── headers, idempotency, a permit ──> task
//!                                   body ──> Actions ──> Reply ──> envelope ──> caller
//! ```
//!
//! The reply modes differ only in who hears of the progress: nobody (`final`), the caller
//! ([`Frames`], `stream`), or the caller once and then the task's own subject
//! (`Submission`, `submit`).

mod submission;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Message, Subject};
use futures_util::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::catalog::{Action, BuiltIn};
use super::envelope::{self, Wishes};
use super::frames::Frames;
use super::service::{Call, Handler, Request};
use crate::a2a::client::chain;
use crate::action::error::{ActionError, Code};
use crate::action::once::{self, Reply, Running, Turn};
use crate::action::progress::{Progress, Silent};
use crate::action::request::{self, FollowUpAnswer, Invocation, Options};
use crate::action::run::{Actions, Mode};
use crate::agent::Agent;
use crate::telemetry::spans::{self, Arrival, CallSpan};
use submission::{First, Submission};

/// Look-ups, cancels and repeats at the same time. They have a limit of their own, so that a task
/// can be cancelled while the agent is busy.
const MAX_ASIDE: usize = 1024;
const IN_FLIGHT: &str = "calls in flight (`max_in_flight`)";
const ASIDE: &str = "look-ups, cancels and repeated calls in flight";
/// Submitted tasks that are followed at the same time, for one agent.
const MAX_SUBMITTED: usize = 10_000;

/// What a request asks for.
#[derive(Debug, Clone)]
pub enum Job {
    /// A skill.
    Skill(Arc<Action>),
    /// One of the actions that every agent has.
    BuiltIn(BuiltIn),
}

/// The desk of one agent.
#[derive(Debug)]
pub struct Desk {
    agent: Agent,
    actions: Actions,
    client: Client,
    calls: TaskTracker,
    in_flight: Arc<Semaphore>,
    aside: Arc<Semaphore>,
    submitted: Arc<Semaphore>,
}

impl Desk {
    /// `calls` tracks the requests that are being worked on.
    pub fn new(agent: Agent, actions: Actions, client: Client, calls: TaskTracker) -> Self {
        let permits = |count| Arc::new(Semaphore::new(count));
        let in_flight = permits(agent.config.max_in_flight);
        let (aside, submitted) = (permits(MAX_ASIDE), permits(MAX_SUBMITTED));
        Self { agent, actions, client, calls, in_flight, aside, submitted }
    }

    /// The handler of one endpoint.
    pub fn handler(self: &Arc<Self>, job: Job) -> Handler {
        let desk = Arc::clone(self);
        let action: Arc<str> = match &job {
            Job::Skill(action) => action.subject.as_str().into(),
            Job::BuiltIn(built_in) => format!("{built_in:?} {}", desk.agent.name).into(),
        };
        Arc::new(move |request| {
            let plan = desk.plan(&job, &action, &request);
            let (desk, job) = (Arc::clone(&desk), job.clone());
            let calls = desk.calls.clone();
            let span = desk.span(&job, &request);
            let exported = desk.exported_span(job.name(), &request.message);
            calls.spawn(exported.around(desk.serve(job, plan, request).instrument(span)));
        })
    }

    /// What happens for this request is logged under it; it continues the caller's trace. A span costs
    /// as much as the rest of the bookkeeping together, so there is one only with logs at `debug`;
    /// warnings name the agent themselves.
    fn span(&self, job: &Job, request: &Request) -> tracing::Span {
        let span = tracing::debug_span!("call", agent = %self.agent.name, skill = job.name(), trace_id = tracing::field::Empty, task = tracing::field::Empty);
        if let Some(id) = envelope::trace_id(&request.message) {
            span.record("trace_id", id);
        }
        span
    }

    /// The span that a collector gets, whatever is logged.
    pub(super) fn exported_span(&self, action: &str, message: &Message) -> CallSpan {
        let arrival = Arrival { agent: &self.agent.name, action, subject: &message.subject };
        CallSpan::begin(arrival, || envelope::trace(message))
    }

    /// Decides what to do with a request before anything is spent on it.
    fn plan(&self, job: &Job, action: &Arc<str>, request: &Request) -> Result<Plan, ActionError> {
        let mut wishes = envelope::wishes(&request.message)?;
        if !job.runs_the_agent() {
            wishes.mode = Mode::Final;
            return Ok(Plan::Run(Box::new(Run {
                wishes,
                running: None,
                permits: vec![self.permit(&self.aside, ASIDE)?],
            })));
        }
        let mut running = None;
        if let Some(key) = &wishes.options.idempotency_key {
            match self.actions.memory().once.turn(action, key, &request.message.payload)? {
                Turn::First(first) => running = Some(first),
                Turn::Later(reply) => {
                    let config = &self.agent.config;
                    let limit = match wishes.mode {
                        Mode::Final => config.request_timeout,
                        Mode::Stream | Mode::Submit => config.task_timeout,
                    };
                    return Ok(Plan::Wait {
                        reply,
                        mode: wishes.mode,
                        limit: wishes.options.timeout.map_or(limit, |own| own.min(limit)),
                        permit: self.permit(&self.aside, ASIDE)?,
                    });
                }
            }
        }
        let mut permits = vec![self.place()?];
        if wishes.mode == Mode::Submit {
            permits.push(self.permit(&self.submitted, "submitted tasks")?);
        }
        Ok(Plan::Run(Box::new(Run { wishes, running, permits })))
    }

    /// The agent whose desk it is.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// What the agent can be asked to do.
    pub fn actions(&self) -> &Actions {
        &self.actions
    }

    /// The tracker of all requests that are being worked on.
    pub fn calls(&self) -> &TaskTracker {
        &self.calls
    }

    /// A place among the calls in flight (`max_in_flight`), whichever way a call came.
    pub fn place(&self) -> Result<OwnedSemaphorePermit, ActionError> {
        self.permit(&self.in_flight, IN_FLIGHT)
    }

    /// The same for a call that has been let in before: it waits for its turn.
    pub async fn place_in_turn(&self) -> Result<OwnedSemaphorePermit, ActionError> {
        let place = Arc::clone(&self.in_flight).acquire_owned().await;
        place.map_err(|_| ActionError::internal())
    }

    fn permit(&self, permits: &Arc<Semaphore>, what: &str) -> Result<OwnedSemaphorePermit, ActionError> {
        Arc::clone(permits).try_acquire_owned().map_err(|_| {
            let message = format!("agent `{}` has as many {what} as it may; try again", self.agent.name);
            ActionError::new(Code::Busy, message)
        })
    }

    /// Calls in mode `final` are the many, and each has a future of this size: it is allocated, moved
    /// and kept. So whatever else a request can be is boxed.
    async fn serve(self: Arc<Self>, job: Job, mut plan: Result<Plan, ActionError>, request: Request) {
        let Request { message, call } = request;
        if let Ok(Plan::Run(run)) = &mut plan {
            spans::hand_on(&mut run.wishes.options.trace);
        }
        // The service hands on no request without a reply subject.
        let Some(to) = message.reply.clone() else { return };
        match plan {
            Err(error) => Box::pin(self.refuse(&job, &message, to, call, error)).await,
            Ok(Plan::Wait { reply, mode, limit, permit }) => {
                let waited = tokio::time::timeout(limit, once::reply_of_first(reply)).await;
                let reply = waited.unwrap_or_else(|_| {
                    Err(ActionError::new(
                        Code::Timeout,
                        "the first call with this key did not end within the limit",
                    ))
                });
                drop(permit);
                match mode {
                    Mode::Stream => Box::pin(self.end_frames(self.frames(to, false), reply, call)).await,
                    Mode::Final | Mode::Submit => self.respond(to, reply, call).await,
                }
            }
            Ok(Plan::Run(run)) if run.wishes.mode == Mode::Final => {
                let Run { wishes, running, permits } = *run;
                let options = &wishes.options;
                let work = Work { job: &job, body: &message.payload, options, mode: Mode::Final };
                let reply = self.guarded(work, &mut Silent).await;
                finish(running, &reply);
                // Whoever has a reply may call again at once.
                drop(permits);
                self.respond(to, reply, call).await;
            }
            Ok(Plan::Run(run)) => Box::pin(self.run(&job, *run, &message, to, call)).await,
        }
    }

    /// Answers a request that is not run, in the form that its caller expects.
    async fn refuse(&self, job: &Job, message: &Message, to: Subject, call: Call, error: ActionError) {
        let mode = envelope::mode(message).unwrap_or(Mode::Final);
        if mode == Mode::Stream && job.runs_the_agent() {
            let mut frames = self.frames(to, false);
            frames.acknowledge().await;
            self.end_frames(frames, Err(error), call).await;
        } else {
            self.respond(to, Err(error), call).await;
        }
    }

    /// Runs a request whose caller hears of the progress.
    async fn run(&self, job: &Job, run: Run, message: &Message, to: Subject, call: Call) {
        let Run { wishes, running, permits } = run;
        let Wishes { mode, cancel_on_disconnect, options } = wishes;
        let work = Work { job, body: &message.payload, options: &options, mode };
        if mode == Mode::Submit {
            let first = First { to, call, running, permits };
            let mut submission =
                Submission { desk: self, first: Some(first), task_id: None, permits: Vec::new() };
            let reply = self.guarded(work, &mut submission).await;
            return submission.end(reply).await;
        }
        let mut frames = self.frames(to, cancel_on_disconnect);
        frames.acknowledge().await;
        let reply = self.guarded(work, &mut frames).await;
        finish(running, &reply);
        drop(permits);
        self.end_frames(frames, reply, call).await;
    }

    fn frames(&self, to: Subject, cancel_on_disconnect: bool) -> Frames {
        Frames::new(self.client.clone(), to, self.agent.config.stream_keepalive, cancel_on_disconnect)
    }

    /// Runs the work; a defect in one request must not cost the caller the reply.
    async fn guarded(&self, work: Work<'_>, progress: &mut impl Progress) -> Reply {
        let _working = work.job.runs_the_agent().then(|| self.agent.work());
        let done = AssertUnwindSafe(self.perform(work, progress)).catch_unwind().await;
        let reply = done.unwrap_or_else(|_| {
            tracing::error!(agent = %self.agent.name, "a request panicked; this is a defect, please report it");
            Err(ActionError::internal().after_reaching_agent())
        });
        reply.map_err(|error| error.covered(|text| self.agent.output.cover(text)))
    }

    async fn perform(&self, work: Work<'_>, progress: &mut impl Progress) -> Reply {
        let Work { job, body, options, mode } = work;
        match job {
            Job::Skill(action) => {
                let request = Invocation::parse(body, &action.template)?;
                let outcome = self.actions.invoke(&action.skill, request, options, mode, progress).await?;
                Ok(outcome.to_json())
            }
            Job::BuiltIn(BuiltIn::ProvideRequiredInput) => {
                let answer = FollowUpAnswer::parse(body)?;
                let outcome = Box::pin(self.actions.answer(answer, options, mode, progress)).await?;
                Ok(outcome.to_json())
            }
            Job::BuiltIn(BuiltIn::CancelTask) => {
                Box::pin(self.actions.cancel(&request::task_id(body)?, options)).await
            }
            Job::BuiltIn(BuiltIn::GetTask) => {
                Box::pin(self.actions.get(&request::task_id(body)?, options)).await
            }
            Job::BuiltIn(BuiltIn::Card) => self.card(),
        }
    }

    fn card(&self) -> Reply {
        let status = self.agent.status.borrow();
        match &status.known {
            Some(known) => Ok(known.card.to_v1(&known.interface).to_string().into()),
            None => Err(ActionError::unavailable(&self.agent.name, status.last_error.as_deref())),
        }
    }

    async fn end_frames(&self, frames: Frames, reply: Reply, call: Call) {
        self.note(&reply, &call);
        count(call, frames.finish(reply).await);
    }

    async fn respond(&self, to: Subject, reply: Reply, call: Call) {
        self.note(&reply, &call);
        let outgoing = envelope::Outgoing::new(reply, self.client.max_payload(), 0);
        let error = outgoing.error;
        if let Err(error) = outgoing.send(&self.client, to).await {
            tracing::warn!(agent = %self.agent.name, error = chain(&error), "a reply could not be sent");
        }
        count(call, error);
    }

    fn note(&self, reply: &Reply, call: &Call) {
        let outcome = envelope::outcome(reply);
        self.agent.calls.ended(outcome, call.elapsed());
        spans::outcome(outcome);
        if let Err(error) = reply {
            let code = error.info.code;
            let message = error.for_logs();
            self.agent.calls.failed(code.name(), message);
            if code == Code::AgentUnavailable {
                self.agent.recheck();
            }
            tracing::debug!(agent = %self.agent.name, code = code.name(), message, "request failed");
        }
    }
}

fn count(call: Call, error: Option<(u16, &'static str)>) {
    spans::ended(error.map(|(_, code)| code));
    match error {
        None => call.succeed(),
        Some((number, code)) => call.fail(number, code),
    }
}

fn finish(running: Option<Running>, reply: &Reply) {
    if let Some(running) = running {
        running.finish(reply.clone());
    }
}

impl Job {
    /// The name of the action, as on the mesh.
    fn name(&self) -> &str {
        match self {
            Self::Skill(action) => action.token.as_str(),
            Self::BuiltIn(built_in) => built_in.name(),
        }
    }

    fn runs_the_agent(&self) -> bool {
        match self {
            Self::Skill(_) | Self::BuiltIn(BuiltIn::ProvideRequiredInput) => true,
            Self::BuiltIn(BuiltIn::CancelTask | BuiltIn::GetTask | BuiltIn::Card) => false,
        }
    }
}

/// What is done with a request that was taken. Permits are held until the reply is ready.
enum Plan {
    Run(Box<Run>),
    Wait { reply: watch::Receiver<Option<Reply>>, mode: Mode, limit: Duration, permit: OwnedSemaphorePermit },
}

struct Run {
    wishes: Wishes,
    running: Option<Running>,
    permits: Vec<OwnedSemaphorePermit>,
}

struct Work<'a> {
    job: &'a Job,
    body: &'a [u8],
    options: &'a Options,
    mode: Mode,
}
