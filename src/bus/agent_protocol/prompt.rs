//! Runs one prompt to its end, including the agent's questions to the caller.

use std::sync::Arc;

use async_nats::Message;
use futures_util::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant, sleep_until, timeout, timeout_at};

use super::chunks::ChunkWriter;
use super::envelope::PromptEnvelope;
use crate::a2a::LiveAgent;
use crate::action::actions::{CallShutdown, CallableSkill};
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, Meta, ReplyMode};
use crate::bus::catalog::{Action, Catalog};
use crate::bus::headers::{self, Headers};
use crate::bus::inbox::subscribe_once;
use crate::bus::outbox::Outbox;
use crate::bus::per_card::PerCard;
use crate::bus::service::{Handler, ServiceRequest};
use crate::bus::subject::{AgentProtocolSubjects, Subjects, Token};
use crate::caller::Caller;
use crate::dispatch::Dispatcher;
use crate::dispatch::arrival::Arrival;
use crate::dispatch::request::{Input, Operation, Permit, Request};
use crate::offload;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, ReplyStatus};
use crate::telemetry::spans::{self, CallInfo};
use crate::telemetry::trace_context::TraceContext;
use crate::text::duration;

/// The name of a prompt in spans, and of one that selects no skill in metrics.
const PROMPT: &str = "prompt";
/// Maximum number of open questions of one agent.
pub(super) const MAX_QUESTIONS: usize = 1024;
/// How long to wait for the agent to cancel the task of an abandoned question.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(3);

/// The endpoint `prompt` of one agent.
#[derive(Debug)]
pub(super) struct PromptEndpoint {
    pub(super) dispatcher: Arc<Dispatcher>,
    pub(super) outbox: Outbox,
    pub(super) subjects: Subjects,
    pub(super) protocol_subjects: AgentProtocolSubjects,
    pub(super) catalog: PerCard<Arc<Catalog>>,
    /// One permit for each question that may be open at the same time.
    pub(super) questions: Semaphore,
    pub(super) call_shutdown: CallShutdown,
}

/// How the call continues after a question.
enum Continuation {
    /// The caller answered, and the answer has a permit.
    Answered(PromptEnvelope, Permit),
    /// The task continued without an answer.
    Resumed(Arc<Outcome>),
}

impl PromptEndpoint {
    pub(super) fn handler(this: &Arc<Self>) -> Handler {
        let endpoint = Arc::clone(this);
        let action = Arc::from(PROMPT);
        Arc::new(move |mut request| {
            let Message { payload, length, .. } = &mut request.message;
            let Some(arrival) = endpoint.dispatcher.arrive(&action, *length, payload) else {
                return request.accounting.fail(429, "too many requests at the same time");
            };
            let agent = &endpoint.dispatcher.agent().name;
            let subject = request.message.subject.clone();
            let call_info = CallInfo { agent, action: PROMPT, subject: &subject };
            let trace = headers::trace(&request.message);
            let serving = Box::pin(Arc::clone(&endpoint).serve(request, arrival, trace.clone()));
            endpoint.dispatcher.spawn(call_info, &trace, serving);
        })
    }

    async fn serve(self: Arc<Self>, request: ServiceRequest, mut arrival: Arrival, trace: TraceContext) {
        let ServiceRequest { message, caller, accounting } = request;
        // The service passes on no request without a reply subject.
        let Some(to) = message.reply.clone() else { return };
        let caller = caller.inspect(|caller| arrival.identify(caller));
        let keep_alive = self.dispatcher.agent().config.stream_keepalive;
        let outbox = self.outbox.counting(arrival.sent_bytes());
        let mut chunks = ChunkWriter::new(outbox, to, keep_alive);
        let run = Box::pin(self.run(message, caller, trace, &mut arrival, &mut chunks));
        let result = self.dispatcher.guarded(run).await;
        accounting.end(chunks.finish(result).await);
    }

