//! One agent with everything that serves it on NATS.

use std::time::Duration;

use futures_util::future::join_all;
use tokio_util::task::TaskTracker;

use crate::action::actions::CallShutdown;
use crate::agent::Agent;
use crate::bus::agent_protocol::AgentProtocol;
use crate::bus::peers::PeerService;
use crate::bus::publication::Publication;
use crate::bus::stoppable_task::StoppableTask;
use crate::text::millis;

/// How long interrupted calls may take to cancel their tasks and to reply.
const LAST_REPLIES_TIMEOUT: Duration = Duration::from_secs(4);
/// How long the removal from NATS may take. It has to wait for the server, which may have stopped reading, or be gone.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct ServedAgent {
    pub(super) agent: Agent,
    pub(super) publication: Publication,
    pub(super) peer_service: PeerService,
    pub(super) control: StoppableTask,
    pub(super) agent_protocol: Option<AgentProtocol>,
    pub(super) calls: TaskTracker,
    /// Calls to the same agent that began before a reload changed its settings. What served them withdraws and ends
    /// them; this agent must not stop before that.
    pub(super) earlier_calls: Vec<TaskTracker>,
    pub(super) call_shutdown: CallShutdown,
}

impl ServedAgent {
    /// Waits until NATS shows the agent's first state, and its actions if it is ready.
    pub(super) async fn wait_until_first_published(&self) {
        self.publication.wait_until_first_published().await;
        if let Some(agent_protocol) = &self.agent_protocol {
            agent_protocol.wait_until_first_published().await;
        }
    }

    /// Removes the agent from NATS without losing a request, and announces that in the registry. Does not wait long for
    /// a server that takes no messages.
    pub(super) async fn withdraw(&self) {
        self.peer_service.withdraw();
        let agent_protocol = async {
            if let Some(agent_protocol) = &self.agent_protocol {
                agent_protocol.withdraw().await;
            }
        };
        let withdraw = async {
            tokio::join!(self.publication.withdraw(), agent_protocol);
            let status = self.agent.status.borrow().clone();
            self.publication.announce_stopped(&status).await;
        };
        if tokio::time::timeout(WITHDRAW_TIMEOUT, withdraw).await.is_err() {
            let agent = &self.agent.name;
            tracing::warn!(%agent, timeout_ms = millis(WITHDRAW_TIMEOUT), "could not remove the agent from NATS in time; it may stay listed until the connection closes");
        }
    }

    /// Waits for calls in flight until the grace period ends, then cancels their tasks and replies with an
    /// error. The bridge stops following submitted tasks immediately; they continue at the agent.
    /// Open questions of the agent protocol end in an error, and the bridge cancels their tasks.
    pub(super) async fn finish_calls(&self, grace: Duration) {
        self.call_shutdown.begun.cancel();
        self.calls.close();
        let ended = async {
            self.calls.wait().await;
            join_all(self.earlier_calls.iter().map(TaskTracker::wait)).await;
        };
        let in_time = tokio::select! {
            biased;
            () = ended => true,
            () = tokio::time::sleep(grace) => false,
            () = self.call_shutdown.grace_over.cancelled() => false,
        };
        if !in_time {
            let (agent, calls) = (&self.agent.name, self.calls.len());
            tracing::warn!(%agent, calls, "interrupting calls that are still in flight");
            self.call_shutdown.grace_over.cancel();
            let _ = tokio::time::timeout(LAST_REPLIES_TIMEOUT, self.calls.wait()).await;
        }
    }
}
