//! Limits and helpers for JSON, shared by requests, cards and replies.

use std::cell::RefCell;
use std::marker::PhantomData;

use bytes::Bytes;
use serde::de::{IgnoredAny, SeqAccess};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

/// Maximum nesting depth. serde_json enforces the same limit when it builds values, but not for raw values, so those
/// are checked here.
pub(crate) const MAX_DEPTH: usize = 127;
/// Larger buffers are not reused.
const MAX_REUSED_BUFFER: usize = 64 << 10;

/// Whether JSON nests at most [`MAX_DEPTH`] deep.
pub(crate) fn is_shallow(bytes: &[u8]) -> bool {
    // Nearly all documents have fewer brackets than that altogether, and counting is fast.
    let opening = memchr::memchr2_iter(b'{', b'[', bytes).take(MAX_DEPTH + 1).count();
    opening <= MAX_DEPTH || is_shallow_outside_strings(bytes)
}

fn is_shallow_outside_strings(bytes: &[u8]) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for &byte in bytes {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return false;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    true
}

/// Serializes a value that cannot fail to serialize: strings, numbers, lists, maps with text keys, raw JSON.
pub(crate) fn to_bytes(value: &impl Serialize) -> Bytes {
    // Growing a buffer costs more than filling it, so each thread reuses one. The content is copied to bytes of exactly
    // its size, because those may live long.
    thread_local! { static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) } }
    BUFFER.with_borrow_mut(|buffer| {
        buffer.clear();
        serde_json::to_writer(&mut *buffer, value).expect("a value that cannot fail to serialize");
        if buffer.len() > MAX_REUSED_BUFFER {
            return std::mem::take(buffer).into_boxed_slice().into();
        }
        Bytes::copy_from_slice(buffer)
    })
}

/// For fields where `null` means absent.
pub(crate) fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// The longest prefix of `text` that has at most `max` bytes as a JSON string, without quotes.
pub(crate) fn json_prefix(text: &str, max: usize) -> &str {
    let mut written = 0;
    let end = text.char_indices().find(|&(_, c)| {
        written += escaped_len(c);
        written > max
    });
    end.map_or(text, |(at, _)| text.get(..at).unwrap_or_default())
}

/// The bytes of `text` as a JSON string, without quotes.
pub(crate) fn string_len(text: &str) -> usize {
    text.chars().map(escaped_len).sum()
}

fn escaped_len(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\u{1f}' => 6,
        other => other.len_utf8(),
    }
}

/// Shortens `text` to `max` bytes of JSON, with an ellipsis at the end. Returns `None` if it is short enough.
pub(crate) fn shorten_to_json(text: &str, max: usize) -> Option<String> {
    // An escape sequence has at most six characters.
    if text.len().saturating_mul(6) <= max || json_prefix(text, max).len() == text.len() {
        return None;
    }
    Some(format!("{}…", json_prefix(text, max.saturating_sub('…'.len_utf8()))))
}

/// The first items that fit into a JSON document of `limit` bytes, of which `used` bytes are taken already.
pub(crate) fn first_that_fit<T: Serialize>(mut items: Vec<T>, mut used: usize, limit: usize) -> Vec<T> {
    let is_too_much = |item: &T| {
        used += to_bytes(item).len() + ",".len();
        used > limit
    };
    let fitting = items.iter().position(is_too_much).unwrap_or(items.len());
    items.truncate(fitting);
    items
}

/// The first fields of a JSON object, in order, with their values as raw text: at most one more than [`MAX_FIELDS`], so
/// that an object with too many is recognised before it takes much memory.
#[derive(Debug)]
pub(crate) struct RawObject(pub Vec<(String, Box<RawValue>)>);

/// Maximum number of fields in an object of a request. A field takes more than ten times as much memory as the shortest
/// text for it.
pub(crate) const MAX_FIELDS: usize = 1024;

impl<'de> Deserialize<'de> for RawObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = RawObject;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<RawObject, A::Error> {
                let mut entries = Vec::new();
                while entries.len() <= MAX_FIELDS {
                    let Some(entry) = map.next_entry()? else { return Ok(RawObject(entries)) };
                    entries.push(entry);
                }
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(RawObject(entries))
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}

/// The first items of a JSON array, at most `MAX + 1`.
#[derive(Debug)]
pub(crate) struct FirstItems<T, const MAX: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for FirstItems<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> serde::de::Visitor<'de> for Visitor<T, MAX> {
            type Value = FirstItems<T, MAX>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a JSON array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while list.len() <= MAX {
                    let Some(item) = items.next_element()? else { return Ok(FirstItems(list)) };
                    list.push(item);
                }
                while items.next_element::<IgnoredAny>()?.is_some() {}
                Ok(FirstItems(list))
            }
        }
        deserializer.deserialize_seq(Visitor(PhantomData))
    }
}

/// The body of a message of a stream.
pub(crate) fn typed_body(r#type: &str, data: impl Serialize) -> Bytes {
    #[derive(Serialize)]
    struct TypedBody<'a, T> {
        r#type: &'a str,
        data: T,
    }
    to_bytes(&TypedBody { r#type, data })
}

/// Splits a text into pieces that take at most `room` bytes of JSON each, without quotes. A piece has at
/// least one character, even if that does not fit.
pub(crate) fn split_text(mut text: &str, room: usize) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let (piece, rest) = split_first(text, room)?;
        text = rest;
        Some(piece)
    })
}

/// The first piece of a text, and the rest.
pub(crate) fn split_first(text: &str, room: usize) -> Option<(&str, &str)> {
    let first = text.chars().next()?;
    // An escape has at most six bytes, so most texts need no measuring.
    let fits = text.len().saturating_mul(6) <= room;
    let end = if fits { text.len() } else { json_prefix(text, room).len().max(first.len_utf8()) };
    Some(text.split_at(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_measured_outside_strings_only() {
        assert!(is_shallow(br#"{"a": "[[[[[[", "b": [1, {"c": "\"["}]}"#));
        let deep = |n: usize| "[".repeat(n) + &"]".repeat(n);
        assert!(is_shallow(deep(MAX_DEPTH).as_bytes()));
        assert!(!is_shallow(deep(MAX_DEPTH + 1).as_bytes()));
        assert!(!is_shallow("{\"a\":".repeat(100_000).as_bytes()));
    }

    proptest::proptest! {
        #[test]
        fn shortened_text_fits_and_only_long_text_is_shortened(text in "(?s-u:[\\x00-\\x7f])*|(?s:.)*", max in 3_usize..60) {
            let written = |text: &str| serde_json::to_string(text).unwrap().len() - 2;
            match shorten_to_json(&text, max) {
                None => proptest::prop_assert!(written(&text) <= max),
                Some(short) => {
                    proptest::prop_assert!(written(&text) > max);
                    proptest::prop_assert!(written(&short) <= max && written(&short) + 9 > max, "{short:?}");
                }
            }
        }
    }

    #[test]
    fn long_text_is_split_into_pieces_that_fit_and_add_up() {
        assert_eq!(split_text("", 100).count(), 0);
        assert_eq!(split_text("abc", 3).collect::<Vec<_>>(), ["abc"]);
        assert_eq!(split_text("aé", 0).collect::<Vec<_>>(), ["a", "é"]);
        for text in ["é\u{1}\"".repeat(500), "x".repeat(1000)] {
            let pieces: Vec<_> = split_text(&text, 120).collect();
            assert!(pieces.iter().all(|piece| to_bytes(piece).len() <= 120 + 2));
            assert!(pieces.len() < text.len() / 10);
            assert_eq!(pieces.concat(), text);
        }
    }
}
