//! The outcome of a call that did not end in an error, and the reply body of the public protocol.

use std::borrow::Cow;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::{self, Deserializer as _, MapAccess, Visitor};
use serde::ser::{Error as _, SerializeMap as _};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::error::{Code, ErrorInfo};
use crate::a2a::model::{ALLOCATION_OVERHEAD, TaskState};
use crate::a2a::retry::{Retries, Retry};
use crate::json;

/// The id under which a caller can answer an agent's question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FollowUp {
    #[serde(rename = "follow_up_id")]
    pub id: Uuid,
    /// RFC 3339.
    pub expires_at: String,
}

impl FollowUp {
    /// The memory that it takes in addition to its own size, in bytes.
    pub(crate) fn allocated(&self) -> usize {
        ALLOCATION_OVERHEAD + self.expires_at.capacity()
    }
}

/// The statuses of the public protocol, except for that of errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum ReplyStatus {
    Completed,
    Failed,
    /// The agent refused the task.
    Rejected,
    Canceled,
    InputRequired,
    AuthRequired,
    Working,
}

impl ReplyStatus {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Completed => "COMPLETED",
            Self::Failed => "FAILED",
            Self::Rejected => "REJECTED",
            Self::Canceled => "CANCELED",
            Self::InputRequired => "INPUT_REQUIRED",
            Self::AuthRequired => "AUTH_REQUIRED",
            Self::Working => "WORKING",
        }
    }
}

impl From<&TaskState> for ReplyStatus {
    fn from(state: &TaskState) -> Self {
        match state {
            TaskState::Completed => Self::Completed,
            TaskState::Failed => Self::Failed,
            TaskState::Rejected => Self::Rejected,
            TaskState::Canceled => Self::Canceled,
            TaskState::InputRequired => Self::InputRequired,
            TaskState::AuthRequired => Self::AuthRequired,
            TaskState::Submitted | TaskState::Working | TaskState::Unknown(_) => Self::Working,
        }
    }
}

impl From<ReplyStatus> for TaskState {
    fn from(status: ReplyStatus) -> Self {
        // Every status has the name of its state.
        Self::parse(status.name())
    }
}

/// The `task` of a reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TaskRef {
    /// The agent's id of the task; `null` for a direct message.
    pub id: Option<String>,
    pub context_id: Option<String>,
    pub agent: Arc<str>,
    /// The skill's id in the card; `null` if the bridge does not know it.
    pub skill: Option<Arc<str>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReplyFile {
    pub name: Option<String>,
    pub mime_type: Option<String>,
    /// In bytes; absent for a file that is given by URL.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<usize>,
    /// In hexadecimal digits, for a file in the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// In base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<String>,
}

/// An artifact's id and name, which distinguish versions of a refined result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ArtifactRef {
    pub id: Option<String>,
    pub name: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct ReplyContent {
    pub message: String,
    pub files: Vec<ReplyFile>,
    /// All data parts, in order.
    pub data: Vec<Box<RawValue>>,
    pub artifacts: Vec<ArtifactRef>,
}

impl ReplyContent {
    /// The bytes of files, data and artifacts in a reply body, without escapes.
    pub(crate) fn list_lengths(&self) -> [usize; 3] {
        const FILE: usize = r#"{"name":"","mime_type":""}"#.len();
        const ARTIFACT: usize = r#"{"id":"","name":""}"#.len();
        let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        let file = |file: &ReplyFile| {
            let texts = [&file.name, &file.mime_type, &file.sha256, &file.url, &file.bytes];
            FILE + texts.into_iter().map(length).sum::<usize>()
        };
        let artifact = |artifact: &ArtifactRef| ARTIFACT + length(&artifact.id) + length(&artifact.name);
        [
            self.files.iter().map(file).sum(),
            self.data.iter().map(|data| data.get().len()).sum(),
            self.artifacts.iter().map(artifact).sum(),
        ]
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub status: ReplyStatus,
    pub success: bool,
    pub content: ReplyContent,
    /// How to answer the agent's question. In a reply body, `data` then holds this and nothing else.
    pub follow_up: Option<FollowUp>,
    /// Why the bridge sent the message again.
    pub retries: Vec<Retry>,
    pub task: TaskRef,
}

impl Outcome {
    pub(crate) fn new(status: ReplyStatus, content: ReplyContent, task: TaskRef) -> Self {
        let success = matches!(status, ReplyStatus::Completed | ReplyStatus::Working);
        Self { status, success, content, follow_up: None, retries: Vec::new(), task }
    }

