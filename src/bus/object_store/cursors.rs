//! Where the chunks of a file are in the stream, so that a download in pieces does not start at the first chunk each time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Positions that are remembered, of all files together.
const MAX_POSITIONS: usize = 64 << 10;

/// A position in a file, and the sequence from which on its chunk is found in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Position {
    pub(super) offset: u64,
    pub(super) sequence: u64,
}

#[derive(Debug, Default)]
pub(super) struct Cursors(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    files: HashMap<String, BTreeMap<u64, u64>>,
    /// The files, the oldest first.
    order: VecDeque<String>,
    positions: usize,
}

impl Cursors {
    /// The last known position that is not after `offset`.
    pub(super) fn before(&self, content_id: &str, offset: u64) -> Position {
        let table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = table.files.get(content_id).and_then(|file| file.range(..=offset).next_back());
        known.map_or(Position::default(), |(&offset, &sequence)| Position { offset, sequence })
    }

    pub(super) fn remember(&self, content_id: &str, at: Position) {
        let mut guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let table = &mut *guard;
        if !table.files.contains_key(content_id) {
            table.order.push_back(content_id.to_owned());
        }
        let file = table.files.entry(content_id.to_owned()).or_default();
        if file.insert(at.offset, at.sequence).is_none() {
            table.positions += 1;
        }
        while table.positions > MAX_POSITIONS {
            let Some(oldest) = table.order.pop_front() else { break };
            table.positions -= table.files.remove(&oldest).map_or(0, |file| file.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_position_before_an_offset_is_found_and_the_oldest_files_are_forgotten() {
        let cursors = Cursors::default();
        assert_eq!(cursors.before("a", 7), Position::default());
        for offset in [0, 100, 200] {
            cursors.remember("a", Position { offset, sequence: offset + 1 });
        }
        assert_eq!(cursors.before("a", 199), Position { offset: 100, sequence: 101 });
        assert_eq!(cursors.before("a", 200), Position { offset: 200, sequence: 201 });
        for offset in 0..MAX_POSITIONS as u64 {
            cursors.remember("b", Position { offset, sequence: offset });
        }
        assert_eq!(cursors.before("a", 199), Position::default());
        assert!(cursors.0.lock().unwrap().positions <= MAX_POSITIONS);
    }
}
