//! The credentials of one agent, and how they are kept out of what others can read.

use std::sync::Arc;

use memchr::memmem;
use secrecy::{ExposeSecret as _, SecretString};

/// A shorter value may be any word, and is not taken for a secret.
const SHORTEST: usize = 8;
const HIDDEN: &str = "***";

/// Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Secrets(Arc<[SecretString]>);

impl Secrets {
    /// A secret of several lines, such as a key in PEM form, is redacted line by line: output comes in lines.
    pub fn new(secrets: impl IntoIterator<Item = SecretString>) -> Self {
        let lines = |secret: SecretString| {
            let lines = secret.expose_secret().lines().map(str::trim);
            lines.map(SecretString::from).collect::<Vec<_>>()
        };
        let mut secrets: Vec<SecretString> = secrets.into_iter().flat_map(lines).collect();
        secrets.retain(|secret| secret.expose_secret().len() >= SHORTEST);
        // The longest first: of one that begins with another, the rest would remain.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.expose_secret().len()));
        Self(secrets.into())
    }

    /// Replaces every secret in a text, also one that the end of the text cuts off.
    pub fn redact(&self, text: &mut String) {
        for secret in &*self.0 {
            let secret = secret.expose_secret();
            if text.contains(secret) {
                *text = text.replace(secret, HIDDEN);
            }
            if let Some(start) = cut_off(text, secret) {
                text.truncate(start);
                text.push_str(HIDDEN);
            }
        }
    }
}

/// Where a text ends with the beginning of a secret, perhaps followed by the mark of a cut.
fn cut_off(text: &str, secret: &str) -> Option<usize> {
    let (text, secret) = (text.trim_end_matches('…').as_bytes(), secret.as_bytes());
    let from = text.len().saturating_sub(secret.len() - 1);
    let tail = text.get(from..)?;
    memmem::find_iter(tail, secret.get(..SHORTEST)?)
        .find(|start| tail.get(*start..).is_some_and(|rest| secret.starts_with(rest)))
        .map(|start| from + start)
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
    fn a_secret_at_the_end_of_a_text_that_was_cut_is_replaced_too() {
        let secrets = ["t0ps3cret-ünd-more"];
        assert_eq!(redacted(&secrets, "it begins with: t0ps3cret-ü"), "it begins with: ***");
        assert_eq!(redacted(&secrets, "it begins with: t0ps3cret…"), "it begins with: ***");
        assert_eq!(redacted(&secrets, "t0ps3cret is the beginning"), "t0ps3cret is the beginning");
        assert_eq!(redacted(&secrets, "t0ps3c"), "t0ps3c", "too little to be a secret");
        assert_eq!(redacted(&["abababababab"], "abababababab ababababab"), "*** ***");
    }
}
