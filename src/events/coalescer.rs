//! Coalesces text into fewer frames: while the connection is behind, and before events are logged.

use super::artifact_data::PART_OVERHEAD;
use crate::a2a::model::ArtifactUpdate;
use crate::action::progress::ProgressEvent;

/// Approximate limit of text that is coalesced into one message.
pub(crate) const MAX_COALESCED: usize = 16 << 10;

/// Pieces of one artifact, and the response's text in them, which goes out after them.
#[derive(Debug, Default)]
pub(crate) struct Coalescer {
    update: Option<ArtifactUpdate>,
    /// Whether the artifact belongs to the response.
    is_response: bool,
    text: String,
    size: usize,
}

impl Coalescer {
    /// Adds a frame whose text continues what is held; returns any other frame.
    pub(crate) fn add(&mut self, frame: ProgressEvent) -> Option<ProgressEvent> {
        match frame {
            frame if self.size >= MAX_COALESCED => Some(frame),
            ProgressEvent::Response(text) if text.len() <= MAX_COALESCED => {
                self.size += text.len();
                self.text.push_str(&text);
                None
            }
            ProgressEvent::Artifact { update, is_response } => {
                let rest = self.add_update(update, is_response);
                rest.map(|update| ProgressEvent::Artifact { update, is_response })
            }
            other => Some(other),
        }
    }

    fn add_update(&mut self, update: ArtifactUpdate, is_response: bool) -> Option<ArtifactUpdate> {
        let parts = &update.artifact.parts;
        let sizes = parts.iter().map(|part| part.as_text().map(|text| PART_OVERHEAD + text.len()));
        let size = sizes.sum::<Option<usize>>().filter(|size| *size <= MAX_COALESCED);
        let Some(size) = size.filter(|_| update.artifact.extras.is_none()) else {
            return Some(update);
        };
        match &mut self.update {
            // An artifact goes out before its own text, but not before text that came earlier.
            None if self.text.is_empty() => (self.update, self.is_response) = (Some(update), is_response),
            Some(held) if self.is_response == is_response && continues(held, &update) => {
                // The parts stay separate, as the agent sent them.
                held.artifact.parts.extend(update.artifact.parts);
                held.last_chunk = update.last_chunk;
            }
            _ => return Some(update),
        }
        self.size += size;
        None
    }

    /// Approximate bytes of what is held.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.update.is_none() && self.text.is_empty()
    }

    /// Everything that is held, in the order in which it goes out.
    pub(crate) fn take(&mut self) -> impl Iterator<Item = ProgressEvent> + use<> {
        let Self { update, is_response, text, .. } = std::mem::take(self);
        let update = update.map(|update| ProgressEvent::Artifact { update, is_response });
        let text = Some(text).filter(|text| !text.is_empty());
        update.into_iter().chain(text.map(ProgressEvent::Response))
    }
}

fn continues(held: &ArtifactUpdate, update: &ArtifactUpdate) -> bool {
    let (one, other) = (&held.artifact, &update.artifact);
    update.append
        && !held.last_chunk
        && one.id == other.id
        && (other.name.is_none() || one.name == other.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::a2a::model::{Artifact, Part, TaskState};

    fn piece(id: &str, text: &str, append: bool) -> ProgressEvent {
        let parts = vec![Part::Text(text.to_owned())];
        let artifact = Artifact { id: Some(id.to_owned()), name: None, parts, extras: None };
        let (task_id, context_id) = (None, None);
        let update = ArtifactUpdate { task_id, context_id, artifact, append, last_chunk: false };
        ProgressEvent::Artifact { update, is_response: true }
    }

    fn response(text: &str) -> ProgressEvent {
        ProgressEvent::Response(text.to_owned())
    }

    #[test]
    fn pieces_of_one_artifact_and_their_text_are_coalesced_and_nothing_else() {
        let mut coalescer = Coalescer::default();
        for frame in [piece("a", "1", false), response("1"), piece("a", "2", true), response("2")] {
            assert!(coalescer.add(frame).is_none());
        }
        for other in [
            piece("b", "1", true),
            piece("a", "again", false),
            ProgressEvent::State { state: TaskState::Working, message: String::new() },
        ] {
            assert!(coalescer.add(other).is_some());
        }
        let taken: Vec<_> = coalescer.take().collect();
        let [ProgressEvent::Artifact { update, .. }, ProgressEvent::Response(text)] = taken.as_slice() else {
            panic!("{taken:?}");
        };
        let parts: Vec<_> = update.artifact.parts.iter().filter_map(Part::as_text).collect();
        assert_eq!((parts.as_slice(), update.append, text.as_str()), (["1", "2"].as_slice(), false, "12"));
        assert!(coalescer.is_empty());
    }

    #[test]
    fn an_artifact_does_not_overtake_text_that_came_before_it() {
        let mut coalescer = Coalescer::default();
        assert!(coalescer.add(response("first")).is_none());
        assert!(coalescer.add(piece("a", "second", false)).is_some());
    }

    #[test]
    fn large_frames_are_not_held() {
        let large = "x".repeat(MAX_COALESCED + 1);
        let mut coalescer = Coalescer::default();
        assert!(coalescer.add(piece("a", "1", false)).is_none());
        assert!(coalescer.add(piece("a", &large, true)).is_some());
        assert!(coalescer.add(response(&large)).is_some());
        assert_eq!(coalescer.take().count(), 1);
    }

    #[test]
    fn the_number_of_held_pieces_is_limited_even_if_they_are_empty() {
        let mut coalescer = Coalescer::default();
        assert!((0..MAX_COALESCED).any(|number| coalescer.add(piece("a", "", number > 0)).is_some()));
    }
}
