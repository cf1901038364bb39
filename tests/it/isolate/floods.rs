//! Attacks by callers: many requests, expensive ones, and callers that do not read.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use serde_json::json;
use tokio::task::JoinSet;

use super::arena::{Arena, HANGING, Load, Tally};
use super::attacks::{time, times};
use super::hostile::CROWD;
use super::raw_nats::RawNats;
use super::shapes::UNANSWERED_TASK;

/// Almost as much as a message may have.
const BODY: usize = 1_000_000;

pub(super) async fn hanging(arena: Arc<Arena>) -> Tally {
    let mut callers = JoinSet::new();
    for agent in HANGING {
        let load = Load { callers: 256, calls: 256, ..Load::new(agent, "hang", time()) };
        let arena = Arc::clone(&arena);
        callers.spawn(async move { arena.load(load).await });
    }
    // Long enough for several checks of the victim's process and port.
    tokio::time::sleep(time() * 2).await;
    arena.hostile.end_attack();
    let mut tally = Tally::default();
    while let Some(done) = callers.join_next().await {
        tally.add(done.unwrap());
    }
    tally
}

/// 256 calls in flight at an agent that hangs, with these bodies.
pub(super) async fn hang_with(
    arena: Arc<Arena>,
    agent: &'static str,
    body: fn(&str, usize) -> String,
) -> Tally {
    let load = Load { callers: 256, calls: 256, body, ..Load::new(agent, "hang", time()) };
    let end = async {
        tokio::time::sleep(time()).await;
        arena.hostile.end_attack();
    };
    tokio::join!(arena.load(load), end).0
}

