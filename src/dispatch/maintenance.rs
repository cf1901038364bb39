//! Looks after the tasks of an agent that no call follows.
//!
//! - A question that is not answered in time expires, and its task is canceled at the agent.
//! - When a replica is gone, one of the others adopts each of its open tasks and follows it.
//! - A change of a task that the store did not confirm is written and published when the store responds.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use tokio::sync::broadcast;
use tokio::time::{Instant, MissedTickBehavior};

use super::Dispatcher;
use crate::action::adoption::AdoptedLog;
use crate::action::progress::NoProgress;
use crate::action::request::CallOptions;
use crate::events::log::AgentLog;
use crate::events::logged::Logged;
use crate::events::resume::{self, ResumedRun};
use crate::events::store::LogUnavailable;
use crate::files::{CallFiles, FileMode};
use crate::state::StoreUnavailable;
use crate::state::follow_ups::SentAnswer;
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
/// How often changes are written that the store has not confirmed.
const LATE_WRITE_INTERVAL: Duration = Duration::from_millis(500);
/// Only a process of its replica knows the task of a launched agent, and that replica may only have lost its
/// connection. After this time the task counts as lost.
const LOCAL_TASK_GRACE: Duration = RETURN_GRACE;
/// Replicas wait for a random part of this before they adopt tasks, so that they do not all try the same ones.
const JITTER: Duration = Duration::from_millis(300);
/// Pause between two adoptions: at most 200 a second.
const ADOPTION_PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of tasks that a replica adopts from another one at a time; the next search finds the rest.
const MAX_ADOPTED: usize = 10_000;
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
    // Replicas that launched an agent and are gone, and when their tasks count as lost.
    let mut local_graces: Vec<(InstanceId, Instant)> = Vec::new();
    loop {
        let death = tokio::select! {
            _ = checks.tick() => None,
            death = deaths.recv() => match death {
                Ok(death) => Some(death.instance),
                Err(broadcast::error::RecvError::Lagged(_)) => {
                    searches.hasten(Instant::now());
                    None
                }
                Err(broadcast::error::RecvError::Closed) => return,
            },
        };
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        let mut dead: HashSet<InstanceId> = death.into_iter().collect();
        if !dead.is_empty() {
            searches.hasten(Instant::now());
        }
        let state = &dispatcher.actions.state;
        if searches.is_due(state.is_shared() && state.store().is_available(), Instant::now()) {
            match dispatcher.dead_owners().await {
                Ok(owners) => dead.extend(owners),
                Err(StoreUnavailable) => searches.hasten(Instant::now()),
            }
        }
        for from in dead {
            if dispatcher.adopt(from, false).await && !local_graces.iter().any(|(known, _)| *known == from) {
                local_graces.push((from, Instant::now() + LOCAL_TASK_GRACE));
            }
        }
        let now = Instant::now();
        for (from, _) in local_graces.extract_if(.., |(_, until)| *until <= now) {
            if dispatcher.actions.state.peers.liveness(from).await == Liveness::Dead {
                dispatcher.adopt(from, true).await;
            }
        }
    }
}

/// When to search the store for tasks of replicas that are gone.
#[derive(Debug)]
struct Searches {
    next: Instant,
    /// Before the search after the next one.
    pause: Duration,
    is_store_available: bool,
}

impl Searches {
    fn new(now: Instant) -> Self {
        Self { next: now, pause: SEARCH_PAUSE.0, is_store_available: false }
    }

    /// Searches soon, and more often for a while.
    fn hasten(&mut self, now: Instant) {
        self.pause = SEARCH_PAUSE.0;
        self.next = self.next.min(now + self.pause);
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
        let expired = self.actions.state.follow_ups.take_expired(&self.agent.name).await;
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
        let senders = state.follow_ups.sending(&self.agent.name).map_ok(|sent| sent.by);
        owners.extend(senders.try_collect::<HashSet<_>>().await?);
        let mut dead = Vec::new();
        for owner in owners {
            if state.peers.liveness(owner).await == Liveness::Dead {
                dead.push(owner);
            }
        }
        Ok(dead)
    }

