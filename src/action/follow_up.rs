//! The caller's answer to an agent's question. The bridge sends each answer once; if the agent has not taken it, the
//! caller can answer again under the same follow-up id.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use super::actions::Actions;
use super::progress::{ForwardError, Progress, RunStart};
use super::request::{CallOptions, FollowUpAnswer, MessageContent, Meta};
use super::run::{
    CallRun, DeliveryError, PollSchedule, Polled, Poller, Purpose, RunInput, asks_question, known_task_error,
};
use crate::a2a::client::ClientError;
use crate::a2a::dialect::OutgoingMessage;
use crate::a2a::model::Task;
use crate::a2a::retry::Retries;
use crate::failpoint;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::TaskRef;
use crate::state::follow_ups::{Claim, ClaimResult, expired};
use crate::state::peers::{InstanceId, Liveness};

/// After the connection of an answer broke: how long a task may still ask before the answer counts as not taken.
const POLL_AFTER_ANSWER: Duration = Duration::from_secs(30);
/// JSON-RPC errors that can occur before or after the agent takes the answer: internal error, server error, and
/// invalid agent response.
const INTERNAL_ERRORS: [i64; 3] = [-32603, -32000, -32006];

pub(crate) async fn answer(
    actions: &Actions,
    answer: FollowUpAnswer,
    options: &CallOptions,
    progress: &mut impl Progress,
) -> Reply {
    let deadline = Instant::now() + actions.timeout(options);
    let FollowUpAnswer { follow_up_id, parts } = answer;
    // Before the claim: while the agent is unavailable, there is no memory, or a file cannot be read, the id stays valid.
    let live_agent = match actions.live_agent() {
        Ok(live_agent) => live_agent,
        Err(error) => return answer_without_agent(actions, &follow_up_id, error, options, progress).await,
    };
    let parts = actions.resolve_files(parts, deadline).await?;
    let content = MessageContent::new(&actions.memory, parts, &mut Meta::default()).await?;
    let claimed = actions.state.follow_ups.claim(&actions.agent, &options.caller, &follow_up_id).await?;
    failpoint::hit("answer-claimed").await;
    let claim = match claimed {
        ClaimResult::Claimed(claim) => match unless_ended(actions, *claim, options).await? {
            Checked::Open(claim) => *claim,
            Checked::Elsewhere(to) => return answer_elsewhere(actions, to, options, progress).await,
        },
        ClaimResult::Elsewhere(to) => return answer_elsewhere(actions, to, options, progress).await,
    };
    failpoint::hit("answer-checked").await;
    let question = claim.question.clone();
    let start = RunStart {
        session_id: None,
        message: None,
        skill: question.skill.as_deref(),
        context_id: question.context_id.as_deref(),
        card_hash: &live_agent.card.hash,
        continues: question.run.as_ref(),
    };
    let link = match progress.begin_run(start).await {
        Ok(begun) => begun.map(|begun| begun.link),
        Err(error) => {
            claim.release().await;
            return Err(error);
        }
    };
    let logged_session = link.as_ref().and_then(|link| link.session.clone());
    let retries = Retries::new(&actions.agent);
    let input = RunInput {
        purpose: Purpose::Answer { question: question.fingerprint },
        mode: options.mode,
        skill: question.skill.clone(),
        output_modes: Arc::clone(&question.output_modes),
        caller: &options.caller,
        trace: &options.trace,
        deadline,
        retries: Some(&retries),
        content,
        claim: claim.sender(actions.state.tasks.is_only_here(&actions.agent, &question.task_id)),
        reply_memory: &options.reply_memory,
        link: link.clone(),
    };
    let message = OutgoingMessage {
        message_id: Uuid::new_v4(),
        task_id: Some(&question.task_id),
        new_task_id: None,
        context_id: question.context_id.as_deref(),
        reference_task_ids: &[],
        parts: &[],
        skill_id: question.skill.as_deref(),
        caller: actions.forwarded_caller(options),
        run_id: link.as_ref().map(|link| link.run),
        session_id: logged_session.as_deref(),
        output_modes: &question.output_modes,
        blocking: true,
        retries: &retries,
    };
    let mut run = CallRun::new(actions, live_agent, input, progress);
    let error = match run.deliver(&message).await {
        Ok(outcome) => {
            actions.state.mark_used(&actions.agent, claim).await;
            return Ok(outcome);
        }
        Err(DeliveryError::Client(error)) => match Box::pin(after_failure(&mut run, claim, error)).await {
            Ok(outcome) => return Ok(outcome),
            Err(error) => error,
        },
        Err(DeliveryError::TaskEnded) => {
            claim.mark_expired().await;
            return Err(expired());
        }
        Err(DeliveryError::NotSent(error)) => {
            claim.release().await;
            return Err(error);
        }
        Err(DeliveryError::Action(error)) => {
            actions.state.mark_used(&actions.agent, claim).await;
            error
        }
    };
    // Agents often quote an answer that they refuse.
    let error = ActionError { is_private: true, ..error.with_retries(&retries) };
    let end = run.recorder.end();
    Err(actions.record_untracked(error, options, end).await)
}

