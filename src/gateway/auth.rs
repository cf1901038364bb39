//! Who uses the gateway: tokens, principals, and what browsers may do.
//!
//! | rule | against |
//! | --- | --- |
//! | without tokens, the gateway listens on loopback, and `Host` must be a loopback name | web pages that rebind their own name to 127.0.0.1 |
//! | a request that changes something needs `Content-Type: application/json` | forms of other web pages, which browsers send without asking |
//! | and, if it has an `Origin`, an allowed one | scripts of other web pages |
//! | the cookie is `HttpOnly` and `SameSite=Strict` | scripts that read it; other web pages that use it |
//! | tokens are compared as SHA-256, all of them, in constant time | guessing a token byte by byte |

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::http::{HeaderMap, HeaderValue, header};
use sha2::{Digest as _, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use url::{Host, Url};

use super::body::BodyUsage;
use super::error::{HttpError, HttpResult};
use super::rate::{FailureLimit, RateLimit};
use crate::config::{GatewayConfig, GatewayRole, GatewayToken};

/// The principal of a gateway without tokens.
const LOCAL: &str = "local";
/// Failed attempts to authenticate a second, per client.
const MAX_FAILURES: usize = 20;
/// Maximum bytes of a token.
const MAX_TOKEN: usize = 4096;
const COOKIE: &str = "a2a_token";
/// Browsers accept a cookie of such a name only with `Secure`, from this host, for all paths.
const SECURE_COOKIE: &str = "__Host-a2a_token";

/// Someone who uses the gateway.
#[derive(Debug)]
pub(super) struct Principal {
    /// As bridges see it, in `A2A-Caller`.
    pub(super) name: HeaderText,
    pub(super) role: GatewayRole,
    /// `None` for all.
    agents: Option<Vec<String>>,
    rate: Option<RateLimit>,
    streams: Arc<Semaphore>,
    /// The bodies of its requests.
    pub(super) bodies: BodyUsage,
}

/// The name of a principal, and the same as the value of a NATS header.
#[derive(Debug)]
pub(super) struct HeaderText {
    pub(super) text: String,
    pub(super) value: async_nats::HeaderValue,
}

impl Principal {
    fn new(token: &GatewayToken, streams: Arc<Semaphore>) -> Self {
        Self {
            name: HeaderText::new(&token.name),
            role: token.role,
            agents: token.agents.clone(),
            rate: token.rate.map(RateLimit::new),
            streams,
            bodies: BodyUsage::default(),
        }
    }

    fn local(streams: usize) -> Self {
        Self {
            name: HeaderText::new(LOCAL),
            role: GatewayRole::Operator,
            agents: None,
            rate: None,
            streams: Arc::new(Semaphore::new(streams)),
            bodies: BodyUsage::default(),
        }
    }

    pub(super) fn may_use(&self, agent: &str) -> bool {
        self.agents.as_ref().is_none_or(|agents| agents.iter().any(|allowed| allowed == agent))
    }

    /// Admits one request.
    pub(super) fn admit(&self) -> HttpResult<()> {
        let Some(rate) = &self.rate else { return Ok(()) };
        rate.admit(Instant::now()).map_err(|wait| {
            let seconds = wait.as_secs() + 1;
            HttpError::too_many_requests("the token's `rate` of requests is exceeded; send fewer", seconds)
        })
    }

    /// A place for an event stream, until it is dropped.
    pub(super) fn stream(&self) -> HttpResult<OwnedSemaphorePermit> {
        Arc::clone(&self.streams).try_acquire_owned().map_err(|_| {
            HttpError::too_many_requests("too many event streams at the same time; close some of them", 1)
        })
    }
}

impl HeaderText {
    fn new(text: &str) -> Self {
        let value = text.parse().expect("the configuration refuses names with line breaks");
        Self { text: text.to_owned(), value }
    }
}

/// The rules of the current configuration.
#[derive(Debug)]
pub(super) struct AuthRules {
    tokens: Vec<([u8; 32], Arc<Principal>)>,
    /// Everyone, if there are no tokens.
    local: Option<Arc<Principal>>,
    allowed_origins: Vec<String>,
    is_tls: bool,
    failures: FailureLimit,
}

impl AuthRules {
    pub(super) fn new(config: &GatewayConfig) -> Self {
        let mut streams: Vec<(&str, Arc<Semaphore>)> = Vec::new();
        let mut tokens = Vec::new();
        for token in &config.tokens {
            // Several tokens of one principal share its places.
            let places = match streams.iter().find(|(name, _)| *name == token.name) {
                Some((_, places)) => Arc::clone(places),
                None => {
                    let places = Arc::new(Semaphore::new(config.limits.streams));
                    streams.push((&token.name, Arc::clone(&places)));
                    places
                }
            };
            tokens.push((token.sha256, Arc::new(Principal::new(token, places))));
        }
        Self {
            local: tokens.is_empty().then(|| Arc::new(Principal::local(config.limits.streams))),
            tokens,
            allowed_origins: config.allowed_origins.clone(),
            is_tls: config.tls.is_some(),
            failures: FailureLimit::new(MAX_FAILURES),
        }
    }

    pub(super) fn allowed_origins(&self) -> &[String] {
        &self.allowed_origins
    }

    /// Who sends a request with these headers.
    pub(super) fn authenticate(&self, headers: &HeaderMap, client: IpAddr) -> HttpResult<Arc<Principal>> {
        if let Some(local) = &self.local {
            return Ok(Arc::clone(local));
        }
        let token = match headers.get(header::AUTHORIZATION) {
            Some(value) => bearer(value),
            None => self.cookie(headers),
        };
        let Some(token) = token else {
            let message =
                "this gateway needs a token: send `Authorization: Bearer …`, or `POST /api/v1/login` first";
            return Err(HttpError::unauthorized(message));
        };
        self.find(token, client)
    }

    /// The holder of a token.
    fn find(&self, token: &str, client: IpAddr) -> HttpResult<Arc<Principal>> {
        let digest: [u8; 32] = Sha256::digest(token).into();
        let mut found = None;
        for (expected, principal) in &self.tokens {
            if is_equal(expected, &digest) {
                found = Some(principal);
            }
        }
        if let Some(principal) = found {
            return Ok(Arc::clone(principal));
        }
        match self.failures.add(client, Instant::now()) {
            Ok(()) => Err(HttpError::unauthorized("the token is not valid")),
            Err(wait) => {
                let message = "too many attempts with invalid tokens";
                Err(HttpError::too_many_requests(message, wait.as_secs() + 1))
            }
        }
    }

    /// The cookie for a browser that has sent a token.
    pub(super) fn login(&self, token: &str, client: IpAddr) -> HttpResult<(Arc<Principal>, HeaderValue)> {
        if let Some(local) = &self.local {
            let none = format!("{COOKIE}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0");
            return Ok((Arc::clone(local), header_value(&none)?));
        }
        let is_plain = token.len() <= MAX_TOKEN && token.bytes().all(is_cookie_byte);
        if !is_plain {
            // No such token can be in a cookie.
            return Err(HttpError::unauthorized("the token is not valid"));
        }
        let principal = self.find(token, client)?;
        let (name, secure) = if self.is_tls { (SECURE_COOKIE, "; Secure") } else { (COOKIE, "") };
        let cookie = format!("{name}={token}; Path=/; HttpOnly; SameSite=Strict{secure}");
        Ok((principal, header_value(&cookie)?))
    }

    fn cookie<'h>(&self, headers: &'h HeaderMap) -> Option<&'h str> {
        let wanted = if self.is_tls { SECURE_COOKIE } else { COOKIE };
        let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut pairs =
            cookies.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
        pairs
            .find(|(name, _)| *name == wanted)
            .map(|(_, token)| token)
            .filter(|token| token.len() <= MAX_TOKEN)
    }

    /// Refuses requests of web pages that have rebound their own name to this machine. With tokens, they have none.
    pub(super) fn check_host(&self, host: Option<&str>) -> HttpResult<()> {
        if self.local.is_none() || host.is_some_and(is_loopback) {
            return Ok(());
        }
        Err(HttpError::forbidden(
            "a gateway without tokens serves this machine only: use `localhost` or `127.0.0.1` as host",
        ))
    }

    /// Refuses requests that a browser sends for another web page.
    pub(super) fn check_origin(&self, headers: &HeaderMap, host: Option<&str>) -> HttpResult<()> {
        let refused = || {
            Err(HttpError::forbidden("this web page may not use the gateway; see `gateway.allowed_origins`"))
        };
        let Some(origin) = headers.get(header::ORIGIN) else {
            // Browsers always send `Origin` with these requests. Old ones may send this instead.
            let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
            return if matches!(site, Some(b"cross-site" | b"same-site")) { refused() } else { Ok(()) };
        };
        let Ok(origin) = origin.to_str() else { return refused() };
        if self.allowed_origins.iter().any(|allowed| allowed == origin) || is_own_origin(origin, host) {
            return Ok(());
        }
        refused()
    }
}

