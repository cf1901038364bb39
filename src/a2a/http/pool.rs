//! Connections for HTTP/1.1 without TLS, which the calling task polls itself.
//!
//! Common clients spawn a task for each connection, with a channel from the caller to it and another one back. That
//! costs two wake-ups for each request, often on another core, and two tasks for each request in flight. Here the task
//! that waits for the response also reads and writes. `docs/src/performance.md` has the figures.

use std::collections::BTreeMap;
use std::future::{Future as _, poll_fn};
use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use http_body_util::BodyExt as _;
use hyper::Uri;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use reqwest::Method;
use reqwest::header::{HOST, HeaderMap, HeaderValue};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use url::{Position, Url};

use super::peer_check::{PeerCheck, connect_checked};
use super::{CONNECT_TIMEOUT, HttpBody, HttpError, HttpResponse, IDLE_TIMEOUT, RequestBody};
use crate::a2a::client::ClientError;

/// How long each address of a host name has before the next one is tried as well.
const HEAD_START: Duration = Duration::from_millis(300);
/// Interval of TCP keep-alive probes.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The read buffer of a connection grows up to this size, and a response's headers must fit into it, or the response
/// is an error ([`ClientError::LargeHeaders`]). The memory budget does not count it.
const MAX_BUFFER: usize = 64 << 10;

/// Maximum bytes that an agent may send before the final headers of a response. Interim responses (1xx) are ignored, and
/// there may be any number of them.
const MAX_HEAD: usize = 2 * MAX_BUFFER;
/// A connection yields after reading this many bytes, because hyper reads on as long as there is something to ignore.
const READ_BUDGET: usize = 2 * MAX_BUFFER;

/// The pools of all hosts that are called without TLS.
#[derive(Debug, Default)]
pub(in crate::a2a) struct ConnectionPools {
    pools: Mutex<BTreeMap<String, Weak<ConnectionPool>>>,
    check: Option<Arc<dyn PeerCheck>>,
}

impl ConnectionPools {
    pub(super) fn checked(check: Arc<dyn PeerCheck>) -> Self {
        Self { pools: Mutex::default(), check: Some(check) }
    }

    /// The pool for the host and port of `url`, unless it needs TLS. All clients of one host share its connections.
    pub(super) fn pool(&self, url: &Url) -> Option<Arc<ConnectionPool>> {
        if url.scheme() != "http" {
            return None;
        }
        let name = &url[Position::BeforeHost..Position::AfterPort];
        let mut pools = self.pools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = pools.get(name).and_then(Weak::upgrade) {
            return Some(pool);
        }
        let pool = Arc::new(ConnectionPool::new(url, self.check.clone())?);
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
    check: Option<Arc<dyn PeerCheck>>,
    idle: Mutex<IdleConnections>,
}

#[derive(Debug, Default)]
struct IdleConnections {
    /// The oldest first.
    #[expect(clippy::vec_box, reason = "a request takes the box out and puts it back")]
    list: Vec<Box<Connection>>,
    /// Whether a task runs that closes expired connections.
    is_swept: bool,
}

/// Always boxed, because it is large and often moved.
#[derive(Debug)]
struct Connection {
    sender: http1::SendRequest<RequestBody>,
    /// `None` once it is closed.
    io: Option<http1::Connection<TokioIo<Socket>, RequestBody>>,
    control: Arc<SocketControl>,
    /// When its last response was complete.
    idle_since: Instant,
}

impl ConnectionPool {
    fn new(url: &Url, check: Option<Arc<dyn PeerCheck>>) -> Option<Self> {
        Some(Self {
            // Name resolution does not accept the brackets of an IPv6 address.
            host: url.host_str()?.trim_matches(['[', ']']).to_owned(),
            port: url.port_or_known_default()?,
            host_header: url[Position::BeforeHost..Position::AfterPort].parse().ok()?,
            check,
            idle: Mutex::default(),
        })
    }

