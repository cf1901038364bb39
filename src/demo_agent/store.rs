//! The tasks in memory, their turns, and who follows them.
//!
//! A *turn* is what the agent does with one message. Its events go into a [`Run`]: a log that any
//! number of callers can follow from any point, none of them slowing the task or losing an event.
//! A turn belongs to no connection, so a caller who leaves changes nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::model::{Artifact, Chunk, Event, Message, Part, State, Status, Task, new_id};
use super::rpc::Fault;
use super::skills::Skill;

const MAX_TASKS: u64 = 10_000;

/// The events of one turn. It ends when the caller is to be let go, not only when the task ends.
#[derive(Default)]
pub(super) struct Run(watch::Sender<Log>);

#[derive(Default)]
struct Log {
    events: Vec<Event>,
    /// The task as it was when the run ended.
    outcome: Option<Task>,
}

impl Run {
    /// The event number `at`, as soon as there is one; `None` at the end.
    pub(super) async fn event(&self, at: usize) -> Option<Event> {
        let mut log = self.0.subscribe();
        let log = log.wait_for(|log| log.outcome.is_some() || log.events.len() > at).await.ok()?;
        log.events.get(at).cloned()
    }

    /// The task as it is when its callers are let go.
    pub(super) async fn outcome(&self) -> Option<Task> {
        let mut log = self.0.subscribe();
        let log = log.wait_for(|log| log.outcome.is_some()).await.ok()?;
        log.outcome.clone()
    }
}

/// All tasks, the least recently used forgotten first.
pub(super) struct Store {
    tasks: Cache<String, Arc<Entry>>,
    opened: AtomicU64,
}

/// One task.
pub(super) struct Entry {
    pub(super) id: String,
    pub(super) context_id: String,
    pub(super) skill: Skill,
    number: u64,
    inner: Mutex<Inner>,
}

struct Inner {
    task: Task,
    run: Arc<Run>,
    turn: usize,
    stop: CancellationToken,
}

impl Inner {
    fn record(&mut self, event: Event) {
        self.task.apply(&event);
        let ends = matches!(&event, Event::Status(status) if status.state.ends_turn());
        self.run.0.send_modify(|log| log.events.push(event));
        if ends {
            self.end_run();
        }
    }

    /// Lets the followers go; who comes later follows a new log.
    fn end_run(&mut self) {
        let outcome = Some(self.task.clone());
        std::mem::take(&mut self.run).0.send_modify(|log| log.outcome = outcome);
    }
}

/// A caller's view of a task: how it is now, and the log to follow from `at` on.
pub(super) struct View {
    pub(super) task: Task,
    pub(super) run: Arc<Run>,
    pub(super) at: usize,
}

impl Store {
    pub(super) fn new() -> Self {
        let tasks = Cache::builder().max_capacity(MAX_TASKS).eviction_policy(EvictionPolicy::lru()).build();
        Self { tasks, opened: AtomicU64::new(0) }
    }

    /// A new task with its first message.
    pub(super) fn open(&self, skill: Skill, context_id: String, message: Message) -> (View, Turn) {
        let id = new_id();
        let status = Status { state: State::Submitted, message: None, timestamp: None };
        let task = Task {
            id: id.clone(),
            context_id: context_id.clone(),
            status,
            artifacts: Vec::new(),
            history: Vec::new(),
        };
        let inner = Inner { task, run: Arc::default(), turn: 0, stop: CancellationToken::new() };
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        let entry = Arc::new(Entry { id: id.clone(), context_id, skill, number, inner: Mutex::new(inner) });
        self.tasks.insert(id, entry.clone());
        let mut inner = entry.lock();
        let turn = entry.start_turn(&mut inner, message);
        (inner.view(), turn)
    }

    pub(super) fn get(&self, id: &str) -> Result<Arc<Entry>, Fault> {
        self.tasks.get(id).ok_or(Fault::NoSuchTask)
    }

    /// All tasks or those of one context, newest first.
    pub(super) fn list(&self, context_id: Option<&str>) -> Vec<Task> {
        let entries = self.tasks.iter().map(|(_, entry)| entry);
        let wanted = entries.filter(|entry| context_id.is_none_or(|id| id == entry.context_id));
        let by_age: BTreeMap<_, _> = wanted.map(|entry| (entry.number, entry)).collect();
        by_age.into_values().rev().map(|entry| entry.task()).collect()
    }
}

