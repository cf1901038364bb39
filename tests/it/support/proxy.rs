//! TCP proxies in front of agents and of nats-server.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_util::task::TaskTracker;

/// Relays connections to `target`. `is_forwarded` sees each chunk that a client sends, and decides whether
/// the target gets it.
pub fn relay(
    listener: tokio::net::TcpListener,
    target: String,
    is_forwarded: impl Fn(&[u8]) -> bool + Clone + Send + Sync + 'static,
) {
    let tasks = TaskTracker::new();
    tasks.clone().spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = tokio::net::TcpStream::connect(&target).await else {
                continue;
            };
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tasks.spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
            let is_forwarded = is_forwarded.clone();
            tasks.spawn(async move {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(count @ 1..) = from_client.read(&mut buffer).await {
                    let chunk = &buffer[..count];
                    if is_forwarded(chunk) && to_server.write_all(chunk).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
}

/// Relays connections to a server, and stops reading from the clients while it is paused.
pub struct PausableProxy {
    port: u16,
    paused: Arc<(Mutex<bool>, Condvar)>,
}

impl PausableProxy {
    /// A proxy to `port` of this machine that is not paused.
    pub fn start(port: u16) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        // A small buffer here, so that the sender's own buffer fills soon.
        socket.set_recv_buffer_size(4096).expect("a small buffer");
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a free port");
        socket.listen(16).expect("a listener");
        let listener = TcpListener::from(socket);
        let own = listener.local_addr().unwrap().port();
        let paused = Arc::<(Mutex<bool>, Condvar)>::default();
        let shared = Arc::clone(&paused);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("the server is there");
                let (from_server, to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let paused = Arc::clone(&shared);
                std::thread::spawn(move || copy(client, server, || wait(&paused)));
                std::thread::spawn(move || copy(from_server, to_client, || ()));
            }
        });
        Self { port: own, paused }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// A function that pauses the proxy.
    pub fn pauser(&self) -> impl Fn() + Send + Sync + 'static {
        let paused = Arc::clone(&self.paused);
        move || *paused.0.lock().unwrap() = true
    }

    pub fn resume(&self) {
        *self.paused.0.lock().unwrap() = false;
        self.paused.1.notify_all();
    }
}

fn wait((is_paused, resumed): &(Mutex<bool>, Condvar)) {
    drop(resumed.wait_while(is_paused.lock().unwrap(), |is_paused| *is_paused).unwrap());
}

fn copy(mut from: TcpStream, mut to: TcpStream, before_each: impl Fn()) {
    let mut buffer = [0; 64 << 10];
    loop {
        before_each();
        match from.read(&mut buffer) {
            Ok(length @ 1..) if to.write_all(&buffer[..length]).is_ok() => {}
            _ => break,
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