    /// Adopts the open tasks of a replica that is gone: those that other replicas' agents know, or, with `local`, those
    /// that only a process of that replica knew. Returns whether there are tasks of the latter kind.
    async fn adopt(self: &Arc<Self>, from: InstanceId, local: bool) -> bool {
        let state = &self.actions.state;
        if !state.is_shared() {
            return false;
        }
        tokio::time::sleep(JITTER.mul_f64(fastrand::f64())).await;
        let found = state
            .tasks
            .foreign(&self.agent.name)
            .try_filter(|(_, task)| std::future::ready(task.owner == from));
        let found: Result<Vec<_>, _> = found.take(MAX_ADOPTED).try_collect().await;
        let Ok(mut found) = found else { return false };
        if !local {
            found.extend(self.answered_by(from).await);
        }
        let has_local = found.iter().any(|(_, task)| task.is_local);
        found.retain(|(_, task)| task.is_local == local);
        fastrand::shuffle(&mut found);
        if !found.is_empty() {
            let (agent, tasks) = (&self.agent.name, found.len());
            tracing::info!(%agent, tasks, replica = %from, "adopting the tasks of a replica that is gone");
        }
        for (task_id, outline) in found {
            let owner = outline.owner;
            self.follow_adopted(task_id, outline, owner);
            tokio::time::sleep(ADOPTION_PAUSE).await;
        }
        has_local
    }

    /// Waiting tasks to which a replica was sending an answer when it died. Their owner does not follow them, because it
    /// waits for an answer. If a task has gone on, the answer was used.
    async fn answered_by(&self, from: InstanceId) -> Vec<(String, TaskOutline)> {
        let state = &self.actions.state;
        let sending = state.follow_ups.sending(&self.agent.name);
        let sending = sending.try_filter(|sent| std::future::ready(sent.by == from));
        let Ok(sending) = sending.take(MAX_ADOPTED).try_collect::<Vec<_>>().await else { return Vec::new() };
        let mut found = Vec::new();
        for SentAnswer { id, task_id, .. } in sending {
            let Ok(task) = state.tasks.find_current(&self.agent.name, &task_id).await else { continue };
            match task {
                Some(task) if task.follow_up.as_ref().is_some_and(|named| named.id == id) => {
                    if task.owner != from {
                        found.push((task_id, task));
                    }
                }
                // After an error, the next search finds it again.
                _ => drop(state.follow_ups.adopt(&self.agent.name, &id, from).await),
            }
        }
        found
    }

    /// Adopts a task, follows it to its end, and continues its log.
    async fn adopt_task(&self, task_id: &str, outline: &TaskOutline, from: InstanceId) {
        let Some(record) = self.actions.adopt_task(task_id, from).await else { return };
        let options = CallOptions { caller: record.caller.clone(), ..CallOptions::default() };
        let log = self.log.as_ref().zip(record.run.clone());
        let resumed = match log {
            Some((log, link)) => self.resume_log(log, &options, &link).await.map(|resumed| (log, resumed)),
            None => None,
        };
        // The log of a question is complete. Its answer is another call.
        let resumed = resumed.filter(|(_, resumed)| !resumed.has_ended);
        let mut inner = NoProgress;
        let Some((log, resumed)) = resumed else {
            let logged = AdoptedLog { progress: &mut inner, link: None, reported: Vec::new() };
            let followed = self.actions.follow_adopted_task(task_id, record, outline, from, logged);
            Box::pin(followed).await;
            return;
        };
        let ResumedRun { run, reported, .. } = resumed;
        CallFiles::use_references();
        let link = Some(Arc::clone(run.link()));
        let mut progress = Logged::resumed(&mut inner, log, &options, run);
        let adopted = AdoptedLog { progress: &mut progress, link, reported };
        let followed = self.actions.follow_adopted_task(task_id, record, outline, from, adopted);
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

    fn follow_adopted(self: &Arc<Self>, task_id: String, outline: TaskOutline, from: InstanceId) {
        let dispatcher = Arc::clone(self);
        self.calls.spawn(async move {
            let follow = async {
                let files = dispatcher.call_files(&outline.caller, FileMode::default());
                CallFiles::scope_of(files, dispatcher.adopt_task(&task_id, &outline, from)).await;
                Ok(())
            };
            // An error is a panic, which is logged.
            let _ = dispatcher.guarded(follow).await;
        });
    }
}
