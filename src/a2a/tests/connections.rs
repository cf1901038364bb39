//! Connections without TLS: reused while they work, and only then.

use crate::text::error_chain;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::a2a::card::Card;
use crate::a2a::client::{Client, ClientError};
use crate::config;
use crate::memory::MemoryAccount;
use crate::telemetry::trace_context::TraceContext;

/// What the agent does with a connection after a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AfterResponse {
    KeepsOpen,
    Closes,
    /// With `Connection: close` and without a length.
    AnnouncesClose,
    /// After half of the response.
    ClosesHalfway,
    /// Sends a second response without a request.
    SendsMore,
    /// Keeps it open, and responds with ids of its own.
    HasOwnIds,
    /// Responds to the second request for the task on a connection with the response to the first, which it sent twice. The bridge
    /// sees it when it has already sent the second request.
    RepeatsItself,
}

#[derive(Debug)]
struct Peer {
    port: u16,
    connections: Arc<AtomicUsize>,
    open: watch::Sender<usize>,
    requests: Arc<AtomicUsize>,
    settled: watch::Sender<usize>,
}

impl Peer {
    async fn start(address: &str, after: AfterResponse) -> Self {
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let peer = Self {
            port,
            connections: Arc::default(),
            open: watch::Sender::default(),
            requests: Arc::default(),
            settled: watch::Sender::default(),
        };
        let (connections, open) = (Arc::clone(&peer.connections), peer.open.clone());
        let (requests, settled) = (Arc::clone(&peer.requests), peer.settled.clone());
        TaskTracker::new().spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.fetch_add(1, Relaxed);
                open.send_modify(|open| *open += 1);
                let (open, requests) = (open.clone(), Arc::clone(&requests));
                let settled = settled.clone();
                TaskTracker::new().spawn(async move {
                    let _ = serve(stream, after, &requests, &settled).await;
                    open.send_modify(|open| *open -= 1);
                });
            }
        });
        peer
    }

    /// Waits until the agent has finished with this many requests.
    async fn settled(&self, requests: usize) {
        self.settled.subscribe().wait_for(|settled| *settled >= requests).await.unwrap();
    }

    fn requests(&self) -> usize {
        self.requests.load(Relaxed)
    }
}

async fn serve(
    stream: TcpStream,
    after: AfterResponse,
    requests: &AtomicUsize,
    settled: &watch::Sender<usize>,
) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut first_id = None;
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            let line = line.trim().to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            if line.is_empty() {
                break;
            }
        }
        let mut request = vec![0; length];
        stream.read_exact(&mut request).await?;
        let request: Value = serde_json::from_slice(&request).unwrap();
        requests.fetch_add(1, Relaxed);
        let id = match after {
            AfterResponse::HasOwnIds => json!(1),
            AfterResponse::RepeatsItself if request["params"]["id"] == "t" => {
                first_id.get_or_insert(request["id"].clone()).clone()
            }
            _ => request["id"].clone(),
        };
        let body = json!({"jsonrpc": "2.0", "id": id, "result":
            {"kind": "task", "id": "t", "status": {"state": "completed"}}})
        .to_string();
        let (head, rest) = match after {
            AfterResponse::AnnouncesClose => ("Connection: close".to_owned(), body.as_str()),
            AfterResponse::ClosesHalfway => {
                (format!("Content-Length: {}", body.len()), &body[..body.len() / 2])
            }
            _ => (format!("Content-Length: {}", body.len()), body.as_str()),
        };
        let response = format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{head}\r\n\r\n{rest}");
        stream.write_all(response.as_bytes()).await?;
        match after {
            AfterResponse::KeepsOpen | AfterResponse::HasOwnIds | AfterResponse::RepeatsItself => {}
            AfterResponse::SendsMore => stream.write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").await?,
            AfterResponse::Closes | AfterResponse::AnnouncesClose | AfterResponse::ClosesHalfway => {
                drop(stream);
                settled.send_modify(|settled| *settled += 1);
                return Ok(());
            }
        }
        settled.send_modify(|settled| *settled += 1);
    }
}

async fn client(url: &str) -> Client {
    let text = format!("agents: [{{ name: a, url: '{url}', protocol: 0.3, binding: jsonrpc }}]");
    let config = config::parse(&text, "test.yaml", &|_| None).unwrap().agents.remove(0);
    let chooser = crate::a2a::chooser(
        &config,
        &crate::a2a::http_client().unwrap(),
        &config.secrets(),
        MemoryAccount::unlimited("fake"),
    )
    .unwrap();
    let card = Card::from_value(json!({"name": "a"})).unwrap();
    let interface = chooser.choose(&card).await.unwrap();
    chooser.client(&card, &interface).unwrap()
}

