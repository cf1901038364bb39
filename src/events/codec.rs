//! Turns the progress of a call into events, and events back into the progress from which frames are made.
//!
//! Frames of a logged call are made only from decoded events. So whoever reads the events later gets the same frames.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::artifact_data::ArtifactEncoder;
use super::coalescer::MAX_COALESCED;
use super::event::{Event, EventType, FrameHint};
use super::mapping::{ArtifactKind, TypeRules};
use crate::a2a::decode_parts;
use crate::a2a::model::{Artifact, ArtifactExtras, ArtifactUpdate, File, FileContent, Part, TaskState};
use crate::action::progress::ProgressEvent;
use crate::json::{self, split_text};
use crate::secrets::Secrets;

/// Maximum bytes of an id in an event.
const MAX_ID: usize = 4 << 10;

/// An event that has no number yet.
#[derive(Debug)]
pub(crate) struct NewEvent {
    pub kind: EventType,
    pub payload: Box<RawValue>,
    pub frame: FrameHint,
    pub is_transient: bool,
}

impl NewEvent {
    pub(crate) fn new(kind: EventType, payload: &impl Serialize) -> Self {
        let frame = FrameHint::default();
        Self { kind, payload: raw(payload), frame, is_transient: false }
    }

    /// Approximate bytes in a batch.
    pub(crate) fn size(&self) -> usize {
        128 + self.payload.get().len() + self.frame.text.as_ref().map_or(0, |text| 2 * text.len())
    }
}

/// JSON of a value that cannot fail to serialize.
pub(crate) fn raw(value: &impl Serialize) -> Box<RawValue> {
    serde_json::value::to_raw_value(value).unwrap_or_default()
}

#[derive(Serialize, Deserialize)]
struct TaskPayload {
    id: String,
    context_id: Option<String>,
}

#[derive(Serialize)]
struct StatePayload<'a> {
    state: &'a str,
    message: &'a str,
}

/// The payload of `agent_status`: of a state, or of the id of the task.
#[derive(Deserialize)]
struct StatusPayload {
    state: Option<String>,
    #[serde(default)]
    message: String,
    id: Option<String>,
    context_id: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct TokenPayload {
    text: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    artifact: Option<Box<RawValue>>,
}

/// The data of an artifact frame.
#[derive(Deserialize)]
struct ArtifactPayload<'a> {
    artifact_id: Option<String>,
    name: Option<String>,
    description: Option<Box<RawValue>>,
    #[serde(default)]
    append: bool,
    #[serde(default)]
    last_chunk: bool,
    #[serde(borrow)]
    parts: Vec<&'a RawValue>,
    metadata: Option<Box<RawValue>>,
    extensions: Option<Box<RawValue>>,
    update_metadata: Option<Box<RawValue>>,
}

/// Makes events of the progress of a call.
#[derive(Debug)]
pub(crate) struct Encoder<'a> {
    pub rules: &'a TypeRules,
    pub secrets: &'a Secrets,
    /// Maximum bytes of a payload.
    pub room: usize,
}

impl Encoder<'_> {
    /// The events of a piece of progress: of an artifact and the text of the answer that came with it, or of anything else.
    /// `is_change` says whether a state differs from the one before.
    pub(crate) fn encode(&self, piece: Vec<ProgressEvent>, is_change: bool) -> Vec<NewEvent> {
        let mut events = Vec::with_capacity(1);
        let mut pieces = piece.into_iter().peekable();
        while let Some(event) = pieces.next() {
            match event {
                ProgressEvent::Task { id, context_id } => {
                    let short = |id: String| json::shorten_to_json(&id, MAX_ID).unwrap_or(id);
                    let payload = TaskPayload { id: short(id), context_id: context_id.map(short) };
                    events.push(NewEvent::new(EventType::AgentStatus, &payload));
                }
                ProgressEvent::State { state, message } => {
                    self.encode_state(&state, &message, !is_change, &mut events);
                }
                ProgressEvent::Response(text) => self.encode_text(&text, &mut events),
                ProgressEvent::Artifact { update, is_response } => {
                    let is_short = |next: &ProgressEvent| matches!(next, ProgressEvent::Response(text) if text.len() <= MAX_COALESCED);
                    let text = match pieces.next_if(|next| is_response && is_short(next)) {
                        Some(ProgressEvent::Response(text)) => Some(text),
                        _ => None,
                    };
                    self.encode_artifact(update, is_response, text, &mut events);
                }
            }
        }
        events.iter_mut().for_each(|event| self.redact(event));
        events
    }

    fn encode_state(&self, state: &TaskState, message: &str, is_transient: bool, events: &mut Vec<NewEvent>) {
        let state = state.to_string();
        let mut push = |message| {
            let event = NewEvent::new(EventType::AgentStatus, &StatePayload { state: &state, message });
            events.push(NewEvent { is_transient, ..event });
        };
        if message.is_empty() {
            return push("");
        }
        split_text(message, self.room.saturating_sub(128)).for_each(push);
    }

    fn encode_text(&self, text: &str, events: &mut Vec<NewEvent>) {
        for text in split_text(text, self.room.saturating_sub(64)) {
            let payload = TokenPayload { text: text.to_owned(), artifact: None };
            let event = NewEvent::new(EventType::AgentToken, &payload);
            events.push(NewEvent { is_transient: true, ..event });
        }
    }

    fn encode_artifact(
        &self,
        mut update: ArtifactUpdate,
        is_response: bool,
        mut text: Option<String>,
        events: &mut Vec<NewEvent>,
    ) {
        without_bytes(&mut update);
        let kind = self.rules.kind(update.artifact.name.as_deref());
        let kind = match kind {
            Some(ArtifactKind::Event(kind)) => kind,
            Some(ArtifactKind::Answer) => EventType::AgentArtifact,
            None if text.is_some() => EventType::AgentToken,
            None => EventType::AgentArtifact,
        };
        let data = ArtifactEncoder::new(&update, self.room).data();
        let last = data.len().saturating_sub(1);
        for (number, data) in data.into_iter().enumerate() {
            // The text follows the artifact.
            let text = text.take_if(|_| number == last);
            let (payload, text) = match kind.is_token() {
                true => (raw(&TokenPayload { text: text.unwrap_or_default(), artifact: Some(data) }), None),
                false => (data, text),
            };
            let is_transient = kind != EventType::AgentToolResult;
            events.push(NewEvent { kind, payload, frame: FrameHint { is_response, text }, is_transient });
        }
    }

    fn redact(&self, event: &mut NewEvent) {
        event.payload = redacted(&event.payload, self.secrets);
        if let Some(text) = &mut event.frame.text {
            self.secrets.redact(text);
        }
    }
}