    /// Sends a request on a new connection, or on a kept one if it `may_reuse` one. Repeats it only if a kept connection
    /// turns out to be closed before the first byte is written.
    pub(super) async fn send(
        self: &Arc<Self>,
        method: Method,
        target: Uri,
        mut headers: HeaderMap,
        body: Option<RequestBody>,
        may_reuse: bool,
    ) -> Result<HttpResponse, ClientError> {
        headers.insert(HOST, self.host_header.clone());
        let mut request = hyper::Request::new(body.unwrap_or(RequestBody::Whole(None)));
        *request.method_mut() = method;
        *request.uri_mut() = target;
        *request.headers_mut() = headers;
        loop {
            let kept = if may_reuse { self.reuse().await } else { None };
            let is_kept = kept.is_some();
            let mut connection = match kept {
                Some(connection) => connection,
                None => Box::pin(self.connect()).await.map_err(ClientError::Unreachable)?,
            };
            let sent = connection.sender.try_send_request(request);
            connection.control.head_left.store(MAX_HEAD, Relaxed);
            let sent = connection.poll_while(sent).await;
            let head_left = connection.control.head_left.swap(usize::MAX, Relaxed);
            match sent {
                Ok(response) => {
                    let (head, incoming) = response.into_parts();
                    let source = Some((Arc::clone(self), connection));
                    let body = HttpBody::Pooled(PooledBody { incoming, source, is_complete: false });
                    return Ok(HttpResponse {
                        status: head.status,
                        headers: head.headers,
                        body,
                        may_be_stray: is_kept,
                        since_yield: 0,
                        open: None,
                        filter: None,
                    });
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if is_kept => request = unsent,
                    Some(_) => return Err(ClientError::Unreachable(error.into_error().into())),
                    None if head_left == 0 => return Err(ClientError::LargeHeaders),
                    None => return Err(super::broken(error.into_error())),
                },
            }
        }
    }

    async fn connect(&self) -> Result<Box<Connection>, HttpError> {
        let reach = async {
            let addresses: Vec<_> = tokio::net::lookup_host((&*self.host, self.port)).await?.collect();
            connect_checked(self.check.as_ref(), || connect_any(addresses.clone())).await
        };
        let reached = tokio::time::timeout(CONNECT_TIMEOUT, reach).await;
        let stream = reached.map_err(|_| format!("no response within {} s", CONNECT_TIMEOUT.as_secs()))??;
        set_options(&stream)?;
        let control = Arc::new(SocketControl {
            peeks: AtomicBool::new(false),
            head_left: AtomicUsize::new(usize::MAX),
        });
        let socket = Socket { stream, control: Arc::clone(&control), budget: READ_BUDGET };
        let (sender, io) =
            http1::Builder::new().max_buf_size(MAX_BUFFER).handshake(TokioIo::new(socket)).await?;
        Ok(Box::new(Connection { sender, io: Some(io), control, idle_since: Instant::now() }))
    }

    /// Takes the most recently used connection that still works.
    async fn reuse(&self) -> Option<Box<Connection>> {
        loop {
            let mut connection = self.lock().list.pop()?;
            if connection.idle_since.elapsed() < IDLE_TIMEOUT && connection.is_usable().await {
                return Some(connection);
            }
        }
    }

    fn keep(self: &Arc<Self>, mut connection: Box<Connection>) {
        connection.idle_since = Instant::now();
        let mut idle = self.lock();
        if !std::mem::replace(&mut idle.is_swept, true) {
            #[expect(clippy::disallowed_methods, reason = "it ends by itself, and nothing depends on it")]
            tokio::spawn(sweep(Arc::downgrade(self)));
        }
        idle.list.push(connection);
    }

    fn lock(&self) -> MutexGuard<'_, IdleConnections> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connects to the first address that responds. Each has a head start before the next one; after a refusal the next one
/// is tried immediately.
async fn connect_any(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut rest = addresses.into_iter();
    let mut tries = FuturesUnordered::new();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host name has no address");
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

/// Sends small requests without delay, and detects an unreachable machine within a minute.
fn set_options(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let probes = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE).with_retries(3);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(2 * KEEP_ALIVE))?;
    Ok(())
}

/// Closes expired connections until none are left.
async fn sweep(pool: Weak<ConnectionPool>) {
    loop {
        tokio::time::sleep(IDLE_TIMEOUT).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.lock();
        let expired = idle.list.partition_point(|idle| idle.idle_since.elapsed() >= IDLE_TIMEOUT);
        let expired: Vec<_> = idle.list.drain(..expired).collect();
        idle.is_swept = !idle.list.is_empty();
        let is_done = !idle.is_swept;
        // Closes the connections after the lock is released.
        drop(idle);
        drop(expired);
        if is_done {
            return;
        }
    }
}

impl Connection {
    /// Drives the connection until `work` is done.
    async fn poll_while<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        poll_fn(|context| {
            if let Poll::Ready(done) = work.as_mut().poll(context) {
                return Poll::Ready(done);
            }
            if self.io.as_mut().is_some_and(|io| Pin::new(io).poll(context).is_ready()) {
                self.io = None;
            }
            work.as_mut().poll(context)
        })
        .await
    }

