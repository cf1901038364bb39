//! Looks after the tasks of an agent that no call follows.
//!
//! - A question that is not answered in time expires, and its task is canceled at the agent.
//! - When a replica is gone, one of the others adopts each of its open tasks and follows it.
//! - A change of a task that the store did not confirm is written and published when the store responds.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};
use tokio::time::{Instant, MissedTickBehavior};
use uuid::Uuid;

use super::Dispatcher;
use crate::action::adoption::{AbandonedTask, AdoptedLog};
use crate::action::progress::NoProgress;
use crate::action::request::CallOptions;
use crate::events::log::AgentLog;
use crate::events::logged::Logged;
use crate::events::resume::{self, ResumedRun};
use crate::events::store::LogUnavailable;
use crate::files::{CallFiles, FileMode};
use crate::reply::error::ActionError;
use crate::state::StoreUnavailable;
use crate::state::follow_ups::UnsettledQuestion;
use crate::state::peers::{Death, InstanceId, Liveness, RETURN_GRACE};
use crate::state::run_link::RunLink;
use crate::state::tasks::TaskOutline;

/// How often expired questions are looked for.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(500);
/// How often a replica checks whether to search.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// A search of the store for tasks of replicas that are gone reads all tasks of the agent, so it is rare: it comes at the
/// start, when the store is available again, and this long after a replica was noticed to be gone, for what was written or
/// could not be adopted meanwhile. Then the pause doubles up to the maximum.
const SEARCH_PAUSE: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));
/// Replicas wait for a random part of this before they search a store that is available again.
const SEARCH_JITTER: Duration = Duration::from_secs(3);
/// Pause before the tasks of a replica that is gone are read again, because the store did not return all of them. It doubles
/// up to the maximum.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// How often changes are written that the store has not confirmed.
const LATE_WRITE_INTERVAL: Duration = Duration::from_millis(500);
/// Only a process of its replica knows the task of a launched agent, and that replica may only have lost its
/// connection. After this time the task counts as lost.
const LOCAL_TASK_GRACE: Duration = RETURN_GRACE;
/// Replicas wait for a random part of this before they adopt tasks, so that they do not all try the same ones.
const JITTER: Duration = Duration::from_millis(300);
/// Maximum number of tasks whose adoption waits for the store at the same time.
const ADOPTIONS_AT_A_TIME: usize = 32;
/// Maximum number of tasks that a replica adopts from another one at a time; the next attempt finds the rest.
const MAX_ADOPTED: usize = 10_000;
/// Maximum number of questions of these tasks that are read.
const MAX_QUESTIONS: usize = 2 * MAX_ADOPTED;
/// Attempts to read the log of an adopted task, and the pause after the first; later ones are longer.
const RESUME_ATTEMPTS: u32 = 5;
const RESUME_PAUSE: Duration = Duration::from_millis(500);
/// Maximum number of tasks that are canceled at the same time because their question expired.
const CANCELS_AT_A_TIME: usize = 16;

/// Runs until the dispatcher is dropped or `deaths` ends.
pub(crate) async fn run(dispatcher: Weak<Dispatcher>, deaths: broadcast::Receiver<Death>) {
    // Apart from each other: an agent may take long to cancel tasks.
    tokio::select! {
        () = write_late(&dispatcher) => {}
        () = cancel_expired(&dispatcher) => {}
        () = adopt_from_gone(&dispatcher, deaths) => {}
    }
}

async fn write_late(dispatcher: &Weak<Dispatcher>) {
    loop {
        tokio::time::sleep(LATE_WRITE_INTERVAL).await;
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        dispatcher.actions.write_late().await;
    }
}

async fn cancel_expired(dispatcher: &Weak<Dispatcher>) {
    let mut ticks = tokio::time::interval(EXPIRY_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        dispatcher.cancel_expired().await;
    }
}

async fn adopt_from_gone(dispatcher: &Weak<Dispatcher>, mut deaths: broadcast::Receiver<Death>) {
    let mut checks = tokio::time::interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut searches = Searches::new(Instant::now());
    let mut gone = GoneReplicas::default();
    loop {
        tokio::select! {
            _ = checks.tick() => {}
            death = deaths.recv() => match death {
                Ok(death) => {
                    gone.add(death.instance, Instant::now());
                    searches.hasten(Instant::now());
                }
                Err(broadcast::error::RecvError::Lagged(_)) => searches.retry(Instant::now()),
                Err(broadcast::error::RecvError::Closed) => return,
            },
        };
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        let state = &dispatcher.actions.state;
        if searches.is_due(state.is_shared() && state.store().is_available(), Instant::now()) {
            match dispatcher.dead_owners().await {
                Ok(owners) => {
                    searches.retry_pause = RETRY_PAUSE.0;
                    owners.into_iter().for_each(|owner| gone.add(owner, Instant::now()));
                }
                Err(StoreUnavailable) => searches.retry(Instant::now()),
            }
        }
        for (from, local) in gone.due(Instant::now()) {
            let is_wanted = match state.peers.liveness(from).await {
                Liveness::Dead => true,
                // It may still come back. What every replica knows does not wait for that.
                Liveness::Unreachable => !local,
                Liveness::Alive => false,
            };
            match is_wanted {
                true => gone.tried(from, local, dispatcher.adopt(from, local).await, Instant::now()),
                false => gone.forget(from, local),
            }
        }
    }
}

