//! Notifies a call that follows a task when another request, such as a cancel, has seen the end of that task.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// Agent and task id. A subscription shares both with its entry.
type TaskKey = (Arc<str>, Arc<str>);

/// The subscriptions of all tasks.
#[derive(Debug, Default)]
pub(super) struct TaskEnds(Mutex<HashMap<TaskKey, Subscribers>>);

#[derive(Debug)]
struct Subscribers {
    ended: CancellationToken,
    count: usize,
}

/// Dropping it ends the subscription.
#[derive(Debug)]
pub(crate) struct TaskEndSubscription<'a> {
    task_ends: &'a TaskEnds,
    key: TaskKey,
    ended: CancellationToken,
}

impl TaskEnds {
    pub(super) fn subscribe(&self, agent: &Arc<str>, id: &str) -> TaskEndSubscription<'_> {
        let key: TaskKey = (Arc::clone(agent), id.into());
        let mut all = self.lock();
        let new = || Subscribers { ended: CancellationToken::new(), count: 0 };
        let subscribers = all.entry(key.clone()).or_insert_with(new);
        subscribers.count += 1;
        TaskEndSubscription { task_ends: self, key, ended: subscribers.ended.clone() }
    }

    pub(super) fn notify(&self, agent: &Arc<str>, id: &str) {
        let mut all = self.lock();
        if let Some(subscribers) = all.remove(&(Arc::clone(agent), id.into())) {
            // Under the lock: a subscription that is dropped now must not reduce the count of later subscribers.
            subscribers.ended.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TaskKey, Subscribers>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TaskEndSubscription<'_> {
    pub(crate) fn is_for(&self, id: &str) -> bool {
        *self.key.1 == *id
    }

    pub(crate) fn ended(&self) -> impl Future<Output = ()> + use<> {
        self.ended.clone().cancelled_owned()
    }
}

impl Drop for TaskEndSubscription<'_> {
    fn drop(&mut self) {
        let mut all = self.task_ends.lock();
        // After the end, an entry with the same key belongs to later subscribers.
        if !self.ended.is_cancelled()
            && let Some(subscribers) = all.get_mut(&self.key)
        {
            subscribers.count -= 1;
            if subscribers.count == 0 {
                all.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn all_subscribers_of_a_task_learn_of_its_end_and_no_entry_remains() {
        let ends = TaskEnds::default();
        let agent: Arc<str> = "a".into();
        let (one, two) = (ends.subscribe(&agent, "t"), ends.subscribe(&agent, "t"));
        let others = [ends.subscribe(&agent, "u"), ends.subscribe(&"b".into(), "t")];
        ends.notify(&agent, "t");
        let again = ends.subscribe(&agent, "t");
        assert_eq!([&one, &two].map(|subscription| subscription.ended().now_or_never()), [Some(()); 2]);
        drop([one, two]);
        assert_eq!(again.ended().now_or_never(), None);
        assert_eq!(others.each_ref().map(|other| other.ended().now_or_never()), [None; 2]);
        assert_eq!(ends.lock().len(), 3);
        drop((again, others));
        assert_eq!(ends.lock().len(), 0);
    }
}
