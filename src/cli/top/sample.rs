//! The counts of all agents at one moment, and what has happened between two moments.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::bus::service::{EndpointData, LatencyBucket};
use crate::bus::subject::{Subjects, Token};
use crate::cli::client::JsonFields as _;

/// What to make a row for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grouping<'a> {
    Agents,
    /// The skills of one agent.
    SkillsOf(&'a str),
}

/// The counts of all rows at one moment.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) rows: BTreeMap<String, Row>,
}

/// An agent or a skill at one moment, over all replicas.
#[derive(Debug, Default)]
pub(super) struct Row {
    /// One per replica.
    pub(super) states: Vec<String>,
    /// The number of requests that run.
    pub(super) in_flight: u64,
    /// By instance and endpoint, because a replica can come and go.
    counts: BTreeMap<(String, String), Counts>,
}

/// Requests since an instance started, or within a stretch of time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) calls: u64,
    pub(super) errors: u64,
    /// By the limits of the buckets, in microseconds.
    latency: BTreeMap<u64, u64>,
}

impl Sample {
    pub(super) fn new(at: Instant, replies: &[Value], subjects: &Subjects, grouping: Grouping<'_>) -> Self {
        let mut sample = Self { at, rows: BTreeMap::new() };
        for reply in replies {
            sample.add(reply, subjects, grouping);
        }
        sample
    }

    /// Adds a STATS reply. Services of other programs answer too; they are not agents.
    fn add(&mut self, stats: &Value, subjects: &Subjects, grouping: Grouping<'_>) -> Option<()> {
        let metadata = |key: &str| stats.get("metadata")?.get(key)?.as_str();
        let (agent, _) = (metadata("a2a.agent")?, metadata("bridge")?);
        let instance = stats.text("/id")?;
        let endpoints = stats.list("/endpoints");
        let token = Token::new(agent);
        if matches!(grouping, Grouping::SkillsOf(wanted) if wanted != agent && wanted != token.as_str()) {
            return None;
        }
        let state = metadata("a2a.state");
        let card = subjects.card(&token);
        // The agent has a second service for the agent protocol, without a card.
        if state.is_some() && !endpoints.iter().any(|endpoint| endpoint.text("/subject") == Some(&card)) {
            return None;
        }
        let look_ups = [card, subjects.get_task(&token), subjects.cancel_task(&token)];
        let mut is_listed = false;
        for endpoint in endpoints {
            let (name, subject) = (endpoint.text("/name")?, endpoint.text("/subject")?);
            let is_call = match state {
                Some(_) => !look_ups.iter().any(|look_up| look_up == subject),
                None => name == "prompt",
            };
            let key = match grouping {
                Grouping::Agents => agent.to_owned(),
                Grouping::SkillsOf(_) if is_call => format!("{agent}.{name}"),
                Grouping::SkillsOf(_) => continue,
            };
            let row = self.rows.entry(key).or_default();
            if let (Some(state), false) = (state, is_listed && grouping == Grouping::Agents) {
                row.states.push(state.to_owned());
                is_listed = true;
            }
            if is_call {
                let number = |key: &str| endpoint.get(key).and_then(Value::as_u64).unwrap_or_default();
                let data = endpoint.get("data").cloned().unwrap_or_default();
                let data: EndpointData = serde_json::from_value(data).unwrap_or_default();
                row.in_flight += data.in_flight;
                let latency = data.latency.iter().map(|LatencyBucket { le_us, count }| (*le_us, *count));
                let counts = Counts {
                    calls: number("num_requests"),
                    errors: number("num_errors"),
                    latency: latency.collect(),
                };
                row.counts.insert((instance.to_owned(), subject.to_owned()), counts);
            }
        }
        Some(())
    }
}

impl Row {
    /// Everything since the instances started.
    pub(super) fn total(&self) -> Counts {
        self.counts.values().fold(Counts::default(), |sum, counts| sum.plus(counts))
    }

    /// What has happened since an earlier sample. An instance that is not in it does not count yet.
    pub(super) fn since(&self, earlier: &Self) -> Counts {
        let changes =
            self.counts.iter().filter_map(|(key, counts)| Some(counts.minus(earlier.counts.get(key)?)));
        changes.fold(Counts::default(), |sum, counts| sum.plus(&counts))
    }
}

impl Counts {
    fn plus(mut self, other: &Self) -> Self {
        self.calls += other.calls;
        self.errors += other.errors;
        for (limit, count) in &other.latency {
            *self.latency.entry(*limit).or_default() += count;
        }
        self
    }

