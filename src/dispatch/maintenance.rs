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
use crate::action::request::CallOptions;
use crate::state::follow_ups::SentAnswer;
use crate::state::peers::{Death, InstanceId, Liveness};
use crate::state::tasks::TaskOutline;

/// How often expired questions are looked for.
const EXPIRY_INTERVAL: Duration = Duration::from_millis(500);
/// How often changes are written that the store has not confirmed.
const LATE_WRITE_INTERVAL: Duration = Duration::from_millis(500);
/// How often the store is searched for tasks of replicas that are gone, besides when one is noticed to be gone.
const SCAN_INTERVAL: Duration = Duration::from_secs(30);
/// Only a process of its replica knows the task of a launched agent, and that replica may only have lost its
/// connection. After this time the task counts as lost.
const LOCAL_TASK_GRACE: Duration = Duration::from_secs(60);
/// Replicas wait for a random part of this before they adopt tasks, so that they do not all try the same ones.
const JITTER: Duration = Duration::from_millis(300);
/// Pause between two adoptions: at most 200 a second.
const ADOPTION_PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of tasks that a replica adopts from another one at a time; the next search finds the rest.
const MAX_ADOPTED: usize = 10_000;
/// Maximum number of tasks that are canceled at the same time because their question expired.
const CANCELS_AT_A_TIME: usize = 16;

/// Runs until the dispatcher is dropped or `deaths` ends.
pub(crate) async fn run(dispatcher: Weak<Dispatcher>, deaths: broadcast::Receiver<Death>) {
    tokio::select! {
        () = write_late(dispatcher.clone()) => {}
        () = expire_and_adopt(dispatcher, deaths) => {}
    }
}

async fn write_late(dispatcher: Weak<Dispatcher>) {
    loop {
        tokio::time::sleep(LATE_WRITE_INTERVAL).await;
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        dispatcher.actions.write_late().await;
    }
}

async fn expire_and_adopt(dispatcher: Weak<Dispatcher>, mut deaths: broadcast::Receiver<Death>) {
    let mut expiry = tokio::time::interval(EXPIRY_INTERVAL);
    let mut scan = tokio::time::interval(SCAN_INTERVAL);
    for interval in [&mut expiry, &mut scan] {
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    // Replicas that launched an agent and are gone, and when their tasks count as lost.
    let mut local_graces: Vec<(InstanceId, Instant)> = Vec::new();
    loop {
        let death = tokio::select! {
            _ = expiry.tick() => None,
            death = deaths.recv() => match death {
                Ok(death) => Some(death.instance),
                // The next search finds what was missed.
                Err(broadcast::error::RecvError::Lagged(_)) => None,
                Err(broadcast::error::RecvError::Closed) => return,
            },
        };
        let Some(dispatcher) = dispatcher.upgrade() else { return };
        dispatcher.cancel_expired().await;
        let mut dead: HashSet<InstanceId> = death.into_iter().collect();
        if futures_util::poll!(std::pin::pin!(scan.tick())).is_ready() {
            dead.extend(dispatcher.dead_owners().await);
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
    async fn dead_owners(&self) -> Vec<InstanceId> {
        let state = &self.actions.state;
        if !state.is_shared() {
            return Vec::new();
        }
        let owners =
            state.tasks.foreign(&self.agent.name).try_fold(HashSet::new(), async |mut owners, (_, task)| {
                owners.insert(task.owner);
                Ok(owners)
            });
        // While the store is unavailable nothing can be adopted.
        let senders = state.follow_ups.sending(&self.agent.name).map_ok(|sent| sent.by);
        let (Ok(mut owners), Ok(senders)) = (owners.await, senders.try_collect::<HashSet<_>>().await) else {
            return Vec::new();
        };
        owners.extend(senders);
        let mut dead = Vec::new();
        for owner in owners {
            if state.peers.liveness(owner).await == Liveness::Dead {
                dead.push(owner);
            }
        }
        dead
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

    fn follow_adopted(self: &Arc<Self>, task_id: String, outline: TaskOutline, from: InstanceId) {
        let dispatcher = Arc::clone(self);
        self.calls.spawn(async move {
            let follow = async {
                dispatcher.actions.adopt_task(&task_id, &outline, from).await;
                Ok(())
            };
            // An error is a panic, which is logged.
            let _ = dispatcher.guarded(follow).await;
        });
    }
}
