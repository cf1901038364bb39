//! One agent's actions: request in, reply out.
//!
//! [`Actions`] holds no connection of its own: it looks at the instance that is running right now
//! (a watch channel written by the agent's loop) and at the shared [`Memory`]. A message is sent
//! at most once. A task that comes back unfinished is followed until it settles, the limit is
//! over, or its agent is gone; then the caller gets exactly one reply, true to the agent's state.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::assemble::{self, ArtifactRules};
use super::error::{ActionError, Code};
use super::follow_up::{Claim, FollowUp, FollowUps, Waiting};
use super::ledger::{Ledger, Record};
use super::once::{Once, Reply};
use super::outcome::{Outcome, Status, TaskRef};
use super::request::{FollowUpAnswer, Invocation, Options};
use crate::a2a::Instance;
use crate::a2a::client::{Client, ClientError, Trace, code};
use crate::a2a::dialect::Outgoing;
use crate::a2a::model::{Answer, Task, TaskState};

/// First pause before asking for a task again, and the longest.
const POLL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How often in a row the agent may fail to say what became of a task.
const MAX_POLL_FAILURES: u32 = 6;
/// How long one look at a task, or a cancel, may take.
const ASIDE: Duration = Duration::from_secs(10);
/// How long a caller waits for a cancel.
const CANCEL: Duration = Duration::from_secs(30);
/// How often a task is looked at after its answer was cut off before it counts as still waiting.
const SETTLING_LOOKS: u32 = 4;

/// What all agents of this process remember together.
#[derive(Debug, Default)]
pub struct Memory {
    /// Open questions.
    pub follow_ups: FollowUps,
    /// Tasks and conversations.
    pub ledger: Ledger,
    /// Idempotency keys.
    pub once: Arc<Once>,
}

/// The settings of one agent that its actions need.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Limit of a whole call.
    pub request_timeout: Duration,
    /// How long a question can be answered.
    pub input_required_ttl: Duration,
    /// Which artifacts are the answer.
    pub artifacts: ArtifactRules,
}

/// What is known about an agent that calls can go to.
pub type Live = watch::Receiver<Option<Arc<Instance>>>;

/// One agent's actions.
#[derive(Debug)]
pub struct Actions {
    agent: Arc<str>,
    limits: Limits,
    live: Live,
    memory: Arc<Memory>,
    // Cancelled when the grace time of a stop is over.
    hurry: CancellationToken,
}

/// The skill that a call goes to, as the reply and the agent shall see it.
#[derive(Debug)]
pub struct Skill {
    /// Its original id; `None` sends the message to the agent as a whole.
    pub id: Option<Arc<str>>,
    /// Media types it answers with.
    pub output_modes: Vec<String>,
}

/// How a wait for the agent ended when it was not the agent that ended it.
enum Interruption {
    Deadline,
    Hurry,
    Gone,
}

struct Journey<'a> {
    instance: Arc<Instance>,
    skill: Option<Arc<str>>,
    output_modes: Vec<String>,
    session_id: Option<String>,
    trace: &'a Trace,
    deadline: Instant,
}

impl Actions {
    /// The actions of the agent called `agent` in the settings.
    pub fn new(
        agent: Arc<str>,
        limits: Limits,
        live: Live,
        memory: Arc<Memory>,
        hurry: CancellationToken,
    ) -> Self {
        Self {
            agent,
            limits,
            live,
            memory,
            hurry,
        }
    }

    /// The agent's name in the settings.
    pub fn agent(&self) -> &Arc<str> {
        &self.agent
    }

