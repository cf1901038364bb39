//! One prompt on its way: to the agent, back with its questions, and to the end.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Message, Subscriber};
use futures_util::{FutureExt as _, StreamExt as _};
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::chunks::Chunks;
use super::envelope::Envelope;
use crate::action::error::{ActionError, Code};
use crate::action::outcome::{Outcome, Status};
use crate::action::request::{FollowUpAnswer, Invocation, Meta, Options};
use crate::action::run::{Mode, Skill, Stop};
use crate::bus::catalog;
use crate::bus::desk::Desk;
use crate::bus::envelope;
use crate::bus::service::{Handler, Request};
use crate::bus::subject::{AgentSubjects, Subjects, Token};
use crate::telemetry::spans;

/// The name of a prompt among the calls of an agent.
const PROMPT: &str = "prompt";
/// Questions that may be open at the same time, for one agent.
const MAX_QUESTIONS: usize = 1024;
/// How often is looked whether somebody has signed in elsewhere.
const LOOK: Duration = Duration::from_secs(3);
/// How long a cancel may take that the caller did not ask for.
const GIVE_UP: Duration = Duration::from_secs(3);

type Place = OwnedSemaphorePermit;

/// The prompts to one agent.
#[derive(Debug)]
pub(super) struct Prompts {
    desk: Arc<Desk>,
    client: Client,
    subjects: Subjects,
    own: AgentSubjects,
    questions: Arc<Semaphore>,
    stop: Stop,
}

/// How a question went on.
enum Reply {
    /// The caller answered, and it is this call's turn again.
    Answer(Envelope, Place),
    /// The task went on without an answer.
    Moved(Outcome),
}

impl Prompts {
    pub(super) fn new(
        desk: Arc<Desk>,
        client: Client,
        subjects: Subjects,
        own: AgentSubjects,
        stop: Stop,
    ) -> Self {
        Self { desk, client, subjects, own, questions: Arc::new(Semaphore::new(MAX_QUESTIONS)), stop }
    }

    /// The handler of the endpoint.
    pub(super) fn handler(this: &Arc<Self>) -> Handler {
        let this = Arc::clone(this);
        Arc::new(move |request| {
            let place = this.desk.place();
            let prompts = Arc::clone(&this);
            let exported = this.desk.exported_span(PROMPT, &request.message);
            this.desk.calls().spawn(exported.around(async move { prompts.serve(request, place).await }));
        })
    }

    async fn serve(&self, request: Request, place: Result<Place, ActionError>) {
        let Request { message, call } = request;
        // The service hands on no request without a reply subject.
        let Some(to) = message.reply.clone() else { return };
        let agent = self.desk.agent();
        let mut chunks = Chunks::new(self.client.clone(), to, agent.config.stream_keepalive);
        // A defect in one prompt must not cost the caller the end of the stream.
        let done = AssertUnwindSafe(self.run(&message, place, &mut chunks)).catch_unwind().await;
        let done = done.unwrap_or_else(|_| {
            tracing::error!(agent = %agent.name, "a prompt panicked; this is a defect, please report it");
            Err(ActionError::internal())
        });
        let done = done.map_err(|error| error.covered(|text| agent.output.cover(text)));
        if let Err(error) = &done {
            let code = error.info.code;
            if code == Code::AgentUnavailable {
                agent.recheck();
            }
            tracing::debug!(agent = %agent.name, code = code.name(), message = error.for_logs(), "prompt failed");
        }
        spans::outcome(done.as_ref().map_or_else(|error| error.info.code.name(), |()| "COMPLETED"));
        let error = chunks.end(done).await;
        spans::ended(error.map(|(_, code)| code));
        match error {
            None => call.succeed(),
            Some((number, code)) => call.fail(number, code),
        }
    }

    async fn run(
        &self,
        message: &Message,
        place: Result<Place, ActionError>,
        chunks: &mut Chunks,
    ) -> Result<(), ActionError> {
        let envelope = self.envelope(message)?;
        let mut options = envelope::wishes(message)?.options;
        spans::hand_on(&mut options.trace);
        let skill = self.skill(envelope.skill.as_deref())?;
        let mut place = Some(place?);
        chunks.acknowledge().await;

        let actions = self.desk.actions();
        let meta = Meta { session_id: Some(self.session(envelope.session.as_deref())), ..Meta::default() };
        let request = Invocation { parts: envelope.parts, meta };
        let mut outcome = actions.invoke(&skill, request, &options, Mode::Stream, chunks).await?;
        while let Some(follow_up) = outcome.follow_up.take() {
            // A person may take minutes; others can use the place meanwhile.
            drop(place.take());
            let follow_up_id = follow_up.id.to_string();
            let next = match self.reply(&follow_up_id, &outcome, &options, chunks).await {
                Ok(Reply::Answer(Envelope { parts, .. }, turn)) => {
                    place = Some(turn);
                    let answer = FollowUpAnswer { follow_up_id, parts };
                    actions.answer(answer, &options, Mode::Stream, chunks).await
                }
                Ok(Reply::Moved(moved)) => Ok(moved),
                Err(error) => {
                    self.give_up(&outcome, &error, &options).await;
                    Err(error)
                }
            };
            outcome = next?;
        }
        drop(place);
        chunks.conclude(&outcome).await;
        ended(&outcome)
    }

    fn envelope(&self, message: &Message) -> Result<Envelope, ActionError> {
        Envelope::parse(&message.payload, self.client.max_payload())
    }

