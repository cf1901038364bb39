//! References to objects: `obj://bucket/name`.

use std::fmt;

use super::FileError;

const SCHEME: &str = "obj://";
const MAX_BUCKET: usize = 128;
const MAX_NAME: usize = 128;

/// The bucket and the name of an object. Both consist of plain characters, so that neither can leave its place in a
/// subject or a path; nothing is decoded.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectUrl {
    bucket: String,
    name: String,
}

impl ObjectUrl {
    pub(crate) fn new(bucket: &str, name: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        let is_bucket = (1..=MAX_BUCKET).contains(&bucket.len()) && bucket.bytes().all(is_plain);
        let is_name = (1..=MAX_NAME).contains(&name.len())
            && name.bytes().all(|byte| is_plain(byte) || byte == b'.')
            && name.bytes().any(|byte| byte != b'.');
        (is_bucket && is_name).then(|| Self { bucket: bucket.to_owned(), name: name.to_owned() })
    }

    /// `None` if the text does not begin with `obj://`.
    pub(crate) fn parse(text: &str) -> Option<Result<Self, FileError>> {
        let scheme = text.get(..SCHEME.len())?;
        if !scheme.eq_ignore_ascii_case(SCHEME) {
            return None;
        }
        let parsed = text.get(SCHEME.len()..).and_then(|rest| rest.split_once('/'));
        Some(parsed.and_then(|(bucket, name)| Self::new(bucket, name)).ok_or_else(|| {
            FileError::Invalid(
                "the reference to a file must have the form `obj://bucket/name`, with letters, digits, `_`, `-`, and in \
                 the name also `.`"
                    .to_owned(),
            )
        }))
    }

    pub(crate) fn bucket(&self) -> &str {
        &self.bucket
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.bucket, self.name)
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("obj://a2a_files/9f")]
    #[case("OBJ://b/a.b-c_d")]
    fn a_reference_has_a_bucket_and_a_name(#[case] text: &str) {
        let url = ObjectUrl::parse(text).unwrap().unwrap();
        assert_eq!(format!("obj://{}/{}", url.bucket(), url.name()), url.to_string());
    }

    #[rstest]
    #[case("obj://")]
    #[case("obj://b")]
    #[case("obj://b/")]
    #[case("obj:///n")]
    #[case("obj://b/..")]
    #[case("obj://b/../c")]
    #[case("obj://b/a/b")]
    #[case("obj://b/%2e%2e")]
    #[case("obj://b/n?x=1")]
    #[case("obj://b/n#x")]
    #[case("obj://b/n ")]
    #[case("obj://b/é")]
    #[case("obj://u@b/n")]
    #[case("obj://b:1/n")]
    #[case("obj://b.*/n")]
    #[case("obj://b.>/n")]
    #[case("obj://b/n\r\nPUB x")]
    #[case("obj://b\0/n")]
    fn a_malformed_reference_is_invalid(#[case] text: &str) {
        assert!(matches!(ObjectUrl::parse(text), Some(Err(FileError::Invalid(_)))), "{text}");
    }

    #[test]
    fn long_names_are_invalid_and_other_schemes_are_no_references() {
        let long = "n".repeat(MAX_NAME);
        assert!(ObjectUrl::new("b", &long).is_some());
        assert!(ObjectUrl::new("b", &format!("{long}n")).is_none());
        for text in ["https://b/n", "object://b/n", "obj:/b/n", "", "ob"] {
            assert!(ObjectUrl::parse(text).is_none(), "{text}");
        }
    }
}
