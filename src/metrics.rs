//! The HTTP endpoints for operators: `/metrics` for Prometheus, `/healthz` and `/readyz`.
//!
//! Agents, calls and process output keep their own counters. A scrape reads them, so there is no second
//! registry to keep up to date.

mod endpoints;
mod process;
mod store;

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use async_nats::Client;
use async_nats::connection::State as ConnectionState;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType::{self, Counter, Gauge, Histogram};
use prometheus_client::registry::Registry;

pub(crate) use self::endpoints::{Endpoints, serve};
use self::process::ProcessFigures;
use crate::agent::call_stats::{self, BUCKETS, SkillStats};
use crate::agent::{Agent, AgentState};
use crate::bus::connect;
use crate::bus::object_store::{FileFigures, ObjectStore};
use crate::events::log::EventLog;
use crate::memory::MemoryBudget;
use crate::state::State as BridgeState;
use crate::state::quota::{AgentQuota, KindUsage, QuotaKind};

const NO_CONNECTION: &str = "no connection to NATS";

/// The agents that must be ready for `/readyz` to succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequiredAgents {
    None,
    /// At least one.
    Any,
    All,
}

#[derive(Debug)]
pub(crate) struct Metrics {
    client: Client,
    state: Arc<BridgeState>,
    files: Arc<ObjectStore>,
    memory: Arc<MemoryBudget>,
    /// `None` if calls are not logged.
    log: Option<Arc<EventLog>>,
    agents: Mutex<Vec<Agent>>,
    /// Why `/readyz` fails, regardless of the state of the NATS connection.
    not_ready: Mutex<Option<&'static str>>,
}

impl Metrics {
    pub(crate) fn new(
        client: Client,
        state: Arc<BridgeState>,
        files: Arc<ObjectStore>,
        memory: Arc<MemoryBudget>,
        log: Option<Arc<EventLog>>,
    ) -> Self {
        let not_ready = Mutex::new(Some("starting"));
        Self { client, state, files, memory, log, agents: Mutex::default(), not_ready }
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

    /// Why the bridge is not ready. The agents count as far as the caller requires.
    fn not_ready_reason(&self, required: RequiredAgents) -> Option<&'static str> {
        let reason = *self.not_ready.lock().unwrap_or_else(PoisonError::into_inner);
        let disconnected = || (!self.is_connected()).then_some(NO_CONNECTION);
        reason.or_else(disconnected).or_else(|| {
            let agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
            let is_ready = |agent: &Agent| agent.status.borrow().state == AgentState::Ready;
            match required {
                RequiredAgents::Any if !agents.iter().any(is_ready) => Some("no agent is ready"),
                RequiredAgents::All if !agents.iter().all(is_ready) => Some("not every agent is ready"),
                _ => None,
            }
        })
    }

    /// All metrics in the OpenMetrics text format.
    async fn encode(&self) -> Result<String, fmt::Error> {
        let pending_follow_ups = self.state.follow_ups.pending(None).await.ok().map(|count| count as u64);
        let agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let quota = |agent: &Agent| Some((Arc::clone(&agent.name), self.state.quotas.find(&agent.name)?));
        let snapshot = Snapshot {
            is_connected: self.is_connected(),
            reconnects: connect::reconnects(&self.client),
            malformed_messages: connect::malformed_messages(&self.client),
            pending_follow_ups,
            memory: Arc::clone(&self.memory),
            quotas: agents.iter().filter_map(quota).collect(),
            agents,
            store: Arc::clone(&self.state),
            files: self.files.figures(),
            log: self.log.clone(),
        };
        encode(Box::new(snapshot))
    }
}

/// The metrics while the bridge waits for its first connection to NATS.
fn encode_unconnected() -> Result<String, fmt::Error> {
    encode(Box::new(Unconnected))
}

fn encode(collector: Box<dyn Collector>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(collector);
    let mut out = String::new();
    text::encode(&mut out, &registry)?;
    Ok(out)
}

#[derive(Debug)]
struct Unconnected;

impl Collector for Unconnected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_bridge(&mut encoder, false)
    }
}