    /// Whether the agent has neither closed the connection nor sent anything without a request.
    async fn is_usable(&mut self) -> bool {
        poll_fn(|context| {
            self.control.peeks.store(true, Relaxed);
            let is_closed = self.io.as_mut().is_none_or(|io| Pin::new(io).poll(context).is_ready());
            self.control.peeks.store(false, Relaxed);
            Poll::Ready(!is_closed && self.sender.is_ready())
        })
        .await
    }
}

/// The body of a response as it arrives. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct PooledBody {
    incoming: Incoming,
    /// The connection, and the pool to return it to.
    source: Option<(Arc<ConnectionPool>, Box<Connection>)>,
    is_complete: bool,
}

impl PooledBody {
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        let Some((_, connection)) = &mut self.source else { return Ok(None) };
        while let Some(frame) = connection.poll_while(self.incoming.frame()).await {
            let frame = frame.map_err(|error| ClientError::Broken(error.into()))?;
            // Trailers are ignored.
            if let Ok(data) = frame.into_data() {
                return Ok(Some(data));
            }
        }
        self.is_complete = true;
        Ok(None)
    }

    /// Returns the connection to the pool, if the body is complete.
    pub(super) fn keep_connection(&mut self) {
        if let Some((pool, connection)) = self.source.take_if(|_| self.is_complete) {
            pool.keep(connection);
        }
    }
}

/// The request target of `url`: path and query.
pub(super) fn target(url: &Url) -> Result<Uri, HttpError> {
    Ok(url[Position::BeforePath..Position::AfterQuery].parse()?)
}

/// A socket that limits what hyper reads, and can check its current state.
#[derive(Debug)]
struct Socket {
    stream: TcpStream,
    control: Arc<SocketControl>,
    /// Bytes to read until it yields.
    budget: usize,
}

/// How a connection controls its socket.
#[derive(Debug)]
struct SocketControl {
    /// Reads go through the runtime, which learns of a close only when it next polls all sockets. Whether a kept
    /// connection still works must not depend on that, so while this is set the socket also asks the kernel.
    peeks: AtomicBool,
    /// Bytes that the agent may still send before the final headers. Reads fail at 0.
    head_left: AtomicUsize,
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.budget == 0 && !self.control.peeks.load(Relaxed) {
            self.budget = READ_BUDGET;
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let head_left = self.control.head_left.load(Relaxed);
        if head_left == 0 {
            return Poll::Ready(Err(io::Error::other("the headers of the response are too large")));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if read.is_ready() {
            let bytes = buffer.filled().len() - before;
            self.budget = self.budget.saturating_sub(bytes);
            if head_left != usize::MAX {
                self.control.head_left.store(head_left.saturating_sub(bytes), Relaxed);
            }
        }
        if read.is_ready() || !self.control.peeks.load(Relaxed) {
            return read;
        }
        match SockRef::from(&self.stream).peek(&mut [MaybeUninit::uninit()]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            // Closed, broken, or data without a request: the connection is unusable in any case.
            _ => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    use super::*;
    use crate::reply::error::{ActionError, Code};

    /// Accepts one connection, responds to one request on it and returns it, still open.
    fn respond_once(listener: &TcpListener) -> JoinHandle<std::net::TcpStream> {
        let listener = listener.try_clone().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\nhello") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.extend(byte);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi").unwrap();
            stream
        })
    }

    fn pool(listener: &TcpListener) -> Arc<ConnectionPool> {
        let url = format!("http://{}", listener.local_addr().unwrap());
        ConnectionPools::default().pool(&url.parse().unwrap()).unwrap()
    }

