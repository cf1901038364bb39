//! The bodies of `artifact` frames: a result with all that the agent said about it.

use std::borrow::Cow;

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::Body;
use crate::a2a::dialect::V1Part;
use crate::a2a::model::{ArtifactExtras, ArtifactUpdate, Part, PartExtras};
use crate::json;

/// What a part costs beside its text.
const PART: usize = 16;

#[derive(Serialize)]
struct Data<'a> {
    artifact_id: Option<&'a str>,
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<&'a RawValue>,
    append: bool,
    last_chunk: bool,
    parts: &'a [Piece<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extensions: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    update_metadata: Option<&'a RawValue>,
}

/// A part as the caller sees it, in v1.0's shape.
#[derive(Serialize)]
#[serde(untagged)]
enum Piece<'a> {
    Part(V1Part<'a>),
    /// What cannot be cut and does not fit is told without its content, and the stream goes on.
    Omitted {
        filename: Option<Cow<'a, str>>,
        size: usize,
        omitted: &'static str,
    },
}

impl<'a> Piece<'a> {
    fn put(&mut self, extras: &'a PartExtras) {
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

    /// The least that can be said of it.
    fn least(self, room: usize) -> Self {
        let (filename, size) = match self {
            Self::Part(V1Part { text: Some(text), .. }) => {
                return Self::Part(V1Part { text: Some(text), ..V1Part::default() });
            }
            Self::Part(part) => {
                let data = part.data.map(RawValue::get);
                let size = part.raw.map(decoded).or(part.url.or(data).map(str::len));
                (part.filename.map(Cow::Borrowed), size.unwrap_or_default())
            }
            Self::Omitted { filename, size, .. } => (filename, size),
        };
        let filename = filename.map(|name| label(name, room));
        Self::Omitted { filename, size, omitted: "too_large" }
    }
}

/// How many bytes so much base64 stands for.
fn decoded(base64: &str) -> usize {
    base64.len() / 4 * 3
}

/// A name or an id that leaves room for others, always in the same way.
fn label(text: Cow<'_, str>, room: usize) -> Cow<'_, str> {
    match json::shorten_written(&text, room / 4) {
        Some(short) => Cow::Owned(short),
        None => text,
    }
}

/// An update on its way into bodies of at most `room` bytes.
pub(super) struct Telling<'a> {
    update: &'a ArtifactUpdate,
    id: Option<Cow<'a, str>>,
    name: Option<Cow<'a, str>>,
    room: usize,
}

impl<'a> Telling<'a> {
    pub(super) fn new(update: &'a ArtifactUpdate, room: usize) -> Self {
        let short = |text: &'a Option<String>| text.as_deref().map(|text| label(Cow::Borrowed(text), room));
        Self { update, id: short(&update.artifact.id), name: short(&update.artifact.name), room }
    }

    /// The whole update in one body, whether there is room or not.
    pub(super) fn whole(&self) -> Bytes {
        let Self { update, .. } = self;
        let extras = update.artifact.extras.as_deref();
        let mut parts: Vec<_> =
            update.artifact.parts.iter().map(|part| Piece::Part(V1Part::from(part))).collect();
        for (place, extras) in extras.into_iter().flat_map(|extras| &extras.parts) {
            parts.get_mut(*place).into_iter().for_each(|part| part.put(extras));
        }
        self.body(extras, &parts, update.append, update.last_chunk)
    }

    /// The update in bodies that append to each other, as many parts in each as there is room for. What the
    /// agent says about the artifact and about a part comes with the first piece of it, unless it leaves
    /// no room.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Bytes> {
        let Self { update, room, .. } = self;
        // What is left beside the artifact's id and name.
        let bare = self.body(None, &[], update.append, update.last_chunk).len();
        let part_room = room.saturating_sub(bare);
        let extras = update.artifact.extras.as_deref();
        let mut about = extras.map_or(&[][..], |extras| &extras.parts).iter().peekable();
        let with_extras = self.body(extras, &[], update.append, update.last_chunk).len();
        let extras = extras.filter(|_| with_extras <= *room);
        let mut groups = vec![Vec::<Piece<'_>>::new()];
        let mut used = if extras.is_some() { with_extras - bare } else { 0 };
        for (place, part) in update.artifact.parts.iter().enumerate() {
            // Both are in the order of the parts.
            let about = about.next_if(|(at, _)| *at == place).map(|(_, about)| about);
            let pieces = split(part, part_room);
            let is_cut = pieces.len() > 1;
            for (number, mut piece) in pieces.into_iter().enumerate() {
                if let Some(about) = about.filter(|_| number == 0) {
                    piece.put(about);
                }
                let size = json::to_bytes(&piece).len() + ",".len();
                // The pieces of one text have a body each, so that they are not taken for several texts.
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
            let group: Vec<_> = group.into_iter().map(Piece::without_metadata).collect();
            let plain = self.body(None, &group, append, is_last);
            if plain.len() <= *room {
                return plain;
            }
            let group: Vec<_> = group.into_iter().map(|piece| piece.least(*room)).collect();
            self.body(None, &group, append, is_last)
        })
    }

    fn body(
        &self,
        extras: Option<&ArtifactExtras>,
        parts: &[Piece<'_>],
        append: bool,
        last_chunk: bool,
    ) -> Bytes {
        let data = Data {
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
        json::to_bytes(&Body { r#type: "artifact", data: &data })
    }
}

/// A part in pieces for which there is room. Only text can be cut.
fn split(part: &Part, room: usize) -> Vec<Piece<'_>> {
    // Escapes can make a text in JSON six times as long.
    let text_room = room.saturating_sub(PART) / 6;
    match part {
        Part::Text(text) if text.len() > text_room => {
            let mut pieces = Vec::new();
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let head = crate::text::head(rest, text_room.max(4));
                pieces.push(Piece::Part(V1Part { text: Some(head), ..V1Part::default() }));
                rest = rest.get(head.len()..).unwrap_or_default();
            }
            pieces
        }
        other => vec![Piece::Part(V1Part::from(other))],
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
        let telling = Telling::new(&update, 1 << 20);
        let bodies: Vec<_> = telling.pieces().collect();
        assert!(bodies.iter().all(|body| body.len() <= 1 << 20));
        assert!(bodies.len() <= 4, "{}", bodies.len());
        let parts = |body: &Bytes| {
            let body: serde_json::Value = serde_json::from_slice(body).unwrap();
            body["data"]["parts"].as_array().unwrap().len()
        };
        assert_eq!(bodies.iter().map(parts).sum::<usize>(), 4000);
    }
}
