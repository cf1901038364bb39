//! Answers to an agent's questions: each is sent once, and one that the agent has not taken can be
//! given again under the same id.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::actions::Actions;
use super::progress::Progress;
use super::request::{CallOptions, FollowUpAnswer};
use super::run::{
    Call, CallRun, Failure, Pace, Polled, Poller, Purpose, Question, about_known_task, question_of,
};
use crate::a2a::client::ClientError;
use crate::a2a::dialect::OutgoingMessage;
use crate::a2a::model::{Event, Task};
use crate::a2a::retry::Retries;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::TaskRef;
use crate::state::follow_ups::{Claim, expired};

/// How long a task may go on asking after its answer was cut off before it counts as not taken.
const PATIENCE: Duration = Duration::from_secs(30);
/// JSON-RPC errors that tell nothing about when they happened: internal, of the server, of the agent's own answer.
const BROKE_INSIDE: [i64; 3] = [-32603, -32000, -32006];

impl Actions {
    pub(crate) async fn answer(
        &self,
        answer: FollowUpAnswer,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Reply {
        // The agent first: while it is away the id stays valid.
        let instance = self.instance()?;
        let claim = self.state.follow_ups.claim(&self.agent, &answer.follow_up_id).await?;
        let claim = self.unless_ended(claim).await?;
        let waiting = claim.waiting.clone();
        let retries = Retries::new(&self.agent);
        let call = Call {
            purpose: Purpose::Answer(Question { id: waiting.question, is_taken: false }),
            mode: options.mode,
            skill: waiting.skill.clone(),
            output_modes: Arc::clone(&waiting.output_modes),
            trace: &options.trace,
            limit: self.limit(options),
            retries: Some(&retries),
        };
        let message = OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: Some(&waiting.task_id),
            new_task_id: None,
            context_id: waiting.context_id.as_deref(),
            reference_task_ids: &[],
            parts: &answer.parts,
            skill_id: waiting.skill.as_deref(),
            output_modes: &waiting.output_modes,
            blocking: true,
            retries: &retries,
        };
        let mut run = CallRun::new(self, instance, call, progress);
        let error = match run.deliver(&message).await {
            Ok(outcome) => {
                claim.used().await;
                return Ok(outcome);
            }
            Err(Failure::Client(error)) => match Box::pin(self.answer_failed(&mut run, claim, error)).await {
                Ok(outcome) => return Ok(outcome),
                Err(error) => error,
            },
            Err(Failure::TaskEnded) => {
                claim.expire().await;
                return Err(expired());
            }
            Err(Failure::Action(error)) => {
                claim.used().await;
                error
            }
        };
        // Agents tend to repeat what they do not take.
        Err(self.lost_from_sight(ActionError { is_private: true, ..error.after(&retries) }).await)
    }

    /// A question cannot be answered once its task has reached a final state.
    async fn unless_ended(&self, claim: Claim) -> Result<Claim, ActionError> {
        match self.state.tasks.find(&self.agent, &claim.waiting.task_id).await {
            Ok(Some(record)) if record.state.is_final() => {
                claim.expire().await;
                Err(expired())
            }
            Ok(_) => Ok(claim),
            Err(error) => {
                claim.give_back().await;
                Err(error.into())
            }
        }
    }

    /// The agent did not take an answer, or nobody knows whether it did.
    async fn answer_failed<P: Progress>(
        &self,
        run: &mut CallRun<'_, P>,
        claim: Claim,
        error: ClientError,
    ) -> Reply {
        let task = run.task_ref(Some(claim.waiting.task_id.clone()), claim.waiting.context_id.clone());
        if may_be_taken(&error) {
            return self.after_a_failure(run, claim, error, task).await;
        }
        // The agent's error means that it did not take the answer, unless it was too long to be read.
        match matches!(error, ClientError::TooLarge { .. }) || error.is_task_not_found() {
            true => claim.used().await,
            false => claim.give_back().await,
        }
        Err(about_known_task(error, task))
    }

    /// Finds out what became of a task whose answer may have been lost on its way. If it has moved, that is
    /// the reply; if it still asks the same, the answer was not taken.
    async fn after_a_failure<P: Progress>(
        &self,
        run: &mut CallRun<'_, P>,
        claim: Claim,
        error: ClientError,
        reference: TaskRef,
    ) -> Reply {
        let asks_the_same =
            |task: &Task| task.state.is_waiting() && question_of(task) == claim.waiting.question;
        // A gateway that gave up, or a cut, says nothing about the agent, which may think for a while before
        // it moves.
        let is_silent =
            matches!(error, ClientError::Broken(_) | ClientError::Refused { http_status: Some(504), .. });
        let left = run.deadline.saturating_duration_since(Instant::now());
        let patience = if is_silent { PATIENCE.min(left / 2) } else { Duration::ZERO };
        let task = match self.task_after_answer(run, &reference, patience, asks_the_same).await {
            Ok(Some(task)) if asks_the_same(&task) => {
                claim.give_back().await;
                return Err(not_taken(error, reference));
            }
            Ok(task) => {
                claim.used().await;
                task
            }
            Err(error) => {
                claim.used().await;
                return Err(error);
            }
        };
        match task {
            // The answer was taken, and led to this.
            Some(task) if error.rpc_code().is_none() => {
                let mut fold = run.fold();
                run.resume(&mut fold, Event::Task(task)).await
            }
            _ => Err(about_known_task(error, reference)),
        }
    }

    /// Looks at a task until it has moved, or for long enough to say that it has not: an agent takes
    /// an answer some time before it shows it.
    async fn task_after_answer<P: Progress>(
        &self,
        run: &mut CallRun<'_, P>,
        reference: &TaskRef,
        patience: Duration,
        has_not_moved: impl Fn(&Task) -> bool,
    ) -> Result<Option<Task>, ActionError> {
        let mut poller =
            Poller::new(reference.id.clone().unwrap_or_default(), Pace::SETTLE.with_patience(patience));
        let mut last = None;
        loop {
            match poller.next(run).await {
                Ok(Some(Polled::Seen(seen))) => {
                    let has_moved = !has_not_moved(&seen);
                    last = Some(seen);
                    if has_moved {
                        break;
                    }
                }
                Ok(Some(Polled::Failed(error))) if error.is_task_not_found() => {
                    return Err(about_known_task(error, reference.clone()));
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(interruption) => {
                    return Err(run.interrupted(interruption, Some(reference.clone())).await);
                }
            }
        }
        Ok(last)
    }
}

/// Whether an answer may have reached the agent's work all the same: it was cut off, a gateway answered
/// instead, or something broke inside.
fn may_be_taken(error: &ClientError) -> bool {
    match error {
        ClientError::Broken(_) | ClientError::NotA2a { .. } | ClientError::Compressed { .. } => true,
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