    /// The published skill that a caller names; without one, the agent as a whole.
    fn skill(&self, wanted: Option<&str>) -> Result<Skill, ActionError> {
        let whole = || Skill { id: None, output_modes: Vec::new() };
        let Some(wanted) = wanted else {
            return Ok(whole());
        };
        let agent = self.desk.agent();
        let status = agent.status.borrow();
        let Some(known) = &status.known else {
            return Err(ActionError::unavailable(&agent.name, status.last_error.as_deref()));
        };
        let token = Token::new(&agent.name);
        let (actions, _) = catalog::actions(&known.card, &agent.config.skills, &self.subjects, &token);
        let is_wanted = [
            |action: &catalog::Action, name: &str| action.token.as_str() == name,
            |action: &catalog::Action, name: &str| action.skill.id.as_deref() == Some(name),
            |action: &catalog::Action, name: &str| action.name == name,
        ];
        let found = is_wanted.iter().find_map(|is| actions.iter().find(|action| is(action, wanted)));
        match found {
            Some(action) => {
                Ok(Skill { id: action.skill.id.clone(), output_modes: action.skill.output_modes.clone() })
            }
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
    async fn give_up(&self, asked: &Outcome, error: &ActionError, options: &Options) {
        if let Some(task_id) = asked.task.id.as_ref().filter(|_| error.info.code != Code::TaskLost) {
            // Best effort: the caller hears of the reason, not of this.
            let cancel = self.desk.actions().cancel(task_id, options);
            let _ = timeout(GIVE_UP, cancel).await;
        }
    }

    /// Asks the caller, and waits for the answer.
    async fn reply(
        &self,
        id: &str,
        outcome: &Outcome,
        options: &Options,
        chunks: &mut Chunks,
    ) -> Result<Reply, ActionError> {
        let agent = self.desk.agent();
        let too_many = |_| ActionError::new(Code::Busy, "too many questions of this agent are open");
        let _open = Arc::clone(&self.questions).try_acquire_owned().map_err(too_many)?;
        let instance = agent.live.borrow().clone();
        let instance = instance.ok_or_else(|| ActionError::unavailable(&agent.name, None))?;
        let deadline = Instant::now() + agent.config.input_required_ttl;
        let reply_subject = self.client.new_inbox();
        let answers = self.client.subscribe(reply_subject.clone()).await;
        let answers = answers.map_err(|_| ActionError::internal())?;
        chunks.ask(id, &reply_subject, outcome).await;

        let waited = async {
            tokio::select! {
                biased;
                answer = self.answer(answers) => answer,
                () = instance.gone.cancelled() => {
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
                moved = self.moved(outcome, options) => moved,
            }
        };
        match chunks.keep_alive_during(waited).await? {
            Reply::Moved(seen) => {
                let settled = tokio::select! {
                    biased;
                    settled = chunks.keep_alive_during(self.settled(seen, options)) => settled?,
                    () = instance.gone.cancelled() => {
                        let message = "the agent ended while it held the task";
                        return Err(ActionError::new(Code::TaskLost, message));
                    }
                    () = self.stop.hurry.cancelled() => {
                        let message = "the bridge stops serving the agent, which did not end in time";
                        return Err(ActionError::new(Code::Timeout, message));
                    }
                    () = sleep(agent.config.task_timeout) => {
                        let message = "the agent did not end within the limit";
                        return Err(ActionError::new(Code::Timeout, message));
                    }
                };
                Ok(Reply::Moved(settled))
            }
            answer @ Reply::Answer(..) => Ok(answer),
        }
    }

    /// The first message to the question's own subject, when it is this call's turn again.
    async fn answer(&self, mut answers: Subscriber) -> Result<Reply, ActionError> {
        let message = answers.next().await.ok_or_else(ActionError::internal)?;
        let envelope = self.envelope(&message)?;
        let place = self.desk.place_in_turn().await?;
        Ok(Reply::Answer(envelope, place))
    }

    /// Resolves when a task that waits for authentication goes on by itself; never for any other
    /// question.
    async fn moved(&self, asked: &Outcome, options: &Options) -> Result<Reply, ActionError> {
        if asked.status != Status::AuthRequired {
            return std::future::pending().await;
        }
        let mut seen = asked.clone();
        while seen.status == Status::AuthRequired {
            seen = self.look(seen, options).await?;
        }
        Ok(Reply::Moved(seen))
    }

    /// Resolves when a task that goes on has come to its end, or to the next question.
    async fn settled(&self, mut seen: Outcome, options: &Options) -> Result<Outcome, ActionError> {
        while seen.status == Status::Working {
            seen = self.look(seen, options).await?;
        }
        Ok(seen)
    }

    async fn look(&self, before: Outcome, options: &Options) -> Result<Outcome, ActionError> {
        sleep(LOOK).await;
        let seen = match &before.task.id {
            Some(id) => self.desk.actions().look(id, options).await?,
            None => None,
        };
        Ok(seen.unwrap_or(before))
    }
}

/// Whether the caller got what was asked for.
fn ended(outcome: &Outcome) -> Result<(), ActionError> {
    let (code, otherwise) = match outcome.status {
        Status::Completed => return Ok(()),
        Status::Failed => (Code::TaskFailed, "the agent's task failed"),
        Status::Rejected => (Code::TaskRejected, "the agent rejected the task"),
        Status::Canceled => (Code::NotCancelable, "the agent's task was cancelled"),
        Status::InputRequired | Status::AuthRequired | Status::Working => {
            (Code::OutcomeUnknown, "the agent's task has not come to an end")
        }
    };
    let message = match outcome.content.message.trim() {
        "" => otherwise,
        message => message,
    };
    Err(ActionError::new(code, message))
}
