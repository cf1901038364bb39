//! Waiting for an agent within the limits of a call.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::OptionFuture;
use tokio::time::Instant;

use super::poller::Polled;
use crate::a2a::LiveAgent;
use crate::action::actions::Actions;
use crate::action::progress::{Listener, Progress};
use crate::action::request::ReplyMode;
use crate::telemetry::trace_context::TraceContext;

/// Why a wait ended without a response from the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::action) enum Interruption {
    Deadline,
    Idle,
    /// The bridge shuts down. The wait ends immediately for a submitted task, otherwise after the grace period.
    Shutdown,
    /// The agent's process has exited, or the supervisor stops it.
    AgentExited,
    /// No caller listens.
    Abandoned,
}

#[derive(Debug)]
pub(in crate::action) struct AgentWaiter<'a, P> {
    pub(super) actions: &'a Actions,
    pub(in crate::action) live_agent: Arc<LiveAgent>,
    pub(super) progress: &'a mut P,
    pub(super) mode: ReplyMode,
    pub(super) trace: &'a TraceContext,
    pub(in crate::action) deadline: Instant,
    pub(super) has_task_id: bool,
    /// No caller listens: the run cancels the task as soon as its id is known.
    pub(super) is_abandoned: bool,
}

impl<P: Progress> AgentWaiter<'_, P> {
    /// Waits for `wait`, unless the call's deadline, a shutdown, the exit of the agent or the loss of the caller comes
    /// first.
    pub(in crate::action) async fn within<T>(
        &mut self,
        wait: impl Future<Output = T>,
    ) -> Result<T, Interruption> {
        self.until(self.deadline, wait).await
    }

    /// Waits like [`Self::within`], but not longer than `stream_idle_timeout` for an event of a stream.
    pub(super) async fn with_idle_timeout<T>(
        &mut self,
        wait: impl Future<Output = T>,
    ) -> Result<T, Interruption> {
        // In mode `final` the caller does not see the stream, and the call has a timeout of its own.
        if self.mode == ReplyMode::Final {
            return self.within(wait).await;
        }
        let idle = Instant::now() + self.actions.config.stream_idle_timeout;
        let result = self.until(idle.min(self.deadline), wait).await;
        result.map_err(|why| {
            if why == Interruption::Deadline && idle < self.deadline { Interruption::Idle } else { why }
        })
    }

    async fn until<T>(&mut self, end: Instant, wait: impl Future<Output = T>) -> Result<T, Interruption> {
        let mut wait = pin!(wait);
        // The next event of a stream is often available immediately; then no timer is needed.
        if let Some(result) = wait.as_mut().now_or_never() {
            return Ok(result);
        }
        self.progress.flush().await;
        // Cloning a token takes a lock that all calls share, so the tokens are borrowed.
        let (actions, live_agent) = (self.actions, Arc::clone(&self.live_agent));
        // No caller waits for a submitted task, so a shutdown does not wait either.
        let leaves_immediately = self.mode == ReplyMode::Submit && self.has_task_id;
        let mut agent_exited = pin!(live_agent.exited.cancelled());
        let mut grace_over = pin!(actions.call_shutdown.grace_over.cancelled());
        let mut shutdown_begun = pin!(actions.call_shutdown.begun.cancelled());
        let mut end = pin!(tokio::time::sleep_until(end));
        loop {
            let keep_alive_interval = self.progress.keep_alive_interval().filter(|_| !self.is_abandoned);
            let silence = OptionFuture::from(keep_alive_interval.map(tokio::time::sleep));
            tokio::select! {
                biased;
                result = &mut wait => return Ok(result),
                () = &mut agent_exited => return Err(Interruption::AgentExited),
                () = &mut end => return Err(Interruption::Deadline),
                () = &mut grace_over => return Err(Interruption::Shutdown),
                () = &mut shutdown_begun, if leaves_immediately => return Err(Interruption::Shutdown),
                Some(()) = silence => {
                    self.is_abandoned |= self.progress.keep_alive().await == Listener::Disconnected;
                    if self.is_abandoned && self.has_task_id {
                        return Err(Interruption::Abandoned);
                    }
                }
            }
        }
    }

    /// Reads a task from the agent once.
    pub(in crate::action) async fn get_task(
        &mut self,
        task_id: &str,
        timeout: Duration,
    ) -> Result<Polled, Interruption> {
        let (live_agent, trace) = (Arc::clone(&self.live_agent), self.trace);
        let get = tokio::time::timeout(timeout, Box::pin(live_agent.client.get(task_id, trace)));
        Ok(match self.within(get).await? {
            Ok(Ok(task)) => Polled::Task(task),
            Ok(Err(error)) => Polled::Failed(error),
            Err(_) => Polled::TimedOut,
        })
    }
}
