//! Agents that a reload has removed or replaced. They finish their calls and end in the background, and
//! nobody waits for them but a stop of the bridge, and a new agent that needs their port.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use super::served_agent::ServedAgent;
use crate::agent::{Agent, Predecessors};
use crate::config::{self, Port};
use crate::metrics::Metrics;
use crate::tasks::{OnFailure, Tasks};

#[derive(Debug)]
pub(super) struct DrainingAgents {
    tasks: Tasks,
    tracker: TaskTracker,
    metrics: Arc<Metrics>,
    grace: Duration,
    leaving: Arc<Mutex<Vec<Agent>>>,
}

impl DrainingAgents {
    pub(super) fn new(tasks: Tasks, metrics: Arc<Metrics>, grace: Duration) -> Self {
        Self { tasks, tracker: TaskTracker::new(), metrics, grace, leaving: Arc::default() }
    }

    /// Marks agents that the current reload replaces, before any new one starts: a new agent may need the
    /// port of any of them.
    pub(super) fn expect(&self, replaced: impl IntoIterator<Item = Agent>) {
        lock(&self.leaving).extend(replaced);
    }

    /// The agent stays after all.
    pub(super) fn keep(&self, agent: &Agent) {
        lock(&self.leaving).retain(|leaving| !leaving.is(agent));
    }

    /// Lets an agent go. One that was replaced has a `successor` that re-announces itself after the old
    /// instance has announced `stopped`.
    pub(super) fn start(&self, served: ServedAgent, successor: Option<Arc<Notify>>) {
        let mut leaving = lock(&self.leaving);
        if !leaving.iter().any(|agent| agent.is(&served.agent)) {
            leaving.push(served.agent.clone());
        }
        drop(leaving);
        let (metrics, leaving, grace) = (Arc::clone(&self.metrics), Arc::clone(&self.leaving), self.grace);
        let tracked = self.tracker.token();
        self.tasks.spawn("leaving agent", OnFailure::StopBridge, async move {
            let began = Instant::now();
            // Orders are for the agent that is served under this name from now on.
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
            lock(&leaving).retain(|agent| !agent.is(&served.agent));
            let agent = &served.agent.name;
            tracing::info!(%agent, took = ?began.elapsed(), replaced = successor.is_some(), "agent left");
            drop(tracked);
        });
    }

    /// What an agent with these settings takes over: it starts after those that have its name or its port.
    pub(super) fn before(&self, config: &config::AgentConfig) -> Predecessors {
        let leaving = lock(&self.leaving);
        let same_name = |old: &&Agent| *old.name == *config.name;
        let calls = leaving.iter().rev().find(same_name).map(|old| Arc::clone(&old.calls));
        let in_the_way = leaving.iter().filter(|old| {
            old.config.command.is_some() && (same_name(old) || shares_port(&old.config, config))
        });
        Predecessors {
            ended: in_the_way.map(|old| old.ended().clone()).collect(),
            calls: calls.unwrap_or_default(),
        }
    }

    /// Waits until all have left; nobody may start to leave any more.
    pub(super) async fn finished(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }
}

fn lock(leaving: &Mutex<Vec<Agent>>) -> MutexGuard<'_, Vec<Agent>> {
    leaving.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the bridge launches both on the same fixed port of this machine, whatever they call the machine.
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
