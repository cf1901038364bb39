//! Removes the extra wrapping that v0.3 over REST adds to data parts and file bytes.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserializer as _;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::a2a::model::{Event, FileContent, Part, normalize_base64};

pub(super) fn unwrap_parts(event: &mut Event) {
    let unwrap = |parts: &mut Vec<Part>| parts.iter_mut().for_each(unwrap_part);
    match event {
        Event::Task(task) => {
            let messages = task.status_message.iter_mut().chain(&mut task.history);
            messages.for_each(|message| unwrap(&mut message.parts));
            task.artifacts.iter_mut().for_each(|artifact| unwrap(&mut artifact.parts));
        }
        Event::Message(message) => unwrap(&mut message.parts),
        Event::Status(update) => update.message.iter_mut().for_each(|message| unwrap(&mut message.parts)),
        Event::Artifact(update) => unwrap(&mut update.artifact.parts),
    }
}

fn unwrap_part(part: &mut Part) {
    match part {
        Part::Text(_) => {}
        Part::Data(data) => {
            if let Some(inner) = inner_data(data) {
                *data = inner;
            }
        }
        Part::File(file) => {
            if let FileContent::Base64(bytes) = &mut file.content
                && let Some(inner) = encoded_twice(bytes, file.media_type.as_deref())
            {
                *bytes = inner;
            }
        }
    }
}

/// The inner value of `{"data": …}` if that is the only key.
fn inner_data(data: &RawValue) -> Option<Box<RawValue>> {
    struct OnlyField;

    impl<'de> Visitor<'de> for OnlyField {
        type Value = Option<Box<RawValue>>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Self::Value, A::Error> {
            let mut inner = None;
            let mut others = 0_usize;
            while let Some(key) = fields.next_key::<Cow<'de, str>>()? {
                if key == "data" && others == 0 {
                    inner = Some(fields.next_value::<&RawValue>()?);
                } else {
                    others += 1;
                    fields.next_value::<IgnoredAny>()?;
                }
            }
            Ok(inner.filter(|_| others == 0).map(ToOwned::to_owned))
        }
    }
    serde_json::Deserializer::from_str(data.get()).deserialize_map(OnlyField).ok()?
}

/// The inner base64 of a file whose bytes the Python SDK has encoded twice. Only where that is certain: a file of a
/// binary type never consists of base64 characters alone, and a JSON file is JSON.
fn encoded_twice(text: &str, media_type: Option<&str>) -> Option<String> {
    let media_type = media_type?.split(';').next()?.trim().to_ascii_lowercase();
    let is_json = media_type == "application/json" || media_type.ends_with("+json");
    if !is_json && !is_binary(&media_type) {
        return None;
    }
    let (text, _) = normalize_base64(text)?;
    let outer = STANDARD.decode(text).ok()?;
    let inner = std::str::from_utf8(&outer).ok()?;
    let content = STANDARD.decode(inner).ok().filter(|content| !content.is_empty())?;
    let json = |bytes: &[u8]| serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok();
    if is_json && (json(&outer) || !json(&content)) {
        return None;
    }
    Some(inner.to_owned())
}

fn is_binary(media_type: &str) -> bool {
    let (group, kind) = media_type.split_once('/').unwrap_or_default();
    match group {
        // SVG is text.
        "image" | "audio" | "video" | "font" => !kind.ends_with("+xml"),
        "application" => matches!(
            kind,
            "pdf" | "zip" | "gzip" | "x-gzip" | "x-tar" | "wasm" | "x-7z-compressed" | "vnd.rar"
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_decoded_twice_only_when_that_is_certain() {
        let twice = |bytes: &[u8]| STANDARD.encode(STANDARD.encode(bytes));
        let png = b"\x89PNG\x00\x01";
        assert_eq!(encoded_twice(&twice(png), Some("image/png")).as_deref(), Some("iVBORwAB"));
        assert_eq!(encoded_twice("iVBORwAB", Some("image/png")), None, "encoded once");
        assert_eq!(encoded_twice(&twice(b"hello"), Some("text/plain")), None, "base64 is also text");
        assert_eq!(encoded_twice(&twice(png), None), None);
        let json = br#"{"a":1}"#;
        assert!(encoded_twice(&twice(json), Some("application/json")).is_some());
        assert_eq!(encoded_twice(&STANDARD.encode(json), Some("application/json")), None);
        assert_eq!(encoded_twice(&STANDARD.encode("true"), Some("application/json")), None);
        assert_eq!(encoded_twice("", Some("image/png")), None);
    }

    #[test]
    fn data_is_unwrapped_once_and_only_as_the_single_key() {
        let unwrapped = |json: &str| {
            let raw = RawValue::from_string(json.to_owned()).unwrap();
            inner_data(&raw).map(|inner| inner.get().to_owned())
        };
        assert_eq!(unwrapped(r#"{"data": {"data": 1.0}}"#).as_deref(), Some(r#"{"data": 1.0}"#));
        assert_eq!(unwrapped(r#"{"data": 1, "n": 2}"#), None);
        assert_eq!(unwrapped("[1]"), None);
    }
}
