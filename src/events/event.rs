//! Events of the log, and the batches in which they are stored.
//!
//! One message of the stream is one [`Batch`]. Its form is fixed: bridges of other releases read it. A batch with a higher
//! version is not misread; it makes the log unavailable to this release.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::store::LogUnavailable;
use crate::json;

/// The version of the batches that this release writes. Raise it when an older release would misread them.
const VERSION: u32 = 1;
/// Maximum number of events in a batch: the index of an event has room for this many.
pub(crate) const MAX_EVENTS: usize = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EventType {
    SessionCreated,
    UserMessage,
    AgentStart,
    AgentStatus,
    AgentTokenStart,
    AgentToken,
    AgentTokenEnd,
    AgentToolCall,
    AgentToolResult,
    AgentArtifact,
    AgentInputRequired,
    AgentComplete,
    AgentCancelled,
    AgentFailed,
    Fork,
    Forked,
    Edit,
    Title,
    Redacted,
}

impl EventType {
    /// Whether the event ends a call of a run. A question does, too: its answer is the next call of the same run.
    pub(crate) fn ends_call(self) -> bool {
        matches!(
            self,
            Self::AgentInputRequired | Self::AgentComplete | Self::AgentCancelled | Self::AgentFailed
        )
    }

    /// Whether the event carries pieces of the answer as they arrive.
    pub(crate) fn is_token(self) -> bool {
        matches!(self, Self::AgentTokenStart | Self::AgentToken | Self::AgentTokenEnd)
    }
}

/// One event as it is stored.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Event {
    /// Counts the events of a run.
    pub n: u64,
    #[serde(rename = "type")]
    pub kind: EventType,
    /// RFC 3339.
    pub at: String,
    pub payload: Box<RawValue>,
    /// What frames need in addition to the payload. Readers of events do not get it.
    #[serde(default, skip_serializing_if = "FrameHint::is_empty")]
    pub frame: FrameHint,
}

/// What the frames of an event need in addition to its payload.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FrameHint {
    /// Whether the text of the artifact belongs to the answer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_response: bool,
    /// The text of the answer that comes with an artifact whose payload has no place for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl FrameHint {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Frames that precede a batch in each [selection](super::selection::FrameSelection): `all`, `text`, `artifacts`.
pub(crate) type FrameCounts = [u64; 3];

/// Events that are stored together.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Batch {
    v: u32,
    pub session: Option<Arc<str>>,
    /// `None` for events of the session itself.
    pub run: Option<Uuid>,
    /// Counts the calls of a run: 0 for the first, and one more for each answer to a question.
    pub call: u32,
    /// How many frames of the call precede the batch. Numbers of frames survive the expiry of earlier batches.
    pub frames: FrameCounts,
    pub events: Vec<Event>,
    /// The batch in place of which this one is, without what was redacted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Box<KeptBatch>>,
}

/// A batch that was removed from the log because of one of its events, without the content of that event.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KeptBatch {
    /// The sequence that the batch had. Its events keep their indexes.
    pub sequence: u64,
    pub batch: Batch,
}

/// The version of a batch of any release.
#[derive(Deserialize)]
struct Version {
    v: u32,
}

impl Batch {
    pub(crate) fn new(
        session: Option<Arc<str>>,
        run: Option<Uuid>,
        call: u32,
        frames: FrameCounts,
        events: Vec<Event>,
    ) -> Self {
        Self { v: VERSION, session, run, call, frames, events, kept: None }
    }

    pub(crate) fn encode(&self) -> Bytes {
        json::to_bytes(self)
    }

    /// Encodes a batch of these parts.
    pub(crate) fn encode_parts(
        session: Option<&Arc<str>>,
        run: Option<Uuid>,
        call: u32,
        frames: FrameCounts,
        events: &[Event],
    ) -> Bytes {
        #[derive(Serialize)]
        struct BatchParts<'a> {
            v: u32,
            session: Option<&'a Arc<str>>,
            run: Option<Uuid>,
            call: u32,
            frames: FrameCounts,
            events: &'a [Event],
        }
        json::to_bytes(&BatchParts { v: VERSION, session, run, call, frames, events })
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, LogUnavailable> {
        match serde_json::from_slice::<Self>(body) {
            Ok(batch) if batch.v <= VERSION && batch.events.len() <= MAX_EVENTS => return Ok(batch),
            Ok(_) | Err(_) => {}
        }
        match serde_json::from_slice(body) {
            Ok(Version { v }) if v > VERSION => {
                tracing::warn!(version = v, "a newer release wrote to the event log; upgrade this bridge");
            }
            // Not the error, which may quote the events.
            _ => tracing::warn!("cannot read a batch of the event log"),
        }
        Err(LogUnavailable)
    }
}

/// The index of an event in its session: increasing, with gaps.
pub(crate) fn event_index(sequence: u64, position: usize) -> u64 {
    sequence.saturating_mul(MAX_EVENTS as u64).saturating_add(position as u64)
}

/// The sequence and the position behind an index.
pub(crate) fn index_position(index: u64) -> (u64, usize) {
    let position = usize::try_from(index % MAX_EVENTS as u64).unwrap_or_default();
    (index / MAX_EVENTS as u64, position)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(payload: &str) -> Event {
        Event {
            n: 3,
            kind: EventType::AgentToken,
            at: "2026-01-01T00:00:00Z".to_owned(),
            payload: RawValue::from_string(payload.to_owned()).unwrap(),
            frame: FrameHint::default(),
        }
    }

    #[test]
    fn a_batch_has_the_documented_form() {
        let batch = Batch::new(Some("s".into()), None, 1, [2, 3, 4], vec![event(r#"{"text":"1.0"}"#)]);
        let expected = r#"{"v":1,"session":"s","run":null,"call":1,"frames":[2,3,4],"events":[{"n":3,"type":"agent_token","at":"2026-01-01T00:00:00Z","payload":{"text":"1.0"}}]}"#;
        assert_eq!(batch.encode(), expected);
        assert_eq!(Batch::decode(expected.as_bytes()).unwrap().encode(), expected);
    }

    #[test]
    fn a_batch_of_a_newer_version_is_not_misread() {
        for body in
            [r#"{"v":2,"session":null,"run":null,"call":0,"frames":[0,0,0],"events":[]}"#, r#"{"v":2}"#, "x"]
        {
            assert!(Batch::decode(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn an_index_increases_with_sequence_and_position() {
        assert_eq!(index_position(event_index(7, 999)), (7, 999));
        assert!(event_index(7, 999) < event_index(8, 0));
    }
}
