//! Single values: text in, checked value out.
//!
//! Parsers know nothing about files or positions. An error says what was expected and never repeats the text, which
//! may be a secret or come from the environment.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

use crate::text::is_unprintable;

/// Maximum duration of a setting.
pub(super) const MAX_DURATION: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Reads `30s`, `500ms`, `2m`, `1h30m`, `1d`, or a plain number of seconds (`30`, `1.5`).
///
/// The result is above zero and at most 30 days.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    match parse_capped_duration(text)? {
        duration if duration <= MAX_DURATION => Ok(duration),
        _ => Err("expected a duration of at most 30 days (`30d`)".into()),
    }
}

/// As [`parse_duration`], for a limit that the caller caps: it accepts every length. A length that exceeds a
/// [`Duration`] becomes the maximum.
pub(crate) fn parse_capped_duration(text: &str) -> Result<Duration, String> {
    let seconds = seconds(text.trim())
        .ok_or("expected a duration such as `30s`, `500ms`, `2m`, `1h30m` or a number of seconds")?;
    // The seconds are never negative, so this fails only if there are too many of them.
    let duration = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    if duration.is_zero() { Err("expected a duration above zero".into()) } else { Ok(duration) }
}

fn seconds(text: &str) -> Option<f64> {
    if !text.is_empty() && text.bytes().all(is_number) {
        return text.parse().ok();
    }
    let mut rest = text;
    let mut sum = 0.0;
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.bytes().take_while(|byte| is_number(*byte)).count());
        let (unit, after) =
            after.split_at(after.bytes().take_while(|byte| byte.is_ascii_alphabetic()).count());
        let scale = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86400.0,
            _ => return None,
        };
        sum += number.parse::<f64>().ok()? * scale;
        rest = after;
    }
    (!text.is_empty()).then_some(sum)
}

fn is_number(byte: u8) -> bool {
    byte.is_ascii_digit() || byte == b'.'
}

/// Reads `4MiB`, `64KB` or a plain number of bytes.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let (number, unit) = text.split_at(text.bytes().take_while(u8::is_ascii_digit).count());
    let scale: Option<u64> = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "kb" => Some(1000),
        "kib" => Some(1 << 10),
        "mb" => Some(1_000_000),
        "mib" => Some(1 << 20),
        "gb" => Some(1_000_000_000),
        "gib" => Some(1 << 30),
        _ => None,
    };
    number
        .parse::<u64>()
        .ok()
        .zip(scale)
        .and_then(|(number, scale)| number.checked_mul(scale))
        .ok_or_else(|| "expected a size such as `4MiB`, `64KB` or a number of bytes".into())
}

pub(super) fn response_size(text: &str) -> Result<u64, String> {
    let size = parse_size(text)?;
    if (1 << 10..=1 << 30).contains(&size) {
        Ok(size)
    } else {
        Err("expected a size from 1KiB to 1GiB".into())
    }
}

pub(super) fn memory_size(text: &str) -> Result<u64, String> {
    let size = parse_size(text)?;
    if (64 << 20..=1 << 40).contains(&size) {
        Ok(size)
    } else {
        Err("expected a size from 64MiB to 1024GiB".into())
    }
}

pub(super) fn file_size(text: &str) -> Result<u64, String> {
    let size = parse_size(text)?;
    if (1 << 10..=1 << 40).contains(&size) {
        Ok(size)
    } else {
        Err("expected a size from 1KiB to 1024GiB".into())
    }
}

pub(super) fn bucket_name(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    match (1..=128).contains(&text.len()) && text.bytes().all(is_plain) {
        true => Ok(text.to_owned()),
        false => Err("expected the name of a bucket: letters, digits, `_` and `-`".into()),
    }
}

/// The principal for whom a gateway calls, as a bridge accepts it in `A2A-Caller`.
pub(super) fn principal(text: &str) -> Result<String, String> {
    let name = non_empty(text)?;
    if name.len() > 256 || name.contains(is_unprintable) || name.trim() != name {
        return Err(
            "expected a name of at most 256 bytes, without unprintable characters and outer spaces".into()
        );
    }
    Ok(name)
}

pub(super) fn sha256_digest(text: &str) -> Result<[u8; 32], String> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    let mut digest = [0; 32];
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let is_digest = pairs.len() == digest.len() && rest.is_empty();
    let parsed = digest.iter_mut().zip(pairs).try_for_each(|(byte, [high, low])| {
        *byte = digit(*high)? << 4 | digit(*low)?;
        Some(())
    });
    match (is_digest, parsed) {
        (true, Some(())) => Ok(digest),
        _ => Err("expected 64 hexadecimal digits, as from `printf %s \"$TOKEN\" | sha256sum`".into()),
    }
}

