//! The text of a response that an agent streams in artifacts.

use std::collections::HashMap;

use super::assemble::text_of_parts;
use crate::a2a::model::Artifact;

/// The text that was streamed so far.
#[derive(Debug, Default)]
pub(super) struct ResponseText {
    joined: String,
    /// `joined` without line breaks between artifacts: a closing artifact repeats the text of several in this form.
    run_on: String,
    /// The position of the artifact that was extended last, and the length of its text.
    current: Option<(usize, usize)>,
    /// Artifacts that were not streamed, by position: they have no text, or repeat all the text before them.
    withheld: HashMap<usize, Withheld>,
}

/// An artifact that was not streamed. Its text is the first `length` bytes of `joined`, of `run_on`, or of both.
#[derive(Debug, Clone, Copy)]
struct Withheld {
    length: usize,
    is_joined: bool,
    is_run_on: bool,
}

impl ResponseText {
    /// Adds an artifact's text, unless it repeats all the text before it. Returns the text to stream.
    pub(super) fn add(&mut self, text: &str) -> Option<String> {
        if text.is_empty() || text == self.joined || text == self.run_on {
            return None;
        }
        Some(self.begin(text))
    }

    /// Adds text on a new line.
    fn begin(&mut self, text: &str) -> String {
        let separator = if self.joined.is_empty() { "" } else { "\n" };
        let added = format!("{separator}{text}");
        self.joined.push_str(&added);
        self.run_on.push_str(text);
        added
    }

    /// Adds text to the artifact at `position`.
    fn append(&mut self, position: usize, text: String) -> String {
        match &mut self.current {
            Some((current, length)) if *current == position => {
                *length += text.len();
                self.joined.push_str(&text);
                self.run_on.push_str(&text);
                text
            }
            _ => {
                self.current = Some((position, text.len()));
                self.begin(&text)
            }
        }
    }

    /// Whether a withheld artifact still repeats all the text before it after `more` was appended. Streamed text only
    /// grows, so it is enough to compare the end.
    fn still_withheld(&self, withheld: Withheld, more: &str) -> Option<Withheld> {
        let length = withheld.length + more.len();
        let is_all_of = |streamed: &str| streamed.len() == length && streamed.ends_with(more);
        let is_joined = withheld.is_joined && is_all_of(&self.joined);
        let is_run_on = withheld.is_run_on && is_all_of(&self.run_on);
        (is_joined || is_run_on).then_some(Withheld { length, is_joined, is_run_on })
    }

    pub(super) fn into_text(self) -> Option<String> {
        (!self.joined.is_empty()).then_some(self.joined)
    }

    pub(super) fn size(&self) -> usize {
        self.joined.len() + self.run_on.len()
    }

    /// The part of `message` after the streamed text. Empty if `message` does not begin with the streamed text.
    pub(super) fn rest_of<'m>(&self, message: &'m str) -> &'m str {
        message.strip_prefix(&*self.joined).unwrap_or_default()
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
            let Some(withheld) = self.withheld.get(&position).copied() else {
                return Some(self.append(position, text));
            };
            if let Some(longer) = self.still_withheld(withheld, &text) {
                self.withheld.insert(position, longer);
                return None;
            }
            text = text_of_parts(&artifact.parts);
        }
        let is_current = |current: &(usize, usize)| current.0 == position;
        // Some agents send the whole text again with every token instead of appending.
        if let Some((_, length)) = self.current.filter(is_current) {
            let before = self.run_on.get(self.run_on.len().saturating_sub(length)..).unwrap_or_default();
            if let Some(more) = text.strip_prefix(before) {
                return (!more.is_empty()).then(|| self.append(position, more.to_owned()));
            }
        }
        let added = self.add(&text);
        if added.is_some() {
            self.withheld.remove(&position);
            self.current = Some((position, text.len()));
        } else {
            let withheld = Withheld {
                length: text.len(),
                is_joined: text.is_empty() || text == self.joined,
                is_run_on: text.is_empty() || text == self.run_on,
            };
            self.withheld.insert(position, withheld);
            self.current.take_if(|current| is_current(current));
        }
        added
    }
}
