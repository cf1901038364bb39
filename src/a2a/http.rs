//! HTTP to agents: with TLS through reqwest, without TLS through [connection pools](pool) of our own.
//!
//! Nearly all agents that a bridge starts listen on the loopback interface without TLS, where reqwest costs more than
//! the request itself.

mod file_body;
mod pace;
mod peer_check;
mod pool;
mod received_files;

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::Uri;
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap, HeaderValue, USER_AGENT,
};
use reqwest::{Method, StatusCode, Version};
use url::Url;

use super::client::ClientError;
use crate::files::CallFiles;
use crate::memory::{MemoryAccount, MemoryCharge, OutOfMemory};
pub(super) use file_body::{FileBody, RequestBody};
use pace::{OpenRequest, Pace};
pub(crate) use peer_check::{PeerCheck, Verdict};
use pool::{ConnectionPool, ConnectionPools, PooledBody};
use received_files::FileFilter;
pub(super) use received_files::received_file;

const USER_AGENT_VALUE: &str = concat!("a2a-bridge/", env!("CARGO_PKG_VERSION"));
/// The bridge does not decompress. Without this header servers may compress.
const NO_COMPRESSION: HeaderValue = HeaderValue::from_static("identity");
const COMPRESSIONS: [&str; 7] = ["gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd"];
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection without TLS is kept for the next request. A request on a connection that the server is just
/// closing has an unknown outcome, and servers close idle connections after five seconds, two (gunicorn) or even one.
/// Half of that leaves time for a slow machine, and a new connection costs little where requests are that rare.
const IDLE_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a connection with TLS is kept. A new one costs more, and the server is usually a proxy that keeps
/// connections for a minute.
const IDLE_TIMEOUT_TLS: Duration = Duration::from_secs(4);

/// How much an agent may send over HTTP/2 before the bridge reads it. The defaults are megabytes for each response, which
/// no budget counts.
const HTTP2_STREAM_WINDOW: u32 = 256 << 10;
const HTTP2_CONNECTION_WINDOW: u32 = 1 << 20;

/// A task that reads without waiting yields after this much work, in bytes.
const YIELD_INTERVAL: usize = 128 << 10;
/// The work on a chunk in addition to its bytes: an agent may send each byte in a chunk of its own.
const CHUNK_COST: usize = 128;
/// The byte order mark of UTF-8.
const BOM: &[u8] = b"\xEF\xBB\xBF";

pub(super) type HttpError = Box<dyn std::error::Error + Send + Sync>;

/// The client for tokens and agents with TLS. It follows no redirects and reads no proxy variables: credentials
/// are only for the address that they are configured for.
pub(super) fn builder() -> reqwest::ClientBuilder {
    reqwest::Client::builder()
        .user_agent(USER_AGENT_VALUE)
        .default_headers(HeaderMap::from_iter([(ACCEPT_ENCODING, NO_COMPRESSION)]))
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_TIMEOUT_TLS)
        .http2_initial_stream_window_size(HTTP2_STREAM_WINDOW)
        .http2_initial_connection_window_size(HTTP2_CONNECTION_WINDOW)
        .tcp_nodelay(true)
}

/// Sends all requests to an agent. Clones share their connections.
#[derive(Debug, Clone)]
pub struct HttpClient {
    /// For tokens and agents with TLS.
    pub(super) reqwest: reqwest::Client,
    /// The same, but each request has a connection of its own.
    without_reuse: reqwest::Client,
    /// For agents without TLS.
    pools: Arc<ConnectionPools>,
    pace: Arc<Pace>,
}

impl HttpClient {
    pub(super) fn new() -> Result<Self, reqwest::Error> {
        let without_reuse = builder().pool_max_idle_per_host(0).build()?;
        let reqwest = builder().build()?;
        Ok(Self { reqwest, without_reuse, pools: Arc::default(), pace: Arc::default() })
    }

    /// A client for another agent.
    pub(super) fn for_another_agent(&self) -> Self {
        Self { pace: Arc::new(self.pace.of_another()), ..self.clone() }
    }

