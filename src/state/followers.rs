//! How a call that follows a task learns that somebody else has seen the end of that task.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

type Key = (Arc<str>, Box<str>);

/// The followers of all tasks, by agent and task.
#[derive(Debug, Default)]
pub(super) struct Followers(Mutex<HashMap<Key, Followed>>);

#[derive(Debug)]
struct Followed {
    ended: CancellationToken,
    followers: usize,
}

/// Follows a task until it is dropped.
#[derive(Debug)]
pub(crate) struct Follower<'a> {
    followers: &'a Followers,
    key: Key,
    ended: CancellationToken,
}

impl Followers {
    pub(super) fn follow(&self, agent: &Arc<str>, id: &str) -> Follower<'_> {
        let key: Key = (Arc::clone(agent), id.into());
        let mut followed = self.lock();
        let followed = followed
            .entry(key.clone())
            .or_insert_with(|| Followed { ended: CancellationToken::new(), followers: 0 });
        followed.followers += 1;
        Follower { followers: self, key, ended: followed.ended.clone() }
    }

    /// Tells those who follow the task that it has ended.
    pub(super) fn end(&self, agent: &Arc<str>, id: &str) {
        let mut all = self.lock();
        if let Some(followed) = all.remove(&(Arc::clone(agent), id.into())) {
            // Under the lock: a follower that is dropped meanwhile must not count for those who come after the end.
            followed.ended.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Followed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Follower<'_> {
    /// Whether this is the task that is followed.
    pub(crate) fn follows(&self, id: &str) -> bool {
        *self.key.1 == *id
    }

    /// Resolves when somebody else has seen the end of the task.
    pub(crate) fn ended(&self) -> impl Future<Output = ()> + use<> {
        self.ended.clone().cancelled_owned()
    }
}

impl Drop for Follower<'_> {
    fn drop(&mut self) {
        let mut all = self.followers.lock();
        // After the end, the entry has gone, and one with the same key belongs to others.
        if !self.ended.is_cancelled()
            && let Some(followed) = all.get_mut(&self.key)
        {
            followed.followers -= 1;
            if followed.followers == 0 {
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
    fn an_end_is_told_to_all_followers_of_that_task_alone_and_nothing_stays_behind() {
        let followers = Followers::default();
        let agent: Arc<str> = "a".into();
        let (one, two) = (followers.follow(&agent, "t"), followers.follow(&agent, "t"));
        let others = [followers.follow(&agent, "u"), followers.follow(&"b".into(), "t")];
        followers.end(&agent, "t");
        let again = followers.follow(&agent, "t");
        assert_eq!([&one, &two].map(|follower| follower.ended().now_or_never()), [Some(()); 2]);
        drop([one, two]);
        assert_eq!(again.ended().now_or_never(), None);
        assert_eq!(others.each_ref().map(|other| other.ended().now_or_never()), [None; 2]);
        assert_eq!(followers.lock().len(), 3);
        drop((again, others));
        assert_eq!(followers.lock().len(), 0);
    }
}
