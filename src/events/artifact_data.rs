//! The bodies of `artifact` frames: an artifact with everything that the agent sent with it.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::a2a::dialect::V1Part;
use crate::a2a::model::{ArtifactExtras, ArtifactUpdate, Part, PartExtras};
use crate::json::{self, split_text, typed_body};

/// Bytes of a part in addition to its text.
pub(crate) const PART_OVERHEAD: usize = 16;

/// Maximum bytes of one of the artifact's extras in addition to its value.
const EXTRAS_OVERHEAD: usize = r#","update_metadata":"#.len();

#[derive(Serialize)]
struct ArtifactData<'a> {
    artifact_id: Option<&'a str>,
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a RawValue>,
    append: bool,
    last_chunk: bool,
    parts: &'a [FramePart<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extensions: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    update_metadata: Option<&'a RawValue>,
    /// Says that extras of the artifact or of its parts were left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    omitted: Option<&'static str>,
}

const TOO_LARGE: &str = "too_large";

/// A part in the form of A2A v1.0, or a note that it was left out.
#[derive(Serialize)]
#[serde(untagged)]
enum FramePart<'a> {
    Part(V1Part<'a>),
    /// Content that neither fits nor can be split is left out, and the stream continues.
    Omitted {
        filename: Option<Cow<'a, str>>,
        size: usize,
        omitted: &'static str,
    },
}

impl<'a> FramePart<'a> {
    fn add_extras(&mut self, extras: &'a PartExtras) {
        if let Self::Part(part) = self {
            part.filename = part.filename.or(extras.filename.as_deref());
            part.media_type = part.media_type.or(extras.media_type.as_deref());
            part.metadata = extras.metadata.as_deref();
        }
    }

    fn without_metadata(self) -> Self {
        match self {
            Self::Part(part) => Self::Part(V1Part { metadata: None, ..part }),
            omitted @ Self::Omitted { .. } => omitted,
        }
    }

    fn has_metadata(&self) -> bool {
        matches!(self, Self::Part(V1Part { metadata: Some(_), .. }))
    }

    fn is_labelled_text(&self) -> bool {
        matches!(self, Self::Part(part) if part.text.is_some() && part.filename.or(part.media_type).is_some())
    }

    /// The smallest form of the part: text without anything else, or a note that it was left out.
    fn smallest(self, room: usize) -> Self {
        let (filename, size) = match self {
            Self::Part(V1Part { text: Some(text), .. }) => {
                return Self::Part(V1Part { text: Some(text), ..V1Part::default() });
            }
            Self::Part(part) => {
                let data = part.data.map(RawValue::get);
                let decoded_size = part.raw.map(|base64| base64.len() / 4 * 3);
                let size = decoded_size.or(part.url.or(data).map(str::len));
                (part.filename.map(Cow::Borrowed), size.unwrap_or_default())
            }
            Self::Omitted { filename, size, .. } => (filename, size),
        };
        let filename = filename.map(|name| shorten_label(name, room));
        Self::Omitted { filename, size, omitted: TOO_LARGE }
    }
}

/// Cuts a name or an id so that it leaves room for others. The result depends on nothing else, so that all
/// frames of one artifact have the same id.
fn shorten_label(text: Cow<'_, str>, room: usize) -> Cow<'_, str> {
    match json::shorten_to_json(&text, room / 4) {
        Some(short) => Cow::Owned(short),
        None => text,
    }
}

/// Encodes an update in bodies of at most `room` bytes.
pub(crate) struct ArtifactEncoder<'a> {
    update: &'a ArtifactUpdate,
    id: Option<Cow<'a, str>>,
    name: Option<Cow<'a, str>>,
    room: usize,
}

/// Parts that go out in one body.
pub(crate) struct PartGroup<'a> {
    parts: Vec<FramePart<'a>>,
    /// With the first group.
    extras: Option<&'a ArtifactExtras>,
    is_without_extras: bool,
    append: bool,
    last_chunk: bool,
    /// Approximate bytes of the body.
    pub(crate) size: usize,
}

impl<'a> ArtifactEncoder<'a> {
    pub(crate) fn new(update: &'a ArtifactUpdate, room: usize) -> Self {
        let label =
            |text: &'a Option<String>| text.as_deref().map(|text| shorten_label(Cow::Borrowed(text), room));
        Self { update, id: label(&update.artifact.id), name: label(&update.artifact.name), room }
    }

    /// Approximate bytes of the whole update in one body, without escapes.
    pub(crate) fn size(&self) -> usize {
        let labels = [&self.id, &self.name].into_iter().flatten().map(|label| label.len());
        let parts = self.update.artifact.parts.iter().map(Part::allocated);
        let extras = self.update.artifact.extras.as_deref().map_or(0, |extras| {
            let of_parts = extras.parts.iter().map(|(_, extras)| {
                let texts = [&extras.filename, &extras.media_type].into_iter().flatten().map(String::len);
                texts.chain(extras.metadata.as_deref().map(raw_len)).sum::<usize>()
            });
            artifact_extras(extras).map(raw_len).chain(of_parts).sum()
        });
        labels.chain(parts).sum::<usize>() + extras
    }