    pub(crate) fn with_retries(self, retries: Option<&Retries>) -> Self {
        Self { retries: retries.map(Retries::list).unwrap_or_default(), ..self }
    }

    /// The reply body of the public protocol.
    pub(crate) fn to_json(&self) -> Bytes {
        let parts = &*self.content.data;
        let (data, data_parts) = match &self.follow_up {
            Some(follow_up) => (ReplyData::FollowUp(follow_up), parts),
            None => match MergedObjects::new(parts) {
                Some(object) => (ReplyData::Object(object), &[] as &[_]),
                None => (ReplyData::Object(MergedObjects::default()), parts),
            },
        };
        let failure = match self.status {
            ReplyStatus::Failed => Some(Code::TaskFailed),
            ReplyStatus::Rejected => Some(Code::TaskRejected),
            _ => None,
        };
        json::to_bytes(&ReplyBody {
            success: self.success,
            status: self.status.name(),
            message: &self.content.message,
            files: &self.content.files,
            data,
            data_parts,
            artifacts: &self.content.artifacts,
            error_info: failure.map(|code| Cow::Owned(ErrorInfo::new(code))),
            metadata: ReplyBody::metadata(&self.retries),
            task: Some(&self.task),
        })
    }

    /// The bytes of the content, without the object around it and without escapes: the reply body has more.
    pub(crate) fn content_length(&self) -> usize {
        self.content.message.len() + self.content.list_lengths().into_iter().sum::<usize>()
    }

    /// The size in memory, in bytes.
    pub(crate) fn allocated(&self) -> usize {
        let ReplyContent { message, files, data, artifacts } = &self.content;
        let of_files =
            files.iter().flat_map(|file| [&file.name, &file.mime_type, &file.sha256, &file.url, &file.bytes]);
        let of_artifacts = artifacts.iter().flat_map(|artifact| [&artifact.id, &artifact.name]);
        let texts = of_files.chain(of_artifacts).chain([&self.task.id, &self.task.context_id]).flatten();
        let blocks = [
            message.capacity(),
            files.capacity() * size_of::<ReplyFile>(),
            data.capacity() * size_of::<Box<RawValue>>(),
            artifacts.capacity() * size_of::<ArtifactRef>(),
            self.retries.capacity() * size_of::<Retry>(),
        ];
        let blocks = blocks.into_iter().filter(|bytes| *bytes > 0);
        size_of::<Self>()
            + blocks.map(|bytes| ALLOCATION_OVERHEAD + bytes).sum::<usize>()
            + self.follow_up.as_ref().map_or(0, FollowUp::allocated)
            + data.iter().map(|data| ALLOCATION_OVERHEAD + data.get().len()).sum::<usize>()
            + texts.map(|text| ALLOCATION_OVERHEAD + text.capacity()).sum::<usize>()
    }
}

/// The reply body of the public protocol, for outcomes and errors.
#[derive(Debug, Serialize)]
pub(super) struct ReplyBody<'a> {
    pub success: bool,
    pub status: &'static str,
    pub message: &'a str,
    pub files: &'a [ReplyFile],
    pub data: ReplyData<'a>,
    /// All data parts, where `data` cannot hold them.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub data_parts: &'a [Box<RawValue>],
    pub artifacts: &'a [ArtifactRef],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_info: Option<Cow<'a, ErrorInfo>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<ReplyMetadata<'a>>,
    pub task: Option<&'a TaskRef>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum ReplyData<'a> {
    FollowUp(&'a FollowUp),
    Object(MergedObjects<'a>),
}

#[derive(Debug, Serialize)]
pub(super) struct ReplyMetadata<'a> {
    retries: &'a [Retry],
}

impl ReplyBody<'_> {
    pub(super) fn metadata(retries: &[Retry]) -> Option<ReplyMetadata<'_>> {
        (!retries.is_empty()).then_some(ReplyMetadata { retries })
    }
}

