//! One prompt: to the agent, back with its questions, and to the end.

use std::sync::Arc;

use async_nats::{Client, Message, Subscriber};
use futures_util::StreamExt as _;
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant, sleep_until, timeout};

use super::chunks::ChunkWriter;
use super::envelope::Envelope;
use crate::action::actions::{Skill, Stop};
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, Meta, ReplyMode};
use crate::bus::catalog;
use crate::bus::headers::{self, Headers};
use crate::bus::service::{self, Handler};
use crate::bus::subject::{AgentProtocolSubjects, Subjects, Token};
use crate::dispatch::Dispatcher;
use crate::dispatch::request::{Admission, Input, Operation, Permit, Request};
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, ReplyStatus};
use crate::telemetry::spans::{self, Arrival};
use crate::telemetry::trace_context::TraceContext;

/// The name of a prompt among the calls of an agent.
const PROMPT: &str = "prompt";
/// Questions that may be open at the same time, for one agent.
const MAX_QUESTIONS: usize = 1024;
/// How long to wait for the cancel of a task that the caller has given up.
const ABANDON_TIMEOUT: Duration = Duration::from_secs(3);

/// The prompts to one agent.
#[derive(Debug)]
pub(super) struct Prompts {
    dispatcher: Arc<Dispatcher>,
    client: Client,
    subjects: Subjects,
    own: AgentProtocolSubjects,
    questions: Arc<Semaphore>,
    stop: Stop,
}

/// How a question went on.
enum Continuation {
    /// The caller answered, and the agent has a permit for it.
    Answer(Envelope, Permit),
    /// The task went on without an answer.
    Moved(Arc<Outcome>),
}

impl Prompts {
    pub(super) fn new(
        dispatcher: Arc<Dispatcher>,
        client: Client,
        subjects: Subjects,
        own: AgentProtocolSubjects,
        stop: Stop,
    ) -> Self {
        Self { dispatcher, client, subjects, own, questions: Arc::new(Semaphore::new(MAX_QUESTIONS)), stop }
    }

    /// The handler of the endpoint.
    pub(super) fn handler(this: &Arc<Self>) -> Handler {
        let this = Arc::clone(this);
        Arc::new(move |request| {
            let prompts = Arc::clone(&this);
            let subject = request.message.subject.clone();
            let agent = &this.dispatcher.agent().name;
            let arrival = Arrival { agent, action: PROMPT, subject: &subject };
            let trace = headers::trace(&request.message);
            let of_prompt = trace.clone();
            let serving = async move { prompts.serve(request, of_prompt).await };
            this.dispatcher.spawn(arrival, &trace, serving);
        })
    }

    async fn serve(&self, request: service::ServiceRequest, trace: TraceContext) {
        let service::ServiceRequest { message, accounting } = request;
        // The service hands on no request without a reply subject.
        let Some(to) = message.reply.clone() else { return };
        let keepalive = self.dispatcher.agent().config.stream_keepalive;
        let mut chunks = ChunkWriter::new(self.client.clone(), to, keepalive);
        let done = self.dispatcher.guarded(Box::pin(self.run(&message, trace, &mut chunks))).await;
        accounting.end(chunks.end(done).await);
    }

    async fn run(
        &self,
        message: &Message,
        trace: TraceContext,
        chunks: &mut ChunkWriter,
    ) -> Result<(), ActionError> {
        let (operation, options) = match self.read(message, trace) {
            Ok(read) => read,
            Err(error) => {
                self.dispatcher.note_refusal(&error);
                return Err(error);
            }
        };
        let first = request(operation, &options, Admission::Try);
        let mut outcome = self.dispatcher.call(first, chunks).await?;
        while let Some(follow_up) = outcome.follow_up.clone() {
            // A person may take minutes; the call has given its permit back.
            outcome = match self.ask(&follow_up, &outcome, &options, chunks).await {
                Ok(Continuation::Answer(Envelope { parts, .. }, permit)) => {
                    let answer = FollowUpAnswer { follow_up_id: follow_up.id.to_string(), parts };
                    let operation = Operation::Answer(Input::Ready(answer));
                    let next = request(operation, &options, Admission::Permitted(permit));
                    self.dispatcher.call(next, chunks).await?
                }
                Ok(Continuation::Moved(moved)) => {
                    spans::outcome(moved.status.name());
                    moved
                }
                Err(error) => {
                    spans::outcome(error.info.code.name());
                    self.abandon(&outcome, &error, &options).await;
                    return Err(error);
                }
            };
        }
        chunks.conclude(&outcome).await;
        ended(&outcome)
    }

