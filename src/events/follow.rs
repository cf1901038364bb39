//! Reads a log and goes on with what is appended, without gaps and without repetitions.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::{BoxStream, TryStreamExt as _};

use super::store::{EventStore, LogKey, LogUnavailable, StoredBatch};

/// How often a quiet log is compared with the store, because the last message of a subscription may be lost.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Batches of a key after a sequence: those that are stored, and then those that are appended. Never ends by itself.
///
/// The subscription begins before the log is read, so that nothing is missed in between; the sequence shows what was read
/// already.
pub(crate) struct Follower {
    store: Arc<dyn EventStore>,
    key: LogKey,
    live: BoxStream<'static, StoredBatch>,
    /// The sequence of the last batch that was returned.
    last: u64,
    /// Batches that were read and not returned yet.
    read: std::collections::VecDeque<StoredBatch>,
    /// Whether the store may have batches that were not read.
    is_behind: bool,
}

/// Batches that are read ahead; the rest is read later.
const READ_AHEAD: usize = 64;

impl Follower {
    pub(crate) async fn start(
        store: &Arc<dyn EventStore>,
        key: LogKey,
        after: u64,
    ) -> Result<Self, LogUnavailable> {
        let live = store.subscribe(&key).await?;
        let (store, read) = (Arc::clone(store), std::collections::VecDeque::new());
        Ok(Self { store, key, live, last: after, read, is_behind: true })
    }

    /// The next batch. Waits until there is one.
    pub(crate) async fn next(&mut self) -> Result<StoredBatch, LogUnavailable> {
        loop {
            if let Some(batch) = self.read.pop_front() {
                self.last = batch.sequence;
                return Ok(batch);
            }
            if self.is_behind {
                let batches = self.store.read(&self.key, self.last).take(READ_AHEAD);
                self.read = batches.try_collect().await?;
                self.is_behind = self.read.len() == READ_AHEAD;
                continue;
            }
            match tokio::time::timeout(CHECK_INTERVAL, self.live.next()).await {
                Ok(Some(batch)) if batch.sequence <= self.last => {}
                Ok(Some(batch)) if batch.previous.is_some_and(|previous| previous <= self.last) => {
                    self.last = batch.sequence;
                    return Ok(batch);
                }
                Ok(Some(_)) => self.is_behind = true,
                // The connection is gone, and with it the subscription.
                Ok(None) => return Err(LogUnavailable),
                Err(_) => {
                    let last = self.store.last_sequence(&self.key).await?;
                    self.is_behind = last.is_some_and(|last| last > self.last);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::caller::Caller;
    use crate::events::memory_store::MemoryEventStore;
    use crate::events::store::NewBatch;

    async fn append(store: &MemoryEventStore, key: &LogKey, numbers: std::ops::Range<usize>) {
        for number in numbers {
            let (id, body) = (format!("{:?}{number}", key.scope), number.to_string().into());
            let batch = NewBatch { key, id, run: None, body, is_transient: false, expects_first: false };
            store.append(batch).await.unwrap();
        }
    }

    async fn expect(follower: &mut Follower, numbers: std::ops::Range<usize>) {
        for number in numbers {
            assert_eq!(follower.next().await.unwrap().body, number.to_string());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_missed_or_repeated_even_if_a_subscription_loses_messages() {
        let memory = Arc::new(MemoryEventStore::default());
        let store = Arc::clone(&memory) as Arc<dyn EventStore>;
        let [key, other] = ["s", "other"].map(|id| LogKey::session(&Caller::default(), id));
        append(&memory, &key, 0..READ_AHEAD + 10).await;
        let mut follower = Follower::start(&store, key.clone(), 0).await.unwrap();
        // Both read and received.
        append(&memory, &key, READ_AHEAD + 10..100).await;
        append(&memory, &other, 0..3).await;
        expect(&mut follower, 0..100).await;
        append(&memory, &key, 100..110).await;
        expect(&mut follower, 100..110).await;
        // A gap before a message that was received.
        memory.loses_live.store(true, Relaxed);
        append(&memory, &key, 110..115).await;
        memory.loses_live.store(false, Relaxed);
        append(&memory, &key, 115..116).await;
        expect(&mut follower, 110..116).await;
        // The last messages are lost.
        memory.loses_live.store(true, Relaxed);
        append(&memory, &key, 116..120).await;
        expect(&mut follower, 116..120).await;
        memory.is_down.store(true, Relaxed);
        assert_eq!(follower.next().await.unwrap_err(), LogUnavailable);
    }
}
