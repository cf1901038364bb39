//! Agents that a reload has removed or replaced. They finish their calls and stop in the background; only a
//! stop of the bridge, and a new agent that needs their port, wait for them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::served_agent::ServedAgent;
use crate::agent::{Agent, Predecessors};
use crate::background::{BackgroundTasks, OnPanic};
use crate::config::{self, Port};
use crate::metrics::Metrics;
use crate::text::millis;

#[derive(Debug)]
pub(super) struct DrainingAgents {
    tasks: BackgroundTasks,
    tracker: TaskTracker,
    metrics: Arc<Metrics>,
    grace: Duration,
    agents: Arc<Mutex<Vec<Agent>>>,
}

impl DrainingAgents {
    pub(super) fn new(tasks: BackgroundTasks, metrics: Arc<Metrics>, grace: Duration) -> Self {
        Self { tasks, tracker: TaskTracker::new(), metrics, grace, agents: Arc::default() }
    }

    /// Adds the agents that a reload is about to replace, before any new agent starts: a new agent may need
    /// the port of any of them.
    pub(super) fn mark_replacing(&self, replaced: impl IntoIterator<Item = Agent>) {
        lock(&self.agents).extend(replaced);
    }

    /// Removes an agent that was not replaced after all.
    pub(super) fn unmark(&self, agent: &Agent) {
        lock(&self.agents).retain(|draining| !draining.is(agent));
    }

    /// Withdraws what served an agent until a reload changed its settings. The agent itself goes on, and `successor` serves
    /// it now. Calls in flight may take as long as they like, until `ending` is cancelled because the successor ends its own.
    pub(super) fn drain_calls(&self, served: ServedAgent, successor: Arc<Notify>, ending: CancellationToken) {
        let (tracked, grace) = (self.tracker.token(), self.grace);
        self.tasks.spawn("draining calls", OnPanic::StopBridge, async move {
            let began = Instant::now();
            served.control.stop().await;
            served.withdraw().await;
            successor.notify_one();
            served.calls.close();
            tokio::select! {
                () = served.calls.wait() => {}
                () = ending.cancelled() => served.finish_calls(grace).await,
            }
            tracing::debug!(agent = %served.agent.name, took_ms = millis(began.elapsed()), "calls with the previous settings drained");
            drop(tracked);
        });
    }

    /// Drains an agent in the background. The `successor` of a replaced agent announces itself again after the
    /// old instance has announced `stopped`.
    pub(super) fn drain(&self, served: ServedAgent, successor: Option<Arc<Notify>>) {
        let mut agents = lock(&self.agents);
        if !agents.iter().any(|agent| agent.is(&served.agent)) {
            agents.push(served.agent.clone());
        }
        drop(agents);
        let (metrics, agents, grace) = (Arc::clone(&self.metrics), Arc::clone(&self.agents), self.grace);
        let tracked = self.tracker.token();
        self.tasks.spawn("draining agent", OnPanic::StopBridge, async move {
            let began = Instant::now();
            // From now on, commands are for the new agent with this name.
            served.control.stop().await;
            served.withdraw().await;
            if let Some(successor) = &successor {
                successor.notify_one();
            }
            served.finish_calls(grace).await;
            served.agent.stop().await;
            if successor.is_none() {
                metrics.remove(&served.agent);
            }
            lock(&agents).retain(|agent| !agent.is(&served.agent));
            let (agent, replaced) = (&served.agent.name, successor.is_some());
            tracing::info!(%agent, took_ms = millis(began.elapsed()), replaced, "agent drained");
            drop(tracked);
        });
    }

    /// The draining agents that block the start of an agent with this configuration, because they have its
    /// name or its port, and the call statistics that it continues.
    pub(super) fn predecessors(&self, config: &config::AgentConfig) -> Predecessors {
        let agents = lock(&self.agents);
        let same_name = |old: &&Agent| *old.name == *config.name;
        let calls = agents.iter().rev().find(same_name).map(|old| Arc::clone(&old.calls));
        let blocking = agents.iter().filter(|old| {
            old.config.command.is_some() && (same_name(old) || shares_port(&old.config, config))
        });
        Predecessors {
            ended: blocking.map(|old| old.ended.clone()).collect(),
            calls: calls.unwrap_or_default(),
        }
    }

    /// Waits until all agents have stopped. No agent may start to drain after this call.
    pub(super) async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}

fn lock(agents: &Mutex<Vec<Agent>>) -> MutexGuard<'_, Vec<Agent>> {
    agents.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the bridge launches both agents on the same fixed port, whatever host name their URLs have.
fn shares_port(old: &config::AgentConfig, new: &config::AgentConfig) -> bool {
    if old.command.is_none() || new.command.is_none() {
        return false;
    }
    let port = |config: &config::AgentConfig| match config.port {
        Some(Port::Auto) => None,
        Some(Port::Fixed(port)) => Some(port),
        None => config.url.port_or_known_default(),
    };
    port(old).is_some() && port(old) == port(new)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn agent(lines: &str) -> config::AgentConfig {
        let text = format!("nats: {{ url: 'nats://127.0.0.1:4222' }}\nagents: [{{ name: a, {lines} }}]");
        config::parse(&text, "test", &|_| None).unwrap().agents.remove(0)
    }

    #[rstest]
    #[case::of_the_url(
        "url: 'http://127.0.0.1:9000', command: x",
        "url: 'http://127.0.0.1:9000', command: y",
        true
    )]
    #[case::by_another_name(
        "url: 'http://127.0.0.1:9000', command: x",
        "url: 'http://localhost:9000', command: x",
        true
    )]
    #[case::of_the_scheme(
        "url: 'http://localhost', command: x",
        "url: 'http://localhost:80', command: x",
        true
    )]
    #[case::of_the_setting(
        "url: 'http://localhost:{port}', port: 9000, command: x",
        "url: 'http://localhost:9000', command: x",
        true
    )]
    #[case::another(
        "url: 'http://127.0.0.1:9000', command: x",
        "url: 'http://127.0.0.1:9001', command: x",
        false
    )]
    #[case::found_at_the_start(
        "url: 'http://localhost:{port}', port: auto, command: x",
        "url: 'http://localhost:{port}', port: auto, command: x",
        false
    )]
    #[case::attached("url: 'http://127.0.0.1:9000'", "url: 'http://127.0.0.2:9000'", false)]
    #[case::one_attached("url: 'http://127.0.0.1:9000'", "url: 'http://127.0.0.1:9000', command: x", false)]
    fn a_port_is_shared_by_agents_that_are_launched_on_it(
        #[case] one: &str,
        #[case] other: &str,
        #[case] expected: bool,
    ) {
        let (one, other) = (agent(one), agent(other));
        assert_eq!((shares_port(&one, &other), shares_port(&other, &one)), (expected, expected));
    }
}