/// The origin of a web page as browsers send it: scheme, host, and the port unless it is the default.
pub(super) fn web_origin(text: &str) -> Result<String, String> {
    let expected = || "expected an origin such as `https://app.example.org`, without a path".to_owned();
    let url = Url::parse(text.trim()).map_err(|_| expected())?;
    let is_origin = matches!(url.scheme(), "http" | "https")
        && matches!(url.path(), "" | "/")
        && url.query().is_none()
        && url.fragment().is_none()
        && url.username().is_empty()
        && url.password().is_none();
    if is_origin { Ok(url.origin().ascii_serialization()) } else { Err(expected()) }
}

pub(super) fn processor_count(text: &str) -> Result<f64, String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number = text.parse().ok().filter(|number| is_plain && (0.01..=1024.0).contains(number));
    number.ok_or_else(|| "expected a number from 0.01 to 1024, such as `1.5`".into())
}

pub(super) fn count(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|number| (1..=100_000).contains(number))
        .ok_or_else(|| "expected a whole number from 1 to 100000".into())
}

/// The text, if it is as expected.
fn checked(text: &str, is_valid: bool, expected: &str) -> Result<String, String> {
    if is_valid { Ok(text.into()) } else { Err(expected.into()) }
}

pub(super) fn non_empty(text: &str) -> Result<String, String> {
    checked(text, !text.trim().is_empty(), "expected text, found none")
}

pub(super) fn path(text: &str) -> Result<PathBuf, String> {
    checked(text, !text.is_empty() && !text.contains('\0'), "expected a path").map(PathBuf::from)
}

pub(super) fn agent_name(text: &str) -> Result<String, String> {
    if text.chars().count() > 256 {
        Err("the name is longer than 256 characters".into())
    } else if text.chars().any(char::is_control) {
        Err("the name must not contain line breaks or other control characters".into())
    } else {
        non_empty(text)
    }
}

pub(super) fn agent_url(text: &str) -> Result<Url, String> {
    let url = http_url(text, "`http://127.0.0.1:9000`", "`bearer_token` or `headers`")?;
    if url.query().is_some() || url.fragment().is_some() {
        return Err("expected a URL without `?` and `#`".into());
    }
    Ok(url)
}

pub(super) fn token_url(text: &str) -> Result<Url, String> {
    http_url(text, "`https://login.example.org/token`", "`client_id` and `client_secret`")
}

fn http_url(text: &str, example: &str, instead: &str) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|_| format!("expected a URL such as {example}"))?;
    if !matches!(url.scheme(), "http" | "https") {
        Err("expected a URL that starts with `http://` or `https://`".into())
    } else if url.host_str().is_none_or(str::is_empty) {
        Err("expected a URL with a host".into())
    } else if !url.username().is_empty() || url.password().is_some() {
        Err(format!("expected a URL without user and password; use {instead}"))
    } else {
        Ok(url)
    }
}

/// `host` or `host:port`, in the URL standard's spelling.
pub(super) fn host(text: &str) -> Result<String, String> {
    let port = |text: &str| text.parse::<u16>().is_ok();
    let (host, port) = match text.rsplit_once(':') {
        Some((host, digits)) if port(digits) && (host.ends_with(']') || !host.contains(':')) => {
            (host, Some(digits))
        }
        _ => (text, None),
    };
    match (url::Host::parse(host), port) {
        (Ok(host), Some(port)) => Ok(format!("{host}:{port}")),
        (Ok(host), None) => Ok(host.to_string()),
        (Err(_), _) => Err("expected a host such as `agents.example.org` or `10.0.0.7:9000`".into()),
    }
}

/// One server, or several with commas between them.
pub(super) fn nats_urls(text: &str) -> Result<Vec<String>, String> {
    text.split(',').map(str::trim).map(nats_url).collect()
}

fn nats_url(text: &str) -> Result<String, String> {
    let expected = "expected a server such as `nats://127.0.0.1:4222`, `tls://host:4222` or `host:4222`";
    let (scheme, rest) = text.split_once("://").unwrap_or(("nats", text));
    if !matches!(scheme, "nats" | "tls") {
        return Err("expected a URL that starts with `nats://` or `tls://`".into());
    }
    // The URL standard parses host and port strictly for the schemes it knows, and `http` is one.
    match Url::parse(&format!("http://{rest}")) {
        Ok(url) if url.host_str().is_some_and(|host| !host.is_empty()) => Ok(text.into()),
        _ => Err(expected.into()),
    }
}

