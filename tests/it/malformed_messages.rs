//! What the patched NATS client has to withstand: messages that no proper client sends, but that nats-server forwards,
//! and more messages than anyone reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use a2a_bridge::internal::service::round_trip;
use futures_util::{FutureExt as _, StreamExt as _};
use rstest::rstest;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::commands::{command_on, run};
use crate::support::processes::free_port;
use crate::support::{Bridge, NatsServer, Reply, attached, launched, wait_until, within_deadline};

/// Header blocks that cannot be parsed.
const HEADERS: [&[u8]; 13] = [
    b"NATS/1.0\r\nno colon\r\n\r\n",
    b"NATS/1.0\r\nA: \xff\r\n\r\n",
    // This one made the connection task panic: the bridge never connected again.
    b"NATS/1.0\r\nA: b\rc\r\n\r\n",
    b"NATS/1.0\r\nA b: c\r\n\r\n",
    b"NATS/1.0\r\nA\x01: b\r\n\r\n",
    b"NATS/1.0\r\n\xc3\xa4: b\r\n\r\n",
    b"NATS/1.0\r\n A: b\r\n\r\n",
    b"NATS/1.0 abc\r\n\r\n",
    b"NATS/1.0 099\r\n\r\n",
    b"NATS/1.0 10000 x\r\n\r\n",
    b"NATS/2.0\r\nA: b\r\n\r\n",
    b"A: b\r\n\r\n",
    b"\r\n",
];
/// Header blocks that look odd and can be parsed.
const ODD_HEADERS: [&[u8]; 4] = [
    b"NATS/1.0\r\n: b\r\n\r\n",
    b"NATS/1.0\r\nA: b\0c\r\n\r\n",
    b"NATS/1.0\r\nA: b",
    b"NATS/1.0 503 No Responders\r\n\r\n",
];
/// Ends of reply subjects that are valid for the server. The first is not UTF-8; the bridge refuses the others.
const REPLY_ENDS: [&[u8]; 5] = [b"\xff", b"\xc2\xa0x", b"\x0bx", b"\0x", b"\rx"];

/// A client that writes the protocol itself.
struct RawClient(TcpStream);

impl RawClient {
    async fn connect(port: u16) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(b"CONNECT {\"verbose\":false,\"headers\":true}\r\n").await.unwrap();
        Self(stream)
    }

    /// Publishes, and waits until the server has processed it.
    async fn publish(&mut self, subject: &[u8], reply: &[u8], headers: Option<&[u8]>) {
        let body = b"hello";
        let (verb, sizes) = match headers {
            Some(headers) => ("HPUB", format!(" {} {}\r\n", headers.len(), headers.len() + body.len())),
            None => ("PUB", format!(" {}\r\n", body.len())),
        };
        let parts: [&[u8]; 10] = [
            verb.as_bytes(),
            b" ",
            subject,
            b" ",
            reply,
            sizes.as_bytes(),
            headers.unwrap_or_default(),
            body,
            b"\r\n",
            b"PING\r\n",
        ];
        self.0.write_all(&parts.concat()).await.unwrap();
        let mut seen = Vec::new();
        while !seen.windows(4).any(|window| window == b"PONG") {
            let read = within_deadline(self.0.read_buf(&mut seen)).await.unwrap();
            assert!(read > 0, "the server refuses it: {}", String::from_utf8_lossy(&seen));
        }
    }
}

