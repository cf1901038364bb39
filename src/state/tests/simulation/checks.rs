//! What must hold when everything works again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::super::super::RecordKey;
use super::super::super::RecordKind;
use super::super::super::peers::ClaimStatus;
use super::callers::{answer_once, is_submitted, look_up, place};
use super::replica::task_id;
use super::world::World;
use crate::a2a::model::TaskState;
use crate::reply::error::Code;

/// Rounds of answers after the faults.
const ROUNDS: usize = 12;

fn record(world: &World, kind: RecordKind, id: &str) -> Option<Value> {
    let key = RecordKey::new(&"agent".into(), id);
    let record = world.records.lock().unwrap().read(kind, &key)?;
    let value: Value = serde_json::from_slice(&record.value).ok()?;
    Some(value["record"].clone())
}

fn task_state(world: &World, task: usize) -> Option<TaskState> {
    let record = record(world, RecordKind::Task, &task_id(task))?;
    record["task"]["state"].as_str().map(TaskState::parse)
}

fn submitted(world: &World) -> Vec<usize> {
    let tasks = world.agent.lock().unwrap();
    let begun = tasks.iter().enumerate().filter(|(task, found)| found.is_begun && is_submitted(*task));
    // The replica may have crashed before it told anybody about the task.
    let is_known = |task: &usize| record(world, RecordKind::Task, &task_id(*task)).is_some();
    begun.map(|(task, _)| task).filter(is_known).collect()
}

/// Every submitted task that has ended at the agent is recorded as ended, though nobody has looked it up.
pub(super) fn tasks_are_followed(world: &World) {
    // A request that is dropped no longer follows the task that it has answered.
    if world.counts().0.contains_key("abandoned answers") {
        return;
    }
    for task in submitted(world).into_iter().filter(|task| world.is_final_at_agent(*task)) {
        let state = task_state(world, task);
        if !state.as_ref().is_some_and(TaskState::is_final) && world.had_false_deaths() {
            // The replica that has seen the end is not the owner any more. The next look-up records it.
            world.count("tasks that have ended without a record, after a false death");
        } else if !state.as_ref().is_some_and(TaskState::is_final) {
            world.violation(format!("task {task} has ended at the agent, but its record says {state:?}"));
        }
    }
}

/// Answers everything that can be answered, until all submitted tasks have ended.
pub(super) async fn answer_the_rest(world: &Arc<World>) {
    let mut lookup_errors = BTreeMap::new();
    let open =
        || submitted(world).into_iter().filter(|task| !world.is_final_at_agent(*task)).collect::<Vec<_>>();
    for _ in 0..ROUNDS {
        if open().is_empty() {
            break;
        }
        for task in open() {
            match look_up(world, task).await {
                Some(Ok(Some(id))) => drop(answer_once(world, id).await),
                Some(Ok(None)) => {}
                Some(Err(error)) => drop(lookup_errors.insert(task, error.message.clone())),
                None => {}
            }
        }
        tokio::time::sleep(Duration::from_secs(9)).await;
    }
    for task in open() {
        let ids = world.issued.lock().unwrap().clone();
        if ids.iter().any(|issued| issued.task == task && world.is_expired(issued.id)) {
            // Its question has expired. The cancel at the agent is tried once.
            world.count("tasks whose question expired and whose cancel failed");
            continue;
        }
        let errors = lookup_errors.get(&task);
        world
            .violation(format!("question lost: task {task} still waits for an answer; look-ups: {errors:?}"));
    }
}

