//! Finds or creates the bucket for files, and gives it the limits of the configuration.

use serde::Serialize;
use serde_json::{Value, json};

use super::jetstream::{JetStream, NO_ROOM};
use super::metadata::stream_name;
use crate::bus::jetstream::api::{ApiError, code};
use crate::config::StateReplicas;
use crate::files::FileRules;

/// Codes for more copies than the server or its cluster can keep.
const NO_REPLICAS: [u32; 2] = [code::REPLICAS_NOT_SUPPORTED, code::NO_SUITABLE_PEERS];
/// A smaller bucket is of no use.
const MIN_BUCKET: i64 = 16 << 20;
/// What the bridge needs of the stream.
const NEEDED: [&str; 3] = ["allow_rollup_hdrs", "allow_direct", "allow_msg_ttl"];

/// The stream of a bucket, as ADR-20 describes it.
#[derive(Debug, Serialize)]
struct BucketConfig {
    name: String,
    description: &'static str,
    subjects: [String; 2],
    retention: &'static str,
    storage: &'static str,
    discard: &'static str,
    /// In nanoseconds.
    max_age: u64,
    max_bytes: i64,
    num_replicas: u64,
    allow_rollup_hdrs: bool,
    allow_direct: bool,
    /// Shows whether the server is new enough.
    allow_msg_ttl: bool,
}

impl BucketConfig {
    fn new(bucket: &str, rules: &FileRules, replicas: StateReplicas) -> Self {
        Self {
            name: stream_name(bucket),
            description: "Files of a2a-bridge",
            subjects: [format!("$O.{bucket}.C.>"), format!("$O.{bucket}.M.>")],
            retention: "limits",
            storage: "file",
            discard: "new",
            max_age: u64::try_from(rules.ttl.as_nanos()).unwrap_or(u64::MAX),
            max_bytes: i64::try_from(rules.max_total).unwrap_or(i64::MAX),
            num_replicas: replicas.first_choice() as u64,
            allow_rollup_hdrs: true,
            allow_direct: true,
            allow_msg_ttl: true,
        }
    }

    /// What an operator has set for an existing stream, with the limits of the configuration.
    fn applied_to(&self, found: &Value) -> Value {
        let mut changed = found.clone();
        for needed in NEEDED {
            changed[needed] = json!(true);
        }
        changed["max_bytes"] = json!(self.max_bytes);
        if changed["max_age"] != json!(self.max_age) {
            changed["max_age"] = json!(self.max_age);
            // It must not be longer than the age. The server chooses another one.
            if let Some(changed) = changed.as_object_mut() {
                changed.remove("duplicate_window");
            }
        }
        changed
    }
}

impl JetStream {
    /// Finds the bucket and applies its limits, or creates it. The error says why there is none.
    pub(super) async fn provision(&self, bucket: &str, rules: &FileRules) -> Result<(), String> {
        let Some(replicas) = self.replicas else {
            return Err("`nats.jetstream.mode` is `off`".to_owned());
        };
        match self.find_or_create(BucketConfig::new(bucket, rules, replicas), replicas).await {
            // Older servers drop what they do not know, and have no batches either.
            Ok(config) if config["allow_msg_ttl"] == true => {
                self.health.own.breaker.close();
                Ok(())
            }
            Ok(_) => Err("files by reference need nats-server 2.11 or newer".to_owned()),
            Err(ApiError::NoResponders { .. }) => Err("JetStream is not enabled".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The configuration of the stream. A user that may not create streams can use an existing one.
    async fn find_or_create(
        &self,
        mut wanted: BucketConfig,
        replicas: StateReplicas,
    ) -> Result<Value, ApiError> {
        let info = format!("STREAM.INFO.{}", wanted.name);
        // Without retries: if nobody listens, that is the answer.
        let found: Result<Value, _> = self.api.call_once(&info, None::<&()>).await;
        let mut found = match found {
            Err(error) if error.code() == Some(code::STREAM_NOT_FOUND) => {
                match self.create(&mut wanted, replicas).await {
                    // Another replica has created it in the meantime.
                    Err(error) if error.code() == Some(code::NAME_IN_USE) => {
                        self.api.call(&info, None::<&()>).await?
                    }
                    created => return Ok(created?["config"].take()),
                }
            }
            found => found?,
        };
        self.adjust(&wanted, found["config"].take()).await
    }

    /// Gives an existing stream the limits of the configuration. If that is not possible, it stays as it is.
    async fn adjust(&self, wanted: &BucketConfig, found: Value) -> Result<Value, ApiError> {
        let update = format!("STREAM.UPDATE.{}", wanted.name);
        let mut changed = wanted.applied_to(&found);
        loop {
            if changed == found {
                return Ok(found);
            }
            let error = match self.api.call::<Value>(&update, Some(&changed)).await {
                Ok(mut updated) => {
                    let (max_bytes, stream) = (&changed["max_bytes"], &wanted.name);
                    tracing::info!(stream, %max_bytes, "changed the limits of the bucket for files");
                    return Ok(updated["config"].take());
                }
                Err(error) => error,
            };
            if !NEEDED.iter().all(|needed| found[needed] == true) {
                return Err(error);
            }
            let has_no_room = error.code().is_some_and(|code| NO_ROOM.contains(&code));
            let max_bytes = &found["max_bytes"];
            tracing::warn!(
                reason = %error,
                %max_bytes,
                "cannot change the limits of the bucket for files (`files.max_total`, `files.ttl`); keeping the current ones"
            );
            if !has_no_room || changed["max_bytes"] == *max_bytes {
                return Ok(found);
            }
            // The other limits may still change.
            changed["max_bytes"] = max_bytes.clone();
        }
    }

    /// Creates the stream. The number of copies and the size can be smaller than the configuration says, if the server has no
    /// more.
    async fn create(&self, config: &mut BucketConfig, replicas: StateReplicas) -> Result<Value, ApiError> {
        loop {
            let create = format!("STREAM.CREATE.{}", config.name);
            let created = self.api.call_once(&create, Some(&*config)).await;
            let Some(code) = created.as_ref().err().and_then(ApiError::code) else { return created };
            let is_reducible = replicas == StateReplicas::Auto && config.num_replicas > 1;
            if NO_REPLICAS.contains(&code) && is_reducible {
                config.num_replicas = 1;
            } else if NO_ROOM.contains(&code) && config.max_bytes > MIN_BUCKET {
                config.max_bytes /= 2;
                tracing::warn!(
                    max_bytes = config.max_bytes,
                    "JetStream has little storage left; creating a smaller bucket for files"
                );
            } else {
                return created;
            }
        }
    }
}
