//! Finds strings in a text, whole or truncated, in time that depends on the length of the text only.
//!
//! A PEM key has hundreds of forms and a text may have 15 MB, so one pass over the text has to find all of them. An
//! Aho-Corasick automaton does: its state after each byte is the longest prefix of a form that ends there.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use aho_corasick::Anchored;
use aho_corasick::automaton::{Automaton as _, StateID};
use aho_corasick::nfa::contiguous::NFA;
use secrecy::{ExposeSecret, SecretString};

use crate::text::head;

/// What [`shorten`](crate::text::shorten) and others write in place of the rest of a string.
const ELLIPSIS: &str = "…";
const FIRST_OF_ELLIPSIS: u8 = 0xe2;
/// How much of a form is found before an ellipsis, where it is more likely to be the beginning of a secret.
const MIN_TRUNCATED: usize = 3;
/// How many bytes of a form are in the automaton, which needs about 20 bytes of memory for each. Where a text has all
/// of them, what follows is compared with the form, and belongs to the secret up to the first difference.
const MAX_HEAD: usize = 64;

pub(super) struct Matcher {
    automaton: NFA,
    /// What follows each head in the forms that begin with it, in the order of the automaton's patterns.
    tails: Vec<Vec<SecretString>>,
    /// How many bytes a state stands for; ordered by state. Those of fewer than [`MIN_TRUNCATED`] bytes are absent.
    depths: Vec<(StateID, usize)>,
    min_at_end: usize,
}

impl Matcher {
    /// `min_at_end` is how many bytes of a form are found at the end of a text.
    pub(super) fn new(forms: impl IntoIterator<Item = String>, min_at_end: usize) -> Self {
        let mut tails: BTreeMap<String, Vec<SecretString>> = BTreeMap::new();
        for form in forms {
            let (head, tail) = form.split_at(head(&form, MAX_HEAD).len());
            let tails = tails.entry(head.to_owned()).or_default();
            if !tail.is_empty() && tails.iter().all(|known| known.expose_secret() != tail) {
                tails.push(tail.into());
            }
        }
        // Without the prefilter, which has copies of the forms, and is not used for overlapping matches.
        let automaton = NFA::builder().prefilter(false).build(tails.keys());
        let automaton = automaton.expect("the forms of the secrets in a configuration are not gigabytes");
        let start = start(&automaton);
        let mut depths = Vec::new();
        for head in tails.keys() {
            let mut state = start;
            for (at, byte) in head.bytes().enumerate() {
                state = automaton.next_state(Anchored::No, state, byte);
                if at + 1 >= MIN_TRUNCATED {
                    depths.push((state, at + 1));
                }
            }
        }
        depths.sort_unstable();
        depths.dedup();
        Self { automaton, tails: tails.into_values().collect(), depths, min_at_end }
    }

    pub(super) fn replace(&self, text: &mut String, replacement: &str) {
        let found = self.find(text);
        if found.is_empty() {
            return;
        }
        let mut replaced = String::with_capacity(text.len());
        let mut end = 0;
        for range in found {
            replaced.push_str(text.get(end..range.start).unwrap_or_default());
            replaced.push_str(replacement);
            end = range.end;
        }
        replaced.push_str(text.get(end..).unwrap_or_default());
        *text = replaced;
    }

    /// The parts of a text that belong to a form, in order. Overlapping ones are united, so that no end of one remains.
    fn find(&self, text: &str) -> Vec<Range<usize>> {
        let mut found = Vec::new();
        if self.tails.is_empty() {
            return found;
        }
        let mut state = start(&self.automaton);
        for (at, byte) in text.bytes().enumerate() {
            if byte == FIRST_OF_ELLIPSIS && text.get(at..).is_some_and(|rest| rest.starts_with(ELLIPSIS)) {
                self.add_truncated(&mut found, state, at, MIN_TRUNCATED);
            }
            state = self.automaton.next_state(Anchored::No, state, byte);
            if self.automaton.is_match(state) {
                self.add_whole(&mut found, state, at + 1, text);
            }
        }
        self.add_truncated(&mut found, state, text.len(), self.min_at_end);
        found
    }

    /// Adds the forms whose heads end at `end`.
    fn add_whole(&self, found: &mut Vec<Range<usize>>, state: StateID, end: usize, text: &str) {
        for index in 0..self.automaton.match_len(state) {
            let pattern = self.automaton.match_pattern(state, index);
            let start = end - self.automaton.pattern_len(pattern);
            // What belongs to a secret already is not compared again: a form may repeat itself, like `aaaa`.
            let known = found.last().map_or(end, |last| last.end.max(end));
            let rest = text.as_bytes().get(known..).unwrap_or_default();
            let tails = self.tails.get(pattern.as_usize()).into_iter().flatten();
            let further = tails.filter_map(|tail| {
                let tail = tail.expose_secret().as_bytes().get(known - end..)?;
                Some(rest.iter().zip(tail).take_while(|(one, other)| one == other).count())
            });
            let equal = known + further.max().unwrap_or_default();
            // Two characters may have the same first bytes.
            add(found, start..head(text, equal).len());
        }
    }

    /// Adds the beginning of a form that is cut at `end`.
    fn add_truncated(&self, found: &mut Vec<Range<usize>>, state: StateID, end: usize, min: usize) {
        let index = self.depths.binary_search_by_key(&state, |(state, _)| *state);
        if let Some((_, depth)) = index.ok().and_then(|index| self.depths.get(index))
            && *depth >= min
        {
            add(found, end - depth..end);
        }
    }
}

impl Default for Matcher {
    fn default() -> Self {
        Self::new([], 0)
    }
}

impl fmt::Debug for Matcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Matcher").finish_non_exhaustive()
    }
}

fn start(automaton: &NFA) -> StateID {
    automaton.start_state(Anchored::No).expect("this automaton has both start states")
}

/// Unites a range with those that it overlaps, which are the last ones.
fn add(found: &mut Vec<Range<usize>>, mut range: Range<usize>) {
    while let Some(last) = found.pop_if(|last| last.end > range.start) {
        range = last.start.min(range.start)..last.end.max(range.end);
    }
    found.push(range);
}

#[cfg(test)]
mod tests;
