//! The other replicas, as the state logic sees them.
//!
//! A replica is alive while its subject on NATS has a responder. There are no leases and no clocks: NATS reports *no
//! responders* the moment a connection is gone. `bus::peers` implements [`Peers`] on NATS.

use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
#[cfg(test)]
use futures_util::future::{FutureExt as _, ready};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{RecordKey, RecordKind};
use crate::reply::error::{ActionError, Code};

/// A replica that has not stopped in an orderly way may only have lost its connection. For this long after it counts as
/// dead, what only its process knows is not lost.
pub(crate) const RETURN_GRACE: Duration = Duration::from_secs(60);

/// Identifies one process of the bridge.
pub(crate) type InstanceId = Uuid;

/// What is known about another replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Liveness {
    Alive,
    /// It did not respond, but may only have lost its connection for a moment.
    Unreachable,
    /// It stopped, or has not responded for so long that others take over its work.
    Dead,
}

/// Which replica holds a record that is not in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    At(InstanceId),
    Nowhere,
    /// A replica that may hold it did not answer.
    Unknown,
}

impl Holder {
    /// The error of a request for a record that a replica which does not answer may hold.
    pub(crate) fn no_answer() -> ActionError {
        let message = "a replica that may know this id does not respond; try again in a few seconds";
        ActionError::new(Code::StateUnavailable, message)
    }
}

/// What the holder of a claim does with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ClaimStatus {
    /// A request works on the answer.
    Held,
    /// The agent has not taken the answer, and the store may not know it yet.
    Released,
    /// No request of the process holds it.
    Ended,
}

/// A replica stopped, or stopped responding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Death {
    pub instance: InstanceId,
    /// Whether it has announced that it leaves: then it has written everything that it had to write.
    pub is_orderly: bool,
}

pub(crate) trait Peers: fmt::Debug + Send + Sync {
    /// The id of this process.
    fn instance(&self) -> InstanceId;

    /// Whether no other replica is known.
    fn is_alone(&self) -> bool;

    /// How many other replicas are known to be alive.
    fn others(&self) -> usize;

    /// For how long this process has run without knowing another replica. `None` if it knows one now.
    fn alone_for(&self) -> Option<Duration>;

    /// Whether a replica is alive. Asks it if the last sign of life is not recent.
    fn liveness(&self, instance: InstanceId) -> BoxFuture<'_, Liveness>;

    /// Whether a replica that does not respond may come back with what its process knows.
    fn may_return(&self, instance: InstanceId) -> bool;

    /// What a replica does with the claim that has this nonce. `None` if it does not respond.
    fn claim_status(&self, instance: InstanceId, nonce: Uuid) -> BoxFuture<'_, Option<ClaimStatus>>;

    /// The other replica that holds a record which is not in the store. With a key of a verified caller, only a task that
    /// belongs to that caller counts.
    fn find<'a>(&'a self, kind: RecordKind, key: &'a RecordKey) -> BoxFuture<'a, Holder>;

    /// Tells a replica that a record which it has written has changed, best effort, so that it drops its copy.
    fn record_changed(&self, instance: InstanceId, kind: RecordKind, key: &RecordKey);
}

/// What other replicas ask this one. The answers come from memory and must not wait.
pub(crate) trait PeerQueries: fmt::Debug + Send + Sync {
    /// Whether this process holds a record, for [`Peers::find`].
    fn has(&self, kind: RecordKind, key: &RecordKey) -> bool;

    /// What this process does with the claim that has this nonce, for [`Peers::claim_status`].
    fn claim_status(&self, nonce: Uuid) -> ClaimStatus;

    /// Another replica has changed a record, for [`Peers::record_changed`].
    fn record_changed(&self, kind: RecordKind, key: &RecordKey);
}

/// For a bridge that holds nothing.
#[derive(Debug)]
pub(crate) struct NoQueries;

impl PeerQueries for NoQueries {
    fn has(&self, _: RecordKind, _: &RecordKey) -> bool {
        false
    }

    fn claim_status(&self, _: Uuid) -> ClaimStatus {
        ClaimStatus::Ended
    }

    fn record_changed(&self, _: RecordKind, _: &RecordKey) {}
}

/// For a test with one replica.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct NoPeers(pub InstanceId);

#[cfg(test)]
impl Peers for NoPeers {
    fn instance(&self) -> InstanceId {
        self.0
    }

    fn is_alone(&self) -> bool {
        true
    }

    fn others(&self) -> usize {
        0
    }

    fn alone_for(&self) -> Option<Duration> {
        Some(Duration::MAX)
    }

    fn liveness(&self, instance: InstanceId) -> BoxFuture<'_, Liveness> {
        ready(if instance == self.0 { Liveness::Alive } else { Liveness::Dead }).boxed()
    }

    fn may_return(&self, _: InstanceId) -> bool {
        false
    }

    fn claim_status(&self, _: InstanceId, _: Uuid) -> BoxFuture<'_, Option<ClaimStatus>> {
        ready(None).boxed()
    }

    fn find<'a>(&'a self, _: RecordKind, _: &'a RecordKey) -> BoxFuture<'a, Holder> {
        ready(Holder::Nowhere).boxed()
    }

    fn record_changed(&self, _: InstanceId, _: RecordKind, _: &RecordKey) {}
}
