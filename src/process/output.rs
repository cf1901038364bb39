//! The output of a child: always read, so that the child never blocks, and kept within limits.
//!
//! Both pipes are drained to EOF however fast the child writes. A hundred lines per second of each go to the log and into a
//! ring buffer; further lines are counted and dropped, except for the last ones.

mod pump;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;
use tokio::sync::watch;

use pump::Pump;

use crate::secrets::Secrets;
use crate::text::Timestamp;

/// Maximum number of lines in the ring buffer, both streams together.
const MAX_KEPT_LINES: usize = 200;
/// Maximum number of bytes in the ring buffer.
const MAX_KEPT_BYTES: usize = 256 << 10;
/// Longer lines are shortened in the ring buffer.
const MAX_LINE_BYTES: usize = 2000;

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

/// The severity of a line, guessed from its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Line {
    /// Increases by one with every kept line of the agent.
    pub seq: u64,
    /// When the bridge read the line.
    pub at: Timestamp,
    pub stream: Stream,
    pub level: Level,
    pub text: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    pub lines: u64,
    pub bytes: u64,
    /// Lines neither logged nor kept.
    pub dropped_lines: u64,
    /// Bytes of dropped lines and of truncated lines.
    pub dropped_bytes: u64,
}

/// The output of one agent across all its starts. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Output(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    agent: Arc<str>,
    secrets: Secrets,
    ring: Mutex<Ring>,
    /// The next sequence number; followers wait for it to change.
    next: watch::Sender<u64>,
    /// Pipes that are still read.
    open_pipes: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Ring {
    lines: VecDeque<Line>,
    bytes: usize,
    counts: Counts,
}

impl Output {
    /// Redacts `secrets` in every line.
    pub fn new(agent: Arc<str>, secrets: Secrets) -> Self {
        let (next, open_pipes) = (watch::Sender::new(0), watch::Sender::new(0));
        Self(Arc::new(Shared { agent, secrets, ring: Mutex::default(), next, open_pipes }))
    }

    /// The sequence number of the next line.
    pub fn next(&self) -> u64 {
        *self.0.next.borrow()
    }

    /// Of the lines from sequence number `from` on, the last `count`.
    pub fn tail(&self, from: u64, count: usize) -> Vec<Line> {
        let ring = self.ring();
        let wanted = ring.lines.iter().filter(|line| line.seq >= from);
        let skipped = wanted.clone().count().saturating_sub(count);
        wanted.skip(skipped).cloned().collect()
    }

    /// Resolves when the line with sequence number `from` exists.
    pub async fn wait_for_line(&self, from: u64) {
        let mut next = self.0.next.subscribe();
        // `self` holds the sender.
        let _ = next.wait_for(|next| *next > from).await;
    }

    pub fn counts(&self) -> Counts {
        self.ring().counts
    }

    pub fn pump<P>(&self, pipe: P, stream: Stream) -> impl Future<Output = ()> + Send + use<P>
    where
        P: AsyncRead + Unpin + Send,
    {
        self.0.open_pipes.send_modify(|open| *open += 1);
        let (pump, output) = (Pump::new(self.clone(), stream), self.clone());
        async move {
            pump.run(pipe).await;
            output.0.open_pipes.send_modify(|open| *open -= 1);
        }
    }

    /// Resolves when all pipes have been read to their end: after the exit of the processes, no line is missing then.
    pub async fn read_to_end(&self) {
        // `self` holds the sender.
        let _ = self.0.open_pipes.subscribe().wait_for(|open| *open == 0).await;
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push_line(&self, stream: Stream, level: Level, text: &str) {
        let mut ring = self.ring();
        let text = crate::text::shorten(text, MAX_LINE_BYTES);
        ring.bytes += text.len();
        let seq = *self.0.next.borrow();
        ring.lines.push_back(Line { seq, at: Timestamp(SystemTime::now()), stream, level, text });
        while ring.lines.len() > MAX_KEPT_LINES || ring.bytes > MAX_KEPT_BYTES {
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
            // Terminals interpret control characters.
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
        assert!(tail[0].text.len() <= MAX_LINE_BYTES + 3);
        assert_eq!(texts(&output.tail(0, 2)), ["second", "third without an end"]);
        output.read_to_end().await;
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
        assert!(output.tail(0, 1000).len() <= MAX_KEPT_LINES);
    }

    #[tokio::test]
    async fn secrets_and_control_characters_are_replaced() {
        let output = output();
        let text = b"token t0ps3cret \x1b[31mred".as_slice();
        output.pump(text, Stream::Stdout).await;
        assert_eq!(texts(&output.tail(0, 1)), ["token *** \u{b7}[31mred"]);
    }

    #[tokio::test]
    async fn a_new_line_wakes_followers() {
        let output = output();
        let follower = output.clone();
        let waiting = tokio::time::timeout(Duration::from_secs(5), follower.wait_for_line(0));
        let (resolved, ()) = tokio::join!(waiting, output.pump(b"one\n".as_slice(), Stream::Stdout));
        resolved.unwrap();
        assert_eq!((output.tail(0, 9).len(), output.next()), (1, 1));
    }
}
