//! What a run records of its task, and the reply that it makes of it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};

use super::{CallRun, Purpose};
use crate::a2a::model::{Message, Part, Task, TaskState};
use crate::action::assemble::{self, Source};
use crate::action::progress::Progress;
use crate::action::request::ReplyMode;
use crate::action::task_builder::TaskBuilder;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, ReplyStatus, TaskRef};
use crate::state::follow_ups::{Standing, Waiting};
use crate::state::tasks::{Observer, Recorded, TaskRecord};
use crate::telemetry::spans;
use crate::text::hex;

/// A question and the id to answer it.
struct Question {
    follow_up: FollowUp,
    is_new: bool,
}

/// What a run has recorded.
pub(super) struct Observed {
    outcome: Arc<Outcome>,
    source: Source,
    /// Whether those who follow the task have to know.
    is_update: bool,
}

impl<P: Progress> CallRun<'_, P> {
    /// Records where a task stands, publishes the change if the task was submitted, and makes the reply for
    /// it; if it waits, with the follow-up that is `known` for its question, or with a new one.
    pub(in crate::action) async fn observe(
        &self,
        task: &Task,
        status_texts: &str,
        known: Option<FollowUp>,
    ) -> Result<(Arc<Outcome>, Source), ActionError> {
        let Observed { outcome, source, is_update } = self.record(task, status_texts, known).await?;
        if is_update {
            self.actions.publish(&task.id, Ok(Arc::clone(&outcome))).await;
        }
        Ok((outcome, source))
    }

    pub(super) async fn record(
        &self,
        task: &Task,
        status_texts: &str,
        known: Option<FollowUp>,
    ) -> Result<Observed, ActionError> {
        let (state, agent) = (&self.actions.state, &self.actions.agent);
        let reference = self.task_ref(Some(task.id.clone()), task.context_id.clone());
        let (content, source) = assemble::of_task(task, status_texts, &self.actions.limits.artifacts)
            .map_err(|reason| unreadable(&reason).about(reference.clone()))?;
        let mut outcome =
            Outcome::new(ReplyStatus::from(&task.state), content, reference).after(self.call.retries);
        if task.state.is_failure() {
            self.actions.secrets.redact(&mut outcome.content.message);
        }
        let follow_up = match task.state.is_waiting() {
            true => Some(Box::pin(self.follow_up(task, known)).await?),
            false => None,
        };
        outcome.follow_up = follow_up.as_ref().map(|follow_up| follow_up.follow_up.clone());
        let outcome = Arc::new(outcome);
        let record = TaskRecord {
            state: task.state.clone(),
            reply: Ok(Arc::clone(&outcome)),
            follow_up: outcome.follow_up.clone(),
            is_submitted: self.call.mode == ReplyMode::Submit,
            seen_at: SystemTime::now(),
            alive: self.alive(&task.state),
            ttl: self.actions.limits.task_ttl,
        };
        tracing::Span::current().record("task", task.id.as_str());
        spans::task(&task.id, outcome.task.context_id.as_deref());
        let observer = match self.call.purpose {
            Purpose::New { .. } | Purpose::Answer(_) => Observer::Call { began: self.began },
            Purpose::Inspect => Observer::Look { began: self.began },
        };
        let before = match state.tasks.record(agent, &task.id, record, observer).await {
            Recorded::Written { before } => before,
            // Another call has recorded the end, or something newer.
            Recorded::Kept(kept) => {
                if let Some(follow_up) = follow_up.filter(|follow_up| follow_up.is_new) {
                    let _ = Box::pin(state.follow_ups.expire(agent, &follow_up.follow_up.id)).await;
                }
                let outcome = match &kept.reply {
                    Ok(kept) if !task.state.is_final() => Arc::clone(kept),
                    _ => outcome,
                };
                return Ok(Observed { outcome, source, is_update: false });
            }
        };
        if let Some(question) = before.as_ref().and_then(|before| before.follow_up.as_ref())
            && task.state.is_final()
        {
            // Best effort: an answer asks for the state of its task, too.
            let _ = Box::pin(state.follow_ups.expire(agent, &question.id)).await;
        }
        let is_submitted =
            self.call.mode == ReplyMode::Submit || before.as_ref().is_some_and(|before| before.is_submitted);
        let is_change = before.is_none_or(|before| {
            let question = |follow_up: &Option<FollowUp>| follow_up.as_ref().map(|follow_up| follow_up.id);
            // The run that lost track of it has found it again.
            before.reply.is_err()
                || ReplyStatus::from(&before.state) != outcome.status
                || question(&before.follow_up) != question(&outcome.follow_up)
        });
        Ok(Observed { outcome, source, is_update: is_submitted && is_change })
    }

    /// The follow-up for the question of a waiting task: the one that is known for it, or a new one.
    async fn follow_up(&self, task: &Task, known: Option<FollowUp>) -> Result<Question, ActionError> {
        let (state, agent) = (&self.actions.state, &self.actions.agent);
        let question = question_of(task);
        if let Some(known) = known {
            // A look may see the same question in other words than the stream that brought it; only while the
            // id is being answered does the question decide.
            let is_its_name = match state.follow_ups.standing(agent, &known.id).await? {
                Standing::Open { .. } | Standing::Expired => true,
                Standing::Answering { question: of } => of == question,
                Standing::Used | Standing::Unknown => false,
            };
            if is_its_name {
                return Ok(Question { follow_up: known, is_new: false });
            }
        }
        let before = match self.call.purpose {
            Purpose::New { .. } => state.tasks.known(agent, &task.id).await?,
            Purpose::Answer(_) | Purpose::Inspect => state.tasks.find(agent, &task.id).await?,
        };
        if let Some(open) = before.and_then(|before| before.follow_up.clone())
            && matches!(state.follow_ups.standing(agent, &open.id).await?, Standing::Open { question: of } if of == question)
        {
            return Ok(Question { follow_up: open, is_new: false });
        }
        let waiting = Waiting {
            task_id: task.id.clone(),
            context_id: task.context_id.clone(),
            skill: self.call.skill.clone(),
            output_modes: Arc::clone(&self.call.output_modes),
            question,
        };
        let ttl = self.actions.limits.input_required_ttl;
        Ok(Question { follow_up: state.follow_ups.park(agent, waiting, ttl).await?, is_new: true })
    }

    /// How long a task in this state may go on without another word: whoever looks at it does not
    /// know who else follows it, so the longest limit counts.
    fn alive(&self, state: &TaskState) -> Duration {
        let limits = &self.actions.limits;
        let followed = limits.task_timeout.max(limits.request_timeout);
        match state {
            state if state.is_final() => Duration::ZERO,
            TaskState::InputRequired => limits.input_required_ttl,
            // Followed on, and its question may be the last thing that happens meanwhile.
            TaskState::AuthRequired => followed.max(limits.input_required_ttl),
            _ => followed,
        }
    }

    /// Lets the caller's session follow the conversation that the agent has chosen.
    pub(super) async fn follow_context(&self, context_id: Option<&str>) {
        let Purpose::New { session_id: Some(session_id) } = &self.call.purpose else { return };
        let Some(context_id) = context_id else { return };
        let followed = self.actions.state.sessions.follow(&self.actions.agent, session_id, context_id);
        if let Err(error) = Box::pin(followed).await {
            tracing::warn!(agent = %self.actions.agent, error = error.message, "cannot remember the context of a session");
        }
    }

    pub(in crate::action) fn task_ref(&self, id: Option<String>, context_id: Option<String>) -> TaskRef {
        TaskRef { id, context_id, agent: Arc::clone(&self.actions.agent), skill: self.call.skill.clone() }
    }

    pub(super) fn known_ref(&self, fold: &TaskBuilder<'_>) -> TaskRef {
        let task = fold.task();
        self.task_ref(task.map(|task| task.id.clone()), task.and_then(|task| task.context_id.clone()))
    }
}

pub(super) fn unreadable(reason: &str) -> ActionError {
    let message = format!("the agent answered with something that is not A2A: {reason}");
    ActionError::new(Code::AgentError, message).after_reaching_agent()
}

/// Tells one question of a task from the next: by the message that asks it, or, where the agent gives
/// its messages no ids, by all that it has said so far. The same at every replica and in every version.
pub(in crate::action) fn question_of(task: &Task) -> String {
    let mut hash = Sha256::new();
    let asked = task.status_message.as_ref();
    if asked.is_none_or(|message| message.id.is_none()) {
        hash.update(task.artifacts.len().to_be_bytes());
        task.history.iter().filter(|message| !message.from_user).for_each(|said| add(said, &mut hash));
    }
    asked.inspect(|message| add(message, &mut hash));
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
