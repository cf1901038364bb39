//! Text that waits while the connection is behind, and goes out in fewer frames.

use crate::a2a::model::ArtifactUpdate;
use crate::action::progress::Frame;
use crate::bus::inbox::MAX_JOINED;

/// What a part costs beside its text.
const PART: usize = 16;

/// Pieces of one artifact, and the answer's text in them, which is told after them.
#[derive(Debug, Default)]
pub(super) struct Coalescer {
    update: Option<ArtifactUpdate>,
    text: String,
    size: usize,
}

impl Coalescer {
    /// Takes a frame whose text continues what waits; any other is given back.
    pub(super) fn join(&mut self, frame: Frame) -> Option<Frame> {
        match frame {
            frame if self.size >= MAX_JOINED => Some(frame),
            Frame::Response(text) => {
                self.size += text.len();
                self.text.push_str(&text);
                None
            }
            Frame::Artifact { update, is_answer } => {
                self.join_update(update).map(|update| Frame::Artifact { update, is_answer })
            }
            other => Some(other),
        }
    }

    fn join_update(&mut self, update: ArtifactUpdate) -> Option<ArtifactUpdate> {
        let sizes = update.artifact.parts.iter().map(|part| part.as_text().map(|text| PART + text.len()));
        let Some(size) = sizes.sum::<Option<usize>>().filter(|_| update.artifact.extras.is_none()) else {
            return Some(update);
        };
        match &mut self.update {
            // An artifact is told before its text, and after that of another.
            None if self.text.is_empty() => self.update = Some(update),
            Some(held) if continues(held, &update) => {
                // As parts of their own, so that nothing of what the agent told is lost.
                held.artifact.parts.extend(update.artifact.parts);
                held.last_chunk = update.last_chunk;
            }
            _ => return Some(update),
        }
        self.size += size;
        None
    }

    pub(super) fn is_empty(&self) -> bool {
        self.update.is_none() && self.text.is_empty()
    }

    /// What waits, in the order in which it is told.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Frame> + use<> {
        let Self { update, text, .. } = std::mem::take(self);
        let text = Some(text).filter(|text| !text.is_empty());
        // The form was applied before.
        update
            .map(|update| Frame::Artifact { update, is_answer: false })
            .into_iter()
            .chain(text.map(Frame::Response))
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

    fn piece(id: &str, text: &str, append: bool) -> Frame {
        let parts = vec![Part::Text(text.to_owned())];
        let artifact = Artifact { id: Some(id.to_owned()), name: None, parts, extras: None };
        let (task_id, context_id) = (None, None);
        let update = ArtifactUpdate { task_id, context_id, artifact, append, last_chunk: false };
        Frame::Artifact { update, is_answer: true }
    }

    fn response(text: &str) -> Frame {
        Frame::Response(text.to_owned())
    }

    #[test]
    fn pieces_of_one_artifact_and_their_text_are_joined_and_nothing_else() {
        let mut held = Coalescer::default();
        for frame in [piece("a", "1", false), response("1"), piece("a", "2", true), response("2")] {
            assert!(held.join(frame).is_none());
        }
        for other in [
            piece("b", "1", true),
            piece("a", "again", false),
            Frame::State { state: TaskState::Working, message: String::new() },
        ] {
            assert!(held.join(other).is_some());
        }
        let told: Vec<_> = held.take().collect();
        let [Frame::Artifact { update, .. }, Frame::Response(text)] = told.as_slice() else {
            panic!("{told:?}");
        };
        let parts: Vec<_> = update.artifact.parts.iter().filter_map(Part::as_text).collect();
        assert_eq!((parts.as_slice(), update.append, text.as_str()), (["1", "2"].as_slice(), false, "12"));
        assert!(held.is_empty());
    }

    #[test]
    fn an_artifact_is_not_told_before_text_that_came_before_it() {
        let mut held = Coalescer::default();
        assert!(held.join(response("first")).is_none());
        assert!(held.join(piece("a", "second", false)).is_some());
    }

    #[test]
    fn what_waits_is_bounded_even_if_it_is_nothing() {
        let mut held = Coalescer::default();
        assert!((0..MAX_JOINED).any(|number| held.join(piece("a", "", number > 0)).is_some()));
    }
}