/// The agent of this replica is unavailable, but that of another one may have the question.
async fn answer_without_agent(
    actions: &Actions,
    follow_up_id: &str,
    error: ActionError,
    options: &CallOptions,
    progress: &mut impl Progress,
) -> Reply {
    let holder = actions.state.follow_ups.other_holder(&actions.agent, &options.caller, follow_up_id).await;
    match holder {
        Some(to) => answer_elsewhere(actions, to, options, progress).await,
        None => Err(error),
    }
}

/// Lets the replica that can reach the task's agent pass the answer on.
async fn answer_elsewhere(
    actions: &Actions,
    to: InstanceId,
    options: &CallOptions,
    progress: &mut impl Progress,
) -> Reply {
    let unreachable = || {
        let why = "the replica that runs the agent does not respond";
        Err(ActionError::unavailable(&actions.agent, Some(why)))
    };
    if options.is_forwarded {
        return unreachable();
    }
    match actions.state.peers.liveness(to).await {
        Liveness::Alive => {}
        Liveness::Unreachable => return unreachable(),
        Liveness::Dead if actions.state.peers.may_return(to) => return unreachable(),
        Liveness::Dead => {
            let message = "the replica that ran the agent is gone, and the task with it";
            return Err(ActionError::new(Code::TaskLost, message));
        }
    }
    match progress.forward(to).await {
        Ok(reply) => reply,
        Err(ForwardError::Gone | ForwardError::Unsupported | ForwardError::NotKept) => unreachable(),
        Err(ForwardError::Silent) => {
            let message =
                "the replica that runs the agent stopped responding; the agent may have received the answer";
            Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent())
        }
    }
}

/// Where a question that was claimed can be answered.
enum Checked {
    Open(Box<Claim>),
    Elsewhere(InstanceId),
}

/// A question cannot be answered once its task has reached a final state, or asks under another id.
async fn unless_ended(
    actions: &Actions,
    claim: Claim,
    options: &CallOptions,
) -> Result<Checked, ActionError> {
    let (state, id) = (&actions.state, &claim.question.task_id);
    let found = match state.tasks.find_to_answer(&actions.agent, id).await {
        Ok(found) => Ok(found),
        Err(_) if state.tasks.is_only_here(&actions.agent, id) => state.tasks.find(&actions.agent, id).await,
        Err(error) => Err(error),
    };
    let task = match found {
        Ok(task) => task,
        Err(error) => {
            claim.release().await;
            return Err(error);
        }
    };
    let (owner, own) = (claim.owner(), state.peers.instance());
    let liveness = match &task {
        Some(task) if task.state.is_final() => {
            claim.mark_expired().await;
            return Err(expired());
        }
        Some(task) if !state.is_shared() || claim.is_named_in(task) => {
            return Ok(Checked::Open(Box::new(claim)));
        }
        None if !state.is_shared() || owner == own => return Ok(Checked::Open(Box::new(claim))),
        // The replica that asked knows whether it is about to write the record that names the question.
        _ if owner == own => None,
        _ => Some(state.peers.liveness(owner).await),
    };
    match (liveness, task) {
        (Some(Liveness::Alive), _) if !options.is_forwarded => {
            claim.release().await;
            Ok(Checked::Elsewhere(owner))
        }
        (Some(Liveness::Dead), None) => Ok(Checked::Open(Box::new(claim))),
        // Another replica adopts the task, and finds the question.
        (Some(Liveness::Dead), Some(task)) if task.owner == owner => unanswerable(claim).await,
        (None | Some(Liveness::Dead), _) => {
            claim.mark_expired().await;
            Err(expired())
        }
        (Some(_), _) => unanswerable(claim).await,
    }
}

/// Only a replica that does not respond knows whether the question is valid.
async fn unanswerable(claim: Claim) -> Result<Checked, ActionError> {
    claim.release().await;
    let message = "the replica that asked does not respond; try again in a few seconds";
    Err(ActionError::new(Code::StateUnavailable, message))
}

