//! Records as a store keeps them: JSON with the version of their form.

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Unavailable;
use crate::json;

/// The form of the records that this version writes. Raise it when an older version would misread a record.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Written<'a, R> {
    v: u32,
    record: &'a R,
}

#[derive(Deserialize)]
struct Version {
    v: u32,
}

#[derive(Deserialize)]
struct Read<R> {
    record: R,
}

pub(super) fn encode<R: Serialize>(record: &R) -> Bytes {
    json::to_bytes(&Written { v: VERSION, record })
}

/// A record of a newer version, or one that cannot be read, is treated as unavailable.
pub(super) fn decode<R: DeserializeOwned>(value: &[u8]) -> Result<R, Unavailable> {
    let version: Version = serde_json::from_slice(value).map_err(|error| unreadable(&error))?;
    if version.v > VERSION {
        tracing::warn!(version = version.v, "a newer version of the bridge wrote a record; update this one");
        return Err(Unavailable);
    }
    let read: Read<R> = serde_json::from_slice(value).map_err(|error| unreadable(&error))?;
    Ok(read.record)
}

fn unreadable(error: &serde_json::Error) -> Unavailable {
    // The category only: the text of the error may quote the record.
    tracing::warn!(category = ?error.classify(), "a record in the state store cannot be read");
    Unavailable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_a_newer_version_is_not_misread() {
        assert_eq!(decode::<String>(&encode(&"text")), Ok("text".to_owned()));
        assert_eq!(decode::<String>(br#"{"v": 2, "record": "text"}"#), Err(Unavailable));
        assert_eq!(decode::<String>(b"{"), Err(Unavailable));
    }
}
