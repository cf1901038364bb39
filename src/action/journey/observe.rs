//! What is remembered of a task on the way, and what the caller is told of it.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use super::Journey;
use crate::a2a::model::{Message, Part, Task, TaskState};
use crate::action::assemble::{self, Source};
use crate::action::error::{ActionError, Code};
use crate::action::fold::Fold;
use crate::action::follow_up::{FollowUp, Waiting};
use crate::action::ledger::Record;
use crate::action::outcome::{Outcome, Status, TaskRef};
use crate::action::progress::Progress;
use crate::action::run::Mode;
use crate::telemetry::spans;

impl<P: Progress> Journey<'_, P> {
    /// Remembers where a task stands, tells those who follow it, and makes the reply for it; if it
    /// waits, with the follow-up that is `known` for its question, or with a new one.
    pub(in crate::action) async fn observe(
        &self,
        task: &Task,
        status_texts: &str,
        known: Option<FollowUp>,
    ) -> Result<(Outcome, Source), ActionError> {
        let (outcome, source, is_news) = self.remember(task, status_texts, known)?;
        if is_news {
            self.actions.news(&task.id, outcome.to_json()).await;
        }
        Ok((outcome, source))
    }

    /// The same without telling; whether there is something to tell.
    pub(super) fn remember(
        &self,
        task: &Task,
        status_texts: &str,
        known: Option<FollowUp>,
    ) -> Result<(Outcome, Source, bool), ActionError> {
        let memory = &self.actions.memory;
        let reference = self.task_ref(Some(task.id.clone()), task.context_id.clone());
        let (content, source) = assemble::of_task(task, status_texts, &self.actions.limits.artifacts)
            .map_err(|reason| unreadable(&reason).about(reference.clone()))?;
        let mut outcome = Outcome::new(Status::from(&task.state), content, reference).after(self.retries);
        let before = memory.ledger.task(&self.actions.agent, &task.id);
        // Somebody else has seen the end meanwhile; this look was older.
        if before.as_ref().is_some_and(|before| before.state.is_final()) && !task.state.is_final() {
            return Ok((outcome, source, false));
        }
        if task.state.is_waiting() {
            let question = question_of(task);
            let open = before.as_ref().and_then(|before| before.follow_up.clone());
            let open = open.filter(|open| memory.follow_ups.is_open_for(&open.id, question));
            let known = known.filter(|known| !memory.follow_ups.is_used(&known.id));
            outcome.follow_up = Some(known.or(open).unwrap_or_else(|| self.follow_up(task)));
        }
        let is_submitted =
            self.mode == Mode::Submit || before.as_ref().is_some_and(|record| record.is_submitted);
        let record = Record {
            task: outcome.task.clone(),
            state: task.state.clone(),
            reply: Ok(outcome.to_json()),
            follow_up: outcome.follow_up.clone(),
            is_submitted,
            alive: self.alive(&task.state),
            ttl: self.actions.limits.task_ttl,
        };
        let is_change = before.is_none_or(|before| {
            let question = |follow_up: &Option<FollowUp>| follow_up.as_ref().map(|follow_up| follow_up.id);
            // One that was lost from sight is seen again.
            before.reply.is_err()
                || Status::from(&before.state) != outcome.status
                || question(&before.follow_up) != question(&record.follow_up)
        });
        tracing::Span::current().record("task", task.id.as_str());
        spans::task(&task.id, outcome.task.context_id.as_deref());
        memory.ledger.record(&self.actions.agent, &task.id, record);
        Ok((outcome, source, is_submitted && is_change))
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

    fn follow_up(&self, task: &Task) -> FollowUp {
        let waiting = Waiting {
            task_id: task.id.clone(),
            context_id: task.context_id.clone(),
            skill: self.skill.clone(),
            output_modes: Arc::clone(&self.output_modes),
            question: question_of(task),
        };
        self.actions.memory.follow_ups.park(
            &self.actions.agent,
            waiting,
            self.actions.limits.input_required_ttl,
        )
    }

    pub(super) fn follow_context(&self, context_id: Option<&str>) {
        if let (Some(session_id), Some(context_id)) = (&self.session_id, context_id) {
            self.actions.memory.ledger.follow_context(&self.actions.agent, session_id, context_id);
        }
    }

    pub(in crate::action) fn task_ref(&self, id: Option<String>, context_id: Option<String>) -> TaskRef {
        TaskRef { id, context_id, agent: Arc::clone(&self.actions.agent), skill: self.skill.clone() }
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
/// its messages no ids, by all that it has said so far. A stream may leave that out.
pub(in crate::action) fn question_of(task: &Task) -> u64 {
    let mut hasher = DefaultHasher::new();
    let asked = task.status_message.as_ref();
    if asked.is_none_or(|message| message.id.is_none()) {
        task.artifacts.len().hash(&mut hasher);
        task.history.iter().filter(|message| !message.from_user).for_each(|said| hash(said, &mut hasher));
    }
    asked.inspect(|message| hash(message, &mut hasher));
    hasher.finish()
}

fn hash(message: &Message, hasher: &mut DefaultHasher) {
    message.id.hash(hasher);
    message.parts.len().hash(hasher);
    message.parts.iter().filter_map(Part::as_text).for_each(|text| text.hash(hasher));
}
