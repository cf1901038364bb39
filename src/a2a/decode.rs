//! Decodes tasks, messages and updates of every version of A2A into the [model](super::model).
//!
//! One set of types accepts all spellings. Where some agents send two spellings of a field, both are fields
//! here, because serde rejects an alias that occurs together with its name as a duplicate.
//!
//! Lists are converted item by item and [counted](super::meter) as they grow: the lenient form of a part is much larger
//! than `{}`, its shortest text.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::http::received_file;
use super::meter;
use super::model::{
    ALLOCATION_OVERHEAD, Artifact, ArtifactExtras, ArtifactUpdate, Event, File, FileContent, Message, Part,
    PartExtras, SendResult, StatusUpdate, StoredContent, Task, TaskState, text_size,
};
use super::response_ids::RpcId;
use crate::json::null_is_default;

/// Maximum length of an id that an agent assigns. The bridge stores ids, sends them back and uses them in subjects.
const MAX_AGENT_ID: usize = 1024;

impl Event {
    /// Decodes a task, a message or an update, bare or wrapped as in v1.0.
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        meter::restart();
        serde_json::from_str::<LenientEvent<'_>>(json)?.into_checked_event()
    }

    /// Decodes a JSON-RPC response with such a result, in one pass, and returns its id too; `None` if the body is
    /// anything else.
    pub(super) fn decode_response(json: &[u8]) -> Option<(Self, Option<RpcId<'_>>)> {
        #[derive(Deserialize)]
        struct RpcResponse<'a> {
            #[serde(borrow)]
            id: Option<RpcId<'a>>,
            #[serde(borrow)]
            result: Option<Box<LenientEvent<'a>>>,
            error: Option<serde::de::IgnoredAny>,
        }
        // One UTF-8 check of the whole text costs less than one of each string in it.
        let response: RpcResponse<'_> = serde_json::from_str(std::str::from_utf8(json).ok()?).ok()?;
        let result = response.result.filter(|_| response.error.is_none())?;
        Some((result.into_checked_event().ok()?, response.id))
    }
}

impl TryFrom<Event> for SendResult {
    type Error = serde_json::Error;

    fn try_from(event: Event) -> Result<Self, serde_json::Error> {
        match event {
            Event::Task(task) => Ok(Self::Task(task)),
            Event::Message(message) => Ok(Self::Message(message)),
            // A v0.1 task with nothing but id and status looks like a status update.
            Event::Status(StatusUpdate { task_id: Some(id), context_id, state, message, .. }) => {
                Ok(Self::Task(Task {
                    id,
                    context_id,
                    state,
                    status_message: message,
                    artifacts: Vec::new(),
                    history: Vec::new(),
                    memory: None,
                }))
            }
            Event::Status(_) | Event::Artifact(_) => {
                Err(serde_json::Error::custom("an update where a task or a message was expected"))
            }
        }
    }
}

impl TryFrom<Event> for Task {
    type Error = serde_json::Error;

    fn try_from(event: Event) -> Result<Self, serde_json::Error> {
        match event.try_into()? {
            SendResult::Task(task) => Ok(task),
            SendResult::Message(_) => Err(serde_json::Error::custom("a message where a task was expected")),
        }
    }
}

#[cfg(test)]
impl Task {
    pub fn decode(json: &str) -> Result<Self, serde_json::Error> {
        Event::decode(json)?.try_into()
    }
}

/// The fields of everything that an event or a result can be, filled in one pass over the text. Large fields are
/// boxed, because most of them are absent, and all are moved.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a task, a message or an update")]
struct LenientEvent<'a> {
    #[serde(borrow)]
    kind: Option<Cow<'a, str>>,
    #[serde(alias = "status_update")]
    status_update: Option<Box<LenientUpdate>>,
    #[serde(alias = "artifact_update")]
    artifact_update: Option<Box<LenientUpdate>>,
    task: Option<Box<LenientTask>>,
    // Kept raw: in a v0.1 task it can be anything. v0.3's protobuf calls it `msg`.
    #[serde(alias = "msg", borrow)]
    message: Option<&'a RawValue>,
    id: Option<LenientString>,
    #[serde(alias = "task_id")]
    task_id: Option<LenientString>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    session_id: Option<String>,
    status: Option<Box<LenientStatus>>,
    artifact: Option<Box<LenientArtifact>>,
    artifacts: Option<List<LenientArtifact>>,
    history: Option<List<LenientMessage>>,
    #[serde(rename = "final")]
    is_final: Option<bool>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
    #[serde(alias = "message_id")]
    message_id: Option<LenientString>,
    role: Option<LenientString>,
    parts: Option<LenientParts>,
    content: Option<LenientContent>,
    metadata: Option<Box<RawValue>>,
}

