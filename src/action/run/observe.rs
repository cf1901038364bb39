//! What a run records of its task, and the reply that it makes of it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sha2::{Digest as _, Sha256};

use super::{CallRun, Purpose};
use crate::a2a::model::{Message, Part, Task, TaskState};
use crate::action::assemble::{self, Source};
use crate::action::fold::Fold;
use crate::action::progress::Progress;
use crate::action::request::ReplyMode;
use crate::json::hex;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, Status, TaskRef};
use crate::state::follow_ups::{Standing, Waiting};
use crate::state::tasks::{Recorded, TaskRecord};
use crate::telemetry::spans;

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

    /// The same without publishing.
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
            Outcome::new(Status::from(&task.state), content, reference).after(self.call.retries);
        // A store that is away does not fail a call that is under way.
        let before = match self.call.purpose {
            Purpose::New { .. } => state.tasks.known(agent, &task.id).await.unwrap_or_default(),
            Purpose::Answer(_) | Purpose::Inspect => {
                Box::pin(state.tasks.find(agent, &task.id)).await.unwrap_or_default()
            }
        };
        if task.state.is_waiting() {
            let open = before.as_ref().and_then(|before| before.follow_up.clone());
            outcome.follow_up = Some(Box::pin(self.follow_up(task, known, open)).await?);
        }
        let is_submitted =
            self.call.mode == ReplyMode::Submit || before.as_ref().is_some_and(|record| record.is_submitted);
        let outcome = Arc::new(outcome);
        let record = TaskRecord {
            task: outcome.task.clone(),
            state: task.state.clone(),
            reply: Ok(Arc::clone(&outcome)),
            follow_up: outcome.follow_up.clone(),
            is_submitted,
            seen_at: SystemTime::now(),
            alive: self.alive(&task.state),
            ttl: self.actions.limits.task_ttl,
        };
        tracing::Span::current().record("task", task.id.as_str());
        spans::task(&task.id, outcome.task.context_id.as_deref());
        let before = match state.tasks.record(agent, &task.id, record, self.began).await {
            Recorded::Written { before } => before,
            // Another call has seen the end meanwhile; this look was older, or says the same.
            Recorded::Ended(_) => return Ok(Observed { outcome, source, is_update: false }),
        };
        if let Some(question) = before.as_ref().and_then(|before| before.follow_up.as_ref())
            && task.state.is_final()
        {
            // Best effort: an answer asks for the state of its task, too.
            let _ = Box::pin(state.follow_ups.expire(agent, &question.id)).await;
        }
        let is_change = before.is_none_or(|before| {
            let question = |follow_up: &Option<FollowUp>| follow_up.as_ref().map(|follow_up| follow_up.id);
            // One that was lost from sight is seen again.
            before.reply.is_err()
                || Status::from(&before.state) != outcome.status
                || question(&before.follow_up) != question(&outcome.follow_up)
        });
        Ok(Observed { outcome, source, is_update: is_submitted && is_change })
    }

    /// The follow-up for the question of a waiting task: the one that is known for it, or a new one.
    async fn follow_up(
        &self,
        task: &Task,
        known: Option<FollowUp>,
        open: Option<FollowUp>,
    ) -> Result<FollowUp, ActionError> {
        let (follow_ups, agent) = (&self.actions.state.follow_ups, &self.actions.agent);
        let question = question_of(task);
        if let Some(known) = known
            && !matches!(follow_ups.standing(agent, &known.id).await?, Standing::Used | Standing::Unknown)
        {
            return Ok(known);
        }
        if let Some(open) = open
            && matches!(follow_ups.standing(agent, &open.id).await?, Standing::Open { question: of } if of == question)
        {
            return Ok(open);
        }
        let waiting = Waiting {
            task_id: task.id.clone(),
            context_id: task.context_id.clone(),
            skill: self.call.skill.clone(),
            output_modes: Arc::clone(&self.call.output_modes),
            question,
        };
        follow_ups.park(agent, waiting, self.actions.limits.input_required_ttl).await
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

    pub(super) fn known_ref(&self, fold: &Fold<'_>) -> TaskRef {
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
