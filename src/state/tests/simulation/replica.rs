//! One replica: the real state logic, and the steps of `src/action` and `src/dispatch` around it.
//!
//! These steps need HTTP and NATS in the bridge. Here they are repeated in the same order: `action::run::recorder`
//! (observe), `action::follow_up` (answer), `action::adoption` (adopt), `action::actions` (look up, cancel),
//! `dispatch::maintenance` (expiry and adoption), `bus::publication` (updates).

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use futures_util::stream::{Stream, StreamExt as _};
use tokio::sync::{Notify, mpsc};
use uuid::Uuid;

use super::super::super::State;
use super::super::super::clock::wall_time;
use super::super::super::follow_ups::{
    AdoptedQuestion, Claim, ClaimResult, FollowUpState, NewFollowUp, OpenQuestion, UnsettledQuestion, expired,
};
use super::super::super::peers::{Holder, InstanceId, Liveness, Peers};
use super::super::super::quota::Quotas;
use super::super::super::replicated::ReplicatedStore;
use super::super::super::tasks::{Observer, RecordResult, Takeover, TaskOutline, TaskRecord};
use super::super::super::{RecordKey, RecordKind, StateStore, StoreUnavailable};
use super::super::free;
use super::agent::{Seen, SendError};
use super::executor::Owner;
use super::store::{SharedStore, SimulatedPeers};
use super::world::{Issued, Published, Sent, World};
use crate::a2a::model::TaskState;
use crate::caller::Caller;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{FollowUp, Outcome, ReplyContent, ReplyStatus, TaskRef};

const HOUR: Duration = Duration::from_secs(3600);

#[derive(Debug, Clone)]
pub(super) struct Replica {
    pub index: usize,
    pub world: Arc<World>,
    pub state: Arc<State>,
    pub store: Arc<ReplicatedStore>,
    pub agent: Arc<str>,
    updates: mpsc::UnboundedSender<Published>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    NewTask,
    Answer,
    Adopted,
    Lookup,
}

/// A request that observes a task.
#[derive(Debug)]
pub(super) struct Run {
    purpose: Purpose,
    is_submit: bool,
    began: SystemTime,
    is_first: AtomicBool,
    /// The follow-up id that it answers.
    answered: Option<Uuid>,
    /// For an adopted task: its questions that were not settled.
    questions: Vec<UnsettledQuestion>,
    number: u64,
}

impl Run {
    fn new(state: &State, purpose: Purpose, is_submit: bool) -> Self {
        let number = if purpose == Purpose::Lookup { 0 } else { state.tasks.next_run() };
        let (is_first, questions) = (true.into(), Vec::new());
        Self { purpose, is_submit, began: wall_time(), is_first, answered: None, questions, number }
    }

    fn takeover(&self) -> Takeover {
        let is_first = self.is_first.swap(false, Relaxed);
        match self.purpose {
            Purpose::NewTask if is_first => Takeover::New,
            Purpose::NewTask => Takeover::None,
            Purpose::Answer => self.answered.map_or(Takeover::None, Takeover::Answer),
            Purpose::Adopted | Purpose::Lookup => Takeover::None,
        }
    }
}

pub(super) fn agent_unavailable() -> ActionError {
    ActionError::unavailable("agent", None)
}

pub(super) fn task_id(task: usize) -> String {
    format!("t{task}")
}

