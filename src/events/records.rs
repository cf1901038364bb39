//! Records that are derived from the log: summaries of sessions, positions of their messages, and runs.
//!
//! They can be made again from the log at any time. Writes compare the revision, so that several replicas can write the
//! same record and none overwrites what it has not seen.

use std::sync::Arc;

use bytes::Bytes;
use uuid::Uuid;

/// The name of a record.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct RecordKey {
    /// A hash of the caller.
    pub owner: Arc<str>,
    pub session: Arc<str>,
    pub part: RecordPart,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RecordPart {
    /// The session as a whole.
    Summary,
    /// The positions of some messages of the session.
    Positions(u64),
    Run(Uuid),
}

/// Records of one owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RecordFilter {
    /// The summaries of all sessions.
    Summaries { owner: Arc<str> },
    /// The positions of all messages of a session.
    Positions { owner: Arc<str>, session: Arc<str> },
    /// The runs of a session.
    Runs { owner: Arc<str>, session: Arc<str> },
}

/// A record that was read.
#[derive(Debug, Clone)]
pub(crate) struct LogRecord {
    pub value: Bytes,
    /// Increases with every write of any record of its kind.
    pub revision: u64,
}