    fn read(&self, message: &Message, trace: TraceContext) -> Result<(Operation, CallOptions), ActionError> {
        let envelope = self.envelope(message)?;
        let headers = Headers::read(message, trace)?;
        let skill = self.skill(envelope.skill.as_deref())?;
        let meta = Meta { session_id: Some(self.session(envelope.session.as_deref())), ..Meta::default() };
        let input = Input::Ready(Invocation { parts: envelope.parts, meta });
        let operation = Operation::Invoke { action: PROMPT.into(), skill, input };
        Ok((operation, CallOptions { mode: ReplyMode::Stream, ..headers.options }))
    }

    fn envelope(&self, message: &Message) -> Result<Envelope, ActionError> {
        Envelope::parse(&message.payload, self.client.max_payload())
    }

    /// The published skill that a caller names; without one, the agent as a whole.
    fn skill(&self, wanted: Option<&str>) -> Result<Arc<Skill>, ActionError> {
        let Some(wanted) = wanted else {
            return Ok(Arc::new(Skill::whole_agent()));
        };
        let agent = self.dispatcher.agent();
        let status = agent.status.borrow();
        let Some(known) = &status.known else {
            return Err(ActionError::unavailable(&agent.name, status.last_error.as_deref()));
        };
        let token = Token::new(&agent.name);
        let catalog::Catalog { actions, .. } =
            catalog::Catalog::new(&known.card, &agent.config.skills, &self.subjects, &token);
        let is_wanted = [
            |action: &catalog::Action, name: &str| action.token.as_str() == name,
            |action: &catalog::Action, name: &str| action.skill.id.as_deref() == Some(name),
            |action: &catalog::Action, name: &str| action.name == name,
        ];
        let found = is_wanted.iter().find_map(|is| actions.iter().find(|action| is(action, wanted)));
        match found {
            Some(action) => Ok(Arc::clone(&action.skill)),
            None => {
                let names: Vec<_> = actions.iter().map(|action| action.token.as_str()).collect();
                let message = format!("no such skill; there are {}", names.join(", "));
                Err(ActionError::new(Code::NotFound, message))
            }
        }
    }

    /// The conversation of the protocol's session, or of the caller's own. Made of the names alone, so
    /// that it is the same at every replica of the bridge and after a restart; a UUID, because
    /// some agents take no other id for a context.
    fn session(&self, own: Option<&str>) -> String {
        let hash = Sha256::new()
            .chain_update(self.own.prompt())
            .chain_update([0])
            .chain_update(own.unwrap_or_default())
            .finalize();
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(hash).for_each(|(to, from)| *to = from);
        uuid::Builder::from_custom_bytes(bytes).into_uuid().to_string()
    }

    /// Ends the task of a question that nobody can answer any more.
    async fn abandon(&self, asked: &Outcome, error: &ActionError, options: &CallOptions) {
        if let Some(task_id) = asked.task.id.as_ref().filter(|_| error.info.code != Code::TaskLost) {
            // Best effort: the caller gets the reason, not the result of this.
            let _ = timeout(ABANDON_TIMEOUT, self.dispatcher.abandon_task(task_id, options)).await;
        }
    }