/// The prefix of subjects that the bridge serves. Callers wait for replies below `_INBOX` and `_R_`, so a bridge there would
/// refuse all their reply subjects as its own.
pub(crate) fn subject_prefix(text: &str) -> Result<String, String> {
    let is_for_replies = matches!(text.split('.').next(), Some("_INBOX" | "_R_"));
    let prefix = checked(
        text,
        !is_for_replies,
        "expected a prefix other than `_INBOX` and `_R_`, which are for replies",
    )?;
    // The subjects of a bridge with the prefix `a2a.gw` would be those of gateways to a bridge with the prefix `a2a`.
    let is_for_gateways = text.split('.').next_back() == Some("gw");
    checked(&prefix, !is_for_gateways, "expected a prefix that does not end in `gw`, which is for gateways")
        .and_then(|prefix| inbox_prefix(&prefix))
}

pub(crate) fn inbox_prefix(text: &str) -> Result<String, String> {
    let token = |token: &str| {
        !token.is_empty()
            && token.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
    };
    checked(
        text,
        text.len() <= 128 && text.split('.').all(token),
        "expected tokens of letters, digits, `_` and `-` with dots between them, at most 128 characters",
    )
}

pub(crate) fn subject_pattern(text: &str) -> Result<String, String> {
    let last = text.split('.').count().saturating_sub(1);
    let token = |(index, token): (usize, &str)| match token {
        "" => false,
        "*" => true,
        ">" => index == last,
        _ => !token.chars().any(|c| c.is_whitespace() || c.is_control() || matches!(c, '*' | '>')),
    };
    checked(
        text,
        text.split('.').enumerate().all(token),
        "expected a subject pattern such as `_INBOX.>`: `*` is a whole token, and `>` comes last",
    )
}

pub(super) fn owner(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-');
    let is_valid = (1..=64).contains(&text.len()) && text.bytes().all(plain);
    checked(text, is_valid, "expected 1 to 64 lower-case letters, digits, `_` and `-`")
}

pub(super) fn card_path(text: &str) -> Result<String, String> {
    // `//host` and `/\\host` name another host, which would receive this agent's token.
    let is_host = text.get(1..).is_some_and(|rest| rest.starts_with(['/', '\\']));
    let has_blank = text.chars().any(|c| c.is_whitespace() || c.is_control());
    checked(text, text.starts_with('/') && !is_host && !has_blank, "expected a path that starts with one `/`")
}

/// Splits a command line like a shell does, without a shell.
pub(super) fn command_line(text: &str) -> Result<Vec<String>, String> {
    command(shlex::split(text).ok_or("a quote in this command is not closed")?)
}

pub(super) fn command(words: Vec<String>) -> Result<Vec<String>, String> {
    if words.first().is_none_or(|program| program.trim().is_empty()) {
        Err("expected a program and its arguments".into())
    } else if words.iter().any(|word| word.contains('\0')) {
        Err("the command must not contain NUL characters".into())
    } else {
        Ok(words)
    }
}

pub(super) fn env_value(text: &str) -> Result<String, String> {
    checked(text, !text.contains('\0'), "the value must not contain NUL characters")
}

pub(super) fn is_env_name(name: &str) -> bool {
    !name.is_empty() && !name.contains(['=', '\0'])
}

pub(super) fn bearer_token(text: &str) -> Result<String, String> {
    let is_valid = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    checked(text, is_valid, "expected a token of ASCII characters without spaces and line breaks")
}

pub(super) fn header_value(text: &str) -> Result<String, String> {
    let is_valid = text.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t'));
    checked(text, is_valid, "expected a header value of ASCII characters without line breaks")
}

pub(super) fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected an address with a port, such as `127.0.0.1:9464`".into())
}

pub(super) fn user_name(text: &str) -> Result<String, String> {
    // RFC 7617, section 2: the colon separates user name and password.
    if text.contains(':') { Err("the user name must not contain `:`".into()) } else { non_empty(text) }
}

pub(super) fn api_key_name(text: &str) -> Result<String, String> {
    header_name(text).map(|()| text.to_owned()).map_err(|reason| format!("this name {reason}"))
}

/// Says why a header cannot be set, if it cannot.
pub(super) fn header_name(name: &str) -> Result<(), &'static str> {
    // RFC 9110 section 5.6.2: the characters of a token; 7.6.1: headers of one connection only.
    const MARKS: &str = "!#$%&'*+-.^_`|~";
    const RESERVED: &str = "connection content-length content-type host keep-alive proxy-authenticate \
                            proxy-authorization proxy-connection te trailer transfer-encoding upgrade";
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || MARKS.contains(c)) {
        Err("is not a valid header name")
    } else if RESERVED.split(' ').any(|reserved| reserved.eq_ignore_ascii_case(name)) {
        Err("is set by the bridge itself")
    } else {
        Ok(())
    }
}