/// What is known about the bridge at any time.
fn encode_bridge(encoder: &mut DescriptorEncoder<'_>, is_connected: bool) -> fmt::Result {
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("os", std::env::consts::OS),
        ("arch", std::env::consts::ARCH),
    ];
    family(encoder, Gauge, "a2a_bridge_build_info", "The running build; always 1.", [(labels, 1)])?;
    ProcessFigures::read().encode(encoder)?;
    let (name, help) = ("a2a_bridge_nats_connected", "Whether the bridge is connected to NATS.");
    encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&u64::from(is_connected))
}

/// Everything one scrape reports.
#[derive(Debug)]
struct Snapshot {
    is_connected: bool,
    reconnects: u64,
    malformed_messages: u64,
    pending_follow_ups: Option<u64>,
    memory: Arc<MemoryBudget>,
    quotas: Vec<(Arc<str>, Arc<AgentQuota>)>,
    agents: Vec<Agent>,
    store: Arc<BridgeState>,
    files: FileFigures,
    log: Option<Arc<EventLog>>,
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_bridge(&mut encoder, self.is_connected)?;
        let (name, help) = ("a2a_bridge_nats_reconnects", "Connections to NATS after the first one.");
        let mut reconnects = encoder.encode_descriptor(name, help, None, Counter)?;
        reconnects.encode_counter::<NoLabelSet, _, u64>(&self.reconnects, None)?;
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
        let calls: Vec<_> = self.agents.iter().map(|agent| (&*agent.name, agent.calls.skills())).collect();
        let skills = || {
            calls
                .iter()
                .flat_map(|(agent, skills)| skills.iter().map(|(skill, stats)| (*agent, &**skill, stats)))
        };
        let outcomes = skills().flat_map(|(agent, skill, stats)| {
            stats.outcomes.iter().map(move |(outcome, count)| {
                ([("agent", agent), ("skill", skill), ("outcome", *outcome)], *count)
            })
        });
        let replicas = self.store.peers.others() as u64 + 1;
        let help = "Replicas that are known to be alive, including this one.";
        encoder.encode_descriptor("a2a_bridge_replicas", help, None, Gauge)?.encode_gauge(&replicas)?;
        store::encode(&mut encoder, self.store.store())?;
        store::encode_files(&mut encoder, self.files)?;
        if let Some(log) = &self.log {
            store::encode_log(&mut encoder, log)?;
        }
        let help = "Finished calls by status or error code.";
        family(&mut encoder, Counter, "a2a_bridge_calls", help, outcomes)?;
        for (name, help, histogram) in HISTOGRAMS {
            let mut family = encoder.encode_descriptor(name, help, None, Histogram)?;
            for (agent, skill, stats) in skills() {
                encode_histogram(&mut family, [("agent", agent), ("skill", skill)], histogram(stats))?;
            }
        }
        Ok(())
    }
}

type SkillHistogram = (&'static str, &'static str, fn(&SkillStats) -> &call_stats::Histogram);

const HISTOGRAMS: [SkillHistogram; 2] = [
    ("a2a_bridge_call_duration_seconds", "Duration of calls.", |stats| &stats.durations),
    (
        "a2a_bridge_time_to_first_token_seconds",
        "Time from a streamed call to the first text of its answer.",
        |stats| &stats.first_tokens,
    ),
];

type AgentMetric = (MetricType, &'static str, &'static str, fn(&Agent) -> u64);

