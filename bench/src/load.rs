//! The callers: so many requests in flight, all the time, for a time or a number.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use async_nats::{Client, HeaderMap, Message};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;

/// What floor and bridge are asked for, and where.
#[derive(Clone)]
pub struct Target {
    /// One, or several that are asked in turn.
    pub subjects: Arc<[String]>,
    pub body: Body,
    pub form: Form,
}

/// In which form the reply comes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One message.
    Single,
    /// A stream in the default form.
    Stream,
    /// A stream whose frames have each piece of text once (`A2A-Frames: text`).
    TextStream,
}

#[derive(Clone)]
pub enum Body {
    Same(Bytes),
    /// Made from the number of the call.
    Numbered(fn(u64) -> String),
}

/// How long to go on.
#[derive(Clone, Copy)]
pub enum Until {
    Elapsed(Duration),
    Calls(u64),
}

/// What came of it.
#[derive(Default)]
pub struct Done {
    pub latencies: Vec<Duration>,
    pub elapsed: Duration,
    /// Messages of streams, ends included.
    pub messages: u64,
    /// Pieces of text in them: parts of artifacts, or tokens in `response` frames of a text-only stream.
    pub pieces: u64,
}

/// Keeps `in_flight` calls going.
pub async fn call(client: &Client, target: &Target, in_flight: usize, until: Until) -> anyhow::Result<Done> {
    let next = AtomicU64::new(0);
    let began = Instant::now();
    let workers = (0..in_flight).map(|_| worker(client, target, &next, began, until));
    let mut all = Done::default();
    for done in try_join_all(workers).await? {
        all.latencies.extend(done.latencies);
        all.messages += done.messages;
        all.pieces += done.pieces;
    }
    all.elapsed = began.elapsed();
    ensure!(!all.latencies.is_empty(), "not one call was answered");
    Ok(all)
}

async fn worker(
    client: &Client,
    target: &Target,
    next: &AtomicU64,
    began: Instant,
    until: Until,
) -> anyhow::Result<Done> {
    let inbox = client.new_inbox();
    let mut replies = client.subscribe(inbox.clone()).await?;
    let inbox = async_nats::Subject::from(inbox);
    let subjects: Vec<async_nats::Subject> = target.subjects.iter().map(|s| s.as_str().into()).collect();
    let is_stream = target.form != Form::Single;
    let mut headers = HeaderMap::new();
    if is_stream {
        headers.insert("A2A-Reply", "stream");
    }
    if target.form == Form::TextStream {
        headers.insert("A2A-Frames", "text");
    }
    let pieces = Pieces::of(target.form);
    let mut done = Done::default();
    loop {
        let number = next.fetch_add(1, Relaxed);
        let over = match until {
            Until::Elapsed(limit) => began.elapsed() >= limit,
            Until::Calls(limit) => number >= limit,
        };
        if over {
            return Ok(done);
        }
        let subject = subjects[number as usize % subjects.len()].clone();
        let body = match &target.body {
            Body::Same(body) => body.clone(),
            Body::Numbered(make) => make(number).into(),
        };
        let sent = Instant::now();
        if is_stream {
            client.publish_with_reply_and_headers(subject, inbox.clone(), headers.clone(), body).await?;
        } else {
            client.publish_with_reply(subject, inbox.clone(), body).await?;
        }
        loop {
            let message = tokio::time::timeout(Duration::from_secs(60), replies.next()).await;
            let message = message.context("no reply within a minute")?.context("the connection is closed")?;
            done.messages += 1;
            check(&message)?;
            if is_stream {
                done.pieces += pieces.count(&message.payload)?;
            }
            if !is_stream || message.payload.is_empty() {
                break;
            }
        }
        done.latencies.push(sent.elapsed());
    }
}

/// Counts the pieces of text in the messages of a stream.
struct Pieces {
    form: Form,
    piece: memchr::memmem::Finder<'static>,
}

impl Pieces {
    fn of(form: Form) -> Self {
        // The bench's agent sends `token1 `, `token2 ` and so on; frames may hold several of them.
        let piece = if form == Form::TextStream { "token" } else { r#"{"text":"# };
        Self { form, piece: memchr::memmem::Finder::new(piece) }
    }

    fn count(&self, payload: &[u8]) -> anyhow::Result<u64> {
        if self.form == Form::TextStream {
            ensure!(
                !payload.starts_with(br#"{"type":"artifact""#),
                "a text-only stream has an artifact frame: the bridge ignores `A2A-Frames: text`"
            );
            // The result at the end repeats the whole text.
            if !payload.starts_with(br#"{"type":"response""#) {
                return Ok(0);
            }
        }
        Ok(self.piece.find_iter(payload).count() as u64)
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

/// Calls that are all sent at once and answered whenever.
pub struct Crowd {
    replies: async_nats::Subscriber,
    count: usize,
}

impl Crowd {
    pub async fn send(client: &Client, subject: &str, body: &Bytes, count: usize) -> anyhow::Result<Self> {
        let inbox = client.new_inbox();
        let replies = client.subscribe(format!("{inbox}.*")).await?;
        for number in 0..count {
            client.publish_with_reply(subject.to_owned(), format!("{inbox}.{number}"), body.clone()).await?;
        }
        client.flush().await?;
        Ok(Self { replies, count })
    }

    /// How many were answered without an error, within a minute of silence.
    pub async fn answered(mut self) -> usize {
        let mut answered = 0;
        for _ in 0..self.count {
            match tokio::time::timeout(Duration::from_secs(60), self.replies.next()).await {
                Ok(Some(message)) => match check(&message) {
                    Ok(()) => answered += 1,
                    Err(error) => eprintln!("bench: {error}"),
                },
                _ => break,
            }
        }
        answered
    }
}