    async fn run(
        &self,
        message: Message,
        caller: Result<Caller, ActionError>,
        trace: TraceContext,
        arrival: &mut Arrival,
        chunks: &mut ChunkWriter,
    ) -> Result<(), ActionError> {
        let parsed = match caller.and_then(|caller| arrival.check().map(|()| caller)) {
            Ok(caller) => {
                let parse = || self.parse(&message, caller, trace);
                offload::run(&self.dispatcher.agent().name, message.payload.len(), parse).await
            }
            Err(error) => Err(error),
        };
        // Headers take several times the memory of their bytes, and a question may stay open for hours.
        drop(message);
        let parsed = parsed.inspect_err(|error| self.dispatcher.count_refusal(error, arrival));
        let (operation, options) = parsed?;
        let first = request(operation, &options, None);
        let mut outcome = self.dispatcher.call(first, arrival, chunks).await?;
        while let Some(follow_up) = outcome.follow_up.clone() {
            // A person may take minutes to answer.
            arrival.release_permit();
            outcome = match self.ask(&follow_up, &outcome, &options, arrival, chunks).await {
                Ok(Continuation::Answered(PromptEnvelope { parts, .. }, permit)) => {
                    let answer = FollowUpAnswer { follow_up_id: follow_up.id.to_string(), parts };
                    let operation = Operation::Answer(Input::Parsed(answer));
                    let next = request(operation, &options, Some(permit));
                    self.dispatcher.call(next, arrival, chunks).await?
                }
                Ok(Continuation::Resumed(resumed)) => {
                    spans::set_outcome(resumed.status.name());
                    resumed
                }
                Err(error) => {
                    spans::set_outcome(error.info.code.name());
                    self.abandon(&outcome, &error, &options).await;
                    return Err(error);
                }
            };
        }
        chunks.send_outcome(&outcome).await;
        result_of(&outcome)
    }

    fn parse(
        &self,
        message: &Message,
        caller: Caller,
        trace: TraceContext,
    ) -> Result<(Operation, CallOptions), ActionError> {
        let envelope = self.envelope(message)?;
        let headers = Headers::read(message, caller, trace)?;
        let (action, skill) = self.skill(envelope.skill.as_deref())?;
        let session_id = self.session_id(envelope.session.as_deref());
        let meta = Meta { session_id: Some(session_id), ..Meta::default() };
        let input = Input::Parsed(Invocation { parts: envelope.parts, meta });
        let operation = Operation::Invoke { action, skill, input };
        Ok((operation, CallOptions { mode: ReplyMode::Stream, ..headers.options }))
    }

    fn envelope(&self, message: &Message) -> Result<PromptEnvelope, ActionError> {
        PromptEnvelope::parse(&message.payload, self.outbox.client.max_payload())
    }

    /// The published skill that the caller selects, or the agent as a whole, and its name in metrics.
    fn skill(&self, selected: Option<&str>) -> Result<(Arc<str>, Arc<CallableSkill>), ActionError> {
        let Some(selected) = selected else {
            return Ok((PROMPT.into(), Arc::new(CallableSkill::whole_agent())));
        };
        let agent = self.dispatcher.agent();
        let status = agent.status.borrow();
        let Some(known) = &status.known else {
            return Err(ActionError::unavailable(&agent.name, status.last_error.as_deref()));
        };
        let token = Token::new(&agent.name);
        let make = || Catalog::new(&known.card, &agent.config.skills, &self.subjects, &token);
        let catalog = self.catalog.get_or_make(known, || Arc::new(make()));
        let actions = &catalog.actions;
        let matchers = [
            |action: &Action, name: &str| action.token.as_str() == name,
            |action: &Action, name: &str| action.skill.id.as_deref() == Some(name),
            |action: &Action, name: &str| action.name == name,
        ];
        let found =
            matchers.iter().find_map(|matches| actions.iter().find(|action| matches(action, selected)));
        match found {
            Some(action) => Ok((Arc::clone(&action.label), Arc::clone(&action.skill))),
            None => {
                let names: Vec<_> = actions.iter().map(|action| action.token.as_str()).collect();
                let message = format!("no such skill; available skills: {}", names.join(", "));
                Err(ActionError::new(Code::NotFound, message))
            }
        }
    }

    /// The A2A context of the agent's shared session or of the one that the caller selects. It depends on the
    /// names alone, so that it is the same at every replica and after a restart. It is a UUID because some
    /// agents accept no other context id.
    fn session_id(&self, selected: Option<&str>) -> String {
        let hash = Sha256::new()
            .chain_update(self.protocol_subjects.subject("prompt"))
            .chain_update([0])
            .chain_update(selected.unwrap_or_default())
            .finalize();
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(hash).for_each(|(to, from)| *to = from);
        uuid::Builder::from_custom_bytes(bytes).into_uuid().to_string()
    }

    /// Cancels the task of a question that can no longer be answered. The caller gets the reason, not the
    /// result of the cancellation.
    async fn abandon(&self, question: &Outcome, error: &ActionError, options: &CallOptions) {
        if let Some(task_id) = question.task.id.as_ref().filter(|_| error.info.code != Code::TaskLost) {
            let _ = timeout(CANCEL_TIMEOUT, self.dispatcher.abandon_task(task_id, options)).await;
        }
    }

