//! The HTTP endpoints for operators: `/metrics` for Prometheus, `/healthz` and `/readyz`.
//!
//! Agents, calls and process output keep their own counters. A scrape reads them, so there is no second
//! registry to keep up to date.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State as ConnectionState;
use axum::Router;
use axum::extract::State as Shared;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge, Histogram};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::agent::call_stats::BUCKETS;
use crate::agent::{Agent, AgentState};
use crate::bus::connect;
use crate::memory::MemoryBudget;
use crate::state::State as BridgeState;
use crate::state::quota::{AgentQuota, KindUsage, QuotaKind};

/// At most this many connections are served at the same time; more have to wait.
const MAX_CONNECTIONS: usize = 64;
/// Within this time after the connection, a client has to send its request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Within this time after the connection, a client has to read the response.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(30);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

const NO_CONNECTION: &str = "no connection to NATS";
const NOT_CONNECTED: &str = "waiting for the first connection to NATS";

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug)]
pub(crate) struct Metrics {
    client: Client,
    state: Arc<BridgeState>,
    memory: Arc<MemoryBudget>,
    agents: Mutex<Vec<Agent>>,
    /// Why `/readyz` fails, regardless of the state of the NATS connection.
    not_ready: Mutex<Option<&'static str>>,
}

impl Metrics {
    pub(crate) fn new(client: Client, state: Arc<BridgeState>, memory: Arc<MemoryBudget>) -> Self {
        let not_ready = Mutex::new(Some("starting"));
        Self { client, state, memory, agents: Mutex::default(), not_ready }
    }

    /// Every configured agent is published: `/readyz` succeeds from now on.
    pub(crate) fn set_serving(&self) {
        self.set_not_ready(None);
    }

    /// The bridge stops: `/readyz` fails from now on.
    pub(crate) fn set_stopping(&self) {
        self.set_not_ready(Some("stopping"));
    }

    fn set_not_ready(&self, reason: Option<&'static str>) {
        *self.not_ready.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }

    /// Adds an agent, or replaces the one with the same name: a name has one set of series.
    pub(crate) fn add(&self, agent: Agent) {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        match agents.iter_mut().find(|known| known.name == agent.name) {
            Some(known) => *known = agent,
            None => agents.push(agent),
        }
    }

    /// Removes exactly this agent, not one that has replaced it under the same name.
    pub(crate) fn remove(&self, agent: &Agent) {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        agents.retain(|known| !known.is(agent));
    }

    fn is_connected(&self) -> bool {
        self.client.connection_state() == ConnectionState::Connected
    }

    fn not_ready_reason(&self) -> Option<&'static str> {
        let reason = *self.not_ready.lock().unwrap_or_else(PoisonError::into_inner);
        reason.or_else(|| (!self.is_connected()).then_some(NO_CONNECTION))
    }

    /// All metrics in the OpenMetrics text format.
    async fn encode(&self) -> Result<String, fmt::Error> {
        let pending_follow_ups = self.state.follow_ups.pending().await.ok().map(|count| count as u64);
        let agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let quota = |agent: &Agent| Some((Arc::clone(&agent.name), self.state.quotas.find(&agent.name)?));
        let snapshot = Snapshot {
            is_connected: self.is_connected(),
            malformed_messages: connect::malformed_messages(&self.client),
            pending_follow_ups,
            memory: Arc::clone(&self.memory),
            quotas: agents.iter().filter_map(quota).collect(),
            agents,
        };
        snapshot.into_text()
    }
}

/// Everything one scrape reports.
#[derive(Debug)]
struct Snapshot {
    is_connected: bool,
    malformed_messages: u64,
    pending_follow_ups: Option<u64>,
    memory: Arc<MemoryBudget>,
    quotas: Vec<(Arc<str>, Arc<AgentQuota>)>,
    agents: Vec<Agent>,
}

