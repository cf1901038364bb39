//! A way to a server that can be shut: what is sent then waits at the sender.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};

use socket2::{Domain, Socket, Type};

/// Passes connections on to a server, and holds back what goes to it while it is shut.
pub struct Tap {
    port: u16,
    valve: Arc<(Mutex<bool>, Condvar)>,
}

impl Tap {
    /// A way to `port` of this machine, open.
    pub fn start(port: u16) -> Self {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        // Little room here, so that the sender's own fills soon.
        socket.set_recv_buffer_size(4096).expect("a small buffer");
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a free port");
        socket.listen(16).expect("a listener");
        let listener = TcpListener::from(socket);
        let own = listener.local_addr().unwrap().port();
        let valve = Arc::<(Mutex<bool>, Condvar)>::default();
        let shared = Arc::clone(&valve);
        std::thread::spawn(move || {
            for here in listener.incoming().flatten() {
                let there = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("the server is there");
                let (back_from, back_to) = (there.try_clone().unwrap(), here.try_clone().unwrap());
                let valve = Arc::clone(&shared);
                std::thread::spawn(move || pass(here, there, || wait(&valve)));
                std::thread::spawn(move || pass(back_from, back_to, || ()));
            }
        });
        Self { port: own, valve }
    }

    /// Where the server is reached through here.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// What shuts it.
    pub fn shutter(&self) -> impl Fn() + Send + Sync + 'static {
        let valve = Arc::clone(&self.valve);
        move || *valve.0.lock().unwrap() = true
    }

    pub fn open(&self) {
        *self.valve.0.lock().unwrap() = false;
        self.valve.1.notify_all();
    }
}

fn wait((is_shut, opened): &(Mutex<bool>, Condvar)) {
    drop(opened.wait_while(is_shut.lock().unwrap(), |is_shut| *is_shut).unwrap());
}

fn pass(mut from: TcpStream, mut to: TcpStream, before_each: impl Fn()) {
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