/// Finds out whether the agent took an answer whose delivery failed. If the task has moved on, that is the reply; if
/// it still asks the same question, the agent did not take the answer.
async fn after_failure<P: Progress>(run: &mut CallRun<'_, P>, claim: Claim, error: ClientError) -> Reply {
    let question = claim.question.clone();
    let Actions { state, agent, .. } = run.actions;
    let task_ref = run.recorder.task_ref(Some(question.task_id), question.context_id);
    if !may_be_taken(&error) {
        // The agent refused the answer, unless only its response did not fit, or the task no longer exists.
        let does_not_fit = matches!(
            error,
            ClientError::TooLarge { .. } | ClientError::OutOfMemory | ClientError::NotStored(_)
        );
        match does_not_fit || error.is_task_not_found() {
            true => state.mark_used(agent, claim).await,
            false => claim.release().await,
        }
        return Err(known_task_error(error, task_ref));
    }
    // A broken connection or the timeout of a gateway says nothing about the agent, which may take a while before
    // the task moves on.
    let is_agent_silent =
        matches!(error, ClientError::Broken(_) | ClientError::Refused { http_status: Some(504), .. });
    let time_left = run.waiter.deadline.saturating_duration_since(Instant::now());
    let duration = if is_agent_silent { POLL_AFTER_ANSWER.min(time_left / 2) } else { Duration::ZERO };
    match poll_while(run, &task_ref, duration, &question.fingerprint).await {
        Ok(LastSeen::StillAsking) => {
            claim.release().await;
            Err(not_taken(error, task_ref))
        }
        Ok(seen) => {
            let reply = match seen {
                LastSeen::MovedOn(task) if error.rpc_code().is_none() => run.resume_after_answer(*task).await,
                _ => Err(known_task_error(error, task_ref)),
            };
            state.mark_used(agent, claim).await;
            reply
        }
        Err(error) => {
            state.mark_used(agent, claim).await;
            Err(error)
        }
    }
}

/// Polls a task until it no longer asks the same question. Does not give up before `duration` has passed, because a
/// task may show an answer some time after the agent took it.
async fn poll_while<P: Progress>(
    run: &mut CallRun<'_, P>,
    task_ref: &TaskRef,
    duration: Duration,
    fingerprint: &str,
) -> Result<LastSeen, ActionError> {
    let schedule = PollSchedule::CONFIRM.with_min_duration(duration);
    let mut poller = Poller::new(task_ref.id.clone().unwrap_or_default(), schedule);
    let mut last = LastSeen::Nothing;
    loop {
        match poller.next(&mut run.waiter).await {
            Ok(Some(Polled::Task(task))) if asks_question(&task, fingerprint, &task_ref.agent).await => {
                last = LastSeen::StillAsking;
            }
            Ok(Some(Polled::Task(task))) => return Ok(LastSeen::MovedOn(Box::new(task))),
            Ok(Some(Polled::Failed(error))) if error.is_task_not_found() => {
                return Err(known_task_error(error, task_ref.clone()));
            }
            Ok(Some(_)) => {}
            Ok(None) => return Ok(last),
            Err(interruption) => {
                return Err(run.interrupted_for(interruption, Some(task_ref.clone())).await);
            }
        }
    }
}

/// The task of an answer as it was last seen.
enum LastSeen {
    Nothing,
    StillAsking,
    MovedOn(Box<Task>),
}

/// Whether the agent may have taken an answer in spite of the error: the connection broke, a gateway responded, or the
/// agent had an internal error.
fn may_be_taken(error: &ClientError) -> bool {
    match error {
        ClientError::Broken(_)
        | ClientError::NotA2a { .. }
        | ClientError::Compressed { .. }
        | ClientError::LargeHeaders
        | ClientError::WrongId => true,
        ClientError::Refused { code: Some(code), .. } => INTERNAL_ERRORS.contains(code),
        ClientError::Refused { code: None, http_status, .. } => {
            matches!(http_status, Some(500 | 502 | 503 | 504))
        }
        ClientError::Unreachable(_)
        | ClientError::Token(_)
        | ClientError::NotSent(_)
        | ClientError::NotStored(_)
        | ClientError::TooLarge { .. }
        | ClientError::OutOfMemory => false,
    }
}

/// The error of an answer after which the task still asks the same question.
fn not_taken(error: ClientError, task: TaskRef) -> ActionError {
    let is_broken = matches!(error, ClientError::Broken(_));
    let mut error = ActionError::from_client(error).with_task(task);
    if is_broken {
        // The outcome is not unknown: polling has shown that the task still waits.
        error.info.code = Code::AgentUnavailable;
        error.info.retryable = true;
    }
    error.message += "; the task is still waiting for an answer, and the follow-up id can be used again";
    error
}