#[rstest::rstest]
#[case::keeps_open(AfterResponse::KeepsOpen)]
#[case::closes(AfterResponse::Closes)]
#[case::announces_close(AfterResponse::AnnouncesClose)]
#[case::sends_more(AfterResponse::SendsMore)]
#[case::has_own_ids(AfterResponse::HasOwnIds)]
#[tokio::test]
async fn every_request_is_sent_once_whatever_the_agent_does_after_a_response(#[case] after: AfterResponse) {
    let peer = Peer::start("127.0.0.1", after).await;
    let client = client(&format!("http://127.0.0.1:{}", peer.port)).await;
    let (requests, connections) = (peer.requests(), peer.connections.load(Relaxed));
    for call in 0..50 {
        client.get("t", &TraceContext::default()).await.unwrap();
        peer.settled(requests + call + 1).await;
    }
    assert_eq!(peer.requests() - requests, 50);
    let used = peer.connections.load(Relaxed) - connections;
    assert_eq!(used, if after == AfterResponse::KeepsOpen { 1 } else { 50 });
}

#[tokio::test]
async fn a_response_to_another_request_is_an_error_and_ends_the_connection() {
    let peer = Peer::start("127.0.0.1", AfterResponse::RepeatsItself).await;
    let client = client(&format!("http://127.0.0.1:{}", peer.port)).await;
    client.get("t", &TraceContext::default()).await.unwrap();
    let (requests, connections) = (peer.requests(), peer.connections.load(Relaxed));
    let error = client.get("t", &TraceContext::default()).await.unwrap_err();
    assert!(matches!(error, ClientError::WrongId), "{error:?}");
    assert_eq!(peer.connections.load(Relaxed), connections, "the connection was reused");
    peer.open.subscribe().wait_for(|open| *open == 0).await.unwrap();
    // From now on each request has its own connection, where no response can belong to another request.
    for _ in 0..5 {
        client.get("t", &TraceContext::default()).await.unwrap();
    }
    assert_eq!((peer.requests() - requests, peer.connections.load(Relaxed) - connections), (6, 5));
}

#[tokio::test]
async fn a_request_whose_response_is_cut_off_is_not_repeated() {
    let peer = Peer::start("127.0.0.1", AfterResponse::ClosesHalfway).await;
    let client = client(&format!("http://127.0.0.1:{}", peer.port)).await;
    let requests = peer.requests();
    let error = client.get("t", &TraceContext::default()).await.unwrap_err();
    assert!(matches!(error, ClientError::Broken(_)), "{error:?}");
    assert_eq!(peer.requests() - requests, 1);
}

#[tokio::test]
async fn concurrent_requests_have_their_own_connections_which_are_closed_when_idle() {
    let peer = Peer::start("127.0.0.1", AfterResponse::KeepsOpen).await;
    let client = client(&format!("http://127.0.0.1:{}", peer.port)).await;
    let trace = TraceContext::default();
    let calls = (0..20).map(|_| client.get("t", &trace));
    for result in futures_util::future::join_all(calls).await {
        result.unwrap();
    }
    let mut open = peer.open.subscribe();
    assert!(*open.borrow() > 0);
    open.wait_for(|open| *open == 0).await.unwrap();
    client.get("t", &trace).await.unwrap();
}

#[rstest::rstest]
#[case::name("127.0.0.1", "localhost")]
#[case::ipv6("::1", "[::1]")]
#[tokio::test]
async fn names_and_ipv6_addresses_are_reached(#[case] address: &str, #[case] host: &str) {
    if let Err(error) = TcpListener::bind((address, 0)).await {
        panic!("this test needs the loopback address {address}: {error}");
    }
    let peer = Peer::start(address, AfterResponse::KeepsOpen).await;
    let client = client(&format!("http://{host}:{}/at/here", peer.port)).await;
    client.get("t", &TraceContext::default()).await.unwrap();
}

#[tokio::test]
async fn a_port_without_a_listener_is_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = client(&url).await.get("t", &TraceContext::default()).await.unwrap_err();
    assert!(matches!(error, ClientError::Unreachable(_)), "{error:?}");
    let text = error_chain(&error);
    assert_eq!(text, "cannot connect to the agent: Connection refused (os error 111)");
}
