//! How a bridge ends: the order of the stop, and how one agent leaves while the others stay.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

use super::{Bridge, Served};
use crate::bus::service::round_trip;

/// How long calls that were cut off may take to cancel at the agent and to reply.
const LAST_WORDS: Duration = Duration::from_secs(4);
/// How long the last tasks may take to leave.
const LAST_TASKS: Duration = Duration::from_secs(2);

impl Bridge {
    /// Skips every grace time of a [`Bridge::stop`] under way.
    pub fn hurry(&self) {
        self.stop.hurry.cancel();
        self.hurry_agents.cancel();
    }

    /// Lets one agent go, while the others stay.
    pub(super) async fn leave(&self, served: &Served) {
        self.metrics.remove(&served.agent.name);
        served.withdraw().await;
        served.finish_calls(self.grace).await;
        served.agent.stop().await;
        served.say_goodbye().await;
    }

    /// Off the mesh, let calls finish, cancel the rest, end the agents, close NATS.
    ///
    /// A change of what is served that is under way ends beside it: those who were leaving have their
    /// grace, and nobody new is served.
    pub async fn stop(&self) {
        self.metrics.ends();
        self.closing.cancel();
        let served = self.served().take().unwrap_or_default();
        let (_change, ()) = tokio::join!(self.change.lock(), self.end(&served));

        let step = Step::begin("NATS closed");
        for served in &served {
            served.say_goodbye().await;
        }
        // The connection may only be closed once the last replies have arrived.
        if let Err(error) = round_trip(&self.mesh.client).await {
            tracing::warn!(%error, "the last replies may not have reached NATS");
        }
        // Without a connection its queue may be full, and nobody empties it.
        let _ = tokio::time::timeout(LAST_TASKS, self.mesh.client.drain()).await;
        self.tasks.stopping().cancel();
        let _ = tokio::time::timeout(LAST_TASKS, self.tasks.finished()).await;
        step.end();
    }

    /// Ends agents and the calls to them.
    async fn end(&self, served: &[Served]) {
        let step = Step::begin("actions taken off the mesh");
        join_all(served.iter().map(Served::withdraw)).await;
        step.end();

        let step = Step::begin("calls finished");
        join_all(served.iter().map(|served| served.finish_calls(self.grace))).await;
        step.end();

        let step = Step::begin("agents ended");
        join_all(served.iter().map(|served| served.agent.stop())).await;
        step.end();
    }
}

impl Served {
    /// Off the mesh, without losing a request.
    async fn withdraw(&self) {
        let agent_protocol = async {
            if let Some(agent_protocol) = &self.agent_protocol {
                agent_protocol.withdraw().await;
            }
        };
        tokio::join!(self.publication.withdraw(), agent_protocol);
    }

    /// Lets calls finish within their grace; the rest is cancelled at the agent, and told so. What nobody
    /// waits for, or what waits for somebody, has no use for the grace.
    async fn finish_calls(&self, grace: Duration) {
        self.stop.leave.cancel();
        self.calls.close();
        let in_time = tokio::select! {
            biased;
            () = self.calls.wait() => true,
            () = tokio::time::sleep(grace) => false,
            () = self.stop.hurry.cancelled() => false,
        };
        if !in_time {
            let (agent, calls) = (&self.agent.name, self.calls.len());
            tracing::warn!(%agent, calls, "calls still in flight are cut off");
            self.stop.hurry.cancel();
            let _ = tokio::time::timeout(LAST_WORDS, self.calls.wait()).await;
        }
    }

    async fn say_goodbye(&self) {
        let status = self.agent.status.borrow().clone();
        self.publication.farewell(&status).await;
        self.control.stop().await;
    }
}

/// One step of the stop, with its duration in the log.
struct Step(&'static str, Instant);

impl Step {
    fn begin(name: &'static str) -> Self {
        Self(name, Instant::now())
    }

    fn end(self) {
        tracing::info!(took = ?self.1.elapsed(), "{}", self.0);
    }
}
