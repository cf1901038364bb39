//! The background tasks of the bridge: each has a name, is tracked, and has a policy for panics.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// What happens when a background task panics. A panic is always a bug.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnPanic {
    /// The task serves one request or one probe: log the panic and go on.
    Log,
    /// The bridge cannot work without this task: shut down gracefully and exit with an error.
    StopBridge,
}

/// The tracked tasks and the token that stops them. Clones share the same tasks.
#[derive(Debug, Clone, Default)]
pub struct BackgroundTasks {
    /// For modules that spawn tasks by other means, so that [`BackgroundTasks::finished`] waits for those too.
    pub(crate) tracker: TaskTracker,
    /// The root token: cancelling it ends the loop of every background task.
    pub(crate) stop: CancellationToken,
    /// Whether a task with [`OnPanic::StopBridge`] has panicked.
    pub(crate) essential_task_panicked: Arc<AtomicBool>,
}

impl BackgroundTasks {
    pub fn spawn<F>(&self, name: &'static str, on_panic: OnPanic, future: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let this = self.clone();
        self.tracker.spawn(async move {
            if AssertUnwindSafe(future).catch_unwind().await.is_err() {
                tracing::error!(task = name, "a background task panicked; please report this bug");
                if on_panic == OnPanic::StopBridge {
                    this.essential_task_panicked.store(true, Ordering::Relaxed);
                    this.stop.cancel();
                }
            }
        });
    }

    /// Waits until all tasks have ended. Call it once, after cancelling [`BackgroundTasks::stop`].
    pub async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}
