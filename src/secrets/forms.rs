//! The encodings in which a secret can occur in a string.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use serde_json::Value;

/// The forms in which a secret is sent, or comes back from an agent that repeats it. Many of them are usually equal.
pub(super) fn forms(secret: &str) -> Vec<String> {
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
