//! Answers to an agent's questions: each goes out once, and what the agent has not taken can be
//! given again under the same id.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::{ActionError, Code};
use super::fold::Fold;
use super::follow_up::Claim;
use super::journey::{ASIDE, Failure, Journey, POLL, SETTLING_LOOKS, about_known_task, question_of};
use super::outcome::{Outcome, TaskRef};
use super::progress::Progress;
use super::request::{FollowUpAnswer, Options};
use super::run::{Actions, Mode};
use crate::a2a::client::ClientError;
use crate::a2a::dialect::{Outgoing, Wait};
use crate::a2a::model::{Event, Task};
use crate::a2a::retry::Retries;

/// How long a task may go on asking after its answer was cut off before it counts as not taken.
const PATIENCE: Duration = Duration::from_secs(30);
/// Errors of JSON-RPC that tell nothing about when: internal, of the server, of the agent's own answer.
const BROKE_INSIDE: [i64; 3] = [-32603, -32000, -32006];

impl Actions {
    /// Answers an agent's question.
    pub async fn answer(
        &self,
        answer: FollowUpAnswer,
        options: &Options,
        mode: Mode,
        progress: &mut impl Progress,
    ) -> Result<Outcome, ActionError> {
        // The agent first: while it is away the id stays valid.
        let instance = self.instance()?;
        let claim = self.memory.follow_ups.take(&self.agent, &answer.follow_up_id)?;
        let waiting = claim.waiting.clone();
        let retries = Retries::default();
        let mut journey = self.journey(instance, mode, options, progress);
        journey.retries = Some(&retries);
        journey.skill.clone_from(&waiting.skill);
        journey.output_modes = Arc::clone(&waiting.output_modes);
        journey.answers = Some(waiting.question);
        let message = Outgoing {
            task_id: Some(&waiting.task_id),
            new_task_id: None,
            context_id: waiting.context_id.as_deref(),
            reference_task_ids: &[],
            parts: &answer.parts,
            skill_id: waiting.skill.as_deref(),
            output_modes: &waiting.output_modes,
            wait: Wait::UntilSettled,
            retries: &retries,
        };
        let answered = match journey.deliver(&message).await {
            Ok(outcome) => return Ok(outcome),
            Err(Failure::Client(error)) => Box::pin(self.answer_failed(&mut journey, claim, error)).await,
            Err(Failure::Action(error)) => Err(error),
        };
        // Agents like to repeat what they do not take.
        answered
            .map_err(|error| self.lost_from_sight(ActionError { is_private: true, ..error.after(&retries) }))
    }

    /// The agent did not take an answer, or nobody knows whether it did.
    async fn answer_failed<P: Progress>(
        &self,
        journey: &mut Journey<'_, P>,
        claim: Claim,
        error: ClientError,
    ) -> Result<Outcome, ActionError> {
        let task = journey.task_ref(Some(claim.waiting.task_id.clone()), claim.waiting.context_id.clone());
        if may_be_taken(&error) {
            return self.after_a_failure(journey, claim, error, task).await;
        }
        // The agent's error means that it did not take the answer, unless it was too long to be read.
        if !matches!(error, ClientError::TooLarge { .. }) && !error.is_task_not_found() {
            claim.give_back();
        }
        Err(about_known_task(error, task))
    }

    /// What became of a task whose answer may have been lost on its way. If it has moved, that is the
    /// reply; if it still asks the same, the answer was not taken.
    async fn after_a_failure<P: Progress>(
        &self,
        journey: &mut Journey<'_, P>,
        claim: Claim,
        error: ClientError,
        reference: TaskRef,
    ) -> Result<Outcome, ActionError> {
        let asks_the_same =
            |task: &Task| task.state.is_waiting() && question_of(task) == claim.waiting.question;
        // A gateway that gave up, or a cut, says nothing about the agent, which may think for a while before
        // it moves.
        let is_silent =
            matches!(error, ClientError::Broken(_) | ClientError::Refused { http_status: Some(504), .. });
        let left = journey.deadline.saturating_duration_since(Instant::now());
        let patience = if is_silent { PATIENCE.min(left / 2) } else { Duration::ZERO };
        let Some(task) = self.settled_look(journey, &reference, patience, asks_the_same).await? else {
            return Err(about_known_task(error, reference));
        };
        if asks_the_same(&task) {
            claim.give_back();
            return Err(not_taken(error, reference));
        }
        // It was taken, and led to this.
        if error.rpc_code().is_some() {
            return Err(about_known_task(error, reference));
        }
        let max_size = usize::try_from(self.limits.max_response_size).unwrap_or(usize::MAX);
        let mut fold = Fold::new(&self.limits.artifacts, max_size, journey.progress.listens());
        journey.resume(&mut fold, Event::Task(task)).await
    }

    /// Looks at a task until it has moved, or for long enough to say that it has not: an agent takes
    /// its time to begin. `None` if the agent cannot be asked.
    async fn settled_look<P: Progress>(
        &self,
        journey: &mut Journey<'_, P>,
        reference: &TaskRef,
        patience: Duration,
        has_not_moved: impl Fn(&Task) -> bool,
    ) -> Result<Option<Task>, ActionError> {
        let instance = Arc::clone(&journey.instance);
        let client = &instance.client;
        let trace = journey.trace;
        let task_id = reference.id.as_deref().unwrap_or_default();
        let (mut pause, mut last) = (POLL.0, None);
        let until = Instant::now() + patience;
        for look in 0.. {
            if look >= SETTLING_LOOKS && Instant::now() >= until {
                break;
            }
            let looked = journey.within(async {
                tokio::time::sleep(pause).await;
                tokio::time::timeout(ASIDE, client.get(task_id, trace)).await
            });
            match looked.await {
                Ok(Ok(Ok(seen))) => {
                    let has_moved = !has_not_moved(&seen);
                    last = Some(seen);
                    if has_moved {
                        break;
                    }
                }
                Ok(Ok(Err(error))) if error.is_task_not_found() => {
                    return Err(about_known_task(error, reference.clone()));
                }
                Ok(_) => {}
                Err(interruption) => {
                    return Err(journey.interrupted(interruption, Some(reference.clone())).await);
                }
            }
            pause = (pause * 2).min(POLL.1);
        }
        Ok(last)
    }
}

/// Whether an answer may have reached the agent's work all the same: it was cut off, a gateway answered
/// instead, or something broke inside.
fn may_be_taken(error: &ClientError) -> bool {
    match error {
        ClientError::Broken(_) | ClientError::NotA2a { .. } | ClientError::Encoded { .. } => true,
        ClientError::Refused { code: Some(code), .. } => BROKE_INSIDE.contains(code),
        ClientError::Refused { code: None, http_status, .. } => {
            matches!(http_status, Some(500 | 502 | 503 | 504))
        }
        ClientError::Unreachable(_) | ClientError::Token(_) | ClientError::TooLarge { .. } => false,
    }
}

/// The error of an answer after which the task still asks the same.
fn not_taken(error: ClientError, task: TaskRef) -> ActionError {
    let is_cut = matches!(error, ClientError::Broken(_));
    let mut error = ActionError::from_client(error).about(task);
    if is_cut {
        // What became of the task is known after all.
        error.info.code = Code::AgentUnavailable;
        error.info.retryable = true;
    }
    error.message += "; the task still waits for the answer, and the follow-up id can be used again";
    error
}
