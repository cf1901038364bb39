//! The tasks in memory, their turns, and the callers that follow them.
//!
//! A *turn* is what the agent does with one message. Its events go into an [`EventLog`], which any number of
//! callers can follow from any point without slowing the task or losing an event. A turn belongs to no
//! connection, so it goes on when its caller disconnects.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::protocol::{
    ArtifactChunk, DemoArtifact, DemoMessage, DemoTask, MethodError, ProtocolVersion, RawJson, ends_turn,
};
use super::skills::DemoSkill;
use crate::a2a::model::TaskState;

pub(super) const MAX_TASKS: usize = 10_000;

/// The events of one turn. It closes when its callers get their answer, which may be before the task ends.
#[derive(Default)]
pub(super) struct EventLog(watch::Sender<LoggedEvents>);

#[derive(Default)]
struct LoggedEvents {
    events: Vec<RawJson>,
    /// The task at the time the log closed.
    outcome: Option<DemoTask>,
}

impl EventLog {
    /// Waits for the event at `index`; `None` if the log closes before it.
    pub(super) async fn event(&self, index: usize) -> Option<RawJson> {
        let mut log = self.0.subscribe();
        let log = log.wait_for(|log| log.outcome.is_some() || log.events.len() > index).await.ok()?;
        log.events.get(index).cloned()
    }

    /// Waits until the log closes.
    pub(super) async fn outcome(&self) -> Option<DemoTask> {
        let mut log = self.0.subscribe();
        let log = log.wait_for(|log| log.outcome.is_some()).await.ok()?;
        log.outcome.clone()
    }
}

/// A task as one caller sees it: its present state, and the log to follow from the event `next`.
pub(super) struct TaskView {
    pub(super) task: DemoTask,
    pub(super) log: Arc<EventLog>,
    pub(super) next: usize,
}

/// All tasks. The oldest is forgotten when there are too many.
#[derive(Default)]
pub(super) struct DemoTasks(Mutex<KnownTasks>);

#[derive(Default)]
struct KnownTasks {
    by_id: HashMap<String, Arc<TaskEntry>>,
    oldest_first: VecDeque<String>,
}

impl DemoTasks {
    /// Adds `task` and starts its first turn.
    pub(super) fn open(
        &self,
        task: DemoTask,
        skill: DemoSkill,
        message: DemoMessage,
    ) -> (TaskView, DemoTurn) {
        let id = task.id.clone();
        let live = LiveTask { task, log: Arc::default(), stop: CancellationToken::new() };
        let entry = Arc::new(TaskEntry { skill, live: Mutex::new(live) });
        let mut known = lock(&self.0);
        if known.oldest_first.len() == MAX_TASKS
            && let Some(oldest) = known.oldest_first.pop_front()
        {
            known.by_id.remove(&oldest);
        }
        known.by_id.insert(id.clone(), entry.clone());
        known.oldest_first.push_back(id);
        let mut live = lock(&entry.live);
        let turn = entry.start_turn(&mut live, message, true);
        (live.view(), turn)
    }

    pub(super) fn get(&self, id: &str) -> Result<Arc<TaskEntry>, MethodError> {
        let entry = lock(&self.0).by_id.get(id).cloned();
        entry.ok_or_else(|| MethodError::new(-32001, "TASK_NOT_FOUND", "Task not found"))
    }

    /// All tasks or those of one context, newest first.
    pub(super) fn list(&self, context_id: Option<&str>) -> Vec<DemoTask> {
        let known = lock(&self.0);
        let newest_first = known.oldest_first.iter().rev().filter_map(|id| known.by_id.get(id));
        let tasks = newest_first.map(|entry| entry.task());
        tasks.filter(|task| context_id.is_none_or(|id| id == task.context_id)).collect()
    }
}

pub(super) struct TaskEntry {
    pub(super) skill: DemoSkill,
    live: Mutex<LiveTask>,
}

impl TaskEntry {
    pub(super) fn task(&self) -> DemoTask {
        lock(&self.live).task.clone()
    }

    /// For a caller who comes back to an open task.
    pub(super) fn follow(&self) -> Result<TaskView, MethodError> {
        let live = lock(&self.live);
        live.task.refuse_if_final()?;
        Ok(live.view())
    }

    /// Takes one more message for an open task. It starts a turn if the task waits for it; otherwise the
    /// message only joins the history, and the caller follows the turn in progress.
    pub(super) fn resume(
        self: &Arc<Self>,
        message: DemoMessage,
    ) -> Result<(TaskView, Option<DemoTurn>), MethodError> {
        let mut live = lock(&self.live);
        if message.context_id.as_ref().is_some_and(|context| *context != live.task.context_id) {
            return Err(MethodError::bad_params("message.contextId: not that of the task"));
        }
        live.task.refuse_if_final()?;
        let next = live.next_event();
        let turn = if ends_turn(&live.task.status.state) {
            live.set_status(TaskState::Working, Vec::new());
            Some(self.start_turn(&mut live, message, false))
        } else {
            live.take_message(message);
            None
        };
        Ok((TaskView { next, ..live.view() }, turn))
    }

