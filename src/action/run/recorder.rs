//! Records the task of a run, and builds the reply from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::{Purpose, RunInput};
use crate::a2a::model::{Message, Part, Task, TaskState};
use crate::action::actions::Actions;
use crate::action::assemble::{self, MessageSource};
use crate::action::request::ReplyMode;
use crate::offload;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, ReplyStatus, TaskRef};
use crate::state::follow_ups::{ClaimSender, FollowUpState, NewFollowUp, OpenQuestion};
use crate::state::run_link::RunLink;
use crate::state::tasks::{Observer, RecordResult, Takeover, TaskRecord};
use crate::telemetry::spans;
use crate::text::hex;

#[derive(Debug)]
pub(in crate::action) struct TaskRecorder<'a> {
    pub(super) actions: &'a Actions,
    pub(super) input: RunInput<'a>,
    pub(super) began: SystemTime,
    /// Identifies the call among those of this process that follow the task.
    run: u64,
    /// Whether nothing is recorded yet.
    is_first: AtomicBool,
    /// The revision of a change that was recorded and not published; 0 if there is none.
    unpublished: AtomicU64,
}

/// What remains of a run that ends with an error.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::action) struct RunEnd {
    /// Identifies the run.
    pub run: u64,
    /// The revision of the change that [`TaskRecorder::record_unpublished`] has recorded.
    pub unpublished: Option<u64>,
}

pub(super) struct Observation {
    outcome: Arc<Outcome>,
    source: MessageSource,
    /// The revision of the change, if it is to be published.
    update: Option<u64>,
    /// Whether another replica follows the task.
    pub(super) is_taken_over: bool,
}

impl<'a> TaskRecorder<'a> {
    pub(super) fn new(actions: &'a Actions, input: RunInput<'a>) -> Self {
        let run = match input.purpose {
            Purpose::ReadOrCancel => 0,
            Purpose::NewTask { .. } | Purpose::Answer { .. } | Purpose::Adopted { .. } => {
                actions.state.tasks.next_run()
            }
        };
        let (is_first, unpublished) = (true.into(), 0.into());
        Self { actions, input, began: SystemTime::now(), run, is_first, unpublished }
    }

    /// Whether the next record makes this replica the owner of the task.
    fn takeover(&self) -> Takeover {
        let is_first = self.is_first.swap(false, Relaxed);
        match self.input.purpose {
            Purpose::NewTask { .. } if is_first => Takeover::New,
            Purpose::NewTask { .. } => Takeover::None,
            Purpose::Answer { .. } => self.answered().map_or(Takeover::None, Takeover::Answer),
            Purpose::Adopted { .. } | Purpose::ReadOrCancel => Takeover::None,
        }
    }

    /// Where the call is logged.
    fn run_link(&self) -> Option<RunLink> {
        self.input.link.as_ref().map(|link| link.now())
    }

    /// The follow-up id that the call answers.
    fn answered(&self) -> Option<Uuid> {
        self.input.claim.as_ref().and_then(ClaimSender::id)
    }

    /// Records the state of a task, publishes the change if the task was submitted, and builds the reply. If the task
    /// waits for an answer, the reply has the follow-up that is `known` for the question, or a new one.
    pub(in crate::action) async fn observe(
        &self,
        task: &Task,
        status_texts: &str,
        known: Option<FollowUp>,
    ) -> Result<(Arc<Outcome>, MessageSource), ActionError> {
        // A call that has not asked yet has its task to itself, or its changes are not published.
        let is_alone = matches!(self.input.purpose, Purpose::NewTask { .. })
            && self.input.mode != ReplyMode::Submit
            && !task.state.awaits_caller();
        let _turn = match is_alone {
            true => None,
            false => Some(Box::pin(self.actions.state.tasks.turn(&self.actions.agent, &task.id)).await),
        };
        let observation = self.record(task, status_texts, known).await?;
        if observation.is_taken_over && self.input.mode == ReplyMode::Submit {
            // The other replica publishes the changes.
            let task_ref = self.task_ref(Some(task.id.clone()), task.context_id.clone());
            return Err(taken_over().with_task(task_ref));
        }
        let Observation { outcome, source, update, .. } = observation;
        if let Some(revision) = update {
            let (caller, memory) = (self.input.caller.clone(), self.input.reply_memory);
            self.actions.publish(&task.id, Ok(Arc::clone(&outcome)), revision, caller, memory).await;
        }
        Ok((outcome, source))
    }

