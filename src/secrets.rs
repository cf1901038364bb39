//! Redacts the credentials of an agent in logs, errors and replies.

use std::borrow::Cow;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use memchr::memmem;
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;

const MIN_LENGTH: usize = Secrets::MIN_LENGTH;
/// How many access tokens of an agent are redacted. Not only the newest: a token may be valid for longer than tokens
/// that were issued after it.
const MAX_TOKENS: usize = 32;
const REDACTED: &str = "***";
/// What [`shorten`](crate::text::shorten) and others write in place of the rest of a string.
const ELLIPSIS: &str = "…";
/// How much of a secret is redacted before an ellipsis, where it is more likely to be the beginning of a secret.
const MIN_TRUNCATED: usize = 3;

/// The secrets of one agent. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    configured: Arc<SecretForms>,
    tokens: Arc<RwLock<AccessTokens>>,
}

#[derive(Debug, Default)]
struct AccessTokens {
    /// The oldest first.
    all: VecDeque<SecretString>,
    forms: SecretForms,
}

/// Secrets in all forms in which they can occur in a string.
#[derive(Default)]
struct SecretForms {
    /// The longest first: if one begins with another, its end must not remain.
    all: Vec<SecretString>,
    /// The first bytes of each. Nearly every string has none of these and no ellipsis, and so no secret, whole or
    /// truncated.
    prefixes: Vec<memmem::Finder<'static>>,
}

impl Secrets {
    /// A shorter value may be an ordinary word and is not redacted.
    pub const MIN_LENGTH: usize = 8;

    /// A secret of several lines, such as a PEM key, is redacted line by line, because output is read in lines.
    pub fn new(secrets: impl IntoIterator<Item = SecretString>) -> Self {
        let secrets: Vec<SecretString> = secrets.into_iter().collect();
        let lines = secrets.iter().flat_map(|secret| secret.expose_secret().lines().map(str::trim));
        Self { configured: Arc::new(SecretForms::new(lines)), tokens: Arc::default() }
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
        tokens.forms = SecretForms::new(tokens.all.iter().map(ExposeSecret::expose_secret));
    }

    /// Replaces every secret in a string, including one that the end of the string or an ellipsis truncates.
    pub fn redact(&self, text: &mut String) {
        self.configured.redact(text);
        self.tokens.read().unwrap_or_else(PoisonError::into_inner).forms.redact(text);
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

impl SecretForms {
    fn new<'a>(secrets: impl IntoIterator<Item = &'a str>) -> Self {
        let secrets = secrets.into_iter().filter(|secret| secret.len() >= MIN_LENGTH);
        let mut all: Vec<String> = secrets.flat_map(forms).filter(|form| form.len() >= MIN_LENGTH).collect();
        all.sort_by(|one, other| other.len().cmp(&one.len()).then_with(|| one.cmp(other)));
        all.dedup();
        let prefixes: BTreeSet<_> = all.iter().filter_map(|form| form.as_bytes().get(..MIN_LENGTH)).collect();
        let prefixes = prefixes.into_iter().map(|bytes| memmem::Finder::new(bytes).into_owned()).collect();
        Self { all: all.into_iter().map(SecretString::from).collect(), prefixes }
    }

    fn redact(&self, text: &mut String) {
        let is_cut = text.contains(ELLIPSIS);
        if !is_cut && self.prefixes.iter().all(|prefix| prefix.find(text.as_bytes()).is_none()) {
            return;
        }
        for secret in &self.all {
            let secret = secret.expose_secret();
            if text.contains(secret) {
                *text = text.replace(secret, REDACTED);
            }
            if let Some(redacted) = redact_truncated(text, secret) {
                *text = redacted;
            }
        }
    }
}

impl fmt::Debug for SecretForms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretForms").finish_non_exhaustive()
    }
}