/// A prompt of a megabyte.
pub(super) fn long_prompt(prompt: &str, index: usize) -> String {
    static TEXT: LazyLock<String> = LazyLock::new(|| "x".repeat(BODY));
    format!(r#"{{"prompt":"{prompt}#{index}{}"}}"#, *TEXT)
}

/// A megabyte of data with many keys.
pub(super) fn many_keys(prompt: &str, index: usize) -> String {
    static DATA: LazyLock<String> = LazyLock::new(|| {
        let mut data = String::new();
        for index in 0.. {
            data.push_str(&format!(r#""{index:x}":0,"#));
            if data.len() > BODY {
                break;
            }
        }
        data + r#""last":0"#
    });
    format!(r#"{{"prompt":"{prompt}#{index}","data":{{{}}}}}"#, *DATA)
}

/// A value of 16 KB, which the description of the agent `places` multiplies to 16 MB.
pub(super) fn long_value(prompt: &str, index: usize) -> String {
    json!({ "a": format!("{prompt}#{index}{}", "x".repeat(16_000)) }).to_string()
}

/// One large task that waits or runs, and 1,024 lookups of it at once, which the agent does not answer.
pub(super) async fn lookups(arena: Arc<Arena>, prompt: &'static str) -> Tally {
    let mut tally = arena.load(Load { callers: 1, calls: 1, ..Load::new("hostile", prompt, time()) }).await;
    let lookups = Load {
        action: "get_task",
        body: |_, _| json!({ "task_id": UNANSWERED_TASK }).to_string(),
        callers: 1_024,
        calls: 1_024,
        ..Load::new("hostile", "", time())
    };
    let end = async {
        tokio::time::sleep(time()).await;
        arena.hostile.end_attack();
    };
    tally.add(tokio::join!(arena.load(lookups), end).0);
    tally
}

/// Requests without a body, all at once, from a client that reads all replies.
pub(super) async fn requests(arena: Arc<Arena>, subjects: &'static [&str], short: usize) -> Tally {
    let count = times(short, 6_000);
    flood(&arena, count, move |client, index, inbox| {
        client.request(subjects[index % subjects.len()], inbox, "");
    })
    .await
}

/// Requests with a megabyte of small headers, each with a name of its own.
pub(super) async fn many_headers(arena: Arc<Arena>) -> Tally {
    let mut headers = String::from("NATS/1.0\r\n");
    let mut index = 0;
    while headers.len() < 1_000_000 {
        headers.push_str(&format!("{index:x}:\r\n"));
        index += 1;
    }
    headers.push_str("\r\n");
    arena.hostile.prepare("small");
    flood(&arena, times(50, 1_000), move |client, _, inbox| {
        client.request_with_headers("a2a.action.hostile.ask", inbox, headers.as_bytes(), "small");
    })
    .await
}

/// Sends this many requests at once, and reads until no more replies arrive.
async fn flood(
    arena: &Arena,
    count: usize,
    request: impl Fn(&mut RawNats, usize, &str) + Send + 'static,
) -> Tally {
    let port = arena.site.server.port();
    let attack = tokio::task::spawn_blocking(move || {
        let mut client = RawNats::connect(port);
        let read = client.discard();
        client.subscribe("_INBOX.raw.*");
        for index in 0..count {
            request(&mut client, index, &format!("_INBOX.raw.{index}"));
        }
        // Until no more replies arrive.
        let (mut seen, mut idle, limit) = (0, 0, Instant::now() + Duration::from_secs(40));
        while idle < 10 && Instant::now() < limit {
            std::thread::park_timeout(Duration::from_millis(100));
            let now = read.load(std::sync::atomic::Ordering::Relaxed);
            idle = if now == seen { idle + 1 } else { 0 };
            seen = now;
        }
        seen
    });
    let bytes = attack.await.unwrap();
    let mut tally = Tally::default();
    tally.note("requests", count);
    tally.note("kB of replies", usize::try_from(bytes / 1_000).unwrap());
    tally
}

/// Callers that request a large stream and never read from their connection.
pub(super) async fn slow_readers(arena: Arc<Arena>) -> Tally {
    arena.hostile.prepare("stream of text");
    let headers = b"NATS/1.0\r\nA2A-Reply: stream\r\n\r\n";
    let mut readers = Vec::new();
    for index in 0..20 {
        let mut reader = RawNats::connect(arena.site.server.port());
        let inbox = format!("_INBOX.slow.{index}");
        reader.subscribe(&inbox);
        reader.request_with_headers(
            "a2a.action.streamer.ask",
            &inbox,
            headers,
            "{\"prompt\":\"stream of text\"}",
        );
        readers.push(reader);
    }
    tokio::time::sleep(time() * 2).await;
    let mut tally = Tally::default();
    tally.note("streams", readers.len());
    tally
}

/// Callers of many agents that request replies and streams of many sizes, and never read from their connections.
pub(super) async fn crowd_of_slow_readers(arena: Arc<Arena>) -> Tally {
    const SIZES: [usize; 7] = [10, 60_000, 65_400, 65_536, 131_000, 131_072, 900_000];
    /// The server closes the connection of a reader that is too slow, so a caller reconnects.
    const ROUNDS: usize = 10;
    let (port, until) = (arena.site.server.port(), Instant::now() + time() * 2);
    let mut callers = JoinSet::new();
    for agent in CROWD {
        callers.spawn_blocking(move || {
            let (subject, mut requests) = (format!("a2a.action.{agent}.ask"), 0);
            while Instant::now() < until {
                let mut caller = RawNats::connect(port);
                let inbox = format!("_INBOX.{:x}", fastrand::u64(..));
                caller.subscribe(&format!("{inbox}.*"));
                for _ in 0..ROUNDS {
                    for index in 0..8 {
                        let size = SIZES[fastrand::usize(..SIZES.len())];
                        let body = format!(r#"{{"prompt":"text of {size}"}}"#);
                        caller.request(&subject, &format!("{inbox}.f{index}"), &body);
                        let headers = b"NATS/1.0\r\nA2A-Reply: stream\r\n\r\n";
                        let body = r#"{"prompt":"stream of many sizes"}"#;
                        caller.request_with_headers(&subject, &format!("{inbox}.s{index}"), headers, body);
                        requests += 2;
                    }
                    std::thread::park_timeout(Duration::from_millis(500));
                    if Instant::now() > until {
                        break;
                    }
                }
            }
            requests
        });
    }
    let mut tally = Tally::default();
    tally.note("requests", callers.join_all().await.into_iter().sum());
    tally
}

/// Messages that nats-server passes on although they are malformed, beside calls of the same agent.
pub(super) async fn malformed(arena: Arc<Arena>) -> Tally {
    let count = times(4, 12);
    let time = Duration::from_millis(500) * u32::try_from(count).unwrap();
    let load = Load { callers: 4, ..Load::new("hostile", "small", time) };
    let mut client = RawNats::connect(arena.site.server.port());
    let subject = "a2a.action.hostile.ask";
    let with_headers = |client: &mut RawNats, headers: &[u8]| {
        client.request_with_headers(subject, "_INBOX.m", headers, "hello");
    };
    let send = async {
        for index in 0..count {
            match index % 3 {
                0 => with_headers(&mut client, b"NATS/1.0\r\nno colon\r\n\r\n"),
                1 => with_headers(&mut client, b"NATS/1.0\r\nA: \xff\xfe\r\n\r\n"),
                _ => client.send(b"PUB a2a.action.hostile.ask _INBOX.\xc3\x28 5\r\nhello\r\n"),
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    };
    let (mut tally, ()) = tokio::join!(arena.load(load), send);
    tally.note("messages", count);
    tally
}

/// The first call hangs, and its repeats wait for it.
pub(super) async fn repeats_of_one_key(arena: Arc<Arena>) -> Tally {
    arena.hostile.prepare("hang");
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", uuid::Uuid::new_v4().to_string());
    for _ in 0..1_101 {
        let (subject, body) = ("a2a.action.hostile.ask", "{\"prompt\":\"hang\"}");
        let inbox = arena.client.new_inbox();
        let sent = arena.client.publish_with_reply_and_headers(subject, inbox, headers.clone(), body.into());
        sent.await.unwrap();
    }
    arena.client.flush().await.unwrap();
    let mut tally = Tally::default();
    tally.note("repeats", 1_100);
    let id = json!({"task_id": uuid::Uuid::new_v4()}).to_string();
    let lookups = [
        ("a2a.action.hostile.get_task", id.clone()),
        ("a2a.action.hostile.cancel_task", id),
        ("a2a.card.hostile", String::new()),
    ];
    for _ in 0..10 {
        for (subject, body) in &lookups {
            let reply = arena.client.request(*subject, body.clone().into()).await;
            let text = reply.map_or_else(
                |error| error.to_string(),
                |reply| String::from_utf8_lossy(&reply.payload).into(),
            );
            if text.contains("\"busy\"") || text.contains("timed out") {
                tally.wrong.push(format!("{subject}: busy"));
            }
        }
    }
    tally.wrong.dedup();
    tally
}
