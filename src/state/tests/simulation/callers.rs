//! Those who use the replicas: they begin tasks, answer questions, and repeat requests.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use uuid::Uuid;

use super::super::super::idempotency::Reservation;
use super::super::super::sessions::{SessionId, SessionPlace};
use super::super::{free, outcome};
use super::executor::Owner;
use super::replica::{Replica, agent_unavailable};
use super::world::World;
use crate::a2a::model::TaskState;
use crate::caller::Caller;
use crate::reply::error::{ActionError, Code};

/// Whether the changes of a task are published.
pub(super) fn is_submitted(task: usize) -> bool {
    task % 3 != 2
}

/// Polls a request a few times and drops it then, like a caller whose request is gone.
async fn abandoned<T>(request: impl Future<Output = T>, polls: usize) -> Option<T> {
    let (mut request, mut left) = (Box::pin(request), polls);
    std::future::poll_fn(move |context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        request.as_mut().poll(context).map(Some)
    })
    .await
}

/// Begins a task, and answers its questions.
pub(super) async fn use_task(world: Arc<World>, task: usize) {
    tokio::time::sleep(world.millis(0..3000)).await;
    begin(&world, task);
    let mut answered: BTreeSet<Uuid> = BTreeSet::new();
    while !world.is_healed() {
        tokio::time::sleep(world.millis(300..2000)).await;
        if !world.agent.lock().unwrap()[task].is_begun && world.per_mille(200) {
            begin(&world, task);
        }
        if is_submitted(task) && world.per_mille(150) {
            look_up(&world, task).await;
        }
        let open: Vec<Uuid> = {
            let issued = world.issued.lock().unwrap();
            let told = issued
                .iter()
                .filter(|issued| issued.task == task && issued.is_told && !answered.contains(&issued.id));
            told.map(|issued| issued.id).collect()
        };
        for id in open {
            answered.insert(id);
            if world.per_mille(200) {
                // Nobody answers for now.
                continue;
            }
            for _ in 0..=world.below(3) {
                world.spawner.spawn(Owner::World, answer_persistently(Arc::clone(&world), id));
            }
        }
    }
}

fn begin(world: &Arc<World>, task: usize) {
    let Some(replica) = world.any_running().and_then(|index| world.replica(index)) else { return };
    let this = Arc::clone(world);
    world.spawner.spawn(Owner::World, async move {
        let reply = this.call(replica.index, replica.begin(task, is_submitted(task))).await;
        // The caller of a submitted task gets the id from an update, or from a lookup.
        if let Some(Ok(outcome)) = reply
            && !is_submitted(task)
            && let Some(follow_up) = &outcome.follow_up
        {
            this.tell(follow_up.id);
        }
    });
}

/// Looks a task up at any replica.
pub(super) async fn look_up(world: &Arc<World>, task: usize) -> Option<Result<Option<Uuid>, ActionError>> {
    let replica = world.any_running().and_then(|index| world.replica(index))?;
    let reply = world.call(replica.index, replica.look_up(task, false, false)).await?;
    let follow_up = reply.map(|outcome| outcome.follow_up.as_ref().map(|known| known.id));
    if let Ok(Some(id)) = follow_up {
        world.tell(id);
    }
    Some(follow_up)
}

async fn answer_persistently(world: Arc<World>, id: Uuid) {
    tokio::time::sleep(world.millis(0..1500)).await;
    while !world.is_healed() {
        match answer_once(&world, id).await {
            Some(Ok(()) | Err(Code::OutcomeUnknown | Code::FollowUpExpired)) => return,
            Some(Err(Code::FollowUpUsed)) if world.per_mille(700) => return,
            _ => tokio::time::sleep(world.millis(100..4000)).await,
        }
    }
}