/// The forms in which a secret is sent, or comes back from an agent that repeats it. Many of them are usually equal.
fn forms(secret: &str) -> Vec<String> {
    let quoted = Value::from(secret).to_string();
    let in_json = quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned();
    let in_form: String = url::form_urlencoded::byte_serialize(secret.as_bytes()).collect();
    let in_path = in_form.replace('+', "%20").replace('*', "%2A").replace("%7E", "~");
    let hex = crate::text::hex(secret.as_bytes());
    let mut forms = vec![
        secret.to_owned(),
        in_html(secret, "&quot;", "&#39;"),
        in_html(secret, "&#34;", "&#x27;"),
        hex.to_ascii_uppercase(),
        hex,
        in_json.replace('/', "\\/"),
        escape_html(&in_json, |c| format!("\\u{c:04X}")),
        escape_html(&in_json, |c| format!("\\u{c:04x}")),
        in_json,
        with_lowercase_escapes(&in_path),
        in_form,
        in_path,
        STANDARD.encode(secret),
        STANDARD_NO_PAD.encode(secret),
        URL_SAFE_NO_PAD.encode(secret),
    ];
    forms.extend((0..3).flat_map(|before| within_base64(secret, before)));
    forms
}

/// The characters that a secret has for certain within longer text in Base64, after this many bytes of a group of three.
fn within_base64(secret: &str, before: usize) -> [String; 2] {
    let text = [vec![0; before], secret.as_bytes().to_vec()].concat();
    // Six bits a character; the bits of a character at either end belong to other bytes in part.
    let certain = (before * 8).div_ceil(6)..text.len() * 8 / 6;
    [STANDARD_NO_PAD.encode(&text), URL_SAFE_NO_PAD.encode(&text)]
        .map(|encoded| encoded.get(certain.clone()).unwrap_or_default().to_owned())
}

fn in_html(secret: &str, quote: &str, apostrophe: &str) -> String {
    let escaped = secret.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    escaped.replace('"', quote).replace('\'', apostrophe)
}

/// Escapes JSON so that it is safe in HTML: .NET uses uppercase digits, Go lowercase ones.
fn escape_html(in_json: &str, escaped: impl Fn(u32) -> String) -> String {
    let escape = |c: char| if "+&<>'".contains(c) { escaped(u32::from(c)) } else { c.to_string() };
    in_json.chars().map(escape).collect()
}

/// `%2f` for `%2F`.
fn with_lowercase_escapes(in_path: &str) -> String {
    let mut pieces = in_path.split('%');
    let mut lowercase = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (digits, rest) = piece.split_at_checked(2).unwrap_or((piece, ""));
        lowercase.extend(["%", &digits.to_ascii_lowercase(), rest]);
    }
    lowercase
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

/// Replaces the beginning of a secret at the end of the text and before each ellipsis.
fn redact_truncated(text: &str, secret: &str) -> Option<String> {
    let mut pieces: Vec<Cow<'_, str>> = text.split(ELLIPSIS).map(Cow::Borrowed).collect();
    let last = pieces.len() - 1;
    let mut is_changed = false;
    for (index, piece) in pieces.iter_mut().enumerate() {
        let min = if index == last { MIN_LENGTH } else { MIN_TRUNCATED };
        if let Some(head) = before_truncated(piece, secret, min) {
            *piece = format!("{head}{REDACTED}").into();
            is_changed = true;
        }
    }
    is_changed.then(|| pieces.join(ELLIPSIS))
}

/// The text without the beginning of a secret, of at least `min` bytes, at its end; `None` if there is none.
fn before_truncated<'a>(text: &'a str, secret: &str, min: usize) -> Option<&'a str> {
    let (bytes, secret) = (text.as_bytes(), secret.as_bytes());
    let from = bytes.len().saturating_sub(secret.len() - 1);
    let tail = bytes.get(from..)?;
    // From the left, so that the longest match counts.
    let fits = |start: &usize| tail.get(*start..).is_some_and(|rest| secret.starts_with(rest));
    let last = (tail.len() + 1).checked_sub(min)?;
    (0..last).find(fits).and_then(|start| text.get(..from + start))
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