/// An id that a caller knows, and to which nothing was sent, can be answered.
pub(super) async fn ids_are_valid(world: &Arc<World>) {
    let told = world.issued.lock().unwrap().clone();
    for issued in told.into_iter().filter(|issued| issued.is_told) {
        let id = issued.id;
        let was_sent = world.was_sent(id);
        let asks = world
            .get_task(issued.task)
            .await
            .is_some_and(|seen| seen.fingerprint == Some(issued.fingerprint.clone()));
        if was_sent || !asks || world.is_expired(id) || world.is_lost(id) {
            continue;
        }
        let mut replies = Vec::new();
        for _ in 0..6 {
            match answer_once(world, id).await {
                Some(Ok(())) => break,
                reply => replies.push(reply),
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        // A replica that others considered dead has told a caller an id that it could not write. The one that adopted the
        // task had to give the question another id.
        let is_used = matches!(replies.last(), Some(Some(Err(Code::FollowUpUsed | Code::FollowUpExpired))));
        if replies.len() == 6 && is_used && world.had_false_deaths() {
            world.count("ids that were replaced after a false death");
        } else if replies.len() == 6 {
            let (name, fingerprint) = (world.name(id), issued.fingerprint);
            world.violation(format!(
                "question lost: {name} for {fingerprint} cannot be answered: {replies:?}"
            ));
        }
        world.count("ids answered after the faults");
    }
}

/// Records of follow-ups say what has happened, and no claim is left behind by a replica that runs.
pub(super) fn follow_ups_are_settled(world: &World) {
    let issued = world.issued.lock().unwrap().clone();
    for issued in issued.into_iter().filter(|issued| issued.is_told) {
        let id = issued.id;
        let name = world.name(id);
        let Some(record) = record(world, RecordKind::FollowUp, &id.simple().to_string()) else {
            match world.is_lost(id) {
                true => world.count("ids lost with a replica before the store had them"),
                false => world.violation(format!("the record of {name} is missing")),
            }
            continue;
        };
        let state = &record["state"];
        let was_sent = world.was_sent(id);
        match state["is"].as_str().unwrap_or_default() {
            // After a false death, another replica had to assume that the answer was sent, because the claim said so.
            "used" if !was_sent && !world.had_false_deaths() => {
                world.violation(format!("{name} is used, but nothing was sent"));
            }
            // Nothing was sent, and the next answer takes over such a claim. It is left behind by a request that was dropped
            // while the store did not confirm its write.
            "answering" => world.count("claims that were left behind before anything was sent"),
            "sending" => {
                let uuid = |name: &str| state[name].as_str().and_then(|id| Uuid::try_parse(id).ok());
                let holder = uuid("by").and_then(|by| world.index_of(by)).and_then(|by| world.state(by));
                let nonce = uuid("nonce").unwrap_or_default();
                if holder.is_some_and(|holder| holder.follow_ups.claim_status(nonce) == ClaimStatus::Ended) {
                    world.violation(format!("{name} is left in {state} by a replica that runs"));
                }
            }
            "expired" if !world.is_final_at_agent(issued.task) && !world.is_expired(id) => {
                // An id that was replaced by another one for the same question expires, too.
                world.count("ids that expired because another one was recorded");
            }
            _ => {}
        }
    }
}

/// The changes of each task were published in order, each once, and again only after a crash.
pub(super) fn updates_are_in_order(world: &World) {
    let published = world.published.lock().unwrap().clone();
    for task in submitted(world) {
        let of_task: Vec<_> = published.iter().filter(|update| update.task == task).collect();
        let mut contents: BTreeMap<u64, BTreeSet<&str>> = BTreeMap::new();
        let mut last_of: BTreeMap<usize, u64> = BTreeMap::new();
        let (mut repeated, mut last) = (false, 0);
        for update in &of_task {
            repeated |= contents.contains_key(&update.revision);
            contents.entry(update.revision).or_default().insert(&update.content);
            let previous = last_of.insert(update.by, update.revision).unwrap_or(0);
            if previous > update.revision {
                let text = format!(
                    "task {task}: replica {} published {} after {previous}",
                    update.by, update.revision
                );
                world.violation(text);
            }
            if update.revision < last {
                // The former owner may still have updates in its queue when another replica has answered.
                world.count("updates published after a later one of another replica");
            }
            last = update.revision;
        }
        let list = || {
            of_task.iter().map(|update| (update.revision, update.by, &*update.content)).collect::<Vec<_>>()
        };
        if repeated {
            world.count("tasks with repeated updates");
            if !world.had_deaths() {
                world.violation(format!("task {task}: an update was repeated without a crash: {:?}", list()));
            }
        }
        if contents.values().any(|contents| contents.len() > 1) {
            world.violation(format!("task {task}: two contents of one revision: {:?}", list()));
        }
        let highest = contents.keys().max().copied().unwrap_or(0);
        if (1..=highest).any(|revision| !contents.contains_key(&revision)) {
            world.count("tasks with a missing update");
            if !world.had_crashes() {
                world.violation(format!("task {task}: an update is missing: {:?}", list()));
            }
        }
        let ended = task_state(world, task).filter(TaskState::is_final);
        let ends = ["COMPLETED", "CANCELED", "error"];
        if let Some(state) = ended
            && !contents.iter().any(|(revision, contents)| {
                *revision == highest
                    && contents.iter().any(|content| ends.iter().any(|end| content.starts_with(end)))
            })
        {
            world.violation(format!("task {task}: it is {state}, but that was not published: {:?}", list()));
        }
    }
}

/// Nothing waits to be written.
pub(super) fn writes_are_flushed(world: &World) {
    for replica in world.running().into_iter().filter_map(|index| world.replica(index)) {
        let waiting = replica.store.waiting();
        if waiting > 0 {
            world.violation(format!("{waiting} writes of replica {} still wait", replica.index));
        }
    }
}

/// All replicas send a session to the same place.
pub(super) async fn sessions_agree(world: &Arc<World>) {
    for number in 0..world.mix.sessions {
        let mut places = Vec::new();
        for replica in world.running().into_iter().filter_map(|index| world.replica(index)) {
            let index = replica.index;
            let place = world.call(index, async move { place(&replica, number).await }).await;
            places.push(place.unwrap_or(Err(Code::Timeout)));
        }
        let distinct: BTreeSet<_> = places.iter().map(|place| format!("{place:?}")).collect();
        if distinct.len() > 1 {
            world.violation(format!("session {number} has several places: {places:?}"));
        }
    }
}
