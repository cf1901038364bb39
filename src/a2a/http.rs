//! HTTP to one agent: with TLS through the common client, without it on connections of our own.
//!
//! Nearly all agents that a bridge starts listen on the loopback without TLS, and there the common
//! client costs more than the call: see [`plain`].

mod plain;

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::Uri;
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap, HeaderValue, USER_AGENT,
};
use reqwest::{Method, StatusCode};
use url::Url;

use super::client::ClientError;
use plain::{ConnectionPool, ConnectionPools};

/// What the bridge calls itself.
const NAME: &str = concat!("a2a-bridge/", env!("CARGO_PKG_VERSION"));
/// Compressed answers are not read. To say nothing of it would allow them.
const ENCODING: HeaderValue = HeaderValue::from_static("identity");
/// What no body can be read through.
const COMPRESSIONS: [&str; 7] = ["gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd"];
/// How long it may take to reach an agent.
const CONNECT: Duration = Duration::from_secs(10);
/// How long a connection is kept for the next call. A call on one that is just being closed has an
/// unknown outcome, and servers close theirs after five seconds, two (gunicorn) or even one: half of
/// that leaves time for a slow machine, and a new connection costs little to those who call so rarely.
const IDLE: Duration = Duration::from_millis(500);
/// The same over TLS, where a new connection costs more, and mostly proxies answer, which keep theirs for
/// a minute.
const IDLE_TLS: Duration = Duration::from_secs(4);

/// The byte order mark of UTF-8.
const BOM: &[u8] = b"\xEF\xBB\xBF";

/// Why there is no answer, or no more of it.
pub(super) type HttpError = Box<dyn std::error::Error + Send + Sync>;

/// The client for cards, tokens and agents behind TLS. Redirects are not followed and proxy variables
/// not read: credentials belong to the address that they were configured for.
pub(super) fn builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .user_agent(NAME)
        .default_headers(HeaderMap::from_iter([(ACCEPT_ENCODING, ENCODING)]))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(CONNECT)
        .pool_idle_timeout(IDLE_TLS)
        .tcp_nodelay(true)
}

/// What agents are called through; clones share their connections.
#[derive(Debug, Clone)]
pub struct HttpClient {
    /// For cards, tokens and agents behind TLS.
    pub(super) reqwest: reqwest::Client,
    /// For agents without TLS.
    pub(super) pools: Arc<ConnectionPools>,
}

impl HttpClient {
    pub(super) fn with_tls(&self, reqwest: reqwest::Client) -> Self {
        Self { reqwest, pools: Arc::clone(&self.pools) }
    }
}

/// The way to one endpoint.
#[derive(Debug, Clone)]
pub(super) struct Endpoint {
    url: Url,
    transport: Transport,
}

#[derive(Debug, Clone)]
enum Transport {
    Plain { pool: Arc<ConnectionPool>, target: Uri },
    Common(reqwest::Client),
}

impl Endpoint {
    pub(super) fn new(url: Url, http: &HttpClient) -> Self {
        let transport = match (http.pools.pool(&url), plain::target(&url)) {
            (Some(pool), Ok(target)) => Transport::Plain { pool, target },
            _ => Transport::Common(http.reqwest.clone()),
        };
        Self { url, transport }
    }

    pub(super) fn url(&self) -> &Url {
        &self.url
    }

    /// Sends a request, to `url` where it is not the endpoint itself.
    pub(super) async fn send(
        &self,
        method: Method,
        url: Option<Url>,
        mut headers: HeaderMap,
        body: Option<Bytes>,
    ) -> Result<Response, ClientError> {
        match &self.transport {
            Transport::Plain { pool, target } => {
                let target = match url {
                    Some(url) => plain::target(&url).map_err(ClientError::Unreachable)?,
                    None => target.clone(),
                };
                headers.entry(USER_AGENT).or_insert(HeaderValue::from_static(NAME));
                headers.entry(ACCEPT_ENCODING).or_insert(ENCODING);
                pool.send(method, target, headers, body).await.map(Response::Plain)
            }
            Transport::Common(client) => {
                let mut request = reqwest::Request::new(method, url.unwrap_or_else(|| self.url.clone()));
                *request.headers_mut() = headers;
                *request.body_mut() = body.map(Into::into);
                let sent = Box::pin(client.execute(request)).await;
                sent.map(Response::Common).map_err(connection_error)
            }
        }
    }
}

/// The head of an answer, and its body as it comes.
#[derive(Debug)]
pub(super) enum Response {
    Plain(plain::Response),
    Common(reqwest::Response),
}

impl Response {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Plain(response) => response.status(),
            Self::Common(response) => response.status(),
        }
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        match self {
            Self::Plain(response) => response.headers(),
            Self::Common(response) => response.headers(),
        }
    }

    /// Makes sure that the body can be read as it comes. What is no compression is let pass: some servers
    /// write `utf-8` there.
    pub(super) fn check_encoding(&self) -> Result<(), ClientError> {
        for value in self.headers().get_all(CONTENT_ENCODING) {
            let value = String::from_utf8_lossy(value.as_bytes());
            let encoding = value.trim();
            let is_compression = |name: &str| COMPRESSIONS.iter().any(|one| one.eq_ignore_ascii_case(name));
            if encoding.split(',').map(str::trim).any(is_compression) {
                return Err(ClientError::Compressed { encoding: crate::text::shorten(encoding, 80) });
            }
        }
        Ok(())
    }

    /// The next bytes of the body; `None` at its end.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        match self {
            Self::Plain(response) => response.chunk().await,
            Self::Common(response) => {
                response.chunk().await.map_err(|error| ClientError::Broken(error.without_url().into()))
            }
        }
    }

    /// The body, up to `limit` bytes.
    pub(super) async fn body(mut self, limit: u64) -> Result<Bytes, ClientError> {
        self.check_encoding()?;
        let too_large = || ClientError::TooLarge { limit };
        let length = self.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: u64| length > limit) {
            return Err(too_large());
        }
        let mut first: Option<Bytes> = None;
        let mut rest = BytesMut::new();
        while let Some(chunk) = self.chunk().await? {
            let so_far = first.as_ref().map_or(0, Bytes::len) + rest.len();
            if (so_far + chunk.len()) as u64 > limit {
                return Err(too_large());
            }
            // Most answers are one chunk, which needs no copy.
            match &first {
                None => first = Some(chunk),
                Some(begin) => {
                    if rest.is_empty() {
                        rest.extend_from_slice(begin);
                        first = Some(Bytes::new());
                    }
                    rest.extend_from_slice(&chunk);
                }
            }
        }
        let body = if rest.is_empty() { first.unwrap_or_default() } else { rest.freeze() };
        // Some put it before their JSON, where no reader of JSON takes it.
        Ok(if body.starts_with(BOM) { body.slice(BOM.len()..) } else { body })
    }
}

/// Tells a request that never left from one that may have arrived.
pub(super) fn connection_error(error: reqwest::Error) -> ClientError {
    // The URL may hold what an operator considers private, and every message names the agent anyway.
    let error = error.without_url();
    if error.is_connect() {
        return ClientError::Unreachable(cause(&error).into());
    }
    if error.is_builder() {
        ClientError::Unreachable(error.into())
    } else {
        ClientError::Broken(error.into())
    }
}

/// What is at the bottom of an error; the layers above only say that something was tried.
fn cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), cause)
}
