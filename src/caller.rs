//! The caller of a request, as far as the bridge can verify it.
//!
//! Follow-ups, tasks, sessions, idempotency keys and files belong to the caller that made them. For any other caller they
//! do not exist.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::text::{head, hex};

/// 128 bits in hexadecimal digits.
const HASH_LEN: usize = 32;

/// Who sent a request.
///
/// Callers within the bridge's own NATS account cannot be told apart; they share one identity, which is the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Caller(Option<Arc<str>>);

impl Caller {
    /// A caller whose identity NATS or a gateway has verified, such as `TENANT/alice`.
    pub(crate) fn verified(name: &str) -> Self {
        Self(Some(name.into()))
    }

    pub(crate) fn is_verified(&self) -> bool {
        self.0.is_some()
    }

    /// The verified identity.
    pub(crate) fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// Whether it is the caller that all unverified callers share. Records leave it out.
    pub(crate) fn is_shared(&self) -> bool {
        self.0.is_none()
    }

    /// The caller that stands for the account of this one, or for its gateway: what all of them together may use is limited,
    /// too. Accounts have neither `/` nor `:` in their names.
    pub(crate) fn tenant(&self) -> Self {
        Self(self.name().map(|name| match name.split_inclusive(['/', ':']).next() {
            Some(tenant) if tenant.ends_with(['/', ':']) => tenant.into(),
            // An account whose user is not known.
            _ => format!("{name}/").into(),
        }))
    }

    /// Whether the caller is not one of several users of its tenant, because its user is not known.
    pub(crate) fn is_whole_tenant(&self) -> bool {
        let separator = self.name().and_then(|name| Some((name.find(['/', ':'])?, name.len())));
        separator.is_none_or(|(position, len)| position + 1 == len)
    }

    /// An id that belongs to this caller alone, for the key of a record: a hash of the caller and of `parts`.
    pub(crate) fn scoped_id(&self, parts: &[&str]) -> String {
        let mut hash = Sha256::new();
        let fields = [if self.is_verified() { "1" } else { "0" }, self.name().unwrap_or_default()];
        for field in fields.iter().chain(parts) {
            hash.update((field.len() as u64).to_be_bytes());
            hash.update(field);
        }
        head(&hex(&hash.finalize()), HASH_LEN).to_owned()
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name().unwrap_or("-"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_of_an_account_are_one_tenant() {
        let tenant = |name: &str| Caller::verified(name).tenant();
        assert_eq!(tenant("T/alice"), tenant("T/bob"));
        assert_eq!(tenant("gateway:a/b"), tenant("gateway:c"));
        assert_ne!(tenant("T/alice"), tenant("U/alice"));
        assert_ne!(tenant("gateway/alice"), tenant("gateway:alice"));
        assert_eq!(tenant("T"), tenant("T/alice"));
        assert_ne!(tenant("gateway"), tenant("gateway:alice"));
        assert_eq!(Caller::default().tenant(), Caller::default());
        for (name, is_whole) in [("T", true), ("?", true), ("T/alice", false), ("gateway:alice", false)] {
            assert_eq!(Caller::verified(name).is_whole_tenant(), is_whole, "{name}");
            assert!(tenant(name).is_whole_tenant(), "{name}");
            assert_eq!(tenant(name), tenant(name).tenant(), "{name}");
        }
    }

    #[test]
    fn an_id_belongs_to_one_caller() {
        let (shared, alice) = (Caller::default(), Caller::verified("T/alice"));
        let ids = [
            shared.scoped_id(&["s"]),
            alice.scoped_id(&["s"]),
            Caller::verified("").scoped_id(&["s"]),
            Caller::verified("T").scoped_id(&["/alice", "s"]),
            alice.scoped_id(&["", "s"]),
        ];
        for (n, id) in ids.iter().enumerate() {
            assert_eq!(id.len(), HASH_LEN);
            assert!(!ids[n + 1..].contains(id));
        }
        assert_eq!(alice.scoped_id(&["s"]), Caller::verified("T/alice").scoped_id(&["s"]));
    }
}