    /// The whole update in one body, even if it does not fit.
    pub(crate) fn whole(&self) -> Bytes {
        let Self { update, .. } = self;
        let extras = update.artifact.extras.as_deref();
        let mut parts: Vec<_> =
            update.artifact.parts.iter().map(|part| FramePart::Part(V1Part::from(part))).collect();
        for (index, extras) in extras.into_iter().flat_map(|extras| &extras.parts) {
            parts.get_mut(*index).into_iter().for_each(|part| part.add_extras(extras));
        }
        self.body(extras, &parts, update.append, update.last_chunk, None)
    }

    /// The update in groups that append to each other, each with as many parts as fit into one body. The extras of the
    /// artifact and of a part come with its first piece, unless they leave no room.
    pub(crate) fn groups(&self) -> Vec<PartGroup<'a>> {
        let Self { update, room, .. } = self;
        let extras = update.artifact.extras.as_deref();
        let note = extras.map(|_| TOO_LARGE);
        let bare = self.body(None, &[], update.append, update.last_chunk, note).len();
        let part_room = room.saturating_sub(bare);
        let mut part_extras = extras.map_or(&[][..], |extras| &extras.parts).iter().peekable();
        let extras_len = |extras: &ArtifactExtras| -> usize {
            artifact_extras(extras).map(|raw| raw_len(raw) + EXTRAS_OVERHEAD).sum()
        };
        let own_extras = extras.filter(|extras| artifact_extras(extras).next().is_some());
        let fitting = own_extras.filter(|extras| extras_len(extras) <= part_room);
        let mut used = fitting.map_or(0, extras_len);
        let mut groups = vec![PartGroup {
            parts: Vec::new(),
            extras: fitting,
            is_without_extras: own_extras.is_some() && fitting.is_none(),
            append: update.append,
            last_chunk: false,
            size: bare + used,
        }];
        for (index, part) in update.artifact.parts.iter().enumerate() {
            // Both lists are in the order of the parts.
            let part_extras = part_extras.next_if(|(at, _)| *at == index).map(|(_, extras)| extras);
            let pieces = split(part, part_room);
            let is_cut = pieces.len() > 1;
            for (number, mut piece) in pieces.into_iter().enumerate() {
                if let Some(part_extras) = part_extras.filter(|_| number == 0) {
                    piece.add_extras(part_extras);
                }
                let size = json::to_bytes(&piece).len() + ",".len();
                // Each piece of one text gets its own body, so that readers do not see several texts.
                let has_parts = groups.last().is_some_and(|group| !group.parts.is_empty());
                if has_parts && (is_cut || used + size > part_room) {
                    groups.push(PartGroup {
                        parts: Vec::new(),
                        extras: None,
                        is_without_extras: false,
                        append: true,
                        last_chunk: false,
                        size: bare,
                    });
                    used = 0;
                }
                used += if is_cut { part_room } else { size };
                if let Some(group) = groups.last_mut() {
                    group.size += size;
                    group.parts.push(piece);
                }
            }
        }
        if let Some(last) = groups.last_mut() {
            last.last_chunk = update.last_chunk;
        }
        groups
    }

    pub(crate) fn encode(&self, group: PartGroup<'_>) -> Bytes {
        let PartGroup { parts, extras, is_without_extras, append, last_chunk, .. } = group;
        let full = self.body(extras, &parts, append, last_chunk, is_without_extras.then_some(TOO_LARGE));
        if full.len() <= self.room {
            return full;
        }
        let is_reduced = is_without_extras || extras.is_some() || parts.iter().any(FramePart::has_metadata);
        let is_labelled = parts.iter().any(FramePart::is_labelled_text);
        let note = is_reduced.then_some(TOO_LARGE);
        let parts: Vec<_> = parts.into_iter().map(FramePart::without_metadata).collect();
        let plain = self.body(None, &parts, append, last_chunk, note);
        if plain.len() <= self.room {
            return plain;
        }
        let parts: Vec<_> = parts.into_iter().map(|piece| piece.smallest(self.room)).collect();
        self.body(None, &parts, append, last_chunk, note.or(is_labelled.then_some(TOO_LARGE)))
    }

    /// The data of the bodies: the whole update if it fits, otherwise in pieces that append to each other.
    pub(crate) fn data(&self) -> Vec<Box<RawValue>> {
        #[derive(Deserialize)]
        struct Body<'a> {
            #[serde(borrow)]
            data: &'a RawValue,
        }
        let whole = Some(self.size()).filter(|size| *size <= self.room).map(|_| self.whole());
        let bodies = match whole.filter(|whole| whole.len() <= self.room) {
            Some(whole) => vec![whole],
            None => self.groups().into_iter().map(|group| self.encode(group)).collect(),
        };
        let data =
            |body: &Bytes| serde_json::from_slice(body).ok().map(|body: Body<'_>| body.data.to_owned());
        bodies.iter().filter_map(data).collect()
    }

    fn body(
        &self,
        extras: Option<&ArtifactExtras>,
        parts: &[FramePart<'_>],
        append: bool,
        last_chunk: bool,
        omitted: Option<&'static str>,
    ) -> Bytes {
        let data = ArtifactData {
            artifact_id: self.id.as_deref(),
            name: self.name.as_deref(),
            description: extras.and_then(|extras| extras.description.as_deref()),
            append,
            last_chunk,
            parts,
            metadata: extras.and_then(|extras| extras.metadata.as_deref()),
            extensions: extras.and_then(|extras| extras.extensions.as_deref()),
            update_metadata: extras.and_then(|extras| extras.update_metadata.as_deref()),
            omitted,
        };
        typed_body("artifact", data)
    }
}

