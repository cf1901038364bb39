//! The attacks, each with the number of the finding that it repeats.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Request};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::arena::{Arena, HANGING, Load, Tally};
use super::hostile::{card_of_braces, card_of_skills};
use super::is_full;
use super::raw_nats::RawNats;
use crate::support::peer::card;

type Running = Pin<Box<dyn Future<Output = Tally> + Send>>;

pub(super) struct Attack {
    pub(super) name: String,
    pub(super) run: Box<dyn Fn(Arc<Arena>) -> Running + Send + Sync>,
}

fn attack<F>(name: &str, run: impl Fn(Arc<Arena>) -> F + Send + Sync + 'static) -> Attack
where
    F: Future<Output = Tally> + Send + 'static,
{
    Attack { name: name.to_owned(), run: Box::new(move |arena| Box::pin(run(arena))) }
}

/// How long an attack lasts.
fn time() -> Duration {
    if is_full() { Duration::from_secs(8) } else { Duration::from_millis(1_200) }
}

fn times(short: usize, full: usize) -> usize {
    if is_full() { full } else { short }
}

pub(super) fn all() -> Vec<Attack> {
    let answers = [
        ("1 files with different names", "files"),
        ("1 the same file, repeated", "same files"),
        ("1 answer of 40,000 artifacts", "artifacts"),
        ("2 one text", "text"),
        ("2 millions of empty parts", "empty parts"),
        ("2 long file names", "file names"),
        ("2 empty URLs", "empty URLs"),
        ("2 ids of nested JSON", "ids"),
        ("2 data of empty objects", "data"),
        ("2 deeply nested data", "nested"),
        ("2 JSON-RPC error", "error"),
        ("2 JSON-RPC error with data", "error data"),
    ];
    let streams = [
        ("1 stream of 40,000 artifacts", "stream of artifacts"),
        ("1 stream of joined parts", "stream of many parts"),
        ("1 flood of comments", "flood of comments"),
        ("1 flood of pings", "flood of pings"),
        ("1 flood of other events", "flood of other events"),
        ("1 snapshots of the whole text", "stream of snapshots"),
        ("2 stream of file names, 90 MB", "stream of file names"),
        ("2 stream of empty URLs", "stream of empty URLs"),
    ];
    let answer =
        |(name, prompt): (&str, &'static str)| attack(name, move |arena| large(arena, "hostile", prompt));
    let stream =
        |(name, prompt): (&str, &'static str)| attack(name, move |arena| large(arena, "streamer", prompt));
    let mut attacks: Vec<_> =
        answers.into_iter().map(answer).chain(streams.into_iter().map(stream)).collect();
    attacks.extend([
        attack("1 card with 500,000 braces", |arena| {
            replace_card(arena, card_of_braces(times(150_000, 500_000)))
        }),
        attack("1 card with 10,000 skills", |arena| {
            replace_card(arena, card_of_skills(times(2_000, 10_000)))
        }),
        attack("4 1,024 hanging calls, 1,024 descriptors", hanging),
        attack("5 100,000 calls", |arena| many(arena, "small", false)),
        attack("5 100,000 keyed calls", |arena| many(arena, "small", true)),
        attack("5 100,000 questions", |arena| many(arena, "question", false)),
        attack("6 6,000 requests for a large card", |arena| requests(arena, &["a2a.card.bigcard"], 400)),
        attack("6 6,000 discovery requests", |arena| requests(arena, &["$SRV.INFO", "$SRV.STATS"], 2_000)),
        attack("6 20 readers that do not read", slow_readers),
        attack("7 malformed NATS messages", malformed),
        attack("10 responses to earlier requests", repeated_responses),
        attack("13 1,100 repeats of one key", repeats_of_one_key),
        attack("flood of output", flood_of_output),
    ]);
    attacks
}

/// Eight callers at once get large answers.
async fn large(arena: Arc<Arena>, agent: &'static str, prompt: &'static str) -> Tally {
    let streams = agent == "streamer";
    let load = Load { agent, prompt, streams, is_keyed: false, callers: 8, calls: usize::MAX, time: time() };
    if !prompt.starts_with("flood") {
        return arena.load(load).await;
    }
    // A flood ends with the attack, not with the call.
    let end = async {
        tokio::time::sleep(time()).await;
        arena.hostile.end_attack();
    };
    tokio::join!(arena.load(load), end).0
}

async fn many(arena: Arc<Arena>, prompt: &'static str, is_keyed: bool) -> Tally {
    let time = Duration::from_secs(if is_full() { 120 } else { 3 });
    let calls = times(3_000, 100_000);
    arena.load(Load { agent: "hostile", prompt, streams: false, is_keyed, callers: 64, calls, time }).await
}

/// The agent serves this card until the bridge has read it a few times.
async fn replace_card(arena: Arc<Arena>, hostile_card: Value) -> Tally {
    arena.hostile.set_card(&hostile_card);
    let before = arena.hostile.card_reads();
    tokio::time::sleep(time()).await;
    arena.hostile.set_card(&card(&["ask"]));
    let mut tally = Tally::default();
    let reads = arena.hostile.card_reads() - before;
    tally.note("reads", usize::try_from(reads).unwrap());
    if reads == 0 {
        tally.wrong.push("the card was not read".into());
    }
    tally
}

async fn hanging(arena: Arc<Arena>) -> Tally {
    let mut callers = JoinSet::new();
    for agent in HANGING {
        let load = Load {
            agent,
            prompt: "hang",
            streams: false,
            is_keyed: false,
            callers: 256,
            calls: 256,
            time: time(),
        };
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

/// Requests without a body, all at once, from a client that reads all replies.
async fn requests(arena: Arc<Arena>, subjects: &'static [&str], short: usize) -> Tally {
    let (count, port) = (times(short, 6_000), arena.site.server.port());
    let attack = tokio::task::spawn_blocking(move || {
        let mut client = RawNats::connect(port);
        let read = client.discard();
        client.subscribe("_INBOX.raw.*");
        for index in 0..count {
            client.request(subjects[index % subjects.len()], &format!("_INBOX.raw.{index}"), "");
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
    tally.note("MB of replies", usize::try_from(bytes / 1_000_000).unwrap());
    tally
}

/// Callers that request a large stream and never read from their connection.
async fn slow_readers(arena: Arc<Arena>) -> Tally {
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

/// Messages that nats-server passes on although they are malformed, beside calls of the same agent.
async fn malformed(arena: Arc<Arena>) -> Tally {
    let count = times(4, 12);
    let time = Duration::from_millis(500) * u32::try_from(count).unwrap();
    let load = Load {
        agent: "hostile",
        prompt: "small",
        streams: false,
        is_keyed: false,
        callers: 4,
        calls: usize::MAX,
        time,
    };
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
    let disconnects = arena.site.log().matches("NATS connection is down").count();
    if disconnects > 0 {
        tally.wrong.push(format!("the bridge was disconnected {disconnects} times"));
    }
    tally
}

/// Pairs of calls, one after the other, so that the second one is on the connection of the first.
async fn repeated_responses(arena: Arc<Arena>) -> Tally {
    let (mut tally, until) = (Tally::default(), Instant::now() + time());
    let mut swapped = 0;
    for index in 0..times(100, 600) {
        if Instant::now() > until {
            break;
        }
        let prompt = format!("own text {index}");
        let body = json!({ "prompt": prompt }).to_string();
        let request = Request::new().payload(body.into()).timeout(Some(Duration::from_secs(10)));
        let reply = arena.client.send_request("a2a.action.repeater.ask", request).await;
        let reply = reply.map_err(|error| error.to_string());
        let reply = reply.map(|reply| serde_json::from_slice::<Value>(&reply.payload).unwrap_or_default());
        swapped += usize::from(
            reply.as_ref().is_ok_and(|reply| reply["success"] == true && reply["message"] != prompt),
        );
        tally.count(&reply);
    }
    if swapped > 0 {
        tally.wrong.push(format!("{swapped} callers got the response to another call"));
    }
    tally
}

/// The first call hangs, and its repeats wait for it.
async fn repeats_of_one_key(arena: Arc<Arena>) -> Tally {
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

async fn flood_of_output(arena: Arc<Arena>) -> Tally {
    std::fs::write(&arena.flood, "").unwrap();
    let before = arena.site.show("loud").await.map_or(0, |report| report.counts.bytes);
    tokio::time::sleep(time()).await;
    let after = arena.site.show("loud").await.map_or(0, |report| report.counts.bytes);
    std::fs::remove_file(&arena.flood).unwrap();
    let mut tally = Tally::default();
    tally.note("MB of output", usize::try_from(after.saturating_sub(before) / 1_000_000).unwrap());
    tally
}
