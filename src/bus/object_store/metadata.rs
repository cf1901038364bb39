//! The metadata of an object (ADR-20), and the names of its subjects.

use std::collections::BTreeMap;
use std::time::SystemTime;

use base64::Engine as _;
use base64::engine::general_purpose::{URL_SAFE, URL_SAFE_NO_PAD};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::quota::Owner;
use crate::caller::Caller;
use crate::files::{FileDescription, ObjectUrl, StoredFile, last_component, media_type};
use crate::text::{Timestamp, hex, shorten};

/// The digits of an instance in a content id.
pub(super) const INSTANCE_LEN: usize = 16;
const NAME_LEN: usize = 32;
/// The keys under which the metadata has the owner and its tenant.
const OWNER: &str = "a2a-caller";
const TENANT: &str = "a2a-tenant";
const CONTENT_TYPE: &str = "Content-Type";
/// Maximum bytes of the name and the media type that callers and agents give a file.
const MAX_NAME: usize = 255;
const MAX_MEDIA_TYPE: usize = 127;

pub(super) fn stream_name(bucket: &str) -> String {
    format!("OBJ_{bucket}")
}

pub(super) fn chunk_subject(bucket: &str, content_id: &str) -> String {
    format!("$O.{bucket}.C.{content_id}")
}

pub(super) fn metadata_subject(url: &ObjectUrl) -> String {
    format!("$O.{}.M.{}", url.bucket(), URL_SAFE.encode(url.name()))
}

pub(super) fn content_id(instance: &str, name: &str) -> String {
    format!("{instance}_{name}")
}

