//! The credentials of one agent, and how they are kept out of what others can read.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock};

use memchr::memmem;
use secrecy::{ExposeSecret as _, SecretString};

/// A shorter value may be any word, and is not taken for a secret.
const SHORTEST: usize = 8;
/// How many access tokens are redacted; those from before are no longer valid, as a rule.
const MAX_TOKENS: usize = 8;
const HIDDEN: &str = "***";
/// What [`shorten`](crate::json::shorten) and others put where they cut a text.
const CUT: &str = "…";

/// A handle: clones share what they know.
#[derive(Debug, Clone, Default)]
pub struct Secrets(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    configured: Vec<SecretString>,
    /// Access tokens, which are known only once they were asked for.
    tokens: RwLock<VecDeque<SecretString>>,
}

impl Secrets {
    /// A secret of several lines, such as a key in PEM form, is redacted line by line: output comes in lines.
    pub fn new(secrets: impl IntoIterator<Item = SecretString>) -> Self {
        let lines = |secret: SecretString| {
            let lines = secret.expose_secret().lines().map(str::trim);
            lines.map(SecretString::from).collect::<Vec<_>>()
        };
        let mut secrets: Vec<SecretString> = secrets.into_iter().flat_map(lines).collect();
        let escaped: Vec<_> = secrets.iter().filter_map(escaped).collect();
        secrets.extend(escaped);
        secrets.retain(|secret| secret.expose_secret().len() >= SHORTEST);
        // The longest first: of one that begins with another, the rest would remain.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.expose_secret().len()));
        Self(Arc::new(Shared { configured: secrets, tokens: RwLock::default() }))
    }

    /// Adds an access token.
    pub fn learn(&self, token: &str) {
        if token.len() < SHORTEST {
            return;
        }
        let mut tokens = self.0.tokens.write().unwrap_or_else(PoisonError::into_inner);
        if tokens.len() == MAX_TOKENS {
            tokens.pop_front();
        }
        tokens.push_back(token.into());
    }

    /// Replaces every secret in a text, also one that is cut off: by the end of the text, or by the mark of a cut.
    pub fn redact(&self, text: &mut String) {
        let tokens = self.0.tokens.read().unwrap_or_else(PoisonError::into_inner);
        for secret in self.0.configured.iter().chain(&*tokens) {
            let secret = secret.expose_secret();
            if text.contains(secret) {
                *text = text.replace(secret, HIDDEN);
            }
            if let Some(covered) = without_beginnings(text, secret) {
                *text = covered;
            }
        }
    }
}

/// The form that a secret has within JSON, if that is another one.
fn escaped(secret: &SecretString) -> Option<SecretString> {
    let secret = secret.expose_secret();
    let quoted = serde_json::Value::from(secret).to_string();
    let escaped = quoted.get(1..quoted.len() - 1)?;
    (escaped != secret).then(|| escaped.into())
}

/// A text in which pieces end with the beginning of a secret, without those: every ellipsis marks a cut, and what
/// was cut may go on behind it.
fn without_beginnings(text: &str, secret: &str) -> Option<String> {
    memmem::find(text.as_bytes(), secret.as_bytes().get(..SHORTEST)?)?;
    let covered = |piece| match cut_off(piece, secret) {
        Some(head) => format!("{head}{HIDDEN}").into(),
        None => Cow::Borrowed(piece),
    };
    Some(text.split(CUT).map(covered).collect::<Vec<_>>().join(CUT))
}

/// What a text has before the beginning of a secret that it ends with.
fn cut_off<'a>(text: &'a str, secret: &str) -> Option<&'a str> {
    let (bytes, secret) = (text.as_bytes(), secret.as_bytes());
    let from = bytes.len().saturating_sub(secret.len() - 1);
    let tail = bytes.get(from..)?;
    memmem::find_iter(tail, secret.get(..SHORTEST)?)
        .find(|start| tail.get(*start..).is_some_and(|rest| secret.starts_with(rest)))
        .and_then(|start| text.get(..from + start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redacted(secrets: &[&str], text: &str) -> String {
        let mut text = text.to_owned();
        Secrets::new(secrets.iter().copied().map(SecretString::from)).redact(&mut text);
        text
    }

    #[test]
    fn every_secret_is_replaced_and_short_values_are_not_secrets() {
        let secrets = ["t0ps3cret", "t0ps3cret-and-more", "word"];
        assert_eq!(redacted(&secrets, "t0ps3cret t0ps3cret-and-more, a word"), "*** ***, a word");
        assert_eq!(redacted(&secrets, ""), "");
    }

    #[test]
    fn each_line_of_a_key_is_a_secret() {
        let key = "BEGIN KEY\n  Zm9vYmFyYmF6\nEND KEY\n";
        assert_eq!(redacted(&[key], "read Zm9vYmFyYmF6"), "read ***");
    }

    #[test]
    fn a_secret_is_found_within_json() {
        assert_eq!(redacted(&["t0p\\s3cret"], r#"{"sent": ["t0p\\s3cret"]}"#), r#"{"sent": ["***"]}"#);
    }

    #[test]
    fn an_access_token_is_redacted_by_every_handle_until_newer_ones_have_come() {
        let secrets = Secrets::default();
        let handle = secrets.clone();
        (0..=MAX_TOKENS).for_each(|number| secrets.learn(&format!("access-token-{number}")));
        let mut text = format!("access-token-0 access-token-{MAX_TOKENS}");
        handle.redact(&mut text);
        assert_eq!(text, "access-token-0 ***");
    }

    #[test]
    fn a_secret_at_the_end_of_a_text_that_was_cut_is_replaced_too() {
        let secrets = ["t0ps3cret-ünd-more"];
        assert_eq!(redacted(&secrets, "it begins with: t0ps3cret-ü"), "it begins with: ***");
        assert_eq!(redacted(&secrets, "it begins with: t0ps3cret…"), "it begins with: ***…");
        assert_eq!(redacted(&secrets, "as t0ps3cret…; t0ps3cret-…; or…"), "as ***…; ***…; or…");
        assert_eq!(redacted(&secrets, "t0ps3cret goes on … here"), "t0ps3cret goes on … here");
        assert_eq!(redacted(&secrets, "t0ps3cret is the beginning"), "t0ps3cret is the beginning");
        assert_eq!(redacted(&secrets, "t0ps3c"), "t0ps3c", "too little to be a secret");
        assert_eq!(redacted(&["abababababab"], "abababababab ababababab"), "*** ***");
    }
}
