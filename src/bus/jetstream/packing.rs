//! Compresses small records. A record is JSON whose keys are always the same, so a dictionary of them saves two thirds.
//!
//! A packed value begins with the number of its dictionary. JSON begins with `{`, so a reader can tell the two apart.

use std::cell::RefCell;

use bytes::Bytes;
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::MAX_VALUE;
use crate::state::StoreUnavailable;

/// Larger values consist of content, for which a dictionary is of little use.
const MAX_PACKED: usize = 8 << 10;
/// Identifies [`DICTIONARY`]. A changed dictionary needs another number, and the old one must stay readable.
const VERSION: u8 = 1;
/// What records have in common. The most frequent parts are at the end, where references to them are shortest.
const DICTIONARY: &[u8] = br#"application/jsonapplication/pdftext/markdown","text/plain"],"is":"expired"},"is":"used"},"is":"sending","by":","is":"answering","by":","state":"Running"},"state":"Done"},"body":"{"v":1,"agent":","id":","record":{"context_id":","owner":"auth-required","AUTH_REQUIRED","failed","FAILED","canceled","CANCELED","rejected","REJECTED"{"Err":{"info":{"code":"task_lost","retryable":true,"http_status":null},"is_private":false,"message":"completed","COMPLETED","success":true,"WORKING"{"v":1,"agent":","id":","record":{"question":{"task_id":","context_id":","skill":","output_modes":["text/plain"],"fingerprint":","caller":"},"owner":","expires_ms":17950,"state":{"is":"pending"}}}{"v":1,"agent":","id":","record":{"task":{"state":"working","state":"input-required","reply":{"Ok":{"status":"INPUT_REQUIRED","success":false,"content":{"message":"","files":[],"data":[],"artifacts":[]},"follow_up":{"follow_up_id":","expires_at":"2026-"},"retries":[],"task":{"id":","context_id":","agent":","skill":"}}},"follow_up":null,"follow_up":{"follow_up_id":","expires_at":"2026-"},"is_submitted":true,"is_submitted":false,"revision":0,"owner":","seen_at":{"secs_since_epoch":17950,"nanos_since_epoch":},"may_run_for":{"secs":300,"nanos":0},"ttl":{"secs":86400,"nanos":0},"open_for":{"secs":300,"nanos":0}},"nonce":","replaced":","run":1}}"#;

/// The value as it is stored.
pub(super) fn pack(value: Bytes) -> Bytes {
    if value.len() > MAX_PACKED {
        return value;
    }
    compress(&value).filter(|packed| packed.len() < value.len()).map_or(value, Bytes::from)
}

thread_local! {
    /// Its tables have 270 kB, so each thread makes them once.
    static COMPRESS: RefCell<Compress> = RefCell::new(Compress::new(Compression::default(), false));
}

fn compress(value: &[u8]) -> Option<Vec<u8>> {
    COMPRESS.with_borrow_mut(|compress| {
        compress.reset();
        compress.set_dictionary(DICTIONARY).ok()?;
        let mut packed = Vec::with_capacity(value.len() + 64);
        packed.push(VERSION);
        match compress.compress_vec(value, &mut packed, FlushCompress::Finish) {
            Ok(Status::StreamEnd) => Some(packed),
            _ => None,
        }
    })
}

/// The value as it was written. An error if a newer release has packed it.
pub(super) fn unpack(stored: Bytes) -> Result<Bytes, StoreUnavailable> {
    match stored.first() {
        // JSON, white space, or a marker without a value.
        None | Some(b' '..) => Ok(stored),
        Some(&VERSION) => decompress(stored.get(1..).unwrap_or_default()).ok_or(StoreUnavailable),
        Some(version) => {
            tracing::warn!(version, "a newer release wrote a record in the state store; upgrade this bridge");
            Err(StoreUnavailable)
        }
    }
}

fn decompress(packed: &[u8]) -> Option<Bytes> {
    let mut decompress = Decompress::new(false);
    decompress.set_dictionary(DICTIONARY).ok()?;
    let mut value = Vec::with_capacity(MAX_PACKED.min(8 * packed.len()));
    loop {
        let consumed = usize::try_from(decompress.total_in()).ok()?;
        let before = value.len();
        match decompress.decompress_vec(packed.get(consumed..)?, &mut value, FlushDecompress::Finish) {
            Ok(Status::StreamEnd) => return Some(value.into()),
            Ok(Status::Ok | Status::BufError)
                if value.len() == value.capacity() && value.len() < MAX_VALUE =>
            {
                value.reserve(value.len().max(1024));
            }
            Ok(Status::Ok) if value.len() > before => {}
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const QUESTION: &str = r#"{"v":1,"agent":"demo","id":"2c6caf201bf44c51a250e0fa93b6dde5","record":{"question":{"task_id":"57245524-3a97-4445-8746-45b3172351ad","context_id":"00d11411-5636-4627-bf89-254780d3fc93","skill":"report","output_modes":["text/plain","text/markdown","application/pdf"],"fingerprint":"b75fb32070b4c7de"},"owner":"c01a70b1-772b-4bb2-a450-f1c3aa8780b9","expires_ms":1795013493119,"state":{"is":"pending"}}}"#;

    #[test]
    fn a_record_takes_less_than_half_of_its_size() {
        let packed = pack(QUESTION.into());
        assert!(2 * packed.len() < QUESTION.len(), "{} of {}", packed.len(), QUESTION.len());
        assert_eq!(unpack(packed).unwrap(), QUESTION);
    }

    #[test]
    fn values_of_other_forms_are_read_as_they_are() {
        for value in ["", "{}", " {}", "[1]", "text"] {
            assert_eq!(unpack(value.into()).unwrap(), value);
        }
        let long = "x".repeat(MAX_PACKED + 1);
        assert_eq!(pack(long.clone().into()), long);
    }

    #[test]
    fn damaged_values_and_those_of_newer_releases_are_not_misread() {
        let packed = pack(QUESTION.into());
        assert_eq!(unpack(packed.slice(..packed.len() / 2)), Err(StoreUnavailable));
        assert_eq!(unpack(Bytes::from_static(&[2, 1, 1])), Err(StoreUnavailable));
        assert_eq!(unpack(Bytes::from_static(&[VERSION])), Err(StoreUnavailable));
    }

    #[test]
    fn a_value_of_this_release_remains_readable() {
        let stored = concat!(
            "018d954b0a42310c455714c8b7699793f4339307e2feb10385c753c469092121f79c5e6338e6ed7867917be9b1182997",
            "6a370a369cb8a2499631a6fd019c39ab192b4834075535a8ae05d452c85976d3713d38e2205222b022bbb2b043aeda80",
            "4dbde290d59b9cb2b0d73aee8fdf04bf047f12fee53ff8643cdd560aa3636af731cfa477a4d8ef04ee9ca0990ca186b0",
            "a84b44dd5366fba603126d42d47e68e109",
        );
        let stored: Vec<u8> = (0..stored.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&stored[at..at + 2], 16).unwrap())
            .collect();
        assert_eq!(unpack(stored.into()).unwrap(), QUESTION);
    }

    proptest! {
        #[test]
        fn every_value_is_read_as_it_was_written(value in "\\PC{0,20000}") {
            let value = Bytes::from(format!("{{{value}}}"));
            prop_assert_eq!(unpack(pack(value.clone())).unwrap(), value);
        }
    }
}
