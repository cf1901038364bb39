//! Finds or creates the bucket for files, and gives it the limits of the configuration.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::jetstream::{JetStream, NO_ROOM};
use super::metadata::stream_name;
use crate::bus::jetstream::api::{ApiError, code};
use crate::config::StateReplicas;
use crate::files::FileRules;

/// Codes for more copies than the server or its cluster can keep.
const NO_REPLICAS: [u32; 2] = [code::REPLICAS_NOT_SUPPORTED, code::NO_SUITABLE_PEERS];
/// A smaller bucket is of no use.
const MIN_BUCKET: i64 = 16 << 20;
const MAX_BYTES: &str = "max_bytes";
/// Shows whether the server is new enough.
const MSG_TTL: &str = "allow_msg_ttl";
/// What the bridge needs of the stream.
const NEEDED: [&str; 3] = ["allow_rollup_hdrs", "allow_direct", MSG_TTL];

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
    fn applied_to(&self, found: &FoundConfig) -> FoundConfig {
        let mut changed = found.clone();
        for needed in NEEDED {
            changed.insert(needed.to_owned(), true.into());
        }
        changed.insert(MAX_BYTES.to_owned(), self.max_bytes.into());
        let max_age = Value::from(self.max_age);
        if changed.insert("max_age".to_owned(), max_age.clone()) != Some(max_age) {
            // It must not be longer than the age. The server chooses another one.
            changed.remove("duplicate_window");
        }
        changed
    }
}

/// The configuration of a stream that exists, with all that an operator may have set.
type FoundConfig = Map<String, Value>;

#[derive(Deserialize)]
struct FoundStream {
    config: FoundConfig,
}

fn is_set(config: &FoundConfig, key: &str) -> bool {
    config.get(key) == Some(&Value::Bool(true))
}

impl JetStream {
    /// Finds the bucket and applies its limits, or creates it. The error says why there is none.
    pub(super) async fn provision(&self, bucket: &str, rules: &FileRules) -> Result<(), String> {
        let Some(replicas) = self.replicas else {
            return Err("`nats.jetstream.mode` is `off`".to_owned());
        };
        match self.find_or_create(BucketConfig::new(bucket, rules, replicas), replicas).await {
            // Older servers drop what they do not know, and have no batches either.
            Ok(config) if is_set(&config, MSG_TTL) => {
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
    ) -> Result<FoundConfig, ApiError> {
        let info = format!("STREAM.INFO.{}", wanted.name);
        // Without retries: if nobody listens, that is the answer.
        let found: Result<FoundStream, _> = self.api.call_once(&info, None::<&()>).await;
        let FoundStream { config } = match found {
            Err(error) if error.code() == Some(code::STREAM_NOT_FOUND) => {
                match self.create(&mut wanted, replicas).await {
                    // Another replica has created it in the meantime.
                    Err(error) if error.code() == Some(code::NAME_IN_USE) => {
                        self.api.call(&info, None::<&()>).await?
                    }
                    created => return Ok(created?.config),
                }
            }
            found => found?,
        };
        self.adjust(&wanted, config).await
    }

    /// Gives an existing stream the limits of the configuration. If that is not possible, it stays as it is.
    async fn adjust(&self, wanted: &BucketConfig, found: FoundConfig) -> Result<FoundConfig, ApiError> {
        let update = format!("STREAM.UPDATE.{}", wanted.name);
        let mut changed = wanted.applied_to(&found);
        let max_bytes = found.get(MAX_BYTES).cloned().unwrap_or_default();
        loop {
            if changed == found {
                return Ok(found);
            }
            let error = match self.api.call::<FoundStream>(&update, Some(&changed)).await {
                Ok(FoundStream { config }) => {
                    let max_bytes = config.get(MAX_BYTES).and_then(Value::as_i64);
                    tracing::info!(
                        stream = wanted.name,
                        max_bytes,
                        "changed the limits of the bucket for files"
                    );
                    return Ok(config);
                }
                Err(error) => error,
            };
            if !NEEDED.iter().all(|needed| is_set(&found, needed)) {
                return Err(error);
            }
            let has_no_room = error.code().is_some_and(|code| NO_ROOM.contains(&code));
            tracing::warn!(
                reason = %error,
                %max_bytes,
                "cannot change the limits of the bucket for files (`files.max_total`, `files.ttl`); keeping the current ones"
            );
            // The other limits may still change.
            let replaced = changed.insert(MAX_BYTES.to_owned(), max_bytes.clone());
            if !has_no_room || replaced.as_ref() == Some(&max_bytes) {
                return Ok(found);
            }
        }
    }

    /// Creates the stream. The number of copies and the size can be smaller than the configuration says, if the server has no
    /// more.
    async fn create(
        &self,
        config: &mut BucketConfig,
        replicas: StateReplicas,
    ) -> Result<FoundStream, ApiError> {
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