    /// Sends a question to the caller, and waits for the answer.
    async fn ask(
        &self,
        follow_up: &FollowUp,
        outcome: &Arc<Outcome>,
        options: &CallOptions,
        arrival: &mut Arrival,
        chunks: &mut ChunkWriter,
    ) -> Result<Continuation, ActionError> {
        let agent = self.dispatcher.agent();
        let too_many =
            |_| ActionError::new(Code::Busy, "too many questions of this agent are open; try again");
        let _permit = self.questions.try_acquire().map_err(too_many)?;
        let live_agent = agent.live.borrow().clone();
        let live_agent = live_agent.ok_or_else(|| ActionError::unavailable(&agent.name, None))?;
        let deadline = Instant::now() + agent.config.input_required_ttl;
        let question = subscribe_once(&self.outbox.client).await;
        let (reply_subject, mut answers) = question.ok_or_else(ActionError::internal)?;
        chunks.send_question(&follow_up.id.to_string(), &reply_subject, outcome).await;

        let continuation = async {
            let answer = tokio::select! {
                biased;
                answer = answers.next() => answer.ok_or_else(ActionError::internal)?,
                closed = self.closed(&live_agent) => return Err(closed),
                () = sleep_until(deadline) => {
                    let ttl = duration(agent.config.input_required_ttl);
                    let message = format!("no answer within {ttl} (`input_required_ttl`); the task is canceled");
                    return Err(ActionError::new(Code::FollowUpExpired, message));
                }
                resumed = self.resumed(outcome, options) => return resumed.map(Continuation::Resumed),
            };
            drop(answers);
            arrival.charge(answer.length)?;
            let parse = || self.envelope(&answer);
            let envelope = offload::run(&agent.name, answer.payload.len(), parse).await?;
            drop(answer);
            tokio::select! {
                biased;
                // The follow-up id expires at the deadline.
                permit = timeout_at(deadline, self.dispatcher.permit(&options.caller)) => {
                    let permit = permit.unwrap_or_else(|_| Err(no_permit(agent.config.input_required_ttl)))?;
                    Ok(Continuation::Answered(envelope, permit))
                }
                closed = self.closed(&live_agent) => Err(closed),
            }
        };
        match chunks.keep_alive_during(continuation).await? {
            Continuation::Resumed(resumed) if resumed.status == ReplyStatus::Working => {
                let task_id = resumed.task.id.clone().unwrap_or_default();
                let settled = self.dispatcher.wait_until_settled(&task_id, options);
                Ok(Continuation::Resumed(chunks.keep_alive_during(settled).await?))
            }
            continuation => Ok(continuation),
        }
    }

    /// Resolves when no answer can reach the agent any more.
    async fn closed(&self, live_agent: &LiveAgent) -> ActionError {
        let (code, message) = tokio::select! {
            biased;
            () = live_agent.exited.cancelled() => {
                (Code::TaskLost, "the agent exited or was stopped while it waited for the answer")
            }
            () = self.call_shutdown.begun.cancelled() => {
                let message = "the bridge stops serving the agent; the question is closed and the task is canceled";
                (Code::Timeout, message)
            }
        };
        ActionError::new(code, message)
    }

    /// Resolves when a task that waits for authentication continues without an answer; never for any other
    /// question.
    async fn resumed(&self, question: &Outcome, options: &CallOptions) -> Reply {
        match &question.task.id {
            Some(task_id) if question.status == ReplyStatus::AuthRequired => {
                self.dispatcher.wait_for_authentication(task_id, options).await
            }
            _ => std::future::pending().await,
        }
    }
}

/// The error of an answer that found no free slot in time.
fn no_permit(input_required_ttl: Duration) -> ActionError {
    let ttl = duration(input_required_ttl);
    let message = format!(
        "the agent had no free slot (`max_in_flight`) for the answer within {ttl} (`input_required_ttl`); the task is canceled"
    );
    ActionError::new(Code::Busy, message)
}

fn request(operation: Operation, options: &CallOptions, permit: Option<Permit>) -> Request {
    // The protocol has no idempotency keys.
    Request { operation, options: options.clone(), idempotency_key: None, permit }
}

/// The error of an outcome that is not a completed task.
fn result_of(outcome: &Outcome) -> Result<(), ActionError> {
    let (code, default_message) = match outcome.status {
        ReplyStatus::Completed => return Ok(()),
        ReplyStatus::Failed => (Code::TaskFailed, "the agent's task failed"),
        ReplyStatus::Rejected => (Code::TaskRejected, "the agent rejected the task"),
        ReplyStatus::Canceled => (Code::TaskCanceled, "the agent's task was canceled"),
        ReplyStatus::InputRequired | ReplyStatus::AuthRequired | ReplyStatus::Working => {
            (Code::OutcomeUnknown, "the agent's task has not ended")
        }
    };
    let message = match outcome.content.message.trim() {
        "" => default_message,
        message => message,
    };
    Err(ActionError::new(code, message))
}
