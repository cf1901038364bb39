//! The bodies of `artifact` frames: an artifact with everything that the agent sent with it.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::PART_OVERHEAD;
use crate::a2a::dialect::V1Part;
use crate::a2a::model::{ArtifactExtras, ArtifactUpdate, Part, PartExtras};
use crate::bus::inbox::{split_text, typed_body};
use crate::json;

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
}

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
        Self::Omitted { filename, size, omitted: "too_large" }
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

impl<'a> ArtifactEncoder<'a> {
    pub(crate) fn new(update: &'a ArtifactUpdate, room: usize) -> Self {
        let label =
            |text: &'a Option<String>| text.as_deref().map(|text| shorten_label(Cow::Borrowed(text), room));
        Self { update, id: label(&update.artifact.id), name: label(&update.artifact.name), room }
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
        self.body(extras, &parts, update.append, update.last_chunk)
    }

    /// The update in bodies that append to each other, each with as many parts as fit. The extras of the
    /// artifact and of a part come with its first piece, unless they leave no room.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Bytes> {
        let Self { update, room, .. } = self;
        let bare = self.body(None, &[], update.append, update.last_chunk).len();
        let part_room = room.saturating_sub(bare);
        let extras = update.artifact.extras.as_deref();
        let mut part_extras = extras.map_or(&[][..], |extras| &extras.parts).iter().peekable();
        let with_extras = self.body(extras, &[], update.append, update.last_chunk).len();
        let extras = extras.filter(|_| with_extras <= *room);
        let mut groups = vec![Vec::<FramePart<'_>>::new()];
        let mut used = if extras.is_some() { with_extras - bare } else { 0 };
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
                let has_parts = groups.last().is_some_and(|group| !group.is_empty());
                if has_parts && (is_cut || used + size > part_room) {
                    groups.push(Vec::new());
                    used = 0;
                }
                used += if is_cut { part_room } else { size };
                if let Some(group) = groups.last_mut() {
                    group.push(piece);
                }
            }
        }
        let count = groups.len();
        groups.into_iter().enumerate().map(move |(index, group)| {
            let (append, is_last) = (update.append || index > 0, update.last_chunk && index + 1 == count);
            let full = self.body(extras.filter(|_| index == 0), &group, append, is_last);
            if full.len() <= *room {
                return full;
            }
            let group: Vec<_> = group.into_iter().map(FramePart::without_metadata).collect();
            let plain = self.body(None, &group, append, is_last);
            if plain.len() <= *room {
                return plain;
            }
            let group: Vec<_> = group.into_iter().map(|piece| piece.smallest(*room)).collect();
            self.body(None, &group, append, is_last)
        })
    }

    fn body(
        &self,
        extras: Option<&ArtifactExtras>,
        parts: &[FramePart<'_>],
        append: bool,
        last_chunk: bool,
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
        };
        typed_body("artifact", data)
    }
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
    fn many_parts_of_an_artifact_with_a_long_name_do_not_multiply_the_name() {
        let parts: Vec<_> =
            (0..4000).map(|number| Part::Text(format!("part {number} {}", "x".repeat(200)))).collect();
        let artifact = Artifact { id: None, name: Some("n".repeat(250_000)), parts, extras: None };
        let update =
            ArtifactUpdate { task_id: None, context_id: None, artifact, append: false, last_chunk: true };
        let encoder = ArtifactEncoder::new(&update, 1 << 20);
        let bodies: Vec<_> = encoder.pieces().collect();
        assert!(bodies.iter().all(|body| body.len() <= 1 << 20));
        assert!(bodies.len() <= 4, "{}", bodies.len());
        let parts = |body: &Bytes| {
            let body: serde_json::Value = serde_json::from_slice(body).unwrap();
            body["data"]["parts"].as_array().unwrap().len()
        };
        assert_eq!(bodies.iter().map(parts).sum::<usize>(), 4000);
    }
}
