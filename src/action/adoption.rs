//! Follows the tasks of replicas that are gone.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::OwnedSemaphorePermit;
use uuid::Uuid;

use super::actions::Actions;
use super::progress::Progress;
use super::request::{CallOptions, MessageContent, ReplyMemory, ReplyMode};
use super::run::{CallRun, GET_TASK_TIMEOUT, Polled, Purpose, RunEnd, RunInput, known_task_error};
use crate::a2a::model::{Event, TaskState};
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::Outcome;
use crate::state::follow_ups::{AdoptedQuestion, UnsettledQuestion};
use crate::state::peers::InstanceId;
use crate::state::run_link::LiveRunLink;
use crate::state::tasks::{TaskOutline, TaskRecord};

/// Maximum number of adopted tasks that are read from the agent at the same time, before they are followed one by one.
pub(super) const ADOPTED_READS: usize = 64;
/// Initial and maximum pause before the agent is asked for an adopted task again.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// The task of a replica that is gone.
#[derive(Debug)]
pub(crate) struct AbandonedTask {
    pub id: String,
    pub outline: TaskOutline,
    /// Its questions in the store that are not settled. The outline may not name the last one.
    pub questions: Vec<UnsettledQuestion>,
}

/// The log of an adopted task.
#[derive(Debug)]
pub(crate) struct AdoptedLog<'a, P> {
    pub progress: &'a mut P,
    pub link: Option<Arc<LiveRunLink>>,
    /// What the log has of the task.
    pub reported: Vec<Event>,
}

/// Why a task is no longer tracked.
struct Untracked {
    error: ActionError,
    end: RunEnd,
}

impl Actions {
    /// Adopts the task of a replica that is gone: makes this replica its owner. Of several replicas, one does it. The first
    /// attempt at the store ends with `admission`.
    pub(crate) async fn adopt_task(
        &self,
        task: &AbandonedTask,
        admission: OwnedSemaphorePermit,
    ) -> Option<TaskRecord> {
        let (task_id, from) = (&*task.id, task.outline.owner);
        let record = self.become_owner(task_id, from, admission).await?;
        tracing::debug!(agent = %self.agent, task_id, %from, "adopted a task");
        Some(record)
    }

    /// Follows a task that was [adopted](Self::adopt_task) to its end. `reported` is what its caller has seen of it.
    /// What `count` returns is held meanwhile. Returns how the call ends; `None` if it goes on elsewhere.
    pub(crate) async fn follow_adopted_task<G>(
        &self,
        task: AbandonedTask,
        record: TaskRecord,
        logged: AdoptedLog<'_, impl Progress>,
        count: impl FnOnce() -> G,
    ) -> Option<Reply> {
        let AbandonedTask { id, outline, questions } = task;
        let (task_id, from) = (&*id, outline.owner);
        let options =
            CallOptions { mode: ReplyMode::Submit, caller: record.caller.clone(), ..CallOptions::default() };
        if record.state.is_final() || record.reply.is_err() {
            return Some(record.reply);
        }
        // The task of a launched agent that waits for an answer has ended with its process, too. One whose question was
        // answered, by a replica that is gone, goes on.
        let question = match &outline.follow_up {
            Some(follow_up) => self.adopt_question(&follow_up.id, from).await,
            None => AdoptedQuestion::Open,
        };
        let is_open = question == AdoptedQuestion::Open;
        if record.state == TaskState::InputRequired && !record.is_local && is_open {
            return Some(record.reply);
        }
        let _counted = count();
        match self.follow_adopted(task_id, record, questions.into(), &options, logged).await {
            Ok(outcome) => Some(Ok(outcome)),
            Err(untracked) => {
                let Untracked { error, end } = *untracked;
                let is_handed_over = self.hands_tasks_over();
                let error = self.record_untracked(error, &options, end).await;
                tracing::debug!(agent = %self.agent, task_id, code = error.info.code.name(), "an adopted task is no longer tracked");
                (!is_handed_over).then_some(Err(error))
            }
        }
    }

