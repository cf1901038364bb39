//! Whether the NATS server has the JetStream that shared state needs.

use std::time::Duration;

use futures_util::future::try_join_all;
use serde::Deserialize;

use super::JetStreamStore;
use super::api::{Api, ApiError, code};

/// How often the bridge looks for JetStream while the server has none.
const INTERVAL: Duration = Duration::from_secs(60);
/// The same while it is unavailable for a reason that may end soon.
const SHORT_INTERVAL: Duration = Duration::from_secs(5);
/// How long the start waits for JetStream if the reason for its absence may end soon, such as an election.
const START_TIMEOUT: Duration = Duration::from_secs(10);
const START_PAUSE: Duration = Duration::from_millis(250);

/// Why JetStream cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JetStreamAbsence {
    #[error("JetStream is not enabled on the NATS server, or not for the account of the bridge")]
    Disabled,
    #[error("shared state needs nats-server 2.11 or newer")]
    ServerTooOld,
    #[error(
        "the bucket {0} does not permit a time to live of messages (`allow_msg_ttl`); edit or remove its stream"
    )]
    BucketWithoutTtl(String),
    #[error(
        "the NATS user of the bridge may not publish to {0}; deploy/nats-permissions.conf shows what it needs"
    )]
    Denied(String),
    #[error("JetStream does not respond: {0}")]
    Failed(String),
}

impl JetStreamAbsence {
    fn may_end_soon(&self) -> bool {
        matches!(self, Self::Failed(_))
    }
}

impl From<ApiError> for JetStreamAbsence {
    fn from(error: ApiError) -> Self {
        match error {
            ApiError::Denied { subject } => Self::Denied(subject),
            ApiError::Refused { code: code::NOT_ENABLED | code::NOT_ENABLED_FOR_ACCOUNT, .. } => {
                Self::Disabled
            }
            other => Self::Failed(other.to_string()),
        }
    }
}

/// The part of the account information that the bridge needs.
#[derive(Debug, Deserialize)]
struct AccountInfo {
    #[serde(default)]
    api: ApiLevel,
}

#[derive(Debug, Default, Deserialize)]
struct ApiLevel {
    /// Servers before 2.11 have none.
    #[serde(default)]
    level: u32,
}

impl JetStreamStore {
    /// Looks for JetStream at the start of the bridge.
    ///
    /// # Errors
    ///
    /// When it cannot be used. [`Self::watch`] keeps looking for it.
    pub(crate) async fn detect_at_start(&self) -> Result<(), JetStreamAbsence> {
        let deadline = tokio::time::Instant::now() + START_TIMEOUT;
        loop {
            match self.detect().await {
                Err(absence) if absence.may_end_soon() && tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(START_PAUSE).await;
                }
                result => return result,
            }
        }
    }

    /// Looks for JetStream after every reconnect, and at intervals while it does not work. While it works, requests
    /// notice a failure themselves, so that an idle bridge sends nothing.
    pub(crate) async fn watch(&self) {
        loop {
            let interval = if self.was_disabled() { INTERVAL } else { SHORT_INTERVAL };
            let has_reconnected = tokio::time::timeout(interval, self.api.connected()).await.is_ok();
            let is_working = self.is_detected() && self.is_reachable() && !self.outage.is_under_way();
            if !self.api.is_connected() || (is_working && !has_reconnected) {
                continue;
            }
            let was_detected = self.is_detected();
            match self.detect().await {
                Ok(()) if !was_detected => tracing::info!("found JetStream; state is shared from now on"),
                Ok(()) => {}
                Err(absence) if was_detected => self.outage.begin(&absence),
                Err(absence) => tracing::debug!(reason = %absence, "JetStream is not available"),
            }
        }
    }

    async fn detect(&self) -> Result<(), JetStreamAbsence> {
        let found = self.find_buckets().await;
        self.set_disabled(matches!(&found, Err(absence) if !absence.may_end_soon()));
        if found.is_ok() {
            for bucket in &self.buckets {
                bucket.breaker.close();
            }
            self.set_detected();
        }
        found
    }

    async fn find_buckets(&self) -> Result<(), JetStreamAbsence> {
        find_jetstream(&self.api).await?;
        let ensured = self.buckets.iter().map(|bucket| async {
            let info = bucket.ensure(&self.api, self.replicas).await?;
            if !info.config.allow_msg_ttl {
                return Err(JetStreamAbsence::BucketWithoutTtl(bucket.name.clone()));
            }
            bucket.found(&info.config);
            let differences = bucket.differences(&info.config, self.replicas);
            if !differences.is_empty() && !self.is_detected() {
                let differences = differences.join(", ");
                tracing::warn!(bucket = bucket.name, differences, "using an existing bucket as it is");
            }
            Ok(())
        });
        try_join_all(ensured).await.map(drop)
    }
}

/// Whether the server has a JetStream that is new enough. The request changes nothing.
pub(crate) async fn find_jetstream(api: &Api) -> Result<(), JetStreamAbsence> {
    let account: AccountInfo = match api.call_once("INFO", None::<&()>).await {
        // Without JetStream nobody listens to its API. A cluster without a leader responds to this request.
        Err(ApiError::NoResponders { .. }) => return Err(JetStreamAbsence::Disabled),
        result => result?,
    };
    if account.api.level == 0 { Err(JetStreamAbsence::ServerTooOld) } else { Ok(()) }
}