impl LenientEvent<'_> {
    fn into_checked_event(self) -> Result<Event, serde_json::Error> {
        let event = self.into_event()?;
        let (task_id, context_id) = match &event {
            Event::Task(task) => (Some(&task.id), &task.context_id),
            Event::Message(message) => (None, &message.context_id),
            Event::Status(update) => (update.task_id.as_ref(), &update.context_id),
            Event::Artifact(update) => (update.task_id.as_ref(), &update.context_id),
        };
        for (name, id) in [("task", task_id), ("context", context_id.as_ref())] {
            if let Some(id) = id.filter(|id| id.len() > MAX_AGENT_ID) {
                let length = id.len();
                let reason = format!("the {name} id has {length} bytes; the limit is {MAX_AGENT_ID}");
                return Err(serde_json::Error::custom(reason));
            }
        }
        Ok(event)
    }

    fn into_event(mut self) -> Result<Event, serde_json::Error> {
        if let Some(update) = self.status_update.take().or_else(|| self.artifact_update.take()) {
            return update.into_event();
        }
        // A v0.1 task may have a `message` key, so whatever has a status is a task or an update.
        if self.status.is_some() || self.artifact.is_some() {
            return if self.is_update() {
                self.into_update().into_event()
            } else {
                self.into_task().into_event()
            };
        }
        if let Some(task) = self.task {
            return task.into_event();
        }
        if let Some(message) = self.message {
            return Ok(Event::Message(serde_json::from_str::<LenientMessage>(message.get())?.into()));
        }
        if self.parts.is_none() && self.content.is_none() {
            return Err(serde_json::Error::custom("neither a task nor a message"));
        }
        let message = LenientMessage {
            message_id: self.message_id,
            role: self.role,
            context_id: self.context_id,
            context_id_snake: self.context_id_snake,
            parts: self.parts.unwrap_or_default(),
            content: self.content,
        };
        Ok(Event::Message(message.into()))
    }

    /// Distinguishes an update from a task: a task has no `final`, and calls its id `id`, which in v0.1 updates do
    /// too.
    fn is_update(&self) -> bool {
        match self.kind.as_deref() {
            Some("task") => false,
            Some("status-update" | "artifact-update") => true,
            _ => {
                let only_tasks_have = self.artifacts.is_some() || self.history.is_some();
                self.artifact.is_some() || self.is_final.is_some() || (self.id.is_none() && !only_tasks_have)
            }
        }
    }

    fn into_update(self) -> LenientUpdate {
        LenientUpdate {
            task_id: self.task_id.or(self.id),
            context_id: self.context_id.or(self.context_id_snake).or(self.session_id),
            status: self.status,
            artifact: self.artifact,
            is_final: self.is_final,
            append: self.append,
            last_chunk: self.last_chunk,
            metadata: self.metadata,
        }
    }

    fn into_task(self) -> LenientTask {
        LenientTask {
            id: self.id.or(self.task_id),
            context_id: self.context_id,
            context_id_snake: self.context_id_snake,
            session_id: self.session_id,
            status: self.status,
            artifacts: self.artifacts,
            history: self.history,
        }
    }
}

/// A wrapped update. Not a [`LenientEvent`]: an agent must not choose the depth of recursion, and other fields of
/// an update may have any type.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an update")]
struct LenientUpdate {
    #[serde(alias = "task_id", alias = "id")]
    task_id: Option<LenientString>,
    #[serde(alias = "context_id", alias = "sessionId")]
    context_id: Option<String>,
    status: Option<Box<LenientStatus>>,
    artifact: Option<Box<LenientArtifact>>,
    #[serde(rename = "final")]
    is_final: Option<bool>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
    metadata: Option<Box<RawValue>>,
}

