//! HTTP/1.1 without TLS, where the call itself polls its connection.
//!
//! The usual way is a task for each connection, and a channel from the call to it and another one back:
//! two wake-ups, often on the other core, for each call, and two tasks for each call in flight. Here the
//! one who waits for the answer does the reading and writing. `docs/src/performance.md` has the figures.

mod socket;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::future::{Future as _, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http_body_util::{BodyExt as _, Full};
use hyper::Uri;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use reqwest::header::{HOST, HeaderMap, HeaderValue};
use reqwest::{Method, StatusCode};
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;
use tokio::time::Instant;
use url::{Position, Url};

use self::socket::Socket;
use super::{CONNECT, HttpError, IDLE};
use crate::a2a::client::ClientError;

/// How long the first address of a name is tried alone.
const HEAD_START: Duration = Duration::from_millis(300);
/// After this much silence is asked whether the other machine is still there.
const PROBE: Duration = Duration::from_secs(15);

type Body = Full<Bytes>;

/// The pools of all hosts that are called without TLS.
#[derive(Debug, Default)]
pub(in crate::a2a) struct ConnectionPools(Mutex<BTreeMap<String, Weak<ConnectionPool>>>);

impl ConnectionPools {
    /// The pool for the host and port of `url`, unless it needs TLS. All clients of one host share its connections.
    pub(super) fn pool(&self, url: &Url) -> Option<Arc<ConnectionPool>> {
        if url.scheme() != "http" {
            return None;
        }
        let name = &url[Position::BeforeHost..Position::AfterPort];
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(name).and_then(Weak::upgrade) {
            return Some(pool);
        }
        let pool = Arc::new(ConnectionPool::new(url)?);
        pools.retain(|_, pool| pool.strong_count() > 0);
        pools.insert(name.to_owned(), Arc::downgrade(&pool));
        Some(pool)
    }
}

/// The connections to one host and port.
#[derive(Debug)]
pub(super) struct ConnectionPool {
    host: String,
    port: u16,
    host_header: HeaderValue,
    kept: Mutex<Kept>,
}

/// The connections that nobody uses, the oldest first.
#[derive(Debug, Default)]
struct Kept {
    idle: Vec<Idle>,
    // Whether somebody closes what is not used for long.
    is_tidied: bool,
}

#[derive(Debug)]
struct Idle {
    connection: Box<Connection>,
    since: Instant,
}

/// Large, so it is moved in a box.
#[derive(Debug)]
struct Connection {
    sender: http1::SendRequest<Body>,
    // None once it is closed.
    io: Option<http1::Connection<TokioIo<Socket>, Body>>,
    // Tells the socket to look for itself.
    is_in_doubt: Arc<AtomicBool>,
}

impl ConnectionPool {
    fn new(url: &Url) -> Option<Self> {
        Some(Self {
            // Brackets belong to the text of an IPv6 address, not to the address.
            host: url.host_str()?.trim_matches(['[', ']']).to_owned(),
            port: url.port_or_known_default()?,
            host_header: url[Position::BeforeHost..Position::AfterPort].parse().ok()?,
            kept: Mutex::default(),
        })
    }

    /// Sends a request. It goes out a second time only if it never left on a connection that was kept.
    pub(super) async fn send(
        self: &Arc<Self>,
        method: Method,
        target: Uri,
        mut headers: HeaderMap,
        body: Option<Bytes>,
    ) -> Result<Response, ClientError> {
        headers.insert(HOST, self.host_header.clone());
        let mut request = hyper::Request::new(Body::new(body.unwrap_or_default()));
        *request.method_mut() = method;
        *request.uri_mut() = target;
        *request.headers_mut() = headers;
        loop {
            let kept = self.reuse().await;
            let is_kept = kept.is_some();
            let mut connection = match kept {
                Some(connection) => connection,
                None => Box::pin(self.connect()).await.map_err(ClientError::Unreachable)?,
            };
            let sent = connection.sender.try_send_request(request);
            match connection.poll_while(sent).await {
                Ok(response) => {
                    let (head, body) = response.into_parts();
                    let way_back = Some((Arc::clone(self), connection));
                    return Ok(Response { status: head.status, headers: head.headers, body, way_back });
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_kept => request = unsent,
                    Some(_) => return Err(ClientError::Unreachable(error.into_error().into())),
                    None => return Err(ClientError::Broken(error.into_error().into())),
                },
            }
        }
    }