/// Objects as one object. Their fields are read from the text each time, because they take many times its memory.
#[derive(Debug, Default)]
pub(super) struct MergedObjects<'a>(&'a [Box<RawValue>]);

impl<'a> MergedObjects<'a> {
    /// `None` unless all parts are objects and their keys do not clash.
    fn new(parts: &'a [Box<RawValue>]) -> Option<Self> {
        let (hasher, mut keys) = (RandomState::new(), Vec::new());
        for part in parts {
            each_field(part, |key, _| {
                keys.push(hasher.hash_one(key));
                Ok(())
            })
            .ok()?;
        }
        keys.sort_unstable();
        let is_distinct = keys.is_sorted_by(|one, other| one < other);
        is_distinct.then_some(Self(parts))
    }
}

impl Serialize for MergedObjects<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_map(None)?;
        for part in self.0 {
            let write = |key: &str, value: &RawValue| {
                object.serialize_entry(key, value).map_err(|error| error.to_string())
            };
            each_field(part, write).map_err(S::Error::custom)?;
        }
        object.end()
    }
}

/// Calls `take` for each field of an object.
fn each_field(
    object: &RawValue,
    take: impl FnMut(&str, &RawValue) -> Result<(), String>,
) -> Result<(), serde_json::Error> {
    struct FieldVisitor<F>(F);

    impl<'de, F: FnMut(&str, &RawValue) -> Result<(), String>> Visitor<'de> for FieldVisitor<F> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(mut self, mut fields: A) -> Result<(), A::Error> {
            while let Some((key, value)) = fields.next_entry::<Cow<'de, str>, &'de RawValue>()? {
                (self.0)(&key, value).map_err(de::Error::custom)?;
            }
            Ok(())
        }
    }
    serde_json::Deserializer::from_str(object.get()).deserialize_map(FieldVisitor(take))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(parts: &[&str]) -> String {
        let data = parts.iter().map(|part| RawValue::from_string((*part).to_owned()).unwrap()).collect();
        let task = TaskRef { id: None, context_id: None, agent: "a".into(), skill: None };
        let content = ReplyContent { data, ..ReplyContent::default() };
        let body = Outcome::new(ReplyStatus::Completed, content, task).to_json();
        String::from_utf8(body.to_vec()).unwrap()
    }

    #[test]
    fn every_text_of_the_content_counts_and_the_body_is_never_shorter() {
        let text = || Some("x".repeat(1000));
        let file = ReplyFile {
            name: text(),
            mime_type: text(),
            size: None,
            sha256: text(),
            url: text(),
            bytes: text(),
        };
        let empty =
            ReplyFile { name: None, mime_type: None, size: None, sha256: None, url: None, bytes: None };
        let artifacts = vec![ArtifactRef { id: text(), name: text() }, ArtifactRef { id: None, name: None }];
        let content =
            ReplyContent { message: "x".repeat(1000), files: vec![file, empty], data: Vec::new(), artifacts };
        let task = TaskRef { id: None, context_id: None, agent: "a".into(), skill: None };
        let outcome = Outcome::new(ReplyStatus::Completed, content, task);
        assert!((8000..outcome.to_json().len()).contains(&outcome.content_length()));
    }

    #[test]
    fn objects_whose_keys_do_not_clash_are_one_object() {
        let merged = body(&[r#"{ "a\"é": 1.0, "b": {"b": [1e400, 2]} }"#, "{}", r#"{"c": null}"#]);
        let expected = r#""data":{"a\"é":1.0,"b":{"b": [1e400, 2]},"c":null},"artifacts""#;
        assert!(merged.contains(expected), "{merged}");
        for parts in [&[r#"{"a":1}"#, r#"{"a":1}"#][..], &[r#"{"a":1,"a":2}"#], &["[1]"], &["{}", "1"]] {
            let expected = format!(r#""data":{{}},"data_parts":[{}]"#, parts.join(","));
            assert!(body(parts).contains(&expected), "{expected}");
        }
    }
}
