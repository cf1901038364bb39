//! Formats values for log lines, replies and command output: shortened text, times, durations, hex, error chains.

use std::borrow::Cow;
use std::error::Error;
use std::fmt::{self, Display, Write as _};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The longest prefix of `text` with at most `max` bytes, cut between characters.
pub(crate) fn head(text: &str, max: usize) -> &str {
    let mut end = max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// Like [`head`], with an ellipsis if anything was cut.
pub(crate) fn shorten(text: &str, max: usize) -> String {
    if text.len() <= max {
        text.to_owned()
    } else {
        format!("{}…", head(text, max.saturating_sub('…'.len_utf8())))
    }
}

/// Whether a terminal, or whatever else shows a text, acts upon this character instead of showing it: control
/// characters (C0 and C1, so escape sequences), and characters that reorder or hide the text around them.
pub(crate) fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{061C}' | '\u{200B}'..='\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2060}'..='\u{206F}'
            | '\u{FEFF}' | '\u{FFF9}'..='\u{FFFB}' | '\u{E0000}'..='\u{E007F}')
}

/// Escapes the unprintable characters in a JSON text, except the line breaks between its values.
pub(crate) fn escape_json(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if is_unprintable(c) && c != '\n' {
            let mut units = [0; 2];
            escaped.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// The start of a body for an error message: without unprintable characters, with an ellipsis if it was cut.
pub(crate) fn snippet(body: &[u8], max: usize) -> String {
    let head = String::from_utf8_lossy(body.get(..max.min(body.len())).unwrap_or_default());
    let text = head.replace(is_unprintable, " ");
    if body.len() <= max {
        return text.trim().to_owned();
    }
    // The cut may have split the last character.
    format!("{}…", text.trim_end_matches(char::REPLACEMENT_CHARACTER).trim())
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// An error and its causes on one line.
pub(crate) fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let step = error.to_string();
        if !text.ends_with(&step) {
            text = format!("{text}: {step}");
        }
        cause = error.source();
    }
    text
}

/// A time as RFC 3339 in UTC, always with milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub SystemTime);

impl Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let second = rfc3339_to_second(self.0);
        write!(f, "{}.{:03}Z", second.trim_end_matches('Z'), unix_millis(self.0) % 1000)
    }
}

impl FromStr for Timestamp {
    type Err = time::error::Parse;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        OffsetDateTime::parse(text, &Rfc3339).map(|time| Self(time.into()))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Cow::<str>::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// A time without its fraction of a second.
pub(crate) fn rfc3339_to_second(time: SystemTime) -> String {
    let second = SystemTime::UNIX_EPOCH + Duration::from_secs(unix_millis(time) / 1000);
    OffsetDateTime::from(second).format(&Rfc3339).unwrap_or_default()
}

pub(crate) fn unix_millis(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A duration for a log field whose name ends in `_ms`: a number in JSON, and a [`duration`] in text.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A duration for a sentence or a table of durations: `12 ms`, `0.9 s`, `12 s`, `2 min 5 s`.
pub(crate) fn seconds(duration: Duration) -> String {
    let (seconds, tenths) = (duration.as_secs(), duration.subsec_millis() / 100);
    match duration.as_millis() {
        millis @ 0..100 => format!("{millis} ms"),
        100..10_000 if tenths > 0 => format!("{seconds}.{tenths} s"),
        100..60_000 => format!("{seconds} s"),
        60_000..3_600_000 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
    }
}

/// A duration in its two largest units: `120ms`, `3.4s`, `2m5s`, `1h`, `2d3h`.
pub(crate) fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let units = |first: u64, first_unit: char, second: u64, second_unit: char| match second {
        0 => format!("{first}{first_unit}"),
        _ => format!("{first}{first_unit}{second}{second_unit}"),
    };
    match seconds {
        0 if duration.is_zero() => "0s".to_owned(),
        0 => format!("{}ms", duration.as_millis()),
        1..60 => match duration.subsec_millis() / 100 {
            0 => format!("{seconds}s"),
            tenths => format!("{seconds}.{tenths}s"),
        },
        60..3_600 => units(seconds / 60, 'm', seconds % 60, 's'),
        3_600..86_400 => units(seconds / 3_600, 'h', seconds / 60 % 60, 'm'),
        _ => units(seconds / 86_400, 'd', seconds / 3_600 % 24, 'h'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(head("aé", 2), "a");
        assert_eq!(shorten("abcdef", 5), "ab…");
        assert_eq!(shorten("abc", 3), "abc");
        assert_eq!(snippet(b"a\x1b\xc3\xa9\n", 6), "a é");
        assert_eq!(snippet("a\u{202E}b\u{9b}c".as_bytes(), 20), "a b c");
        assert_eq!(snippet("abé".as_bytes(), 3), "ab…");
    }

    #[test]
    fn durations_have_at_most_two_units() {
        let cases = [
            (0, "0s"),
            (120, "120ms"),
            (3_000, "3s"),
            (3_450, "3.4s"),
            (60_000, "1m"),
            (125_900, "2m5s"),
            (3_600_000, "1h"),
            (3_900_000, "1h5m"),
            (183_600_000, "2d3h"),
        ];
        for (millis, text) in cases {
            assert_eq!(duration(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn durations_in_sentences_have_a_space() {
        let cases = [
            (0, "0 ms"),
            (99, "99 ms"),
            (999, "0.9 s"),
            (9_949, "9.9 s"),
            (2_000, "2 s"),
            (59_999, "59 s"),
            (125_900, "2 min 5 s"),
            (90_000_000, "25 h 0 min"),
        ];
        for (millis, text) in cases {
            assert_eq!(seconds(Duration::from_millis(millis)), text);
        }
    }

    #[test]
    fn times_are_in_utc_with_milliseconds() {
        let cases = [
            (123_456_789, "2023-11-14T22:13:20.123Z"),
            (100_000_000, "2023-11-14T22:13:20.100Z"),
            (0, "2023-11-14T22:13:20.000Z"),
        ];
        for (nanos, text) in cases {
            let time = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, nanos);
            assert_eq!(Timestamp(time).to_string(), text);
            assert_eq!(text.parse::<Timestamp>().unwrap().to_string(), text);
            assert_eq!(rfc3339_to_second(time), "2023-11-14T22:13:20Z");
        }
        let elsewhere = "2023-11-15T00:13:20.123456789+02:00".parse::<Timestamp>().unwrap();
        assert_eq!(elsewhere.to_string(), "2023-11-14T22:13:20.123Z");
    }
}