/// The encoder adds `_total` to the names of counters.
const PER_AGENT: [AgentMetric; 8] = [
    (Counter, "a2a_bridge_agent_restarts", "Process starts after the first one.", |agent| {
        agent.status.borrow().restarts.into()
    }),
    (Gauge, "a2a_bridge_calls_in_flight", "Calls in flight.", |agent| agent.calls.in_flight() as u64),
    (Gauge, "a2a_bridge_tasks_followed", "Tasks that are followed although no call waits.", |agent| {
        agent.calls.followed() as u64
    }),
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

fn encode_histogram(
    family: &mut MetricEncoder<'_>,
    labels: [(&str, &str); 2],
    histogram: &call_stats::Histogram,
) -> fmt::Result {
    let count = histogram.count();
    if count == 0 {
        return Ok(());
    }
    let mut buckets: Vec<_> = BUCKETS.into_iter().zip(histogram.buckets).collect();
    buckets.push((f64::INFINITY, histogram.longer));
    let seconds = histogram.sum.as_secs_f64();
    family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(seconds, count, &buckets, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::quota::Quotas;

    #[test]
    fn the_names_and_types_of_all_metrics_are_stable() {
        let quota = Quotas::new(0).agent(&"a".into());
        quota.usage(QuotaKind::Session).evictions.store(3, Relaxed);
        let snapshot = Snapshot {
            is_connected: true,
            reconnects: 1,
            malformed_messages: 3,
            pending_follow_ups: Some(2),
            memory: MemoryBudget::new(2048),
            quotas: vec![("a".into(), quota)],
            agents: Vec::new(),
            store: Arc::default(),
            files: FileFigures { is_available: true, stored: 5, stored_bytes: 6000, writing: 1 },
            log: None,
        };
        let text = encode(Box::new(snapshot)).unwrap();
        assert!(text.contains("\na2a_bridge_nats_connected 1\n"), "{text}");
        assert!(text.contains("\na2a_bridge_nats_reconnects_total 1\n"), "{text}");
        assert!(text.contains("\na2a_bridge_nats_malformed_messages_total 3\n"), "{text}");
        assert!(text.contains("\na2a_bridge_follow_ups_pending 2\n"), "{text}");
        assert!(text.contains("\na2a_bridge_memory_limit_bytes 1024\n"), "{text}");
        let evictions = "\na2a_bridge_state_evictions_total{agent=\"a\",kind=\"session\"} 3\n";
        assert!(text.contains(evictions), "{text}");
        assert!(text.contains("\na2a_bridge_replicas 1\n"), "{text}");
        assert!(text.contains("\na2a_bridge_files_available 1\n"), "{text}");
        assert!(text.contains("\na2a_bridge_files_stored 5\n"), "{text}");
        assert!(text.contains("\na2a_bridge_files_stored_bytes 6000\n"), "{text}");
        let types: Vec<_> =
            text.lines().filter(|line| !line.starts_with("# HELP") && line.starts_with('#')).collect();
        insta::assert_snapshot!(types.join("\n"), @r"
        # TYPE a2a_bridge_build_info gauge
        # TYPE process_cpu_seconds counter
        # TYPE process_start_time_seconds gauge
        # TYPE process_resident_memory_bytes gauge
        # TYPE process_virtual_memory_bytes gauge
        # TYPE process_threads gauge
        # TYPE process_open_fds gauge
        # TYPE process_max_fds gauge
        # TYPE a2a_bridge_nats_connected gauge
        # TYPE a2a_bridge_nats_reconnects counter
        # TYPE a2a_bridge_nats_malformed_messages counter
        # TYPE a2a_bridge_follow_ups_pending gauge
        # TYPE a2a_bridge_memory_limit_bytes gauge
        # TYPE a2a_bridge_memory_used_bytes gauge
        # TYPE a2a_bridge_memory_withheld_bytes gauge
        # TYPE a2a_bridge_agent_state gauge
        # TYPE a2a_bridge_agents gauge
        # TYPE a2a_bridge_agent_restarts counter
        # TYPE a2a_bridge_calls_in_flight gauge
        # TYPE a2a_bridge_tasks_followed gauge
        # TYPE a2a_bridge_memory_bytes gauge
        # TYPE a2a_bridge_memory_refusals counter
        # TYPE a2a_bridge_agent_output_bytes counter
        # TYPE a2a_bridge_agent_output_dropped_bytes counter
        # TYPE a2a_bridge_agent_output_dropped_lines counter
        # TYPE a2a_bridge_state_entries gauge
        # TYPE a2a_bridge_state_bytes gauge
        # TYPE a2a_bridge_state_evictions counter
        # TYPE a2a_bridge_state_refusals counter
        # TYPE a2a_bridge_replicas gauge
        # TYPE a2a_bridge_state_shared gauge
        # TYPE a2a_bridge_files_available gauge
        # TYPE a2a_bridge_files_stored gauge
        # TYPE a2a_bridge_files_stored_bytes gauge
        # TYPE a2a_bridge_files_writing gauge
        # TYPE a2a_bridge_calls counter
        # TYPE a2a_bridge_call_duration_seconds histogram
        # TYPE a2a_bridge_time_to_first_token_seconds histogram
        # EOF
        ");
    }
}