    pub(super) fn cancel(&self) -> Result<DemoTask, MethodError> {
        let mut live = lock(&self.live);
        if live.task.status.state.is_final() {
            let message = format!("Task cannot be canceled - current state: {}", live.task.status.state_name);
            return Err(MethodError::new(-32002, "TASK_NOT_CANCELABLE", message));
        }
        let text = live.task.version.text("canceled as asked");
        live.set_status(TaskState::Canceled, vec![text]);
        live.stop.cancel();
        Ok(live.task.clone())
    }

    fn start_turn(self: &Arc<Self>, live: &mut LiveTask, message: DemoMessage, is_first: bool) -> DemoTurn {
        let message = live.take_message(message);
        // Ends an earlier turn that still waits in the background, for a sign-in elsewhere.
        std::mem::take(&mut live.stop).cancel();
        let (version, stop) = (live.task.version, live.stop.clone());
        DemoTurn { version, entry: self.clone(), is_first, stop, message }
    }
}

/// What changes while a task is worked on.
struct LiveTask {
    task: DemoTask,
    log: Arc<EventLog>,
    /// Ends the turn in progress.
    stop: CancellationToken,
}

impl LiveTask {
    fn next_event(&self) -> usize {
        self.log.0.borrow().events.len()
    }

    fn view(&self) -> TaskView {
        TaskView { task: self.task.clone(), log: self.log.clone(), next: self.next_event() }
    }

    fn take_message(&mut self, mut message: DemoMessage) -> DemoMessage {
        message.task_id = Some(self.task.id.clone());
        message.context_id = Some(self.task.context_id.clone());
        self.task.history.push(message.clone());
        message
    }

    /// Like the public SDKs, moves the status message that it replaces to the history.
    fn set_status(&mut self, state: TaskState, parts: Vec<RawJson>) {
        let task = &mut self.task;
        let message = (!parts.is_empty()).then(|| {
            let mut message = task.version.agent_message(&task.context_id, parts);
            message.task_id = Some(task.id.clone());
            message
        });
        task.history.extend(task.status.message.take());
        let closes = ends_turn(&state);
        task.status = task.version.status(state, message);
        self.log_event(self.task.status_update());
        if closes {
            self.close_log();
        }
    }

    fn add_artifact(&mut self, artifact: DemoArtifact, chunk: ArtifactChunk) {
        self.log_event(self.task.artifact_update(&artifact, chunk));
        let artifacts = &mut self.task.artifacts;
        match artifacts.iter_mut().find(|known| known.artifact_id == artifact.artifact_id) {
            Some(known) if matches!(chunk, ArtifactChunk::Next | ArtifactChunk::Last) => {
                known.parts.extend(artifact.parts);
            }
            Some(known) => *known = artifact,
            None => artifacts.push(artifact),
        }
    }

    fn log_event(&self, event: RawJson) {
        self.log.0.send_modify(|log| log.events.push(event));
    }

    /// Answers the callers that follow; later ones follow a new log.
    fn close_log(&mut self) {
        let outcome = Some(self.task.clone());
        std::mem::take(&mut self.log).0.send_modify(|log| log.outcome = outcome);
    }
}

/// Write access to a task during one turn. Once another turn has begun or the task is canceled, writes are ignored.
pub(super) struct DemoTurn {
    pub(super) version: ProtocolVersion,
    pub(super) entry: Arc<TaskEntry>,
    /// Whether the message of this turn opened the task.
    pub(super) is_first: bool,
    pub(super) stop: CancellationToken,
    pub(super) message: DemoMessage,
}

impl DemoTurn {
    fn write(&self, write: impl FnOnce(&mut LiveTask)) {
        let mut live = lock(&self.entry.live);
        if !self.stop.is_cancelled() {
            write(&mut live);
        }
    }

    pub(super) fn status(&self, state: TaskState, parts: Vec<RawJson>) {
        self.write(|live| live.set_status(state, parts));
    }

    pub(super) fn status_text(&self, state: TaskState, text: &str) {
        self.status(state, vec![self.version.text(text)]);
    }

    pub(super) fn artifact(&self, artifact: DemoArtifact, chunk: ArtifactChunk) {
        self.write(|live| live.add_artifact(artifact, chunk));
    }

    /// Completes the task with one artifact.
    pub(super) fn complete(&self, name: &'static str, parts: Vec<RawJson>) {
        self.artifact(DemoArtifact::new(name, parts), ArtifactChunk::Whole);
        self.status(TaskState::Completed, Vec::new());
    }

    pub(super) fn complete_with_text(&self, name: &'static str, text: &str) {
        self.complete(name, vec![self.version.text(text)]);
    }

    /// Answers the callers although the task is not done.
    pub(super) fn release_callers(&self) {
        self.write(LiveTask::close_log);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