    /// Records the state of a task after the bridge has canceled it. The error of the run is published in its place,
    /// because that has the reason.
    pub(super) async fn record_unpublished(&self, task: &Task) {
        let _turn = self.actions.state.tasks.turn(&self.actions.agent, &task.id).await;
        if let Ok(Observation { update: Some(revision), .. }) = self.record(task, "", None).await {
            self.unpublished.store(revision, Relaxed);
        }
    }

    /// What remains of the run when it ends with an error.
    pub(in crate::action) fn end(&self) -> RunEnd {
        let unpublished = Some(self.unpublished.load(Relaxed)).filter(|revision| *revision > 0);
        RunEnd { run: self.run, unpublished }
    }

    /// Records the state of a task and builds the reply, like [`Self::observe`], but publishes nothing.
    async fn record(
        &self,
        task: &Task,
        status_texts: &str,
        known: Option<FollowUp>,
    ) -> Result<Observation, ActionError> {
        let (state, agent) = (&self.actions.state, &self.actions.agent);
        let task_ref = self.task_ref(Some(task.id.clone()), task.context_id.clone());
        let size = task.allocated() + status_texts.len();
        self.cover_reply(size).map_err(|error| error.with_task(task_ref.clone()))?;
        let artifacts = &self.actions.artifacts;
        let (content, source) =
            offload::run(&self.actions.agent, size, || assemble::task_content(task, status_texts, artifacts))
                .await
                .map_err(|reason| unreadable(&reason).with_task(task_ref.clone()))?;
        let mut outcome =
            Outcome::new(ReplyStatus::from(&task.state), content, task_ref).with_retries(self.input.retries);
        if task.state.is_failure() {
            let message = &mut outcome.content.message;
            offload::run(&self.actions.agent, message.len(), || self.actions.secrets.redact(message)).await;
        }
        let mut new_follow_up = None;
        if task.state.awaits_caller() {
            let (follow_up, new) = Box::pin(self.follow_up(task, known)).await?;
            (outcome.follow_up, new_follow_up) = (Some(follow_up), new);
        }
        let outcome = Arc::new(outcome);
        // A task that was adopted stays what it was.
        let is_submission =
            self.input.mode == ReplyMode::Submit && !matches!(self.input.purpose, Purpose::Adopted { .. });
        let record = TaskRecord {
            state: task.state.clone(),
            reply: Ok(Arc::clone(&outcome)),
            follow_up: outcome.follow_up.clone(),
            is_submitted: is_submission,
            revision: 0,
            caller: self.input.caller.clone(),
            owner: state.peers.instance(),
            is_local: self.actions.is_launched(),
            seen_at: SystemTime::now(),
            may_run_for: self.may_run_for(&task.state),
            ttl: self.actions.config.task_ttl,
            open_for: self.open_for(&task.state),
            run: self.run_link(),
        };
        tracing::Span::current().record("task", task.id.as_str());
        spans::set_task(&task.id, outcome.task.context_id.as_deref());
        let is_lookup = matches!(self.input.purpose, Purpose::ReadOrCancel);
        let observer = Observer { began: self.began, is_lookup, takeover: self.takeover(), run: self.run };
        let new_follow_up_id = new_follow_up.as_ref().map(|new| new.follow_up.id);
        let recorded = match new_follow_up {
            None => state.tasks.record(agent, &task.id, record, observer).await,
            // The question first: whoever reads the task must find it.
            Some(new) => match Box::pin(state.follow_ups.store(agent, new)).await {
                Ok(()) => state.tasks.record(agent, &task.id, record, observer).await,
                Err(error) => Err(error),
            },
        };
        let recorded = recorded.map_err(|error| {
            let task_ref = self.task_ref(Some(task.id.clone()), task.context_id.clone());
            error.after_reaching_agent().with_task(task_ref)
        });
        if let Some((revision, reply)) = state.tasks.take_landed(agent, &task.id) {
            let (caller, memory) = (self.input.caller.clone(), self.input.reply_memory);
            self.actions.publish(&task.id, reply, revision, caller, memory).await;
        }
        let (previous, update) = match recorded? {
            RecordResult::Written { previous, update } => (previous, update),
            // The call goes on for its caller. The record of the other replica names the id for the question, if there
            // is one.
            RecordResult::TakenOver => {
                let mut outcome = outcome;
                if let Some(id) = new_follow_up_id {
                    Box::pin(state.expire_unless_named(agent, &task.id, &id)).await;
                    outcome = self.kept_outcome(&task.id, size).await?.unwrap_or(outcome);
                }
                return Ok(Observation { outcome, source, update: None, is_taken_over: true });
            }
            // Another call has recorded the end, or a newer state.
            RecordResult::Kept => {
                if let Some(id) = new_follow_up_id {
                    Box::pin(state.expire_unless_named(agent, &task.id, &id)).await;
                }
                let outcome = match task.state.is_final() {
                    true => outcome,
                    false => self.kept_outcome(&task.id, size).await?.unwrap_or(outcome),
                };
                return Ok(Observation { outcome, source, update: None, is_taken_over: false });
            }
        };
        if let Some(follow_up) = previous.as_ref().and_then(|previous| previous.follow_up.as_ref())
            && task.state.is_final()
        {
            // Best effort: an answer checks the state of its task, too.
            let _ = Box::pin(state.follow_ups.expire(agent, &follow_up.id)).await;
        }
        Ok(Observation { outcome, source, update, is_taken_over: false })
    }