/// Callers that call `demo.echo` one call after the other.
struct Load {
    stop: Arc<AtomicBool>,
    completed: Arc<AtomicUsize>,
    callers: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    #[expect(clippy::disallowed_methods, reason = "`finish` awaits the callers")]
    fn start(bridge: &Bridge, callers: usize) -> Self {
        let (stop, completed) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let caller = || {
            let (stop, completed) = (Arc::clone(&stop), Arc::clone(&completed));
            let (client, subject) = (bridge.client.clone(), bridge.subject("demo.echo"));
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let reply = client.request(subject.clone(), "hello".into());
                    let reply = tokio::time::timeout(Duration::from_secs(5), reply).await;
                    let reply = reply.expect("no call is lost").expect("a bridge serves");
                    assert!(reply.payload.starts_with(b"{\"success\":true"), "{reply:?}");
                    completed.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let callers = (0..callers).map(|_| caller()).collect();
        Self { stop, completed, callers }
    }

    /// Waits for this many more calls.
    async fn proceed(&self, calls: usize) {
        let before = self.completed.load(Ordering::Relaxed);
        let done = || async {
            self.completed.load(Ordering::Relaxed) >= before + calls
                || self.callers.iter().any(tokio::task::JoinHandle::is_finished)
        };
        wait_until(done).await;
    }

    /// Panics if a call was lost.
    async fn finish(self) {
        self.stop.store(true, Ordering::Relaxed);
        for caller in self.callers {
            caller.await.unwrap();
        }
    }
}

async fn malformed_count(port: u16) -> u64 {
    let text = reqwest::get(format!("http://127.0.0.1:{port}/metrics")).await.unwrap().text().await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("a2a_bridge_nats_malformed_messages_total "));
    line.unwrap_or_else(|| panic!("no count in {text}")).parse().unwrap()
}

#[tokio::test]
async fn malformed_messages_disconnect_no_bridge_and_lose_no_call() {
    let ports = [free_port(), free_port()];
    let metrics = |port: u16| json!({"listen": format!("127.0.0.1:{port}")});
    let one = Bridge::with(launched("demo", &[])).set("metrics", metrics(ports[0])).start().await;
    let other = Bridge::with(launched("demo", &[]))
        .nats("url", one.nats.url())
        .nats("subject_prefix", one.prefix.clone())
        .set("metrics", metrics(ports[1]))
        .start_early()
        .await;
    let load = Load::start(&one, 4);
    load.proceed(20).await;

    let subject = one.subject("demo.echo").into_bytes();
    let mut attacker = RawClient::connect(one.nats.port()).await;
    let mut malformed = 0;
    for headers in HEADERS {
        attacker.publish(&subject, b"_INBOX.x.y", Some(headers)).await;
        malformed += 1;
        load.proceed(10).await;
    }
    for headers in ODD_HEADERS {
        attacker.publish(&subject, b"_INBOX.x.y", Some(headers)).await;
        load.proceed(10).await;
    }
    for end in REPLY_ENDS {
        let reply = [b"_INBOX.x".as_slice(), end].concat();
        attacker.publish(&subject, &reply, None).await;
        attacker.publish(&subject, &reply, Some(b"NATS/1.0\r\nA: b\r\n\r\n")).await;
        malformed += if end == b"\xff" { 2 } else { 0 };
        load.proceed(10).await;
    }
    load.finish().await;

    let counted = || async { malformed_count(ports[0]).await + malformed_count(ports[1]).await == malformed };
    wait_until(counted).await;
    for bridge in [&one, &other] {
        assert!(!bridge.log().contains("NATS connection is down"), "{}", bridge.log());
        let logged = bridge.log().matches("dropped a malformed NATS message").count();
        assert!(logged <= 1, "logged {logged} times");
    }
    one.prompt("demo.echo", "still here").await.expect("COMPLETED");
}

/// A command waits for its reply; a malformed message to its inbox is skipped.
#[rstest]
#[case::reply_subject(b"_INBOX.\xff".as_slice(), b"NATS/1.0\r\nA: b\r\n\r\n".as_slice())]
#[case::headers(b"_INBOX.a".as_slice(), b"NATS/1.0\r\nA: b\rc\r\n\r\n".as_slice())]
#[tokio::test]
async fn a_command_survives_a_malformed_reply(#[case] reply: &[u8], #[case] headers: &[u8]) {
    use futures_util::StreamExt as _;
    let bridge = Bridge::without_agents().start().await;
    let mut requests = bridge.client.subscribe("a2a.action.fake.ask").await.unwrap();
    bridge.client.flush().await.unwrap();
    let url = bridge.nats.url();
    let called = tokio::task::spawn_blocking(move || {
        run(&mut command_on(&url, &["call", "fake.ask", "x", "--timeout", "10s"]), "")
    });
    let inbox = within_deadline(requests.next()).await.unwrap().reply.unwrap();
    RawClient::connect(bridge.nats.port()).await.publish(inbox.as_bytes(), reply, Some(headers)).await;
    let body = json!({"success": true, "status": "COMPLETED", "message": "fine", "files": [], "data": {}, "artifacts": []});
    bridge.client.publish(inbox, body.to_string().into()).await.unwrap();
    let output = within_deadline(called).await.unwrap();
    assert_eq!((output.code, output.out.as_str()), (0, "fine\n"), "{output:?}");
}

