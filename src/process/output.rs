//! A child's output: always read, so that the child never blocks; shown and kept, within reason.
//!
//! Both pipes are read to their ends, however fast they fill. A hundred lines a second of each go to
//! the log and into a ring of the last ones; the rest is counted and dropped, all but the very last.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::watch;

/// A longer line is cut here.
const MAX_LINE: usize = 64 << 10;
/// How much is read at once.
const CHUNK: usize = 64 << 10;
/// Most lines per second and stream that are shown and kept.
const LINES_PER_SECOND: u32 = 100;
/// How many lines are kept, both streams together.
const KEPT: usize = 200;
/// How many bytes all kept lines have together.
const KEPT_BYTES: usize = 256 << 10;
/// How many bytes of a line are kept.
const KEPT_LINE: usize = 2000;
/// How many lines from the end of a flood are kept.
const LAST_OF_FLOOD: usize = 20;
/// A shorter value may be any word, and is not taken for a secret.
const SHORTEST_SECRET: usize = 8;

/// Where a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl std::fmt::Display for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        })
    }
}

/// How grave a line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Details.
    Debug,
    /// Anything that does not look otherwise.
    Info,
    /// Something odd.
    Warn,
    /// Something wrong.
    Error,
}

/// A line that was kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Counts up by one with every kept line of the agent.
    pub seq: u64,
    /// When it was read, in milliseconds since 1970.
    pub at_ms: u64,
    /// Where it came from.
    pub stream: Stream,
    /// How grave it looks.
    pub level: Level,
    /// The line.
    pub text: String,
}

/// How much was written, and how much of that nobody saw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// All lines.
    pub lines: u64,
    /// All bytes.
    pub bytes: u64,
    /// Lines neither shown nor kept.
    pub dropped_lines: u64,
    /// Bytes of those lines, and of the ends of lines that were cut.
    pub dropped_bytes: u64,
}