/// What a replica has found of the tasks of another one that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Adoption {
    /// Whether there are tasks that only a process of that replica knew.
    has_local: bool,
    /// Whether the store has returned all tasks.
    is_complete: bool,
}

/// Questions that are not settled.
#[derive(Debug, Default)]
struct Questions {
    by_task: HashMap<String, Vec<UnsettledQuestion>>,
    /// The follow-up ids and tasks to which a replica that is gone was sending an answer.
    answered: Vec<(Uuid, String)>,
}

/// The replicas that are gone, and when to adopt their tasks.
#[derive(Debug, Default)]
struct GoneReplicas {
    /// Whose tasks other replicas' agents know.
    shared: HashMap<InstanceId, Attempt>,
    /// That launched an agent, and whose tasks count as lost at the time of the attempt.
    local: HashMap<InstanceId, Attempt>,
}

#[derive(Debug, Clone, Copy)]
struct Attempt {
    /// When the replica was noticed to be gone.
    since: Instant,
    at: Instant,
    /// Before the attempt after this one.
    pause: Duration,
}

impl GoneReplicas {
    fn add(&mut self, instance: InstanceId, now: Instant) {
        self.shared.entry(instance).or_insert(Attempt { since: now, at: now, pause: RETRY_PAUSE.0 });
    }

    /// Those whose tasks are to be adopted now, and whether these are the local ones.
    fn due(&self, now: Instant) -> Vec<(InstanceId, bool)> {
        let due = |attempts: &HashMap<InstanceId, Attempt>, local| {
            let due = attempts.iter().filter(|(_, attempt)| attempt.at <= now);
            due.map(|(instance, _)| (*instance, local)).collect::<Vec<_>>()
        };
        [due(&self.shared, false), due(&self.local, true)].concat()
    }

    fn tried(&mut self, instance: InstanceId, local: bool, adoption: Adoption, now: Instant) {
        let attempts = if local { &mut self.local } else { &mut self.shared };
        let Some(attempt) = attempts.get_mut(&instance) else { return };
        let since = attempt.since;
        match adoption.is_complete {
            true => drop(attempts.remove(&instance)),
            false => {
                attempt.at = now + attempt.pause;
                attempt.pause = (2 * attempt.pause).min(RETRY_PAUSE.1);
            }
        }
        if adoption.has_local && !local {
            // However late they were found.
            let at = since + LOCAL_TASK_GRACE;
            self.local.entry(instance).or_insert(Attempt { since, at, pause: RETRY_PAUSE.0 });
        }
    }

    fn forget(&mut self, instance: InstanceId, local: bool) {
        if local {
            self.local.remove(&instance)
        } else {
            self.shared.remove(&instance)
        };
    }
}

/// When to search the store for tasks of replicas that are gone.
#[derive(Debug)]
struct Searches {
    next: Instant,
    /// Before the search after the next one.
    pause: Duration,
    /// Before a search that has failed is repeated.
    retry_pause: Duration,
    is_store_available: bool,
}

impl Searches {
    fn new(now: Instant) -> Self {
        Self { next: now, pause: SEARCH_PAUSE.0, retry_pause: RETRY_PAUSE.0, is_store_available: false }
    }

    /// Searches soon, and more often for a while.
    fn hasten(&mut self, now: Instant) {
        self.pause = SEARCH_PAUSE.0;
        self.next = self.next.min(now + self.pause);
    }

    /// Searches again, because a search has failed or deaths were missed.
    fn retry(&mut self, now: Instant) {
        self.hasten(now);
        self.next = self.next.min(now + self.retry_pause);
        self.retry_pause = (2 * self.retry_pause).min(SEARCH_PAUSE.0);
    }