impl Snapshot {
    fn into_text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut out = String::new();
        text::encode(&mut out, &registry)?;
        Ok(out)
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let version = [([("version", env!("CARGO_PKG_VERSION"))], 1)];
        family(&mut encoder, Gauge, "a2a_bridge_info", "Version of the bridge.", version)?;
        let (name, help) = ("a2a_bridge_nats_connected", "Whether the bridge is connected to NATS.");
        encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&u64::from(self.is_connected))?;
        let help = "NATS messages that were dropped because their subject or headers cannot be parsed.";
        let name = "a2a_bridge_nats_malformed_messages";
        let mut malformed = encoder.encode_descriptor(name, help, None, Counter)?;
        malformed.encode_counter::<NoLabelSet, _, u64>(&self.malformed_messages, None)?;
        if let Some(pending) = self.pending_follow_ups {
            let (name, help) = ("a2a_bridge_follow_ups_pending", "Agent questions that wait for an answer.");
            encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&pending)?;
        }
        for (name, help, value) in [
            ("a2a_bridge_memory_limit_bytes", "Memory for calls in flight.", self.memory.limit()),
            ("a2a_bridge_memory_used_bytes", "Memory that calls in flight use.", self.memory.used()),
            (
                "a2a_bridge_memory_withheld_bytes",
                "Memory that calls may not use, because the process is near limits.memory.",
                self.memory.withheld(),
            ),
        ] {
            encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&(value as u64))?;
        }
        let states: Vec<_> = self.agents.iter().map(|agent| (agent, agent.status.borrow().state)).collect();
        let agent_states = states.iter().flat_map(|(agent, current)| {
            AgentState::ALL.into_iter().map(|state| {
                ([("agent", &*agent.name), ("state", state.as_str())], u64::from(state == *current))
            })
        });
        let help = "1 for the current state of the agent, 0 for the others.";
        family(&mut encoder, Gauge, "a2a_bridge_agent_state", help, agent_states)?;
        let by_state = AgentState::ALL.into_iter().map(|state| {
            let count = states.iter().filter(|(_, current)| *current == state).count();
            ([("state", state.as_str())], count as u64)
        });
        family(&mut encoder, Gauge, "a2a_bridge_agents", "Agents by state.", by_state)?;
        for (kind, name, help, value) in PER_AGENT {
            let samples = self.agents.iter().map(|agent| ([("agent", &*agent.name)], value(agent)));
            family(&mut encoder, kind, name, help, samples)?;
        }
        for (kind, name, help, value) in PER_KIND {
            let samples = self.quotas.iter().flat_map(|(agent, quota)| {
                QuotaKind::ALL.into_iter().map(move |kind| {
                    ([("agent", &**agent), ("kind", kind.label())], value(quota.usage(kind)))
                })
            });
            family(&mut encoder, kind, name, help, samples)?;
        }
        let outcomes = self.agents.iter().flat_map(|agent| {
            let outcomes = agent.calls.outcomes().into_iter();
            outcomes
                .map(|(outcome, count)| ([("agent", agent.name.to_string()), ("outcome", outcome)], count))
        });
        let help = "Finished calls by status or error code.";
        family(&mut encoder, Counter, "a2a_bridge_calls", help, outcomes)?;
        let name = "a2a_bridge_call_duration_seconds";
        let mut durations = encoder.encode_descriptor(name, "Duration of calls.", None, Histogram)?;
        self.agents.iter().try_for_each(|agent| encode_durations(&mut durations, agent))
    }
}

type AgentMetric = (MetricType, &'static str, &'static str, fn(&Agent) -> u64);

/// The encoder adds `_total` to the names of counters.
const PER_AGENT: [AgentMetric; 7] = [
    (Counter, "a2a_bridge_agent_restarts", "Process starts after the first one.", |agent| {
        agent.status.borrow().restarts.into()
    }),
    (Gauge, "a2a_bridge_calls_in_flight", "Calls in flight.", |agent| agent.calls.in_flight() as u64),
    (Gauge, "a2a_bridge_memory_bytes", "Memory that the calls of an agent use.", |agent| {
        agent.memory.used() as u64
    }),
    (Counter, "a2a_bridge_memory_refusals", "Refusals because the memory for calls was used up.", |agent| {
        agent.memory.refusals()
    }),
    (Counter, "a2a_bridge_agent_output_bytes", "Bytes that agents wrote to stdout and stderr.", |agent| {
        agent.output.counts().bytes
    }),
    (Counter, "a2a_bridge_agent_output_dropped_bytes", "Output bytes neither logged nor kept.", |agent| {
        agent.output.counts().dropped_bytes
    }),
    (Counter, "a2a_bridge_agent_output_dropped_lines", "Output lines neither logged nor kept.", |agent| {
        agent.output.counts().dropped_lines
    }),
];

