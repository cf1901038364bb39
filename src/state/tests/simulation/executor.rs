//! Polls the tasks of a schedule one at a time, in an order that the seed decides.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use super::world::World;

/// Whose task it is: that of the world, or that of a replica, which ends when the replica crashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    World,
    Replica(usize),
}

pub(super) type BoxTask = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Default)]
pub(super) struct Spawner {
    new: Mutex<Vec<(Owner, BoxTask)>>,
}

impl Spawner {
    pub(super) fn spawn(&self, owner: Owner, task: impl Future<Output = ()> + Send + 'static) {
        self.new.lock().unwrap().push((owner, Box::pin(task)));
    }
}

#[derive(Default)]
struct Ready(Mutex<ReadyTasks>);

#[derive(Default)]
struct ReadyTasks {
    /// In the order in which they became ready, so that a choice by index is reproducible.
    queue: Vec<usize>,
    queued: BTreeSet<usize>,
    root: Option<Waker>,
}

struct TaskWaker {
    id: usize,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let mut ready = self.ready.0.lock().unwrap();
        if ready.queued.insert(self.id) {
            ready.queue.push(self.id);
        }
        if let Some(root) = &ready.root {
            root.wake_by_ref();
        }
    }
}

struct Task {
    owner: Owner,
    future: BoxTask,
    waker: Waker,
}

/// Ends when the driver of the world has ended.
pub(super) struct Executor {
    world: Arc<World>,
    tasks: Vec<Option<Task>>,
    ready: Arc<Ready>,
}

impl Executor {
    pub(super) fn new(world: &Arc<World>) -> Self {
        Self { world: Arc::clone(world), tasks: Vec::new(), ready: Arc::default() }
    }

    fn add_new(&mut self) {
        let new = std::mem::take(&mut *self.world.spawner.new.lock().unwrap());
        for (owner, future) in new {
            let id = self.tasks.len();
            let waker = Arc::new(TaskWaker { id, ready: Arc::clone(&self.ready) });
            waker.clone().wake();
            let is_ended = matches!(owner, Owner::Replica(replica) if !self.world.is_running(replica));
            let task = Task { owner, future, waker: waker.into() };
            self.tasks.push((!is_ended).then_some(task));
        }
    }

    /// Drops all tasks of replicas that have crashed: what they hold in memory is gone.
    fn drop_crashed(&mut self) {
        for replica in self.world.take_crashed() {
            for slot in &mut self.tasks {
                if slot.as_ref().is_some_and(|task| task.owner == Owner::Replica(replica)) {
                    // The drop of a task may wake others, or start the end of a claim, which cannot reach the store.
                    drop(slot.take());
                }
            }
        }
    }

    fn next(&self) -> Option<usize> {
        let mut ready = self.ready.0.lock().unwrap();
        if ready.queue.is_empty() {
            return None;
        }
        let index = self.world.below(ready.queue.len());
        let id = ready.queue.swap_remove(index);
        ready.queued.remove(&id);
        Some(id)
    }

    /// Polls one task. Returns whether there was one.
    fn step(&mut self) -> bool {
        self.add_new();
        self.drop_crashed();
        let Some(id) = self.next() else { return false };
        let Some(task) = self.tasks.get(id).and_then(Option::as_ref) else { return true };
        if let Owner::Replica(replica) = task.owner {
            if let Some(until) = self.world.stalled_until(replica) {
                let waker = task.waker.clone();
                self.world.spawner.spawn(Owner::World, async move {
                    tokio::time::sleep_until(until).await;
                    waker.wake();
                });
                return true;
            }
            if self.world.crashes_now(replica) {
                self.drop_crashed();
                return true;
            }
        }
        let Some(task) = self.tasks.get_mut(id).and_then(Option::as_mut) else { return true };
        self.world.set_clock_of(task.owner);
        let waker = task.waker.clone();
        let poll = task.future.as_mut().poll(&mut Context::from_waker(&waker));
        self.world.set_clock_of(Owner::World);
        if poll.is_ready()
            && let Some(slot) = self.tasks.get_mut(id)
        {
            *slot = None;
        }
        true
    }
}

impl Future for Executor {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.ready.0.lock().unwrap().root = Some(context.waker().clone());
        for _ in 0..4 {
            if self.world.is_over() {
                return Poll::Ready(());
            }
            if !self.step() {
                return Poll::Pending;
            }
        }
        // Tasks that the code under test starts by itself run in between.
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

/// Lets other tasks run, without the passing of time.
pub(super) async fn yield_now() {
    let mut is_polled = false;
    std::future::poll_fn(move |context| {
        if is_polled {
            return Poll::Ready(());
        }
        is_polled = true;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