    /// A client with the settings for TLS that `builder` has. It shares everything else with this one.
    pub(super) fn with_tls<E: From<reqwest::Error>>(
        &self,
        builder: impl Fn() -> Result<reqwest::ClientBuilder, E>,
    ) -> Result<Self, E> {
        let without_reuse = builder()?.pool_max_idle_per_host(0).build()?;
        Ok(Self { reqwest: builder()?.build()?, without_reuse, ..self.clone() })
    }

    /// A client that checks new connections without TLS, and shares them with no other client.
    pub(crate) fn with_peer_check(&self, check: Arc<dyn PeerCheck>) -> Self {
        Self { pools: Arc::new(ConnectionPools::checked(check)), ..self.clone() }
    }
}

#[derive(Debug, Clone)]
pub(super) struct HttpEndpoint {
    pub(super) url: Url,
    transport: Transport,
    pace: Arc<Pace>,
}

#[derive(Debug, Clone)]
enum Transport {
    Pooled { pool: Arc<ConnectionPool>, target: Uri },
    Reqwest { client: reqwest::Client, without_reuse: reqwest::Client },
}

impl HttpEndpoint {
    pub(super) fn new(url: Url, http: &HttpClient) -> Self {
        let transport = match (http.pools.pool(&url), pool::target(&url)) {
            (Some(pool), Ok(target)) => Transport::Pooled { pool, target },
            _ => {
                let (client, without_reuse) = (http.reqwest.clone(), http.without_reuse.clone());
                Transport::Reqwest { client, without_reuse }
            }
        };
        Self { url, transport, pace: Arc::clone(&http.pace) }
    }

    /// An endpoint for small responses. A request to it does not mean that the agent is in use.
    pub(super) fn for_card(url: Url, http: &HttpClient) -> Self {
        Self { pace: Arc::default(), ..Self::new(url, http) }
    }

    /// Sends a request to `url`, by default the endpoint's own. Unless it `may_reuse` a connection, the response
    /// certainly belongs to this request.
    pub(super) async fn send(
        &self,
        method: Method,
        url: Option<Url>,
        headers: HeaderMap,
        body: Option<RequestBody>,
        may_reuse: bool,
    ) -> Result<HttpResponse, ClientError> {
        let failure = body.as_ref().map(RequestBody::failure);
        let sent = self.send_body(method, url, headers, body, may_reuse).await;
        sent.map_err(|error| match failure.and_then(|failure| failure.take()) {
            Some(failure) => ClientError::NotSent(failure),
            None => error,
        })
    }

    async fn send_body(
        &self,
        method: Method,
        url: Option<Url>,
        mut headers: HeaderMap,
        body: Option<RequestBody>,
        may_reuse: bool,
    ) -> Result<HttpResponse, ClientError> {
        let open = self.pace.begin();
        let response = match &self.transport {
            Transport::Pooled { pool, target } => {
                let target = match url {
                    Some(url) => pool::target(&url).map_err(ClientError::Unreachable)?,
                    None => target.clone(),
                };
                headers.entry(USER_AGENT).or_insert(HeaderValue::from_static(USER_AGENT_VALUE));
                headers.entry(ACCEPT_ENCODING).or_insert(NO_COMPRESSION);
                pool.send(method, target, headers, body, may_reuse).await?
            }
            Transport::Reqwest { client, without_reuse } => {
                let mut request = reqwest::Request::new(method, url.unwrap_or_else(|| self.url.clone()));
                let client = if may_reuse { client } else { without_reuse };
                *request.headers_mut() = headers;
                *request.body_mut() = body.map(|body| match body {
                    RequestBody::Whole(bytes) => bytes.unwrap_or_default().into(),
                    files @ RequestBody::WithFiles(_) => reqwest::Body::wrap(files),
                });
                let sent = Box::pin(client.execute(request)).await.map_err(connection_error)?;
                // HTTP/2 assigns responses to requests itself.
                let may_be_stray = may_reuse && sent.version() < Version::HTTP_2;
                HttpResponse { may_be_stray, ..sent.into() }
            }
        };
        Ok(HttpResponse { open: Some(open), ..response })
    }
}

