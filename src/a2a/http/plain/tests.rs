//! Which kept connections are used again: tests that look at them, or stop the runtime.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::thread::JoinHandle;

use super::*;

/// Takes one connection, answers one request on it and hands it over, still open.
fn answer_once(listener: &TcpListener) -> JoinHandle<std::net::TcpStream> {
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
    let (target, body) = (Uri::from_static("/"), Bytes::from_static(b"hello"));
    let mut response = pool.send(Method::POST, target, HeaderMap::new(), Some(body)).await?;
    while response.chunk().await?.is_some() {}
    Ok(())
}

#[tokio::test]
async fn a_connection_that_was_idle_for_half_a_second_is_not_used_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (pool, agent) = (pool(&listener), answer_once(&listener));
    call(&pool).await.unwrap();
    let _open = agent.join().unwrap();
    // However long this has taken.
    pool.lock().idle[0].since = Instant::now();
    let mut fresh = pool.reuse().await.expect("it was used just now");
    assert!(fresh.is_usable().await);
    pool.keep(fresh);
    pool.lock().idle[0].since -= Duration::from_millis(500);
    assert!(pool.reuse().await.is_none());
}

#[tokio::test]
async fn a_close_is_seen_even_before_the_runtime_has_heard_of_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (pool, agent) = (pool(&listener), answer_once(&listener));
    call(&pool).await.unwrap();
    let open = agent.join().unwrap();
    // Its close returns when the other side has it.
    socket2::SockRef::from(&open).set_linger(Some(Duration::from_secs(10))).unwrap();
    // Nothing is awaited between the close and the look, so the runtime has had no turn.
    drop(open);
    assert!(pool.reuse().await.is_none());
}
