//! The text of a response that an agent streams in artifacts.

use std::collections::HashMap;

use sha2::{Digest as _, Sha256};

use super::assemble::text_of_parts;
use crate::a2a::model::Artifact;

/// The text that was streamed so far. The task holds the text itself; hashes suffice to detect repetitions.
#[derive(Debug, Default)]
pub(super) struct ResponseText {
    joined: TextHash,
    /// `joined` without line breaks between artifacts, once it has any: a closing artifact repeats the text of several
    /// in this form.
    run_on: Option<TextHash>,
    current: Option<CurrentArtifact>,
    /// Artifacts that were not streamed, by position: they have no text, or repeat all the text before them.
    withheld: HashMap<usize, TextHash>,
}

/// The artifact that was extended last.
#[derive(Debug)]
struct CurrentArtifact {
    position: usize,
    /// What was streamed of it since; `None` if that is all the streamed text.
    text: Option<TextHash>,
}

/// A hash of text, which does not depend on how the text is divided.
#[derive(Debug, Clone, Default)]
struct TextHash {
    length: usize,
    /// `None` for empty text.
    hash: Option<Box<Sha256>>,
}

impl TextHash {
    fn of(text: &str) -> Self {
        let mut hash = Self::default();
        hash.push(text);
        hash
    }

    fn push(&mut self, text: &str) {
        if !text.is_empty() {
            self.length += text.len();
            self.hash.get_or_insert_default().update(text);
        }
    }

    fn is_hash_of(&self, text: &str) -> bool {
        self.length == text.len() && *self == Self::of(text)
    }
}

impl PartialEq for TextHash {
    fn eq(&self, other: &Self) -> bool {
        let digest = |hash: &Self| hash.hash.as_deref().map(|hash| hash.clone().finalize());
        self.length == other.length && digest(self) == digest(other)
    }
}

impl ResponseText {
    fn run_on(&self) -> &TextHash {
        self.run_on.as_ref().unwrap_or(&self.joined)
    }

    /// Adds text on a new line.
    fn begin(&mut self, position: usize, text: &str) -> String {
        let is_first = self.joined.length == 0;
        let current = (!is_first).then(|| TextHash::of(text));
        self.current = Some(CurrentArtifact { position, text: current });
        if is_first {
            self.joined.push(text);
            return text.to_owned();
        }
        self.run_on.get_or_insert_with(|| self.joined.clone()).push(text);
        self.joined.push("\n");
        self.joined.push(text);
        format!("\n{text}")
    }

    /// Adds text to the artifact at `position`.
    fn append(&mut self, position: usize, text: String) -> String {
        match &mut self.current {
            Some(current) if current.position == position => {
                let hashes = [Some(&mut self.joined), self.run_on.as_mut(), current.text.as_mut()];
                hashes.into_iter().flatten().for_each(|hash| hash.push(&text));
                text
            }
            _ => self.begin(position, &text),
        }
    }

    /// The hash of a withheld artifact after `more` was appended, if it still repeats all the text before it.
    fn still_withheld(&self, withheld: &TextHash, more: &str) -> Option<TextHash> {
        let length = withheld.length + more.len();
        if length != self.joined.length && length != self.run_on().length {
            return None;
        }
        let mut longer = withheld.clone();
        longer.push(more);
        (longer == self.joined || longer == *self.run_on()).then_some(longer)
    }

    /// How much text was streamed, where line breaks count for as much text as they follow.
    pub(super) fn size(&self) -> usize {
        self.joined.length + self.run_on().length
    }

    /// The part of `message` after the streamed text. Empty if `message` does not begin with the streamed text.
    pub(super) fn rest_of<'m>(&self, message: &'m str) -> &'m str {
        let split = message.split_at_checked(self.joined.length);
        split.filter(|(head, _)| self.joined.is_hash_of(head)).map_or("", |(_, rest)| rest)
    }

    /// Returns the text to stream after an update of the artifact at `position`. The update appended `piece` to
    /// `artifact`, or replaced it.
    pub(super) fn update(
        &mut self,
        position: usize,
        artifact: &Artifact,
        is_append: bool,
        piece: &Artifact,
    ) -> Option<String> {
        let mut text = text_of_parts(&piece.parts);
        if is_append {
            if text.is_empty() {
                return None;
            }
            let Some(withheld) = self.withheld.get(&position) else {
                return Some(self.append(position, text));
            };
            if let Some(longer) = self.still_withheld(withheld, &text) {
                self.withheld.insert(position, longer);
                return None;
            }
            text = text_of_parts(&artifact.parts);
        }
        let is_current = |current: &CurrentArtifact| current.position == position;
        // Some agents send the whole text again with every token instead of appending.
        if let Some(current) = self.current.as_ref().filter(|current| is_current(current)) {
            let before = current.text.as_ref().unwrap_or(&self.joined);
            let split = text.split_at_checked(before.length).filter(|(head, _)| before.is_hash_of(head));
            if let Some((_, more)) = split {
                return (!more.is_empty()).then(|| self.append(position, more.to_owned()));
            }
        }
        let is_repetition =
            text.is_empty() || self.joined.is_hash_of(&text) || self.run_on().is_hash_of(&text);
        if is_repetition {
            self.withheld.insert(position, TextHash::of(&text));
            self.current.take_if(|current| is_current(current));
            return None;
        }
        self.withheld.remove(&position);
        Some(self.begin(position, &text))
    }
}