/// Whether an origin is that of the gateway. The scheme may differ behind a proxy that ends TLS.
fn is_own_origin(origin: &str, host: Option<&str>) -> bool {
    let Some((_, authority)) = origin.split_once("://") else { return false };
    host.is_some_and(|host| !host.is_empty() && host.eq_ignore_ascii_case(authority))
}

/// Whether the value of `Host` names this machine.
fn is_loopback(host: &str) -> bool {
    let Ok(url) = Url::parse(&format!("http://{host}/")) else { return false };
    let is_plain =
        url.username().is_empty() && url.password().is_none() && url.path() == "/" && url.query().is_none();
    is_plain
        && match url.host() {
            Some(Host::Domain(name)) => name.trim_end_matches('.') == "localhost",
            Some(Host::Ipv4(address)) => address.is_loopback(),
            Some(Host::Ipv6(address)) => address.is_loopback(),
            None => false,
        }
}

fn bearer(value: &HeaderValue) -> Option<&str> {
    let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && token.len() <= MAX_TOKEN).then_some(token)
}

fn header_value(text: &str) -> HttpResult<HeaderValue> {
    HeaderValue::from_str(text).map_err(|_| HttpError::unauthorized("the token is not valid"))
}

/// RFC 6265, section 4.1.1.
fn is_cookie_byte(byte: u8) -> bool {
    matches!(byte, b'!' | b'#'..=b'+' | b'-'..=b':' | b'<'..=b'[' | b']'..=b'~')
}

