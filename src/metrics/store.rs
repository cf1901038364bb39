//! Metrics of the state that replicas share, and of the files.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType::{Counter, Gauge, Histogram};

use crate::bus::object_store::FileFigures;
use crate::events::log::EventLog;
use crate::state::StateStore;
use crate::state::stats::{LATENCY_BUCKETS, Operation, StoreStats};

/// The metrics of a store. Only whether state is shared, if it never is.
pub(super) fn encode(encoder: &mut DescriptorEncoder<'_>, store: &dyn StateStore) -> fmt::Result {
    let mut gauge = |name: &str, help: &str, value: u64| {
        encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&value)
    };
    let help = "1 if replicas share state in JetStream, 0 if it is in the memory of this process.";
    gauge("a2a_bridge_state_shared", help, store.is_shared().into())?;
    let Some(stats) = store.stats() else { return Ok(()) };
    gauge("a2a_bridge_state_available", "Whether shared state can be written.", store.is_available().into())?;
    let deferred = stats.deferred.load(Relaxed) as u64;
    gauge("a2a_bridge_state_deferred", "Records that wait to be written to shared state.", deferred)?;
    for (name, help, value) in [
        (
            "a2a_bridge_state_store_errors",
            "Requests to shared state that failed or were not confirmed.",
            &stats.errors,
        ),
        ("a2a_bridge_state_store_conflicts", "Writes to shared state that lost a race.", &stats.conflicts),
        ("a2a_bridge_state_deferred_writes", "Writes that were deferred.", &stats.deferred_total),
        (
            "a2a_bridge_state_dropped_writes",
            "Deferred writes that were given up, because too many waited or there was no room.",
            &stats.dropped,
        ),
    ] {
        let mut counter = encoder.encode_descriptor(name, help, None, Counter)?;
        counter.encode_counter::<NoLabelSet, _, u64>(&value.load(Relaxed), None)?;
    }
    encode_latency(encoder, stats)
}

/// The metrics of the file store.
pub(super) fn encode_files(encoder: &mut DescriptorEncoder<'_>, files: FileFigures) -> fmt::Result {
    let FileFigures { is_available, stored, stored_bytes, writing } = files;
    for (name, help, value) in [
        ("a2a_bridge_files_available", "Whether files can be stored in JetStream.", u64::from(is_available)),
        (
            "a2a_bridge_files_stored",
            "Files in the bucket, when this bridge has last stored or listed files.",
            stored as u64,
        ),
        ("a2a_bridge_files_stored_bytes", "Bytes in the bucket at that time.", stored_bytes),
        ("a2a_bridge_files_writing", "Files that this bridge is writing.", writing as u64),
    ] {
        encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&value)?;
    }
    Ok(())
}

/// The metrics of the event log.
pub(super) fn encode_log(encoder: &mut DescriptorEncoder<'_>, log: &EventLog) -> fmt::Result {
    let (name, help) = ("a2a_bridge_event_log_available", "Whether the event log can be written.");
    let mut gauge = encoder.encode_descriptor(name, help, None, Gauge)?;
    gauge.encode_gauge(&u64::from(log.store.is_available()))?;
    let (name, help) = ("a2a_bridge_event_log_failures", "Calls whose event log is incomplete.");
    let mut counter = encoder.encode_descriptor(name, help, None, Counter)?;
    counter.encode_counter::<NoLabelSet, _, u64>(&log.failed(), None)?;
    let (name, help) = ("a2a_bridge_sessions_pending", "Sessions with events that their records lack.");
    let mut gauge = encoder.encode_descriptor(name, help, None, Gauge)?;
    gauge.encode_gauge(&(log.projector.pending_sessions() as u64))?;
    let (name, help) =
        ("a2a_bridge_sessions_failures", "Updates of what is stored of a session that failed.");
    let mut counter = encoder.encode_descriptor(name, help, None, Counter)?;
    counter.encode_counter::<NoLabelSet, _, u64>(&log.projector.failures(), None)
}

fn encode_latency(encoder: &mut DescriptorEncoder<'_>, stats: &StoreStats) -> fmt::Result {
    let (name, help) = ("a2a_bridge_state_store_duration_seconds", "Duration of requests to shared state.");
    let mut family = encoder.encode_descriptor(name, help, None, Histogram)?;
    for operation in Operation::ALL {
        let latency = stats.latency(operation);
        let counts = latency.counts();
        let limits = LATENCY_BUCKETS.into_iter().chain([f64::INFINITY]);
        let buckets: Vec<_> = limits.zip(counts).collect();
        family.encode_family(&[("operation", operation.label())])?.encode_histogram::<NoLabelSet>(
            latency.seconds(),
            counts.iter().sum(),
            &buckets,
            None,
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use prometheus_client::collector::Collector;
    use prometheus_client::encoding::text;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::state::quota::Quotas;
    use crate::state::replicated::ReplicatedStore;
    use crate::state::tests::FaultyStore;

    #[derive(Debug)]
    struct OneStore(Arc<dyn StateStore>);

    impl Collector for OneStore {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            super::encode(&mut encoder, &*self.0)
        }
    }

    #[test]
    fn the_metrics_of_a_shared_store_are_complete() {
        let shared = FaultyStore::shared();
        let stats = shared.stats().unwrap();
        stats.add(Operation::Write, Duration::from_micros(700));
        stats.add(Operation::Write, Duration::from_secs(9));
        stats.conflicts.store(3, Relaxed);
        stats.deferred.store(2, Relaxed);
        let store = ReplicatedStore::new(shared, &Quotas::new(0), false, Arc::default());
        let (mut registry, mut out) = (Registry::default(), String::new());
        registry.register_collector(Box::new(OneStore(Arc::new(store))));
        text::encode(&mut out, &registry).unwrap();
        for line in [
            "a2a_bridge_state_shared 1",
            "a2a_bridge_state_available 1",
            "a2a_bridge_state_deferred 2",
            "a2a_bridge_state_store_conflicts_total 3",
            "a2a_bridge_state_store_duration_seconds_count{operation=\"write\"} 2",
            "a2a_bridge_state_store_duration_seconds_bucket{le=\"0.0005\",operation=\"write\"} 0",
            "a2a_bridge_state_store_duration_seconds_bucket{le=\"0.001\",operation=\"write\"} 1",
            "a2a_bridge_state_store_duration_seconds_bucket{le=\"+Inf\",operation=\"write\"} 2",
        ] {
            assert!(out.lines().any(|found| found == line), "no {line} in {out}");
        }
    }
}
