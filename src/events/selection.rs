//! Which frames of a stream a caller gets.

use std::collections::HashSet;

use crate::a2a::model::{Artifact, Part};
use crate::action::progress::ProgressEvent;

/// The frames that a caller wants (`A2A-Frames`). Status, task, state and result frames always come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum FrameSelection {
    #[default]
    All,
    /// The text of the response comes only as `response`, and artifacts carry everything else.
    Text,
    /// No `response`.
    Artifacts,
}

impl FrameSelection {
    /// Its position in [`FrameCounts`](super::event::FrameCounts).
    pub(crate) fn index(self) -> usize {
        match self {
            Self::All => 0,
            Self::Text => 1,
            Self::Artifacts => 2,
        }
    }
}

/// Applies a selection to the frames of one call, in their order.
#[derive(Debug, Default)]
pub(crate) struct FrameSelector {
    selection: FrameSelection,
    /// With [`FrameSelection::Text`]: the response artifacts of which the caller has received a part.
    started_artifacts: HashSet<Option<String>>,
}

impl FrameSelector {
    pub(crate) fn new(selection: FrameSelection) -> Self {
        Self { selection, started_artifacts: HashSet::new() }
    }

    pub(crate) fn selection(&self) -> FrameSelection {
        self.selection
    }

    /// The frame as the caller gets it, if it does.
    pub(crate) fn select(&mut self, frame: ProgressEvent) -> Option<ProgressEvent> {
        match (self.selection, frame) {
            (FrameSelection::Artifacts, ProgressEvent::Response(_)) => None,
            (FrameSelection::Text, ProgressEvent::Artifact { mut update, is_response: true }) => {
                remove_text(&mut update.artifact);
                let has_started = self.started_artifacts.contains(&update.artifact.id);
                if update.artifact.parts.is_empty() {
                    // A reader that has a part of the artifact must learn that it is replaced or complete.
                    let is_relevant = has_started && (!update.append || update.last_chunk);
                    return is_relevant.then_some(ProgressEvent::Artifact { update, is_response: true });
                }
                if !has_started {
                    self.started_artifacts.insert(update.artifact.id.clone());
                }
                // The first part that the reader sees has nothing to append to.
                update.append &= has_started;
                Some(ProgressEvent::Artifact { update, is_response: true })
            }
            (_, frame) => Some(frame),
        }
    }
}

/// Removes the text parts, and moves the extras of the other parts to their new indices.
fn remove_text(artifact: &mut Artifact) {
    if let Some(extras) = &mut artifact.extras {
        let mut kept = 0;
        let new_index = |part: &Part| {
            let is_kept = part.as_text().is_none();
            kept += usize::from(is_kept);
            is_kept.then(|| kept - 1)
        };
        let new_indices: Vec<Option<usize>> = artifact.parts.iter().map(new_index).collect();
        extras.parts.retain_mut(|(index, _)| match new_indices.get(*index).copied().flatten() {
            Some(new) => {
                *index = new;
                true
            }
            None => false,
        });
    }
    artifact.parts.retain(|part| part.as_text().is_none());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::a2a::model::Event;

    #[test]
    fn an_artifact_without_its_text_keeps_the_extras_of_its_other_parts() {
        let update = r#"{"artifactUpdate":{"taskId":"t","artifact":{"artifactId":"a","parts":[
            {"text":"a","metadata":{"n":0}}, {"data":1,"metadata":{"n":1}}, {"text":"b"}, {"data":2},
            {"text":"c","metadata":{"n":4}}, {"data":3,"metadata":{"n":5}}]}}}"#;
        let Event::Artifact(mut update) = Event::decode(update).unwrap() else { panic!("not an artifact") };
        remove_text(&mut update.artifact);
        assert_eq!(update.artifact.parts.len(), 3);
        let extras = update.artifact.extras.unwrap().parts;
        let kept: Vec<_> = extras
            .iter()
            .map(|(index, extras)| (*index, extras.metadata.as_ref().unwrap().get().to_owned()))
            .collect();
        assert_eq!(kept, [(0, r#"{"n":1}"#.to_owned()), (2, r#"{"n":5}"#.to_owned())]);
    }
}
