//! The streams that hold the records: one for each kind, in the layout of a NATS key-value bucket.
//!
//! Every write has a time to live, and an expired key leaves no marker: with a marker, a write that expects the key to be
//! absent would fail. The buckets have no maximum age, because it would end records whose time to live is longer.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use serde::{Deserialize, Serialize};

use super::api::{Api, ApiError, code};
use super::breaker::Breaker;
use crate::bus::subject::Token;
use crate::config::StateReplicas;
use crate::state::{RecordKey, RecordKind};
use crate::telemetry::log_limit::LogLimit;

const MIB: i64 = 1 << 20;
/// Where there is not enough storage for the buckets, they are smaller by this factor.
const SMALLER: i64 = 16;

/// The name of a kind of record in buckets and metrics, and the size limit of its bucket.
fn kind_properties(kind: RecordKind) -> (&'static str, i64) {
    match kind {
        RecordKind::FollowUp => ("follow_ups", 256 * MIB),
        RecordKind::Task => ("tasks", 1024 * MIB),
        RecordKind::Session => ("contexts", 256 * MIB),
        RecordKind::IdempotencyKey => ("once", 256 * MIB),
        RecordKind::Reply => ("replies", 256 * MIB),
    }
}

/// One bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    /// Without the prefix `KV_` of its stream.
    pub(super) name: String,
    pub(super) breaker: Breaker,
    max_bytes: i64,
    /// The limit of the bucket that was found; 0 if none was found, or if it has no limit.
    capacity: AtomicU64,
    /// For writes that the bucket refuses because it is full.
    pub(super) refusals: LogLimit,
}

impl Bucket {
    /// The bucket for records of a kind. Bridges with different subject prefixes never share one.
    pub(crate) fn new(subject_prefix: &str, kind: RecordKind) -> Self {
        let (kind, max_bytes) = kind_properties(kind);
        let name = format!("{}_{kind}", Token::new(subject_prefix));
        let (capacity, refusals) = (AtomicU64::new(0), LogLimit::default());
        Self { name, breaker: Breaker::default(), max_bytes, capacity, refusals }
    }

    /// How many bytes the bucket that was found takes.
    pub(super) fn capacity(&self) -> Option<u64> {
        Some(self.capacity.load(Relaxed)).filter(|bytes| *bytes > 0)
    }

    pub(super) fn found(&self, config: &StreamConfig) {
        self.capacity.store(u64::try_from(config.max_bytes).unwrap_or(0), Relaxed);
    }

    pub(crate) fn stream(&self) -> String {
        format!("KV_{}", self.name)
    }

    /// The subject of a record. Ids may contain any character.
    pub(super) fn subject(&self, key: &RecordKey) -> String {
        format!("$KV.{}.{}.{}", self.name, Token::new(&key.agent), Token::new(&key.id))
    }

    /// The subjects of all records, or of those of one agent.
    pub(super) fn filter(&self, agent: Option<&str>) -> String {
        match agent {
            Some(agent) => format!("$KV.{}.{}.>", self.name, Token::new(agent)),
            None => format!("$KV.{}.>", self.name),
        }
    }

    pub(crate) async fn info(&self, api: &Api) -> Result<StreamInfo, ApiError> {
        api.call(&format!("STREAM.INFO.{}", self.stream()), None::<&()>).await
    }

    /// Finds the bucket, or creates it. The bridge never changes an existing bucket.
    pub(super) async fn ensure(&self, api: &Api, replicas: StateReplicas) -> Result<StreamInfo, ApiError> {
        match self.info(api).await {
            Err(error) if error.code() == Some(code::STREAM_NOT_FOUND) => self.create(api, replicas).await,
            result => result,
        }
    }

    async fn create(&self, api: &Api, replicas: StateReplicas) -> Result<StreamInfo, ApiError> {
        let mut config = StreamConfig::new(self, replicas.first_choice());
        // The number of replicas, and the size, can be reduced once each.
        for _ in 0..3 {
            let created = api.call(&format!("STREAM.CREATE.{}", self.stream()), Some(&config)).await;
            let code = created.as_ref().err().and_then(ApiError::code);
            match code {
                // Another replica has created it in the meantime, as it sees fit.
                Some(code::NAME_IN_USE) => return self.info(api).await,
                Some(code::REPLICAS_NOT_SUPPORTED | code::NO_SUITABLE_PEERS)
                    if replicas == StateReplicas::Auto && config.num_replicas > 1 =>
                {
                    config.num_replicas = 1;
                }
                Some(
                    code::INSUFFICIENT_STORAGE
                    | code::INSUFFICIENT_MEMORY
                    | code::INSUFFICIENT_RESOURCES
                    | code::MAX_BYTES_EXCEEDED
                    | code::ACCOUNT_RESOURCES_EXCEEDED,
                ) if config.max_bytes == self.max_bytes => {
                    config.max_bytes = self.max_bytes / SMALLER;
                    tracing::warn!(
                        bucket = self.name,
                        max_bytes = config.max_bytes,
                        "JetStream has little storage left; creating a smaller bucket for shared state"
                    );
                }
                _ => {
                    if let Ok(StreamInfo { config, .. }) = &created {
                        tracing::info!(
                            bucket = self.name,
                            replicas = config.num_replicas,
                            "created a bucket for shared state"
                        );
                    }
                    return created;
                }
            }
        }
        self.info(api).await
    }