    /// Makes this replica the owner of a task, and publishes its last change again, because the replica that is gone may
    /// not have published it. Tries until the store has decided, or the bridge stops.
    async fn become_owner(
        &self,
        task_id: &str,
        from: InstanceId,
        admission: OwnedSemaphorePermit,
    ) -> Option<TaskRecord> {
        let (nonce, (mut pause, max_pause)) = (Uuid::new_v4(), RETRY);
        let mut admission = Some(admission);
        loop {
            let turn = self.state.tasks.turn(&self.agent, task_id).await;
            let adopted = self.state.tasks.adopt(&self.agent, task_id, from, nonce).await;
            drop(admission.take());
            match adopted {
                Ok(Some(record)) => {
                    if record.is_submitted {
                        let (caller, memory) = (record.caller.clone(), ReplyMemory::default());
                        self.publish(task_id, record.reply.clone(), record.revision, caller, &memory).await;
                    }
                    return Some(record);
                }
                Ok(None) => return None,
                Err(error) => {
                    tracing::debug!(agent = %self.agent, task_id, error = error.message, "cannot adopt a task yet");
                }
            }
            drop(turn);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.call_shutdown.begun.cancelled() => return None,
            }
            pause = (pause * 2).min(max_pause);
        }
    }

    /// Tries until the store is available, or the bridge stops.
    async fn adopt_question(&self, id: &Uuid, from: InstanceId) -> AdoptedQuestion {
        let (mut pause, max_pause) = RETRY;
        loop {
            if let Ok(adopted) = self.state.follow_ups.adopt(&self.agent, id, from).await {
                return adopted;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.call_shutdown.begun.cancelled() => return AdoptedQuestion::Open,
            }
            pause = (pause * 2).min(max_pause);
        }
    }

    async fn follow_adopted(
        &self,
        task_id: &str,
        record: TaskRecord,
        questions: Arc<[UnsettledQuestion]>,
        options: &CallOptions,
        logged: AdoptedLog<'_, impl Progress>,
    ) -> Result<Arc<Outcome>, Box<Untracked>> {
        let AdoptedLog { progress, link, mut reported } = logged;
        let untracked = |error: ActionError| Err(Box::new(Untracked { error, end: RunEnd::default() }));
        let deadline = record.seen_at + record.may_run_for;
        let skill = match &record.reply {
            Ok(outcome) => outcome.task.skill.clone(),
            Err(error) => error.task.as_ref().and_then(|task| task.skill.clone()),
        };
        let is_local = record.is_local;
        drop(record);
        let (mut pause, max_pause) = RETRY;
        loop {
            let timeout = deadline.duration_since(SystemTime::now()).unwrap_or_default();
            if timeout.is_zero() {
                let message = "the agent did not finish the task within `task_timeout`";
                let mut error = ActionError::new(Code::Timeout, message).after_reaching_agent();
                error.info.cancelled = Some(Some(false));
                return untracked(error.with_task(self.known_task_ref(task_id, skill)));
            }
            if let Ok(live_agent) = self.live_agent() {
                let input = RunInput {
                    purpose: Purpose::Adopted { questions: Arc::clone(&questions) },
                    mode: ReplyMode::Submit,
                    skill: skill.clone(),
                    caller: &options.caller,
                    output_modes: Default::default(),
                    trace: &options.trace,
                    deadline: tokio::time::Instant::now() + timeout,
                    retries: None,
                    content: MessageContent::default(),
                    claim: None,
                    reply_memory: &options.reply_memory,
                    link: link.clone(),
                };
                let mut run = CallRun::new(self, live_agent, input, &mut *progress);
                let reading = self.adopted_reads.acquire().await;
                let polled = run.waiter.get_task(task_id, GET_TASK_TIMEOUT).await;
                drop(reading);
                match polled {
                    Ok(Polled::Task(task)) => {
                        let reported = std::mem::take(&mut reported);
                        let followed = Box::pin(run.follow_adopted(task, reported)).await;
                        let end = run.recorder.end();
                        return followed.map_err(|error| Box::new(Untracked { error, end }));
                    }
                    Ok(Polled::Failed(error)) if error.is_task_not_found() => {
                        return untracked(known_task_error(error, self.known_task_ref(task_id, skill)));
                    }
                    Ok(Polled::Failed(_) | Polled::TimedOut) => {}
                    Err(interruption) => {
                        let task = self.known_task_ref(task_id, skill);
                        let error = run.interrupted_for(interruption, Some(task)).await;
                        let end = run.recorder.end();
                        return Err(Box::new(Untracked { error, end }));
                    }
                }
            } else if is_local {
                // The process that knew the task is gone, and this replica has none that could know it.
                let message = "the replica that ran the agent is gone, and the task with it";
                let error = ActionError::new(Code::TaskLost, message).after_reaching_agent();
                return untracked(error.with_task(self.known_task_ref(task_id, skill)));
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.call_shutdown.begun.cancelled() => {
                    let error = ActionError::new(Code::StateUnavailable, "the bridge stops");
                    return untracked(error.with_task(self.known_task_ref(task_id, skill)));
                }
            }
            pause = (pause * 2).min(max_pause);
        }
    }
}