    fn minus(&self, earlier: &Self) -> Self {
        let before = |limit: &u64| earlier.latency.get(limit).copied().unwrap_or_default();
        let latency = self.latency.iter().map(|(limit, count)| (*limit, count.saturating_sub(before(limit))));
        Self {
            calls: self.calls.saturating_sub(earlier.calls),
            errors: self.errors.saturating_sub(earlier.errors),
            latency: latency.filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// The time within which this part of the requests ended. Within a bucket, the requests are taken to be spread evenly.
    pub(super) fn percentile(&self, part: f64) -> Option<Duration> {
        let total: u64 = self.latency.values().sum();
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let mut rank = (total as f64 * part).max(1.0);
        for (limit, count) in &self.latency {
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let (limit, count) = (*limit as f64, *count as f64);
            if rank <= count {
                // The first bucket begins at zero, which hardly matters.
                let start = limit / std::f64::consts::SQRT_2;
                let micros = start + (limit - start) * rank / count;
                return Duration::try_from_secs_f64(micros / 1e6).ok();
            }
            rank -= count;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn stats(instance: &str, requests: u64, latency: &Value) -> Value {
        json!({
            "id": instance, "name": "demo", "metadata": {"a2a.agent": "demo", "bridge": "x", "a2a.state": "ready"},
            "endpoints": [
                {"name": "card", "subject": "a2a.card.demo", "num_requests": 1000},
                {"name": "get_task", "subject": "a2a.action.demo.get_task", "num_requests": 1000},
                {"name": "echo", "subject": "a2a.action.demo.echo", "num_requests": requests, "num_errors": 1,
                 "data": {"in_flight": 2, "latency": latency}},
            ],
        })
    }

    fn sample(replies: &[Value], grouping: Grouping<'_>) -> Sample {
        Sample::new(Instant::now(), replies, &Subjects::new("a2a").unwrap(), grouping)
    }

    #[tokio::test]
    async fn replicas_are_added_and_look_ups_do_not_count() {
        let latency = json!([{"le_us": 1000, "count": 5}]);
        let prompts = json!({
            "id": "p", "name": "agents", "metadata": {"a2a.agent": "demo", "bridge": "x"},
            "endpoints": [{"name": "prompt", "subject": "agents.prompt.a.b.c", "num_requests": 7},
                          {"name": "status", "subject": "agents.status.a.b.c", "num_requests": 100}],
        });
        let foreign = json!({"id": "x", "name": "other", "metadata": {}, "endpoints": []});
        let mut other_prefix = stats("z", 50, &latency);
        other_prefix["endpoints"][0]["subject"] = json!("other.card.demo");
        let replies = [stats("a", 5, &latency), stats("b", 3, &latency), prompts, foreign, other_prefix];
        let all = sample(&replies, Grouping::Agents);
        assert_eq!(all.rows.keys().collect::<Vec<_>>(), ["demo"]);
        let row = &all.rows["demo"];
        assert_eq!((row.total().calls, row.total().errors, row.in_flight), (15, 2, 4));
        assert_eq!(row.states, ["ready", "ready"]);
        let skills = sample(&replies, Grouping::SkillsOf("demo"));
        assert_eq!(skills.rows.keys().collect::<Vec<_>>(), ["demo.echo", "demo.prompt"]);
        assert!(sample(&replies, Grouping::SkillsOf("x")).rows.is_empty());
    }

    #[tokio::test]
    async fn a_replica_that_restarts_does_not_count_twice() {
        let none = json!([]);
        let before = sample(&[stats("a", 100, &none), stats("b", 10, &none)], Grouping::Agents);
        let after = sample(&[stats("c", 7, &none), stats("b", 12, &none)], Grouping::Agents);
        assert_eq!(after.rows["demo"].since(&before.rows["demo"]).calls, 2);
    }

    #[test]
    fn percentiles_come_from_the_buckets() {
        let counts = |latency: &[(u64, u64)]| Counts {
            latency: latency.iter().copied().collect(),
            ..Counts::default()
        };
        let millis = |counts: &Counts, part| counts.percentile(part).map(|time| time.as_millis());
        assert_eq!(millis(&counts(&[]), 0.5), None);
        let counts = counts(&[(2_000, 90), (128_000, 9), (1_024_000, 1)]);
        assert_eq!((millis(&counts, 0.5), millis(&counts, 0.99)), (Some(1), Some(128)));
        assert_eq!(millis(&counts, 1.0), Some(1024));
    }
}