/// The instance that writes a content, and the name of its object. `None` if no bridge has written it.
pub(super) fn parse_content_id(id: &str) -> Option<(&str, &str)> {
    let (instance, name) = id.split_once('_')?;
    let is_hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let is_ours =
        instance.len() == INSTANCE_LEN && name.len() == NAME_LEN && is_hex(instance) && is_hex(name);
    is_ours.then_some((instance, name))
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ObjectMetadata {
    pub(crate) name: String,
    /// The name that people see.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) description: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    headers: Option<BTreeMap<String, Vec<String>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    metadata: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    options: Option<Value>,
    bucket: String,
    #[serde(rename = "nuid")]
    pub(super) content_id: String,
    #[serde(default)]
    pub(crate) size: u64,
    #[serde(default)]
    chunks: u64,
    #[serde(rename = "mtime")]
    pub(crate) modified: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    deleted: bool,
}

impl ObjectMetadata {
    pub(super) fn new(
        url: &ObjectUrl,
        content_id: &str,
        caller: &Caller,
        size: u64,
        chunks: u64,
        digest: &[u8],
    ) -> Self {
        Self {
            name: url.name().to_owned(),
            description: None,
            headers: None,
            metadata: Some(BTreeMap::from([
                (OWNER.to_owned(), owner(caller)),
                (TENANT.to_owned(), tenant(caller)),
            ])),
            // What the command line tool of NATS expects.
            options: Some(serde_json::json!({ "max_chunk_size": 128 << 10 })),
            bucket: url.bucket().to_owned(),
            content_id: content_id.to_owned(),
            size,
            chunks,
            modified: Timestamp(SystemTime::now()).to_string().into(),
            digest: Some(format!("SHA-256={}", URL_SAFE.encode(digest))),
            deleted: false,
        }
    }

    /// `None` if it is not the metadata of this object.
    pub(super) fn parse(json: &[u8], url: &ObjectUrl) -> Option<Self> {
        let this: Self = serde_json::from_slice(json).ok()?;
        (this.name == url.name() && this.bucket == url.bucket()).then_some(this)
    }

    /// Whether there is content: the object is neither deleted nor a link.
    pub(super) fn is_readable(&self) -> bool {
        let is_link = self.options.as_ref().is_some_and(|options| !options["link"].is_null());
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        !self.deleted
            && !is_link
            && !self.content_id.is_empty()
            && self.content_id.len() <= 128
            && self.content_id.bytes().all(is_plain)
            && self.sha256().is_some()
    }

    /// The owner. Files that no bridge has stored belong to the callers that share an identity.
    pub(super) fn owner(&self) -> Owner {
        let value = |key: &str| self.metadata.as_ref()?.get(key).map(String::as_str);
        match (value(OWNER), value(TENANT)) {
            (None, _) => Owner::new(&Caller::default()),
            // Without a tenant, the owner is one of its own.
            (Some(owner), tenant) => Owner::parse(owner, tenant.unwrap_or(owner)),
        }
    }

    pub(super) fn belongs_to(&self, caller: &Caller) -> bool {
        self.owner().caller == Owner::new(caller).caller
    }

    fn sha256(&self) -> Option<String> {
        let digest = self.digest.as_deref()?.strip_prefix("SHA-256=")?;
        let bytes = URL_SAFE_NO_PAD.decode(digest.trim_end_matches('=')).ok()?;
        (bytes.len() == 32).then(|| hex(&bytes))
    }

    pub(super) fn describe(&mut self, description: &FileDescription) {
        let FileDescription { name, media_type } = clean(description);
        self.description = name;
        self.headers =
            media_type.map(|media_type| BTreeMap::from([(CONTENT_TYPE.to_owned(), vec![media_type])]));
    }

    pub(crate) fn media_type(&self) -> Option<String> {
        let values =
            self.headers.as_ref()?.iter().find(|(name, _)| name.eq_ignore_ascii_case(CONTENT_TYPE))?.1;
        values.first().cloned()
    }

    /// The metadata after the object is deleted.
    pub(super) fn deleted(&self) -> Self {
        let modified = Timestamp(SystemTime::now()).to_string().into();
        Self { deleted: true, size: 0, chunks: 0, digest: None, modified, ..self.clone() }
    }

    pub(super) fn is_deleted(&self) -> bool {
        self.deleted
    }

    pub(crate) fn into_file(self, url: ObjectUrl) -> StoredFile {
        let sha256 = self.sha256().unwrap_or_default();
        let media_type = self.media_type();
        // Objects that no bridge has stored have names of their own.
        let is_ours = parse_content_id(&self.content_id).is_some();
        let name = self.description.filter(|_| is_ours).or((!is_ours).then_some(self.name));
        let media_type = media_type.or_else(|| name.as_deref().and_then(self::media_type).map(str::to_owned));
        let description = clean(&FileDescription { name, media_type });
        let (size, content_id) = (self.size, self.content_id);
        StoredFile { url, description, size, sha256, content_id, temporary: None }
    }
}

/// A description without directories and control characters, and of limited length.
fn clean(description: &FileDescription) -> FileDescription {
    let FileDescription { name, media_type } = description;
    let name = name.as_deref().map(|name| {
        let name: String = last_component(name).chars().filter(|c| !c.is_control()).collect();
        shorten(&name, MAX_NAME)
    });
    let media_type = media_type.clone().filter(|media_type| {
        media_type.len() <= MAX_MEDIA_TYPE && media_type.bytes().all(|byte| matches!(byte, b' '..=b'~'))
    });
    FileDescription {
        name: name.filter(|name| !name.is_empty()),
        media_type: media_type.filter(|t| !t.is_empty()),
    }
}

/// The owner of a file in its metadata: a hash, because others may read the bucket.
pub(super) fn owner(caller: &Caller) -> String {
    caller.scoped_id(&["file"])
}

/// The tenant of the owner, which counts what all its users have stored.
pub(super) fn tenant(caller: &Caller) -> String {
    caller.tenant().scoped_id(&["files of a tenant"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_contents_of_bridges_have_an_instance() {
        let (instance, name) = ("0123456789abcdef", "0123456789abcdef0123456789abcdef");
        let id = content_id(instance, name);
        assert_eq!(parse_content_id(&id), Some((instance, name)));
        for id in ["", "_", "dJ8x0oY2AYQnLBXj3kTZPn", &id[1..], &id.to_uppercase(), &format!("{id}_a")] {
            assert_eq!(parse_content_id(id), None, "{id}");
        }
    }

    #[test]
    fn a_name_has_no_directories_and_no_control_characters() {
        let description = |name: &str, media_type: &str| {
            let description =
                FileDescription { name: Some(name.to_owned()), media_type: Some(media_type.to_owned()) };
            let FileDescription { name, media_type } = clean(&description);
            (name.unwrap_or_default(), media_type.unwrap_or_default())
        };
        assert_eq!(description("../../etc/passwd", "text/plain"), ("passwd".into(), "text/plain".into()));
        assert_eq!(description("a\r\nb", "text/plain\r\nX: y"), ("ab".into(), String::new()));
        assert_eq!(description("/", ""), (String::new(), String::new()));
    }
}