    /// The memory shared with the other agents.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Invokes a skill.
    pub async fn invoke(&self, skill: &Skill, request: Invocation, options: &Options) -> Reply {
        let instance = self.instance()?;
        let Invocation { parts, meta } = request;
        let output_modes = [
            meta.output_modes,
            skill.output_modes.clone(),
            instance.card.output_modes.clone(),
        ]
        .into_iter()
        .find(|modes| !modes.is_empty())
        .unwrap_or_default();
        let context_id = meta
            .session_id
            .as_ref()
            .map(|session| self.memory.ledger.context(&self.agent, session));
        let journey = self.journey(instance, skill.id.clone(), output_modes, meta.session_id, options);
        let message = Outgoing {
            task_id: None,
            context_id: context_id.as_deref(),
            reference_task_ids: &meta.reference_task_ids,
            parts: &parts,
            skill_id: skill.id.as_deref(),
            output_modes: &journey.output_modes,
        };
        match self
            .within(&journey, journey.instance.client.send(&message, journey.trace))
            .await
        {
            Ok(Ok(answer)) => self.settle(&journey, answer).await,
            Ok(Err(error)) => Err(ActionError::from_client(error)),
            Err(interruption) => Err(self.interrupted(&journey, interruption, None).await),
        }
    }

    /// Answers an agent's question.
    pub async fn answer(&self, answer: FollowUpAnswer, options: &Options) -> Reply {
        // The agent first: while it is away the id stays valid.
        let instance = self.instance()?;
        let claim = self.memory.follow_ups.take(&self.agent, &answer.follow_up_id)?;
        let waiting = claim.waiting.clone();
        let journey = self.journey(
            instance,
            waiting.skill.clone(),
            waiting.output_modes.clone(),
            None,
            options,
        );
        let message = Outgoing {
            task_id: Some(&waiting.task_id),
            context_id: waiting.context_id.as_deref(),
            reference_task_ids: &[],
            parts: &answer.parts,
            skill_id: waiting.skill.as_deref(),
            output_modes: &journey.output_modes,
        };
        match self
            .within(&journey, journey.instance.client.send(&message, journey.trace))
            .await
        {
            Ok(Ok(answer)) => self.settle(&journey, answer).await,
            Ok(Err(error)) => self.answer_failed(&journey, claim, error).await,
            Err(interruption) => {
                let task = self.task_ref(&journey, Some(waiting.task_id), waiting.context_id);
                Err(self.interrupted(&journey, interruption, Some(task)).await)
            }
        }
    }

    /// Asks the agent to cancel a task that was seen here.
    pub async fn cancel(&self, task_id: &str, options: &Options) -> Reply {
        let record = self.record(task_id)?;
        let refuse = |why: &str| Err(ActionError::new(Code::NotCancelable, why).about(record.task.clone()));
        if record.is_final {
            return refuse("the task is in a final state");
        }
        let mut journey = self.journey(
            self.instance()?,
            record.task.skill.clone(),
            Vec::new(),
            None,
            options,
        );
        journey.deadline = journey.deadline.min(Instant::now() + CANCEL);
        let client = &journey.instance.client;
        let task = match self.within(&journey, client.cancel(task_id, journey.trace)).await {
            Ok(Ok(task)) => task,
            Ok(Err(error)) => {
                return match error.rpc_code() {
                    Some(
                        code::TASK_NOT_CANCELABLE | code::UNSUPPORTED_OPERATION | code::METHOD_NOT_FOUND,
                    ) => refuse(&format!("the agent refuses to cancel the task: {error}")),
                    _ => Err(self.about_known_task(error, &record.task)),
                };
            }
            Err(_) => {
                let error = ActionError::new(Code::Timeout, "the agent did not answer the cancel in time");
                return Err(error.after_reaching_agent().about(record.task.clone()));
            }
        };
        // Some agents take the wish and carry it out later.
        let task = self.cancelled_soon(&journey, task).await;
        let mut outcome = self.observe(&journey, &task, record.follow_up.clone())?;
        match task.state {
            TaskState::Canceled => {
                outcome.success = true;
                Ok(outcome.to_json().into())
            }
            ref state if state.is_final() => {
                refuse(&format!("the task ended as {state} before it could be cancelled"))
            }
            _ => Ok(outcome.to_json().into()),
        }
    }

