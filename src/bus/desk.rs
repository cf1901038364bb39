//! Where requests of one agent arrive: taken within limits, run, answered exactly once.
//!
//! ```text
//! Service ──Request──> Desk ── headers, idempotency, a permit ──> task
//!                                   body ──> Actions ──> Reply ──> envelope ──> caller
//! ```

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use async_nats::Client;
use futures_util::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

use super::catalog::{Action, BuiltIn};
use super::envelope;
use super::service::{Handler, Request};
use crate::a2a::client::chain;
use crate::action::error::{ActionError, Code};
use crate::action::once::{self, Reply, Running, Turn};
use crate::action::request::{self, FollowUpAnswer, Invocation, Options};
use crate::action::run::Actions;
use crate::agent::Agent;

/// Look-ups, cancels and repeats at the same time. They have a limit of their own, so that a task
/// can be cancelled while the agent is busy.
const MAX_ASIDE: usize = 1024;

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
}

impl Desk {
    /// `calls` tracks the requests that are being worked on.
    pub fn new(agent: Agent, actions: Actions, client: Client, calls: TaskTracker) -> Self {
        let in_flight = Arc::new(Semaphore::new(agent.config.max_in_flight));
        Self {
            agent,
            actions,
            client,
            calls,
            in_flight,
            aside: Arc::new(Semaphore::new(MAX_ASIDE)),
        }
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
            calls.spawn(async move { desk.serve(job, plan, request).await }.instrument(span));
        })
    }

    /// What happens for this request is logged under it; it continues the caller's trace.
    fn span(&self, job: &Job, request: &Request) -> tracing::Span {
        let action = match job {
            Job::Skill(action) => action.token.as_str(),
            Job::BuiltIn(built_in) => built_in.name(),
        };
        let span = tracing::info_span!("call", agent = %self.agent.name, skill = action, trace_id = tracing::field::Empty, task = tracing::field::Empty);
        if let Some(id) = envelope::trace_id(&request.message) {
            span.record("trace_id", id);
        }
        span
    }

    /// Decides what to do with a request before anything is spent on it.
    fn plan(&self, job: &Job, action: &Arc<str>, request: &Request) -> Result<Plan, ActionError> {
        let (_, options) = envelope::options(&request.message)?;
        let mut running = None;
        if let (Some(key), true) = (&options.idempotency_key, job.runs_the_agent()) {
            match self
                .actions
                .memory()
                .once
                .turn(action, key, &request.message.payload)?
            {
                Turn::First(first) => running = Some(first),
                Turn::Later(reply) => {
                    return Ok(Plan::Wait {
                        reply,
                        permit: self.permit(&self.aside)?,
                    });
                }
            }
        }
        let permits = if job.runs_the_agent() {
            &self.in_flight
        } else {
            &self.aside
        };
        Ok(Plan::Run {
            options: Box::new(options),
            running,
            permit: self.permit(permits)?,
        })
    }

    fn permit(&self, permits: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, ActionError> {
        Arc::clone(permits).try_acquire_owned().map_err(|_| {
            let limit = self.agent.config.max_in_flight;
            let message = format!(
                "agent `{}` has {limit} calls in flight (`max_in_flight`); try again",
                self.agent.name
            );
            ActionError::new(Code::Busy, message)
        })
    }

    async fn serve(&self, job: Job, plan: Result<Plan, ActionError>, request: Request) {
        let Request { message, call } = request;
        let began = Instant::now();
        let (reply, permit) = match plan {
            Err(error) => (Err(error), None),
            Ok(Plan::Wait { reply, permit }) => (once::reply_of_first(reply).await, Some(permit)),
            Ok(Plan::Run {
                options,
                running,
                permit,
            }) => {
                let _working = self.agent.work();
                // A defect in one request must not cost the caller the reply.
                let work = AssertUnwindSafe(self.perform(&job, &message.payload, &options));
                let reply = work.catch_unwind().await.unwrap_or_else(|_| {
                    tracing::error!(agent = %self.agent.name, "a request panicked; this is a defect, please report it");
                    Err(ActionError::internal().after_reaching_agent())
                });
                if let Some(running) = running {
                    running.finish(reply.clone());
                }
                (reply, Some(permit))
            }
        };
        self.agent.calls.ended(envelope::outcome(&reply), began.elapsed());
        if let Err(error) = &reply {
            self.agent.calls.failed(error.info.code.name(), &error.message);
            if error.info.code == Code::AgentUnavailable {
                self.agent.doubt();
            }
            tracing::debug!(agent = %self.agent.name, subject = %message.subject, code = error.info.code.name(), message = error.message, "request failed");
        }
        drop(permit);
        let outgoing = envelope::Outgoing::new(reply, self.client.max_payload());
        let error = outgoing.error;
        if let Some(to) = message.reply
            && let Err(error) = outgoing.send(&self.client, to).await
        {
            tracing::warn!(agent = %self.agent.name, error = chain(&error), "a reply could not be sent");
        }
        match error {
            None => call.succeed(),
            Some((number, code)) => call.fail(number, code),
        }
    }

    async fn perform(&self, job: &Job, body: &[u8], options: &Options) -> Reply {
        match job {
            Job::Skill(action) => {
                let request = Invocation::parse(body, &action.template)?;
                self.actions.invoke(&action.skill, request, options).await
            }
            Job::BuiltIn(BuiltIn::ProvideRequiredInput) => {
                self.actions.answer(FollowUpAnswer::parse(body)?, options).await
            }
            Job::BuiltIn(BuiltIn::CancelTask) => self.actions.cancel(&request::task_id(body)?, options).await,
            Job::BuiltIn(BuiltIn::GetTask) => self.actions.get(&request::task_id(body)?, options).await,
            Job::BuiltIn(BuiltIn::Card) => self.card(),
        }
    }

    fn card(&self) -> Reply {
        let status = self.agent.status.borrow();
        match &status.known {
            Some(known) => Ok(known.card.to_v1(&known.interface).to_string().into()),
            None => Err(ActionError::unavailable(
                &self.agent.name,
                status.last_error.as_deref(),
            )),
        }
    }
}

impl Job {
    fn runs_the_agent(&self) -> bool {
        match self {
            Self::Skill(_) | Self::BuiltIn(BuiltIn::ProvideRequiredInput) => true,
            Self::BuiltIn(BuiltIn::CancelTask | BuiltIn::GetTask | BuiltIn::Card) => false,
        }
    }
}

/// What is done with a request that was taken. The permit is held until the reply is ready.
enum Plan {
    Run {
        options: Box<Options>,
        running: Option<Running>,
        permit: OwnedSemaphorePermit,
    },
    Wait {
        reply: tokio::sync::watch::Receiver<Option<Reply>>,
        permit: OwnedSemaphorePermit,
    },
}
