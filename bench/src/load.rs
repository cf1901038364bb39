//! The callers: they keep a number of requests in flight, for a duration or for a number of calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use async_nats::{Client, HeaderMap, Message, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;
use memchr::memmem::Finder;

const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// What to call, and how.
#[derive(Clone)]
pub struct Target {
    /// Calls go to these subjects in turn.
    pub subjects: Arc<[String]>,
    pub body: Body,
    pub form: ReplyForm,
}

impl Target {
    pub fn new(subjects: &[String], body: Bytes, form: ReplyForm) -> Self {
        Self { subjects: subjects.into(), body: Body::Constant(body), form }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ReplyForm {
    /// One message.
    Single,
    /// A stream in the default form.
    Stream,
    /// A stream whose frames carry each chunk of text once (`A2A-Frames: text`).
    TextStream,
}

#[derive(Clone)]
pub enum Body {
    Constant(Bytes),
    /// Computed from the number of the call.
    Numbered(fn(u64) -> String),
}

#[derive(Clone, Copy)]
pub enum StopAfter {
    Elapsed(Duration),
    Calls(u64),
}

/// What the callers saw.
#[derive(Default)]
pub struct Outcome {
    pub latencies: Vec<Duration>,
    pub elapsed: Duration,
    /// Messages of streams, including the empty last ones.
    pub messages: u64,
    /// Chunks of text in them: parts of artifacts, or tokens in `response` frames of a text-only stream.
    pub chunks: u64,
}

impl Outcome {
    pub fn add(&mut self, other: Self) {
        self.latencies.extend(other.latencies);
        self.elapsed += other.elapsed;
        self.messages += other.messages;
        self.chunks += other.chunks;
    }
}

/// Keeps `in_flight` calls in flight.
pub async fn call(
    client: &Client,
    target: &Target,
    in_flight: usize,
    stop: StopAfter,
) -> anyhow::Result<Outcome> {
    let next = AtomicU64::new(0);
    let start = Instant::now();
    let callers = (0..in_flight).map(|_| call_in_sequence(client, target, &next, start, stop));
    let mut total = Outcome::default();
    for outcome in try_join_all(callers).await? {
        total.add(outcome);
    }
    // The callers run at the same time.
    total.elapsed = start.elapsed();
    ensure!(!total.latencies.is_empty(), "no call was answered");
    Ok(total)
}

async fn call_in_sequence(
    client: &Client,
    target: &Target,
    next: &AtomicU64,
    start: Instant,
    stop: StopAfter,
) -> anyhow::Result<Outcome> {
    let inbox = client.new_inbox();
    let mut replies = client.subscribe(inbox.clone()).await?;
    let inbox = Subject::from(inbox);
    let subjects: Vec<Subject> = target.subjects.iter().map(|subject| subject.as_str().into()).collect();
    let is_stream = target.form != ReplyForm::Single;
    let mut headers = HeaderMap::new();
    if is_stream {
        headers.insert("A2A-Reply", "stream");
    }
    if target.form == ReplyForm::TextStream {
        headers.insert("A2A-Frames", "text");
    }
    let counter = ChunkCounter::new(target.form);
    let mut outcome = Outcome::default();
    loop {
        let number = next.fetch_add(1, Relaxed);
        let stops = match stop {
            StopAfter::Elapsed(limit) => start.elapsed() >= limit,
            StopAfter::Calls(limit) => number >= limit,
        };
        if stops {
            return Ok(outcome);
        }
        let subject = subjects[number as usize % subjects.len()].clone();
        let body = match &target.body {
            Body::Constant(body) => body.clone(),
            Body::Numbered(body) => body(number).into(),
        };
        let sent = Instant::now();
        if is_stream {
            client.publish_with_reply_and_headers(subject, inbox.clone(), headers.clone(), body).await?;
        } else {
            client.publish_with_reply(subject, inbox.clone(), body).await?;
        }
        loop {
            let message = tokio::time::timeout(REPLY_TIMEOUT, replies.next()).await;
            let message = message.context("no reply within a minute")?.context("the connection is closed")?;
            outcome.messages += 1;
            check(&message)?;
            if is_stream {
                outcome.chunks += counter.count(&message.payload)?;
            }
            if !is_stream || message.payload.is_empty() {
                break;
            }
        }
        outcome.latencies.push(sent.elapsed());
    }
}

/// Counts the chunks of text in the messages of a stream.
struct ChunkCounter {
    form: ReplyForm,
    finder: Finder<'static>,
}

impl ChunkCounter {
    fn new(form: ReplyForm) -> Self {
        // The benchmark's agent sends `token1 `, `token2 ` and so on; a frame can hold several of them.
        let chunk = if form == ReplyForm::TextStream { "token" } else { r#"{"text":"# };
        Self { form, finder: Finder::new(chunk) }
    }

    fn count(&self, payload: &[u8]) -> anyhow::Result<u64> {
        if self.form == ReplyForm::TextStream {
            ensure!(
                !payload.starts_with(br#"{"type":"artifact""#),
                "a text-only stream has an artifact frame: the bridge ignores `A2A-Frames: text`"
            );
            // The result at the end repeats the whole text.
            if !payload.starts_with(br#"{"type":"response""#) {
                return Ok(0);
            }
        }
        Ok(self.finder.find_iter(payload).count() as u64)
    }
}

fn check(message: &Message) -> anyhow::Result<()> {
    if let Some(status) = message.status {
        bail!("NATS answered {status} for {}", message.subject);
    }
    let error = message.headers.as_ref().and_then(|headers| headers.get("Nats-Service-Error"));
    match error {
        Some(error) => bail!("the reply is an error: {error}"),
        None => Ok(()),
    }
}

/// Calls that are all sent at once.
pub struct Burst {
    replies: async_nats::Subscriber,
    count: usize,
}

impl Burst {
    pub async fn send(client: &Client, subject: &str, body: &Bytes, count: usize) -> anyhow::Result<Self> {
        let inbox = client.new_inbox();
        let replies = client.subscribe(format!("{inbox}.*")).await?;
        for number in 0..count {
            client.publish_with_reply(subject.to_owned(), format!("{inbox}.{number}"), body.clone()).await?;
        }
        client.flush().await?;
        Ok(Self { replies, count })
    }

    /// Waits for the replies, at most a minute for each, and counts those without an error.
    pub async fn count_successes(mut self) -> usize {
        let mut successes = 0;
        for _ in 0..self.count {
            match tokio::time::timeout(REPLY_TIMEOUT, self.replies.next()).await {
                Ok(Some(message)) => match check(&message) {
                    Ok(()) => successes += 1,
                    Err(error) => eprintln!("bench: {error}"),
                },
                _ => break,
            }
        }
        successes
    }
}