    /// Where a task that was seen here stands.
    pub async fn get(&self, task_id: &str, options: &Options) -> Reply {
        let record = self.record(task_id)?;
        if record.is_final {
            return Ok(record.reply.clone());
        }
        // While the agent is away, memory answers.
        let Ok(instance) = self.instance() else {
            return Ok(record.reply.clone());
        };
        let mut journey = self.journey(instance, record.task.skill.clone(), Vec::new(), None, options);
        journey.deadline = journey.deadline.min(Instant::now() + ASIDE);
        match self
            .within(&journey, journey.instance.client.get(task_id, journey.trace))
            .await
        {
            Ok(Ok(task)) => Ok(self
                .observe(&journey, &task, record.follow_up.clone())?
                .to_json()
                .into()),
            Ok(Err(ClientError::Unreachable(_) | ClientError::Broken(_))) | Err(_) => {
                Ok(record.reply.clone())
            }
            Ok(Err(error)) => Err(self.about_known_task(error, &record.task)),
        }
    }

    fn instance(&self) -> Result<Arc<Instance>, ActionError> {
        self.live
            .borrow()
            .clone()
            .ok_or_else(|| ActionError::unavailable(&self.agent, None))
    }

    fn journey<'a>(
        &self,
        instance: Arc<Instance>,
        skill: Option<Arc<str>>,
        output_modes: Vec<String>,
        session_id: Option<String>,
        options: &'a Options,
    ) -> Journey<'a> {
        let limit = options.timeout.map_or(self.limits.request_timeout, |own| {
            own.min(self.limits.request_timeout)
        });
        let deadline = Instant::now() + limit;
        Journey {
            instance,
            skill,
            output_modes,
            session_id,
            trace: &options.trace,
            deadline,
        }
    }

    /// Turns the agent's answer into a reply, following an unfinished task.
    async fn settle(&self, journey: &Journey<'_>, answer: Answer) -> Reply {
        let mut task = match answer {
            Answer::Task(task) => task,
            Answer::Message(message) => {
                self.follow_context(journey, message.context_id.as_deref());
                let content = assemble::of_message(&message).map_err(|reason| self.unreadable(&reason))?;
                let task = self.task_ref(journey, None, message.context_id);
                return Ok(Outcome::new(Status::Completed, content, task).to_json().into());
            }
        };
        self.follow_context(journey, task.context_id.as_deref());
        if !is_settled(&task) {
            task = self.follow(journey, task).await?;
        }
        Ok(self.observe(journey, &task, None)?.to_json().into())
    }

    /// Asks again and again until the task settles.
    async fn follow(&self, journey: &Journey<'_>, mut task: Task) -> Result<Task, ActionError> {
        let (mut pause, longest) = POLL;
        let mut failures = 0;
        self.observe(journey, &task, None)?;
        let client = &journey.instance.client;
        loop {
            let looked = self.within(journey, async {
                tokio::time::sleep(pause).await;
                tokio::time::timeout(ASIDE, client.get(&task.id, journey.trace)).await
            });
            match looked.await {
                Err(interruption) => {
                    let task = self.task_ref(journey, Some(task.id), task.context_id);
                    return Err(self.interrupted(journey, interruption, Some(task)).await);
                }
                Ok(Ok(Ok(seen))) => {
                    failures = 0;
                    task = Task {
                        id: task.id,
                        context_id: seen.context_id.or(task.context_id),
                        ..seen
                    };
                    if is_settled(&task) {
                        return Ok(task);
                    }
                }
                Ok(Ok(Err(error))) if error.rpc_code() == Some(code::TASK_NOT_FOUND) => {
                    return Err(
                        self.about_known_task(error, &self.task_ref(journey, Some(task.id), task.context_id))
                    );
                }
                Ok(failed) => {
                    failures += 1;
                    if failures >= MAX_POLL_FAILURES {
                        let why = match failed {
                            Ok(Err(error)) => crate::a2a::client::chain(&error),
                            _ => "no answer in time".to_owned(),
                        };
                        let message =
                            format!("the agent can no longer be asked what became of the task: {why}");
                        let task = self.task_ref(journey, Some(task.id), task.context_id);
                        return Err(ActionError::new(Code::OutcomeUnknown, message)
                            .after_reaching_agent()
                            .about(task));
                    }
                }
            }
            pause = pause.mul_f32(1.5).min(longest);
        }
    }

    /// The agent did not take an answer, or nobody knows whether it did.
    async fn answer_failed(&self, journey: &Journey<'_>, claim: Claim, error: ClientError) -> Reply {
        let waiting = claim.waiting.clone();
        let task = self.task_ref(journey, Some(waiting.task_id.clone()), waiting.context_id);
        match &error {
            // The agent's error means that it did not take the answer.
            ClientError::Unreachable(_) | ClientError::Refused { .. } => {
                if error.rpc_code() != Some(code::TASK_NOT_FOUND) {
                    claim.give_back();
                }
                Err(self.about_known_task(error, &task))
            }
            ClientError::NotA2a { .. } | ClientError::TooLarge { .. } => {
                Err(self.about_known_task(error, &task))
            }
            // The answer may have arrived, so it is not sent again; the task is known and can be asked for.
            ClientError::Broken(_) => {
                let client = &journey.instance.client;
                let mut pause = POLL.0;
                for _ in 0..SETTLING_LOOKS {
                    let looked = self.within(journey, async {
                        tokio::time::sleep(pause).await;
                        tokio::time::timeout(ASIDE, client.get(&waiting.task_id, journey.trace)).await
                    });
                    match looked.await {
                        // Perhaps only not yet moved: an agent takes its time to begin.
                        Ok(Ok(Ok(seen))) if seen.state.is_waiting() => pause *= 2,
                        Ok(Ok(Ok(seen))) => return self.settle(journey, Answer::Task(seen)).await,
                        Ok(Ok(Err(error))) if error.rpc_code() == Some(code::TASK_NOT_FOUND) => {
                            return Err(self.about_known_task(error, &task));
                        }
                        Ok(_) => pause *= 2,
                        Err(interruption) => {
                            return Err(self.interrupted(journey, interruption, Some(task)).await);
                        }
                    }
                }
                // It still waits: the answer was lost on its way, and the question can be answered.
                match tokio::time::timeout(ASIDE, client.get(&waiting.task_id, journey.trace)).await {
                    Ok(Ok(seen)) => self.settle(journey, Answer::Task(seen)).await,
                    _ => Err(ActionError::from_client(error).about(task)),
                }
            }
        }
    }

    /// Gives an agent that cancels later a moment to do so.
    async fn cancelled_soon(&self, journey: &Journey<'_>, mut task: Task) -> Task {
        let mut pause = POLL.0;
        for _ in 0..SETTLING_LOOKS {
            if task.state.is_final() {
                break;
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
            let looked = journey.instance.client.get(&task.id, journey.trace);
            if let Ok(Ok(seen)) = tokio::time::timeout(ASIDE, looked).await {
                task = seen;
            }
        }
        task
    }

    /// Remembers where a task stands and makes the reply for it; if it waits, with the follow-up
    /// that is `known` for its question, or with a new one.
    fn observe(
        &self,
        journey: &Journey<'_>,
        task: &Task,
        known: Option<FollowUp>,
    ) -> Result<Outcome, ActionError> {
        let reference = self.task_ref(journey, Some(task.id.clone()), task.context_id.clone());
        let content = assemble::of_task(task, &self.limits.artifacts)
            .map_err(|reason| self.unreadable(&reason).about(reference.clone()))?;
        let mut outcome = Outcome::new(Status::from(&task.state), content, reference);
        if task.state.is_waiting() {
            let known = known.filter(|known| !self.memory.follow_ups.is_used(&known.id));
            outcome.follow_up = Some(known.unwrap_or_else(|| self.follow_up(journey, task)));
        }
        let record = Record {
            task: outcome.task.clone(),
            is_final: task.state.is_final(),
            reply: Bytes::from(outcome.to_json()),
            follow_up: outcome.follow_up.clone(),
        };
        tracing::Span::current().record("task", task.id.as_str());
        self.memory.ledger.record(&self.agent, &task.id, record);
        Ok(outcome)
    }

    fn follow_up(&self, journey: &Journey<'_>, task: &Task) -> FollowUp {
        let waiting = Waiting {
            task_id: task.id.clone(),
            context_id: task.context_id.clone(),
            skill: journey.skill.clone(),
            output_modes: journey.output_modes.clone(),
        };
        self.memory
            .follow_ups
            .park(&self.agent, waiting, self.limits.input_required_ttl)
    }

    fn follow_context(&self, journey: &Journey<'_>, context_id: Option<&str>) {
        if let (Some(session_id), Some(context_id)) = (&journey.session_id, context_id) {
            self.memory
                .ledger
                .follow_context(&self.agent, session_id, context_id);
        }
    }

    /// Runs a wait until its deadline, the end of a stop's grace time, or the end of the agent.
    async fn within<T>(
        &self,
        journey: &Journey<'_>,
        wait: impl Future<Output = T>,
    ) -> Result<T, Interruption> {
        tokio::select! {
            biased;
            result = wait => Ok(result),
            () = journey.instance.gone.cancelled() => Err(Interruption::Gone),
            () = tokio::time::sleep_until(journey.deadline) => Err(Interruption::Deadline),
            () = self.hurry.cancelled() => Err(Interruption::Hurry),
        }
    }

    /// Cancels what was interrupted, if its task is known, and says how that went.
    async fn interrupted(
        &self,
        journey: &Journey<'_>,
        why: Interruption,
        task: Option<TaskRef>,
    ) -> ActionError {
        let error = match why {
            Interruption::Gone => match task {
                Some(task) => {
                    ActionError::new(Code::TaskLost, "the agent ended while it held the task").about(task)
                }
                None => ActionError::new(Code::OutcomeUnknown, "the agent ended before it answered"),
            },
            Interruption::Deadline | Interruption::Hurry => {
                let task_id = task.as_ref().and_then(|task| task.id.as_deref());
                let cancelled = match task_id {
                    Some(id) => Some(cancel_at_agent(&journey.instance.client, id, journey.trace).await),
                    None => None,
                };
                let message = match why {
                    Interruption::Hurry => "the bridge is stopping and the agent did not end in time",
                    _ => "the agent did not end within the limit",
                };
                let mut error = ActionError {
                    task,
                    ..ActionError::new(Code::Timeout, message)
                };
                error.info.cancelled = Some(cancelled);
                error
            }
        };
        error.after_reaching_agent()
    }

    /// An error about a task that was seen here: when the agent does not know it any more, it is lost.
    fn about_known_task(&self, error: ClientError, task: &TaskRef) -> ActionError {
        let lost = error.rpc_code() == Some(code::TASK_NOT_FOUND);
        let mut error = ActionError::from_client(error).about(task.clone());
        if lost {
            error.info.code = Code::TaskLost;
        }
        error
    }

    fn unreadable(&self, reason: &str) -> ActionError {
        let message = format!("the agent answered with something that is not A2A: {reason}");
        ActionError::new(Code::AgentError, message).after_reaching_agent()
    }

    fn record(&self, task_id: &str) -> Result<Arc<Record>, ActionError> {
        let never = "this task was never seen here, or is forgotten";
        self.memory
            .ledger
            .task(&self.agent, task_id)
            .ok_or_else(|| ActionError::new(Code::NotFound, never))
    }

    fn task_ref(&self, journey: &Journey<'_>, id: Option<String>, context_id: Option<String>) -> TaskRef {
        TaskRef {
            id,
            context_id,
            agent: Arc::clone(&self.agent),
            skill: journey.skill.clone(),
        }
    }
}

fn is_settled(task: &Task) -> bool {
    task.state.is_final() || task.state.is_waiting()
}

async fn cancel_at_agent(client: &Client, task_id: &str, trace: &Trace) -> bool {
    let cancelled = tokio::time::timeout(ASIDE, client.cancel(task_id, trace)).await;
    matches!(cancelled, Ok(Ok(task)) if task.state == TaskState::Canceled)
}
