//! The bodies of `artifact` frames: a result with all that the agent said about it.

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;

use super::Body;
use crate::a2a::dialect::{V1Part as WirePart, v1_part};
use crate::a2a::model::{ArtifactUpdate, Extras, File, FileContent, Part, PartExtras};
use crate::json;

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
    Part(WirePart<'a>),
    /// What cannot be cut and does not fit is told without its content, and the stream goes on.
    Omitted {
        filename: Option<&'a str>,
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
            Self::Part(part) => Self::Part(WirePart { metadata: None, ..part }),
            omitted @ Self::Omitted { .. } => omitted,
        }
    }
}

/// The whole update in one body.
pub(super) fn whole(update: &ArtifactUpdate) -> Bytes {
    let extras = update.artifact.extras.as_deref();
    let mut parts: Vec<_> = update.artifact.parts.iter().map(|part| Piece::Part(v1_part(part))).collect();
    for (place, extras) in extras.into_iter().flat_map(|extras| &extras.parts) {
        parts.get_mut(*place).into_iter().for_each(|part| part.put(extras));
    }
    body(update, extras, &parts, update.append, update.last_chunk)
}

/// The update in bodies that append to each other. What the agent says about the artifact and about a
/// part comes with the first piece of it, unless it leaves no room.
pub(super) fn pieces(update: &ArtifactUpdate, room: usize) -> Vec<Bytes> {
    let extras = update.artifact.extras.as_deref();
    let mut pieces = Vec::new();
    for (place, part) in update.artifact.parts.iter().enumerate() {
        let first = pieces.len();
        pieces.extend(split(part, room));
        let about = extras.and_then(|extras| extras.parts.iter().find(|(at, _)| *at == place));
        if let (Some((_, about)), Some(first)) = (about, pieces.get_mut(first)) {
            first.put(about);
        }
    }
    let count = pieces.len();
    let piece = |(index, piece)| {
        let (append, is_last) = (update.append || index > 0, update.last_chunk && index + 1 == count);
        let extras = extras.filter(|_| index == 0);
        let full = body(update, extras, std::slice::from_ref(&piece), append, is_last);
        if full.len() <= room {
            return full;
        }
        body(update, None, &[piece.without_metadata()], append, is_last)
    };
    pieces.into_iter().enumerate().map(piece).collect()
}

fn body(
    update: &ArtifactUpdate,
    extras: Option<&Extras>,
    parts: &[Piece<'_>],
    append: bool,
    last_chunk: bool,
) -> Bytes {
    let data = Data {
        artifact_id: update.artifact.id.as_deref(),
        name: update.artifact.name.as_deref(),
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

/// A part in pieces for which there is room.
fn split(part: &Part, room: usize) -> Vec<Piece<'_>> {
    let omitted = |filename, size| vec![Piece::Omitted { filename, size, omitted: "too_large" }];
    // Escapes can make a text in JSON six times as long.
    let text_room = room / 6;
    match part {
        Part::Text(text) if text.len() > text_room => {
            let mut pieces = Vec::new();
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let head = json::head(rest, text_room.max(4));
                pieces.push(Piece::Part(WirePart { text: Some(head), ..WirePart::default() }));
                rest = rest.get(head.len()..).unwrap_or_default();
            }
            pieces
        }
        Part::File(File { name, content: FileContent::Base64(bytes), .. }) if bytes.len() > room => {
            omitted(name.as_deref(), bytes.len() / 4 * 3)
        }
        Part::Data(data) if data.get().len() > room => omitted(None, data.get().len()),
        other => vec![Piece::Part(v1_part(other))],
    }
}
