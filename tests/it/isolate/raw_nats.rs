//! A NATS client on a plain socket, for what a well-behaved client never sends, and for readers that do not read.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(super) struct RawNats {
    socket: TcpStream,
}

impl RawNats {
    pub(super) fn connect(port: u16) -> Self {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let mut info = String::new();
        // The server sends nothing else before CONNECT.
        BufReader::new(socket.try_clone().unwrap()).read_line(&mut info).unwrap();
        socket.write_all(b"CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true}\r\n").unwrap();
        Self { socket }
    }

    /// Sends these bytes as they are; a closed connection is ignored.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    pub(super) fn subscribe(&mut self, subject: &str) {
        self.send(format!("SUB {subject} 1\r\n").as_bytes());
    }

    pub(super) fn request(&mut self, subject: &str, reply: &str, body: &str) {
        self.send(format!("PUB {subject} {reply} {}\r\n{body}\r\n", body.len()).as_bytes());
    }

    /// A request with a header block of these bytes.
    pub(super) fn request_with_headers(&mut self, subject: &str, reply: &str, headers: &[u8], body: &str) {
        let size = headers.len() + body.len();
        let line = format!("HPUB {subject} {reply} {} {size}\r\n", headers.len());
        self.send(&[line.as_bytes(), headers, body.as_bytes(), b"\r\n"].concat());
    }

    /// Reads and drops everything on a thread of its own, until the connection is dropped; the bytes read so far.
    pub(super) fn discard(&self) -> Arc<AtomicU64> {
        let (mut socket, count) = (self.socket.try_clone().unwrap(), Arc::new(AtomicU64::new(0)));
        let read = Arc::clone(&count);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 20];
            while let Ok(length @ 1..) = socket.read(&mut buffer) {
                read.fetch_add(length as u64, Relaxed);
            }
        });
        count
    }
}

impl Drop for RawNats {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}