/// The status and headers of a response, and its body as it arrives.
#[derive(Debug)]
pub(super) struct HttpResponse {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    body: HttpBody,
    /// Whether it came on a connection that was used before, so that it may belong to an earlier request.
    pub(super) may_be_stray: bool,
    /// The work on chunks since the task last yielded, in bytes.
    since_yield: usize,
    /// Not for tokens.
    open: Option<OpenRequest>,
    /// Moves large files to the store.
    filter: Option<Box<FileFilter>>,
}

#[derive(Debug)]
enum HttpBody {
    Pooled(PooledBody),
    Reqwest(reqwest::Response),
}

impl From<reqwest::Response> for HttpResponse {
    fn from(mut response: reqwest::Response) -> Self {
        let headers = std::mem::take(response.headers_mut());
        Self {
            status: response.status(),
            headers,
            body: HttpBody::Reqwest(response),
            may_be_stray: false,
            since_yield: 0,
            open: None,
            filter: None,
        }
    }
}

impl HttpResponse {
    /// Fails if the body is compressed. Any other value passes: some servers write `utf-8` there.
    pub(super) fn check_encoding(&self) -> Result<(), ClientError> {
        for value in self.headers.get_all(CONTENT_ENCODING) {
            let value = String::from_utf8_lossy(value.as_bytes());
            let encoding = value.trim();
            let is_compression = |name: &str| COMPRESSIONS.iter().any(|one| one.eq_ignore_ascii_case(name));
            if encoding.split(',').map(str::trim).any(is_compression) {
                return Err(ClientError::Compressed { encoding: crate::text::shorten(encoding, 80) });
            }
        }
        Ok(())
    }

    /// Moves large files to the store while the body is read, if the call has a store.
    pub(super) fn store_files(&mut self) {
        let Some(files) = CallFiles::current().filter(|files| files.stores_received()) else { return };
        // A short body has no large file.
        if self.content_length().is_none_or(|length| length > files.max_inline as u64) {
            self.filter = Some(Box::new(FileFilter::new(files)));
        }
    }

    fn content_length(&self) -> Option<u64> {
        self.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok())
    }

    /// The next bytes of the body, in which markers may be in place of files; `None` at its end. Cancel-safe.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        if self.filter.is_none() {
            return self.raw_chunk().await;
        }
        Box::pin(self.filtered_chunk()).await
    }

    async fn filtered_chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            if let Some(filter) = &mut self.filter
                && let Some(output) = filter.next().await?
            {
                return Ok(Some(output));
            }
            let chunk = self.raw_chunk().await?;
            match (&mut self.filter, chunk) {
                (Some(filter), Some(chunk)) => filter.push(chunk),
                (Some(filter), None) => return Ok(filter.end()),
                (None, chunk) => return Ok(chunk),
            }
        }
    }

    /// The next bytes of the body; `None` at its end. Yields now and then: an agent that sends faster than the bridge
    /// reads must not keep other calls waiting.
    async fn raw_chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        if self.since_yield > YIELD_INTERVAL {
            let work = std::mem::take(&mut self.since_yield);
            match &self.open {
                // Boxed, because it is rare.
                Some(open) => Box::pin(open.wait(work)).await,
                None => tokio::task::yield_now().await,
            }
        }
        let chunk = match &mut self.body {
            HttpBody::Pooled(body) => body.chunk().await?,
            HttpBody::Reqwest(response) => {
                let chunk = response.chunk().await;
                chunk.map_err(|error| ClientError::Broken(error.without_url().into()))?
            }
        };
        self.since_yield += CHUNK_COST + chunk.as_ref().map_or(0, Bytes::len);
        Ok(chunk)
    }

    /// Keeps the connection for the next request, if the body is complete. Otherwise it is closed.
    pub(super) fn keep_connection(&mut self) {
        match &mut self.body {
            HttpBody::Pooled(body) => body.keep_connection(),
            // The client has its own pool.
            HttpBody::Reqwest(_) => {}
        }
    }

    /// A small body that is not the response to a call: a card, a token.
    pub(super) async fn small_body(mut self, limit: u64) -> Result<Bytes, ClientError> {
        self.read(limit, |_| Ok(())).await
    }

    /// The body, up to `limit` bytes. `charge` covers it while it is read and afterwards.
    pub(super) async fn body(
        &mut self,
        limit: u64,
        memory: &Arc<MemoryAccount>,
        charge: &mut Option<MemoryCharge>,
    ) -> Result<Bytes, ClientError> {
        self.read(limit, |allocated| memory.cover(charge, allocated)).await
    }

    async fn read(
        &mut self,
        limit: u64,
        mut cover: impl FnMut(usize) -> Result<(), OutOfMemory>,
    ) -> Result<Bytes, ClientError> {
        self.check_encoding()?;
        let too_large = || ClientError::TooLarge { limit };
        // Files that go to the store have limits of their own.
        if self.filter.is_none() && self.content_length().is_some_and(|length| length > limit) {
            return Err(too_large());
        }
        let mut body = JoinedBytes::default();
        while let Some(chunk) = self.chunk().await? {
            if (body.len() + chunk.len()) as u64 > limit {
                return Err(too_large());
            }
            body.push(b"", chunk);
            cover(body.allocated())?;
        }
        let body = body.take();
        // Some agents put it before their JSON, and JSON parsers reject it.
        Ok(if body.starts_with(BOM) { body.slice(BOM.len()..) } else { body })
    }
}