impl Replica {
    /// Starts a replica and everything that runs in it.
    pub(super) fn start(world: &Arc<World>) -> Self {
        let (index, instance) = world.add_replica();
        let shared = Arc::new(SharedStore { world: Arc::clone(world), replica: index });
        let quotas = Quotas::new(64 << 20);
        let wake = Arc::new(Notify::new());
        let store = Arc::new(ReplicatedStore::new(shared, &quotas, false, wake));
        let peers: Arc<dyn Peers> =
            Arc::new(SimulatedPeers { world: Arc::clone(world), replica: index, instance });
        let state = Arc::new(State::new(&(Arc::clone(&store) as Arc<dyn StateStore>), &quotas, &peers));
        let (updates, queue) = mpsc::unbounded_channel();
        let replica = Self { index, world: Arc::clone(world), state, store, agent: "agent".into(), updates };
        world.directory.lock().unwrap().push(Some(replica.clone()));
        replica.spawn(|this| async move { this.store.flush_continuously().await });
        replica.spawn(|this| async move { this.state.share_long_running().await });
        replica.spawn(|this| this.publish_updates(queue));
        replica.spawn(Self::write_late);
        replica.spawn(Self::expire_questions);
        replica.spawn(Self::adopt_from_dead);
        replica
    }

    pub(super) fn spawn<F: Future<Output = ()> + Send + 'static>(&self, task: impl FnOnce(Self) -> F) {
        self.world.spawner.spawn(Owner::Replica(self.index), task(self.clone()));
    }

    fn log(&self, text: impl FnOnce() -> String) {
        self.world.log(|| format!("replica {}: {}", self.index, text()));
    }

    /// The updates wait in a queue, as in `bus::publication`, and for the connection.
    async fn publish_updates(self, mut queue: mpsc::UnboundedReceiver<Published>) {
        while let Some(update) = queue.recv().await {
            while self.world.is_cut_off(self.index) {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            self.world.latency().await;
            self.log(|| format!("publishes {} of task {}: {}", update.revision, update.task, update.content));
            if let Some(id) = update.follow_up {
                self.world.tell(id);
            }
            self.world.published.lock().unwrap().push(update);
        }
    }

    fn publish(&self, task: usize, reply: &Reply, revision: u64) {
        let follow_up =
            reply.as_ref().ok().and_then(|outcome| outcome.follow_up.as_ref()).map(|known| known.id);
        let content = match reply {
            Ok(outcome) => {
                let question = follow_up.map(|id| self.world.name(id)).unwrap_or_default();
                format!("{} {question}", outcome.status.name())
            }
            Err(error) => format!("error {}", error.info.code.name()),
        };
        let _ = self.updates.send(Published { task, revision, by: self.index, content, follow_up });
    }

    /// As in `TaskRecorder::observe`.
    pub(super) async fn observe(
        &self,
        run: &Run,
        seen: &Seen,
        known: Option<FollowUp>,
    ) -> Result<Arc<Outcome>, ActionError> {
        let (state, agent, id) = (&self.state, &self.agent, task_id(seen.task));
        let is_alone = run.purpose == Purpose::NewTask && !run.is_submit && seen.fingerprint.is_none();
        let _turn = match is_alone {
            true => None,
            false => Some(state.tasks.turn(agent, &id).await),
        };
        let task_ref = TaskRef { id: Some(id.clone()), context_id: None, agent: agent.clone(), skill: None };
        let mut outcome =
            Outcome::new(ReplyStatus::from(&seen.state), ReplyContent::default(), task_ref.clone());
        let mut new_follow_up = None;
        if let Some(fingerprint) = &seen.fingerprint {
            let (follow_up, new) = self.follow_up(run, seen, fingerprint, known).await?;
            (outcome.follow_up, new_follow_up) = (Some(follow_up), new);
        }
        let outcome = Arc::new(outcome);
        let may_run_for = if seen.state.is_final() { Duration::ZERO } else { HOUR };
        let record = TaskRecord {
            state: seen.state.clone(),
            reply: Ok(Arc::clone(&outcome)),
            follow_up: outcome.follow_up.clone(),
            is_submitted: run.is_submit && run.purpose != Purpose::Adopted,
            revision: 0,
            caller: Caller::default(),
            owner: state.peers.instance(),
            is_local: false,
            seen_at: wall_time(),
            may_run_for,
            ttl: HOUR,
            open_for: may_run_for,
            run: None,
        };
        let is_lookup = run.purpose == Purpose::Lookup;
        let observer = Observer { began: run.began, is_lookup, takeover: run.takeover(), run: run.number };
        let new_id = new_follow_up.as_ref().map(|new| new.follow_up.id);
        let recorded = match new_follow_up {
            None => state.tasks.record(agent, &id, record, observer).await,
            Some(new) => match state.follow_ups.store(agent, new).await {
                Ok(()) => state.tasks.record(agent, &id, record, observer).await,
                Err(error) => Err(error),
            },
        };
        if let Some((revision, reply)) = state.tasks.take_landed(agent, &id) {
            self.publish(seen.task, &reply, revision);
        }
        let recorded = recorded.map_err(|error| error.after_reaching_agent().with_task(task_ref.clone()))?;
        self.log(|| {
            let what = match &recorded {
                RecordResult::Written { update, .. } => format!("written, update {update:?}"),
                other => format!("{other:?}"),
            };
            format!("{:?} observes {seen:?}: {what}", run.purpose)
        });
        let (previous, update) = match recorded {
            RecordResult::Written { previous, update } => (previous, update),
            RecordResult::TakenOver if run.is_submit => {
                let message = "another replica follows the task";
                return Err(ActionError::new(Code::StateUnavailable, message)
                    .after_reaching_agent()
                    .with_task(task_ref));
            }
            RecordResult::TakenOver => {
                let Some(new_id) = new_id else { return Ok(outcome) };
                state.expire_unless_named(agent, &id, &new_id).await;
                let kept = state.tasks.reply(agent, &id, free).await?;
                return Ok(kept.and_then(Reply::ok).unwrap_or(outcome));
            }
            RecordResult::Kept => {
                if let Some(new_id) = new_id {
                    state.expire_unless_named(agent, &id, &new_id).await;
                }
                if seen.state.is_final() {
                    return Ok(outcome);
                }
                let kept = state.tasks.reply(agent, &id, free).await?;
                return Ok(kept.and_then(Reply::ok).unwrap_or(outcome));
            }
        };
        if let Some(follow_up) = previous.as_ref().and_then(|previous| previous.follow_up.as_ref())
            && seen.state.is_final()
        {
            let _ = state.follow_ups.expire(agent, &follow_up.id).await;
        }
        if let Some(revision) = update {
            self.publish(seen.task, &Ok(Arc::clone(&outcome)), revision);
        }
        Ok(outcome)
    }

    /// As in `TaskRecorder::follow_up`.
    async fn follow_up(
        &self,
        run: &Run,
        seen: &Seen,
        fingerprint: &str,
        known: Option<FollowUp>,
    ) -> Result<(FollowUp, Option<NewFollowUp>), ActionError> {
        let (state, agent, id) = (&self.state, &self.agent, task_id(seen.task));
        if let Some(known) = known {
            let record = state.follow_ups.find(agent, &known.id).await?;
            let is_for_question = record.is_some_and(|record| match record.state {
                FollowUpState::Pending => true,
                FollowUpState::Expired => record.is_over(),
                FollowUpState::Answering { .. } | FollowUpState::Sending { .. } | FollowUpState::Used => {
                    record.is_for(fingerprint)
                }
            });
            if is_for_question {
                return Ok((known, None));
            }
        }
        let previous = match run.purpose {
            Purpose::NewTask => state.tasks.find_seen_here(agent, &id).await?,
            Purpose::Answer | Purpose::Adopted | Purpose::Lookup => state.tasks.find(agent, &id).await?,
        };
        if let Some(open) = previous.and_then(|previous| previous.follow_up)
            // After an answer, the agent may ask the same question again.
            && Some(open.id) != run.answered
            && let Some(record) = state.follow_ups.find(agent, &open.id).await?
            && record.is_for(fingerprint)
        {
            return Ok((open, None));
        }
        if run.purpose == Purpose::Adopted
            && let Some(open) = state.follow_ups.find_open(agent, &run.questions, fingerprint).await?
        {
            return Ok((open, None));
        }
        let question =
            OpenQuestion { task_id: id, fingerprint: fingerprint.to_owned(), ..super::super::question() };
        let ttl = match self.world.per_mille(self.world.mix.short_questions) {
            true => self.world.millis(10_000..40_000),
            false => HOUR + self.world.millis(0..1000),
        };
        let new = state.follow_ups.prepare(question, ttl);
        let issued = Issued {
            id: new.follow_up.id,
            by: self.index,
            task: seen.task,
            fingerprint: fingerprint.to_owned(),
            expires: wall_time() + ttl,
            is_told: false,
            winners: 0,
        };
        self.world.issued.lock().unwrap().push(issued);
        let name = self.world.name(new.follow_up.id);
        self.log(|| format!("makes {name} for {fingerprint}, {ttl:?}"));
        Ok((new.follow_up.clone(), Some(new)))
    }

    /// Begins a task, and follows it until it asks or ends.
    pub(super) async fn begin(self, task: usize, is_submit: bool) -> Result<Arc<Outcome>, ActionError> {
        let run = Run::new(&self.state, Purpose::NewTask, is_submit);
        let begun = self.world.begin_task(task).await.map_err(|_| agent_unavailable())?;
        let result = self.follow(&run, begun).await;
        match result {
            Ok(outcome) => Ok(outcome),
            Err(error) => Err(self.record_untracked(&run, task, error).await),
        }
    }

    /// Observes a task until it has settled.
    async fn follow(&self, run: &Run, mut seen: Seen) -> Result<Arc<Outcome>, ActionError> {
        loop {
            let outcome = self.observe(run, &seen, None).await?;
            if seen.is_settled() {
                return Ok(outcome);
            }
            loop {
                tokio::time::sleep(self.world.millis(50..1500)).await;
                match self.world.get_task(seen.task).await {
                    Some(next) if next != seen => {
                        seen = next;
                        break;
                    }
                    _ => {}
                }
            }
        }
    }

    /// As in `Actions::record_untracked`.
    async fn record_untracked(&self, run: &Run, task: usize, error: ActionError) -> ActionError {
        self.log(|| format!("no longer tracks task {task}: {}", error.message));
        let _turn = self.state.tasks.turn(&self.agent, &task_id(task)).await;
        let (tasks, id) = (&self.state.tasks, task_id(task));
        let marked = match error.task.is_some() {
            true => tasks.mark_untracked(&self.agent, &id, &error, run.number).await,
            false => None,
        };
        if let Some((revision, reply)) = tasks.take_landed(&self.agent, &id) {
            self.publish(task, &reply, revision);
        }
        if let Some(revision) = marked {
            self.publish(task, &Err(error.clone()), revision);
        }
        error
    }

    /// As in `action::follow_up::answer`.
    pub(super) fn answer(self, id: Uuid, is_forwarded: bool) -> BoxFuture<'static, Result<(), ActionError>> {
        Box::pin(async move {
            let name = self.world.name(id);
            let claimed = self.state.follow_ups.claim(&self.agent, &Caller::default(), &id.to_string()).await;
            self.log(|| match &claimed {
                Ok(ClaimResult::Claimed(_)) => format!("claims {name}"),
                Ok(ClaimResult::Elsewhere(to)) => format!("finds {name} at {}", self.world.name(*to)),
                Err(error) => format!("cannot claim {name}: {} {}", error.info.code.name(), error.message),
            });
            let claim = match claimed? {
                ClaimResult::Claimed(claim) => match self.unless_ended(*claim, is_forwarded).await? {
                    Ok(claim) => claim,
                    Err(to) => return self.answer_elsewhere(to, id, is_forwarded).await,
                },
                ClaimResult::Elsewhere(to) => return self.answer_elsewhere(to, id, is_forwarded).await,
            };
            let (Some(task), fingerprint) = (
                claim.question.task_id.trim_start_matches('t').parse::<usize>().ok(),
                claim.question.fingerprint.clone(),
            ) else {
                panic!("a task of the simulation")
            };
            let run =
                Run { answered: Some(id), ..Run::new(&self.state, Purpose::Answer, self.is_submitted(task)) };
            let seen = self.world.get_task(task).await;
            if seen.as_ref().is_some_and(|seen| !seen.is_settled()) {
                claim.release().await;
                return Err(agent_unavailable());
            }
            if let Some(seen) = seen.filter(|seen| seen.state.is_final()) {
                if let Err(error) = self.observe(&run, &seen, None).await {
                    self.mark_used(claim).await;
                    return Err(error);
                }
                claim.mark_expired().await;
                return Err(expired());
            }
            let is_only_here = self.state.tasks.is_only_here(&self.agent, &claim.question.task_id);
            let sender = claim.sender(is_only_here).expect("a claim that is held");
            let number = {
                let mut sent = self.world.sent.lock().unwrap();
                sent.push(Sent { id, by: self.index, is_released: false });
                sent.len() - 1
            };
            let released = || {
                if let Some(sent) = self.world.sent.lock().unwrap().get_mut(number) {
                    sent.is_released = true;
                }
            };
            if let Err(error) = sender.mark_sending().await {
                self.log(|| format!("may not send the answer to {name}: {}", error.message));
                claim.release().await;
                released();
                return Err(error);
            }
            self.log(|| format!("sends the answer to {name}"));
            let release = |claim: Claim| async {
                claim.release().await;
                released();
                self.log(|| format!("releases {name}"));
                Err(agent_unavailable())
            };
            let seen = match self.world.send_answer(task, &fingerprint, id).await {
                Ok(seen) => seen,
                Err(SendError::NotTaken) => return release(claim).await,
                Err(SendError::Broken) => match self.world.poll_past(task, &fingerprint).await {
                    Some(None) => return release(claim).await,
                    Some(Some(seen)) => {
                        let followed = self.follow_answer(&run, task, seen).await;
                        self.mark_used(claim).await;
                        followed?;
                        return self.win(id);
                    }
                    None => {
                        self.mark_used(claim).await;
                        return Err(ActionError::new(Code::OutcomeUnknown, "broken").after_reaching_agent());
                    }
                },
            };
            let followed = self.follow_answer(&run, task, seen).await;
            self.mark_used(claim).await;
            self.log(|| format!("has answered {name}"));
            followed?;
            self.win(id)
        })
    }

    async fn follow_answer(&self, run: &Run, task: usize, seen: Seen) -> Result<(), ActionError> {
        match self.follow(run, seen).await {
            Ok(outcome) => {
                if let Some(follow_up) = &outcome.follow_up
                    && !run.is_submit
                {
                    self.world.tell(follow_up.id);
                }
                Ok(())
            }
            Err(error) => Err(self.record_untracked(run, task, error).await),
        }
    }

    /// As in `State::mark_used`.
    async fn mark_used(&self, claim: Claim) {
        let id = claim.question.task_id.clone();
        if !self.state.tasks.is_unconfirmed(&self.agent, &id) {
            return claim.mark_used().await;
        }
        self.spawn(|this| async move {
            while this.state.tasks.is_unconfirmed(&this.agent, &id) {
                tokio::time::sleep(Duration::from_millis(500)).await;
            }
            claim.mark_used().await;
        });
    }

    fn win(&self, id: Uuid) -> Result<(), ActionError> {
        let winners =
            self.world.issued.lock().unwrap().iter_mut().find(|issued| issued.id == id).map_or(0, |issued| {
                issued.winners += 1;
                issued.winners
            });
        if winners > 1 {
            let name = self.world.name(id);
            self.world.violation(format!("{winners} answers to {name} won"));
        }
        Ok(())
    }

    fn is_submitted(&self, task: usize) -> bool {
        task % 3 != 2
    }

    /// Returns the claim, or the replica that can answer.
    async fn unless_ended(
        &self,
        claim: Claim,
        is_forwarded: bool,
    ) -> Result<Result<Claim, InstanceId>, ActionError> {
        let (tasks, id) = (&self.state.tasks, &claim.question.task_id);
        let found = match tasks.find_to_answer(&self.agent, id).await {
            Ok(found) => Ok(found),
            Err(_) if tasks.is_only_here(&self.agent, id) => tasks.find(&self.agent, id).await,
            Err(error) => Err(error),
        };
        let task = match found {
            Ok(task) => task,
            Err(error) => {
                claim.release().await;
                return Err(error);
            }
        };
        let (owner, own) = (claim.owner(), self.state.peers.instance());
        let liveness = match &task {
            Some(task) if task.state.is_final() => {
                claim.mark_expired().await;
                return Err(expired());
            }
            Some(task) if claim.is_named_in(task) => return Ok(Ok(claim)),
            None if owner == own => return Ok(Ok(claim)),
            _ if owner == own => None,
            _ => Some(self.state.peers.liveness(owner).await),
        };
        let unanswerable = async |claim: Claim| {
            claim.release().await;
            Err(ActionError::new(Code::StateUnavailable, "the replica that asked does not respond"))
        };
        match (liveness, task) {
            (Some(Liveness::Alive), _) if !is_forwarded => {
                claim.release().await;
                Ok(Err(owner))
            }
            (Some(Liveness::Dead), None) => Ok(Ok(claim)),
            (Some(Liveness::Dead), Some(task)) if task.owner == owner => unanswerable(claim).await,
            (None | Some(Liveness::Dead), _) => {
                claim.mark_expired().await;
                Err(expired())
            }
            (Some(_), _) => unanswerable(claim).await,
        }
    }

    async fn answer_elsewhere(
        &self,
        to: InstanceId,
        id: Uuid,
        is_forwarded: bool,
    ) -> Result<(), ActionError> {
        if is_forwarded || self.state.peers.liveness(to).await != Liveness::Alive {
            return Err(agent_unavailable());
        }
        match self.forward(to, move |replica| replica.answer(id, true)).await {
            Some(reply) => reply,
            None => Err(ActionError::new(Code::OutcomeUnknown, "no reply").after_reaching_agent()),
        }
    }

    /// Lets another replica serve a request.
    async fn forward<T, F>(&self, to: InstanceId, request: impl FnOnce(Self) -> F + Send) -> Option<T>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let to = self.world.index_of(to)?;
        let replica = self.world.replica(to)?;
        if self.world.is_cut_off(self.index) || !self.world.is_reachable(to) {
            return None;
        }
        self.world.call(to, request(replica)).await
    }

    /// As in `Actions::get_task` and `Actions::cancel_task`.
    pub(super) fn look_up(
        self,
        task: usize,
        cancels: bool,
        is_forwarded: bool,
    ) -> BoxFuture<'static, Result<Arc<Outcome>, ActionError>> {
        Box::pin(async move {
            let id = task_id(task);
            let not_found = || ActionError::new(Code::NotFound, "unknown task");
            let found = self.state.tasks.find(&self.agent, &id).await;
            let record = match found.and_then(|found| found.ok_or_else(not_found)) {
                Ok(record) => record,
                Err(error) => {
                    let key = RecordKey::new(&self.agent, id.as_str());
                    let Holder::At(holder) = self.state.peers.find(RecordKind::Task, &key).await else {
                        return Err(error);
                    };
                    if is_forwarded {
                        return Err(error);
                    }
                    let forwarded =
                        self.forward(holder, move |other| other.look_up(task, cancels, true)).await;
                    return forwarded.unwrap_or(Err(error));
                }
            };
            if let Some(owner) = self.state.tasks.other_owner(&record)
                && !record.state.is_final()
                && !is_forwarded
                && self.state.peers.liveness(owner).await == Liveness::Alive
                && let Some(reply) =
                    self.forward(owner, move |other| other.look_up(task, cancels, true)).await
            {
                return reply;
            }
            if !record.state.is_final() {
                let run = Run::new(&self.state, Purpose::Lookup, false);
                let seen = match cancels {
                    true => self.world.cancel_task(task).await,
                    false => self.world.get_task(task).await,
                };
                if let Some(seen) = seen {
                    return self.observe(&run, &seen, record.follow_up.clone()).await;
                }
            }
            self.state.tasks.reply(&self.agent, &id, free).await?.ok_or_else(not_found)?
        })
    }

    /// As in `Actions::write_late`.
    async fn write_late(self) {
        let (state, agent) = (&self.state, &self.agent);
        loop {
            tokio::time::sleep(Duration::from_millis(500)).await;
            for id in state.tasks.unconfirmed(agent) {
                let Ok(task) = id.trim_start_matches('t').parse::<usize>() else { continue };
                let _turn = state.tasks.turn(agent, &id).await;
                let Some(late) = state.tasks.write_late(agent, &id).await else { continue };
                self.log(|| {
                    format!(
                        "late write of task {task}: {:?}",
                        late.updates.iter().map(|(revision, _)| revision).collect::<Vec<_>>()
                    )
                });
                self.world.count("changes that were confirmed late");
                for (revision, reply) in &late.updates {
                    self.publish(task, reply, *revision);
                }
                if let Some(obsolete) = late.obsolete {
                    state.expire_unless_named(agent, &id, &obsolete).await;
                }
            }
        }
    }

    /// As in `dispatch::maintenance::cancel_expired`.
    async fn expire_questions(self) {
        loop {
            tokio::time::sleep(Duration::from_secs(2)).await;
            for question in self.state.take_expired(&self.agent).await {
                self.log(|| format!("question {} expires", question.fingerprint));
                self.world.count("questions that expired");
                if let Ok(task) = question.task_id.trim_start_matches('t').parse() {
                    let _ = self.clone().look_up(task, true, false).await;
                }
            }
        }
    }

    /// As in `dispatch::maintenance::run`.
    async fn adopt_from_dead(self) {
        let mut known_dead: HashSet<InstanceId> = HashSet::new();
        // Those whose tasks could not all be read.
        let mut incomplete: Vec<InstanceId> = Vec::new();
        let mut rounds = self.world.below(15);
        loop {
            tokio::time::sleep(Duration::from_secs(2)).await;
            rounds += 1;
            let all: Vec<InstanceId> = self.world.replicas().iter().map(|status| status.instance).collect();
            let mut dead = Vec::new();
            for instance in all {
                match self.world.liveness(self.index, instance) {
                    Liveness::Dead if known_dead.insert(instance) => dead.push(instance),
                    Liveness::Alive => {
                        known_dead.remove(&instance);
                        incomplete.retain(|known| *known != instance);
                    }
                    _ => {}
                }
            }
            if rounds.is_multiple_of(15) {
                dead.extend(self.dead_owners().await);
            }
            incomplete.retain(|instance| !dead.contains(instance));
            dead.append(&mut incomplete);
            for from in dead {
                if !self.adopt_all(from).await {
                    self.world.count("searches that broke");
                    incomplete.push(from);
                }
            }
        }
    }

    /// The tasks that other replicas follow, and whether these are all.
    async fn foreign(&self) -> (Vec<(String, TaskOutline)>, bool) {
        let (mut found, is_complete) = collect(self.state.tasks.foreign(&self.agent)).await;
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        (found, is_complete)
    }

    async fn unsettled(&self) -> (Vec<UnsettledQuestion>, bool) {
        let (mut found, is_complete) = collect(self.state.follow_ups.unsettled(&self.agent)).await;
        found.sort_by_key(|question| {
            (question.sender, question.task_id.clone(), self.world.name(question.id))
        });
        (found, is_complete)
    }

    async fn dead_owners(&self) -> Vec<InstanceId> {
        let mut dead = Vec::new();
        let owners = self.foreign().await.0.into_iter().map(|(_, task)| task.owner);
        let senders = self.unsettled().await.0.into_iter().filter_map(|question| question.sender);
        for owner in owners.chain(senders) {
            if !dead.contains(&owner) && self.state.peers.liveness(owner).await == Liveness::Dead {
                dead.push(owner);
            }
        }
        dead
    }

    /// Returns whether all tasks were read.
    async fn adopt_all(&self, from: InstanceId) -> bool {
        tokio::time::sleep(self.world.millis(0..300)).await;
        let (mut found, mut is_complete) = self.foreign().await;
        found.retain(|(_, task)| task.owner == from);
        let (mut questions, all_questions) = self.unsettled().await;
        is_complete &= all_questions;
        questions.retain(|question| {
            question.sender == Some(from)
                || question.owner == from
                || found.iter().any(|(id, _)| *id == question.task_id)
        });
        for UnsettledQuestion { id, task_id, .. } in
            questions.iter().filter(|question| question.sender == Some(from))
        {
            match self.state.tasks.find_current(&self.agent, task_id).await {
                Ok(Some(task)) if task.follow_up.as_ref().is_some_and(|named| named.id == *id) => {
                    if task.owner != from {
                        found.push((task_id.clone(), task));
                    }
                }
                Ok(_) => is_complete &= self.state.follow_ups.adopt(&self.agent, id, from).await.is_ok(),
                Err(_) => is_complete = false,
            }
        }
        self.world.shuffle(&mut found);
        for (id, outline) in found {
            let questions = questions.iter().filter(|question| question.task_id == id).cloned().collect();
            self.spawn(|this| async move { this.adopt(&id, &outline, questions).await });
        }
        is_complete
    }

    /// As in `Actions::become_owner`.
    async fn become_owner(&self, id: &str, task: usize, from: InstanceId) -> Option<TaskRecord> {
        let nonce = Uuid::new_v4();
        loop {
            let turn = self.state.tasks.turn(&self.agent, id).await;
            match self.state.tasks.adopt(&self.agent, id, from, nonce).await {
                Ok(Some(record)) => {
                    self.world.count("adoptions");
                    self.log(|| format!("adopts task {task} at revision {}", record.revision));
                    if record.is_submitted {
                        self.publish(task, &record.reply, record.revision);
                    }
                    return Some(record);
                }
                Ok(None) => return None,
                Err(_) => drop(turn),
            }
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
    }

    /// As in `Actions::adopt_task`.
    async fn adopt(&self, id: &str, outline: &TaskOutline, questions: Vec<UnsettledQuestion>) {
        let from = outline.owner;
        let Ok(task) = id.trim_start_matches('t').parse::<usize>() else { return };
        let Some(record) = self.become_owner(id, task, from).await else { return };
        if record.state.is_final() || record.reply.is_err() {
            return;
        }
        let mut is_open = true;
        if let Some(follow_up) = &outline.follow_up {
            is_open = loop {
                match self.state.follow_ups.adopt(&self.agent, &follow_up.id, from).await {
                    Ok(adopted) => break adopted == AdoptedQuestion::Open,
                    Err(_) => tokio::time::sleep(Duration::from_secs(2)).await,
                }
            };
        }
        if record.state == TaskState::InputRequired && is_open {
            return;
        }
        let run = Run { questions, ..Run::new(&self.state, Purpose::Adopted, true) };
        let seen = loop {
            match self.world.get_task(task).await {
                Some(seen) => break seen,
                None => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        };
        if let Err(error) = self.follow(&run, seen).await {
            self.record_untracked(&run, task, error).await;
        }
    }
}

/// What a scan has returned before it ended or broke, and whether that is all.
async fn collect<T>(scan: impl Stream<Item = Result<T, StoreUnavailable>>) -> (Vec<T>, bool) {
    let mut scan = std::pin::pin!(scan);
    let mut found = Vec::new();
    while let Some(item) = scan.next().await {
        match item {
            Ok(item) => found.push(item),
            Err(StoreUnavailable) => return (found, false),
        }
    }
    (found, true)
}