/// A payload without credentials.
pub(crate) fn redacted(payload: &RawValue, secrets: &Secrets) -> Box<RawValue> {
    let redacted = secrets.redact_json(payload.get());
    // It is not valid JSON if a number is a secret.
    RawValue::from_string(redacted).unwrap_or_else(|_| raw(&serde_json::json!({ "redacted": true })))
}

/// Replaces files whose bytes are not in the store by a note: the log never has the bytes of files.
fn without_bytes(update: &mut ArtifactUpdate) {
    for part in &mut update.artifact.parts {
        if let Part::File(File { name, media_type, content: FileContent::Base64(base64) }) = part {
            let size = base64.len() / 4 * 3;
            let note = serde_json::json!({
                "filename": name, "media_type": media_type, "size": size, "omitted": "not_stored",
            });
            *part = Part::Data(raw(&note));
        }
    }
}

/// The progress that an event stands for. Events without frames have none.
pub(crate) fn decode(event: &Event) -> Vec<ProgressEvent> {
    let payload = event.payload.get();
    match event.kind {
        EventType::AgentStatus => status(payload).into_iter().collect(),
        kind if kind.is_token() => {
            let Ok(TokenPayload { text, artifact }) = serde_json::from_str(payload) else {
                return Vec::new();
            };
            let has_artifact = artifact.is_some();
            let artifact = artifact.and_then(|data| artifact_event(data.get(), event.frame.is_response));
            let text = Some(text).filter(|text| !text.is_empty() || !has_artifact);
            artifact.into_iter().chain(text.map(ProgressEvent::Response)).collect()
        }
        EventType::AgentToolCall | EventType::AgentToolResult | EventType::AgentArtifact => {
            let artifact = artifact_event(payload, event.frame.is_response);
            let text = event.frame.text.clone().map(ProgressEvent::Response);
            artifact.into_iter().chain(text).collect()
        }
        _ => Vec::new(),
    }
}

fn status(payload: &str) -> Option<ProgressEvent> {
    let StatusPayload { state, message, id, context_id } = serde_json::from_str(payload).ok()?;
    match (id, state) {
        (Some(id), _) => Some(ProgressEvent::Task { id, context_id }),
        (None, Some(state)) => Some(ProgressEvent::State { state: TaskState::parse(&state), message }),
        (None, None) => None,
    }
}