/// The extras of the artifact itself.
fn artifact_extras(extras: &ArtifactExtras) -> impl Iterator<Item = &RawValue> {
    let ArtifactExtras { description, metadata, extensions, update_metadata, parts: _ } = extras;
    [description, metadata, extensions, update_metadata].into_iter().flatten().map(|raw| &**raw)
}

fn raw_len(raw: &RawValue) -> usize {
    raw.get().len()
}

/// A part in pieces that fit into `room`. Only text can be split; its pieces leave room for the extras of the
/// part.
fn split(part: &Part, room: usize) -> Vec<FramePart<'_>> {
    match part {
        Part::Text(text) if !text.is_empty() => split_text(text, room.saturating_sub(PART_OVERHEAD) / 6)
            .map(|text| FramePart::Part(V1Part { text: Some(text), ..V1Part::default() }))
            .collect(),
        other => vec![FramePart::Part(V1Part::from(other))],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::a2a::model::Artifact;

    #[test]
    fn extras_that_do_not_fit_are_left_out_with_a_note() {
        let raw = |text: String| serde_json::value::to_raw_value(&text).ok();
        let update = |artifact_metadata: usize, part_metadata: usize| {
            let part_extras =
                PartExtras { filename: None, media_type: None, metadata: raw("p".repeat(part_metadata)) };
            let extras = ArtifactExtras {
                description: None,
                metadata: raw("m".repeat(artifact_metadata)),
                extensions: None,
                update_metadata: None,
                parts: vec![(0, part_extras)],
            };
            let parts = vec![Part::Text("text".to_owned())];
            let artifact = Artifact { id: None, name: None, parts, extras: Some(Box::new(extras)) };
            ArtifactUpdate { task_id: None, context_id: None, artifact, append: false, last_chunk: true }
        };
        for (artifact_metadata, part_metadata, has_note) in
            [(10, 10, false), (5000, 10, true), (10, 5000, true), (5000, 5000, true)]
        {
            let update = update(artifact_metadata, part_metadata);
            let encoder = ArtifactEncoder::new(&update, 1024);
            assert!(encoder.size() >= artifact_metadata + part_metadata);
            let mut groups = encoder.groups();
            assert_eq!(groups.len(), 1);
            let body = encoder.encode(groups.remove(0));
            assert!(body.len() <= 1024);
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            let data = &body["data"];
            assert_eq!(data["parts"][0]["text"], "text");
            assert_eq!(data["omitted"] == "too_large", has_note, "{body}");
            let is_complete = data["metadata"].is_string() && data["parts"][0]["metadata"].is_string();
            assert_eq!(is_complete, !has_note, "{body}");
        }
    }

    #[test]
    fn many_parts_of_an_artifact_with_a_long_name_do_not_multiply_the_name() {
        let parts: Vec<_> =
            (0..4000).map(|number| Part::Text(format!("part {number} {}", "x".repeat(200)))).collect();
        let artifact = Artifact { id: None, name: Some("n".repeat(250_000)), parts, extras: None };
        let update =
            ArtifactUpdate { task_id: None, context_id: None, artifact, append: false, last_chunk: true };
        let encoder = ArtifactEncoder::new(&update, 1 << 20);
        let bodies: Vec<_> = encoder.groups().into_iter().map(|group| encoder.encode(group)).collect();
        assert!(bodies.iter().all(|body| body.len() <= 1 << 20));
        assert!(bodies.len() <= 4, "{}", bodies.len());
        let parts = |body: &Bytes| {
            let body: serde_json::Value = serde_json::from_slice(body).unwrap();
            body["data"]["parts"].as_array().unwrap().len()
        };
        assert_eq!(bodies.iter().map(parts).sum::<usize>(), 4000);
    }
}
