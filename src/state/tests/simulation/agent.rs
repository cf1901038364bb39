//! An agent that all replicas reach. Its tasks ask questions, and end.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::super::super::clock::Instant;
use super::executor::Owner;
use super::world::World;
use crate::a2a::model::TaskState;

#[derive(Debug, Clone, Default)]
pub(super) struct AgentTask {
    pub is_begun: bool,
    state: Option<TaskState>,
    /// Questions that it has asked.
    asked: usize,
    questions: usize,
    /// For each question, how many answers the agent has taken.
    pub answers: Vec<Vec<Uuid>>,
}

/// A task as the agent reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    pub task: usize,
    pub state: TaskState,
    /// The question, if it asks one.
    pub fingerprint: Option<String>,
}

impl Seen {
    pub(super) fn is_settled(&self) -> bool {
        self.state.is_final() || self.fingerprint.is_some()
    }
}

/// How sending an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendError {
    /// Nothing was sent, or the agent refused it.
    NotTaken,
    Broken,
}

impl World {
    pub(super) fn add_task(&self, questions: usize) -> usize {
        let mut tasks = self.agent.lock().unwrap();
        tasks.push(AgentTask { questions, answers: vec![Vec::new(); questions], ..AgentTask::default() });
        tasks.len() - 1
    }

    fn seen(&self, task: usize) -> Option<Seen> {
        let tasks = self.agent.lock().unwrap();
        let found = tasks.get(task)?;
        let state = found.state.clone()?;
        let fingerprint =
            (state == TaskState::InputRequired).then(|| format!("t{task}/q{}", found.asked - 1));
        Some(Seen { task, state, fingerprint })
    }

    pub(super) fn is_final_at_agent(&self, task: usize) -> bool {
        self.seen(task).is_none_or(|seen| seen.state.is_final())
    }

    fn set_task(&self, task: usize, change: impl FnOnce(&mut AgentTask)) {
        if let Some(task) = self.agent.lock().unwrap().get_mut(task) {
            change(task);
        }
        let seen = self.seen(task);
        self.log(|| format!("agent: {seen:?}"));
    }

    /// Begins a task, if the request arrives.
    pub(super) async fn begin_task(self: &Arc<Self>, task: usize) -> Result<Seen, SendError> {
        self.latency().await;
        let is_begun = self.agent.lock().unwrap().get(task).is_some_and(|task| task.is_begun);
        if is_begun || self.fails(self.mix.agent_faults) {
            return Err(SendError::NotTaken);
        }
        self.set_task(task, |task| (task.is_begun, task.state) = (true, Some(TaskState::Working)));
        self.work(task);
        let seen = self.seen(task);
        self.latency().await;
        seen.ok_or(SendError::Broken)
    }

    /// The agent works until it asks the next question, or ends.
    fn work(self: &Arc<Self>, task: usize) {
        let world = Arc::clone(self);
        self.spawner.spawn(Owner::World, async move {
            tokio::time::sleep(world.millis(1..8000)).await;
            world.set_task(task, |task| {
                if task.state != Some(TaskState::Working) {
                    return;
                }
                let asks = task.asked < task.questions;
                task.asked += usize::from(asks);
                task.state = Some(if asks { TaskState::InputRequired } else { TaskState::Completed });
            });
        });
    }

    pub(super) async fn get_task(&self, task: usize) -> Option<Seen> {
        self.latency().await;
        if self.fails(self.mix.agent_faults / 3) {
            return None;
        }
        let seen = self.seen(task);
        self.latency().await;
        seen
    }

    pub(super) async fn cancel_task(&self, task: usize) -> Option<Seen> {
        self.latency().await;
        if self.fails(self.mix.agent_faults / 3) {
            return None;
        }
        self.set_task(task, |task| {
            if task.state.as_ref().is_some_and(|state| !state.is_final()) {
                task.state = Some(TaskState::Canceled);
            }
        });
        let seen = self.seen(task);
        self.latency().await;
        seen
    }

    /// Sends an answer to the question with this fingerprint. The message names only the task, so the agent takes it as
    /// the answer to whatever it asks then.
    pub(super) async fn send_answer(
        self: &Arc<Self>,
        task: usize,
        fingerprint: &str,
        id: Uuid,
    ) -> Result<Seen, SendError> {
        if self.fails(self.mix.agent_faults) {
            self.count("answers that the agent did not take");
            self.latency().await;
            return Err(SendError::NotTaken);
        }
        let is_broken = self.fails(self.mix.agent_faults);
        let is_lost = is_broken && self.per_mille(500);
        let later = is_broken.then(|| self.millis(1..5000));
        let (arrival, arrived) = tokio::sync::oneshot::channel();
        let (world, fingerprint) = (Arc::clone(self), fingerprint.to_owned());
        if !is_lost {
            self.spawner.spawn(Owner::World, async move {
                match later {
                    Some(later) => tokio::time::sleep(later).await,
                    None => world.latency().await,
                }
                let _ = arrival.send(world.take_answer(task, &fingerprint, id));
            });
        }
        if is_broken {
            self.count("answers whose connection broke");
            self.latency().await;
            return Err(SendError::Broken);
        }
        let arrived = arrived.await;
        self.latency().await;
        match arrived {
            Ok(true) => self.seen(task).ok_or(SendError::Broken),
            Ok(false) => Err(SendError::NotTaken),
            Err(_) => Err(SendError::Broken),
        }
    }

    /// An answer arrives at the agent. Returns whether it took it.
    fn take_answer(self: &Arc<Self>, task: usize, fingerprint: &str, id: Uuid) -> bool {
        let seen = self.seen(task);
        let name = self.name(id);
        self.log(|| format!("an answer to {fingerprint} ({name}) arrives; agent: {seen:?}"));
        let Some(seen) = seen.filter(|seen| !seen.state.is_final()) else { return false };
        let question: Option<usize> = fingerprint.rsplit('q').next().and_then(|number| number.parse().ok());
        let mut taken = Vec::new();
        self.set_task(task, |task| {
            if let Some(answers) = question.and_then(|question| task.answers.get_mut(question)) {
                answers.push(id);
                taken.clone_from(answers);
            }
            task.state = Some(TaskState::Working);
        });
        self.count("answers taken");
        let count = taken.len();
        if count > 1 {
            self.violation(format!("second delivery: the agent has {count} answers to {fingerprint}"));
        } else if seen.fingerprint.as_deref() != Some(fingerprint) {
            self.violation(format!("an answer to {fingerprint} arrived at {seen:?}"));
        }
        if seen.state == TaskState::InputRequired {
            self.work(task);
        }
        true
    }

    /// Waits until the task no longer asks the question, as after a broken connection. `Some(None)` if it still asks.
    pub(super) async fn poll_past(&self, task: usize, fingerprint: &str) -> Option<Option<Seen>> {
        let mut last = None;
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let began = Instant::now();
            match self.get_task(task).await {
                Some(seen) if seen.fingerprint.as_deref() == Some(fingerprint) => last = Some(None),
                Some(seen) => return Some(Some(seen)),
                None => {}
            }
            if began >= until {
                break;
            }
            tokio::time::sleep(self.millis(300..3000)).await;
        }
        last
    }
}