type KindMetric = (MetricType, &'static str, &'static str, fn(&KindUsage) -> u64);

const PER_KIND: [KindMetric; 4] = [
    (Gauge, "a2a_bridge_state_entries", "Entries of state in memory.", |usage| {
        usage.entries.load(Relaxed) as u64
    }),
    (Gauge, "a2a_bridge_state_bytes", "Memory of these entries.", |usage| usage.bytes.load(Relaxed) as u64),
    (Counter, "a2a_bridge_state_evictions", "Entries removed before they expired.", |usage| {
        usage.evictions.load(Relaxed)
    }),
    (Counter, "a2a_bridge_state_refusals", "Entries for which there was no room.", |usage| {
        usage.refusals.load(Relaxed)
    }),
];

fn family<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    kind: MetricType,
    name: &str,
    help: &str,
    samples: impl IntoIterator<Item = (L, u64)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, kind)?;
    for (labels, value) in samples {
        let mut sample = family.encode_family(&labels)?;
        match kind {
            Counter => sample.encode_counter::<NoLabelSet, _, u64>(&value, None)?,
            _ => sample.encode_gauge(&value)?,
        }
    }
    Ok(())
}

fn encode_durations(family: &mut MetricEncoder<'_>, agent: &Agent) -> fmt::Result {
    let latency = agent.calls.latency();
    // The encoder accumulates buckets, so convert the cumulative counts back to per-bucket counts.
    let mut below = 0;
    let mut buckets: Vec<_> = BUCKETS
        .into_iter()
        .zip(latency.buckets)
        .map(|(limit, up_to)| (limit, up_to - std::mem::replace(&mut below, up_to)))
        .collect();
    // A call that ends during the scrape may be in a bucket and not yet in the count.
    let count = latency.count.max(below);
    buckets.push((f64::INFINITY, count - below));
    family.encode_family(&[("agent", &*agent.name)])?.encode_histogram::<NoLabelSet>(
        latency.seconds,
        count,
        &buckets,
        None,
    )
}

/// What the endpoints serve. There are no metrics before the first connection to NATS.
#[derive(Debug, Default)]
pub(crate) struct Endpoints(OnceLock<Arc<Metrics>>);

impl Endpoints {
    pub(crate) fn set_metrics(&self, metrics: Arc<Metrics>) {
        let _ = self.0.set(metrics);
    }
}

/// Binds the address, and returns a future that serves until `stop` is cancelled.
pub(crate) async fn serve(
    listen: SocketAddr,
    endpoints: Arc<Endpoints>,
    stop: CancellationToken,
) -> io::Result<impl Future<Output = ()> + Send> {
    let listener = TcpListener::bind(listen).await?;
    tracing::info!(address = %listener.local_addr()?, "serving /metrics, /healthz and /readyz");
    let routes = Router::new()
        .route("/metrics", get(get_metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(get_ready))
        .with_state(endpoints);
    Ok(serve_connections(listener, routes, stop))
}

/// Serves one request per connection. A client that is silent or slow is disconnected, and cannot keep others waiting
/// for long.
async fn serve_connections(listener: TcpListener, routes: Router, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).keep_alive(false);
    let mut connections = FuturesUnordered::new();
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.next() => continue,
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely.
                    tracing::warn!(%error, "cannot accept a connection for metrics");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
        };
        let service = TowerToHyperService::new(routes.clone());
        let connection = http.serve_connection(TokioIo::new(stream), service);
        connections.push(tokio::time::timeout(CONNECTION_TIMEOUT, connection));
    }
    // Requests that have begun are answered.
    let _ = tokio::time::timeout(STOP_TIMEOUT, async { while connections.next().await.is_some() {} }).await;
}

