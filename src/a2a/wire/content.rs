//! Artifacts and parts on the wire.

use serde::Deserialize;
use serde::de::Error as _;
use serde_json::value::RawValue;

use super::Id;
use crate::a2a::model::{Artifact, ArtifactExtras, File, FileContent, Part, PartExtras};
use crate::json::null_is_default;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an artifact")]
pub(super) struct WireArtifact {
    #[serde(alias = "artifact_id")]
    artifact_id: Option<Id>,
    // v0.1 numbers artifacts instead of naming them.
    index: Option<Id>,
    pub(super) append: Option<bool>,
    #[serde(alias = "last_chunk")]
    pub(super) last_chunk: Option<bool>,
    name: Option<String>,
    #[serde(default, deserialize_with = "null_is_default")]
    parts: Vec<WirePart>,
    description: Option<Box<RawValue>>,
    metadata: Option<Box<RawValue>>,
    extensions: Option<Box<RawValue>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", expecting = "a part")]
pub(super) struct WirePart {
    text: Option<String>,
    file: Option<Box<WireFile>>,
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
struct WireFile {
    name: Option<String>,
    #[serde(alias = "mime_type", alias = "mediaType", alias = "media_type")]
    mime_type: Option<String>,
    #[serde(alias = "fileWithBytes", alias = "file_with_bytes")]
    bytes: Option<String>,
    #[serde(alias = "url", alias = "fileWithUri", alias = "file_with_uri")]
    uri: Option<String>,
}

/// What stands for `parts` in v0.3's protobuf (a list) and in python-a2a (one part, or text).
pub(super) struct Content(pub(super) Vec<WirePart>);

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let parts = match raw.as_bytes().first() {
            Some(b'[') => serde_json::from_str(raw),
            Some(b'{') => serde_json::from_str(raw).map(|part| vec![part]),
            Some(b'"') => serde_json::from_str(raw).map(|text| vec![WirePart::text(text)]),
            _ => Ok(Vec::new()),
        };
        parts.map(Self).map_err(D::Error::custom)
    }
}

impl From<WireArtifact> for Artifact {
    fn from(wire: WireArtifact) -> Self {
        wire.with_update_metadata(None)
    }
}

impl WireArtifact {
    /// The artifact, with what the update that brought it says about itself.
    pub(super) fn with_update_metadata(self, update_metadata: Option<Box<RawValue>>) -> Artifact {
        let mut parts = Vec::with_capacity(self.parts.len());
        let mut part_extras = Vec::new();
        for mut wire in self.parts {
            let extras = wire.take_extras();
            if let Some(part) = wire.into_part() {
                part_extras.extend(extras.map(|extras| (parts.len(), extras)));
                parts.push(part);
            }
        }
        let extras = ArtifactExtras {
            description: self.description,
            metadata: self.metadata,
            extensions: self.extensions,
            update_metadata,
            parts: part_extras,
        };
        Artifact {
            id: self.artifact_id.or(self.index).map(|id| id.0),
            name: self.name.filter(|name| !name.is_empty()),
            parts,
            extras: (!extras.is_empty()).then(|| Box::new(extras)),
        }
    }
}

impl WirePart {
    pub(super) fn text(text: String) -> Self {
        Self { text: Some(text), ..Self::default() }
    }

    /// What the part has beside what a [`Part`] holds.
    fn take_extras(&mut self) -> Option<PartExtras> {
        let is_file = self.file.is_some() || self.raw.is_some() || self.url.is_some();
        let is_file = is_file && !self.is_text();
        let metadata = self.metadata.take();
        let (filename, media_type) =
            if is_file { (None, None) } else { (self.filename.take(), self.media_type.take()) };
        let is_plain = metadata.is_none() && filename.is_none() && media_type.is_none();
        (!is_plain).then_some(PartExtras { filename, media_type, metadata })
    }

    /// Some have an empty text in parts of every kind.
    fn is_text(&self) -> bool {
        let is_other = self.file.is_some() || self.data.is_some();
        self.text.as_ref().is_some_and(|text| !text.is_empty() || !is_other)
    }

    /// `None` for a kind of part that no known version has.
    pub(super) fn into_part(self) -> Option<Part> {
        let filled = |text: &String| !text.is_empty();
        let file = |name: Option<String>, media_type: Option<String>, content| {
            Some(Part::File(File {
                name: name.filter(filled),
                media_type: media_type.filter(filled),
                content,
            }))
        };
        if self.is_text() {
            return self.text.map(Part::Text);
        }
        if let Some(wire) = self.file {
            let content = match (wire.bytes, wire.uri) {
                // Some write both, the one that is not meant empty.
                (Some(bytes), Some(uri)) if bytes.is_empty() && !uri.is_empty() => FileContent::Uri(uri),
                (Some(bytes), _) => FileContent::Base64(bytes),
                (None, Some(uri)) => FileContent::Uri(uri),
                (None, None) => return None,
            };
            return file(wire.name, wire.mime_type, content);
        }
        if let Some(raw) = self.raw {
            return file(self.filename, self.media_type, FileContent::Base64(raw));
        }
        if let Some(url) = self.url {
            return file(self.filename, self.media_type, FileContent::Uri(url));
        }
        self.data.map(Part::Data)
    }
}