    async fn call(pool: &Arc<ConnectionPool>) -> Result<(), ClientError> {
        let (target, body) = (Uri::from_static("/"), RequestBody::new(Bytes::from_static(b"hello")));
        let mut response = pool.send(Method::POST, target, HeaderMap::new(), Some(body), true).await?;
        while response.chunk().await?.is_some() {}
        response.keep_connection();
        Ok(())
    }

    #[tokio::test]
    async fn a_connection_that_was_idle_for_half_a_second_is_not_reused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (pool, agent) = (pool(&listener), respond_once(&listener));
        call(&pool).await.unwrap();
        let _open = agent.join().unwrap();
        // Does not depend on how long this has taken so far.
        pool.lock().list[0].idle_since = Instant::now();
        let mut fresh = pool.reuse().await.expect("the connection is fresh");
        assert!(fresh.is_usable().await);
        pool.keep(fresh);
        pool.lock().list[0].idle_since -= Duration::from_millis(500);
        assert!(pool.reuse().await.is_none());
    }

    #[tokio::test]
    async fn large_headers_fit_into_the_read_buffer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pool = pool(&listener);
        let agent = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // A response before the request is another error.
            stream.read_exact(&mut [0]).unwrap();
            let value = "x".repeat(MAX_BUFFER / 2);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nLarge: {value}\r\n\r\nhi");
            stream.write_all(head.as_bytes()).unwrap();
            stream
        });
        call(&pool).await.unwrap();
        drop(agent.join().unwrap());
    }

    #[tokio::test]
    async fn some_interim_responses_are_ignored_and_a_flood_of_them_is_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let [first, second] = [pool(&listener), pool(&listener)];
        let agent = std::thread::spawn(move || {
            for interim in [10, 1_000_000] {
                let (mut stream, _) = listener.accept().unwrap();
                stream.read_exact(&mut [0]).unwrap();
                let flood = "HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n".repeat(interim);
                // Fails when the bridge closes the connection.
                let _ = stream.write_all(flood.as_bytes());
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi");
                let _ = stream.read_to_end(&mut Vec::new());
            }
        });
        call(&first).await.unwrap();
        drop(first);
        let error = call(&second).await.unwrap_err();
        assert!(matches!(error, ClientError::LargeHeaders), "{error:?}");
        agent.join().unwrap();
    }

    #[rstest::rstest]
    #[case::size(format!("Large: {}\r\n", "x".repeat(8 * MAX_BUFFER)))]
    #[case::lines("A: b\r\n".repeat(101))]
    #[tokio::test]
    async fn headers_that_are_too_large_are_an_error_of_the_agent_and_end_the_connection(
        #[case] headers: String,
    ) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (pool, url) = (pool(&listener), format!("http://{}", listener.local_addr().unwrap()));
        let agent = std::thread::spawn(move || {
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().unwrap();
                // A response before the request is another error.
                stream.read_exact(&mut [0]).unwrap();
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n{headers}\r\nhi");
                // Fails if the bridge closes the connection before it has read everything, and so does the read.
                let _ = stream.write_all(head.as_bytes());
                let _ = stream.read_to_end(&mut Vec::new());
            }
        });
        let pooled = call(&pool).await.unwrap_err();
        assert!(pool.lock().list.is_empty());
        let client = crate::a2a::http::builder().build().unwrap();
        let other = crate::a2a::http::connection_error(client.get(url).send().await.unwrap_err());
        agent.join().unwrap();
        for error in [pooled, other] {
            let error = ActionError::from_client(error);
            assert_eq!((error.info.code, error.reached_agent), (Code::AgentError, true), "{error:?}");
            assert_eq!(
                error.message,
                "the headers of the agent's response are too large; the limit is 64 KiB and 100 lines"
            );
        }
    }

    #[tokio::test]
    async fn a_close_is_detected_before_the_runtime_learns_of_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (pool, agent) = (pool(&listener), respond_once(&listener));
        call(&pool).await.unwrap();
        let open = agent.join().unwrap();
        // With this option, close returns when the other side has received it.
        socket2::SockRef::from(&open).set_linger(Some(Duration::from_secs(10))).unwrap();
        // There is no await between the close and the check, so the runtime has not polled the socket.
        drop(open);
        assert!(pool.reuse().await.is_none());
    }
}
