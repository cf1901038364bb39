//! Redacts the credentials of an agent in logs, errors and replies.

mod forms;
mod matcher;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock};

use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;

use self::matcher::Matcher;

const MIN_LENGTH: usize = Secrets::MIN_LENGTH;
/// How many access tokens of an agent are redacted. Not only the newest: a token may be valid for longer than tokens
/// that were issued after it.
const MAX_TOKENS: usize = 32;
const REDACTED: &str = "***";

/// The secrets of one agent. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    configured: Arc<Matcher>,
    tokens: Arc<RwLock<AccessTokens>>,
}

#[derive(Debug, Default)]
struct AccessTokens {
    /// The oldest first.
    all: VecDeque<SecretString>,
    matcher: Arc<Matcher>,
}

impl Secrets {
    /// A shorter value may be an ordinary word and is not redacted.
    pub const MIN_LENGTH: usize = 8;

    /// A secret of several lines, such as a PEM key, is redacted line by line, because output is read in lines.
    pub fn new(secrets: impl IntoIterator<Item = SecretString>) -> Self {
        let secrets: Vec<SecretString> = secrets.into_iter().collect();
        let lines = secrets.iter().flat_map(|secret| secret.expose_secret().lines().map(str::trim));
        Self { configured: Arc::new(matcher(lines)), tokens: Arc::default() }
    }

    /// Adds an access token.
    pub fn learn(&self, token: &str) {
        if token.len() < MIN_LENGTH {
            return;
        }
        let mut tokens = self.tokens.write().unwrap_or_else(PoisonError::into_inner);
        // Some token endpoints issue the same token again while it is valid.
        if tokens.all.iter().any(|known| known.expose_secret() == token) {
            return;
        }
        if tokens.all.len() == MAX_TOKENS {
            tokens.all.pop_front();
        }
        tokens.all.push_back(token.into());
        tokens.matcher = Arc::new(matcher(tokens.all.iter().map(ExposeSecret::expose_secret)));
    }

    /// Replaces every secret in a string, including one that the end of the string or an ellipsis truncates.
    pub fn redact(&self, text: &mut String) {
        // The lock is not held while a long text is read.
        let tokens = Arc::clone(&self.tokens.read().unwrap_or_else(PoisonError::into_inner).matcher);
        for matcher in [&self.configured, &tokens] {
            matcher.replace(text, REDACTED);
        }
    }

    /// Redacts the keys and strings of a JSON text, in whatever way they are escaped; everything else stays as it is.
    /// The result is not valid JSON if a number is a secret.
    pub fn redact_json(&self, json: &str) -> String {
        let mut redacted = String::with_capacity(json.len());
        // `plain` is the text since the last string with escapes; it is redacted in one pass.
        let (mut plain, mut rest) = (json, json);
        while let Some((literal, after)) = next_string(rest) {
            if literal.len() >= MIN_LENGTH && literal.contains('\\') {
                let length = plain.len() - after.len() - literal.len();
                redacted.push_str(&self.redacted(plain.get(..length).unwrap_or_default()));
                redacted.push_str(&self.redacted_literal(literal));
                plain = after;
            }
            rest = after;
        }
        redacted.push_str(&self.redacted(plain));
        redacted
    }

    fn redacted(&self, text: &str) -> String {
        let mut text = text.to_owned();
        self.redact(&mut text);
        text
    }

    fn redacted_literal<'a>(&self, literal: &'a str) -> Cow<'a, str> {
        // A string that cannot be decoded (half a surrogate pair) may contain a secret.
        let Ok(text) = serde_json::from_str::<String>(literal) else {
            return format!("\"{REDACTED}\"").into();
        };
        let redacted = self.redacted(&text);
        if redacted == text { literal.into() } else { Value::from(redacted).to_string().into() }
    }
}

/// Finds secrets in all their forms.
fn matcher<'a>(secrets: impl IntoIterator<Item = &'a str>) -> Matcher {
    let secrets = secrets.into_iter().filter(|secret| secret.len() >= MIN_LENGTH);
    Matcher::new(secrets.flat_map(forms::forms).filter(|form| form.len() >= MIN_LENGTH), MIN_LENGTH)
}