impl LenientUpdate {
    fn into_event(self) -> Result<Event, serde_json::Error> {
        let task_id = non_empty(self.task_id.map(|id| id.0));
        let context_id = non_empty(self.context_id);
        if let Some(artifact) = self.artifact {
            // v0.1 has these inside the artifact.
            let append = self.append.or(artifact.append).unwrap_or(false);
            let last_chunk = self.last_chunk.or(artifact.last_chunk).unwrap_or(false);
            let artifact = artifact.into_artifact(self.metadata);
            meter::allocate::<serde_json::Error>(size_without_parts(&artifact))?;
            return Ok(Event::Artifact(ArtifactUpdate { task_id, context_id, artifact, append, last_chunk }));
        }
        let Some(LenientStatus { state: Some(state), message }) = self.status.map(|status| *status) else {
            return Err(serde_json::Error::custom("an update without a state"));
        };
        let (message, is_last) = (message.map(Into::into), self.is_final.unwrap_or(false));
        Ok(Event::Status(StatusUpdate { task_id, context_id, state, message, is_last }))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a task")]
struct LenientTask {
    id: Option<LenientString>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    session_id: Option<String>,
    status: Option<Box<LenientStatus>>,
    artifacts: Option<List<LenientArtifact>>,
    history: Option<List<LenientMessage>>,
}

impl LenientTask {
    fn into_event(self) -> Result<Event, serde_json::Error> {
        let missing = |what: &str| serde_json::Error::custom(format!("a task without {what}"));
        let Some(LenientStatus { state: Some(state), message }) = self.status.map(|status| *status) else {
            return Err(missing("a status"));
        };
        Ok(Event::Task(Task {
            id: non_empty(self.id.map(|id| id.0)).ok_or_else(|| missing("an id"))?,
            context_id: non_empty(self.context_id.or(self.context_id_snake).or(self.session_id)),
            state,
            status_message: message.map(Into::into),
            artifacts: self.artifacts.map(|list| list.0).unwrap_or_default(),
            history: self.history.map(|list| list.0).unwrap_or_default(),
            memory: None,
        }))
    }
}

fn non_empty(text: Option<String>) -> Option<String> {
    text.filter(|text| !text.is_empty())
}

#[derive(Deserialize)]
#[serde(expecting = "a status")]
struct LenientStatus {
    state: Option<TaskState>,
    message: Option<LenientMessage>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a message")]
struct LenientMessage {
    #[serde(alias = "message_id")]
    message_id: Option<LenientString>,
    role: Option<LenientString>,
    context_id: Option<String>,
    #[serde(rename = "context_id")]
    context_id_snake: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    parts: LenientParts,
    content: Option<LenientContent>,
}

impl From<LenientMessage> for Message {
    fn from(message: LenientMessage) -> Self {
        let content = message.content.map(|content| content.0).unwrap_or_default();
        let parts = if message.parts.is_absent { content } else { message.parts };
        Self {
            id: message.message_id.map(|id| id.0),
            // 1 is the number in protobuf.
            from_user: message.role.is_some_and(|LenientString(role)| {
                role.eq_ignore_ascii_case("user") || role == "ROLE_USER" || role == "1"
            }),
            context_id: non_empty(message.context_id.or(message.context_id_snake)),
            parts: parts.list,
            memory: None,
        }
    }
}

/// An id or a role, which some agents write as a number.
struct LenientString(String);

impl<'de> Deserialize<'de> for LenientString {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        if text.starts_with('"') {
            return serde_json::from_str(text).map(Self).map_err(D::Error::custom);
        }
        if text.len() > MAX_AGENT_ID {
            return Err(D::Error::custom(format!("an id with more than {MAX_AGENT_ID} bytes")));
        }
        Ok(Self(text.to_owned()))
    }
}

/// What a list of this lenient form is converted to, item by item.
trait ListItem {
    type Item;
    const EXPECTED: &str;

    /// The item, and the memory that it takes in addition to the list and to lists within it.
    fn convert(self) -> (Self::Item, usize);
}

/// A list whose memory is counted.
struct List<T: ListItem>(Vec<T::Item>);

impl<'de, T: ListItem + Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T>(PhantomData<T>);

        impl<'de, T: ListItem + Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
            type Value = Vec<T::Item>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(T::EXPECTED)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(item) = items.next_element::<T>()? {
                    let (item, content) = item.convert();
                    meter::push(&mut list, item, content)?;
                }
                Ok(list)
            }
        }
        deserializer.deserialize_seq(ListVisitor::<T>(PhantomData)).map(Self)
    }
}