    /// Whether to search now.
    fn is_due(&mut self, is_store_available: bool, now: Instant) -> bool {
        if is_store_available && !std::mem::replace(&mut self.is_store_available, is_store_available) {
            self.hasten(now);
            self.next = self.next.min(now + SEARCH_JITTER.mul_f64(fastrand::f64()));
        }
        self.is_store_available = is_store_available;
        if !is_store_available || now < self.next {
            return false;
        }
        // So that replicas do not all search at the same time.
        self.next = now + self.pause.mul_f64(0.75 + fastrand::f64() / 2.0);
        self.pause = (2 * self.pause).min(SEARCH_PAUSE.1);
        true
    }
}

impl Dispatcher {
    /// Cancels the tasks whose question was not answered in time.
    async fn cancel_expired(&self) {
        let expired = self.actions.state.take_expired(&self.agent.name).await;
        let cancel = |question: crate::state::follow_ups::OpenQuestion| async move {
            let options = CallOptions { caller: question.caller, ..CallOptions::default() };
            self.abandon_task(&question.task_id, &options).await;
        };
        futures_util::stream::iter(expired).for_each_concurrent(CANCELS_AT_A_TIME, cancel).await;
    }

    /// The replicas that are gone and still own tasks of the agent, or were sending an answer to one.
    async fn dead_owners(&self) -> Result<Vec<InstanceId>, StoreUnavailable> {
        let state = &self.actions.state;
        let owners =
            state.tasks.foreign(&self.agent.name).try_fold(HashSet::new(), async |mut owners, (_, task)| {
                owners.insert(task.owner);
                Ok(owners)
            });
        let mut owners = owners.await?;
        let mut questions = std::pin::pin!(state.follow_ups.unsettled(&self.agent.name));
        while let Some(question) = questions.try_next().await? {
            owners.extend(question.sender);
        }
        let mut dead = Vec::new();
        for owner in owners {
            if state.peers.liveness(owner).await == Liveness::Dead {
                dead.push(owner);
            }
        }
        Ok(dead)
    }

    /// Adopts the open tasks of a replica that is gone: those that other replicas' agents know, or, with `local`, those
    /// that only a process of that replica knew. If the store does not return all of them, those that it has returned are
    /// adopted.
    async fn adopt(self: &Arc<Self>, from: InstanceId, local: bool) -> Adoption {
        let state = &self.actions.state;
        let mut adoption = Adoption { has_local: false, is_complete: true };
        if !state.is_shared() {
            return adoption;
        }
        tokio::time::sleep(JITTER.mul_f64(fastrand::f64())).await;
        let mut found = self.left_by(from, local, &mut adoption).await;
        let mut questions = match local && found.is_empty() {
            true => Questions::default(),
            false => self.questions_of(from, &found, &mut adoption).await,
        };
        if !local {
            let answered = std::mem::take(&mut questions.answered);
            found.extend(self.answered_by(from, answered, &mut adoption).await);
        }
        fastrand::shuffle(&mut found);
        if !found.is_empty() {
            let (agent, tasks) = (&self.agent.name, found.len());
            tracing::info!(%agent, tasks, replica = %from, "adopting the tasks of a replica that is gone");
        }
        let admissions = Arc::new(Semaphore::new(ADOPTIONS_AT_A_TIME));
        for (id, outline) in found {
            let Ok(admission) = Arc::clone(&admissions).acquire_owned().await else { break };
            let questions = questions.by_task.remove(&id).unwrap_or_default();
            self.follow_adopted(AbandonedTask { id, outline, questions }, admission);
        }
        adoption
    }

    /// The tasks of a replica that is gone, up to the number that is adopted at a time.
    async fn left_by(
        &self,
        from: InstanceId,
        local: bool,
        adoption: &mut Adoption,
    ) -> Vec<(String, TaskOutline)> {
        let mut found = Vec::new();
        let mut tasks = std::pin::pin!(self.actions.state.tasks.foreign(&self.agent.name));
        while let Some(task) = tasks.next().await {
            match task {
                Ok((_, task)) if task.owner != from => {}
                Ok((_, task)) if task.is_local != local => adoption.has_local |= task.is_local,
                Ok(task) if found.len() < MAX_ADOPTED => found.push(task),
                Ok(_) | Err(StoreUnavailable) => {
                    adoption.is_complete = false;
                    break;
                }
            }
        }
        found
    }

    /// The questions of a replica that is gone, and of the tasks that it left. One scan is enough for all tasks.
    async fn questions_of(
        &self,
        from: InstanceId,
        tasks: &[(String, TaskOutline)],
        adoption: &mut Adoption,
    ) -> Questions {
        let tasks: HashSet<&str> = tasks.iter().map(|(id, _)| id.as_str()).collect();
        let (mut found, mut count) = (Questions::default(), 0);
        let mut questions = std::pin::pin!(self.actions.state.follow_ups.unsettled(&self.agent.name));
        while let Some(question) = questions.next().await {
            let question = match question {
                Ok(question) if count < MAX_QUESTIONS => question,
                Ok(_) | Err(StoreUnavailable) => {
                    adoption.is_complete = false;
                    break;
                }
            };
            let is_answered = question.sender == Some(from);
            if !is_answered && question.owner != from && !tasks.contains(&*question.task_id) {
                continue;
            }
            count += 1;
            if is_answered {
                found.answered.push((question.id, question.task_id.clone()));
            }
            found.by_task.entry(question.task_id.clone()).or_default().push(question);
        }
        found
    }