    /// Asks the caller, and waits for the answer.
    async fn ask(
        &self,
        follow_up: &FollowUp,
        outcome: &Arc<Outcome>,
        options: &CallOptions,
        chunks: &mut ChunkWriter,
    ) -> Result<Continuation, ActionError> {
        let agent = self.dispatcher.agent();
        let too_many = |_| ActionError::new(Code::Busy, "too many questions of this agent are open");
        let _open = Arc::clone(&self.questions).try_acquire_owned().map_err(too_many)?;
        let instance = agent.live.borrow().clone();
        let instance = instance.ok_or_else(|| ActionError::unavailable(&agent.name, None))?;
        let deadline = Instant::now() + agent.config.input_required_ttl;
        let reply_subject = self.client.new_inbox();
        let answers = self.client.subscribe(reply_subject.clone()).await;
        let answers = answers.map_err(|_| ActionError::internal())?;
        chunks.ask(&follow_up.id.to_string(), &reply_subject, outcome).await;

        let waited = async {
            tokio::select! {
                biased;
                answer = self.answer(answers) => answer,
                () = instance.terminated.cancelled() => {
                    let message = "the agent ended while it waited for the answer";
                    Err(ActionError::new(Code::TaskLost, message))
                }
                () = self.stop.leave.cancelled() => {
                    let message = "the bridge stops serving the agent and the question is still open; the task is cancelled";
                    Err(ActionError::new(Code::Timeout, message))
                }
                () = sleep_until(deadline) => {
                    let message = format!(
                        "no answer within {} s (`input_required_ttl`); the task is cancelled",
                        agent.config.input_required_ttl.as_secs_f32(),
                    );
                    Err(ActionError::new(Code::FollowUpExpired, message))
                }
                moved = self.moved(outcome, options) => moved.map(Continuation::Moved),
            }
        };
        match chunks.keep_alive_during(waited).await? {
            Continuation::Moved(moved) if moved.status == ReplyStatus::Working => {
                let task_id = moved.task.id.clone().unwrap_or_default();
                let settled = self.dispatcher.task_settled(&task_id, options);
                Ok(Continuation::Moved(chunks.keep_alive_during(settled).await?))
            }
            continuation => Ok(continuation),
        }
    }

    /// The first message to the question's own subject, once there is a permit for it.
    async fn answer(&self, mut answers: Subscriber) -> Result<Continuation, ActionError> {
        let message = answers.next().await.ok_or_else(ActionError::internal)?;
        let envelope = self.envelope(&message)?;
        Ok(Continuation::Answer(envelope, self.dispatcher.permit().await?))
    }

    /// Resolves when a task that waits for authentication goes on by itself; never for any other
    /// question.
    async fn moved(&self, asked: &Outcome, options: &CallOptions) -> Reply {
        let Some(task_id) = asked.task.id.as_ref().filter(|_| asked.status == ReplyStatus::AuthRequired)
        else {
            return std::future::pending().await;
        };
        self.dispatcher.task_moved(task_id, options).await
    }
}

fn request(operation: Operation, options: &CallOptions, admission: Admission) -> Request {
    // The protocol has no idempotency keys.
    Request { operation, options: options.clone(), idempotency_key: None, admission }
}

/// Whether the caller got what was asked for.
fn ended(outcome: &Outcome) -> Result<(), ActionError> {
    let (code, otherwise) = match outcome.status {
        ReplyStatus::Completed => return Ok(()),
        ReplyStatus::Failed => (Code::TaskFailed, "the agent's task failed"),
        ReplyStatus::Rejected => (Code::TaskRejected, "the agent rejected the task"),
        ReplyStatus::Canceled => (Code::TaskCanceled, "the agent's task was cancelled"),
        ReplyStatus::InputRequired | ReplyStatus::AuthRequired | ReplyStatus::Working => {
            (Code::OutcomeUnknown, "the agent's task has not come to an end")
        }
    };
    let message = match outcome.content.message.trim() {
        "" => otherwise,
        message => message,
    };
    Err(ActionError::new(code, message))
}
