//! Mutations of an input. Besides random bytes, they repeat and nest whole values, which is what makes code that is not
//! linear slow, and what a mutator of bytes rarely finds.

use fastrand::Rng;

use crate::budget::MAX_INPUT;

/// Pieces of what agents and callers send.
const WORDS: [&str; 36] = [
    "{}",
    "[]",
    "null",
    "true",
    "0",
    "-1",
    "1e999",
    "18446744073709551616",
    "\"\"",
    "\"\\ud800\"",
    "\u{feff}",
    "\r\n",
    "\n\n",
    "data: ",
    ": ping\n\n",
    "event: x\n",
    "\"id\":",
    "\"parts\":",
    "\"artifacts\":",
    "\"history\":",
    "\"artifactId\":",
    "\"text\":",
    "\"file\":",
    "\"raw\":",
    "\"url\":",
    "\"filename\":",
    "\"append\":true",
    "\"kind\":",
    "\"status\":",
    "\"error\":",
    "\"skills\":",
    "\"description\":",
    "{a}",
    "${A}",
    "&a ",
    "*a",
];

/// One to four mutations of `input`; `other` is another input, of which pieces may be taken. Half of the results keep the
/// structure, so that most of them are valid.
pub fn mutate(random: &mut Rng, input: &[u8], other: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    let kinds = if random.bool() { 0..4 } else { 0..10 };
    for _ in 0..random.usize(1..=4) {
        let before = bytes.len();
        match random.u8(kinds.clone()) {
            0 | 1 => repeat_item(random, &mut bytes),
            2 => replace_value(random, &mut bytes, other),
            3 => lengthen_string(random, &mut bytes),
            4 => nest_value(random, &mut bytes),
            5 => repeat_range(random, &mut bytes),
            6 => splice(random, &mut bytes, other),
            7 => insert_word(random, &mut bytes),
            8 => remove(random, &mut bytes),
            _ => replace_byte(random, &mut bytes),
        }
        // Enough for one input, and too much to be cut without damage.
        if bytes.len() > MAX_INPUT / 2 && bytes.len() > before {
            break;
        }
    }
    bytes.truncate(MAX_INPUT);
    bytes
}

fn position(random: &mut Rng, bytes: &[u8]) -> usize {
    random.usize(0..=bytes.len())
}

/// Mostly short, because long inputs take time, but sometimes as long as allowed.
fn count(random: &mut Rng, size: usize) -> usize {
    let most = MAX_INPUT / size.max(1) + 1;
    let limit = [4, 64, 1_024, most][random.usize(0..4)].min(most);
    random.usize(1..=limit)
}

fn replace_byte(random: &mut Rng, bytes: &mut [u8]) {
    if let Some(byte) = random.choice(bytes.iter_mut()) {
        *byte = random.u8(..);
    }
}

fn remove(random: &mut Rng, bytes: &mut Vec<u8>) {
    let start = position(random, bytes);
    let end = (start + random.usize(1..64)).min(bytes.len());
    bytes.drain(start..end);
}

fn insert(bytes: &mut Vec<u8>, at: usize, piece: &[u8]) {
    bytes.splice(at..at, piece.iter().copied());
}

fn insert_word(random: &mut Rng, bytes: &mut Vec<u8>) {
    let word = WORDS[random.usize(0..WORDS.len())];
    let at = position(random, bytes);
    insert(bytes, at, word.as_bytes());
}

fn splice(random: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    let start = position(random, other);
    let end = (start + random.usize(1..256)).min(other.len());
    let at = position(random, bytes);
    insert(bytes, at, &other[start..end]);
}

fn repeat_range(random: &mut Rng, bytes: &mut Vec<u8>) {
    let start = position(random, bytes);
    let end = (start + random.usize(1..128)).min(bytes.len());
    let piece = bytes[start..end].repeat(count(random, end - start));
    insert(bytes, end, &piece);
}

/// A JSON value at a random place: its range.
fn value(random: &mut Rng, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let from = position(random, bytes);
    let start = from + bytes[from..].iter().position(|byte| matches!(byte, b'{' | b'[' | b'"'))?;
    let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
    for (index, byte) in bytes.iter().enumerate().skip(start) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => depth += 1,
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 && !in_string {
            return Some(start..index + 1);
        }
    }
    None
}

/// An item of a JSON list at a random place: its range.
fn item(random: &mut Rng, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    let is_item = |range: &std::ops::Range<usize>| {
        let before = bytes[..range.start].iter().rfind(|byte| !byte.is_ascii_whitespace());
        let after = bytes[range.end..].iter().find(|byte| !byte.is_ascii_whitespace());
        // A key of an object follows a comma, too.
        matches!(before, Some(b'[' | b',')) && !matches!(after, Some(b':'))
    };
    (0..8).find_map(|_| value(random, bytes).filter(is_item))
}

/// Repeats an item of a list behind itself. The last string in it differs, so that names and ids do, or not.
fn repeat_item(random: &mut Rng, bytes: &mut Vec<u8>) {
    let Some(range) = item(random, bytes) else { return };
    let room = MAX_INPUT.saturating_sub(bytes.len()) / (range.len() + 7);
    let (item, differs) = (bytes[range.clone()].to_vec(), random.bool());
    let mut items = Vec::new();
    for index in 0..count(random, item.len() + 1).min(room) {
        items.push(b',');
        match item.iter().rposition(|byte| *byte == b'"').filter(|_| differs) {
            Some(quote) => {
                items.extend_from_slice(&item[..quote]);
                items.extend_from_slice(index.to_string().as_bytes());
                items.extend_from_slice(&item[quote..]);
            }
            None => items.extend_from_slice(&item),
        }
    }
    insert(bytes, range.end, &items);
}

fn nest_value(random: &mut Rng, bytes: &mut Vec<u8>) {
    let Some(range) = value(random, bytes) else { return };
    let depth = count(random, 2);
    let (open, close) = if random.bool() { ("[", "]") } else { ("{\"a\":", "}") };
    insert(bytes, range.end, close.repeat(depth).as_bytes());
    insert(bytes, range.start, open.repeat(depth).as_bytes());
}

fn replace_value(random: &mut Rng, bytes: &mut Vec<u8>, other: &[u8]) {
    let (Some(range), Some(piece)) = (value(random, bytes), value(random, other)) else { return };
    bytes.splice(range, other[piece].iter().copied());
}

fn lengthen_string(random: &mut Rng, bytes: &mut Vec<u8>) {
    let at = position(random, bytes);
    let Some(quote) = bytes[at..].iter().position(|byte| *byte == b'"') else { return };
    let byte = b"x{<~ .*"[random.usize(0..7)];
    let room = MAX_INPUT.saturating_sub(bytes.len()).max(1);
    insert(bytes, at + quote + 1, &vec![byte; count(random, 1).min(room)]);
}
