//! The messages between replicas, as JSON.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::caller::Caller;
use crate::state::RecordKind;
use crate::state::peers::{ClaimStatus, InstanceId};

/// A ping, and the response to it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ping {
    /// The sender.
    pub instance: InstanceId,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Announcement {
    /// The tokens of the agents that the replica serves. `None` if there are too many for a message.
    pub agents: Option<Vec<String>>,
    #[serde(default, rename = "leaving")]
    pub is_leaving: bool,
}

/// What does the replica do with the claim that has this nonce?
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClaimQuery {
    pub nonce: Uuid,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClaimAnswer {
    pub status: ClaimStatus,
}

/// Another replica has changed a record that this one has written.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RecordChanged<'a> {
    pub kind: Kind,
    #[serde(borrow)]
    pub agent: Cow<'a, str>,
    #[serde(borrow)]
    pub id: Cow<'a, str>,
}

/// Which replica holds a record of an agent?
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FindQuery<'a> {
    pub from: InstanceId,
    pub kind: Kind,
    #[serde(borrow)]
    pub id: Cow<'a, str>,
    /// If it is verified, only a task of this caller counts.
    #[serde(default, skip_serializing_if = "Caller::is_shared")]
    pub caller: Caller,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct FindAnswer {
    pub instance: InstanceId,
    pub has: bool,
}

/// A [`RecordKind`] in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    FollowUp,
    Task,
    Session,
    IdempotencyKey,
    Reply,
}

impl From<RecordKind> for Kind {
    fn from(kind: RecordKind) -> Self {
        match kind {
            RecordKind::FollowUp => Self::FollowUp,
            RecordKind::Task => Self::Task,
            RecordKind::Session => Self::Session,
            RecordKind::IdempotencyKey => Self::IdempotencyKey,
            RecordKind::Reply => Self::Reply,
        }
    }
}

impl From<Kind> for RecordKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::FollowUp => Self::FollowUp,
            Kind::Task => Self::Task,
            Kind::Session => Self::Session,
            Kind::IdempotencyKey => Self::IdempotencyKey,
            Kind::Reply => Self::Reply,
        }
    }
}
