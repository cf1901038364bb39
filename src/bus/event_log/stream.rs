//! The stream that holds the event log.

use std::time::Duration;

use serde_json::{Value, json};

use crate::bus::jetstream::JetStreamAbsence;
use crate::bus::jetstream::api::{Api, ApiError, code};
use crate::bus::jetstream::find_jetstream;
use crate::bus::subject::{Subjects, Token};
use crate::config::StateReplicas;

/// How long the server recognises a repeated batch.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);
/// Codes for an account or a server without room.
const NO_ROOM: [u32; 5] = [
    code::INSUFFICIENT_STORAGE,
    code::INSUFFICIENT_RESOURCES,
    code::MAX_BYTES_EXCEEDED,
    code::INSUFFICIENT_MEMORY,
    code::ACCOUNT_RESOURCES_EXCEEDED,
];
/// Codes for more copies than the server or its cluster can keep.
const NO_REPLICAS: [u32; 2] = [code::REPLICAS_NOT_SUPPORTED, code::NO_SUITABLE_PEERS];
/// A smaller stream is of no use.
const MIN_BYTES: u64 = 16 << 20;
/// Size limit of the buckets for sessions and runs.
const MAX_BUCKET_BYTES: u64 = 256 << 20;

/// What the configuration says about the stream. It applies when the stream is created.
#[derive(Debug, Clone)]
pub(crate) struct LogLimits {
    pub max_age: Duration,
    pub max_bytes: u64,
    pub replicas: StateReplicas,
}

/// The name of the stream for a subject prefix.
pub(crate) fn stream_name(subject_prefix: &str) -> String {
    format!("{}_events", Token::new(subject_prefix))
}

/// The name of the bucket for runs.
pub(crate) fn runs_bucket(subject_prefix: &str) -> String {
    format!("{}_runs", Token::new(subject_prefix))
}

/// The name of the bucket for sessions.
pub(crate) fn sessions_bucket(subject_prefix: &str) -> String {
    format!("{}_sessions", Token::new(subject_prefix))
}

/// Finds the stream, and the buckets for sessions and runs, or creates them. What exists is used as it is.
pub(super) async fn ensure(
    api: &Api,
    subjects: &Subjects,
    limits: &LogLimits,
) -> Result<(), JetStreamAbsence> {
    find_jetstream(api).await?;
    let (name, runs) = (stream_name(subjects.prefix()), runs_bucket(subjects.prefix()));
    let info = find_or_create(api, &name, log_config(&name, subjects, limits), limits).await?;
    for bucket in [runs, sessions_bucket(subjects.prefix())] {
        find_or_create(api, &format!("KV_{bucket}"), bucket_config(&bucket, limits), limits).await?;
    }
    // Older servers drop what they do not know.
    if info.pointer("/config/allow_msg_ttl").and_then(Value::as_bool) != Some(true) {
        return Err(JetStreamAbsence::BucketWithoutTtl(name));
    }
    let has =
        |setting: &str| info.pointer(setting).is_some_and(|value| !value.is_null() && *value != json!(false));
    for (setting, why) in [
        ("/config/allow_direct", "the log cannot be read"),
        ("/config/republish", "attached callers see new events with a delay"),
    ] {
        if !has(setting) {
            tracing::warn!(
                stream = name,
                setting = setting.trim_start_matches("/config/"),
                why,
                "using an existing stream for the event log, without a setting that it needs"
            );
        }
    }
    Ok(())
}

fn log_config(name: &str, subjects: &Subjects, limits: &LogLimits) -> Value {
    json!({
        "name": name,
        "description": "Event log of a2a-bridge",
        "subjects": [subjects.all_events()],
        // Interest retention would drop what nobody reads yet.
        "retention": "limits",
        "storage": "file",
        "discard": "old",
        "max_age": nanos(limits.max_age),
        "max_bytes": limits.max_bytes,
        "allow_direct": true,
        "allow_msg_ttl": true,
        "compression": "s2",
        "duplicate_window": nanos(DUPLICATE_WINDOW),
        "republish": { "src": subjects.all_events(), "dest": subjects.all_live_events() },
    })
}

/// In the layout of a NATS key-value bucket.
fn bucket_config(bucket: &str, limits: &LogLimits) -> Value {
    json!({
        "name": format!("KV_{bucket}"),
        "description": "Sessions and runs in the event log of a2a-bridge",
        "subjects": [format!("$KV.{bucket}.>")],
        "storage": "file",
        // One caller's records never push out another's.
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_age": nanos(limits.max_age),
        "max_bytes": limits.max_bytes.min(MAX_BUCKET_BYTES),
        "allow_rollup_hdrs": true,
        "deny_delete": true,
        "allow_direct": true,
        "allow_msg_ttl": true,
    })
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX >> 1)
}

async fn find_or_create(
    api: &Api,
    name: &str,
    mut config: Value,
    limits: &LogLimits,
) -> Result<Value, ApiError> {
    match api.call(&format!("STREAM.INFO.{name}"), None::<&()>).await {
        Err(error) if error.code() == Some(code::STREAM_NOT_FOUND) => {}
        found => return found,
    }
    let mut replicas = limits.replicas.first_choice();
    let mut max_bytes = config.get("max_bytes").and_then(Value::as_u64).unwrap_or_default();
    loop {
        if let Some(config) = config.as_object_mut() {
            config.insert("num_replicas".to_owned(), json!(replicas));
            config.insert("max_bytes".to_owned(), json!(max_bytes));
        }
        let created = api.call(&format!("STREAM.CREATE.{name}"), Some(&config)).await;
        match created.as_ref().err().and_then(ApiError::code) {
            // Another replica has created it in the meantime.
            Some(code::NAME_IN_USE) => return api.call(&format!("STREAM.INFO.{name}"), None::<&()>).await,
            Some(code)
                if NO_REPLICAS.contains(&code) && limits.replicas == StateReplicas::Auto && replicas > 1 =>
            {
                replicas = 1;
            }
            Some(code) if NO_ROOM.contains(&code) && max_bytes > MIN_BYTES => max_bytes /= 2,
            _ => {
                if created.is_ok() {
                    tracing::info!(stream = name, max_bytes, replicas, "created a stream of the event log");
                }
                return created;
            }
        }
    }
}