/// Compares in a time that does not depend on the content.
fn is_equal(one: &[u8; 32], other: &[u8; 32]) -> bool {
    std::hint::black_box(one.iter().zip(other).fold(0, |differences, (a, b)| differences | (a ^ b))) == 0
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("localhost", true)]
    #[case("LOCALHOST:8080", true)]
    #[case("127.0.0.1:8080", true)]
    #[case("127.1.2.3", true)]
    #[case("[::1]:8080", true)]
    #[case("evil.example", false)]
    #[case("localhost.evil.example", false)]
    #[case("127.0.0.1.evil.example", false)]
    #[case("localhost@evil.example", false)]
    #[case("evil.example/localhost", false)]
    #[case("evil.example?localhost", false)]
    #[case("10.0.0.1", false)]
    #[case("", false)]
    fn only_loopback_names_are_this_machine(#[case] host: &str, #[case] is_local: bool) {
        assert_eq!(is_loopback(host), is_local);
        assert_eq!(AuthRules::new(&GatewayConfig::default()).check_host(Some(host)).is_ok(), is_local);
    }

    #[rstest]
    #[case(&[], true)]
    #[case(&[("origin", "http://gw:8080")], true)]
    #[case(&[("origin", "https://GW:8080")], true)]
    #[case(&[("origin", "https://app.example.org")], true)]
    #[case(&[("origin", "https://app.example.org.evil.example")], false)]
    #[case(&[("origin", "http://gw:8081")], false)]
    #[case(&[("origin", "null")], false)]
    #[case(&[("origin", "gw:8080")], false)]
    #[case(&[("sec-fetch-site", "cross-site")], false)]
    #[case(&[("sec-fetch-site", "same-origin")], true)]
    fn other_web_pages_are_refused(#[case] headers: &[(&'static str, &str)], #[case] is_allowed: bool) {
        let allowed_origins = vec!["https://app.example.org".to_owned()];
        let rules = AuthRules::new(&GatewayConfig { allowed_origins, ..GatewayConfig::default() });
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        assert_eq!(rules.check_origin(&map, Some("gw:8080")).is_ok(), is_allowed, "{headers:?}");
    }
}