/// The next string of a JSON text with its quotes, and the rest of the text.
fn next_string(json: &str) -> Option<(&str, &str)> {
    let start = memchr::memchr(b'"', json.as_bytes())?;
    let mut end = start + 1;
    loop {
        end += memchr::memchr2(b'"', b'\\', json.as_bytes().get(end..)?)?;
        if json.as_bytes().get(end) == Some(&b'"') {
            let (head, after) = json.split_at_checked(end + 1)?;
            return Some((head.get(start..)?, after));
        }
        end += 2;
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

    use super::*;

    fn redacted(secrets: &[&str], text: &str) -> String {
        let mut text = text.to_owned();
        Secrets::new(secrets.iter().copied().map(SecretString::from)).redact(&mut text);
        text
    }

    #[test]
    fn every_secret_is_redacted_and_short_values_are_not_secrets() {
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
    fn a_secret_is_redacted_within_json() {
        assert_eq!(redacted(&["t0p\\s3cret"], r#"{"sent": ["t0p\\s3cret"]}"#), r#"{"sent": ["***"]}"#);
    }

    #[test]
    fn a_secret_is_redacted_in_every_form_that_is_sent() {
        let secret = "t0p s3/cr+t~*é?";
        for form in [
            "t0p s3\\/cr+t~*é?",
            "t0p+s3%2Fcr%2Bt%7E*%C3%A9%3F",
            "t0p%20s3%2Fcr%2Bt~%2A%C3%A9%3F",
            "dDBwIHMzL2NyK3R+KsOpPw==",
            "dDBwIHMzL2NyK3R+KsOpPw",
        ] {
            assert_eq!(redacted(&[secret], &format!("a={form}&b")), "a=***&b");
            let secrets = Secrets::default();
            secrets.learn(secret);
            assert_eq!(secrets.redacted(&format!("a={form}&b")), "a=***&b");
        }
        assert!(!format!("{:?}", Secrets::new([SecretString::from(secret)])).contains("116"), "shows bytes");
    }

    #[test]
    fn json_keeps_everything_but_secrets() {
        let secrets = Secrets::new(["t0p/s3cret", "1234567890"].map(SecretString::from));
        for (json, expected) in [
            (r#"{"a\u0062" : [1.50, 1e400,"\/\u00e9"] }"#, r#"{"a\u0062" : [1.50, 1e400,"\/\u00e9"] }"#),
            (r#"{"t0p\/s3cret": ["\"\u0074\u0030p/s3cret"]}"#, r#"{"***": ["\"***"]}"#),
            (r#"["\ud800t0p\u002fs3cret", "\\"]"#, r#"["***", "\\"]"#),
            (r#""t0p/s3cret""#, r#""***""#),
            ("null", "null"),
            ("[1234567890]", "[***]"),
        ] {
            assert_eq!(secrets.redact_json(json), expected);
        }
    }

    #[test]
    fn a_secret_is_redacted_with_html_escapes_and_lowercase_escapes() {
        let forms =
            [r"t0p\u002Bs3cret\u003C", r"t0p\u002bs3cret\u003c", "t0p%2bs3cret%3c", "dDBwK3MzY3JldDw"];
        for form in forms {
            assert_eq!(redacted(&["t0p+s3cret<"], form), "***");
        }
    }

    #[test]
    fn a_secret_is_redacted_within_encoded_text() {
        let secret = "t0p&s3cret?<'ü~>";
        for before in ["", "a", "ab", "Bearer "] {
            let text = format!("{before}{secret} and more");
            for encoded in [STANDARD.encode(&text), URL_SAFE_NO_PAD.encode(&text)] {
                let redacted = redacted(&[secret], &encoded);
                assert!(redacted.contains(REDACTED), "{encoded}");
                // At most one character on each side has bits of the secret.
                assert!(
                    redacted.len() <= encoded.len() - secret.len() * 8 / 6 + 5,
                    "{redacted} of {encoded}"
                );
            }
        }
        let html = "t0p&amp;s3cret?&lt;&#39;ü~&gt;";
        assert_eq!(redacted(&[secret], &format!("<p>{html}</p>")), "<p>***</p>");
        assert_eq!(redacted(&["t0ps3cret"], "74307073336372657 743070733363726574"), "74307073336372657 ***");
    }

    #[test]
    fn a_token_that_is_issued_again_does_not_evict_another() {
        let secrets = Secrets::default();
        secrets.learn("access-token-of-the-card");
        (0..=MAX_TOKENS).for_each(|_| secrets.learn("access-token-of-tasks"));
        let mut text = "access-token-of-the-card".to_owned();
        secrets.redact(&mut text);
        assert_eq!(text, "***");
    }

    #[test]
    fn an_access_token_is_redacted_by_every_clone_until_newer_tokens_evict_it() {
        let secrets = Secrets::default();
        let clone = secrets.clone();
        (0..=MAX_TOKENS).for_each(|number| secrets.learn(&format!("access-token-{number:03}")));
        let mut text = format!("access-token-000 access-token-{MAX_TOKENS:03}");
        clone.redact(&mut text);
        assert_eq!(text, "access-token-000 ***");
    }

    #[test]
    fn a_truncated_secret_is_redacted() {
        let secrets = ["t0ps3cret-ünd-more"];
        assert_eq!(redacted(&secrets, "it begins with: t0ps3cret-ü"), "it begins with: ***");
        assert_eq!(redacted(&secrets, "it begins with: t0ps3cret…"), "it begins with: ***…");
        assert_eq!(redacted(&secrets, "as t0ps3cret…; t0ps3cret-…; or…"), "as ***…; ***…; or…");
        assert_eq!(redacted(&secrets, "t0ps3cret goes on … here"), "t0ps3cret goes on … here");
        assert_eq!(redacted(&secrets, "t0ps3cret is the beginning"), "t0ps3cret is the beginning");
        assert_eq!(redacted(&secrets, "t0ps3c"), "t0ps3c", "too short for a secret");
        assert_eq!(redacted(&secrets, "it begins with: t0p…"), "it begins with: ***…");
        assert_eq!(redacted(&secrets, "it begins with: dDBw…"), "it begins with: ***…");
        assert_eq!(redacted(&["abababababab"], "abababababab ababababab"), "*** ***");
        assert_eq!(redacted(&["ababababab-more"], "it is abababababab"), "it is ab***");
    }
}
