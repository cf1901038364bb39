//! A background task that its owner stops and waits for.

use tokio_util::sync::CancellationToken;

use crate::background::{BackgroundTasks, OnPanic};

#[derive(Debug)]
pub(crate) struct StoppableTask {
    stop: CancellationToken,
    stopped: CancellationToken,
}

impl StoppableTask {
    /// Runs the future that `start` makes, which has to end when its token is cancelled. If it panics, the
    /// bridge stops.
    pub(super) fn spawn<F>(
        tasks: &BackgroundTasks,
        name: &'static str,
        start: impl FnOnce(CancellationToken) -> F,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stop, stopped) = (CancellationToken::new(), CancellationToken::new());
        let (task, ended) = (start(stop.clone()), stopped.clone().drop_guard());
        tasks.spawn(name, OnPanic::StopBridge, async move {
            task.await;
            drop(ended);
        });
        Self { stop, stopped }
    }

    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        self.stopped.cancelled().await;
    }
}