fn artifact_event(data: &str, is_response: bool) -> Option<ProgressEvent> {
    let payload: ArtifactPayload<'_> = serde_json::from_str(data).ok()?;
    let (mut parts, mut part_extras) = (Vec::with_capacity(payload.parts.len()), Vec::new());
    for part in payload.parts {
        #[derive(Deserialize)]
        struct Note {
            omitted: Option<serde::de::IgnoredAny>,
        }
        // A note that something was left out is not a part of A2A.
        if serde_json::from_str::<Note>(part.get()).is_ok_and(|note| note.omitted.is_some()) {
            parts.push(Part::Data(part.to_owned()));
            continue;
        }
        let (decoded, extras) = decode_parts(&format!("[{part}]")).ok()?;
        part_extras.extend(extras.into_iter().map(|(_, extras)| (parts.len(), extras)));
        parts.extend(decoded);
    }
    let extras = ArtifactExtras {
        description: payload.description,
        metadata: payload.metadata,
        extensions: payload.extensions,
        update_metadata: payload.update_metadata,
        parts: part_extras,
    };
    let extras = (!extras.is_empty()).then(|| Box::new(extras));
    let artifact = Artifact { id: payload.artifact_id, name: payload.name, parts, extras };
    let update = ArtifactUpdate {
        task_id: None,
        context_id: None,
        artifact,
        append: payload.append,
        last_chunk: payload.last_chunk,
    };
    Some(ProgressEvent::Artifact { update, is_response })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::a2a::model;

    fn update(json: &str) -> ArtifactUpdate {
        match model::Event::decode(&format!(r#"{{"artifactUpdate":{json}}}"#)).unwrap() {
            model::Event::Artifact(update) => update,
            other => panic!("{other:?}"),
        }
    }

    fn encode(piece: Vec<ProgressEvent>) -> Vec<Event> {
        let (rules, secrets) = (TypeRules::default(), Secrets::new(["a-long-secret".into()]));
        let encoder = Encoder { rules: &rules, secrets: &secrets, room: 4096 };
        let events = encoder.encode(piece, true).into_iter().enumerate();
        let event = |(n, event): (usize, NewEvent)| {
            let NewEvent { kind, payload, frame, .. } = event;
            Event { n: n as u64, kind, at: String::new(), payload, frame }
        };
        events.map(event).collect()
    }

    /// The data of the artifact frames that some progress becomes.
    fn frames(progress: &[ProgressEvent]) -> Vec<String> {
        let data = |event: &ProgressEvent| match event {
            ProgressEvent::Artifact { update, .. } => ArtifactEncoder::new(update, 1 << 20)
                .data()
                .iter()
                .map(|data| data.get().to_owned())
                .collect(),
            other => vec![format!("{other:?}")],
        };
        progress.iter().flat_map(data).collect()
    }

    #[test]
    fn what_is_decoded_makes_the_same_frames() {
        let artifact = update(
            r#"{"taskId":"t","append":true,"lastChunk":true,"metadata":{"u":1.0},"artifact":{"artifactId":"a","name":"n",
            "description":"d","metadata":{"m":[1e400]},"parts":[{"text":"x","metadata":{"p":1}},{"data":{"k":1.10}},
            {"url":"https://example.org/f","filename":"f"},{"text":"","mediaType":"text/html"}]}}"#,
        );
        let piece = vec![
            ProgressEvent::Artifact { update: artifact, is_response: true },
            ProgressEvent::Response("x".to_owned()),
        ];
        let before = frames(&piece);
        let events = encode(piece);
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].kind, EventType::AgentToken);
        assert_eq!(frames(&decode(&events[0])), before);
    }

    #[test]
    fn the_bytes_of_files_and_credentials_are_never_in_an_event() {
        let artifact = update(
            r#"{"taskId":"t","artifact":{"artifactId":"a","parts":[{"raw":"QUJDREVGRw==","filename":"f"},{"text":"a-long-secret"}]}}"#,
        );
        let events = encode(vec![
            ProgressEvent::Artifact { update: artifact, is_response: false },
            ProgressEvent::State { state: TaskState::Working, message: "a-long-secret".to_owned() },
        ]);
        let stored: String = events.iter().map(|event| event.payload.get()).collect();
        assert!(!stored.contains("QUJD") && !stored.contains("a-long-secret"), "{stored}");
        assert!(stored.contains(r#""filename":"f""#) && stored.contains("not_stored"), "{stored}");
        let again = frames(&decode(&events[0])).concat();
        assert!(again.contains("not_stored"), "{again}");
    }

    #[test]
    fn long_text_becomes_several_events_that_fit() {
        let text = "\u{1}é".repeat(4000);
        let events = encode(vec![ProgressEvent::Response(text.clone())]);
        assert!(events.len() > 1 && events.iter().all(|event| event.payload.get().len() <= 4096));
        let decoded = events.iter().flat_map(decode).map(|event| match event {
            ProgressEvent::Response(text) => text,
            other => panic!("{other:?}"),
        });
        assert_eq!(decoded.collect::<String>(), text);
    }

    #[test]
    fn names_decide_about_types_and_how_long_events_are_kept() {
        let piece = |name: &str| {
            let json = format!(
                r#"{{"taskId":"t","artifact":{{"artifactId":"a","name":"{name}","parts":[{{"text":"x"}}]}}}}"#
            );
            ProgressEvent::Artifact { update: update(&json), is_response: false }
        };
        let (rules, secrets) = (TypeRules::default(), Secrets::new([]));
        let encoder = Encoder { rules: &rules, secrets: &secrets, room: 4096 };
        for (name, kind, is_transient) in [
            ("output_start", EventType::AgentTokenStart, true),
            ("tool_notification_start", EventType::AgentToolCall, true),
            ("tool_result", EventType::AgentToolResult, false),
            ("execution_plan_update", EventType::AgentArtifact, true),
            ("final_result", EventType::AgentArtifact, true),
        ] {
            let events = encoder.encode(vec![piece(name)], false);
            assert_eq!((events[0].kind, events[0].is_transient), (kind, is_transient), "{name}");
        }
    }
}