impl ListItem for LenientMessage {
    type Item = Message;
    const EXPECTED: &str = "a list of messages";

    fn convert(self) -> (Message, usize) {
        let message = Message::from(self);
        let content = text_size(&message.id) + text_size(&message.context_id);
        (message, content)
    }
}

impl ListItem for LenientArtifact {
    type Item = Artifact;
    const EXPECTED: &str = "a list of artifacts";

    fn convert(self) -> (Artifact, usize) {
        let artifact = self.into_artifact(None);
        let content = size_without_parts(&artifact);
        (artifact, content)
    }
}

/// The memory of an artifact's fields, in bytes.
fn size_without_parts(artifact: &Artifact) -> usize {
    let extras = artifact.extras.as_ref().map_or(0, |extras| {
        let ArtifactExtras { description, metadata, extensions, update_metadata, .. } = &**extras;
        let raw = [description, metadata, extensions, update_metadata].map(raw_size);
        ALLOCATION_OVERHEAD + size_of::<ArtifactExtras>() + raw.iter().sum::<usize>()
    });
    text_size(&artifact.id) + text_size(&artifact.name) + extras
}

fn raw_size(raw: &Option<Box<RawValue>>) -> usize {
    raw.as_ref().map_or(0, |raw| ALLOCATION_OVERHEAD + raw.get().len())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an artifact")]
struct LenientArtifact {
    #[serde(alias = "artifact_id")]
    artifact_id: Option<LenientString>,
    // v0.1 numbers artifacts instead of naming them.
    index: Option<LenientString>,
    append: Option<bool>,
    #[serde(alias = "last_chunk")]
    last_chunk: Option<bool>,
    name: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    parts: LenientParts,
    description: Option<Box<RawValue>>,
    metadata: Option<Box<RawValue>>,
    extensions: Option<Box<RawValue>>,
}

impl LenientArtifact {
    fn into_artifact(self, update_metadata: Option<Box<RawValue>>) -> Artifact {
        let extras = ArtifactExtras {
            description: self.description,
            metadata: self.metadata,
            extensions: self.extensions,
            update_metadata,
            parts: self.parts.extras,
        };
        Artifact {
            id: self.artifact_id.or(self.index).map(|id| id.0),
            name: non_empty(self.name),
            parts: self.parts.list,
            extras: (!extras.is_empty()).then(|| Box::new(extras)),
        }
    }
}

/// The parts of a message or an artifact. Parts without any content that a known version has are left out.
struct LenientParts {
    list: Vec<Part>,
    /// By the index of the part.
    extras: Vec<(usize, PartExtras)>,
    /// Whether the agent sent no part at all, not even an empty one.
    is_absent: bool,
}

impl Default for LenientParts {
    fn default() -> Self {
        Self { list: Vec::new(), extras: Vec::new(), is_absent: true }
    }
}

impl LenientParts {
    fn push<E: serde::de::Error>(&mut self, mut part: LenientPart) -> Result<(), E> {
        self.is_absent = false;
        let extras = part.take_extras();
        let Some(part) = part.into_part() else { return Ok(()) };
        if let Some(extras) = extras {
            let content =
                text_size(&extras.filename) + text_size(&extras.media_type) + raw_size(&extras.metadata);
            meter::push(&mut self.extras, (self.list.len(), extras), content)?;
        }
        // The part itself is counted with the list.
        let content = part.allocated() - size_of::<Part>();
        meter::push(&mut self.list, part, content)
    }
}

impl<'de> Deserialize<'de> for LenientParts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PartsVisitor;

        impl<'de> Visitor<'de> for PartsVisitor {
            type Value = LenientParts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of parts")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<LenientParts, A::Error> {
                let mut parts = LenientParts::default();
                while let Some(part) = items.next_element::<LenientPart>()? {
                    parts.push(part)?;
                }
                Ok(parts)
            }
        }
        deserializer.deserialize_seq(PartsVisitor)
    }
}

/// Parts, and their extra fields by the index of the part.
pub(crate) type DecodedParts = (Vec<Part>, Vec<(usize, PartExtras)>);