impl Inner {
    fn view(&self) -> View {
        let at = self.run.0.borrow().events.len();
        View { task: self.task.clone(), run: self.run.clone(), at }
    }

    fn refuse_if_final(&self) -> Result<(), Fault> {
        let state = self.task.status.state;
        if state.is_final() { Err(Fault::Finished { id: self.task.id.clone(), state }) } else { Ok(()) }
    }
}

impl Entry {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn task(&self) -> Task {
        self.lock().task.clone()
    }

    /// What to follow, for a caller who comes back to an open task.
    pub(super) fn follow(&self) -> Result<View, Fault> {
        let inner = self.lock();
        inner.refuse_if_final()?;
        Ok(inner.view())
    }

    /// One more message for an open task. A task that waits for it starts a turn; one that works
    /// takes note, and the caller follows the turn under way.
    pub(super) fn resume(self: &Arc<Self>, message: Message) -> Result<(View, Option<Turn>), Fault> {
        let mut inner = self.lock();
        inner.refuse_if_final()?;
        if !inner.task.status.state.ends_turn() {
            let view = inner.view();
            inner.task.history.push(self.own(message));
            return Ok((view, None));
        }
        let at = inner.view().at;
        inner.turn += 1;
        inner.record(Event::Status(Status::now(State::Working, None)));
        let turn = self.start_turn(&mut inner, message);
        Ok((View { at, ..inner.view() }, Some(turn)))
    }

    pub(super) fn cancel(&self) -> Result<Task, Fault> {
        let mut inner = self.lock();
        let state = inner.task.status.state;
        if state.is_final() {
            return Err(Fault::NotCancelable(state));
        }
        let words = vec![Part::text("cancelled as asked")];
        let message = Message::from_agent(&self.context_id, Some(&self.id), words);
        inner.record(Event::Status(Status::now(State::Canceled, Some(message))));
        inner.stop.cancel();
        Ok(inner.task.clone())
    }

    fn own(&self, message: Message) -> Message {
        Message { task_id: Some(self.id.clone()), context_id: Some(self.context_id.clone()), ..message }
    }

    fn start_turn(self: &Arc<Self>, inner: &mut Inner, message: Message) -> Turn {
        let message = self.own(message);
        inner.task.history.push(message.clone());
        // A turn that waits in the background (auth that happens elsewhere) is superseded.
        std::mem::take(&mut inner.stop).cancel();
        Turn { entry: self.clone(), number: inner.turn, stop: inner.stop.clone(), message }
    }
}

/// The agent's hand on a task during one turn. What it does to a finished task is ignored.
pub(super) struct Turn {
    pub(super) entry: Arc<Entry>,
    /// 0 for the message that opened the task.
    pub(super) number: usize,
    pub(super) stop: CancellationToken,
    pub(super) message: Message,
}

impl Turn {
    fn inner(&self) -> Option<MutexGuard<'_, Inner>> {
        let inner = self.entry.lock();
        (inner.turn == self.number && !inner.task.status.state.is_final()).then_some(inner)
    }

    /// Moves the task to `state`; `parts` make the status message, if there are any.
    pub(super) fn status(&self, state: State, parts: Vec<Part>) {
        let message = (!parts.is_empty())
            .then(|| Message::from_agent(&self.entry.context_id, Some(&self.entry.id), parts));
        if let Some(mut inner) = self.inner() {
            inner.record(Event::Status(Status::now(state, message)));
        }
    }

    pub(super) fn artifact(&self, artifact: Artifact, chunk: Chunk) {
        if let Some(mut inner) = self.inner() {
            inner.record(Event::Artifact(artifact, chunk));
        }
    }

    /// Completes the task with one artifact.
    pub(super) fn complete(&self, name: &str, parts: Vec<Part>) {
        let artifact = Artifact { id: new_id(), name: name.into(), description: None, parts };
        self.artifact(artifact, Chunk::Whole);
        self.status(State::Completed, Vec::new());
    }

    /// Lets the callers go though the task is not done.
    pub(super) fn let_callers_go(&self) {
        if let Some(mut inner) = self.inner() {
            inner.end_run();
        }
    }
}
