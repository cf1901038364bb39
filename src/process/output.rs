//! A child's output: always read, so that the child never blocks; shown and kept, within reason.
//!
//! Both pipes are read to their ends, however fast they fill. A hundred lines a second of each go to
//! the log and into a ring of the last ones; the rest is counted and dropped, all but the very last.

mod pump;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;
use tokio::sync::watch;

use pump::Pump;

use crate::secrets::Secrets;

/// How many lines are kept, both streams together.
const KEPT: usize = 200;
/// How many bytes all kept lines have together.
const KEPT_BYTES: usize = 256 << 10;
/// How many bytes of a line are kept.
const KEPT_LINE: usize = 2000;

/// Where a line came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    Stdout,
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
    Debug,
    /// Anything that does not look otherwise.
    Info,
    Warn,
    Error,
}

/// A line that was kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Counts up by one with every kept line of the agent.
    pub seq: u64,
    /// When it was read, in milliseconds since 1970.
    pub at_ms: u64,
    pub stream: Stream,
    pub level: Level,
    pub text: String,
}

/// How much was written, and how much of that nobody saw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub lines: u64,
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
    secrets: Secrets,
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
    /// Of nothing yet. What is in `secrets` never shows up in a line.
    pub fn new(agent: Arc<str>, secrets: Secrets) -> Self {
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
        Pump::new(self.clone(), stream).run(pipe)
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, stream: Stream, level: Level, text: &str) {
        let mut ring = self.ring();
        let text = crate::text::shorten(text, KEPT_LINE);
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

    fn redacted_text(&self, line: &[u8]) -> String {
        let mut text: String = String::from_utf8_lossy(line)
            .trim_end()
            .chars()
            // A terminal acts upon control characters.
            .map(|c| if c.is_control() && c != '\t' { '\u{b7}' } else { c })
            .collect();
        self.0.secrets.redact(&mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use secrecy::SecretString;

    use super::pump::MAX_LINE;
    use super::*;

    fn output() -> Output {
        Output::new("a".into(), Secrets::new([SecretString::from("t0ps3cret")]))
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
        let (state_sender, ()) = tokio::join!(waiting, output.pump(b"one\n".as_slice(), Stream::Stdout));
        state_sender.unwrap();
        assert_eq!((output.tail(0, 9).len(), output.next()), (1, 1));
    }
}