/// Decodes the parts of an artifact.
pub(crate) fn decode_parts(json: &str) -> Result<DecodedParts, serde_json::Error> {
    let LenientParts { list, extras, .. } = serde_json::from_str(json)?;
    Ok((list, extras))
}

/// What replaces `parts` in v0.3's protobuf (a list) and in python-a2a (one part, or a string).
struct LenientContent(LenientParts);

impl<'de> Deserialize<'de> for LenientContent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let mut parts = LenientParts::default();
        match raw.as_bytes().first() {
            Some(b'[') => parts = serde_json::from_str(raw).map_err(D::Error::custom)?,
            Some(b'{') => parts.push(serde_json::from_str(raw).map_err(D::Error::custom)?)?,
            Some(b'"') => {
                let text = Some(serde_json::from_str(raw).map_err(D::Error::custom)?);
                parts.push(LenientPart { text, ..LenientPart::default() })?;
            }
            _ => {}
        }
        Ok(Self(parts))
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", expecting = "a part")]
struct LenientPart {
    text: Option<String>,
    file: Option<Box<LenientFile>>,
    data: Option<Box<RawValue>>,
    raw: Option<String>,
    url: Option<String>,
    filename: Option<String>,
    #[serde(alias = "media_type", alias = "mimeType", alias = "mime_type")]
    media_type: Option<String>,
    metadata: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a file")]
struct LenientFile {
    name: Option<String>,
    #[serde(alias = "mime_type", alias = "mediaType", alias = "media_type")]
    mime_type: Option<String>,
    #[serde(alias = "fileWithBytes", alias = "file_with_bytes")]
    bytes: Option<String>,
    #[serde(alias = "url", alias = "fileWithUri", alias = "file_with_uri")]
    uri: Option<String>,
}

impl LenientPart {
    fn take_extras(&mut self) -> Option<PartExtras> {
        let is_file = self.file.is_some() || self.raw.is_some() || self.url.is_some();
        let is_file = is_file && !self.is_text();
        let metadata = self.metadata.take();
        let (filename, media_type) =
            if is_file { (None, None) } else { (self.filename.take(), self.media_type.take()) };
        let is_plain = metadata.is_none() && filename.is_none() && media_type.is_none();
        (!is_plain).then_some(PartExtras { filename, media_type, metadata })
    }

    /// Some agents have an empty text in parts of every kind.
    fn is_text(&self) -> bool {
        let is_other = self.file.is_some() || self.data.is_some();
        self.text.as_ref().is_some_and(|text| !text.is_empty() || !is_other)
    }

    /// `None` for a kind of part that no known version has.
    fn into_part(self) -> Option<Part> {
        if self.is_text() {
            return self.text.map(Part::Text);
        }
        let (name, media_type, bytes, uri) = match self.file {
            Some(file) => (file.name, file.mime_type, file.bytes, file.uri),
            None => (self.filename, self.media_type, self.raw, self.url),
        };
        let content = match (bytes, uri) {
            // Some agents send both, with the unused one empty.
            (Some(bytes), Some(uri)) if bytes.is_empty() && !uri.is_empty() => FileContent::Uri(uri),
            (Some(bytes), _) => match received_file(&bytes) {
                Some(file) => StoredContent::received(file),
                None => FileContent::Base64(bytes),
            },
            (None, Some(uri)) => FileContent::Uri(uri),
            (None, None) => return self.data.map(Part::Data),
        };
        Some(Part::File(File { name: non_empty(name), media_type: non_empty(media_type), content }))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(r#"{"task":{"id":"1","status":{"state":"working"},"task":"write a report"}}"#)]
    #[case(r#"{"task":{"id":"1","status":{"state":"working"},"parts":"x","final":"no"}}"#)]
    #[case(r#"{"statusUpdate":{"taskId":"1","status":{"state":"working"},"kind":7,"history":"none"}}"#)]
    fn other_fields_of_wrapped_objects_may_have_any_type(#[case] json: &str) {
        Event::decode(json).unwrap();
    }

    #[test]
    fn nested_wrappers_need_no_stack() {
        let json = format!("{}{}", r#"{"task":"#.repeat(126), "}".repeat(126).replacen('}', "1}", 1));
        let decode = move || Event::decode(&json).is_err();
        let small_stack = std::thread::Builder::new().stack_size(256 << 10);
        assert!(small_stack.spawn(decode).unwrap().join().unwrap());
    }
}