async fn get_metrics(Shared(endpoints): Shared<Arc<Endpoints>>) -> Response {
    let Some(metrics) = endpoints.0.get() else { return not_ready(NOT_CONNECTED) };
    match metrics.encode().await {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn get_ready(Shared(endpoints): Shared<Arc<Endpoints>>) -> Response {
    match endpoints.0.get().map(|metrics| metrics.not_ready_reason()) {
        Some(None) => "ok\n".into_response(),
        Some(Some(reason)) => not_ready(reason),
        None => not_ready(NOT_CONNECTED),
    }
}

fn not_ready(reason: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response()
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;
    use crate::state::quota::Quotas;

    #[expect(clippy::disallowed_methods, reason = "the test awaits it")]
    async fn started() -> (SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, stop) = (listener.local_addr().unwrap(), CancellationToken::new());
        let routes = Router::new().route("/healthz", get(|| async { "ok\n" }));
        (address, stop.clone(), tokio::spawn(serve_connections(listener, routes, stop)))
    }

    /// Everything that the server sends until it closes the connection.
    async fn received(mut stream: TcpStream) -> String {
        let mut text = String::new();
        let read = stream.read_to_string(&mut text);
        tokio::time::timeout(2 * CONNECTION_TIMEOUT, read).await.expect("the server closes it").unwrap();
        text
    }

    #[tokio::test]
    async fn silent_connections_are_closed_and_do_not_keep_others_waiting() {
        let (address, stop, server) = started().await;
        let mut half = TcpStream::connect(address).await.unwrap();
        half.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n").await.unwrap();
        let mut silent = vec![half];
        while silent.len() < MAX_CONNECTIONS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut whole = TcpStream::connect(address).await.unwrap();
        whole.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
        let text = received(whole).await;
        assert!(text.starts_with("HTTP/1.1 200") && text.ends_with("ok\n"), "{text}");
        for stream in silent {
            assert!(!received(stream).await.contains("200"));
        }
        stop.cancel();
        server.await.unwrap();
    }

    #[test]
    fn the_names_and_types_of_all_metrics_are_stable() {
        let quota = Quotas::new(0).agent(&"a".into());
        quota.usage(QuotaKind::Session).evictions.store(3, Relaxed);
        let snapshot = Snapshot {
            is_connected: true,
            malformed_messages: 3,
            pending_follow_ups: Some(2),
            memory: MemoryBudget::new(2048),
            quotas: vec![("a".into(), quota)],
            agents: Vec::new(),
        };
        let text = snapshot.into_text().unwrap();
        assert!(text.contains("\na2a_bridge_nats_connected 1\n"), "{text}");
        assert!(text.contains("\na2a_bridge_nats_malformed_messages_total 3\n"), "{text}");
        assert!(text.contains("\na2a_bridge_follow_ups_pending 2\n"), "{text}");
        assert!(text.contains("\na2a_bridge_memory_limit_bytes 1024\n"), "{text}");
        let evictions = "\na2a_bridge_state_evictions_total{agent=\"a\",kind=\"session\"} 3\n";
        assert!(text.contains(evictions), "{text}");
        let types: Vec<_> =
            text.lines().filter(|line| !line.starts_with("# HELP") && line.starts_with('#')).collect();
        insta::assert_snapshot!(types.join("\n"), @r"
        # TYPE a2a_bridge_info gauge
        # TYPE a2a_bridge_nats_connected gauge
        # TYPE a2a_bridge_nats_malformed_messages counter
        # TYPE a2a_bridge_follow_ups_pending gauge
        # TYPE a2a_bridge_memory_limit_bytes gauge
        # TYPE a2a_bridge_memory_used_bytes gauge
        # TYPE a2a_bridge_memory_withheld_bytes gauge
        # TYPE a2a_bridge_agent_state gauge
        # TYPE a2a_bridge_agents gauge
        # TYPE a2a_bridge_agent_restarts counter
        # TYPE a2a_bridge_calls_in_flight gauge
        # TYPE a2a_bridge_memory_bytes gauge
        # TYPE a2a_bridge_memory_refusals counter
        # TYPE a2a_bridge_agent_output_bytes counter
        # TYPE a2a_bridge_agent_output_dropped_bytes counter
        # TYPE a2a_bridge_agent_output_dropped_lines counter
        # TYPE a2a_bridge_state_entries gauge
        # TYPE a2a_bridge_state_bytes gauge
        # TYPE a2a_bridge_state_evictions counter
        # TYPE a2a_bridge_state_refusals counter
        # TYPE a2a_bridge_calls counter
        # TYPE a2a_bridge_call_duration_seconds histogram
        # EOF
        ");
    }
}