    /// The outcome that another call has recorded, while this one holds `held` bytes.
    async fn kept_outcome(&self, id: &str, held: usize) -> Result<Option<Arc<Outcome>>, ActionError> {
        let charge = |bytes| self.input.reply_memory.cover(&self.actions.memory, held + bytes);
        let kept = Box::pin(self.actions.state.tasks.reply(&self.actions.agent, id, charge)).await?;
        Ok(kept.and_then(Reply::ok))
    }

    /// The follow-up for the question of a waiting task, and the record of a new one, which is not stored yet.
    async fn follow_up(
        &self,
        task: &Task,
        known: Option<FollowUp>,
    ) -> Result<(FollowUp, Option<NewFollowUp>), ActionError> {
        let (state, agent) = (&self.actions.state, &self.actions.agent);
        let fingerprint =
            offload::run(&self.actions.agent, task.allocated(), || question_fingerprint(task)).await;
        if let Some(known) = known {
            let record = state.follow_ups.find(agent, &known.id).await?;
            let is_for_question = record.is_some_and(|record| match record.state {
                // `get_task` may see the same question in other words than the stream that brought it.
                FollowUpState::Pending => true,
                // The task is canceled, unless the id became invalid because another one was recorded.
                FollowUpState::Expired => record.is_over(),
                FollowUpState::Answering { .. } | FollowUpState::Sending { .. } | FollowUpState::Used => {
                    record.is_for(&fingerprint)
                }
            });
            if is_for_question {
                return Ok((known, None));
            }
        }
        let previous = match self.input.purpose {
            Purpose::NewTask { .. } => state.tasks.find_seen_here(agent, &task.id).await?,
            Purpose::Answer { .. } | Purpose::Adopted { .. } | Purpose::ReadOrCancel => {
                state.tasks.find(agent, &task.id).await?
            }
        };
        if let Some(open) = previous.and_then(|previous| previous.follow_up)
            // After an answer, the agent may ask the same question again.
            && Some(open.id) != self.answered()
            && let Some(record) = state.follow_ups.find(agent, &open.id).await?
            && record.is_for(&fingerprint)
        {
            return Ok((open, None));
        }
        if let Purpose::Adopted { questions } = &self.input.purpose
            && let Some(open) = state.follow_ups.find_open(agent, questions, &fingerprint).await?
        {
            return Ok((open, None));
        }
        let question = OpenQuestion {
            task_id: task.id.clone(),
            context_id: task.context_id.clone(),
            skill: self.input.skill.clone(),
            output_modes: Arc::clone(&self.input.output_modes),
            fingerprint,
            caller: self.input.caller.clone(),
            is_local: self.actions.is_launched(),
            run: self.run_link(),
        };
        let new = state.follow_ups.prepare(question, self.actions.config.input_required_ttl);
        Ok((new.follow_up.clone(), Some(new)))
    }