/// Pieces of a body or an event, joined. Nearly always there is one piece, which needs no copy.
#[derive(Debug, Default)]
pub(super) enum JoinedBytes {
    #[default]
    Nothing,
    One(Bytes),
    Many(BytesMut),
}

impl JoinedBytes {
    pub(super) fn push(&mut self, separator: &[u8], piece: Bytes) {
        let mut all = match std::mem::take(self) {
            Self::Nothing => {
                *self = Self::One(piece);
                return;
            }
            Self::One(first) => BytesMut::from(first.as_ref()),
            Self::Many(all) => all,
        };
        all.extend_from_slice(separator);
        all.extend_from_slice(&piece);
        *self = Self::Many(all);
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::One(piece) => piece.len(),
            Self::Many(all) => all.len(),
        }
    }

    /// The memory that it takes, in bytes.
    pub(super) fn allocated(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::One(piece) => piece.len(),
            Self::Many(all) => all.capacity(),
        }
    }

    pub(super) fn take(&mut self) -> Bytes {
        match std::mem::take(self) {
            Self::Nothing => Bytes::new(),
            Self::One(piece) => piece,
            Self::Many(all) => all.freeze(),
        }
    }
}

/// Distinguishes a request that was never sent from one that may have arrived.
pub(super) fn connection_error(error: reqwest::Error) -> ClientError {
    // The URL may contain private data, and every message names the agent anyway.
    let error = error.without_url();
    if error.is_connect() {
        return ClientError::Unreachable(root_cause(&error));
    }
    if error.is_builder() { ClientError::Unreachable(error.into()) } else { broken(error) }
}

/// The error of a request that may have arrived.
fn broken(error: impl Into<HttpError>) -> ClientError {
    let error = error.into();
    let mut causes =
        std::iter::successors(Some(&*error as &(dyn std::error::Error + 'static)), |e| e.source());
    let is_large = causes.any(|e| e.downcast_ref().is_some_and(hyper::Error::is_parse_too_large));
    if is_large { ClientError::LargeHeaders } else { ClientError::Broken(error) }
}

/// The innermost error; those around it only say what was attempted.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> HttpError {
    if let Some(source) = error.source() {
        return root_cause(source);
    }
    // Keeps the code of the system.
    let code = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
    code.map_or_else(|| error.to_string().into(), |code| std::io::Error::from_raw_os_error(code).into())
}
