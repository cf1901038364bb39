//! How many frames a call has, in every form in which callers can have them.

use super::event::FrameCounts;
use super::selection::{FrameSelection, FrameSelector};
use crate::action::progress::ProgressEvent;

/// Counts the frames of a call in every selection.
#[derive(Debug)]
pub(super) struct FrameCounter {
    pub(super) counts: FrameCounts,
    text: FrameSelector,
}

impl FrameCounter {
    /// The acknowledgement is the first frame of every call.
    pub(super) fn new() -> Self {
        Self { counts: [1; 3], text: FrameSelector::new(FrameSelection::Text) }
    }

    /// Continues after batches that have expired.
    pub(super) fn set(&mut self, counts: FrameCounts) {
        self.counts = counts;
    }

    pub(super) fn add(&mut self, progress: &[ProgressEvent]) {
        for event in progress {
            let [all, text, artifacts] = &mut self.counts;
            *all += 1;
            *text += u64::from(self.text.select(event.clone()).is_some());
            *artifacts += u64::from(!matches!(event, ProgressEvent::Response(_)));
        }
    }
}