    async fn connect(&self) -> Result<Box<Connection>, HttpError> {
        let reach = async {
            let addresses = tokio::net::lookup_host((&*self.host, self.port)).await?.collect();
            connect_any(addresses).await
        };
        let reached = tokio::time::timeout(CONNECT, reach).await;
        let stream = reached.map_err(|_| format!("no answer within {} s", CONNECT.as_secs()))??;
        prepare(&stream)?;
        let is_in_doubt = Arc::new(AtomicBool::new(false));
        let socket = Socket::new(stream, Arc::clone(&is_in_doubt));
        let (sender, io) = http1::handshake(TokioIo::new(socket)).await?;
        Ok(Box::new(Connection { sender, io: Some(io), is_in_doubt }))
    }

    /// The connection that was used last, if it still works.
    async fn reuse(&self) -> Option<Box<Connection>> {
        loop {
            let Idle { mut connection, since } = self.lock().idle.pop()?;
            if since.elapsed() < IDLE && connection.is_usable().await {
                return Some(connection);
            }
        }
    }

    fn keep(self: &Arc<Self>, connection: Box<Connection>) {
        let mut kept = self.lock();
        if !std::mem::replace(&mut kept.is_tidied, true) {
            #[expect(clippy::disallowed_methods, reason = "it ends by itself, and nothing depends on it")]
            tokio::spawn(tidy(Arc::downgrade(self)));
        }
        kept.idle.push(Idle { connection, since: Instant::now() });
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects to the first address that answers. Each has a head start before the next one; one that says
/// no leaves its turn at once.
async fn connect_any(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut rest = addresses.into_iter();
    let mut tries = FuturesUnordered::new();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    loop {
        tries.extend(rest.next().map(TcpStream::connect));
        tokio::select! {
            tried = tries.next() => match tried {
                Some(Ok(stream)) => return Ok(stream),
                Some(Err(error)) => last = error,
                None => return Err(last),
            },
            () = tokio::time::sleep(HEAD_START), if rest.len() > 0 => {}
        }
    }
}

/// Small requests go out at once, and a machine that is gone is noticed within a minute.
fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new().with_time(PROBE).with_interval(PROBE).with_retries(3);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(2 * PROBE))?;
    Ok(())
}

/// Closes what was not used for long, until nothing is left.
async fn tidy(pool: Weak<ConnectionPool>) {
    loop {
        tokio::time::sleep(IDLE).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut kept = pool.lock();
        let old = kept.idle.partition_point(|idle| idle.since.elapsed() >= IDLE);
        let closed: Vec<_> = kept.idle.drain(..old).collect();
        kept.is_tidied = !kept.idle.is_empty();
        let is_done = !kept.is_tidied;
        drop(kept);
        drop(closed);
        if is_done {
            return;
        }
    }
}

impl Connection {
    /// Reads and writes while `work` waits for it.
    async fn poll_while<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(done);
            }
            if self.io.as_mut().is_some_and(|io| Pin::new(io).poll(context).is_ready()) {
                // Whoever waits for something of it learns from this that nothing comes.
                self.io = None;
            }
            work.as_mut().poll(context)
        })
        .await
    }

    /// Whether the agent has neither closed it nor said something that nobody asked for.
    async fn is_usable(&mut self) -> bool {
        poll_fn(|context| {
            self.is_in_doubt.store(true, Relaxed);
            let is_closed = self.io.as_mut().is_none_or(|io| Pin::new(io).poll(context).is_ready());
            self.is_in_doubt.store(false, Relaxed);
            Poll::Ready(!is_closed && self.sender.is_ready())
        })
        .await
    }
}

/// The head of an answer, and its body as it comes. Dropped before the end, it closes the connection.
#[derive(Debug)]
pub(in crate::a2a) struct Response {
    status: StatusCode,
    headers: HeaderMap,
    body: Incoming,
    way_back: Option<(Arc<ConnectionPool>, Box<Connection>)>,
}

impl Response {
    pub(super) fn status(&self) -> StatusCode {
        self.status
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        let Some((_, connection)) = &mut self.way_back else { return Ok(None) };
        loop {
            match connection.poll_while(self.body.frame()).await {
                Some(Ok(frame)) => {
                    // Trailers say nothing here.
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => return Err(ClientError::Broken(error.into())),
                None => break,
            }
        }
        if let Some((pool, connection)) = self.way_back.take() {
            pool.keep(connection);
        }
        Ok(None)
    }
}

/// What stands in the first line of a request to `url`.
pub(super) fn target(url: &Url) -> Result<Uri, HttpError> {
    Ok(url[Position::BeforePath..Position::AfterQuery].parse()?)
}