/// Answers a question at any replica. `None` if there is no reply.
pub(super) async fn answer_once(world: &Arc<World>, id: Uuid) -> Option<Result<(), Code>> {
    let replica = world.any_running().and_then(|index| world.replica(index))?;
    let index = replica.index;
    let was_out_of_reach = world.is_out_of_reach(id);
    let reply = match world.fails(world.mix.abandoned) {
        true => {
            world.count("abandoned answers");
            let polls = world.below(60);
            world.call(index, abandoned(replica.answer(id, false), polls)).await?
        }
        false => world.call(index, replica.answer(id, false)).await,
    };
    let reply = reply?.map_err(|error| error.info.code);
    let is_expected = match reply {
        Ok(()) => true,
        Err(code) => {
            matches!(
                code,
                Code::StateUnavailable
                    | Code::AgentUnavailable
                    | Code::FollowUpUsed
                    | Code::FollowUpExpired
                    | Code::OutcomeUnknown
            ) || (code == Code::NotFound
                && (world.is_lost(id) || was_out_of_reach || world.is_out_of_reach(id)))
        }
    };
    if !is_expected {
        let name = world.name(id);
        world.violation(format!("the answer to {name} failed with {reply:?}"));
    }
    Some(reply)
}

/// Sends the same request several times.
pub(super) async fn use_key(world: Arc<World>, number: usize) {
    tokio::time::sleep(world.millis(0..20_000)).await;
    for _ in 0..1 + world.below(4) {
        let this = Arc::clone(&world);
        world.spawner.spawn(Owner::World, async move {
            tokio::time::sleep(this.millis(0..1500)).await;
            for _ in 0..4 {
                let Some(replica) = this.any_running().and_then(|index| this.replica(index)) else { return };
                let reply = this.call(replica.index, run_once(replica, number)).await;
                match reply {
                    Some(Ok(()) | Err(Code::OutcomeUnknown)) => return,
                    _ => tokio::time::sleep(this.millis(100..3000)).await,
                }
            }
        });
    }
}

async fn run_once(replica: Replica, number: usize) -> Result<(), Code> {
    let (world, agent) = (&replica.world, &replica.agent);
    let (key, limit) = (format!("key-{number}"), Duration::from_secs(60));
    let caller = Caller::default();
    let keys = &replica.state.idempotency;
    let reserved = keys.reserve(agent, (&caller, "run", &key), b"body", limit).await;
    match reserved.map_err(|error| error.info.code)? {
        Reservation::First(first) => {
            world.latency().await;
            if world.fails(world.mix.agent_faults) {
                first.finish(&Err(agent_unavailable())).await;
                return Err(Code::AgentUnavailable);
            }
            let runs = {
                let mut all = world.runs.lock().unwrap();
                let runs = all.entry(number).or_default();
                *runs += 1;
                *runs
            };
            world.log(|| format!("replica {}: runs the request of key {number}", replica.index));
            if runs > 1 {
                world.violation(format!("the request of key {number} ran {runs} times"));
            }
            world.latency().await;
            first.finish(&Ok(Arc::new(outcome(&TaskState::Completed)))).await;
            Ok(())
        }
        Reservation::Repeat(repeat) => {
            let reply = tokio::time::timeout(limit, repeat.reply(free)).await;
            reply.map_err(|_| Code::Timeout)?.map(drop).map_err(|error| error.info.code)
        }
    }
}

/// Where a session with a launched agent continues, as one replica sees it.
pub(super) async fn place(replica: &Replica, number: usize) -> Result<usize, Code> {
    let (caller, id) = (Caller::default(), format!("session-{number}"));
    let session = SessionId { agent: &replica.agent, caller: &caller, id: &id, is_launched: true };
    match replica.state.sessions.place(session).await.map_err(|error| error.info.code)? {
        SessionPlace::Here { .. } => Ok(replica.index),
        SessionPlace::Elsewhere(owner) => replica.world.index_of(owner).ok_or(Code::NotFound),
    }
}

pub(super) async fn use_session(world: Arc<World>, number: usize) {
    while !world.is_healed() {
        tokio::time::sleep(world.millis(0..8000)).await;
        let Some(replica) = world.any_running().and_then(|index| world.replica(index)) else { continue };
        let index = replica.index;
        let _ = world.call(index, async move { place(&replica, number).await }).await;
    }
}