    /// How long a task in this state may go on without another event. A request to read or cancel a task
    /// does not know which call follows it, so the longest limit counts.
    fn may_run_for(&self, state: &TaskState) -> Duration {
        let config = &self.actions.config;
        let longest_call = config.task_timeout.max(config.request_timeout);
        match state {
            state if state.is_final() => Duration::ZERO,
            TaskState::InputRequired => config.input_required_ttl,
            // The task may go on without an answer, or wait for one.
            TaskState::AuthRequired => longest_call.max(config.input_required_ttl),
            _ => longest_call,
        }
    }

    /// Charges the content of a reply with about this size.
    pub(super) fn cover_reply(&self, size: usize) -> Result<(), ActionError> {
        let covered = self.input.reply_memory.cover(&self.actions.memory, size);
        covered.map_err(|error| match self.input.purpose {
            // The request runs nothing, so it can be repeated.
            Purpose::ReadOrCancel => error.into(),
            Purpose::NewTask { .. } | Purpose::Answer { .. } | Purpose::Adopted { .. } => {
                ActionError::from_client(error.into())
            }
        })
    }

    /// How long the task runs or waits as far as the caller is concerned. After a request for authentication only a
    /// submitted task is still followed.
    fn open_for(&self, state: &TaskState) -> Duration {
        match state {
            TaskState::AuthRequired if self.input.mode != ReplyMode::Submit => {
                self.actions.config.input_required_ttl
            }
            state => self.may_run_for(state),
        }
    }

    /// Maps the caller's session to the context id that the agent has chosen.
    pub(super) async fn update_session(&self, context_id: Option<&str>) {
        let Purpose::NewTask { session_id: Some(session_id) } = &self.input.purpose else { return };
        let Some(context_id) = context_id else { return };
        let session = self.actions.session(self.input.caller, session_id);
        let update = self.actions.state.sessions.set_context_id(session, context_id);
        if let Err(error) = Box::pin(update).await {
            tracing::warn!(agent = %self.actions.agent, error = error.message, "cannot record the context id of a session");
        }
    }

    pub(in crate::action) fn task_ref(&self, id: Option<String>, context_id: Option<String>) -> TaskRef {
        TaskRef { id, context_id, agent: Arc::clone(&self.actions.agent), skill: self.input.skill.clone() }
    }
}

/// Ends a run whose task another replica follows.
fn taken_over() -> ActionError {
    ActionError::new(Code::StateUnavailable, "another replica follows the task").after_reaching_agent()
}

pub(super) fn unreadable(reason: &str) -> ActionError {
    let message = format!("the agent's response is not A2A: {reason}");
    ActionError::new(Code::AgentError, message).after_reaching_agent()
}

/// Whether a task of this agent waits for the answer to the question with this fingerprint.
pub(in crate::action) async fn asks_question(task: &Task, fingerprint: &str, agent: &str) -> bool {
    task.state.awaits_caller()
        && offload::run(agent, task.allocated(), || question_fingerprint(task)).await == fingerprint
}

/// Distinguishes one question of a task from the next: by the message that asks it, or, if the agent gives its
/// messages no ids, by all the agent's messages so far. All replicas and all releases must compute the same value.
fn question_fingerprint(task: &Task) -> String {
    let mut hash = Sha256::new();
    let question = task.status_message.as_ref();
    if question.is_none_or(|message| message.id.is_none()) {
        hash.update(task.artifacts.len().to_be_bytes());
        task.history.iter().filter(|message| !message.from_user).for_each(|message| add(message, &mut hash));
    }
    question.inspect(|message| add(message, &mut hash));
    hex(hash.finalize().get(..8).unwrap_or_default())
}

fn add(message: &Message, hash: &mut Sha256) {
    let mut field = |text: &str| {
        hash.update(text.len().to_be_bytes());
        hash.update(text);
    };
    field(message.id.as_deref().unwrap_or_default());
    message.parts.iter().filter_map(Part::as_text).for_each(field);
}