#[tokio::test]
async fn a_request_with_malformed_headers_is_not_run() {
    let peer = crate::support::Peer::completing("done");
    let bridge = Bridge::with_peer(&peer).await;
    let mut raw = RawClient::connect(bridge.nats.port()).await;
    raw.publish(bridge.subject("peer.ask").as_bytes(), b"_INBOX.x.y", Some(HEADERS[0])).await;
    let reply: Reply = bridge.prompt("peer.ask", "x").await;
    reply.expect("COMPLETED");
    assert_eq!(peer.calls("SendMessage").len(), 1, "a request without its headers must not run");
}

/// In a map of the client, a line of a few bytes takes hundreds.
#[tokio::test]
async fn a_request_with_too_many_headers_is_not_run() {
    let peer = crate::support::Peer::completing("done");
    let port = free_port();
    let metrics = json!({"listen": format!("127.0.0.1:{port}")});
    let bridge = Bridge::with(attached("peer", &peer.url())).set("metrics", metrics).start().await;
    let subject = bridge.subject("peer.ask");
    let mut raw = RawClient::connect(bridge.nats.port()).await;
    for lines in [1000, 1001, 150_000] {
        let lines: String = (0..lines).map(|line| format!("{line:x}:\n")).collect();
        let headers = format!("NATS/1.0\r\n{lines}\r\n");
        raw.publish(subject.as_bytes(), b"_INBOX.x.y", Some(headers.as_bytes())).await;
    }
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    wait_until(|| async { malformed_count(port).await == 2 }).await;
    wait_until(|| async { peer.calls("SendMessage").len() >= 2 }).await;
    assert_eq!(peer.calls("SendMessage").len(), 2, "one of the three, and the prompt");
}

#[tokio::test]
async fn messages_that_wait_to_be_read_take_limited_memory() {
    const MESSAGE: usize = 100_000;
    let server = NatsServer::start().await;
    let options = async_nats::ConnectOptions::new().max_queued_bytes(10 * MESSAGE);
    let (reader, writer) = (server.connect_with(options).await, server.connect().await);
    let mut subscriptions = Vec::new();
    for subject in ["many.a", "many.b"] {
        subscriptions.push(reader.subscribe(subject).await.unwrap());
    }
    round_trip(&reader).await.unwrap();
    let send = async |count: usize| {
        for index in 0..count {
            let subject = ["many.a", "many.b"][index % 2];
            writer.publish(subject, vec![b'x'; MESSAGE].into()).await.unwrap();
        }
        writer.flush().await.unwrap();
        // The server has passed on everything before this message.
        let mut end = reader.subscribe("end").await.unwrap();
        round_trip(&reader).await.unwrap();
        writer.publish("end", "".into()).await.unwrap();
        within_deadline(end.next()).await
    };
    send(40).await.unwrap();
    // Both subscriptions share the limit, and each message counts a little more than its content.
    let mut waiting = 0;
    for subscription in &mut subscriptions {
        while let Some(Some(_)) = subscription.next().now_or_never() {
            waiting += 1;
        }
    }
    assert_eq!(waiting, 9);
    // What was read no longer counts.
    send(4).await.unwrap();
    for subscription in &mut subscriptions {
        within_deadline(subscription.next()).await.unwrap();
    }
}