    /// Waiting tasks to which a replica was sending an answer when it died, by the follow-up ids of these answers. Their
    /// owner does not follow them, because it waits for an answer. If a task has gone on, the answer was used.
    async fn answered_by(
        &self,
        from: InstanceId,
        answered: Vec<(Uuid, String)>,
        adoption: &mut Adoption,
    ) -> Vec<(String, TaskOutline)> {
        let (state, agent) = (&self.actions.state, &self.agent.name);
        let check = |(id, task_id): (Uuid, String)| async move {
            match state.tasks.find_current(agent, &task_id).await? {
                Some(task) if task.follow_up.as_ref().is_some_and(|named| named.id == id) => {
                    Ok((task.owner != from || task.is_local).then_some((task_id, task)))
                }
                _ => state.follow_ups.adopt(agent, &id, from).await.map(|_| None),
            }
        };
        let mut found = Vec::new();
        let mut checked =
            futures_util::stream::iter(answered).map(check).buffer_unordered(ADOPTIONS_AT_A_TIME);
        while let Some(checked) = checked.next().await {
            match checked {
                Ok(Some((_, task))) if task.is_local => adoption.has_local = true,
                Ok(task) => found.extend(task),
                Err::<_, ActionError>(_) => adoption.is_complete = false,
            }
        }
        found
    }

    /// Adopts a task, follows it to its end, and continues its log.
    async fn adopt_task(&self, task: AbandonedTask, admission: OwnedSemaphorePermit) {
        let Some(record) = self.actions.adopt_task(&task, admission).await else { return };
        let options = CallOptions { caller: record.caller.clone(), ..CallOptions::default() };
        let log = self.log.as_ref().zip(record.run.clone());
        let resumed = match log {
            Some((log, link)) => self.resume_log(log, &options, &link).await.map(|resumed| (log, resumed)),
            None => None,
        };
        // The log of a question is complete. Its answer is another call.
        let resumed = resumed.filter(|(_, resumed)| !resumed.has_ended);
        let (mut inner, count) = (NoProgress, || self.agent.calls.follow());
        let Some((log, resumed)) = resumed else {
            let logged = AdoptedLog { progress: &mut inner, link: None, reported: Vec::new() };
            let followed = self.actions.follow_adopted_task(task, record, logged, count);
            Box::pin(followed).await;
            return;
        };
        let ResumedRun { run, reported, .. } = resumed;
        CallFiles::use_references();
        let link = Some(Arc::clone(run.link()));
        let mut progress = Logged::resumed(&mut inner, log, &options, run);
        let adopted = AdoptedLog { progress: &mut progress, link, reported };
        let followed = self.actions.follow_adopted_task(task, record, adopted, count);
        let reply = Box::pin(followed).await;
        if let Some(reply) = reply {
            progress.end(&reply).await;
        }
    }

    /// Reads the log of a call whose replica is gone. `None` if it cannot be read for a while.
    async fn resume_log(&self, log: &AgentLog, options: &CallOptions, link: &RunLink) -> Option<ResumedRun> {
        let max_size = usize::try_from(self.agent.config.max_response_size).unwrap_or(usize::MAX);
        for attempt in 0..RESUME_ATTEMPTS {
            match resume::adopted(log, &options.caller, link, max_size).await {
                Ok(resumed) => return Some(resumed),
                Err(LogUnavailable) => tokio::time::sleep(RESUME_PAUSE * (attempt + 1)).await,
            }
        }
        tracing::warn!(agent = %self.agent.name, run = %link.run, "cannot read the log of an adopted task; it stays incomplete");
        None
    }

    fn follow_adopted(self: &Arc<Self>, task: AbandonedTask, admission: OwnedSemaphorePermit) {
        let dispatcher = Arc::clone(self);
        self.calls.spawn(async move {
            let follow = async {
                let files = dispatcher.call_files(&task.outline.caller, FileMode::default());
                CallFiles::scope_of(files, dispatcher.adopt_task(task, admission)).await;
                Ok(())
            };
            // An error is a panic, which is logged.
            let _ = dispatcher.guarded(follow).await;
        });
    }
}
