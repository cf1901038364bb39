//! Figures for Prometheus, and whether the bridge is well: `/metrics`, `/healthz`, `/readyz`.
//!
//! Everything is counted where it happens (the agents' status, calls and output); this module only
//! reads it and writes it in the text format, so there is no registry to keep in step.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use async_nats::Client;
use async_nats::connection::State as Connection;
use axum::Router;
use axum::extract::State as Held;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::agent::call_stats::BUCKETS;
use crate::agent::{Agent, AgentState};
use crate::state::State as Stored;

const STARTING: u8 = 0;
const SERVING: u8 = 1;
const STOPPING: u8 = 2;

#[derive(Debug)]
pub(crate) struct Metrics {
    client: Client,
    state: Arc<Stored>,
    agents: Mutex<Vec<Agent>>,
    phase: AtomicU8,
}

impl Metrics {
    /// Of a bridge that has just connected.
    pub(crate) fn new(client: Client, state: Arc<Stored>) -> Self {
        Self { client, state, agents: Mutex::default(), phase: AtomicU8::new(STARTING) }
    }

    /// All agents of the settings are served.
    pub(crate) fn begun(&self) {
        self.phase.store(SERVING, Relaxed);
    }

    pub(crate) fn ends(&self) {
        self.phase.store(STOPPING, Relaxed);
    }

    /// Adds an agent, in the place of one with the same name: a name has one set of series.
    pub(crate) fn add(&self, agent: Agent) {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        match agents.iter_mut().find(|known| known.name == agent.name) {
            Some(known) => *known = agent,
            None => agents.push(agent),
        }
    }

    /// Removes this agent, and none that has replaced it.
    pub(crate) fn remove(&self, agent: &Agent) {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        agents.retain(|known| !known.is(agent));
    }

    /// Why callers should not be sent here now, if they should not.
    fn not_ready(&self) -> Option<&'static str> {
        match self.phase.load(Relaxed) {
            STARTING => Some("starting"),
            STOPPING => Some("stopping"),
            _ if self.client.connection_state() != Connection::Connected => Some("no connection to NATS"),
            _ => None,
        }
    }

    /// Everything in the text format of Prometheus.
    pub(crate) async fn text(&self) -> String {
        let pending = self.state.follow_ups.pending().await;
        let agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut out = Text::default();
        out.family("a2a_bridge_info", "gauge", "The version of the bridge.");
        out.sample("a2a_bridge_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
        out.family("a2a_bridge_nats_connected", "gauge", "Whether there is a connection to NATS.");
        let connected = self.client.connection_state() == Connection::Connected;
        out.sample("a2a_bridge_nats_connected", &[], u8::from(connected));
        if let Ok(pending) = pending {
            let help = "Questions of agents that wait for an answer.";
            out.family("a2a_bridge_follow_ups_pending", "gauge", help);
            out.sample("a2a_bridge_follow_ups_pending", &[], pending);
        }
        out.family("a2a_bridge_agent_state", "gauge", "1 for the state that the agent is in.");
        for agent in &agents {
            let now = agent.status.borrow().state;
            for state in AgentState::ALL {
                let labels = [("agent", &*agent.name), ("state", state.as_str())];
                out.sample("a2a_bridge_agent_state", &labels, u8::from(state == now));
            }
        }
        out.family("a2a_bridge_agents", "gauge", "Agents by state.");
        for state in AgentState::ALL {
            let count = agents.iter().filter(|agent| agent.status.borrow().state == state).count();
            out.sample("a2a_bridge_agents", &[("state", state.as_str())], count);
        }
        out.family("a2a_bridge_agent_restarts_total", "counter", "Starts after the first one.");
        for agent in &agents {
            let restarts = agent.status.borrow().restarts;
            out.sample("a2a_bridge_agent_restarts_total", &[("agent", &agent.name)], restarts);
        }
        out.family("a2a_bridge_calls_in_flight", "gauge", "Calls that are being worked on.");
        for agent in &agents {
            out.sample("a2a_bridge_calls_in_flight", &[("agent", &agent.name)], agent.calls.in_flight());
        }
        out.family("a2a_bridge_calls_total", "counter", "Calls that ended, by status or error code.");
        for agent in &agents {
            for (outcome, count) in agent.calls.outcomes() {
                let labels = [("agent", &*agent.name), ("outcome", outcome.as_str())];
                out.sample("a2a_bridge_calls_total", &labels, count);
            }
        }
        out.family("a2a_bridge_call_duration_seconds", "histogram", "How long calls took.");
        for agent in &agents {
            let latency = agent.calls.latency();
            let name = "a2a_bridge_call_duration_seconds";
            for (limit, count) in BUCKETS.iter().zip(latency.buckets) {
                let limit = limit.to_string();
                let labels = [("agent", &*agent.name), ("le", limit.as_str())];
                out.sample(&format!("{name}_bucket"), &labels, count);
            }
            let all = [("agent", &*agent.name), ("le", "+Inf")];
            out.sample(&format!("{name}_bucket"), &all, latency.count);
            out.sample(&format!("{name}_sum"), &[("agent", &agent.name)], latency.seconds);
            out.sample(&format!("{name}_count"), &[("agent", &agent.name)], latency.count);
        }
        for (name, help, value) in OUTPUT {
            out.family(name, "counter", help);
            for agent in &agents {
                out.sample(name, &[("agent", &agent.name)], value(agent.output.counts()));
            }
        }
        out.0
    }
}

type OutputCount = (&'static str, &'static str, fn(crate::process::output::Counts) -> u64);

const OUTPUT: [OutputCount; 3] = [
    ("a2a_bridge_agent_output_bytes_total", "What agents wrote to stdout and stderr.", |counts| counts.bytes),
    ("a2a_bridge_agent_output_dropped_bytes_total", "What of that was neither logged nor kept.", |counts| {
        counts.dropped_bytes
    }),
    ("a2a_bridge_agent_output_dropped_lines_total", "Lines neither logged nor kept.", |counts| {
        counts.dropped_lines
    }),
];

/// The text format, version 0.0.4.
#[derive(Default)]
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let labels: Vec<_> =
            labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }
}

/// Listens; what it gives back serves until `stop`.
///
/// # Errors
///
/// When the address cannot be listened on.
pub(crate) async fn serve(
    listen: SocketAddr,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> io::Result<impl Future<Output = ()> + Send> {
    let listener = TcpListener::bind(listen).await?;
    tracing::info!(address = %listener.local_addr()?, "metrics, /healthz and /readyz are served");
    let routes = Router::new()
        .route("/metrics", get(figures))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(metrics);
    Ok(async move {
        let served = axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned());
        if let Err(error) = served.await {
            tracing::error!(%error, "metrics are not served any more");
        }
    })
}

async fn figures(Held(metrics): Held<Arc<Metrics>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, metrics.text().await).into_response()
}

async fn ready(Held(metrics): Held<Arc<Metrics>>) -> Response {
    match metrics.not_ready() {
        None => "ok\n".into_response(),
        Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut text = Text::default();
        text.sample("m", &[("agent", "a\"b\\c\nd")], 1);
        assert_eq!(text.0, "m{agent=\"a\\\"b\\\\c\\nd\"} 1\n");
    }
}