    /// What is different in an existing bucket, for a warning.
    pub(super) fn differences(&self, found: &StreamConfig, replicas: StateReplicas) -> Vec<String> {
        let expected = StreamConfig::new(self, replicas.first_choice());
        let mut differences = Vec::new();
        let mut compare = |setting: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
            let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
            if found != expected {
                differences.push(format!("{setting} is {found} instead of {expected}"));
            }
        };
        compare("subjects", &found.subjects, &expected.subjects);
        compare("storage", &found.storage, &expected.storage);
        compare("discard", &found.discard, &expected.discard);
        compare("max_msgs_per_subject", &found.max_msgs_per_subject, &expected.max_msgs_per_subject);
        compare("max_age", &found.max_age, &expected.max_age);
        compare("subject_delete_marker_ttl", &found.subject_delete_marker_ttl, &0);
        if replicas != StateReplicas::Auto {
            compare("num_replicas", &found.num_replicas, &expected.num_replicas);
        }
        differences
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StreamConfig {
    name: String,
    #[serde(default)]
    subjects: Vec<String>,
    #[serde(default)]
    description: String,
    storage: String,
    discard: String,
    max_msgs_per_subject: i64,
    pub(crate) max_bytes: i64,
    #[serde(default)]
    max_age: i64,
    pub(crate) num_replicas: usize,
    #[serde(default)]
    allow_rollup_hdrs: bool,
    #[serde(default)]
    deny_delete: bool,
    #[serde(default)]
    allow_direct: bool,
    /// Servers before 2.11 do not know it and leave it out of the response.
    #[serde(default)]
    pub(super) allow_msg_ttl: bool,
    #[serde(default, skip_serializing)]
    subject_delete_marker_ttl: i64,
}

impl StreamConfig {
    fn new(bucket: &Bucket, num_replicas: usize) -> Self {
        Self {
            name: bucket.stream(),
            subjects: vec![bucket.filter(None)],
            description: "Shared state of a2a-bridge".to_owned(),
            storage: "file".to_owned(),
            discard: "new".to_owned(),
            max_msgs_per_subject: 1,
            max_bytes: bucket.max_bytes,
            max_age: 0,
            num_replicas,
            allow_rollup_hdrs: true,
            deny_delete: true,
            allow_direct: true,
            allow_msg_ttl: true,
            subject_delete_marker_ttl: 0,
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StreamInfo {
    pub(crate) config: StreamConfig,
    pub(crate) state: StreamState,
    #[serde(default)]
    pub(crate) cluster: Option<ClusterInfo>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct StreamState {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ClusterInfo {
    #[serde(default)]
    pub(crate) leader: Option<String>,
    #[serde(default)]
    pub(crate) replicas: Vec<PeerInfo>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct PeerInfo {
    #[serde(default)]
    pub(crate) current: bool,
    #[serde(default)]
    pub(crate) offline: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_and_differ_between_prefixes() {
        let bucket = Bucket::new("acme.a2a", RecordKind::Session);
        assert_eq!(bucket.stream(), "KV__xacme_2Ea2a_contexts");
        let key = RecordKey::new(&"weather.>".into(), "echo\nkey *");
        assert_eq!(bucket.subject(&key), "$KV._xacme_2Ea2a_contexts._xweather_2E_3E._xecho_0Akey_20_2A");
        assert_eq!(Bucket::new("a2a", RecordKind::Task).filter(Some("weather")), "$KV.a2a_tasks.weather.>");
    }

    #[test]
    fn a_bucket_that_differs_is_described() {
        let bucket = Bucket::new("a2a", RecordKind::FollowUp);
        let config = StreamConfig::new(&bucket, 1);
        assert!(bucket.differences(&config, StateReplicas::Auto).is_empty());
        let other = StreamConfig { max_age: 1, max_bytes: 5, ..config };
        let found = bucket.differences(&other, StateReplicas::Three);
        assert_eq!(found, ["max_age is 1 instead of 0", "num_replicas is 1 instead of 3"]);
    }
}