/// The output of one agent, through all its starts; clone freely.
#[derive(Debug, Clone)]
pub struct Output(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    agent: Arc<str>,
    secrets: Vec<SecretString>,
    ring: Mutex<Ring>,
    /// The next number; tells those who follow that there is more.
    next: watch::Sender<u64>,
    lines: AtomicU64,
    bytes: AtomicU64,
    dropped_lines: AtomicU64,
    dropped_bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Ring {
    lines: VecDeque<Line>,
    bytes: usize,
}

impl Output {
    /// Of nothing yet. What is in `secrets` is covered wherever it shows up.
    pub fn new(agent: Arc<str>, secrets: impl IntoIterator<Item = SecretString>) -> Self {
        let secrets =
            secrets.into_iter().filter(|secret| secret.expose_secret().len() >= SHORTEST_SECRET).collect();
        Self(Arc::new(Shared {
            agent,
            secrets,
            ring: Mutex::default(),
            next: watch::channel(0).0,
            lines: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            dropped_lines: AtomicU64::new(0),
            dropped_bytes: AtomicU64::new(0),
        }))
    }

    /// The number that the next line gets.
    pub fn next(&self) -> u64 {
        *self.0.next.borrow()
    }

    /// The last `count` lines from number `from` on.
    pub fn tail(&self, from: u64, count: usize) -> Vec<Line> {
        let ring = self.ring();
        let wanted = ring.lines.iter().filter(|line| line.seq >= from);
        let skipped = wanted.clone().count().saturating_sub(count);
        wanted.skip(skipped).cloned().collect()
    }

    /// Resolves when there is a line with number `from` or later.
    pub async fn beyond(&self, from: u64) {
        let mut next = self.0.next.subscribe();
        // The sender lives as long as we do.
        let _ = next.wait_for(|next| *next > from).await;
    }

    /// How much there was.
    pub fn counts(&self) -> Counts {
        Counts {
            lines: self.0.lines.load(Relaxed),
            bytes: self.0.bytes.load(Relaxed),
            dropped_lines: self.0.dropped_lines.load(Relaxed),
            dropped_bytes: self.0.dropped_bytes.load(Relaxed),
        }
    }

    /// Reads `pipe` to its end.
    pub fn pump<P>(&self, pipe: P, stream: Stream) -> impl Future<Output = ()> + Send + use<P>
    where
        P: AsyncRead + Unpin + Send,
    {
        Pump {
            output: self.clone(),
            stream,
            line: Vec::new(),
            cut: 0,
            flood: Vec::new(),
            since: Instant::now(),
            admitted: 0,
            dropped: 0,
        }
        .run(pipe)
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, stream: Stream, level: Level, text: &str) {
        let mut ring = self.ring();
        let text = crate::json::shorten(text, KEPT_LINE);
        ring.bytes += text.len();
        let seq = *self.0.next.borrow();
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        ring.lines.push_back(Line {
            seq,
            at_ms: u64::try_from(since_1970.as_millis()).unwrap_or_default(),
            stream,
            level,
            text,
        });
        while ring.lines.len() > KEPT || ring.bytes > KEPT_BYTES {
            let Some(oldest) = ring.lines.pop_front() else {
                break;
            };
            ring.bytes -= oldest.text.len();
        }
        self.0.next.send_replace(seq + 1);
    }

    fn covered(&self, line: &[u8]) -> String {
        let mut text: String = String::from_utf8_lossy(line)
            .trim_end()
            .chars()
            // A terminal acts upon control characters.
            .map(|c| if c.is_control() && c != '\t' { '\u{b7}' } else { c })
            .collect();
        for secret in &self.0.secrets {
            if text.contains(secret.expose_secret()) {
                text = text.replace(secret.expose_secret(), "***");
            }
        }
        text
    }
}

struct Pump {
    output: Output,
    stream: Stream,
    line: Vec<u8>,
    /// Bytes of the line that were cut off.
    cut: u64,
    /// The last chunk of a flood.
    flood: Vec<u8>,
    since: Instant,
    admitted: u32,
    dropped: u64,
}

impl Pump {
    async fn run(mut self, mut pipe: impl AsyncRead + Unpin) {
        let mut chunk = vec![0; CHUNK];
        while let Ok(count @ 1..) = pipe.read(&mut chunk).await {
            let text = chunk.get(..count).unwrap_or_default();
            self.output.0.bytes.fetch_add(count as u64, Relaxed);
            self.take(text);
        }
        self.end_of_flood();
        self.show();
    }

    fn take(&mut self, text: &[u8]) {
        let mut rest = text;
        while !rest.is_empty() {
            if !self.admits() {
                return self.drop_all(rest);
            }
            self.end_of_flood();
            let end = rest.iter().position(|byte| *byte == b'\n');
            let (piece, after) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
            rest = after;
            let room = MAX_LINE.saturating_sub(self.line.len()).min(piece.len());
            self.line.extend_from_slice(piece.get(..room).unwrap_or_default());
            self.cut += (piece.len() - room) as u64;
            if end.is_some() {
                self.show();
            }
        }
    }

    /// Too fast: only counts, and keeps the last chunk in case it is the last of all.
    fn drop_all(&mut self, text: &[u8]) {
        let lines = text.iter().filter(|byte| **byte == b'\n').count() as u64;
        let counts = &self.output.0;
        counts.lines.fetch_add(lines, Relaxed);
        counts.dropped_lines.fetch_add(lines, Relaxed);
        counts.dropped_bytes.fetch_add((text.len() + self.line.len()) as u64 + self.cut, Relaxed);
        self.dropped += lines;
        self.cut = 0;
        self.line.clear();
        // Small pieces of one flood belong together, but not for ever.
        if text.len() >= CHUNK / 2 || self.flood.len() + text.len() > 2 * CHUNK {
            self.flood.clear();
        }
        self.flood.extend_from_slice(text);
    }

    fn end_of_flood(&mut self) {
        if self.dropped > 0 {
            let dropped = std::mem::take(&mut self.dropped);
            tracing::warn!(agent = %self.output.0.agent, stream = %self.stream, dropped, "the agent writes faster than the log takes");
        }
        if self.flood.is_empty() {
            return;
        }
        let flood = std::mem::take(&mut self.flood);
        let last: Vec<&[u8]> = flood.rsplit(|byte| *byte == b'\n').take(LAST_OF_FLOOD).collect();
        for line in last.into_iter().rev() {
            let text = self.output.covered(line.get(..MAX_LINE.min(line.len())).unwrap_or_default());
            if !text.is_empty() {
                self.output.keep(self.stream, level_of(&text), &text);
            }
        }
    }

    fn show(&mut self) {
        let text = self.output.covered(&self.line);
        self.output.0.dropped_bytes.fetch_add(self.cut, Relaxed);
        self.line.clear();
        self.cut = 0;
        if text.is_empty() {
            return;
        }
        self.admitted += 1;
        self.output.0.lines.fetch_add(1, Relaxed);
        let level = level_of(&text);
        self.output.keep(self.stream, level, &text);
        let (agent, stream) = (&self.output.0.agent, self.stream);
        macro_rules! log {
            ($level:ident) => {
                tracing::$level!(target: "a2a_bridge::agent_output", agent = %agent, stream = %stream, "{text}")
            };
        }
        match level {
            Level::Debug => log!(debug),
            Level::Info => log!(info),
            Level::Warn => log!(warn),
            Level::Error => log!(error),
        }
    }

    /// So many lines a second.
    fn admits(&mut self) -> bool {
        if self.admitted < LINES_PER_SECOND {
            return true;
        }
        if self.since.elapsed() < Duration::from_secs(1) {
            return false;
        }
        self.since = Instant::now();
        self.admitted = 0;
        true
    }
}

/// How grave a line is, by a word for it near its beginning: `ERROR`, `warning:`, `level=debug`,
/// `"level":"error"`. The same words in small letters within a sentence mean nothing.
fn level_of(line: &str) -> Level {
    let head: String = line.chars().take(160).collect();
    if head.starts_with("Traceback ") || head.starts_with("panic") || head.contains(" panicked at ") {
        return Level::Error;
    }
    let mut before = "";
    let mut rest = head.as_str();
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        let (gap, tail) = rest.split_at(start);
        let (word, after) =
            tail.split_at(tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len()));
        let is_key = before.eq_ignore_ascii_case("level") || before.eq_ignore_ascii_case("severity");
        let is_named = is_key && gap.contains(['=', ':']);
        if is_named || after.starts_with(':') || word.bytes().all(|byte| byte.is_ascii_uppercase()) {
            match word.to_ascii_uppercase().as_str() {
                "ERROR" | "ERR" | "FATAL" | "CRITICAL" | "PANIC" => return Level::Error,
                "WARN" | "WARNING" => return Level::Warn,
                "INFO" | "NOTICE" => return Level::Info,
                "DEBUG" | "TRACE" => return Level::Debug,
                _ => {}
            }
        }
        (before, rest) = (word, after);
    }
    Level::Info
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output() -> Output {
        Output::new("a".into(), [SecretString::from("t0ps3cret")])
    }

    fn texts(lines: &[Line]) -> Vec<&str> {
        lines.iter().map(|line| line.text.as_str()).collect()
    }

    #[tokio::test]
    async fn endless_lines_are_cut_and_the_last_ones_kept() {
        let output = output();
        let mut text = vec![b'x'; 1 << 20];
        text.extend_from_slice(b"\nsecond\n\nthird without an end");
        output.pump(text.as_slice(), Stream::Stdout).await;
        let tail = output.tail(0, 10);
        assert_eq!(tail.len(), 3);
        assert!(tail[0].text.len() <= KEPT_LINE + 3);
        assert_eq!(texts(&output.tail(0, 2)), ["second", "third without an end"]);
        let counts = output.counts();
        assert_eq!(counts.bytes, text.len() as u64);
        assert_eq!(counts.dropped_bytes, (1 << 20) + 1 - MAX_LINE as u64);
    }

    #[tokio::test]
    async fn a_flood_is_counted_and_its_last_lines_are_kept() {
        let output = output();
        let text: String = (0..100_000).map(|n| format!("line {n}\n")).collect();
        output.pump(text.as_bytes(), Stream::Stderr).await;
        let counts = output.counts();
        assert_eq!((counts.lines, counts.bytes), (100_000, text.len() as u64));
        assert!(counts.dropped_lines > 90_000, "{counts:?}");
        assert_eq!(texts(&output.tail(0, 1)), ["line 99999"]);
        assert!(output.tail(0, 1000).len() <= KEPT);
    }

    #[tokio::test]
    async fn secrets_and_control_characters_are_covered() {
        let output = output();
        let text = b"token t0ps3cret \x1b[31mred".as_slice();
        output.pump(text, Stream::Stdout).await;
        assert_eq!(texts(&output.tail(0, 1)), ["token *** \u{b7}[31mred"]);
    }

    #[tokio::test]
    async fn whoever_follows_is_told_of_new_lines() {
        let output = output();
        let follower = output.clone();
        let waiting = tokio::time::timeout(Duration::from_secs(5), follower.beyond(0));
        let (told, ()) = tokio::join!(waiting, output.pump(b"one\n".as_slice(), Stream::Stdout));
        told.unwrap();
        assert_eq!((output.tail(0, 9).len(), output.next()), (1, 1));
    }

    #[test]
    fn the_level_is_guessed_from_words_for_it() {
        for (line, level) in [
            ("2026-01-01 ERROR it broke", Level::Error),
            ("error: no such file", Level::Error),
            ("Traceback (most recent call last):", Level::Error),
            (r#"{"level":"warning","msg":"x"}"#, Level::Warn),
            ("time=1 level=debug msg=x", Level::Debug),
            ("INFO:     Uvicorn running on http://127.0.0.1:9000", Level::Info),
            ("there was no error in this warning", Level::Info),
            ("", Level::Info),
        ] {
            assert_eq!(level_of(line), level, "{line}");
        }
    }
}
