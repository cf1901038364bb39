//! Every background task of the bridge: named, tracked, with a consequence when it fails.
//!
//! A [`Tasks`] is cheap to clone. [`Tasks::stopping`] is the root token that ends all loops;
//! [`Tasks::finished`] waits until the last one has left.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What follows when a task panics. A panic is always a defect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The defect concerns one request or one probe: say so and go on.
    Log,
    /// The bridge cannot do its work without this task: stop in order and leave with an error.
    StopBridge,
}

/// The tracked tasks and the token that ends them.
#[derive(Debug, Clone, Default)]
pub struct Tasks {
    tracker: TaskTracker,
    stop: CancellationToken,
    defect: Arc<AtomicBool>,
}

impl Tasks {
    /// Runs `future` in the background under `name`.
    pub fn spawn<F>(&self, name: &'static str, on_failure: OnFailure, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let this = self.clone();
        self.tracker.spawn(async move {
            if AssertUnwindSafe(future).catch_unwind().await.is_err() {
                tracing::error!(
                    task = name,
                    "a task of the bridge panicked; this is a defect, please report it"
                );
                if on_failure == OnFailure::StopBridge {
                    this.defect.store(true, Ordering::Relaxed);
                    this.stop.cancel();
                }
            }
        });
    }

    /// The tracker, for layers that only need to be waited for.
    pub fn tracker(&self) -> &TaskTracker {
        &self.tracker
    }

    /// Ends every loop when cancelled.
    pub fn stopping(&self) -> &CancellationToken {
        &self.stop
    }

    /// Whether a task that the bridge depends on has panicked.
    pub fn has_defect(&self) -> bool {
        self.defect.load(Ordering::Relaxed)
    }

    /// Waits until all tasks have left; call it once, after [`Tasks::stopping`] was cancelled.
    pub async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}
