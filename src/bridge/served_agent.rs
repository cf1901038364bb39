//! One agent and its places on the context.

use std::time::Duration;

use tokio_util::task::TaskTracker;

use crate::action::actions::Stop;
use crate::agent::Agent;
use crate::bus::agent_protocol::AgentProtocol;
use crate::bus::control::Control;
use crate::bus::publication::Publication;

/// How long calls that were cut off may take to cancel at the agent and to reply.
const LAST_REPLIES: Duration = Duration::from_secs(4);

#[derive(Debug)]
pub(super) struct ServedAgent {
    pub(super) agent: Agent,
    pub(super) publication: Publication,
    pub(super) control: Control,
    /// For clients of the agent protocol.
    pub(super) agent_protocol: Option<AgentProtocol>,
    pub(super) calls: TaskTracker,
    pub(super) stop: Stop,
}

impl ServedAgent {
    /// Waits until the mesh shows the agent's state, and its actions if it is ready.
    pub(super) async fn shown(&self) {
        // An error means that the publication has ended, and then there is nothing to wait for.
        let _ = self.publication.shown().wait_for(Option::is_some).await;
        if let Some(agent_protocol) = &self.agent_protocol {
            agent_protocol.shown().await;
        }
    }

    /// Takes the agent off the mesh without losing a request, and announces that in the registry.
    pub(super) async fn withdraw(&self) {
        let agent_protocol = async {
            if let Some(agent_protocol) = &self.agent_protocol {
                agent_protocol.withdraw().await;
            }
        };
        tokio::join!(self.publication.withdraw(), agent_protocol);
        let status = self.agent.status.borrow().clone();
        self.publication.farewell(&status).await;
    }

    /// Lets calls finish within their grace period; the rest is cancelled at the agent, and its callers
    /// get an error. Submitted tasks and open questions end at once: nobody waits for their reply here.
    pub(super) async fn finish_calls(&self, grace: Duration) {
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
            let _ = tokio::time::timeout(LAST_REPLIES, self.calls.wait()).await;
        }
    }
}
